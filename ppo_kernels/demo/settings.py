"""Sizes and rates of the sentiment demo, in full and quick."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Settings:
    """Everything a run of the demo depends on, apart from its seed."""

    vocab_size: int = 5000
    width: int = 128
    layers: int = 2
    heads: int = 4
    dropout: float = 0.05
    max_tokens: int = 32

    sft_epochs: int = 4
    sft_batch: int = 16
    sft_lr: float = 1e-3
    sft_embedding_lr: float = 1e-2

    reward_epochs: int = 2
    reward_batch: int = 64
    reward_lr: float = 5e-4
    reward_embedding_lr: float = 2e-3

    prompt_tokens: int = 4
    response_tokens: int = 24


FULL = Settings()
QUICK = replace(FULL, vocab_size=3000, sft_epochs=2)
