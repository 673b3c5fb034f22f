"""logprobs_from_logits: values, gradients and edge semantics on every backend.

Names of projects and numbers in comments are reports of the field: what broke there is tested
here.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tolerances as tol
import torch
from backends import INTERPRETED, NAMES, Backend, cases, logprob_kernels, use
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import ppo_kernels as pk
from ppo_kernels import reference

INF, NAN = float("inf"), float("nan")
FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
ORACLES = np.load(Path(__file__).parent / "data" / "logprobs.npz")


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Every log-prob op on one backend."""
    return use(monkeypatch, request.param, logprob_kernels())


def close(got: Tensor, want: Tensor, tolerance: dict[str, float] = tol.FP32) -> None:
    torch.testing.assert_close(
        got.detach().double().cpu(), want.detach().double().cpu(), equal_nan=True, **tolerance
    )


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.cpu(), want.cpu(), rtol=0, atol=0, equal_nan=True)


def grad_tolerance(backend: Backend, dtype: torch.dtype) -> dict[str, float]:
    """One rounding of the gradient to the dtype of the logits."""
    if dtype == BF16 and backend.name == "triton" and INTERPRETED:
        return tol.BF16_OUT_INTERPRETER
    if dtype == FP16 and backend.name == "triton" and INTERPRETED:
        return tol.FP16_OUT_INTERPRETER
    return {BF16: tol.BF16_OUT, FP16: tol.FP16_OUT, FP64: tol.FP64, FP32: tol.FP32}[dtype]


def rows(N: int, V: int, dtype: torch.dtype = FP32, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    return (torch.randn(N, V) * scale).to(dtype), torch.randint(0, V, (N,))


def run(backend: Backend, logits: Tensor, labels: Tensor, g: Any = None, h: Any = None, **options):
    """(logprobs, entropy, gradient) on the backend's device; gradient of sum g logp + sum h H."""
    x = logits.detach().to(backend.device).requires_grad_()
    on = {k: v.to(backend.device) if isinstance(v, Tensor) else v for k, v in options.items()}
    logp, entropy = pk.logprobs_from_logits(x, labels.to(backend.device), return_entropy=True, **on)
    loss = torch.zeros((), device=backend.device)
    if g is not None:
        loss = loss + (logp * (g.to(logp) if isinstance(g, Tensor) else g)).sum()
    if h is not None:
        loss = loss + (entropy * (h.to(logp) if isinstance(h, Tensor) else h)).sum()
    loss.backward()
    return logp.detach(), entropy.detach(), x.grad


def expected(logits: Tensor, labels: Tensor, g: Any = 0.0, h: Any = 0.0, **options):
    """The same in fp64, by autograd through the definition."""
    x = logits.detach().double().requires_grad_()
    if isinstance(options.get("temperature"), Tensor):
        options["temperature"] = options["temperature"].double()
    logp, entropy = reference.logprobs_and_entropy(x, labels, **options)
    (logp * g + entropy * h).sum().backward()
    return logp.detach(), entropy.detach(), x.grad


def check(backend: Backend, logits: Tensor, labels: Tensor, **options) -> None:
    N = labels.shape
    g, h = torch.randn(N), torch.randn(N)
    logp, entropy, grad = run(backend, logits, labels, g, h, **options)
    want = expected(logits, labels, g, h, **options)
    exact = tol.FP64 if logits.dtype == FP64 else tol.FP32
    close(logp, want[0], exact)
    close(entropy, want[1], exact)
    close(grad, want[2], grad_tolerance(backend, logits.dtype))
    assert logp.dtype == (FP64 if logits.dtype == FP64 else FP32) and grad.dtype == logits.dtype


# ---------------------------------------------------------------------------------- values

TRANSFORMS = {
    "plain": {},
    "scaled": {"temperature": 0.7, "logit_scale": 0.0625},
    "capped": {"softcap": 5.0},
    "all": {"temperature": torch.tensor([0.5, 1.0, 1.7]), "logit_scale": 1.3, "softcap": 10.0},
}


# V = 1 and 7: less than a vector. 300: verl#2899 (V % 1024 != 0 let padding into the sum, +123).
# 1024: whole vectors and blocks. 9000: a second block of columns in Triton.
# fp64 is for the CPU. In the interpreter, which is slow, "all" stands for its two parts at 9000.
def _fits(backend: Backend, V: int, dtype: torch.dtype, transform: str) -> bool:
    part = V == 9000 and transform in ("scaled", "capped")
    return (backend.has_fp64 or dtype != FP64) and not (backend.name == "triton" and part)


@pytest.mark.parametrize(
    ("backend", "V", "dtype", "transform"),
    cases(_fits, [1, 7, 300, 1024, 9000], [FP32, BF16, FP16, FP64], TRANSFORMS),
    indirect=["backend"],
)
def test_against_fp64(backend: Backend, V: int, dtype: torch.dtype, transform: str) -> None:
    check(backend, *rows(3, V, dtype), **TRANSFORMS[transform])


@pytest.mark.parametrize(
    ("backend", "V", "dtype"),
    cases(
        lambda backend, V, _: backend.max_V >= V,
        [32000, 50257, 128256, 151936, 262144],
        [FP32, BF16],
    ),
    indirect=["backend"],
)
def test_large_vocabularies(backend: Backend, V: int, dtype: torch.dtype) -> None:
    check(backend, *rows(2, V, dtype))


def test_precision_budget(backend: Backend) -> None:
    """Design section 6: |dlogp| <= 2e-5 at |z| <= 32, V = 151936, against fp64."""
    V = min(151936, backend.max_V)
    logits = (torch.rand(4, V) * 2 - 1) * 32
    labels = torch.randint(0, V, (4,))
    logp, entropy, _ = run(backend, logits, labels, 1.0)
    want = expected(logits, labels)
    close(logp, want[0], tol.LOGPROBS)
    close(entropy, want[1], tol.LOGPROBS)


def test_gradient_rows_sum_to_zero(backend: Backend) -> None:
    *_, grad = run(backend, *rows(3, 9000), 1.0, 1.0)
    close(grad.double().sum(-1), torch.zeros(3))


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_gradcheck(softcap: float | None) -> None:
    """fp64, through the C++ kernels."""
    x = torch.randn(2, 3, 11, dtype=FP64, requires_grad=True)
    labels = torch.randint(0, 11, (2, 3))
    labels[0, 1] = -100
    t = torch.rand(2, 3, dtype=FP64) + 0.5

    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        return pk.logprobs_from_logits(
            x, labels, temperature=t, logit_scale=1.5, softcap=softcap, return_entropy=True
        )

    assert torch.autograd.gradcheck(op, (x,), fast_mode=False)


def test_gemma_softcap_is_a_cap(backend: Backend) -> None:
    """apple#48, unsloth-zoo#593: z * tanh(z / c) instead of c * tanh(z / c) gave -125, not -31."""
    logits = torch.tensor([[124.0, -124.0, 0.0]])
    logp, *_ = run(backend, logits, torch.tensor([1]), 1.0, softcap=30.0)
    z = 30 * torch.tanh(logits.double() / 30)
    close(logp, z[:, 1] - z.logsumexp(-1))


def test_stats(backend: Backend) -> None:
    """verl#6153: sum p^2 from the same pass, for optimal-token baselines."""
    V = 40000 if backend.name == "cpu" else 9000
    logits, labels = rows(4, V)
    logits[1, :700] = -INF
    logits[:, V - 500] += 9  # the maximum moves with the last block, piece of the row
    labels[2] = -100
    x, y = logits.to(backend.device), labels.to(backend.device)
    _, stats = pk.logprobs_from_logits(x, y, temperature=0.8, return_stats=True)
    *_, with_entropy = pk.logprobs_from_logits(
        x, y, temperature=0.8, return_stats=True, return_entropy=True
    )
    z = logits.double() / 0.8
    keep = labels != -100
    close(stats.lse.cpu()[keep], z.logsumexp(-1)[keep])
    close(stats.sum_p2.cpu()[keep], (z.softmax(-1) ** 2).sum(-1)[keep])
    assert stats.lse[2] == 0 and stats.sum_p2[2] == 0 and not stats.lse.requires_grad
    same(stats.sum_p2, with_entropy.sum_p2)


def test_entropy_from_logits(backend: Backend) -> None:
    logits = torch.randn(2, 3, 50)
    x = logits.to(backend.device).requires_grad_()
    H = pk.entropy_from_logits(x, temperature=1.3)
    H.sum().backward()
    z = (logits.detach().double() / 1.3).requires_grad_()
    want = torch.distributions.Categorical(logits=z).entropy()
    want.sum().backward()
    close(H, want)
    close(x.grad, z.grad / 1.3)


# --------------------------------------------------------- numbers recorded from other projects


def oracle_names() -> list[str]:
    return sorted({key.split("/")[0] for key in ORACLES.files} - {"trl_topk_v97_32"})


def oracle_logits(name: str) -> Tensor:
    x = ORACLES[f"{name}/in.logits"]
    if x.dtype == np.uint16:  # bits of bf16
        return torch.from_numpy(x.astype(np.int16)).view(BF16)
    return torch.from_numpy(x).to(FP64 if name.endswith("_64") else FP32)


def _oracle_fits(backend: Backend, name: str) -> bool:
    logits = oracle_logits(name)
    return logits.shape[-1] <= backend.max_V and (backend.has_fp64 or logits.dtype != FP64)


@pytest.mark.parametrize(
    ("backend", "name"), cases(_oracle_fits, oracle_names()), indirect=["backend"]
)
def test_oracles(backend: Backend, name: str) -> None:
    """verl 0.9.1, TRL 0.11.4 and 1.16.0 (also its Triton kernel), OpenRLHF 0.11.2; where a
    project rounds or breaks, the fp64 value of the same inputs ("right.*") takes its place."""
    stored = {k.split("/")[1]: ORACLES[k] for k in ORACLES.files if k.startswith(name + "/")}
    logits = oracle_logits(name)
    labels = torch.from_numpy(stored["in.target"])
    if "row_mask" in stored:  # TRL's masked rows are our ignored ones
        labels = labels.masked_fill(~torch.from_numpy(stored["row_mask"]), -100)
    options = {"temperature": float(stored["temperature"])}
    grads = {
        "logp": run(backend, logits, labels, torch.from_numpy(stored["in.g"]), None, **options),
        "entropy": run(backend, logits, labels, None, torch.from_numpy(stored["in.h"]), **options),
    }
    value = dict(zip(("logp", "entropy"), grads["logp"][:2]))
    compared = 0
    for key, want in stored.items():
        kind, _, what = key.partition(".")
        if kind not in ("out", "right") or what.endswith(("@cols", "@sum")):
            continue
        what, _, selected = what.partition("@")
        want = torch.from_numpy(want)
        if what in value:
            close(value[what], want, tol.ORACLE)
        else:
            got = grads[what.removeprefix("grad_").removesuffix("_logits")][2].cpu()
            if selected:
                got = got[..., torch.from_numpy(stored[f"out.{what}@cols"])]
            tolerance = grad_tolerance(backend, logits.dtype)
            close(got, want, tol.ORACLE if logits.dtype in (FP32, FP64) else tolerance)
        compared += 1
    assert compared >= 2


def test_oracle_several_labels_per_row(backend: Backend) -> None:
    """TRL's selective_log_softmax takes k labels per row: here a stride-0 view of the logits."""
    name = "trl_topk_v97_32"
    logits, labels = oracle_logits(name), torch.from_numpy(ORACLES[f"{name}/in.index"])
    x = logits.to(backend.device).unsqueeze(-2).expand(*labels.shape, 97)
    logp = pk.logprobs_from_logits(
        x, labels.to(backend.device), temperature=float(ORACLES[f"{name}/temperature"])
    )
    close(logp, torch.from_numpy(ORACLES[f"{name}/out.logp"]), tol.ORACLE)


def test_entropy_of_peaked_rows(backend: Backend) -> None:
    """lse - E[z] cancels to noise (verl: negative); ln s - w/s only loses the 1 of 1 + |ln p|."""
    name = "trl_hard_peaked"
    labels = torch.from_numpy(ORACLES[f"{name}/in.target"])
    _, entropy, _ = run(backend, oracle_logits(name), labels, 1.0)
    want = torch.from_numpy(ORACLES[f"{name}/right.entropy"])
    assert (entropy >= 0).all()
    visible = want > 1e-37  # below that exp is 0 in fp32
    close(entropy.cpu()[visible], want[visible], tol.PEAKED_ENTROPY)


# ------------------------------------------------------------------------------ masked logits


def test_masked_columns(backend: Backend) -> None:
    """flash-attention#1930: NaN after a leading block of -inf (there 16384 columns, Liger 32768
    and 2048, TRL 1024). TRL#7221: one -inf made the entropy NaN (0 * -inf)."""
    V = 9000 if backend.name == "triton" else 70000
    logits, labels = rows(4, V)
    logits[0, 5] = -INF
    logits[1, : V - 3] = -INF
    logits[2, ::2] = -INF
    logits[3] = -INF
    logits[3, 17] = 2.0  # all but the target: probability 1, entropy exactly 0
    labels = torch.tensor([9, V - 1, 1, 17])
    for options in ({}, {"softcap": 7.0}):
        check(backend, logits, labels, **options)
        logp, entropy, grad = run(backend, logits, labels, 1.0, 1.0, **options)
        assert logp[3] == 0 and entropy[3] == 0
        assert (grad[logits.to(grad) == -INF] == 0).all()


def test_label_on_a_masked_column(backend: Backend) -> None:
    logits, labels = rows(2, 300)
    logits[0, 4] = -INF
    labels[0] = 4
    for options in ({}, {"softcap": 7.0}):
        logp, entropy, grad = run(backend, logits, labels, 2.0, **options)
        assert logp[0] == -INF and torch.isfinite(entropy).all() and torch.isfinite(grad).all()
        close(grad[0], expected(logits, labels, 2.0, **options)[2][0])


@pytest.mark.parametrize("softcap", [None, 7.0])
def test_bad_rows_stay_alone(backend: Backend, softcap: float | None) -> None:
    logits, labels = rows(5, 600)
    good = run(backend, logits, labels, 1.0, 1.0, softcap=softcap)
    bad = logits.clone()
    bad[0] = -INF
    bad[2, 599] = NAN
    bad[3, 0] = INF
    out = run(backend, bad, labels, 1.0, 1.0, softcap=softcap)
    for got, want in zip(out, good):
        assert got[[0, 2, 3]].isnan().all()
        same(got[[1, 4]], want[[1, 4]])


# SkyRL#2141, verl: a running maximum that starts at 0 gave +inf below about -104, 1.2e-4 at -96.
@pytest.mark.parametrize("level", [-1000.0, -256.0, -120.0, -96.0, 300.0, 1000.0])
def test_shifted_logits_are_exact(backend: Backend, level: float) -> None:
    """Multiples of 1/16 survive the shift in fp32: the same bits as unshifted."""
    logits = torch.randint(-64, 64, (3, 700)) / 16
    labels = torch.randint(0, 700, (3,))
    plain = run(backend, logits, labels, 1.0, 1.0)
    shifted = run(backend, logits + level, labels, 1.0, 1.0)
    for got, want in zip(shifted, plain):
        same(got, want)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_maximum_that_rises_to_the_end(backend: Backend, dtype: torch.dtype) -> None:
    """By more than the exponential holds, a little in each vector or all at the last column."""
    logits, labels = rows(3, 5000, dtype)
    logits[0] += torch.linspace(-1000, 1000, 5000)
    logits[1, -1] = 300.0
    logits[2, 2500] = 200.0
    check(backend, logits, labels)
    check(backend, logits, torch.tensor([4999, 4999, 2500]))


def test_finite_mask_values(backend: Backend) -> None:
    """finfo.min is the other way to mask; a row of nothing else is uniform, not NaN."""
    V = 9000 if backend.name == "triton" else 40000
    logits, labels = rows(3, V)
    logits[0, 10:] = torch.finfo(FP32).min
    logits[1] = torch.finfo(FP32).min
    logits[2, : V - 5] = torch.finfo(FP32).min  # whole vectors, pieces and blocks of it first
    labels[0], labels[2] = 3, V - 1
    check(backend, logits, labels)


# ------------------------------------------------------------------------------------- labels


def test_ignored_rows(backend: Backend) -> None:
    """Not read (NaN inside), 0 out, gradient 0. Liger zeroed the caller's ignored rows under
    no_grad; Liger#968: a first ignored token zeroed every gradient."""
    logits, labels = rows(5, 300)
    labels[[0, 3]] = -100
    logits[0] = NAN
    before = logits.clone()
    logp, entropy, grad = run(backend, logits, labels, 1.0, 1.0)
    assert (logp[[0, 3]] == 0).all() and (entropy[[0, 3]] == 0).all()
    assert (grad[[0, 3]] == 0).all()
    keep = torch.tensor([1, 2, 4])
    close(grad[keep], expected(logits[keep], labels[keep], 1.0, 1.0)[2])
    with torch.no_grad():
        on_device = logits.to(backend.device, copy=True)
        pk.logprobs_from_logits(on_device, labels.to(backend.device))
    same(on_device, before)
    same(logits, before)


def test_ignore_index_may_be_a_token(backend: Backend) -> None:
    logits, labels = rows(3, 50)
    labels[:] = torch.tensor([0, 7, 0])
    logp, *_ = run(backend, logits, labels, 1.0, ignore_index=0)
    close(logp, expected(logits, labels, ignore_index=0)[0])
    assert logp[0] == 0 and logp[1] != 0


def test_labels_out_of_range_poison_their_row(backend: Backend) -> None:
    """flash-attention returned loss 0 and a full gradient for label 70 of 64."""
    logits, labels = rows(5, 64)
    labels[[0, 1, 3]] = torch.tensor([70, -1, 64])
    logp, entropy, grad = run(backend, logits, labels, 1.0)
    for x in (logp, entropy, grad):
        assert x[[0, 1, 3]].isnan().all() and x[[2, 4]].isfinite().all()
    *_, grad = run(backend, logits, labels, None, 1.0)
    assert grad[[0, 1, 3]].isnan().all() and grad[[2, 4]].isfinite().all()


def test_rows_without_gradient(backend: Backend) -> None:
    """A masked slot may hold anything: its gradient is selected away to exactly 0."""
    logits, labels = rows(4, 300)
    logits[1, 3], labels[2] = NAN, 999
    g = torch.tensor([1.0, 0.0, 0.0, -2.0])
    *_, grad = run(backend, logits, labels, g, g)
    assert (grad[1:3] == 0).all() and (grad[[0, 3]] != 0).any(-1).all() and grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_misaligned_labels(backend: Backend, dtype: torch.dtype) -> None:
    """flash-attention, by its own comment, loaded the wrong label at 8-byte alignment."""
    logits, labels = rows(5, 300)
    store = torch.zeros(6, dtype=dtype)
    store[1:] = labels
    close(run(backend, logits, store[1:], 1.0)[0], expected(logits, labels)[0])


def test_bad_temperature_in_a_tensor_poisons_its_row(backend: Backend) -> None:
    logits, labels = rows(4, 512)  # no padding, which a negative temperature would turn to +inf
    t = torch.tensor([1.0, 0.0, -1.0, NAN])
    out = run(backend, logits, labels, 1.0, 1.0, temperature=t)
    for x in out:
        assert x[1:].isnan().all() and x[0].isfinite().all()


def test_temperature_tensor_is_the_same_as_the_number(backend: Backend) -> None:
    logits, labels = rows(3, 700)
    number = run(backend, logits, labels, 1.0, 1.0, temperature=0.7)
    tensor = run(backend, logits, labels, 1.0, 1.0, temperature=torch.tensor(0.7))
    for got, want in zip(tensor, number):
        same(got, want)


# ------------------------------------------------------------------------- shapes and strides


def strided_views() -> dict[str, Any]:
    return {
        "all but the last token": lambda: torch.randn(3, 5, 40)[:, :-1],
        "padded vocabulary": lambda: torch.randn(3, 4, 64)[..., :40],
        "both": lambda: torch.randn(3, 5, 64)[:, 1:, :40],
        "transposed batch": lambda: torch.randn(4, 3, 40).transpose(0, 1),
        "every second row": lambda: torch.randn(8, 40)[::2],
        "one row": lambda: torch.randn(40),
        "four dimensions": lambda: torch.randn(2, 3, 2, 40)[:, :, :1],
        "strided vocabulary": lambda: torch.randn(40, 6).t(),
        "expanded": lambda: torch.randn(1, 40).expand(3, 40),
        "misaligned": lambda: torch.randn(121)[1:].view(3, 40),
    }


@pytest.mark.parametrize("name", strided_views())
def test_strides(backend: Backend, name: str) -> None:
    logits = strided_views()[name]()
    labels = torch.randint(0, 40, logits.shape[:-1])
    want = expected(logits.contiguous(), labels, 1.0, 0.5)
    # Out of a leaf, so that the gradient goes back through the view.
    leaf = logits.to(backend.device).detach()
    leaf = leaf.as_strided(leaf.size(), leaf.stride(), leaf.storage_offset()).requires_grad_()
    logp, entropy = pk.logprobs_from_logits(leaf, labels.to(backend.device), return_entropy=True)
    (logp + 0.5 * entropy).sum().backward()
    for got, w in zip((logp, entropy, leaf.grad), want):
        close(got, w)


def test_slices_are_not_copied(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    op = torch.ops.ppo_kernels.logprobs_fwd

    def spy(logits: Tensor, *args: Any) -> Any:
        seen.append(logits.data_ptr())
        return op(logits, *args)

    monkeypatch.setattr(torch.ops.ppo_kernels, "logprobs_fwd", spy)
    full = torch.randn(3, 6, 64, device=backend.device)
    for view in (full[:, :-1], full[:, 1:, :40], full.transpose(0, 1)):
        labels = torch.zeros(view.shape[:-1], dtype=torch.int64, device=backend.device)
        pk.logprobs_from_logits(view, labels)
        assert seen.pop() == view.data_ptr()


def test_no_rows(backend: Backend) -> None:
    for shape in ((0, 7), (2, 0, 7), (0, 3, 7)):
        logits = torch.randn(shape, device=backend.device, requires_grad=True)
        labels = torch.zeros(shape[:-1], dtype=torch.int64, device=backend.device)
        logp, entropy = pk.logprobs_from_logits(logits, labels, return_entropy=True)
        assert logp.shape == entropy.shape == labels.shape
        (logp.sum() + entropy.sum()).backward()
        assert logits.grad.shape == shape


def test_all_rows_ignored(backend: Backend) -> None:
    logits, labels = rows(3, 40)
    logp, _, grad = run(backend, logits, labels.fill_(-100), 1.0, 1.0)
    assert (logp == 0).all() and (grad == 0).all()


@pytest.mark.parametrize(
    ("backend", "inplace"),
    cases(lambda backend, _: backend.name != "reference", [False, True]),
    indirect=["backend"],
)
def test_offsets_beyond_32_bits(backend: Backend, inplace: bool) -> None:
    """Three rows, the strides of which fit 32 bits and the last offset of which does not, in 4 GB
    of memory of which only they are ever touched. (The reference takes no offsets of its own.)"""
    V, apart = 300, 2**30 + 8
    far = torch.empty(2 * apart + V, dtype=BF16, device=backend.device)
    far = far.as_strided((3, V), (apart, 1))
    logits, labels = rows(3, V, BF16)
    far.copy_(logits)
    far.requires_grad_()
    logp = pk.logprobs_from_logits(far, labels.to(backend.device), inplace_backward=inplace)
    (grad,) = torch.autograd.grad(logp.sum(), far)
    want = expected(logits, labels, 1.0)
    close(logp, want[0])
    close(grad, want[2], grad_tolerance(backend, BF16))


# ------------------------------------------------------------------------------- gradients


def test_expanded_gradient(backend: Backend) -> None:
    """sum().backward() hands over a stride-0 gradient, on which verl's kernel asserts."""
    logits, labels = rows(4, 300)
    x = logits.to(backend.device).requires_grad_()
    pk.logprobs_from_logits(x, labels.to(backend.device)).sum().backward()
    close(x.grad, expected(logits, labels, 1.0)[2])


def test_bf16_gradient(backend: Backend) -> None:
    logits, labels = rows(4, 300)
    x = logits.to(backend.device).requires_grad_()
    logp = pk.logprobs_from_logits(x, labels.to(backend.device))
    g = torch.randn(4).bfloat16()
    (logp.bfloat16() * g.to(backend.device)).sum().backward()
    close(x.grad, expected(logits, labels, g.double())[2])


@pytest.mark.parametrize(("g", "h"), [(1.0, None), (None, 1.0), (1.0, -0.01)])
def test_either_gradient_alone(backend: Backend, g: float | None, h: float | None) -> None:
    """TRL's chunked entropy looked differentiable and had gradient 0 (right: 0.968)."""
    logits, labels = rows(4, 300)
    *_, grad = run(backend, logits, labels, g, h)
    close(grad, expected(logits, labels, g or 0.0, h or 0.0)[2])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_two_backwards(backend: Backend, dtype: torch.dtype) -> None:
    """retain_graph, and two losses on one tensor. unsloth#5002: the second saw gradients as
    logits; flash-attention in place: -0.772, then -2.669."""
    logits, labels = rows(4, 300, dtype)
    x = logits.to(backend.device).requires_grad_()
    y = labels.to(backend.device)
    first = pk.logprobs_from_logits(x, y)
    second = pk.logprobs_from_logits(x, y, temperature=0.5)
    first.sum().backward(retain_graph=True)
    once = x.grad.clone()
    x.grad = None
    first.sum().backward()
    same(x.grad, once)
    x.grad = None
    second.sum().backward()
    want = expected(logits, labels, 1.0, temperature=0.5)[2]
    close(x.grad, want, grad_tolerance(backend, dtype))


def test_no_gradient_is_asked_for(backend: Backend) -> None:
    logits, labels = rows(2, 30)
    logp = pk.logprobs_from_logits(logits.to(backend.device), labels.to(backend.device))
    assert not logp.requires_grad


def test_second_order_raises() -> None:
    x = torch.randn(2, 5, requires_grad=True)
    logp = pk.logprobs_from_logits(x, torch.tensor([0, 1]))
    with pytest.raises(RuntimeError, match="differentiable a second time"):
        torch.autograd.grad((logp**2).sum(), x, create_graph=True)


# ---------------------------------------------------------------------------------- in place


@pytest.mark.parametrize("steps", [(0, 1), (1, 1), (39, 1)])
def test_inplace_backward_refuses_rows_that_share_memory(steps: tuple[int, int]) -> None:
    x = (torch.randn(200, requires_grad=True) * 1).as_strided((3, 40), steps)
    with pytest.raises(ValueError, match="rows do not share memory"):
        pk.logprobs_from_logits(x, torch.zeros(3, dtype=torch.int64), inplace_backward=True)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_inplace_backward(backend: Backend, dtype: torch.dtype) -> None:
    logits, labels = rows(5, 300, dtype)
    labels[1] = -100
    leaf = logits.to(backend.device).requires_grad_()
    x = leaf * 1
    logp, entropy = pk.logprobs_from_logits(
        x, labels.to(backend.device), return_entropy=True, inplace_backward=True, temperature=0.7
    )
    version = x._version
    (logp + 0.3 * entropy).sum().backward()
    _, _, want = run(backend, logits, labels, 1.0, 0.3, temperature=0.7)
    same(leaf.grad, want)
    same(x, want)  # the logits' storage is the gradient
    assert x._version > version


def test_inplace_backward_of_a_slice(backend: Backend) -> None:
    logits = torch.randn(2, 4, 64)
    labels = torch.randint(0, 40, (2, 3))
    leaf = logits.to(backend.device).requires_grad_()
    x = leaf * 1
    pk.logprobs_from_logits(
        x[:, :-1, :40], labels.to(backend.device), inplace_backward=True
    ).sum().backward()
    want = torch.zeros(2, 4, 64, dtype=FP64)
    want[:, :-1, :40] = expected(logits[:, :-1, :40].contiguous(), labels, 1.0)[2]
    close(leaf.grad, want)
    same(x[:, -1], logits[:, -1])
    same(x[..., 40:], logits[..., 40:])


def test_inplace_used_twice_raises(backend: Backend) -> None:
    """Liger#272, #343, Megatron#1594, verl#1672: in place without a version bump, any other use
    of the logits silently got gradients instead."""
    y = torch.tensor([1, 2], device=backend.device)

    def leaf() -> Tensor:
        return torch.randn(2, 30, device=backend.device).requires_grad_()

    x = leaf()
    logp = pk.logprobs_from_logits(x, y, inplace_backward=True)
    logp.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace_backward=True"):
        logp.sum().backward()
    for first in (True, False):
        for second in (True, False):
            if not (first or second):
                continue
            x = leaf()
            z = x * 1
            a = pk.logprobs_from_logits(z, y, inplace_backward=first)
            b = pk.logprobs_from_logits(z, y, inplace_backward=second, temperature=0.5)
            a.sum().backward(retain_graph=True)
            if first:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    b.sum().backward()
            else:
                b.sum().backward()
                assert x.grad.isfinite().all()
    # An op that saved the logits itself.
    x = leaf()
    z = x * 1
    squares = z**2
    pk.logprobs_from_logits(z, y, inplace_backward=True).sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.sum().backward()


def test_inplace_on_a_leaf_used_twice_raises(backend: Backend) -> None:
    x = torch.randn(2, 30, device=backend.device).requires_grad_()
    y = torch.tensor([1, 2], device=backend.device)
    a = pk.logprobs_from_logits(x, y, inplace_backward=True)
    b = pk.logprobs_from_logits(x, y, inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (a.sum() + b.sum()).backward()


# ---------------------------------------------------------------- bits: batches, threads, runs


def bits(backend: Backend, logits: Tensor, labels: Tensor, **options: Any) -> list[Tensor]:
    return [x.cpu() for x in run(backend, logits, labels, 1.0, 0.5, **options)]


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_batch_invariance(backend: Backend, dtype: torch.dtype) -> None:
    """TRL#6789, RL-Kernel#98: 8% of the ratios left the clip band without any update because a
    batch of 1 and one of 8 rounded differently."""
    N, V = (257, 40000) if backend.name == "cpu" else (257, 700)
    logits, labels = rows(N, V, dtype)
    if backend.name == "triton" and INTERPRETED:
        N = 9  # ten milliseconds per row
        logits, labels = logits[:N], labels[:N]
    whole = bits(backend, logits, labels)
    for row in (0, 5, N - 1):
        one = slice(row, row + 1)
        for alone in (logits[one], logits[one].clone()):
            for got, want in zip(bits(backend, alone, labels[one]), whole):
                same(got, want[one])
    for got, want in zip(bits(backend, logits[2:5], labels[2:5]), whole):
        same(got, want[2:5])


def test_thread_invariance() -> None:
    """Rows over threads, and one row's pieces over threads."""
    threads = torch.get_num_threads()
    cpu = Backend("cpu", "cpu")
    try:
        for N in (1, 3, 40):
            logits, labels = rows(N, 70001)
            outs = []
            for n in (1, 2, 5):
                torch.set_num_threads(n)
                outs.append(bits(cpu, logits, labels))
            for other in outs[1:]:
                for got, want in zip(other, outs[0]):
                    same(got, want)
    finally:
        torch.set_num_threads(threads)


def test_determinism(backend: Backend) -> None:
    logits, labels = rows(4, 2000)
    first = bits(backend, logits, labels)
    for _ in range(4):
        for got, want in zip(bits(backend, logits, labels), first):
            same(got, want)


def test_entropy_does_not_change_the_logprobs(backend: Backend) -> None:
    logits, labels = rows(5, 5000)
    x, y = logits.to(backend.device), labels.to(backend.device)
    alone = pk.logprobs_from_logits(x, y)
    both, _ = pk.logprobs_from_logits(x, y, return_entropy=True)
    with_stats, _ = pk.logprobs_from_logits(x, y, return_stats=True)
    same(both, alone)
    same(with_stats, alone)


def test_inputs_are_left_alone(backend: Backend) -> None:
    logits, labels = rows(4, 300)
    t = torch.rand(4) + 0.5
    copies = [x.clone() for x in (logits, labels, t)]
    on = [x.to(backend.device) for x in (logits, labels, t)]
    on[0].requires_grad_()
    pk.logprobs_from_logits(on[0], on[1], temperature=on[2], softcap=3.0).sum().backward()
    for x, copy in zip(on, copies):
        same(x.detach(), copy)


# -------------------------------------------------------------------------------- hypothesis


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_input(backend: Backend, data: st.DataObject) -> None:
    few = backend.name == "triton" and INTERPRETED
    shape = data.draw(st.lists(st.integers(1, 2 if few else 4), min_size=1, max_size=3))
    V = data.draw(st.integers(1, 70) | st.sampled_from([127, 128, 129, 513, 1025]))
    dtypes = [FP32, BF16, FP16] + [FP64] * backend.has_fp64
    dtype = data.draw(st.sampled_from(dtypes))
    padding, skip = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 2))
    torch.manual_seed(data.draw(st.integers(0, 2**20)))
    full = (torch.randn(*shape[:-1], shape[-1] * skip, V + padding) * 4).to(dtype)
    if data.draw(st.booleans()):
        full = full.masked_fill(torch.rand(full.shape) < 0.5, -INF)
    logits = full[..., ::skip, :V]
    labels = torch.randint(0, V, logits.shape[:-1])
    # A kept label: that of a -inf column and of a whole -inf row are tested on their own.
    logits = logits.scatter(-1, labels.unsqueeze(-1), torch.ones_like(logits[..., :1]))
    if padding:
        wide = torch.full((*logits.shape[:-1], V + padding), NAN, dtype=dtype)
        wide[..., :V] = logits
        logits = wide[..., :V]
    labels = labels.masked_fill(torch.rand(labels.shape) < 0.2, -100)
    options: dict[str, Any] = {"temperature": data.draw(st.sampled_from([1.0, 0.6, 1.9]))}
    if data.draw(st.booleans()):
        options["temperature"] = torch.rand(labels.shape, dtype=dtype) + 0.5
    if data.draw(st.booleans()):
        options["softcap"] = data.draw(st.sampled_from([2.0, 30.0]))
    check(
        backend,
        logits,
        labels.to(data.draw(st.sampled_from([torch.int32, torch.int64]))),
        **options,
    )
