"""The `ppo_kernels` op namespace. Each op file defines its own schema through `define`."""

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ppo_kernels import _native

LIB = torch.library.Library("ppo_kernels", "DEF")


def define(
    schema: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    triton_twin: Callable[..., Any] | None = None,
    triton_module: str | None = None,
) -> None:
    """Define an op: its schema, the reference that runs wherever no kernel does, its fake.

    The reference is registered under CompositeExplicitAutograd, the key every device falls back
    to; kernels register under CPU and CUDA and win there. C++ kernels appear when the native
    module loads, which the first call that finds none sees to, also inside a compiled graph: an
    op never asks for it. triton_twin takes the CUDA key if the module came without that part.
    triton_module names the file in kernels/ whose function of this name is the CUDA kernel, for
    all but fp64 inputs.

    No op is differentiable: an autograd.Function outside it is. Autograd's keys are passed over, so
    that no result has history and no caller needs to turn gradients off, which small calls notice.
    """
    LIB.define(schema)
    name = schema.split("(", 1)[0].strip()
    tried = False

    def first_use(*args: Any, **kwargs: Any) -> Any:
        nonlocal tried
        if tried:
            return reference(*args, **kwargs)
        _native.ensure()
        want_twin = not tried and triton_twin is not None and not has_kernel(name, "CUDA")
        if want_twin and importlib.util.find_spec("triton"):
            LIB.impl(name, torch.no_grad()(triton_twin), "CUDA")
        tried = True
        return getattr(torch.ops.ppo_kernels, name)(*args, **kwargs)

    reference = torch.no_grad()(reference)
    LIB.impl(name, torch.library.fallthrough_kernel, "Autograd")
    LIB.impl(name, first_use, "CompositeExplicitAutograd")
    if triton_module is not None:
        LIB.impl(name, _launcher(triton_module, name, reference), "CUDA")
    torch.library.register_fake(f"ppo_kernels::{name}", fake, lib=LIB)


def has_kernel(name: str, key: str) -> bool:
    """Whether a kernel is registered for this very dispatch key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"ppo_kernels::{name}", key)


def _launcher(module: str, name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """`ppo_kernels.kernels.<module>.<name>`, imported (and triton with it) when first called."""

    @functools.cache
    def kernel() -> Callable[..., Any]:
        if importlib.util.find_spec("triton") is None:
            message = f"ppo_kernels runs {name} in plain PyTorch: triton is not installed"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return reference
        return torch.no_grad()(
            getattr(importlib.import_module(f"ppo_kernels.kernels.{module}"), name)
        )

    return lambda *args: (reference if args[0].dtype == torch.float64 else kernel())(*args)
