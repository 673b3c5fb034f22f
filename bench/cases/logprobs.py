"""logprobs_from_logits against log_softmax as people write it, compiled, and other projects."""

from collections.abc import Callable

import torch
from torch import Tensor

import ppo_kernels as ppo
from bench import peers
from bench.case import DTYPES, Case, Contestant, Function, Tensors, with_gradients

MODES = ("forward", "forward+backward", "in place", "entropy, in place")
SHAPES = {"cpu": (512, 128256), "cuda": (8192, 151936)}
# The logits repeat this many random rows: filling billions of numbers would outlast the timing.
DISTINCT_ROWS = 64


def make(N: int, V: int, dtype: str, device: torch.device, seed: int) -> Tensors:
    """Logits with the spread of a language model's, one label and two upstream gradients a row."""
    g = torch.Generator(device).manual_seed(seed)
    rows = torch.randn(min(N, DISTINCT_ROWS), V, generator=g, device=device) * 3
    logits = torch.empty(N, V, dtype=DTYPES[dtype], device=device)
    for start in range(0, N, DISTINCT_ROWS):
        part = logits[start : start + DISTINCT_ROWS]
        part.copy_(rows[: len(part)])
    return {
        "logits": logits,
        "labels": torch.randint(V, (N,), generator=g, device=device),
        "g": torch.randn(N, generator=g, device=device),
        "h": torch.randn(N, generator=g, device=device),
    }


def expected(x: Tensors, rows: Tensor, mode: str) -> Tensors:
    """fp64, written out: `p = softmax(z)`, `dz = g (1_y - p) - h p (ln p + H)`."""
    z, y = x["logits"][rows].double(), x["labels"][rows].unsqueeze(-1)
    logp_all = torch.log_softmax(z, -1)
    p = logp_all.exp()
    entropy = -(p * logp_all).sum(-1)
    answer = {"logprobs": logp_all.gather(-1, y).squeeze(-1)}
    if mode == "forward":
        return answer
    g = x["g"][rows].double().unsqueeze(-1)
    dz = (-g * p).scatter_add_(-1, y, g)
    if mode.startswith("entropy"):
        answer["entropy"] = entropy
        dz -= x["h"][rows].double().unsqueeze(-1) * p * (logp_all + entropy.unsqueeze(-1))
    return answer | {"dlogits": dz}


def eager(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def eager_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(logits.float(), -1)
    return logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(-1)


def forward_of(function: Callable[..., Tensor | tuple[Tensor, Tensor]]) -> Function:
    """(logits, labels) -> logprobs or (logprobs, entropy), as a function of the inputs."""

    def run(x: Tensors) -> Tensors:
        out = function(x["logits"], x["labels"])
        both = out if isinstance(out, tuple) else (out,)
        return dict(zip(("logprobs", "entropy"), both))

    return run


def _ours(mode: str) -> Callable[..., Tensor]:
    options = {"inplace_backward": mode.endswith("in place")}
    if mode.startswith("entropy"):
        options["return_entropy"] = True
    return lambda logits, labels: ppo.logprobs_from_logits(logits, labels, **options)


def contestants(N: int, V: int, mode: str, device: torch.device) -> list[Contestant]:
    plain = eager_entropy if mode.startswith("entropy") else eager
    upstream = {"logprobs": "g"} | ({"entropy": "h"} if mode.startswith("entropy") else {})
    in_place = "logits" if mode.endswith("in place") else None

    def timed(function: Callable[..., Tensor]) -> Function:
        forward = forward_of(function)
        return forward if mode == "forward" else with_gradients(forward, ("logits",), upstream)

    copies = (2 if mode == "forward" else 4) * N * V * 4.0
    found = [
        Contestant("ours", lambda: timed(_ours(mode)), 0.0, in_place),
        Contestant("eager", lambda: timed(plain), copies),
        Contestant(
            "compile",
            lambda: timed(torch.compile(plain, dynamic=False)),
            copies,
            compiles=True,
        ),
    ]
    others = peers.ENTROPY if mode.startswith("entropy") else peers.LOGPROBS
    for name, load in others.items():
        overwrites = name in peers.OVERWRITES_LOGITS and mode != "forward"
        # Out of place and in place are two cases: each peer runs in the one that it is made for.
        if overwrites == (mode == "in place") or mode.startswith("entropy"):
            at = "logits" if overwrites else None
            found.append(Contestant(name, lambda f=load: timed(f(device)), copies, at))
    return found


def case(N: int, V: int, dtype: str, mode: str, device: torch.device, **flags: object) -> Case:
    size = {"fp32": 4, "bf16": 2}[dtype]
    half = min(DISTINCT_ROWS, N) // 2
    rows = torch.cat([torch.arange(half), torch.arange(N - half, N)])
    return Case(
        op="logprobs",
        name=f"N={N} V={V} {mode}",
        dtype=dtype,
        make=lambda seed, check: make(N, V, dtype, device, seed),
        expected=lambda x: expected(x, rows.to(device), mode),
        contestants=contestants(N, V, mode, device),
        input_bytes=float(N * V * size),
        bytes=float(N * V * size) * (1 if mode == "forward" else 3),
        required=float(N * V * size) if mode == "forward+backward" else 0.0,
        rows=rows,
        **flags,
    )


def sweep(device: torch.device) -> list[Case]:
    """Forward and in-place backward against N at fixed V, and against V at fixed N."""
    big = device.type == "cuda"
    at_N, at_V = (4096, 131072) if big else (256, 32768)
    points = [(n, at_V, ("N", n)) for n in ((1024, 4096, 16384) if big else (32, 128, 512, 2048))]
    points += [(at_N, v, ("V", v)) for v in (8192, 32768, 131072, 262144)]
    found = []
    for N, V, at in points:
        point = case(N, V, "bf16" if big else "fp32", "in place", device, sweep=at)
        point.name = f"{point.name}, sweep of {at[0]}"
        found.append(point)
    return found


def build(device: torch.device, size: str) -> list[Case]:
    if size == "small":
        return [case(16, 2048, d, m, device) for d in ("fp32", "bf16") for m in MODES]
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
        case(N, V, dtype, mode, device, headline=mode != "forward+backward")
        for dtype in (("bf16",) if device.type == "cuda" else ("fp32", "bf16"))
        for mode in MODES
    ]
