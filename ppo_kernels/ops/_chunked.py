"""Softmax sums and gradients of `hidden @ weight.T` [N, V], a bounded piece of which exists.

There are two ways through the logits, each over one buffer that is reused:

* by rows, some whole rows at a time: forward, where a softmax needs all of its row. A loss knows
  d(logits) as soon as the sums of the row are known, so both backward GEMMs run while the chunk is
  still there: 6 N H V flops for forward and backward. Every chunk adds to all of dW.
* by columns, once the sums of all rows are known. The logits are made again, 2 N H V flops more,
  and each row of dW is finished before the next begins.

A bf16 dW needs wider sums while chunks add to it. On CUDA they are fp32: half of them in the memory
of dW, the others elsewhere. On a CPU they are fp32 within a chunk and have 24 bits from one chunk
to the next (and after every 1024 rows of a larger one): fp32 without its last 8 bits, an error of
2^-16 at most each time, where the one rounding to bf16 makes up to 2^-8. Beside dW they need a byte
a number. With fp32 sums a third of dW would find no room in 300 MB, and what finds none is done by
columns.

What a loss holds beyond inputs and gradients on a CPU, in MB, where one row has V = 151936 logits
and H = 896 inputs:

    logits of a chunk of rows, fp32                WORKSPACE_BYTES            252
    bf16: the same, and sums of dW                 SHARED_BYTES         140 + 136
    rows left out, fp16: a copied block of columns BLOCK_BYTES                  8
    d(hidden) and hidden of the chunk              8 H bytes per row            2
    bf16: packed factors and sums of a product     3 MB per thread              6
    row sums and the loss's gradients for them     24 N bytes                   0

bf16 gradients of the logits take the place of the fp32 logits, so that GEMMs need no copy of them.
By columns, for the rows of a bf16 dW that have no sums, the buffer shares the workspace with the
rows of dW in fp32.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppo_kernels import reference
from ppo_kernels.ops._library import LIB, define
from ppo_kernels.ops.logprobs import in_bf16

# The logits that exist at a time, where chunk_tokens does not say; on a CPU, those and the sums of
# a bf16 dW.
WORKSPACE_BYTES = 240 * 2**20
SHARED_BYTES = 264 * 2**20
# Copies of some of their columns. A GPU wants few large launches.
BLOCK_BYTES = {"cpu": 8 * 2**20, "cuda": 128 * 2**20}
# Sums of a 16-bit dW beyond what fits into dW itself. The rows of dW left over are done by columns.
SUM_BYTES = {"cpu": 130 * 2**20, "cuda": 2**30}
# Bytes between the beginnings of tensors that share memory.
ALIGNED = 64


class Problem(NamedTuple):
    """The arguments that all ops on hidden states begin with; one row per token."""

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
        return sum_dtype(self.hidden, self.weight)

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

    def columns(self, bytes_each: int) -> int:
        """How many columns a block has whose columns take `bytes_each` bytes."""
        budget = BLOCK_BYTES.get(self.weight.device.type, BLOCK_BYTES["cpu"])
        return max(1, budget // bytes_each)


def sum_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Of sums, of the log-probs and, unless asked otherwise, of the logits."""
    wide = torch.float64 in (hidden.dtype, weight.dtype)
    return torch.float64 if wide else torch.float32


def gradient_dtype(x: Tensor) -> torch.dtype:
    """fp16 gradients stay fp32 until the loss scale comes in."""
    return torch.float32 if x.dtype == torch.float16 else x.dtype


def workspace_bytes(weight: Tensor, loss: bool) -> int:
    """What the logits of a chunk may take, in a loss or where gradients come later."""
    if not (loss and weight.requires_grad and _splits(weight)):
        return WORKSPACE_BYTES
    return SHARED_BYTES - min(weight.numel(), SUM_BYTES["cpu"])


def _splits(weight: Tensor) -> bool:
    """Whether sums of dW have 24 bits."""
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu"


def _slices(n: int, step: int, first: int = 0) -> Iterator[slice]:
    for start in range(first, n, step):
        yield slice(start, min(start + step, n))


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
define(
    "split_product_(Tensor(a!) high, Tensor(b!) low, Tensor a, Tensor b, bool add, bool last) "
    "-> ()",
    reference.split_product_,
    lambda *_: None,
)


def _product(out: Tensor, a: Tensor, b: Tensor, add: bool = False) -> None:
    """out = a @ b, or out += a @ b, whose sums are never rounded below the dtype of out."""
    if a.dtype == b.dtype == out.dtype:
        torch.addmm(out, a, b, beta=int(add), out=out)
    elif a.dtype == b.dtype and (a.is_cuda or (a.dtype == torch.bfloat16 and _has_onednn())):
        torch.ops.ppo_kernels.widening_product_(out, a, b, add)
    else:
        reference.widening_product_(out, a, b, add)


def _split_product(high: Tensor, low: Tensor, a: Tensor, b: Tensor, add: bool, last: bool) -> None:
    in_bf16 = a.dtype == b.dtype == torch.bfloat16 and _has_onednn()
    op = torch.ops.ppo_kernels.split_product_ if in_bf16 else reference.split_product_
    op(high, low, a, b, add, last)


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled


def _project(p: Problem, out: Tensor, x: Tensor, cols: slice) -> None:
    """out = x @ weight[cols].T + bias[cols]"""
    _product(out, x, p.weight[cols].t())
    if p.bias is not None:
        out += p.bias[cols]


# ----------------------------------------------------------------------------------- by rows


def row_parts(p: Problem) -> list[slice | Tensor]:
    """The rows whose labels are not ignored, in chunks of equal size but for the last."""
    rows = p.where(p.labels != p.ignore_index)
    n = p.labels.numel() if rows is None else rows.numel()
    step = -(-n // max(1, -(-n // p.chunk_tokens)))
    return [part for _, part in p.parts(rows, max(1, step))]


def chunks(
    p: Problem, parts: list[slice | Tensor]
) -> Iterator[tuple[slice | Tensor, Tensor, Tensor]]:
    """(which rows, their hidden, their logits); the logits of all chunks share one memory."""
    V, buffer = p.weight.shape[0], None
    for part in parts:
        x = p.hidden[part].to(p.gemm_dtype)
        if buffer is None:
            buffer = p.hidden.new_empty(x.shape[0] * V, dtype=p.logits_dtype)
        z = buffer[: x.shape[0] * V].view(-1, V)
        _project(p, z, x, slice(0, V))
        yield part, x, z


def _narrows(p: Problem, exact: bool) -> bool:
    """Whether d(logits) is made in bf16 where the fp32 logits were, with nothing to copy later."""
    dtypes = (p.logits_dtype, p.grad_dtype)
    on_cpu = p.weight.device.type == "cpu"
    return on_cpu and not exact and dtypes == (torch.float32, torch.bfloat16)


def _backward_(p: Problem, z: Tensor, *args: Any, exact: bool) -> Tensor:
    """d(logits) in the memory of z; exact: not rounded beyond the dtype of z, for d(bias)."""
    if not _narrows(p, exact):
        torch.ops.ppo_kernels.logprobs_bwd_(z, *args)
        return z
    torch.ops.ppo_kernels.logprobs_bwd_bf16_(z, *args)
    return in_bf16(z)


# (rows, logp, entropy) -> d(loss)/d(logp), and d(loss)/d(entropy) or None
RowGradients = Callable[[slice | Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def by_rows(p: Problem, need: tuple[bool, ...], row_gradients: RowGradients) -> tuple[Tensor, ...]:
    """(logp, entropy, d_hidden, d_weight, d_bias) of a loss that knows its own gradients."""
    parts, room = row_parts(p), None
    gradients = _Gradients(p, need)
    # logp, entropy, row_max, log_sum, and the loss's gradients for the first two
    table = p.hidden.new_zeros((6, p.labels.numel()), dtype=p.sum_dtype)
    for part, x, z in chunks(p, parts):
        room = z if room is None else room  # the first chunk has the most rows
        labels, transform = p.labels[part], p.transform(part)
        *found, _ = torch.ops.ppo_kernels.logprobs_fwd(z, labels, *transform, True, False)
        if any(need):
            logp, entropy, *softmax = found
            g, h = row_gradients(part, logp, entropy)
            args = (g, h, labels, *transform, *softmax, entropy, None)
            dz = _backward_(p, z, *args, exact=need[2])
            live = _is_live(g, h)
            last = part is parts[-1]
            gradients.add(part, p.without_dead(x, live), dz, p.where(live), last)
            found += [g, torch.zeros_like(g) if h is None else h]
        table[: len(found), part] = torch.stack(found)
    gradients.finish(table, room)
    d_weight = p.weight.new_empty(0) if gradients.weight is None else gradients.weight.out
    return table[0], table[1], gradients.hidden, d_weight, gradients.bias


def _is_live(g: Tensor | None, h: Tensor | None) -> Tensor:
    """Rows with a gradient; NaN is one."""
    if g is None or h is None:
        return (h if g is None else g) != 0
    return (g != 0) | (h != 0)


class _Gradients:
    """The gradients that chunks of rows add to, and memory for blocks of d(logits)."""

    def __init__(self, p: Problem, need: tuple[bool, ...]) -> None:
        (N, H), V = p.hidden.shape, p.weight.shape[0]
        self.p, self.block, self.selected = p, None, None
        self.hidden = p.hidden.new_zeros((N, H) if need[0] else 0, dtype=gradient_dtype(p.hidden))
        sums = _SplitSums if _splits(p.weight) else _WideSums
        self.weight = sums(p) if need[1] else None
        self.bias = p.hidden.new_zeros(V if need[2] else 0, dtype=p.sum_dtype)

    def add(
        self, part: slice | Tensor, x: Tensor, dz: Tensor, live: Tensor | None, last: bool
    ) -> None:
        """What d(logits) of the chunk's rows gives; live: those that are not 0, None for all.
        last: no other chunk follows."""
        p = self.p
        if live is not None:
            part, x = live + part.start if isinstance(part, slice) else part[live], x[live]
        d_x = x.new_zeros(x.shape, dtype=p.sum_dtype) if self.hidden.numel() else None
        grad_x = x.to(p.grad_dtype)
        for cols in self._blocks(self._width(dz)):
            if self.bias.numel():
                self.bias[cols] += dz[:, cols].sum(0, dtype=self.bias.dtype)
            block = self._copied(dz[:, cols], live)
            if d_x is not None:
                _product(d_x, block, p.weight[cols].to(p.grad_dtype), add=True)
            if self.weight is not None and cols.stop <= self.weight.summed:
                self.weight.add(cols, block.t(), grad_x, last)
        if d_x is not None:
            self.hidden[part] = d_x.to(self.hidden.dtype)
        if self.weight is not None:
            self.weight.begun = True

    def finish(self, table: Tensor, room: Tensor | None) -> None:
        """Round dW, and make its rows that have no sums, with `room` to work in."""
        if self.weight is None:
            return
        self.block = self.selected = None
        d_weight, summed = self.weight.out, self.weight.summed
        self.weight.finish()
        if summed < d_weight.shape[0]:
            _, entropy, *softmax, g, h = table
            softmax.append(entropy)
            by_columns(self.p, g, h, tuple(softmax), d_weight=d_weight, first=summed, room=room)

    def _blocks(self, width: int) -> Iterator[slice]:
        """Columns of the logits in order; the sums of their rows of dW lie side by side."""
        edges = (0, self.p.weight.shape[0]) if self.weight is None else self.weight.edges
        for first, end in itertools.pairwise(edges):
            yield from _slices(end, width, first)

    def _width(self, dz: Tensor) -> int:
        p, rows = self.p, dz.shape[0]
        copies = p.compact * dz.itemsize + (dz.dtype != p.grad_dtype) * p.grad_dtype.itemsize
        wide_weight = (p.weight.dtype != p.grad_dtype) * p.grad_dtype.itemsize
        return p.columns(max(1, rows * copies + p.weight.shape[1] * wide_weight))

    def _copied(self, dz: Tensor, live: Tensor | None) -> Tensor:
        """The live rows of d(logits), as GEMMs want them, in memory that is allocated once."""
        if live is not None:
            self.selected = _room(self.selected, dz, dz.dtype)
            out = self.selected[: live.numel() * dz.shape[1]].view(-1, dz.shape[1])
            dz = torch.index_select(dz, 0, live, out=out)
        if dz.dtype == self.p.grad_dtype:
            return dz
        self.block = _room(self.block, dz, self.p.grad_dtype)
        return self.block[: dz.numel()].view(dz.shape).copy_(dz)


def _room(buffer: Tensor | None, x: Tensor, dtype: torch.dtype) -> Tensor:
    """buffer, or a larger one if x does not fit."""
    if buffer is not None and buffer.numel() >= x.numel():
        return buffer
    return x.new_empty(x.numel(), dtype=dtype)


# Two forms of dW and the sums of its first rows, to which all chunks add. Rows from `summed` on
# have none; between two `edges` sums lie side by side; `begun`: there are some.


class _WideSums:
    """dW of 32 bits is its own sums. One of 16 bits, read as fp32, holds the sums of half of its
    rows; `more` holds those of others."""

    def __init__(self, p: Problem) -> None:
        V, H = p.weight.shape
        self.begun = False
        self.out = p.weight.new_empty((V, H), dtype=gradient_dtype(p.weight))
        self.own, self.more = self.out, self.out.new_empty((0, H), dtype=p.sum_dtype)
        if self.out.dtype != p.sum_dtype:
            per_sum = p.sum_dtype.itemsize // self.out.itemsize
            half = V // per_sum
            self.own = self.out.view(-1)[: per_sum * half * H].view(p.sum_dtype).view(half, H)
            budget = SUM_BYTES.get(p.weight.device.type, SUM_BYTES["cpu"])
            self.more = self.more.new_empty((min(V - half, budget // (4 * H)), H))
        self.summed = self.own.shape[0] + self.more.shape[0]
        self.edges = (0, self.own.shape[0], self.summed, V)
        self.width = p.columns(4 * H)

    def add(self, cols: slice, dz: Tensor, x: Tensor, last: bool) -> None:
        _product(self._of(cols), dz, x, add=self.begun)

    def finish(self) -> None:
        """From sums to dW in place. Front to back, a block is read before its memory is needed."""
        if not self.begun:
            self.out.zero_()
        elif self.own is not self.out:
            for first, end in itertools.pairwise(self.edges[:3]):
                for cols in _slices(end, self.width, first):
                    self.out[cols] = self._of(cols).to(self.out.dtype)
        self.own = self.more = None

    def _of(self, cols: slice) -> Tensor:
        half = self.own.shape[0]
        if cols.stop <= half:
            return self.own[cols]
        return self.more[cols.start - half : cols.stop - half]


class _SplitSums:
    """dW in bf16 holds the upper 16 of the 24 bits of its sums. The other 8 lie in the memory of
    rows without sums and in `more`."""

    def __init__(self, p: Problem) -> None:
        V, H = p.weight.shape
        self.begun = False
        self.out = p.weight.new_empty((V, H))
        budget = SUM_BYTES["cpu"] // H
        self.summed = min(V, (2 * V + budget) // 3)
        self.inside = min(self.summed, 2 * (V - self.summed))
        low = self.out[self.summed :].view(-1).view(torch.uint8)
        self.low = low[: self.inside * H].view(-1, H)
        self.more = low.new_empty((self.summed - self.inside, H))
        self.edges = (0, self.inside, self.summed, V)

    def add(self, cols: slice, dz: Tensor, x: Tensor, last: bool) -> None:
        inside = self.inside
        if cols.stop <= inside:
            low = self.low[cols]
        else:
            low = self.more[cols.start - inside : cols.stop - inside]
        _split_product(self.out[cols], low, dz, x, self.begun, last)

    def finish(self) -> None:
        """The last chunk has rounded the sums."""
        if not self.begun:
            self.out.zero_()
        self.low = self.more = None


# -------------------------------------------------------------------------------- by columns


def _carved(
    room: Tensor | None, like: Tensor, width: int, each: tuple[tuple[int, torch.dtype], ...]
) -> list[Tensor]:
    """Flat tensors of n * width numbers for every (n, dtype), in `room` if they fit."""
    sizes = [-(-n * width * dtype.itemsize // ALIGNED) * ALIGNED for n, dtype in each]
    if room is None or room.numel() * room.itemsize < sum(sizes):
        room = like.new_empty(sum(sizes), dtype=torch.uint8)
    parts = room.view(-1).view(torch.uint8)[: sum(sizes)].split(sizes)
    return [part.view(dtype)[: n * width] for part, (n, dtype) in zip(parts, each)]


def by_columns(
    p: Problem,
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
    softmax: tuple[Tensor | None, ...],
    shard: Tensor | None = None,
    d_hidden: Tensor | None = None,
    d_weight: Tensor | None = None,
    d_bias: Tensor | None = None,
    first: int = 0,
    room: Tensor | None = None,
) -> None:
    """Fill d_weight and d_bias from column `first` on, and d_hidden with what these columns give.

    softmax: row_max, log_sum, entropy. shard: as in logprobs_bwd. An output None is not wanted.
    room: contiguous memory to overwrite, None for memory of its own.
    """
    (V, H), size = p.weight.shape, p.logits_dtype.itemsize
    live = _is_live(grad_logp, grad_entropy) & (p.labels != p.ignore_index)
    rows = p.where(live)
    n = p.labels.numel() if rows is None else rows.numel()
    budget = p.chunk_tokens * V * size if room is None else room.numel() * room.itemsize
    step = max(1, min(n, max(p.chunk_tokens, math.isqrt(budget // size))))
    exact = d_bias is not None
    # Besides logits: d(logits) in the dtype of the GEMMs and sums of dW, where those differ.
    copies = p.grad_dtype != p.logits_dtype and not _narrows(p, exact)
    rounds = d_weight is not None and d_weight.dtype != p.sum_dtype
    each = (step, p.logits_dtype), (copies * step, p.grad_dtype), (rounds * H, p.sum_dtype)
    budget -= ALIGNED * len(each)  # what rounding up to it may take
    width = max(1, min(V - first, budget // sum(n * dtype.itemsize for n, dtype in each)))
    z_room, dz_room, sums_room = _carved(room, p.hidden, width, each)
    d_x = None if d_hidden is None else p.hidden.new_zeros((n, H), dtype=p.sum_dtype)
    shard = torch.arange(2, device=p.weight.device) * V if shard is None else shard
    per_row = (grad_logp, grad_entropy, *softmax)
    for cols in _slices(V, width, first):
        d_w = None
        if d_weight is not None:
            d_w = sums_room.view(-1, H)[: cols.stop - cols.start] if rounds else d_weight[cols]
            d_w.zero_()
        d_b = None if d_bias is None else d_bias[cols].zero_()
        here = shard.clone()
        here[0] += cols.start
        for at, part in p.parts(rows, step):
            x = p.without_dead(p.hidden[part].to(p.gemm_dtype), live[part])
            z = z_room[: x.shape[0] * (cols.stop - cols.start)].view(x.shape[0], -1)
            _project(p, z, x, cols)
            g, h, *sums = (None if t is None else t[part] for t in per_row)
            args = (g, h, p.labels[part], *p.transform(part), *sums, here)
            dz = _backward_(p, z, *args, exact=exact)
            if d_b is not None:
                d_b += dz.sum(0, dtype=d_b.dtype)
            if copies:
                dz = dz_room[: dz.numel()].view(dz.shape).copy_(dz)
            if d_x is not None:
                _product(d_x[at], dz, p.weight[cols].to(p.grad_dtype), add=True)
            if d_w is not None:
                _product(d_w, dz.t(), x.to(p.grad_dtype), add=True)
        if rounds:
            d_weight[cols] = d_w
    if d_hidden is not None:
        d_hidden.zero_()
        d_hidden[slice(None) if rows is None else rows] = d_x
