"""Run by test_gae_emulation.py with the address sanitizer preloaded; numpy only, no torch."""

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import emulation

emu = emulation.load(Path(sys.argv[1]))
rng = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    """fp32, off any alignment by one element, with nothing behind it."""
    store = np.empty(int(np.prod(shape)) + 1, np.float32)
    store[1:] = rng.normal(size=store.size - 1)
    return store[1:].reshape(shape)


@contextlib.contextmanager
def unreadable(*arrays: np.ndarray) -> Iterator[None]:
    """The sanitizer reports whoever reads these (contiguous) arrays."""
    asan = ctypes.CDLL(None)
    places = [(ctypes.c_void_p(x.ctypes.data), ctypes.c_size_t(x.nbytes)) for x in arrays]
    for place in places:
        asan.__asan_poison_memory_region(*place)
    yield
    for place in places:
        asan.__asan_unpoison_memory_region(*place)


# No valid token in this part of a row: its lanes, and two whole tiles, read nothing but the mask.
HOLE = slice(1000, 3400)
PER_TOKEN = (
    "rewards",
    "values",
    "bootstrap",
    "logprobs",
    "ref_logprobs",
    "terminated",
    "truncated",
)

for T in (1, 33, 1025, 4097):
    for launch in ("warp", "block", "split"):
        for packed in (False, True):
            shape = (2 * T,) if packed else (2, T)
            arrays = {k: numbers(*shape) for k in ("rewards", "values", "bootstrap")}
            arrays |= {k: numbers(*shape) for k in ("logprobs", "ref_logprobs")}
            for k in ("mask", "terminated", "truncated"):
                arrays[k] = (rng.random(shape) < 0.5).astype(np.uint8)
            arrays["mask"].reshape(2, T)[:, HOLE] = 0
            arrays |= {"scores": numbers(2), "stats": np.full(3, np.nan)}
            arrays |= {k: np.full(shape, np.nan, np.float32) for k in ("advantages", "returns")}
            if packed:
                arrays["cu_seqlens_32"] = np.array([0, T // 2, 2 * T], np.int32)
            addresses = {k: (x.ctypes.data, 0) for k, x in arrays.items()}
            options = {"gamma": 0.99, "lam": 0.95, "lam_returns": 1.0, "kl_coef": 0.1, "kl_kind": 2}
            for order in (False, True):
                sizes = (2, 0 if packed else T, 2 * T)
                rows = () if packed else (0, 1)
                holes = [arrays[k][row, HOLE] for k in PER_TOKEN for row in rows]
                with unreadable(*holes):
                    emulation.call(emu, addresses, sizes, options, launch, last_warp_first=order)
            assert not np.isnan(arrays["advantages"]).any() and arrays["stats"][0] > -1
print("clean")
