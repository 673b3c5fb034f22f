"""Statistics under TRL's names: sums over tokens and responses of all ranks, divided once."""

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from ppo_kernels.ops.loss import PPOLoss
from ppo_kernels.ranks import Ranks
from ppo_kernels.trainer.config import PPOConfig
from ppo_kernels.trainer.rollout import Rollout

# Entries of PPOLoss.stats: parts of the loss, and means over tokens.
PARTS = {"ppo/loss/policy": "policy_loss", "ppo/loss/value": "value_loss", "ppo/loss/kl": "kl_ref"}
MEANS = {
    "ppo/policy/approxkl": "approx_kl",
    "ppo/policy/policykl": "policy_kl",
    "ppo/policy/clipfrac": "clipfrac",
    "ppo/policy/ratio": "ratio_mean",
    "ppo/val/clipfrac": "clipfrac_value",
}
# What a minibatch adds up over its tokens, and what it takes the largest of.
SUMS = ("ppo/loss/total", *PARTS, "ppo/loss/ptx", *MEANS)
SUMS += ("ppo/policy/entropy", "ppo/val/vpred", "ppo/val/error")
PEAKS = ("ppo/policy/ratio_max", "ppo/policy/first_logprob_gap", "ppo/grad_norm")


def of_micro_batch(
    out: PPOLoss, new: dict[str, Tensor], old: Rollout, tokens: float
) -> dict[str, Tensor]:
    """SUMS and PEAKS of a micro-batch, on its device; tokens: of its minibatch on all ranks."""

    def total(x: Tensor) -> Tensor:
        return torch.where(old.mask, x.detach(), 0).sum()

    gap = torch.where(old.mask, new["logprobs"].detach() - old.logprobs, 0).abs().max()
    return {
        "ppo/loss/total": out.loss.detach() * tokens,
        **{name: out.stats[key] * tokens for name, key in PARTS.items()},
        **{name: out.stats[key] * out.stats.n for name, key in MEANS.items()},
        "ppo/policy/entropy": total(new["entropy"]),
        "ppo/val/vpred": total(new["values"]),
        "ppo/val/error": total((new["values"] - old.returns) ** 2),
        "ppo/policy/ratio_max": out.stats.ratio_max,
        "ppo/policy/first_logprob_gap": gap,
    }


def of_minibatch(parts: list[dict[str, Tensor]], ranks: Ranks) -> dict[str, float]:
    """SUMS and PEAKS of all its parts on all ranks; one copy to the host."""
    zero = torch.zeros((), dtype=torch.float64, device=ranks.device)
    rows = [[part.get(name, zero).double() for name in SUMS + PEAKS] for part in ({}, *parts)]
    table = torch.stack([torch.stack(row) for row in rows])
    n = len(SUMS)
    numbers = torch.cat([ranks.sum(table[:, :n].sum(0)), ranks.max(table[:, n:].amax(0))])
    return dict(zip(SUMS + PEAKS, numbers.tolist()))


def verdict(mb: dict[str, Any], cfg: PPOConfig) -> str:
    """ "step", "skip" or "stop": what to do with a minibatch, by numbers that all ranks share."""
    n = max(mb["tokens"], 1.0)
    if cfg.early_stopping and mb["ppo/policy/approxkl"] / n > 1.5 * cfg.target_kl:
        return "stop"
    limit = math.inf if cfg.ratio_threshold is None else cfg.ratio_threshold
    sound = math.isfinite(mb["ppo/grad_norm"]) and mb["ppo/policy/ratio"] / n <= limit
    return "step" if mb["tokens"] and sound else "skip"


def of_update(minibatches: list[dict[str, Any]], per_epoch: int) -> dict[str, float]:
    """Means over the tokens of all minibatches, and what became of these."""
    live = [mb for mb in minibatches if mb["tokens"]]
    tokens = sum(mb["tokens"] for mb in live) or 1.0
    verdicts = [mb["verdict"] for mb in minibatches]
    return {name: sum(mb[name] for mb in live) / tokens for name in SUMS} | {
        "ppo/policy/ratio_max": max([mb["ppo/policy/ratio_max"] for mb in live], default=0.0),
        "ppo/policy/first_logprob_gap": live[0]["ppo/policy/first_logprob_gap"] if live else 0.0,
        "ppo/grad_norm": sum(mb["ppo/grad_norm"] for mb in live) / max(len(live), 1),
        "ppo/epochs": float((len(verdicts) - verdicts.count("stop")) // max(per_epoch, 1)),
        "ppo/optimizer_steps": float(verdicts.count("step")),
        "ppo/skipped_steps": float(verdicts.count("skip")),
        "ppo/early_stopped": float(verdicts.count("stop")),
    }


def of_rollout(ro: Rollout, kl_coef: float, ranks: Ranks) -> dict[str, float]:
    """Everything a rollout says by itself."""
    mask, live = ro.mask, ro.mask.any(-1)
    tokens = {"k1": ro.logprobs - ro.ref_logprobs, "kl": ro.kl, "entropy": ro.entropy}
    tokens |= {"surprise": -ro.logprobs - ro.entropy, "residual": ro.returns - ro.values}
    tokens |= {"advantages": ro.advantages, "ppo/returns": ro.returns, "ppo/val": ro.values}
    given = torch.where(mask, ro.token_scores, 0).sum(-1)
    rows = {"env/reward": ro.raw_scores + given, "scores": ro.scores + given}
    rows["kl_of_response"] = torch.where(mask, tokens["k1"], 0).sum(-1)
    rows |= {"unfinished": ~ro.finished, "truncated": ro.truncated}
    vectors = {k: x[mask] for k, x in tokens.items()} | {k: x[live] for k, x in rows.items()}
    for name, texts in (("queries", ro.queries), ("responses", ro.responses)):
        vectors[f"tokens/{name}_len"] = torch.tensor([len(x) for x in texts])
    m = _moments(vectors | {"empty": ~live}, ranks)
    out = {
        f"{k}/{what}": m[k][what] for k in ("ppo/returns", "ppo/val") for what in ("mean", "var")
    }
    for name in ("env/reward", "tokens/queries_len", "tokens/responses_len"):
        out |= {f"{name}_{what}": m[name][what] for what in ("mean", "std")}
    surprise, var = m["surprise"], m["ppo/returns"]["var"]
    return out | {
        "objective/kl": m["k1"]["sum"] / max(m["scores"]["n"], 1),
        "objective/kl_z": _standard_errors(m["kl_of_response"]),
        "objective/kl_per_token": m["k1"]["mean"],
        "objective/kl_coef": kl_coef,
        "objective/entropy": m["entropy"]["mean"],
        "objective/surprise": surprise["mean"],
        "objective/surprise_z": _standard_errors(surprise),
        "ppo/mean_non_score_reward": -kl_coef * m["kl"]["mean"],
        "ppo/mean_scores": m["scores"]["mean"],
        "ppo/std_scores": m["scores"]["std"],
        "ppo/policy/advantages_mean": m["advantages"]["mean"],
        "ppo/val/var_explained": 1 - m["residual"]["var"] / var if var > 0 else 0.0,
        "tokens/responses": m["empty"]["n"],
        "tokens/empty_responses": m["empty"]["sum"],
        "tokens/without_eos": m["unfinished"]["mean"],
        "tokens/truncated": m["truncated"]["mean"],
    }


def _standard_errors(m: dict[str, float]) -> float:
    """How many of its own standard errors a mean is away from 0."""
    return m["mean"] * m["n"] ** 0.5 / max(m["std"], 1e-12)


def _moments(vectors: dict[str, Tensor], ranks: Ranks) -> dict[str, dict[str, float]]:
    """Of each vector, put together from all ranks: n, sum, mean, unbiased var, std; 0 if undefined.

    One reduction, one copy to the host.
    """
    rows = [x.to(ranks.device, torch.float64) for x in vectors.values()]
    sums = [torch.stack([x.new_tensor(len(x)), x.sum(), (x * x).sum()]) for x in rows]
    out = {}
    for name, (n, total, squares) in zip(vectors, ranks.sum(torch.stack(sums)).tolist()):
        mean = total / max(n, 1)
        var = max(squares - n * mean**2, 0.0) / max(n - 1, 1)
        out[name] = {"n": n, "sum": total, "mean": mean, "var": var, "std": math.sqrt(var)}
    return out


# Standard errors below 0 from which on a mean KL is no accident of sampling.
KL_ERRORS = 5


def warn_of_negative_kl(s: dict[str, float]) -> None:
    """A policy's own samples have a mean KL to the reference of at least 0, up to their number."""
    if s["objective/kl_z"] < -KL_ERRORS:
        warnings.warn(
            f"mean KL to the reference is {s['objective/kl']:.4g}, {-s['objective/kl_z']:.1f} "
            "standard errors below 0: were responses made with top_k, top_p, a minimum length or "
            "another temperature than config.temperature?",
            stacklevel=3,
        )


def self_check(s: dict[str, float], cfg: PPOConfig) -> str:
    """What the first step says about the set-up; a suspicious number names its likely cause."""
    gap, kl, z = s["ppo/policy/first_logprob_gap"], s["objective/kl"], s["objective/surprise_z"]
    surprise, sampling = s["objective/surprise"], "top_k, top_p, a minimum length, greedy search"
    lines = [
        f"PPO self-check: largest |new - old| log-prob {gap:.2g}, mean KL to the reference "
        f"{kl:.3g} nats per response, {s['tokens/without_eos']:.0%} of the responses without EOS, "
        f"{s['tokens/truncated']:.0%} truncated, {s['tokens/empty_responses']:.0f} empty"
    ]
    if gap > (0.3 if cfg.bf16 else 1e-2):
        lines.append(
            "  |new - old| should be rounding before the first step: dropout is live, the rollout "
            "is from other weights, or the model computes in low precision"
        )
    if s["objective/kl_z"] < -KL_ERRORS:
        lines.append(
            "  so negative a KL is impossible over samples of the policy: responses were made with "
            f"{sampling}, or at another temperature"
        )
    if abs(z) > 6 and abs(surprise) > 0.05:
        lines.append(
            f"  responses are {'less' if z > 0 else 'more'} likely than samples of the policy, by "
            f"{abs(surprise):.2g} nats per token: other weights or another temperature made them, "
            f"or {sampling}"
        )
    if s["tokens/without_eos"] > 0.9:
        lines.append("  hardly a response ends: is the EOS id right, max_new_tokens too small?")
    return "\n".join(lines)
