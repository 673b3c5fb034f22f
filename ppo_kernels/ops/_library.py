"""The `ppo_kernels` op namespace. Each op file defines its own schema through `define`."""

from collections.abc import Callable
from typing import Any

import torch

LIB = torch.library.Library("ppo_kernels", "DEF")


def define(schema: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an op: its schema, the reference that runs wherever no kernel does, its fake.

    The reference is registered under CompositeExplicitAutograd, the key every device falls back
    to; the native module and the Triton launchers register under CPU and CUDA and win there.
    """
    LIB.define(schema)
    name = schema.split("(", 1)[0].strip()
    LIB.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ppo_kernels::{name}", fake, lib=LIB)
