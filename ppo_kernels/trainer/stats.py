"""Statistics: sums over tokens and responses of all ranks, divided once, under TRL's names."""

import math
from typing import Any

import torch
from torch import Tensor

from ppo_kernels.ops.loss import PPOLoss
from ppo_kernels.ranks import Ranks
from ppo_kernels.trainer.config import PPOConfig
from ppo_kernels.trainer.rollout import Rollout

# Of a minibatch: parts of its loss, sums over its n tokens, the largest of a token.
PARTS = {"loss": "total", "policy_loss": "policy", "value_loss": "value", "kl_ref": "kl"}
MEANS = {
    "approx_kl": "policy/approxkl",
    "policy_kl": "policy/policykl",
    "clipfrac": "policy/clipfrac",
    "ratio_mean": "policy/ratio",
    "clipfrac_value": "val/clipfrac",
}
SUMS = (*PARTS, "ptx", *MEANS, "entropy", "vpred", "error", "n")
PEAKS = ("ratio_max", "logprob_gap")


def zeros(device: torch.device) -> tuple[Tensor, Tensor]:
    options = {"dtype": torch.float64, "device": device}
    return torch.zeros(len(SUMS), **options), torch.zeros(len(PEAKS), **options)


def of_micro_batch(out: PPOLoss, new: dict[str, Tensor], old: Rollout) -> tuple[Tensor, Tensor]:
    """(SUMS, PEAKS) of one micro-batch, fp64, on its device."""
    n = out.stats["n"]
    error = (new["values"] - old.returns) ** 2
    sums = {"loss": out.loss.detach(), "ptx": torch.zeros_like(n), "n": n}
    sums |= {k: out.stats[k] for k in PARTS if k != "loss"}
    sums |= {k: out.stats[k] * n for k in MEANS}
    for name, x in (("entropy", new["entropy"]), ("vpred", new["values"]), ("error", error)):
        sums[name] = torch.where(old.mask, x.detach(), 0).sum()
    gap = torch.where(old.mask, (new["logprobs"].detach() - old.logprobs).abs(), 0).max()
    peaks = torch.stack([out.stats["ratio_max"], gap])
    return torch.stack([sums[k].double() for k in SUMS]), peaks.double()


def verdict(mb: dict[str, float], cfg: PPOConfig) -> str:
    """ "step", "skip" or "stop": what to do with a minibatch, by numbers that all ranks share."""
    n = max(mb["n"], 1.0)
    if cfg.early_stopping and mb["approx_kl"] / n > 1.5 * cfg.target_kl:
        return "stop"
    limit = math.inf if cfg.ratio_threshold is None else cfg.ratio_threshold
    sound = mb["n"] and mb["ratio_mean"] / n <= limit and math.isfinite(mb["grad_norm"])
    return "step" if sound else "skip"


def of_update(minibatches: list[dict[str, Any]]) -> dict[str, float]:
    """Means over minibatches, weighted by their tokens."""
    live = [mb for mb in minibatches if mb["n"]]
    tokens = sum(mb["n"] for mb in live) or 1.0
    stats = {f"ppo/loss/{PARTS.get(k, k)}": sum(mb[k] * mb["n"] for mb in live) / tokens
             for k in (*PARTS, "ptx")}  # fmt: skip
    means = MEANS | {"entropy": "policy/entropy", "vpred": "val/vpred", "error": "val/error"}
    stats |= {f"ppo/{name}": sum(mb[k] for mb in live) / tokens for k, name in means.items()}
    verdicts = [mb["verdict"] for mb in minibatches]
    per_epoch = max([mb["of"] for mb in minibatches], default=1)
    return stats | {
        "ppo/policy/ratio_max": max([mb["ratio_max"] for mb in live], default=0.0),
        "ppo/policy/first_logprob_gap": live[0]["logprob_gap"] if live else 0.0,
        "ppo/grad_norm": sum(mb["grad_norm"] for mb in live) / max(len(live), 1),
        "ppo/epochs": float((len(verdicts) - verdicts.count("stop")) // per_epoch),
        "ppo/optimizer_steps": float(verdicts.count("step")),
        "ppo/skipped_steps": float(verdicts.count("skip")),
        "ppo/early_stopped": float(verdicts.count("stop")),
    }


def of_rollout(rollout: Rollout, kl_coef: float, ranks: Ranks) -> dict[str, float]:
    """Everything a rollout says by itself; one reduction, one copy to the host."""
    ro, mask, live = rollout, rollout.mask, rollout.mask.any(-1)
    tokens = {"k1": ro.logprobs - ro.ref_logprobs, "kl": ro.kl, "entropy": ro.entropy}
    tokens |= {"surprise": -ro.logprobs - ro.entropy, "residual": ro.returns - ro.values}
    tokens |= {"advantages": ro.advantages, "returns": ro.returns, "values": ro.values}
    rows = {"raw": ro.raw_scores[live], "scores": ro.scores[live], "empty": ~live}
    rows |= {"open": ~ro.finished[live], "cut": ro.truncated[live]}
    rows |= {"queries": torch.tensor([len(q) for q in ro.queries])}
    rows |= {"responses": torch.tensor([len(r) for r in ro.responses])}
    sums = [_sums(torch.where(mask, x, 0), mask.sum()) for x in tokens.values()]
    sums += [_sums(x.to(mask.device), torch.tensor(float(len(x)))) for x in rows.values()]
    numbers = ranks.sum(torch.stack(sums)).tolist()
    m = {name: _Moments(*s) for name, s in zip([*tokens, *rows], numbers)}
    surprise, R = m["surprise"], m["returns"]
    stats = {
        "objective/kl": m["k1"].total / max(m["raw"].n, 1),
        "objective/kl_per_token": m["k1"].mean,
        "objective/kl_coef": kl_coef,
        "objective/entropy": m["entropy"].mean,
        "objective/surprise": surprise.mean,
        "objective/surprise_z": surprise.mean
        / max(surprise.std / max(surprise.n, 1) ** 0.5, 1e-12),
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
    for name in ("queries", "responses"):
        stats[f"tokens/{name}_len_mean"] = m[name].mean
        stats[f"tokens/{name}_len_std"] = m[name].std
    return stats


def _sums(x: Tensor, n: Tensor) -> Tensor:
    x = x.double()
    return torch.stack([n.to(x.device).double(), x.sum(), (x * x).sum()])


class _Moments:
    """Mean and unbiased variance from (n, sum, sum of squares); 0 where they are undefined."""

    def __init__(self, n: float, total: float, squares: float) -> None:
        self.n, self.total = n, total
        self.mean = total / n if n else 0.0
        self.var = max(squares - n * self.mean**2, 0.0) / (n - 1) if n > 1 else 0.0
        self.std = math.sqrt(self.var)


def self_check(s: dict[str, float], cfg: PPOConfig) -> str:
    """What the first step says about the set-up; a suspicious number names its likely cause."""
    gap, kl, z = s["ppo/policy/first_logprob_gap"], s["objective/kl"], s["objective/surprise_z"]
    surprise, bad_sampling = (
        s["objective/surprise"],
        "top_k, top_p, a minimum length, greedy search",
    )
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
    if kl < -1e-3:
        lines.append(
            "  mean KL < 0 is impossible over samples of the policy: responses were made with "
            f"{bad_sampling}, or at another temperature"
        )
    if abs(z) > 6 and abs(surprise) > 0.05:
        lines.append(
            f"  responses are {'less' if z > 0 else 'more'} likely than samples of the policy, by "
            f"{abs(surprise):.2g} nats per token: other weights or another temperature made them, "
            f"or {bad_sampling}"
        )
    if s["tokens/without_eos"] > 0.9:
        lines.append("  hardly a response ends: is the EOS id right, max_new_tokens too small?")
    return "\n".join(lines)
