"""The PPO core for language models as fused PyTorch ops."""

__version__ = "0.1.0"
