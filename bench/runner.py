"""Checks every contestant, times the right ones in turns, and returns rows of plain data."""

import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch

from bench import memory, timing
from bench.case import TOLERANCE, Case, Contestant, Function, Tensors, Unavailable, error_against

Row = dict[str, Any]
Report = Callable[[str], None]
FEWEST, MOST = 3, 40
# A call longer than this is its own warm-up: it counts, and two more follow; one more where a call
# is so long that the machine's noise averages out within it.
SLOW_SECONDS, VERY_SLOW_SECONDS = 1.0, 5.0
MEMORY_TIMEOUT = 400


def run_case(case: Case, device: torch.device, budget: float, report: Report) -> list[Row]:
    """Rows of one case, one per contestant, whatever happened to it."""
    rows = {c.name: new_row(case, c) for c in case.contestants}
    free = timing.free_bytes(device)
    if case.input_bytes > 0.9 * free:
        for row in rows.values():
            row.update(_too_large(case.input_bytes, free))
        return list(rows.values())
    torch._dynamo.reset()
    functions = _checked(case, device, rows, report)
    if case.memory_only:
        for name in functions:
            rows[name]["status"] = "ok"
    elif functions:
        _time(case, functions, device, budget, rows, report)
    return list(rows.values())


def new_row(case: Case, contestant: Contestant) -> Row:
    return {
        "op": case.op,
        "case": case.name,
        "dtype": case.dtype,
        "contestant": contestant.name,
        "status": "not run",
        "message": "",
        "bytes": case.bytes,
        "flops": case.flops,
        "required_bytes": case.required,
        "headline": case.headline,
        "sweep": case.sweep,
        "tokens": case.tokens,
    }


def _too_large(need: float, free: float) -> Row:
    gib = 2**30
    return {
        "status": "skipped",
        "message": f"needs {need / gib:.1f} GiB, {free / gib:.1f} GiB free",
    }


def failure(error: BaseException) -> Row:
    """What the table says about a contestant that raised."""
    if isinstance(error, (Unavailable, ImportError)):
        return {"status": "absent", "message": str(error).splitlines()[0]}
    lines = traceback.format_exception_only(error)[-1].strip().splitlines()
    return {"status": "crashed", "message": lines[0][:200]}


def _checked(
    case: Case, device: torch.device, rows: dict[str, Row], report: Report
) -> dict[str, Function]:
    """The contestants whose output is right, by name; the others' rows say what is wrong."""
    inputs = case.make(0, True)
    want = case.expected(inputs)
    right: dict[str, Function] = {}
    for contestant in case.contestants:
        name, row = contestant.name, rows[contestant.name]
        report(f"{case.key}: checking {name}")
        need = case.input_bytes + case.required + contestant.workspace
        free = timing.free_bytes(device) + sum(x.nbytes for x in inputs.values())
        if need > 0.9 * free:
            row.update(_too_large(need, free))
            continue
        try:
            function = contestant.load()
            mine = contestant.prepare(inputs)
            if contestant.overwrites and not case.single:
                mine[contestant.overwrites] = inputs[contestant.overwrites].clone()
            error = error_against(case, inputs, function(mine), want)
        except Exception as e:
            row.update(failure(e))
            continue
        row["error"] = error
        if error > TOLERANCE[case.dtype]:
            limit = TOLERANCE[case.dtype]
            row.update(status="wrong", message=f"off by {error:.1e}, {limit:.0e} allowed")
            continue
        row["status"] = "checked"
        right[name] = function
    return right


def _ring(case: Case, device: torch.device) -> list[Tensors]:
    """Enough sets of inputs to exceed twice the cache, so that no call finds its own there."""
    first = case.make(1, False)
    size = max(sum(x.nbytes for x in first.values()), 1)
    count = 1 if case.single else min(64, 1 + int(2 * timing.cache_bytes(device) / size))
    return [first, *(case.make(1 + i, False) for i in range(1, count))]


def _time(
    case: Case,
    functions: dict[str, Function],
    device: torch.device,
    budget: float,
    rows: dict[str, Row],
    report: Report,
) -> None:
    ring = _ring(case, device)
    watches, cost, slow = {}, {}, {}
    for contestant in case.contestants:
        name = contestant.name
        if name not in functions:
            continue
        report(f"{case.key}: warming up {name}")
        overwrites = None if case.single else contestant.overwrites
        inputs = [contestant.prepare(x) for x in ring]
        watch = timing.Stopwatch(functions[name], inputs, overwrites, device)
        try:
            if contestant.compiles:
                watch.sample()
            cost[name] = watch.warm_up()
        except Exception as e:
            rows[name].update(failure(e))
            continue
        watches[name] = watch
        if cost[name] > SLOW_SECONDS or case.single:
            slow[name] = (cost[name], cost[name])
    report(f"{case.key}: timing {', '.join(watches)}")
    fewest = {n: FEWEST - (n in slow) - (cost[n] > VERY_SLOW_SECONDS) for n in watches}
    if case.single:
        fewest, budget = dict.fromkeys(watches, 0), 0.0
    samples = timing.interleave(watches, cost, budget, fewest, MOST)
    for name, taken in samples.items():
        if name in slow:
            taken.insert(0, slow[name])
        middle, low, high = timing.quartiles([device_s for device_s, _ in taken])
        rows[name].update(
            status="ok",
            seconds=middle,
            low=low,
            high=high,
            wall_seconds=timing.quartiles([wall for _, wall in taken])[0],
            samples=len(taken),
        )


def measure_memory(keys: list[str], contestant: str, args: list[str]) -> dict[str, Any]:
    """Peak bytes by case key from one fresh process, and "message" if it did not finish."""
    command = [sys.executable, "-m", "bench.memory", json.dumps([keys, contestant]), *args]
    found: dict[str, Any] = {}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MEMORY_TIMEOUT)
        output = done.stdout
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            found["message"] = lines[-1][:200]
    except subprocess.TimeoutExpired as e:
        output = (e.stdout or b"").decode()
        found["message"] = f"no answer in {MEMORY_TIMEOUT} s"
    for line in output.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found


def add_memory(cases: Iterable[Case], rows: list[Row], args: list[str], report: Report) -> None:
    """Adds "peak_bytes" to the rows that ran: a fresh process per op and contestant."""
    ran = {(r["op"], r["case"], r["dtype"], r["contestant"]): r for r in rows}
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        for c in case.contestants:
            if ran[case.op, case.name, case.dtype, c.name]["status"] == "ok":
                groups.setdefault((case.op, c.name), []).append(case)
    for (op, name), members in groups.items():
        report(f"{op}: peak memory of {name}")
        found = measure_memory([case.key for case in members], name, args)
        for case in members:
            row = ran[op, case.name, case.dtype, name]
            if case.key in found:
                row["peak_bytes"] = found[case.key]
            else:
                row["memory_message"] = found.get("message", "not measured")


def add_cuda_memory(case: Case, rows: list[Row], device: torch.device, report: Report) -> None:
    """Adds "peak_bytes" from the allocator, which needs no process of its own to be exact."""
    for contestant, row in zip(case.contestants, rows):
        if row["status"] == "ok":
            report(f"{case.key}: peak memory of {contestant.name}")
            try:
                row["peak_bytes"] = memory.peak_bytes(case, contestant, device)
            except Exception as e:
                row["memory_message"] = failure(e)["message"]
