"""What users hand to the trainer, checked row by row before any work is done."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ppo_kernels.trainer.config import PPOConfig


class InputChecker:
    """The limits of a model and a configuration. Errors name argument and row; nothing changes.

    others: configs of what reads the same tokens, reference and value model. start: a seq2seq
    model's start token. It is no action: a response may begin with it or not, and loses it here,
    together with its entry in lists that have one per token.
    """

    def __init__(
        self, cfg: PPOConfig, model_config: Any, eos_ids: Sequence[int] = (), others: Any = ()
    ) -> None:
        def least(name: str) -> float:
            sizes = [getattr(c, name, None) or 0 for c in (model_config, *others)]
            return min((n for n in sizes if n > 0), default=math.inf)

        self.cfg, self.eos = cfg, torch.tensor(eos_ids, dtype=torch.int64)
        self.vocab_size, self.max_length = least("vocab_size"), least("max_position_embeddings")
        seq2seq = getattr(model_config, "is_encoder_decoder", False)
        self.start = model_config.decoder_start_token_id if seq2seq else None

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
        B, most, cap = length("queries", queries), self.cfg.batch_size, self.cfg.rollout_is_cap
        length("responses", responses, B)
        if most < B:
            raise ValueError(f"queries must be at most batch_size = {most}, got {B}")
        if cap is not None and rollout_logprobs is None:
            raise ValueError("rollout_is_cap needs rollout_logprobs, got None")
        responses = [self.ids(f"responses[{i}]", r) for i, r in enumerate(responses)]
        sizes = [len(r) for r in responses]
        first = [int(self.start is not None and r[:1].tolist() == [self.start]) for r in responses]
        lengths = [n - start for n, start in zip(sizes, first)]
        rows = enumerate(zip(queries, lengths))
        queries = [self.query(f"queries[{i}]", q, f"responses[{i}]", n) for i, (q, n) in rows]
        scores, rewards = self._scores(scores, sizes)
        added = _per_token("token_scores", token_scores, sizes, 0.0)
        masks = _per_token("response_masks", response_masks, sizes, 1.0)
        fill = math.nan if cap is None else None
        sampler = _per_token("rollout_logprobs", rollout_logprobs, sizes, fill)
        responses, masks, rewards, sampler = (
            [x[start:] for x, start in zip(xs, first)]
            for xs in (responses, masks, map(torch.add, rewards, added), sampler)
        )
        out = {"queries": queries, "responses": responses, "response_masks": masks}
        finished = torch.tensor([bool(torch.isin(r, self.eos).any()) for r in responses]).bool()
        cut_off = ~finished
        if truncated is not None:
            length("truncated", truncated, B)
            flags = [_finite(f"truncated[{i}]", x, "a bool", ()) for i, x in enumerate(truncated)]
            cut_off = torch.tensor(flags) != 0
        out |= {"scores": scores, "finished": finished, "truncated": cut_off}
        for name, xs in (("token_scores", rewards), ("rollout_logprobs", sampler)):
            out[name] = torch.cat([torch.empty(0), *xs])
        return out

    def ids(self, name: str, x: Any) -> Tensor:
        """A 1-D integer tensor of known tokens, as int64 on the CPU."""
        if not isinstance(x, Tensor) or x.dim() != 1 or x.dtype not in (torch.int64, torch.int32):
            got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            got += " (is the list around it missing?)" * (isinstance(x, Tensor) and not x.dim())
            raise TypeError(f"{name} must be a 1-D tensor of token ids, got {got}")
        x, V = x.detach().long().cpu(), self.vocab_size
        if x.numel() and (x.min() < 0 or x.max() >= V):
            got = f"{int(x.min())} to {int(x.max())}"
            raise ValueError(f"{name} must hold ids in [0, {V}), got {got}")
        return x

    def query(self, name: str, x: Any, response: str = "", n: int = 0) -> Tensor:
        """The ids of a query that is not empty and leaves room for n tokens of a response."""
        x = self.ids(name, x)
        if not len(x):
            raise ValueError(f"{name} is empty: the first action needs a token before it")
        # A seq2seq model's encoder and decoder, which starts with a token more, share no positions.
        total = len(x) + n if self.start is None else max(len(x), 1 + n)
        if total > self.max_length:
            what = f"{name} and {response}" if response else name
            raise ValueError(f"{what}: {total} tokens, the model takes at most {self.max_length}")
        return x

    def _scores(self, scores: Any, sizes: list[int]) -> tuple[Tensor, list[Tensor]]:
        """([B] scores of whole responses, [n] rewards of the tokens of each)."""
        length("scores", scores, len(sizes))
        given, scaled = [], self.cfg.use_score_scaling
        for i, (score, n) in enumerate(zip(scores, sizes)):
            kind, shapes = "a finite number", [(), (1,)]
            if not scaled:
                kind, shapes = f"{kind}, or one for each of {n} tokens", [*shapes, (n,)]
            given.append(_finite(f"scores[{i}]", score, kind, *shapes))
        # [1] is a number for the response, unless other rows show that it is one for its one token.
        per_token = any(x.dim() and len(x) != 1 for x in given)
        whole, rewards = torch.zeros(len(sizes)), [torch.zeros(n) for n in sizes]
        for i, (x, n) in enumerate(zip(given, sizes)):
            if x.dim() and (len(x) != 1 or (per_token and n == 1)):
                rewards[i] = x
            else:
                whole[i] = float(x)
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
        texts = given.get("input_ids")
        names = [f"ptx_batch[{i}]" for i in range(length("ptx_batch", texts))]
        if self.start is not None:
            rows = []
            for name, pair in zip(names, texts):
                if length(name, pair) != 2:
                    raise ValueError(f"{name} must be (source, target), got {len(pair)} entries")
                y = self.ids(name, pair[1])
                rows.append((self.query(name, pair[0], "target", len(y)), y, torch.ones_like(y)))
            return rows
        texts = [*map(self.ids, names, texts)]
        sizes = [len(x) for x in texts]
        real = _per_token("ptx_batch attention_mask", given.get("attention_mask"), sizes, 1.0)
        labels = _per_token("ptx_batch labels", given.get("labels"), sizes, 0.0)
        rows = [(x[m != 0], (y != -100)[m != 0]) for x, y, m in zip(texts, labels, real)]
        rows = [(self.query(name, x), mask) for name, (x, mask) in zip(names, rows) if len(x) > 1]
        return [(x[:1], x[1:], mask[1:]) for x, mask in rows]


def length(name: str, x: Any, n: int | None = None) -> int:
    """len(x) of a list, tensor or array; it must be n if that is given."""
    try:
        got = len(None if isinstance(x, str) else x)  # the letters of a text are no rows
    except TypeError:
        raise TypeError(f"{name} must be a list or tensor, got {type(x).__name__}") from None
    if n is not None and got != n:
        raise ValueError(f"{name} must have one entry per query, {n}, got {got}")
    return got


def _finite(name: str, x: Any, kind: str, *shapes: tuple[int, ...]) -> Tensor:
    """x as finite fp32 of one of the shapes, on the CPU."""
    try:
        y = torch.as_tensor(x, dtype=torch.float32).detach().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"{name} must be {kind}, got {x!r:.80}") from None
    if tuple(y.shape) not in shapes or not torch.isfinite(y).all():
        got = f"shape {tuple(y.shape)}: {y.flatten()[:8].tolist()}"
        raise ValueError(f"{name} must be {kind}, got {got}")
    return y


def _per_token(name: str, rows: Any, sizes: list[int], fill: float | None) -> list[Tensor]:
    """[n] fp32 for each response, finite; or of `fill`, if it has one, where None was given."""
    rows, out = [None] * len(sizes) if rows is None else rows, []
    length(name, rows, len(sizes))
    for i, (x, n) in enumerate(zip(rows, sizes)):
        kind, absent = f"one finite entry for each of {n} tokens", x is None and fill is not None
        x = torch.full((n,), fill) if absent else _finite(f"{name}[{i}]", x, kind, (n,))
        out.append(x)
    return out
