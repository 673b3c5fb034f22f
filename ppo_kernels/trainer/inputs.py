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

    def __init__(self, cfg: PPOConfig, model_config: Any, eos_ids: Sequence[int] = ()) -> None:
        self.cfg, self.eos = cfg, torch.tensor(eos_ids, dtype=torch.int64)
        self.vocab_size = getattr(model_config, "vocab_size", None) or math.inf
        seq2seq = getattr(model_config, "is_encoder_decoder", False)
        self.start = model_config.decoder_start_token_id if seq2seq else None
        length = getattr(model_config, "max_position_embeddings", None) or 0
        self.max_length = length if length > 0 and not seq2seq else math.inf

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
        lists = {"response_masks": response_masks, "truncated": truncated}
        lists |= {"token_scores": token_scores, "rollout_logprobs": rollout_logprobs}
        given = {name: x for name, x in lists.items() if x is not None}
        for name, x in {"responses": responses, "scores": scores, **given}.items():
            if not hasattr(x, "__len__"):
                raise TypeError(f"{name} must have one entry per query, got {type(x).__name__}")
            if len(x) != B:
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
        added = _per_token("token_scores", token_scores, sizes, 0.0)
        masks = _per_token("response_masks", response_masks, sizes, 1.0)
        sampler = _per_token("rollout_logprobs", rollout_logprobs, sizes, math.nan)
        first = [int(self.start is not None and r[:1].tolist() == [self.start]) for r in responses]
        responses, masks, rewards, sampler = (
            [x[start:] for x, start in zip(xs, first)]
            for xs in (responses, masks, map(torch.add, rewards, added), sampler)
        )
        out = {"queries": queries, "responses": responses, "response_masks": masks}
        finished = torch.tensor([bool(torch.isin(r, self.eos).any()) for r in responses]).bool()
        cut_off = ~finished if truncated is None else torch.tensor([*map(bool, truncated)]).bool()
        out |= {"scores": scores, "finished": finished, "truncated": cut_off}
        for name, xs in (("token_scores", rewards), ("rollout_logprobs", sampler)):
            out[name] = torch.cat([torch.empty(0), *xs])
        return out

    def ids(self, name: str, x: Any) -> Tensor:
        """A 1-D integer tensor of known tokens, as int64 on the CPU."""
        if not isinstance(x, Tensor) or x.dim() != 1 or x.dtype not in (torch.int64, torch.int32):
            got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} must be a 1-D tensor of token ids, got {got}")
        x, V = x.detach().long().cpu(), self.vocab_size
        if x.numel() and (x.min() < 0 or x.max() >= V):
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
            elif shape != (n,) or scaled:
                or_tokens = "" if scaled else f", or one for each of {n} tokens"
                raise ValueError(f"scores[{i}] must be a number{or_tokens}, got shape {shape}")
            else:
                rewards[i] = x
        return whole, rewards

    def ptx(self, batch: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
        """ptx_batch as (query, response, mask) rows for collate; a first token is only context."""
        if batch is None:
            return []
        if not self.cfg.ptx_coef:
            raise ValueError("ptx_batch needs ptx_coef > 0 in PPOConfig, got 0")
        given = batch if hasattr(batch, "keys") else {"input_ids": batch}
        if given is batch and self.start is not None:
            raise TypeError("ptx_batch must hold (source, target) pairs for seq2seq, got a dict")
        if self.start is not None:
            pairs = [[self.ids(f"ptx_batch[{i}]", x) for x in pair] for i, pair in enumerate(batch)]
            return [(x, y, torch.ones_like(y)) for x, y in pairs]
        texts = [self.ids(f"ptx_batch[{i}]", x) for i, x in enumerate(given["input_ids"])]
        real = [m.cpu() != 0 for m in given.get("attention_mask", map(torch.ones_like, texts))]
        learnt = [y.cpu() != -100 for y in given.get("labels", texts)]
        rows = [(x[m], y[m]) for x, y, m in zip(texts, learnt, real)]
        return [(x[:1], x[1:], mask[1:]) for x, mask in rows if len(x) > 1]


def _per_token(name: str, rows: Any, sizes: list[int], fill: float) -> list[Tensor]:
    """[n] fp32, finite, for each response; of `fill` if nothing was given."""
    if rows is None:
        return [torch.full((n,), fill) for n in sizes]
    rows = [torch.as_tensor(row).detach().cpu().float() for row in rows]
    for i, (x, n) in enumerate(zip(rows, sizes)):
        if tuple(x.shape) != (n,) or not torch.isfinite(x).all():
            raise ValueError(
                f"{name}[{i}] must have one finite entry for each of the {n} response tokens, "
                f"got shape {tuple(x.shape)}: {x.flatten()[:8].tolist()}"
            )
    return rows
