"""A GPU that is named several times: as many threads of this process, each on a stream of its own."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from autoopt_lab import devices
from autoopt_lab.tasks.mnist import NET


def test_chunks_run_at_once_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here: the streams are stand-ins, and all else is as it is."""
    streams: dict[int, object] = {}
    monkeypatch.setattr(torch.cuda, "Stream", lambda name: (name, object()))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: streams.update({threading.get_ident(): stream}))
    both = threading.Barrier(2, timeout=30)  # it breaks if one waits for the other to end

    def work() -> tuple[int, str, bool]:
        both.wait()
        return os.getpid(), devices.here.device, devices.here.stopping()

    with devices.processes(["cuda:0", "cuda:0"]) as pool:
        assert pool.places() == 2
        results = [future.result() for future in [pool.submit(work), pool.submit(work)]]
    assert results == [(os.getpid(), "cuda:0", False)] * 2
    assert len(set(map(id, streams.values()))) == 2
    assert devices.here.stopping(), "a chunk that is under way must see that it is to stop"


def test_the_start_of_a_run_does_not_depend_on_other_threads() -> None:
    """They share torch's generator; without a lock most threads have starts of no seed."""
    wanted = torch.stack([NET.initial(seed) for seed in range(10)])
    together = threading.Barrier(6, timeout=30)

    def starts(_: int) -> torch.Tensor:
        together.wait()
        return torch.stack([NET.initial(seed) for seed in range(10)])

    with ThreadPoolExecutor(6) as pool:
        for found in pool.map(starts, range(6)):
            assert torch.equal(found, wanted)
