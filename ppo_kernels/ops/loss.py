"""ppo_loss: the whole PPO objective, its gradients and its statistics."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppo_kernels import reference
from ppo_kernels.ops import _checks
from ppo_kernels.ops.hidden import logprobs_from_hidden
from ppo_kernels.ops.logprobs import logprobs_from_logits


class LossStats:
    """One device tensor of statistics, read by name: `stats.clipfrac` or `stats["clipfrac"]`.

    Nothing is copied to the host until a value is used as a number; `as_dict` copies once.
    """

    names: tuple[str, ...] = reference.STAT_NAMES

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.tensor[self.names.index(name)]

    def __getattr__(self, name: str) -> Tensor:
        if name not in type(self).names:
            raise AttributeError(f"no statistic {name!r}; there are {', '.join(self.names)}")
        return self[name]

    def as_dict(self) -> dict[str, float]:
        """All statistics as Python numbers (one synchronisation)."""
        return dict(zip(self.names, self.tensor.tolist()))

    def __repr__(self) -> str:
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
    """`-agg(min(r A, clip(r) A)) + vf_coef/2 agg(max((V-R)^2, (clip(V)-R)^2)) - ent_coef agg(H)
    + kl_coef agg(KL)`, with `r = exp(clamp(logp - old, -20, 20))` (Schulman et al. 2017).
    """
    options = {
        "policy_loss": policy_loss,
        "cliprange": cliprange,
        "cliprange_high": cliprange_high,
        "dual_clip": dual_clip,
        "cliprange_value": cliprange_value,
        "vf_coef": vf_coef,
        "ent_coef": ent_coef,
        "kl_coef": kl_coef,
        "kl_old_coef": kl_old_coef,
        "is_cap": is_cap,
        "reduction": reduction,
        "normalizer": normalizer,
        "whiten": whiten,
        "cu_seqlens": cu_seqlens,
    }
    tensors = {
        "old_logprobs": old_logprobs,
        "advantages": advantages,
        "values": values,
        "old_values": old_values,
        "returns": returns,
        "entropy": entropy,
        "ref_logprobs": ref_logprobs,
        "rollout_logprobs": rollout_logprobs,
    }
    _check(logprobs, mask, tensors, options, kl_penalty)
    loss, stats = reference.ppo_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        values=values,
        old_values=old_values,
        returns=returns,
        entropy=entropy,
        ref_logprobs=ref_logprobs,
        rollout_logprobs=rollout_logprobs,
        kl_kind=kl_penalty,
        **options,
    )
    return PPOLoss(loss, LossStats(stats))


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
    ent_coef: float = 0.0,
    **options: Any,
) -> PPOLoss:
    """ppo_loss of logprobs_from_logits(logits, labels); the entropy bonus is computed inside."""
    logp, entropy = logprobs_from_logits(
        logits,
        _trained(labels, mask),
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        return_entropy=True,
    )
    return ppo_loss(
        logp, old_logprobs, advantages, mask, entropy=entropy, ent_coef=ent_coef, **options
    )


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
    ent_coef: float = 0.0,
    chunk_tokens: int | None = None,
    logits_dtype: torch.dtype | None = None,
    **options: Any,
) -> PPOLoss:
    """ppo_loss of logprobs_from_hidden(hidden, weight, labels)."""
    logp, entropy = logprobs_from_hidden(
        hidden,
        weight,
        _trained(labels, mask),
        bias=bias,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        return_entropy=True,
        chunk_tokens=chunk_tokens,
        logits_dtype=logits_dtype,
    )
    return ppo_loss(
        logp, old_logprobs, advantages, mask, entropy=entropy, ent_coef=ent_coef, **options
    )


def _trained(labels: Tensor, mask: Tensor | None) -> Tensor:
    """Masked tokens become ignore_index, so that their rows are not even read."""
    if mask is None:
        return labels
    return torch.where(mask != 0, labels, torch.full_like(labels, -100))


def _check(
    logprobs: Tensor,
    mask: Tensor | None,
    tensors: dict[str, Tensor | None],
    options: dict[str, Any],
    kl_kind: str,
) -> None:
    _checks.tensor("logprobs", logprobs, _checks.FLOATS)
    for name, x in tensors.items():
        if x is not None or name in ("old_logprobs", "advantages"):
            _checks.like(name, x, logprobs, "logprobs")
    if mask is not None:
        _checks.like("mask", mask, logprobs, "logprobs", None)
    value_inputs = {"values", "returns"}
    if options["cliprange_value"] is not None:
        value_inputs.add("old_values")
    given = [n for n in ("values", "old_values", "returns") if tensors[n] is not None]
    missing = sorted(value_inputs - set(given))
    if given and missing:
        raise ValueError(f"the value term got {', '.join(given)} but needs {', '.join(missing)}")
    if options["kl_coef"] and tensors["ref_logprobs"] is None:
        raise ValueError(f"kl_coef={options['kl_coef']} needs ref_logprobs, got None")
    if options["ent_coef"] and tensors["entropy"] is None:
        raise ValueError(f"ent_coef={options['ent_coef']} needs entropy, got None")
    _check_options(options, kl_kind)
    two_level = options["reduction"].startswith("seq")
    cu = options["cu_seqlens"]
    if cu is not None:
        if logprobs.dim() != 1:
            raise ValueError(
                f"logprobs must have shape [N] with cu_seqlens, got {tuple(logprobs.shape)}"
            )
        _checks.cu_seqlens("cu_seqlens", cu, logprobs.numel(), logprobs.device)
    elif two_level and logprobs.dim() != 2:
        raise ValueError(
            f"reduction {options['reduction']!r} needs logprobs [B, T], or [N] with cu_seqlens; "
            f"got {tuple(logprobs.shape)}"
        )


def _check_options(options: dict[str, Any], kl_kind: str) -> None:
    _checks.choice("policy_loss", options["policy_loss"], reference.POLICY_LOSSES)
    _checks.choice("reduction", options["reduction"], reference.REDUCTIONS)
    _checks.choice("kl_penalty", kl_kind, reference.KL_KINDS)
    _checks.number("cliprange", options["cliprange"], 0)
    for name in ("cliprange_high", "cliprange_value"):
        if options[name] is not None:
            _checks.number(name, options[name], 0)
    if options["dual_clip"] is not None:
        _checks.number("dual_clip", options["dual_clip"], 1, above=True)
    for name in ("vf_coef", "ent_coef", "kl_coef", "kl_old_coef"):
        _checks.number(name, options[name])
    _checks.number("is_cap", options["is_cap"], 0, above=True)
    normalizer = options["normalizer"]
    if isinstance(normalizer, torch.Tensor):
        _checks.shape("normalizer", normalizer, (), "a number")
    elif normalizer is not None:
        _checks.number("normalizer", normalizer, 0, above=True)
    if options["whiten"] is not None:
        _checks.tensor("whiten", options["whiten"], (torch.float64,))
        _checks.shape("whiten", options["whiten"], (3,), "gae(...).stats")
