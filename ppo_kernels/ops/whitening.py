"""masked_mean, masked_whiten: statistics of the valid tokens, global over ranks if asked."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ppo_kernels import reference
from ppo_kernels.ops import _checks


def masked_mean(x: Tensor, mask: Tensor | None = None, dim: int | None = None) -> Tensor:
    """`sum(mask * x) / sum(mask)` over valid slots, 0 where there is none.

    x: any shape, floating; mask: bool of the same shape, or floating weights; dim: the dimension
    to reduce, None for all. Returns fp32 (fp64 for fp64). NaN in a masked slot does not leak.
    """
    _checks.tensor("x", x, _checks.FLOATS)
    if mask is not None:
        _checks.like("mask", mask, x, "x", None)
    return reference.masked_mean(x, mask, dim)


def masked_whiten(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    shift_mean: bool = True,
    stats: Tensor | None = None,
    group: Any = None,
) -> Tensor:
    """`(x - mean) / sqrt(var + 1e-8)` over the valid tokens, masked slots exactly 0.

    The variance is unbiased and eps is inside the root (TRL's `masked_whiten`). With zero or one
    valid token every deviation is 0. `shift_mean=False` adds the mean back, as TRL does: it is
    not a pure scale.

    x: any shape, floating; mask: bool of the same shape. stats: fp64 [3] = (n, sum, sum of
    squares), for example `gae(...).stats`, to use instead of x's own. group: a process group
    whose ranks' sums are added up first; every rank must call, also with nothing valid.
    Sums run in fp64; of fp64 x itself they are taken twice, the second time around the mean.
    Returns fp32 (fp64 for fp64), detached: whitened advantages are targets.
    """
    _checks.tensor("x", x, _checks.FLOATS)
    if mask is None:
        mask = torch.ones_like(x, dtype=torch.bool)
    else:
        _checks.like("mask", mask, x, "x", None)
        mask = _checks.as_bool_mask(mask)
    if stats is not None:
        _checks.tensor("stats", stats, (torch.float64,))
        _checks.shape("stats", stats, (3,), "(n, sum, sum of squares)")
        _checks.same_device("stats", stats, x.device, "x")
    _checks.group("group", group)
    with torch.no_grad():
        sums = _total(reference.masked_sums(x, mask) if stats is None else stats, group)
        if x.dtype != torch.float64 or stats is not None:
            return reference.masked_whiten(x, mask, sums, shift_mean)
        # Squares of fp64 numbers far from 0 lose their deviations: once more, around the mean.
        mean, _ = reference.mean_rstd(sums)
        sums = _total(reference.masked_sums(x - mean, mask), group)
        y = reference.masked_whiten(x - mean, mask, sums)
        return y if shift_mean else torch.where(mask, y + mean, y)


def _total(sums: Tensor, group: Any) -> Tensor:
    if group is None:
        return sums
    sums = sums.clone()
    dist.all_reduce(sums, group=group)
    return sums
