"""What users hand to the trainer, checked row by row before any work is done."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppo_kernels.trainer.config import PPOConfig


class Inputs(NamedTuple):
    """Checked rows on the CPU; token_scores and rollout_logprobs are flat over response tokens."""

    queries: list[Tensor]
    responses: list[Tensor]
    masks: list[Tensor]
    scores: Tensor
    token_scores: Tensor
    rollout_logprobs: Tensor
    finished: Tensor
    truncated: Tensor


class InputChecker:
    """The limits of one model and configuration. Errors name argument and row; nothing changes."""

    def __init__(self, cfg: PPOConfig, model_config: Any, eos_ids: list[int], start: int | None):
        self.cfg, self.start_token_id = cfg, start
        self.eos = torch.tensor(eos_ids, dtype=torch.int64)
        self.vocab_size = getattr(model_config, "vocab_size", None)
        length = getattr(model_config, "max_position_embeddings", None) or 0
        self.max_length = length if start is None and length > 0 else None

    def __call__(
        self,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        scores: Any,
        response_masks: Sequence[Tensor] | None = None,
        truncated: Sequence[bool] | None = None,
        token_scores: Sequence[Tensor] | None = None,
        rollout_logprobs: Sequence[Tensor] | None = None,
    ) -> Inputs:
        lists = {"responses": responses, "scores": scores, "response_masks": response_masks}
        lists |= {"truncated": truncated, "token_scores": token_scores}
        B, most = len(queries), self.cfg.batch_size
        for name, x in (lists | {"rollout_logprobs": rollout_logprobs}).items():
            if x is not None and len(x) != B:
                raise ValueError(f"{name} must have one entry per query, {B}, got {len(x)}")
        if most < B:
            raise ValueError(f"queries must be at most batch_size = {most}, got {B}")
        if self.cfg.rollout_is_cap is not None and rollout_logprobs is None:
            raise ValueError("rollout_is_cap needs rollout_logprobs, got None")
        queries = [self.ids(f"queries[{i}]", q) for i, q in enumerate(queries)]
        responses = [self._response(i, q, r) for i, (q, r) in enumerate(zip(queries, responses))]
        pairs = [self._score(i, s, len(r)) for i, (s, r) in enumerate(zip(scores, responses))]
        extra = _per_token("token_scores", token_scores, responses, 0.0)
        behaviour = _per_token("rollout_logprobs", rollout_logprobs, responses, math.nan)
        skip = 0 if self.start_token_id is None else 1  # the start token is no action
        none = torch.empty(0)
        finished = [bool(torch.isin(r[skip:], self.eos).any()) for r in responses]
        truncated = [not f for f in finished] if truncated is None else map(bool, truncated)
        return Inputs(
            queries,
            responses,
            masks=_per_token("response_masks", response_masks, responses, 1.0),
            scores=torch.tensor([score for score, _ in pairs], dtype=torch.float64),
            token_scores=torch.cat([none, *((a + b)[skip:] for (_, a), b in zip(pairs, extra))]),
            rollout_logprobs=torch.cat([none, *(x[skip:] for x in behaviour)]),
            finished=torch.tensor(finished, dtype=torch.bool),
            truncated=torch.tensor(list(truncated), dtype=torch.bool),
        )

    def ids(self, name: str, x: Any) -> Tensor:
        """A 1-D integer tensor of known tokens, as int64 on the CPU."""
        if not isinstance(x, Tensor) or x.dim() != 1 or x.dtype not in (torch.int64, torch.int32):
            got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} must be a 1-D tensor of token ids, got {got}")
        x, V = x.detach().long().cpu(), self.vocab_size
        if x.numel() and (x.min() < 0 or (V is not None and x.max() >= V)):
            raise ValueError(
                f"{name} must hold ids in [0, {V}), got {int(x.min())} to {int(x.max())}"
            )
        return x

    def _response(self, i: int, query: Tensor, response: Any) -> Tensor:
        x = self.ids(f"responses[{i}]", response)
        if self.start_token_id is not None and (not len(x) or x[0] != self.start_token_id):
            x = torch.cat([torch.tensor([self.start_token_id]), x])
        if not len(query):
            raise ValueError(f"queries[{i}] is empty: the first action needs a token before it")
        if self.max_length is not None and len(query) + len(x) > self.max_length:
            raise ValueError(
                f"queries[{i}] and responses[{i}] have {len(query) + len(x)} tokens together, "
                f"the model takes at most {self.max_length}"
            )
        return x

    def _score(self, i: int, score: Any, n: int) -> tuple[float, Tensor]:
        """(score of the whole response, rewards of its n tokens)."""
        x = torch.as_tensor(score, dtype=torch.float32).detach().cpu()
        if not torch.isfinite(x).all():
            raise ValueError(f"scores[{i}] must be finite, got {x.tolist()}")
        if x.numel() == 1 and x.dim() <= 1:
            return float(x), torch.zeros(n)
        if tuple(x.shape) != (n,) or self.cfg.use_score_scaling:
            per_token = "" if self.cfg.use_score_scaling else f", or one for each of {n} tokens"
            raise ValueError(f"scores[{i}] must be a number{per_token}, got shape {tuple(x.shape)}")
        return 0.0, x

    def ptx(self, batch: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
        """ptx_batch as (query, response, mask) rows for collate; a first token is only context."""
        if batch is None:
            return []
        if not self.cfg.ptx_coef:
            raise ValueError("ptx_batch needs ptx_coef > 0 in PPOConfig, got 0")
        if self.start_token_id is not None:
            pairs = [[self.ids(f"ptx_batch[{i}]", x) for x in pair] for i, pair in enumerate(batch)]
            targets = [torch.cat([torch.tensor([self.start_token_id]), y]) for _, y in pairs]
            return [(x, y, torch.ones_like(y)) for (x, _), y in zip(pairs, targets)]
        texts = batch["input_ids"] if hasattr(batch, "keys") else batch
        texts = [self.ids(f"ptx_batch[{i}]", x) for i, x in enumerate(texts)]
        masks = [torch.ones_like(x) for x in texts]
        if hasattr(batch, "keys"):
            real = [m.cpu() != 0 for m in batch.get("attention_mask", masks)]
            labels = [y.cpu() for y in batch.get("labels", masks)]
            masks = [(y != -100)[m] for y, m in zip(labels, real)]
            texts = [x[m] for x, m in zip(texts, real)]
        return [(x[:1], x[1:], mask[1:]) for x, mask in zip(texts, masks) if len(x) > 1]


def _per_token(
    name: str, rows: Sequence[Any] | None, responses: list[Tensor], fill: float
) -> list[Tensor]:
    """One finite fp32 number per response token; `fill` if nothing was given."""
    if rows is None:
        return [torch.full((len(r),), fill) for r in responses]
    out = [torch.as_tensor(row).detach().cpu().float() for row in rows]
    for i, (x, r) in enumerate(zip(out, responses)):
        if tuple(x.shape) != (len(r),) or not torch.isfinite(x).all():
            raise ValueError(
                f"{name}[{i}] must have one finite entry for each of the {len(r)} response tokens, "
                f"got shape {tuple(x.shape)}: {x.flatten()[:8].tolist()}"
            )
    return out
