"""`python -m bench`: see --help. Exit status: 0; 1 if an op of ours is wrong or crashes; 2 if a
name was not known (the known ones run all the same); 130 if it was interrupted."""

import argparse
import json
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench import cases, machine, memory, peers, plots, report, runner, timing
from bench.case import DTYPES, Case

# Seconds of samples for a case, shared by its contestants. Slow calls take what they take.
BUDGET = {"small": 0.5, "default": 5.0, "sweep": 2.0, "large": 0.0}
GPU_BUDGET = 2.0
RECORD = ("default", "sweep", "large")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    listing = "comma separated list"
    parser.add_argument("--op", default="all", help=f"{listing} of {', '.join(cases.OPS)}, or all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="all", help=f"{listing} of {', '.join(DTYPES)}, or all")
    parser.add_argument("--size", default="default", choices=("small", "default", "large"))
    parser.add_argument(
        "--peers", default="all", help=f"{listing} of {', '.join(peers.NAMES)}; all or none"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the rows, after every case"
    )
    parser.add_argument("--plot", type=Path, metavar="DIR", help="also run sweeps, and draw")
    parser.add_argument("--memory", action="store_true", help="peak memory, in fresh processes")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no case after this many seconds"
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="DIR",
        help="results of record: default sizes, sweeps and memory of each op into DIR as JSON, "
        "Markdown and PNG; an op with a complete file of this commit there is not run again",
    )
    return parser.parse_args(argv)


def known(what: str, given: str, names: tuple[str, ...]) -> tuple[list[str], bool]:
    """The known names of a list, in its order, and whether all were; unknown ones are named."""
    if given in ("all", "none"):
        return list(names) if given == "all" else [], True
    asked = [n.strip() for n in given.split(",") if n.strip()]
    unknown = [n for n in asked if n not in names]
    if unknown:
        complain(f"unknown {what} {', '.join(unknown)}; there are {', '.join(names)}")
    return [n for n in dict.fromkeys(asked) if n in names], not unknown


def obstacle(args: argparse.Namespace) -> str:
    """Why nothing can be measured or written, if so; makes the folders to write to."""
    if args.device not in ("cpu", "cuda"):
        return f"unknown device {args.device}; there are cpu, cuda"
    if args.device == "cuda" and not torch.cuda.is_available():
        return "device cuda was asked for, but torch finds no CUDA device"
    if args.record and (args.json or args.plot):
        return "--record writes its own files: leave out --json and --plot"
    if args.json and args.json.is_dir():
        return f"--json {args.json} is a folder; a file was expected"
    try:
        for folder in filter(None, (args.record, args.plot, args.json and args.json.parent)):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    return ""


def complain(message: str) -> None:
    print(f"bench: {message}", file=sys.stderr)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A live line on a terminal that rich can drive; one line per step elsewhere."""
    start = time.monotonic()
    try:
        from rich.console import Console
    except ImportError:
        Console = None
    if Console is None or not sys.stderr.isatty():
        yield lambda text: print(f"[{time.monotonic() - start:5.0f} s] {text}", file=sys.stderr)
        return
    with Console(stderr=True).status("") as status:
        yield lambda text: status.update(f"[{time.monotonic() - start:.0f} s] {text}")


def choose(args: argparse.Namespace, ops: list[str]) -> list[tuple[str, Case]]:
    """(size, case) of these ops, without the dtypes and peers that were not asked for."""
    sizes = RECORD if args.record else [args.size, *(["sweep"] if args.plot else [])]
    device, unwanted = torch.device(args.device), set(peers.NAMES) - set(args.peers)
    found = [(s, c) for s in sizes for c in cases.build(ops, device, s) if c.dtype in args.dtypes]
    for _, case in found:
        case.contestants = [c for c in case.contestants if c.name.split()[0] not in unwanted]
    return found


def run(args: argparse.Namespace, ops: list[str], file: Path | None, results: list[Any]) -> None:
    """Appends to results what it measures of these ops; half a run is kept and printed as well."""
    if args.record and file.exists():
        earlier = json.loads(file.read_text())
        if "stopped" not in earlier and machine.is_of_this_commit(earlier):
            complain(f"{file} is there, from this commit; remove it to measure again")
            results.append(earlier)
            return
        if "took" in earlier:
            complain(f"{file} took {earlier['took']:.0f} s the last time")
    chosen = choose(args, ops)
    if not chosen:
        complain(f"{', '.join(ops)}: no {args.size} case in {', '.join(args.dtypes) or args.dtype}")
        return
    result = {"name": f"{', '.join(ops)} on {args.device}", "ceiling": {}, "rows": []}
    result |= machine.describe(torch.device(args.device))
    results.append(result)
    try:
        with progress() as say:
            measure(args, chosen, result, file, say)
    finally:
        write(result, file)
        if args.record:
            file.with_suffix(".md").write_text(report.markdown(result))
        print(report.text(result), flush=True)


def measure(
    args: argparse.Namespace,
    chosen: list[tuple[str, Case]],
    result: dict[str, Any],
    file: Path | None,
    say: Callable[[str], None],
) -> None:
    """Adds the rows of all cases to result, which says where it stopped until all are there."""
    start, device = time.monotonic(), torch.device(args.device)
    say("measuring copy bandwidth and GEMM rates")
    result["stopped"] = "before the first case"
    result["ceiling"] = timing.ceilings(device, args.dtypes)
    for i, (size, case) in enumerate(chosen, 1):
        result["stopped"] = f"{time.monotonic() - start:.0f} s after it began, at {case.key}"
        write(result, file)
        if time.monotonic() - start > args.seconds:
            return
        rows = runner.new_rows(case)
        result["rows"] += rows
        budget = GPU_BUDGET if device.type == "cuda" else BUDGET[size]
        at = f"{i} of {len(chosen)}, "
        runner.run_case(case, rows, device, budget, lambda text, at=at: say(at + text))
        if args.memory and device.type == "cuda":
            memory.measure([case], rows, device, say)
    if args.memory and device.type == "cpu":
        result["stopped"] = "before peak memory was measured"
        write(result, file)
        memory.measure([case for _, case in chosen], result["rows"], device, say)
    del result["stopped"]
    result["took"] = time.monotonic() - start


def write(result: dict[str, Any], file: Path | None) -> None:
    """As JSON, whole files only: a process that is killed here leaves the last one."""
    if file:
        part = file.with_name(file.name + ".part")
        part.write_text(json.dumps(result, indent=1) + "\n")
        part.replace(file)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    ops, ops_known = known("op", args.op, tuple(cases.OPS))
    args.dtypes, dtypes_known = known("dtype", args.dtype, tuple(DTYPES))
    args.peers, peers_known = known("peer", args.peers, peers.NAMES)
    if reason := obstacle(args):
        complain(reason)
        return 2
    # Peers warn about each other and about deprecations in torch: none of it is about a number.
    warnings.filterwarnings("ignore")
    torch._dynamo.config.recompile_limit = 64
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = args.record or args.plot
    args.memory |= bool(args.record)
    jobs = [(ops, args.json)] if ops else []
    if args.record:
        jobs = [([op], args.record / f"{args.device}-{op}.json") for op in ops]
    results: list[dict[str, Any]] = []
    status = 0 if ops_known and dtypes_known and peers_known else 2
    try:
        for job in jobs:
            run(args, *job, results)
    except KeyboardInterrupt:
        complain("interrupted; the table has what was measured")
        status = 130
    drawn = results
    if args.record:  # with the ops that were recorded before
        drawn = [r for r in report.load(args.record) if r["device"] == args.device]
    try:
        for path in plots.draw(drawn, folder, args.device) if folder else ():
            print(f"bench: wrote {path}")
    except ImportError as error:
        complain(f"no plots: {error}")
    rows = [row for result in results for row in result["rows"]]
    ours = [row["status"] for row in rows if row["contestant"] == "ours"]
    return 1 if "wrong" in ours or "crashed" in ours else status


if __name__ == "__main__":
    sys.exit(main())
