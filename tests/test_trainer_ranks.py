"""Two processes on one global batch do what one process does. Item 37."""

import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import tiny
import tolerances as tol
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from processes import run_ranks
from torch import nn

FIELDS = {"batch_size": 4, "mini_batch_size": 2, "ppo_epochs": 2, "shuffle": False}
FIELDS |= {"use_score_scaling": True, "whiten_rewards": True, "ptx_coef": 0.5, "horizon": 100}
FIELDS |= {"early_stopping": False, "ratio_threshold": 10.0}
TEXTS = [torch.arange(3, 9), torch.arange(20, 23), torch.arange(30, 34), torch.arange(40, 49)]
# rank -> rows of the global batch; its minibatches, put together, are those of one process.
SHARDS = {"even": ([0, 1, 4, 5], [2, 3, 6, 7]), "uneven": ([0, 1, 2, 4, 5, 6], [3, 7]),
          "empty": ([0, 1, 2, 3, 4, 5, 6, 7], [])}  # fmt: skip
MINI = {"even": (2, 2), "uneven": (3, 1), "empty": (4, 4)}
MODES = ["token-mean", "seq-mean-token-mean"]


def global_rows() -> tuple[list[Any], list[Any], list[float]]:
    queries, responses, scores = tiny.rows(8, seed=2)
    responses[6] = torch.empty(0, dtype=torch.int64)
    return queries, responses, scores


def run(shard: str | None, rank: int, mode: str) -> dict[str, Any]:
    """Two steps on this rank's rows (None: all rows, one process)."""
    rows = list(range(8)) if shard is None else SHARDS[shard][rank]
    size = 4 if shard is None else MINI[shard][rank]
    fields = FIELDS | {"batch_size": 8, "mini_batch_size": size, "loss_agg_mode": mode}
    # Another seed per rank: rank 0's weights have to be everyone's.
    model = tiny.policy(rank)
    reference = tiny.policy(9)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trainer = tiny.trainer(model, reference, optimizer=optimizer, **fields)
    q, r, s = ([xs[i] for i in rows] for xs in global_rows())
    texts = TEXTS if shard is None else TEXTS[2 * rank : 2 * rank + 2]
    stats = [trainer.step(q, r, s, ptx_batch=texts) for _ in range(2)]
    keep = {k: v for k, v in stats[-1].items() if not k.startswith("time/")}
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return {"stats": keep, "weights": weights, "kl_coef": trainer.kl_ctl.value}


def decisions(rank: int, folder: str) -> dict[str, Any]:
    """Guards that only one rank's rows call for, and bad input on one rank."""
    q, r, s = tiny.rows(4, seed=rank)
    out: dict[str, Any] = {}
    trainer = tiny.trainer(early_stopping=True, target_kl=0.01, ratio_threshold=None)
    ro = trainer.rollout(q, r, s)
    if rank == 1:
        ro.logprobs[:2] -= 2.0  # the first minibatch, if rows were in order, is enough
    out["stopped"] = trainer.update(ro)["ppo/early_stopped"]
    trainer = tiny.trainer(mini_batch_size=4, ppo_epochs=1)
    ro = trainer.rollout(q, r, s)
    if rank == 0:
        ro.logprobs -= 8.0
    out["skipped"] = trainer.update(ro)["ppo/skipped_steps"]
    try:
        trainer.step(q, r, s if rank == 0 else [float("nan")] * 4)
    except (ValueError, RuntimeError) as e:
        out["error"] = f"{type(e).__name__}: {e}"
    bad = [torch.tensor([3, 4 + 99 * rank])] * 8
    failing = {
        "prompt": lambda: trainer.train(bad, lambda p, r: [0.0] * 4, steps=1, max_new_tokens=2),
        "save": lambda: trainer.save_checkpoint("/dev/null/ppo.pt"),  # which only rank 0 does
        "load": lambda: trainer.load_checkpoint(f"{folder}/{rank}.pt"),  # rank 0 has one
        "state": lambda: trainer.load_state_dict({} if rank else state),
    }
    state = trainer.state_dict()
    trainer.save_checkpoint(f"{folder}/0.pt")
    for name, call in failing.items():
        try:
            call()
        except Exception as e:
            out[name] = f"{type(e).__name__}: {e}"
    prompts = [torch.tensor([3 + i, 4]) for i in range(16)]
    seen: list[int] = []

    def reward(chosen: list[torch.Tensor], responses: list[torch.Tensor]) -> list[float]:
        seen.extend(int(p[0]) for p in chosen)
        return [0.0] * len(chosen)

    trainer.train(prompts, reward, steps=2, max_new_tokens=2)
    out["prompts"] = seen
    state = trainer.state_dict()
    trainer.load_state_dict(state)
    out["generators"] = [x["generator"].tolist() for x in state["random"]]
    return out


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", **store, timeout=timedelta(seconds=60))  # a hang is an error
    try:
        out: dict[str, Any] = {s: run(s, rank, m) for s in SHARDS for m in MODES[:1]}
        out |= {f"{s} {m}": run(s, rank, m) for s in ("uneven",) for m in MODES[1:]}
        out["decisions"] = decisions(rank, folder)
        torch.save(out, f"{folder}/{rank}.pt")
        dist.barrier()
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        raise
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(worker, args=(str(folder),), nprocs=2)
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("case", [*SHARDS, "uneven seq-mean-token-mean"])
def test_37_two_ranks_equal_one(ranks: list[dict[str, Any]], case: str) -> None:
    one = run(None, 0, case.split()[1] if " " in case else MODES[0])
    for rank in ranks:
        two = rank[case]
        for name, p in one["weights"].items():
            torch.testing.assert_close(two["weights"][name], p, **tol.STEPPED_SGD, msg=name)
        assert two["stats"].keys() == one["stats"].keys()
        for name, value in one["stats"].items():
            assert two["stats"][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
        assert two["kl_coef"] == pytest.approx(one["kl_coef"], rel=1e-6)
    assert one["stats"]["tokens/empty_responses"] == 1
    same = [torch.equal(a, b) for a, b in zip(*(r[case]["weights"].values() for r in ranks))]
    assert all(same)


def test_26_27_37_ranks_decide_alike(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["decisions"]["stopped"] == 1
        assert rank["decisions"]["skipped"] == 1


def test_37_bad_input_on_one_rank_raises_on_all(ranks: list[dict[str, Any]]) -> None:
    told, named = (rank["decisions"]["error"] for rank in ranks)
    assert named.startswith("ValueError: scores[0] must be a finite number")
    assert told.startswith("RankFailed: another rank failed")


def test_37_what_fails_on_one_rank_raises_on_all(ranks: list[dict[str, Any]]) -> None:
    for name, failing, error in (
        ("prompt", 1, "ValueError: queries[0] must hold ids in [0, 61)"),
        ("save", 0, "FileExistsError"),
        ("load", 1, "FileNotFoundError"),
        ("state", 1, "ValueError: this is no state of PPOTrainer"),
    ):
        assert ranks[failing]["decisions"][name].startswith(error)
        assert ranks[1 - failing]["decisions"][name].startswith("RankFailed: another rank failed")


def test_37_38_ranks_have_their_own_prompts_and_seeds(ranks: list[dict[str, Any]]) -> None:
    prompts = [rank["decisions"]["prompts"] for rank in ranks]
    assert sorted(prompts[0] + prompts[1]) == list(range(3, 19))
    a, b = ranks[0]["decisions"]["generators"]
    assert a != b and ranks[1]["decisions"]["generators"] == [a, b]


class Own(nn.Module):
    """A policy of the user's own, which returns logits and values through any wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = tiny.policy()
        self.config = self.policy.config

    def forward(self, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.policy(**inputs, return_logits=True)
        return out.logits, out.values


class DeepSpeedEngine(Own):
    """Stands for DeepSpeed's, which is not installed here."""


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))


def zero3(model: nn.Module) -> nn.Module:
    next(model.parameters()).ds_id = 0
    return model


def wrapped_worker(rank: int, file: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=1)
    ddp = nn.parallel.DistributedDataParallel
    tiny.trainer(Own(), tiny.gpt2())
    for wrap, said in (
        (ddp, "got DistributedDataParallel"),
        (lambda model: nn.Sequential(ddp(model)), "got DistributedDataParallel"),
        (lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
         "got FullyShardedDataParallel"),
        (sharded, r"got \S+ as a DTensor \(fully_shard"),
        (lambda _: DeepSpeedEngine(), "got DeepSpeedEngine"),
        (zero3, r"got \S+ as a ZeRO-3 parameter"),
    ):  # fmt: skip
        for model in (Own, tiny.policy):
            with pytest.raises(TypeError, match=f"^model must be unwrapped.*{said}.*itself"):
                tiny.trainer(wrap(model()), tiny.gpt2())
        with pytest.raises(TypeError, match=f"^ref_model must be unwrapped.*{said}"):
            tiny.trainer(ref_model=wrap(tiny.gpt2()))
    os._exit(0)  # gloo's threads may outlive the interpreter, which then calls terminate()


def test_39_models_that_share_weights_or_gradients_are_refused(tmp_path: Path) -> None:
    run_ranks(wrapped_worker, 1, tmp_path)
