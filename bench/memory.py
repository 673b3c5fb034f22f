"""Peak memory of one call above its inputs.

On CUDA this is the allocator's peak. On the CPU it is the high-water mark of the resident set above
its level when the inputs exist (Linux resets the mark through /proc/self/clear_refs), and only a
fresh process shows it: runner.measure_memory starts `python -m bench.memory`, which prints a line
of JSON, case -> bytes, for each case.
"""

import ctypes
import gc
import json
import sys
from pathlib import Path

import torch

from bench import cases
from bench.case import Case, Contestant


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def peak_bytes(case: Case, contestant: Contestant, device: torch.device) -> int:
    """The peak above the inputs of one call after a small one that loads code and threads."""
    function = contestant.load()
    function(contestant.prepare(case.make(0, True)))
    inputs = contestant.prepare(case.make(1, False))
    if contestant.compiles:
        function(inputs)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outputs = function(inputs)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = status_bytes("VmRSS")
        outputs = function(inputs)
        peak = status_bytes("VmHWM") - before
    del outputs, inputs
    return max(peak, 0)


def main() -> None:
    keys, name = json.loads(sys.argv[1])
    size, ops = sys.argv[2:]
    device = torch.device("cpu")
    for case in cases.build(ops.split(","), device, size):
        if case.key in keys:
            (contestant,) = [c for c in case.contestants if c.name == name]
            print(json.dumps({case.key: peak_bytes(case, contestant, device)}), flush=True)


if __name__ == "__main__":
    main()
