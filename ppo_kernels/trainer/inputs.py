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
        responses = [self.ids(f"responses[{i}]", r) for i, r in enumerate(responses)]
        sizes = [len(r) for r in responses]
        rows = enumerate(zip(queries, sizes))
        queries = [self.query(f"queries[{i}]", q, f"responses[{i}]", n) for i, (q, n) in rows]
        scores, rewards = self._scores(scores, sizes)
        masks = _per_token("response_masks", response_masks, sizes, 1.0)
        added = _per_token("token_scores", token_scores, sizes, 0.0)
        sampler = _per_token("rollout_logprobs", rollout_logprobs, sizes, math.nan)
        first = [int(self.start is not None and r[:1].tolist() == [self.start]) for r in responses]
        responses, masks, rewards, sampler = (
            [x[start:] for x, start in zip(xs, first)]
            for xs in (responses, masks, map(torch.add, rewards, added), sampler)
        )
        finished = [bool(torch.isin(r, self.eos).any()) for r in responses]
        truncated = [not end for end in finished] if truncated is None else map(bool, truncated)
        return {
            "queries": queries,
            "responses": responses,
            "response_masks": masks,
            "scores": scores,
            "finished": torch.tensor(finished, dtype=torch.bool),
            "truncated": torch.tensor([*truncated], dtype=torch.bool),
            "token_scores": torch.cat([torch.empty(0), *rewards]),
            "rollout_logprobs": torch.cat([torch.empty(0), *sampler]),
        }

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

    def _scores(self, scores: Any, sizes: list[int]) -> tuple[Tensor, list[Tensor]]:
        """([B] scores of whole responses, [n] rewards of the tokens of each)."""
        # [1] is a number for the response, unless other rows show that it is one for its one token.
        per_token = any(getattr(s, "ndim", 0) == 1 and len(s) != 1 for s in scores)
        whole, rewards = torch.zeros(len(sizes)), [torch.zeros(n) for n in sizes]
        for i, (score, n) in enumerate(zip(scores, sizes)):
            try:
                x = torch.as_tensor(score, dtype=torch.float32).detach().cpu()
            except (TypeError, ValueError, RuntimeError):
                raise TypeError(f"scores[{i}] must be a number, got {score!r}") from None
            if not torch.isfinite(x).all():
                raise ValueError(f"scores[{i}] must be finite, got {x.tolist()}")
            shape, scaled = tuple(x.shape), self.cfg.use_score_scaling
            if shape == () or (shape == (1,) and not (per_token and n == 1)):
                whole[i] = float(x)
            elif shape == (n,) and not scaled:
                rewards[i] = x
            else:
                or_tokens = "" if scaled else f", or one for each of {n} tokens"
                raise ValueError(f"scores[{i}] must be a number{or_tokens}, got shape {shape}")
        return whole, rewards

    def ptx(self, batch: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
        """ptx_batch as (query, response, mask) rows for collate; a first token is only context."""
        if batch is None:
            return []
        if not self.cfg.ptx_coef:
            raise ValueError("ptx_batch needs ptx_coef > 0 in PPOConfig, got 0")
        given = batch if hasattr(batch, "keys") else {"input_ids": batch}
        if self.start is not None:
            if given is batch:
                raise TypeError(
                    "ptx_batch must hold (source, target) pairs for seq2seq, got a dict"
                )
            pairs = [[self.ids(f"ptx_batch[{i}]", x) for x in pair] for i, pair in enumerate(batch)]
            return [(x, y, torch.ones_like(y)) for x, y in pairs]
        texts = [self.ids(f"ptx_batch[{i}]", x) for i, x in enumerate(given["input_ids"])]
        real = [m.cpu() != 0 for m in given.get("attention_mask", map(torch.ones_like, texts))]
        learnt = [y.cpu() != -100 for y in given.get("labels", texts)]
        rows = [(x[m], y[m]) for x, y, m in zip(texts, learnt, real)]
        return [(x[:1], x[1:], mask[1:]) for x, mask in rows if len(x) > 1]


def _per_token(name: str, rows: Any, sizes: list[int], fill: float) -> list[Tensor]:
    """[n] fp32, finite, for each response; `fill` where nothing was given."""
    out = [torch.full((n,), fill) for n in sizes]
    for i, n in enumerate(sizes if rows is not None else ()):
        if rows[i] is None:
            continue
        out[i] = torch.as_tensor(rows[i]).detach().cpu().float()
        if tuple(out[i].shape) != (n,) or not torch.isfinite(out[i]).all():
            raise ValueError(
                f"{name}[{i}] must have one finite entry for each of the {n} response tokens, "
                f"got shape {tuple(out[i].shape)}: {out[i].flatten()[:8].tolist()}"
            )
    return out
