"""What a benchmark is: inputs, the right answer, and the functions that compete on them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Function = Callable[[Tensors], Tensors]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Largest error against fp64, over the largest expected number, that still counts as right. In bf16
# people's own code computes whole softmaxes in bf16: coarse, but what they use.
TOLERANCE = {"fp32": 1e-3, "bf16": 6e-2}


class Unavailable(Exception):
    """A contestant that cannot run here: not installed, or for another device."""


@dataclass
class Contestant:
    """`load()` imports or compiles and returns the function to time: inputs -> named outputs."""

    name: str
    load: Callable[[], Function]
    workspace: float = 0.0  # bytes above the inputs that a call is expected to need
    overwrites: str | None = None  # the input that a call destroys
    compiles: bool = False  # the first call at a new shape compiles: it is no sample
    prepare: Function = dict  # the inputs in the layout that its users have them in: not timed


@dataclass
class Case:
    """One block of the table. The first contestant is ours; ratios are to it."""

    op: str
    name: str
    dtype: str
    make: Callable[[int, bool], Tensors]  # (seed, whether for the check) -> inputs
    expected: Function  # inputs of the check -> the answer in fp64
    contestants: list[Contestant]
    input_bytes: float
    bytes: float = 0.0  # the least that has to be moved; 0 for a case bound by arithmetic
    flops: float = 0.0  # the least arithmetic
    required: float = 0.0  # bytes of the gradients asked for: not counted as extra memory
    part: Callable[[Tensors, Tensor], Tensor] = lambda x, out: out  # of an output that is compared
    headline: bool = False  # goes into the README
    sweep: tuple[str, int] | None = None  # (what varies, its value): a point of a scaling plot
    single: bool = False  # too large for more than one timed call
    memory_only: bool = False  # a point of a table of peak memory: never timed
    tokens: int = 0  # the table says tokens per second

    def __post_init__(self) -> None:
        if self.sweep:  # two sweeps may share a point
            self.name += f", sweep of {self.sweep[0]}"

    @property
    def key(self) -> str:
        return f"{self.op}: {self.name} {self.dtype}"


def error_against(case: Case, inputs: Tensors, outputs: Tensors, want: Tensors) -> float:
    """Largest |output - answer| over the largest |answer|, over all outputs the answer names."""
    shared = sorted(want.keys() & outputs.keys())
    if not shared:
        raise ValueError(f"no output is named {', '.join(want)}")
    worst = 0.0
    for name in shared:
        expected = want[name]
        got = case.part(inputs, outputs[name])
        if got.shape != expected.shape:
            raise ValueError(f"{name} has shape {tuple(got.shape)}, not {tuple(expected.shape)}")
        difference = (got.double() - expected).abs().max()
        error = (difference / expected.abs().max().clamp(min=1e-30)).item()
        # NaN compares false with everything: it must not pass as the smaller number.
        worst = max(worst, error if error == error else float("inf"))
    return worst


def with_gradients(forward: Function, wrt: tuple[str, ...], upstream: Tensors) -> Function:
    """forward, then the gradients of its outputs weighted by `upstream`, named d<input>.

    upstream: output name -> name of the input that holds its weight, or None for a scalar loss.
    """

    def run(inputs: Tensors) -> Tensors:
        leaves = {name: inputs[name].detach().requires_grad_() for name in wrt}
        outputs = forward({**inputs, **leaves})
        heads = [outputs[name] for name in upstream]
        weights = [None if g is None else inputs[g] for g in upstream.values()]
        grads = torch.autograd.grad(heads, list(leaves.values()), weights)
        detached = {name: x.detach() for name, x in outputs.items()}
        return detached | {f"d{name}": g for name, g in zip(wrt, grads)}

    return run


def usual(
    ours: Function,
    eager: Function,
    timed: Callable[[Function], Function],
    workspace: float,
    overwrites: str | None = None,
    to_compile: Function | None = None,
) -> list[Contestant]:
    """Ours, eager code as people write it, and that (or to_compile) compiled for its shapes."""

    def load_compiled() -> Function:
        return timed(torch.compile(to_compile or eager, dynamic=False))

    return [
        Contestant("ours", partial(timed, ours), 0.0, overwrites),
        Contestant("eager", partial(timed, eager), workspace),
        Contestant("compile", load_compiled, workspace, compiles=True),
    ]


def in_fp64(function: Function) -> Function:
    """The answer: the same formula in double precision."""

    def run(x: Tensors) -> Tensors:
        return function({n: t.double() if t.is_floating_point() else t for n, t in x.items()})

    return run
