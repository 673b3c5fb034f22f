"""gae: generalized advantage estimation over ragged, masked and packed batches."""

import torch
from torch import Tensor

from ppo_kernels import reference
from ppo_kernels.ops import _checks
from ppo_kernels.reference import Advantages

__all__ = ["Advantages", "gae"]


def gae(
    rewards: Tensor | None,
    values: Tensor,
    mask: Tensor | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    lam_returns: float | None = None,
    scores: Tensor | None = None,
    bootstrap: Tensor | None = None,
    logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_penalty: str = "k1",
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Advantages:
    """Advantages and returns by one reverse scan.

    `delta_t = r_t + gamma V_{t+1} - V_t`, `A_t = delta_t + gamma lam A_{t+1}`, `R_t = A_t + V_t`,
    where t+1 is the next *valid* token: a masked token is no transition, the recurrence crosses
    it undecayed, and its outputs are exactly 0 (Schulman et al. 2016; mask semantics of verl).

    Layouts: padded, values [B, T]; or packed, values [N] with cu_seqlens int32 [S+1].
    rewards: like values, or None for zeros. scores [B]: added on the last action of each row;
    a row without an action drops it. bootstrap [B]: V after the last action of a response that
    was cut off, 0 elsewhere. logprobs and ref_logprobs (like values): adds
    `-kl_coef * kl_penalty(logprobs, ref_logprobs)` to the rewards in the same pass.
    terminated, truncated (bool, like values): an episode ends after t inside the row; truncated
    needs bootstrap of the shape of values. lam_returns: another lambda for the returns (VAPO).

    Inputs fp32, bf16, fp16 or fp64; outputs fp32 (fp64 for fp64 values), detached: they are
    targets. stats: fp64 [3] = (n, sum A, sum A^2) over the valid tokens, for masked_whiten.
    """
    _check(values, rewards, mask, logprobs, ref_logprobs, terminated, truncated, cu_seqlens)
    gamma = _checks.number("gamma", gamma, 0, 1)
    lam = _checks.number("lam", lam, 0, 1)
    if lam_returns is not None:
        lam_returns = _checks.number("lam_returns", lam_returns, 0, 1)
    _checks.choice("kl_penalty", kl_penalty, ("k1", "k2", "k3", "abs"))
    rows = values.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    _check_rows(values, rows, scores, bootstrap, truncated)
    with torch.no_grad():
        mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
        mask = _checks.as_bool_mask(mask)
        if logprobs is not None:
            kl = reference.kl_penalty(logprobs, ref_logprobs, kl_penalty)
            shaped = -kl_coef * kl
            rewards = shaped if rewards is None else rewards + shaped
        if cu_seqlens is None:
            return reference.gae(
                rewards,
                values,
                mask,
                gamma,
                lam,
                lam_returns,
                scores,
                bootstrap,
                terminated,
                truncated,
            )
        width = int((cu_seqlens[1:] - cu_seqlens[:-1]).max()) if rows else 0
        padded = [
            reference.pad_packed(x, cu_seqlens, width)
            for x in (rewards, values, mask, terminated, truncated)
        ]
        boot = bootstrap
        if bootstrap is not None and truncated is not None:
            boot = reference.pad_packed(bootstrap, cu_seqlens, width)
        r, v, m, term, trunc = padded
        out = reference.gae(r, v, m, gamma, lam, lam_returns, scores, boot, term, trunc)
        at = torch.arange(width, device=values.device)
        inside = at < (cu_seqlens[1:] - cu_seqlens[:-1]).unsqueeze(-1)
        return Advantages(out.advantages[inside], out.returns[inside], out.stats)


def _check(
    values: Tensor,
    rewards: Tensor | None,
    mask: Tensor | None,
    logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    terminated: Tensor | None,
    truncated: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    _checks.tensor("values", values, _checks.FLOATS)
    if cu_seqlens is None and values.dim() != 2:
        raise ValueError(
            f"values must have shape [B, T] (or [N] with cu_seqlens), got {tuple(values.shape)}"
        )
    if cu_seqlens is not None:
        if values.dim() != 1:
            raise ValueError(
                f"values must have shape [N] with cu_seqlens, got {tuple(values.shape)}"
            )
        _checks.cu_seqlens("cu_seqlens", cu_seqlens, values.numel(), values.device)
    for name, x in (("rewards", rewards), ("logprobs", logprobs), ("ref_logprobs", ref_logprobs)):
        if x is not None:
            _checks.like(name, x, values, "values")
    if (logprobs is None) != (ref_logprobs is None):
        raise ValueError("logprobs and ref_logprobs must be given together")
    for name, x in (("mask", mask), ("terminated", terminated), ("truncated", truncated)):
        if x is not None:
            _checks.like(name, x, values, "values", None)


def _check_rows(
    values: Tensor,
    rows: int,
    scores: Tensor | None,
    bootstrap: Tensor | None,
    truncated: Tensor | None,
) -> None:
    if scores is not None:
        _checks.tensor("scores", scores, _checks.FLOATS)
        _checks.shape("scores", scores, (rows,), "one per row")
        _checks.same_device("scores", scores, values.device, "values")
    if truncated is not None and bootstrap is None:
        raise ValueError("truncated needs bootstrap, V after each cut, of the shape of values")
    if bootstrap is not None:
        _checks.tensor("bootstrap", bootstrap, _checks.FLOATS)
        _checks.same_device("bootstrap", bootstrap, values.device, "values")
        if truncated is None:
            _checks.shape("bootstrap", bootstrap, (rows,), "one per row")
        else:
            _checks.shape("bootstrap", bootstrap, tuple(values.shape), "values")
