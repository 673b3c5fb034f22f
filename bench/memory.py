"""Peak memory of one contestant, in this process alone: `python -m bench.memory` is started by
runner.measure_memory and prints one line of JSON, case -> bytes above the inputs.

On the CPU this is the high-water mark of the resident set above its level when the inputs exist
(Linux resets the mark through /proc/self/clear_refs); on CUDA it is the allocator's peak.
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
    small = case.make(0, True)
    # A case that is checked at full size has no smaller inputs: its warm-up leaves nothing behind,
    # because what it allocated is given back below.
    function(small)
    del small
    inputs = case.make(1, False)
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
    device, size = torch.device(sys.argv[2]), sys.argv[3]
    found = {}
    for case in cases.build(sys.argv[4].split(","), device, size):
        if case.key in keys:
            (contestant,) = [c for c in case.contestants if c.name == name]
            found[case.key] = peak_bytes(case, contestant, device)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
