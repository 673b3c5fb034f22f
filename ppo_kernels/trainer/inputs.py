"""What users hand to the trainer, checked row by row before any work is done."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Limits:
    """What one model and configuration accept."""

    batch_size: int
    vocab_size: int | None
    max_length: int | None
    eos_ids: list[int]
    start_token_id: int | None
    min_new_tokens: int
    need_rollout_logprobs: bool
    one_score_only: bool


@dataclass
class Inputs:
    """Checked rows, on the CPU. token_scores and rollout_logprobs are flat over response tokens."""

    queries: list[Tensor]
    responses: list[Tensor]
    masks: list[Tensor]
    scores: Tensor
    token_scores: Tensor
    rollout_logprobs: Tensor
    finished: Tensor
    truncated: Tensor


def check_inputs(
    limits: Limits,
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    scores: Any,
    response_masks: Sequence[Tensor] | None,
    truncated: Sequence[bool] | None,
    token_scores: Sequence[Tensor] | None,
    rollout_logprobs: Sequence[Tensor] | None,
) -> Inputs:
    """Every error names the argument and the row. Nothing that came in is changed."""
    B = len(queries)
    given = {"responses": responses, "scores": scores, "response_masks": response_masks}
    given |= {"truncated": truncated, "token_scores": token_scores}
    given |= {"rollout_logprobs": rollout_logprobs}
    for name, x in given.items():
        if x is not None and len(x) != B:
            raise ValueError(f"{name} must have one entry per query, {B}, got {len(x)}")
    if len(queries) > limits.batch_size:
        raise ValueError(f"queries must be at most batch_size = {limits.batch_size}, got {B}")
    if limits.need_rollout_logprobs and rollout_logprobs is None:
        raise ValueError("rollout_is_cap needs rollout_logprobs, got None")
    queries = [_ids("queries", i, q, limits.vocab_size) for i, q in enumerate(queries)]
    responses = [_response(i, r, limits) for i, r in enumerate(responses)]
    skip = 0 if limits.start_token_id is None else 1
    for i, (q, r) in enumerate(zip(queries, responses)):
        if not len(q):
            raise ValueError(f"queries[{i}] is empty: the first action needs a token before it")
        if limits.max_length is not None and len(q) + len(r) > limits.max_length:
            raise ValueError(
                f"queries[{i}] and responses[{i}] have {len(q) + len(r)} tokens together, "
                f"the model takes at most {limits.max_length}"
            )
    rows = [_row_scores(i, s, len(r), limits) for i, (s, r) in enumerate(zip(scores, responses))]
    extra = _per_token("token_scores", token_scores, responses, 0.0)
    flat = [row + more for (_, row), more in zip(rows, extra)]
    behaviour = _per_token("rollout_logprobs", rollout_logprobs, responses, math.nan)
    eos = torch.tensor(limits.eos_ids, dtype=torch.int64)
    finished = [bool(torch.isin(r[skip:], eos).any()) for r in responses]
    cut = [not f for f in finished] if truncated is None else [bool(t) for t in truncated]
    return Inputs(
        queries=queries,
        responses=responses,
        masks=[m.bool() for m in _per_token("response_masks", response_masks, responses, 1.0)],
        scores=torch.tensor([score for score, _ in rows], dtype=torch.float64),
        token_scores=torch.cat([torch.empty(0), *(x[skip:] for x in flat)]),
        rollout_logprobs=torch.cat([torch.empty(0), *(x[skip:] for x in behaviour)]),
        finished=torch.tensor(finished, dtype=torch.bool),
        truncated=torch.tensor(cut, dtype=torch.bool),
    )


def _ids(name: str, i: int, x: Any, vocab_size: int | None) -> Tensor:
    if not isinstance(x, Tensor) or x.dim() != 1 or x.is_floating_point() or x.dtype == torch.bool:
        got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name}[{i}] must be a 1-D tensor of token ids, got {got}")
    x = x.detach().long().cpu()
    if x.numel() and (x.min() < 0 or (vocab_size is not None and x.max() >= vocab_size)):
        raise ValueError(
            f"{name}[{i}] must hold ids from 0 to the vocabulary's {vocab_size}, "
            f"got {int(x.min())} to {int(x.max())}"
        )
    return x


def _response(i: int, x: Any, limits: Limits) -> Tensor:
    x = _ids("responses", i, x, limits.vocab_size)
    if limits.start_token_id is not None and (not len(x) or x[0] != limits.start_token_id):
        x = torch.cat([torch.tensor([limits.start_token_id]), x])
    early = x[: limits.min_new_tokens]
    if torch.isin(early, torch.tensor(limits.eos_ids, dtype=torch.int64)).any():
        raise ValueError(f"responses[{i}] ends before min_new_tokens = {limits.min_new_tokens}")
    return x


def _row_scores(i: int, score: Any, n: int, limits: Limits) -> tuple[float, Tensor]:
    """(score of the whole response, rewards of its tokens)."""
    x = torch.as_tensor(score, dtype=torch.float32).detach().cpu()
    if not torch.isfinite(x).all():
        raise ValueError(f"scores[{i}] must be finite, got {x.tolist()}")
    if x.numel() == 1 and x.dim() <= 1:
        return float(x), torch.zeros(n)
    if tuple(x.shape) != (n,):
        raise ValueError(
            f"scores[{i}] must be a number, or one reward for each of the {n} response tokens, "
            f"got shape {tuple(x.shape)}"
        )
    if limits.one_score_only:
        raise ValueError(f"scores[{i}] has one reward per token; use_score_scaling needs a number")
    return 0.0, x


def _per_token(
    name: str, rows: Sequence[Any] | None, responses: list[Tensor], fill: float
) -> list[Tensor]:
    """One fp32 number per response token; `fill` if nothing was given."""
    if rows is None:
        return [torch.full((len(r),), fill) for r in responses]
    out = []
    for i, (row, r) in enumerate(zip(rows, responses)):
        x = torch.as_tensor(row).detach().cpu().float()
        if tuple(x.shape) != (len(r),):
            raise ValueError(
                f"{name}[{i}] must have one entry for each of the {len(r)} response tokens, "
                f"got shape {tuple(x.shape)}"
            )
        if not torch.isfinite(x).all():
            raise ValueError(f"{name}[{i}] must be finite, got {x.tolist()}")
        out.append(x)
    return out


def ptx_rows(batch: Any, start_token_id: int | None) -> list[tuple[Tensor, Tensor, Tensor]]:
    """ptx_batch as (query, response, mask) rows for collate; the first token is only context."""
    if batch is None:
        return []
    rows = []
    if hasattr(batch, "keys"):
        ids = batch["input_ids"]
        attention = batch.get("attention_mask")
        labels = batch.get("labels")
        for i, row in enumerate(ids):
            real = torch.ones_like(row) if attention is None else attention[i]
            kept = row[real != 0].cpu()
            mask = torch.ones_like(kept) if labels is None else labels[i][real != 0].cpu() != -100
            rows.append((kept, mask))
    elif start_token_id is None:
        rows = [(_ids("ptx_batch", i, x, None), torch.ones(len(x))) for i, x in enumerate(batch)]
    else:
        start = torch.tensor([start_token_id])
        out = []
        for source, target in batch:
            target = torch.cat([start, target.cpu()])
            out.append((source.cpu(), target, torch.ones(len(target))))
        return out
    return [(ids[:1], ids[1:], mask[1:]) for ids, mask in rows if len(ids) > 1]
