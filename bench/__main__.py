"""`python -m bench`: see --help. Exit status: 0; 1 if an op of ours is wrong or crashes; 2 if a
name was not known (the known ones run all the same)."""

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bench import cases, peers, plots, report, runner, timing
from bench.case import DTYPES

PACKAGES = ("torch", "triton", "transformers", "trl", "liger-kernel", "cut-cross-entropy")
PACKAGES += ("torchrl", "verl", "openrlhf", "quack-kernels", "flash-attn", "pufferlib")
BUDGET = {"small": 0.5, "default": 5.0, "sweep": 2.0, "large": 0.0}
GPU_BUDGET = 2.0


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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="also run sweeps, and draw")
    parser.add_argument("--memory", action="store_true", help="peak memory, in fresh processes")
    parser.add_argument("--seconds", type=float, help="start no case after this many seconds")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="DIR",
        help="results of record: default sizes, sweeps and memory of each op into DIR as JSON, "
        "Markdown and PNG; an op whose file is there already is not run again",
    )
    return parser.parse_args(argv)


def known(what: str, given: str, names: tuple[str, ...]) -> tuple[list[str], bool]:
    """The known names in a list, and whether all of them were; unknown ones are named."""
    if given == "all":
        return list(names), True
    asked = [n for n in given.split(",") if n]
    unknown = [n for n in asked if n not in names]
    if unknown:
        message = f"unknown {what} {', '.join(unknown)}; there are {', '.join(names)}"
        print(f"bench: {message}", file=sys.stderr)
    return [n for n in names if n in asked], not unknown


@contextmanager
def progress() -> Any:
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


def machine(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
        models = [line.split(":")[1].strip() for line in info.splitlines() if "model name" in line]
        name = models[0] if models else "unknown CPU"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"device": name, "cores": os.cpu_count(), "memory": f"{memory / 2**30:.0f} GiB"}


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of this checkout, marked when files differ from it; results do not count."""
    here = Path(__file__).parents[1]

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *args], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ".", ":!bench/results")
        return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def select(args: argparse.Namespace, ops: list[str], size: str, device: torch.device) -> list:
    """The cases of these ops and dtypes, without the peers that were not asked for."""
    dtypes, wanted = args.dtypes, args.peer_names
    chosen = [c for c in cases.build(ops, device, size) if c.dtype in dtypes]
    for case in chosen:
        case.contestants = [
            c for c in case.contestants if package(c.name) is None or package(c.name) in wanted
        ]
    return chosen


def package(contestant: str) -> str | None:
    first = contestant.split()[0]
    return first if first in peers.NAMES else None


def run(
    args: argparse.Namespace,
    ops: list[str],
    sizes: list[str],
    device: torch.device,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """All rows of these ops, and what they were measured on."""
    start = time.monotonic()
    say("measuring copy bandwidth and GEMM rates")
    result = {
        "name": f"{', '.join(ops)} on {device.type}",
        "device": device.type,
        "machine": machine(device),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "ceiling": timing.ceilings(device, args.dtypes),
        "rows": [],
    }
    for size in sizes:
        budget = GPU_BUDGET if device.type == "cuda" else BUDGET[size]
        chosen = select(args, ops, size, device)
        ran = []
        for i, case in enumerate(chosen, 1):
            if args.seconds and time.monotonic() - start > args.seconds:
                say(f"{case.key}: not run, {args.seconds:.0f} s are over")
                continue
            at = f"{size} case {i} of {len(chosen)}, "
            rows = runner.run_case(case, device, budget, lambda text, at=at: say(at + text))
            if args.memory and device.type == "cuda":
                runner.add_cuda_memory(case, rows, device, say)
            result["rows"] += rows
            ran.append(case)
        if args.memory and device.type == "cpu":
            weighed = [c for c in ran if not args.record or c.headline or c.sweep or c.single]
            runner.add_memory(weighed, result["rows"], [size, ",".join(ops)], say)
    return result


def record(args: argparse.Namespace, ops: list[str], device: torch.device, folder: Path) -> int:
    """Results of record, op by op, so that an interrupted run goes on where it stopped."""
    folder.mkdir(parents=True, exist_ok=True)
    args.memory = True
    for op in ops:
        file = folder / f"{device.type}-{op}.json"
        if file.exists():
            print(f"bench: {file} is there; remove it to measure again", file=sys.stderr)
            continue
        with progress() as say:
            result = run(args, [op], ["default", "sweep", "large"], device, say)
        file.write_text(json.dumps(result, indent=1) + "\n")
        file.with_suffix(".md").write_text(report.markdown(result))
        print(report.text(result), flush=True)
    results = [json.loads(p.read_text()) for p in sorted(folder.glob(f"{device.type}-*.json"))]
    for path in plots.draw(results, folder, device.type):
        print(f"bench: wrote {path}")
    return failed([row for result in results for row in result["rows"]])


def failed(rows: list[dict[str, Any]]) -> int:
    return int(any(r["contestant"] == "ours" and r["status"] in ("wrong", "crashed") for r in rows))


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    ops, ops_known = known("op", args.op, tuple(cases.OPS))
    args.dtypes, dtypes_known = known("dtype", args.dtype, tuple(DTYPES))
    args.peer_names, peers_known = (
        ([], True) if args.peers == "none" else known("peer", args.peers, peers.NAMES)
    )
    if args.device not in ("cpu", "cuda"):
        print(f"bench: unknown device {args.device}; there are cpu, cuda", file=sys.stderr)
        return 2
    if args.device == "cuda" and not torch.cuda.is_available():
        print("bench: device cuda was asked for, but torch finds no CUDA device", file=sys.stderr)
        return 2
    if not ops or not args.dtypes:
        return 2
    device = torch.device(args.device)
    # Peers warn about each other and about deprecations in torch: none of it is about a number.
    warnings.filterwarnings("ignore")
    torch._dynamo.config.recompile_limit = 64
    if args.record:
        status = record(args, ops, device, args.record)
    else:
        with progress() as say:
            result = run(args, ops, [args.size, *(["sweep"] if args.plot else [])], device, say)
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
        if args.plot:
            plots.draw([result], args.plot, device.type)
        print(report.text(result))
        status = failed(result["rows"])
    return status or (0 if ops_known and dtypes_known and peers_known else 2)


if __name__ == "__main__":
    sys.exit(main())
