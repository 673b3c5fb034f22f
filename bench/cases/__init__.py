"""The cases of every op, one file per op; `build` lists them for a device and a size."""

from collections.abc import Iterable

import torch

from bench.case import Case
from bench.cases import gae, hidden, logprobs, loss, step

OPS = {
    "gae": gae.build,
    "logprobs": logprobs.build,
    "loss": loss.build,
    "hidden": hidden.build,
    "step": step.build,
}
SIZES = ("small", "default", "large", "sweep")


def build(ops: Iterable[str], device: torch.device, size: str) -> list[Case]:
    """A sweep leaves torch.compile out: it would compile each point anew for minutes."""
    found = [case for op in ops for case in OPS[op](device, size)]
    if size == "sweep":
        for case in found:
            case.contestants = [c for c in case.contestants if not c.compiles]
    return found
