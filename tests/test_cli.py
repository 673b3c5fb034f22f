"""The command line: flags, errors that name what is wrong, `train` from start to resume."""

import argparse
import json
import multiprocessing
import re
import shutil
import signal
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
import yaml
from processes import run_ranks

import ppo_kernels
from ppo_kernels import cli, models, train, train_settings
from ppo_kernels._errors import UserError
from ppo_kernels.demo.data import Snippet, Split
from ppo_kernels.demo.settings import QUICK
from ppo_kernels.demo.supervised import train_tokenizer
from ppo_kernels.trainer import PPOConfig
from ppo_kernels.trainer.rollout import response_text

REWARDS = """
import signal

import torch.distributed as dist

calls = 0

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

def none(prompt, response):
    return None

def interrupts(prompt, response, times=1, number=signal.SIGINT):
    global calls
    calls += 1
    if calls == 10:
        for _ in range(times):
            signal.raise_signal(number)
    return length(prompt, response)

def fails_later(prompt, response):
    global calls
    calls += 1
    return length(prompt, response) / (calls != 6)

def twice(prompt, response):
    return interrupts(prompt, response, 2)

def terminates(prompt, response):
    return interrupts(prompt, response, 2, signal.SIGTERM)

def terminates_rank_1(prompt, response):
    return (terminates if dist.get_rank() == 1 else length)(prompt, response)

def fails_on_rank_1(prompt, response):
    return (fails_later if dist.get_rank() == 1 else length)(prompt, response)

def sees(prompt, response, answer, other="default"):
    return (prompt, response, answer, other) == ("<|user|>  Aa", "bc", 3, "default")

def sees_all(prompt, response, **fields):
    return fields == {"answer": 3, "level": "hard"}

def three(prompt, response, answer):
    return 0.0

def zero():
    return 0.0

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


@pytest.fixture(autouse=True)
def _interrupts_arrive() -> Iterator[None]:
    """A suite that was started in the background of a script inherits SIGINT as ignored, and
    bench has a handler of its own for SIGTERM."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()


def metrics(out: str) -> list[dict]:
    return [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("reward", "how", "status"),
    [("interrupts", "interrupted", 130), ("terminates", "terminated", 143)],
)
def test_an_interrupted_run_goes_on_to_the_same_weights(
    model_dir: Path, here: Path, capfd: pytest.CaptureFixture, reward: str, how: str, status: int
) -> None:
    """Ctrl-C, or SIGTERM twice as by `timeout`, comes while the third step's responses are scored;
    --resume needs no other flag."""
    assert cli.main(command(model_dir, "--steps", "4")) == 0
    four, start = weights("out/model"), weights(model_dir)
    assert any(not torch.equal(four[name], start[name]) for name in start)

    stopped = command(model_dir, "--steps", "4", "--out", "two", reward=f"my_rewards:{reward}")
    assert cli.main(stopped) == status
    err = capfd.readouterr().err
    assert "Ctrl-C from now on stops at once" in err and "Traceback" not in err
    assert f"{how}: two/checkpoint.pt holds step 3; --resume goes on from there" in err
    assert not Path("two/model").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    assert cli.main(["train", "--out", "two", "--resume"]) == 0
    assert "resumed at step 3 of 4\n" in capfd.readouterr().out
    two = weights("two/model")
    for name, want in four.items():
        assert torch.equal(two[name], want), name
    assert [line["step"] for line in metrics("two")] == [1, 2, 3, 4]
    assert list(Path("two/tensorboard/train").glob("events.*"))


def _two_ranks(model_dir: Path, rank: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    small = ["--steps", "5", "--batch-size", "2"]
    assert cli.main(command(model_dir, *small, "--out", "one")) == 0

    failing = command(model_dir, *small, "--out", "failed", reward="my_rewards:fails_on_rank_1")
    assert cli.main(failing) == 1  # in rank 1's sixth call

    stopped = command(model_dir, *small, "--out", "two", reward="my_rewards:terminates_rank_1")
    assert cli.main(stopped) == 143  # rank 1 has counted on
    assert cli.main(["train", "--out", "two", "--resume"]) == 0
    dist.destroy_process_group()


def test_two_ranks_write_one_run_and_stop_at_one_step(
    model_dir: Path, here: Path, capfd: pytest.CaptureFixture
) -> None:
    run_ranks(partial(_two_ranks, model_dir), 2, here)
    said = capfd.readouterr()
    for name, want in weights("one/model").items():
        assert torch.equal(weights("two/model")[name], want), name
    for out in ("one", "two"):
        assert [line["step"] for line in metrics(out)] == [1, 2, 3, 4, 5]
    assert len(list(Path("one/tensorboard/train").glob("events.*"))) == 1
    assert said.out.count("resumed at step 2 of 5") == 1
    assert said.err.count("terminated: two/checkpoint.pt holds step 2") == 2
    for why in ("the reward function raised on row 1", "another rank failed"):
        assert re.search(f"{why}.*; failed/checkpoint.pt holds step 2", said.err), said.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_someone_else_handles_stays_theirs(number: int) -> None:
    got = []
    signal.signal(number, theirs := lambda *_: got.append(1))
    with train.FirstInterrupt() as stop:
        signal.raise_signal(number)
    assert got and not stop.asked and signal.getsignal(number) is theirs


def _sleep(started: Any) -> None:
    started.set()
    time.sleep(60)


def test_a_worker_of_the_reward_function_can_be_terminated() -> None:
    fork = multiprocessing.get_context("fork")
    with train.FirstInterrupt() as stop:
        started = fork.Event()
        worker = fork.Process(target=_sleep, args=(started,))
        worker.start()
        assert started.wait(10)  # Python drops what comes while a process forks
        worker.terminate()
        worker.join(10)
    ended = worker.exitcode
    worker.kill()
    assert ended == -signal.SIGTERM and not stop.asked


def test_the_second_interrupt_does_not_wait(model_dir: Path, here: Path, capfd) -> None:
    twice = command(model_dir, "--steps", "4", "--save-every", "1", reward="my_rewards:twice")
    assert cli.main(twice) == 130
    assert "out/checkpoint.pt holds step 2;" in capfd.readouterr().err
    assert [line["step"] for line in metrics("out")] == [1, 2]


def test_an_interrupt_before_the_first_step_saves_nothing(
    model_dir: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(train, "make_trainer", lambda *_: signal.raise_signal(signal.SIGINT))
    assert cli.main(command(model_dir, "--steps", "1")) == 130
    assert capsys.readouterr().err == "ppo-kernels train: interrupted\n"


def test_a_reward_that_fails_costs_no_finished_step(model_dir: Path, here: Path, capsys) -> None:
    assert cli.main(command(model_dir, "--steps", "3", reward="my_rewards:fails_later")) == 1
    err = capsys.readouterr().err
    assert "raised on row 1 of the batch" in err and "ZeroDivisionError(" in err
    assert "; out/checkpoint.pt holds step 1, --resume goes on with other prompts" in err
    assert cli.main(["train", "--out", "out", "--resume"]) == 0
    assert [line["step"] for line in metrics("out")] == [1, 2, 3]


def test_resume_applies_what_may_change_and_refuses_the_rest(
    model_dir: Path, here: Path, capsys: pytest.CaptureFixture
) -> None:
    assert cli.main(command(model_dir, "--steps", "2", "--learning-rate", "1e-3")) == 0
    before = Path("out/config.yaml").read_text()
    for more, message in (
        (["--batch-size", "2"], "--batch-size: batch_size cannot change .* is 4, got 2"),
        (["--batch-size", "1"], "--batch-size: batch_size cannot change .* is 4, got 1"),
        (["--init-kl-coef", "0.1"], "init_kl_coef cannot change"),
        (["--steps", "1"], "--steps 1: the run has already made 2 steps"),
        (["--config", "absent.yaml"], "--config absent.yaml: .*No such file"),
    ):
        assert cli.main(["train", "--out", "out", "--resume", *more]) == 1
        assert re.search(message, capsys.readouterr().err), more
    assert cli.main(["train", "--out", "fresh", "--resume"]) == 1
    assert "nothing to resume, there is no fresh/checkpoint.pt" in capsys.readouterr().err
    assert cli.main(command(model_dir, "--steps", "4")) == 1
    assert "holds a checkpoint: add --resume" in capsys.readouterr().err
    assert Path("out/config.yaml").read_text() == before

    more = ["--steps", "3", "--learning-rate", "1e-5", "--value-learning-rate", "1e-4"]
    assert cli.main(["train", "--out", "out", "--resume", *more]) == 0
    out = capsys.readouterr().out
    assert "resumed at step 2 of 3, steps 2 -> 3, learning_rate 0.001 -> 1e-05" in out
    assert [line["ppo/learning_rate"] for line in metrics("out")] == [1e-3, 1e-3, 1e-5]
    saved = yaml.safe_load(Path("out/config.yaml").read_text())
    assert (saved["steps"], saved["batch_size"], saved["max_new_tokens"]) == (3, 4, 5)
    rates = [group["lr"] for group in torch.load("out/checkpoint.pt")["optimizer"]["param_groups"]]
    assert rates == [1e-5, 1e-4]


def test_a_mini_batch_size_that_was_derived_is_not_kept() -> None:
    """config.yaml, read again with another batch_size, derives it anew."""
    layer = {"model": "m", "prompts": "p", "reward": "r:f", "steps": 1, "batch_size": 16}
    _, config = train_settings.settings(("", layer))
    saved = {name: x for name, x in asdict(config).items() if name in train_settings.FIELDS}
    _, again = train_settings.settings(("config.yaml", layer | saved), ("", {"batch_size": "8"}))
    assert (config.minibatch, again.minibatch) == (16, 8)


class Metaspace:
    """As Llama's: a space before each word, which the first of a text loses."""

    words = ("", " a", " b", ",")

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool = True) -> str:
        text = "".join(self.words[i] for i in ids)
        return text.replace(" b,", " B,").removeprefix(" ")


def test_a_response_is_told_as_it_stands_behind_its_prompt() -> None:
    def text(query: list[int], response: list[int], alone: bool = False) -> str:
        ids = torch.tensor(query), torch.tensor(response)
        return response_text(Metaspace(), *ids, alone)

    assert text([1], [2, 0]) == " b"
    assert text([1], [2], alone=True) == "b"
    assert text([1, 2], [3, 1]) == ", a"  # together they read "a B, a", which "a b" does not begin


def test_two_texts_of_a_seq2seq_model_are_not_run_together(here: Path) -> None:
    function = train.RewardFunction("my_rewards:letters", is_seq2seq=True)
    q = torch.tensor([1])
    reward = train.Reward(function, Metaspace(), {id(q): train.Prompt(1, "a", {})})
    assert reward([q], [torch.tensor([1, 2])]) == [2 / (1 + len("a a b"))]


def test_rewards_get_the_prompt_as_it_is_in_the_file_and_fields_of_its_line(here: Path) -> None:
    class Lossy:
        """Keeps no case and no special token: what chat markers are to many tokenizers."""

        def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
            assert skip_special_tokens
            return "".join(chr(i).lower() for i in ids if i > 32)

    def score(name: str) -> float:
        function = train.RewardFunction(f"my_rewards:{name}")
        function.check([prompt])
        return train.Reward(function, Lossy(), {id(query): prompt})([query], [response])[0]

    prompt = train.Prompt(1, "<|user|>  Aa", {"answer": 3, "level": "hard"})
    query, response = torch.tensor([0, 65, 97]), torch.tensor([98, 99, 0])
    assert score("length") == -2.0
    assert score("sees") == 1.0
    assert score("sees_all") == 1.0
    assert score("letters") == 3 / (1 + len("<|user|>  Aabc"))


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("my_rewards:fails", r"the reward function raised on row \d .*line 5.*no good"),
        ("my_rewards:nan", r"the reward function returned nan on row 0"),
        ("my_rewards:none", r"the reward function returned None on row 0"),
        ("my_rewards:three", r"missing a required argument: 'answer' on line 1 of the prompts"),
        ("my_rewards:zero", r"too many positional arguments on line 1"),
        ("os:sep", r"'sep' is no function but '/'"),
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
    assert Path("out").exists() == ("row" in message), "what can be known is known before"


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
    shutil.copytree(model_dir, "notokens", ignore=shutil.ignore_patterns("token*", "special*"))
    for more, message in (
        (["--steps", "1", "--clip-range", "1"], "clip-range 1; here it is --cliprange"),
        (["--steps", "1", "--batch-size", "5"], "4 prompts, fewer than --batch-size 5"),
        (["--steps", "1", "--prompts", "absent.jsonl"], "absent.jsonl"),
        (["--steps", "1", "--model", "./absent"], "--model ./absent: there is no such folder"),
        (["--steps", "1", "--batchsize", "4"], "did you mean --batch-size?"),
        (["--steps", "1", "--rollout-is-cap", "2"], "it is for PPOTrainer in Python"),
        (["--steps", "1", "--model", "notokens"], "there are no files of a tokenizer with it"),
        (["--steps", "1", "--model", "runs/a/b"], "--model runs/a/b: there is no such folder"),
        ([], "--steps must be given, or steps in the file of --config"),
        (["--steps", "x"], "--steps: steps must be an integer, got 'x'"),
        (["--steps", "1", "--gamma", "2"], "--gamma: gamma must be"),
        (["--steps", "1", "--kl-unit", "nats"], "choose from"),
        (["--steps", "1", "--max-new-tokens", "0"], "max-new-tokens"),
        (["--steps", "1", "--max-new-tokens", "60"], "line 1 and --max-new-tokens: 65 tokens"),
        (["--steps", "1", "--out", "prompts.jsonl"], "--out prompts.jsonl is not a folder"),
    ):
        try:
            assert cli.main(command(model_dir, *more)) == 1
        except SystemExit as stop:  # argparse itself
            assert stop.code == 2
        assert message in capsys.readouterr().err, more
    assert not Path("out").exists()


# ------------------------------------------------------------------------------------- config


GIVEN = {"model": "m", "prompts": "p", "reward": "r", "steps": "7"}


def test_every_field_is_a_flag() -> None:
    parser = argparse.ArgumentParser()
    train_settings.add_flags(parser)
    names = {field.name for field in fields(PPOConfig)} - set(train_settings.PYTHON_ONLY)
    names |= {"model", "prompts", "reward", "max_new_tokens", "save_every"}
    assert vars(parser.parse_args([])) == dict.fromkeys(names)
    for name in names:
        choices = train_settings.CHOICES.get(name, ["3"])
        values = [] if train_settings.FIELDS[name].type is bool else [choices[-1]]
        got = vars(parser.parse_args([train_settings.flag(name), *values]))[name]
        assert got == (values[0] if values else True)
    assert parser.parse_args(["--no-shuffle"]).shuffle is False


def test_help_explains_and_needs_no_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for name in ("yaml", "transformers", "tqdm"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "ppo_kernels.train")
    monkeypatch.delattr(ppo_kernels, "train")
    with pytest.raises(SystemExit, match="0"):
        cli.main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for part in ("--ppo-epochs N passes over a batch [4]", "--kl-unit {sequence,token}"):
        assert part in text
    for part in ("--max-new-tokens N most tokens of a response [64]", "--out OUT [runs/train]"):
        assert part in text

    assert cli.main(["train", "--steps", "1"]) == 1
    err = capsys.readouterr().err
    assert "run `pip install '.[train]'` in the project's folder" in err and err.count("\n") == 1
    with pytest.raises(ModuleNotFoundError, match=r"pip install '.\[train\]'"):
        models.AutoModelForCausalLMWithValueHead.from_pretrained("name")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("--lr", "; here it is --learning-rate"),
        ("--lr=1e-5", "; here it is --learning-rate"),
        ("lr", "; here it is learning_rate"),
        ("--beta", "; here it is --init-kl-coef, which --adap-kl-ctrl steers"),
        ("kl_coef", "; here it is init_kl_coef, which adap_kl_ctrl steers"),
        ("--value-clip", "; here it is --cliprange-value"),
        ("--response-length", "; here it is --max-new-tokens, of the response alone"),
        ("output_dir", "; here it is --out"),
        ("--total-epochs", "; here it is --steps, of --batch-size responses each"),
        ("--gae-lambda", "; here it is --lam"),
        ("--learning_rate", "; did you mean --learning-rate?"),
        ("--ppo-epoch", "; did you mean --ppo-epochs?"),
        *((f"--{name}", "") for name in ("top-k", "warmup-steps", "kl-loss-type", "save-total")),
        *((f"--{name}", "") for name in ("fp16", "eval-batch-size", "dtype", "logging-steps")),
    ],
)
def test_a_name_of_other_trainers_is_translated_or_left_alone(name: str, expected: str) -> None:
    assert train_settings.hint(name) == expected


def test_every_translation_names_what_there_is_and_translates_nothing_that_is_here() -> None:
    known = {*train_settings.FIELDS, *train_settings.NO_FIELDS}
    others = " ".join(train_settings.RENAMED.values()).split()
    assert len(set(others)) == len(others) and not known & set(others)
    for text in train_settings.RENAMED:
        assert {name for _, name, _, _ in string.Formatter().parse(text) if name} <= known


def test_flags_override_the_file_and_numbers_are_numbers() -> None:
    file = yaml.safe_load("learning_rate: 1e-5\nbatch_size: 16\nmax_grad_norm: null\nseed: 3")
    flags = {"batch_size": "64", "cliprange_value": "none", "max_new_tokens": "9"}
    run, config = train_settings.settings(("c.yaml", GIVEN | file), ("", flags))
    assert (config.learning_rate, config.steps, config.max_grad_norm) == (1e-5, 7, None)
    assert (config.batch_size, config.cliprange_value, config.seed) == (64, None, 3)
    assert (run.model, run.max_new_tokens, run.save_every) == ("m", 9, 20)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_ppo_epochs: 3", r"no field 'num_ppo_epochs'; here it is ppo_epochs"),
        ("batchsize: 3", r"no field 'batchsize'; did you mean batch_size\?"),
        ("gamma: 2", r"gamma must be"),
        ("model: 5", r"model must be a text, got 5"),
        ("save_every: 0", r"save_every must be an integer >= 1, got 0"),
        ("learning_rate: fast", r"learning_rate must be a number, got 'fast'"),
        ("batch_size: 8\nmini_batch_size: 16", r"mini_batch_size must be <= batch_size = 8"),
        ("- 1", r"expected `field: value` lines"),
        ("a: [", r"while parsing"),
    ],
)
def test_config_errors_name_the_file_and_the_field(
    here: Path, capsys: pytest.CaptureFixture, text: str, message: str
) -> None:
    Path("c.yaml").write_text(text)
    flags = [f"--{name}={value}" for name, value in GIVEN.items() if name not in text]
    assert cli.main(["train", "--config", "c.yaml", *flags]) == 1
    assert re.search(rf"--config c.yaml: .*{message}", capsys.readouterr().err)


# ------------------------------------------------------------------------------ other commands


def test_worked_example_and_info(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"ppo_kernels {ppo_kernels.__version__}\n"
    assert cli.main(["demo", "worked-example"]) == 0
    assert "total reward 2.995112" in capsys.readouterr().out
    assert cli.main(["info"]) == 0
    assert f"torch {torch.__version__}" in capsys.readouterr().out


def test_demo_is_no_job_for_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["demo", "sentiment"]) == 1
    assert "it runs in one process, without torchrun" in capsys.readouterr().err


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
    (tmp_path / "bench" / "__init__.py").touch()
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
