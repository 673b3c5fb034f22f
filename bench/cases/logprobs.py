"""logprobs_from_logits against log_softmax as people write it, compiled, and other projects."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import ppo_kernels as ppo
from bench import peers
from bench.case import (
    DTYPES,
    Case,
    Contestant,
    Function,
    Tensors,
    in_fp64,
    usual,
    with_gradients,
)
from ppo_kernels.reference import upcast

MODES = ("forward", "forward+backward", "in place", "entropy, in place")
SHAPES = {"cpu": (512, 128256), "cuda": (8192, 151936)}
# The logits repeat this many random rows: filling billions of numbers would outlast the timing.
DISTINCT_ROWS = 64


def make(N: int, V: int, dtype: str, device: torch.device, seed: int) -> Tensors:
    """Logits with the spread of a language model's, one label and two upstream gradients a row."""
    g = torch.Generator(device).manual_seed(seed)
    rows = 3 * torch.randn(min(N, DISTINCT_ROWS), V, generator=g, device=device)
    logits = torch.empty(N, V, dtype=DTYPES[dtype], device=device)
    for part in logits.split(DISTINCT_ROWS):
        part.copy_(rows[: len(part)])
    return {
        "logits": logits,
        "labels": torch.randint(V, (N,), generator=g, device=device),
        "g": torch.randn(N, generator=g, device=device),
        "h": torch.randn(N, generator=g, device=device),
    }


def eager(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.log_softmax(upcast(logits), -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def eager_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(upcast(logits), -1)
    return logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(-1)


def named(function: Callable[..., Tensor | tuple[Tensor, Tensor]]) -> Function:
    """(logits, labels) -> logprobs or (logprobs, entropy), as a function of the inputs."""

    def run(x: Tensors) -> Tensors:
        out = function(x["logits"], x["labels"])
        return dict(zip(("logprobs", "entropy"), out if isinstance(out, tuple) else (out,)))

    return run


def case(N: int, V: int, dtype: str, mode: str, device: torch.device, **flags: object) -> Case:
    size = N * V * float(DTYPES[dtype].itemsize)
    entropy, backward = mode.startswith("entropy"), mode != "forward"
    overwrites = "logits" if mode.endswith("in place") else None
    half = min(DISTINCT_ROWS, N) // 2
    rows = torch.cat([torch.arange(half), torch.arange(N - half, N)])

    def timed(function: Function) -> Function:
        upstream = {"logprobs": "g", "entropy": "h"} if entropy else {"logprobs": "g"}
        return with_gradients(function, ("logits",), upstream) if backward else function

    def ours(x: Tensors) -> Tensors:
        options = {"return_entropy": entropy, "inplace_backward": overwrites is not None}
        return named(lambda *t: ppo.logprobs_from_logits(*t, **options))(x)

    def peer(load: peers.Loader) -> Function:
        return timed(named(load(device)))

    plain = named(eager_entropy if entropy else eager)
    copies = (4 if backward else 2) * N * V * 4.0
    found = usual(ours, plain, timed, copies, overwrites)
    for name, load in (peers.ENTROPY if entropy else peers.LOGPROBS).items():
        # Out of place and in place are two cases: each peer runs in the one that it is made for.
        at = "logits" if backward and name in peers.OVERWRITES_LOGITS else None
        if entropy or at == overwrites:
            found.append(Contestant(name, partial(peer, load), copies, at))
    return Case(
        op="logprobs",
        name=f"N={N} V={V} {mode}",
        dtype=dtype,
        make=lambda seed, check: make(N, V, dtype, device, seed),
        expected=lambda x: in_fp64(timed(plain))({n: t[rows] for n, t in x.items()}),
        contestants=found,
        part=lambda x, out: out[rows.to(out.device)],
        input_bytes=size,
        bytes=size * (3 if backward else 1),
        required=size if mode == "forward+backward" else 0.0,
        **flags,
    )


def sweep(device: torch.device) -> list[Case]:
    """Forward and in-place backward against N at fixed V, and against V at fixed N."""
    big = device.type == "cuda"
    fixed_N, fixed_V = (4096, 131072) if big else (256, 32768)
    points = [
        (n, fixed_V, ("N", n)) for n in ((1024, 4096, 16384) if big else (32, 128, 512, 2048))
    ]
    points += [(fixed_N, v, ("V", v)) for v in (8192, 32768, 131072, 262144)]
    dtype = "bf16" if big else "fp32"
    return [case(n, v, dtype, "in place", device, sweep=at) for n, v, at in points]


def build(device: torch.device, size: str) -> list[Case]:
    if size == "small":
        return [case(16, 2048, d, m, device) for d in DTYPES for m in MODES]
    if size == "sweep":
        return sweep(device)
    if size == "large":
        # More than 2^31 elements: offsets must be 64 bits wide.
        V = 131072
        point = case((1 << 31) // V + 16, V, "bf16", "in place", device, single=True)
        point.contestants = point.contestants[:2]
        return [point]
    N, V = SHAPES[device.type]
    return [
        case(N, V, dtype, mode, device, headline="in place" in mode)
        for dtype in (("bf16",) if device.type == "cuda" else DTYPES)
        for mode in MODES
    ]
