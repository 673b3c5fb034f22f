"""TRL's functions by the names and signatures they have in TRL 1.16, on the fused ops.

    from ppo_kernels.integrations import trl as fused
    logps = fused.selective_log_softmax(logits, input_ids, temperature=0.7)

Not patched in behind anyone's back. TRL's trainers import these functions by name, so that to make
one of them use ours they are assigned before its module is imported. In 1.16 `trl.experimental`'s
CPO, ORPO, SDFT, SDPO and A2PO use the first, TPO the second; GRPO has a path of its own:

    import trl.trainer.utils
    from ppo_kernels.integrations import trl as fused
    trl.trainer.utils.selective_log_softmax = fused.selective_log_softmax
    trl.trainer.utils.selective_log_softmax_and_entropy = fused.selective_log_softmax_and_entropy
"""

import torch
from torch import Tensor

from ppo_kernels.ops import logprobs as _logprobs

__all__ = ["entropy_from_logits", "selective_log_softmax", "selective_log_softmax_and_entropy"]


def selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    """`log_softmax(logits / temperature)[index]`: logits [.., V], index [..] or [.., K].

    Where row_mask (like index) is 0 the result is 0 and the row is not read. Returns fp32 where
    TRL returns the dtype of the logits: a bf16 log-prob is too coarse for a ratio (error up to
    2^-8 of a value near 10 nats).
    """
    index = _masked(index, row_mask)
    if index.dim() == logits.dim():
        columns = [
            _logprobs.logprobs_from_logits(logits, index[..., k], temperature=temperature)
            for k in range(index.shape[-1])
        ]
        return torch.stack(columns, dim=-1)
    return _logprobs.logprobs_from_logits(logits, index, temperature=temperature)


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Both in one read: log-probs of index [..] and entropies [..], 0 where row_mask is 0."""
    logp, entropy = _logprobs.logprobs_from_logits(
        logits, _masked(index, row_mask), temperature=temperature, return_entropy=True
    )
    return logp, entropy if entropy_requires_grad else entropy.detach()


def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
    """Entropy per position, [..] fp32. chunk_size is accepted and not needed: nothing is copied."""
    return _logprobs.entropy_from_logits(logits)


def _masked(index: Tensor, row_mask: Tensor | None) -> Tensor:
    return index if row_mask is None else index.masked_fill(row_mask == 0, -100)
