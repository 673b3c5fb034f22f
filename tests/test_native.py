"""The native module: what it says about itself, and every way in which building it can fail."""

import os
import subprocess
import sys
from pathlib import Path

import torch

import ppo_kernels as pk
from ppo_kernels import _native

ROOT = Path(pk.__file__).resolve().parent.parent
USE = (
    "import warnings, torch, ppo_kernels as pk\n"
    "with warnings.catch_warnings(record=True) as seen:\n"
    "    warnings.simplefilter('always')\n"
    "    for _ in range(3):\n"
    "        out = pk.gae(torch.ones(2, 3), torch.ones(2, 3))\n"
    "print([str(w.message) for w in seen])\n"
    "from ppo_kernels import _native\n"
    "print('native', _native._module is not None, out.advantages.sum().item())\n"
)


def run(code: str, **env: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


def test_import_does_no_work(tmp_path: Path) -> None:
    done = run(
        "import sys, warnings; warnings.simplefilter('error'); import ppo_kernels\n"
        "assert 'ppo_kernels._C' not in sys.modules and 'triton' not in sys.modules",
        PPO_KERNELS_CACHE=str(tmp_path / "cache"),
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "cache").exists()


def test_build_info() -> None:
    info = _native.module().build_info()
    assert info["isa"] in info["isas"] and info["cxx_flags"]
    if info["nvcc"]:
        assert info["cuda_archs"] and info["left_out"] == ""
    else:
        assert info["left_out"]
    assert info["torch"] == torch.__version__
