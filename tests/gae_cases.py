"""Calls of pk.gae and what they should return, by a loop in the textbook's delta form.

The package computes the carry form everywhere, reference included; this file shares nothing with
it but the definition.
"""

import math
from typing import Any

import torch
from torch import Tensor

Call = dict[str, Any]


def random_call(
    seed: int, shape: tuple[int, ...] = (5, 37), dtype: torch.dtype = torch.float32, **fixed: Any
) -> Call:
    """A padded call in which each optional argument is given or not; `fixed` overrides."""
    g = torch.Generator().manual_seed(seed)

    def normal(*size: int, std: float = 1.0) -> Tensor:
        return (std * torch.randn(*size, generator=g, dtype=torch.float64)).to(dtype)

    def given(p: float = 0.5) -> bool:
        return bool(torch.rand((), generator=g) < p)

    def some(p: float) -> Tensor:
        return torch.rand(*shape, generator=g) < p

    def pick(*options: float) -> float:
        return options[int(torch.randint(len(options), (), generator=g))]

    rows = shape[0]
    call: Call = {"rewards": normal(*shape, std=0.3) if given(0.8) else None}
    call |= {"values": normal(*shape), "gamma": pick(1.0, 0.99), "lam": pick(0.95, 1.0, 0.0, 0.5)}
    call["mask"] = some(0.7) if given(0.8) else None
    call["scores"] = normal(rows) if given() else None
    if given():
        call |= {"logprobs": normal(*shape, std=0.5), "ref_logprobs": normal(*shape, std=0.5)}
        call |= {"kl_coef": 0.1, "kl_penalty": ("k1", "k2", "k3", "abs")[int(pick(0, 1, 2, 3))]}
    call["terminated"] = some(0.1) if given(0.3) else None
    call["truncated"] = some(0.1) if given(0.3) else None
    if call["truncated"] is not None:
        call["bootstrap"] = normal(*shape)
        if call["terminated"] is not None:  # wins in gae(); kernels are never given both
            call["truncated"] &= ~call["terminated"]
    elif given():
        call["bootstrap"] = normal(rows)
    call["lam_returns"] = pick(1.0, 0.9) if given(0.3) else None
    return call | fixed


def poisoned(call: Call, with_: float = math.nan) -> Call:
    """The call with `with_` in every masked slot of every input."""
    if call["mask"] is None:
        return call
    out = dict(call)
    for name in ("rewards", "values", "logprobs", "ref_logprobs", "bootstrap"):
        x = call.get(name)
        if x is not None and x.shape == call["mask"].shape:
            out[name] = torch.where(call["mask"], x, torch.full_like(x, with_))
    return out


PER_TOKEN = ("rewards", "values", "mask", "logprobs", "ref_logprobs", "terminated", "truncated")


def packed(call: Call, lengths: list[int]) -> Call:
    """Rows cut to `lengths` and laid end to end."""
    out = dict(call)
    width = call["values"].shape[1]
    keep = torch.arange(width) < torch.tensor(lengths).unsqueeze(-1)
    names = (*PER_TOKEN, "bootstrap") if call.get("truncated") is not None else PER_TOKEN
    for name in names:
        if call.get(name) is not None:
            out[name] = call[name][keep]
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return out | {"cu_seqlens": cu}


def kl(d: float, kind: str) -> float:
    if kind == "k3":
        d = min(max(d, -20.0), 20.0)
        return math.exp(-d) - 1 + d
    return {"k1": d, "k2": d * d / 2, "abs": abs(d)}[kind]


def expected(call: Call) -> tuple[Tensor, Tensor]:
    """(advantages, returns) of a padded call in fp64, one row, one lambda, one step at a time."""
    lams = (call["lam"], call["lam"] if call.get("lam_returns") is None else call["lam_returns"])
    rows = range(call["values"].shape[0])
    advantages, others = (
        torch.stack([_delta_form(call, row, lam) for row in rows]) for lam in lams
    )
    mask = call.get("mask")
    returns = others + call["values"].double()
    return advantages, returns if mask is None else torch.where(mask, returns, 0.0)


def _delta_form(call: Call, row: int, lam: float) -> Tensor:
    def at(name: str, t: int, default: float = 0.0) -> float:
        x = call.get(name)
        return default if x is None else float(x[row] if x.dim() == 1 else x[row, t])

    T, gamma = call["values"].shape[1], call["gamma"]
    steps = [t for t in range(T) if at("mask", t, 1.0)]
    out = torch.zeros(T, dtype=torch.float64)
    per_token = call.get("truncated") is not None
    advantage = 0.0
    for i in reversed(range(len(steps))):
        t = steps[i]
        reward = at("rewards", t)
        if call.get("logprobs") is not None:
            d = at("logprobs", t) - at("ref_logprobs", t)
            reward -= call["kl_coef"] * kl(d, call["kl_penalty"])
        if i + 1 < len(steps):
            next_value = at("values", steps[i + 1])
        else:
            reward += at("scores", t)
            next_value = 0.0 if per_token else at("bootstrap", t)
            advantage = 0.0
        if at("terminated", t):
            next_value, advantage = 0.0, 0.0
        if at("truncated", t):
            next_value, advantage = at("bootstrap", t), 0.0
        delta = reward + gamma * next_value - at("values", t)
        advantage = delta + gamma * lam * advantage
        out[t] = advantage
    return out
