"""Clocks, ceilings and buffers: how a number is taken."""

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bench.case import Function, Tensors

# A sample on the CPU lasts at least this long, so that the clock's own cost disappears.
SAMPLE_SECONDS = 2e-3
# Below this a CUDA call is timed by replaying a graph: launches would dominate.
GRAPH_SECONDS = 2e-3


def cache_bytes(device: torch.device) -> int:
    """The last-level cache: rotating inputs must exceed it."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(p.read_text().strip().rstrip("K")) * 1024 for p in sizes), default=32 << 20)


def free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024.0
    return float("inf")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Times one function on a ring of inputs; each call takes the next one.

    `sample()` returns (device seconds, wall seconds) per call. On the CPU the two are one.
    """

    def __init__(
        self, function: Function, ring: list[Tensors], overwrites: str | None, device: torch.device
    ) -> None:
        self.function, self.ring, self.device = function, ring, device
        self.at, self.calls, self.graph = 0, 1, None
        self.overwrites = overwrites
        self.pristine = None if overwrites is None else ring[0][overwrites].clone()

    def warm_up(self) -> float:
        """Settles calls per sample, and the graph where one pays; returns seconds per sample."""
        seconds = self._one_call()[1]
        if seconds > 1:
            return seconds
        seconds = min(self._one_call()[1] for _ in range(2))
        if self.overwrites is not None:
            return seconds
        if self.device.type == "cuda":
            self.calls = max(1, min(50, int(SAMPLE_SECONDS / seconds)))
            if seconds < GRAPH_SECONDS:
                self.graph = self._capture()
        else:
            self.calls = max(1, int(SAMPLE_SECONDS / seconds))
        return seconds * self.calls

    def sample(self) -> tuple[float, float]:
        if self.calls == 1 and self.graph is None:
            return self._one_call()
        wall = self._loop()
        if self.device.type == "cpu":
            return wall, wall
        return self._events(), wall

    def _next(self) -> Tensors:
        inputs = self.ring[self.at % len(self.ring)]
        self.at += 1
        if self.pristine is not None:
            inputs[self.overwrites].copy_(self.pristine)
        return inputs

    def _one_call(self) -> tuple[float, float]:
        inputs = self._next()
        if self.device.type == "cpu":
            start = time.perf_counter()
            outputs = self.function(inputs)
            wall = time.perf_counter() - start
            del outputs  # freeing the results is not part of the call
            return wall, wall
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        synchronize(self.device)
        start = time.perf_counter()
        events[0].record()
        self.function(inputs)
        events[1].record()
        synchronize(self.device)
        return events[0].elapsed_time(events[1]) / 1e3, time.perf_counter() - start

    def _loop(self) -> float:
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(self.calls):
            self.function(self._next())
        synchronize(self.device)
        return (time.perf_counter() - start) / self.calls

    def _events(self) -> float:
        """Device time per call, from a replayed graph, or from calls queued back to back."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        if self.graph is not None:
            self.graph.replay()
        else:
            for _ in range(self.calls):
                self.function(self._next())
        events[1].record()
        synchronize(self.device)
        return events[0].elapsed_time(events[1]) / 1e3 / self.calls

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        """A graph of `calls` calls over the ring; None for a function that cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for _ in range(self.calls):
                    self.function(self._next())
            graph.replay()
            synchronize(self.device)
        except Exception:  # it synchronises or allocates outside the pool: events do
            synchronize(self.device)
            return None
        return graph


def interleave(
    watches: dict[str, Stopwatch],
    cost: dict[str, float],
    budget: float,
    fewest: dict[str, int],
    most: int,
) -> dict[str, list[tuple[float, float]]]:
    """Samples of every contestant, taken in turns so that drift of the machine hits all alike."""
    share = budget / max(len(watches), 1)
    counts = {name: max(fewest[name], min(most, int(share / cost[name]))) for name in watches}
    rounds = max(counts.values(), default=0)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in watches}
    gc.collect()
    gc.disable()
    try:
        for r in range(rounds):
            for name, n in counts.items():
                if (r + 1) * n // rounds > r * n // rounds:
                    samples[name].append(watches[name].sample())
    finally:
        gc.enable()
    return samples


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """(median, lower quartile, upper quartile)."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def ceilings(device: torch.device, dtypes: list[str]) -> dict[str, float]:
    """This machine's copy bandwidth (bytes/s, read plus write) and GEMM rates (flop/s)."""
    big = device.type == "cuda"
    source = torch.ones(1 << (31 if big else 28), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = {"copy": 2 * source.numel() / _median(partial(target.copy_, source), device)}
    m, k, n = (8192, 8192, 8192) if big else (1024, 1024, 8192)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        if name in dtypes:
            a = torch.randn(m, k, device=device).to(dtype)
            b = torch.randn(n, k, device=device).to(dtype)
            found[name] = 2 * m * n * k / _median(partial(torch.mm, a, b.T), device)
    return found


def _median(call: Callable[[], object], device: torch.device) -> float:
    watch = Stopwatch(lambda _: {"": call()}, [{}], None, device)
    watch.warm_up()
    return quartiles([watch.sample()[0] for _ in range(5)])[0]
