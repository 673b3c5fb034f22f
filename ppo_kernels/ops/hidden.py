"""From hidden states to log-probs and losses: of the logits, a bounded chunk exists at a time.

There are two ways through `hidden @ weight.T` [N, V], both over one buffer that is reused:

* by rows, some whole rows at a time: forward, where a softmax needs all of its row. A loss knows
  d(logits) as soon as the sums of the row are known, so both backward GEMMs run while the chunk is
  still there: 6 N H V flops for forward and backward. Every chunk adds to all of dW, in fp32.
* by columns, once the sums of all rows are known. The logits are made again, 2 N H V flops more,
  and each row of dW is finished before the next begins.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ppo_kernels import reference
from ppo_kernels.ops import _checks
from ppo_kernels.ops._gradients import first_order, needs, refuse_transforms, with_gradients
from ppo_kernels.ops._library import LIB, define
from ppo_kernels.ops.logprobs import TRANSFORM, check_temperature, merged_partials, shard_of
from ppo_kernels.ops.loss import (
    TERM_NAMES,
    TERMS,
    LossStats,
    PPOLoss,
    check_options,
    loss_terms,
    ppo_loss,
    trained,
)

# The logits that exist at a time, where chunk_tokens does not say: with the copies of some of their
# columns it is about 256 MB.
WORKSPACE_BYTES = 192 * 2**20
# Copies of some columns in another dtype. A GPU wants few large launches.
BLOCK_BYTES = {"cpu": 16 * 2**20, "cuda": 128 * 2**20}
# fp32 sums of a 16-bit dW beyond those that fit into dW itself, which are half of them. The rows of
# dW left over are done by columns.
SUM_BYTES = {"cpu": 0, "cuda": 2**30}

PROBLEM = (
    f"Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, {TRANSFORM}, int chunk_tokens, "
    "ScalarType logits_dtype, bool compact"
)
NEED = "bool need_hidden, bool need_weight, bool need_bias"
GRADIENTS = "Tensor d_hidden, Tensor d_weight, Tensor d_bias"


class _Problem(NamedTuple):
    """The arguments that all ops here begin with, in the order of PROBLEM; one row per token."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    temperatures: Tensor | None
    temperature: float
    logit_scale: float
    softcap: float
    ignore_index: int
    chunk_tokens: int
    logits_dtype: torch.dtype
    compact: bool

    @property
    def gemm_dtype(self) -> torch.dtype:
        return torch.promote_types(self.hidden.dtype, self.weight.dtype)

    @property
    def sum_dtype(self) -> torch.dtype:
        return _sum_dtype(self.hidden, self.weight)

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype in which d(logits) enters GEMMs; fp16 would flush most of p / N to 0."""
        return torch.float32 if self.gemm_dtype == torch.float16 else self.gemm_dtype

    def transform(self, part: Any) -> tuple:
        t = None if self.temperatures is None else self.temperatures[part]
        return t, self.temperature, self.logit_scale, self.softcap, self.ignore_index

    def where(self, wanted: Tensor) -> Tensor | None:
        """Numbers of the wanted rows, None for all. On CUDA the host waits for their count."""
        if not self.compact:
            return None
        rows = wanted.nonzero().squeeze(-1)
        return None if rows.numel() == wanted.numel() else rows

    def without_dead(self, x: Tensor, live: Tensor) -> Tensor:
        """x, where all rows go through the GEMMs, with 0 in dead ones: their NaN times 0 is NaN."""
        return x if self.compact else torch.where(live.unsqueeze(-1), x, 0)

    def parts(self, rows: Tensor | None, step: int) -> Iterator[tuple[slice, slice | Tensor]]:
        """For up to `step` rows at a time: their place among `rows`, and among all rows."""
        for at in _slices(self.labels.numel() if rows is None else rows.numel(), step):
            yield at, at if rows is None else rows[at]

    def width(self, rows: int, copies: bool) -> int:
        """Columns per block, if blocks are copied with `rows` rows, and W's rows as fp32."""
        budget = BLOCK_BYTES.get(self.weight.device.type, BLOCK_BYTES["cpu"])
        return max(1, budget // (4 * (rows + copies * self.weight.shape[1])))


def _slices(n: int, step: int, first: int = 0) -> Iterator[slice]:
    for start in range(first, n, step):
        yield slice(start, min(start + step, n))


def _sum_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Of sums, of the log-probs and, unless asked otherwise, of the logits."""
    wide = torch.float64 in (hidden.dtype, weight.dtype)
    return torch.float64 if wide else torch.float32


def _gradient_dtype(x: Tensor) -> torch.dtype:
    """fp16 gradients stay fp32 until the loss scale comes in."""
    return torch.float32 if x.dtype == torch.float16 else x.dtype


# ------------------------------------------------------------------------------------- GEMMs


def _widening_product_on_cuda(out: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    if torch.version.hip is not None or torch.cuda.get_device_capability(a.device) < (8, 0):
        reference.widening_product_(out, a, b, add)
    elif add:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


define(
    "widening_product_(Tensor(a!) out, Tensor a, Tensor b, bool add) -> ()",
    reference.widening_product_,
    lambda *_: None,
)
LIB.impl("widening_product_", _widening_product_on_cuda, "CUDA")


def _product(out: Tensor, a: Tensor, b: Tensor, add: bool = False) -> None:
    """out = a @ b, or out += a @ b, whose sums are never rounded below the dtype of out."""
    if a.dtype == b.dtype == out.dtype:
        torch.addmm(out, a, b, beta=int(add), out=out)
    elif a.dtype == b.dtype and (a.is_cuda or (a.dtype == torch.bfloat16 and _has_onednn())):
        torch.ops.ppo_kernels.widening_product_(out, a, b, add)
    else:
        reference.widening_product_(out, a, b, add)


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled


def _project(p: _Problem, out: Tensor, x: Tensor, cols: slice) -> None:
    """out = x @ weight[cols].T + bias[cols]"""
    _product(out, x, p.weight[cols].t())
    if p.bias is not None:
        out += p.bias[cols]


def _add_gradients(
    p: _Problem,
    dz: Tensor,
    live: Tensor | None,
    x: Tensor,
    cols: slice,
    d_x: Tensor | None,
    d_w: Tensor | None,
    d_b: Tensor | None,
) -> None:
    """Add what d(logits) of some columns gives to d_x and to the columns' d_w and d_b.

    live: the rows of dz that are not 0; x and d_x have no others.
    """
    if d_b is not None:
        d_b += dz.sum(0, dtype=d_b.dtype)
    dz = dz.to(p.grad_dtype)
    if live is not None:
        dz = dz.index_select(0, live)
    if d_x is not None:
        _product(d_x, dz, p.weight[cols].to(p.grad_dtype), add=True)
    if d_w is not None:
        _product(d_w, dz.t(), x.to(p.grad_dtype), add=True)


class _WeightSums:
    """dW, and the sums of its first rows that all chunks of tokens add to.

    dW of 32 bits is its own sums. One of 16 bits, read as fp32, holds the sums of half of its rows;
    `more` holds those of other rows, and rows from `summed` on have none.
    """

    def __init__(self, p: _Problem) -> None:
        V, H = p.weight.shape
        self.out = p.weight.new_empty((V, H), dtype=_gradient_dtype(p.weight))
        self.own, self.more = self.out, self.out.new_empty((0, H), dtype=p.sum_dtype)
        if self.out.dtype != p.sum_dtype:
            per_sum = p.sum_dtype.itemsize // self.out.itemsize
            half = V // per_sum
            self.own = self.out.view(-1)[: per_sum * half * H].view(p.sum_dtype).view(half, H)
            budget = SUM_BYTES.get(p.weight.device.type, SUM_BYTES["cpu"])
            self.more = self.more.new_empty((min(V - half, budget // (4 * H)), H))
        self.own.zero_()
        self.more.zero_()
        self.summed = self.own.shape[0] + self.more.shape[0]

    def blocks(self, width: int) -> Iterator[tuple[slice, Tensor | None]]:
        """(columns, sums of their rows of dW or None) in order, over the vocabulary."""
        half = self.own.shape[0]
        for cols in _slices(half, width):
            yield cols, self.own[cols]
        for cols in _slices(self.summed, width, half):
            yield cols, self.more[cols.start - half : cols.stop - half]
        for cols in _slices(self.out.shape[0], width, self.summed):
            yield cols, None

    def round(self, width: int) -> None:
        """From sums to dW in place. Front to back, a block is read before its memory is needed."""
        if self.own is not self.out:
            for cols, sums in self.blocks(width):
                if sums is not None:
                    self.out[cols] = sums.to(self.out.dtype)
            self.own = self.more = None


# ------------------------------------------------------------------------------ the two ways


def _chunks(p: _Problem) -> Iterator[tuple[slice | Tensor, Tensor, Tensor]]:
    """By rows: (which rows, their hidden, their logits in the buffer), ignored rows left out."""
    rows, V = p.where(p.labels != p.ignore_index), p.weight.shape[0]
    n = p.labels.numel() if rows is None else rows.numel()
    step = -(-n // max(1, -(-n // p.chunk_tokens)))
    buffer = p.hidden.new_empty(step * V, dtype=p.logits_dtype)
    for _, part in p.parts(rows, max(1, step)):
        x = p.hidden[part].to(p.gemm_dtype)
        z = buffer[: x.shape[0] * V].view(-1, V)
        _project(p, z, x, slice(0, V))
        yield part, x, z


# (rows, logp, entropy) -> d(loss)/d(logp), and d(loss)/d(entropy) or None
RowGradients = Callable[[slice | Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def _by_rows(
    p: _Problem, need: tuple[bool, ...], row_gradients: RowGradients
) -> tuple[Tensor, ...]:
    """(logp, entropy, d_hidden, d_weight, d_bias) of a loss that knows its own gradients."""
    N, (V, H) = p.labels.numel(), p.weight.shape
    d_hidden = p.hidden.new_zeros((N, H) if need[0] else 0, dtype=_gradient_dtype(p.hidden))
    d_bias = p.hidden.new_zeros(V if need[2] else 0, dtype=p.sum_dtype)
    d_weight = _WeightSums(p) if need[1] else None
    logp, entropy, *softmax, g, h = _visit_rows(
        p, row_gradients if any(need) else None, d_hidden, d_weight, d_bias
    )
    if d_weight is None:
        return logp, entropy, d_hidden, p.weight.new_empty(0), d_bias
    d_weight.round(p.width(0, True))
    if d_weight.summed < V:
        _by_columns(p, g, h, (*softmax, entropy), None, None, d_weight.out, None, d_weight.summed)
    return logp, entropy, d_hidden, d_weight.out, d_bias


def _visit_rows(
    p: _Problem,
    row_gradients: RowGradients | None,
    d_hidden: Tensor,
    d_weight: _WeightSums | None,
    d_bias: Tensor,
) -> Tensor:
    """[6, N]: logp, entropy, row_max, log_sum, and the loss's gradients for the first two."""
    table = p.hidden.new_zeros((6, p.labels.numel()), dtype=p.sum_dtype)
    for part, x, z in _chunks(p):
        labels, transform = p.labels[part], p.transform(part)
        *found, _ = torch.ops.ppo_kernels.logprobs_fwd(z, labels, *transform, True, False)
        if row_gradients is not None:
            logp, entropy, *softmax = found
            g, h = row_gradients(part, logp, entropy)
            torch.ops.ppo_kernels.logprobs_bwd_(
                z, g, h, labels, *transform, *softmax, entropy, None
            )
            found += [g, torch.zeros_like(g) if h is None else h]
            live = _is_live(g, h)
            x = p.without_dead(x, live)
            _chunk_gradients(p, part, x, z, p.where(live), d_hidden, d_weight, d_bias)
        table[: len(found), part] = torch.stack(found)
    return table


def _is_live(g: Tensor | None, h: Tensor | None) -> Tensor:
    """Rows with a gradient; NaN is one."""
    if g is None or h is None:
        return (h if g is None else g) != 0
    return (g != 0) | (h != 0)


def _chunk_gradients(
    p: _Problem,
    part: slice | Tensor,
    x: Tensor,
    dz: Tensor,
    live: Tensor | None,
    d_hidden: Tensor,
    d_weight: _WeightSums | None,
    d_bias: Tensor,
) -> None:
    """The two GEMMs of a chunk, over its live rows only (None: all)."""
    if live is not None:
        part, x = live + part.start if isinstance(part, slice) else part[live], x[live]
    d_x = x.new_zeros(x.shape, dtype=p.sum_dtype) if d_hidden.numel() else None
    width, V = p.width(dz.shape[0], p.weight.dtype != p.grad_dtype), p.weight.shape[0]
    blocks = ((c, None) for c in _slices(V, width)) if d_weight is None else d_weight.blocks(width)
    for cols, d_w in blocks:
        d_b = d_bias[cols] if d_bias.numel() else None
        _add_gradients(p, dz[:, cols], live, x, cols, d_x, d_w, d_b)
    if d_x is not None:
        d_hidden[part] = d_x.to(d_hidden.dtype)


def _by_columns(
    p: _Problem,
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
    softmax: tuple[Tensor | None, ...],
    shard: Tensor | None,
    d_hidden: Tensor | None,
    d_weight: Tensor | None,
    d_bias: Tensor | None,
    first: int = 0,
) -> None:
    """Fill d_weight and d_bias from column `first` on, and d_hidden with what these columns give.

    softmax: row_max, log_sum, entropy. shard: as in logprobs_bwd. An output None is not wanted.
    """
    (V, H), size = p.weight.shape, p.logits_dtype.itemsize
    live = _is_live(grad_logp, grad_entropy) & (p.labels != p.ignore_index)
    rows = p.where(live)
    n = p.labels.numel() if rows is None else rows.numel()
    budget = p.chunk_tokens * V * size
    step = max(1, min(n, max(p.chunk_tokens, math.isqrt(budget // size))))
    width = max(1, min(V - first, budget // (step * (size + p.grad_dtype.itemsize) + 8 * H)))
    buffer = p.hidden.new_empty(step * width, dtype=p.logits_dtype)
    d_x = None if d_hidden is None else p.hidden.new_zeros((n, H), dtype=p.sum_dtype)
    shard = torch.arange(2, device=p.weight.device) * V if shard is None else shard
    per_row = (grad_logp, grad_entropy, *softmax)
    for cols in _slices(V, width, first):
        d_w = None if d_weight is None else d_weight[cols].to(p.sum_dtype).zero_()
        d_b = None if d_bias is None else d_bias[cols].zero_()
        here = shard.clone()
        here[0] += cols.start
        for at, part in p.parts(rows, step):
            x = p.without_dead(p.hidden[part].to(p.gemm_dtype), live[part])
            z = buffer[: x.shape[0] * (cols.stop - cols.start)].view(x.shape[0], -1)
            _project(p, z, x, cols)
            g, h, *sums = (None if t is None else t[part] for t in per_row)
            torch.ops.ppo_kernels.logprobs_bwd_(
                z, g, h, p.labels[part], *p.transform(part), *sums, here
            )
            _add_gradients(p, z, None, x, cols, None if d_x is None else d_x[at], d_w, d_b)
        if d_w is not None and d_w.dtype != d_weight.dtype:
            d_weight[cols] = d_w.to(d_weight.dtype)
    if d_hidden is not None:
        d_hidden.zero_()
        d_hidden[slice(None) if rows is None else rows] = d_x


# --------------------------------------------------------------------------------------- ops


def _plain(op: Callable[..., Any]) -> Callable[..., Any]:
    """Autocast would cast the GEMMs' inputs and trip over their outputs; dtypes are settled."""

    @functools.wraps(op)
    def run(hidden: Tensor, *args: Any) -> Any:
        with torch.autocast(hidden.device.type, enabled=False):
            return op(hidden, *args)

    return run


@_plain
def _partials(*args: Any) -> Tensor:
    *args, shard = args
    p = _Problem(*args)
    out = p.hidden.new_zeros((p.labels.numel(), 4), dtype=p.sum_dtype)
    for part, _, z in _chunks(p):
        out[part] = torch.ops.ppo_kernels.logprobs_partials(
            z, p.labels[part], *p.transform(part), shard, False
        )
    return out


@_plain
def _gradients(*args: Any) -> tuple[Tensor, ...]:
    p, (g, h, *softmax, shard) = _Problem(*args[:12]), args[12:18]
    outputs = _empty_gradients(p, args[18:], p.sum_dtype)
    wanted = (out if need else None for out, need in zip(outputs, args[18:]))
    _by_columns(p, g, h, tuple(softmax), shard, *wanted)
    return outputs


@_plain
def _lm_loss(*args: Any) -> tuple[Tensor, ...]:
    p, (normalizer, denominator, *need) = _Problem(*args[:12]), args[12:]
    trained = (p.labels != p.ignore_index).to(p.sum_dtype)
    n = denominator if normalizer is None else normalizer
    coefs = reference.token_coefs(trained, "token-mean", n)
    logp, _, *gradients = _by_rows(p, tuple(need), lambda part, *_: (-coefs[part], None))
    return -(coefs * logp).sum(), *gradients


@_plain
def _ppo_loss(*args: Any) -> tuple[Tensor, ...]:
    p, args = _Problem(*args[:12]), args[12:]
    terms, need = dict(zip(TERM_NAMES, args)), args[-4:]
    names = ("old_logprobs", "advantages", "ref_logprobs", "rollout_logprobs")
    per_row = {n: terms[n].reshape(-1) for n in names if terms[n] is not None}
    per_row["mask"] = _coefs(terms, p.sum_dtype).reshape(-1)
    # A chunk's gradients: a sum with the coefficients of the whole as its weights.
    rest = ("values", "old_values", "returns", "normalizer", "cu_seqlens")
    fixed = {**terms, **dict.fromkeys(rest), "reduction": "sum", "denominator": 1.0}
    with_entropy = terms["ent_coef"] != 0

    def row_gradients(part: Any, logp: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor | None]:
        rows = {**fixed, **{name: x[part] for name, x in per_row.items()}}
        _, _, g, _, h = torch.ops.ppo_kernels.ppo_loss(
            logp, entropy, *(rows[n] for n in TERM_NAMES), True, False, with_entropy
        )
        return g, h if with_entropy else None

    logp, entropy, *gradients = _by_rows(p, need[:3], row_gradients)
    like = terms["old_logprobs"]
    loss, stats, _, d_values, _ = torch.ops.ppo_kernels.ppo_loss(
        logp.view(like.shape), entropy.view(like.shape), *terms.values(), False, need[3], False
    )
    return loss, stats, *gradients, d_values


def _coefs(terms: dict[str, Any], dtype: torch.dtype) -> Tensor:
    mask, like = terms["mask"], terms["old_logprobs"]
    weight = torch.ones_like(like, dtype=dtype) if mask is None else mask.to(dtype)
    normalizer = terms["denominator"] if terms["normalizer"] is None else terms["normalizer"]
    return reference.token_coefs(weight, terms["reduction"], normalizer, terms["cu_seqlens"])


def _empty_gradients(
    p: _Problem, need: tuple[bool, ...], hidden_dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    (V, H), N = p.weight.shape, p.labels.numel()
    hidden_dtype = hidden_dtype or _gradient_dtype(p.hidden)
    return (
        p.hidden.new_empty((N, H) if need[0] else 0, dtype=hidden_dtype),
        p.weight.new_empty((V, H) if need[1] else 0, dtype=_gradient_dtype(p.weight)),
        p.weight.new_empty(V if need[2] else 0, dtype=p.sum_dtype),
    )


def _partials_fake(*args: Any) -> Tensor:
    p = _Problem(*args[:12])
    return p.hidden.new_empty((p.labels.numel(), 4), dtype=p.sum_dtype)


def _gradients_fake(*args: Any) -> tuple[Tensor, ...]:
    p = _Problem(*args[:12])
    return _empty_gradients(p, args[18:], p.sum_dtype)


def _lm_loss_fake(*args: Any) -> tuple[Tensor, ...]:
    p = _Problem(*args[:12])
    return p.hidden.new_empty((), dtype=p.sum_dtype), *_empty_gradients(p, args[14:])


def _ppo_loss_fake(*args: Any) -> tuple[Tensor, ...]:
    p, like = _Problem(*args[:12]), dict(zip(TERM_NAMES, args[12:]))["old_logprobs"]
    loss = p.hidden.new_empty((), dtype=p.sum_dtype)
    stats = loss.new_empty(len(reference.STAT_NAMES))
    d_values = loss.new_empty(like.shape if args[-1] else 0)
    return loss, stats, *_empty_gradients(p, args[-4:-1]), d_values


# [N, 4]: max, sum, weighted sum and the label's z of each row, 0 for ignored rows.
define(f"hidden_partials({PROBLEM}, Tensor shard) -> Tensor", _partials, _partials_fake)
define(
    f"hidden_gradients({PROBLEM}, Tensor? grad_logprobs, Tensor? grad_entropy, Tensor row_max, "
    f"Tensor log_sum, Tensor? entropy, Tensor shard, {NEED}) -> ({GRADIENTS})",
    _gradients,
    _gradients_fake,
)
define(
    f"hidden_lm_loss({PROBLEM}, Tensor? normalizer, float? denominator, {NEED}) -> "
    f"(Tensor loss, {GRADIENTS})",
    _lm_loss,
    _lm_loss_fake,
)
define(
    f"hidden_ppo_loss({PROBLEM}, {TERMS}, {NEED}, bool need_values) -> "
    f"(Tensor loss, Tensor stats, {GRADIENTS}, Tensor d_values)",
    _ppo_loss,
    _ppo_loss_fake,
)


# ---------------------------------------------------------------------------------- autograd


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, group: Any, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        problem = (hidden, weight, bias, *rest)
        labels, ignore_index = rest[0], rest[5]
        shard = shard_of(weight.shape[0], weight.device, group)
        partials = torch.ops.ppo_kernels.hidden_partials(*problem, shard)
        logp, entropy, row_max, log_sum = merged_partials(
            partials, labels, ignore_index, shard, group
        )
        ctx.save_for_backward(hidden, weight, bias, *rest[:2], row_max, log_sum, entropy, shard)
        ctx.numbers, ctx.group = rest[2:], group
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None) -> Any:
        nothing = (None,) * (3 + len(ctx.numbers))
        if grad_logp is None and grad_entropy is None:
            return None, None, None, *nothing
        hidden, weight, bias, labels, temperatures, row_max, *others = ctx.saved_tensors
        gradients = (
            None if g is None else g.to(row_max.dtype).contiguous()
            for g in (grad_logp, grad_entropy)
        )
        need = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
        found = torch.ops.ppo_kernels.hidden_gradients(
            hidden,
            weight,
            bias,
            labels,
            temperatures,
            *ctx.numbers,
            *gradients,
            row_max,
            *others,
            *need,
        )
        if ctx.group is not None and need[0]:
            # Each rank has the part of its columns.
            dist.all_reduce(found[0], group=ctx.group)
        inputs = (hidden, weight, bias)
        d = (g.to(x.dtype) if wanted else None for g, x, wanted in zip(found, inputs, need))
        return *d, *nothing


# -------------------------------------------------------------------------- public functions


def logprobs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    chunk_tokens: int | None = None,
    logits_dtype: torch.dtype | None = None,
    compact: bool = True,
    tp_group: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`logprobs_from_logits(hidden @ weight.T + bias, labels)` without the logits.

    hidden [.., H], weight [V, H], bias [V], labels [..]; hidden and weight fp32, bf16, fp16 (fp64
    on CPU), of two dtypes if they are: GEMMs run in the wider one, under autocast in its dtype.
    The other arguments and the results are those of logprobs_from_logits, which says what a label
    out of range, a masked column or a NaN does. Differentiable in hidden, weight and bias.

    Cost: forward 2 N H V flops, backward 2 N H V for the logits once more and as much again for
    each of d(hidden) and d(weight) that is wanted; what is frozen costs nothing.

    chunk_tokens: rows of logits [chunk_tokens, V] that exist at a time; None: about 200 MB of them.
    logits_dtype: their dtype. None: fp32, in which GEMMs add up; torch.bfloat16 (of bf16 inputs
        only) is faster and rounds every logit to 8 bits, an error of up to 0.06 at 32.
    compact: leave rows with an ignored label, and backward those without a gradient, out of the
        GEMMs. On CUDA the host waits for their number, once forward and once backward. False does
        all rows and waits for nothing; the results are the same.
    tp_group: a process group whose ranks hold consecutive rows of weight (and bias) in rank order,
        of any sizes, and the same hidden and labels: one all_gather of 16 bytes per token forward,
        one all_reduce of d(hidden) in fp32 backward.

    A weight that is a DTensor is gathered, its gradient averaged over the ranks as FSDP does.
    ValueError or TypeError for wrong shapes, dtypes or devices.
    """
    _check_weight(weight, bias, tp_group)
    args = _problem(
        hidden,
        weight,
        labels,
        bias,
        temperature,
        logit_scale,
        softcap,
        ignore_index,
        chunk_tokens,
        logits_dtype,
        compact,
    )
    logp, entropy = _Logprobs.apply(*args[:3], tp_group, *args[3:])
    logp = logp.view(labels.shape)
    return (logp, entropy.view(labels.shape)) if return_entropy else logp


def lm_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    normalizer: float | Tensor | None = None,
    chunk_tokens: int | None = None,
    logits_dtype: torch.dtype | None = None,
    compact: bool = True,
    tp_group: Any = None,
) -> Tensor:
    """`-sum logp(label) / n` over the n labels that are not ignored (PPO-ptx, SFT), 0-d fp32.

    normalizer, a number or 0-d tensor, replaces n, so that micro-batches add up to the full batch.
    No label: 0. The other arguments are those of logprobs_from_hidden.

    Cost: 6 N H V flops, all in forward, where each chunk of logits becomes its gradient at once;
    backward only scales. With tp_group it is that of logprobs_from_hidden.
    """
    _check_weight(weight, bias, tp_group)
    _check_normalizer(normalizer, hidden)
    args = _problem(
        hidden,
        weight,
        labels,
        bias,
        temperature,
        logit_scale,
        softcap,
        ignore_index,
        chunk_tokens,
        logits_dtype,
        compact,
    )
    if tp_group is not None:
        logp, _ = _Logprobs.apply(*args[:3], tp_group, *args[3:])
        trained = (args[3] != ignore_index).to(logp.dtype)
        return reference.aggregate(-logp, trained, "token-mean", normalizer)
    on_device, need = isinstance(normalizer, Tensor), needs(*args[:3])
    with torch.no_grad():
        loss, *gradients = torch.ops.ppo_kernels.hidden_lm_loss(
            *args,
            normalizer.double() if on_device else None,
            None if on_device else normalizer,
            *need,
        )
    return with_gradients(loss, args[:3], gradients)


def ppo_loss_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    values: Tensor | None = None,
    chunk_tokens: int | None = None,
    logits_dtype: torch.dtype | None = None,
    compact: bool = True,
    tp_group: Any = None,
    **options: Any,
) -> PPOLoss:
    """`ppo_loss` of the log-probs and entropy of logprobs_from_hidden(hidden, weight, labels).

    hidden [.., H], labels and every per-token tensor [..], as in logprobs_from_hidden and
    ppo_loss, which document the arguments; options are ppo_loss's. A token with mask 0 or label
    -100 is not read. Differentiable in hidden, weight, bias and values.

    Cost: 6 N H V flops, all in forward: denominators depend on the mask alone, so that each chunk
    of logits yields its log-probs, the loss's gradient and d(logits) at once, and backward only
    scales. Without anything to differentiate it is 2 N H V. A bf16 weight needs fp32 sums for its
    gradient; they fill the memory of d(weight), which holds half of them, and at most 1 GiB more
    on CUDA: for the rows of weight left over the logits are made again (at most 1 N H V more). With
    tp_group the cost is that of logprobs_from_hidden.

    compact: tokens that are not trained leave before any GEMM, and tokens whose gradient is
        exactly 0 (clipped; no advantage and neither entropy nor KL term) before the backward
        GEMMs. On CUDA the host waits for their numbers, once and once per chunk; False does
        without.
    """
    _check_weight(weight, bias, tp_group)
    unknown = [name for name in options if name not in _LOSS_OPTIONS]
    if unknown:
        raise TypeError(f"ppo_loss_from_hidden got an unexpected keyword {unknown[0]!r}")
    labels, mask = trained(labels, mask)
    args = _problem(
        hidden,
        weight,
        labels,
        bias,
        temperature,
        logit_scale,
        softcap,
        -100,
        chunk_tokens,
        logits_dtype,
        compact,
    )
    if tp_group is not None:
        logp, entropy = _Logprobs.apply(*args[:3], tp_group, *args[3:])
        logp, entropy = logp.view(labels.shape), entropy.view(labels.shape)
        tokens = (logp, old_logprobs, advantages, mask)
        return ppo_loss(*tokens, values=values, entropy=entropy, **options)
    options = {**_LOSS_OPTIONS, **options, "values": values}
    options |= {"old_logprobs": old_logprobs, "advantages": advantages, "mask": mask}
    check_options(labels, "labels", options)
    inputs = [*args[:3], values]
    need = needs(*inputs)
    with torch.no_grad():
        # Its dtype is that of the log-probs.
        like = hidden.new_empty(0, dtype=_sum_dtype(*args[:2]))
        loss, stats, *gradients = torch.ops.ppo_kernels.hidden_ppo_loss(
            *args, *loss_terms(options, like), *need
        )
    return PPOLoss(with_gradients(loss, inputs, gradients), LossStats(stats))


_LOSS_OPTIONS = {k: v for k, v in ppo_loss.__kwdefaults__.items() if k != "entropy"}


def _problem(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    chunk_tokens: int | None,
    logits_dtype: torch.dtype | None,
    compact: bool,
) -> list[Any]:
    """The checked arguments in the order of PROBLEM, rows flattened."""
    refuse_transforms()
    weight, bias = gathered(weight), gathered(bias)
    _check_shapes(hidden, weight, labels, bias)
    temperature = check_temperature(temperature, labels)
    _checks.number("logit_scale", logit_scale, 0, above=True)
    if softcap is not None:
        _checks.number("softcap", softcap, 0, above=True)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an integer, got {type(ignore_index).__name__}")
    hidden, weight, bias = (_as_autocast(x) for x in (hidden, weight, bias))
    H = hidden.shape[-1]
    hidden, labels = hidden.reshape(-1, H), labels.reshape(-1).contiguous()
    logits_dtype = _logits_dtype(logits_dtype, hidden, weight)
    temperatures = None
    if isinstance(temperature, Tensor):
        temperatures = temperature.detach().to(_sum_dtype(hidden, weight)).reshape(-1).contiguous()
        temperature = 1.0
    return [
        hidden,
        weight,
        bias,
        labels,
        temperatures,
        temperature,
        float(logit_scale),
        float(softcap or 0),
        ignore_index,
        _chunk_tokens(chunk_tokens, weight, logits_dtype),
        logits_dtype,
        bool(compact),
    ]


def _as_autocast(x: Tensor | None) -> Tensor | None:
    """As F.linear would see it: cast once where autocast is on."""
    if x is None or x.is_meta or x.dtype == torch.float64:
        return x
    if not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def gathered(x: Tensor | None) -> Tensor | None:
    """The full tensor of a DTensor, whose gradient is averaged over the ranks as by FSDP: right
    for ranks that saw different rows, and for ranks that did the same work."""
    if x is None or not hasattr(x, "full_tensor"):
        return x
    from torch.distributed.tensor import Partial

    return x.full_tensor(grad_placements=[Partial("avg")] * x.device_mesh.ndim)


def _logits_dtype(asked: torch.dtype | None, hidden: Tensor, weight: Tensor) -> torch.dtype:
    default = _sum_dtype(hidden, weight)
    if asked is None or asked == default:
        return default
    if asked != torch.bfloat16:
        raise ValueError(f"logits_dtype must be None, {default} or torch.bfloat16, got {asked}")
    if not hidden.dtype == weight.dtype == torch.bfloat16:
        raise ValueError(
            "logits_dtype=torch.bfloat16 needs bfloat16 hidden and weight, got "
            f"{hidden.dtype} and {weight.dtype}"
        )
    return asked


def _chunk_tokens(asked: int | None, weight: Tensor, logits_dtype: torch.dtype) -> int:
    if asked is None:
        row = weight.shape[0] * logits_dtype.itemsize
        if row > WORKSPACE_BYTES:
            raise ValueError(
                f"chunk_tokens: one row of logits has {row} bytes, more than the workspace of "
                f"{WORKSPACE_BYTES}; pass chunk_tokens=1 to allow it"
            )
        return WORKSPACE_BYTES // row
    if isinstance(asked, bool) or not isinstance(asked, int):
        raise TypeError(f"chunk_tokens must be an integer, got {type(asked).__name__}")
    if asked < 1:
        raise ValueError(f"chunk_tokens must be >= 1, got {asked}")
    return asked


def _check_weight(weight: Any, bias: Any, tp_group: Any) -> None:
    _checks.group("tp_group", tp_group)
    for name, x in (("weight", weight), ("bias", bias)):
        if tp_group is not None and hasattr(x, "full_tensor"):
            raise TypeError(
                f"{name} must be this rank's plain tensor with tp_group, got a DTensor: pass "
                f"{name}.to_local(), or leave tp_group out to have it gathered"
            )


def _check_shapes(hidden: Any, weight: Any, labels: Any, bias: Any) -> None:
    for name, x in (("hidden", hidden), ("labels", labels)):
        if hasattr(x, "full_tensor"):
            raise TypeError(f"{name} must be a plain tensor, got a DTensor: pass {name}.to_local()")
    _checks.tensor("hidden", hidden, _checks.FLOATS)
    _checks.tensor("weight", weight, _checks.FLOATS)
    _checks.tensor("labels", labels, _checks.INDICES)
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(
            f"weight must have shape [V, H], got {tuple(weight.shape)}; a parameter sharded by "
            "FSDP1 or ZeRO-3 must be gathered first"
        )
    if hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden must have shape [.., H] with H = {weight.shape[1]} of weight, "
            f"got {tuple(hidden.shape)}"
        )
    _checks.shape("labels", labels, tuple(hidden.shape[:-1]), "hidden without its last dimension")
    if bias is not None:
        _checks.tensor("bias", bias, _checks.FLOATS)
        _checks.shape("bias", bias, (weight.shape[0],), "the rows of weight")
    for name, x in (("weight", weight), ("labels", labels), ("bias", bias)):
        if x is not None:
            _checks.same_device(name, x, hidden.device, "hidden")
    if hidden.is_cuda and torch.float64 in (hidden.dtype, weight.dtype):
        raise TypeError("hidden and weight must not be float64 on cuda")


def _check_normalizer(normalizer: Any, hidden: Tensor) -> None:
    if isinstance(normalizer, Tensor):
        _checks.shape("normalizer", normalizer, (), "a number")
        _checks.same_device("normalizer", normalizer, hidden.device, "hidden")
    elif normalizer is not None:
        _checks.number("normalizer", normalizer, 0, above=True)
