"""The adapters against numbers recorded from the projects whose names they carry.

tests/data/integrations.npz: verl 0.9.1, TRL 1.9.2, OpenRLHF 0.11.2 and torchrl 0.14.1, run once
on the CPU; inputs `in.*`, what the project returned `out.*`.
"""

import contextlib
import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tolerances import FP32
from torch import Tensor

from ppo_kernels.integrations import openrlhf, torchrl, trl, verl

DATA = np.load(Path(__file__).parent / "data" / "integrations.npz")


def load(name: str) -> Tensor:
    return torch.from_numpy(DATA[name])


def close(got: Tensor, want: Tensor, where: Tensor | None = None) -> None:
    if where is not None:
        got, want = got[where], want[where]
    torch.testing.assert_close(got, want.to(got.dtype), **FP32)


def test_trl() -> None:
    logits, labels = load("trl_logits.in.logits"), load("trl_logits.in.target")
    close(trl.selective_log_softmax(logits, labels), load("trl_logits.out.logp"))
    close(trl.entropy_from_logits(logits), load("trl_logits.out.entropy"))
    two = trl.selective_log_softmax(logits, torch.stack([labels, labels.flip(-1)], -1))
    close(two[..., 0], load("trl_logits.out.logp"))
    close(two[..., 1], torch.log_softmax(logits, -1).gather(-1, labels.flip(-1)[..., None])[..., 0])


def test_trl_temperature_and_row_mask() -> None:
    logits, labels = load("trl_logits.in.logits"), load("trl_logits.in.target")
    keep = torch.arange(labels.numel()).view(labels.shape) % 3 != 0
    dead = torch.where(keep.unsqueeze(-1), logits, torch.nan)
    logp, entropy = trl.selective_log_softmax_and_entropy(dead, labels, True, 0.7, keep.long())
    z = torch.log_softmax(logits / 0.7, -1)
    close(logp, torch.where(keep, z.gather(-1, labels.unsqueeze(-1)).squeeze(-1), 0.0))
    close(entropy, torch.where(keep, -(z.exp() * z).sum(-1), 0.0))
    assert torch.equal(logp, trl.selective_log_softmax(dead, labels, 0.7, keep.long()))


# Where a function lives, and its parameters in TRL 1.16, verl 0.9.1, OpenRLHF 0.11, torchrl 0.14.
SIGNATURES = [
    (
        "trl.trainer.utils",
        trl.selective_log_softmax,
        "logits, index, temperature=1.0, row_mask=None",
    ),
    (
        "trl.trainer.utils",
        trl.selective_log_softmax_and_entropy,
        "logits, index, entropy_requires_grad=True, temperature=1.0, row_mask=None",
    ),
    ("trl.trainer.utils", trl.entropy_from_logits, "logits, chunk_size=128"),
    (
        "verl.utils.torch_functional",
        verl.logprobs_from_logits,
        "logits, labels, inplace_backward=True",
    ),
    ("verl.utils.torch_functional", verl.entropy_from_logits, "logits"),
    ("verl.utils.torch_functional", verl.masked_mean, "values, mask, axis=None"),
    ("verl.utils.torch_functional", verl.masked_whiten, "values, mask, shift_mean=True"),
    (
        "verl.trainer.ppo.core_algos",
        verl.compute_gae_advantage_return,
        "token_level_rewards, values, response_mask, gamma, lam",
    ),
    (
        "openrlhf.models.utils",
        openrlhf.log_probs_from_logits,
        "logits, labels, temperature=1.0",
    ),
    (
        "torchrl.objectives.value.functional",
        torchrl.vec_generalized_advantage_estimate,
        "gamma, lmbda, state_value, next_state_value, reward, done, terminated=None, "
        "*, time_dim=-2",
    ),
]


@pytest.mark.parametrize(("home", "ours", "expected"), SIGNATURES)
def test_signatures(home: str, ours: Callable, expected: str) -> None:
    def parameters(function: Callable) -> str:
        known = inspect.signature(function).parameters.values()
        plain = [p.replace(annotation=inspect.Parameter.empty) for p in known]
        return str(inspect.Signature(plain))[1:-1]

    assert parameters(ours) == expected
    with contextlib.suppress(ImportError):  # where the project is installed, what it has today
        assert parameters(getattr(importlib.import_module(home), ours.__name__)) == expected


@pytest.mark.parametrize(
    ("ours", "homes"),
    [
        (trl, "trl.trainer.utils"),
        (verl, "verl.utils.torch_functional verl.trainer.ppo.core_algos"),
        (openrlhf, "openrlhf.models.actor openrlhf.trainer.ppo_utils.experience_maker"),
        (torchrl, "torchrl.objectives.value.advantages"),
    ],
)
def test_the_recipe_in_the_docstring_assigns_what_it_says(
    ours: types.ModuleType, homes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run as it is printed, on empty modules in the places of the project's."""
    modules: dict[str, types.ModuleType] = {}
    for home in homes.split():
        parts = home.split(".")
        for n in range(1, len(parts) + 1):
            name, parent = ".".join(parts[:n]), ".".join(parts[: n - 1])
            if name not in modules:
                modules[name] = types.ModuleType(name)
                monkeypatch.setitem(sys.modules, name, modules[name])
                if parent:
                    setattr(modules[parent], parts[n - 1], modules[name])
    holders: list[Any] = [modules[home] for home in homes.split()]
    if ours is openrlhf:
        holders[1].RemoteExperienceMaker = type("RemoteExperienceMaker", (), {})
        holders.append(holders[1].RemoteExperienceMaker)
    lines = [line[4:] for line in ours.__doc__.splitlines() if line.startswith("    ")]
    exec("\n".join(lines), {"logits": torch.zeros(1, 1, 3), "input_ids": torch.zeros(1, 1).long()})
    assigned = {
        line.split(".")[-1].split(" =")[0] for line in lines if re.match(r"\S+\.\w+ =", line)
    }
    assert assigned
    for name in assigned:
        assert any(getattr(holder, name, None) is getattr(ours, name) for holder in holders), name


def test_verl() -> None:
    logits, labels = load("verl_logits.in.logits"), load("verl_logits.in.target")
    close(verl.logprobs_from_logits(logits, labels), load("verl_logits.out.logp"))
    close(verl.entropy_from_logits(logits), load("verl_logits.out.entropy"))
    mask = load("verl_gae.in.mask")
    advantages, returns = verl.compute_gae_advantage_return(
        load("verl_gae.in.rewards"),
        load("verl_gae.in.values"),
        mask,
        torch.tensor(1.0),
        torch.tensor(0.95),
    )
    close(advantages, load("verl_gae.out.advantages"), mask != 0)
    close(returns, load("verl_gae.out.returns"), mask != 0)
    assert (advantages[mask == 0] == 0).all()


def test_openrlhf() -> None:
    logits = load("openrlhf_logits.in.logits")
    before = logits.clone()
    got = openrlhf.log_probs_from_logits(logits, load("openrlhf_logits.in.target"), 0.7)
    close(got, load("openrlhf_logits.out.logp"))
    assert torch.equal(logits, before)
    mask = load("openrlhf_gae.in.mask")
    advantages, returns = openrlhf.get_advantages_and_returns(
        load("openrlhf_gae.in.values"), load("openrlhf_gae.in.rewards"), mask, 1.0, 0.95
    )
    close(advantages, load("openrlhf_gae.out.advantages"), mask)
    close(returns, load("openrlhf_gae.out.returns"), mask)


def test_torchrl() -> None:
    names = ("values", "next_values", "rewards", "done", "terminated")
    tensors = [load(f"torchrl.in.{n}").unsqueeze(-1) for n in names]
    advantages, returns = torchrl.vec_generalized_advantage_estimate(0.999, 0.999, *tensors)
    assert advantages.shape == tensors[0].shape
    close(advantages.squeeze(-1), load("torchrl.out.advantages"))
    close(returns.squeeze(-1), load("torchrl.out.returns"))


def test_torchrl_next_values_of_another_network() -> None:
    g = torch.Generator().manual_seed(0)
    values, after, rewards = torch.randn(3, 2, 9, 1, generator=g, dtype=torch.float64)
    done, terminated = torch.rand(2, 2, 9, 1, generator=g) < 0.3
    done = done | terminated
    gamma, lam, carry = 0.9, 0.8, torch.zeros(2, 1, dtype=torch.float64)
    want = torch.zeros_like(values)
    for t in reversed(range(9)):
        delta = rewards[:, t] + gamma * after[:, t] * ~terminated[:, t] - values[:, t]
        carry = want[:, t] = delta + gamma * lam * carry * ~done[:, t]
    found = torchrl.vec_generalized_advantage_estimate(
        gamma, lam, values, after, rewards, done, terminated
    )
    close(found[0], want)
    close(found[1], want + values)
