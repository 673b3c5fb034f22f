"""The command line: flags, errors that name what is wrong, `train` from start to resume."""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import transformers

from ppo_kernels import cli, train
from ppo_kernels._errors import UserError
from ppo_kernels.demo.data import Snippet, Split
from ppo_kernels.demo.settings import QUICK
from ppo_kernels.demo.supervised import train_tokenizer
from ppo_kernels.trainer import PPOConfig

REWARDS = """
def length(prompt, response):
    return -float(len(response))

def letters(text):
    return sum(c in "aeiou" for c in text) / (1 + len(text))

def fails(prompt, response):
    if prompt.endswith("fourth"):
        raise ZeroDivisionError("no good")
    return 0.0

def nan(prompt, response):
    return float("nan")

number = 3
"""
SMALL = [
    "--batch-size",
    "4",
    "--mini-batch-size",
    "2",
    "--ppo-epochs",
    "1",
    "--max-new-tokens",
    "5",
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 with its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    words = [Snippet("tell me about the first second third fourth", 0.0)]
    tokenizer = train_tokenizer(Split(words, words), 300)
    tokenizer.save_pretrained(folder)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=64,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a reward module and prompts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    Path("my_rewards.py").write_text(REWARDS)
    Path("broken.py").write_text("oops\n")
    rows = ['{"prompt": "tell me about the first"}', '"the second"', "", '{"prompt": "the third"}']
    rows += ['{"prompt": "about the fourth"}']
    Path("prompts.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path


def command(model_dir: Path, *more: str, reward: str = "my_rewards:length") -> list[str]:
    base = ["train", "--model", str(model_dir), "--prompts", "prompts.jsonl", "--reward", reward]
    return [*base, "--out", "out", *SMALL, *more]


# -------------------------------------------------------------------------------------- train


def test_train_two_and_two_steps_are_four(
    model_dir: Path, here: Path, capsys: pytest.CaptureFixture
) -> None:
    assert cli.main(command(model_dir, "--steps", "4")) == 0
    four = transformers.AutoModelForCausalLM.from_pretrained("out/model").state_dict()
    start = transformers.AutoModelForCausalLM.from_pretrained(model_dir).state_dict()
    assert any(not torch.equal(four[k], start[k]) for k in start)

    assert cli.main(command(model_dir, "--steps", "2", "--out", "two")) == 0
    assert cli.main(command(model_dir, "--steps", "4", "--out", "two", "--resume")) == 0
    assert "resumed at step 2" in capsys.readouterr().out
    two = transformers.AutoModelForCausalLM.from_pretrained("two/model").state_dict()
    for name, want in four.items():
        assert torch.equal(two[name], want), name
    lines = [json.loads(x) for x in Path("two/metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines] == [1, 2, 3, 4]
    assert list(Path("two/tensorboard/train").glob("events.*"))

    assert cli.main(command(model_dir, "--steps", "4")) == 1
    assert "holds a checkpoint: add --resume" in capsys.readouterr().err


def test_a_reward_of_one_text_sees_prompt_and_response(here: Path) -> None:
    score = train.load_reward("my_rewards:letters")
    assert score("aa", "bb") == 2 / 5
    assert train.load_reward("my_rewards:length")("aa", "bbb") == -3.0


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("my_rewards:fails", r"the reward function raised on row \d .*line 5.*no good"),
        ("my_rewards:nan", r"the reward function returned nan on row 0"),
        ("my_rewards:absent", r"module my_rewards has no 'absent'"),
        ("no_such_module:f", r"No module named 'no_such_module'"),
        ("my_rewards", r"--reward must be module:function, got 'my_rewards'"),
        ("my_rewards:number", r"'number' is no function but 3"),
        ("broken:score", r"importing broken raised NameError.*oops"),
    ],
)
def test_reward_errors(
    model_dir: Path, here: Path, capsys: pytest.CaptureFixture, reward: str, message: str
) -> None:
    assert cli.main(command(model_dir, "--steps", "1", reward=reward)) == 1
    err = capsys.readouterr().err
    assert re.search(message, err), err
    assert not Path("out/model").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"fine"\n{"prompt": 3}\n', r"line 2: expected a text"),
        ('"fine"\n{"text": "no"}\n', r"line 2: expected a text"),
        ('"fine"\n\n{"prompt": "cut\n', r"line 3: not JSON"),
        ("", r"no prompts in it"),
    ],
)
def test_unreadable_prompts_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        train.read_prompts(path)


def test_prompts_that_are_no_text_file(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "p", tmp_path / "absent", tmp_path):
        with pytest.raises(UserError, match=r"--prompts "):
            train.read_prompts(path)


def test_nothing_is_written_before_the_input_is_checked(
    model_dir: Path, here: Path, capsys: pytest.CaptureFixture
) -> None:
    for more, message in (
        (["--steps", "1", "--clip-range", "1"], "clip-range"),
        (["--steps", "1", "--batch-size", "5"], "4 prompts, fewer than batch_size = 5"),
        (["--steps", "1", "--prompts", "absent.jsonl"], "absent.jsonl"),
        (["--steps", "1", "--model", "./absent"], "--model ./absent"),
        ([], "steps must be set"),
        (["--steps", "x"], "steps must be an integer, got 'x'"),
        (["--steps", "1", "--max-new-tokens", "0"], "max-new-tokens"),
        (["--steps", "1", "--max-new-tokens", "60"], "line 1 and --max-new-tokens have"),
        (["--steps", "1", "--out", "prompts.jsonl"], "--out prompts.jsonl is not a folder"),
    ):
        try:
            assert cli.main(command(model_dir, *more)) == 1
        except SystemExit as stop:  # argparse itself
            assert stop.code == 2
        assert message in capsys.readouterr().err, more
    assert not Path("out").exists()


# ------------------------------------------------------------------------------------- config


def test_every_field_is_a_flag() -> None:
    parser = argparse.ArgumentParser()
    train.add_config_flags(parser)
    assert vars(parser.parse_args([])) == {}
    for field in fields(PPOConfig):
        flag = "--" + field.name.replace("_", "-")
        values = [] if field.type is bool else ["3"]
        got = vars(parser.parse_args([flag, *values]))
        assert got == {field.name: values[0] if values else True}
    assert vars(parser.parse_args(["--no-shuffle"])) == {"shuffle": False}


def test_flags_override_the_file_and_numbers_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("learning_rate: 1e-5\nbatch_size: 16\nsteps: 7\nmax_grad_norm: null\n")
    config = train.read_config(path, {"batch_size": "64", "cliprange_value": "none"})
    assert (config.learning_rate, config.steps, config.max_grad_norm) == (1e-5, 7, None)
    assert (config.batch_size, config.cliprange_value) == (64, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 1\nnum_ppo_epochs: 3", r"no field 'num_ppo_epochs'; here it is ppo_epochs"),
        ("steps: 1\ngamma: 2", r"gamma must be"),
        ("steps: 1\nlearning_rate: fast", r"learning_rate must be a number"),
        ("- 1", r"expected `field: value` lines"),
        ("a: [", r"--config"),
    ],
)
def test_config_errors_name_the_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        train.read_config(path, {})


# ------------------------------------------------------------------------------ other commands


def test_worked_example_and_info(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["demo", "worked-example"]) == 0
    assert "total reward 2.995112" in capsys.readouterr().out
    assert cli.main(["info"]) == 0
    assert f"torch {torch.__version__}" in capsys.readouterr().out


def test_demo_out_of_another_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "run.json").write_text('{"seed": 5}')
    assert cli.main(["demo", "sentiment", "--quick", "--out", str(tmp_path)]) == 1
    assert "another seed or other settings" in capsys.readouterr().err
    assert QUICK.ppo_steps > 0


def test_bench_without_the_repository(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "ppo_kernels" / "cli.py"))
    assert cli.main(["bench"]) == 1
    assert "the benchmarks are in the repository" in capsys.readouterr().err


def test_bench_passes_its_flags_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    (tmp_path / "bench").mkdir()
    fake = "import sys\ndef main():\n    print('got', sys.argv[1:])\n    return 3\n"
    (tmp_path / "bench" / "__main__.py").write_text(fake)
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "ppo_kernels" / "cli.py"))
    assert cli.main(["bench", "--op", "gae", "x"]) == 3
    assert "got ['--op', 'gae', 'x']" in capfd.readouterr().out


def test_other_commands_load_no_transformers_and_no_reader_is_no_error() -> None:
    """`worked-example | head -1`, in a process of its own."""
    code = (
        "import sys; from ppo_kernels import cli; status = cli.main(['demo', 'worked-example']);"
        "sys.exit(status if 'transformers' not in sys.modules else 9)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() in (0, 1)
