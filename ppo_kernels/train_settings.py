"""What `ppo-kernels train` can be told, as flags or in a file: RunSettings and PPOConfig.

A comment beside a field is its explanation in --help, the comment above a group its heading.
"""

import argparse
import dataclasses
import difflib
import inspect
import re
import typing
from dataclasses import dataclass
from typing import Any

from ppo_kernels._errors import UserError
from ppo_kernels.trainer.config import CHOICES, PPOConfig

# Going on with another value of these would change nothing, or lose the place in the prompts.
FIXED = ("seed", "shuffle", "batch_size", "init_kl_coef")


@dataclass
class RunSettings:
    """What is trained on what; PPOConfig says how."""

    # Run
    model: str  # a folder with a model and its tokenizer, or their name on the hub
    prompts: str  # FILE.jsonl: on each line a text, or an object with a text as "prompt"
    reward: str  # MODULE:FUNCTION; modules in the current folder come first
    max_new_tokens: int = 64  # most tokens of a response
    save_every: int = 20  # steps from one checkpoint to the next

    def __post_init__(self) -> None:
        for name in ("model", "prompts", "reward"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise TypeError(f"{name} must be a text, got {value!r}")
        for name in ("max_new_tokens", "save_every"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")


# What other trainers call it -> what it is called here.
RENAMED = {
    "forward_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "mini_batch_size (one optimizer step) and micro_batch_size",
    "num_mini_batches": "mini_batch_size",
    "num_ppo_epochs": "ppo_epochs",
    "kl_coef": "init_kl_coef, with adap_kl_ctrl=False",
    "kl_estimator": "kl_penalty",
    "clip_ratio_low": "cliprange",
    "clip_ratio_high": "cliprange_high",
    "clip_ratio_c": "dual_clip",
    "lambd": "lam",
    "gae_lambda": "lam",
    "eps_clip": "cliprange",
    "clip_range": "cliprange",
}
# Fields for data that the command line has no way to give.
PYTHON_ONLY = ("ptx_coef", "rollout_is_cap")
FIELDS = {
    field.name: field
    for cls in (RunSettings, PPOConfig)
    for field in dataclasses.fields(cls)
    if field.name not in PYTHON_ONLY
}


def explanations(cls: type) -> dict[str, tuple[str, str]]:
    """(heading of its group, comment beside it) of every field, from the source of a dataclass."""
    heading, found = "", {}
    for line in inspect.getsource(cls).splitlines():
        if match := re.fullmatch(r"    # (.+)", line):
            heading = match[1]
        elif (match := re.fullmatch(r"    (\w+): .*?(?:  # (.+))?", line)) and match[1] in FIELDS:
            found[match[1]] = heading, match[2] or ""
    return found


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field; a flag that is not given is None."""
    groups: dict[str, Any] = {}
    for name, (heading, text) in (explanations(RunSettings) | explanations(PPOConfig)).items():
        field = FIELDS[name]
        options: dict[str, Any] = {"dest": name, "default": None}
        if field.default is not dataclasses.MISSING:
            text = f"{text} [{field.default}]".lstrip()
        if field.type is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif name in CHOICES:
            options["choices"] = CHOICES[name]
        else:
            options["metavar"] = {int: "N", float: "X"}.get(_kinds(field)[0], name.upper())
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        groups[heading].add_argument(flag(name), help=text.replace("%", "%%"), **options)


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def hint(name: str) -> str:
    """What a field, or flag, that does not exist might be here."""
    shown = flag if name.startswith("-") else str
    name = name.lstrip("-").replace("-", "_")
    if name in PYTHON_ONLY:
        return "; it is for PPOTrainer in Python"
    if name in RENAMED:
        return f"; here it is {RENAMED[name]}"
    close = difflib.get_close_matches(name, FIELDS, 1)
    return f"; did you mean {shown(close[0])}?" if close else ""


def settings(*layers: tuple[str, dict[str, Any]]) -> tuple[RunSettings, PPOConfig]:
    """From (where they are from, fields); later ones win. UserError names the field and its origin.

    Flags are from "".
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for source, fields in layers:
        for name, value in fields.items():
            if name not in FIELDS:
                raise UserError(f"{source}: there is no field {name!r}{hint(str(name))}")
            origin[name] = source or flag(name)
            values[name] = convert(FIELDS[name], value, origin[name])
    missing = [n for n in ("model", "prompts", "reward", "steps") if values.get(n) is None]
    if missing:
        flags = ", ".join(map(flag, missing))
        raise UserError(f"{flags} must be given, or {', '.join(missing)} in the file of --config")
    try:
        made = [
            cls(**{f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values})
            for cls in (RunSettings, PPOConfig)
        ]
    except (TypeError, ValueError) as error:
        named = [word for word in re.findall(r"\w+", str(error)) if word in origin]
        raise UserError(f"{origin[named[0]] if named else 'config'}: {error}") from None
    return made[0], made[1]


def convert(field: dataclasses.Field, value: Any, source: str) -> Any:
    """A text as the type of the field; YAML 1.1 reads 1e-5 as a text, flags are all texts."""
    kinds = _kinds(field)
    if not isinstance(value, str) or str in kinds:
        return value
    if type(None) in kinds and value.lower() in ("none", "null"):
        return None
    try:
        return kinds[0](value) if kinds[0] is not bool else value
    except ValueError:
        what = "an integer" if kinds[0] is int else "a number"
        raise UserError(f"{source}: {field.name} must be {what}, got {value!r}") from None


def _kinds(field: dataclasses.Field) -> tuple[Any, ...]:
    """The types of a field, None last."""
    return typing.get_args(field.type) or (field.type,)


def changes(
    before: tuple[RunSettings, PPOConfig], after: tuple[RunSettings, PPOConfig]
) -> list[str]:
    """`name old -> new` of what a resumed run does differently; UserError if it cannot."""
    old, new = (dataclasses.asdict(run) | dataclasses.asdict(ppo) for run, ppo in (before, after))
    changed = [name for name in new if old[name] != new[name]]
    for name in changed:
        if name in FIXED:
            raise UserError(
                f"{flag(name)}: {name} cannot change when a run is resumed: it is {old[name]}, "
                f"got {new[name]}"
            )
    return [f"{name} {old[name]} -> {new[name]}" for name in changed]
