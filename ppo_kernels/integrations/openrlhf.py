"""OpenRLHF's functions by their own names and signatures, on the fused ops."""

from torch import Tensor

from ppo_kernels.ops.gae import gae as _gae
from ppo_kernels.ops.logprobs import logprobs_from_logits as _logprobs_from_logits

__all__ = ["get_advantages_and_returns", "log_probs_from_logits"]


def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-prob of each label, fp32. The logits are left alone; OpenRLHF divides them in place."""
    return _logprobs_from_logits(logits, labels, temperature=temperature)


def get_advantages_and_returns(
    values: Tensor, rewards: Tensor, action_mask: Tensor | None, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), [B, T].

    Equal to OpenRLHF's where the mask only pads on the right. Across a hole inside a response
    (tool output) OpenRLHF keeps decaying through values of 0; here a hole is no transition.
    """
    out = _gae(rewards, values, action_mask, gamma=gamma, lam=lambd)
    return out.advantages, out.returns
