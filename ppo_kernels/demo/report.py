"""report.md and its plots, from the stages' numbers and metrics.jsonl."""

import os
import platform
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import torch
import transformers

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ppo_kernels.demo.settings import Settings
from ppo_kernels.train import read_metrics

SAMPLES = 8
Metrics = dict[str, Any]


class Panel(NamedTuple):
    """A plot of one quantity: its name for each training batch, and on the held-out prompts."""

    title: str
    batch: str
    held_out: str | None = None


PANELS = (
    Panel("reward-model score", "batch/reward_model", "reward"),
    Panel("judge: mean VADER compound", "batch/judge", "judge"),
    Panel("KL to the SFT model, nats per response", "objective/kl", "kl"),
    Panel("entropy, nats per token", "objective/entropy", "entropy"),
    Panel("share of ratios clipped", "ppo/policy/clipfrac"),
    Panel("explained variance of the value model", "ppo/val/var_explained"),
)
COMPARED = (*PANELS[:3], Panel("distinct-2", "batch/distinct_2", "distinct_2"))
RUNS = {"ppo": ("tab:blue", "with the KL term"), "no_kl": ("tab:red", "without")}

# name, key, format, how the change from SFT to PPO is shown
ROWS = (
    ("reward-model score", "reward", "{:+.2f}", "difference"),
    ("judge: mean VADER compound", "judge", "{:+.3f}", "difference"),
    ("correlation of the two", "reward_judge_correlation", "{:.2f}", None),
    ("KL to the SFT model, nats per response", "kl", "{:.1f}", None),
    ("entropy, nats per token", "entropy", "{:.2f}", None),
    ("tokens per response", "length", "{:.1f}", None),
    ("finished (with EOS)", "finished", "{:.0%}", None),
    ("distinct-2", "distinct_2", "{:.3f}", "ratio"),
    ("most common four tokens", "top_phrase", "{}", None),
    ("responses that contain them", "top_phrase_share", "{:.1%}", None),
)


def write(out: Path, infos: dict[str, dict[str, Any]], settings: Settings, seed: int) -> None:
    """out/report.md, out/curves.png and out/no_kl.png."""
    lines, metrics = read_metrics(out), infos["evaluation"]["metrics"]
    plot(out / "curves.png", lines, metrics, PANELS, ("ppo",))
    plot(out / "no_kl.png", lines, metrics, COMPARED, ("ppo", "no_kl"))
    (out / "report.md").write_text(text(infos, settings, seed), encoding="utf-8")


# -------------------------------------------------------------------------------------- plots


def plot(
    path: Path,
    lines: list[Metrics],
    metrics: dict[str, Metrics],
    panels: tuple[Panel, ...],
    runs: tuple[str, ...],
) -> None:
    """Thin lines for training batches, points for the held-out prompts."""
    columns = len(panels) // 2
    figure, axes = plt.subplots(2, columns, figsize=(4.2 * columns, 6.2))
    for ax, panel in zip(axes.flat, panels):
        for run in runs:
            color, label = RUNS[run]
            mine = [line for line in lines if line["run"] == run]
            x = [line["step"] for line in mine]
            ax.plot(x, [line[panel.batch] for line in mine], lw=1, alpha=0.6, color=color)
            if panel.held_out is not None:
                points = held_out(mine, metrics["sft"], metrics[run], panel.held_out)
                ax.plot(*points, "o-", ms=5, color=color, label=label)
        ax.set_title(panel.title, fontsize=10)
        ax.set_xlabel("PPO step", fontsize=9)
        ax.tick_params(labelsize=8)
        ax.grid(alpha=0.3)
    if len(runs) > 1:
        axes.flat[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def held_out(
    lines: list[Metrics], before: Metrics, after: Metrics, name: str
) -> tuple[list[int], list[float]]:
    """Steps and values on the held-out prompts: before, what was measured on the way, after."""
    key = f"held_out/{name}"
    way = [(line["step"], line[key]) for line in lines if key in line]
    points = [(0, before[name]), *way, (lines[-1]["step"], after[name])]
    return [x for x, _ in points], [y for _, y in points]


# --------------------------------------------------------------------------------------- text


def text(infos: dict[str, dict[str, Any]], settings: Settings, seed: int) -> str:
    """The report in Markdown."""
    evaluation = infos["evaluation"]
    accuracy = infos["reward"]["held_out_pair_accuracy"]
    return f"""# RLHF on movie reviews: what PPO changed

Seed {seed}. One response to each of {settings.eval_prompts} prompts: the first \
{settings.prompt_tokens} tokens of reviews that nothing was trained on. The reward model, which \
PPO climbs, puts {accuracy:.1%} of held-out pairs of reviews in the order that people did. The \
judge, VADER, is a lexicon that no stage has seen.

{table(evaluation["metrics"])}

![curves](curves.png)

Thin lines: training batches. Points: the held-out prompts.

{hacking(evaluation, settings)}

{setup(infos, settings, seed)}

## Samples

{samples(evaluation)}

## Time

{times(infos)}
"""


def setup(infos: dict[str, dict[str, Any]], settings: Settings, seed: int) -> str:
    """What was run, on what."""
    config = settings.ppo_config(seed, settings.kl_coef, settings.ppo_steps)
    data, vocabulary = infos["data"], infos["tokenizer"]["vocabulary"]
    rows = {
        "model": f"GPT-2's architecture, {settings.layers} layers of width {settings.width}, "
        f"{vocabulary} tokens, trained from scratch; the reward model starts from it",
        "data": f"{data['train']} movie-review snippets, {data['held_out']} more held out, from "
        "rotten.tomatoes.com with ratings by people (Hutto & Gilbert 2014)",
        "PPO": f"{config.steps} steps of {config.batch_size} responses of at most "
        f"{settings.response_tokens} tokens, {config.ppo_epochs} passes over each",
        "temperature": f"{config.temperature:g}",
        "KL coefficient": f"{config.init_kl_coef:g}, fixed",
        "seed": f"{seed}",
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, "
        f"threads: {torch.get_num_threads()}",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
    }
    lines = ["## What was run", "", "| | |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {name} | {escape(text)} |" for name, text in rows.items())])


def table(metrics: dict[str, Metrics]) -> str:
    """Every measure of the three policies."""
    sft, ppo, no_kl = (metrics[name] for name in ("sft", "ppo", "no_kl"))
    lines = ["| | SFT | PPO | change | PPO without KL |", "| --- | --- | --- | --- | --- |"]
    for name, key, form, kind in ROWS:
        change = ""
        if kind == "difference":
            change = form.format(ppo[key] - sft[key])
        elif kind == "ratio":
            change = f"x {ppo[key] / max(sft[key], 1e-9):.2f}"
        cells = (escape(form.format(m[key])) for m in (sft, ppo, no_kl))
        before, after, without = cells
        lines.append(f"| {name} | {before} | {after} | {change} | {without} |")
    return "\n".join(lines)


def hacking(evaluation: dict[str, Any], settings: Settings) -> str:
    """What the score cost, with the KL term and without; directions are read off the numbers."""
    sft, ppo, no_kl = (evaluation["metrics"][name] for name in ("sft", "ppo", "no_kl"))
    examples = "\n".join(f"* {escape(t)}" for t in evaluation["texts"]["no_kl"][:3])
    return f"""## Reward hacking

The reward is the reward model's score, less {settings.short_penalty} for each token that a \
response is shorter than {settings.short_of}, so that one nice thing and a full stop is not the \
best answer. What else a policy gave for its score shows in distinct-2, in the entropy and in the \
most common four tokens; the judge may like a nice word as often as it comes.

From the SFT model to PPO, {moves(sft, ppo)}; {kl(ppo)}.

To PPO without the KL term, stopped after {settings.no_kl_steps} of {settings.ppo_steps} steps, \
{moves(sft, no_kl)}; {kl(no_kl)}. Three of its responses:

{examples}

![without the KL term](no_kl.png)

distinct-2 falls as a sample grows: the thin line is of 64 responses, the points are of \
{settings.eval_prompts}."""


MOVES = (
    ("the score", "reward", "{:+.2f}"),
    ("the judge", "judge", "{:+.3f}"),
    ("distinct-2", "distinct_2", "{:.3f}"),
    ("entropy", "entropy", "{:.2f}"),
    ("the share of responses with the most common four tokens", "top_phrase_share", "{:.1%}"),
)


def moves(before: Metrics, after: Metrics) -> str:
    """How each of MOVES went from one policy to another, in words."""
    parts = []
    for name, key, form in MOVES:
        old, new = form.format(before[key]), form.format(after[key])
        verb = "rises" if after[key] > before[key] else "falls"
        parts.append(
            f"{name} stays at {old}" if old == new else f"{name} {verb} from {old} to {new}"
        )
    return f"{', '.join(parts[:-1])}, and {parts[-1]}"


def kl(policy: Metrics) -> str:
    """Its distance from the SFT model, in words."""
    return f"it is {policy['kl']:.1f} nats per response away from the SFT model"


def samples(evaluation: dict[str, Any]) -> str:
    """The first prompts with the responses before and after, side by side."""
    lines = ["| prompt | SFT | PPO |", "| --- | --- | --- |"]
    texts = evaluation["texts"]
    for prompt, before, after in zip(evaluation["prompts"][:SAMPLES], texts["sft"], texts["ppo"]):
        cells = (prompt, before[len(prompt) :], after[len(prompt) :])
        lines.append("| " + " | ".join(map(escape, cells)) + " |")
    return "\n".join(lines)


def times(infos: dict[str, dict[str, Any]]) -> str:
    """Seconds of every stage, and their sum."""
    lines = ["| stage | seconds |", "| --- | --- |"]
    lines += [f"| {name} | {info['seconds']:.1f} |" for name, info in infos.items()]
    total = sum(info["seconds"] for info in infos.values())
    return "\n".join([*lines, f"| all | {total:.1f} |"])


def escape(cell: str) -> str:
    """Text as Markdown shows it literally, also in a table."""
    cell = " ".join(cell.split())
    for mark in "\\|*_<`":
        cell = cell.replace(mark, "\\" + mark)
    return cell
