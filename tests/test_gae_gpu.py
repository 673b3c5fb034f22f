"""What only a GPU can show of gae: streams, graphs, large offsets."""

import pytest
import torch

import ppo_kernels as pk

pytestmark = pytest.mark.gpu


def test_runs_on_the_current_stream() -> None:
    r, v = torch.randn(2, 64, 4096, device="cuda")
    want = pk.gae(r, v)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late = r.clone()
        out = pk.gae(late, v)
    side.synchronize()
    assert torch.equal(out.advantages, want.advantages)


@pytest.mark.parametrize("shape", [(64, 128), (64, 4096), (4, 65536)])
def test_graph_capture(shape: tuple[int, int]) -> None:
    r, v = torch.randn(2, *shape, device="cuda")
    pk.gae(r, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pk.gae(r, v)
    r.normal_()
    graph.replay()
    want = pk.gae(r, v)
    assert torch.equal(out.advantages, want.advantages) and torch.equal(out.stats, want.stats)


def test_more_than_2_to_the_31_tokens() -> None:
    rows, T = 2**15 + 1, 2**16
    if torch.cuda.mem_get_info()[0] < 20 * rows * T:
        pytest.skip("needs 45 GB of GPU memory")
    v = torch.zeros(rows, T, device="cuda", dtype=torch.bfloat16)
    v[-1].normal_()
    out = pk.gae(None, v)
    alone = pk.gae(None, v[-1:].clone())
    assert torch.equal(out.advantages[-1:], alone.advantages)
