"""The adapters against numbers recorded from the projects whose names they carry.

tests/data/integrations.npz: verl 0.9.1, TRL 1.9.2, OpenRLHF 0.11.2 and torchrl 0.14.1, run once
on the CPU; inputs `in.*`, what the project returned `out.*`.
"""

from pathlib import Path

import numpy as np
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


def test_verl() -> None:
    logits, labels = load("verl_logits.in.logits"), load("verl_logits.in.target")
    close(verl.logprobs_from_logits(logits, labels), load("verl_logits.out.logp"))
    close(verl.entropy_from_logits(logits), load("verl_logits.out.entropy"))
    mask = load("verl_gae.in.mask")
    advantages, returns = verl.compute_gae_advantage_return(
        load("verl_gae.in.rewards"), load("verl_gae.in.values"), mask, 1.0, 0.95
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
