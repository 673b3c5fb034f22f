"""logprobs_from_hidden and ppo_loss_from_hidden against logits, Liger, cut-cross-entropy, verl."""

import math
from functools import partial

import torch
from torch import Tensor

import ppo_kernels as ppo
from bench import peers
from bench.case import DTYPES, Case, Contestant, Function, Tensors, in_fp64, usual, with_gradients
from ppo_kernels.reference import upcast

WRT = ("hidden", "weight")
CLIP = 0.2
MAX_LENGTH = 256
CHECK_TOKENS = 64
LOGIT_STD = 1.5
SHAPES = {"cpu": (2048, 896, 151936), "cuda": (8192, 4096, 131072)}


def make(
    N: int, H: int, V: int, dtype: str, masked: float, device: torch.device, seed: int
) -> Tensors:
    """[B, T] tokens with one advantage per sequence, which is all that Liger's loss takes."""
    g = torch.Generator(device).manual_seed(seed)
    T = min(N, MAX_LENGTH)
    shape = (N // T, T)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=g, device=device)

    hidden = normal(*shape, H).to(DTYPES[dtype])
    weight = normal(V, H).mul_(LOGIT_STD * H**-0.5).to(DTYPES[dtype])
    labels = torch.randint(V, shape, generator=g, device=device)
    # The old policy is close: some ratios are clipped, most are not. Its normalizer needs no
    # logits: over many random columns it is ln V plus half the variance.
    h = hidden.float()
    variance = LOGIT_STD**2 * h.square().mean(-1)
    logp = (h * weight[labels].float()).sum(-1) - math.log(V) - 0.5 * variance
    return {
        "hidden": hidden,
        "weight": weight,
        "labels": labels,
        "old_logprobs": logp + 0.15 * normal(*shape),
        "advantages": normal(shape[0], 1).expand(shape).contiguous(),
        "mask": torch.rand(shape, generator=g, device=device) >= masked,
    }


def clipped_loss(logp: Tensor, x: Tensors) -> Tensor:
    m = x["mask"].to(logp.dtype)
    ratio = torch.exp(logp - x["old_logprobs"])
    plain, clipped = ratio * x["advantages"], ratio.clamp(1 - CLIP, 1 + CLIP) * x["advantages"]
    return (-torch.min(plain, clipped) * m).sum() / m.sum()


def eager_logprobs(x: Tensors) -> Tensors:
    logp = torch.log_softmax(upcast(x["hidden"] @ x["weight"].T), -1)
    return {"logprobs": logp.gather(-1, x["labels"].unsqueeze(-1)).squeeze(-1)}


def eager_loss(x: Tensors) -> Tensors:
    return {"loss": clipped_loss(eager_logprobs(x)["logprobs"], x)}


def ours_logprobs(x: Tensors) -> Tensors:
    return {"logprobs": ppo.logprobs_from_hidden(x["hidden"], x["weight"], x["labels"])}


def ours_loss(x: Tensors) -> Tensors:
    out = ppo.ppo_loss_from_hidden(
        *(x[n] for n in (*WRT, "labels", "old_logprobs", "advantages", "mask")), cliprange=CLIP
    )
    return {"loss": out.loss}


def timed_loss(function: Function) -> Function:
    return with_gradients(function, WRT, {"loss": None})


def peer(load: peers.Loader, device: torch.device, backward: bool) -> Function:
    """A function of flat tokens -> logprobs; for the loss, the eager formula on top."""
    function = load(device)

    def forward(x: Tensors) -> Tensors:
        flat = function(x["hidden"].flatten(0, 1), x["weight"], x["labels"].flatten())
        logp = flat.view(x["labels"].shape)
        return {"loss": clipped_loss(logp.float(), x)} if backward else {"logprobs": logp}

    return timed_loss(forward) if backward else forward


def liger_loss(device: torch.device) -> Function:
    function = peers.liger_chunked_loss(device)
    names = (*WRT, "labels", "old_logprobs", "advantages", "mask")
    return timed_loss(lambda x: {"loss": function(*(x[n] for n in names))})


def contestants(N: int, V: int, backward: bool, device: torch.device) -> list[Contestant]:
    logits = N * V * 4.0 * (4 if backward else 2)
    if backward:
        found = usual(ours_loss, eager_loss, timed_loss, logits)
        found.append(Contestant("liger chunked loss", partial(liger_loss, device), 2.0**29))
    else:
        found = usual(ours_logprobs, eager_logprobs, lambda f: f, logits)
    for name, load in peers.HIDDEN.items():
        whole = name == "cce" and device.type == "cpu"  # its CPU path compiles, holding the logits
        run = partial(peer, load, device, backward)
        found.append(Contestant(name, run, logits if whole else 2.0**30, compiles=whole))
    return found


def case(
    N: int,
    H: int,
    V: int,
    dtype: str,
    device: torch.device,
    masked: float = 0.0,
    backward: bool = True,
    only: tuple[str, ...] | None = None,
    **flags: object,
) -> Case:
    inputs = float((N + V) * H * DTYPES[dtype].itemsize)
    what = "PPO loss, forward+backward" if backward else "logprobs, forward"
    found = contestants(N, V, backward, device)
    if masked:
        what += f", {masked:.0%} of rows masked"
    return Case(
        op="hidden",
        name=f"N={N} H={H} V={V} {what}",
        dtype=dtype,
        make=lambda seed, check: make(
            CHECK_TOKENS if check else N, H, V, dtype, masked, device, seed
        ),
        expected=in_fp64(timed_loss(eager_loss) if backward else eager_logprobs),
        contestants=[c for c in found if only is None or c.name in only],
        input_bytes=inputs,
        flops=(6.0 if backward else 2.0) * N * H * V * (1 - masked),
        required=inputs if backward else 0.0,
        **flags,
    )


def sweep(device: torch.device) -> list[Case]:
    """Against N at fixed V and against V at fixed N; then peak memory alone over N x V. For that
    H is small on a CPU, or it would take hours: memory above inputs and gradients hardly depends
    on H."""
    big = device.type == "cuda"
    H, dtype, N, V = (4096, "bf16", 4096, 131072) if big else (128, "fp32", 1024, 32768)
    points = [(n, V, ("N", n)) for n in (N // 4, N, 4 * N)]
    points += [(N, v, ("V", v)) for v in (V // 4, V, 4 * V)]
    swept = partial(case, dtype=dtype, device=device, only=("ours", "eager"))
    return [swept(n, H, v, sweep=at) for n, v, at in points] + [
        swept(n, 1024 if big else 16, v, sweep=(f"N at V={v}", n), memory_only=True)
        for v in (32768, 131072, 262144)
        for n in (2048, 8192, 32768)
    ]


def build(device: torch.device, size: str) -> list[Case]:
    """On a CPU a call takes about ten seconds, so that each contestant runs in one dtype only:
    cut-cross-entropy's CPU path is the compiled eager code."""
    if size == "small":
        shape = (128, 32, 2048)
        return [
            case(*shape, "fp32", device, backward=False),
            case(*shape, "fp32", device),
            case(*shape, "bf16", device, masked=0.4),
        ]
    if size == "sweep":
        return sweep(device)
    if size == "large":
        return []
    shape, pair = SHAPES[device.type], ("ours", "eager")
    if device.type == "cuda":
        return [
            case(*shape, "bf16", device, backward=False, headline=True),
            case(*shape, "bf16", device, headline=True),
            case(*shape, "bf16", device, masked=0.4),
        ]
    return [
        case(*shape, "fp32", device, headline=True, only=(*pair, "liger chunked loss")),
        case(*shape, "fp32", device, masked=0.4, only=pair),
        case(*shape, "bf16", device, headline=True, only=(*pair, "liger chunked loss", "cce")),
        case(*shape, "bf16", device, masked=0.4, only=pair),
    ]
