"""logprobs_from_logits: log-softmax, gather and entropy of [.., V] logits in one read."""

from typing import Any

import torch
from torch import Tensor

from ppo_kernels import reference
from ppo_kernels.ops import _checks


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        temperature: Tensor | float,
        logit_scale: float,
        softcap: float | None,
        ignore_index: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.args = (logit_scale, softcap, ignore_index)
        ctx.temperature = temperature
        ctx.save_for_backward(logits, labels)
        ctx.set_materialize_grads(False)
        return reference.logprobs_fwd(logits, labels, temperature, *ctx.args)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None) -> Any:
        if grad_logp is None and grad_entropy is None:
            return (None,) * 6
        logits, labels = ctx.saved_tensors
        grad = reference.logprobs_bwd(
            grad_logp, grad_entropy, logits, labels, ctx.temperature, *ctx.args
        )
        return grad, None, None, None, None, None


def logprobs_from_logits(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    inplace_backward: bool = False,
    tp_group: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`logp = z_label - logsumexp(z)` and, if asked, `H = -sum p ln p`, per row.

    `z = softcap * tanh(logit_scale * logits / softcap) / temperature`, `p = softmax(z)`.

    logits [.., V] fp32, bf16, fp16 (fp64 on CPU); labels [..] int64 or int32; temperature a
    number or a tensor like labels. Returns fp32 (fp64 for fp64) of the shape of labels.
    A label equal to ignore_index gives 0, 0 and gradient 0; any other label outside [0, V) gives
    NaN, as does a row with NaN, +inf or only -inf. Single -inf columns are masked vocabulary.
    """
    _checks.tensor("logits", logits, _checks.FLOATS)
    _checks.tensor("labels", labels, _checks.INDICES)
    if logits.dim() < 1 or logits.shape[-1] < 1:
        raise ValueError(f"logits must have shape [.., V] with V >= 1, got {tuple(logits.shape)}")
    _checks.shape("labels", labels, tuple(logits.shape[:-1]), "logits without its last dimension")
    _checks.same_device("labels", labels, logits.device, "logits")
    temperature = check_temperature(temperature, labels)
    _checks.number("logit_scale", logit_scale)
    if softcap is not None:
        _checks.number("softcap", softcap, 0, above=True)
    if isinstance(temperature, Tensor):
        temperature = temperature.reshape(-1)
    logp, entropy = _Logprobs.apply(
        logits.reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        temperature,
        logit_scale,
        softcap,
        ignore_index,
    )
    logp = logp.view(labels.shape)
    return (logp, entropy.view(labels.shape)) if return_entropy else logp


def check_temperature(temperature: float | Tensor, labels: Tensor) -> float | Tensor:
    """A number > 0, or one number per label; a 0-d tensor is expanded."""
    if not isinstance(temperature, Tensor):
        return _checks.number("temperature", temperature, 0, above=True)
    _checks.tensor("temperature", temperature, _checks.FLOATS)
    _checks.same_device("temperature", temperature, labels.device, "labels")
    if temperature.dim() == 0:
        return temperature.expand(labels.shape)
    _checks.shape("temperature", temperature, tuple(labels.shape), "labels")
    return temperature


def entropy_from_logits(logits: Tensor, *, temperature: float | Tensor = 1.0) -> Tensor:
    """`H = -sum p ln p` of `p = softmax(logits / temperature)`, [..] fp32, differentiable."""
    _checks.tensor("logits", logits, _checks.FLOATS)
    labels = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return logprobs_from_logits(logits, labels, temperature=temperature, return_entropy=True)[1]
