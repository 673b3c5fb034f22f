"""Validation shared by the ops: an error names the argument, what was expected and what came.

Only shapes, dtypes, devices and Python numbers are looked at, never a tensor's values: no op
synchronises with the device to validate.
"""

from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INDICES = (torch.int64, torch.int32)
FP32_MAX = torch.finfo(torch.float32).max


def tensor(name: str, x: Any, dtypes: tuple[torch.dtype, ...] | None = None) -> Tensor:
    """x is a tensor of one of `dtypes`, or a TypeError that names it."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if dtypes is not None and x.dtype not in dtypes:
        names = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{name} must have dtype {names}, got {str(x.dtype)[6:]}")
    return x


def shape(name: str, x: Tensor, expected: tuple[int, ...], like: str) -> None:
    """x has the shape `expected`, which is the shape of `like`."""
    if x.shape != expected:
        raise ValueError(
            f"{name} must have shape {tuple(expected)} like {like}, got {tuple(x.shape)}"
        )


def same_device(name: str, x: Tensor, device: torch.device, like: str) -> None:
    if x.device != device:
        raise ValueError(f"{name} must be on {device} like {like}, got {x.device}")


def like(
    name: str,
    x: Any,
    other: Tensor,
    other_name: str,
    dtypes: tuple[torch.dtype, ...] | None = FLOATS,
) -> None:
    """x is a tensor with the shape and device of `other`; dtypes None: of any real dtype."""
    tensor(name, x, dtypes)
    if dtypes is None and x.is_complex():
        raise TypeError(f"{name} must have a real dtype, got {str(x.dtype)[6:]}")
    if x.shape != other.shape:
        shape(name, x, other.shape, other_name)
    if x.device != other.device:
        same_device(name, x, other.device, other_name)


def number(
    name: str, x: Any, low: float | None = None, high: float | None = None, above: bool = False
) -> float:
    """x is a number that fp32 holds, in [low, high] (above: in (low, high])."""
    # Real is an abstract class: asking it takes longer than all the rest.
    if type(x) is not float and (isinstance(x, bool) or not isinstance(x, Real)):
        raise TypeError(f"{name} must be a number, got {type(x).__name__}")
    given = x
    try:
        x = float(x)
    except OverflowError:
        x = float("inf")
    below = low is not None and (x <= low if above else x < low)
    if x != x or below or (high is not None and x > high) or abs(x) > FP32_MAX:
        left = "" if low is None else f" {'>' if above else '>='} {low:g}"
        right = "" if high is None else f"{' and' if left else ''} <= {high:g}"
        shown = given if isinstance(given, int) and abs(x) <= FP32_MAX else x
        beyond = ", more than fp32 holds" if FP32_MAX < abs(x) < float("inf") else ""
        raise ValueError(f"{name} must be a finite number{left}{right}, got {shown!r}{beyond}")
    return x


def group(name: str, x: Any) -> None:
    """x is None or a process group."""
    if x is not None and not isinstance(x, dist.ProcessGroup):
        raise TypeError(f"{name} must be a torch.distributed.ProcessGroup, got {type(x).__name__}")


def choice(name: str, x: Any, options: tuple[str, ...]) -> str:
    if not isinstance(x, str) or x not in options:
        raise ValueError(f"{name} must be one of {', '.join(options)}; got {x!r}")
    return x


def cu_seqlens(name: str, cu: Any, n: int, device: torch.device) -> None:
    """int32 [S+1] from 0 to n, non-decreasing; values are looked at only on the host."""
    tensor(name, cu, INDICES)
    if cu.dim() != 1 or cu.numel() < 1:
        raise ValueError(f"{name} must have shape [S + 1], got {tuple(cu.shape)}")
    same_device(name, cu, device, "the packed inputs")
    if cu.device.type != "cpu" or torch.compiler.is_compiling() or isinstance(cu, FakeTensor):
        return
    if int(cu[0]) != 0 or int(cu[-1]) != n:
        raise ValueError(f"{name} must run from 0 to {n}, got {int(cu[0])} to {int(cu[-1])}")
    if bool((cu[1:] < cu[:-1]).any()):
        raise ValueError(f"{name} must not decrease, got {cu.tolist()[:8]}...")


def as_bool_mask(mask: Tensor) -> Tensor:
    """A bool mask as it is; integers and weights count where they are not 0."""
    return mask if mask.dtype == torch.bool else mask != 0
