"""Finds or builds the native module `_C` from csrc/, on the first call of an op that wants it.

A wheel made with `PPO_KERNELS_PREBUILD=1` contains `_C`. Any other install compiles it with ninja
into `$PPO_KERNELS_CACHE` (default `~/.cache/ppo_kernels`), under a key of everything that shapes
it. Importing `_C` registers its kernels with torch's dispatcher; nothing here is on a call's path
afterwards. `PPO_KERNELS_NATIVE=require` turns a failed build into an error, `off` never tries.
"""

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

PACKAGE = Path(__file__).resolve().parent
# Turing to Blackwell, with PTX for what comes next. Which GPU is visible does not matter; where
# none is, somebody waits for the CPU kernels: one architecture then, whose PTX a GPU that turns up
# later compiles for itself.
DEFAULT_ARCHS = "7.5 8.0 9.0 10.0 12.0+PTX"
ARCHS_WITHOUT_GPU = "7.5+PTX"
# The oldest libtorch that _C may be loaded into (torch's stable ABI).
TORCH_TARGET = "0x020a000000000000"
# A process that waits longer than this for another one's build makes its own.
WAIT_SECONDS = 180

_lock = threading.RLock()
_module: ModuleType | None = None
_failure: str | None = None


class NativeError(RuntimeError):
    """Why there is no native module."""


def ensure() -> bool:
    """Load `_C` if that was not tried yet; whether its kernels are there. Warns once if not."""
    global _module, _failure
    mode = os.environ.get("PPO_KERNELS_NATIVE", "")
    if mode not in ("", "off", "require"):
        raise ValueError(f"PPO_KERNELS_NATIVE must be unset, 'off' or 'require', got {mode!r}")
    with _lock:
        if _module is None and _failure is None:
            try:
                _module = None if mode == "off" else _load()
                _failure = "PPO_KERNELS_NATIVE=off" if mode == "off" else None
            except (NativeError, ImportError, OSError) as error:
                _failure = str(error)
                if mode != "require":
                    warnings.warn(
                        f"ppo_kernels runs without its native kernels: {_failure}",
                        RuntimeWarning,
                        stacklevel=2,
                    )
    if _failure is not None and mode == "require":
        raise NativeError(f"PPO_KERNELS_NATIVE=require, but: {_failure}")
    return _module is not None


def module() -> ModuleType:
    """The loaded `_C`, for build_info() and gae_plan(); NativeError if there is none."""
    ensure()
    if _module is None:
        raise NativeError(_failure)
    return _module


# ------------------------------------------------------------------------------------- find


def _load() -> ModuleType:
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    for path in (PACKAGE / f"_C{suffix}" for suffix in suffixes):
        if path.exists():
            return _import(path)
    path = _cache_dir() / _key() / f"_C{suffixes[0]}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with _one_builder(path.parent / "lock", path):
            if not path.exists():
                print(
                    f"ppo_kernels: compiling its kernels, once, into {path.parent}", file=sys.stderr
                )
                build(path, prebuilt=False)
    return _import(path)


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("ppo_kernels._C", path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    sys.modules["ppo_kernels._C"] = loaded
    return loaded


def _cache_dir() -> Path:
    if os.environ.get("PPO_KERNELS_CACHE"):
        return Path(os.environ["PPO_KERNELS_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ppo_kernels"


def _sources() -> Path:
    """csrc beside this file (a wheel) or beside the package (a checkout)."""
    inside = PACKAGE / "csrc"
    return inside if inside.is_dir() else PACKAGE.parent / "csrc"


def _key() -> str:
    """A digest of the sources, the flags and the machine. It does not name the compiler that
    happens to be installed, so that a filled cache also serves a machine without one."""
    digest = hashlib.sha256()
    for path in sorted(p for p in _sources().rglob("*") if p.is_file() and p.suffix != ".py"):
        digest.update(f"{path.relative_to(_sources())}\0".encode() + path.read_bytes())
    machine = [torch.__version__, torch.version.cuda, sys.version, platform.machine()]
    machine += [os.environ.get("CXX"), _nvcc(), _arch_list(prebuilt=False), _cpu_features()]
    digest.update(json.dumps([flags(prebuilt=False), machine]).encode())
    return digest.hexdigest()[:24]


def _cpu_features() -> str:
    """What `-march=native` depends on."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line.split(":", 1)[1].strip()
    return platform.processor()


@contextlib.contextmanager
def _one_builder(lock: Path, product: Path) -> Iterator[None]:
    """Let one process build and the others wait for `product`. The kernel drops the lock of a
    process that dies, and a build is renamed into place: giving up the wait is safe."""
    import fcntl

    with open(lock, "w") as file:
        deadline = time.monotonic() + WAIT_SECONDS
        while not product.exists() and time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
            except OSError:  # a file system without locks: everyone builds, the last rename wins
                break
        yield


# ------------------------------------------------------------------------------------ build


def flags(prebuilt: bool) -> tuple[dict[str, list[str]], list[str], list[str]]:
    """(instruction sets, C++ flags, nvcc flags), the same for first-use and prebuilt modules.

    Files in csrc/cpu are compiled once per instruction set; `csrc/cpu/isa.h` picks one at run
    time. A first-use build knows its CPU, a prebuilt one carries several. No -ffast-math: NaN and
    inf have a meaning here. No contraction: which products are fused is written in the source, so
    that a token's bits do not depend on whether a vector or a scalar loop met it.
    """
    x86 = platform.machine() in ("x86_64", "AMD64")
    if not prebuilt:
        isas = {"native": ["-march=native" if x86 else "-mcpu=native"]}
    elif x86:
        isas = {"avx512": ["-march=x86-64-v4"], "avx2": ["-march=x86-64-v3"], "generic": []}
    else:
        isas = {"generic": []}
    cxx = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
    cxx += ["-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Werror=return-type"]
    cxx += [f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"]
    nvcc = ["-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden"]
    return isas, cxx, nvcc


def build(target: Path, prebuilt: bool) -> None:
    """Compile csrc/ into the extension module `target`, renamed into place when complete.

    If nvcc fails, the CPU part is built alone and `build_info()` says why.
    """
    cxx, (nvcc, archs, left_out) = _cxx(), _cuda(prebuilt)
    with tempfile.TemporaryDirectory(prefix="ppo_kernels_") as tmp:
        try:
            made = _ninja(Path(tmp) / "all", cxx, nvcc, archs, left_out, prebuilt)
        except NativeError as error:
            if nvcc is None or "nvcc FAILED" not in str(error):
                raise
            left_out = f"nvcc failed: {error}"
            made = _ninja(Path(tmp) / "cpu", cxx, None, [], left_out, prebuilt)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        shutil.copyfile(made, partial)
        os.replace(partial, target)


def _ninja(
    work: Path, cxx: str, nvcc: str | None, archs: list[str], left_out: str, prebuilt: bool
) -> Path:
    import ninja
    import pybind11

    work.mkdir()
    isas, cxx_flags, nvcc_flags = flags(prebuilt)
    _write_config(work / "build_config.h", cxx, nvcc, archs, left_out, prebuilt)
    torch_dir = Path(torch.__file__).parent
    include = [work, _sources(), pybind11.get_include(), sysconfig.get_paths()["include"]]
    system = ["-isystem", torch_dir / "include"] + (["-DUSE_CUDA"] if nvcc else [])
    cxx_flags = cxx_flags + [f"-I{path}" for path in include] + system
    libs = [f"-L{torch_dir / 'lib'}", "-lc10", "-ltorch_cpu"] + (["-ltorch_cuda"] if nvcc else [])
    linker = [nvcc, "-shared", f"-ccbin={cxx}", "-cudart=static"] if nvcc else [cxx, "-shared"]

    def quote(command: list) -> str:
        return shlex.join(str(x) for x in command).replace("$", "$$")

    lines = [
        f"rule cxx\n  command = {quote([cxx, *cxx_flags])} $flags -c $in -o $out",
        f"rule link\n  command = {quote(linker)} $in -o $out {quote(libs)}",
    ]
    if nvcc:
        command = [nvcc, f"-ccbin={cxx}", *nvcc_flags, f"-I{_sources()}", *_gencode(archs)]
        command += ["--threads", "0"]
        lines.append(f"rule nvcc\n  command = {quote(command)} -c $in -o $out")
    objects = []

    def compile_with(rule: str, source: Path, name: str, extra: list[str]) -> None:
        path = str(source).replace(":", "$:").replace(" ", "$ ")
        lines.append(f"build {name}.o: {rule} {path}\n  flags = {quote(extra)}")
        objects.append(f"{name}.o")

    for source in sorted(_sources().glob("*.cpp")):
        compile_with("cxx", source, source.stem, [])
    for source in sorted(_sources().glob("cpu/*.cpp")):
        for isa, extra in isas.items():
            compile_with("cxx", source, f"{source.stem}.{isa}", [f"-DPPO_ISA={isa}", *extra])
    for source in sorted(_sources().glob("*.cu")) if nvcc else []:
        compile_with("nvcc", source, f"{source.stem}.cuda", [])
    lines.append(f"build _C.so: link {' '.join(objects)}\ndefault _C.so\n")
    (work / "build.ninja").write_text("\n".join(lines))
    command = [str(Path(ninja.BIN_DIR) / "ninja"), "-C", str(work)]
    if "MAX_JOBS" in os.environ:
        command += ["-j", os.environ["MAX_JOBS"]]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
        what = "nvcc FAILED" if re.search(r"FAILED: .*\.cuda\.o", done.stdout) else f"{cxx} failed"
        raise NativeError(f"{what} ({Path(cxx).name} and ninja in a temporary folder):\n{tail}")
    return work / "_C.so"


def _write_config(
    path: Path, cxx: str, nvcc: str | None, archs: list[str], left_out: str, prebuilt: bool
) -> None:
    """The header with what the sources ask about their own build."""
    isas, cxx_flags, nvcc_flags = flags(prebuilt)
    info = {
        "prebuilt": prebuilt,
        "cxx": _first_line([cxx, "--version"]),
        "cxx_flags": cxx_flags,
        "isas": isas,
        "nvcc": _nvcc_version(nvcc) if nvcc else None,
        "nvcc_flags": nvcc_flags if nvcc else None,
        "cuda_archs": archs,
        "left_out": left_out,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    names = " ".join(f"X({isa}, arg)" for isa in isas)
    text = json.dumps(info).replace(')json"', "")
    path.write_text(
        f"#define PPO_ISAS(X, arg) {names}\n"
        f'#define PPO_BUILD_INFO R"json({text})json"\n' + ("#define PPO_CUDA\n" if nvcc else "")
    )


def _cxx() -> str:
    wanted = os.environ.get("CXX")
    found = [shutil.which(c) for c in ([wanted] if wanted else ["g++", "c++", "clang++"])]
    if not any(found):
        raise NativeError(f"no C++ compiler: {wanted or 'g++, c++, clang++'} not found on PATH")
    return next(c for c in found if c)


def _first_line(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    return (done.stdout or done.stderr).strip().split("\n")[0]


# ------------------------------------------------------------------------------------- CUDA


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which(f"{home}/bin/nvcc")
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def _nvcc_version(nvcc: str) -> str:
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
    found = re.search(r"release (\d+\.\d+)", done.stdout)
    return found.group(1) if found else "unknown"


def _arch_list(prebuilt: bool) -> str:
    # device_count asks the driver's management library and starts no CUDA context.
    every = prebuilt or torch.cuda.device_count() > 0
    default = DEFAULT_ARCHS if every else ARCHS_WITHOUT_GPU
    return os.environ.get("TORCH_CUDA_ARCH_LIST") or default


def _cuda(prebuilt: bool) -> tuple[str | None, list[str], str]:
    """(nvcc, architectures it will compile for, why there is no CUDA part)."""
    if torch.version.cuda is None:
        return None, [], f"torch {torch.__version__} is built without CUDA"
    nvcc = _nvcc()
    if nvcc is None:
        return None, [], "nvcc not found (CUDA_HOME, PATH, /usr/local/cuda)"
    version = _nvcc_version(nvcc)
    # A newer runtime than torch's may ask for a newer driver than the one torch runs on.
    if version == "unknown" or int(version.split(".")[0]) > int(torch.version.cuda.split(".")[0]):
        return None, [], f"nvcc {version} is newer than torch's CUDA {torch.version.cuda}"
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True).stdout
    wanted = re.split(r"[;,\s]+", _arch_list(prebuilt).strip())
    try:
        archs = [a for a in wanted if f"sm_{_digits(a)}".rstrip("af") in known.split()]
    except NativeError as error:
        return None, [], str(error)
    if not archs:
        return None, [], f"nvcc {version} knows none of the architectures {' '.join(wanted)}"
    return nvcc, archs, ""


def _digits(arch: str) -> str:
    """9.0a+PTX -> 90a"""
    if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", arch):
        raise NativeError(f"TORCH_CUDA_ARCH_LIST must hold items like 9.0 or 9.0+PTX, got {arch!r}")
    return arch.removesuffix("+PTX").replace(".", "")


def _gencode(archs: list[str]) -> list[str]:
    out = []
    for arch in archs:
        n = _digits(arch)
        out.append(f"-gencode=arch=compute_{n},code=sm_{n}")
        if arch.endswith("+PTX"):
            out.append(f"-gencode=arch=compute_{n},code=compute_{n}")
    return out


# ------------------------------------------------------------------------------------- info


def describe() -> str:
    """What is active, per op and device, and why (`ppo-kernels info`)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        native = ensure()
    lines = [
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"CUDA device: {torch.cuda.get_device_name() if torch.cuda.is_available() else 'none'}"
    ]
    if not native:
        lines.append(f"native module: none, {_failure}")
    else:
        info = _module.build_info()
        origin = "prebuilt" if info["prebuilt"] else "built on this machine"
        lines.append(f"native module: {origin}, {_module.__file__}")
        lines.append(f"  C++: {info['cxx']} {' '.join(info['cxx_flags'])}")
        isas = ", ".join(info["isas"])
        own = "for this CPU" if info["isa"] == "native" else f"{info['isa']} of {isas}"
        lines.append(f"  CPU kernels: {own}")
        if info["nvcc"]:
            lines.append(f"  CUDA: nvcc {info['nvcc']} for {' '.join(info['cuda_archs'])}")
        else:
            lines.append(f"  CUDA part left out: {info['left_out']}")
    lines += ["", f"{'op':24}{'CPU':12}CUDA"]
    lines += [f"{name:24}{cpu:12}{cuda}" for name, cpu, cuda in _active()]
    lines += [
        "",
        "GEMMs: the vendor's, around the kernels of the other ops. reference: plain PyTorch.",
    ]
    return "\n".join(lines)


def _active() -> list[tuple[str, str, str]]:
    """(op, what runs it on the CPU, on CUDA) for every op defined so far, from the dispatcher."""
    rows = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if name.startswith("ppo_kernels::hidden_"):
            rows.append((name.split("::")[1], "GEMMs", "GEMMs"))
        elif name.startswith("ppo_kernels::") and not name.endswith("_product_"):
            dump = torch._C._dispatch_dump(name)
            kinds = [
                re.search(rf"^{key}: registered at (\S+)", dump, re.M) for key in ("CPU", "CUDA")
            ]
            cpu, cuda = ("reference" if not k else "py" if ".py" in k[1] else "C++" for k in kinds)
            rows.append((name.split("::")[1], cpu, {"py": "Triton", "C++": "CUDA"}.get(cuda, cuda)))
    return rows
