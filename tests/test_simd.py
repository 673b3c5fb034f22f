"""The CPU kernels under every instruction set of a distributed wheel, without torch around them.

A first-use build only ever runs with this machine's own features; here each set that the CPU
knows is compiled and called through ctypes.
"""

import ctypes
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tolerances as tol
import torch

from ppo_kernels import _native, reference

HERE = Path(__file__).parent
# What csrc/cpu/isa.h asks for before it picks a set.
AVX2 = {"avx2", "fma", "bmi2"}
AVX512 = AVX2 | {f"avx512{part}" for part in ("f", "bw", "cd", "dq", "vl")}
NEEDS = {"avx2": AVX2, "avx512": AVX512}
ISAS, CXX_FLAGS, _ = _native.flags(prebuilt=True)
FEATURES = set(_native._cpu_features().split())
RUNNABLE = [isa for isa in ISAS if NEEDS.get(isa, set()) <= FEATURES]


@pytest.fixture(scope="module", params=RUNNABLE)
def probe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    isa = request.param
    out = tmp_path_factory.mktemp("simd")
    (out / "build_config.h").write_text(f"#define PPO_ISAS(X, arg) X({isa}, arg)\n")
    command = [os.environ.get("CXX", "g++"), *CXX_FLAGS, *ISAS[isa], f"-DPPO_ISA={isa}", "-shared"]
    command += ["-fvisibility=default", f"-I{out}", f"-I{_native._sources()}"]
    command += [str(HERE / "simd_probe.cpp"), "-o", str(out / "probe.so")]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(out / "probe.so"))


def call(function: ctypes._CFuncPtr, x: np.ndarray, dtype: type) -> np.ndarray:
    out = np.empty(x.shape, dtype)
    pointer = ctypes.c_void_p
    function(pointer(x.ctypes.data), pointer(out.ctypes.data), ctypes.c_int64(x.size))
    return out


def every(step: int, low: float, high: float) -> np.ndarray:
    """Every step-th fp32 number between two of one sign."""
    ends = np.abs(np.array([low, high], np.float32)).view(np.uint32)
    x = np.arange(ends.min(), ends.max() + 1, step, dtype=np.uint32).view(np.float32)
    return x if high > 0 else -x


def ulps(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    return np.abs(got - exact) / np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)


@pytest.mark.parametrize(
    ("name", "low", "high", "none"), [("exp", -87.0, 88.0, -87.5), ("exp2", -126.0, 126.9, -126.5)]
)
def test_powers(probe: ctypes.CDLL, name: str, low: float, high: float, none: float) -> None:
    function, exact = getattr(probe, f"{name}_f32"), getattr(np, name)
    for x in (every(997, low, -0.0), every(997, 0.0, high)):
        got = call(function, x, np.float32)
        assert ulps(got, exact(x.astype(np.float64))).max() <= tol.EXP_ULPS
    x = np.array([0.0, -0.0, none, -1e4, -3e38, -np.inf, np.nan] * 3, np.float32)
    got = call(function, x, np.float32)
    np.testing.assert_array_equal(got, np.array([1, 1, 0, 0, 0, 0, np.nan] * 3, np.float32))


def test_tanh(probe: ctypes.CDLL) -> None:
    for x in (every(997, -30.0, -1e-30), every(997, 1e-30, 30.0)):
        got = call(probe.tanh_f32, x, np.float32)
        assert ulps(got, np.tanh(x.astype(np.float64))).max() <= tol.TANH_ULPS
    x = np.array([0.0, -0.0, 1e30, -1e30, np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(call(probe.tanh_f32, x, np.float32), np.tanh(x))


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_conversions(probe: ctypes.CDLL, name: str, dtype: torch.dtype) -> None:
    """All 65536 patterns up; down, a number near every rounding boundary, as torch rounds."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    up = call(getattr(probe, f"from_{name}"), patterns, np.float32)
    exact = torch.from_numpy(patterns.view(np.int16)).view(dtype).float()
    torch.testing.assert_close(torch.from_numpy(up), exact, rtol=0, atol=0, equal_nan=True)
    rng = np.random.default_rng(0)
    low = np.array(
        [0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0x9000, 0xFFFF], np.uint32
    )
    bits = [(patterns.astype(np.uint32) << 16) | each for each in low]
    bits.append(rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32))
    x = np.concatenate(bits).view(np.float32)
    down = call(getattr(probe, f"to_{name}"), x, np.uint16)
    got = torch.from_numpy(down.view(np.int16)).view(dtype).float()
    want = torch.from_numpy(x).to(dtype).float()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("half", [False, True])
def test_logprobs(probe: ctypes.CDLL, half: bool, softcap: float) -> None:
    N, V = 4, 20011
    x = (torch.randn(N, V) * 4).to(torch.bfloat16 if half else torch.float32)
    x[1, : V // 2] = -torch.inf
    labels = torch.tensor([0, V - 1, -100, 777])
    g, h = torch.randn(N), torch.randn(N)
    out, dx = torch.empty(5, N), torch.empty_like(x)

    def at(t: torch.Tensor) -> ctypes.c_void_p:
        return ctypes.c_void_p(t.data_ptr())

    size = ctypes.c_int64
    cap = ctypes.c_double(softcap)
    probe.logprobs(at(x), at(labels), size(N), size(V), half, cap, at(out), at(g), at(h), at(dx))
    z = x.double().requires_grad_()
    want = reference.logprobs_and_entropy(z, labels, 0.7, 1.0, softcap)
    (want[0] * g + want[1] * h).sum().backward()
    torch.testing.assert_close(out[:2].double(), torch.stack(want).detach(), **tol.FP32)
    rounded = tol.BF16_OUT if half else tol.FP32
    torch.testing.assert_close(dx.double(), z.grad, **rounded)


def test_widths_differ(probe: ctypes.CDLL, request: pytest.FixtureRequest) -> None:
    """Each set really is compiled for itself."""
    isa = request.node.callspec.params["probe"]
    assert probe.lanes() == {"avx512": 16, "avx2": 8}.get(isa, 4)
