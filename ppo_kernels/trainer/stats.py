"""Statistics under TRL's names: sums over tokens and responses of all ranks, divided once."""

import math
from typing import Any, NamedTuple

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


class Moments(NamedTuple):
    """Of n numbers; mean and unbiased variance are 0 where they are undefined."""

    n: float
    total: float
    squares: float

    @property
    def mean(self) -> float:
        return self.total / max(self.n, 1)

    @property
    def var(self) -> float:
        return max(self.squares - self.n * self.mean**2, 0.0) / max(self.n - 1, 1)

    @property
    def std(self) -> float:
        return math.sqrt(self.var)


def moments(vectors: dict[str, Tensor], ranks: Ranks) -> dict[str, Moments]:
    """Of each vector, put together from all ranks; one reduction, one copy to the host."""
    rows = [x.to(ranks.device, torch.float64) for x in vectors.values()]
    sums = [torch.stack([x.new_tensor(len(x)), x.sum(), (x * x).sum()]) for x in rows]
    return dict(zip(vectors, (Moments(*s) for s in ranks.sum(torch.stack(sums)).tolist())))


def of_rollout(ro: Rollout, kl_coef: float, ranks: Ranks) -> dict[str, float]:
    """Everything a rollout says by itself."""
    mask, live = ro.mask, ro.mask.any(-1)
    tokens = {"k1": ro.logprobs - ro.ref_logprobs, "kl": ro.kl, "entropy": ro.entropy}
    tokens |= {"surprise": -ro.logprobs - ro.entropy, "residual": ro.returns - ro.values}
    tokens |= {"advantages": ro.advantages, "returns": ro.returns, "values": ro.values}
    rows = {"raw": ro.raw_scores, "scores": ro.scores, "open": ~ro.finished, "cut": ro.truncated}
    vectors = {k: x[mask] for k, x in tokens.items()} | {k: x[live] for k, x in rows.items()}
    for name in ("queries", "responses"):
        vectors[name] = torch.tensor([len(x) for x in getattr(ro, name)])
    m = moments(vectors | {"empty": ~live}, ranks)
    surprise, R = m["surprise"], m["returns"]
    lengths = {f"tokens/{k}_len_mean": m[k].mean for k in ("queries", "responses")}
    lengths |= {f"tokens/{k}_len_std": m[k].std for k in ("queries", "responses")}
    return lengths | {
        "objective/kl": m["k1"].total / max(m["raw"].n, 1),
        "objective/kl_per_token": m["k1"].mean,
        "objective/kl_coef": kl_coef,
        "objective/entropy": m["entropy"].mean,
        "objective/surprise": surprise.mean,
        "objective/surprise_z": surprise.mean * surprise.n**0.5 / max(surprise.std, 1e-12),
        "ppo/mean_non_score_reward": -kl_coef * m["kl"].mean,
        "ppo/mean_scores": m["scores"].mean,
        "ppo/std_scores": m["scores"].std,
        "ppo/policy/advantages_mean": m["advantages"].mean,
        "ppo/returns/mean": R.mean,
        "ppo/returns/var": R.var,
        "ppo/val/mean": m["values"].mean,
        "ppo/val/var": m["values"].var,
        "ppo/val/var_explained": 1 - m["residual"].var / R.var if R.var > 0 else 0.0,
        "env/reward_mean": m["raw"].mean,
        "env/reward_std": m["raw"].std,
        "tokens/responses": m["responses"].n,
        "tokens/empty_responses": m["empty"].total,
        "tokens/without_eos": m["open"].mean,
        "tokens/truncated": m["cut"].mean,
    }


def self_check(s: dict[str, float], cfg: PPOConfig) -> str:
    """What the first step says about the set-up; a suspicious number names its likely cause."""
    gap, kl, z = s["ppo/policy/first_logprob_gap"], s["objective/kl"], s["objective/surprise_z"]
    surprise, sampling = s["objective/surprise"], "top_k, top_p, a minimum length, greedy search"
    causes = {
        "|new - old| should be rounding before the first step: dropout is live, the rollout is "
        "from other weights, or the model computes in low precision": (
            gap > (0.3 if cfg.bf16 else 1e-2)
        ),
        "mean KL < 0 is impossible over samples of the policy: responses were made with "
        f"{sampling}, or at another temperature": kl < -1e-3,
        f"responses are {'less' if z > 0 else 'more'} likely than samples of the policy, by "
        f"{abs(surprise):.2g} nats per token: other weights or another temperature made them, or "
        f"{sampling}": abs(z) > 6 and abs(surprise) > 0.05,
        "hardly a response ends: is the EOS id right, max_new_tokens too small?": (
            s["tokens/without_eos"] > 0.9
        ),
    }
    lines = [
        f"PPO self-check: largest |new - old| log-prob {gap:.2g}, mean KL to the reference "
        f"{kl:.3g} nats per response, {s['tokens/without_eos']:.0%} of the responses without EOS, "
        f"{s['tokens/truncated']:.0%} truncated, {s['tokens/empty_responses']:.0f} empty"
    ]
    return "\n".join(lines + [f"  {cause}" for cause, suspicious in causes.items() if suspicious])
