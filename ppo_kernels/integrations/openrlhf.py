"""OpenRLHF's functions by the names and signatures they have in OpenRLHF 0.11, on the fused ops.

They are assigned where they are used, in each process that computes (Ray's workers import for
themselves); the second is a method there:

    from openrlhf.models import actor
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
    from ppo_kernels.integrations import openrlhf as fused
    actor.log_probs_from_logits = fused.log_probs_from_logits
    advantages = staticmethod(fused.get_advantages_and_returns)
    RemoteExperienceMaker.get_advantages_and_returns = advantages
"""

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
