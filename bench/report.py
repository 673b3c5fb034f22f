"""Tables from result files: on the screen, as Markdown, and the block that the README quotes.

`python -m bench.report [DIR]` prints the README's block from DIR (default bench/results), and
`python -m bench.report DIR --full` everything that is in DIR.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
LEGEND = (
    "time: median per call (on a GPU the device's time, and wall the time between calls); spread: "
    "half the interquartile range; vs ours: ratio of times, with ~ where the spreads overlap, so "
    "that the difference is not one; of ceiling: the least bytes or flops, over the time, over "
    "this machine's measured copy bandwidth or GEMM rate (a copy on a CPU also loads what it "
    "overwrites: reading, or writing in place, can exceed it); error: largest deviation from fp64 "
    "over the largest value; memory: peak above the inputs and the gradients that were asked for, "
    "in a fresh process on a CPU, by the allocator on a GPU."
)


def seconds(x: float) -> str:
    scale, unit = next(((s, u) for s, u in ((1, "s"), (1e3, "ms")) if x * s >= 1), (1e6, "us"))
    return f"{significant(x * scale)} {unit}"


def significant(x: float) -> str:
    """Three significant digits (two below one), without an exponent."""
    if x >= 100:
        return f"{x:.0f}"
    if x >= 1:
        return f"{x:.1f}" if x >= 10 else f"{x:.2f}"
    return f"{x:.2g}" if x >= 1e-4 else "0"


def mebibytes(x: float) -> str:
    mib = x / 2**20
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"


def ratio(row: Row, base: Row | None) -> str:
    if base is None or "seconds" not in row or "seconds" not in base or row is base:
        return ""
    unclear = row["low"] <= base["high"] and base["low"] <= row["high"]
    return f"{'~' if unclear else ''}{significant(row['seconds'] / base['seconds'])}x"


def bound(row: Row, ceiling: dict[str, float]) -> tuple[float, float, str]:
    """(the least bytes or flops of the case, this machine's rate of them or 0, their unit)."""
    if row["flops"]:
        return row["flops"], ceiling.get(row["dtype"], 0.0), "flop"
    return row["bytes"], ceiling.get("copy", 0.0), "B"


def floor_seconds(row: Row, ceiling: dict[str, float]) -> float:
    """The time that the least bytes or flops take at the ceiling; 0 where either is not known."""
    least, top, _ = bound(row, ceiling)
    return least / top if top else 0.0


def share(row: Row, ceiling: dict[str, float]) -> str:
    """Percent of the ceiling that binds the case, or nothing where none was measured."""
    least = floor_seconds(row, ceiling)
    if not (least and "seconds" in row):
        return ""
    percent = 100 * least / row["seconds"]
    return f"{percent:.0f}%" if percent >= 1 else f"{percent:.1g}%"


def extra_memory(row: Row) -> str:
    if "peak_bytes" not in row:
        return row.get("memory_message", "")
    return mebibytes(max(row["peak_bytes"] - row["required_bytes"], 0))


def cells(row: Row, base: Row | None, result: dict[str, Any]) -> dict[str, str]:
    """The line of one contestant that ran, by column; empty columns are dropped."""
    error = f"{row['error']:.1e}" if "error" in row else ""
    line = {"": row["contestant"]}
    if "seconds" in row:
        line["time"] = seconds(row["seconds"])
        if result["device"] == "cuda":
            line["wall"] = seconds(row["wall_seconds"])
        if row["tokens"]:
            line["tokens/s"] = f"{row['tokens'] / row['wall_seconds']:.0f}"
        half = seconds((row["high"] - row["low"]) / 2)
        line["spread"] = half if row["samples"] > 1 else "one call"
        line["vs ours"] = ratio(row, base)
        line["of ceiling"] = share(row, result["ceiling"])
    return line | {"error": error, "memory": extra_memory(row)}


class Table(NamedTuple):
    title: str
    lines: list[list[str]]  # the header first; none where no contestant ran
    floor: str = ""
    notes: Sequence[str] = ()


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """One for each case, then one for each quantity of each sweep."""
    for title, group in blocks([r for r in result["rows"] if not r["sweep"]]):
        yield case_table(title, group, result)
    points = [r for r in result["rows"] if r["sweep"]]
    points.sort(key=lambda r: (r["op"], r["dtype"], *r["sweep"]))
    for _, group in groupby(points, key=lambda r: (r["op"], r["dtype"], r["sweep"][0])):
        group = list(group)
        if any("seconds" in r for r in group):
            yield sweep_table("time", lambda r: seconds(r["seconds"]), "seconds", group, result)
        if any("peak_bytes" in r for r in group):
            yield sweep_table("memory", extra_memory, "peak_bytes", group, result)


def case_table(title: str, group: list[Row], result: dict[str, Any]) -> Table:
    base = base_of(group)
    lines = [cells(r, base, result) for r in group if r["status"] == "ok"]
    columns = dict.fromkeys(k for line in lines for k in line)
    columns = [c for c in columns if any(line.get(c) for line in lines)]
    problems: dict[str, list[str]] = {}
    for r in group:
        if r["status"] != "ok":
            problems.setdefault(problem(r), []).append(r["contestant"])
    notes = [f"{', '.join(names)} {why}" for why, names in problems.items()]
    body = [[line.get(c, "") for c in columns] for line in lines]
    return Table(title, [columns, *body] if body else [], floor(group[0], result["ceiling"]), notes)


def sweep_table(
    what: str, show: Callable[[Row], str], key: str, group: list[Row], result: dict[str, Any]
) -> Table:
    """Contestants down, values across; the notes say why a number is not there."""
    at = {(r["contestant"], r["sweep"][1]): r for r in group}
    values = sorted({value for _, value in at})
    lines = [[group[0]["sweep"][0][0], *map(str, values)]]
    for name in dict.fromkeys(r["contestant"] for r in group if key in r):
        found = [at.get((name, value), {}) for value in values]
        lines.append([name, *(show(r) if key in r else "" for r in found)])
    if key == "seconds":
        least = [floor_seconds(at["ours", value], result["ceiling"]) for value in values]
        lines.append(["floor", *(seconds(x) if x else "" for x in least)])
    missing: dict[tuple[str, str], list[str]] = {}
    for r in group:
        if key not in r:
            missing.setdefault((r["contestant"], problem(r)), []).append(str(r["sweep"][1]))
    notes = [f"{name} at {', '.join(where)} {why}" for (name, why), where in missing.items()]
    return Table(f"{swept(group[0])}: {what}", lines, notes=notes)


def swept(row: Row) -> str:
    """The title of a sweep: the case without what varies."""
    axis, value = row["sweep"]
    fixed = row["case"].rsplit(", sweep", 1)[0].replace(f"{axis[0]}={value} ", "")
    return f"{row['op']}: {fixed}, {row['dtype']}, against {axis[0]}"


def problem(row: Row) -> str:
    """Why a number is not there."""
    if row["status"] == "ok":
        return row.get("memory_message", "not measured")
    label = "not here" if row["status"] == "absent" else row["status"].upper()
    return label + (f": {row['message']}" if row.get("message") else "")


def blocks(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """Rows grouped into cases, in the order they ran."""
    grouped = groupby(rows, key=lambda r: (r["op"], r["case"], r["dtype"]))
    return [(f"{op}: {case}, {dtype}", list(group)) for (op, case, dtype), group in grouped]


def base_of(group: list[Row]) -> Row | None:
    return next((r for r in group if r["contestant"] == "ours" and r["status"] == "ok"), None)


def floor(row: Row, ceiling: dict[str, float]) -> str:
    """The least that a case has to move or compute, and the time that takes here."""
    least, _, unit = bound(row, ceiling)
    if not least:
        return "no floor"
    prefixes = ((1e12, "T"), (1e9, "G"), (1e6, "M"))
    scale, prefix = next(((s, p) for s, p in prefixes if least >= s), (1e3, "k"))
    time = floor_seconds(row, ceiling)
    at_best = f", {seconds(time)} at the ceiling" if time else ""
    return f"least {significant(least / scale)} {prefix}{unit}{at_best}"


def text(result: dict[str, Any]) -> str:
    """Fixed-width tables for a terminal."""
    out = [fill(describe(result), 100), ""]
    for title, lines, least, notes in tables(result):
        out.append(f"{title}  ({least})" if least else title)
        widths = [max(map(len, column)) for column in zip(*lines)]
        for first, *others in lines:
            right = "".join(f"  {c:>{w}}" for c, w in zip(others, widths[1:]))
            out.append(f"  {first:<{widths[0]}}{right}".rstrip())
        out += [f"  {note}" for note in notes] + [""]
    return "\n".join([*out, fill(LEGEND, 100)])


def markdown(result: dict[str, Any]) -> str:
    out = [f"# {result['name']}", "", describe(result), "", LEGEND, ""]
    for title, lines, least, notes in tables(result):
        out += [f"## {title}", ""] + ([least, ""] if least else [])
        if lines:
            lines.insert(1, ["---"] * len(lines[0]))
        out += ["| " + " | ".join(line) + " |" for line in lines] + [""] * bool(lines)
        out += [f"* {note}" for note in notes] + [""] * bool(notes)
    return "\n".join(out)


def describe(result: dict[str, Any]) -> str:
    """Machine, ceilings, versions, commit and date in two sentences; a third for half a run."""
    m, c = result["machine"], result["ceiling"]
    rates = [f"copy {c['copy'] / 1e9:.3g} GB/s"] if "copy" in c else []
    rates += [f"{n} GEMM {c[n] / 1e9:.4g} Gflop/s" for n in ("fp32", "bf16") if n in c]
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    return (
        f"{m['device']}, {m['cores']} cores, {m['memory']}; measured ceilings: {', '.join(rates)}. "
        f"Commit {result['commit']}, {result['date']}; {versions}."
        + (f" STOPPED {result['stopped']}: the rest is missing." if "stopped" in result else "")
    )


def load(folder: Path = RESULTS) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def readme(results: list[dict[str, Any]]) -> str:
    """The headline cases of all result files as one Markdown table per machine."""
    lines = []
    for device, group in groupby(results, key=lambda r: r["machine"]["device"]):
        group = list(group)
        first = group[0]
        lines += [
            f"{device}, {first['machine']['cores']} cores, torch {first['versions']['torch']}, "
            f"{first['date'][:10]}, commit {first['commit']}:",
            "",
            "| | ours | of ceiling | memory | eager | compiled | other projects |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for result in group:
            for title, rows in blocks([r for r in result["rows"] if r["headline"]]):
                lines.append(_readme_line(title, rows, result["ceiling"]))
        lines.append("")
    return "\n".join(lines).rstrip()


def _readme_line(title: str, rows: list[Row], ceiling: dict[str, float]) -> str:
    base = base_of(rows)
    if base is None or "seconds" not in base:
        return f"| {title} | {problem(rows[0])} | | | | | |"

    def other(row: Row) -> str:
        memory = extra_memory(row)
        return f"{ratio(row, base)}{f' ({memory})' if memory else ''}"

    named = {r["contestant"]: r for r in rows if r["status"] == "ok"}
    others = [
        f"{name} {other(r)}"
        for name, r in named.items()
        if not name.startswith(("ours", "eager", "compile"))
    ]
    pair = [other(named[n]) if n in named else "" for n in ("eager", "compile")]
    mine = [seconds(base["seconds"]), share(base, ceiling), extra_memory(base)]
    return "| " + " | ".join([title, *mine, *pair, ", ".join(others)]) + " |"


if __name__ == "__main__":
    found = load(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)
    print("\n".join(map(markdown, found)) if "--full" in sys.argv else readme(found))
