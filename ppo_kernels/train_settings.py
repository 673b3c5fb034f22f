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


# What it is called here: what TRL, transformers, OpenRLHF, verl and others call it.
RENAMED = {
    "{model}": "model_name_or_path model_name model_path sft_model_path pretrain",
    "{prompts}": "dataset dataset_name train_files prompt_data",
    "{reward}, a function that may ask a reward model": "reward_model reward_model_path "
    "reward_pretrain reward_fn reward_funcs reward_function remote_rm_url",
    "nothing: the reference is the model as it starts": "ref_model ref_model_path reference_model "
    "ref_pretrain",
    "{max_new_tokens}, of the response alone": "max_length response_length max_response_length "
    "max_completion_length generate_max_len max_tokens",
    "{save_every}": "save_steps save_freq save_interval",
    "{out}": "output_dir output save_path ckpt_path default_local_dir",
    "{resume}": "resume_from_checkpoint load_checkpoint",
    "{steps}, of {batch_size} responses each": "total_episodes num_episodes total_epochs "
    "num_train_epochs",
    "{steps}": "max_steps total_steps total_training_steps",
    "{batch_size}": "rollout_batch_size",
    "{batch_size} (one step) or {mini_batch_size} (one optimizer step)": "train_batch_size",
    "{mini_batch_size}": "num_mini_batches num_minibatches ppo_mini_batch_size minibatch_size",
    "{micro_batch_size}": "forward_batch_size per_device_train_batch_size micro_train_batch_size "
    "micro_rollout_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu",
    "{mini_batch_size} (one optimizer step) and {micro_batch_size}": "gradient_accumulation_steps",
    "{ppo_epochs}": "num_ppo_epochs update_epochs",
    "{learning_rate}": "lr actor_lr actor_learning_rate",
    "{value_learning_rate}": "critic_lr critic_learning_rate",
    "{critic_warmup_steps}": "critic_warmup",
    "{max_grad_norm}": "grad_clip clip_grad max_norm clip_grad_norm",
    "{init_kl_coef}, which {adap_kl_ctrl} steers": "kl_coef beta kl_beta",
    "{adap_kl_ctrl}": "adaptive_kl use_adaptive_kl",
    "{target}": "kl_target",
    "{horizon}": "kl_horizon",
    "{kl_penalty}": "kl_estimator",
    "{kl_loss_coef}": "use_kl_loss",
    "{score_clip}": "reward_clip reward_clip_range cliprange_reward",
    "{gamma}": "gae_gamma discount discount_factor",
    "{lam}": "gae_lambda lambda lambd lmbda",
    "{whiten_advantages}": "normalize_advantage normalize_advantages",
    "{cliprange}": "clip_range clip_ratio clip_eps clip_coef eps_clip epsilon clip_ratio_low "
    "cliprange_low",
    "{cliprange_high}": "clip_ratio_high epsilon_high eps_clip_high",
    "{cliprange} and {cliprange_high}": "eps_clip_low_high",
    "{dual_clip}": "clip_ratio_c",
    "{cliprange_value}": "value_clip cliprange_vf clip_range_vf clip_range_value vf_clip",
    "{vf_coef}": "value_loss_coef value_coef",
    "{ent_coef}": "entropy_coef entropy_coeff entropy_loss_coef",
}
# Fields for data that the command line has no way to give.
PYTHON_ONLY = ("ptx_coef", "rollout_is_cap")
# Flags that are not fields.
NO_FIELDS = ("out", "resume", "config")
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
    """What a field, or flag, that does not exist is here; "" if that is not known."""
    shown = flag if name.startswith("-") else str
    name = name.partition("=")[0].lstrip("-").replace("-", "_")
    if name in PYTHON_ONLY:
        return "; it is for PPOTrainer in Python"
    for text, others in RENAMED.items():
        if name in others.split():
            known = {field: shown(field) for field in FIELDS} | {n: flag(n) for n in NO_FIELDS}
            return f"; here it is {text.format_map(known)}"
    # Letters that are wrong or missing, no more: a name that is merely similar means another thing.
    close = difflib.get_close_matches(name, (*FIELDS, *NO_FIELDS), 1, cutoff=0.88)
    return f"; did you mean {shown(close[0])}?" if close else ""


def settings(
    *layers: tuple[str, dict[str, Any]], resumed: PPOConfig | None = None
) -> tuple[RunSettings, PPOConfig]:
    """From (where they are from, fields); later ones win. UserError names the field and its origin.

    Flags are from "". resumed: of a run whose FIXED fields must stay.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for source, fields in layers:
        for name, value in fields.items():
            if name not in FIELDS:
                raise UserError(f"{source}: there is no field {name!r}{hint(str(name))}")
            origin[name] = source or flag(name)
            values[name] = convert(FIELDS[name], value, origin[name])
    for name in FIXED:
        if resumed is not None and values.get(name, was := getattr(resumed, name)) != was:
            raise UserError(
                f"{origin[name]}: {name} cannot change when a run is resumed: it is {was}, "
                f"got {values[name]}"
            )
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
    """`name old -> new` of what a resumed run does differently."""
    old, new = (dataclasses.asdict(run) | dataclasses.asdict(ppo) for run, ppo in (before, after))
    return [f"{name} {old[name]} -> {new[name]}" for name in new if old[name] != new[name]]
