"""The processes that share one global batch. One process alone needs no torch.distributed."""

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_ELEMENTS = 1 << 25


class Ranks:
    """Sums, maxima and gradients over the ranks of `group`; every rank must make the same calls.

    Without a group, all ranks of torch.distributed if it is initialised. Under `torchrun` or
    `accelerate launch`, accelerate initialises it. Gradients are summed, not averaged: the losses
    carry global denominators, so a rank without a single response adds exactly nothing.
    """

    def __init__(self, group: Any = None) -> None:
        if group is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            if not dist.is_initialized():
                from accelerate import PartialState

                PartialState()
            group = dist.group.WORLD
        elif group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def sum(self, x: Tensor) -> Tensor:
        """x summed over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def max(self, x: Tensor) -> Tensor:
        """The largest x of any rank, in place."""
        if self.size > 1:
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x

    def gather(self, x: Any) -> list[Any]:
        """One picklable object of every rank, on every rank."""
        out = [x] * self.size
        if self.size > 1:
            dist.all_gather_object(out, x, group=self.group)
        return out

    def fail_together(self, error: Exception | None, device: torch.device) -> None:
        """Raise this rank's error; if only other ranks have one, raise too instead of hanging."""
        failed = self.max(torch.tensor(float(error is not None), device=device))
        if error is not None:
            raise error
        if self.size > 1 and failed.item():
            raise RuntimeError("another rank was given bad input; its error says which")

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's values, everywhere."""
        if self.size > 1:
            for x in tensors:
                dist.broadcast(x.data, group=self.group, group_src=0)

    def sum_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """Sum .grad over ranks, in buckets; where a rank has none it joins with zeros."""
        if self.size == 1:
            return
        bucket: list[torch.nn.Parameter] = []
        for i, p in enumerate(parameters):
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            bucket.append(p)
            after = parameters[i + 1] if i + 1 < len(parameters) else None
            full = sum(q.numel() for q in bucket) >= BUCKET_ELEMENTS
            if full or after is None or (after.dtype, after.device) != (p.dtype, p.device):
                flat = self.sum(torch.cat([q.grad.reshape(-1) for q in bucket]))
                for q, g in zip(bucket, flat.split([q.numel() for q in bucket])):
                    q.grad.copy_(g.view_as(q))
                bucket = []
