"""From ragged queries and responses to tensors: `collate`, the one place that shifts; `Rollout`."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppo_kernels.ops._checks import choice


@dataclass
class Batch:
    """One forward's inputs, and where its actions are.

    input_ids, attention_mask, position_ids [B, L]; lengths [B]; mask [B, L-1] bool: True at j if
    token j+1 is an action, so that `logprobs[:, j]`, `values[:, j]` and `mask[:, j]` speak of the
    same action. The n response tokens in row-major order: `at` [n], flat positions in [B, L] of
    the state each is chosen in; `labels` [n], the tokens; `steps` [n], their index in the
    response. `ends` [B]: flat positions of the last tokens. Seq2seq: L is the decoder's length.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    mask: Tensor
    lengths: Tensor
    at: Tensor
    labels: Tensor
    steps: Tensor
    ends: Tensor
    encoder_input_ids: Tensor | None = None
    encoder_attention_mask: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        moved = {k: v if v is None else v.to(device) for k, v in vars(self).items()}
        return Batch(**moved)

    def inputs(self) -> dict[str, Tensor]:
        """Keyword arguments of the model's forward."""
        ids, attention = self.input_ids, self.attention_mask
        if self.encoder_input_ids is None:
            kwargs = {"position_ids": self.position_ids}
            return {"input_ids": ids, "attention_mask": attention, **kwargs}
        return {
            "input_ids": self.encoder_input_ids,
            "attention_mask": self.encoder_attention_mask,
            "decoder_input_ids": ids,
            "decoder_attention_mask": attention,
        }

    def scatter(self, x: Tensor) -> Tensor:
        """One number per response token, [n] -> [B, L-1], 0 elsewhere; differentiable."""
        B, L = self.input_ids.shape
        rows = torch.div(self.at, L, rounding_mode="floor")
        return x.new_zeros(B * (L - 1)).index_copy(0, self.at - rows, x).view(B, L - 1)


def collate(
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    pad_token_id: int = 0,
    padding_side: str = "left",
    response_masks: Sequence[Tensor] | None = None,
    *,
    encoder_queries: Sequence[Tensor] | None = None,
) -> Batch:
    """Pad `cat(query, response)` and mark its actions.

    queries, responses: 1-D integer tensors, a response may be empty. response_masks: like the
    responses, 0 where a token is not an action (tool output). Everything comes from lengths: the
    pad id only fills, so pad == eos is harmless. position_ids count from the first real token.
    encoder_queries (seq2seq): what the encoder reads; then queries are the decoder's start tokens.
    """
    choice("padding_side", padding_side, ("left", "right"))
    for i, q in enumerate(queries):
        if not len(q):
            raise ValueError(f"queries[{i}] is empty: the first action needs a token before it")
    rows = [torch.cat([q, r]).long().cpu() for q, r in zip(queries, responses)]
    input_ids, attention = _pad(rows, pad_token_id, padding_side)
    B, L = input_ids.shape
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    offsets = L - lengths if padding_side == "left" else torch.zeros_like(lengths)
    first = offsets + torch.tensor([len(q) for q in queries], dtype=torch.int64)
    column = torch.arange(L).expand(B, L)
    response = (column >= first[:, None]) & (column < (offsets + lengths)[:, None])
    action = response.clone()
    for i, m in enumerate(response_masks or ()):
        action[i, response[i]] = torch.as_tensor(m).bool().cpu()
    flat = response.flatten().nonzero().squeeze(-1)
    batch = Batch(
        input_ids=input_ids,
        attention_mask=attention,
        position_ids=(attention.cumsum(-1) - 1).clamp(min=0),
        mask=action[:, 1:],
        lengths=lengths,
        at=flat - 1,
        labels=input_ids.flatten()[flat],
        steps=(column - first[:, None]).flatten()[flat],
        ends=torch.arange(B) * L + offsets + lengths - 1,
    )
    if encoder_queries is not None:
        encoder = _pad([q.long().cpu() for q in encoder_queries], pad_token_id, "right")
        batch.encoder_input_ids, batch.encoder_attention_mask = encoder
    return batch


def _pad(rows: list[Tensor], fill: int, side: str) -> tuple[Tensor, Tensor]:
    """([B, L] ids, [B, L] attention); L >= 1."""
    L = max([1, *map(len, rows)])
    ids = torch.full((len(rows), L), fill, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        where = slice(L - len(row), L) if side == "left" else slice(0, len(row))
        ids[i, where], attention[i, where] = row, 1
    return ids, attention


@dataclass
class Rollout:
    """What one update learns from: B responses, right-padded, in the index convention of Batch.

    Tensors are yours to edit between `rollout` and `update`: set `mask` False to drop tokens, or
    change `rewards` and call `PPOTrainer.compute_advantages`. Index it by a slice or a list of
    rows, put several together with `Rollout.cat`, keep it with `save` and `load`.

    queries, responses: lists of 1-D tensors (seq2seq responses begin with the start token).
    mask, logprobs, ref_logprobs, values, entropy, kl (per-token penalty before its coefficient),
    rewards, advantages, returns, rollout_logprobs (NaN if none were given): [B, T].
    raw_scores, scores (after scaling, clipping and penalties), bootstrap: [B]. finished (has EOS),
    truncated: [B] bool.
    """

    queries: list[Tensor]
    responses: list[Tensor]
    mask: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    entropy: Tensor
    kl: Tensor
    rewards: Tensor
    advantages: Tensor
    returns: Tensor
    rollout_logprobs: Tensor
    raw_scores: Tensor
    scores: Tensor
    bootstrap: Tensor
    finished: Tensor
    truncated: Tensor

    def __len__(self) -> int:
        return len(self.queries)

    def __iter__(self) -> Iterator["Rollout"]:
        return (self[[i]] for i in range(len(self)))

    def __getitem__(self, rows: int | slice | Sequence[int] | Tensor) -> "Rollout":
        """The rollout of these rows; a bool mask [B] selects too."""
        if isinstance(rows, slice):
            rows = list(range(len(self))[rows])
        elif isinstance(rows, int):
            rows = [rows]
        elif isinstance(rows, Tensor):
            rows = (rows.nonzero().squeeze(-1) if rows.dtype == torch.bool else rows).tolist()
        picked = {}
        for name, x in vars(self).items():
            picked[name] = x[rows] if isinstance(x, Tensor) else [x[i] for i in rows]
        return Rollout(**picked)

    @classmethod
    def cat(cls, rollouts: Sequence["Rollout"]) -> "Rollout":
        """All rows of several rollouts, padded to the widest."""
        width = max(r.mask.shape[1] for r in rollouts)
        joined: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            parts = [getattr(r, field.name) for r in rollouts]
            if isinstance(parts[0], list):
                joined[field.name] = [x for part in parts for x in part]
                continue
            if parts[0].dim() == 2:
                parts = [torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in parts]
            joined[field.name] = torch.cat(parts)
        return cls(**joined)

    def to(self, device: torch.device | str) -> "Rollout":
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in vars(self).items()}
        return Rollout(**moved)

    def narrow(self, width: int) -> "Rollout":
        """Without the columns from width on, which must be padding."""
        cut = {
            k: v[:, :width] if isinstance(v, Tensor) and v.dim() == 2 else v
            for k, v in vars(self).items()
        }
        return Rollout(**cut)

    def save(self, path: str | Path) -> None:
        torch.save(vars(self), path)

    @classmethod
    def load(cls, path: str | Path) -> "Rollout":
        return cls(**torch.load(path, weights_only=True))


class BatchOrder:
    """Endless batches of row numbers: a permutation per epoch, its part for this rank.

    Iterating goes on where it stopped, also in the middle of an epoch; the order depends only on
    (seed, epoch), so `epoch` and `cursor` are its whole state. Rows that do not fill a batch on
    every rank wait for the next permutation.
    """

    def __init__(self, n: int, batch_size: int, seed: int, shuffle: bool, rank: int, size: int):
        if n < batch_size * size:
            raise ValueError(
                f"the data has {n} rows, fewer than batch_size = {batch_size} on {size} rank(s)"
            )
        self.n, self.batch_size, self.seed, self.shuffle = n, batch_size, seed, shuffle
        self.rank, self.size = rank, size
        self.epoch = self.cursor = 0

    def __len__(self) -> int:
        return self.n // (self.batch_size * self.size)

    def __iter__(self) -> Iterator[list[int]]:
        """The rest of this epoch."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = (
            torch.randperm(self.n, generator=generator) if self.shuffle else torch.arange(self.n)
        )
        while self.cursor < len(self):
            start = (self.cursor * self.size + self.rank) * self.batch_size
            self.cursor += 1
            yield order[start : start + self.batch_size].tolist()
        self.epoch, self.cursor = self.epoch + 1, 0
