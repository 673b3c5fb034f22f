"""logprobs_from_logits: log-softmax, gather and entropy of [.., V] logits in one read."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ppo_kernels import reference
from ppo_kernels.ops import _checks
from ppo_kernels.ops._gradients import first_order, refuse_transforms
from ppo_kernels.ops._library import define

# How a logit becomes z, and the label that counts for nothing. softcap 0 is none; temperatures
# has one real per row and wins over temperature.
TRANSFORM = (
    "Tensor? temperatures, float temperature, float logit_scale, float softcap, int ignore_index"
)
# logits [N, V] or [A, B, V], last dimension contiguous; labels [N] or [A, B], contiguous. shard:
# int64 [2] = (first column, vocabulary size) where logits are a slice of the vocabulary.
BACKWARD = (
    "Tensor? grad_logprobs, Tensor? grad_entropy, Tensor labels, "
    f"{TRANSFORM}, Tensor row_max, Tensor log_sum, Tensor? entropy, Tensor? shard"
)


def _real(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _fwd_fake(logits: Tensor, labels: Tensor, *args: Any) -> tuple[Tensor, ...]:
    def per_row(wanted: bool = True) -> Tensor:
        return logits.new_empty(labels.shape if wanted else (0,), dtype=_real(logits))

    *_, entropy, sum_p2 = args
    return per_row(), per_row(entropy), per_row(), per_row(), per_row(sum_p2)


def _partials_fake(logits: Tensor, labels: Tensor, *args: Any) -> Tensor:
    return logits.new_empty((labels.numel(), 5 if args[-1] else 4), dtype=_real(logits))


def _bwd_fake(logits: Tensor, *args: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _bwd_inplace_reference(logits: Tensor, *args: Any) -> None:
    logits.copy_(reference.logprobs_bwd(logits, *args))


def _bwd_bf16_reference(logits: Tensor, *args: Any) -> None:
    in_bf16(logits).copy_(reference.logprobs_bwd(logits, *args))


def in_bf16(logits: Tensor) -> Tensor:
    """Where logprobs_bwd_bf16_ leaves the gradient of contiguous fp32 logits [N, V]."""
    return logits.view(torch.bfloat16)[:, : logits.shape[1]]


def _bwd_inplace_fake(logits: Tensor, *args: Any) -> None:
    return None


define(
    f"logprobs_fwd(Tensor logits, Tensor labels, {TRANSFORM}, bool want_entropy, bool want_sum_p2)"
    " -> (Tensor logprobs, Tensor entropy, Tensor row_max, Tensor log_sum, Tensor sum_p2)",
    reference.logprobs_fwd,
    _fwd_fake,
    triton_module="logprobs",
)
define(
    f"logprobs_partials(Tensor logits, Tensor labels, {TRANSFORM}, Tensor? shard, bool sum_p2)"
    " -> Tensor",
    reference.logprobs_partials,
    _partials_fake,
    triton_module="logprobs",
)
define(
    f"logprobs_bwd(Tensor logits, {BACKWARD}) -> Tensor",
    reference.logprobs_bwd,
    _bwd_fake,
    triton_module="logprobs",
)
define(
    f"logprobs_bwd_(Tensor(a!) logits, {BACKWARD}) -> ()",
    _bwd_inplace_reference,
    _bwd_inplace_fake,
    triton_module="logprobs",
)
# The gradient is rounded to bf16 as it is made, and fills the first half of each fp32 row.
define(
    f"logprobs_bwd_bf16_(Tensor(a!) logits, {BACKWARD}) -> ()",
    _bwd_bf16_reference,
    _bwd_inplace_fake,
)


class LogprobStats(NamedTuple):
    """lse: logsumexp(z); sum_p2: sum_v p_v^2. Like labels, detached."""

    lse: Tensor
    sum_p2: Tensor


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        transform: tuple,
        want_entropy: bool,
        want_stats: bool,
        inplace: bool,
        group: Any,
    ) -> tuple[Tensor | None, ...]:
        shard = None
        if group is None:
            logp, entropy, row_max, log_sum, sum_p2 = torch.ops.ppo_kernels.logprobs_fwd(
                logits, labels, *transform, want_entropy, want_stats
            )
        else:
            shard = shard_of(logits.shape[-1], logits.device, group)
            partials = torch.ops.ppo_kernels.logprobs_partials(
                logits, labels, *transform, shard, want_stats
            )
            logp, entropy, row_max, log_sum, *sum_p2 = merged_partials(
                partials, labels, transform[-1], shard, group
            )
            sum_p2 = sum_p2[0] if want_stats else None
        if not want_entropy:
            entropy = None
        temperatures, *ctx.numbers = transform
        ctx.inplace, ctx.consumed = inplace, False
        ctx.save_for_backward(logits, labels, temperatures, row_max, log_sum, entropy, shard)
        ctx.set_materialize_grads(False)
        if not want_stats:
            return logp, entropy, None, None
        lse = row_max + log_sum
        ctx.mark_non_differentiable(lse, sum_p2)
        return logp, entropy, lse, sum_p2

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None, *_: Any) -> Any:
        nothing = (None,) * 6
        if grad_logp is None and grad_entropy is None:
            return None, *nothing
        if ctx.inplace and ctx.consumed:
            raise RuntimeError(
                "logprobs_from_logits(inplace_backward=True): the first backward has overwritten "
                "the logits with their gradient; a second one needs inplace_backward=False"
            )
        logits, labels, temperatures, row_max, log_sum, entropy, shard = ctx.saved_tensors
        g, h = (
            None if x is None else x.to(row_max.dtype).contiguous()
            for x in (grad_logp, grad_entropy)
        )
        args = (g, h, labels, temperatures, *ctx.numbers, row_max, log_sum, entropy, shard)
        # A compiled graph plans its own memory: there the gradient is an ordinary output.
        if not ctx.inplace or torch.compiler.is_compiling():
            return torch.ops.ppo_kernels.logprobs_bwd(logits, *args), *nothing
        ctx.consumed = True
        logits = logits.detach()
        torch.ops.ppo_kernels.logprobs_bwd_(logits, *args)
        # Whoever else saved these logits now fails loudly instead of reading gradients.
        torch.autograd.graph.increment_version(logits)
        return logits, *nothing


def shard_of(columns: int, device: torch.device, group: Any) -> Tensor:
    """int64 [2]: this rank's first column and the vocabulary size. 8 bytes per rank, on device."""
    size = torch.full((1,), columns, dtype=torch.int64, device=device)
    if group is None:
        return torch.cat([torch.zeros_like(size), size])
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = size.new_empty(ranks)
    dist.all_gather_into_tensor(sizes, size, group=group)
    return torch.stack([sizes[:rank].sum(), sizes.sum()])


def merged_partials(
    mine: Tensor, labels: Tensor, ignore_index: int, shard: Tensor, group: Any
) -> tuple[Tensor, ...]:
    """(logp, entropy, row_max, log_sum[, sum_p2]) from this rank's partials [N, 4] or [N, 5].

    One all_gather of 16 or 20 bytes per token; every rank gets the same bits.
    """
    if group is not None:
        ranks, (N, K) = dist.get_world_size(group), mine.shape
        everyones = mine.new_empty((ranks * N, K))
        dist.all_gather_into_tensor(everyones, mine, group=group)
        mine = reference.merge_partials(everyones.view(ranks, N, K))
    return reference.finish_partials(mine, labels, ignore_index, shard[1])


def logprobs_from_logits(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_stats: bool = False,
    inplace_backward: bool = False,
    tp_group: Any = None,
) -> Any:
    """`logp = z_label - logsumexp(z)` and, if asked, `H = -sum p ln p`, per row.

    `z = softcap * tanh(logit_scale * logits / softcap) / temperature`, `p = softmax(z)`.

    logits [.., V] fp32, bf16, fp16 (fp64 on CPU), read once and never copied: up to two leading
    dimensions may have any stride, as in `logits[:, :-1]`; only a strided vocabulary is copied.
    labels [..] int64 or int32. temperature: a number, or a tensor like labels (no gradient).

    Returns logprobs, or (logprobs[, entropy][, stats]): fp32 (fp64 for fp64) like labels. Both
    are differentiable; backward recomputes p from the logits. stats is LogprobStats(lse, sum_p2),
    detached; `1 - 2 p_label + sum_p2` is the squared norm of a token's score function in the
    logits, the weight of an optimal-token baseline.

    A label equal to ignore_index gives 0, 0 and gradient 0, and its row is not read. Any other
    label outside [0, V) gives NaN, as does a row with NaN, +inf or only -inf, or a temperature in
    a tensor that is not > 0. -inf columns are masked vocabulary: they contribute nothing. A row
    whose outputs receive no gradient gets gradient 0, whatever is in it.

    inplace_backward: the gradient overwrites the logits, which saves a tensor of their size (and
    is not for logits that are a leaf: their .grad would be they themselves). Afterwards a backward
    that needs the logits raises, a second one through here included; a metric read from them does
    not, and sees gradients: read it before. Under torch.compile the flag changes nothing.
    tp_group: a process group whose ranks hold consecutive slices of the vocabulary in rank order,
    of any sizes, and the same labels: one all_gather of 16 bytes per token (after one of 8 bytes
    per rank), none in backward.
    """
    refuse_transforms()
    _checks.group("tp_group", tp_group)
    x, y, transform = logit_rows(
        logits, labels, temperature, logit_scale, softcap, ignore_index, inplace_backward
    )
    outputs = _Logprobs.apply(
        x, y, transform, return_entropy, return_stats, inplace_backward, tp_group
    )
    if y.shape != labels.shape:
        outputs = (None if o is None else o.view(labels.shape) for o in outputs)
    logp, entropy, lse, sum_p2 = outputs
    if not return_entropy and not return_stats:
        return logp
    stats = (LogprobStats(lse, sum_p2),) if return_stats else ()
    return (logp, entropy, *stats) if return_entropy else (logp, *stats)


def logit_rows(
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    inplace_backward: bool,
) -> tuple[Tensor, Tensor, tuple]:
    """The checked arguments as the ops take them: rows of logits, their labels, TRANSFORM."""
    _check(logits, labels, ignore_index, inplace_backward)
    temperature = check_temperature(temperature, labels)
    _checks.number("logit_scale", logit_scale, 0, above=True)
    if softcap is not None:
        _checks.number("softcap", softcap, 0, above=True)
    x, y = _as_rows(logits, labels)
    temperatures = None
    if torch.compiler.is_compiling() and not isinstance(temperature, Tensor):
        # A number given to an op becomes a constant of the graph; in arithmetic it stays variable.
        temperature = torch.ones(y.shape, dtype=_real(x), device=x.device) * temperature
    if isinstance(temperature, Tensor):
        temperatures = temperature.to(_real(logits)).reshape(y.shape).contiguous()
        temperature = 1.0
    transform = (temperatures, temperature, float(logit_scale), float(softcap or 0), ignore_index)
    return x, y, transform


def entropy_from_logits(logits: Tensor, *, temperature: float | Tensor = 1.0) -> Tensor:
    """`H = -sum p ln p` of `p = softmax(logits / temperature)`, [..] fp32, differentiable."""
    _checks.tensor("logits", logits, _checks.FLOATS)
    labels = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return logprobs_from_logits(logits, labels, temperature=temperature, return_entropy=True)[1]


def check_temperature(temperature: float | Tensor, labels: Tensor) -> float | Tensor:
    """A number > 0, or one number per label; a 0-d tensor is expanded."""
    if not isinstance(temperature, Tensor):
        return _checks.number("temperature", temperature, 0, above=True)
    _checks.tensor("temperature", temperature, _checks.FLOATS)
    _checks.same_device("temperature", temperature, labels.device, "labels")
    if temperature.requires_grad:
        raise ValueError("temperature has no gradient here and must not require one: detach() it")
    if temperature.dim() == 0:
        return temperature.expand(labels.shape)
    _checks.shape("temperature", temperature, tuple(labels.shape), "labels")
    return temperature


def _check(logits: Tensor, labels: Tensor, ignore_index: int, inplace: bool) -> None:
    _checks.tensor("logits", logits, _checks.FLOATS)
    _checks.tensor("labels", labels, _checks.INDICES)
    if logits.dim() < 1 or logits.shape[-1] < 1:
        raise ValueError(f"logits must have shape [.., V] with V >= 1, got {tuple(logits.shape)}")
    if logits.dtype == torch.float64 and logits.device.type == "cuda":
        raise TypeError("logits must have dtype float32, bfloat16, float16 on cuda, got float64")
    _checks.shape("labels", labels, logits.shape[:-1], "logits without its last dimension")
    _checks.same_device("labels", labels, logits.device, "logits")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an integer, got {type(ignore_index).__name__}")
    if inplace and not logits.is_contiguous() and _overlaps(logits):
        raise ValueError("inplace_backward needs logits whose rows do not share memory (expand)")


def _overlaps(x: Tensor) -> bool:
    """Whether elements may share memory: some step is no longer than what the smaller ones span."""
    span = 1
    for stride, n in sorted((s, n) for s, n in zip(x.stride(), x.shape) if n > 1):
        if stride < span:
            return True
        span += stride * (n - 1)
    return False


def _as_rows(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """logits as [N, V] or [A, B, V] with a contiguous last dimension, labels likewise."""
    V = logits.shape[-1]
    if V > 1 and logits.stride(-1) != 1:
        # .contiguous() leaves an empty tensor as it is.
        logits = logits.clone(memory_format=torch.contiguous_format)
    if logits.dim() > 3:
        logits = logits.flatten(0, -3)
    elif logits.dim() == 1:
        logits = logits.unsqueeze(0)
    rows = logits.shape[:-1]
    labels = labels if labels.shape == rows else labels.reshape(rows)
    return logits, labels.contiguous()
