"""The benchmark: nothing wrong is timed, no failure is hidden, no figure is typed by hand."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import __main__ as cli
from bench import cases, memory, peers, plots, report, runner, timing
from bench.case import Case, Contestant, Unavailable, error_against

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


def _double(x):
    return {"y": 2 * x["x"]}


def _raise(error):
    def load():
        raise error

    return load


def _case(*contestants, **options):
    defaults = {"op": "double", "input_bytes": 4e3, "bytes": 8e3, "required": 4e3}
    defaults["expected"] = lambda x: {"y": 2 * x["x"].double()}
    return Case(
        name="N=1000",
        dtype="fp32",
        make=lambda seed, check: {"x": torch.arange(1000.0) + seed},
        contestants=list(contestants),
        **{**defaults, **options},
    )


def _run(*contestants, **options):
    case = _case(*contestants, **options)
    rows = runner.new_rows(case)
    runner.run_case(case, rows, CPU, 0.05, lambda text: None)
    return {r["contestant"]: r for r in rows}


def test_a_right_contestant_is_timed_and_every_failure_keeps_its_row_and_reason():
    calls = []

    def wrong(x):
        calls.append(1)
        return {"y": 2 * x["x"] + 5}

    rows = _run(
        Contestant("ours", lambda: _double),
        Contestant("wrong", lambda: wrong),
        Contestant("nan", lambda: lambda x: {"y": x["x"] * float("nan")}),
        Contestant("misnamed", lambda: lambda x: {"z": x["x"]}),
        Contestant("misshapen", lambda: lambda x: {"y": x["x"][:3]}),
        Contestant("crash", lambda: lambda x: x["nothing"]),
        Contestant("missing", _raise(ImportError("No module named 'peer'"))),
        Contestant("gpu only", _raise(Unavailable("needs a CUDA device"))),
    )
    ours = rows["ours"]
    assert ours["status"] == "ok"
    assert ours["samples"] >= timing.FEWEST
    assert 0 < ours["low"] <= ours["seconds"] <= ours["high"]
    assert rows["wrong"]["status"] == "wrong"
    assert len(calls) == 1  # checked once, never timed
    assert rows["nan"]["status"] == "wrong"
    assert rows["misnamed"]["status"] == rows["misshapen"]["status"] == "crashed"
    assert "KeyError: 'nothing'" in rows["crash"]["message"]
    assert rows["missing"]["status"] == rows["gpu only"]["status"] == "absent"
    result = {"rows": list(rows.values()), "ceiling": {"copy": 1e10}, "device": "cpu"}
    (table,) = report.tables(result)
    for name in rows.keys() - {"ours"}:
        assert any(re.match(rf"(.*, )?{name}(,| )", note) for note in table.notes), name


def test_too_large_is_skipped_with_the_size_and_the_rest_still_runs():
    huge = 2.0**60
    rows = _run(Contestant("ours", lambda: _double), Contestant("eager", lambda: _double, huge))
    assert rows["ours"]["status"] == "ok"
    assert rows["eager"]["status"] == "skipped"
    assert re.match(r"needs \d+\.\d GiB, \d+\.\d GiB free", rows["eager"]["message"])
    assert (
        _run(Contestant("ours", lambda: _double), input_bytes=huge)["ours"]["status"] == "skipped"
    )


def test_a_sample_lasts_as_long_as_it_should_though_the_first_calls_are_slow(monkeypatch):
    now, calls = 0.0, 0

    def slow_at_first(x):
        nonlocal now, calls
        calls += 1
        now += 1e-3 if calls < 4 else 1e-4
        return {}

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now))
    watch = timing.Stopwatch(slow_at_first, [{}], None, CPU)
    watch.warm_up()
    assert watch.calls == pytest.approx(timing.SAMPLE_SECONDS / 1e-4, abs=1)
    assert watch.cost == pytest.approx(timing.SAMPLE_SECONDS, rel=0.1)


def test_an_in_place_contestant_gets_fresh_inputs_for_each_call():
    seen = []

    def in_place(x):
        seen.append(x["x"][1].item())
        return {"y": x["x"].mul_(2)}

    rows = _run(Contestant("ours", lambda: in_place, overwrites="x"))
    assert rows["ours"]["status"] == "ok"
    assert set(seen) == {1.0, 2.0}  # seed 0 for the check, seed 1 ever after


def test_only_the_part_that_the_answer_covers_is_compared():
    x = {"m": torch.tensor([True, False, True])}
    out, want = {"y": torch.tensor([1.0, 9.0, 2.0])}, {"y": torch.tensor([1.0, 2.0]).double()}
    assert error_against(_case(part=lambda x, out: out[x["m"]]), x, out, want) == 0
    assert error_against(_case(part=lambda x, out: out[:2]), x, out, want) > 1


def test_the_ratio_says_when_the_spread_is_wider_than_the_difference():
    base = {"seconds": 1.0, "low": 0.9, "high": 1.1}
    clear, unclear = (
        {"seconds": 2.0, "low": 1.8, "high": 2.2},
        {"seconds": 1.2, "low": 1.05, "high": 1.4},
    )
    assert report.ratio(clear, base) == "2.00x"
    assert report.ratio(unclear, base) == "~1.20x"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("size", cases.SIZES)
def test_cases_have_distinct_names_and_ours_first(device, size):
    found = cases.build(cases.OPS, torch.device(device), size)
    assert len({c.key for c in found}) == len(found)
    for case in found:
        names = [c.name for c in case.contestants]
        assert names[0] == "ours"
        assert len(set(names)) == len(names)
        assert case.input_bytes > 0
        others = [n for n in names if not n.startswith(("ours", "eager", "compile"))]
        assert {n.split()[0] for n in others} <= set(peers.NAMES)


def test_the_large_case_needs_64_bit_offsets():
    (large,) = cases.build(["logprobs"], CPU, "large")
    N, V = (int(n) for n in re.match(r"N=(\d+) V=(\d+)", large.name).groups())
    assert N * V > 2**31
    rows = large.part({}, torch.arange(N))
    assert (rows[0], rows[-1]) == (0, N - 1)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--op", "nonsense"], "unknown op nonsense; there are gae, logprobs"),
        (["--device", "tpu"], "unknown device tpu; there are cpu, cuda"),
        (["--dtype", "int8"], "unknown dtype int8; there are fp32, bf16"),
        (["--json", "tests", "--device", "cpu"], "--json tests is a folder"),
        (["--json", "README.md/x.json", "--device", "cpu"], "README.md"),
        (["--record", "x", "--plot", "x", "--device", "cpu"], "leave out --json and --plot"),
        pytest.param(
            ["--device", "cuda"],
            "torch finds no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_bad_arguments_are_named(argv, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main(argv) == 2
    assert message in capsys.readouterr().err


def test_a_run_writes_rows_and_an_unknown_name_does_not_stop_the_others(tmp_path, capsys):
    file = tmp_path / "out.json"
    argv = ["--op", "step,nonsense", "--size", "small", "--peers", "typo", "--device", "cpu"]
    assert cli.main([*argv, "--json", str(file)]) == 2
    captured = capsys.readouterr()
    assert "unknown op nonsense" in captured.err
    assert "unknown peer typo; there are trl, liger" in captured.err
    result = json.loads(file.read_text())
    assert {"machine", "versions", "commit", "date", "ceiling"} <= result.keys()
    assert [r["contestant"] for r in result["rows"]] == ["ours", "eager"]
    assert all(r["status"] == "ok" for r in result["rows"])
    assert "PPO update" in captured.out
    assert "tokens/s" in captured.out


def test_inputs_that_cannot_be_made_fail_their_case_only():
    rows = _run(Contestant("ours", lambda: _double), expected=lambda x: x["nothing"])
    assert rows["ours"]["status"] == "crashed"
    assert "KeyError: 'nothing'" in rows["ours"]["message"]


@pytest.fixture
def toy_ops(monkeypatch):
    """Two ops of one toy case each; what `second` does when it is called can be set."""
    behaviour = {"second": _double}
    second = lambda: lambda x: behaviour["second"](x)  # noqa: E731
    made = {"first": lambda: _double, "second": second}

    def build(op):
        return lambda device, size: [_case(Contestant("ours", made[op]), op=op)][
            : size == "default"
        ]

    monkeypatch.setattr(cases, "OPS", {op: build(op) for op in made})
    monkeypatch.setattr(timing, "ceilings", lambda device, dtypes: {"copy": 1e10})
    monkeypatch.setattr(memory, "in_fresh_process", lambda op, name, keys: dict.fromkeys(keys, 5e6))
    monkeypatch.setattr(cli.machine, "commit", lambda: "abc1234")
    return behaviour


def test_an_interrupt_keeps_what_was_measured(toy_ops, tmp_path, capsys):
    def interrupt(x):
        raise KeyboardInterrupt

    toy_ops["second"] = interrupt
    file = tmp_path / "new folder" / "out.json"
    assert cli.main(["--device", "cpu", "--json", str(file)]) == 130
    result = json.loads(file.read_text())
    assert [r["status"] for r in result["rows"]] == ["ok", "not run"]
    assert "second" in result["stopped"]
    printed = capsys.readouterr().out
    assert "ours NOT RUN" in printed
    assert "STOPPED" in printed


def test_a_record_survives_a_failure_and_repeats_nothing_that_is_complete(toy_ops, tmp_path):
    toy_ops["second"] = lambda x: x["nothing"]
    assert cli.main(["--device", "cpu", "--record", str(tmp_path)]) == 1
    files = [tmp_path / f"cpu-{op}.json" for op in ("first", "second")]
    (first,), (second,) = (json.loads(f.read_text())["rows"] for f in files)
    assert (first["status"], first["peak_bytes"], second["status"]) == ("ok", 5e6, "crashed")
    assert "KeyError" in files[1].with_suffix(".md").read_text()
    result = json.loads(files[1].read_text())
    files[1].write_text(json.dumps(result | {"stopped": "half-way"}))
    toy_ops["second"] = _double
    before = files[0].stat().st_mtime_ns
    assert cli.main(["--device", "cpu", "--record", str(tmp_path)]) == 0
    assert files[0].stat().st_mtime_ns == before
    assert json.loads(files[1].read_text())["rows"][0]["status"] == "ok"


def test_sweeps_and_headline_cases_are_drawn_and_tabulated(tmp_path):
    timed = {"status": "ok", "low": 1e-3, "high": 3e-3, "samples": 3, "peak_bytes": 5e6}
    rows = []
    for at in (256, 1024):
        case = _case(Contestant("ours", None), Contestant("eager", None), sweep=("N", at))
        rows += [row | timed | {"seconds": at * 1e-6} for row in runner.new_rows(case)]
    case = _case(Contestant("ours", None), Contestant("eager", None), headline=True)
    rows += [row | timed | {"seconds": 2e-3} for row in runner.new_rows(case)]
    case = _case(Contestant("ours", None), sweep=("N", 16))
    rows += [runner.new_rows(case)[0] | {"status": "skipped", "message": "needs 99 GiB"}]
    result = {"rows": rows, "ceiling": {"copy": 1e10}, "machine": {"device": "a machine"}}
    paths = plots.draw([result], tmp_path, "cpu")
    assert [p.name for p in paths] == ["cpu-scaling-double.png", "cpu-summary.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)
    _, times, memories = report.tables(result | {"device": "cpu"})
    assert times.title == "double: N=1000, fp32, against N: time"
    assert times.lines[:2] == [["N", "16", "256", "1024"], ["ours", "", "256 us", "1.02 ms"]]
    assert times.notes == ["ours at 16 SKIPPED: needs 99 GiB"]
    assert times.lines[-1] == ["floor", *["0.8 us"] * 3]
    assert memories.lines[2] == ["eager", "", "4.8 MiB", "4.8 MiB"]


def test_a_headline_that_was_interrupted_has_a_line_in_the_readme():
    rows = runner.new_rows(_case(Contestant("ours", None), headline=True))
    result = {"rows": rows, "ceiling": {}, "machine": {"device": "a machine", "cores": 2}}
    result |= {"versions": {"torch": "2"}, "date": "2026-11-30", "commit": "abc1234"}
    assert report.readme([result]).endswith("| double: N=1000, fp32 | NOT RUN | | | | | |")
    rows[0]["status"] = "ok"  # checked, and then no sample
    assert "| not measured |" in report.readme([result])


def test_peak_memory_is_measured_in_a_fresh_process():
    (case,) = [c for c in cases.build(["hidden"], CPU, "small") if "forward+" in c.name][:1]
    found = memory.in_fresh_process("hidden", "eager", [case.key])
    # The fp32 logits [128, 2048] and their gradient are there at once; a process is 100 times that.
    assert 2 * 128 * 2048 * 4 < found[case.key] < 64 * 128 * 2048 * 4
    broken = memory.in_fresh_process("nonsense", "eager", [case.key])
    assert "nonsense" in broken["message"]


# ------------------------------------------------------------------------- figures in the README

# A measurement: a ratio, a time, a rate, or memory in the units that the reports use.
FIGURE = re.compile(
    r"(?<![\w.])~?\d+(?:[.,]\d+)*(?:e[+-]?\d+)?\s?"
    r"(?:x(?![\w])|×|times\b|us\b|µs\b|ms\b|GB/s|TB/s|[GT]flop/s|tokens/s|tok/s|MiB\b|GiB\b)"
)


def figures(text):
    return [re.sub(r"[\s~]", "", f) for f in FIGURE.findall(text)]


def unsupported(readme, results):
    """Figures of a text that stand in no results file."""
    known = set(figures("\n".join(results)))
    return [f for f in figures(readme) if f not in known]


def test_the_readme_quotes_no_figure_that_is_not_in_the_results():
    results = [p.read_text() for p in sorted(report.RESULTS.glob("*.md"))]
    assert unsupported((ROOT / "README.md").read_text(), results) == []


def test_the_figure_check_can_fail():
    results = ["| ours | 1.25 ms | 4.5x | 3.0 MiB |"]
    assert unsupported("1.25 ms, 4.5x faster, 3.0 MiB", results) == []
    assert unsupported("1.26 ms", results) == ["1.26ms"]
    assert unsupported("up to 10x faster", results) == ["10x"]
    assert unsupported("100 times the loop at 22 GB/s", results) == ["100times", "22GB/s"]
    assert unsupported("V = 151936, Python 3.10, transformers 5.x, x86", results) == []


def test_the_readme_table_is_the_one_that_the_results_give():
    table = report.readme(report.load())
    text = (ROOT / "README.md").read_text()
    begin, end = "<!-- bench:begin -->", "<!-- bench:end -->"
    assert text.count(begin) == text.count(end) == 1
    assert text.split(begin)[1].split(end)[0].strip() == table
