"""What nvcc makes of csrc/gae.cu, on a machine without a GPU: no warning, no spill, registers."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ppo_kernels import _native

NVCC = _native._nvcc()
pytestmark = pytest.mark.skipif(NVCC is None, reason="needs nvcc")
# Four blocks of 256 threads an SM; fp64, which gets two, and the small kernels are below as well.
BUDGET = {"float": 64, "double": 128}


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
