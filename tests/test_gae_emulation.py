"""The CUDA kernels of gae on the CPU: every launch, both warp orders, sanitizers, mutants.

tests/test_gae.py runs them through pk.gae; here is what needs a hold on the launch itself.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import emulation
import pytest
import torch
from gae_cases import Call, expected, packed, poisoned, random_call
from tolerances import FP32, LONG_SCAN

import ppo_kernels as pk

pytestmark = pytest.mark.emu
WAYS = [(launch, order) for launch in ("warp", "block", "split") for order in (False, True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emulation.shared_folder(tmp_path_factory.getbasetemp())


def run(emu: Any, call: Call, **where: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.ppo_kernels, "gae", emulation.op(emu, **where))
        call = dict(call)
        return pk.gae(call.pop("rewards", None), **call)


def check(emu: Any, call: Call, flat: Call | None = None) -> None:
    """Every launch and order gives the right numbers, and the same bits."""
    advantages, returns = expected(call)
    first = None
    for launch, order in WAYS:
        out = run(emu, poisoned(call), launch=launch, last_warp_first=order)
        torch.testing.assert_close(out.advantages.double(), advantages, **FP32)
        torch.testing.assert_close(out.returns.double(), returns, **FP32)
        n = call["values"].numel() if call["mask"] is None else int(call["mask"].sum())
        sums = torch.tensor([n, advantages.sum(), (advantages**2).sum()], dtype=torch.float64)
        torch.testing.assert_close(out.stats, sums, rtol=FP32["rtol"], atol=FP32["rtol"] * n)
        first = out if first is None else first
        assert torch.equal(out.advantages, first.advantages)
        assert torch.equal(out.returns, first.returns)


def long_call() -> Call:
    """Two segments and a bit, plain: the kernels compiled without episode ends. The hole is wider
    than a block's tile and lies across the border of two segments."""
    mask = torch.rand(2, 4501, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[0, 1000:3400] = False
    ends = {"terminated": None, "truncated": None, "lam_returns": None}
    fixed = {"gamma": 0.99, "lam": 0.95, "scores": torch.randn(2), "bootstrap": torch.randn(2)}
    return random_call(1, (2, 4501), mask=mask, **ends, **fixed)


def ends_call() -> Call:
    """Everything at once, in rows that are no multiple of a vector."""
    some = torch.rand(3, 3, 301, generator=torch.Generator().manual_seed(2))
    return random_call(
        2, (3, 301), mask=some[0] < 0.7, terminated=some[1] < 0.05, truncated=None,
        bootstrap=torch.randn(3), scores=torch.randn(3), lam_returns=1.0, gamma=0.99, lam=0.9,
    )  # fmt: skip


@pytest.mark.parametrize("call", [long_call, ends_call])
def test_every_launch(folder: Path, call: Any) -> None:
    check(emulation.load(emulation.build(folder / "emu")), call())


def test_split_rows_of_a_packed_batch(folder: Path) -> None:
    emu = emulation.load(emulation.build(folder / "emu"))
    call = random_call(4, (4, 4500))
    flat = packed(call, [4500, 0, 1, 2500])
    outs = [run(emu, flat, launch=launch, last_warp_first=order) for launch, order in WAYS]
    for out in outs[1:]:
        assert torch.equal(out.advantages, outs[0].advantages)
    torch.testing.assert_close(
        outs[0].advantages, pk.gae(flat.pop("rewards"), **flat).advantages, **FP32
    )


def test_long_row(folder: Path) -> None:
    """131072 tokens, as the launch code of a card with 132 multiprocessors spreads them."""
    emu = emulation.load(emulation.build(folder / "emu"))
    call = long_call() | {"gamma": 1.0, "lam": 1.0, "bootstrap": None, "logprobs": None}
    call |= {
        "ref_logprobs": None,
        "kl_coef": 0.0,
        "rewards": torch.randn(1, 131072) * 0.1,
        "scores": None,
    }
    call |= {"values": torch.randn(1, 131072), "mask": torch.rand(1, 131072) < 0.9}
    out = run(emu, poisoned(call), launch="planned", sms=132)
    torch.testing.assert_close(out.advantages.double(), expected(call)[0], **LONG_SCAN)
    assert torch.equal(run(emu, poisoned(call), launch="block").advantages, out.advantages)


def test_sanitizers(folder: Path) -> None:
    """Addresses and undefined behaviour: a CUDA memcheck without a GPU."""
    module = emulation.build(folder / "emu_sanitized", flags=emulation.SANITIZE)
    asan = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    env = os.environ | {"LD_PRELOAD": asan, "ASAN_OPTIONS": "detect_leaks=0"}
    script = Path(__file__).parent / "emu" / "sanitized.py"
    command = [sys.executable, str(script), str(module)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "clean" in done.stdout, done.stderr[-4000:]


# One mistake each: (what, text in gae.cuh, what it becomes).
MUTANTS = [
    (
        "combines in the wrong order",
        "{left.c * right.c, fma_(left.c, right.b, left.b)}",
        "{left.c * right.c, fma_(right.c, left.b, right.b)}",
    ),
    ("off by one in the shuffle guard", "if (lane + d < 32) all", "if (lane + d < 31) all"),
    (
        "no identity right of the last lane",
        "return lane < 31 ? right : Affine<F>{F(1), F(0)};",
        "return right;",
    ),
    (
        "a masked token is a transition",
        "if (!is_valid(i)) continue;\n      all = then",
        "all = then",
    ),
    (
        "multiplies by the mask",
        "if (!is_valid(i)) continue;\n      all = then(all, {stops(i) ? F(0) : cg, "
        "fma_(cg, r[i], cv * v[i])});",
        "const F m = F(is_valid(i));\n      all = then(all, {stops(i) ? F(0) : 1 - m + m * cg, "
        "m * fma_(cg, r[i], cv * v[i])});",
    ),
    (
        "no barrier before reading the units",
        "units[warp] = unit;\n      __syncthreads();",
        "units[warp] = unit;",
    ),
    ("units of the next tile overwrite those being read", "turn ^= 1;", ""),
    (
        "one tile too few",
        "int(part.hi - part.lo - 1) / kTile",
        "int(part.hi - part.lo) / kTile - 1",
    ),
    (
        "the score counts twice with episode ends",
        "if (a.scores.data && !call.last) x +=",
        "if (a.scores.data) x +=",
    ),
    (
        "the seed of the segment's left side",
        "maps[i].b = x;\n        x = left;",
        "x = left;\n        maps[i].b = x;",
    ),
    ("skips lanes with a masked token", "if (!valid) return;", "if (valid != inside) return;"),
    (
        "skips lanes of which only the last token counts",
        "if (!valid) return;",
        "if (!(valid & 7)) return;",
    ),
    ("the slots of the tile before", "if (tile > 0) next =", "if (tile > 1) next ="),
    ("the bootstrap is not discounted", "x = call.gamma * load_one", "x = load_one"),
    (
        "a warp is left out of the sums",
        "for (int w = 0; w < kWarps; ++w) total",
        "for (int w = 1; w < kWarps; ++w) total",
    ),
]


@pytest.mark.parametrize(
    ("old", "new"), [pytest.param(old, new, id=what) for what, old, new in MUTANTS]
)
def test_mutants_are_caught(folder: Path, old: str, new: str) -> None:
    def mutate(text: str) -> str:
        assert text.count(old) == 1, "the kernel no longer reads like this: renew the mutant"
        return text.replace(old, new)

    emu = emulation.load(emulation.build(folder / f"mutant{hash((old, new))}", edit=mutate))
    with pytest.raises(AssertionError):
        for call in (ends_call(), long_call()):
            check(emu, call)
