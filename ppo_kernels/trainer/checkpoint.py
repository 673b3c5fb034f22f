"""The state of a run as one file: whole or not there, of this run or refused, random states too."""

import math
import os
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

# Settings that live on in the optimizer and the KL controller, not in the config.
LIVE = ("learning_rate", "value_learning_rate", "init_kl_coef", "adap_kl_ctrl")


def write(state: dict[str, Any], path: Path) -> None:
    """torch.save, but what was at `path` stays until the new file is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: Path) -> dict[str, Any]:
    """What `write` wrote, on the CPU; nothing in the file is executed."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError):  # torch's text advises to execute it
        raise ValueError(f"{path} is not a checkpoint: torch.load cannot read it safely") from None


def check(state: dict[str, Any], own: dict[str, Any]) -> None:
    """ValueError that says why, if `state` is not of a run whose state is `own` now."""
    names = state.keys() if isinstance(state, dict) else set()
    if names != own.keys():
        wrong = sorted(map(str, names ^ own.keys()))
        wrong = ", ".join(wrong[:4]) + ", .." * (len(wrong) > 4)
        raise ValueError(f"this is no state of PPOTrainer: {wrong} missing or unknown")
    theirs, ours = ({n: tuple(p.shape) for n, p in s["model"].items()} for s in (state, own))
    if theirs != ours:
        wrong = sorted({name for name, _ in theirs.items() ^ ours.items()})
        raise ValueError(f"the state is of another model: {', '.join(wrong[:4])} differ")
    theirs, ours = len(state["random"]), len(own["random"])
    if theirs != ours:
        raise ValueError(f"the state is of {theirs} ranks, this run has {ours}")
    if not math.isclose(state["frozen"], own["frozen"], rel_tol=1e-6):
        remedy = "make the trainer from the same original models, then load"
        raise ValueError(f"ref_model or frozen weights are not those of the saved run: {remedy}")
    if (state["lr_scheduler"] is None) != (own["lr_scheduler"] is None):
        raise ValueError("lr_scheduler must be given exactly if the saved run had one")
    for name in LIVE:
        was, now = state["config"][name], own["config"][name]
        if was != now:
            said = f"the saved run had {name}={was}, this trainer {now}: the saved state goes on"
            warnings.warn(said, stacklevel=5)
    was, now = ({**s["config"], **dict.fromkeys(LIVE, None), "steps": None} for s in (state, own))
    if changed := [n for n in now if was.get(n) != now[n]]:
        was, now = (", ".join(f"{n}={c.get(n)}" for n in changed) for c in (was, now))
        warnings.warn(f"the saved run had {was}: this trainer goes on with {now}", stacklevel=5)


def frozen_sum(model: nn.Module, ref_model: nn.Module | None) -> float:
    """sum |w| over the weights that no checkpoint holds: a run may not go on with others."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    frozen += [] if ref_model is None else list(ref_model.parameters())
    return sum(float(p.detach().abs().sum(dtype=torch.float64)) for p in frozen)


def random_state(own: torch.Generator, device: torch.device) -> dict[str, Any]:
    """Every random state that can matter, in types that torch.load takes with weights_only."""
    name, keys, *rest = np.random.get_state()
    return {
        "generator": own.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": (name, keys.tolist(), *rest),
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any], own: torch.Generator, device: torch.device) -> None:
    own.set_state(state["generator"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
