"""verl's functions by the names and signatures they have in verl 0.9, on the fused ops.

They are assigned where verl defines them, in each process that computes (Ray's workers import for
themselves), and before its engines are imported, which take `logprobs_from_logits` by name:

    import verl.utils.torch_functional as verl_F
    from verl.trainer.ppo import core_algos
    from ppo_kernels.integrations import verl as fused
    verl_F.logprobs_from_logits = fused.logprobs_from_logits
    verl_F.entropy_from_logits = fused.entropy_from_logits
    core_algos.compute_gae_advantage_return = fused.compute_gae_advantage_return
"""

from torch import Tensor

from ppo_kernels.ops.gae import gae as _gae
from ppo_kernels.ops.logprobs import entropy_from_logits as _entropy_from_logits
from ppo_kernels.ops.logprobs import logprobs_from_logits as _logprobs_from_logits
from ppo_kernels.ops.whitening import masked_mean as _masked_mean
from ppo_kernels.ops.whitening import masked_whiten as _masked_whiten

__all__ = [
    "compute_gae_advantage_return",
    "entropy_from_logits",
    "logprobs_from_logits",
    "masked_mean",
    "masked_whiten",
]


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Log-prob of each label, fp32. As in verl the gradient takes the place of the logits unless
    inplace_backward=False: another backward that needs them raises, a metric computed from them
    after backward silently reads gradients."""
    return _logprobs_from_logits(logits, labels, inplace_backward=inplace_backward)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy per position, fp32."""
    return _entropy_from_logits(logits)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Mean over the valid slots; 0 where there are none."""
    return _masked_mean(values, mask, axis)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """verl's whitening; masked slots are 0 here and left-overs there."""
    return _masked_whiten(values, mask, shift_mean=shift_mean)


def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float | Tensor,
    lam: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """(whitened advantages, returns), [B, T]; 0 at masked slots, where verl leaves the carry.

    gamma and lam as tensors are read by the host.
    """
    gamma, lam = float(gamma), float(lam)
    out = _gae(token_level_rewards, values, response_mask, gamma=gamma, lam=lam)
    return _masked_whiten(out.advantages, response_mask, stats=out.stats), out.returns
