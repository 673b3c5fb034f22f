"""masked_mean and masked_whiten: values, edges, other projects' numbers, sums over ranks."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from tolerances import FAR_FROM_ZERO, FAR_FROM_ZERO_FP64, FP32, FP64, ORACLE
from torch import Tensor

import ppo_kernels as pk

DATA = Path(__file__).parent / "data"
CASES = [c for c in json.loads((DATA / "gae.json").read_text()) if c["kind"] == "whiten"]
ARRAYS = np.load(DATA / "gae.npz")


def by_hand(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    kept = x.double()[mask]
    white = (kept - kept.mean()) / torch.sqrt(kept.var(unbiased=True) + 1e-8)
    out = torch.zeros(x.shape, dtype=torch.float64)
    out[mask] = white if shift_mean else white + kept.mean()
    return out


@pytest.mark.parametrize("shift_mean", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_by_hand(dtype: torch.dtype, shift_mean: bool) -> None:
    x, mask = (3 + 2 * torch.randn(7, 11)).to(dtype), torch.rand(7, 11) < 0.6
    out = pk.masked_whiten(x, mask, shift_mean=shift_mean)
    assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = FP64 if dtype == torch.float64 else FP32
    torch.testing.assert_close(out.double(), by_hand(x, mask, shift_mean), **tolerance)
    assert (out[~mask] == 0).all()


def test_a_large_mean_keeps_its_digits() -> None:
    """The sums are fp64: fp32 ones would be off in the first digit."""
    x, mask = 30000 + 0.05 * torch.randn(4096), torch.ones(4096, dtype=torch.bool)
    torch.testing.assert_close(
        pk.masked_whiten(x, mask).double(), by_hand(x, mask), **FAR_FROM_ZERO
    )


@pytest.mark.parametrize("n", [0, 1])
def test_too_few_to_have_a_variance(n: int) -> None:
    x, mask = torch.full((2, 3), torch.nan), torch.zeros(2, 3, dtype=torch.bool)
    mask[0, :n] = True
    x[mask] = 5.0
    assert (pk.masked_whiten(x, mask) == 0).all()
    kept = pk.masked_whiten(x, mask, shift_mean=False)
    assert torch.equal(kept, torch.where(mask, 5.0, 0.0))


def test_masked_slots_are_never_read() -> None:
    x, mask = torch.randn(5, 8), torch.rand(5, 8) < 0.5
    poison = torch.where(mask, x, torch.nan)
    assert torch.equal(pk.masked_whiten(poison, mask), pk.masked_whiten(x, mask))
    assert torch.equal(pk.masked_mean(poison, mask), pk.masked_mean(x, mask))


def test_statistics_of_gae() -> None:
    r, v = torch.randn(2, 4, 20)
    mask = torch.rand(4, 20) < 0.8
    out = pk.gae(r, v, mask)
    mine = pk.masked_whiten(out.advantages, mask)
    torch.testing.assert_close(
        pk.masked_whiten(out.advantages, mask, stats=out.stats), mine, **FP32
    )


def test_masked_mean() -> None:
    x, mask = torch.randn(4, 6), torch.rand(4, 6) < 0.5
    mask[1] = False
    torch.testing.assert_close(pk.masked_mean(x, mask), x[mask].mean(), **FP32)
    rows = pk.masked_mean(x, mask, dim=1)
    assert rows[1] == 0
    torch.testing.assert_close(rows[0], x[0][mask[0]].mean(), **FP32)
    weights = torch.rand(4, 6)
    want = (x * weights).sum() / weights.sum()
    torch.testing.assert_close(pk.masked_mean(x, weights), want, **FP32)


@pytest.mark.parametrize("case", [pytest.param(c, id=c["id"]) for c in CASES])
def test_trl_and_verl(case: dict) -> None:
    """Theirs where it is sound; the right number where it cancels, divides by 0 or spreads NaN."""
    x, mask, want = (
        torch.from_numpy(ARRAYS[f"{case['id']}/{name}"])
        for name in ("in.x", "in.mask", "want.white")
    )
    mask = mask != 0
    out = pk.masked_whiten(x, mask, shift_mean=case["params"]["shift_mean"])
    tolerance = ORACLE if case["verdict"] != "convention" else case["tol"] or ORACLE
    torch.testing.assert_close(out.double()[mask], want.double()[mask], **tolerance)


def _rank(rank: int, folder: str, queue: mp.Queue) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    torch.manual_seed(0)
    x, mask = torch.randn(3, 5), torch.rand(3, 5) < 0.7
    if rank == 1:  # nothing valid here, and yet it must call
        x, mask = torch.full((2, 2), torch.nan), torch.zeros(2, 2, dtype=torch.bool)
    stats = torch.tensor([0.0, 0.0, 0.0], dtype=torch.float64) if rank else None
    given = stats.clone() if rank else None
    out = pk.masked_whiten(x, mask, stats=stats, group=torch.distributed.group.WORLD)
    assert given is None or torch.equal(stats, given), "the caller's stats changed"
    queue.put((rank, out.numpy()))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_over_two_ranks_one_of_them_empty(tmp_path: Path) -> None:
    context = mp.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, str(tmp_path), queue)) for r in range(2)]
    for p in ranks:
        p.start()
    out = dict(queue.get(timeout=120) for _ in ranks)
    for p in ranks:
        p.join()
    torch.manual_seed(0)
    x, mask = torch.randn(3, 5), torch.rand(3, 5) < 0.7
    assert np.array_equal(out[0], pk.masked_whiten(x, mask).numpy())
    assert (out[1] == 0).all()


@pytest.mark.parametrize(
    ("error", "name", "call"),
    [
        (TypeError, "x", {"x": [1.0]}),
        (TypeError, "x", {"x": torch.ones(3).long()}),
        (ValueError, "mask", {"mask": torch.ones(2).bool()}),
        (TypeError, "stats", {"stats": torch.ones(3)}),
        (ValueError, "stats", {"stats": torch.ones(2, dtype=torch.float64)}),
    ],
)
def test_bad_input(error: type, name: str, call: dict) -> None:
    call = {"x": torch.zeros(3)} | call
    with pytest.raises(error, match=f"^{name} "):
        pk.masked_whiten(call.pop("x"), call.pop("mask", None), **call)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_fp64_far_from_zero_keeps_its_digits(shift_mean: bool) -> None:
    """Squares of 1e7 leave two digits to a deviation of 1; around the mean they leave all."""
    x = torch.randn(1000, dtype=torch.float64) + 1e7
    want = (x - x.mean()) / x.std() + (0 if shift_mean else x.mean())
    got = pk.masked_whiten(x, shift_mean=shift_mean)
    # The input itself has 9 decimals.
    torch.testing.assert_close(got, want, **FAR_FROM_ZERO_FP64)
