"""What gae means, independent of who computes it: identities, other projects' numbers, errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gae_cases import expected, random_call
from tolerances import FP64, ORACLE, ORACLE_FP64
from torch import Tensor

import ppo_kernels as pk

DATA = Path(__file__).parent / "data"
CASES = json.loads((DATA / "gae.json").read_text())
ARRAYS = np.load(DATA / "gae.npz")
DOUBLE = {"dtype": torch.float64}


def close(got: Tensor, want: Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(got.double(), want.double(), **(tolerance or FP64))


# ------------------------------------------------------------------------------------- identities


def test_sum_of_deltas() -> None:
    """A_t = sum_k (gamma lam)^k delta_{t+k}, all pairs (t, k) written out."""
    T, gamma, lam = 24, 0.97, 0.9
    r, v, boot = torch.randn(T, **DOUBLE), torch.randn(T, **DOUBLE), torch.randn(1, **DOUBLE)
    delta = r + gamma * torch.cat([v[1:], boot]) - v
    want = torch.stack(
        [sum((gamma * lam) ** k * delta[t + k] for k in range(T - t)) for t in range(T)]
    )
    out = pk.gae(r[None], v[None], gamma=gamma, lam=lam, bootstrap=boot)
    close(out.advantages[0], want)
    close(out.returns[0], want + v)


def test_lambda_one_is_monte_carlo() -> None:
    r, v = torch.randn(2, 3, 50, **DOUBLE)
    out = pk.gae(r, v, gamma=1.0, lam=1.0)
    reward_to_go = r.flip(-1).cumsum(-1).flip(-1)
    close(out.advantages, reward_to_go - v)
    close(out.returns, reward_to_go)


def test_lambda_zero_is_the_td_residual() -> None:
    r, v = torch.randn(2, 3, 50, **DOUBLE)
    out = pk.gae(r, v, gamma=0.9, lam=0.0)
    after = torch.nn.functional.pad(v[:, 1:], (0, 1))
    close(out.advantages, r + 0.9 * after - v)


def test_a_perfect_critic_has_no_advantage() -> None:
    """V constant and r = (1 - gamma) V, bootstrapped with V."""
    gamma, v = 0.9, torch.full((2, 40), 3.0, **DOUBLE)
    out = pk.gae((1 - gamma) * v, v, gamma=gamma, lam=0.7, bootstrap=v[:, 0])
    close(out.advantages, torch.zeros_like(v))


@pytest.mark.parametrize("gap", [1, 5, 31, 32, 33, 255, 256, 257])
def test_masked_tokens_are_no_transitions(gap: int) -> None:
    """The rows with holes are the scan of the rows without, scattered back."""
    keep = torch.ones(40 + gap, dtype=torch.bool)
    keep[20 : 20 + gap] = False
    v, r = torch.randn(2, 1, 40 + gap, **DOUBLE)
    score = torch.randn(1, **DOUBLE)
    out = pk.gae(r, v, keep[None], lam=0.8, gamma=0.99, scores=score)
    alone = pk.gae(r[:, keep], v[:, keep], lam=0.8, gamma=0.99, scores=score)
    assert torch.equal(out.advantages[:, keep], alone.advantages)
    assert torch.equal(out.returns[:, keep], alone.returns)


def test_an_episode_end_splits_the_row() -> None:
    """Two episodes in one row are two rows."""
    r, v = torch.randn(2, 1, 30, **DOUBLE)
    ends = torch.arange(30).eq(11)[None]
    out = pk.gae(r, v, gamma=0.98, lam=0.9, terminated=ends)
    left = pk.gae(r[:, :12], v[:, :12], gamma=0.98, lam=0.9)
    right = pk.gae(r[:, 12:], v[:, 12:], gamma=0.98, lam=0.9)
    close(out.advantages, torch.cat([left.advantages, right.advantages], 1))


def test_truncated_in_the_row_is_truncated_at_its_end() -> None:
    r, v = torch.randn(2, 1, 30, **DOUBLE)
    after = torch.randn(1, 30, **DOUBLE)
    ends = torch.zeros(1, 30, dtype=torch.bool)
    ends[0, -1] = True
    out = pk.gae(r, v, gamma=0.98, truncated=ends, bootstrap=after)
    close(out.advantages, pk.gae(r, v, gamma=0.98, bootstrap=after[:, -1]).advantages)


def test_reference_in_fp64_is_the_delta_form() -> None:
    from ppo_kernels import reference

    for seed in range(20):
        call = random_call(
            seed, (3, 20), torch.float64, logprobs=None, ref_logprobs=None, kl_coef=0.0
        )
        names = ("mask", "scores", "bootstrap", "terminated", "truncated", "gamma", "lam")
        given = {k: call.get(k) for k in names}
        given["mask"] = torch.ones(3, 20).bool() if given["mask"] is None else given["mask"]
        out = reference.gae(
            call["rewards"], call["values"], lam_returns=call["lam_returns"], **given
        )
        advantages, returns = expected(call)
        close(out.advantages, advantages)
        close(out.returns, returns)


# --------------------------------------------------------------------------- recorded from others


def cases(*kinds: str) -> Any:
    return pytest.mark.parametrize(
        "case", [pytest.param(c, id=c["id"]) for c in CASES if c["kind"] in kinds]
    )


def array(case: dict, name: str) -> Tensor:
    return torch.from_numpy(ARRAYS[f"{case['id']}/{name}"])


def options(case: dict) -> dict[str, float]:
    return {k: case["params"][k] for k in ("gamma", "lam")}


@cases("gae_carry", "gae_zero")
def test_verl_openrlhf_trl(case: dict) -> None:
    """verl carries over masked tokens, as here. OpenRLHF and TRL 0.11 take them for transitions;
    for rows with holes the recorded number is the right one, not theirs."""
    mask = array(case, "in.mask") != 0
    rewards, values = array(case, "in.rewards"), array(case, "in.values")
    if case["params"].get("whiten_rewards"):
        rewards = pk.masked_whiten(rewards, mask, shift_mean=False)
    out = pk.gae(rewards, values, mask, **options(case))
    tolerance = ORACLE_FP64 if values.dtype == torch.float64 else ORACLE
    close(out.returns[mask], array(case, "want.returns")[mask], **tolerance)
    advantages = out.advantages
    if f"{case['id']}/want.advantages_raw" in ARRAYS:
        close(advantages[mask], array(case, "want.advantages_raw")[mask], **tolerance)
    if "whiten" in case["params"]:
        advantages = pk.masked_whiten(advantages, mask, stats=out.stats)
    close(advantages[mask], array(case, "want.advantages")[mask], **tolerance)


@cases("gae_done")
def test_torchrl(case: dict) -> None:
    """torchrl hands over V of the next state of each transition. Where it is not values[t+1], the
    difference moves into the reward; where the episode is cut off it is the bootstrap."""
    done, terminated = array(case, "in.done").bool(), array(case, "in.terminated").bool()
    after, values = array(case, "in.next_values"), array(case, "in.values")
    cut = done & ~terminated
    cut[:, -1] |= ~terminated[:, -1]
    gamma = case["params"]["gamma"]
    next_value = torch.nn.functional.pad(values[:, 1:], (0, 1))
    difference = torch.where(cut | terminated, 0.0, gamma * (after - next_value))
    out = pk.gae(
        array(case, "in.rewards") + difference,
        values,
        truncated=cut,
        terminated=terminated,
        bootstrap=after,
        **options(case),
    )
    close(out.advantages, array(case, "want.advantages"), **ORACLE)
    close(out.returns, array(case, "want.returns"), **ORACLE)


# ------------------------------------------------------------------------------------------ errors

V = torch.zeros(2, 3)
CU = torch.tensor([0, 2, 6], dtype=torch.int32)
N = torch.zeros(6)


def test_terminated_wins_over_truncated() -> None:
    """Gymnasium's last step of an episode that ends in its time limit carries both flags."""
    both = torch.ones(1, 1, dtype=torch.bool)
    zero = torch.zeros(1, 1)
    out = pk.gae(zero, zero, terminated=both, truncated=both, bootstrap=zero + 7)
    assert out.advantages.item() == 0


BAD = [
    (TypeError, "values", {"values": [[1.0]]}),
    (TypeError, "values", {"values": V.long()}),
    (ValueError, "values", {"values": torch.zeros(3)}),
    (ValueError, "values", {"cu_seqlens": CU}),
    (ValueError, "rewards", {"rewards": torch.zeros(2, 4)}),
    (TypeError, "rewards", {"rewards": V.long()}),
    (ValueError, "mask", {"mask": torch.ones(2, 4).bool()}),
    (ValueError, "scores", {"scores": torch.zeros(3)}),
    (TypeError, "scores", {"scores": torch.zeros(2).long()}),
    (ValueError, "bootstrap", {"bootstrap": torch.zeros(3)}),
    (ValueError, "truncated", {"truncated": V.bool()}),
    (ValueError, "bootstrap", {"truncated": V.bool(), "bootstrap": torch.zeros(2)}),
    (ValueError, "logprobs and ref_logprobs", {"logprobs": V}),
    (ValueError, "ref_logprobs", {"logprobs": V, "ref_logprobs": torch.zeros(2, 2)}),
    (ValueError, "terminated", {"terminated": torch.zeros(3, 2).bool()}),
    (ValueError, "gamma", {"gamma": 1.5}),
    (ValueError, "gamma", {"gamma": float("nan")}),
    (TypeError, "gamma", {"gamma": "1"}),
    (ValueError, "lam", {"lam": -0.1}),
    (ValueError, "lam_returns", {"lam_returns": 2.0}),
    (TypeError, "kl_coef", {"kl_coef": "0.1"}),
    (ValueError, "logprobs and ref_logprobs need", {"logprobs": V, "ref_logprobs": V}),
    (ValueError, "kl_coef=0.1 needs", {"kl_coef": 0.1}),
    (ValueError, "kl_penalty", {"kl_penalty": "k4"}),
    (ValueError, "kl_penalty", {"kl_penalty": "k3+"}),
    (ValueError, "cu_seqlens", {"values": N, "cu_seqlens": torch.tensor([0, 2, 5])}),
    (ValueError, "cu_seqlens", {"values": N, "cu_seqlens": torch.tensor([1, 2, 6])}),
    (ValueError, "cu_seqlens", {"values": N, "cu_seqlens": torch.tensor([0, 4, 2, 6])}),
    (TypeError, "cu_seqlens", {"values": N, "cu_seqlens": torch.tensor([0.0, 6.0])}),
    (ValueError, "cu_seqlens", {"values": N, "cu_seqlens": torch.tensor([[0, 6]])}),
    (ValueError, "scores", {"values": N, "cu_seqlens": CU, "scores": torch.zeros(3)}),
]


@pytest.mark.parametrize(("error", "name", "call"), BAD)
def test_bad_input(error: type, name: str, call: dict[str, Any]) -> None:
    call = {"values": V} | call
    with pytest.raises(error, match=f"^{name} "):
        pk.gae(call.pop("rewards", None), **call)


def test_a_coefficient_that_has_come_to_0_is_no_penalty() -> None:
    plain, none = pk.gae(V, V), pk.gae(V, V, logprobs=V, ref_logprobs=V + 1, kl_coef=0.0)
    assert torch.equal(plain.advantages, none.advantages)


def test_wrong_offsets_behind_the_public_function() -> None:
    """A compiled graph skips the Python checks; the C++ kernel still refuses."""
    args = [None, N, *[None] * 7, torch.tensor([0, 9, 6]), 1.0, 0.95, 0.95, 0.0, 0]
    with pytest.raises(RuntimeError, match="cu_seqlens"):
        torch.ops.ppo_kernels.gae(*args)


# --------------------------------------------------------------------------------------- machinery


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_opcheck(layout: str) -> None:
    call = random_call(3, (4, 9), mask=torch.rand(4, 9) < 0.7, lam_returns=1.0)
    names = ("rewards", "values", "mask", "scores", "bootstrap", "logprobs", "ref_logprobs")
    tensors = [call.get(name) for name in (*names, "terminated", "truncated")]
    cu = None
    if layout == "packed":
        tensors = [x.flatten() if x is not None and x.dim() == 2 else x for x in tensors]
        cu = torch.tensor([0, 9, 9, 20, 36], dtype=torch.int32)
    else:  # a dense permuted view shows a fake whose strides are not the kernel's
        tensors[1] = tensors[1].t().contiguous().t()
    args = (*tensors, cu, 0.99, 0.95, 1.0, 0.1, 2)
    torch.library.opcheck(torch.ops.ppo_kernels.gae.default, args)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_graph_breaks(dynamic: bool) -> None:
    def advantages(rewards: Tensor, values: Tensor, mask: Tensor, cu: Tensor) -> list[Tensor]:
        out = pk.gae(rewards, values, mask, gamma=0.99, lam_returns=1.0)
        flat = pk.gae(rewards.flatten(), values.flatten(), cu_seqlens=cu)
        white = pk.masked_whiten(out.advantages, mask, stats=out.stats)
        return [*out, *flat, white, pk.masked_whiten(values, mask, shift_mean=False)]

    compiled = torch.compile(advantages, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for B, T in ((2, 7), (3, 11)):
        rewards, values = torch.randn(2, B, T)
        mask, cu = torch.rand(B, T) < 0.7, torch.tensor([0, T, B * T], dtype=torch.int32)
        for got, want in zip(
            compiled(rewards, values, mask, cu), advantages(rewards, values, mask, cu)
        ):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_fake_tensors_say_what_the_kernel_returns() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        real = pk.gae(None, torch.randn(3, 4).to(dtype))
        with FakeTensorMode() as mode:
            fake = pk.gae(None, mode.from_tensor(torch.randn(3, 4).to(dtype)))
        for x, y in zip(real, fake):
            assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
