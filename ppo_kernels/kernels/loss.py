"""Triton kernels of ppo_loss and ppo_loss_from_logits.

Three launches make a loss: the sums of the mask that its denominators need (`_weights_kernel`, left
out where there are none), the tokens (`_loss_kernel`: every input read once, gradients and sums per
program written), and the sums of the programs in a fixed order (`_finish_kernel`). From logits,
`_rows_kernel` comes before the tokens: it turns a row into log-prob, entropy and d(logits). Nothing
is added atomically and nothing waits for the host. `_logprob_terms` is the mathematics of a token
for both; as in csrc/cpu/loss_math.h, weights multiply only what was selected by them.

All arithmetic is fp32 but the sums of weights, the sums over programs and A - mean, which are fp64.
Which terms there are is compiled in; coefficients and ranges are runtime arguments.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppo_kernels.kernels.logprobs import _dx, _factors, _row_sums, _rows, _z

# Tokens per program: one 128-bit load of every fp32 input for each of 128 threads. 65536 tokens
# are then a program for every SM of a large card, and the dozen inputs still fit the registers.
BLOCK = 512
# Tokens per partial sum of a mask that has no sequences.
RUN = 4096
# exp() arguments are clamped to this, as in reference.py.
LOG_RATIO_CLAMP: tl.constexpr = tl.constexpr(20.0)
# Rows of the partial sums: reference.STAT_NAMES, before any division.
SUMS: tl.constexpr = tl.constexpr(13)
RATIO_SUM: tl.constexpr = tl.constexpr(10)
RATIO_MAX: tl.constexpr = tl.constexpr(11)


# ------------------------------------------------------------------------- one token's loss


@triton.jit
def _clamp(x):
    """x within +-LOG_RATIO_CLAMP; NaN stays, which tl.minimum would drop."""
    x = tl.where(x < -LOG_RATIO_CLAMP, -LOG_RATIO_CLAMP, x)
    return tl.where(x > LOG_RATIO_CLAMP, LOG_RATIO_CLAMP, x)


@triton.jit
def _exp_and_rest(x):
    """e^x and e^x - 1 - x for clamped x. With x = n ln2 + r, e^r = 1 + r + r^2 p(r): for n = 0,
    where the difference would cancel, the second is r^2 p(r) itself."""
    n = tl.floor(x * 1.44269504 + 0.5)
    r = x - n * 0.693359375 + n * 2.12194440e-4
    p = 1.38146131e-3 * r + 8.36870983e-3
    p = p * r + 4.16683874e-2
    p = p * r + 1.66665207e-1
    p = p * r + 4.99999935e-1
    square = p * (r * r)
    # NaN has no integer; it is in `square` already.
    exponent = tl.where(n == n, n, 0.0).to(tl.int32)
    exp_x = (square + r + 1.0) * ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    return exp_x, tl.where(n == 0, square, (exp_x - 1.0) - x)


@triton.jit
def _pick(ptr, t, inside, valid):
    """Tokens t as fp32, 0 where not valid. The load asks only for `inside`, to be a wide one."""
    return tl.where(valid, tl.load(ptr + t, mask=inside, other=0).to(tl.float32), 0.0)


@triton.jit
def _policy(logp, log_ratio, r, kl, a, low, high, dual, kl_old_coef, POLICY: tl.constexpr):
    """(loss, d(loss)/d(logp), above, below); on a bound nothing is clipped."""
    above = (a > 0) & (r > high)
    below = (a < 0) & (r < low)
    outside = tl.abs(log_ratio) > LOG_RATIO_CLAMP
    if POLICY == "clip":
        past = (a < 0) & (r > dual)
        stopped = tl.where(above, high, tl.where(below, low, tl.where(past, dual, r)))
        loss = -a * stopped
        grad = tl.where(above | below | past | outside, 0.0, -a * r)
    elif POLICY == "kl":
        loss = kl_old_coef * kl - a * r
        # kl + log_ratio is r - 1, without cancellation.
        grad = tl.where(outside, 0.0, kl_old_coef * (kl + log_ratio) - a * r)
    else:
        loss = -a * logp
        grad = -a
    if POLICY != "clip":
        above = above & ~above
        below = below & ~below
    return loss, grad, above, below


@triton.jit
def _kl(d, KIND: tl.constexpr):
    """(value, derivative) of reference.kl_penalty; the + kinds have the derivative of k2."""
    value = d
    grad = d
    if KIND == "k1":
        grad = 1.0
    elif KIND == "k2":
        value = 0.5 * d * d
    elif KIND == "abs":
        value = tl.abs(d)
        grad = tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, d))
    elif KIND == "k3" or KIND == "k3+":
        x = -_clamp(d)
        _, value = _exp_and_rest(x)
        if KIND == "k3":
            grad = tl.where(tl.abs(d) > LOG_RATIO_CLAMP, 0.0, -(x + value))
    return value, grad


@triton.jit
def _logprob_terms(
    logp,
    c,
    t,
    inside,
    valid,
    old_ptr,
    adv_ptr,
    ref_ptr,
    rollout_ptr,
    whiten_ptr,
    low,
    high,
    dual,
    kl_old_coef,
    kl_coef,
    is_cap,
    POLICY: tl.constexpr,
    KL: tl.constexpr,
):
    """What tokens t with log-probs logp and coefficients c add to the loss, and its derivative.

    (d(loss)/d(logp), policy term, KL term, log-ratio, ratio, k3, above, below); c is in the first
    three.
    """
    old = _pick(old_ptr, t, inside, valid)
    a = _pick(adv_ptr, t, inside, valid)
    if whiten_ptr is not None:
        mean, rstd = _mean_rstd(whiten_ptr)
        # In fp64: the mean may be much larger than the deviations.
        a = tl.where(valid, ((a.to(tl.float64) - mean) * rstd).to(tl.float32), 0.0)
    log_ratio = logp - old
    r, kl = _exp_and_rest(_clamp(log_ratio))
    loss, grad, above, below = _policy(
        logp, log_ratio, r, kl, a, low, high, dual, kl_old_coef, POLICY
    )
    c_policy = c
    if rollout_ptr is not None:
        w, _ = _exp_and_rest(_clamp(old - _pick(rollout_ptr, t, inside, valid)))
        c_policy = c * tl.where(w > is_cap, is_cap, w)
    d_logp = c_policy * grad
    kl_ref = c * 0.0
    if ref_ptr is not None:
        kl_ref, kl_grad = _kl(logp - _pick(ref_ptr, t, inside, valid), KL)
        kl_ref *= c
        d_logp += c * kl_coef * tl.where(kl_coef == 0, 0.0, kl_grad)
    return d_logp, c_policy * loss, kl_ref, log_ratio, r, kl, above, below


@triton.jit
def _mean_rstd(stats_ptr):
    """reference.mean_rstd of (n, sum, sum of squares): fp64 mean, fp32 rstd."""
    n = tl.load(stats_ptr)
    s1 = tl.load(stats_ptr + 1)
    # 1 / n by Newton: an fp64 division is a call, around which registers are spilled.
    m = tl.where(n > 1, n, 1.0)
    inverse = (1.0 / m.to(tl.float32)).to(tl.float64)
    inverse = inverse * (2.0 - m * inverse)
    mean = s1 * inverse * (2.0 - m * inverse)
    var = (tl.load(stats_ptr + 2) - s1 * mean).to(tl.float32)
    var = var / tl.where(n > 2, n - 1, 1.0).to(tl.float32)
    return mean, tl.where(n > 1, tl.rsqrt(tl.where(var > 0, var, 0.0) + 1e-8), 0.0)


@triton.jit
def _value(v, old, ret, value_range):
    """(max of the two squared errors, derivative of half of it, whether the clipped one is it)."""
    error = v - ret
    low = old - value_range
    high = old + value_range
    other = tl.where(v < low, low, tl.where(v > high, high, v)) - ret
    stop = other * other > error * error
    return tl.where(stop, other * other, error * error), tl.where(stop, 0.0, error), stop


# ------------------------------------------------------------------ weights and denominators


@triton.jit
def _weight(mask_ptr, t, inside):
    if mask_ptr is not None:
        return tl.load(mask_ptr + t, mask=inside, other=0).to(tl.float32)
    else:
        return tl.where(inside, 1.0, 0.0)


@triton.jit
def _weights_kernel(weights_ptr, mask_ptr, cu_seqlens_ptr, T, N, BLOCK: tl.constexpr):
    """The sum of the mask over a sequence: a run of T tokens, or what cu_seqlens says."""
    part = tl.program_id(0).to(tl.int64)
    lo = part * T
    hi = tl.minimum(lo + T, N)
    if cu_seqlens_ptr is not None:
        lo = tl.maximum(tl.load(cu_seqlens_ptr + part).to(tl.int64), 0)
        hi = tl.minimum(tl.load(cu_seqlens_ptr + part + 1).to(tl.int64), N)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(lo, hi, BLOCK):
        t = start + tl.arange(0, BLOCK)
        total += _weight(mask_ptr, t, t < hi).to(tl.float64)
    tl.store(weights_ptr + part, tl.sum(total, 0))


@triton.jit
def _scale(normalizer_ptr, denominator, weights_ptr, parts, REDUCTION: tl.constexpr):
    """1 / the denominator, or 0 where it is not > 0."""
    if normalizer_ptr is not None:
        den = tl.load(normalizer_ptr).to(tl.float32)
    elif denominator is not None:
        den = denominator
    else:
        # Every program adds up the same few numbers in the same order.
        total = tl.zeros([256], tl.float64)
        for start in range(0, parts, 256):
            i = start + tl.arange(0, 256)
            w = tl.load(weights_ptr + i, mask=i < parts, other=0)
            if REDUCTION != "token-mean":
                w = tl.where(w > 0, 1.0, 0.0).to(tl.float64)
            total += w
        den = tl.sum(total, 0).to(tl.float32)
    return tl.where(den > 0, 1.0 / tl.where(den > 0, den, 1.0), 0.0)


@triton.jit
def _sequence_of(cu_seqlens_ptr, t, S, halvings):
    """The sequence that holds token t: the last one that starts at or before it."""
    low = t * 0
    high = low + S
    for _ in range(0, halvings):
        middle = (low + high) // 2
        starts_before = tl.load(cu_seqlens_ptr + middle) <= t
        low = tl.where(starts_before, middle, low)
        high = tl.where(starts_before, high, middle)
    return low


@triton.jit
def _coefs(
    weight,
    t,
    normalizer_ptr,
    denominator,
    weights_ptr,
    cu_seqlens_ptr,
    parts,
    T,
    halvings,
    REDUCTION: tl.constexpr,
):
    """The c of `agg(x) = sum c x`."""
    scale = _scale(normalizer_ptr, denominator, weights_ptr, parts, REDUCTION)
    if REDUCTION == "seq-mean-token-mean":
        if cu_seqlens_ptr is not None:
            sequence = _sequence_of(cu_seqlens_ptr, t, parts, halvings)
        else:
            sequence = t // T
        # Tokens past the end have no sequence, and no weight.
        n = tl.load(weights_ptr + sequence, mask=weight != 0, other=0).to(tl.float32)
        scale = tl.where(n > 0, scale / tl.where(n > 0, n, 1.0), 0.0)
    return weight * scale


# --------------------------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=["parts", "T", "halvings"])
def _loss_kernel(
    d_logp_ptr,
    d_values_ptr,
    d_entropy_ptr,
    sums_ptr,
    logp_ptr,
    entropy_ptr,
    values_ptr,
    old_values_ptr,
    returns_ptr,
    mask_ptr,
    N,
    normalizer_ptr,
    denominator,
    weights_ptr,
    cu_seqlens_ptr,
    parts,
    T,
    halvings,
    old_ptr,
    adv_ptr,
    ref_ptr,
    rollout_ptr,
    whiten_ptr,
    low,
    high,
    dual,
    kl_old_coef,
    kl_coef,
    is_cap,
    value_range,
    vf_coef,
    ent_coef,
    POLICY: tl.constexpr,
    KL: tl.constexpr,
    REDUCTION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    t = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = t < N
    weight = _weight(mask_ptr, t, inside)
    valid = weight != 0
    c = _coefs(
        weight, t, normalizer_ptr, denominator, weights_ptr, cu_seqlens_ptr, parts, T, halvings,
        REDUCTION,
    )  # fmt: skip
    logp = _pick(logp_ptr, t, inside, valid)
    d_logp, policy, kl_ref, log_ratio, r, kl, above, below = _logprob_terms(
        logp, c, t, inside, valid, old_ptr, adv_ptr, ref_ptr, rollout_ptr, whiten_ptr, low, high,
        dual, kl_old_coef, kl_coef, is_cap, POLICY, KL,
    )  # fmt: skip
    value = 0.0
    clip_value = 0.0
    entropy = 0.0
    if values_ptr is not None:
        v = _pick(values_ptr, t, inside, valid)
        ret = _pick(returns_ptr, t, inside, valid)
        old_values = v
        if old_values_ptr is not None:
            old_values = _pick(old_values_ptr, t, inside, valid)
        squared, d_value, stop = _value(v, old_values, ret, value_range)
        value = tl.sum(0.5 * c * squared, 0)
        clip_value = tl.sum(tl.where(stop, weight, 0.0), 0)
        if d_values_ptr is not None:
            d_value = tl.where(vf_coef == 0, 0.0, vf_coef * c * d_value)
            tl.store(d_values_ptr + t, d_value, mask=inside)
    if entropy_ptr is not None:
        entropy = tl.sum(c * _pick(entropy_ptr, t, inside, valid), 0)
        if d_entropy_ptr is not None:
            tl.store(d_entropy_ptr + t, -ent_coef * c, mask=inside)
    if d_logp_ptr is not None:
        tl.store(d_logp_ptr + t, d_logp, mask=inside)
    sums = sums_ptr + program
    stride = tl.num_programs(0).to(tl.int64)
    tl.store(sums, tl.sum(policy, 0))
    tl.store(sums + stride, value)
    tl.store(sums + 2 * stride, entropy)
    tl.store(sums + 3 * stride, tl.sum(kl_ref, 0))
    tl.store(sums + 4 * stride, tl.sum(weight * kl, 0))
    tl.store(sums + 5 * stride, tl.sum(weight * -log_ratio, 0))
    tl.store(sums + 6 * stride, tl.sum(tl.where(above | below, weight, 0.0), 0))
    tl.store(sums + 7 * stride, tl.sum(tl.where(above, weight, 0.0), 0))
    tl.store(sums + 8 * stride, tl.sum(tl.where(below, weight, 0.0), 0))
    tl.store(sums + 9 * stride, clip_value)
    tl.store(sums + 10 * stride, tl.sum(weight * r, 0))
    tl.store(sums + 11 * stride, tl.max(tl.where(valid, r, 0.0), 0))
    tl.store(sums + 12 * stride, tl.sum(weight, 0))


@triton.jit(do_not_specialize=["programs"])
def _finish_kernel(loss_ptr, stats_ptr, sums_ptr, programs, vf_coef, ent_coef, kl_coef):
    """The loss and its statistics from the sums of all programs, always added in one order."""
    k = tl.arange(0, 16)
    total = tl.zeros([16, 256], tl.float64)
    for start in range(0, programs, 256):
        i = start + tl.arange(0, 256)
        at = k[:, None].to(tl.int64) * programs + i[None, :]
        here = (k[:, None] < SUMS) & (i[None, :] < programs)
        x = tl.load(sums_ptr + at, mask=here, other=0).to(tl.float64)
        larger = tl.where(x > total, x, total)
        total = tl.where(k[:, None] == RATIO_MAX, larger, total + x)
    x = tl.where(k == RATIO_MAX, tl.max(total, 1), tl.sum(total, 1))
    n = tl.sum(tl.where(k == SUMS - 1, x, 0.0), 0)
    # A maximum leaves NaN out, the sum of the ratios does not.
    ratio_sum = tl.sum(tl.where(k == RATIO_SUM, x, 0.0), 0)
    x = tl.where(k == RATIO_MAX, tl.where(ratio_sum == ratio_sum, x, float("nan")), x)
    share = tl.where(n > 0, 1.0 / tl.where(n > 0, n, 1.0), 0.0)
    mean = (k >= 4) & (k <= RATIO_SUM)
    tl.store(stats_ptr + k, tl.where(mean, x * share, x).to(tl.float32), mask=k < SUMS)
    coef = tl.where(k == 0, 1.0, tl.where(k == 1, vf_coef, tl.where(k == 2, -ent_coef, kl_coef)))
    # A coefficient of 0 leaves its term out, which may be infinite.
    tl.store(loss_ptr, tl.sum(tl.where((k < 4) & (coef != 0), coef * x, 0.0), 0).to(tl.float32))


@triton.jit(do_not_specialize=["B", "ignore_index", "parts", "T", "halvings"])
def _rows_kernel(
    dx_ptr,
    logp_ptr,
    entropy_ptr,
    x_ptr,
    labels_ptr,
    temperatures_ptr,
    mask_ptr,
    B,
    V,
    x_stride_a,
    x_stride_b,
    dx_stride_a,
    dx_stride_b,
    temperature,
    logit_scale,
    softcap,
    ignore_index,
    normalizer_ptr,
    denominator,
    weights_ptr,
    cu_seqlens_ptr,
    parts,
    T,
    halvings,
    old_ptr,
    adv_ptr,
    ref_ptr,
    rollout_ptr,
    whiten_ptr,
    low,
    high,
    dual,
    kl_old_coef,
    kl_coef,
    is_cap,
    ent_coef,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    POLICY: tl.constexpr,
    KL: tl.constexpr,
    REDUCTION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Log-prob and entropy of a row, and d(loss)/d(logits) of it; dx_ptr may be x_ptr or None.

    ENTROPY: whether the entropy has a gradient.
    """
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row // B * x_stride_a + row % B * x_stride_b
    label = tl.load(labels_ptr + row).to(tl.int64)
    weight = _weight(mask_ptr, row, row >= 0)
    read = (label != ignore_index) & (weight != 0)
    here = (label >= 0) & (label < V)
    inner, outer = _factors(temperatures_ptr, row, temperature, logit_scale, softcap, CAPPED)
    # Before the row is summed, for which the warps wait for each other: one that is already done
    # may write the gradient over the label's logit. A label outside [0, V) poisons its row.
    y = tl.load(x_row + label, mask=read & here, other=float("nan")).to(tl.float32)
    m, s, w, _ = _row_sums(
        x_row, tl.where(read, V, 0), inner, outer, CAPPED, ENTROPY=True, SUM_P2=False, BLOCK=BLOCK,
        STAGES=3,
    )  # fmt: skip
    log_s = tl.log(s)
    logp = tl.where(read, (_z(y, inner, outer, CAPPED) - m) - log_s, 0.0)
    entropy = tl.where(read, tl.where(here, log_s - w / s, float("nan")), 0.0)
    tl.store(logp_ptr + row, logp)
    tl.store(entropy_ptr + row, entropy)
    if dx_ptr is not None:
        c = _coefs(
            weight, row, normalizer_ptr, denominator, weights_ptr, cu_seqlens_ptr, parts, T,
            halvings, REDUCTION,
        )  # fmt: skip
        terms = _logprob_terms(
            logp, c, row, row >= 0, weight != 0, old_ptr, adv_ptr, ref_ptr, rollout_ptr,
            whiten_ptr, low, high, dual, kl_old_coef, kl_coef, is_cap, POLICY, KL,
        )  # fmt: skip
        g = terms[0]
        h = 0.0
        # A row without a gradient is not read again and gets exact zeros.
        live = read & (g != 0)
        if ENTROPY:
            h = -ent_coef * c
            live = read & ((g != 0) | (h != 0))
        g = tl.where(here, g, float("nan"))
        label = tl.where(here, label, -1).to(tl.int32)
        dx_row = dx_ptr + row // B * dx_stride_a + row % B * dx_stride_b
        blocks = tl.cdiv(V, BLOCK)
        # Backwards: the end of the row was read last and is still in the cache.
        for k in range(0, blocks):
            cols = (blocks - 1 - k) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_row + cols, mask=(cols < V) & live, other=-float("inf")).to(tl.float32)
            dx = _dx(x, cols, label, g, h, m, log_s, entropy, inner, outer, CAPPED, ENTROPY)
            dx = tl.where(live, dx, 0.0).to(dx_ptr.dtype.element_ty)
            tl.store(dx_row + cols, dx, mask=cols < V)


# ------------------------------------------------------------------------------- launchers


def rows_block_and_warps(V: int, itemsize: int) -> tuple[int, int]:
    """Columns per block and warps of `_rows_kernel`, from V and the bytes of a logit alone.

    The second read of a row is worth something only if the rows at work fit the L2 cache. 1024
    threads leave room for one program per SM: 132 rows of 256 KB (bf16, V = 131072) are 34 MB of an
    H100's 50; of longer rows the end still hits. In the place of other programs, two blocks of
    32 KB on their way hide the latency. Rows of up to 64 KB fit with four programs per SM, which
    also hide what comes before and after the row: 256 threads and blocks of 8 KB. Rows that are no
    multiple of 16 bytes load element by element and without stages, in half a block.
    """
    long = V * itemsize > 65536
    size = (32768 if long else 8192) // (1 if V * itemsize % 16 == 0 else 2)
    block = min(max(triton.next_power_of_2(V), 32), size // itemsize)
    return block, 32 if long else min(max(block // 256, 1), 8)


class Terms(NamedTuple):
    """TERMS of ops/loss.py, which says what they are."""

    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor | None
    values: Tensor | None
    old_values: Tensor | None
    returns: Tensor | None
    ref_logprobs: Tensor | None
    rollout_logprobs: Tensor | None
    whiten: Tensor | None
    normalizer: Tensor | None
    denominator: float | None
    cu_seqlens: Tensor | None
    policy_loss: str
    cliprange: float
    cliprange_high: float
    dual_clip: float | None
    cliprange_value: float | None
    vf_coef: float
    ent_coef: float
    kl_coef: float
    kl_kind: str
    kl_old_coef: float
    is_cap: float
    reduction: str


def _contiguous(args: tuple[Any, ...]) -> Terms:
    return Terms(*(x.contiguous() if isinstance(x, Tensor) else x for x in args))


def _coef_args(t: Terms) -> tuple[Any, ...]:
    """The arguments of `_coefs` from normalizer_ptr to halvings; sums the weights they need."""
    N, cu, weights, parts, T, halvings = t.old_logprobs.numel(), None, None, 0, 0, 0
    denominator = t.denominator
    if t.reduction.startswith("seq"):
        cu = t.cu_seqlens
        parts = t.old_logprobs.shape[0] if cu is None else cu.numel() - 1
        T = t.old_logprobs.shape[-1] if cu is None else 0
        halvings = parts.bit_length()
    elif t.mask is None and denominator is None:
        denominator = float(N)
    elif t.normalizer is None and denominator is None:
        parts, T = triton.cdiv(N, RUN), RUN
    if parts and N:
        weights = torch.empty(parts, dtype=torch.float64, device=t.old_logprobs.device)
        _weights_kernel[(parts,)](
            weights, t.mask, cu, T, N, BLOCK=1024, num_warps=4, enable_fp_fusion=True
        )
    return t.normalizer, denominator, weights, cu, parts, T, halvings


def _token_args(t: Terms) -> tuple[Any, ...]:
    """The arguments of `_logprob_terms` from old_ptr to is_cap."""
    dual = float("inf") if t.dual_clip is None else t.dual_clip
    bounds = (1 - t.cliprange, 1 + t.cliprange_high, dual)
    per_token = (t.old_logprobs, t.advantages, t.ref_logprobs, t.rollout_logprobs)
    return *per_token, t.whiten, *bounds, t.kl_old_coef, t.kl_coef, t.is_cap


def _loss(
    logp: Tensor,
    entropy: Tensor | None,
    t: Terms,
    coef_args: tuple[Any, ...],
    gradients: tuple[Tensor | None, ...],
) -> tuple[Tensor, Tensor]:
    """(loss, stats) of the tokens; d_logp, d_values, d_entropy go where there is room for them."""
    loss = torch.empty((), dtype=torch.float32, device=logp.device)
    stats = torch.empty(SUMS.value, dtype=torch.float32, device=logp.device)
    programs = triton.cdiv(logp.numel(), BLOCK)
    sums = torch.empty(SUMS.value, programs, dtype=torch.float32, device=logp.device)
    clipped = t.cliprange_value is not None
    if programs:
        _loss_kernel[(programs,)](
            *gradients, sums, logp, entropy, t.values, t.old_values if clipped else None, t.returns,
            t.mask, logp.numel(), *coef_args, *_token_args(t),
            t.cliprange_value if clipped else float("inf"), t.vf_coef, t.ent_coef,
            POLICY=t.policy_loss, KL=t.kl_kind, REDUCTION=t.reduction, BLOCK=BLOCK, num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
    _finish_kernel[(1,)](
        loss, stats, sums, programs, t.vf_coef, t.ent_coef, t.kl_coef, num_warps=8,
        enable_fp_fusion=True,
    )  # fmt: skip
    return loss, stats


def _room(like: Tensor, need: bool) -> Tensor:
    return torch.empty(like.shape if need else 0, dtype=torch.float32, device=like.device)


def ppo_loss(logprobs: Tensor, entropy: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    """Launch the kernels of the op of this name in ops/loss.py."""
    t, need = _contiguous(args[:-3]), args[-3:]
    gradients = [_room(logprobs, needed) for needed in need]
    with torch.cuda.device_of(logprobs):
        loss, stats = _loss(
            logprobs.contiguous(),
            None if entropy is None else entropy.contiguous(),
            t,
            _coef_args(t),
            tuple(g if needed else None for g, needed in zip(gradients, need)),
        )
    return loss, stats, *gradients


def _from_logits(
    logits: Tensor, labels: Tensor, transform: tuple[Any, ...], t: Terms, dx: Tensor | None,
    need_values: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, stats, d_values); d(logits) goes to dx, which may be the logits."""
    A, B, V, stride_a, stride_b = _rows(logits)
    dx_strides = (0, 0)
    if dx is not None:
        # dx is the logits or contiguous: where one stride serves the logits, it serves dx.
        dx_strides = (0, dx.stride(-2)) if A == 1 else dx.stride()[:2]
    logp, entropy = _room(t.old_logprobs, True), _room(t.old_logprobs, True)
    d_values = _room(t.old_logprobs, need_values)
    block, warps = rows_block_and_warps(V, logits.element_size())
    with torch.cuda.device_of(logits):
        coef_args = _coef_args(t)
        if A * B:
            temperatures, *numbers = transform
            _rows_kernel[(A * B,)](
                dx, logp, entropy, logits, labels, temperatures, t.mask, B, V, stride_a, stride_b,
                *dx_strides, *numbers, *coef_args, *_token_args(t), t.ent_coef,
                CAPPED=numbers[2] > 0, ENTROPY=t.ent_coef != 0, POLICY=t.policy_loss,
                KL=t.kl_kind, REDUCTION=t.reduction, BLOCK=block, num_warps=warps,
                enable_fp_fusion=True,
            )  # fmt: skip
        gradients = (None, d_values if need_values else None, None)
        loss, stats = _loss(logp, entropy, t, coef_args, gradients)
    return loss, stats, d_values


def ppo_loss_from_logits(logits: Tensor, labels: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Launch the kernels of the op of this name in ops/loss.py."""
    transform, t, (need_logits, need_values) = args[:5], _contiguous(args[5:-2]), args[-2:]
    shape = logits.shape if need_logits else (0,)
    d_logits = torch.empty(shape, dtype=logits.dtype, device=logits.device)
    loss, stats, d_values = _from_logits(
        logits, labels, transform, t, d_logits if need_logits else None, need_values
    )
    return loss, stats, d_logits, d_values


def ppo_loss_from_logits_(logits: Tensor, labels: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """`ppo_loss_from_logits` with d(logits) in the place of the logits."""
    return _from_logits(logits, labels, args[:5], _contiguous(args[5:-1]), logits, args[-1])
