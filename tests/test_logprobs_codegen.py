"""What ptxas makes of the log-prob kernels on sm_80, sm_90 and sm_100: no spills, wide loads."""

import aot
import pytest
import torch

N = 512


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch(
    V: int,
    dtype: torch.dtype,
    entropy: bool,
    softcap: float,
    temperatures: bool,
    N: int = N,
    temperature: float = 0.7,
    ignore_index: int = -100,
) -> None:
    """One forward and one backward, as ops/logprobs.py launches them."""
    from ppo_kernels.kernels import logprobs as kernels

    labels = meta(N, dtype=torch.int64)
    transform = (meta(N) if temperatures else None, temperature, 1.0, softcap, ignore_index)
    logits = meta(N, V, dtype=dtype)
    kernels.logprobs_fwd(logits, labels, *transform, entropy, False)
    saved = (meta(N), meta(N), meta(N) if entropy else None)
    grads = (meta(N), meta(N) if entropy else None)
    kernels.logprobs_bwd(logits, *grads, labels, *transform, *saved, None)


# Every block size that block_and_warps picks for V in {1, 7, 300, 1024, 32000, 50257, 128256,
# 151936, 262144}, rows of odd length (50257) and aligned ones, and every flag once.
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LAUNCHES = {
    "bf16 1": lambda: launch(1, BF16, True, 0.0, False),
    "bf16 300": lambda: launch(300, BF16, True, 0.0, False),
    "bf16 1024": lambda: launch(1024, BF16, True, 0.0, False),
    "bf16 50257": lambda: launch(50257, BF16, True, 0.0, False),
    "bf16 151936": lambda: launch(151936, BF16, False, 0.0, False),
    "bf16 151936 all": lambda: launch(151936, BF16, True, 30.0, True),
    "fp16 32000": lambda: launch(32000, FP16, True, 0.0, False),
    "fp32 151936": lambda: launch(151936, FP32, False, 0.0, False),
    "fp32 262144 all": lambda: launch(262144, FP32, True, 30.0, True),
}
SAME_CODE = "other sizes and temperatures"


def launch_others() -> None:
    launch(1024, BF16, True, 0.0, False)
    launch(1024, BF16, True, 0.0, False, N=1, temperature=1.0)
    launch(1024, BF16, True, 0.0, False, N=257, temperature=1.3, ignore_index=0)


LAUNCHES[SAME_CODE] = launch_others
# A program has 256 threads: four programs fit an SM (65536 registers) at 64 registers, two at 128.
REGISTERS, REGISTERS_ALL = 64, 128


@pytest.fixture(scope="module")
def binaries() -> dict[tuple[str, int], list[aot.Binary]]:
    return aot.compile_launches(__name__)


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("name", [name for name in LAUNCHES if name != SAME_CODE])
def test_kernels(binaries: dict, name: str, arch: int) -> None:
    forward, backward = binaries[name, arch]
    assert (forward.kernel, backward.kernel) == ("_logprobs_fwd_kernel", "_logprobs_bwd_kernel")
    for binary in (forward, backward):
        assert binary.local == 0, f"spills: {binary}"
        assert binary.registers <= (REGISTERS_ALL if name.endswith("all") else REGISTERS), binary
    V = int(name.split()[1])
    if V % 16 == 0:
        assert forward.loads.get(128), forward
        assert backward.loads.get(128) and backward.stores.get(128), backward


def test_nothing_recompiles(binaries: dict) -> None:
    """Liger, TRL: a constexpr temperature or length compiled anew for every value."""
    launched = binaries[SAME_CODE, 90]
    assert len(launched) == 6
    assert len({binary.hash for binary in launched}) == 2, "one forward, one backward"
