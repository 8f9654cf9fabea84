"""What a piece of code allocates on the CPU, by torch's profiler."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler talks

import torch


@dataclass(frozen=True)
class Allocated:
    """In bytes, beyond what was there before."""

    peak: int  # the most that was held at once
    kept: int  # still held at the end


def allocated(code: Callable[[], object]) -> Allocated:
    """What `code` allocates while it runs, once."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # garbage of others, freed meanwhile, would count against it
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            code()
    finally:
        if collecting:
            gc.enable()
    assert profile.profiler is not None
    results = profile.profiler.kineto_results
    assert results is not None
    held = peak = 0
    for event in results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return Allocated(peak, held)
