"""How much memory a call takes, in the eyes of torch's own CPU allocator."""

from collections.abc import Callable
from typing import Any

import torch


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most that torch's CPU allocator held at once beyond what it held before."""
    with torch.profiler.profile(profile_memory=True) as profile:
        kept = run()
    events = profile.profiler.kineto_results.events()
    events = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    held = peak = 0
    for event in events:
        held += event.nbytes()
        peak = max(peak, held)
    del kept
    return peak
