"""The sentiment demo on invented reviews, stage by stage; the real one in quick, marked slow."""

import io
import json
import os
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_kernels._errors import UserError
from ppo_kernels.demo import data, evaluate, report, sentiment, stages, supervised, worked_example
from ppo_kernels.demo.settings import QUICK
from ppo_kernels.demo.stages import Stages

TINY = replace(
    QUICK,
    vocab_size=320,
    width=32,
    layers=1,
    heads=2,
    sft_epochs=1,
    reward_epochs=1,
    reward_batch=32,
    ppo_steps=4,
    no_kl_steps=2,
    eval_prompts=16,
    eval_every=2,
    response_tokens=8,
    short_of=4,
)
GOOD = ("great", "moving", "funny", "charming")
BAD = ("dull", "awful", "clumsy", "empty")


def reviews(n: int) -> list[data.Snippet]:
    """Invented snippets whose rating is the balance of their good and bad words."""
    rng = random.Random(0)
    out = []
    for i in range(n):
        words = [rng.choice((GOOD, BAD)[rng.random() < 0.5]) for _ in range(3)]
        balance = sum(1 if w in GOOD else -1 for w in words)
        text = f"film {i} of the year is {words[0]} and {words[1]} and rather {words[2]}."
        out.append(data.Snippet(text, float(balance)))
    return out


@pytest.fixture(autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Matrices of 32 columns are slower on two."""
    before = torch.get_num_threads()
    if "alone" not in request.keywords:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> data.Split:
    made = data.split(reviews(400))
    monkeypatch.setattr(data, "load", lambda: made)
    return made


# --------------------------------------------------------------------------------------- data


def test_parse_clean_and_split() -> None:
    text = "1\t-0.5\tA  Dull\tfilm\r\n2\t2.0\ta dull\r\n3\t1.0\tgood\r\n"
    snippets = data.clean(data.parse(text))
    assert snippets == [("a dull", -0.5), ("good", 1.0)]
    with pytest.raises(ValueError, match=r"line 2: expected id, rating, text, got '2\\tgood'"):
        data.parse("1\t1.0\tfine\n2\tgood\n")
    train, held_out = data.split(reviews(200))
    assert len(held_out) == 20 and not set(train) & set(held_out)
    assert data.split(reviews(200)).held_out == held_out


def test_no_network_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "")
    with pytest.raises(UserError, match=r"could not download .* put vaderSentiment-3.3.2.tar.gz"):
        data.fetch()
    assert list(data.cache_dir().iterdir()) == []


def test_a_broken_cache_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data.cache_dir().mkdir()
    (data.cache_dir() / data.SDIST).write_bytes(b"half a file")
    called: list[Any] = []
    monkeypatch.setattr(data.subprocess, "run", lambda *a, **k: called.append(a) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        data.fetch()
    assert "download" in called[0][0]


# --------------------------------------------------------------------------------- supervised


def test_tokenizer_keeps_the_text_and_encode_cuts(split: data.Split) -> None:
    tokenizer = supervised.train_tokenizer(split, 320)
    row = supervised.encode(tokenizer, split.held_out[:1], 100)[0]
    assert tokenizer.decode(row, skip_special_tokens=True) == split.held_out[0].text
    assert (row[0], row[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    cut = supervised.encode(tokenizer, split.held_out[:1], 5)[0]
    assert torch.equal(cut, row[:5])


def test_pair_loss_is_bradley_terry() -> None:
    ratings, scores = torch.tensor([2.0, 0.0, 1.5]), torch.tensor([0.3, -0.2, 0.5])
    # Pairs rated more than 1 apart: (0, 1) and (2, 1).
    want = sum(torch.log1p(torch.exp(-d)) for d in (torch.tensor(0.5), torch.tensor(0.7))) / 2
    torch.testing.assert_close(supervised.pair_loss(scores, ratings), want)


def test_padding_does_not_change_losses_or_scores(split: data.Split) -> None:
    tokenizer = supervised.train_tokenizer(split, 320)
    model = supervised.new_language_model(tokenizer, TINY).eval()
    rows = [supervised.encode(tokenizer, split.train[:1], n)[0] for n in (6, 20)]
    n = [len(row) - 1 for row in rows]
    alone = [supervised.next_token_loss(model, [row]) for row in rows]
    both = supervised.next_token_loss(model, rows)
    torch.testing.assert_close(both * sum(n), alone[0] * n[0] + alone[1] * n[1])


# ------------------------------------------------------------------------------------ metrics


def test_distinct_and_top_phrase() -> None:
    same, other = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([9, 8, 7])
    assert evaluate.distinct([same, same, other]) == 6 / 10
    assert evaluate.top_phrase([same, same, other]) == ([1, 2, 3, 4], 2 / 3) or (
        evaluate.top_phrase([same, same, other]) == ([2, 3, 4, 5], 2 / 3)
    )
    assert evaluate.distinct([torch.tensor([1])]) == 0.0
    assert evaluate.top_phrase([other]) == ([], 0.0)


# ------------------------------------------------------------------------------------- stages


def test_a_run_with_other_settings_is_not_touched(tmp_path: Path) -> None:
    Stages(tmp_path, {"seed": 0}, sentiment.Console(quiet=True))
    with pytest.raises(UserError, match=r"another seed or other settings"):
        Stages(tmp_path, {"seed": 1}, sentiment.Console(quiet=True))
    assert json.loads((tmp_path / "run.json").read_text()) == {"seed": 0}


def test_output_that_is_no_terminal_gets_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(tick: stages.Tick) -> tuple[None, dict[str, Any]]:
        for i in range(3):
            tick(f"loss {i}")
        return None, {"loss": 0.5}

    lines = io.StringIO()
    run = Stages(tmp_path, {}, sentiment.Console(file=lines, force_terminal=False))
    run.run("quiet", 3, make)
    monkeypatch.setattr(stages, "LINE_EVERY", 0.0)
    run.run("sft", 3, make)
    got = [" ".join(line.split()) for line in lines.getvalue().splitlines()]
    assert got[0] == "quiet 0/3" and re.fullmatch(r"quiet \d+\.\d s loss 0.500", got[1])
    assert got[2:6] == ["sft 0/3", "sft 1/3 loss 0", "sft 2/3 loss 1", "sft 3/3 loss 2"]


def test_the_report_says_what_the_numbers_do() -> None:
    sft = {"reward": 0.0, "judge": 0.1, "distinct_2": 0.5, "entropy": 3.0, "top_phrase_share": 0.02}
    ppo = {"reward": 2.0, "judge": 0.1, "distinct_2": 0.6, "entropy": 2.5, "top_phrase_share": 0.01}
    metrics = {"sft": sft, "ppo": ppo | {"kl": 4.0}, "no_kl": sft | {"kl": 0.25}}
    text = report.hacking({"metrics": metrics, "texts": {"no_kl": ["a", "b", "c"]}}, TINY)
    assert "the score rises from +0.00 to +2.00, the judge stays at +0.100" in text
    assert "distinct-2 rises from 0.500 to 0.600, entropy falls from 3.00 to 2.50" in text
    assert "most common four tokens falls from 2.0% to 1.0%; it is 4.0 nats per" in text
    assert "the score stays at +0.00" in text


def test_the_whole_demo_and_going_on_after_a_stop(
    split: data.Split,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """A run that dies inside PPO and is started again ends like one that was left alone."""
    monkeypatch.setattr(sentiment, "CHECKPOINT_EVERY", 2)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    sentiment.main(TINY, 0, whole)
    assert "| judge: mean VADER compound | " in capsys.readouterr().out
    kept = sentiment.Reward.__call__
    calls = []

    def dies(self: Any, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return kept(self, *args)

    monkeypatch.setattr(sentiment.Reward, "__call__", dies)
    with pytest.raises(KeyboardInterrupt):
        sentiment.main(TINY, 0, broken)
    sft = (broken / "sft" / "info.json").read_bytes()
    sentiment.main(TINY, 0, broken)
    assert (broken / "sft" / "info.json").read_bytes() == sft
    # 3 steps before the stop, of which the checkpoint has 2; then 2 more; then 2 without KL.
    assert len(calls) == 4 + 2 + 2
    evaluations = [json.loads((d / "evaluation/info.json").read_text()) for d in (whole, broken)]
    for info in evaluations:
        info.pop("seconds")
    assert evaluations[0] == evaluations[1]
    check_outputs(broken, TINY)


def check_outputs(out: Path, settings: Any) -> None:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for run, steps in (("ppo", settings.ppo_steps), ("no_kl", settings.no_kl_steps)):
        assert [x["step"] for x in lines if x["run"] == run] == list(range(1, steps + 1))
        assert list((out / "tensorboard" / run).glob("events.*"))
    for name in ("curves.png", "no_kl.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    text = (out / "report.md").read_text()
    run = text[text.index("## What was run") : text.index("## Samples")]
    for part in (
        f"{settings.layers} layers of width {settings.width}",
        f"{settings.ppo_steps} steps of 64 responses of at most {settings.response_tokens} tokens",
        "| temperature | 0.85 |",
        f"| KL coefficient | {settings.kl_coef:g}, fixed |",
        "| seed | 0 |",
        f"{len(os.sched_getaffinity(0))} CPUs",
        f"torch {torch.__version__}",
    ):
        assert part in run, part
    assert re.search(r"\| data \| \d+ movie-review snippets, \d+ more held out", run)
    samples = text[text.index("## Samples") : text.index("## Time")]
    assert samples.count("\n| ") == 2 + report.SAMPLES
    assert list((out / "checkpoints").iterdir()) == []


@pytest.mark.alone
def test_quick_demo_on_the_real_reviews(tmp_path: Path) -> None:
    """What `ppo-kernels demo sentiment --quick` does, with the gains that it should show."""
    sentiment.main(QUICK, 0, tmp_path)
    check_outputs(tmp_path, QUICK)
    metrics = json.loads((tmp_path / "evaluation/info.json").read_text())["metrics"]
    sft, ppo, no_kl = (metrics[k] for k in ("sft", "ppo", "no_kl"))
    assert ppo["reward"] - sft["reward"] > 1.0
    assert ppo["judge"] - sft["judge"] > 0.25
    assert ppo["kl"] < 15 < no_kl["kl"]
    assert ppo["distinct_2"] > 0.6 * sft["distinct_2"]


# ----------------------------------------------------------------------------- worked example


def test_worked_example_prints_the_documents_numbers() -> None:
    """The tables that the document prints, to its three decimals, found in what we print."""
    lines: list[str] = []
    worked_example.main(lines.append)
    shown = "\n".join(lines)
    numbers = [float(x) for x in re.findall(r"-?\d+\.\d+", shown)]
    for want in (0.182, 0.134, -0.134, 0.054, 0.065, 0.041, 0.049, 2.995, 0.095, 0.190, 0.795):
        assert any(abs(x - want) < 1e-3 for x in numbers), want
    table = shown[shown.index("3. The document") :].splitlines()
    rows = [line.split() for line in table if re.match(r"  [1-7] ", line)][:7]
    printed = [0.795, 0.626, 0.448, 0.366, 0.280, 0.190, 0.095]
    assert [float(row[3]) for row in rows] == pytest.approx(printed, abs=1e-3)
    assert [float(row[2]) for row in rows] == pytest.approx(
        [0.2, 0.2] + [0.1] * 4 + [0.095], abs=1e-3
    )
