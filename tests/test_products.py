"""bf16 GEMMs whose sums are wider: in fp32, or from call to call in 24 bits."""

import ctypes
import itertools
import mmap
from collections.abc import Callable

import pytest
import tolerances as tol
import torch
from torch import Tensor

from ppo_kernels import reference

split_product = pytest.mark.parametrize(
    "split_product_", [torch.ops.ppo_kernels.split_product_, reference.split_product_]
)


def close(got: Tensor, want: Tensor, tolerance: dict[str, float] = tol.FP32_SUM) -> None:
    torch.testing.assert_close(got.double(), want.double(), equal_nan=True, **tolerance)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (17, 65, 33), (300, 515, 70), (2, 3, 600), (700, 130, 1100), (3, 4, 0)]
)
@pytest.mark.parametrize("add", [False, True])
def test_widening_product(shape: tuple[int, int, int], add: bool) -> None:
    M, N, K = shape
    for a in (torch.randn(M, K), torch.randn(K, M).t()):
        for b in (torch.randn(K, N), torch.randn(N, K).t()):
            a16, b16, start = a.bfloat16(), b.bfloat16(), torch.randn(M, 2 * N)[:, :N]
            want = a16.double() @ b16.double() + (start.double() if add else 0)
            found = [product_with(n, start, a16, b16, add) for n in (1, 3)]
            close(found[0], want)
            assert found[0].equal(found[1])


def before_a_guard(x: Tensor) -> Tensor:
    """x in its own layout, NaN before it, and after its last number memory that faults."""
    page = mmap.PAGESIZE
    size = -(-x.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    end = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + size
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), ctypes.c_size_t(page), 0) == 0
    flat = torch.frombuffer(memory, dtype=x.dtype, count=size // x.itemsize).fill_(torch.nan)
    return flat.as_strided(x.shape, x.stride(), flat.numel() - x.numel()).copy_(x)


@pytest.mark.parametrize("shape", [(1, 1, 1), (17, 65, 33), (40, 64, 513), (3, 130, 31)])
def test_widening_product_reads_its_factors_alone(shape: tuple[int, int, int]) -> None:
    """Neither the memory around them nor what earlier products left in the packed blocks."""
    M, N, K = shape
    nothing = torch.full((1, 1), torch.nan, dtype=torch.bfloat16)
    for a in (torch.randn(M, K), torch.randn(K, M).t()):
        for b in (torch.randn(K, N), torch.randn(N, K).t()):
            a16, b16 = before_a_guard(a.bfloat16()), before_a_guard(b.bfloat16())
            before = nothing.expand(256, 1024), nothing.expand(1024, 1024)
            torch.ops.ppo_kernels.widening_product_(torch.empty(256, 1024), *before, False)
            found = product_with(1, torch.zeros(M, N), a16, b16, False)
            close(found, a16.double() @ b16.double())


def product_with(threads: int, start: Tensor, a: Tensor, b: Tensor, add: bool) -> Tensor:
    before, out = torch.get_num_threads(), torch.zeros(start.shape[0], 2 * start.shape[1])
    out = out[:, : start.shape[1]].copy_(start)  # rows apart, as in a chunk of logits
    torch.set_num_threads(threads)
    try:
        torch.ops.ppo_kernels.widening_product_(out, a, b, add)
    finally:
        torch.set_num_threads(before)
    return out


def in_24_bits(high: Tensor, low: Tensor) -> Tensor:
    """The numbers that high and low stand for, in fp64."""
    bits = (high.view(torch.int16).int() << 16) | (low.int() << 8)
    return bits.view(torch.float32).double()


def rounded(x: Tensor, precision: int) -> Tensor:
    """x in fp64, rounded to so many bits, ties to even."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(
        torch.round(torch.ldexp(mantissa, torch.tensor(precision))), exponent - precision
    )


def split_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """high and low, rows apart, of numbers that have 24 bits."""
    bits = x.float().view(torch.int32)
    assert (bits & 0xFF == 0).all()
    M, N = x.shape
    high = torch.full((M, N + 7), torch.nan, dtype=torch.bfloat16)
    low = torch.full((M, N + 5), 0xA5, dtype=torch.uint8)
    high[:, :N] = (bits >> 16).short().view(torch.bfloat16)
    low[:, :N] = (bits >> 8 & 0xFF).to(torch.uint8)
    return high, low


def split_sum(
    split_product_: Callable[..., None], start: Tensor, a: Tensor, b: Tensor, add: bool, last: bool
) -> Tensor:
    """What the op makes of sums at `start`, which begins on the 24 bits; nothing else changes."""
    (high, low), N = split_of(start), start.shape[1]
    split_product_(high[:, :N], low[:, :N], a, b, add, last)
    assert high[:, N:].isnan().all() and (low[:, N:] == 0xA5).all()
    return high[:, :N].double() if last else in_24_bits(high[:, :N], low[:, :N])


@split_product
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (17, 65, 33), (300, 515, 70), (2, 3, 600), (270, 130, 1100), (3, 20, 0)]
)
def test_split_product(split_product_: Callable[..., None], shape: tuple[int, int, int]) -> None:
    """The fp32 sums, rounded: to 16 bits of precision, or by the last product to bf16's 8."""
    M, N, K = shape
    start = rounded(torch.randn(M, N).double(), 16)
    for a in (torch.randn(M, K), torch.randn(K, M).t()):
        for b in (torch.randn(K, N), torch.randn(N, K).t()):
            a16, b16 = a.bfloat16(), b.bfloat16()
            for add, last in itertools.product((False, True), repeat=2):
                want = a16.double() @ b16.double() + (start if add else 0)
                found = split_sum(split_product_, start, a16, b16, add, last)
                assert found.equal(rounded(found, 8 if last else 16))
                tolerance = dict(tol.SUM_BF16 if last else tol.SUM_24_BITS)
                if K > 1024:  # after which the sums are rounded as between two calls
                    tolerance["atol"] += tol.SUM_24_BITS["rtol"] * want.abs().max().item()
                close(found, want, tolerance)


@split_product
def test_split_product_rounds_to_nearest_even(split_product_: Callable[..., None]) -> None:
    """Numbers of 8 bits, the last one 2, plus up to three units, half a unit at a time."""
    n = torch.arange(0, 4000, dtype=torch.float64)[None]
    one, whole = torch.ones(1, 1).bfloat16(), rounded(1 + n / 4000, 8)
    for last, precision in ((False, 16), (True, 8)):
        part = n % 7 * 2.0**-precision
        for sign in (1, -1):
            start, b = sign * whole, part.bfloat16()
            found = split_sum(split_product_, start, sign * one, b, True, last)
            assert found.equal(sign * rounded(whole + part, precision))


@split_product
def test_split_product_of_special_numbers(split_product_: Callable[..., None]) -> None:
    inf, nan, big = float("inf"), float("nan"), float(torch.finfo(torch.bfloat16).max)
    tiny = 2.0**-133  # bf16's smallest subnormal
    start = torch.tensor([[inf, -inf, inf, 0, -0.0, big, -big, tiny, 3]], dtype=torch.float64)
    factor = torch.tensor([[1, 1, -inf, nan, -0.0, big, -big, 0, inf]]).bfloat16()
    want = torch.tensor([[inf, -inf, nan, nan, 0, inf, -inf, tiny, inf]], dtype=torch.float64)
    one = torch.ones(1, 1).bfloat16()
    for last in (False, True):
        found = split_sum(split_product_, start, one, factor, True, last)
        close(found, want, {"rtol": 0, "atol": 0})


@split_product
def test_sums_of_many_split_products(split_product_: Callable[..., None]) -> None:
    """From 200 chunks: as near to the exact sums as bf16 comes."""
    M, N, K, chunks = 16, 48, 16, 200
    high, low = torch.empty(M, N, dtype=torch.bfloat16), torch.empty(M, N, dtype=torch.uint8)
    exact = torch.zeros(M, N, dtype=torch.float64)
    for i in range(chunks):
        a, b = (torch.randn(shape).bfloat16() for shape in ((M, K), (K, N)))
        exact += a.double() @ b.double()
        split_product_(high, low, a, b, i > 0, i == chunks - 1)
    once = (exact.bfloat16().double() - exact).norm()
    assert (high.double() - exact).norm() < tol.MANY_SUMS * once


def test_split_product_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference takes some rows at a time, in fp32 whatever torch's default is."""
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 16 * 40)
    a, b = torch.randn(9, 5).bfloat16(), torch.randn(5, 20).bfloat16()
    start = rounded(torch.randn(9, 20).double(), 16)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        found = split_sum(reference.split_product_, start, a, b, True, False)
    finally:
        torch.set_default_dtype(default)
    close(found, a.double() @ b.double() + start, tol.SUM_24_BITS)


def test_reference_of_split_product_keeps_any_nan() -> None:
    """Also one that rounding up would carry over to 0."""
    a = torch.tensor([-1, 2**31 - 1], dtype=torch.int32).view(torch.float32)[:, None]
    found = split_sum(
        reference.split_product_, torch.zeros(2, 3).double(), a, torch.ones(1, 3), False, False
    )
    assert found.isnan().all()


def test_split_product_refuses_other_memory_for_the_lower_bits() -> None:
    high, factor = torch.empty(3, 3).bfloat16(), torch.randn(3, 3).bfloat16()
    for low in (torch.empty(2, 3), torch.empty(3, 2), torch.empty(9)):
        with pytest.raises(RuntimeError):
            torch.ops.ppo_kernels.split_product_(high, low.byte(), factor, factor, False, False)


def test_split_product_on_threads() -> None:
    a, b = torch.randn(700, 300).bfloat16(), torch.randn(300, 200).bfloat16()
    start = rounded(torch.randn(700, 200).double(), 16)
    op, before, found = torch.ops.ppo_kernels.split_product_, torch.get_num_threads(), []
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            found.append(split_sum(op, start, a, b, True, False))
    finally:
        torch.set_num_threads(before)
    assert found[0].equal(found[1])
