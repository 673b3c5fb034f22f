"""Run by test_gae_emulation.py with the address sanitizer preloaded; numpy only, no torch."""

import sys
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


for T in (1, 33, 1025, 4097):
    for launch in ("warp", "block", "split"):
        for packed in (False, True):
            shape = (2 * T,) if packed else (2, T)
            arrays = {k: numbers(*shape) for k in ("rewards", "values", "bootstrap")}
            arrays |= {k: numbers(*shape) for k in ("logprobs", "ref_logprobs")}
            for k in ("mask", "terminated", "truncated"):
                arrays[k] = (rng.random(shape) < 0.5).astype(np.uint8)
            arrays |= {"scores": numbers(2), "stats": np.full(3, np.nan)}
            arrays |= {k: np.full(shape, np.nan, np.float32) for k in ("advantages", "returns")}
            if packed:
                arrays["cu_seqlens_32"] = np.array([0, T // 2, 2 * T], np.int32)
            addresses = {k: (x.ctypes.data, 0) for k, x in arrays.items()}
            options = {"gamma": 0.99, "lam": 0.95, "lam_returns": 1.0, "kl_coef": 0.1, "kl_kind": 2}
            for order in (False, True):
                sizes = (2, 0 if packed else T, 2 * T)
                emulation.call(emu, addresses, sizes, options, launch, last_warp_first=order)
            assert not np.isnan(arrays["advantages"]).any() and arrays["stats"][0] > -1
print("clean")
