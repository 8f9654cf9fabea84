"""A GPU that is named several times: as many threads of this process, each on a stream of its own."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from autoopt_lab import devices


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
