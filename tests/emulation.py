"""Builds the emulated GAE kernels (tests/emu) and calls them with torch or numpy arrays."""

import importlib.util
import itertools
import os
import shlex
import subprocess
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import ninja
import pybind11

TESTS = Path(__file__).resolve().parent
CSRC = TESTS.parent / "csrc"
SANITIZE = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
LAUNCHES = {"warp": 0, "block": 1, "split": 2, "planned": -1}
TENSORS = (
    *("rewards", "values", "mask", "scores", "bootstrap", "logprobs", "ref_logprobs"),
    *("terminated", "truncated", "cu_seqlens_32", "cu_seqlens_64"),
    *("advantages", "returns", "stats"),
)
_versions = itertools.count()


def build(
    folder: Path, *, flags: list[str] | None = None, edit: Callable[[str], str] | None = None
) -> Path:
    """Compile the emulator module into `folder`; edit changes the text of gae.cuh first."""
    done = folder / "done" / "emu.so"
    if done.exists():
        return done
    work = folder / f"work{os.getpid()}.{next(_versions)}"
    work.mkdir(parents=True)
    header = (CSRC / "gae.cuh").read_text()
    (work / "gae.cuh").write_text(edit(header) if edit else header)
    include = [work, CSRC, TESTS / "emu", pybind11.get_include(), sysconfig.get_paths()["include"]]
    cxx = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden"]
    cxx += ["-Wno-unknown-pragmas", *(f"-I{path}" for path in include)]
    checked = shlex.join([*cxx, *(flags or [])])
    # The binding is the same for every edit of the kernels, and no sanitizer looks at it: once.
    module = folder.parent / "emu_module.o"
    lines = [
        f"rule kernels\n  command = {checked} -c $in -o $out",
        f"rule module\n  command = {shlex.join(cxx)} -O0 -c $in -o $out",
        f"rule link\n  command = {checked} -shared $in -o $out",
        f"build gae.o: kernels {TESTS / 'emu' / 'emu_gae.cpp'}",
        f"build emu.so: link gae.o {module if module.exists() else 'module.o'}",
    ]
    if not module.exists():
        lines.append(f"build module.o: module {TESTS / 'emu' / 'emu_module.cpp'}")
    (work / "build.ninja").write_text("\n".join(lines) + "\n")
    command = [str(Path(ninja.BIN_DIR) / "ninja"), "-C", str(work)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    if (work / "module.o").exists():
        os.replace(work / "module.o", module)
    done.parent.mkdir(exist_ok=True)
    os.replace(work / "emu.so", done)
    return done


def shared_folder(base: Path) -> Path:
    """A folder for the builds of one test run, from tmp_path_factory.getbasetemp()."""
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def load(path: Path) -> ModuleType:
    # pybind11 hands out a module it knows by this name, so each build gets one of its own.
    spec = importlib.util.spec_from_file_location(f"build{next(_versions)}.emu", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(
    emu: ModuleType,
    arrays: Mapping[str, tuple[int, int]],
    sizes: tuple[int, int, int],
    options: Mapping[str, Any],
    launch: str = "planned",
    sms: int = 132,
    last_warp_first: bool = False,
) -> None:
    """arrays: (address, dtype number) by name, outputs included; sizes: (rows, T, tokens)."""
    given = {name: arrays.get(name, (0, 0)) for name in TENSORS}
    emu.gae(
        given,
        *sizes,
        *(options[k] for k in ("gamma", "lam", "lam_returns", "kl_coef", "kl_kind")),
        LAUNCHES[launch],
        sms,
        last_warp_first,
    )


def op(emu: ModuleType, **where: Any) -> Callable[..., tuple]:
    """torch.ops.ppo_kernels.gae, with the CUDA kernels on the CPU; outputs start as NaN."""
    import torch

    numbers = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
    names = TENSORS[:9]

    def gae(*args: Any) -> tuple:
        *tensors, gamma, lam, lam_returns, kl_coef, kl_kind = args
        given = {k: x for k, x in zip((*names, "cu_seqlens"), tensors) if x is not None}
        cu, values = given.pop("cu_seqlens", None), given["values"]
        f64 = values.dtype == torch.float64
        for k, x in given.items():  # as csrc/gae.cpp does
            if x.is_floating_point() and f64 != (x.dtype == torch.float64):
                x = x.to(torch.float64 if f64 else torch.float32)
            given[k] = x.contiguous()
        if cu is not None:
            given[f"cu_seqlens_{8 * cu.itemsize}"] = cu.contiguous()
        out_dtype = torch.float64 if f64 else torch.float32
        given["advantages"] = torch.full(values.shape, torch.nan, dtype=out_dtype)
        given["returns"] = given["advantages"].clone()
        given["stats"] = torch.zeros(3, dtype=torch.float64)
        rows, T = (values.shape[0], values.shape[1]) if cu is None else (cu.numel() - 1, 0)
        if values.numel():
            given["stats"].fill_(torch.nan)
            addresses = {k: (x.data_ptr(), numbers.get(x.dtype, 0)) for k, x in given.items()}
            options = {"gamma": gamma, "lam": lam, "lam_returns": lam_returns}
            options |= {"kl_coef": kl_coef, "kl_kind": kl_kind}
            call(emu, addresses, (rows, T, values.numel()), options, **where)
        return given["advantages"], given["returns"], given["stats"]

    return gae
