"""Everything that is learned before PPO: the tokenizer, the language model, the reward model.

All three come from nothing: a byte-level BPE trained on the train split, a GPT-2 with random
weights, and a scalar head on a copy of that GPT-2.
"""

import math
from collections.abc import Callable, Iterator

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from ppo_kernels.demo.data import Snippet, Split
from ppo_kernels.demo.settings import Settings

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
# Pairs of snippets are compared when their mean ratings differ by more than this.
RATING_MARGIN = 1.0

Tick = Callable[[str], None]


def train_tokenizer(split: Split, settings: Settings) -> PreTrainedTokenizerFast:
    """A byte-level BPE of the train split's texts, as a transformers tokenizer."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        [s.text for s in split.train],
        vocab_size=settings.vocab_size,
        special_tokens=[PAD, BOS, EOS],
        show_progress=False,
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD
    )


def encode(
    tokenizer: PreTrainedTokenizerFast, snippets: list[Snippet], max_tokens: int
) -> list[Tensor]:
    """BOS + text + EOS of each snippet, cut at max_tokens (a cut text has no EOS)."""
    texts = tokenizer([s.text for s in snippets], add_special_tokens=False)["input_ids"]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return [torch.tensor([bos, *ids, eos][:max_tokens]) for ids in texts]


def pad(rows: list[Tensor], pad_token_id: int) -> Tensor:
    """[B, T], padded on the right."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_token_id)


def batches(n: int, size: int, generator: torch.Generator) -> Iterator[list[int]]:
    """One epoch of shuffled indices; a last batch that is not full is left out."""
    order = torch.randperm(n, generator=generator).tolist()
    for start in range(0, n - size + 1, size):
        yield order[start : start + size]


def optimizer(
    model: torch.nn.Module, lr: float, embedding_lr: float, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW with a rate of its own for embeddings, which see each row rarely; linear decay."""
    tables = [p for name, p in model.named_parameters() if "wte" in name or "wpe" in name]
    chosen = {id(p) for p in tables}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    groups = [{"params": rest, "lr": lr}, {"params": tables, "lr": embedding_lr}]
    adamw = torch.optim.AdamW(groups, weight_decay=0.1, fused=True)
    decay = torch.optim.lr_scheduler.LambdaLR(adamw, lambda k: 1 - k / steps)
    return adamw, decay


# ------------------------------------------------------------------------------------- SFT


def new_language_model(tokenizer: PreTrainedTokenizerFast, settings: Settings) -> GPT2LMHeadModel:
    """A small GPT-2 with random weights; token embeddings start wider than GPT-2's .02."""
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=64,
        n_embd=settings.width,
        n_layer=settings.layers,
        n_head=settings.heads,
        resid_pdrop=settings.dropout,
        embd_pdrop=settings.dropout,
        attn_pdrop=settings.dropout,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = GPT2LMHeadModel(config)
    torch.nn.init.normal_(model.transformer.wte.weight, std=0.05)
    return model


def sft_loss(model: GPT2LMHeadModel, ids: Tensor, pad_token_id: int) -> Tensor:
    """Mean negative log-prob of the tokens after BOS, in nats."""
    labels = ids[:, 1:]
    real = labels != pad_token_id
    hidden = model.transformer(ids).last_hidden_state[:, :-1][real]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden), labels[real])


def train_language_model(
    split: Split, tokenizer: PreTrainedTokenizerFast, settings: Settings, seed: int, tick: Tick
) -> tuple[GPT2LMHeadModel, dict[str, float]]:
    """Next-token training on the train split; returns the model and its held-out loss."""
    torch.manual_seed(seed)
    model = new_language_model(tokenizer, settings)
    rows = encode(tokenizer, split.train, settings.max_tokens)
    size, epochs = settings.sft_batch, settings.sft_epochs
    steps = epochs * (len(rows) // size)
    adamw, decay = optimizer(model, settings.sft_lr, settings.sft_embedding_lr, steps)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(epochs):
        for chosen in batches(len(rows), size, generator):
            ids = pad([rows[i] for i in chosen], tokenizer.pad_token_id)
            loss = sft_loss(model, ids, tokenizer.pad_token_id)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adamw.step()
            decay.step()
            adamw.zero_grad()
            tick(f"loss {loss.item():.2f}")
    return model.eval(), {"held_out_nats_per_token": held_out_loss(model, split, tokenizer, settings)}


@torch.no_grad()
def held_out_loss(
    model: GPT2LMHeadModel, split: Split, tokenizer: PreTrainedTokenizerFast, settings: Settings
) -> float:
    """Nats per token on the held-out snippets."""
    total = count = 0.0
    rows = encode(tokenizer, split.held_out, settings.max_tokens)
    for start in range(0, len(rows), 128):
        part = rows[start : start + 128]
        n = sum(len(r) - 1 for r in part)
        ids = pad(part, tokenizer.pad_token_id)
        total += n * sft_loss(model, ids, tokenizer.pad_token_id).item()
        count += n
    return total / count


# ---------------------------------------------------------------------------- reward model


def pair_loss(scores: Tensor, ratings: Tensor) -> Tensor:
    """Bradley-Terry: -mean ln sigmoid(score_i - score_j) over pairs rated margin apart, i above."""
    above = ratings[:, None] - ratings[None, :] > RATING_MARGIN
    return -torch.nn.functional.logsigmoid(scores[:, None] - scores[None, :])[above].mean()


def score(model: GPT2ForSequenceClassification, rows: list[Tensor]) -> Tensor:
    """Reward-model score [B] of token rows: the scalar head at each row's last token."""
    ids = pad(rows, model.config.pad_token_id)
    hidden = model.transformer(ids).last_hidden_state
    last = torch.tensor([len(r) - 1 for r in rows])
    return model.score(hidden[torch.arange(len(rows)), last]).squeeze(-1)


def train_reward_model(
    language_model: GPT2LMHeadModel,
    split: Split,
    tokenizer: PreTrainedTokenizerFast,
    settings: Settings,
    seed: int,
    tick: Tick,
) -> tuple[GPT2ForSequenceClassification, dict[str, float]]:
    """A scalar head on a copy of the language model's body, trained on all pairs of each batch."""
    torch.manual_seed(seed)
    config = GPT2Config.from_dict(language_model.config.to_dict() | {"num_labels": 1})
    model = GPT2ForSequenceClassification(config)
    model.transformer.load_state_dict(language_model.transformer.state_dict())
    rows = encode(tokenizer, split.train, settings.max_tokens)
    ratings = torch.tensor([s.rating for s in split.train])
    size, epochs = settings.reward_batch, settings.reward_epochs
    steps = epochs * (len(rows) // size)
    adamw, decay = optimizer(model, settings.reward_lr, settings.reward_embedding_lr, steps)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(epochs):
        for chosen in batches(len(rows), size, generator):
            loss = pair_loss(score(model, [rows[i] for i in chosen]), ratings[chosen])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adamw.step()
            decay.step()
            adamw.zero_grad()
            tick(f"loss {loss.item():.2f}")
    accuracy = pair_accuracy(model.eval(), split, tokenizer, settings)
    return model, {"held_out_pair_accuracy": accuracy, "chance": 0.5}


@torch.no_grad()
def pair_accuracy(
    model: GPT2ForSequenceClassification,
    split: Split,
    tokenizer: PreTrainedTokenizerFast,
    settings: Settings,
) -> float:
    """Share of all held-out pairs rated margin apart whose order the model's scores keep."""
    rows = encode(tokenizer, split.held_out, settings.max_tokens)
    scores = torch.cat([score(model, rows[i : i + 128]) for i in range(0, len(rows), 128)])
    ratings = torch.tensor([s.rating for s in split.held_out])
    above = ratings[:, None] - ratings[None, :] > RATING_MARGIN
    return (scores[:, None] > scores[None, :])[above].double().mean().item()
