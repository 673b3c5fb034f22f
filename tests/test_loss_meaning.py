"""What ppo_loss means, whoever computes it: other projects' numbers, invariances, what may stand in
an input, the reference against the kernels op by op."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tolerances as tol
import torch
from backends import logprob_kernels, use
from torch import Tensor
from torch._dynamo.utils import counters

import ppo_kernels as pk
from ppo_kernels import _native, reference
from ppo_kernels.ops import loss as ops

DATA = Path(__file__).parent / "data"
CASES = {c["id"]: c for c in json.loads((DATA / "loss.json").read_text())}
ARRAYS = np.load(DATA / "loss.npz")
FP64 = torch.float64
EXACT = {"rtol": 0, "atol": 0}
PER_TOKEN = ("logprobs", "old_logprobs", "advantages", "values", "old_values", "returns")
PER_TOKEN += ("entropy", "ref_logprobs", "rollout_logprobs")
LEAVES = ("logprobs", "values", "entropy")
# Every term and factor takes part.
ALL_TERMS = {"vf_coef": 0.3, "ent_coef": 0.1, "kl_coef": 0.2}


def tokens(*shape: int, dtype: torch.dtype = FP64) -> dict[str, Tensor]:
    x = {name: torch.randn(shape, dtype=FP64) for name in PER_TOKEN}
    for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs"):
        x[name] = x["logprobs"] + 0.3 * x[name]
    return {name: t.to(dtype) for name, t in x.items()}


def run(x: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
    """(loss, stats, gradients)."""
    leaves = [x[n].detach().requires_grad_() for n in LEAVES]
    out = pk.ppo_loss(**{**x, **dict(zip(LEAVES, leaves))}, **{**ALL_TERMS, **options})
    return out.loss.detach(), out.stats.tensor, *torch.autograd.grad(out.loss, leaves)


def close(got: Any, want: Any, tolerance: dict = tol.FP64) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b.double(), **tolerance, equal_nan=True)


# -------------------------------------------------------------------------- other projects' numbers


def recorded(case: str) -> dict[str, Tensor]:
    names = [n for n in ARRAYS.files if n.startswith(f"{case}/")]
    return {n.split("/")[1]: torch.from_numpy(ARRAYS[n]) for n in names}


def reduction(params: dict[str, Any], mask: Tensor) -> dict[str, Any]:
    """Their way to add up tokens in our words.

    A peer on several ranks multiplies its loss by their number, which the mean of gradients
    takes away again. "-norm" divides the sum over tokens by a length and leaves the number of
    sequences to the batch.
    """
    ranks, kind = params.get("dp_size", 1), params["agg"]
    live = int(mask.any(-1).sum())
    if kind == "token-sum":
        return {"reduction": "sum", "normalizer": 1 / ranks}
    if kind == "token-mean":
        n = params.get("batch_num_tokens")
        return {"reduction": kind, "normalizer": n and n / ranks}
    n = params.get("global_batch_size", live) / ranks
    if kind.endswith("-norm"):
        length = params.get("loss_scale_factor", mask.shape[-1])
        return {"reduction": "seq-mean-token-sum", "normalizer": n * length or None}
    return {"reduction": kind, "normalizer": n or None}


@pytest.mark.parametrize("case", [k for k, c in CASES.items() if c["kind"] == "policy"])
def test_policy_loss_of_the_peers(case: str) -> None:
    x, params = recorded(case), CASES[case]["params"]
    mask, logp = x["in.mask"] != 0, x["in.logp"].requires_grad_()
    out = pk.ppo_loss(
        logp,
        x["in.old"],
        x["in.adv"],
        mask,
        cliprange=params["low"],
        cliprange_high=params["high"],
        dual_clip=params.get("dual"),
        rollout_logprobs=x["in.old"] - x["in.weight"].log() if "in.weight" in x else None,
        is_cap=1e6,
        **reduction(params, mask),
    )
    out.loss.backward()
    close([out.loss, logp.grad], [x["out.loss"], x["out.grad_logp"]], tol.ORACLE)
    for ours, theirs in (("clipfrac", "out.clipfrac"), ("policy_kl", "out.kl_k1")):
        if theirs in x:
            close([out.stats[ours]], [x[theirs]], tol.ORACLE)


@pytest.mark.parametrize("case", [k for k, c in CASES.items() if c["kind"].startswith("value")])
def test_value_loss_of_the_peers(case: str) -> None:
    x, params = recorded(case), CASES[case]["params"]
    values, zero = x["in.vpred"].requires_grad_(), torch.zeros_like(x["in.vpred"])
    mask = x["in.mask"] != 0 if "in.mask" in x else torch.ones_like(zero, dtype=torch.bool)
    out = pk.ppo_loss(
        zero,
        zero,
        zero,
        mask,
        values=values,
        old_values=x["in.values"],
        returns=x["in.returns"],
        cliprange_value=params.get("clip"),
        vf_coef=1.0 if params.get("half") else 2.0,  # torchrl's squares have no 1/2
        **reduction({"agg": "token-mean", **params}, mask),
    )
    out.loss.backward()
    close([out.loss, values.grad], [x["out.loss"], x["out.grad_vpred"]], tol.ORACLE)
    if "out.clipfrac" in x:
        close([out.stats.clipfrac_value], [x["out.clipfrac"]], tol.ORACLE)


@pytest.mark.parametrize("case", [k for k, c in CASES.items() if c["kind"] == "policy_logits"])
def test_torchrl_from_logits(case: str) -> None:
    x, params = recorded(case), CASES[case]["params"]
    logits = x["in.logits"].requires_grad_()
    out = pk.ppo_loss_from_logits(
        logits,
        x["in.action"],
        x["in.old"],
        x["in.adv"].view_as(x["in.old"]),
        cliprange=params["low"],
        ent_coef=params["entropy_coef"],
    )
    out.loss.backward()
    loss, grad = (x[f"out.{n}"] + x[f"out.{m}"] for n, m in THEIR_SUMS)
    close([out.loss, logits.grad], [loss, grad], tol.ORACLE)
    names = ("entropy", "policy_kl", "ratio_mean", "ratio_max")
    theirs = [x[f"out.{n}"] for n in ("entropy", "kl_k1", "ratio_mean", "ratio_max")]
    close([out.stats[n] for n in names], theirs, tol.ORACLE)


THEIR_SUMS = (("loss", "loss_entropy"), ("grad_logits", "grad_entropy_logits"))


def test_all_cases_are_used() -> None:
    kinds = {c["kind"] for c in CASES.values()}
    assert kinds == {"policy", "value", "value_torchrl", "policy_logits"} and len(CASES) == 64


# --------------------------------------------------------------------------------- invariances


def responses(lengths: list[int]) -> list[dict[str, Tensor]]:
    return [tokens(n, dtype=torch.float32) for n in lengths]


def padded(rows: list[dict[str, Tensor]], width: int, left: bool) -> tuple[dict, Tensor]:
    """Rows of NaN with the responses at one end, and the mask."""
    x = {n: torch.full((len(rows), width), float("nan")) for n in PER_TOKEN}
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        n = row["logprobs"].numel()
        where = slice(width - n, width) if left else slice(n)
        mask[i, where] = True
        for name in PER_TOKEN:
            x[name][i, where] = row[name]
    return x, mask


@pytest.mark.parametrize("reduction", reference.REDUCTIONS)
def test_padding_packing_and_order_of_rows_change_nothing(reduction: str) -> None:
    lengths = [7, 600, 0, 33, 1, 512]
    rows = responses(lengths)
    x, mask = padded(rows, 600, left=False)
    want = run(x, mask=mask, reduction=reduction)
    valid = [want[0], want[1], *(g[mask] for g in want[2:])]
    for width, left in ((600, True), (1100, True), (1100, False)):
        x, mask = padded(rows, width, left)
        got = run(x, mask=mask, reduction=reduction)
        assert all((g[~mask] == 0).all() for g in got[2:])
        close([got[0], got[1], *(g[mask] for g in got[2:])], valid, tol.REORDERED)
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    packed = {n: torch.cat([r[n] for r in rows]) for n in PER_TOKEN}
    close(run(packed, reduction=reduction, cu_seqlens=cu), valid, tol.REORDERED)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    x, mask = padded([rows[i] for i in order], 600, left=False)
    got = run(x, mask=mask, reduction=reduction)
    close(got, [want[0], want[1], *(g[order] for g in want[2:])], tol.REORDERED)


def test_cu_seqlens_may_be_a_column_of_a_table() -> None:
    cu = torch.tensor([0, 3, 7, 12], dtype=torch.int32)
    column = torch.stack([cu, cu + 2_000_000_000], -1)[:, 0]
    x, options = tokens(12), {"reduction": "seq-mean-token-mean", "vf_coef": 0.3}
    close(run(x, cu_seqlens=column, **options), run(x, cu_seqlens=cu, **options), EXACT)


@pytest.mark.parametrize("last", [2_000_000_000, 11, -1])
def test_a_compiled_graph_reads_nothing_behind_the_tokens(last: int) -> None:
    assert _native.ensure()
    x = tokens(12)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(cu: Tensor) -> Tensor:
        return pk.ppo_loss(**x, cu_seqlens=cu, reduction="seq-mean-token-sum").loss

    sound = torch.tensor([0, 3, 12], dtype=torch.int32)
    assert loss(sound).isfinite()
    with pytest.raises(RuntimeError, match="cu_seqlens must run from 0 to 12 and not decrease"):
        loss(torch.tensor([0, 3, last], dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, FP64])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 511, 513, 4095, 4097, 8200])
def test_what_lies_behind_the_last_token_is_not_read(n: int, dtype: torch.dtype) -> None:
    x = tokens(n, dtype=dtype)
    want = run({k: v.double() for k, v in x.items()})
    behind = {
        k: torch.cat([v, torch.full((600,), float("nan"), dtype=dtype)]) for k, v in x.items()
    }
    for options in ({}, {"mask": torch.ones(n + 600, dtype=torch.bool)[:n]}):
        got = run({k: v[:n] for k, v in behind.items()}, **options)
        close(got, want, tol.FP64 if dtype == FP64 else tol.FP32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP64])
@pytest.mark.parametrize("name", PER_TOKEN)
def test_each_input_of_each_dtype(name: str, dtype: torch.dtype) -> None:
    """A narrow input is the same numbers in fp32, and strides do not matter."""
    x = tokens(3, 70, dtype=torch.float32)
    mask = torch.rand(3, 70) > 0.3
    x[name] = x[name].to(dtype)
    # fp64 log-probs are computed in fp64; whatever else is fp64 is rounded to fp32 once.
    real = x["logprobs"].dtype if dtype == FP64 else torch.float32
    want = run({k: v.to(real) for k, v in x.items()}, mask=mask)
    for y in (x, {**x, name: x[name].t().contiguous().t()}):
        got = run(y, mask=mask)
        assert [t.dtype for t in got] == [real, real, *(y[n].dtype for n in LEAVES)]
        close(got, [b.to(a.dtype) for a, b in zip(got, want)], EXACT)


# -------------------------------------------------------------------- numbers at the edges


def test_small_kl_does_not_cancel() -> None:
    """k3 is d^2/2 - d^3/6 + ..: in fp32 `exp(d) - 1 - d` keeps no digit of it at d = 1e-4."""
    d = torch.tensor([[1e-4, -3e-5, 2e-3, 1e-7]])
    for sign in (1, -1):
        zero, want = (
            torch.zeros_like(d),
            (torch.expm1(sign * d.double()) - sign * d.double()).mean(),
        )
        stats = pk.ppo_loss(sign * d, zero, zero).stats
        close([stats.approx_kl], [want], tol.FP32_RELATIVE)
        out = pk.ppo_loss(zero, zero, zero, ref_logprobs=sign * d, kl_penalty="k3", kl_coef=1.0)
        close([out.stats.kl_ref], [want], tol.FP32_RELATIVE)


@pytest.mark.parametrize("dtype", [torch.float32, FP64])
@pytest.mark.parametrize("kind", reference.KL_KINDS)
def test_the_reference_policy_itself_is_no_reason_to_move(kind: str, dtype: torch.dtype) -> None:
    """Every KL is 0 there and, but for k1, whose gradient is always 1, flat: also |d|."""
    logp = torch.randn(2, 20, dtype=dtype, requires_grad=True)
    old, zero = logp.detach(), torch.zeros(2, 20, dtype=dtype)
    options = {"kl_coef": 1.0, "kl_penalty": kind, "reduction": "sum"}
    out = pk.ppo_loss(logp, old, zero, ref_logprobs=old, **options)
    out.loss.backward()
    assert out.loss == 0 and out.stats.kl_ref == 0
    assert (logp.grad == (1 if kind == "k1" else 0)).all()


@pytest.mark.parametrize("dtype", [torch.float32, FP64])
def test_dual_clip_stops_only_negative_advantages(dtype: torch.dtype) -> None:
    """Above it their loss is -A dual_clip and flat, also where cliprange_high lies above it."""
    ratio = torch.tensor([[0.5, 1.1, 1.9, 2.5, 9.0]], dtype=dtype)
    zero = torch.zeros_like(ratio)
    for A, high, stops_at in (
        (-1.0, 0.2, [0.8, 1.1, 1.9, 2, 2]),
        (1.0, 4, [0.5, 1.1, 1.9, 2.5, 5]),
    ):
        logp = ratio.log().requires_grad_()
        out = pk.ppo_loss(logp, zero, zero + A, cliprange_high=high, dual_clip=2.0, reduction="sum")
        out.loss.backward()
        bounded = torch.tensor([stops_at], dtype=FP64)
        close([out.loss], [(-A * bounded).sum()], tol.FP32)
        moves = bounded == ratio.double().round(decimals=3)
        close([logp.grad], [torch.where(moves, -A * bounded, 0)], tol.FP32)


def test_whitening_far_from_zero_and_of_nothing() -> None:
    """A mean of 30000 leaves fp32 advantages their deviation of 0.05; no tokens give A = 0."""
    x = tokens(2, 40, dtype=torch.float32)
    x["advantages"] = 3e4 + 0.05 * x["advantages"]
    A = x["advantages"].double()
    stats = torch.tensor([A.numel(), A.sum(), (A * A).sum()], dtype=FP64)
    want = run({k: v.double() for k, v in x.items()}, whiten=stats)
    close(run(x, whiten=stats), want, tol.FP32)
    for dtype in (torch.float32, FP64):
        y = {k: v.to(dtype) for k, v in x.items()}
        _, stats, d_logprobs, *_ = run(y, whiten=torch.zeros(3, dtype=FP64), kl_coef=0.0)
        assert stats[0] == 0 and (d_logprobs == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, FP64])
@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "advantages", "values", "entropy"])
def test_nan_at_a_trained_token_shows(name: str, dtype: torch.dtype) -> None:
    """In the loss, in that token's gradient and in ratio_max, in whatever lane it lies."""
    for at, dual_clip in itertools.product((0, 9, 36), (None, 1.5)):
        x = tokens(1, 37, dtype=dtype)
        x["logprobs"][0, at] = x["old_logprobs"][0, at] + 1  # beyond every bound
        clean = run(x, dual_clip=dual_clip)
        x[name][0, at] = float("nan")
        loss, stats, *grads = run(x, dual_clip=dual_clip)
        assert loss.isnan()
        if name.endswith("logprobs"):
            assert stats[reference.STAT_NAMES.index("ratio_max")].isnan()
        for leaf, g, want in zip(LEAVES, grads, clean[2:]):
            touched = name == leaf != "entropy" or (leaf == "logprobs" and name in PER_TOKEN[1:3])
            assert bool(g[0, at].isnan()) == touched
            g[0, at] = want[0, at] = 0
            close([g], [want], EXACT)


def test_ratio_max_ignores_masked_and_sees_small_ratios() -> None:
    logp = torch.tensor([[-1.0, -2.0, 5.0]])
    mask = torch.tensor([[True, True, False]])
    stats = pk.ppo_loss(logp, torch.zeros_like(logp), logp, mask).stats
    close([stats.ratio_max], [torch.tensor(-1.0, dtype=FP64).exp()], tol.FP32)


@pytest.mark.parametrize("reduction", reference.REDUCTIONS)
def test_one_token_and_none(reduction: str) -> None:
    x = tokens(2, 40, dtype=torch.float32)
    mask = torch.zeros(2, 40, dtype=torch.bool)
    for options in ({}, {"normalizer": torch.tensor(0)}):
        got = run(x, mask=mask, reduction=reduction, **options)
        assert all((g == 0).all() for g in got)
    mask[1, 33] = True
    want = run({k: v[1:, 33:34] for k, v in x.items()})
    got = run(x, mask=mask, reduction=reduction)
    close(
        [*got[:2], *(g[1, 33] for g in got[2:])],
        [*want[:2], *(g[0, 0] for g in want[2:])],
        tol.FP32,
    )


# ---------------------------------------------------------------- every combination of options


def combinations(x: dict[str, Tensor], mask: Tensor) -> Any:
    """Inputs and options: every policy, reduction, KL, mask and layout; the others in turn."""
    cu = torch.tensor([0, 5, 5, x["logprobs"].numel()], dtype=torch.int32)
    weights = torch.rand(mask.shape, dtype=FP64) * mask
    optional = (None, ("values", "old_values", "returns"), ("entropy",), ("ref_logprobs",))
    optional += (("rollout_logprobs",), PER_TOKEN[3:])
    axes = (reference.POLICY_LOSSES, reference.REDUCTIONS, reference.KL_KINDS)
    axes += ((None, mask, weights), (False, True))
    for i, (policy, reduction, kind, m, packed) in enumerate(itertools.product(*axes)):
        left_out = optional[i % len(optional)] or ()
        y = {k: None if k in left_out else v for k, v in x.items()}
        options = {
            "policy_loss": policy,
            "reduction": reduction,
            "kl_penalty": kind,
            "mask": m,
            "normalizer": (None, 7.5, torch.tensor(11))[i // 6 % 3],
            "dual_clip": (None, 1.2)[i % 2],
            "cliprange_high": (None, 0.28)[i // 2 % 2],
            "cliprange_value": (0.2, None)[i // 3 % 2],
            "whiten": (None, torch.tensor([40.0, 3.0, 50.0], dtype=FP64))[i // 5 % 2],
            "vf_coef": 0.3,
            "ent_coef": 0.1 if y["entropy"] is not None else 0.0,
            "kl_coef": 0.2 if y["ref_logprobs"] is not None else 0.0,
            "kl_old_coef": 0.7,
            "is_cap": 1.3,
        }
        if packed:
            y = {k: None if v is None else v.reshape(-1) for k, v in y.items()}
            options |= {"cu_seqlens": cu, "mask": None if m is None else m.reshape(-1)}
        yield y, options


@pytest.mark.parametrize("dtype", [torch.float32, FP64])
def test_reference_and_kernels_are_one_op(dtype: torch.dtype) -> None:
    """What runs without a compiler, gradients written out included, is what the kernels do."""
    assert _native.ensure()
    x, mask = tokens(3, 20, dtype=dtype), torch.rand(3, 20) > 0.3
    mask[2] = False
    tolerance = tol.FP64 if dtype == FP64 else tol.FP32
    for i, (y, options) in enumerate(combinations(x, mask)):
        logp, entropy = y["logprobs"], y["entropy"]
        terms = ops.loss_terms({**pk.ppo_loss.__kwdefaults__, **y, **options}, logp)
        need = (i % 4 != 0, y["values"] is not None and i % 4 != 1, entropy is not None)
        got = torch.ops.ppo_kernels.ppo_loss(logp, entropy, *terms, *need)
        close(got, ops._reference(logp, entropy, *terms, *need), tolerance)


def test_gradcheck_of_every_combination() -> None:
    x, mask = tokens(2, 5), torch.rand(2, 5) > 0.2
    for y, options in combinations(x, mask):
        if options["kl_penalty"].endswith("+"):
            continue  # its gradient is by intention not that of its value
        names = [n for n in LEAVES if y[n] is not None]

        def loss(*leaves: Tensor, names=names, y=y, options=options) -> Tensor:
            return pk.ppo_loss(**{**y, **dict(zip(names, leaves))}, **options).loss

        leaves = [y[n].detach().requires_grad_() for n in names]
        torch.autograd.gradcheck(loss, leaves, fast_mode=True)


# ------------------------------------------------------------------------------- from logits


def logits_case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, dict[str, Any]]:
    x, y = torch.randn(2, 5, 40, dtype=FP64).to(dtype), torch.randint(0, 40, (2, 5))
    options = {n: t for n, t in tokens(2, 5).items() if n not in ("logprobs", "entropy")}
    options |= {"mask": torch.rand(2, 5) > 0.3, "reduction": "seq-mean-token-mean", **ALL_TERMS}
    return x, y, options


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP64])
def test_from_logits_by_the_reference(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    x, y, options = logits_case(dtype)

    def call(in_place: bool) -> list[Tensor]:
        logits, values = x.clone().requires_grad_(), options["values"].clone().requires_grad_()
        out = pk.ppo_loss_from_logits(
            logits * 1, y, **{**options, "values": values}, inplace_backward=in_place
        )
        return [
            out.loss.detach(),
            out.stats.tensor,
            *torch.autograd.grad(out.loss, (logits, values)),
        ]

    want = call(in_place=False)
    kernels = logprob_kernels()
    kernels["ppo_loss"] = (ops._reference, None)
    kernels["ppo_loss_from_logits"] = (ops._logits_reference, None)
    kernels["ppo_loss_from_logits_"] = (ops._logits_inplace_reference, None)
    use(monkeypatch, "reference", kernels)
    tolerance = {FP64: tol.FP64, torch.float32: tol.FP32}.get(dtype, tol.BF16_OUT)
    close(call(in_place=False), want, tolerance)
    close(call(in_place=True), want, tolerance)


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP64])
def test_from_logits_over_hard_rows(dtype: torch.dtype, softcap: float | None) -> None:
    """Rows of more columns than one piece of the kernel, hard ones; gradient in place and not."""
    V = 2 * 16384 + 37
    x, y = torch.randn(7, V, dtype=FP64), torch.tensor([5, 16384, V - 1, 3, 7, V, -100])
    x[0] += torch.tensor([-500.0, 500.0, -500.0]).repeat_interleave(16384)[:V]  # one piece is all
    x[1, :16384] = -torch.inf  # a whole piece of masked vocabulary
    x[2] += torch.arange(V) / 3000  # the maximum moves on and on
    x[3, 20000] = torch.nan
    x[4, 7] = -torch.inf  # the label's own logit
    options = {n: t for n, t in tokens(7).items() if n not in ("logprobs", "entropy")}
    options |= {**ALL_TERMS, "kl_penalty": "k3", "reduction": "sum"}
    leaf = x.to(dtype).requires_grad_()
    logp, entropy = pk.logprobs_from_logits(leaf, y, softcap=softcap, return_entropy=True)
    out = pk.ppo_loss(logp, entropy=entropy, mask=y != -100, **options)
    (want,) = torch.autograd.grad(out.loss, leaf)
    for in_place in (False, True):
        call = {"softcap": softcap, "inplace_backward": in_place, **options}
        got = pk.ppo_loss_from_logits(leaf * 1, y, **call)
        (g,) = torch.autograd.grad(got.loss, leaf)
        close([got.stats.tensor], [out.stats.tensor], tol.FP64 if dtype == FP64 else tol.FP32)
        close([g], [want], tol.BF16_OUT if dtype == torch.bfloat16 else tol.FP32)
        assert g[3].isnan().all() and g[5].isnan().all() and (g[6] == 0).all()
        assert g[[0, 1, 2, 4]].isfinite().all() and (g[1, :16384] == 0).all()


def test_from_logits_with_one_high_logit_at_every_column() -> None:
    """Whichever vector and lane it falls into: the shift of the row must see it."""
    V = 135  # whole groups of the widest vectors, and a rest
    x, y = torch.randn(V, V) + 120 * torch.eye(V), (torch.arange(V) + 1) % V
    exact = x.double().requires_grad_()
    logp, entropy = reference.logprobs_and_entropy(exact, y)
    terms = {"advantages": torch.randn(V), "old_logprobs": logp.detach().float()}
    want = pk.ppo_loss(logp, entropy=entropy, ent_coef=0.1, reduction="sum", **terms)
    leaf = x.requires_grad_()
    got = pk.ppo_loss_from_logits(leaf, y, ent_coef=0.1, reduction="sum", **terms)
    gradients = [torch.autograd.grad(*each)[0] for each in ((got.loss, leaf), (want.loss, exact))]
    close(gradients[:1], gradients[1:], tol.ORACLE)


def test_opcheck_from_logits() -> None:
    x, y, options = logits_case()
    terms = ops.loss_terms({**pk.ppo_loss.__kwdefaults__, **options}, x)
    args = (x, y, None, 1.0, 1.0, 0.0, -100, *terms)
    namespace = torch.ops.ppo_kernels
    torch.library.opcheck(namespace.ppo_loss_from_logits.default, (*args, True, True))
    torch.library.opcheck(namespace.ppo_loss_from_logits.default, (*args, False, False))
    args = (x.clone(), *args[1:])
    torch.library.opcheck(namespace.ppo_loss_from_logits_.default, (*args, True))


# ----------------------------------------------------------------------------------- compile


@pytest.mark.parametrize("numbers", [[1.5, 2.5, 3.5, 4.5], [3, 4, 5, 6]])
def test_a_changing_normalizer_does_not_recompile(numbers: list[float]) -> None:
    x = {k: v for k, v in tokens(2, 8, dtype=torch.float32).items()}

    def step(x: dict[str, Tensor], normalizer: float) -> Tensor:
        return pk.ppo_loss(**x, normalizer=normalizer).loss

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for n in numbers:
        close([compiled(x, n)], [step(x, n)], tol.FP32)
    # The first number is taken for a constant, the second shows that it is none.
    assert counters["stats"]["unique_graphs"] == 2
