"""The PPO core for language models as fused PyTorch ops: the public names, nothing else."""

from typing import Any

from ppo_kernels.ops.gae import Advantages, gae
from ppo_kernels.ops.hidden import lm_loss, logprobs_from_hidden, ppo_loss_from_hidden
from ppo_kernels.ops.logprobs import entropy_from_logits, logprobs_from_logits
from ppo_kernels.ops.loss import PPOLoss, ppo_loss, ppo_loss_from_logits
from ppo_kernels.ops.rewards import compute_rewards, kl_penalty
from ppo_kernels.ops.whitening import masked_mean, masked_whiten

__version__ = "0.1.0"

__all__ = [
    "Advantages",
    "PPOLoss",
    "compute_rewards",
    "entropy_from_logits",
    "gae",
    "kl_penalty",
    "lm_loss",
    "logprobs_from_hidden",
    "logprobs_from_logits",
    "masked_mean",
    "masked_whiten",
    "ppo_loss",
    "ppo_loss_from_hidden",
    "ppo_loss_from_logits",
]

# TRL's import line works, and `import ppo_kernels` still does not import transformers.
_LAZY = {
    "AutoModelForCausalLMWithValueHead": "models",
    "AutoModelForSeq2SeqLMWithValueHead": "models",
    "PPOConfig": "trainer",
    "PPOTrainer": "trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ppo_kernels' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"ppo_kernels.{_LAZY[name]}"), name)
