"""`ppo-kernels demo worked-example`: one answer of seven tokens, from probabilities to losses.

The inputs are those of a public walk-through of PPO for language models (goldandrabbit.github.io,
"PPO"): what the policy, the reference and the value model said about each token, and the score of
the reward model. Every other number below is computed here, in fp64, by the package's public ops.
"""

from collections.abc import Callable

import torch
from torch import Tensor

import ppo_kernels as pk

TOKENS = ("它", "是", "一种", "人工智能", "的", "方法", "。")
PI = (0.6, 0.8, 0.9, 0.7, 0.95, 0.8, 0.99)
PI_REF = (0.5, 0.7, 0.9, 0.8, 0.9, 0.75, 0.95)
VALUES = (2.1, 2.3, 2.5, 2.6, 2.7, 2.8, 2.9)
SCORE = 3.0
KL_COEF, LAM, CLIPRANGE = 0.1, 0.95, 0.2
# A made-up next policy and value model, far enough away that both clips bind.
NEW_PI = (0.75, 0.6, 0.9, 0.7, 0.5, 0.96, 0.99)
NEW_VALUES = (2.5, 2.35, 2.6, 2.9, 2.65, 2.8, 3.2)


def row(numbers: tuple[float, ...]) -> Tensor:
    """[1, T] in fp64."""
    return torch.tensor([numbers], dtype=torch.float64)


def number(x: float) -> str:
    """Six decimals, without a minus sign in front of a zero."""
    return f"{round(x, 6) + 0.0:13.6f}"


def table(show: Callable[[str], None], columns: dict[str, Tensor]) -> None:
    """Print one line per token, its text last: wide characters then push nothing aside."""
    show("  t " + "".join(f"{name:>13}" for name in columns) + "   token")
    for t, token in enumerate(TOKENS):
        cells = "".join(number(x[0, t].item()) for x in columns.values())
        show(f"  {t + 1} {cells}   {token}")
    show("")


def losses(show: Callable[[str], None], new: Tensor, values: Tensor, out: pk.Advantages) -> None:
    """Print the three losses of one update, the policy's with A as it is and with A whitened."""
    mask = torch.ones_like(values, dtype=torch.bool)
    white = pk.masked_whiten(out.advantages, mask, stats=out.stats)
    plain, whitened = (
        pk.ppo_loss(
            new,
            row(PI).log(),
            advantages,
            values=values,
            old_values=row(VALUES),
            returns=out.returns,
            ref_logprobs=row(PI_REF).log(),
            kl_penalty="k1",
            cliprange=CLIPRANGE,
        ).stats.as_dict()
        for advantages in (out.advantages, white)
    )
    for name, value in (
        ("policy loss  -mean min(r A, clip(r) A)", plain["policy_loss"]),
        ("             the same with A whitened", whitened["policy_loss"]),
        ("value loss   mean max((V - R)^2, (clip(V) - R)^2) / 2", plain["value_loss"]),
        ("KL loss      mean(ln pi - ln pi_ref)", plain["kl_ref"]),
        ("share of ratios clipped", plain["clipfrac"]),
        ("share of values clipped", plain["clipfrac_value"]),
    ):
        show(f"    {name:<54}{number(value)}")
    show("")


def main(show: Callable[[str], None] = print) -> None:
    """Print every step of the example under both reward conventions."""
    logprobs, ref, values = row(PI).log(), row(PI_REF).log(), row(VALUES)
    mask = torch.ones_like(values, dtype=torch.bool)
    score = torch.tensor([SCORE], dtype=torch.float64)

    show(f"1. What the models said: score {SCORE}, beta {KL_COEF}, lambda {LAM}, eps {CLIPRANGE}")
    table(show, {"pi": row(PI), "pi_ref": row(PI_REF), "V": values})

    show("2. KL per token: k1 = ln pi - ln pi_ref, k2 = k1^2 / 2, k3 = e^-k1 - 1 + k1")
    kl = {kind: pk.kl_penalty(logprobs, ref, kind) for kind in ("k1", "k2", "k3")}
    table(show, kl)
    mean = pk.masked_mean(kl["k1"], mask).item()
    show(f"  sum of k1 {kl['k1'].sum().item():.6f}, mean of k1 (KL_avg) {mean:.6f}\n")

    titles = {
        "terminal_mean": "3. The document: R_total = score - beta * KL_avg, all on the last token",
        "token": "4. What trainers do: -beta * KL_t on every token, the score on the last",
    }
    for placement, title in titles.items():
        rewards = pk.compute_rewards(
            score, logprobs, ref, mask, kl_coef=KL_COEF, kl_placement=placement
        )
        show(f"{title}\n  total reward {rewards.sum().item():.6f}\n")
        for gamma in (1.0, 0.99):
            out = pk.gae(rewards, values, mask, gamma=gamma, lam=LAM)
            # GAE at lambda = 0 is the TD residual r_t + gamma V_{t+1} - V_t.
            delta = pk.gae(rewards, values, mask, gamma=gamma, lam=0.0).advantages
            white = pk.masked_whiten(out.advantages, mask, stats=out.stats)
            columns = {"reward": rewards, "delta": delta, "A": out.advantages}
            show(f"  gamma {gamma}: A_t = delta_t + gamma lambda A_t+1, return = A + V")
            table(show, columns | {"return": out.returns, "A whitened": white})
            if gamma == 1.0:
                show("  losses before the first update (every ratio is 1)")
                losses(show, logprobs, values, out)
                show("  losses after a made-up update: pi = " + ", ".join(map(str, NEW_PI)))
                losses(show, row(NEW_PI).log(), row(NEW_VALUES), out)
