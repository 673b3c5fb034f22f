"""gae against the per-step loop, a compiled scan, and other projects' functions."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

import ppo_kernels as ppo
from bench import peers
from bench.case import DTYPES, Case, Contestant, Function, Tensors

GAMMA, LAM, KL_COEF = 0.99, 0.95, 0.05
SWEEPS = {"cpu": ((64, 1024), 32768), "cuda": ((64, 4096), 131072)}


def make(B: int, T: int, dtype: str, masked: bool, device: torch.device, seed: int) -> Tensors:
    """Ragged rows with holes where tools answered, or every token valid."""
    g = torch.Generator().manual_seed(seed)
    names = ("rewards", "values", "logprobs", "ref_logprobs")
    x = {n: torch.randn(B, T, generator=g).to(DTYPES[dtype]) for n in names}
    x["scores"] = torch.randn(B, generator=g)
    x["mask"] = torch.ones(B, T, dtype=torch.bool)
    if masked:
        lengths = torch.randint(T // 2, T + 1, (B, 1), generator=g)
        hole = torch.rand(B, (T + 63) // 64, generator=g).repeat_interleave(64, 1)[:, :T] < 0.15
        x["mask"] = (torch.arange(T) < lengths) & ~hole
    return {n: t.to(device) for n, t in x.items()}


def expected(x: Tensors, shaped: bool) -> Tensors:
    """The delta form in fp64 numpy, a column at a time."""
    r, v, logp, ref = (
        x[n].double().cpu().numpy() for n in ("rewards", "values", "logprobs", "ref_logprobs")
    )
    mask, scores = x["mask"].cpu().numpy(), x["scores"].double().cpu().numpy()
    if shaped:
        r = -KL_COEF * (logp - ref)
        last = mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
        r[np.arange(len(r)), last] += scores
    advantages, running, following = np.zeros_like(v), np.zeros(len(v)), np.zeros(len(v))
    for t in range(v.shape[1] - 1, -1, -1):
        step = r[:, t] + GAMMA * following - v[:, t] + GAMMA * LAM * running
        running = np.where(mask[:, t], step, running)
        following = np.where(mask[:, t], v[:, t], following)
        advantages[:, t] = running
    a = torch.from_numpy(advantages).to(x["values"].device)
    return {"advantages": a, "returns": a + x["values"].double()}


def loop(r: Tensor, v: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensors:
    """As people write it: one step per token, masked tokens carried over by multiplication."""
    r, v, m = r.float(), v.float(), mask.float()
    following = running = torch.zeros_like(v[:, 0])
    steps = []
    for t in reversed(range(v.shape[1])):
        step = r[:, t] + gamma * following - v[:, t] + gamma * lam * running
        following = v[:, t] * m[:, t] + (1 - m[:, t]) * following
        running = step * m[:, t] + (1 - m[:, t]) * running
        steps.append(running)
    advantages = torch.stack(steps[::-1], dim=1)
    return {"advantages": advantages, "returns": advantages + v}


def doubling(r: Tensor, v: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensors:
    """What torch.compile can digest: the affine maps of the recurrence combined in log2 T steps."""
    r, v = r.float(), v.float()
    a = torch.where(mask, gamma * lam, 1.0)
    b = torch.where(mask, gamma * ((1 - lam) * v + lam * r), 0.0)
    distance, T = 1, v.shape[1]
    while distance < T:
        b_right = torch.nn.functional.pad(b[:, distance:], (0, distance))
        a_right = torch.nn.functional.pad(a[:, distance:], (0, distance), value=1.0)
        a, b, distance = a * a_right, b + a * b_right, 2 * distance
    returns = r + torch.nn.functional.pad(b[:, 1:], (0, 1))
    return {"advantages": returns - v, "returns": returns}


def shape_rewards(x: Tensors) -> Tensor:
    """Eager shaping: KL to the reference at every token, the score at the last one."""
    m = x["mask"].float()
    rewards = -KL_COEF * (x["logprobs"].float() - x["ref_logprobs"].float()) * m
    last = x["mask"].shape[1] - 1 - m.flip(1).argmax(1)
    rewards[torch.arange(len(m), device=m.device), last] += x["scores"]
    return rewards


def ours(x: Tensors) -> Tensors:
    return ppo.gae(x["rewards"], x["values"], x["mask"], gamma=GAMMA, lam=LAM)._asdict()


def ours_fused(x: Tensors) -> Tensors:
    names = ("scores", "logprobs", "ref_logprobs")
    kl = {"kl_coef": KL_COEF} | {n: x[n] for n in names}
    return ppo.gae(None, x["values"], x["mask"], gamma=GAMMA, lam=LAM, **kl)._asdict()


def ours_separate(x: Tensors) -> Tensors:
    kl = (x["logprobs"], x["ref_logprobs"], x["mask"])
    rewards = ppo.compute_rewards(x["scores"], *kl, kl_coef=KL_COEF)
    return ppo.gae(rewards, x["values"], x["mask"], gamma=GAMMA, lam=LAM)._asdict()


def _plain(function: Function) -> Function:
    return lambda x: function(x["rewards"], x["values"], x["mask"], GAMMA, LAM)


def _compiled() -> Function:
    return _plain(torch.compile(doubling, dynamic=False))


def case(B: int, T: int, dtype: str, kind: str, device: torch.device, **flags: object) -> Case:
    """kind: "masked", "unmasked" or "shaped" (masked, with the KL shaping inside)."""
    size = {"fp32": 4, "bf16": 2}[dtype]
    shaped, masked = kind == "shaped", kind != "unmasked"
    contestants = [Contestant("ours", lambda: ours_fused if shaped else ours)]
    if shaped:
        eager: Function = lambda x: loop(shape_rewards(x), x["values"], x["mask"], GAMMA, LAM)  # noqa: E731
        contestants.append(Contestant("ours, separate", lambda: ours_separate))
        contestants.append(Contestant("eager", lambda: eager))
    else:
        contestants.append(Contestant("eager", lambda: _plain(loop)))
        contestants.append(Contestant("compile", _compiled, 8 * B * T * 4, compiles=True))
        for name, loader in peers.GAE.items():
            if not masked or name in peers.GAE_WITH_MASK:
                contestants.append(Contestant(name, lambda f=loader: _plain(f(device))))
    what = {"masked": "interior mask", "unmasked": "no mask", "shaped": "KL shaping"}[kind]
    return Case(
        op="gae",
        name=f"B={B} T={T} {what}",
        dtype=dtype,
        make=lambda seed, check: make(B, T, dtype, masked, device, seed),
        expected=partial(expected, shaped=shaped),
        contestants=contestants,
        input_bytes=B * T * (4 * size + 1),
        bytes=B * T * ((3 if shaped else 2) * size + 1 + 8),
        required=B * T * 8,
        masked_by="mask",
        **flags,
    )


def sweep(device: torch.device) -> list[Case]:
    """Time against T at fixed B, and against B at fixed T."""
    (B, T), longest = SWEEPS[device.type]
    lengths = [256 * 4**i for i in range(8) if 256 * 4**i <= longest]
    points = [(B, t, ("T", t)) for t in lengths]
    points += [(b, T, ("B", b)) for b in (1, 8, 64, 512, 4096)]
    found = []
    for b, t, at in points:
        point = case(b, t, "fp32", "masked", device, sweep=at)
        if t > 8192:  # the loop would take longer than everything else together
            point.contestants = [c for c in point.contestants if c.name not in ("eager", "verl")]
        point.name = f"{point.name}, sweep of {at[0]}"
        found.append(point)
    return found


def build(device: torch.device, size: str) -> list[Case]:
    if size == "small":
        return [case(8, 256, "fp32", kind, device) for kind in ("masked", "unmasked", "shaped")]
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
