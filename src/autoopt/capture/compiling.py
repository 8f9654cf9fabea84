"""Leaving the graphs of a compiled model, and compiling again further in.

`torch.compiler.disable` leaves a graph for good. What runs here under `uncompiled` may ask for the compiler again, so
that a model of which little has to be seen is compiled in parts. And what is compiled by itself, a function with
`@torch.compile` or a part of the model, runs as plain Python there, too: a Watch does not see into a graph.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo import eval_frame
from torch._dynamo.eval_frame import DynamoStance
from torch._dynamo.symbolic_convert import tls

_COMPILING, _EAGER = object(), DynamoStance("force_eager")
_left: ContextVar[Any] = ContextVar("left", default=_COMPILING)  # what compiled before `uncompiled`, if that is inside


class _Stance:
    """torch's stance is one for all threads: eager while any of them is inside `uncompiled`, then what it was.

    It is set as torch itself does once it has seen that it is outside of a graph, which takes longer.
    """

    def __init__(self) -> None:
        self.lock, self.inside, self.before = threading.Lock(), 0, DynamoStance()

    def eager(self) -> None:
        with self.lock:
            self.inside += 1
            if self.inside == 1:
                self.before, eval_frame._stance = eval_frame._stance, _EAGER

    def as_it_was(self) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                eval_frame._stance = self.before


_stance = _Stance()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Compile nothing of what is called, but what is called under `compiled`."""
    if _left.get() is not _COMPILING:
        yield
        return
    before = set_eval_frame(None)
    token = _left.set(before)
    _stance.eager()
    try:
        yield
    finally:
        _stance.as_it_was()
        _left.reset(token)
        set_eval_frame(before)


@contextmanager
def compiled() -> Iterator[None]:
    """Compile what is called, if it is only by `uncompiled` that it would not be."""
    before = _left.get()
    if before is _COMPILING:
        yield
        return
    token = _left.set(_COMPILING)
    _stance.as_it_was()
    set_eval_frame(before)
    try:
        yield
    finally:
        set_eval_frame(None)
        _stance.eager()
        _left.reset(token)


def eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which leaves the graph that it is called in."""

    def outside(*args: Any, **kwargs: Any) -> Any:
        with uncompiled():
            return function(*args, **kwargs)

    left: Callable[..., Any] = torch._dynamo.disable(outside, recursive=False)
    return left


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def may_leave() -> bool:
    """Whether the graph that is traced may be left: not with fullgraph=True. This itself runs while it is traced."""
    tracer: Any = getattr(tls, "current_tx", None)
    return tracer is not None and not (tracer.one_graph or tracer.error_on_graph_break)
