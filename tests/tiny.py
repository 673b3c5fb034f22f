"""Tiny models, rows and a tokenizer for the trainer's tests."""

from typing import Any

import torch
import transformers

from ppo_kernels.models import AutoModelForCausalLMWithValueHead
from ppo_kernels.trainer import PPOConfig, PPOTrainer

VOCAB, EOS = 61, 1


def gpt2(seed: int = 0, dropout: float = 0.0, **options: Any) -> Any:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=EOS,
        **options,
    )
    return transformers.GPT2LMHeadModel(config)


def policy(seed: int = 0, dropout: float = 0.0, **options: Any) -> Any:
    return AutoModelForCausalLMWithValueHead(
        gpt2(seed, dropout, **options), summary_dropout_prob=dropout
    )


def t5(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.1,
        pad_token_id=0,
        eos_token_id=EOS,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def rows(n: int = 4, seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
    """n ragged queries, responses (all but every fourth end with EOS) and scores."""
    g = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> torch.Tensor:
        length = int(torch.randint(low, high, (1,), generator=g))
        return torch.randint(3, VOCAB, (length,), generator=g)

    queries = [ids(2, 7) for _ in range(n)]
    responses = [ids(2, 9) for _ in range(n)]
    for i, r in enumerate(responses):
        if i % 4 != 3:
            r[-1] = EOS
    return queries, responses, torch.randn(n, generator=g).tolist()


def trainer(model: Any = None, ref_model: Any = None, **fields: Any) -> PPOTrainer:
    """A trainer whose defaults suit four rows."""
    options = {k: fields.pop(k) for k in ("tokenizer", "optimizer", "reference") if k in fields}
    config = {"batch_size": 4, "mini_batch_size": 2, "ppo_epochs": 2, "learning_rate": 1e-3}
    config = PPOConfig(**config | fields)
    return PPOTrainer(config, policy() if model is None else model, ref_model, **options)


class Tokenizer:
    """Words w0, w1, .. are the ids; has an EOS and no pad token."""

    eos_token_id, pad_token_id, padding_side = EOS, None, "right"

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word[1:]) for word in text.split()]}

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool = True) -> str:
        return " ".join(f"w{i}" for i in ids.tolist() if i != EOS or not skip_special_tokens)
