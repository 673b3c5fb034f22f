"""gae: generalized advantage estimation over ragged, masked and packed batches."""

from typing import Any

import torch
from torch import Tensor

from ppo_kernels import reference
from ppo_kernels.ops import _checks
from ppo_kernels.ops._library import define
from ppo_kernels.reference import Advantages

__all__ = ["Advantages", "gae"]

KINDS = ("k1", "k2", "k3", "abs")  # as numbered in csrc/gae.h


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
    kl_coef: float | None = None,
    kl_penalty: str = "k1",
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Advantages:
    """Advantages and returns by one reverse scan.

    `delta_t = r_t + gamma V_{t+1} - V_t`, `A_t = delta_t + gamma lam A_{t+1}`, `R_t = A_t + V_t`,
    where t+1 is the next *valid* token: a masked token is no transition, the recurrence crosses
    it undecayed, and its outputs are exactly 0 (Schulman et al. 2016; mask semantics of verl).

    Layouts: padded, values [B, T]; or packed, values [N] with cu_seqlens int32 or int64 [S+1],
    sequence s at [cu_seqlens[s], cu_seqlens[s+1]).

    rewards: like values, or None for zeros. scores [B]: added on the last action of each row;
    a row without an action drops it. bootstrap [B]: V after the last action of a response that
    was cut off, 0 elsewhere. mask: like values, bool or 0/1; None: every token counts.
    logprobs, ref_logprobs (like values): add `-kl_coef * kl_penalty(logprobs, ref_logprobs)`
    (k1, k2, k3 or abs) to the rewards in the same pass.
    terminated, truncated (like values): the episode ends after t, inside the row. A terminated
    token gets nothing from its right, truncated or not; a truncated one gets
    `gamma * bootstrap[t]`, so truncated needs bootstrap of the shape of values, which then
    replaces the one per row.
    lam_returns: another lambda for the returns (VAPO), 1 for Monte-Carlo returns.

    Inputs fp32, bf16, fp16 or fp64, mixed at will; outputs contiguous fp32 (fp64 for fp64
    values), detached: they are targets. stats: fp64 [3] = (n, sum A, sum A^2) over the valid
    tokens, for masked_whiten and ppo_loss(whiten=...).

    Sums run in fp32 (fp64 for fp64): at gamma = lam = 1 their rounding grows with the length, to
    3e-4 relative after 131072 equal rewards. The same inputs give the same bits, and a sequence
    the same bits packed, right-padded, and in any company. Nothing is read back from a GPU:
    cu_seqlens that lives there is not checked, and offsets out of [0, N] are clamped.

    Raises ValueError or TypeError for shapes, dtypes, devices that differ from those of values,
    gamma or lam outside [0, 1], kl_coef without logprobs or these without it, and cu_seqlens on
    the CPU that do not ascend from 0 to N.
    """
    _check(values, rewards, mask, logprobs, ref_logprobs, terminated, truncated, cu_seqlens)
    gamma = _checks.number("gamma", gamma, 0, 1)
    lam = _checks.number("lam", lam, 0, 1)
    lam_returns = lam if lam_returns is None else _checks.number("lam_returns", lam_returns, 0, 1)
    if kl_coef is None and logprobs is not None:  # 0.0 has to be said: a penalty is not forgotten
        raise ValueError("logprobs and ref_logprobs need kl_coef, the weight of their KL, got None")
    kl_coef = _checks.number("kl_coef", 0.0 if kl_coef is None else kl_coef)
    if kl_coef and logprobs is None:
        raise ValueError(f"kl_coef={kl_coef} needs logprobs and ref_logprobs, got None")
    _checks.choice("kl_penalty", kl_penalty, KINDS)
    rows = values.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    _check_rows(values, rows, scores, bootstrap, truncated)
    mask, terminated, truncated = (
        None if x is None else _checks.as_bool_mask(x) for x in (mask, terminated, truncated)
    )
    if terminated is not None and truncated is not None:
        truncated = truncated & ~terminated
    out = torch.ops.ppo_kernels.gae(
        rewards,
        values,
        mask,
        scores,
        bootstrap,
        logprobs,
        ref_logprobs,
        terminated,
        truncated,
        cu_seqlens,
        gamma,
        lam,
        lam_returns,
        kl_coef,
        KINDS.index(kl_penalty),
    )
    return Advantages(*out)


def _reference(
    rewards: Tensor | None,
    values: Tensor,
    mask: Tensor | None,
    scores: Tensor | None,
    bootstrap: Tensor | None,
    logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    terminated: Tensor | None,
    truncated: Tensor | None,
    cu_seqlens: Tensor | None,
    gamma: float,
    lam: float,
    lam_returns: float,
    kl_coef: float,
    kl_kind: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The op by reference.gae; packed rows are padded first, which asks for the longest one."""
    if logprobs is not None:
        shaped = -kl_coef * reference.kl_penalty(logprobs, ref_logprobs, KINDS[kl_kind])
        rewards = shaped if rewards is None else rewards + shaped
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    tokens, inside = (rewards, values, mask, terminated, truncated), None
    if cu_seqlens is not None:
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        width = int(lengths.max()) if lengths.numel() else 0
        inside = torch.arange(width, device=values.device) < lengths.unsqueeze(-1)
        tokens = [reference.pad_packed(x, cu_seqlens, width) for x in tokens]
        if truncated is not None:
            bootstrap = reference.pad_packed(bootstrap, cu_seqlens, width)
    rewards, values, mask, terminated, truncated = tokens
    lams = (gamma, lam, lam_returns)
    out = reference.gae(rewards, values, mask, *lams, scores, bootstrap, terminated, truncated)
    if inside is None:
        return tuple(out)
    return out.advantages[inside], out.returns[inside], out.stats


def _triton(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The op on CUDA without nvcc. The Triton kernel computes in fp32, so fp64 is not its."""
    if args[1].dtype == torch.float64:
        return _reference(*args)
    from ppo_kernels.kernels import gae as kernels

    return kernels.gae(*args)


def _fake(rewards: Tensor | None, values: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    out = values.new_empty(values.shape, dtype=dtype)
    return out, torch.empty_like(out), values.new_empty(3, dtype=torch.float64)


define(
    "gae(Tensor? rewards, Tensor values, Tensor? mask, Tensor? scores, Tensor? bootstrap, "
    "Tensor? logprobs, Tensor? ref_logprobs, Tensor? terminated, Tensor? truncated, "
    "Tensor? cu_seqlens, float gamma, float lam, float lam_returns, float kl_coef, int kl_kind) "
    "-> (Tensor advantages, Tensor returns, Tensor stats)",
    _reference,
    _fake,
    triton_twin=_triton,
)


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
