"""Log-probs and losses from hidden states: of the logits, a bounded chunk exists at a time.

`_chunked.py` has the two ways through the logits; here are the ops, autograd and argument checks.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ppo_kernels import reference
from ppo_kernels.ops import _checks, _chunked
from ppo_kernels.ops._chunked import (
    Problem,
    by_columns,
    by_rows,
    chunks,
    gradient_dtype,
    row_parts,
    sum_dtype,
)
from ppo_kernels.ops._gradients import first_order, needs, refuse_transforms, with_gradients
from ppo_kernels.ops._library import define
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

# The fields of Problem.
PROBLEM = (
    f"Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, {TRANSFORM}, int chunk_tokens, "
    "ScalarType logits_dtype, bool compact"
)
NEED = "bool need_hidden, bool need_weight, bool need_bias"
GRADIENTS = "Tensor d_hidden, Tensor d_weight, Tensor d_bias"


def _plain(op: Callable[..., Any]) -> Callable[..., Any]:
    """Autocast would cast the GEMMs' inputs and trip over their outputs; dtypes are settled."""

    @functools.wraps(op)
    def run(hidden: Tensor, *args: Any) -> Any:
        with torch.autocast(hidden.device.type, enabled=False):
            return op(hidden, *args)

    return run


def _split(args: tuple) -> tuple[Problem, tuple]:
    """An op's arguments: the problem, and what the op adds to it."""
    n = len(Problem._fields)
    return Problem(*args[:n]), args[n:]


@_plain
def _partials(*args: Any) -> Tensor:
    p, (shard,) = _split(args)
    out = p.hidden.new_zeros((p.labels.numel(), 4), dtype=p.sum_dtype)
    for part, _, z in chunks(p, row_parts(p)):
        out[part] = torch.ops.ppo_kernels.logprobs_partials(
            z, p.labels[part], *p.transform(part), shard, False
        )
    return out


@_plain
def _gradients(*args: Any) -> tuple[Tensor, ...]:
    p, (g, h, *softmax, shard, need_hidden, need_weight, need_bias) = _split(args)
    need = (need_hidden, need_weight, need_bias)
    outputs = _empty_gradients(p, need, p.sum_dtype)
    wanted = (out if needed else None for out, needed in zip(outputs, need))
    by_columns(p, g, h, tuple(softmax), shard, *wanted)
    return outputs


@_plain
def _lm_loss(*args: Any) -> tuple[Tensor, ...]:
    p, (normalizer, denominator, *need) = _split(args)
    trained = (p.labels != p.ignore_index).to(p.sum_dtype)
    n = denominator if normalizer is None else normalizer
    coefs = reference.token_coefs(trained, "token-mean", n)
    logp, _, *gradients = by_rows(p, tuple(need), lambda part, *_: (-coefs[part], None))
    return -(coefs * logp).sum(), *gradients


@_plain
def _ppo_loss(*args: Any) -> tuple[Tensor, ...]:
    p, args = _split(args)
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

    logp, entropy, *gradients = by_rows(p, need[:3], row_gradients)
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
    p: Problem, need: tuple[bool, ...], hidden_dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    (V, H), N = p.weight.shape, p.labels.numel()
    hidden_dtype = hidden_dtype or gradient_dtype(p.hidden)
    return (
        p.hidden.new_empty((N, H) if need[0] else 0, dtype=hidden_dtype),
        p.weight.new_empty((V, H) if need[1] else 0, dtype=gradient_dtype(p.weight)),
        p.weight.new_empty(V if need[2] else 0, dtype=p.sum_dtype),
    )


def _partials_fake(*args: Any) -> Tensor:
    p, _ = _split(args)
    return p.hidden.new_empty((p.labels.numel(), 4), dtype=p.sum_dtype)


def _gradients_fake(*args: Any) -> tuple[Tensor, ...]:
    p, rest = _split(args)
    return _empty_gradients(p, rest[-3:], p.sum_dtype)


def _lm_loss_fake(*args: Any) -> tuple[Tensor, ...]:
    p, rest = _split(args)
    return p.hidden.new_empty((), dtype=p.sum_dtype), *_empty_gradients(p, rest[-3:])


def _ppo_loss_fake(*args: Any) -> tuple[Tensor, ...]:
    p, rest = _split(args)
    like = dict(zip(TERM_NAMES, rest))["old_logprobs"]
    loss = p.hidden.new_empty((), dtype=p.sum_dtype)
    stats = loss.new_empty(len(reference.STAT_NAMES))
    d_values = loss.new_empty(like.shape if rest[-1] else 0)
    return loss, stats, *_empty_gradients(p, rest[-4:-1]), d_values


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
        *arguments, row_max, log_sum, entropy, shard = ctx.saved_tensors
        gradients = (
            None if g is None else g.to(row_max.dtype).contiguous()
            for g in (grad_logp, grad_entropy)
        )
        need = ctx.needs_input_grad[:3]
        found = torch.ops.ppo_kernels.hidden_gradients(
            *arguments, *ctx.numbers, *gradients, row_max, log_sum, entropy, shard, *need
        )
        if ctx.group is not None and need[0]:
            # Each rank has the part of its columns.
            dist.all_reduce(found[0], group=ctx.group)
        d = (g.to(x.dtype) if wanted else None for g, x, wanted in zip(found, arguments, need))
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

    chunk_tokens: rows of logits [chunk_tokens, V] that exist at a time; None: 250 MB of them, or,
        in a loss with a bf16 weight on a CPU, 280 MB of them and of the sums of its gradient.
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
    args = _problem(
        hidden, weight, labels, bias=bias, temperature=temperature, logit_scale=logit_scale,
        softcap=softcap, ignore_index=ignore_index, chunk_tokens=chunk_tokens,
        logits_dtype=logits_dtype, compact=compact, tp_group=tp_group,
    )  # fmt: skip
    logp, entropy = _Logprobs.apply(*args[:3], tp_group, *args[3:])
    logp = logp.view(labels.shape)
    return (logp, entropy.view(labels.shape)) if return_entropy else logp


_HEAD = {
    name: default
    for name, default in logprobs_from_hidden.__kwdefaults__.items()
    if name not in ("ignore_index", "return_entropy", "tp_group")
}
_LOSS = {name: default for name, default in ppo_loss.__kwdefaults__.items() if name != "entropy"}


def lm_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    normalizer: float | Tensor | None = None,
    ignore_index: int = -100,
    tp_group: Any = None,
    **head: Any,
) -> Tensor:
    """`-sum logp(label) / n` over the n labels that are not ignored (PPO-ptx, SFT), 0-d fp32.

    normalizer, a number or 0-d tensor, replaces n, so that micro-batches add up to the full batch.
    No label: 0. The other arguments are those of logprobs_from_hidden; head: bias, temperature,
    logit_scale, softcap, chunk_tokens, logits_dtype, compact.

    Cost: 6 N H V flops, all in forward, where each chunk of logits becomes its gradient at once;
    backward only scales. With tp_group it is that of logprobs_from_hidden. How d(weight) is summed
    ppo_loss_from_hidden says.
    """
    _check_names("lm_loss", head, _HEAD)
    head = {**_HEAD, **head, "ignore_index": ignore_index, "tp_group": tp_group}
    args = _problem(hidden, weight, labels, **head, loss=tp_group is None)
    _check_normalizer(normalizer, hidden)
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
    return with_gradients(loss, args[:3], need, gradients)


def ppo_loss_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    values: Tensor | None = None,
    tp_group: Any = None,
    **options: Any,
) -> PPOLoss:
    """`ppo_loss` of the log-probs and entropy of logprobs_from_hidden(hidden, weight, labels).

    hidden [.., H], labels and every per-token tensor [..]; a token with mask 0 or label -100 is not
    read. options: ppo_loss's keywords, and logprobs_from_hidden's bias, temperature, logit_scale,
    softcap, chunk_tokens, logits_dtype, compact. Differentiable in hidden, weight, bias, values.

    Cost: 6 N H V flops, all in forward: denominators depend on the mask alone, so that each chunk
    of logits yields its log-probs, the loss's gradient and d(logits) at once, and backward only
    scales. Without anything to differentiate it is 2 N H V. With tp_group the cost is that of
    logprobs_from_hidden.

    d(weight) of a bf16 weight is summed in fp32 and rounded to bf16 once. Between chunks the sums
    keep all 32 bits on CUDA, 24 of them (16 of precision) on a CPU: with hundreds of chunks the one
    rounding still outweighs theirs where chunks agree in sign; numbers that nearly cancel, and
    thousands of equal chunks, have more error. They lie in the memory of d(weight) and at most
    1 GiB more on CUDA, 136 MB on a CPU; for rows of weight that find no room the logits are made
    again (at most 1 N H V flops more).

    compact: tokens that are not trained leave before any GEMM, and tokens whose gradient is
        exactly 0 (clipped; no advantage and neither entropy nor KL term) before the backward
        GEMMs. On CUDA the host waits for their numbers, once and once per chunk; False does
        without.
    """
    _check_names("ppo_loss_from_hidden", options, {**_HEAD, **_LOSS})
    labels, mask = trained(labels, mask)
    head = {name: options.pop(name, default) for name, default in _HEAD.items()}
    head |= {"ignore_index": -100, "tp_group": tp_group}
    args = _problem(hidden, weight, labels, **head, loss=tp_group is None)
    if tp_group is not None:
        logp, entropy = _Logprobs.apply(*args[:3], tp_group, *args[3:])
        logp, entropy = logp.view(labels.shape), entropy.view(labels.shape)
        tokens = (logp, old_logprobs, advantages, mask)
        return ppo_loss(*tokens, values=values, entropy=entropy, **options)
    options = {**_LOSS, **options, "values": values}
    options |= {"old_logprobs": old_logprobs, "advantages": advantages, "mask": mask}
    check_options(labels, "labels", options)
    inputs = [*args[:3], values]
    need = needs(*inputs)
    with torch.no_grad():
        # Its dtype is that of the log-probs.
        like = hidden.new_empty(0, dtype=sum_dtype(*args[:2]))
        loss, stats, *gradients = torch.ops.ppo_kernels.hidden_ppo_loss(
            *args, *loss_terms(options, like), *need
        )
    return PPOLoss(with_gradients(loss, inputs, need, gradients), LossStats(stats))


# --------------------------------------------------------------------------------- arguments


def _problem(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    chunk_tokens: int | None,
    logits_dtype: torch.dtype | None,
    compact: bool,
    tp_group: Any,
    loss: bool = False,
) -> Problem:
    """The checked arguments, rows flattened; loss: for an op that makes gradients in forward."""
    refuse_transforms()
    _checks.group("tp_group", tp_group)
    _check_plain(hidden, weight, labels, bias, tp_group)
    weight, bias = gathered(weight), gathered(bias)
    _check_tensors(hidden, weight, labels, bias)
    temperature = check_temperature(temperature, labels)
    _checks.number("logit_scale", logit_scale, 0, above=True)
    if softcap is not None:
        _checks.number("softcap", softcap, 0, above=True)
    _check_integer("ignore_index", ignore_index)
    hidden, weight, bias = (_as_autocast(x) for x in (hidden, weight, bias))
    logits_dtype = _logits_dtype(logits_dtype, hidden, weight)
    temperatures = None
    if isinstance(temperature, Tensor):
        temperatures = temperature.detach().to(sum_dtype(hidden, weight)).reshape(-1).contiguous()
        temperature = 1.0
    return Problem(
        hidden=hidden.reshape(-1, hidden.shape[-1]),
        weight=weight,
        bias=bias,
        labels=labels.reshape(-1).contiguous(),
        temperatures=temperatures,
        temperature=temperature,
        logit_scale=float(logit_scale),
        softcap=float(softcap or 0),
        ignore_index=ignore_index,
        chunk_tokens=_chunk_tokens(chunk_tokens, weight, logits_dtype, loss),
        logits_dtype=logits_dtype,
        compact=bool(compact),
    )


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
    default = sum_dtype(hidden, weight)
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


def _chunk_tokens(asked: int | None, weight: Tensor, logits_dtype: torch.dtype, loss: bool) -> int:
    if asked is not None:
        _check_integer("chunk_tokens", asked)
        if asked < 1:
            raise ValueError(f"chunk_tokens must be >= 1, got {asked}")
        return asked
    row = weight.shape[0] * logits_dtype.itemsize
    workspace = _chunked.workspace_bytes(weight, loss)
    if row > workspace:
        raise ValueError(
            f"chunk_tokens: one row of logits has {row} bytes, more than the workspace of "
            f"{workspace}; pass chunk_tokens=1 to allow it"
        )
    beside = 8 * weight.shape[1]  # its hidden and d(hidden)
    return max(1, workspace // (row + beside))


def _check_names(function: str, given: dict[str, Any], known: dict[str, Any]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise TypeError(f"{function} got an unexpected keyword argument {unknown[0]!r}")


def _check_integer(name: str, x: Any) -> None:
    if isinstance(x, bool) or not isinstance(x, int):
        raise TypeError(f"{name} must be an integer, got {type(x).__name__}")


def _check_plain(hidden: Any, weight: Any, labels: Any, bias: Any, tp_group: Any) -> None:
    """DTensors only where one is gathered: weight and bias, without tp_group."""
    shared = {} if tp_group is None else {"weight": weight, "bias": bias}
    for name, x in {"hidden": hidden, "labels": labels, **shared}.items():
        if hasattr(x, "full_tensor"):
            or_else = ", or leave tp_group out to have it gathered" if name in shared else ""
            raise TypeError(
                f"{name} must be this rank's plain tensor, got a DTensor: pass "
                f"{name}.to_local(){or_else}"
            )


def _check_tensors(hidden: Any, weight: Any, labels: Any, bias: Any) -> None:
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
        _checks.tensor("normalizer", normalizer, _checks.FLOATS + _checks.INDICES)
        _checks.shape("normalizer", normalizer, (), "a number")
        _checks.same_device("normalizer", normalizer, hidden.device, "hidden")
    elif normalizer is not None:
        _checks.number("normalizer", normalizer, 0, above=True)
