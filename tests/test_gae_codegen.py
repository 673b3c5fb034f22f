"""What compilers make of gae's GPU kernels on a machine without one: no spills, few registers.

nvcc for csrc/gae.cu, Triton for its twin.
"""

import re
import shutil
import subprocess
from pathlib import Path

import aot
import pytest
import torch

from ppo_kernels import _native

NVCC = _native._nvcc()
# Four blocks of 256 threads an SM; fp64, which gets two, and the small kernels are below as well.
BUDGET = {"float": 64, "double": 128}


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_registers_and_spills(tmp_path: Path, arch: int) -> None:
    command = [NVCC, "-std=c++17", "-O3", f"-arch=sm_{arch}", "-cubin", "-Werror=all-warnings"]
    source = Path(__file__).resolve().parent.parent / "csrc" / "gae.cu"
    done = subprocess.run(
        [*command, "-Xptxas=-v", "-o", str(tmp_path / "gae.cubin"), str(source)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    log = done.stdout + done.stderr
    kernels = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?"
        r"Used (\d+) registers",
        log,
        re.S,
    )
    assert len(kernels) == 17
    for name, stores, loads, registers in kernels:
        kind = "double" if "TraitsId" in name else "float"
        assert stores == loads == "0", f"{name} spills"
        assert int(registers) <= BUDGET[kind], f"{name} takes {registers} registers"
    cuobjdump = shutil.which("cuobjdump") or shutil.which(f"{Path(NVCC).parent}/cuobjdump")
    if cuobjdump:
        sass = subprocess.run(
            [cuobjdump, "-sass", str(tmp_path / "gae.cubin")], capture_output=True, text=True
        ).stdout
        assert "LDG.E.128" in sass and "STG.E.128" in sass


# ------------------------------------------------------------------------------ the Triton twin


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch(
    T: int = 8192,
    rows: int = 64,
    dtype: torch.dtype = torch.float32,
    packed: bool = False,
    kl_kind: int | None = None,
    ends: bool = False,
    gamma: float = 0.99,
) -> None:
    """One call as ops/gae.py makes it; ends brings another lambda for the returns along."""
    from ppo_kernels.kernels import gae as kernels

    def token(given: bool = True, dtype: torch.dtype = dtype) -> torch.Tensor | None:
        shape = (rows * T,) if packed else (rows, T)
        return meta(*shape, dtype=dtype) if given else None

    kernels.gae(
        token(), token(), token(dtype=torch.bool), meta(rows), token() if ends else meta(rows),
        token(kl_kind is not None), token(kl_kind is not None), token(ends, torch.bool),
        token(ends, torch.bool), meta(rows + 1, dtype=torch.int32) if packed else None,
        gamma, 0.95, 1.0 if ends else 0.95, 0.1, kl_kind or 0,
    )  # fmt: skip


LAUNCHES = {
    "fp32": lambda: launch(),
    "fp32 everything": lambda: launch(kl_kind=2, ends=True),
    "bf16 k3": lambda: launch(dtype=torch.bfloat16, kl_kind=2),
    "fp32 packed": lambda: launch(packed=True),
    "bf16 packed everything": lambda: launch(
        dtype=torch.bfloat16, packed=True, kl_kind=2, ends=True
    ),
}
SAME_CODE = "other sizes and gammas"


def launch_others() -> None:
    launch()
    launch(T=1024, rows=1, gamma=1.0)
    launch(T=131072, rows=257, gamma=0.9)


LAUNCHES[SAME_CODE] = launch_others

# A program has 128 threads, of packed rows 256: an SM's 65536 registers are enough for 640 and 512
# of them at 96, for 256 with every argument that there is.
TWIN_BUDGET, TWIN_BUDGET_EVERYTHING = 96, 192


@pytest.fixture(scope="module")
def binaries() -> dict[tuple[str, int], list[aot.Binary]]:
    return aot.compile_launches(__name__)


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("name", [name for name in LAUNCHES if name != SAME_CODE])
def test_twin(binaries: dict, name: str, arch: int) -> None:
    (kernel,) = binaries[name, arch]
    assert kernel.local == 0, f"spills: {kernel}"
    everything = name.endswith("everything")
    assert kernel.registers <= (TWIN_BUDGET_EVERYTHING if everything else TWIN_BUDGET), kernel
    # Packed rows may begin anywhere: they are read one token at a time.
    if "packed" not in name:
        assert kernel.loads.get(128) and kernel.stores.get(128), kernel


def test_twin_recompiles_for_nothing(binaries: dict) -> None:
    launched = binaries[SAME_CODE, 90]
    assert len(launched) == 3 and len({kernel.hash for kernel in launched}) == 1
