"""ppo_loss: the whole PPO objective, its gradients and its statistics in one pass."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppo_kernels import reference
from ppo_kernels.ops import _checks
from ppo_kernels.ops._gradients import needs, with_gradients
from ppo_kernels.ops._library import define
from ppo_kernels.ops.logprobs import TRANSFORM, logit_rows, logprobs_from_logits

# What ppo_loss needs besides the log-probs and the entropy, in the order of the schema.
TERMS = (
    "Tensor old_logprobs, Tensor advantages, Tensor? mask, Tensor? values, Tensor? old_values, "
    "Tensor? returns, Tensor? ref_logprobs, Tensor? rollout_logprobs, Tensor? whiten, "
    "Tensor? normalizer, float? denominator, Tensor? cu_seqlens, str policy_loss, "
    "float cliprange, float cliprange_high, float? dual_clip, float? cliprange_value, "
    "float vf_coef, float ent_coef, float kl_coef, str kl_kind, float kl_old_coef, "
    "float is_cap, str reduction"
)
TERM_NAMES = tuple(term.split()[-1] for term in TERMS.split(", "))


def _reference(logprobs: Tensor, entropy: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    options = dict(zip(TERM_NAMES, args))
    denominator = options.pop("denominator")
    if options["normalizer"] is None:
        options["normalizer"] = denominator
    loss, stats = reference.ppo_loss(logprobs, entropy=entropy, **options)
    grads = reference.ppo_loss_grads(logprobs, entropy=entropy, **options)
    unneeded = [loss.new_empty(0) for _ in grads]
    return loss, stats, *(g if need else u for need, g, u in zip(args[-3:], grads, unneeded))


def _fake(logprobs: Tensor, entropy: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    dtype = reference.upcast(logprobs).dtype

    def empty(*shape: int) -> Tensor:
        return logprobs.new_empty(shape, dtype=dtype)

    grads = (empty(*logprobs.shape) if needed else empty(0) for needed in args[-3:])
    return empty(), empty(len(reference.STAT_NAMES)), *grads


# The gradients are those of the loss itself: coefficients and denominators are in them.
define(
    f"ppo_loss(Tensor logprobs, Tensor? entropy, {TERMS}, "
    "bool need_logprobs, bool need_values, bool need_entropy) -> "
    "(Tensor loss, Tensor stats, Tensor d_logprobs, Tensor d_values, Tensor d_entropy)",
    _reference,
    _fake,
    triton_module="loss",
)


def _logits_reference(logits: Tensor, labels: Tensor, *args: Any) -> tuple[Tensor, ...]:
    transform, terms, (need_logits, need_values) = args[:5], args[5:-2], args[-2:]
    ops = torch.ops.ppo_kernels
    logp, entropy, *sums, _ = ops.logprobs_fwd(logits, labels, *transform, True, False)
    shape = terms[0].shape
    loss, stats, d_logp, d_values, d_entropy = ops.ppo_loss(
        logp.view(shape), entropy.view(shape), *terms, need_logits, need_values, need_logits
    )
    d_logits = logits.new_empty(0)
    if need_logits:
        g, h = d_logp.view(labels.shape), d_entropy.view(labels.shape)
        d_logits = ops.logprobs_bwd(logits, g, h, labels, *transform, *sums, entropy, None)
    return loss, stats, d_logits, d_values


def _logits_inplace_reference(logits: Tensor, labels: Tensor, *args: Any) -> tuple[Tensor, ...]:
    loss, stats, d_logits, d_values = _logits_reference(logits, labels, *args[:-1], True, args[-1])
    logits.copy_(d_logits)
    return loss, stats, d_values


def _logits_fake(logits: Tensor, labels: Tensor, *args: Any) -> tuple[Tensor, ...]:
    like = args[5].to(reference.upcast(logits).dtype)
    loss, stats, _, d_values, _ = _fake(like, None, False, args[-1], False)
    return loss, stats, logits.new_empty(logits.shape if args[-2] else (0,)), d_values


def _logits_inplace_fake(logits: Tensor, labels: Tensor, *args: Any) -> tuple[Tensor, ...]:
    loss, stats, _, d_values = _logits_fake(logits, labels, *args[:-1], False, args[-1])
    return loss, stats, d_values


# logits and labels as in logprobs_fwd; the other tensors have the shape of old_logprobs.
define(
    f"ppo_loss_from_logits(Tensor logits, Tensor labels, {TRANSFORM}, {TERMS}, "
    "bool need_logits, bool need_values) -> "
    "(Tensor loss, Tensor stats, Tensor d_logits, Tensor d_values)",
    _logits_reference,
    _logits_fake,
    triton_module="loss",
)
define(
    f"ppo_loss_from_logits_(Tensor(a!) logits, Tensor labels, {TRANSFORM}, {TERMS}, "
    "bool need_values) -> (Tensor loss, Tensor stats, Tensor d_values)",
    _logits_inplace_reference,
    _logits_inplace_fake,
    triton_module="loss",
)


class LossStats:
    """One device tensor of statistics, read by name: `stats.clipfrac` or `stats["clipfrac"]`.

    Nothing is copied to the host until a value is used as a number; `as_dict` copies once.
    """

    names: tuple[str, ...] = reference.STAT_NAMES

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise KeyError(f"no statistic {name!r}; there are {', '.join(self.names)}")
        return self.tensor[self.names.index(name)]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getattr__(self, name: str) -> Tensor:
        # Also asked for names that copy and pickle look up before `tensor` exists.
        if name not in LossStats.names:
            raise AttributeError(f"no statistic {name!r}; there are {', '.join(LossStats.names)}")
        return self[name]

    def as_dict(self) -> dict[str, float]:
        """All statistics as Python numbers (one synchronisation)."""
        return dict(zip(self.names, self.tensor.tolist()))

    def __repr__(self) -> str:
        if self.tensor.is_meta:
            return f"LossStats({', '.join(self.names)})"
        return f"LossStats({', '.join(f'{k}={v:.4g}' for k, v in self.as_dict().items())})"


class PPOLoss(NamedTuple):
    """loss: 0-d, differentiable; stats: LossStats, detached."""

    loss: Tensor
    stats: LossStats


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    values: Tensor | None = None,
    old_values: Tensor | None = None,
    returns: Tensor | None = None,
    entropy: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    policy_loss: str = "clip",
    cliprange: float = 0.2,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
    cliprange_value: float | None = 0.2,
    vf_coef: float = 0.1,
    ent_coef: float = 0.0,
    kl_coef: float = 0.0,
    kl_penalty: str = "k3+",
    kl_old_coef: float = 1.0,
    is_cap: float = 2.0,
    reduction: str = "token-mean",
    normalizer: float | Tensor | None = None,
    whiten: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> PPOLoss:
    """The PPO objective, minimised, with its statistics:

        -agg(w min(r A, clip(r, 1 - cliprange, 1 + cliprange_high) A))
        + vf_coef/2 agg(max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2))
        - ent_coef agg(H) + kl_coef agg(KL),   r = exp(clamp(logp - old, -20, 20))

    logprobs, old_logprobs, advantages (A) and every other per-token tensor have one shape: padded
    [B, T]; packed [N], with cu_seqlens int32 [S+1] for the sequence means; or any shape for
    "token-mean" and "sum". fp32, bf16, fp16 or fp64 each; computed and returned in fp32 (fp64 for
    fp64 logprobs). mask: bool, True at the trained tokens, or a weight >= 0 per token. What
    stands in a masked slot is never used and its gradients are exactly 0.

    Differentiable in logprobs, values and entropy; everything else is a constant. On a bound
    nothing is clipped: the gradient is 0 only beyond it (clip ranges, dual clip, +-20).

    policy_loss: "clip" (PPO-clip, Schulman et al. 2017); "kl", `-r A + kl_old_coef (r - 1 - ln r)`
        (KL-penalised surrogate, same paper); "a2c", `-A logp`.
    cliprange, cliprange_high: distance of the bounds from ratio 1 below and above (clip-higher,
        DAPO); cliprange_high=None means the same as cliprange.
    dual_clip: a ratio > 1 at which tokens with A < 0 stop (Ye et al. 2020); None: off.
    values, returns (R), old_values (V_old), cliprange_value (c): the value term; with
        cliprange_value=None it is not clipped and needs no old_values.
    entropy (H): nats per token. ref_logprobs, kl_penalty: KL to a reference policy, nats per
        token, of a kind listed at `kl_penalty`; as a loss only "k2" and the "+" kinds have the
        right gradient.
    rollout_logprobs: log-probs of the policy that sampled, where it is not old_logprobs's; the
        policy term is weighed by `w = min(exp(clamp(old - rollout, -20, 20)), is_cap)`, a constant
        (truncated importance sampling).
    reduction: agg. "token-mean"; "seq-mean-token-mean" and "seq-mean-token-sum", the mean over
        sequences with a trained token of their token means or sums; "sum".
    normalizer: replaces agg's denominator (tokens, or sequences for the sequence means; divides
        "sum"). Pass that of the full batch and micro-batches add up to it, loss and gradient. A
        tensor is not looked at: one that is not > 0 makes the loss 0.
    whiten: `gae(...).stats`; A becomes `(A - mean) / std` as by masked_whiten.

    A coefficient of 0 leaves its term out of loss and gradient, even an infinite one.

    stats: the four aggregates before their coefficients (policy_loss, value_loss, entropy,
    kl_ref), and means over the trained tokens: approx_kl = r - 1 - ln r, policy_kl = old - logp,
    clipfrac = clipfrac_high + clipfrac_low (share of tokens stopped at 1 + cliprange_high and
    1 - cliprange), clipfrac_value, ratio_mean; ratio_max; n, the tokens or the sum of weights.

    Under torch.compile every number but the normalizer is a constant of the graph: a coefficient
    or clip range that changes is compiled anew, up to torch's recompile_limit.

    No trained token gives loss 0 and gradient 0. ValueError or TypeError for a wrong shape,
    dtype, device or option, for a value term with part of its inputs, and for a coefficient
    without its tensor. Backward twice is right; twice differentiable it is not.
    """
    options = {
        "old_logprobs": old_logprobs,
        "advantages": advantages,
        "mask": mask,
        "values": values,
        "old_values": old_values,
        "returns": returns,
        "ref_logprobs": ref_logprobs,
        "rollout_logprobs": rollout_logprobs,
        "policy_loss": policy_loss,
        "cliprange": cliprange,
        "cliprange_high": cliprange_high,
        "dual_clip": dual_clip,
        "cliprange_value": cliprange_value,
        "vf_coef": vf_coef,
        "ent_coef": ent_coef,
        "kl_coef": kl_coef,
        "kl_penalty": kl_penalty,
        "kl_old_coef": kl_old_coef,
        "is_cap": is_cap,
        "reduction": reduction,
        "normalizer": normalizer,
        "whiten": whiten,
        "cu_seqlens": cu_seqlens,
    }
    _checks.tensor("logprobs", logprobs, _checks.FLOATS)
    if entropy is not None:
        _checks.like("entropy", entropy, logprobs, "logprobs")
    check_options(logprobs, "logprobs", options)
    if ent_coef and entropy is None:
        raise ValueError(f"ent_coef={ent_coef} needs entropy, got None")
    inputs = [logprobs, values, entropy]
    need = needs(*inputs)
    loss, stats, *gradients = torch.ops.ppo_kernels.ppo_loss.default(
        logprobs, entropy, *loss_terms(options, logprobs), *need
    )
    return PPOLoss(with_gradients(loss, inputs, need, gradients), LossStats(stats))


def ppo_loss_from_logits(
    logits: Tensor,
    labels: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    values: Tensor | None = None,
    inplace_backward: bool = False,
    **options: Any,
) -> PPOLoss:
    """`ppo_loss` of the log-probs and entropy of `logprobs_from_logits(logits, labels)`.

    logits [.., V], labels and every per-token tensor [..]; the arguments are those of the two
    functions (all of ppo_loss's but entropy, which is made here). Differentiable in logits and
    values. A token with mask 0 or label -100 is not read and counts for nothing.

    One read and one write of the logits: what the loss divides by depends on the mask alone, so
    that a row becomes its log-prob, its loss and its gradient while it is at hand. Backward then
    scales, and after `loss.backward()` not even that is left. fp16 logits are read twice: their
    gradient would vanish before a loss scale could reach it.

    inplace_backward: the gradient takes the place of the logits, in this very call: nothing of
    their size is allocated. What else saved them for backward raises, and so does a second
    backward. Where the logits require no grad, and under torch.compile, it changes nothing. Not for
    a leaf, which would be its own .grad.

    ValueError or TypeError as the two functions raise them.
    """
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown:
        raise TypeError(f"ppo_loss_from_logits got an unexpected keyword {unknown[0]!r}")
    options = {**_OPTIONS, **options, "values": values}
    options |= {"old_logprobs": old_logprobs, "advantages": advantages}
    labels, options["mask"] = trained(labels, mask)
    rows, labels_of_rows, transform = logit_rows(
        logits, labels, temperature, logit_scale, softcap, -100, inplace_backward
    )
    check_options(labels, "labels", options)
    if logits.dtype == torch.float16:
        logp, entropy = logprobs_from_logits(
            logits,
            labels,
            temperature=temperature,
            logit_scale=logit_scale,
            softcap=softcap,
            return_entropy=True,
            inplace_backward=inplace_backward,
        )
        return ppo_loss(logp, entropy=entropy, **options)
    inputs = [rows, values]
    need = needs(*inputs)
    in_place = inplace_backward and need[0] and not torch.compiler.is_compiling()
    args = (labels_of_rows, *transform, *loss_terms(options, rows))
    if in_place:
        op, d_logits = torch.ops.ppo_kernels.ppo_loss_from_logits_.default, rows.detach()
        loss, stats, d_values = op(d_logits, *args, need[1])
        torch.autograd.graph.increment_version(d_logits)
    else:
        op = torch.ops.ppo_kernels.ppo_loss_from_logits.default
        loss, stats, d_logits, d_values = op(rows, *args, *need)
    loss = with_gradients(loss, inputs, need, [d_logits, d_values], once=in_place)
    return PPOLoss(loss, LossStats(stats))


_OPTIONS = {k: v for k, v in ppo_loss.__kwdefaults__.items() if k != "entropy"}


def trained(labels: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """(labels, mask) where a token is out in both if it has mask 0 or label -100."""
    _checks.tensor("labels", labels, _checks.INDICES)
    counts = labels != -100
    if mask is None:
        return labels, counts
    _checks.like("mask", mask, labels, "labels", None)
    counts = counts & _checks.as_bool_mask(mask)
    labels = torch.where(counts, labels, -100)
    return labels, counts if mask.dtype == torch.bool else torch.where(counts, mask, 0)


def loss_terms(options: dict[str, Any], logprobs: Tensor) -> list[Any]:
    """The checked keywords of ppo_loss as the op's TERMS: defaults resolved, tensors converted."""
    terms = dict(options)
    mask = terms["mask"]
    if mask is not None and mask.dtype != torch.bool:
        terms["mask"] = mask.to(reference.upcast(logprobs).dtype)
    if terms["cliprange_high"] is None:
        terms["cliprange_high"] = terms["cliprange"]
    terms["kl_kind"] = terms["kl_penalty"]
    normalizer = terms["normalizer"]
    terms["denominator"] = None
    if normalizer is not None and torch.compiler.is_compiling():
        # A number would be a constant of the graph, and every other number another graph.
        normalizer = torch.zeros((), dtype=torch.float64, device=logprobs.device) + normalizer
    if isinstance(normalizer, Tensor):
        terms["normalizer"] = normalizer.double()
    else:
        one = 1.0 if terms["reduction"] == "sum" else None
        terms["normalizer"], terms["denominator"] = None, one if normalizer is None else normalizer
    if terms["cu_seqlens"] is not None:
        terms["cu_seqlens"] = terms["cu_seqlens"].int().contiguous()
    return [terms[name] for name in TERM_NAMES]


def check_options(like: Tensor, name: str, options: dict[str, Any]) -> None:
    """Raise for keywords of ppo_loss that do not go together with each other or with `like`."""
    _check_numbers(options)
    per_token = ("values", "old_values", "returns", "ref_logprobs", "rollout_logprobs")
    for tensor in ("old_logprobs", "advantages"):
        _checks.like(tensor, options[tensor], like, name)
    for tensor in per_token:
        if options[tensor] is not None:
            _checks.like(tensor, options[tensor], like, name)
    if options["mask"] is not None:
        _checks.like("mask", options["mask"], like, name, None)
    needed = ["values", "returns"]
    if options["cliprange_value"] is not None:
        needed.append("old_values")
    given = [n for n in ("values", "old_values", "returns") if options[n] is not None]
    missing = [n for n in needed if options[n] is None]
    if given and missing:
        raise ValueError(f"the value term got {', '.join(given)} but needs {', '.join(missing)}")
    if options["kl_coef"] and options["ref_logprobs"] is None:
        raise ValueError(f"kl_coef={options['kl_coef']} needs ref_logprobs, got None")
    _check_layout(like, name, options)


def _check_layout(like: Tensor, name: str, options: dict[str, Any]) -> None:
    cu, reduction = options["cu_seqlens"], options["reduction"]
    if cu is not None:
        if like.dim() != 1:
            raise ValueError(f"{name} must have shape [N] with cu_seqlens, got {tuple(like.shape)}")
        _checks.cu_seqlens("cu_seqlens", cu, like.numel(), like.device)
    elif reduction.startswith("seq") and like.dim() != 2:
        raise ValueError(
            f"reduction {reduction!r} needs {name} [B, T], or [N] with cu_seqlens; "
            f"got {tuple(like.shape)}"
        )
    normalizer = options["normalizer"]
    if isinstance(normalizer, Tensor):
        _checks.tensor("normalizer", normalizer, _checks.FLOATS + _checks.INDICES)
        _checks.shape("normalizer", normalizer, (), "a number")
        _checks.same_device("normalizer", normalizer, like.device, name)
    elif normalizer is not None:
        _checks.number("normalizer", normalizer, 0, above=True)
    whiten = options["whiten"]
    if whiten is not None:
        _checks.tensor("whiten", whiten, (torch.float64,))
        _checks.shape("whiten", whiten, (3,), "gae(...).stats")
        _checks.same_device("whiten", whiten, like.device, name)


def _check_numbers(options: dict[str, Any]) -> None:
    _checks.choice("policy_loss", options["policy_loss"], reference.POLICY_LOSSES)
    _checks.choice("reduction", options["reduction"], reference.REDUCTIONS)
    _checks.choice("kl_penalty", options["kl_penalty"], reference.KL_KINDS)
    _checks.number("cliprange", options["cliprange"], 0)
    for name in ("cliprange_high", "cliprange_value"):
        if options[name] is not None:
            _checks.number(name, options[name], 0)
    if options["dual_clip"] is not None:
        _checks.number("dual_clip", options["dual_clip"], 1, above=True)
    for name in ("vf_coef", "ent_coef", "kl_coef", "kl_old_coef"):
        _checks.number(name, options[name])
    _checks.number("is_cap", options["is_cap"], 0, above=True)
