"""Statistics: sums over tokens and responses of all ranks, divided once, under TRL's names."""

import math
from typing import Any

import torch
from torch import Tensor

from ppo_kernels.ops.loss import PPOLoss
from ppo_kernels.trainer.config import PPOConfig
from ppo_kernels.trainer.ranks import Ranks
from ppo_kernels.trainer.rollout import Rollout

LOSSES = ("policy_loss", "value_loss", "kl_ref")
MEANS = ("approx_kl", "policy_kl", "clipfrac", "clipfrac_value", "ratio_mean")
SUMS = (*LOSSES, *MEANS, "loss", "ptx_loss", "entropy", "vpred", "error", "n")
PEAKS = ("ratio_max", "logprob_gap")
SURPRISAL_Z = 6.0


def micro_stats(out: PPOLoss, new: dict[str, Tensor], old: Rollout) -> tuple[Tensor, Tensor]:
    """(sums [SUMS], peaks [PEAKS]) of one micro-batch, fp64, on its device."""
    stats, n = out.stats, out.stats["n"]

    def total(x: Tensor) -> Tensor:
        return torch.where(old.mask, x.detach(), 0).sum()

    sums = {k: stats[k] for k in LOSSES} | {k: stats[k] * n for k in MEANS}
    sums |= {"loss": out.loss.detach(), "ptx_loss": torch.zeros_like(n), "n": n}
    sums |= {"entropy": total(new["entropy"]), "vpred": total(new["values"])}
    sums["error"] = total((new["values"] - old.returns) ** 2)
    gap = torch.where(old.mask, (new["logprobs"].detach() - old.logprobs).abs(), 0)
    peaks = torch.stack([stats["ratio_max"], gap.max()])
    return torch.stack([sums[k].double() for k in SUMS]), peaks.double()


class UpdateStats:
    """Decides about each minibatch, and averages them by their number of tokens."""

    def __init__(self) -> None:
        self.minibatches: list[dict[str, float]] = []
        self.epochs = self.steps = self.skipped = 0
        self.verdict = ""

    @property
    def stopped(self) -> bool:
        return self.verdict == "stop"

    def add(self, mb: dict[str, float], cfg: PPOConfig) -> None:
        """`verdict`: "step", "skip" or "stop", from numbers that all ranks share."""
        n = max(mb["n"], 1.0)
        limit = math.inf if cfg.ratio_threshold is None else cfg.ratio_threshold
        if cfg.early_stopping and mb["approx_kl"] / n > 1.5 * cfg.target_kl:
            self.verdict = "stop"
        elif not (mb["n"] and mb["ratio_mean"] / n <= limit and math.isfinite(mb["grad_norm"])):
            self.verdict = "skip"
        else:
            self.verdict = "step"
        self.steps += self.verdict == "step"
        self.skipped += self.verdict == "skip"
        if mb["n"]:
            self.minibatches.append(mb)

    def as_dict(self, cfg: PPOConfig) -> dict[str, float]:
        mbs = self.minibatches
        tokens = sum(mb["n"] for mb in mbs) or 1.0

        def mean(name: str) -> float:
            return sum(mb[name] for mb in mbs) / tokens

        def weighted(name: str) -> float:
            return sum(mb[name] * mb["n"] for mb in mbs) / tokens

        return {
            "ppo/loss/policy": weighted("policy_loss"),
            "ppo/loss/value": weighted("value_loss"),
            "ppo/loss/total": weighted("loss"),
            "ppo/loss/ptx": weighted("ptx_loss"),
            "ppo/loss/kl": weighted("kl_ref"),
            "ppo/policy/entropy": mean("entropy"),
            "ppo/policy/approxkl": mean("approx_kl"),
            "ppo/policy/policykl": mean("policy_kl"),
            "ppo/policy/clipfrac": mean("clipfrac"),
            "ppo/policy/ratio": mean("ratio_mean"),
            "ppo/policy/ratio_max": max([mb["ratio_max"] for mb in mbs], default=0.0),
            "ppo/policy/first_logprob_gap": mbs[0]["logprob_gap"] if mbs else 0.0,
            "ppo/val/vpred": mean("vpred"),
            "ppo/val/error": mean("error"),
            "ppo/val/clipfrac": mean("clipfrac_value"),
            "ppo/grad_norm": sum(mb["grad_norm"] for mb in mbs) / max(len(mbs), 1),
            "ppo/epochs": float(self.epochs),
            "ppo/optimizer_steps": float(self.steps),
            "ppo/skipped_steps": float(self.skipped),
            "ppo/early_stopped": float(self.stopped),
        }


def rollout_stats(rollout: Rollout, kl_coef: float, ranks: Ranks) -> dict[str, float]:
    """Everything a rollout says by itself; one reduction, one copy to the host."""
    mask, live = rollout.mask, rollout.mask.any(-1)
    k1 = rollout.logprobs - rollout.ref_logprobs
    tokens = {"k1": k1, "kl": rollout.kl, "H": rollout.entropy, "A": rollout.advantages}
    tokens |= {"R": rollout.returns, "V": rollout.values, "D": rollout.returns - rollout.values}
    tokens["S"] = -rollout.logprobs - rollout.entropy
    lengths = [[float(len(x)) for x in xs] for xs in (rollout.queries, rollout.responses)]
    rows = {"raw": rollout.raw_scores[live], "score": rollout.scores[live]}
    rows |= {"q": torch.tensor(lengths[0]), "r": torch.tensor(lengths[1])}
    rows |= {"empty": (~live).float(), "open": (~rollout.finished[live]).float()}
    rows["cut"] = rollout.truncated[live].float()
    sums = [_sums(torch.where(mask, x, 0), mask.sum()) for x in tokens.values()]
    sums += [_sums(x.to(mask.device), len(x)) for x in rows.values()]
    numbers = ranks.sum(torch.stack(sums)).tolist()
    m = {name: _Moments(*s) for name, s in zip([*tokens, *rows], numbers)}
    surprise = m["S"].mean / max(m["S"].std / math.sqrt(max(m["S"].n, 1)), 1e-12)
    stats = {
        "objective/kl": m["k1"].total / max(m["raw"].n, 1),
        "objective/kl_per_token": m["k1"].mean,
        "objective/kl_coef": kl_coef,
        "objective/entropy": m["H"].mean,
        "objective/surprise": m["S"].mean,
        "objective/surprise_z": surprise,
        "ppo/mean_non_score_reward": -kl_coef * m["kl"].mean,
        "ppo/mean_scores": m["score"].mean,
        "ppo/std_scores": m["score"].std,
        "ppo/policy/advantages_mean": m["A"].mean,
        "ppo/returns/mean": m["R"].mean,
        "ppo/returns/var": m["R"].var,
        "ppo/val/mean": m["V"].mean,
        "ppo/val/var": m["V"].var,
        "ppo/val/var_explained": 1 - m["D"].var / m["R"].var if m["R"].var > 0 else 0.0,
        "env/reward_mean": m["raw"].mean,
        "env/reward_std": m["raw"].std,
        "tokens/responses": m["q"].n,
        "tokens/empty_responses": m["empty"].total,
        "tokens/without_eos": m["open"].mean,
        "tokens/truncated": m["cut"].mean,
    }
    for key, name in (("q", "queries"), ("r", "responses")):
        stats |= {f"tokens/{name}_len_mean": m[key].mean, f"tokens/{name}_len_std": m[key].std}
    return stats


def _sums(x: Tensor, n: Any) -> Tensor:
    x = x.double()
    return torch.stack([torch.as_tensor(n, device=x.device).double(), x.sum(), (x * x).sum()])


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
    lines = [
        f"PPO self-check: largest |new - old| log-prob {gap:.2g}, mean KL to the reference "
        f"{kl:.3g} nats per response, {s['tokens/without_eos']:.0%} of the responses without EOS, "
        f"{s['tokens/truncated']:.0%} truncated, {s['tokens/empty_responses']:.0f} empty"
    ]
    if gap > (0.3 if cfg.bf16 else 1e-2):
        lines.append(
            f"  |new - old| should be rounding before the first step, is {gap:.2g}: dropout is "
            "live, the rollout is from older weights, or the model computes in low precision"
        )
    if kl < -1e-3:
        lines.append(
            f"  mean KL is {kl:.3g} < 0, impossible over samples of the policy: responses were "
            "made with top_k, top_p, a minimum length, greedily or at another temperature"
        )
    if abs(z) > SURPRISAL_Z and abs(s["objective/surprise"]) > 0.05:
        direction = "less" if z > 0 else "more"
        lines.append(
            f"  responses are {direction} likely than samples of the policy would be, by "
            f"{abs(s['objective/surprise']):.2g} nats per token: other weights or another "
            "temperature made them, or top_k, top_p, greedy search"
        )
    if s["tokens/without_eos"] > 0.9:
        lines.append("  hardly a response ends: is the EOS id right, max_new_tokens too small?")
    return "\n".join(lines)
