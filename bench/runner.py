"""Checks every contestant of a case, times the right ones in turns; rows of plain data hold it."""

import traceback
from collections.abc import Callable
from typing import Any

import torch

from bench import timing
from bench.case import TOLERANCE, Case, Contestant, Function, Unavailable, error_against

Row = dict[str, Any]
Report = Callable[[str], None]


def new_rows(case: Case) -> list[Row]:
    """One row per contestant, as it stands before anything has run."""
    same = {
        "op": case.op,
        "case": case.name,
        "dtype": case.dtype,
        "bytes": case.bytes,
        "flops": case.flops,
        "required_bytes": case.required,
        "headline": case.headline,
        "sweep": case.sweep,
        "tokens": case.tokens,
    }
    return [same | {"contestant": c.name, "status": "not run"} for c in case.contestants]


def run_case(
    case: Case, rows: list[Row], device: torch.device, budget: float, report: Report
) -> None:
    """Fills the rows, whatever happens to a contestant; the samples take `budget` seconds."""
    free = timing.free_bytes(device)
    runnable = []
    for contestant, row in zip(case.contestants, rows):
        need = _bytes_needed(case, contestant)
        if need > 0.9 * free:
            gib = 2**30
            message = f"needs {need / gib:.1f} GiB, {free / gib:.1f} GiB free"
            row.update(status="skipped", message=message)
        else:
            runnable.append((contestant, row))
    torch._dynamo.reset()
    try:
        right = _checked(case, runnable, report)
        if not case.memory_only:
            _time(case, right, device, budget, report)
    except Exception as e:  # no contestant's fault: the inputs, or the answer
        for _, row in runnable:
            if row["status"] in ("not run", "ok"):
                row.update(failure(e))


def _bytes_needed(case: Case, contestant: Contestant) -> float:
    pristine = case.input_bytes if contestant.overwrites and not case.single else 0.0
    return case.input_bytes + pristine + case.required + contestant.workspace


def failure(error: BaseException) -> Row:
    """What the table says about a contestant that raised."""
    if isinstance(error, (Unavailable, ImportError)):
        return {"status": "absent", "message": str(error).splitlines()[0]}
    lines = traceback.format_exception_only(error)[-1].strip().splitlines()
    return {"status": "crashed", "message": lines[0][:200]}


Runnable = list[tuple[Contestant, Row]]


def _checked(
    case: Case, runnable: Runnable, report: Report
) -> list[tuple[Contestant, Row, Function]]:
    """The contestants whose output is right; the rows of the others say what is wrong."""
    if not runnable:
        return []
    report(f"{case.key}: making inputs and the answer in fp64")
    inputs = case.make(0, True)
    want = case.expected(inputs)
    limit = TOLERANCE[case.dtype]
    right = []
    for contestant, row in runnable:
        report(f"{case.key}: checking {contestant.name}")
        try:
            function = contestant.load()
            mine = contestant.prepare(inputs)
            if contestant.overwrites and not case.single:
                mine[contestant.overwrites] = mine[contestant.overwrites].clone()
            error = row["error"] = error_against(case, inputs, function(mine), want)
        except Exception as e:
            row.update(failure(e))
            continue
        if error > limit:
            row.update(status="wrong", message=f"off by {error:.1e}, {limit:.0e} allowed")
            continue
        row["status"] = "ok"
        right.append((contestant, row, function))
    return right


def _time(
    case: Case,
    right: list[tuple[Contestant, Row, Function]],
    device: torch.device,
    budget: float,
    report: Report,
) -> None:
    # Enough sets of inputs to exceed twice the cache, so that no call finds its own there.
    ring = [case.make(1, False)]
    size = max(sum(x.nbytes for x in ring[0].values()), 1)
    if not case.single:
        more = min(63, int(2 * timing.cache_bytes(device) / size))
        ring += [case.make(2 + i, False) for i in range(more)]
    timed = []
    try:
        for contestant, row, function in right:
            report(f"{case.key}: warming up {contestant.name}")
            inputs = [contestant.prepare(x) for x in ring]
            overwrites = None if case.single else contestant.overwrites
            watch = timing.Stopwatch(function, inputs, overwrites, device)
            try:
                if contestant.compiles:
                    watch.sample()
                watch.warm_up()
            except Exception as e:
                row.update(failure(e))
                continue
            timed.append((watch, row))
        report(f"{case.key}: timing {', '.join(row['contestant'] for _, row in timed)}")
        timing.interleave([watch for watch, _ in timed], budget)
    finally:  # an interrupt keeps the samples there are
        for watch, row in timed:
            if watch.samples:
                row.update(timing.summary(watch.samples))
