"""The two wheels: a pure one that needs nothing to build, and one with the module inside."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.is_file()}


def wheel(tmp: Path, **env: str) -> tuple[str, Path]:
    """Build a wheel from a copy of the sources; its file name and its contents, unpacked."""
    source = tmp / "source"
    source.mkdir()
    for name in ("ppo_kernels", "csrc"):
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(tmp / "out"), str(source)],
        env={**os.environ, "PYTHONPATH": "", **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp / "out").glob("*.whl")
    zipfile.ZipFile(path).extractall(tmp / "site")
    return path.name, tmp / "site"


def test_pure_wheel_needs_no_torch_and_no_compiler(tmp_path: Path) -> None:
    (tmp_path / "poison").mkdir()
    (tmp_path / "poison" / "torch.py").write_text("raise ImportError('setup.py imported torch')")
    name, site = wheel(
        tmp_path, PYTHONPATH=str(tmp_path / "poison"), CXX="false", CUDA_HOME="/none"
    )
    assert name.endswith("-py3-none-any.whl")
    package = site / "ppo_kernels"
    inside = {str(p.relative_to(package)) for p in package.rglob("*") if p.is_file()}
    assert inside >= CSRC
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "ppo_kernels").rglob("*.py")}
    assert {f"ppo_kernels/{p}" for p in inside} >= modules
    assert not [p for p in inside if p.endswith(".so")]


def test_installed_wheel_builds_what_a_checkout_builds(tmp_path: Path) -> None:
    """Same sources, same flags, same key: the module of one serves the other."""
    _, site = wheel(tmp_path)
    code = "from ppo_kernels import _native; print(_native.__file__, _native._key())"
    out = []
    for path in (site, ROOT):
        env = {**os.environ, "PYTHONPATH": str(path)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        out.append(done.stdout.split())
    assert out[0][0].startswith(str(site))
    assert out[0][1] == out[1][1]


@pytest.mark.slow
def test_prebuilt_wheel(tmp_path: Path) -> None:
    """Ahead of time with the same flags function; nothing is compiled on use."""
    cxx = tmp_path / "c++"
    cxx.write_text('#!/bin/bash\nexec g++ "${@/-O3/-O0}"\n')
    cxx.chmod(0o755)
    name, site = wheel(tmp_path, PPO_KERNELS_PREBUILD="1", CXX=str(cxx), CUDA_HOME="/none")
    assert "py3-none-any" not in name
    code = (
        "import torch, ppo_kernels as pk; from ppo_kernels import _native\n"
        "print(pk.gae(torch.ones(2, 3), torch.zeros(2, 3), lam=1.0).returns.sum().item())\n"
        "info = _native.module().build_info()\n"
        "print(info['prebuilt'], info['isa'] in info['isas'])\n"
        "print(_native.module().__file__)"
    )
    env = {"PYTHONPATH": str(site), "CXX": "false", "PPO_KERNELS_NATIVE": "require"}
    env["PPO_KERNELS_CACHE"] = str(tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    total, flags, path = done.stdout.splitlines()
    assert total == "12.0" and flags == "True True" and path.startswith(str(site))
    assert not (tmp_path / "cache").exists()
