"""TRL's functions by their own names and signatures, on the fused ops.

    from ppo_kernels.integrations import trl
    logps = trl.selective_log_softmax(logits, input_ids)

Not patched in behind anyone's back: to make TRL's trainers use them, assign them yourself before
the trainer module is imported, e.g. `trl.trainer.utils.selective_log_softmax = ...`.
"""

import torch
from torch import Tensor

from ppo_kernels.ops import logprobs as _logprobs
from ppo_kernels.ops.whitening import masked_mean as _masked_mean
from ppo_kernels.ops.whitening import masked_whiten as _masked_whiten

__all__ = ["entropy_from_logits", "masked_mean", "masked_whiten", "selective_log_softmax"]


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """`log_softmax(logits)[index]`: logits [.., V], index [..] or [.., K] with K columns.

    Returns fp32 where TRL returns the dtype of the logits: a bf16 log-prob is too coarse for a
    ratio (error up to 2^-8 of a value near 10 nats).
    """
    if index.dim() == logits.dim():
        columns = [
            _logprobs.logprobs_from_logits(logits, index[..., k]) for k in range(index.shape[-1])
        ]
        return torch.stack(columns, dim=-1)
    return _logprobs.logprobs_from_logits(logits, index)


def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
    """Entropy per position, [..] fp32. chunk_size is accepted and not needed: nothing is copied."""
    return _logprobs.entropy_from_logits(logits)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Mean over the valid slots (TRL divides by zero on an empty mask; this gives 0)."""
    return _masked_mean(values, mask, axis)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """TRL's whitening; masked slots are 0 here and left-overs there."""
    return _masked_whiten(values, mask, shift_mean=shift_mean)
