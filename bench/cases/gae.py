"""gae against the per-step loop, a compiled scan, and other projects' functions."""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

import ppo_kernels as ppo
from bench import peers
from bench.case import DTYPES, Case, Contestant, Function, Tensors, in_fp64, usual
from ppo_kernels.reference import upcast

GAMMA, LAM, KL_COEF = 0.99, 0.95, 0.05
KINDS = {"masked": "interior mask", "unmasked": "no mask", "shaped": "KL shaping"}
# Above this the loops would take longer than everything else together; one is kept for one row.
LONGEST_LOOP = 8192


def make(B: int, T: int, dtype: str, masked: bool, device: torch.device, seed: int) -> Tensors:
    """Ragged rows with holes where tools answered; without a mask every token is valid."""
    g = torch.Generator().manual_seed(seed)
    names = ("rewards", "values", "logprobs", "ref_logprobs")
    x = {n: torch.randn(B, T, generator=g).to(DTYPES[dtype]) for n in names}
    x["scores"] = torch.randn(B, generator=g)
    if masked:
        lengths = torch.randint(T // 2, T + 1, (B, 1), generator=g)
        hole = torch.rand(B, (T + 63) // 64, generator=g).repeat_interleave(64, 1)[:, :T] < 0.15
        x["mask"] = (torch.arange(T) < lengths) & ~hole
    return {n: t.to(device) for n, t in x.items()}


def loop(r: Tensor, v: Tensor, mask: Tensor | None, gamma: float, lam: float) -> Tensors:
    """As people write it: one step per token, masked tokens carried over by multiplication."""
    r, v = upcast(r), upcast(v)
    m = None if mask is None else mask.to(v.dtype)
    following = running = torch.zeros_like(v[:, 0])
    steps = []
    for t in reversed(range(v.shape[1])):
        step = r[:, t] + gamma * following - v[:, t] + gamma * lam * running
        if m is None:
            following, running = v[:, t], step
        else:
            following = v[:, t] * m[:, t] + (1 - m[:, t]) * following
            running = step * m[:, t] + (1 - m[:, t]) * running
        steps.append(running)
    advantages = torch.stack(steps[::-1], dim=1)
    return {"advantages": advantages, "returns": advantages + v}


def doubling(r: Tensor, v: Tensor, mask: Tensor | None, gamma: float, lam: float) -> Tensors:
    """What torch.compile can digest: the affine maps of the recurrence combined in log2 T steps."""
    r, v = upcast(r), upcast(v)
    a = torch.full_like(v, gamma * lam)
    b = gamma * ((1 - lam) * v + lam * r)
    if mask is not None:
        a, b = torch.where(mask, a, 1.0), torch.where(mask, b, 0.0)
    distance = 1
    while distance < v.shape[1]:
        a_right = pad(a[:, distance:], (0, distance), value=1.0)
        b_right = pad(b[:, distance:], (0, distance))
        a, b, distance = a * a_right, b + a * b_right, 2 * distance
    returns = r + pad(b[:, 1:], (0, 1))
    return {"advantages": returns - v, "returns": returns}


def shaped(function: Function) -> Function:
    """Eager shaping first: KL at every token, the score at the last action."""
    return lambda x: function({**x, "rewards": shape_rewards(x)})


def shape_rewards(x: Tensors) -> Tensor:
    m = x["mask"].to(upcast(x["logprobs"]).dtype)
    rewards = -KL_COEF * (upcast(x["logprobs"]) - upcast(x["ref_logprobs"])) * m
    last = m.shape[1] - 1 - m.flip(1).argmax(1)
    rewards[torch.arange(len(m), device=m.device), last] += x["scores"]
    return rewards


def ours(x: Tensors) -> Tensors:
    return ppo.gae(x["rewards"], x["values"], x.get("mask"), gamma=GAMMA, lam=LAM)._asdict()


def ours_fused(x: Tensors) -> Tensors:
    kl = {n: x[n] for n in ("scores", "logprobs", "ref_logprobs")} | {"kl_coef": KL_COEF}
    return ppo.gae(None, x["values"], x["mask"], gamma=GAMMA, lam=LAM, **kl)._asdict()


def ours_separate(x: Tensors) -> Tensors:
    pair = (x["logprobs"], x["ref_logprobs"])
    rewards = ppo.compute_rewards(x["scores"], *pair, x["mask"], kl_coef=KL_COEF)
    return ours({**x, "rewards": rewards})


def plain(function: Function) -> Function:
    return lambda x: function(x["rewards"], x["values"], x.get("mask"), GAMMA, LAM)


def peer(load: peers.Loader, device: torch.device) -> Function:
    return plain(load(device))


def contestants(B: int, T: int, kind: str, device: torch.device) -> list[Contestant]:
    if kind == "shaped":
        separate = Contestant("ours, separate", lambda: ours_separate)
        first, eager, _ = usual(ours_fused, shaped(plain(loop)), lambda f: f, 0.0)
        return [first, separate, eager]
    found = usual(ours, plain(loop), lambda f: f, 32.0 * B * T, to_compile=plain(doubling))
    found += [Contestant(n, partial(peer, load, device)) for n, load in peers.GAE.items()]
    if kind == "unmasked":
        load = partial(peers.pufferlib_gae, device, GAMMA, LAM)
        found.append(Contestant("pufferlib", load, prepare=peers.pufferlib_layout))
    if T > LONGEST_LOOP:
        loops = ("verl",) if B == 1 and device.type == "cpu" else ("verl", "eager")
        found = [c for c in found if c.name not in loops]
    return found


def case(B: int, T: int, dtype: str, kind: str, device: torch.device, **flags: object) -> Case:
    """kind: "masked", "unmasked" or "shaped" (masked, with the KL shaping inside)."""
    exact, masked = plain(doubling), kind != "unmasked"
    read = DTYPES[dtype].itemsize * (3 if kind == "shaped" else 2) + masked

    def valid(x: Tensors, out: Tensor) -> Tensor:
        return out[x["mask"]] if masked else out

    def answer(x: Tensors) -> Tensors:
        found = in_fp64(shaped(exact) if kind == "shaped" else exact)(x)
        return {n: valid(x, t) for n, t in found.items()}

    return Case(
        op="gae",
        name=f"B={B} T={T} {KINDS[kind]}",
        dtype=dtype,
        make=lambda seed, check: make(B, T, dtype, masked, device, seed),
        expected=answer,
        contestants=contestants(B, T, kind, device),
        part=valid,
        input_bytes=B * T * (4 * DTYPES[dtype].itemsize + masked),
        bytes=B * T * (read + 8),
        required=B * T * 8,
        **flags,
    )


def sweep(device: torch.device) -> list[Case]:
    """Against T at fixed B, and against B at fixed T."""
    big = device.type == "cuda"
    fixed_B, fixed_T = (64, 4096) if big else (64, 1024)
    lengths = [256, 1024, 4096, 16384, *([131072] if big else [])]
    points = [(fixed_B, t, ("T", t)) for t in lengths]
    points += [(b, fixed_T, ("B", b)) for b in (1, 8, 64, 512, 4096)]
    swept = partial(case, dtype="fp32", kind="masked", device=device)
    return [swept(b, t, sweep=at) for b, t, at in points]


def build(device: torch.device, size: str) -> list[Case]:
    if size == "small":
        return [case(8, 256, "fp32", kind, device) for kind in KINDS]
    if size == "sweep":
        return sweep(device)
    if size == "large":
        return []
    if device.type == "cuda":
        return [
            case(4096, 8192, "fp32", "masked", device, headline=True),
            case(4096, 8192, "bf16", "masked", device),
            case(16, 131072, "fp32", "masked", device, headline=True),
            case(64, 1024, "fp32", "unmasked", device),
            case(4096, 8192, "fp32", "shaped", device),
        ]
    return [
        case(64, 8192, "fp32", "masked", device, headline=True),
        case(64, 8192, "fp32", "unmasked", device),
        case(1, 131072, "fp32", "unmasked", device, headline=True),
        case(64, 8192, "fp32", "shaped", device),
    ]
