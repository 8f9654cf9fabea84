"""Who is tested: every optimizer that the library offers, under every rule; new ones join by themselves."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import autoopt
from autoopt.capture import sampled
from autoopt.optim.options import RULES
from contract.small import Batch, batches, mlp, train

Make = Callable[..., Any]
"""make(model, **options) -> optimizer"""

OPTIMIZERS: list[Any] = [
    kind
    for kind in (getattr(autoopt, name) for name in autoopt.__all__)
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and not inspect.isabstract(kind)
]
SUBJECTS: dict[str, Make] = {
    f"{kind.__name__}-{rule}": functools.partial(kind, rule=rule) for kind in OPTIMIZERS for rule in RULES
}
# each optimizer under one of the rules in turn; `make trust` has all
IN_TURN = [name for i, name in enumerate(SUBJECTS) if i % len(RULES) == i // len(RULES) % len(RULES)]
every_optimizer = pytest.mark.parametrize("make", [SUBJECTS[name] for name in IN_TURN], ids=IN_TURN)


@contextlib.contextmanager
def glances() -> Iterator[None]:
    """Have layers that form contributions look at one sample, as large ones do: the nets here are small."""
    before, sampled.ROOM = sampled.ROOM, 0
    try:
        yield
    finally:
        sampled.ROOM = before


def trained(make: Make, data: Sequence[Batch] | None = None, **options: Any) -> nn.Sequential:
    """The small model after a run in which nothing goes wrong."""
    model = mlp()
    train(model, make(model, **options), batches(3) if data is None else data)
    return model
