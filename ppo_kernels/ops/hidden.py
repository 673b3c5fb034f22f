"""logprobs_from_hidden, lm_loss: from hidden states, holding at most [chunk, V] logits."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ppo_kernels import reference
from ppo_kernels.ops import _checks
from ppo_kernels.ops.logprobs import check_temperature, logprobs_from_logits

# Default workspace for one chunk of logits.
WORKSPACE_BYTES = 256 * 2**20


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
    tp_group: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`logprobs_from_logits(hidden @ weight.T + bias, labels)` in chunks of tokens.

    hidden [.., H], weight [V, H], bias [V], labels [..]. At most chunk_tokens rows of logits
    exist at a time, in forward and (recomputed) in backward.
    """
    _check(hidden, weight, labels, bias, chunk_tokens)
    temperature = check_temperature(temperature, labels)
    V, H = weight.shape
    rows = labels.numel()
    step = chunk_tokens or max(1, WORKSPACE_BYTES // (4 * V))
    x, y = hidden.reshape(-1, H), labels.reshape(-1)
    t = temperature.reshape(-1) if isinstance(temperature, Tensor) else None

    def run(rows_of: slice, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        logits = reference.upcast(torch.nn.functional.linear(x[rows_of], weight, bias))
        return logprobs_from_logits(
            logits,
            y[rows_of],
            temperature=temperature if t is None else t[rows_of],
            logit_scale=logit_scale,
            softcap=softcap,
            ignore_index=ignore_index,
            return_entropy=True,
        )

    parts = [
        checkpoint(run, slice(i, min(i + step, rows)), x, weight, bias, use_reentrant=False)
        for i in range(0, max(rows, 1), step)
    ]
    logp = torch.cat([p[0] for p in parts]).view(labels.shape)
    entropy = torch.cat([p[1] for p in parts]).view(labels.shape)
    return (logp, entropy) if return_entropy else logp


def lm_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    chunk_tokens: int | None = None,
    normalizer: float | Tensor | None = None,
) -> Tensor:
    """`-sum logp(label) / n` over the labels that are not ignored (PPO-ptx, SFT).

    normalizer replaces n, so that micro-batches add up to the full batch. No label: 0.
    """
    logp = logprobs_from_hidden(
        hidden,
        weight,
        labels,
        bias=bias,
        logit_scale=logit_scale,
        softcap=softcap,
        ignore_index=ignore_index,
        chunk_tokens=chunk_tokens,
    )
    weights = (labels != ignore_index).to(logp.dtype)
    return reference.aggregate(-logp, weights, "token-mean", normalizer)


def _check(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, chunk: int | None
) -> None:
    _checks.tensor("hidden", hidden, _checks.FLOATS)
    _checks.tensor("weight", weight, _checks.FLOATS)
    _checks.tensor("labels", labels, _checks.INDICES)
    if weight.dim() != 2:
        raise ValueError(f"weight must have shape [V, H], got {tuple(weight.shape)}")
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
    if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"chunk_tokens must be an integer >= 1, got {chunk!r}")
