"""Compile Triton kernels for real GPUs on a machine without one, as their launchers launch them.

A test module lists its launches by name and asks for what came out of ptxas:

    LAUNCHES = {"fwd bf16": lambda: kernels.logprobs_fwd(logits(8, 32000, torch.bfloat16), ...)}

    @pytest.fixture(scope="module")
    def binaries():
        return aot.compile_launches(__name__)   # {(name, arch): [Binary, ...]}

The launches run in a fresh process without TRITON_INTERPRET, on meta tensors (their data pointer,
0, counts as 16-byte aligned, like any fresh CUDA tensor), with a driver that only knows the name
of the card. Block sizes, warps and specialisation are therefore the launcher's own, not a copy.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ARCHS = (80, 90, 100)


@dataclasses.dataclass(frozen=True)
class Binary:
    """What ptxas made of one kernel. local: bytes per thread in local memory, 0 without spills."""

    kernel: str
    hash: str  # equal for two launches that run the same compiled code
    num_warps: int
    registers: int
    local: int
    shared: int
    # Vector width in bits -> number of such global memory instructions in the SASS.
    loads: dict[int, int]
    stores: dict[int, int]

    @property
    def widest_load(self) -> int:
        return max(self.loads, default=0)

    @property
    def widest_store(self) -> int:
        return max(self.stores, default=0)


def compile_launches(
    module: str, archs: tuple[int, ...] = ARCHS
) -> dict[tuple[str, int], list[Binary]]:
    """Run every entry of `module.LAUNCHES` for every architecture; kernels in launch order."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    here = Path(__file__).parent
    env["PYTHONPATH"] = os.pathsep.join([str(here), str(here.parent), env.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "binaries.json"
        command = [sys.executable, __file__, module, str(out), *map(str, archs)]
        run = subprocess.run(command, env=env, capture_output=True, text=True)
        if run.returncode != 0:
            raise RuntimeError(f"compiling the launches of {module} failed:\n{run.stderr[-4000:]}")
        return {(name, arch): _binaries(found) for name, arch, found in json.loads(out.read_text())}


def _binaries(found: list[dict[str, Any]]) -> list[Binary]:
    def widths(counts: dict[str, int]) -> dict[int, int]:
        return {int(bits): n for bits, n in counts.items()}

    return [
        Binary(**{**b, "loads": widths(b["loads"]), "stores": widths(b["stores"])}) for b in found
    ]


# ------------------------------------------------------------------------ in the subprocess


class _Card:
    """The part of a Triton driver that compiling asks for."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch  # triton caches compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


@contextlib.contextmanager
def _compiling_only(arch: int) -> Iterator[list[Any]]:
    """`kernel[grid](...)` compiles for `arch` and launches nothing; yields what was compiled."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return compiled[-1]

    JITFunction.run = compile_only
    driver.set_active(_Card(arch))
    try:
        yield compiled
    finally:
        JITFunction.run = run


def _tool(name: str, cubin: bytes, *options: str) -> str:
    """The output of a CUDA binary tool of the triton wheel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), *options, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _describe(kernel: Any) -> Binary:
    cubin = kernel.asm["cubin"]
    usage = _tool("cuobjdump", cubin, "--dump-resource-usage")

    def resource(name: str) -> int:
        return int(re.search(rf"\b{name}:(\d+)", usage).group(1))

    sass = _tool("nvdisasm", cubin, "-c")

    def widths(op: str) -> dict[int, int]:
        counts: dict[int, int] = {}
        for modifiers in re.findall(rf"\b{op}\.E(\S*)", sass):
            width = re.search(r"\.(?:U|S)?(8|16|64|128|256)\b", modifiers)
            bits = int(width.group(1)) if width else 32
            counts[bits] = counts.get(bits, 0) + 1
        return counts

    return Binary(
        kernel=kernel.metadata.name,
        hash=kernel.hash,
        num_warps=kernel.metadata.num_warps,
        registers=resource("REG"),
        # STACK counts spills and indexed arrays, LOCAL what is declared in local memory.
        local=resource("STACK") + resource("LOCAL"),
        shared=kernel.metadata.shared,
        loads=widths("LDG"),
        stores=widths("STG"),
    )


def _main(module: str, out: str, archs: list[int]) -> None:
    launches: dict[str, Callable[[], Any]] = importlib.import_module(module).LAUNCHES
    found = []
    for arch in archs:
        for name, launch in launches.items():
            with _compiling_only(arch) as compiled:
                launch()
            found.append((name, arch, [dataclasses.asdict(_describe(k)) for k in compiled]))
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], [int(arch) for arch in sys.argv[3:]])
