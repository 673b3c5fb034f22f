"""verl's functions by their own names and signatures, on the fused ops."""

from torch import Tensor

from ppo_kernels.ops.gae import gae as _gae
from ppo_kernels.ops.logprobs import entropy_from_logits as _entropy_from_logits
from ppo_kernels.ops.logprobs import logprobs_from_logits as _logprobs_from_logits
from ppo_kernels.ops.whitening import masked_whiten as _masked_whiten

__all__ = ["compute_gae_advantage_return", "entropy_from_logits", "logprobs_from_logits"]


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = False) -> Tensor:
    """Log-prob of each label, fp32. verl's default is inplace_backward=True; here it is opt-in."""
    return _logprobs_from_logits(logits, labels, inplace_backward=inplace_backward)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy per position, fp32."""
    return _entropy_from_logits(logits)


def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """(whitened advantages, returns), [B, T]; 0 at masked slots, where verl leaves the carry."""
    out = _gae(token_level_rewards, values, response_mask, gamma=gamma, lam=lam)
    return _masked_whiten(out.advantages, response_mask, stats=out.stats), out.returns
