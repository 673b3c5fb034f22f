"""Everything that is learned before PPO: the tokenizer, the language model, the reward model.

All three come from nothing: a byte-level BPE trained on the train split, a GPT-2 with random
weights, and a scalar head on a copy of that GPT-2.
"""

from collections.abc import Callable, Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from ppo_kernels.demo.data import Snippet, Split
from ppo_kernels.demo.settings import Settings
from ppo_kernels.models import sequence_scores

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
# Two snippets are a pair when their mean ratings differ by more than this.
RATING_MARGIN = 1.0
# Rows of a forward without gradients: bounds memory only.
CHUNK = 128

Tick = Callable[[str], None]


def train_tokenizer(split: Split, vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of the train split's texts, as a transformers tokenizer."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((s.text for s in split.train), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, pad_token=PAD
    )


def encode(
    tokenizer: PreTrainedTokenizerFast, snippets: Sequence[Snippet], max_tokens: int
) -> list[Tensor]:
    """BOS + text + EOS of each snippet, cut at max_tokens (a text that is cut has no EOS)."""
    texts = tokenizer([s.text for s in snippets], add_special_tokens=False)["input_ids"]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return [torch.tensor([bos, *ids, eos][:max_tokens]) for ids in texts]


def pad(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """([B, T] ids, [B, T] attention mask), padded on the right with id 0, the pad token's."""
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()


def fit(
    model: nn.Module,
    loss_of: Callable[[list[int]], Tensor],
    rows: int,
    *,
    batch_size: int,
    epochs: int,
    lr: float,
    embedding_lr: float,
    seed: int,
    tick: Tick,
) -> None:
    """AdamW with linear decay over shuffled batches; a last batch that is not full is left out.

    Embeddings have a rate of their own: a step sees few of their rows.
    """
    tables = [p for name, p in model.named_parameters() if "wte" in name or "wpe" in name]
    rest = [p for name, p in model.named_parameters() if "wte" not in name and "wpe" not in name]
    groups = [{"params": rest, "lr": lr}, {"params": tables, "lr": embedding_lr}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.1, fused=True)
    steps = epochs * (rows // batch_size)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 - k / steps)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(epochs):
        order = torch.randperm(rows, generator=generator)
        for chosen in order.split(batch_size)[: rows // batch_size]:
            loss = loss_of(chosen.tolist())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            decay.step()
            tick(f"loss {loss.item():.2f}")
    model.eval()


# -------------------------------------------------------------------------- language model


def new_language_model(tokenizer: PreTrainedTokenizerFast, settings: Settings) -> GPT2LMHeadModel:
    """A small GPT-2 with random weights, without dropout: a few epochs do not overfit."""
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=64,
        n_embd=settings.width,
        n_layer=settings.layers,
        n_head=settings.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        activation_function="gelu_pytorch_tanh",  # GPT-2's own, in one kernel
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=1,
    )
    model = GPT2LMHeadModel(config)
    # GPT-2's .02 suits its width of 768; so narrow a model learns much faster from .05.
    nn.init.normal_(model.transformer.wte.weight, std=0.05)
    return model


def next_token_loss(model: GPT2LMHeadModel, rows: Sequence[Tensor]) -> Tensor:
    """Mean negative log-prob of every token after BOS, in nats."""
    ids, attention = pad(rows)
    real = attention[:, 1:].bool()
    # No attention mask: padding is on the right, where a causal model never looks.
    hidden = model.transformer(ids).last_hidden_state[:, :-1]
    return nn.functional.cross_entropy(model.lm_head(hidden[real]), ids[:, 1:][real])


def train_language_model(
    split: Split, tokenizer: PreTrainedTokenizerFast, settings: Settings, seed: int, tick: Tick
) -> tuple[GPT2LMHeadModel, dict[str, float]]:
    """Next-token training on the train split; returns the model and its held-out loss."""
    torch.manual_seed(seed)
    model = new_language_model(tokenizer, settings)
    rows = encode(tokenizer, split.train, settings.max_tokens)
    fit(
        model,
        lambda chosen: next_token_loss(model, [rows[i] for i in chosen]),
        len(rows),
        batch_size=settings.sft_batch,
        epochs=settings.sft_epochs,
        lr=settings.sft_lr,
        embedding_lr=settings.sft_embedding_lr,
        seed=seed,
        tick=tick,
    )
    held_out = encode(tokenizer, split.held_out, settings.max_tokens)
    return model, {"held_out_nats_per_token": held_out_loss(model, held_out)}


@torch.no_grad()
def held_out_loss(model: GPT2LMHeadModel, rows: list[Tensor]) -> float:
    """Nats per token, over all tokens after BOS."""
    total = count = 0.0
    for start in range(0, len(rows), CHUNK):
        part = rows[start : start + CHUNK]
        n = sum(len(row) - 1 for row in part)
        total += n * next_token_loss(model, part).item()
        count += n
    return total / count


# ---------------------------------------------------------------------------- reward model


def scores_of(model: nn.Module, rows: Sequence[Tensor]) -> Tensor:
    """Reward-model score [B] of token rows: the scalar head at each row's last token."""
    return sequence_scores(model, *pad(rows))


def pairs_above(ratings: Tensor) -> Tensor:
    """[B, B] bool: row i is rated more than RATING_MARGIN above row j."""
    return ratings[:, None] - ratings[None, :] > RATING_MARGIN


def pair_loss(scores: Tensor, ratings: Tensor) -> Tensor:
    """Bradley-Terry: -mean ln sigmoid(score_i - score_j) over all pairs with i rated above j."""
    above = pairs_above(ratings)
    return -nn.functional.logsigmoid(scores[:, None] - scores[None, :])[above].mean()


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
    model = GPT2ForSequenceClassification(language_model.config)
    model.transformer.load_state_dict(language_model.transformer.state_dict())
    rows = encode(tokenizer, split.train, settings.max_tokens)
    ratings = torch.tensor([s.rating for s in split.train])
    fit(
        model,
        lambda chosen: pair_loss(scores_of(model, [rows[i] for i in chosen]), ratings[chosen]),
        len(rows),
        batch_size=settings.reward_batch,
        epochs=settings.reward_epochs,
        lr=settings.reward_lr,
        embedding_lr=settings.reward_embedding_lr,
        seed=seed,
        tick=tick,
    )
    held_out = encode(tokenizer, split.held_out, settings.max_tokens)
    accuracy = pair_accuracy(model, held_out, torch.tensor([s.rating for s in split.held_out]))
    return model, {"held_out_pair_accuracy": accuracy}


@torch.no_grad()
def pair_accuracy(model: nn.Module, rows: list[Tensor], ratings: Tensor) -> float:
    """Share of all pairs with i rated above j whose order the model's scores keep."""
    chunks = [scores_of(model, rows[i : i + CHUNK]) for i in range(0, len(rows), CHUNK)]
    scores = torch.cat(chunks)
    right = scores[:, None] > scores[None, :]
    return right[pairs_above(ratings)].double().mean().item()
