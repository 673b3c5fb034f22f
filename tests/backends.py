"""One test, every backend: the reference, the C++ kernels, the Triton kernels.

Without a GPU the Triton kernels run in the interpreter, on CPU tensors; with one, on it.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch

from ppo_kernels import _native, reference
from ppo_kernels.ops._library import has_kernel

INTERPRETED = not torch.cuda.is_available()


class Backend(NamedTuple):
    name: str
    device: str

    @property
    def max_V(self) -> int:
        """The interpreter takes about 10 ms per program and block of columns."""
        return 9000 if self.name == "triton" and INTERPRETED else 1 << 20

    @property
    def has_fp64(self) -> bool:
        return self.name != "triton"


class _Op:
    """A function in the place of an op and of its only overload: without history, as it is."""

    def __init__(self, function: Callable) -> None:
        self.default = torch.no_grad()(function)

    def __call__(self, *args: Any) -> Any:
        return self.default(*args)


NAMES = ("reference", "cpu", "triton")


def cases(fits: Callable[..., bool], *axes: Iterable[Any]) -> list[tuple]:
    """(backend name, *values) of every combination for which fits(Backend, *values)."""
    return [
        (name, *values)
        for name, *values in itertools.product(NAMES, *axes)
        if fits(Backend(name, "cpu"), *values)
    ]


def use(monkeypatch: pytest.MonkeyPatch, name: str, kernels: dict[str, tuple]) -> Backend:
    """Make the ops in `kernels`, {op: (reference, triton launcher)}, run on backend `name`."""
    if name == "cpu":
        assert _native.ensure(), "the C++ kernels did not build"
        missing = [op for op in kernels if not has_kernel(op, "CPU")]
        assert not missing, f"no CPU kernel registered for {missing}"
        return Backend(name, "cpu")
    if name == "triton" and not INTERPRETED:
        return Backend(name, "cuda")
    for op, implementations in kernels.items():
        implementation: Callable = implementations[name == "triton"]
        monkeypatch.setattr(torch.ops.ppo_kernels, op, _Op(implementation))
    return Backend(name, "cpu")


def logprob_kernels() -> dict[str, tuple]:
    from ppo_kernels.kernels import logprobs as kernels
    from ppo_kernels.ops.logprobs import _bwd_inplace_reference

    return {
        "logprobs_fwd": (reference.logprobs_fwd, kernels.logprobs_fwd),
        "logprobs_partials": (reference.logprobs_partials, kernels.logprobs_partials),
        "logprobs_bwd": (reference.logprobs_bwd, kernels.logprobs_bwd),
        "logprobs_bwd_": (_bwd_inplace_reference, kernels.logprobs_bwd_),
    }


def loss_kernels() -> dict[str, tuple]:
    from ppo_kernels.kernels import loss as kernels
    from ppo_kernels.ops import loss

    return {
        "ppo_loss": (loss._reference, kernels.ppo_loss),
        "ppo_loss_from_logits": (loss._logits_reference, kernels.ppo_loss_from_logits),
        "ppo_loss_from_logits_": (loss._logits_inplace_reference, kernels.ppo_loss_from_logits_),
    }
