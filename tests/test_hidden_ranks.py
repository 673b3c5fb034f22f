"""The hidden path in two gloo processes: vocabulary slices, and a weight sharded as by FSDP2."""

import os
from pathlib import Path

import tolerances as tol
import torch
import torch.distributed as dist
from processes import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ppo_kernels as pk

N, H, SIZES = 9, 8, (17, 6)


def losses(hidden: Tensor, weight: Tensor, **options: object) -> Tensor:
    g = torch.Generator().manual_seed(3)
    labels = torch.randint(sum(SIZES), (N,), generator=g)
    labels[2] = -100
    old, advantages = (torch.randn(N, generator=g) for _ in range(2))
    logp, entropy = pk.logprobs_from_hidden(
        hidden, weight, labels, return_entropy=True, chunk_tokens=2, **options
    )
    ppo = pk.ppo_loss_from_hidden(
        hidden, weight, labels, old - 3, advantages, ent_coef=0.1, **options
    )
    return (
        logp.sin().sum() + entropy.sum() + ppo.loss + pk.lm_loss(hidden, weight, labels, **options)
    )


def run_rank(rank: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(N, H, generator=g).requires_grad_()
    weight = torch.randn(sum(SIZES), H, generator=g).requires_grad_()
    want = losses(hidden, weight)
    d_hidden, d_weight = torch.autograd.grad(want, (hidden, weight))
    mine = weight.detach().split(SIZES)[rank].clone().requires_grad_()
    got = losses(hidden, mine, tp_group=dist.group.WORLD)
    found = torch.autograd.grad(got, (hidden, mine))
    torch.testing.assert_close(got, want, **tol.FP32)
    torch.testing.assert_close(found[0], d_hidden, **tol.FP32_SUM)
    torch.testing.assert_close(found[1], d_weight.split(SIZES)[rank], **tol.FP32_SUM)
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(weight.detach(), mesh, [Shard(0)]).requires_grad_()
    got = losses(hidden, sharded)
    (found,) = torch.autograd.grad(got, (sharded,))
    torch.testing.assert_close(got, want, **tol.FP32)
    torch.testing.assert_close(found.full_tensor(), d_weight, **tol.FP32_SUM)
    try:
        losses(hidden, sharded, tp_group=dist.group.WORLD)
        raise AssertionError("a DTensor weight went through with tp_group")
    except TypeError as error:
        assert "weight must be this rank's plain tensor" in str(error)
    dist.barrier()  # nobody leaves while the other still talks to it
    dist.destroy_process_group()
    # The mesh's gloo threads may outlive the interpreter's teardown, which then calls terminate().
    os._exit(0)


def test_two_processes_equal_one(tmp_path: Path) -> None:
    run_ranks(run_rank, 2, tmp_path)
