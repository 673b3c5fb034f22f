"""Scaling plots with their floors, and the summary chart of the headline cases."""

from pathlib import Path
from textwrap import fill
from typing import Any

from bench.report import base_of, blocks, floor_seconds, significant, swept

Row = dict[str, Any]
# Ours first and dark; the rest from a palette that survives colour blindness and grey print.
COLORS = {"ours": "#0b3954", "eager": "#e07a1f", "compile": "#1b998b"}
OTHERS = ("#8d6cab", "#c2274b", "#6b7a8f", "#a68a00", "#5fa8d3", "#444444")


def palette(rows: list[Row]) -> dict[str, str]:
    others = [n for n in dict.fromkeys(r["contestant"] for r in rows) if n not in COLORS]
    return COLORS | dict(zip(others, 2 * OTHERS))


def draw(results: list[dict[str, Any]], folder: Path, prefix: str) -> list[Path]:
    """PREFIX-scaling-<op>.png per op that was swept, and PREFIX-summary.png."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    written = []
    for result in results:
        points = [r for r in result["rows"] if r["sweep"] and r["status"] == "ok"]
        for op in sorted({r["op"] for r in points}):
            path = folder / f"{prefix}-scaling-{op}.png"
            _scaling(plt, [r for r in points if r["op"] == op], result, op, path)
            written.append(path)
    bars = [(title, rows) for r in results for title, rows in blocks(r["rows"]) if _drawn(rows)]
    if bars:
        written.append(folder / f"{prefix}-summary.png")
        _summary(plt, bars, results[0]["machine"]["device"], written[-1])
    return written


def _drawn(rows: list[Row]) -> bool:
    base = base_of(rows)
    return bool(rows[0]["headline"] and base and "seconds" in base)


def _scaling(plt: Any, rows: list[Row], result: dict[str, Any], op: str, path: Path) -> None:
    axes_names = list(dict.fromkeys(r["sweep"][0] for r in rows))
    kinds = [k for k in ("seconds", "peak_bytes") if any(k in r for r in rows)]
    fig, grid = plt.subplots(
        len(kinds),
        len(axes_names),
        figsize=(3.8 * len(axes_names), 3.3 * len(kinds)),
        squeeze=False,
        layout="constrained",
    )
    colors = palette(rows)
    for j, varied in enumerate(axes_names):
        column = [r for r in rows if r["sweep"][0] == varied]
        for i, kind in enumerate(kinds):
            part = [r for r in column if kind in r]
            if not part:  # a sweep of memory alone
                grid[i][j].axis("off")
                continue
            _lines(grid[i][j], part, kind, result["ceiling"], colors)
            grid[i][j].set_ylabel("milliseconds" if kind == "seconds" else "peak MiB above inputs")
            grid[i][j].set_title(fill(swept(part[0]), 45), fontsize=8)
        grid[-1][j].set_xlabel(varied[0])
    labels = {label: h for ax in fig.axes for h, label in zip(*ax.get_legend_handles_labels())}
    columns = 2 * len(axes_names)
    fig.legend(labels.values(), labels, loc="outside lower center", ncols=columns, frameon=False)
    fig.suptitle(f"{op} on {result['machine']['device']}", fontsize=11)
    fig.savefig(path, dpi=110)
    plt.close(fig)


def _lines(
    ax: Any, rows: list[Row], kind: str, ceiling: dict[str, float], colors: dict[str, str]
) -> None:
    scale = 1e3 if kind == "seconds" else 1 / 2**20
    for name in dict.fromkeys(r["contestant"] for r in rows):
        points = sorted((r["sweep"][1], r[kind] * scale) for r in rows if r["contestant"] == name)
        style = {"marker": "o", "markersize": 3.5, "linewidth": 2.2 if name == "ours" else 1.3}
        ax.plot(*zip(*points), label=name, color=colors[name], **style)
    floors = {}
    for r in rows:
        least = r["required_bytes"] if kind == "peak_bytes" else floor_seconds(r, ceiling)
        floors[r["sweep"][1]] = least * scale
    if any(floors.values()):
        label = "least memory" if kind == "peak_bytes" else "least time"
        ax.plot(*zip(*sorted(floors.items())), color="#999999", linestyle=":", label=label)
    values = sorted({r["sweep"][1] for r in rows})
    ax.set_xscale("log", base=2)
    ax.set_xticks(values, [f"{v // 1024}k" if v % 1024 == 0 else str(v) for v in values])
    if kind == "seconds":
        ax.set_yscale("log")
    else:
        ax.set_yscale("symlog", linthresh=1)
        ax.set_ylim(-0.2, 3 * max(r[kind] * scale for r in rows) + 1)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.grid(True, which="major", color="#e6e6e6", linewidth=0.6)


def _summary(plt: Any, bars: list[tuple[str, list[Row]]], device: str, path: Path) -> None:
    """How many times as long as ours each contestant takes, on a logarithmic axis."""
    fig, ax = plt.subplots(figsize=(8, 0.4 + sum(0.22 * len(rows) + 0.35 for _, rows in bars)))
    colors = palette([row for _, rows in bars for row in rows if "seconds" in row])
    y, ticks, labels = 0.0, [], []
    for title, rows in bars:
        base = base_of(rows)
        ax.text(1.03, y, title, fontsize=8, fontweight="bold", va="center")
        y += 1
        for row in rows:
            if "seconds" not in row or row is base:
                continue
            times = row["seconds"] / base["seconds"]
            ax.barh(y, times - 1, left=1, height=0.75, color=colors[row["contestant"]])
            label = f"{significant(times)}x"
            ax.text(max(times, 1) * 1.05, y, label, fontsize=7.5, va="center")
            ticks.append(y)
            labels.append(row["contestant"])
            y += 1
        y += 0.6
    ax.set_yticks(ticks, labels, fontsize=8)
    ax.invert_yaxis()
    ax.margins(y=0.01)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    ax.axvline(1, color=COLORS["ours"], linewidth=2)
    ax.set_xlabel("time over ours (the line at 1)")
    ax.set_title(device, fontsize=9, loc="right")
    fig.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(fig)
