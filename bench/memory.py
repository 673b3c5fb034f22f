"""Peak memory of one call above its inputs.

On CUDA this is the allocator's peak. On the CPU it is the high-water mark of the resident set above
its level when the inputs exist (Linux resets the mark through /proc/self/clear_refs), and only a
fresh process shows it: `python -m bench.memory OP CONTESTANT KEY...` prints a line of JSON,
case -> bytes, for each case.
"""

import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from bench import cases
from bench.case import Case, Contestant
from bench.machine import ROOT
from bench.runner import Report, Row, failure

TIMEOUT = 600


def measure(tried: list[Case], rows: list[Row], device: torch.device, report: Report) -> None:
    """Adds "peak_bytes" to the rows that ran, or "memory_message" where that failed."""
    by_name = {(r["op"], r["case"], r["dtype"], r["contestant"]): r for r in rows}
    groups: dict[tuple[str, str], dict[str, Row]] = {}
    for case in tried:
        for c in case.contestants:
            row = by_name[case.op, case.name, case.dtype, c.name]
            if row["status"] == "ok":
                groups.setdefault((case.op, c.name), {})[case.key] = row
    for (op, contestant), members in groups.items():
        report(f"{op}: peak memory of {contestant}, {len(members)} cases")
        if device.type == "cuda":
            found = _in_this_process(tried, contestant, members, device)
        else:
            found = in_fresh_process(op, contestant, list(members))
        for key, row in members.items():
            if key in found:
                row["peak_bytes"] = found[key]
            else:
                row["memory_message"] = found.get("message", "not measured")


def in_fresh_process(op: str, contestant: str, keys: list[str]) -> dict[str, Any]:
    """Peak bytes by case, and "message" if the process did not finish."""
    command = [sys.executable, "-m", "bench.memory", op, contestant, *keys]
    found: dict[str, Any] = {}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, cwd=ROOT)
        output = done.stdout
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            found["message"] = lines[-1][:200]
    except subprocess.TimeoutExpired as e:
        output = (e.stdout or b"").decode()
        found["message"] = f"no answer in {TIMEOUT} s"
    for line in output.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found


def _in_this_process(
    tried: list[Case], contestant: str, keys: dict[str, Row], device: torch.device
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case, c in _chosen(tried, contestant, keys):
        try:
            found[case.key] = peak_bytes(case, c, device)
        except Exception as e:
            found["message"] = failure(e)["message"]
    return found


def _chosen(among: list[Case], contestant: str, keys: Any) -> list[tuple[Case, Contestant]]:
    pairs = [(case, c) for case in among if case.key in keys for c in case.contestants]
    return [(case, c) for case, c in pairs if c.name == contestant]


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


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def main() -> None:
    op, contestant, *keys = sys.argv[1:]
    device = torch.device("cpu")
    every = [case for size in cases.SIZES for case in cases.build([op], device, size)]
    for case, c in _chosen(every, contestant, keys):
        print(json.dumps({case.key: peak_bytes(case, c, device)}), flush=True)


if __name__ == "__main__":
    main()
