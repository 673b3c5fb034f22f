"""PPO for language models, written with nothing but the ops of ppo_kernels."""

from ppo_kernels.trainer.config import PPOConfig
from ppo_kernels.trainer.control import AdaptiveKLController, FixedKLController, RunningMoments
from ppo_kernels.trainer.rollout import Batch, Rollout, collate
from ppo_kernels.trainer.trainer import PPOTrainer

__all__ = [
    "AdaptiveKLController",
    "Batch",
    "FixedKLController",
    "PPOConfig",
    "PPOTrainer",
    "Rollout",
    "RunningMoments",
    "collate",
]
