"""From ragged queries and responses to tensors: `collate`, the one place that shifts; `Rollout`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ppo_kernels.models import position_ids
from ppo_kernels.ops._checks import choice


@dataclass
class Batch:
    """One forward's inputs and where its actions are: B rows of L tokens, n response tokens.

    input_ids, attention_mask, position_ids [B, L]; lengths [B]. mask [B, L-1]: True at j if token
    j+1 is an action, so that `logprobs[:, j]`, `values[:, j]` and `mask[:, j]` speak of the same
    one. `labels` [n]: the response tokens, row by row; `at` [n]: flat positions in [B, L] of the
    states they are chosen in. Seq2seq: L is the decoder's length.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    lengths: Tensor
    mask: Tensor
    labels: Tensor
    at: Tensor
    encoder_input_ids: Tensor | None = None
    encoder_attention_mask: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        return Batch(**{k: v if v is None else v.to(device) for k, v in vars(self).items()})

    def inputs(self) -> dict[str, Tensor]:
        """Keyword arguments of the model's forward."""
        inputs = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        if self.encoder_input_ids is None:
            return inputs | {"position_ids": self.position_ids}
        inputs = {f"decoder_{name}": x for name, x in inputs.items()}
        inputs["input_ids"] = self.encoder_input_ids
        return inputs | {"attention_mask": self.encoder_attention_mask}

    def scatter(self, x: Tensor) -> Tensor:
        """One number per response token, [n] -> [B, L-1], 0 elsewhere; differentiable."""
        B, L = self.input_ids.shape
        rows = self.at // L
        return x.new_zeros(B * (L - 1)).index_copy(0, self.at - rows, x).view(B, L - 1)


def collate(
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    pad_token_id: int = 0,
    padding_side: str = "left",
    response_masks: Sequence[Tensor] | None = None,
    *,
    start_token_id: int | None = None,
) -> Batch:
    """Pad `cat(query, response)` and mark its actions.

    queries, responses: 1-D integer tensors; a response may be empty. response_masks: like the
    responses, 0 where a token is not an action (tool output). Everything comes from lengths: the
    pad id only fills, so pad == eos is harmless. position_ids count from the first real token.
    start_token_id (seq2seq): what the decoder reads before a response; queries are the encoder's.
    """
    choice("padding_side", padding_side, ("left", "right"))
    for i, q in enumerate(queries):
        if not len(q):
            raise ValueError(f"queries[{i}] is empty: the first action needs a token before it")
    encoder = queries
    if start_token_id is not None:
        queries = [torch.tensor([start_token_id])] * len(responses)
    kinds = [torch.full_like(q, 1) for q in queries], [torch.full_like(r, 2) for r in responses]
    input_ids = _pad(padding_side, pad_token_id, queries, responses)
    kind = _pad(padding_side, 0, *kinds)
    real, response = (kind > 0).long(), kind == 2
    action, tokens = response.clone(), response.flatten().nonzero().squeeze(-1)
    if response_masks:
        action[response] = torch.cat([torch.as_tensor(m).bool().cpu() for m in response_masks])
    batch = Batch(
        input_ids=input_ids,
        attention_mask=real,
        position_ids=position_ids(real),
        lengths=real.sum(-1),
        mask=action[:, 1:],
        labels=input_ids.flatten()[tokens],
        at=tokens - 1,
    )
    if start_token_id is not None:
        batch.encoder_input_ids = _pad("right", pad_token_id, encoder)
        batch.encoder_attention_mask = _pad("right", 0, [torch.ones_like(q) for q in encoder])
    return batch


def _pad(side: str, fill: int, *columns: Sequence[Tensor]) -> Tensor:
    """[B, L] int64 of the columns, joined row by row; L >= 1, also of no rows."""
    rows = [torch.cat([x.long().cpu() for x in row]) for row in zip(*columns)]
    return pad_sequence([*rows, torch.zeros(1, dtype=torch.int64)], True, fill, side)[:-1]


def response_text(tokenizer: Any, query: Tensor, response: Tensor, alone: bool = False) -> str:
    """What a response adds to the text of its query, special tokens left out.

    Decoded together, as many tokenizers drop the space at the start of a lone response; alone: the
    response of a seq2seq model, which goes on from no text.
    """
    ids = query[:0] if alone else query
    ids = ids, torch.cat([ids, response.to(query.device)])
    before, text = (tokenizer.decode(x, skip_special_tokens=True) for x in ids)
    if not text.startswith(before):  # the decoder has tidied up across the border
        return tokenizer.decode(response, skip_special_tokens=True)
    return text[len(before) :]


# [B, T] of what is scored, and of what is made of it.
TOKEN_FIELDS = ("logprobs", "ref_logprobs", "values", "entropy", "kl")
TOKEN_FIELDS += ("token_scores", "rewards", "advantages", "returns", "rollout_logprobs")


@dataclass(repr=False)
class Rollout:
    """What one update learns from: B responses, right-padded, in the index convention of Batch.

    Yours to edit between `rollout` and `update`: set `mask` False to drop tokens, or change
    `rewards` and call `PPOTrainer.compute_advantages`. A slice, a list of rows or a bool mask [B]
    picks responses; `Rollout.cat` joins several; `save` and `load` keep it.
    """

    queries: list[Tensor]  # 1-D, as the next
    responses: list[Tensor]
    # [B, T]
    mask: Tensor  # True at the actions
    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    entropy: Tensor
    kl: Tensor  # the penalty of each token before its coefficient
    token_scores: Tensor  # rewards given per token
    rewards: Tensor  # scores and token_scores less the KL penalty
    advantages: Tensor
    returns: Tensor
    rollout_logprobs: Tensor  # the sampler's own; NaN if not given
    # [B]
    raw_scores: Tensor
    scores: Tensor  # scaled, clipped, penalised
    bootstrap: Tensor  # V after a truncated response
    finished: Tensor  # has an EOS
    truncated: Tensor

    def __len__(self) -> int:
        return len(self.queries)

    def __repr__(self) -> str:
        (B, T), n = self.mask.shape, int(self.mask.sum())
        score = float(self.raw_scores.mean()) if B else 0.0
        return f"Rollout({B} responses, {n} actions in [{B}, {T}], mean score {score:.4g})"

    def __getitem__(self, rows: int | slice | Sequence[int] | Tensor) -> "Rollout":
        rows = rows.cpu() if isinstance(rows, Tensor) else rows
        index = torch.arange(len(self))[rows].reshape(-1).tolist()
        return self._map(lambda x: x[index], lambda xs: [xs[i] for i in index])

    def _map(
        self, tensor: Callable[[Tensor], Tensor], rows: Callable[[list], list] = list
    ) -> "Rollout":
        fields = vars(self).items()
        return Rollout(**{k: tensor(v) if isinstance(v, Tensor) else rows(v) for k, v in fields})

    def to(self, device: torch.device | str) -> "Rollout":
        return self._map(lambda x: x.to(device))

    def widen(self, width: int) -> "Rollout":
        """With `width` columns: cut, or padded by zeros."""
        pad = (0, width - self.mask.shape[1])
        return self._map(lambda x: torch.nn.functional.pad(x, pad) if x.dim() == 2 else x)

    @classmethod
    def cat(cls, rollouts: Sequence["Rollout"]) -> "Rollout":
        """All rows of several rollouts, padded to the widest."""
        if not len(rollouts):
            raise ValueError("rollouts must hold at least one Rollout, got none")
        width = max(r.mask.shape[1] for r in rollouts)
        columns = zip(*(vars(r.widen(width)).values() for r in rollouts))
        return cls(*(torch.cat(c) if isinstance(c[0], Tensor) else [*chain(*c)] for c in columns))

    def save(self, path: str | Path) -> None:
        torch.save(vars(self), path)

    @classmethod
    def load(cls, path: str | Path) -> "Rollout":
        return cls(**torch.load(path, weights_only=True))
