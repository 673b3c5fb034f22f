"""What users hand to the trainer, checked row by row before any work is done."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ppo_kernels.trainer.config import PPOConfig


class InputChecker:
    """The limits of one model and configuration. Errors name argument and row; nothing changes.

    start: the start token of a seq2seq model. It is no action: a response may begin with it or
    not, and loses it here, together with its entry in lists that have one per token.
    """

    def __init__(self, cfg: PPOConfig, model_config: Any, eos_ids: list[int], start: int | None):
        self.cfg, self.start, self.eos = cfg, start, torch.tensor(eos_ids, dtype=torch.int64)
        self.vocab_size = getattr(model_config, "vocab_size", None)
        length = getattr(model_config, "max_position_embeddings", None) or 0
        self.max_length = length if start is None and length > 0 else math.inf

    def __call__(
        self,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        scores: Any,
        response_masks: Sequence[Tensor] | None = None,
        truncated: Sequence[bool] | None = None,
        token_scores: Sequence[Tensor] | None = None,
        rollout_logprobs: Sequence[Tensor] | None = None,
    ) -> dict[str, Any]:
        """queries, responses, response_masks: a list each, on the CPU. [B]: scores (0 where a row
        gives rewards per token), finished, truncated. token_scores, rollout_logprobs: flat over
        all response tokens.
        """
        B, most = len(queries), self.cfg.batch_size
        columns = {"responses": responses, "scores": scores, "response_masks": response_masks}
        columns |= {"truncated": truncated, "token_scores": token_scores}
        columns |= {"rollout_logprobs": rollout_logprobs}
        for name, x in columns.items():
            if not hasattr(x, "__len__") and (x is not None or name in ("responses", "scores")):
                raise TypeError(f"{name} must have one entry per query, got {type(x).__name__}")
            if x is not None and len(x) != B:
                raise ValueError(f"{name} must have one entry per query, {B}, got {len(x)}")
        if most < B:
            raise ValueError(f"queries must be at most batch_size = {most}, got {B}")
        if self.cfg.rollout_is_cap is not None and rollout_logprobs is None:
            raise ValueError("rollout_is_cap needs rollout_logprobs, got None")
        given = zip(queries, *([None] * B if x is None else x for x in columns.values()))
        # [1] is a number for the response, unless other rows show that it is one for its one token.
        per_token = any(getattr(s, "ndim", 0) == 1 and len(s) != 1 for s in scores)
        rows = [self._row(i, per_token, *row) for i, row in enumerate(given)]
        out = {name: [row[k] for row in rows] for k, name in enumerate(("queries", *columns))}
        out["finished"] = [bool(torch.isin(r, self.eos).any()) for r in out["responses"]]
        if truncated is None:
            out["truncated"] = [not finished for finished in out["finished"]]
        for name, dtype in (("scores", None), ("finished", torch.bool), ("truncated", torch.bool)):
            out[name] = torch.tensor(out[name], dtype=dtype)
        for name in ("token_scores", "rollout_logprobs"):
            out[name] = torch.cat([torch.empty(0), *out[name]])
        return out

    def _row(
        self,
        i: int,
        per_token: bool,
        query: Any,
        response: Any,
        score: Any,
        mask: Any,
        truncated: Any,
        *more: Any,
    ) -> tuple[Any, ...]:
        """A checked row: the same columns."""
        response = self.ids(f"responses[{i}]", response)
        n = len(response)
        query = self.query(f"queries[{i}]", query, f"responses[{i}]", n)
        score, rewards = self._score(i, per_token, score, n)
        mask = _per_token(f"response_masks[{i}]", mask, n, 1.0)
        rewards = rewards + _per_token(f"token_scores[{i}]", more[0], n, 0.0)
        sampler = _per_token(f"rollout_logprobs[{i}]", more[1], n, math.nan)
        first = int(self.start is not None and n > 0 and response[0] == self.start)
        response, mask, rewards, sampler = (x[first:] for x in (response, mask, rewards, sampler))
        return query, response, score, mask, bool(truncated), rewards, sampler

    def query(self, name: str, x: Any, response: str, n: int) -> Tensor:
        """The ids of a query that is not empty and leaves room for n tokens of a response."""
        x = self.ids(name, x)
        if not len(x):
            raise ValueError(f"{name} is empty: the first action needs a token before it")
        if len(x) + n > self.max_length:
            raise ValueError(
                f"{name} and {response} have {len(x) + n} tokens together, "
                f"the model takes at most {self.max_length}"
            )
        return x

    def ids(self, name: str, x: Any) -> Tensor:
        """A 1-D integer tensor of known tokens, as int64 on the CPU."""
        if not isinstance(x, Tensor) or x.dim() != 1 or x.dtype not in (torch.int64, torch.int32):
            got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} must be a 1-D tensor of token ids, got {got}")
        x, V = x.detach().long().cpu(), self.vocab_size
        if x.numel() and (x.min() < 0 or (V is not None and x.max() >= V)):
            got = f"{int(x.min())} to {int(x.max())}"
            raise ValueError(f"{name} must hold ids in [0, {V}), got {got}")
        return x

    def _score(self, i: int, per_token: bool, score: Any, n: int) -> tuple[float, Tensor]:
        """(score of the whole response, rewards of its n tokens)."""
        try:
            x = torch.as_tensor(score, dtype=torch.float32).detach().cpu()
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"scores[{i}] must be a number, got {score!r}") from None
        if not torch.isfinite(x).all():
            raise ValueError(f"scores[{i}] must be finite, got {x.tolist()}")
        if x.dim() == 0 or (tuple(x.shape) == (1,) and not (per_token and n == 1)):
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
        if self.start is not None:
            if hasattr(batch, "keys"):
                raise TypeError(
                    "ptx_batch must hold (source, target) pairs for seq2seq, got a dict"
                )
            pairs = [[self.ids(f"ptx_batch[{i}]", x) for x in pair] for i, pair in enumerate(batch)]
            return [(x, y, torch.ones_like(y)) for x, y in pairs]
        padded = hasattr(batch, "keys")
        texts = batch["input_ids"] if padded else batch
        texts = [self.ids(f"ptx_batch[{i}]", x) for i, x in enumerate(texts)]
        masks = [torch.ones_like(x) for x in texts]
        if padded:
            real = [m.cpu() != 0 for m in batch.get("attention_mask", masks)]
            labels = [y.cpu() for y in batch.get("labels", masks)]
            masks = [(y != -100)[m] for y, m in zip(labels, real)]
            texts = [x[m] for x, m in zip(texts, real)]
        return [(x[:1], x[1:], mask[1:]) for x, mask in zip(texts, masks) if len(x) > 1]


def _per_token(name: str, row: Any, n: int, fill: float) -> Tensor:
    """[n] fp32, finite; `fill` if nothing was given."""
    if row is None:
        return torch.full((n,), fill)
    x = torch.as_tensor(row).detach().cpu().float()
    if tuple(x.shape) != (n,) or not torch.isfinite(x).all():
        raise ValueError(
            f"{name} must have one finite entry for each of the {n} response tokens, "
            f"got shape {tuple(x.shape)}: {x.flatten()[:8].tolist()}"
        )
    return x
