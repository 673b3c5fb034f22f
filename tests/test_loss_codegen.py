"""What ptxas makes of the loss kernels on sm_80, sm_90 and sm_100: no spills, wide loads."""

from typing import Any

import aot
import pytest
import torch

BF16, FP32 = torch.bfloat16, torch.float32
ROWS = 512


def meta(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def terms(*shape: int, dtype: torch.dtype = FP32, everything: bool = True, **options: Any) -> list:
    """TERMS for tokens of this shape; everything: all terms and factors that there are."""
    from ppo_kernels import ppo_loss
    from ppo_kernels.ops.loss import loss_terms

    def tokens() -> torch.Tensor:
        return meta(*shape, dtype=dtype)

    given: dict[str, Any] = {"old_logprobs": tokens(), "advantages": tokens(), "mask": None}
    if everything:
        names = ("values", "old_values", "returns", "ref_logprobs", "rollout_logprobs")
        given |= {name: tokens() for name in names}
        given |= {"mask": meta(*shape, dtype=torch.bool), "ent_coef": 0.1, "kl_coef": 0.1}
        given |= {"whiten": meta(3, dtype=torch.float64)}
    given = {**ppo_loss.__kwdefaults__, **given, **options}
    return loss_terms({k: v for k, v in given.items() if k != "entropy"}, meta(1))


def tokens(*shape: int, dtype: torch.dtype = FP32, everything: bool = True, **options: Any) -> None:
    from ppo_kernels.kernels import loss as kernels

    entropy = meta(*shape, dtype=dtype) if everything else None
    kernels.ppo_loss(
        meta(*shape, dtype=dtype),
        entropy,
        *terms(*shape, dtype=dtype, everything=everything, **options),
        True,
        everything,
        everything,
    )


def logits(V: int, dtype: torch.dtype, softcap: float = 0.0, N: int = ROWS, **options: Any) -> None:
    from ppo_kernels.kernels import loss as kernels

    transform = (meta(N) if softcap else None, 0.7, 1.0, softcap, -100)
    x, labels = meta(N, V, dtype=dtype), meta(N, dtype=torch.int64)
    kernels.ppo_loss_from_logits(x, labels, *transform, *terms(N, **options), True, True)


CU = {"cu_seqlens": meta(65, dtype=torch.int32)}
TOKENS = {
    "least": lambda: tokens(64, 1024, everything=False),
    "all": lambda: tokens(64, 1024, dual_clip=3.0),
    "all bf16": lambda: tokens(64, 1024, dtype=BF16),
    "kl, k3, packed": lambda: tokens(
        65536, policy_loss="kl", kl_penalty="k3", reduction="seq-mean-token-mean", **CU
    ),
}
# Every block size and number of warps that rows_block_and_warps picks for large vocabularies, rows
# of odd length (50257) and aligned ones, and every flag once.
LOGITS = {
    "bf16 1024": lambda: logits(1024, BF16),
    "bf16 32000": lambda: logits(32000, BF16, ent_coef=0.0),
    "bf16 50257": lambda: logits(50257, BF16),
    "bf16 151936": lambda: logits(151936, BF16, reduction="seq-mean-token-mean", **CU),
    "bf16 151936 all": lambda: logits(151936, BF16, softcap=30.0),
    "fp32 128256": lambda: logits(128256, FP32),
    "fp32 262144 all": lambda: logits(262144, FP32, softcap=30.0),
}
SAME_CODE = "other coefficients and sizes"


def launch_others() -> None:
    for i in range(3):
        numbers = {name: 0.1 * (i + 1) for name in ("cliprange", "vf_coef", "ent_coef", "is_cap")}
        tokens(4, 512 * (i + 1), dual_clip=1.5 + i, normalizer=3.0 + i, **numbers)
        logits(1024, BF16, N=16 * (i + 1), normalizer=3.0 + i, **numbers)


LAUNCHES = {**TOKENS, **LOGITS, SAME_CODE: launch_others}
# One program of 1024 threads per SM has 64 registers (65536 in all), four of 256 threads as well.
ROW_REGISTERS = 64
# Five programs of 128 threads per SM; the kernels that add up sums are one or few programs.
TOKEN_REGISTERS, OTHER_REGISTERS = 96, 96


@pytest.fixture(scope="module")
def binaries() -> dict[tuple[str, int], list[aot.Binary]]:
    return aot.compile_launches(__name__)


def check(found: list[aot.Binary], name: str) -> aot.Binary:
    """No kernel of a launch spills or takes too many registers; the one of this name."""
    budget = {"_rows_kernel": ROW_REGISTERS, "_loss_kernel": TOKEN_REGISTERS}
    for binary in found:
        assert binary.local == 0, f"spills: {binary}"
        assert binary.registers <= budget.get(binary.kernel, OTHER_REGISTERS), binary
    return next(binary for binary in found if binary.kernel == name)


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("name", TOKENS)
def test_tokens(binaries: dict, name: str, arch: int) -> None:
    kernel = check(binaries[name, arch], "_loss_kernel")
    inputs = 3 if name == "least" else 9
    # All but the mask: 128 bits of fp32, four tokens of bf16.
    assert kernel.loads.get(64 if "bf16" in name else 128, 0) >= inputs, kernel
    assert kernel.stores.get(128) == (1 if name == "least" else 3), kernel


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("name", LOGITS)
def test_logits(binaries: dict, name: str, arch: int) -> None:
    kernel = check(binaries[name, arch], "_rows_kernel")
    V = int(name.split()[1])
    if V % 16 == 0:
        assert kernel.loads.get(128) and kernel.stores.get(128), kernel
        # Three stages of a block, less the one that is in registers.
        assert kernel.shared >= 2 * V if V == 1024 else kernel.shared >= 16384, kernel


def test_nothing_recompiles(binaries: dict) -> None:
    launched = binaries[SAME_CODE, 90]
    kernels = [{b.hash for b in launched if b.kernel == k} for k in {b.kernel for b in launched}]
    # The tokens with and without their gradients; nothing for another number or size.
    assert len(launched) == 15 and sorted(map(len, kernels)) == [1, 1, 2]
