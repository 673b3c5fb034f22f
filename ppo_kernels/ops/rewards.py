"""kl_penalty and compute_rewards: from a score and two policies to a reward per token."""

import torch
from torch import Tensor

from ppo_kernels import reference
from ppo_kernels.ops import _checks


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str = "k1") -> Tensor:
    """Per-token estimate of KL(pi || ref) for tokens sampled from pi.

    With `d = logprobs - ref_logprobs`:

    | kind  | value           | gradient w.r.t. logprobs                        |
    | k1    | d               | 1 (as a loss: zero in expectation)              |
    | k2    | d^2 / 2         | d (right in expectation)                        |
    | k3    | e^-d - 1 + d    | 1 - e^-d (as a loss: biased); d clamped to ±20  |
    | abs   | abs(d)          | sign(d)                                         |
    | k1+   | k1              | d, straight through (right in expectation)      |
    | k3+   | k3              | d, straight through (right in expectation)      |

    Shapes: any, equal. Returns fp32 (fp64 for fp64), differentiable in both arguments.
    Schulman, "Approximating KL divergence" (2020); the "+" forms are verl's.
    """
    _checks.tensor("logprobs", logprobs, _checks.FLOATS)
    _checks.like("ref_logprobs", ref_logprobs, logprobs, "logprobs")
    _checks.choice("kind", kind, reference.KL_KINDS)
    return reference.kl_penalty(logprobs, ref_logprobs, kind)


def compute_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    kl_coef: float | Tensor,
    kl_penalty: str = "k1",
    kl_placement: str = "token",
    token_rewards: Tensor | None = None,
) -> Tensor:
    """Per-token rewards [B, T] from one score per row and the KL to the reference.

    kl_placement "token" (TRL, OpenRLHF, verl): `r_t = -kl_coef * kl_t` at each action, plus the
    score on the last action. "terminal_mean": 0 everywhere but
    `score - kl_coef * mean_t kl_t` on the last action. The two differ by a factor T in what
    kl_coef means. token_rewards [B, T] are added at the actions.

    scores [B]; logprobs, ref_logprobs [B, T]; mask [B, T], True at the actions. A row without an
    action drops its score. kl_coef: a number, or a 0-d tensor. Masked slots are exactly 0.
    Returns fp32 (fp64 for fp64), detached.
    """
    _checks.tensor("logprobs", logprobs, _checks.FLOATS)
    if logprobs.dim() != 2:
        raise ValueError(f"logprobs must have shape [B, T], got {tuple(logprobs.shape)}")
    _checks.like("ref_logprobs", ref_logprobs, logprobs, "logprobs")
    _checks.like("mask", mask, logprobs, "logprobs", None)
    _checks.tensor("scores", scores, _checks.FLOATS)
    _checks.shape("scores", scores, (logprobs.shape[0],), "the rows of logprobs")
    _checks.same_device("scores", scores, logprobs.device, "logprobs")
    _checks.choice("kl_penalty", kl_penalty, reference.KL_KINDS)
    _checks.choice("kl_placement", kl_placement, ("token", "terminal_mean"))
    if isinstance(kl_coef, Tensor):
        _checks.tensor("kl_coef", kl_coef, _checks.FLOATS)
        _checks.shape("kl_coef", kl_coef, (), "a number")
    else:
        _checks.number("kl_coef", kl_coef)
    if token_rewards is not None:
        _checks.like("token_rewards", token_rewards, logprobs, "logprobs")
    with torch.no_grad():
        return reference.compute_rewards(
            scores,
            logprobs,
            ref_logprobs,
            _checks.as_bool_mask(mask),
            kl_coef,
            kl_penalty,
            kl_placement,
            token_rewards,
        )
