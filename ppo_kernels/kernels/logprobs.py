"""Triton kernels of logprobs_from_logits: one read of the logits forward, one read and one write
backward.

Rows are the leading dimensions [A, B] of logits [A, B, V], each with a stride of its own, so
`logits[:, :-1]` and padded-vocabulary slices need no copy. Row offsets are 64-bit and all programs
lie on grid.x, which counts to 2^31. Logits are upcast on load; all arithmetic is fp32. Temperatures
and scales are runtime arguments: a new one never recompiles.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def block_and_warps(V: int, itemsize: int) -> tuple[int, int]:
    """Columns per block and warps, from V and the bytes of a logit alone (never from N).

    A block is 16 KB over 256 threads: four 128-bit loads per thread, and four resident programs
    (64 registers) keep more in flight than the 18 KB per SM that 3.3 TB/s times 700 ns asks for.
    Smaller blocks pay the two block-wide reductions more often; larger ones spill. Rows that are
    no multiple of 16 bytes (V = 50257) load element by element: half a block, because with more
    the predicates of 32 elements per thread spill on sm_80.
    """
    size = 16384 if V * itemsize % 16 == 0 else 8192
    block = min(max(triton.next_power_of_2(V), 32), size // itemsize)
    return block, min(max(block // 256, 1), 8)


@triton.jit
def _tanh(u):
    """tanh without libdevice: an odd minimax polynomial near 0, 1 - 2 / (e^2u + 1) elsewhere."""
    t = u * u
    p = 0.020639086 - 0.005704987 * t
    p = -0.053739715 + p * t
    p = 0.13331442 + p * t
    p = -0.3333328 + p * t
    a = tl.abs(u)
    large = 1 - 2 / (tl.exp(2 * a) + 1)
    return tl.where(a < 0.625, u + u * t * p, tl.where(u < 0, -large, large))


@triton.jit
def _z(x, inner, outer, CAPPED: tl.constexpr):
    """The transformed logit: inner * x, or outer * tanh(inner * x). Infinite logits stay so."""
    u = inner * x
    if CAPPED:
        u = tl.where(tl.abs(x) == float("inf"), x, outer * _tanh(u))
    return u


@triton.jit
def _dz_dx(x, inner, outer, CAPPED: tl.constexpr):
    if CAPPED:
        t = _tanh(inner * x)
        return tl.where(tl.abs(x) == float("inf"), outer * inner, outer * inner * (1 - t * t))
    else:
        return inner


@triton.jit
def _factors(temperatures_ptr, row, temperature, logit_scale, softcap, CAPPED: tl.constexpr):
    """(inner, outer) of `_z`. A temperature that is not > 0 makes the row NaN."""
    if temperatures_ptr is not None:
        temperature = tl.load(temperatures_ptr + row).to(tl.float32)
        temperature = tl.where(temperature > 0, temperature, float("nan"))
    if CAPPED:
        return logit_scale / softcap, softcap / temperature
    else:
        return logit_scale / temperature, 1.0


@triton.jit
def _row_sums(
    x_row,
    V,
    inner,
    outer,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    SUM_P2: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """(m, s, w, q) of the first V columns: m = max z, and with e = exp(z - m) the sums of e, of
    e (z - m) and of e^2; w and q only if asked. STAGES - 1 blocks are on their way to shared memory
    while one is summed; with STAGES 1 other programs on the SM hide the latency."""
    m = -float("inf")
    s = 0.0
    w = 0.0
    q = 0.0
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_row + cols, mask=cols < V, other=-float("inf")).to(tl.float32)
        z = _z(x, inner, outer, CAPPED)
        new_m = tl.maximum(m, tl.max(z, 0))
        # While everything so far is -inf, shift by 0: e is 0 then and nothing becomes NaN.
        shift = tl.where(new_m == -float("inf"), 0.0, new_m)
        d = z - shift
        e = tl.exp(d)
        rescale = tl.exp(m - shift)
        if ENTROPY:
            # w = sum e d: no cancellation, unlike lse - E[z]. What vanishes is 0, not 0 * -inf.
            w = tl.where(rescale == 0, 0.0, (w + s * (m - shift)) * rescale)
            w += tl.sum(tl.where(e == 0, 0.0, e * d), 0)
        if SUM_P2:
            q = q * (rescale * rescale) + tl.sum(e * e, 0)
        s = s * rescale + tl.sum(e, 0)
        m = new_m
    return m, s, w, q


@triton.jit
def _dx(
    x,
    cols,
    label,
    g,
    h,
    row_max,
    log_sum,
    entropy,
    inner,
    outer,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """dz_v = g (1_y - p_v) - h p_v (ln p_v + H), dx = dz * dz/dx; h only if ENTROPY."""
    log_p = _z(x, inner, outer, CAPPED) - row_max - log_sum
    p = tl.exp(log_p)
    weight = g
    if ENTROPY:
        weight = g + h * (tl.where(p == 0, 0.0, log_p) + entropy)
    dz = tl.where(cols == label, g, 0.0) - p * weight
    return dz * _dz_dx(x, inner, outer, CAPPED)


# Specialising on these would only compile anew for other batch sizes and labels.
@triton.jit(do_not_specialize=["B", "ignore_index"])
def _logprobs_fwd_kernel(
    x_ptr,
    labels_ptr,
    temperatures_ptr,
    logp_ptr,
    entropy_ptr,
    row_max_ptr,
    log_sum_ptr,
    sum_p2_ptr,
    partials_ptr,
    B,
    V,
    x_stride_a,
    x_stride_b,
    temperature,
    logit_scale,
    softcap,
    ignore_index,
    shard_ptr,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    SUM_P2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row // B * x_stride_a + row % B * x_stride_b
    label = tl.load(labels_ptr + row).to(tl.int64)
    ignored = label == ignore_index
    if shard_ptr is not None:
        label -= tl.load(shard_ptr)
    inner, outer = _factors(temperatures_ptr, row, temperature, logit_scale, softcap, CAPPED)

    # An ignored row is not read: it has no columns.
    m, s, w, q = _row_sums(
        x_row, tl.where(ignored, 0, V), inner, outer, CAPPED, ENTROPY, SUM_P2, BLOCK, STAGES=1
    )

    here = (label >= 0) & (label < V) & ~ignored
    if partials_ptr is not None:
        y = tl.load(x_row + label, mask=here, other=-float("inf")).to(tl.float32)
        out = partials_ptr + row * (5 if SUM_P2 else 4)
        tl.store(out, m)
        tl.store(out + 1, s)
        tl.store(out + 2, w)
        tl.store(out + 3, tl.where(here, _z(y, inner, outer, CAPPED), -float("inf")))
        if SUM_P2:
            tl.store(out + 4, q)
    else:
        # A label outside [0, V) loads NaN and poisons its row.
        y = tl.load(x_row + label, mask=here, other=float("nan")).to(tl.float32)
        log_s = tl.log(s)
        # The inner parentheses keep logits near 1000 exact.
        logp = (_z(y, inner, outer, CAPPED) - m) - log_s
        tl.store(logp_ptr + row, tl.where(ignored, 0.0, logp))
        tl.store(row_max_ptr + row, tl.where(ignored, 0.0, m))
        tl.store(log_sum_ptr + row, tl.where(ignored, 0.0, log_s))
        if ENTROPY:
            entropy = tl.where(here, log_s - w / s, float("nan"))
            tl.store(entropy_ptr + row, tl.where(ignored, 0.0, entropy))
        if SUM_P2:
            tl.store(sum_p2_ptr + row, tl.where(ignored, 0.0, q / (s * s)))


@triton.jit(do_not_specialize=["B", "ignore_index"])
def _logprobs_bwd_kernel(
    dx_ptr,
    grad_logp_ptr,
    grad_entropy_ptr,
    x_ptr,
    labels_ptr,
    temperatures_ptr,
    row_max_ptr,
    log_sum_ptr,
    entropy_ptr,
    B,
    V,
    tiles,
    x_stride_a,
    x_stride_b,
    dx_stride_a,
    dx_stride_b,
    temperature,
    logit_scale,
    softcap,
    ignore_index,
    shard_ptr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`_dx` of a tile of columns per program. dx_ptr may be x_ptr."""
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    cols = program % tiles * BLOCK + tl.arange(0, BLOCK)
    x_row = x_ptr + row // B * x_stride_a + row % B * x_stride_b
    dx_row = dx_ptr + row // B * dx_stride_a + row % B * dx_stride_b

    label = tl.load(labels_ptr + row).to(tl.int64)
    g = 0.0
    if grad_logp_ptr is not None:
        g = tl.load(grad_logp_ptr + row)
    h = 0.0
    if grad_entropy_ptr is not None:
        h = tl.load(grad_entropy_ptr + row)
    # A row whose outputs carry no gradient is not read and gets exact zeros.
    skipped = (label == ignore_index) | ((g == 0) & (h == 0))
    vocab_size = V
    if shard_ptr is not None:
        vocab_size = tl.load(shard_ptr + 1)
    g = tl.where((label >= 0) & (label < vocab_size), g, float("nan"))
    if shard_ptr is not None:
        label -= tl.load(shard_ptr)
    # Compared with every column: in 32 bits.
    label = tl.where((label >= 0) & (label < V), label, -1).to(tl.int32)

    inner, outer = _factors(temperatures_ptr, row, temperature, logit_scale, softcap, CAPPED)
    entropy = 0.0
    if grad_entropy_ptr is not None:
        entropy = tl.load(entropy_ptr + row)
    x = tl.load(x_row + cols, mask=(cols < V) & ~skipped, other=-float("inf")).to(tl.float32)
    dx = _dx(
        x, cols, label, g, h, tl.load(row_max_ptr + row), tl.load(log_sum_ptr + row), entropy,
        inner, outer, CAPPED, ENTROPY=grad_entropy_ptr is not None,
    )  # fmt: skip
    dx = tl.where(skipped, 0.0, dx)
    tl.store(dx_row + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < V)


# ------------------------------------------------------------------------------- launchers


def _rows(logits: Tensor) -> tuple[int, int, int, int, int]:
    """(A, B, V, stride_a, stride_b) of logits [N, V] or [A, B, V]; A = 1 if one stride does."""
    if logits.dim() == 2:
        return 1, *logits.shape, 0, logits.stride(0)
    A, B, V = logits.shape
    if logits.stride(0) == B * logits.stride(1):
        return 1, A * B, V, 0, logits.stride(1)
    return A, B, V, logits.stride(0), logits.stride(1)


def _forward(
    logits: Tensor,
    labels: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float,
    ignore_index: int,
    shard: Tensor | None,
    outputs: tuple[Tensor | None, ...],
    entropy: bool,
    sum_p2: bool,
) -> None:
    A, B, V, stride_a, stride_b = _rows(logits)
    if A * B == 0:
        return
    block, warps = block_and_warps(V, logits.element_size())
    with torch.cuda.device_of(logits):
        _logprobs_fwd_kernel[(A * B,)](
            logits,
            labels,
            temperatures,
            *outputs,
            B,
            V,
            stride_a,
            stride_b,
            temperature,
            logit_scale,
            softcap,
            ignore_index,
            shard,
            CAPPED=softcap > 0,
            ENTROPY=entropy,
            SUM_P2=sum_p2,
            BLOCK=block,
            num_warps=warps,
            enable_fp_fusion=True,
        )


def logprobs_fwd(logits: Tensor, labels: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Launch the forward kernel; arguments and results of the op in ops/logprobs.py."""
    *transform, entropy, sum_p2 = args
    logp, row_max, log_sum = (
        torch.empty(labels.shape, dtype=torch.float32, device=logits.device) for _ in range(3)
    )
    ent = torch.empty_like(logp) if entropy else logp.new_empty(0)
    p2 = torch.empty_like(logp) if sum_p2 else logp.new_empty(0)
    outputs = (logp, ent, row_max, log_sum, p2, None)
    _forward(logits, labels, *transform, None, outputs, entropy, sum_p2)
    return logp, ent, row_max, log_sum, p2


def logprobs_partials(logits: Tensor, labels: Tensor, *args: Any) -> Tensor:
    """Launch the forward kernel for one slice of the vocabulary: unfinished row statistics."""
    *transform, shard, sum_p2 = args
    shape = (labels.numel(), 5 if sum_p2 else 4)
    out = torch.empty(shape, dtype=torch.float32, device=logits.device)
    _forward(logits, labels, *transform, shard, (*[None] * 5, out), True, sum_p2)
    return out


def logprobs_bwd_(
    logits: Tensor,
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
    labels: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float,
    ignore_index: int,
    row_max: Tensor,
    log_sum: Tensor,
    entropy: Tensor | None,
    shard: Tensor | None,
    out: Tensor | None = None,
) -> None:
    """Launch the backward kernel; the gradient goes into `out`, or over the logits."""
    A, B, V, stride_a, stride_b = _rows(logits)
    if A * B == 0:
        return
    out = logits if out is None else out
    # out is the logits or contiguous: where one stride serves the logits, it serves out.
    out_strides = (0, out.stride(-2)) if A == 1 else out.stride()[:2]
    block, warps = block_and_warps(V, logits.element_size())
    tiles = triton.cdiv(V, block)
    with torch.cuda.device_of(logits):
        _logprobs_bwd_kernel[(A * B * tiles,)](
            out,
            grad_logp,
            grad_entropy,
            logits,
            labels,
            temperatures,
            row_max,
            log_sum,
            entropy,
            B,
            V,
            tiles,
            stride_a,
            stride_b,
            *out_strides,
            temperature,
            logit_scale,
            softcap,
            ignore_index,
            shard,
            CAPPED=softcap > 0,
            BLOCK=block,
            num_warps=warps,
            enable_fp_fusion=True,
        )


def logprobs_bwd(logits: Tensor, *args: object) -> Tensor:
    """`logprobs_bwd_` into a new contiguous tensor."""
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    logprobs_bwd_(logits, *args, out=out)
    return out
