"""The Triton kernels of ppo_loss and ppo_loss_from_logits, interpreted, or on a GPU.

The tests of test_loss.py again, and what blocks, programs and rows in place can get wrong.
"""

from collections.abc import Callable

import pytest
import test_loss
import tolerances as tol
import torch
from backends import INTERPRETED, Backend, loss_kernels, use
from torch import Tensor

import ppo_kernels as pk
from ppo_kernels import reference
from ppo_kernels.kernels import loss as kernels
from ppo_kernels.ops import _library
from ppo_kernels.ops.loss import loss_terms

INF, NAN = float("inf"), float("nan")
FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
EXACT = {"rtol": 0, "atol": 0}


def on_gpu(test: Callable) -> Callable:
    """Among the tests of bench/gpu.sh, too, whose time is short: there every option is compiled."""
    return test if INTERPRETED else pytest.mark.gpu(test)


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    backend = use(monkeypatch, "triton", loss_kernels())
    with torch.device(backend.device):
        yield backend


# --------------------------------------------------------------------------------- ppo_loss


@on_gpu
@pytest.mark.parametrize("policy", reference.POLICY_LOSSES)
def test_options(policy: str) -> None:
    # The steps have no factor in common with the numbers of choices.
    first = reference.POLICY_LOSSES.index(policy)
    test_loss.check_options(policy, FP32, slice(first, None, 5 if INTERPRETED else 25))


@on_gpu
def test_masked_slots_may_hold_anything() -> None:
    test_loss.test_masked_slots_may_hold_anything(FP32)


def test_nothing_to_train_is_zero() -> None:
    test_loss.test_nothing_to_train_is_zero()


@pytest.mark.parametrize("reduction", reference.REDUCTIONS)
def test_micro_batches_add_up(reduction: str) -> None:
    test_loss.test_micro_batches_add_up(reduction, size=3)


def test_a_coefficient_of_0_leaves_an_infinite_term_out() -> None:
    test_loss.test_a_coefficient_of_0_leaves_an_infinite_term_out(FP32)


def test_on_policy_is_exact() -> None:
    test_loss.test_on_policy_is_exact()


def test_bounds_clip_nothing_and_beyond_them_the_gradient_is_zero() -> None:
    for A in (1.0, -1.0):
        x = torch.tensor([[0.0, 1e-6 * A]], requires_grad=True)
        zero = torch.zeros(1, 2)
        out = pk.ppo_loss(x, zero, zero + A, cliprange=0.0, reduction="sum")
        out.loss.backward()
        assert x.grad[0].tolist() == [-A, 0.0] and out.stats.clipfrac == 0.5
    for A, far in ((1.0, 1e4), (1.0, -1e4), (-1.0, 1e4), (-1.0, -1e4)):
        x = torch.full((1, 2), far, requires_grad=True)
        out = pk.ppo_loss(x, torch.zeros(1, 2), torch.full((1, 2), A), dual_clip=3.0)
        out.loss.backward()
        assert out.loss.isfinite() and (x.grad == 0).all()


def test_small_divergences_do_not_cancel() -> None:
    x = test_loss.tokens(FP32)
    x["old_logprobs"] = x["logprobs"] + 1e-3 * torch.randn_like(x["logprobs"])
    x["ref_logprobs"] = x["old_logprobs"]
    got = pk.ppo_loss(**x, kl_penalty="k3").stats
    want = test_loss.expected(x, kl_penalty="k3")[1]
    index = [reference.STAT_NAMES.index(name) for name in ("approx_kl", "kl_ref")]
    torch.testing.assert_close(got.tensor[index].double(), want[index], **tol.RELATIVE)


def test_nan_in_a_trained_token_shows() -> None:
    x = test_loss.tokens(FP32)
    x["logprobs"][1, 3] = NAN
    loss, stats, d_logp, d_values, _ = test_loss.run(x)
    names = ("policy_loss", "approx_kl", "policy_kl", "ratio_mean", "ratio_max")
    assert loss.isnan() and all(stats[reference.STAT_NAMES.index(n)].isnan() for n in names)
    assert d_logp.isnan().sum() == 1 and d_logp[1, 3].isnan() and not d_values.isnan().any()


def test_more_runs_of_the_mask_than_are_added_at_once(monkeypatch) -> None:
    monkeypatch.setattr(kernels, "RUN", 16)
    x = test_loss.tokens(FP32, rows=28)
    assert x["logprobs"].numel() > 16 * 256
    options = {"mask": torch.rand(28, test_loss.T) > 0.3, "ent_coef": 0.1}
    got = test_loss.run(x, **options)
    test_loss.close(got, test_loss.expected(x, **options), tol.FP32)


def test_more_programs_than_are_added_at_once() -> None:
    sums = torch.rand(len(reference.STAT_NAMES), 600)
    loss, stats = torch.empty(()), torch.empty(len(reference.STAT_NAMES))
    kernels._finish_kernel[(1,)](loss, stats, sums, 600, 0.1, 0.2, 0.3)
    total = sums.double().sum(1)
    total[4:11] /= total[12]
    total[11] = sums[11].max()
    coefs = torch.tensor([1, 0.1, -0.2, 0.3], dtype=FP64)
    want = (coefs * total[:4]).sum(), total
    test_loss.close((loss, stats), want, tol.FP32)


def test_other_dtypes_and_strides() -> None:
    x = {k: v.bfloat16() for k, v in test_loss.tokens().items()}
    want = test_loss.run({k: v.float() for k, v in x.items()}, ent_coef=0.1)
    strided = {k: v.t().contiguous().t() for k, v in x.items()}
    got = test_loss.run(strided, ent_coef=0.1)
    test_loss.close(got[:2], want[:2], EXACT)
    rounded = tol.BF16_OUT_INTERPRETER if INTERPRETED else tol.BF16_OUT
    test_loss.close(got[2:], want[2:], rounded)


def test_whitening_far_from_zero() -> None:
    x = test_loss.tokens(FP32)
    x["advantages"] = 1000 + x["advantages"] / 100
    A = x["advantages"].double()
    stats = torch.stack([torch.tensor(float(A.numel())).double(), A.sum(), (A * A).sum()])
    got, want = (f(x, whiten=stats) for f in (test_loss.run, test_loss.expected))
    test_loss.close(got, want, tol.FP32)
    for n in (0.0, 1.0):
        stats = torch.tensor([n, 2.0, 4.0], dtype=FP64)
        assert test_loss.run(x, whiten=stats)[1][0] == 0


# -------------------------------------------------------------------------------- from logits


def from_logits(logits: Tensor, labels: Tensor, in_place: bool = False, **options):
    """(loss, stats, d_logits, d_values) of the op."""
    leaf = logits.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    values = options["values"].clone().requires_grad_()
    x = leaf * 1 if in_place else leaf
    options = {**options, "values": values}
    out = pk.ppo_loss_from_logits(x, labels, inplace_backward=in_place, **options)
    gradients = torch.autograd.grad(out.loss, [leaf, values])
    return out.loss.detach(), out.stats.tensor, *gradients


def expected(logits: Tensor, labels: Tensor, **options):
    """The same in fp64, by autograd through the definition."""
    transform = {k: options.pop(k) for k in ("temperature", "softcap") if k in options}
    if isinstance(transform.get("temperature"), Tensor):
        transform["temperature"] = transform["temperature"].double()
    options["kl_kind"] = options.pop("kl_penalty", "k3+")
    x, values = (t.detach().double().requires_grad_() for t in (logits, options.pop("values")))
    mask = options.pop("mask") * (labels != -100)
    labels = torch.where(mask != 0, labels, -100)
    logp, entropy = reference.logprobs_and_entropy(x, labels, **transform)
    terms = {k: v.double() if torch.is_tensor(v) else v for k, v in options.items()}
    loss, stats = reference.ppo_loss(
        logp, mask=mask.double(), entropy=entropy, values=values, **terms
    )
    return loss.detach(), stats, *torch.autograd.grad(loss, [x, values])


def case(V: int, dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor, dict]:
    x, y, options = test_loss.logits_case(dtype, V)
    for name in ("values", "old_values", "returns"):
        options[name] = torch.randn(3, 7)
    return x, y, {**options, "vf_coef": 0.3}


CASES = {
    # Without the KL term, clipped tokens have the gradient of the entropy alone.
    "seq-mean-token-mean": {"temperature": 0.7, "softcap": 9.0, "kl_coef": 0.0},
    "token-mean": {"policy_loss": "kl", "kl_penalty": "k3"},
    "seq-mean-token-sum": {"ent_coef": 0.0, "dual_clip": 1.2},
    "sum": {"policy_loss": "a2c", "kl_penalty": "abs"},
}


@on_gpu
@pytest.mark.parametrize(("dtype", "in_place"), [(FP32, False), (BF16, True)])
@pytest.mark.parametrize("reduction", reference.REDUCTIONS)
def test_from_logits(reduction: str, dtype: torch.dtype, in_place: bool, monkeypatch) -> None:
    # Three blocks of columns, the last one not whole.
    monkeypatch.setattr(kernels, "rows_block_and_warps", lambda V, itemsize: (32, 1))
    x, y, options = case(77, dtype)
    options |= {**CASES[reduction], "reduction": reduction}
    if reduction == "token-mean":
        options["mask"] = torch.rand(3, 7) * options["mask"]
        options["temperature"] = 0.5 + torch.rand(3, 7)
    want = expected(x, y, **options)
    x = torch.where((options["mask"] == 0).unsqueeze(-1), NAN, x)
    got = from_logits(x, y, in_place, **options)
    test_loss.close((*got[:2], got[3]), (*want[:2], want[3]), tol.FP32)
    rounded = tol.FP32
    if dtype == BF16:
        rounded = tol.BF16_OUT_INTERPRETER if INTERPRETED else tol.BF16_OUT
    test_loss.close(got[2:3], want[2:3], rounded)


def test_masked_vocabulary_and_bad_labels() -> None:
    x, y, options = case(60)
    options["mask"] = torch.ones(3, 7, dtype=torch.bool)
    y[:] = 20
    y[0, 1] = -100
    x[..., :16] = -INF
    got, want = from_logits(x, y, **options), expected(x, y, **options)
    test_loss.close(got, want, tol.FP32)
    # Here nothing but the label makes the gradient NaN.
    options |= {"policy_loss": "a2c", "ent_coef": 0.0, "kl_coef": 0.0, "ref_logprobs": None}
    got = from_logits(x, y, **options)
    y[2, 3] = 60
    _, _, d_logits, _ = from_logits(x, y, **options)
    assert d_logits[2, 3].isnan().all()
    others = torch.arange(21) != 2 * 7 + 3
    test_loss.close([d_logits.view(21, 60)[others]], [got[2].view(21, 60)[others]], EXACT)


def test_the_mask_alone_keeps_a_row_out() -> None:
    """The op, whose labels need not be -100 where the mask is 0."""
    x, y, options = case(60)
    y[0, 1] = 0
    want = from_logits(x, y, **options)
    x = torch.where(options["mask"].unsqueeze(-1), x, NAN)
    terms = loss_terms({**pk.ppo_loss.__kwdefaults__, **options}, x)
    got = kernels.ppo_loss_from_logits(x, y, None, 1.0, 1.0, 0.0, -100, *terms, True, True)
    test_loss.close(got, want, EXACT)


def test_rows_with_strides_and_neighbours(monkeypatch) -> None:
    """logits[:, :-1] of a padded vocabulary: in place, and nothing beside it."""
    monkeypatch.setattr(kernels, "rows_block_and_warps", lambda V, itemsize: (32, 1))
    x, y, options = case(60)
    want = from_logits(x, y, **options)
    leaf = torch.randn(3, 8, 64).requires_grad_()
    wide = leaf * 1
    wide.data[:, :7, :60] = x
    before = wide.detach().clone()
    rows = wide[:, :7, :60]
    out = pk.ppo_loss_from_logits(rows, y, inplace_backward=True, **options)
    test_loss.close([out.loss, wide[:, :7, :60]], [want[0], want[2]], EXACT)
    before[:, :7, :60] = want[2]
    test_loss.close([wide], [before], EXACT)


@on_gpu
@pytest.mark.parametrize("reduction", ["seq-mean-token-mean", "seq-mean-token-sum"])
def test_packed_is_padded(reduction: str) -> None:
    x, y, options = case(60)
    options |= {"reduction": reduction, "rollout_logprobs": options["old_logprobs"] + 0.1}
    want = from_logits(x, y, **options)
    # With sequences of no tokens at the start, in the middle and at the end.
    cu = torch.tensor([0, 0, 7, 14, 14, 21, 21], dtype=torch.int32)
    flat = {k: v.reshape(-1) if isinstance(v, Tensor) else v for k, v in options.items()}
    got = from_logits(x.reshape(21, 60), y.reshape(-1), cu_seqlens=cu, **flat)
    test_loss.close(got, [w.reshape(g.shape) for g, w in zip(got, want)], EXACT)


def test_without_gradients_and_without_rows() -> None:
    x, y, options = case(60)
    got = from_logits(x, y, **options)
    with torch.no_grad():
        out = pk.ppo_loss_from_logits(x, y, **options)
    test_loss.close([out.loss, out.stats.tensor], got[:2], EXACT)
    none = {k: v[:0] if isinstance(v, Tensor) else v for k, v in options.items()}
    out = pk.ppo_loss_from_logits(x[:0].requires_grad_(), y[:0], **none)
    assert out.loss == 0 and (out.stats.tensor == 0).all()


# ------------------------------------------------------------------------------ registration


def test_the_cuda_key_has_them_and_fp64_is_the_reference() -> None:
    assert all(_library.has_kernel(op, "CUDA") for op in loss_kernels())
    x = {**pk.ppo_loss.__kwdefaults__, **test_loss.tokens(FP32), "mask": None}
    args = (x["logprobs"], x["entropy"], *loss_terms(x, x["logprobs"]), True, True, True)
    launcher = _library._launcher("loss", "ppo_loss", lambda *args: "reference")
    test_loss.close(launcher(*args), kernels.ppo_loss(*args), EXACT)
    assert launcher(args[0].double(), *args[1:]) == "reference"


# --------------------------------------------------------------------------- only on a GPU


def gpu_case(N: int = 300, V: int = 40000, dtype: torch.dtype = BF16):
    logits, labels = torch.randn(N, V, dtype=dtype), torch.randint(0, V, (N,))
    old, A = -10 + torch.randn(N), torch.randn(N)
    return logits, labels, {"old_logprobs": old, "advantages": A, "mask": torch.rand(N) > 0.3}


@pytest.mark.gpu
def test_no_synchronisation_and_the_same_bits() -> None:
    logits, labels, options = gpu_case()
    x = test_loss.tokens(FP32, rows=500)
    cu = torch.arange(0, 75001, 150, dtype=torch.int32)
    packed = {k: v.reshape(-1) for k, v in x.items()}
    results = []
    for _ in range(3):
        torch.cuda.set_sync_debug_mode("error")
        try:
            leaf = logits.clone().requires_grad_()
            loss = pk.ppo_loss_from_logits(leaf, labels, **options, ent_coef=0.1).loss
            loss.backward()
            tokens = test_loss.run(packed, cu_seqlens=cu, reduction="seq-mean-token-mean")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append((loss, leaf.grad, *tokens))
    for again in results[1:]:
        test_loss.close(again, results[0], EXACT)


@pytest.mark.gpu
def test_graph_capture() -> None:
    logits, labels, options = gpu_case()
    args = (logits, labels, *options.values())
    pk.ppo_loss_from_logits(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pk.ppo_loss_from_logits(*args)
    logits.normal_()
    graph.replay()
    want = pk.ppo_loss_from_logits(*args)
    assert torch.equal(out.loss, want.loss) and torch.equal(out.stats.tensor, want.stats.tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("V", [1000, 50257, 128256])
def test_every_block_size_in_place(V: int) -> None:
    """In place, where a warp that is ahead writes while others may still read."""
    for dtype in (BF16, FP32):
        logits, labels, options = gpu_case(600, V, dtype)
        leaf = logits.clone().requires_grad_()
        loss = pk.ppo_loss_from_logits(leaf, labels, ent_coef=0.1, **options).loss
        loss.backward()
        z = logits.clone().requires_grad_()
        rows = z * 1
        again = pk.ppo_loss_from_logits(
            rows, labels, ent_coef=0.1, inplace_backward=True, **options
        ).loss
        assert torch.equal(loss, again) and torch.equal(rows.detach(), leaf.grad)
        x = logits.double().requires_grad_()
        mask = options["mask"]
        logp, entropy = reference.logprobs_and_entropy(x, torch.where(mask, labels, -100))
        terms = {k: v.double() for k, v in options.items() if k != "mask"}
        want, _ = reference.ppo_loss(logp, mask=mask, entropy=entropy, ent_coef=0.1, **terms)
        want.backward()
        torch.testing.assert_close(loss.double(), want, **tol.FP32)
        rounded = tol.BF16_OUT if dtype == BF16 else tol.FP32
        torch.testing.assert_close(leaf.grad.double(), x.grad, **rounded)


@pytest.mark.gpu
def test_more_than_2_to_the_31_logits() -> None:
    N, V = 2**14 + 1, 2**17
    if torch.cuda.mem_get_info()[0] < 3 * N * V:
        pytest.skip("needs 7 GB of GPU memory")
    logits = torch.zeros(N, V, dtype=BF16)
    logits[-1].normal_()
    last = logits[-1:].clone().requires_grad_()
    labels, zero, mask = torch.zeros(N, dtype=torch.int64), torch.zeros(N), torch.zeros(N)
    mask[-1] = 1
    logits.requires_grad_()
    loss = pk.ppo_loss_from_logits(logits, labels, zero, zero + 1, mask, inplace_backward=True).loss
    alone = pk.ppo_loss_from_logits(last, labels[:1], zero[:1], zero[:1] + 1)
    alone.loss.backward()
    torch.testing.assert_close(loss, alone.loss, **tol.FP32)
    torch.testing.assert_close(logits[-1:].detach(), last.grad, **tol.BF16_OUT)
