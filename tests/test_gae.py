"""gae on every backend: reference, C++, Triton, and the CUDA kernels (emulated, or on a GPU)."""

from collections.abc import Callable
from typing import Any

import backends
import emulation
import pytest
import torch
from gae_cases import Call, expected, packed, poisoned, random_call
from tolerances import FP32, FP64, LONG_SCAN
from torch import Tensor

import ppo_kernels as pk
from ppo_kernels import reference
from ppo_kernels.kernels import gae as triton_kernels
from ppo_kernels.ops import gae as gae_op

Run = Callable[..., reference.Advantages]


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return emulation.load(
        emulation.build(emulation.shared_folder(tmp_path_factory.getbasetemp()) / "emu")
    )


class Backend:
    """pk.gae with its tensors sent to a device and the results brought back."""

    def __init__(self, name: str, device: str = "cpu") -> None:
        self.name, self.device = name, device

    def __call__(self, **call: Any) -> reference.Advantages:
        sent = {k: x.to(self.device) if isinstance(x, Tensor) else x for k, x in call.items()}
        return reference.Advantages(*(x.cpu() for x in pk.gae(sent.pop("rewards", None), **sent)))

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.name == "triton" else torch.float64

    @property
    def seeds(self) -> range:
        return range(1 if self.name == "triton" and self.device == "cpu" else 3)


MARKS = {"reference": (), "cpu": (), "triton": (), "emulated": pytest.mark.emu}
MARKS["cuda"] = pytest.mark.gpu
# The interpreter and the emulator take milliseconds per thousand tokens.
WIDEST = {"triton": 1025, "emulated": 4097}


@pytest.fixture(params=[pytest.param(name, marks=marks) for name, marks in MARKS.items()])
def gae(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    name = request.param
    if name == "emulated":
        run = emulation.op(request.getfixturevalue("emulated"))
        monkeypatch.setattr(torch.ops.ppo_kernels, "gae", run)
    elif name == "cuda":
        return Backend(name, "cuda")
    elif name == "triton" and torch.cuda.is_available():
        monkeypatch.setattr(torch.ops.ppo_kernels, "gae", triton_kernels.gae)
        return Backend(name, "cuda")
    else:
        backends.use(monkeypatch, name, {"gae": (gae_op._reference, triton_kernels.gae)})
    return Backend(name)


def close(got: Tensor, want: Tensor) -> None:
    tolerance = FP64 if got.dtype == torch.float64 else FP32
    torch.testing.assert_close(got.double(), want.double(), **tolerance)


def same_bits(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> None:
    for x, y in zip(a, b):
        assert torch.equal(x, y), f"largest difference {(x - y).abs().max()}"


# --------------------------------------------------------------------------------- right at all


@pytest.mark.parametrize("seed", range(12))
def test_delta_form(gae: Backend, seed: int) -> None:
    call = random_call(seed, dtype=gae.dtype)
    out = gae(**poisoned(call))
    advantages, returns = expected(call)
    close(out.advantages, advantages)
    close(out.returns, returns)
    valid = torch.ones(5, 37, dtype=torch.bool) if call["mask"] is None else call["mask"]
    sums = [valid.sum().double(), advantages.sum(), (advantages**2).sum()]
    torch.testing.assert_close(out.stats, torch.stack(sums), **FP32)
    assert (out.advantages[~valid] == 0).all() and (out.returns[~valid] == 0).all()


LENGTHS = [1, 2, 31, 32, 33, 127, 128, 129, 1023, 1024, 1025, 4095, 4096, 4097]


@pytest.mark.parametrize(
    ("gae", "T"),
    [
        pytest.param(name, T, marks=marks)
        for name, marks in MARKS.items()
        for T in LENGTHS
        if WIDEST.get(name, T) >= T
    ],
    indirect=["gae"],
)
def test_lengths(gae: Backend, T: int) -> None:
    """Around the lanes, warps, blocks and segments of the kernels."""
    call = random_call(T, (2, T), mask=torch.rand(2, T) < 0.8, terminated=None, truncated=None)
    if call.get("bootstrap") is not None and call["bootstrap"].dim() == 2:
        call["bootstrap"] = None
    out = gae(**poisoned(call))
    advantages, returns = expected(call)
    close(out.advantages, advantages)
    close(out.returns, returns)


@pytest.mark.parametrize("lam", [0.95, 1.0])
@pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_long_row(backend: str, lam: float) -> None:
    T = 131072
    call = random_call(0, (1, T), mask=torch.rand(1, T) < 0.9, gamma=1.0, lam=lam)
    out = Backend(backend, backend)(**poisoned(call))
    want = expected(call)
    torch.testing.assert_close(out.advantages.double(), want[0], **LONG_SCAN)
    torch.testing.assert_close(out.returns.double(), want[1], **LONG_SCAN)


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf")])
def test_masked_slots_are_never_read(gae: Backend, junk: float) -> None:
    for seed in gae.seeds:
        call = random_call(seed, mask=torch.rand(5, 37) < 0.5)
        same_bits(gae(**poisoned(call, junk)), gae(**poisoned(call, 0.0)))


def test_no_valid_token(gae: Backend) -> None:
    call = random_call(1, mask=torch.zeros(5, 37, dtype=torch.bool), scores=torch.ones(5))
    out = gae(**poisoned(call))
    for x in out:
        assert (x == 0).all()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_empty_padded(gae: Backend, shape: tuple[int, int]) -> None:
    out = gae(values=torch.ones(shape), scores=torch.ones(shape[0]))
    assert out.advantages.shape == out.returns.shape == shape
    assert out.stats.tolist() == [0, 0, 0]


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 3, 0, 5, 0]])
def test_empty_sequences(gae: Backend, lengths: list[int]) -> None:
    call = random_call(2, (len(lengths), 5), scores=torch.ones(len(lengths)))
    out = gae(**packed(call, lengths))
    assert out.advantages.shape == (sum(lengths),)
    for i, n in enumerate(lengths):
        if n:
            one = {k: x[i : i + 1] if isinstance(x, Tensor) else x for k, x in call.items()}
            at = sum(lengths[:i])
            alone = gae(**packed(one, [n]))
            assert torch.equal(out.advantages[at : at + n], alone.advantages)


# ---------------------------------------------------------------------------------- the same bits


def pad(call: Call, left: int, right: int) -> Call:
    """Masked slots of NaN on both sides."""
    out = dict(call)
    rows, T = call["values"].shape
    if call["mask"] is None:
        out["mask"] = torch.ones(rows, T, dtype=torch.bool)
    for name, x in out.items():
        if isinstance(x, Tensor) and x.dim() == 2:
            fill = False if x.dtype == torch.bool else torch.nan
            out[name] = torch.nn.functional.pad(x, (left, right), value=fill)
    return out


@pytest.mark.parametrize("right", [1, 4, 131])
def test_padding_on_the_right_changes_no_bit(gae: Backend, right: int) -> None:
    for seed in gae.seeds:
        call = random_call(seed, (3, 130))
        plain, padded = gae(**call), gae(**pad(call, 0, right))
        same_bits(plain[:2], [x[:, :130] for x in padded[:2]])
        assert (padded.advantages[:, 130:] == 0).all()


@pytest.mark.parametrize("left", [1, 4, 131])
def test_padding_on_the_left(gae: Backend, left: int) -> None:
    for seed in gae.seeds:
        call = random_call(seed, (3, 130), dtype=gae.dtype)
        plain, padded = gae(**call), gae(**pad(call, left, 2))
        for x, y in zip(plain[:2], padded[:2]):
            close(y[:, left : left + 130], x)
            if gae.name in ("reference", "cpu"):  # one token after another: no tree to shift
                assert torch.equal(y[:, left : left + 130], x)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_packed_is_padded(gae: Backend, index: torch.dtype) -> None:
    """Bit for bit, with offsets that are no multiples of four."""
    lengths = [1, 600, 0, 257, 3, 130, 7]
    for seed in gae.seeds:
        call = random_call(seed, (7, 600))
        inside = torch.arange(600) < torch.tensor(lengths).unsqueeze(-1)
        ragged = call | {"mask": inside if call["mask"] is None else call["mask"] & inside}
        flat = packed(ragged, lengths)
        padded = gae(**poisoned(ragged))
        out = gae(**poisoned(flat) | {"cu_seqlens": flat["cu_seqlens"].to(index)})
        same_bits(out[:2], [x[inside] for x in padded[:2]])


def test_company_changes_no_bit(gae: Backend) -> None:
    call = random_call(5, (6, 150))
    order = torch.tensor([4, 0, 5, 2])
    some = {k: x[order] if isinstance(x, Tensor) else x for k, x in call.items()}
    same_bits(gae(**some)[:2], [x[order] for x in gae(**call)[:2]])


def test_again(gae: Backend) -> None:
    call = random_call(6, (3, 300))
    same_bits(gae(**call), gae(**call))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_are_exact(gae: Backend, dtype: torch.dtype) -> None:
    """Upcast on load: nothing is lost but what the input had lost before."""
    for seed in gae.seeds:
        half = random_call(seed, (3, 70), dtype=dtype)
        wide = {
            k: x.float() if isinstance(x, Tensor) and x.dtype == dtype else x
            for k, x in half.items()
        }
        out = gae(**half)
        same_bits(out, gae(**wide))
        assert out.advantages.dtype == torch.float32


def test_mixed_dtypes(gae: Backend) -> None:
    """A bf16 critic beside fp32 log-probs and fp64 scores, as trainers have them."""
    call = random_call(3, logprobs=torch.randn(5, 37), ref_logprobs=torch.randn(5, 37).bfloat16())
    call |= {"kl_coef": 0.1, "kl_penalty": "k3", "scores": torch.randn(5).double()}
    call["values"] = call["values"].bfloat16()
    out = gae(**call)
    assert out.advantages.dtype == torch.float32
    advantages, returns = expected(call)
    close(out.advantages, advantages)
    close(out.returns, returns)


def test_views(gae: Backend) -> None:
    """Strided and misaligned inputs are read right, and left alone."""
    call = random_call(8, (4, 136), mask=torch.rand(4, 136) < 0.7)
    want = gae(**call)
    for layout in ("wider", "transposed", "shifted"):
        views = dict(call)
        for name, x in call.items():
            if not isinstance(x, Tensor) or x.dim() != 2:
                continue
            if layout == "wider":
                views[name] = torch.nn.functional.pad(x, (1, 2))[:, 1:-2]
            elif layout == "transposed":
                views[name] = x.t().contiguous().t()
            else:  # contiguous, but the storage begins one element off any alignment
                store = torch.empty(x.numel() + 1, dtype=x.dtype)
                views[name] = store[1:].view(x.shape).copy_(x)
        before = {k: x.clone() for k, x in views.items() if isinstance(x, Tensor)}
        same_bits(gae(**views), want)
        assert all(torch.equal(views[k], x) for k, x in before.items())


# --------------------------------------------------------------------------------------- arguments


def test_fused_shaping(gae: Backend) -> None:
    for kind in ("k1", "k2", "k3", "abs"):
        call = random_call(
            4, (2, 37), dtype=gae.dtype, logprobs=None, ref_logprobs=None, kl_coef=0.0
        )
        logp, ref = torch.randn(2, 2, 37, dtype=gae.dtype).unbind()
        logp[0, :3] += torch.tensor([1e-4, 30.0, -30.0])  # cancellation, and the clamp of k3
        shaped = -0.2 * pk.kl_penalty(logp, ref, kind)
        if call["rewards"] is not None:
            shaped = shaped + call["rewards"]
        apart = gae(**call | {"rewards": shaped})
        fused = gae(
            **call | {"logprobs": logp, "ref_logprobs": ref, "kl_coef": 0.2, "kl_penalty": kind}
        )
        scale = apart.advantages.abs().max()
        close(fused.advantages / scale, apart.advantages / scale)


def test_another_lambda_for_the_returns(gae: Backend) -> None:
    for seed in gae.seeds:
        call = random_call(seed, lam=0.95, lam_returns=None)
        other = gae(**call | {"lam": 1.0})
        both = gae(**call | {"lam_returns": 1.0})
        assert torch.equal(both.advantages, gae(**call).advantages)
        assert torch.equal(both.returns, other.returns)


def test_score_survives_the_end_of_its_episode(gae: Backend) -> None:
    """terminated on the last action cuts off the bootstrap behind it, not the score on it."""
    values = torch.zeros(1, 4)
    mask = torch.tensor([[True, True, True, False]])
    ends = torch.tensor([[False, False, True, False]])
    call = {"values": values, "mask": mask, "scores": torch.tensor([2.0]), "lam": 1.0}
    out = gae(**call, terminated=ends, bootstrap=torch.tensor([5.0]))
    assert out.returns.tolist() == [[2.0, 2.0, 2.0, 0.0]]
    out = gae(**call, truncated=ends, bootstrap=torch.full((1, 4), 5.0))
    assert out.returns.tolist() == [[7.0, 7.0, 7.0, 0.0]]


def test_integer_masks(gae: Backend) -> None:
    call = random_call(9, mask=torch.rand(5, 37) < 0.6, terminated=torch.rand(5, 37) < 0.1)
    numbers = {k: call[k].long() for k in ("mask", "terminated")}
    same_bits(gae(**call | numbers), gae(**call))


def test_threads_change_no_bit() -> None:
    call = random_call(10, (64, 1000))
    try:
        torch.set_num_threads(1)
        one = pk.gae(**call)
        torch.set_num_threads(2)
        same_bits(pk.gae(**call), one)
    finally:
        torch.set_num_threads(2)


def test_outputs_are_detached() -> None:
    values = torch.randn(2, 5, requires_grad=True)
    out = pk.gae(torch.randn(2, 5, requires_grad=True), values)
    assert not any(x.requires_grad for x in out)
    assert all(x.is_contiguous() for x in out)
