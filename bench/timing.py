"""Clocks, ceilings and buffers: how a number is taken."""

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bench.case import Function, Tensors

# A sample lasts about this long, so that the clock's own cost disappears.
SAMPLE_SECONDS, MOST_CALLS = 2e-3, 100
FEWEST, MOST = 3, 40  # samples of a contestant
# A call longer than this is its own warm-up; one sample less where a call is so long that the
# machine's noise averages out within it.
SLOW_SECONDS, VERY_SLOW_SECONDS = 1.0, 5.0
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
        torch.cuda.empty_cache()  # what the allocator keeps for itself is free as well
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

    A sample is (device seconds, wall seconds) per call; on the CPU the two are one.
    """

    def __init__(
        self, function: Function, ring: list[Tensors], overwrites: str | None, device: torch.device
    ) -> None:
        self.function, self.ring, self.device = function, ring, device
        self.overwrites = overwrites
        self.pristine = None if overwrites is None else ring[0][overwrites].clone()
        self.at, self.calls, self.graph = 0, 1, None
        self.samples: list[tuple[float, float]] = []
        self.cost = 0.0  # seconds that a sample takes

    def warm_up(self) -> None:
        """Settles how many calls make a sample, and captures them where launches would dominate.
        A slow call is its own warm-up: it counts, and nothing is lost by it."""
        first = self.sample()
        self.cost = first[1]
        if self.cost > SLOW_SECONDS:
            self.samples.append(first)
            return
        seconds = min(self.sample()[1] for _ in range(2))
        if self.overwrites is None:
            # Calls that follow others are faster than the first ones: asked twice.
            for _ in range(2):
                self.calls = max(1, min(MOST_CALLS, int(SAMPLE_SECONDS / seconds)))
                seconds = self.sample()[1] if self.calls > 1 else seconds
            if self.device.type == "cuda" and seconds < GRAPH_SECONDS:
                self.graph = self._capture()
        self.cost = seconds * self.calls

    def sample(self) -> tuple[float, float]:
        inputs = self._next()
        synchronize(self.device)
        if self.device.type == "cuda":
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
        start = time.perf_counter()
        for x in inputs:
            outputs = self.function(x)
        if self.device.type == "cuda":
            after.record()
        synchronize(self.device)
        wall = (time.perf_counter() - start) / self.calls
        del outputs  # freeing the last results is not part of the call
        if self.device.type == "cpu":
            return wall, wall
        if self.graph is not None:
            before.record()
            self.graph.replay()
            after.record()
            synchronize(self.device)
        return before.elapsed_time(after) / 1e3 / self.calls, wall

    def _next(self) -> list[Tensors]:
        """The inputs of the next sample; what a call overwrites is put back before the clock."""
        found = [self.ring[(self.at + i) % len(self.ring)] for i in range(self.calls)]
        self.at += self.calls
        if self.pristine is not None:
            found[0][self.overwrites].copy_(self.pristine)
        return found

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        """A graph of `calls` calls over the ring; None for a function that cannot be captured."""
        graph, inputs = torch.cuda.CUDAGraph(), self._next()
        try:
            with torch.cuda.graph(graph):
                for x in inputs:
                    self.function(x)
            graph.replay()
            synchronize(self.device)
        except Exception:  # it synchronises or allocates outside the pool: events do
            synchronize(self.device)
            return None
        return graph


def interleave(watches: list[Stopwatch], budget: float) -> None:
    """Samples of every contestant, taken in turns so that drift of the machine hits all alike."""
    share = budget / max(len(watches), 1)
    wanted = []
    for watch in watches:
        fewest = FEWEST - (watch.cost > VERY_SLOW_SECONDS) - len(watch.samples)
        wanted.append(max(fewest, min(MOST, int(share / watch.cost))))
    rounds = max(wanted, default=0)
    gc.collect()
    gc.disable()
    try:
        for r in range(rounds):
            for watch, n in zip(watches, wanted):
                if (r + 1) * n // rounds > r * n // rounds:
                    watch.samples.append(watch.sample())
    finally:
        gc.enable()


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """(median, lower quartile, upper quartile)."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def summary(samples: list[tuple[float, float]]) -> dict[str, float]:
    """What a row says of its samples."""
    device, wall = zip(*samples)
    middle, low, high = quartiles(device)
    found = {"seconds": middle, "low": low, "high": high, "wall_seconds": quartiles(wall)[0]}
    return found | {"samples": len(samples)}


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
    watch = Stopwatch(lambda _: call(), [{}], None, device)
    watch.warm_up()
    return quartiles([watch.sample()[0] for _ in range(5)])[0]
