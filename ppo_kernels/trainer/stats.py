"""Statistics under TRL's names: sums over tokens and responses of all ranks, divided once."""

import math
import warnings
from collections import namedtuple
from typing import Any

import torch
from torch import Tensor

from ppo_kernels.ops.loss import PPOLoss
from ppo_kernels.ranks import Ranks
from ppo_kernels.trainer.config import PPOConfig
from ppo_kernels.trainer.rollout import Rollout

# TRL's name -> entry of PPOLoss.stats: parts of the loss, and means over tokens.
LOSS = {"ppo/loss/policy": "policy_loss", "ppo/loss/value": "value_loss", "ppo/loss/kl": "kl_ref"}
LOSS |= {"ppo/policy/approxkl": "approx_kl", "ppo/policy/policykl": "policy_kl"}
LOSS |= {"ppo/policy/ratio": "ratio_mean", "ppo/policy/clipfrac": "clipfrac"}
LOSS |= {"ppo/val/clipfrac": "clipfrac_value"}
# What a minibatch adds up over its tokens, and what it takes the largest of.
SUMS = (*LOSS, "ppo/loss/total", "ppo/loss/ptx")
SUMS += ("ppo/policy/entropy", "ppo/val/vpred", "ppo/val/error")
PEAKS = ("ppo/policy/ratio_max", "ppo/policy/first_logprob_gap", "ppo/grad_norm")


@torch.no_grad()
def of_micro_batch(
    out: PPOLoss, new: dict[str, Tensor], old: Rollout, tokens: float
) -> dict[str, Tensor]:
    """SUMS and PEAKS of a micro-batch, on its device; tokens: of its minibatch on all ranks."""
    part = {"ppo/policy/entropy": new["entropy"], "ppo/val/vpred": new["values"]}
    part["ppo/val/error"] = (new["values"] - old.returns) ** 2
    part = {name: torch.where(old.mask, x, 0).sum() for name, x in part.items()}
    for name, key in LOSS.items():
        part[name] = out.stats[key] * (tokens if "/loss/" in name else out.stats.n)
    part |= {"ppo/loss/total": out.loss * tokens, "ppo/policy/ratio_max": out.stats.ratio_max}
    gap = torch.where(old.mask, new["logprobs"] - old.logprobs, 0).abs().max()
    return part | {"ppo/policy/first_logprob_gap": gap}


def of_minibatch(
    parts: list[dict[str, Tensor]], tokens: float, cfg: PPOConfig, ranks: Ranks
) -> dict[str, Any]:
    """SUMS and PEAKS of its parts on all ranks, in one copy to the host; its tokens and verdict."""
    zero = torch.zeros((), dtype=torch.float64, device=ranks.device)
    # .to: the norm of no gradients is on the CPU.
    rows = [[part.get(name, zero).to(zero) for name in SUMS + PEAKS] for part in ({}, *parts)]
    sums, peaks = torch.stack([torch.stack(row) for row in rows]).tensor_split([len(SUMS)], -1)
    numbers = torch.cat([ranks.sum(sums.sum(0)), ranks.max(peaks.amax(0))])
    mb = dict(zip(SUMS + PEAKS, numbers.tolist())) | {"tokens": tokens}
    return mb | {"verdict": _verdict(mb, cfg)}


def _verdict(mb: dict[str, Any], cfg: PPOConfig) -> str:
    """ "step", "skip" or "stop": what to do with a minibatch, by numbers that all ranks share."""
    n = max(mb["tokens"], 1.0)
    if cfg.early_stopping and mb["ppo/policy/approxkl"] / n > 1.5 * cfg.target_kl:
        return "stop"
    bounded = mb["ppo/policy/ratio"] / n <= (cfg.ratio_threshold or math.inf)
    return "step" if mb["tokens"] and bounded and math.isfinite(mb["ppo/grad_norm"]) else "skip"


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


# var is unbiased; what is undefined is 0. z: the mean in its own standard errors, which is t with
# n-1 degrees of freedom, made as likely (roughly) as a normal number: few samples reach far out.
Moments = namedtuple("Moments", "n sum mean var std z")


def _moments(vectors: dict[str, Tensor], ranks: Ranks) -> dict[str, Moments]:
    """Of each vector, put together from all ranks. One reduction, one copy to the host."""
    rows = [x.to(ranks.device, torch.float64) for x in vectors.values()]
    sums = [torch.stack([x.new_tensor(len(x)), x.sum(), (x * x).sum()]) for x in rows]
    out = {}
    for name, (n, total, squares) in zip(vectors, ranks.sum(torch.stack(sums)).tolist()):
        mean = total / max(n, 1)
        var = max(squares - n * mean**2, 0.0) / max(n - 1, 1)
        std, free = math.sqrt(var), max(n - 1, 1e-12)
        t = mean * n**0.5 / max(std, 1e-12)
        z = math.copysign(math.sqrt(free * math.log1p(t * t / free)), t)
        out[name] = Moments(n, total, mean, var, std, z)
    return out


def of_rollout(ro: Rollout, kl_coef: float, ranks: Ranks) -> dict[str, float]:
    """Everything a rollout says by itself."""
    mask, live, k1 = ro.mask, ro.mask.any(-1), ro.logprobs - ro.ref_logprobs
    given = torch.where(mask, ro.token_scores, 0).sum(-1)
    tokens = {"k1": k1, "kl": ro.kl, "entropy": ro.entropy, "advantages": ro.advantages}
    tokens |= {"surprise": -ro.logprobs - ro.entropy, "residual": ro.returns - ro.values}
    tokens |= {"ppo/returns": ro.returns, "ppo/val": ro.values}
    rows = {"env/reward": ro.raw_scores + given, "scores": ro.scores + given}
    rows |= {"unfinished": ~ro.finished, "truncated": ro.truncated}
    rows["kl_of_response"] = torch.where(mask, k1, 0).sum(-1)
    vectors = {k: x[mask] for k, x in tokens.items()} | {k: x[live] for k, x in rows.items()}
    for name, texts in (("queries", ro.queries), ("responses", ro.responses)):
        vectors[f"tokens/{name}_len"] = torch.tensor([len(x) for x in texts])
    m = _moments(vectors | {"empty": ~live}, ranks)
    out = {"objective/kl_coef": kl_coef}
    for name in ("env/reward", "tokens/queries_len", "tokens/responses_len"):
        out |= {f"{name}_mean": m[name].mean, f"{name}_std": m[name].std}
    for name in ("ppo/returns", "ppo/val"):
        out |= {f"{name}/mean": m[name].mean, f"{name}/var": m[name].var}
    var = m["ppo/returns"].var
    return out | {
        "objective/kl": m["k1"].sum / max(m["scores"].n, 1),
        "objective/kl_z": m["kl_of_response"].z,
        "objective/kl_per_token": m["k1"].mean,
        "objective/entropy": m["entropy"].mean,
        "objective/surprise": m["surprise"].mean,
        "objective/surprise_z": m["surprise"].z,
        "ppo/mean_non_score_reward": -kl_coef * m["kl"].mean,
        "ppo/mean_scores": m["scores"].mean,
        "ppo/std_scores": m["scores"].std,
        "ppo/policy/advantages_mean": m["advantages"].mean,
        "ppo/val/var_explained": 1 - m["residual"].var / var if var > 0 else 0.0,
        "tokens/responses": m["empty"].n,
        "tokens/empty_responses": m["empty"].sum,
        "tokens/without_eos": m["unfinished"].mean,
        "tokens/truncated": m["truncated"].mean,
    }


def report(s: dict[str, float], cfg: PPOConfig, first: bool) -> None:
    """Warn of a KL that cannot be; at the first step print what its numbers say of the set-up.

    The mean KL to the reference is at least 0 over a policy's own samples, up to their number.
    """
    kl, kl_z, gap = s["objective/kl"], s["objective/kl_z"], s["ppo/policy/first_logprob_gap"]
    surprise, z = s["objective/surprise"], s["objective/surprise_z"]
    otherwise = "top_k, top_p, a minimum length, greedy search, another temperature"
    negative = (
        f"mean KL to the reference is {kl:.4g}, {-kl_z:.1f} standard errors below 0, which is "
        f"impossible over samples of the policy: were responses made with {otherwise}?"
    )
    impossible = kl_z < -5
    if impossible:
        warnings.warn(negative, stacklevel=3)
    if not first:
        return
    lines = [
        f"PPO self-check: largest |new - old| log-prob {gap:.2g}, mean KL to the reference "
        f"{kl:.3g} nats per response, {s['tokens/without_eos']:.0%} of the responses without EOS, "
        f"{s['tokens/truncated']:.0%} truncated, {s['tokens/empty_responses']:.0f} empty"
    ]
    if gap > (0.3 if cfg.bf16 else 1e-2):
        lines += ["|new - old| is no rounding: dropout is live, other weights, or low precision"]
    lines += [negative] if impossible else []
    if abs(z) > 6 and abs(surprise) > 0.05:
        likely = f"{abs(surprise):.2g} nats per token {'less' if z > 0 else 'more'} likely than"
        lines += [f"responses are {likely} samples of the policy: other weights, or {otherwise}"]
    if s["tokens/without_eos"] > 0.9:
        lines += ["hardly a response ends: is the EOS id right, max_new_tokens too small?"]
    print("\n  ".join(lines))
