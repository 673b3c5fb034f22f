"""kl_penalty and compute_rewards: values, gradients, placement, other projects' numbers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tolerances import FP32, FP64, ORACLE
from torch import Tensor

import ppo_kernels as pk

DATA = Path(__file__).parent / "data"
CASES = json.loads((DATA / "gae.json").read_text())
ARRAYS = np.load(DATA / "gae.npz")
KINDS = ("k1", "k2", "k3", "abs", "k1+", "k3+")


def cases(*kinds: str) -> pytest.MarkDecorator:
    chosen = [pytest.param(c, id=c["id"]) for c in CASES if c["kind"] in kinds]
    return pytest.mark.parametrize("case", chosen)


def array(case: dict, name: str) -> Tensor:
    return torch.from_numpy(ARRAYS[f"{case['id']}/{name}"])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str) -> None:
    """The estimators' own, and that of k2 for the straight-through kinds."""
    logp = torch.randn(50, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(50, dtype=torch.float64)
    d = (logp - ref).detach()
    want = {"k1": torch.ones(50).double(), "k2": d, "k3": 1 - torch.exp(-d), "abs": d.sign()}
    pk.kl_penalty(logp, ref, kind).sum().backward()
    torch.testing.assert_close(logp.grad, want.get(kind, d), **FP64)
    plain = pk.kl_penalty(logp, ref, kind.rstrip("+"))
    torch.testing.assert_close(pk.kl_penalty(logp, ref, kind), plain, **FP64)


def test_k3_is_never_negative_and_never_infinite() -> None:
    d = torch.tensor([0.0, 1e-6, -1e-6, 100.0, -100.0])
    k3 = pk.kl_penalty(d, torch.zeros(5), "k3")
    assert (k3 >= 0).all() and k3.isfinite().all()


@cases("kl")
def test_kl_of_verl_openrlhf_trl(case: dict) -> None:
    logp, ref = array(case, "in.logp").requires_grad_(), array(case, "in.ref")
    kind = case["params"]["kind"]
    if case["params"]["straight"] and kind != "k2":
        kind += "+"
    kl = pk.kl_penalty(logp, ref, kind)
    torch.testing.assert_close(kl.double(), array(case, "want.kl").double(), **ORACLE)
    kl.sum().backward()
    grad = array(case, "want.grad_logp").double()
    torch.testing.assert_close(logp.grad.double(), grad, **ORACLE)


@cases("token_rewards")
def test_rewards_of_openrlhf(case: dict) -> None:
    """Theirs takes the KL itself; as k1 of (kl, 0) it is the same call."""
    kl, mask = array(case, "in.kl"), array(case, "in.mask") != 0
    coef = case["params"]["coef"]
    out = pk.compute_rewards(array(case, "in.score"), kl, torch.zeros_like(kl), mask, kl_coef=coef)
    torch.testing.assert_close(out[mask], array(case, "want.rewards")[mask], **ORACLE)
    assert (out[~mask] == 0).all()


@cases("token_rewards_dense")
def test_dense_rewards_of_verl(case: dict) -> None:
    logp = array(case, "in.logp")
    out = pk.compute_rewards(
        torch.zeros(len(logp)),
        logp,
        array(case, "in.ref"),
        torch.ones(logp.shape, dtype=torch.bool),
        kl_coef=case["params"]["coef"],
        token_rewards=array(case, "in.dense"),
    )
    torch.testing.assert_close(out, array(case, "want.rewards"), **ORACLE)


@pytest.mark.parametrize("placement", ["token", "terminal_mean"])
def test_placement(placement: str) -> None:
    logp, ref = torch.randn(2, 3, 6)
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()
    scores = torch.tensor([1.0, 2.0, 3.0])
    out = pk.compute_rewards(scores, logp, ref, mask, kl_coef=0.1, kl_placement=placement)
    kl = torch.where(mask, logp - ref, 0.0)
    want = -0.1 * kl if placement == "token" else torch.zeros(3, 6)
    for row, last in ((0, 4), (1, 5)):
        mean = kl[row].sum() / mask[row].sum()
        want[row, last] += scores[row] - (0.1 * mean if placement == "terminal_mean" else 0.0)
    torch.testing.assert_close(out, want, **FP32)
    assert (out[2] == 0).all(), "a row without an action drops its score"


@pytest.mark.parametrize("placement", ["token", "terminal_mean"])
def test_masked_slots_are_never_read(placement: str) -> None:
    logp, ref, extra = torch.randn(3, 4, 9)
    mask, scores = torch.rand(4, 9) < 0.5, torch.randn(4)
    options = {"kl_coef": 0.1, "kl_placement": placement}
    want = pk.compute_rewards(scores, logp, ref, mask, token_rewards=extra, **options)
    logp, ref, extra = (torch.where(mask, x, torch.nan) for x in (logp, ref, extra))
    got = pk.compute_rewards(scores, logp, ref, mask, token_rewards=extra, **options)
    assert torch.equal(got, want)


def test_fused_into_gae() -> None:
    logp, ref, values = torch.randn(3, 4, 9)
    mask, scores = torch.rand(4, 9) < 0.7, torch.randn(4)
    rewards = pk.compute_rewards(scores, logp, ref, mask, kl_coef=0.1, kl_penalty="k3")
    apart = pk.gae(rewards, values, mask)
    fused = pk.gae(
        None, values, mask, scores=scores, logprobs=logp, ref_logprobs=ref, kl_coef=0.1,
        kl_penalty="k3",
    )  # fmt: skip
    torch.testing.assert_close(fused.advantages, apart.advantages, **FP32)


V = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("error", "name", "call"),
    [
        (ValueError, "scores", {"scores": torch.zeros(3)}),
        (ValueError, "logprobs", {"logprobs": torch.zeros(3)}),
        (ValueError, "ref_logprobs", {"ref_logprobs": torch.zeros(2, 4)}),
        (ValueError, "mask", {"mask": torch.ones(2).bool()}),
        (ValueError, "kl_penalty", {"kl_penalty": "k9"}),
        (ValueError, "kl_placement", {"kl_placement": "end"}),
        (ValueError, "token_rewards", {"token_rewards": torch.zeros(3, 3)}),
        (TypeError, "kl_coef", {"kl_coef": "0.1"}),
        (ValueError, "kl_coef", {"kl_coef": torch.ones(2)}),
        (ValueError, "kl_coef", {"kl_coef": 10**400}),
        (ValueError, "kl_coef", {"kl_coef": 1e39}),
        (TypeError, "mask", {"mask": torch.ones(2, 3, dtype=torch.complex64)}),
    ],
)
def test_bad_input(error: type, name: str, call: dict) -> None:
    given = {"scores": torch.zeros(2), "logprobs": V, "ref_logprobs": V, "mask": V == 0}
    with pytest.raises(error, match=f"^{name} "):
        pk.compute_rewards(**given | {"kl_coef": 0.1} | call)
