"""Checks every contestant, times the right ones in turns, and returns rows of plain data."""

import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch

from bench import timing
from bench.case import TOLERANCE, Case, Contestant, Function, Tensors, Unavailable, error_against

Row = dict[str, Any]
Report = Callable[[str], None]
FEWEST, MOST = 3, 40
# A call longer than this is its own warm-up: it counts, and two more follow.
SLOW_SECONDS = 1.0
MEMORY_TIMEOUT = 300


def run_case(case: Case, device: torch.device, budget: float, report: Report) -> list[Row]:
    """Rows of one case, one per contestant, whatever happened to it."""
    rows = {c.name: _row(case, c) for c in case.contestants}
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


def _row(case: Case, contestant: Contestant) -> Row:
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
            mine = dict(inputs)
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
        watch = timing.Stopwatch(functions[name], ring, overwrites, device)
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
    fewest = {name: 0 if case.single else FEWEST - (name in slow) for name in watches}
    samples = timing.interleave(watches, cost, budget, fewest, 0 if case.single else MOST)
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
    """Peak bytes of each case by key, or {"message": why not}; one fresh process for all."""
    command = [sys.executable, "-m", "bench.memory", json.dumps([keys, contestant]), *args]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MEMORY_TIMEOUT)
    except subprocess.TimeoutExpired:
        return {"message": f"no answer in {MEMORY_TIMEOUT} s"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return {"message": last[:200]}


def add_memory(cases: Iterable[Case], rows: list[Row], args: list[str], report: Report) -> None:
    """Adds "peak_bytes" above the inputs to the rows that ran; a sweep shares one process."""
    groups: dict[tuple[str, str, Any], list[Case]] = {}
    ran = {
        (r["op"], r["case"], r["dtype"], r["contestant"]): r for r in rows if r["status"] == "ok"
    }
    for case in cases:
        for c in case.contestants:
            if (case.op, case.name, case.dtype, c.name) in ran:
                line = (case.op, c.name, case.sweep[0] if case.sweep else case.key)
                groups.setdefault(line, []).append(case)
    for (_, name, _), members in groups.items():
        report(f"{members[0].key}: peak memory of {name}")
        found = measure_memory([case.key for case in members], name, args)
        for case in members:
            row = ran[case.op, case.name, case.dtype, name]
            if case.key in found:
                row["peak_bytes"] = found[case.key]
            else:
                row["memory_message"] = found.get("message", "not measured")
