"""Work beside the backward pass: on streams of its own, while a CUDA graph is recorded.

A glance is a handful of small kernels. One after the other with those of the backward pass they leave the GPU idle; as
other branches of the graph they fill what those leave of it. Outside of a graph the host is what takes the time, and
streams would only give it more to do.
"""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

Piece = tuple[Callable[[], None], tuple[Tensor, ...]]  # some work, and what it reads

STREAMS = 2
PIECES = 2  # that a branch does at once: to leave the pass and to join it again takes time, too
LAG = 2  # branches that may be under way: what they read is held for so long


def recording(tensor: Tensor) -> bool:
    """Whether what is done with a tensor becomes a part of a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class Aside:
    """The branches of the graph that is being recorded, if one is."""

    def __init__(self) -> None:
        self._streams: deque[torch.cuda.Stream] = deque()
        self._waiting: list[Piece] = []
        self._under_way: deque[tuple[torch.cuda.Event, list[Piece]]] = deque()

    def do(self, work: Callable[[], None], *reads: Tensor) -> None:
        """Have some work done beside the pass. `reads`: what it reads, which the pass must not write over before."""
        self._waiting.append((work, reads))
        if len(self._waiting) == PIECES:
            self._branch()

    def join(self) -> None:
        """Have the pass wait for all of it."""
        if self._waiting:
            self._branch()
        while self._under_way:
            done, pieces = self._under_way.popleft()
            torch.cuda.current_stream(pieces[0][1][0].device).wait_event(done)

    def drop(self) -> None:
        """Forget the work for a pass that did not come to its end, and its graph with it."""
        self._waiting, self._under_way = [], deque()

    def _branch(self) -> None:
        pieces, self._waiting = self._waiting, []
        device = pieces[0][1][0].device
        main = torch.cuda.current_stream(device)
        if not self._streams or self._streams[0].device != device:
            self._streams = deque(torch.cuda.Stream(device) for _ in range(STREAMS))
        self._streams.rotate()
        side = self._streams[0]
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for work, _ in pieces:
                work()
            self._under_way.append((side.record_event(), pieces))
        if len(self._under_way) > LAG:
            main.wait_event(self._under_way.popleft()[0])
