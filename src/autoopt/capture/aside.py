"""Work beside the backward pass: on a stream of its own, while a CUDA graph is recorded.

A glance is a handful of small kernels. One after the other with those of the backward pass they leave the GPU idle; as
another branch of the graph they fill what those leave of it. Outside of a graph the host is what takes the time, and a
stream would only give it more to do.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

PIECES = 2  # that a branch does at once: to leave the pass and to join it again takes time, too
LAG = 2  # branches that may be under way: what they read is held for so long


def recording(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Piece(NamedTuple):
    """Some work."""

    work: Callable[[], None]
    reads: tuple[Tensor, ...]  # what the pass must not write over before it is done
    stream: torch.cuda.Stream  # that of the pass here: autograd runs every node on the one that its forward ran on


class Branch(NamedTuple):
    """Some pieces that are under way."""

    done: torch.cuda.Event
    pieces: list[Piece]

    def join(self) -> None:
        """Have the pass wait for it."""
        self.pieces[0].stream.wait_event(self.done)


class Aside:
    """The branches of the graph that is being recorded, if one is."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._waiting: list[Piece] = []  # for a branch to take them, all of one stream
        self._under_way: deque[Branch] = deque()
        self._held: list[Tensor] = []

    def do(self, work: Callable[[], None], *reads: Tensor) -> None:
        """Have some work done beside the pass, now or later. `reads`: what it reads."""
        stream = torch.cuda.current_stream(reads[0].device)
        if self._waiting and self._waiting[0].stream != stream:
            self._branch()
        self._waiting.append(Piece(work, reads, stream))
        if len(self._waiting) >= PIECES:
            self._branch()

    def hold(self, tensor: Tensor) -> None:
        """Have a tensor of the pass, which later work reads, outlast the work at hand until the pass waited for all."""
        self._held.append(tensor)

    def join(self) -> None:
        """Do what is waiting, and have the pass wait for all of it."""
        if self._waiting:
            self._branch()
        while self._under_way:
            self._under_way.popleft().join()
        self._held = []

    def drop(self) -> None:
        """Forget the work for a pass that did not come to its end, and its graph with it."""
        self._waiting, self._under_way, self._held = [], deque(), []

    def _branch(self) -> None:
        pieces, self._waiting = self._waiting, []
        main = pieces[0].stream
        if self._stream is None or self._stream.device != main.device:
            self._stream = torch.cuda.Stream(main.device)
        side = self._stream
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for piece in pieces:
                piece.work()
            self._under_way.append(Branch(side.record_event(), pieces))
        if len(self._under_way) > LAG:
            self._under_way.popleft().join()
