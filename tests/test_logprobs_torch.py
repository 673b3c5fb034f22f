"""logprobs_from_logits inside torch: op contracts, compiled graphs, memory, ranks, errors, GPUs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tolerances as tol
import torch
import torch.distributed as dist
from backends import logprob_kernels, use
from memory import peak_bytes
from processes import run_ranks
from torch import Tensor

import ppo_kernels as pk
from ppo_kernels import reference

OPS = torch.ops.ppo_kernels
PLAIN = (None, 1.0, 1.0, 0.0, -100)


def expected(logits: Tensor, labels: Tensor, g: Tensor, h: Tensor, **options: Any) -> list[Tensor]:
    """fp64 (logp, entropy, gradient of sum g logp + h H) by autograd through the definition."""
    x = logits.detach().double().cpu().requires_grad_()
    out = reference.logprobs_and_entropy(x, labels.cpu(), **options)
    (out[0] * g + out[1] * h).sum().backward()
    return [out[0].detach(), out[1].detach(), x.grad]


def close(got: Tensor, want: Tensor, tolerance: dict[str, float] = tol.FP32) -> None:
    got, want = got.detach().double().cpu(), want.double().cpu()
    torch.testing.assert_close(got, want, equal_nan=True, **tolerance)


# --------------------------------------------------------------------------------- the ops


def op_arguments(name: str, logits: Tensor, dtype: torch.dtype) -> tuple:
    real = torch.float64 if dtype == torch.float64 else torch.float32
    logits = logits.to(dtype)
    labels = torch.randint(0, logits.shape[-1], logits.shape[:-1], dtype=torch.int32)
    temperatures = torch.rand(labels.shape, dtype=real) + 0.5
    transform = (temperatures, 1.0, 1.2, 9.0, -100)
    if name == "logprobs_fwd":
        return logits, labels, *transform, True, True
    shard = torch.tensor([3, 3 + logits.shape[-1]])
    if name == "logprobs_partials":
        return logits, labels, *transform, shard, False
    _, entropy, row_max, log_sum, _ = OPS.logprobs_fwd(logits, labels, *transform, True, False)
    grads = torch.randn_like(entropy), torch.randn_like(entropy)
    return logits, *grads, labels, *transform, row_max, log_sum, entropy, shard


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "name", ["logprobs_fwd", "logprobs_partials", "logprobs_bwd", "logprobs_bwd_"]
)
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    """Schema, fake and functionalisation of what the CPU runs, dense permuted input included."""
    for logits in (torch.randn(3, 40), torch.randn(2, 5, 40).transpose(0, 1)):
        args = op_arguments(name, logits, dtype)
        torch.library.opcheck(getattr(OPS, name).default, args)


def refused_calls() -> dict[str, Any]:
    """What behind the public function would be read wrongly, by what the error names."""
    x, y, one = torch.randn(3, 8), torch.zeros(3, dtype=torch.int64), torch.ones(3)
    shard = torch.tensor([0, 8])

    def fwd(x: Any = x, y: Any = y, temperatures: Any = None) -> Any:
        return lambda: OPS.logprobs_fwd(x, y, temperatures, *PLAIN[1:], False, False)

    def bwd(g: Any = one, h: Any = None, entropy: Any = None, shard: Any = shard) -> Any:
        return lambda: OPS.logprobs_bwd(x, g, h, y, *PLAIN, one, one, entropy, shard)

    return {
        "labels must have the shape": fwd(y=y[:2]),
        "labels must be contiguous": fwd(y=torch.zeros(6, dtype=torch.int64)[::2]),
        "labels must be int64 or int32": fwd(y=y.to(torch.int16)),
        "logits must be": fwd(torch.randn(2, 2, 3, 8), torch.zeros(2, 2, 3, dtype=torch.int64)),
        "last dimension of logits": fwd(torch.randn(8, 3).t()),
        "temperatures must": fwd(temperatures=one.double()),
        "grad_logprobs must": bwd(g=torch.ones(2)),
        "grad_logprobs must be contiguous": bwd(g=torch.ones(1).expand(3)),
        "grad_entropy needs": bwd(h=one),
        "shard must": bwd(shard=torch.tensor([0])),
        "shard must be int64": bwd(shard=shard.int()),
    }


@pytest.mark.parametrize("message", refused_calls())
def test_cpu_ops_refuse_what_they_would_misread(message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        refused_calls()[message]()


# ---------------------------------------------------------------------------- torch.compile


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_is_eager(compiler: str) -> None:
    """One graph for every N. Liger#1338: under compile, any ignored row gave 61.7, not 21.4."""

    def step(x: Tensor, y: Tensor, t: Tensor) -> Tensor:
        logp, H, stats = pk.logprobs_from_logits(
            x[:, :-1], y, temperature=t, softcap=9.0, return_entropy=True, return_stats=True
        )
        plain = pk.logprobs_from_logits(x[:, 1:] * 1, y, inplace_backward=True)
        return (logp * 2 + H).sum() + stats.lse.mean() + plain.mean()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=compiler)
    for B, T in ((2, 5), (3, 4), (6, 9)):
        x = torch.randn(B, T, 50, requires_grad=True)
        y = torch.randint(0, 50, (B, T - 1))
        y[1] = -100
        t = torch.rand(B, T - 1) + 0.5
        losses, grads = [], []
        for f in (compiled, step):
            x.grad = None
            with torch._dynamo.config.patch(error_on_recompile=B > 2):
                loss = f(x, y, t)
            loss.backward()
            losses.append(loss.detach())
            grads.append(x.grad)
        torch.testing.assert_close(losses[0], losses[1], **tol.FP32)
        torch.testing.assert_close(grads[0], grads[1], **tol.FP32)


def test_compiled_temperature_is_no_constant() -> None:
    """A new number must not mean a new graph, after the first change has made it symbolic."""

    def logp(x: Tensor, y: Tensor, t: float) -> Tensor:
        return pk.logprobs_from_logits(x, y, temperature=t)

    torch._dynamo.reset()
    f = torch.compile(logp, fullgraph=True, backend="aot_eager")
    x, y = torch.randn(4, 50), torch.randint(0, 50, (4,))
    for i, t in enumerate((0.7, 0.8, 0.9, 1.1, 1.3)):
        with torch._dynamo.config.patch(error_on_recompile=i > 1):
            torch.testing.assert_close(f(x, y, t), logp(x, y, t), **tol.FP32)


# ----------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("options", [{}, {"return_entropy": True, "return_stats": True}])
def test_peak_memory(options: dict[str, bool]) -> None:
    """Forward: 64 bytes a row. Backward: the gradient, or in place nothing of that size."""
    N, V = 64, 30000
    x, y = torch.randn(N, V).bfloat16().requires_grad_(), torch.randint(0, V, (N,))
    assert peak_bytes(lambda: pk.logprobs_from_logits(x, y, **options)) <= 64 * N
    for inplace, allowed in ((False, x.nbytes + 64 * N), (True, 64 * N)):
        z = x * 1
        out = pk.logprobs_from_logits(z, y, inplace_backward=inplace, **options)
        loss = (out[0] + out[1] if options else out).sum()
        used = peak_bytes(lambda: torch.autograd.grad(loss, z))  # noqa: B023
        assert used <= allowed


# ------------------------------------------------------------------ slices of the vocabulary


SLICES = (300, 641, 59)


def sharded_input() -> tuple[Tensor, Tensor, Tensor]:
    """logits [7, 1000], labels and a temperature per row. One label in each slice, one on the
    border (apple#59: an off-shard target matched a padded column), one ignored, one outside;
    masked columns, among them a whole slice."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(7, sum(SLICES), generator=generator) * 4
    x[1, :300] = -torch.inf
    x[4, 300:] = -torch.inf
    y = torch.tensor([0, 950, 300, -100, 299, 1000, 941])
    return x, y, torch.rand(7, generator=generator) + 0.5


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_merged_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops of every backend on slices, merged in one process."""
    device = use(monkeypatch, name, logprob_kernels()).device
    x, y, t = sharded_input()
    g, h = torch.randn(7), torch.randn(7)
    want = expected(x, y, g, h, temperature=t.double())
    transform = (t.to(device), 1.0, 1.0, 0.0, -100)
    first, parts, dx = 0, [], []
    slices = [part.to(device) for part in x.split(SLICES, -1)]
    ranges = []
    for part in slices:
        shard = torch.tensor([first, sum(SLICES)], device=device)
        ranges.append(shard)
        parts.append(OPS.logprobs_partials(part, y.to(device), *transform, shard, True))
        first += part.shape[-1]
    merged = reference.merge_partials(torch.stack(parts))
    out = reference.finish_partials(merged, y.to(device), -100, sum(SLICES))
    logp, entropy, row_max, log_sum, sum_p2 = out
    for part, shard in zip(slices, ranges):
        saved = (row_max, log_sum, entropy, shard)
        dx.append(
            OPS.logprobs_bwd(part, g.to(device), h.to(device), y.to(device), *transform, *saved)
        )
    for got, w in zip((logp, entropy, torch.cat(dx, -1)), want):
        close(got, w)
    z = x.double() / t.double().unsqueeze(-1)
    keep = y != -100
    close(sum_p2.cpu()[keep], (z.softmax(-1) ** 2).sum(-1)[keep])


def run_rank(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=3)
    pair = dist.new_group([0, 1])
    x, y, t = sharded_input()
    check_rank(rank, list(x.split(SLICES, -1)), x, y, t, dist.group.WORLD)
    if rank < 2:
        check_rank(rank, list(x.split((941, 59), -1)), x, y, t, pair)
    dist.barrier()
    dist.destroy_process_group()


def check_rank(
    rank: int, slices: list[Tensor], x: Tensor, y: Tensor, t: Tensor, group: Any
) -> None:
    sent = []
    gather = dist.all_gather_into_tensor

    def counted(out: Tensor, mine: Tensor, **options: Any) -> Any:
        sent.append(mine.nbytes)
        return gather(out, mine, **options)

    generator = torch.Generator().manual_seed(1)
    g, h = (torch.randn(7, generator=generator) for _ in range(2))
    want = expected(x, y, g, h, temperature=t.double())
    where = slice(sum(s.shape[-1] for s in slices[:rank]), None)
    for inplace in (False, True):
        mine = slices[rank].clone().requires_grad_()
        dist.all_gather_into_tensor = counted
        logp, entropy = pk.logprobs_from_logits(
            mine * 1,
            y,
            temperature=t,
            return_entropy=True,
            inplace_backward=inplace,
            tp_group=group,
        )
        assert sent == [8, 7 * 16], sent
        (logp * g + entropy * h).sum().backward()
        assert len(sent) == 2, "backward communicated"
        dist.all_gather_into_tensor = gather
        sent.clear()
        close(logp, want[0])
        close(entropy, want[1])
        close(mine.grad, want[2][:, where][:, : mine.shape[-1]])
    # Every rank holds the same bits.
    everyones = logp.new_empty(len(slices) * 7)
    gather(everyones, logp.detach().nan_to_num(0.0), group=group)
    assert (everyones.view(-1, 7) == everyones[:7]).all()
    plain, stats = pk.logprobs_from_logits(
        slices[rank], y, temperature=t, return_stats=True, tp_group=group
    )
    close(plain, want[0])
    close(stats.lse[y != -100], (x.double() / t.double()[:, None]).logsumexp(-1)[y != -100])


def test_tensor_parallel(tmp_path: Path) -> None:
    """Two and three gloo processes with uneven slices; one all_gather of 16 bytes per token."""
    run_ranks(run_rank, 3, tmp_path)


# ----------------------------------------------------------------------------------- errors


def bad_calls() -> dict[str, tuple[type[Exception], str, Callable[[], Any]]]:
    x, y = torch.randn(3, 8), torch.zeros(3, dtype=torch.int64)
    f = pk.logprobs_from_logits
    return {
        "logits no tensor": (TypeError, "logits must be a tensor, got list", lambda: f([1.0], y)),
        "logits integer": (TypeError, "logits must have dtype.*int64", lambda: f(x.long(), y)),
        "labels float": (TypeError, "labels must have dtype.*float32", lambda: f(x, y.float())),
        "labels int16": (TypeError, "labels must have dtype.*int16", lambda: f(x, y.short())),
        "labels shape": (ValueError, r"labels must have shape \(3,\).*\(2,\)", lambda: f(x, y[:2])),
        "labels rank": (ValueError, r"labels must have shape \(3,\)", lambda: f(x, y[:, None])),
        "no vocabulary": (ValueError, r"V >= 1, got \(3, 0\)", lambda: f(x[:, :0], y)),
        "no dimension": (ValueError, "V >= 1", lambda: f(torch.tensor(1.0), y)),
        "temperature 0": (ValueError, "temperature.*> 0, got 0$", lambda: f(x, y, temperature=0)),
        "temperature -1": (ValueError, "temperature.*> 0", lambda: f(x, y, temperature=-1.0)),
        "temperature nan": (ValueError, "temperature", lambda: f(x, y, temperature=float("nan"))),
        "temperature str": (TypeError, "temperature.*str", lambda: f(x, y, temperature="1")),
        "temperature length": (
            ValueError,
            r"temperature must have shape \(3,\).*\(4,\)",
            lambda: f(x, y, temperature=torch.ones(4)),
        ),
        "temperature integer": (
            TypeError,
            "temperature must have dtype",
            lambda: f(x, y, temperature=torch.ones(3).long()),
        ),
        "temperature gradient": (
            ValueError,
            "temperature.*detach",
            lambda: f(x, y, temperature=torch.ones(3, requires_grad=True)),
        ),
        "scale 0": (ValueError, "logit_scale.*> 0", lambda: f(x, y, logit_scale=0.0)),
        "softcap 0": (ValueError, "softcap.*> 0", lambda: f(x, y, softcap=0.0)),
        "ignore_index": (TypeError, "ignore_index.*float", lambda: f(x, y, ignore_index=1.5)),
        "devices": (ValueError, "labels must be on cpu.*meta", lambda: f(x, y.to("meta"))),
        "temperature device": (
            ValueError,
            "temperature must be on cpu",
            lambda: f(x, y, temperature=torch.ones(3, device="meta")),
        ),
        "expanded in place": (
            ValueError,
            "inplace_backward",
            lambda: f(x[:1].expand(3, 8), y, inplace_backward=True),
        ),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_errors(name: str) -> None:
    kind, message, call = bad_calls()[name]
    with pytest.raises(kind, match=message):
        call()


# ------------------------------------------------------------------------------------- GPUs


def on_gpu(N: int, V: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    logits = (torch.randn(N, V, device="cuda") * 3).to(dtype)
    return logits, torch.randint(0, V, (N,), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("V", [7, 1024, 50257, 128256, 151936, 262144])
def test_gpu_values(V: int, dtype: torch.dtype) -> None:
    logits, labels = on_gpu(5, V, dtype)
    logits[1, : V // 2] = -torch.inf
    labels[1], labels[3] = V - 1, -100
    x = logits.clone().requires_grad_()
    logp, entropy = pk.logprobs_from_logits(x, labels, temperature=0.8, return_entropy=True)
    g, h = torch.randn(5), torch.randn(5)
    (logp * g.cuda() + entropy * h.cuda()).sum().backward()
    want = expected(logits, labels, g, h, temperature=0.8)
    close(logp, want[0], tol.LOGPROBS)
    close(entropy, want[1], tol.LOGPROBS)
    rounded = {torch.bfloat16: tol.BF16_OUT, torch.float16: tol.FP16_OUT, torch.float32: tol.FP32}
    close(x.grad, want[2], rounded[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("V", [50257, 151936])
def test_gpu_batch_invariance(V: int) -> None:
    logits, labels = on_gpu(257, V, torch.bfloat16)

    def bits(rows: slice) -> list[Tensor]:
        x = logits[rows].clone().requires_grad_()
        out = pk.logprobs_from_logits(x, labels[rows], return_entropy=True)
        (out[0] + 0.5 * out[1]).sum().backward()
        return [*out, x.grad]

    whole = bits(slice(None))
    for row in (0, 100, 256):
        for got, want in zip(bits(slice(row, row + 1)), whole):
            assert torch.equal(got[0], want[row])
    alone = pk.logprobs_from_logits(logits, labels)
    assert torch.equal(alone, whole[0]), "the entropy changed the log-probs"


@pytest.mark.gpu
def test_gpu_memory_and_no_synchronisation() -> None:
    N, V = 512, 151936
    logits, labels = on_gpu(N, V, torch.bfloat16)
    pk.logprobs_from_logits(logits.requires_grad_(), labels, inplace_backward=True).sum().backward()
    x = logits.detach().clone().requires_grad_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = pk.logprobs_from_logits(x, labels, return_entropy=True, inplace_backward=True)
        # The allocator rounds each of the four row vectors up to 512 bytes.
        assert torch.cuda.max_memory_allocated() - before <= 64 * N
        (out[0] + out[1]).sum().backward()
        assert torch.cuda.max_memory_allocated() - before <= 2 * 64 * N + 4096
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_gpu_graph_and_stream() -> None:
    logits, labels = on_gpu(64, 32000, torch.bfloat16)
    want = pk.logprobs_from_logits(logits, labels)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = pk.logprobs_from_logits(logits, labels)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(got, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = pk.logprobs_from_logits(logits, labels)
    logits.copy_(logits.flip(0))
    labels.copy_(labels.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, want.flip(0))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpu_of_the_tensor_not_the_current_one() -> None:
    """Liger#1304: tensors on cuda:1 while cuda:0 is current launched on the wrong device."""
    logits, labels = torch.randn(3, 1024), torch.randint(0, 1024, (3,))
    got = pk.logprobs_from_logits(logits.to("cuda:1"), labels.to("cuda:1"))
    close(got, expected(logits, labels, torch.ones(3), torch.zeros(3))[0])
