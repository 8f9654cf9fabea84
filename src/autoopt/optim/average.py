"""The average of the weights: kept beside them, put in their place for an evaluation, and taken back."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

KEYS = ("running_mean", "running_var")


class RunningStatistics:
    """The average of what the BatchNorm layers of a model have seen, so that averaged weights meet averaged statistics.

    It lives in the optimizer's state, with the layer's weight where that trains, else with the first parameter.

    Args:
        model: the model, if it is known.
        state: the optimizer's.
        parameters: what the optimizer trains.
    """

    def __init__(
        self, model: nn.Module | None, state: Mapping[Tensor, dict[str, Any]], parameters: list[nn.Parameter]
    ) -> None:
        self.state = state
        self.found: list[tuple[nn.Module, str, nn.Parameter, str]] = []  # layer, buffer, whose state, under which name
        trained = set(parameters)
        for layer in model.modules() if model is not None else ():
            if isinstance(getattr(layer, "running_mean", None), Tensor):
                weight = getattr(layer, "weight", None)
                place = "" if weight in trained else f"_{len(self.found)}"
                owner = weight if weight in trained else parameters[0]
                self.found += [(layer, key, owner, f"average_{key}{place}") for key in KEYS]
        for layer, key, owner, name in self.found:
            state[owner].setdefault(name, getattr(layer, key).clone())

    def pairs(self) -> Iterable[tuple[Tensor, Tensor]]:
        """(the model's own, their average) of each."""
        for layer, key, owner, name in self.found:
            own: Tensor = getattr(layer, key)
            kept = self.state[owner][name] = self.state[owner][name].to(own)  # the model may have been moved
            yield own, kept

    def update(self, newest: Tensor) -> None:
        """Take what the layers have seen by now into the average."""
        own, kept = map(list, zip(*self.pairs(), strict=True))
        change = torch._foreach_sub(own, kept)
        torch._foreach_mul_(change, newest.to(change[0]))  # of another precision it would take a kernel for each
        torch._foreach_add_(kept, change)


@contextlib.contextmanager
def exchanged(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Have the second of each pair in the place of the first, for a while."""
    undo = _exchange(pairs)
    try:
        yield
    finally:
        _exchange(undo)


@torch.no_grad()
def _exchange(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Put the second of each pair into the first; exchanging what is returned undoes it.

    The two change places, so that no further copy of the weights is held, but where the second has another dtype: it
    would lose by the way there and back.
    """
    undo = []
    for own, kept in pairs:
        before = own.clone()
        own.copy_(kept)
        if own.dtype == kept.dtype:
            kept.copy_(before)
            undo.append((own, kept))
        else:
            undo.append((own, before))
    return undo
