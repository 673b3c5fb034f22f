"""logprobs_from_hidden, lm_loss, ppo_loss_from_hidden against the logits path, peers and fp64."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tolerances as tol
import torch
from memory import peak_bytes
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ppo_kernels as pk
from ppo_kernels import reference
from ppo_kernels.ops import _chunked
from ppo_kernels.ops._chunked import Problem
from ppo_kernels.ops.logprobs import in_bf16

# Numbers of TRL's chunked log-probs, verl's FusedLinearForPPO and cut-cross-entropy; for bf16
# inputs the fp64 values, because the peers round their logits.
with np.load(Path(__file__).parent / "data" / "hidden.npz") as stored:
    ORACLE = {key: torch.from_numpy(stored[key]) for key in stored.files}
CASES = sorted({key.split("/")[0] for key in ORACLE})
EVERYTHING = {"logit_scale": 0.7, "softcap": 3.0}


def problem(N: int = 23, H: int = 16, V: int = 37, dtype: torch.dtype = torch.float32) -> dict:
    labels = torch.randint(V, (N,))
    labels[0] = labels[-1] = -100
    floats = {"hidden": torch.randn(N, H), "weight": torch.randn(V, H), "bias": torch.randn(V)}
    return {k: x.to(dtype).requires_grad_() for k, x in floats.items()} | {"labels": labels}


def exact(x: dict) -> dict:
    return {
        k: t.detach().double().requires_grad_() if t.is_floating_point() else t
        for k, t in x.items()
    }


def by_logits(x: dict, labels: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    z = reference.logits_from_hidden(x["hidden"], x["weight"], x["bias"])
    labels = x["labels"] if labels is None else labels
    temperature = options.pop("temperature", 1.0)
    return reference.logprobs_and_entropy(z, labels, temperature, **options)


def gradients(y: Tensor, x: dict, **more: Any) -> list[Tensor]:
    wanted = [x[n] for n in ("hidden", "weight", "bias") if x[n].requires_grad]
    return list(torch.autograd.grad(y, wanted, **more))


def close(got: Any, want: Any, tolerance: dict[str, float] = tol.FP32) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b.double(), equal_nan=True, **tolerance)


def loss_inputs(x: dict) -> tuple[tuple, dict]:
    N = x["labels"].numel()
    logp, _ = by_logits(exact(x))
    old = logp.detach() + 0.2 * torch.randn(N)
    tensors = {"old_values": torch.randn(N), "returns": torch.randn(N), "ref_logprobs": old - 0.1}
    options = {"kl_coef": 0.1, "ent_coef": 0.01, "values": torch.randn(N).requires_grad_()}
    return (old, torch.randn(N), torch.rand(N) > 0.3), tensors | options


def expected_loss(x: dict, tokens: tuple, options: dict, **head: Any) -> Any:
    counts = tokens[2] & (x["labels"] != -100)  # an ignored label is no token of the loss
    labels = torch.where(counts, x["labels"], -100)
    logp, entropy = by_logits(x, labels, **head)
    return pk.ppo_loss(logp, *tokens[:2], counts, entropy=entropy, **options)


@pytest.mark.parametrize("case", CASES)
def test_recorded_numbers(case: str) -> None:
    a = {k.split("/")[1]: t for k, t in ORACLE.items() if k.startswith(case + "/")}
    dtype = torch.bfloat16 if case.endswith("_bf") else torch.float32
    leaves = {n: a[f"in.{n}"].to(dtype) for n in ("hidden", "weight", "bias") if f"in.{n}" in a}
    leaves = {n: t.requires_grad_() for n, t in leaves.items()}
    temperature, scale, cap = a["options"].tolist()
    head = {"temperature": temperature, "logit_scale": scale, "softcap": cap or None}
    logp, entropy = pk.logprobs_from_hidden(
        labels=a["in.target"], return_entropy=True, chunk_tokens=2, **head, **leaves
    )
    small = tol.BF16_GRADIENT if dtype == torch.bfloat16 else tol.ORACLE
    if "out.loss" in a:  # cut-cross-entropy: one output
        close([-logp], [a["out.loss"]], tol.ORACLE)
        found = torch.autograd.grad(-logp, list(leaves.values()), a["in.g"])
        close(found, [a[f"out.grad_{n}"] for n in leaves], small)
        return
    close([logp, entropy], [a["out.logp"], a["out.entropy"]], tol.ORACLE)
    for name, y, g in (("logp", logp, a["in.g"]), ("entropy", entropy, a["in.h"])):
        found = torch.autograd.grad(y, list(leaves.values()), g, retain_graph=True)
        for n, got in zip(leaves, found):
            if f"out.grad_{name}_{n}" in a:
                close([got], [a[f"out.grad_{name}_{n}"]], small)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("chunk", [None, 1, 5])
def test_logprobs_equal_the_logits_path(chunk: int | None, compact: bool) -> None:
    x = problem()
    temperature = torch.rand(23) + 0.5
    out = pk.logprobs_from_hidden(
        **x, temperature=temperature, return_entropy=True, chunk_tokens=chunk, compact=compact,
        **EVERYTHING,
    )  # fmt: skip
    want = exact(x)
    expected = by_logits(want, temperature=temperature.double(), **EVERYTHING)
    close(out, expected)
    g = torch.randn(2, 23)
    got = gradients((out[0] * g[0] + out[1] * g[1]).sum(), x)
    close(got, gradients((expected[0] * g[0] + expected[1] * g[1]).sum(), want))


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("chunk", [None, 1, 5])
def test_ppo_loss_equals_the_logits_path(chunk: int | None, compact: bool) -> None:
    x = problem()
    tokens, options = loss_inputs(x)
    how = {"chunk_tokens": chunk, "compact": compact, "bias": x["bias"], **EVERYTHING}
    got = pk.ppo_loss_from_hidden(x["hidden"], x["weight"], x["labels"], *tokens, **options, **how)
    want = exact(x)
    expected = expected_loss(want, tokens, options, **EVERYTHING)
    close([got.loss, got.stats.tensor], [expected.loss, expected.stats.tensor])
    values = options["values"]
    inputs = [x["hidden"], x["weight"], x["bias"], values]
    exact_inputs = [want["hidden"], want["weight"], want["bias"], values]
    # Twice through the same graph, with another factor: what is saved is not what is handed out.
    for factor, keep in ((1.0, True), (3.0, False)):
        found = torch.autograd.grad(got.loss * factor, inputs, retain_graph=keep)
        wanted = torch.autograd.grad(expected.loss * factor, exact_inputs, retain_graph=True)
        close(found, wanted)


def test_an_ignored_label_counts_as_little_as_from_logits() -> None:
    x = problem()
    (old, advantages, _), _ = loss_inputs(x)
    assert (x["labels"] == -100).any()
    got = pk.ppo_loss_from_hidden(x["hidden"], x["weight"], x["labels"], old, advantages)
    logits = x["hidden"].detach() @ x["weight"].detach().T
    want = pk.ppo_loss_from_logits(logits, x["labels"], old, advantages)
    assert got.stats.n == (x["labels"] != -100).sum()
    close([got.loss, got.stats.tensor], [want.loss, want.stats.tensor])


def test_rows_without_gradient_leave_the_gemms() -> None:
    x = problem()
    (old, advantages, mask), _ = loss_inputs(x)
    old = old - 2 * advantages.sign() * (torch.arange(23) % 2)  # every other row is clipped
    tokens = (old, advantages, mask)
    arguments = (x["hidden"], x["weight"], x["labels"], *tokens)
    got = pk.ppo_loss_from_hidden(*arguments, bias=x["bias"], chunk_tokens=6)
    want = exact(x)
    expected = expected_loss(want, tokens, {})
    assert (expected.stats.clipfrac > 0.2) and (expected.stats.clipfrac < 0.9)
    close(gradients(got.loss, x), gradients(expected.loss, want))


@pytest.mark.parametrize("reduction", ["seq-mean-token-mean", "seq-mean-token-sum", "sum"])
def test_padded_reductions(reduction: str) -> None:
    x = problem(24)
    tokens, options = loss_inputs(x)
    tokens = tuple(t.view(4, 6) for t in tokens)
    options = {k: t.view(4, 6) if isinstance(t, Tensor) else t for k, t in options.items()}
    options |= {"reduction": reduction, "normalizer": torch.tensor(7.0)}
    x |= {"hidden": x["hidden"].detach().view(4, 6, -1).requires_grad_()}
    x |= {"labels": x["labels"].view(4, 6)}
    arguments = (x["hidden"], x["weight"], x["labels"], *tokens)
    got = pk.ppo_loss_from_hidden(*arguments, bias=x["bias"], chunk_tokens=5, **options)
    want = exact(x)
    expected = expected_loss(want, tokens, options)
    close([got.loss], [expected.loss])
    close(gradients(got.loss, x), gradients(expected.loss, want))


def test_a_normalizer_is_a_real_number() -> None:
    hidden, weight, labels = torch.ones(2, 3), torch.ones(4, 3), torch.zeros(2, dtype=torch.int64)
    for wrong in (torch.tensor(2 + 3j), torch.tensor(True)):
        with pytest.raises(TypeError, match="normalizer must have dtype"):
            pk.lm_loss(hidden, weight, labels, normalizer=wrong)


@pytest.mark.parametrize("normalizer", [None, 11.0])
def test_lm_loss(normalizer: float | None) -> None:
    x = problem()
    loss, want = pk.lm_loss(**x, normalizer=normalizer, chunk_tokens=4), exact(x)
    logp, _ = by_logits(want)
    expected = -logp.sum() / (normalizer or (x["labels"] != -100).sum())
    close([loss], [expected])
    close(gradients(loss, x), gradients(expected, want))
    x["labels"].fill_(-100)
    nothing = pk.lm_loss(**x)
    assert nothing == 0 and all((g == 0).all() for g in gradients(nothing, x))


def test_gradcheck() -> None:
    x = problem(5, 3, 7, torch.float64)

    def run(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple:
        return pk.logprobs_from_hidden(
            hidden, weight, x["labels"][:5], bias=bias, return_entropy=True, chunk_tokens=2,
            temperature=0.7, **EVERYTHING,
        )  # fmt: skip

    x["labels"][0] = 1
    assert torch.autograd.gradcheck(run, (x["hidden"], x["weight"], x["bias"]))


# d(bias) needs d(logits) in fp32; where there is none, bf16 ones take the place of the logits.
frozen_bias = pytest.mark.parametrize("frozen_bias", [False, True])


@frozen_bias
def test_bf16_beats_eager_bf16(frozen_bias: bool) -> None:
    x = problem(64, 32, 501, torch.bfloat16)
    x["bias"].requires_grad_(not frozen_bias)
    tokens, options = loss_inputs(x)
    want = exact(x)
    expected = gradients(expected_loss(want, tokens, options).loss, want)
    arguments = (x["hidden"], x["weight"], x["labels"], *tokens)
    ours = pk.ppo_loss_from_hidden(*arguments, bias=x["bias"], chunk_tokens=9, **options)
    labels = torch.where(tokens[2], x["labels"], -100)
    logits = torch.nn.functional.linear(x["hidden"], x["weight"], x["bias"])
    logp, entropy = reference.logprobs_and_entropy(logits, labels)
    eager = pk.ppo_loss(logp, *tokens, entropy=entropy, **options)
    for a, b, e in zip(gradients(ours.loss, x), gradients(eager.loss, x), expected):
        assert (a - e).norm() < 0.7 * (b - e).norm()
        assert (a - e).norm() < tol.BF16_GRADIENT["rtol"] * e.norm()


# Whether a bf16 dW is summed as on a CPU, in 24 bits, or as on CUDA, and bytes for that beside dW:
# none, some, as many as it wants.
sums = pytest.mark.parametrize("split", [True, False])
spare = pytest.mark.parametrize("spare", [0, 150, 10**6])


def limit_sums(monkeypatch: pytest.MonkeyPatch, split: bool, spare: int) -> None:
    monkeypatch.setattr(_chunked, "_splits", lambda weight: split)
    monkeypatch.setitem(_chunked.SUM_BYTES, "cpu", spare)


@frozen_bias
@sums
@spare
def test_sums_of_a_bf16_weight(
    split: bool, spare: int, frozen_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dW's memory first holds sums of its rows; columns without any are made again."""
    limit_sums(monkeypatch, split, spare)
    monkeypatch.setitem(_chunked.BLOCK_BYTES, "cpu", 100)
    x = problem(40, 8, 33, torch.bfloat16)
    x["bias"].requires_grad_(not frozen_bias)
    want = exact(x)
    expected = -by_logits(want)[0].sum() / (x["labels"] != -100).sum()
    expected = gradients(expected, want)
    for chunk_tokens in (7, 40):
        loss = pk.lm_loss(**x, chunk_tokens=chunk_tokens)
        for a, e in zip(gradients(loss, x), expected):
            assert (a - e).norm() < tol.BF16_GRADIENT["rtol"] * e.norm()


def test_rows_with_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rows of 33 have sums, and where those lie: 8 numbers a row."""
    p = Problem(**problem(40, 8, 33, torch.bfloat16), **dict.fromkeys(Problem._fields[4:]))
    found = []
    for split, spare in itertools.product((True, False), (0, 150, 10**6)):
        limit_sums(monkeypatch, split, spare)
        kind = _chunked._SplitSums if split else _chunked._WideSums
        found.append(kind(p).edges)
    in_24_bits = [(0, 22, 22, 33), (0, 10, 28, 33), (0, 0, 33, 33)]
    in_fp32 = [(0, 16, 16, 33), (0, 16, 20, 33), (0, 16, 33, 33)]
    assert found == in_24_bits + in_fp32


@pytest.mark.parametrize("kind", [_chunked._SplitSums, _chunked._WideSums])
@spare
def test_sums_of_many_chunks(kind: type, spare: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As near to the exact sums as bf16 comes, wherever the sums of a row lie."""
    monkeypatch.setitem(_chunked.SUM_BYTES, "cpu", spare)
    p = Problem(**problem(40, 8, 33, torch.bfloat16), **dict.fromkeys(Problem._fields[4:]))
    sums, want = kind(p), torch.zeros(33, 8, dtype=torch.float64)
    for i in range(100):
        dz, x = torch.randn(33, 16).bfloat16(), torch.randn(16, 8).bfloat16()
        want += dz.double() @ x.double()
        for first, end in itertools.pairwise(sums.edges[:3]):
            for cols in _chunked._slices(end, 5, first):
                sums.add(cols, dz[cols], x, last=i == 99)
        sums.begun = True
    sums.finish()
    found, want = sums.out[: sums.summed].double(), want[: sums.summed]
    once = (want.bfloat16().double() - want).norm()
    assert (found - want).norm() < tol.MANY_SUMS * once


@sums
def test_sums_are_rounded_not_cut(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off they would be 2^-8.5 smaller on average. In each chunk some rows have a gradient."""
    limit_sums(monkeypatch, split, 10**6)
    x = problem(40, 16, 200, torch.bfloat16)
    want = exact(x)
    # d(logits) of a label is nearly the advantage: a number that bf16 has.
    old, advantages = by_logits(want)[0].detach().float(), torch.tensor([1.0, -1, 0, 1]).repeat(10)
    tokens, options = (old, advantages, x["labels"] != -100), {"reduction": "sum"}
    arguments = (x["hidden"], x["weight"], x["labels"], *tokens)
    got = pk.ppo_loss_from_hidden(*arguments, bias=x["bias"], chunk_tokens=7, **options)
    a = gradients(got.loss, x)[1]
    e = gradients(expected_loss(want, tokens, options).loss, want)[1]
    assert abs((a * e).sum() / (e * e).sum() - 1) < tol.ROUNDING_BIAS


def test_rows_with_an_entropy_alone_have_a_gradient() -> None:
    """No advantage and no KL: what leaves the GEMMs has no gradient of the log-prob either."""
    x = problem(30, 16, 37)
    want = exact(x)
    tokens = (torch.randn(30), torch.zeros(30), torch.ones(30, dtype=torch.bool))
    arguments = (x["hidden"], x["weight"], x["labels"], *tokens)
    got = pk.ppo_loss_from_hidden(*arguments, bias=x["bias"], chunk_tokens=10, ent_coef=1.0)
    close(
        gradients(got.loss, x), gradients(expected_loss(want, tokens, {"ent_coef": 1.0}).loss, want)
    )


@sums
def test_sums_with_an_entropy(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns made again need the entropy of their rows."""
    limit_sums(monkeypatch, split, 0)
    x = problem(40, 8, 33, torch.bfloat16)
    tokens, options = loss_inputs(x)
    options["ent_coef"] = 3.0
    want = exact(x)
    arguments = (x["hidden"], x["weight"], x["labels"], *tokens)
    got = pk.ppo_loss_from_hidden(*arguments, bias=x["bias"], chunk_tokens=7, **options)
    expected = gradients(expected_loss(want, tokens, options).loss, want)
    for a, e in zip(gradients(got.loss, x), expected):
        assert (a - e).norm() < tol.BF16_GRADIENT["rtol"] * e.norm()


def test_a_bias_has_its_gradient_in_fp32() -> None:
    """It is the sum of d(logits) that GEMMs would have rounded to bf16."""
    x = problem(dtype=torch.bfloat16)
    x["bias"] = torch.randn(37, requires_grad=True)
    want = exact(x)
    for op in (pk.lm_loss, pk.logprobs_from_hidden):
        got, expected = (gradients(op(**each).sum(), each)[2] for each in (x, want))
        close([got], [expected])


def test_memory_of_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients, the workspace, and sums that the workspace made room for; little else."""
    monkeypatch.setattr(_chunked, "SHARED_BYTES", 2**20)
    monkeypatch.setitem(_chunked.SUM_BYTES, "cpu", 2**16)
    monkeypatch.setitem(_chunked.BLOCK_BYTES, "cpu", 2**14)
    x = problem(1000, 32, 3000, torch.bfloat16)
    x["bias"].requires_grad_(False)
    gradient_bytes = x["hidden"].nbytes + x["weight"].nbytes
    used = peak_bytes(lambda: pk.lm_loss(**x))
    assert used <= gradient_bytes + 2**20 + 64 * 1000  # bytes a row


def test_memory_of_a_loss_whose_rows_are_wider_than_its_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chunk's hidden and their gradients count as its logits do."""
    monkeypatch.setattr(_chunked, "WORKSPACE_BYTES", 2**20)
    x = problem(1000, 256, 30)
    gradient_bytes = x["hidden"].nbytes + x["weight"].nbytes
    used = peak_bytes(lambda: pk.lm_loss(**x))
    assert used <= gradient_bytes + 2**20 + 64 * 1000  # bytes a row


def test_columns_use_the_memory_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """However the numbers divide: memory of their own would be as much again."""
    carved = _chunked._carved

    def inside(room: Tensor, *args: Any) -> list[Tensor]:
        parts = carved(room, *args)
        place = room.untyped_storage().data_ptr()
        assert all(part.untyped_storage().data_ptr() == place for part in parts)
        return parts

    monkeypatch.setattr(_chunked, "_carved", inside)
    for split in (True, False):
        limit_sums(monkeypatch, split, 0)
        for V in range(200, 264):
            pk.lm_loss(**problem(5, 16, V, torch.bfloat16), chunk_tokens=3)


@frozen_bias
@sums
def test_chunks_without_a_gradient_add_nothing(
    split: bool, frozen_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of clipped rows has nothing for its GEMMs, be it the first, one in between, the last,
    which rounds the sums, or every one; of others some rows leave."""
    limit_sums(monkeypatch, split, 200)
    x = problem(30, 16, 37, torch.bfloat16)
    x["bias"].requires_grad_(not frozen_bias)
    x["labels"] = torch.randint(37, (30,))
    want = exact(x)
    old = by_logits(want)[0].detach().float()
    advantages = torch.randn(30)
    for dead in ((0, 10), (10, 20), (20, 30), (0, 30), (12, 17)):
        clipped = old.clone()
        clipped[slice(*dead)] -= 2 * advantages[slice(*dead)].sign()
        tokens = (clipped, advantages, torch.ones(30, dtype=torch.bool))
        arguments = (x["hidden"], x["weight"], x["labels"], *tokens)
        got = pk.ppo_loss_from_hidden(*arguments, bias=x["bias"], chunk_tokens=10)
        found = gradients(got.loss, x)
        for a, e in zip(found, gradients(expected_loss(want, tokens, {}).loss, want)):
            assert (a - e).norm() <= tol.BF16_GRADIENT["rtol"] * e.norm()
        assert (found[0][slice(*dead)] == 0).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_bf16_gradient_in_the_place_of_fp32_logits(threads: int) -> None:
    """The bits of the fp32 gradient, rounded; V: two pieces of a row and a part of a vector."""
    N, V = 5, 32777
    z, labels = torch.randn(N, V) * 3, torch.tensor([3, 32776, -100, 16384, 7])
    g, h = torch.randn(N), torch.randn(N)
    g[4] = h[4] = 0  # not read, and 0
    transform = (None, 0.7, 1.3, 0.0, -100)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for softcap in (0.0, 20.0):
            options = (*transform[:3], softcap, -100)
            _, entropy, *softmax, _ = torch.ops.ppo_kernels.logprobs_fwd(
                z, labels, *options, True, False
            )
            for gradients_given in ((g, h, entropy), (g, None, None)):
                args = (*gradients_given[:2], labels, *options, *softmax, gradients_given[2], None)
                want = torch.ops.ppo_kernels.logprobs_bwd(z, *args).bfloat16()
                buffer = z.clone()
                torch.ops.ppo_kernels.logprobs_bwd_bf16_(buffer, *args)
                assert in_bf16(buffer).equal(want)
    finally:
        torch.set_num_threads(before)


def test_bf16_logits() -> None:
    """logits_dtype=torch.bfloat16: coarser by the rounding of each logit, and by no more."""
    x = problem(40, 32, 300, torch.bfloat16)
    x["weight"] = (x["weight"].detach() / 4).requires_grad_()  # |z| < 8
    want = exact(x)
    expected = by_logits(want)
    assert (want["hidden"] @ want["weight"].T + want["bias"]).abs().max() < 8
    exact_logp = pk.logprobs_from_hidden(**x)
    got = pk.logprobs_from_hidden(
        **x, logits_dtype=torch.bfloat16, return_entropy=True, chunk_tokens=7
    )
    assert (got[0] - expected[0]).abs().max() > 10 * (exact_logp - expected[0]).abs().max()
    close(got, expected, tol.BF16_LOGITS)
    loss = pk.lm_loss(**x, logits_dtype=torch.bfloat16)
    expected_loss = -expected[0].sum() / (x["labels"] != -100).sum()
    for found in (gradients(got[0].sum(), x), [g * -38 for g in gradients(loss, x)]):
        wanted = gradients(expected_loss * -38, want, retain_graph=True)
        for a, e in zip(found, wanted):
            assert (a - e).norm() < tol.BF16_LOGITS_GRADIENT * e.norm()


def test_fp16() -> None:
    """fp16 products are summed in fp32, and gradients below fp16's range live to be scaled."""
    x = problem(24, 16, 37, torch.float16)
    tokens, options = loss_inputs(x)
    want = exact(x)
    out = pk.logprobs_from_hidden(**x, return_entropy=True, chunk_tokens=5)
    assert out[0].dtype == torch.float32
    close(out, by_logits(want))
    arguments = (x["hidden"], x["weight"], x["labels"], *tokens)
    got = pk.ppo_loss_from_hidden(*arguments, bias=x["bias"], chunk_tokens=5, **options)
    expected = expected_loss(want, tokens, options)
    close([got.loss], [expected.loss])
    large = 2.0**20  # the tokens of a large batch, and a loss scale against them
    found = gradients(got.loss, x)
    assert [g.dtype for g in found] == [torch.float16] * 3
    for a, e in zip(found, gradients(expected.loss, want)):
        assert (a - e).norm() < tol.FP16_GRADIENT * e.norm()
    options["normalizer"] = got.stats.n * large
    far = pk.ppo_loss_from_hidden(*arguments, bias=x["bias"], **options)
    for a, e in zip(gradients(far.loss * large, x), found):
        assert (a - e).norm() < tol.FP16_GRADIENT * e.norm()


def test_a_weight_of_more_than_2_31_numbers() -> None:
    """Only its first and last rows are not 0, so that their columns give the answer."""
    V, H, ends = 2**21 + 64, 1024, 100
    # Zeros from the system that nobody writes: the memory of one page.
    weight = torch.from_numpy(np.zeros((V, H), np.uint16)).view(torch.bfloat16)
    for rows in (weight[:ends], weight[-ends:]):
        rows.copy_(0.1 * torch.randn(ends, H))
    hidden = torch.randn(2, H).bfloat16().requires_grad_()
    loss = pk.lm_loss(hidden, weight, torch.tensor([V - 1, V - 50]))
    (grad,) = torch.autograd.grad(loss, hidden)
    h = hidden.detach().double().requires_grad_()
    z = h @ torch.cat([weight[:ends], weight[-ends:]]).double().T
    zeros = torch.tensor(V - 2.0 * ends, dtype=torch.float64).log()
    total = torch.logaddexp(z.logsumexp(-1), zeros)
    expected = (total - z[[0, 1], [-1, -50]]).mean()
    close([loss], [expected])
    (want,) = torch.autograd.grad(expected, h)
    assert (grad - want).norm() < tol.BF16_GRADIENT["rtol"] * want.norm()


def test_frozen_inputs_and_untrained_rows() -> None:
    x = problem()
    tokens, options = loss_inputs(x)
    x["weight"].requires_grad_(False)
    # Neither labels nor hidden states of masked tokens are read.
    junk = torch.where(tokens[2].unsqueeze(-1), x["hidden"].detach(), torch.nan).requires_grad_()
    loss = pk.ppo_loss_from_hidden(junk, x["weight"], x["labels"], *tokens, **options).loss
    loss.backward()
    assert x["weight"].grad is None and junk.grad.isfinite().all()
    assert (junk.grad[~tokens[2]] == 0).all()
    with torch.no_grad():
        again = pk.ppo_loss_from_hidden(junk, x["weight"], x["labels"], *tokens, **options)
    assert not again.loss.requires_grad and again.loss == loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compact", [True, False])
def test_a_chunk_without_any_gradient_adds_nothing(dtype: torch.dtype, compact: bool) -> None:
    """Every token clipped in most chunks: their products have no inner dimension left."""
    x = problem(40, dtype=dtype)
    x["labels"][0] = 1
    with torch.no_grad():
        junk = torch.full((200, 200), 3.0, dtype=dtype) @ torch.full((200, 200), 5.0, dtype=dtype)
        assert junk.isfinite().all()  # whatever scratch memory GEMMs keep is not 0 now
        old = pk.logprobs_from_hidden(**x) - 1
    advantages = torch.zeros(40)
    advantages[0] = -1.0  # not clipped above; the other tokens have nothing to gain
    loss = pk.ppo_loss_from_hidden(**x, old_logprobs=old, advantages=advantages, chunk_tokens=8,
                                   compact=compact).loss  # fmt: skip
    got, e = gradients(loss, x), exact(x)
    logp, _ = by_logits(e)
    want = gradients(torch.exp(logp[0] - old[0].double()) / 39, e)
    close(got, want, tol.FP32 if dtype == torch.float32 else tol.BF16_GRADIENT)


@pytest.mark.parametrize("op", ["ppo_loss", "lm_loss", "logprobs"])
def test_all_rows_in_the_gemms_and_nan_in_those_that_do_not_count(op: str) -> None:
    """compact=False multiplies dead rows by 0, and 0 * NaN would be NaN in all of dW."""
    x = problem()
    dead = torch.arange(23) % 5 == 2
    labels = x.pop("labels").masked_fill(dead, -100)
    found = []
    for poison, compact in ((0.0, True), (torch.nan, False)):
        h = torch.where(dead.unsqueeze(-1), poison, x["hidden"].detach()).requires_grad_()
        y = {**x, "hidden": h}
        call = {**y, "labels": labels, "chunk_tokens": 6, "compact": compact}
        if op == "ppo_loss":
            loss = pk.ppo_loss_from_hidden(
                **call, old_logprobs=torch.full((23,), -3.0), advantages=torch.ones(23)
            ).loss
        else:
            loss = pk.lm_loss(**call) if op == "lm_loss" else pk.logprobs_from_hidden(**call).sum()
        found.append([loss, *gradients(loss, y)])
    close(found[1], found[0])


@pytest.mark.parametrize("op", [pk.lm_loss, pk.logprobs_from_hidden])
def test_fp64_hidden_states_and_a_bf16_weight(op: Any) -> None:
    x = problem(V=50) | {"hidden": torch.randn(23, 16, dtype=torch.float64, requires_grad=True)}
    x["weight"] = x["weight"].detach().bfloat16().requires_grad_()
    got, e = gradients(op(**x).sum(), x), exact(x)
    want = gradients(op(**e).sum(), e)
    assert [g.dtype for g in got] == [torch.float64, torch.bfloat16, torch.float32]
    close(got[::2], want[::2], tol.FP32_SUM)
    close(got[1:2], want[1:2], tol.BF16_GRADIENT)


def test_label_out_of_range_poisons_its_row() -> None:
    x = problem()
    x["labels"][3] = 37
    logp = pk.logprobs_from_hidden(**x, chunk_tokens=4)
    assert logp.isnan().nonzero().flatten().tolist() == [3]
    grad = gradients(logp.sum(), x)[0]
    assert grad[3].isnan().all() and grad[torch.arange(23) != 3].isfinite().all()


def test_meta() -> None:
    x = {k: t.to("meta") for k, t in problem().items()}
    assert pk.logprobs_from_hidden(**x).shape == (23,) and pk.lm_loss(**x).shape == ()


def test_empty() -> None:
    x = problem()
    x |= {"hidden": x["hidden"][:0], "labels": x["labels"][:0]}
    assert pk.logprobs_from_hidden(**x).shape == (0,)
    assert pk.lm_loss(**x) == 0


def test_compile_checkpoint_and_autocast() -> None:
    x = problem()
    tokens, options = loss_inputs(x)

    def run(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        logp = pk.logprobs_from_hidden(hidden, weight, x["labels"], bias=bias)
        loss = pk.ppo_loss_from_hidden(hidden, weight, x["labels"], *tokens, bias=bias, **options)
        return loss.loss + logp.mean() + pk.lm_loss(hidden, weight, x["labels"], bias=bias)

    inputs = (x["hidden"], x["weight"], x["bias"])
    want = run(*inputs)
    for other in (
        torch.compile(run, fullgraph=True, backend="aot_eager"),
        lambda *a: checkpoint(run, *a, use_reentrant=False),
    ):
        got = other(*inputs)
        close([got], [want])
        close(gradients(got, x), gradients(want, x, retain_graph=True))
    with torch.autocast("cpu", torch.bfloat16):
        got = run(*inputs)
    rounded = run(*(t.bfloat16() for t in inputs))
    close([got], [rounded])
    assert [g.dtype for g in gradients(got, x)] == [torch.float32] * 3


def test_inductor() -> None:
    x = problem(6, 8, 11)
    tokens, options = loss_inputs(x)

    def run(hidden: Tensor, weight: Tensor) -> Tensor:
        h = hidden.sin()
        return pk.ppo_loss_from_hidden(h, weight, x["labels"], *tokens, **options).loss

    inputs = (x["hidden"], x["weight"])
    got, want = torch.compile(run, fullgraph=True)(*inputs), run(*inputs)
    close([got], [want])
    close(torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(23, 9)}, "hidden must have shape"),
        ({"weight": torch.zeros(0)}, "weight must have shape"),
        ({"labels": torch.zeros(22, dtype=torch.int64)}, "labels must have shape"),
        ({"bias": torch.zeros(3)}, "bias must have shape"),
        ({"weight": torch.zeros(37, 16, device="meta")}, "weight must be on cpu"),
        ({"chunk_tokens": 0}, "chunk_tokens must be >= 1"),
        ({"logits_dtype": torch.float16}, "logits_dtype must be"),
        ({"logits_dtype": torch.bfloat16}, "needs bfloat16 hidden"),
    ],
)
def test_errors(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pk.logprobs_from_hidden(**(problem() | change))


def test_unknown_keywords() -> None:
    x = problem()
    tokens, _ = loss_inputs(x)
    with pytest.raises(TypeError, match="lm_loss got an unexpected keyword argument 'biass'"):
        pk.lm_loss(x["hidden"], x["weight"], x["labels"], biass=x["bias"])
    with pytest.raises(TypeError, match=r"ppo_loss_from_hidden got .* 'entropy'"):
        pk.ppo_loss_from_hidden(
            x["hidden"], x["weight"], x["labels"], *tokens, entropy=torch.zeros(23)
        )


def test_workspace_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_chunked, "WORKSPACE_BYTES", 100)
    with pytest.raises(ValueError, match="one row of logits"):
        pk.lm_loss(**problem())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    x = problem(200, 64, 1000, dtype)
    tokens, options = loss_inputs(x)
    want = exact(x)
    expected = expected_loss(want, tokens, options)
    on = {k: t.detach().cuda().requires_grad_(t.requires_grad) for k, t in x.items()}
    options = {k: t.detach().cuda() if isinstance(t, Tensor) else t for k, t in options.items()}
    got = pk.ppo_loss_from_hidden(
        on["hidden"], on["weight"], on["labels"], *(t.cuda() for t in tokens), bias=on["bias"],
        chunk_tokens=64, **options,
    )  # fmt: skip
    close([got.loss.cpu()], [expected.loss])
    for a, e in zip(gradients(got.loss, on), gradients(expected.loss, want)):
        assert (a.cpu() - e).norm() < tol.BF16_GRADIENT["rtol"] * e.norm()
