"""`ppo-kernels train`: PPO on anyone's model, prompts and reward function.

    ppo-kernels train --model gpt2 --prompts prompts.jsonl --reward rewards:score --steps 200

prompts.jsonl: a JSON text, or an object with a text as "prompt", on each line. rewards.py: a
function that returns a number, score(text) of prompt and response together or score(prompt,
response); after the two it may name other fields of the line, as in score(prompt, response,
answer), or take all of them as **fields.

--out gets config.yaml, metrics.jsonl, tensorboard events, checkpoint.pt and, at the end, model/.
Ctrl-C or SIGTERM saves the step that it interrupts; --resume goes on from there.
"""

import dataclasses
import importlib
import inspect
import json
import math
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
import yaml
from accelerate import PartialState
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from ppo_kernels import models, train_settings
from ppo_kernels._errors import Terminated, UserError
from ppo_kernels.ranks import RankFailed
from ppo_kernels.train_settings import RunSettings
from ppo_kernels.trainer import PPOConfig, PPOTrainer
from ppo_kernels.trainer.inputs import InputChecker
from ppo_kernels.trainer.rollout import response_text


class MetricsLog:
    """Numbers of every step, as lines of metrics.jsonl and as tensorboard events.

    Several runs may share the folder: each line carries the run's name. Whatever an interrupted
    run wrote after step `done`, the one it resumes from, is dropped.
    """

    def __init__(self, out: Path, run: str, done: int) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.path, self.run = out / "metrics.jsonl", run
        lines = read_metrics(out)
        kept = [line for line in lines if line["run"] != run or line["step"] <= done]
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(scratch, self.path)
        self.writer = SummaryWriter(str(out / "tensorboard" / run), purge_step=done + 1)

    def add(self, step: int, numbers: dict[str, Any]) -> None:
        """Write one step; what is not a number is left out of the events."""
        with self.path.open("a") as file:
            file.write(json.dumps({"run": self.run, "step": step, **numbers}) + "\n")
        for name, value in numbers.items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush the events."""
        self.writer.close()


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of out/metrics.jsonl; a last line that was not finished is left out."""
    path = out / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


# ------------------------------------------------------------------------------- user's input


class Prompt(NamedTuple):
    """A line of the prompts file: its number, its text, and what else its object holds."""

    line: int
    text: str
    fields: dict[str, Any]


def read_prompts(path: Path) -> list[Prompt]:
    """Every line that is not blank. UserError names the line."""
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"--prompts {path}, line {number}: not JSON: {error}") from None
        fields = row if isinstance(row, dict) else {"prompt": row}
        text = fields.pop("prompt", None)
        if not isinstance(text, str) or not text:
            raise UserError(
                f"--prompts {path}, line {number}: expected a text, or an object with a text as "
                f'"prompt", got {line.strip()[:80]}'
            )
        prompts.append(Prompt(number, text, fields))
    if not prompts:
        raise UserError(f"--prompts {path}: no prompts in it")
    return prompts


def import_function(name: str) -> Callable[..., Any]:
    """What `module:function` names."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UserError(f"--reward must be module:function, got {name!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: modules beside the user come first
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        raise UserError(f"--reward {name}: {error}") from None
    except Exception as error:
        raise UserError(f"--reward {name}: importing {module} raised {error!r}") from error
    if function is None:
        raise UserError(f"--reward {name}: module {module} has no {attribute!r}")
    if not callable(function):
        raise UserError(f"--reward {name}: {attribute!r} is no function but {function!r}")
    return function


class RewardFunction:
    """module:function of one text, or of (prompt, response) and fields of the prompt's line."""

    def __init__(self, name: str, is_seq2seq: bool = False) -> None:
        self.name, self.function, self.is_seq2seq = name, import_function(name), is_seq2seq
        try:
            self.signature = inspect.signature(self.function)
        except (TypeError, ValueError):
            raise UserError(f"--reward {name}: its arguments are unknown") from None
        kinds = [p.kind for p in self.signature.parameters.values()]
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        two = sum(kind in positional for kind in kinds) > 1
        self.texts = 2 if two or inspect.Parameter.VAR_POSITIONAL in kinds else 1
        self.takes_any_field = inspect.Parameter.VAR_KEYWORD in kinds
        self.names = list(self.signature.parameters)[self.texts :]

    def __call__(self, prompt: Prompt, response: str) -> Any:
        call = self._bind(prompt, response)
        return self.function(*call.args, **call.kwargs)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """UserError that names the line whose fields do not fit the function's arguments."""
        for prompt in prompts:
            try:
                self._bind(prompt, "")
            except TypeError as error:
                raise UserError(
                    f"--reward {self.name}: {error} on line {prompt.line} of the prompts; it must "
                    "take (text), or (prompt, response) and after these names of the line's fields"
                ) from None

    def _bind(self, prompt: Prompt, response: str) -> inspect.BoundArguments:
        texts = (prompt.text, response)
        if self.texts == 1:  # of a seq2seq model they are two texts, not one that goes on
            texts = ((" " if self.is_seq2seq else "").join(texts),)
        fields = prompt.fields
        if not self.takes_any_field:
            fields = {name: fields[name] for name in self.names if name in fields}
        return self.signature.bind(*texts, **fields)


class RewardError(Exception):
    """Names the row on which the user's function failed."""


class Reward:
    """Scores of a batch by the user's function, one row at a time; an error names the row."""

    def __init__(self, function: RewardFunction, tokenizer: Any, rows: dict[int, Prompt]) -> None:
        self.function, self.tokenizer, self.rows = function, tokenizer, rows

    def __call__(self, queries: Sequence[Tensor], responses: Sequence[Tensor]) -> list[float]:
        return [self._score(i, *pair) for i, pair in enumerate(zip(queries, responses))]

    def _score(self, i: int, query: Tensor, response: Tensor) -> float:
        prompt = self.rows[id(query)]
        text = response_text(self.tokenizer, query, response, self.function.is_seq2seq)
        where = f"row {i} of the batch (prompt on line {prompt.line})"
        try:
            score = self.function(prompt, text)
        except Exception as error:
            raise RewardError(f"the reward function raised on {where}: {error!r}") from error
        try:
            finite = math.isfinite(number := float(score))
        except (TypeError, ValueError):
            finite = False
        if not finite:
            raise RewardError(
                f"the reward function returned {score!r} on {where}, not a number: it is asked "
                "about one response at a time"
            )
        return number


# ----------------------------------------------------------------------------------- settings


def read_yaml(path: Path, name: str) -> dict[str, Any]:
    """The fields in a YAML file that the user knows as `name`."""
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{name}: {error}") from None
    if not isinstance(fields, dict):
        raise UserError(f"{name}: expected `field: value` lines, got {fields!r}")
    return fields


def read_settings(
    out: Path, file: Path | None, resume: bool, flags: dict[str, Any]
) -> tuple[RunSettings, PPOConfig, list[str]]:
    """Of the run in `out` if it is resumed, overridden by the file, by the flags; what changed."""
    checkpoint = out / "checkpoint.pt"
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is not a folder")
    if checkpoint.exists() and not resume:
        raise UserError(f"--out {out} holds a checkpoint: add --resume, or choose another")
    if resume and not checkpoint.exists():
        raise UserError(f"--resume: nothing to resume, there is no {checkpoint}")
    given = [("", flags)]
    if file is not None:
        given.insert(0, (f"--config {file}", read_yaml(file, f"--config {file}")))
    if not resume:
        return *train_settings.settings(*given), []
    saved = (str(out / "config.yaml"), read_yaml(out / "config.yaml", f"--resume {out}"))
    before = train_settings.settings(saved)
    after = train_settings.settings(saved, *given, resumed=before[1])
    return *after, train_settings.changes(before, after)


# ----------------------------------------------------------------------------- model and trainer


def read_model(name: str) -> tuple[Any, Any]:
    """The configuration and the tokenizer of a model, which are quick to load."""
    is_path = Path(name).exists() or name.startswith((".", "/", "~")) or name.count("/") > 1
    if is_path and not Path(name).is_dir():
        raise UserError(f"--model {name}: there is no such folder")
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"--model {name}: {error}") from None
    except TypeError:  # transformers 4.57 opens files that are not there
        tokenizer = None
    if tokenizer is None or len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UserError(f"--model {name}: there are no files of a tokenizer with it")
    return config, tokenizer


def tokenize(
    tokenizer: Any, prompts: Sequence[Prompt], path: str, limits: InputChecker, max_new_tokens: int
) -> list[Tensor]:
    """The prompts' ids. UserError names the line of a prompt that is too long for the model."""
    queries = []
    for prompt in prompts:
        ids = torch.tensor(tokenizer(prompt.text)["input_ids"], dtype=torch.int64)
        try:
            limits.query(f"line {prompt.line}", ids, "--max-new-tokens", max_new_tokens)
        except ValueError as error:
            raise UserError(f"--prompts {path}, {error}") from None
        queries.append(ids)
    return queries


def make_trainer(name: str, config: PPOConfig, is_seq2seq: bool, tokenizer: Any) -> PPOTrainer:
    """The language model with a value head, in fp32, in a trainer."""
    kind = "Seq2SeqLM" if is_seq2seq else "CausalLM"
    cls = getattr(models, f"AutoModelFor{kind}WithValueHead")
    torch.manual_seed(config.seed)  # a value head that is not in the files starts at random
    try:
        model = cls.from_pretrained(name, dtype=torch.float32)
        model = model.to(PartialState().device)  # under torchrun a GPU of its own
        return PPOTrainer(config, model, tokenizer=tokenizer)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise UserError(f"--model {name}: {error}") from None


def go_on(trainer: PPOTrainer, checkpoint: Path, changed: list[str]) -> None:
    """Load the checkpoint, but keep the trainer's own settings, learning rates included."""
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the saved run had")  # seen to below
            trainer.load_checkpoint(checkpoint)
    except (OSError, ValueError, RankFailed) as error:
        raise UserError(f"--resume {checkpoint}: {error}") from None
    for group, rate in zip(trainer.optimizer.param_groups, rates):
        group["lr"] = rate
    done, steps = trainer.step_count, trainer.config.steps
    if steps < done:
        raise UserError(f"--steps {steps}: the run has already made {done} steps")
    if trainer.ranks.rank == 0:
        print(", ".join([f"resumed at step {done} of {steps}", *changed]), flush=True)


# ----------------------------------------------------------------------------------- training


class FirstInterrupt:
    """Inside, the first Ctrl-C or SIGTERM sets `asked` to its number and no more; a Ctrl-C after
    it is a KeyboardInterrupt, a SIGTERM is nothing, for coreutils' `timeout` sends two."""

    asked = 0

    def __enter__(self) -> "FirstInterrupt":
        usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
        # Others are ignored, or someone else's.
        self.before = {s: default for s, default in usual.items() if signal.getsignal(s) == default}
        self.process = os.getpid()
        for number in self.before:
            signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, _: Any) -> None:
        if number == signal.SIGTERM and os.getpid() != self.process:
            # A worker that the reward function has forked: this is how pools end theirs.
            signal.signal(number, self.before[number])
            signal.raise_signal(number)
        if self.asked:
            return
        self.asked = number
        if signal.SIGINT in self.before:
            signal.signal(signal.SIGINT, self.before[signal.SIGINT])
        # print would fail where the signal came in the middle of another print.
        os.write(2, b"\nstopping after this step; Ctrl-C from now on stops at once\n")

    def __exit__(self, *_: Any) -> None:
        for number, default in self.before.items():
            signal.signal(number, default)


def run_steps(
    trainer: PPOTrainer,
    queries: list[Tensor],
    reward: Callable[[list[Tensor], list[Tensor]], Any],
    log: MetricsLog | None,
    checkpoint: Path,
    save_every: int,
    report: Callable[[dict[str, float]], dict[str, Any]],
    **sampling: Any,
) -> None:
    """Train up to config.steps; every save_every steps, and at the last, write the checkpoint.

    report(stats) shows a step, and returns what the log gets, which is rank 0's alone. Ctrl-C or
    SIGTERM on any rank writes the checkpoint once the step is complete; the KeyboardInterrupt or
    Terminated that follows on all ranks says what the checkpoint holds.
    """
    saved, asked = trainer.step_count, 0

    def after_step(trainer: PPOTrainer, stats: dict[str, float]) -> None:
        nonlocal saved, asked
        step, numbers = trainer.step_count, report(stats)
        if log is not None:
            log.add(step, numbers)
        asked = int(trainer.ranks.max(torch.tensor(int(stop.asked), device=trainer.device)))
        if asked or step % save_every == 0 or step == trainer.config.steps:
            trainer.save_checkpoint(checkpoint)
            saved = step
        if asked:
            raise KeyboardInterrupt

    with FirstInterrupt() as stop:
        try:
            trainer.train(queries, reward, callbacks=[after_step], **sampling)
        except KeyboardInterrupt:
            terminated = signal.SIGTERM in (asked, stop.asked)
            kind = Terminated if terminated else KeyboardInterrupt
            raise kind(f"{checkpoint} holds step {saved}" if saved else "") from None
        finally:
            if log is not None:
                log.close()


def train(
    trainer: PPOTrainer, queries: list[Tensor], reward: Reward, out: Path, run: RunSettings
) -> None:
    """The loop with a bar; out/model at the end. A reward that fails costs no finished step."""
    total, done, first = trainer.config.steps, trainer.step_count, trainer.ranks.rank == 0
    # In a file every update is a line of its own.
    seconds = 0.1 if sys.stderr.isatty() else 10
    with tqdm(
        total=total, initial=done, unit="step", mininterval=seconds, disable=not first
    ) as bar:

        def report(stats: dict[str, float]) -> dict[str, float]:
            mean, kl = stats["env/reward_mean"], stats["objective/kl"]
            bar.set_postfix_str(f"reward {mean:+.3f}, KL {kl:.2f}", refresh=False)
            bar.update()
            return stats

        log = MetricsLog(out, "train", done) if first else None
        checkpoint = out / "checkpoint.pt"
        options = {"max_new_tokens": run.max_new_tokens}
        try:
            run_steps(trainer, queries, reward, log, checkpoint, run.save_every, report, **options)
        except RuntimeError as error:
            failure = error if isinstance(error, RankFailed) else error.__cause__
            if not isinstance(failure, (RewardError, RankFailed)):
                raise
            saved, step = "", trainer.step_count
            if step:  # the weights are still those of the last step
                trainer.save_checkpoint(checkpoint)
                saved = f"; {checkpoint} holds step {step}, --resume goes on with other prompts"
            raise UserError(f"{failure}{saved}") from failure.__cause__
    trainer.save_pretrained(out / "model")
    if first:
        trainer.tokenizer.save_pretrained(out / "model")


def run(out: Path, file: Path | None, resume: bool, flags: dict[str, Any]) -> None:
    """The command. Everything that can be wrong is read and checked before the model is loaded."""
    settings, config, changed = read_settings(out, file, resume, flags)
    prompts = read_prompts(Path(settings.prompts))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if len(prompts) < config.batch_size * ranks:
        raise UserError(
            f"--prompts {settings.prompts}: {len(prompts)} prompts, fewer than --batch-size "
            f"{config.batch_size}" + f" on each of {ranks} ranks" * (ranks > 1)
        )
    model_config, tokenizer = read_model(settings.model)
    function = RewardFunction(settings.reward, model_config.is_encoder_decoder)
    function.check(prompts)
    limits = InputChecker(config, model_config)
    queries = tokenize(tokenizer, prompts, settings.prompts, limits, settings.max_new_tokens)
    trainer = make_trainer(settings.model, config, model_config.is_encoder_decoder, tokenizer)
    if resume:
        go_on(trainer, out / "checkpoint.pt", changed)
    if trainer.ranks.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        fields = dataclasses.asdict(settings) | dataclasses.asdict(config)
        known = {name: value for name, value in fields.items() if name in train_settings.FIELDS}
        (out / "config.yaml").write_text(yaml.safe_dump(known, sort_keys=False))
    reward = Reward(function, tokenizer, dict(zip(map(id, queries), prompts)))
    train(trainer, queries, reward, out, settings)
