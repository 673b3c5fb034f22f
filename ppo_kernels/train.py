"""`ppo-kernels train`: PPO on anyone's model, prompts and reward function.

    ppo-kernels train --model gpt2 --prompts prompts.jsonl --reward rewards:score --steps 200

prompts.jsonl: a JSON string, or an object with a "prompt", on each line. rewards.py: a function
of one text (prompt and response together) or of two (prompt, response) that returns a number.
--out gets config.yaml, metrics.jsonl, tensorboard events, checkpoint.pt and, at the end, model/.
"""

import argparse
import dataclasses
import importlib
import inspect
import json
import math
import os
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from tqdm import tqdm

from ppo_kernels._errors import UserError
from ppo_kernels.trainer import PPOConfig, PPOTrainer

RewardFunction = Callable[..., float]


class MetricsLog:
    """Numbers of every step, as lines of metrics.jsonl and as tensorboard events.

    Several runs may share the folder: each line carries the run's name. Whatever an interrupted
    run wrote after step `done`, the one it resumes from, is dropped.
    """

    def __init__(self, out: Path, run: str, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

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


def read_prompts(path: Path) -> list[tuple[int, str]]:
    """(line number, prompt) of every line that is not blank. UserError names the line."""
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
        prompt = row.get("prompt") if isinstance(row, dict) else row
        if not isinstance(prompt, str) or not prompt:
            raise UserError(
                f"--prompts {path}, line {number}: expected a text, or an object with a text as "
                f'"prompt", got {line.strip()[:80]}'
            )
        prompts.append((number, prompt))
    if not prompts:
        raise UserError(f"--prompts {path}: no prompts in it")
    return prompts


def load_reward(name: str) -> RewardFunction:
    """The function `module:function`, as a function of (prompt, response)."""
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
    try:
        inspect.signature(function).bind("prompt", "response")
    except TypeError:
        return lambda prompt, response: function(prompt + response)
    return function


class Reward:
    """Scores of a batch by the user's function, one row at a time; an error names the row."""

    def __init__(self, function: RewardFunction, tokenizer: Any, lines: dict[int, int]) -> None:
        self.function, self.tokenizer, self.lines = function, tokenizer, lines

    def __call__(self, queries: Sequence[Tensor], responses: Sequence[Tensor]) -> list[float]:
        return [self._score(i, *pair) for i, pair in enumerate(zip(queries, responses))]

    def _score(self, row: int, query: Tensor, response: Tensor) -> float:
        # Decoded together: some tokenizers drop the space at the start of a lone response.
        ids = torch.cat([query, response.to(query.device)])
        prompt = self.tokenizer.decode(query, skip_special_tokens=True)
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        where = f"row {row} of the batch (prompt on line {self.lines[id(query)]})"
        try:
            score = float(self.function(prompt, text[len(prompt) :]))
        except Exception as error:
            raise RewardError(f"the reward function raised on {where}: {error!r}") from error
        if not math.isfinite(score):
            raise RewardError(f"the reward function returned {score} on {where}")
        return score


class RewardError(Exception):
    """Names the row on which the user's function failed."""


# ------------------------------------------------------------------------------------- config


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field of PPOConfig; a flag that is not given leaves no trace."""
    group = parser.add_argument_group("PPOConfig", "help(ppo_kernels.trainer.PPOConfig) explains")
    for field in dataclasses.fields(PPOConfig):
        flag = "--" + field.name.replace("_", "-")
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
        if field.type is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = "VALUE"
        group.add_argument(flag, help=f"default {field.default}", **options)


def convert(field: dataclasses.Field, value: Any) -> Any:
    """A text as the type of the field; YAML 1.1 reads 1e-5 as a text, flags are all texts."""
    if not isinstance(value, str):
        return value
    kinds = typing.get_args(field.type) or (field.type,)
    if type(None) in kinds and value.lower() in ("none", "null"):
        return None
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(value)
            except ValueError:
                continue
    return value


def read_config(path: Path | None, flags: dict[str, Any]) -> PPOConfig:
    """PPOConfig from a YAML file, overridden by flags. UserError names the field."""
    fields: dict[str, Any] = {}
    if path is not None:
        try:
            fields = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"--config {path}: {error}") from None
        if not isinstance(fields, dict):
            raise UserError(f"--config {path}: expected `field: value` lines, got {fields!r}")
    known = {field.name: field for field in dataclasses.fields(PPOConfig)}
    fields = {
        name: convert(known[name], value) if name in known else value
        for name, value in (fields | flags).items()
    }
    try:
        config = PPOConfig.from_dict(fields)
    except (TypeError, ValueError) as error:
        raise UserError(f"config: {error}") from None
    if config.steps is None:
        raise UserError("config: steps must be set (--steps N), got None")
    return config


# ----------------------------------------------------------------------------------- training


def load_model(name: str) -> tuple[torch.nn.Module, Any]:
    """The language model with a value head in fp32, and its tokenizer."""
    import transformers

    from ppo_kernels import models

    try:
        config = transformers.AutoConfig.from_pretrained(name)
        kind = "Seq2SeqLM" if config.is_encoder_decoder else "CausalLM"
        cls = getattr(models, f"AutoModelFor{kind}WithValueHead")
        model = cls.from_pretrained(name, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"--model {name}: {error}") from None
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def tokenize(
    trainer: PPOTrainer, prompts: list[tuple[int, str]], path: Path, max_new_tokens: int
) -> tuple[list[Tensor], dict[int, int]]:
    """The prompts' ids, and the line each tensor (by its id()) came from."""
    queries, lines = [], {}
    for number, prompt in prompts:
        ids = torch.tensor(trainer.tokenizer(prompt)["input_ids"], dtype=torch.int64)
        try:
            trainer.inputs.query(f"line {number}", ids, "--max-new-tokens", max_new_tokens)
        except ValueError as error:
            raise UserError(f"--prompts {path}, {error}") from None
        queries.append(ids)
        lines[id(ids)] = number
    return queries, lines


def run(args: argparse.Namespace, flags: dict[str, Any]) -> None:
    """The command. Everything that can be wrong is read and checked before the model is loaded."""
    config = read_config(args.config, flags)
    prompts = read_prompts(args.prompts)
    function = load_reward(args.reward)
    checkpoint = args.out / "checkpoint.pt"
    if checkpoint.exists() and not args.resume:
        raise UserError(f"--out {args.out} holds a checkpoint: add --resume, or choose another")
    if args.out.exists() and not args.out.is_dir():
        raise UserError(f"--out {args.out} is not a folder")
    if len(prompts) < config.batch_size:
        raise UserError(
            f"--prompts {args.prompts}: {len(prompts)} prompts, fewer than batch_size = "
            f"{config.batch_size}"
        )
    torch.manual_seed(config.seed)  # a value head that is not in the files starts at random
    model, tokenizer = load_model(args.model)
    try:
        trainer = PPOTrainer(config, model, tokenizer=tokenizer)
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from None
    queries, lines = tokenize(trainer, prompts, args.prompts, args.max_new_tokens)
    if checkpoint.exists():
        try:
            trainer.load_checkpoint(checkpoint)
        except (OSError, ValueError) as error:
            raise UserError(f"--resume {checkpoint}: {error}") from None
        print(f"resumed at step {trainer.step_count}")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(config)))
    reward = Reward(function, tokenizer, lines)
    train(trainer, queries, reward, args.out, args.save_every, args.max_new_tokens)


def train(
    trainer: PPOTrainer,
    queries: list[Tensor],
    reward: Reward,
    out: Path,
    save_every: int,
    max_new_tokens: int,
) -> None:
    """The loop, with its log and checkpoints; out/model at the end."""
    steps, done = trainer.config.steps, trainer.step_count
    log = MetricsLog(out, "train", done)
    with tqdm(total=steps, initial=done, unit="step") as bar:

        def after_step(trainer: PPOTrainer, stats: dict[str, float]) -> None:
            log.add(trainer.step_count, stats)
            if trainer.step_count % save_every == 0 or trainer.step_count == steps:
                trainer.save_checkpoint(out / "checkpoint.pt")
            mean, kl = stats["env/reward_mean"], stats["objective/kl"]
            bar.set_postfix_str(f"reward {mean:+.3f}, KL {kl:.2f}", refresh=False)
            bar.update()

        try:
            trainer.train(queries, reward, callbacks=[after_step], max_new_tokens=max_new_tokens)
        except RuntimeError as error:
            if isinstance(error.__cause__, RewardError):
                raise UserError(str(error.__cause__)) from error.__cause__.__cause__
            raise
        finally:
            log.close()
    trainer.save_pretrained(out / "model")
    trainer.tokenizer.save_pretrained(out / "model")
