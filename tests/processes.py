"""Ranks as processes of their own, which all leave well or fail the test."""

from collections.abc import Callable
from pathlib import Path

import torch

from ppo_kernels import _native


def run_ranks(target: Callable[[int, str], None], n: int, folder: Path) -> None:
    """target(rank, rendezvous file) in n processes; those that hang are killed."""
    assert _native.ensure()  # built once, not by each rank
    context = torch.multiprocessing.get_context("spawn")
    file = str(folder / "rendezvous")
    ranks = [context.Process(target=target, args=(rank, file)) for rank in range(n)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        if process.is_alive():
            process.kill()
            process.join()
    assert [process.exitcode for process in ranks] == [0] * n
