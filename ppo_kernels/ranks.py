"""The processes that share one global batch, and its order. One alone needs no distributed."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_ELEMENTS = 1 << 25


class RankFailed(RuntimeError):
    """Where nothing is wrong itself: what every other rank gets when one fails."""


class Ranks:
    """Sums, maxima and gradients over the ranks of `group`; every rank must make the same calls.

    group None: all ranks, if torch.distributed is initialised; under `torchrun` or `accelerate
    launch`, accelerate initialises it. Gradients are summed, not averaged: the losses carry
    global denominators, so a rank without a single response adds exactly nothing.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            from accelerate import PartialState

            PartialState()
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.group, self.device = group, device
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

    def together(self, work: Callable[..., Any], *args: Any) -> Any:
        """work(*args) on every rank; where one raises, all raise instead of waiting for it."""
        result, error = None, None
        try:
            result = work(*args)
        except Exception as e:
            error = e
        failed = self.size > 1 and self.max(torch.tensor(float(error is not None)).to(self.device))
        if error is not None:
            raise error
        if failed:
            raise RankFailed("another rank failed before this step; its own error says why")
        return result

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's values, everywhere."""
        for x in tensors if self.size > 1 else ():
            dist.broadcast(x.data, group=self.group, group_src=0)

    def sum_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """Sum .grad over ranks, in flat buckets; a rank that has none joins with zeros."""
        buckets: list[list[Tensor]] = []
        for p in parameters if self.size > 1 else ():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            last = buckets[-1] if buckets else []
            full = sum(g.numel() for g in last) >= BUCKET_ELEMENTS
            if not last or full or (last[0].dtype, last[0].device) != (p.dtype, p.device):
                buckets.append([])
            buckets[-1].append(p.grad)
        for grads in buckets:
            flat = self.sum(torch.cat([g.reshape(-1) for g in grads]))
            for g, total in zip(grads, flat.split([g.numel() for g in grads])):
                g.copy_(total.view_as(g))


@dataclass
class BatchOrder:
    """Batches of row numbers: a permutation of n per epoch, and of each batch this rank's part.

    Iterating goes on at `place`, also in the middle of an epoch, and moves it: the order depends
    only on (seed, epoch), so it is the whole state. Rows left over wait for the next permutation.
    """

    n: int
    batch_size: int
    seed: int
    shuffle: bool
    rank: int
    size: int
    place: dict[str, int] = field(default_factory=lambda: {"epoch": 0, "cursor": 0})

    def __post_init__(self) -> None:
        if not len(self):
            raise ValueError(
                f"the data has {self.n} rows, fewer than batch_size = {self.batch_size} on "
                f"{self.size} rank(s)"
            )

    def __len__(self) -> int:
        return self.n // (self.batch_size * self.size)

    def __iter__(self) -> Iterator[list[int]]:
        """The rest of this epoch."""
        place = self.place
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + place["epoch"])
        order = torch.randperm(self.n, generator=generator).tolist()
        order = order if self.shuffle else list(range(self.n))
        while place["cursor"] < len(self):
            start = (place["cursor"] * self.size + self.rank) * self.batch_size
            place["cursor"] += 1
            yield order[start : start + self.batch_size]
        place.update(epoch=place["epoch"] + 1, cursor=0)
