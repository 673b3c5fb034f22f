"""The native module: what it says about itself, and every way in which getting it can fail."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ppo_kernels as pk
from ppo_kernels import _native

ROOT = Path(pk.__file__).resolve().parent.parent
USE = (
    "import warnings, torch, ppo_kernels as pk\n"
    "with warnings.catch_warnings(record=True) as seen:\n"
    "    warnings.simplefilter('always')\n"
    "    for _ in range(3):\n"
    "        out = pk.gae(torch.ones(2, 3), torch.zeros(2, 3, requires_grad=True), lam=1.0)\n"
    "from ppo_kernels import _native\n"
    "print('sum', out.returns.sum().item(), 'native', _native._module is not None)\n"
    "print('history', out.returns.requires_grad)\n"
    "print('warnings', len(seen), *(w.message for w in seen))\n"
)


def start(code: str, **env: str) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], env=env, start_new_session=True, **pipes)


def run(code: str, **env: str) -> str:
    process = start(code, **env)
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    return out


def compiler(path: Path, before: str = "") -> str:
    """A C++ compiler that does not optimise, so that a build takes seconds."""
    path.write_text(f'#!/bin/bash\n{before}\nexec g++ "${{@/-O3/-O0}}"\n')
    path.chmod(0o755)
    return str(path)


def test_import_does_no_work(tmp_path: Path) -> None:
    run(
        "import sys, warnings; warnings.simplefilter('error'); import ppo_kernels\n"
        "assert 'ppo_kernels._C' not in sys.modules and 'triton' not in sys.modules",
        PPO_KERNELS_CACHE=str(tmp_path / "cache"),
    )
    assert not (tmp_path / "cache").exists()


def test_build_info() -> None:
    info = _native.module().build_info()
    assert info["isa"] in info["isas"] and info["cxx_flags"]
    if info["nvcc"]:
        assert info["cuda_archs"] and info["left_out"] == ""
    else:
        assert info["left_out"]
    assert info["torch"] == torch.__version__


def test_gae_plan() -> None:
    def launch(rows: int, length: int) -> str:
        return _native.module().gae_plan(rows, length, sms=132)["launch"]

    assert launch(4096, 128) == launch(7, 512) == "warp per row"
    assert launch(4096, 8192) == launch(16, 8192) == launch(264, 131072) == "block per row"
    assert launch(16, 131072) == "split rows"
    plan = _native.module().gae_plan(rows=16, length=131072, sms=132)
    assert plan["blocks"] * plan["segment"] == 16 * 131072 and plan["threads"] == 256


def test_describe() -> None:
    text = _native.describe()
    assert f"native module: built on this machine, {_native.module().__file__}" in text
    assert any(line.split()[:2] == ["gae", "C++"] for line in text.splitlines())


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"CXX": "no-such-compiler"}, "no C++ compiler"),
        ({"CXX": "false"}, "failed"),
        ({"PPO_KERNELS_CACHE": "FILE"}, "Not a directory"),
    ],
)
def test_without_the_module_the_reference_runs(tmp_path: Path, env: dict, why: str) -> None:
    """One warning with the reason; an error where the module is required."""
    (tmp_path / "file").write_text("a cache that cannot be written to")
    env = {"PPO_KERNELS_NATIVE": "", "PPO_KERNELS_CACHE": str(tmp_path / "cache"), **env}
    if env["PPO_KERNELS_CACHE"] == "FILE":
        env["PPO_KERNELS_CACHE"] = str(tmp_path / "file" / "cache")
    out = run(USE, **env)
    assert "sum 12.0 native False" in out and "warnings 1 " in out and why in out
    required = start(USE, **env | {"PPO_KERNELS_NATIVE": "require"})
    _, err = required.communicate(timeout=100)
    assert required.returncode != 0 and "PPO_KERNELS_NATIVE=require" in err and why in err


def test_off_is_silent_and_the_reference_leaves_no_history() -> None:
    out = run(USE, PPO_KERNELS_NATIVE="off")
    assert "sum 12.0 native False" in out and "warnings 0" in out and "history False" in out


def test_unknown_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPO_KERNELS_NATIVE", "yes")
    with pytest.raises(ValueError, match="PPO_KERNELS_NATIVE"):
        _native.ensure()


def test_the_key_follows_what_shapes_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {_native._key()}
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    keys.add(_native._key())
    monkeypatch.setenv("CXX", "clang++")
    keys.add(_native._key())
    monkeypatch.setattr(_native, "_cpu_features", lambda: "sse2")
    keys.add(_native._key())
    monkeypatch.setattr(torch, "__version__", "2.99")
    keys.add(_native._key())
    assert len(keys) == 5


def test_arch_list(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _native._gencode(["8.0", "9.0a", "12.0+PTX"]) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_120,code=sm_120",
        "-gencode=arch=compute_120,code=compute_120",
    ]
    # Somebody without a GPU waits for one architecture, not for five.
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    for gpus, prebuilt, archs in [
        (0, False, _native.ARCHS_WITHOUT_GPU),
        (1, False, _native.DEFAULT_ARCHS),
        (0, True, _native.DEFAULT_ARCHS),
    ]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda n=gpus: n)
        assert _native._arch_list(prebuilt) == archs
    # Whoever names an architecture that we do not know still gets the CPU part.
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    monkeypatch.setattr(_native, "_nvcc", lambda: "nvcc")
    monkeypatch.setattr(_native, "_nvcc_version", lambda nvcc: "13.0")
    monkeypatch.setattr(_native.subprocess, "run", lambda *a, **k: SimpleNamespace(stdout="sm_90"))
    nvcc, archs, left_out = _native._cuda(prebuilt=False)
    assert nvcc is None and archs == [] and "Hopper" in left_out


def test_an_empty_cache_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPO_KERNELS_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert _native._cache_dir() == Path("/somewhere/ppo_kernels")


@pytest.mark.slow
def test_a_killed_build_and_a_race(tmp_path: Path) -> None:
    """A build that dies leaves nothing that hangs the next; of three at once, one compiles."""
    flag, log = tmp_path / "hang", tmp_path / "log"
    flag.touch()
    hang = f'if [ -e {flag} ]; then sleep 600; fi\necho "$@" >> {log}'
    env = {"CXX": compiler(tmp_path / "c++", hang), "CUDA_HOME": str(tmp_path)}
    env |= {"PPO_KERNELS_CACHE": str(tmp_path / "cache"), "PPO_KERNELS_NATIVE": "require"}
    killed = start(USE, **env)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("cache/*/lock")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    flag.unlink()
    log.write_text("")
    racing = [start(USE, **env) for _ in range(3)]
    for process in racing:
        out, err = process.communicate(timeout=400)
        assert "sum 12.0 native True" in out and "warnings 0" in out, err
    assert len(list(tmp_path.glob("cache/*/_C*.so"))) == 1
    assert not list(tmp_path.glob("cache/*/*.partial"))
    assert sum("-shared" in line for line in log.read_text().splitlines()) == 1
