"""ppo_loss and ppo_loss_from_logits against the usual forty small ops, compiled, and verl."""

from functools import partial

import torch
from torch import Tensor

import ppo_kernels as ppo
from bench import peers
from bench.case import Case, Contestant, Function, Tensors, in_fp64, usual, with_gradients
from bench.cases import logprobs

# Four terms, and k3 without the straight-through trick: what the other projects compute.
COEFS = {
    "cliprange": 0.2,
    "cliprange_value": 0.2,
    "vf_coef": 0.1,
    "ent_coef": 0.01,
    "kl_coef": 0.05,
}


def make(N: int, device: torch.device, seed: int) -> Tensors:
    """Rows of 1024 tokens, a tenth of them masked, a policy a little away from the old one."""
    g = torch.Generator().manual_seed(seed)
    shape = (max(N // 1024, 1), min(N, 1024))
    x = {"logprobs": -3 * torch.rand(shape, generator=g)}
    for name in ("old_logprobs", "ref_logprobs"):
        x[name] = x["logprobs"] + 0.15 * torch.randn(shape, generator=g)
    for name in ("advantages", "values", "returns"):
        x[name] = torch.randn(shape, generator=g)
    x["old_values"] = x["values"] + 0.2 * torch.randn(shape, generator=g)
    x["entropy"] = torch.rand(shape, generator=g)
    x["mask"] = torch.rand(shape, generator=g) > 0.1
    return {n: t.to(device) for n, t in x.items()}


def make_with_logits(N: int, V: int, device: torch.device, seed: int) -> Tensors:
    """The inputs of ppo_loss for N tokens [1, N], with logits in the place of logprobs."""
    x = logprobs.make(N, V, "fp32", device, seed)
    x |= {n: t.reshape(-1)[:N] for n, t in make(max(N, 1024), device, seed).items()}
    near = 0.1 * torch.randn(N, device=device)
    now = torch.log_softmax(x["logits"], -1).gather(-1, x["labels"].unsqueeze(-1)).squeeze(-1)
    return x | {"old_logprobs": now + near, "ref_logprobs": now - near}


def eager(x: Tensors) -> Tensors:
    """The classic trainer's loss and the statistics that it logs, masked by multiplication."""
    c, m = COEFS, x["mask"].to(x["logprobs"].dtype)

    def mean(t: Tensor) -> Tensor:
        return (t * m).sum() / m.sum()

    ratio = torch.exp(x["logprobs"] - x["old_logprobs"])
    plain = -x["advantages"] * ratio
    clipped = -x["advantages"] * torch.clamp(ratio, 1 - c["cliprange"], 1 + c["cliprange"])
    policy = mean(torch.max(plain, clipped))
    low, high = x["old_values"] - c["cliprange_value"], x["old_values"] + c["cliprange_value"]
    v_clipped = torch.max(torch.min(x["values"], high), low)
    v_plain, v_clip = (x["values"] - x["returns"]) ** 2, (v_clipped - x["returns"]) ** 2
    value = 0.5 * mean(torch.max(v_plain, v_clip))
    d = x["ref_logprobs"] - x["logprobs"]
    kl, entropy = mean(torch.exp(d) - d - 1), mean(x["entropy"])
    loss = policy + c["vf_coef"] * value - c["ent_coef"] * entropy + c["kl_coef"] * kl
    with torch.no_grad():
        delta = x["logprobs"] - x["old_logprobs"]
        stats = {
            "clipfrac": mean((clipped > plain).to(m.dtype)),
            "clipfrac_value": mean((v_clip > v_plain).to(m.dtype)),
            "approx_kl": 0.5 * mean(delta**2),
            "policy_kl": mean(-delta),
            "ratio_mean": mean(ratio),
            "ratio_max": (ratio * m).max(),
            "value_mean": mean(x["values"]),
            "return_mean": mean(x["returns"]),
        }
    return {"loss": loss} | stats


def _arguments(x: Tensors) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    named = ("values", "old_values", "returns", "ref_logprobs")
    return (x["old_logprobs"], x["advantages"], x["mask"]), {n: x[n] for n in named}


def ours(x: Tensors) -> Tensors:
    tensors, named = _arguments(x)
    options = {"entropy": x["entropy"], "kl_penalty": "k3", **COEFS}
    out = ppo.ppo_loss(x["logprobs"], *tensors, **named, **options)
    return {"loss": out.loss, "stats": out.stats.tensor}


def ours_from_logits(x: Tensors) -> Tensors:
    tensors, named = _arguments(x)
    options = {"kl_penalty": "k3", "inplace_backward": True, **COEFS}
    out = ppo.ppo_loss_from_logits(x["logits"], x["labels"], *tensors, **named, **options)
    return {"loss": out.loss, "stats": out.stats.tensor}


def ours_separate(x: Tensors) -> Tensors:
    logp, entropy = ppo.logprobs_from_logits(
        x["logits"], x["labels"], return_entropy=True, inplace_backward=True
    )
    return ours({**x, "logprobs": logp, "entropy": entropy})


def eager_from_logits(x: Tensors) -> Tensors:
    logp, entropy = logprobs.eager_entropy(x["logits"], x["labels"])
    return eager({**x, "logprobs": logp, "entropy": entropy})


def answer(function: Function) -> Function:
    """Loss and gradients in fp64. Statistics are left to the tests: some are means near zero."""

    def run(x: Tensors) -> Tensors:
        found = in_fp64(function)(x)
        return {n: t for n, t in found.items() if n == "loss" or n.startswith("d")}

    return run


def case(N: int, device: torch.device, **flags: object) -> Case:
    def timed(function: Function) -> Function:
        return with_gradients(function, ("logprobs", "values", "entropy"), {"loss": None})

    def peer(load: peers.Loader) -> Function:
        function = load(device)
        return timed(lambda x: {"loss": function(x, COEFS)})

    contestants = usual(ours, eager, timed, 0.0)
    contestants += [Contestant(n, partial(peer, load)) for n, load in peers.LOSS.items()]
    return Case(
        op="loss",
        name=f"N={N} four terms, forward+backward",
        dtype="fp32",
        make=lambda seed, check: make(N, device, seed),
        expected=answer(timed(eager)),
        contestants=contestants,
        input_bytes=N * 33.0,
        bytes=N * (33.0 + 12),
        required=N * 12.0,
        **flags,
    )


def case_from_logits(N: int, V: int, device: torch.device, **flags: object) -> Case:
    def timed(function: Function) -> Function:
        return with_gradients(function, ("logits",), {"loss": None})

    contestants = usual(ours_from_logits, eager_from_logits, timed, 20.0 * N * V, "logits")
    separate = Contestant("ours, separate", lambda: timed(ours_separate), 0.0, "logits")
    contestants.insert(1, separate)
    return Case(
        op="loss",
        name=f"from logits, N={N} V={V}, gradient in place",
        dtype="fp32",
        make=lambda seed, check: make_with_logits(N, V, device, seed),
        expected=answer(timed(eager_from_logits)),
        contestants=contestants,
        input_bytes=4.0 * N * V,
        bytes=8.0 * N * V,
        **flags,
    )


def build(device: torch.device, size: str) -> list[Case]:
    if size == "small":
        return [case(2048, device), case_from_logits(16, 2048, device)]
    if size == "sweep":
        counts = [4096 * 4**i for i in range(5)]
        return [case(n, device, sweep=("N", n)) for n in counts]
    if size == "large":
        return []
    N, V = (8192, 131072) if device.type == "cuda" else logprobs.SHAPES["cpu"]
    return [
        case(65536, device, headline=True),
        case_from_logits(N, V, device, headline=True),
    ]
