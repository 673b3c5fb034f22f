"""report.md and its plots, from the stages' numbers and metrics.jsonl."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ppo_kernels.demo.settings import Settings
from ppo_kernels.train import read_metrics

COLORS = {"ppo": "tab:blue", "no_kl": "tab:red"}
LABELS = {"ppo": "with KL term", "no_kl": "without"}
SAMPLES = 8

# title, what the trainer or the reward saw on each batch, what the held-out prompts say
PANELS = (
    ("reward-model score", "batch/reward_model", "held_out/reward"),
    ("judge: mean VADER compound", "batch/judge", "held_out/judge"),
    ("KL to the SFT model, nats per response", "objective/kl", "held_out/kl"),
    ("entropy, nats per token", "objective/entropy", "held_out/entropy"),
    ("share of ratios clipped", "ppo/policy/clipfrac", None),
    ("explained variance of the value model", "ppo/val/var_explained", None),
)
COMPARED = (
    PANELS[0],
    PANELS[1],
    PANELS[2],
    ("distinct-2", "batch/distinct_2", "held_out/distinct_2"),
)
ROWS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("reward-model score", lambda m: f"{m['reward']:+.2f}"),
    ("judge: mean VADER compound", lambda m: f"{m['judge']:+.3f}"),
    ("correlation of the two over responses", lambda m: f"{m['reward_judge_correlation']:.2f}"),
    ("KL to the SFT model, nats per response", lambda m: f"{m['kl']:.1f}"),
    ("entropy, nats per token", lambda m: f"{m['entropy']:.2f}"),
    ("tokens per response", lambda m: f"{m['length']:.1f}"),
    ("finished (with EOS)", lambda m: f"{m['finished']:.0%}"),
    ("distinct-2", lambda m: f"{m['distinct_2']:.3f}"),
    ("most common four tokens", lambda m: f"{quote(m['top_phrase'])}"),
    ("responses that contain them", lambda m: f"{m['top_phrase_share']:.1%}"),
)


def write(out: Path, infos: dict[str, dict[str, Any]], settings: Settings, seed: int) -> None:
    """out/report.md, out/curves.png and out/no_kl.png."""
    lines = read_metrics(out)
    plot(out / "curves.png", lines, PANELS, ("ppo",))
    plot(out / "no_kl.png", lines, COMPARED, ("ppo", "no_kl"))
    (out / "report.md").write_text(text(infos, settings, seed), encoding="utf-8")


def plot(
    path: Path,
    lines: list[dict[str, Any]],
    panels: tuple[tuple[str, str, str | None], ...],
    runs: tuple[str, ...],
) -> None:
    """One panel per quantity: a thin line for training batches, points for held-out prompts."""
    rows = 2
    figure, axes = plt.subplots(rows, len(panels) // rows, figsize=(4.2 * len(panels) // rows, 6))
    for ax, (title, batch, held_out) in zip(axes.flat, panels):
        for run in runs:
            style = {"color": COLORS[run]}
            x, y = series(lines, run, batch)
            name = LABELS[run] if len(runs) > 1 else "training batch"
            ax.plot(x, y, lw=1, alpha=0.6, label=name, **style)
            if held_out is not None:
                x, y = series(lines, run, held_out)
                ax.plot(
                    x, y, "o-", ms=5, label="held-out prompts" if len(runs) == 1 else None, **style
                )
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("PPO step", fontsize=9)
        ax.grid(alpha=0.3)
        ax.tick_params(labelsize=8)
    axes.flat[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def series(lines: list[dict[str, Any]], run: str, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric of one run."""
    points = [(line["step"], line[name]) for line in lines if line["run"] == run and name in line]
    return [p[0] for p in points], [p[1] for p in points]


def text(infos: dict[str, dict[str, Any]], settings: Settings, seed: int) -> str:
    """The report in Markdown."""
    metrics = infos["evaluation"]["metrics"]
    sft, ppo, no_kl = (metrics[name] for name in ("sft", "ppo", "no_kl"))
    seconds = {name: info["seconds"] for name, info in infos.items()}
    body = [
        "# RLHF on movie reviews: what PPO changed",
        "",
        f"Seed {seed}. Sampled once for each of {settings.eval_prompts} prompts (the first "
        f"{settings.prompt_tokens} tokens of reviews that nothing was trained on). The reward "
        f"model orders {infos['reward']['held_out_pair_accuracy']:.1%} of held-out pairs as people "
        "did. The judge, VADER, is a lexicon that no stage has seen.",
        "",
        "| | SFT | PPO | change | PPO without KL |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, show in ROWS:
        body.append(
            f"| {name} | {show(sft)} | {show(ppo)} | {change(name, sft, ppo)} | {show(no_kl)} |"
        )
    body += [
        "",
        "![curves](curves.png)",
        "",
        "## Reward hacking",
        "",
        f"The reward is the reward model's score less {settings.short_penalty} per token that a "
        f"response is shorter than {settings.short_of} tokens: without that, PPO learns to say one "
        "nice thing and stop, which the reward model likes and the judge does not. What remains "
        "can be read off the table: diversity that was given up (distinct-2), a phrase that takes "
        "over, a judge that no longer agrees.",
        "",
        f"Without the KL term ({settings.no_kl_steps} steps, all else equal) the score goes to "
        f"{no_kl['reward']:+.2f}, distinct-2 to {no_kl['distinct_2']:.3f} and "
        f"{no_kl['top_phrase_share']:.0%} of the responses contain {quote(no_kl['top_phrase'])}:",
        "",
        *(f"- {quote(t)}" for t in infos["evaluation"]["texts"]["no_kl"][:3]),
        "",
        "![without the KL term](no_kl.png)",
        "",
        "## Samples",
        "",
        "| prompt | SFT | PPO |",
        "| --- | --- | --- |",
    ]
    texts = infos["evaluation"]["texts"]
    for prompt, before, after in list(
        zip(infos["evaluation"]["prompts"], texts["sft"], texts["ppo"])
    )[:SAMPLES]:
        cells = (prompt, before[len(prompt) :], after[len(prompt) :])
        body.append("| " + " | ".join(escape(cell) for cell in cells) + " |")
    body += ["", "## Time", "", "| stage | seconds |", "| --- | --- |"]
    body += [f"| {name} | {s:.1f} |" for name, s in seconds.items()]
    body += [f"| all | {sum(seconds.values()):.1f} |", ""]
    return "\n".join(body)


def change(name: str, before: dict[str, Any], after: dict[str, Any]) -> str:
    """The column between the two: differences of scores, the ratio of distinct-2."""
    if name.startswith("reward"):
        return f"{after['reward'] - before['reward']:+.2f}"
    if name.startswith("judge"):
        return f"{after['judge'] - before['judge']:+.3f}"
    if name == "distinct-2":
        return f"x {after['distinct_2'] / max(before['distinct_2'], 1e-9):.2f}"
    return ""


def escape(cell: str) -> str:
    """Text as the cell of a Markdown table."""
    return " ".join(cell.split()).replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


def quote(cell: str) -> str:
    return f"\N{LEFT DOUBLE QUOTATION MARK}{escape(cell)}\N{RIGHT DOUBLE QUOTATION MARK}"
