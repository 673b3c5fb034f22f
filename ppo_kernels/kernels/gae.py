"""Triton twin of csrc/gae.cuh, for CUDA machines without nvcc: a program per row.

The carry form of csrc/gae.h, in blocks of tokens from the right. X_{t+1} is what a token needs, so
the scan runs over the maps of t+1, which are computed from memory a second time (the loads hit
L1); dividing X_t by its own map would fail at lam = 0. Blocks are counted from the start of the
row, so padding on the right changes no bit. All arithmetic is fp32, the sums are fp64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _compose(c_right, b_right, c_left, b_left):
    """The map of the right part, then that of the left; reverse=True hands the right one first."""
    return c_left * c_right, b_left + c_left * b_right


@triton.jit
def _kl(d, KIND: tl.constexpr):
    """k1, k2, k3, abs. Near 0, k3 is its series: e^-d - 1 + d would cancel."""
    if KIND == 1:
        d = 0.5 * d * d
    elif KIND == 2:
        d = tl.minimum(tl.maximum(d, -20.0), 20.0)
        series = d * d * (0.5 + d * (-1 / 6 + d * (1 / 24 + d * (-1 / 120 + d / 720))))
        d = tl.where(tl.abs(d) < 0.25, series, tl.exp(-d) - 1 + d)
    elif KIND == 3:
        d = tl.abs(d)
    return d


@triton.jit
def _tokens(
    t,
    lo,
    length,
    last,
    score,
    values_ptr,
    rewards_ptr,
    mask_ptr,
    logprobs_ptr,
    ref_logprobs_ptr,
    terminated_ptr,
    truncated_ptr,
    bootstrap_ptr,
    gamma,
    kl_coef,
    KIND: tl.constexpr,
):
    """(valid, stop, r, v) of the tokens t of a row; r of a stopped one includes what it gets."""
    # Loads ask only whether a slot is in the row: the mask would keep them from being wide ones.
    inside = t < length
    valid = inside
    if mask_ptr is not None:
        valid = tl.load(mask_ptr + lo + t, mask=inside, other=0) != 0
    v = tl.load(values_ptr + lo + t, mask=inside, other=0).to(tl.float32)
    r = tl.zeros_like(v)
    if rewards_ptr is not None:
        r = tl.load(rewards_ptr + lo + t, mask=inside, other=0).to(tl.float32)
    if logprobs_ptr is not None:
        d = tl.load(logprobs_ptr + lo + t, mask=inside, other=0).to(tl.float32)
        d -= tl.load(ref_logprobs_ptr + lo + t, mask=inside, other=0).to(tl.float32)
        r -= kl_coef * _kl(d, KIND)
    stop = t < 0
    if terminated_ptr is not None:
        stop = tl.load(terminated_ptr + lo + t, mask=inside, other=0) != 0
    if truncated_ptr is not None:
        truncated = tl.load(truncated_ptr + lo + t, mask=inside, other=0) != 0
        boot = tl.load(bootstrap_ptr + lo + t, mask=inside, other=0).to(tl.float32)
        r = tl.where(truncated, r + gamma * boot, r)
        stop = stop | truncated
    r += tl.where(t == last, score, 0.0)
    return valid, stop, r, v


@triton.jit
def _enter(valid, stop, r, v, cg, cv, x):
    """X_{t+1} for each slot, from the tokens t+1 and the X that enters the block."""
    c = tl.where(valid, tl.where(stop, 0.0, cg), 1.0)
    b = tl.where(valid, cg * r + cv * v, 0.0)
    c, b = tl.associative_scan((c, b), 0, _compose, reverse=True)
    return c * x + b


@triton.jit
def _gae_kernel(
    advantages_ptr,
    returns_ptr,
    sums_ptr,
    cu_seqlens_ptr,
    scores_ptr,
    values_ptr,
    rewards_ptr,
    mask_ptr,
    logprobs_ptr,
    ref_logprobs_ptr,
    terminated_ptr,
    truncated_ptr,
    bootstrap_ptr,
    T,
    N,
    gamma,
    lam,
    lam_returns,
    kl_coef,
    KIND: tl.constexpr,
    TWO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lo, length = row * T, T
    if cu_seqlens_ptr is not None:
        lo = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + row).to(tl.int64), 0), N)
        hi = tl.minimum(tl.load(cu_seqlens_ptr + row + 1).to(tl.int64), N)
        length = tl.maximum(hi - lo, 0).to(tl.int32)  # offsets inside a row take one register each
    slot = tl.arange(0, BLOCK)
    blocks = tl.cdiv(length, BLOCK)
    cg, cv = gamma * lam, gamma * (1 - lam)
    cg_returns, cv_returns = gamma * lam_returns, gamma * (1 - lam_returns)
    x = 0.0
    score = 0.0
    if bootstrap_ptr is not None and truncated_ptr is None:
        x = gamma * tl.load(bootstrap_ptr + row).to(tl.float32)
    if scores_ptr is not None:
        score = tl.load(scores_ptr + row).to(tl.float32)
    last = tl.full((), -1, tl.int32)
    ENDS: tl.constexpr = terminated_ptr is not None or truncated_ptr is not None
    if ENDS and scores_ptr is not None:
        # An episode end cuts off what comes from the right; the score belongs to the last action.
        for k in range(0, blocks):
            t = k * BLOCK + slot
            valid = t < length
            if mask_ptr is not None:
                valid = tl.load(mask_ptr + lo + t, mask=valid, other=0) != 0
            last = tl.maximum(last, tl.max(tl.where(valid, t, -1)))
    else:
        x += score
    x_returns = x
    n = tl.full((), 0, tl.float64)
    sum_a = tl.full((), 0, tl.float64)
    sum_aa = tl.full((), 0, tl.float64)
    for k in range(0, blocks):
        first = (blocks - 1 - k) * BLOCK
        t = first + slot
        # The tokens t + 1 of this block: the one after it has already gone into x.
        after = tl.where(slot < BLOCK - 1, t + 1, length)
        valid, stop, r, v = _tokens(
            after, lo, length, last, score, values_ptr, rewards_ptr, mask_ptr, logprobs_ptr,
            ref_logprobs_ptr, terminated_ptr, truncated_ptr, bootstrap_ptr, gamma, kl_coef, KIND,
        )  # fmt: skip
        entering = _enter(valid, stop, r, v, cg, cv, x)
        entering_returns = entering
        if TWO:
            entering_returns = _enter(valid, stop, r, v, cg_returns, cv_returns, x_returns)
        valid, stop, r, v = _tokens(
            t, lo, length, last, score, values_ptr, rewards_ptr, mask_ptr, logprobs_ptr,
            ref_logprobs_ptr, terminated_ptr, truncated_ptr, bootstrap_ptr, gamma, kl_coef, KIND,
        )  # fmt: skip
        ret = r + tl.where(stop, 0.0, entering)
        a = tl.where(valid, ret - v, 0.0)
        x = tl.sum(tl.where(slot == 0, tl.where(valid, cg * ret + cv * v, entering), 0.0))
        if TWO:
            ret = r + tl.where(stop, 0.0, entering_returns)
            left = tl.where(valid, cg_returns * ret + cv_returns * v, entering_returns)
            x_returns = tl.sum(tl.where(slot == 0, left, 0.0))
        tl.store(advantages_ptr + lo + t, a, mask=t < length)
        tl.store(returns_ptr + lo + t, tl.where(valid, ret, 0.0), mask=t < length)
        a = a.to(tl.float64)
        n += tl.sum(valid.to(tl.float64))
        sum_a += tl.sum(a)
        sum_aa += tl.sum(a * a)
    tl.store(sums_ptr + 3 * row, n)
    tl.store(sums_ptr + 3 * row + 1, sum_a)
    tl.store(sums_ptr + 3 * row + 2, sum_aa)


def gae(
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
    """ppo_kernels::gae of values that are not fp64."""
    advantages = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    returns = torch.empty_like(advantages)
    packed = cu_seqlens is not None
    rows = cu_seqlens.numel() - 1 if packed else values.shape[0]
    sums = advantages.new_empty(rows, 3, dtype=torch.float64)
    if rows:
        per_token = [values, rewards, mask, logprobs, ref_logprobs, terminated, truncated]
        inputs = [
            None if x is None else x.contiguous()
            for x in (cu_seqlens, scores, *per_token, bootstrap)
        ]
        T = 0 if packed else values.shape[1]
        # Packed rows are read a token at a time: more threads lose no wide loads, and need fewer
        # registers each.
        warps = 8 if packed else 4
        with torch.cuda.device_of(values):
            _gae_kernel[(rows,)](
                advantages, returns, sums, *inputs, T, values.numel(), gamma, lam, lam_returns,
                kl_coef, KIND=kl_kind, TWO=lam != lam_returns, BLOCK=BLOCK, num_warps=warps,
            )  # fmt: skip
    return advantages, returns, sums.sum(0)
