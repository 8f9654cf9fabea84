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
            if all(isinstance(getattr(layer, key, None), Tensor) for key in KEYS):
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
            kept: Tensor = self.state[owner][name]
            if (kept.device, kept.dtype) != (own.device, own.dtype):  # the model was moved
                with torch.inference_mode(False):
                    kept = self.state[owner][name] = kept.to(own)
            yield own, kept

    def update(self, newest: Tensor, takes: Tensor) -> None:
        """Take what the layers have seen by now into the average, if the step `takes` place, and where it is finite.

        A batch that is skipped has left its mark in what the layers keep, which may be no number, for ever.
        """
        alike: dict[Any, list[tuple[Tensor, Tensor]]] = {}  # what one operation can take
        for own, kept in self.pairs():
            alike.setdefault((own.device, own.dtype), []).append((own, kept))
        share = newest * takes
        for (device, dtype), pairs in alike.items():
            seen, known = (torch.cat([pair[side].flatten() for pair in pairs]) for side in (0, 1))
            change = seen.sub_(known).mul_(share.to(device, dtype)).nan_to_num_(0.0, 0.0, 0.0)
            torch._foreach_add_([kept.view(-1) for _, kept in pairs], change.split([own.numel() for own, _ in pairs]))


@contextlib.contextmanager
def exchanged(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Have the second of each pair in the place of the first, for a while."""
    # They change places, so that no further copy of the weights is held, but where the second has another dtype: it
    # would lose by the way there and back.
    places = [(own, kept if own.dtype == kept.dtype else kept.clone()) for own, kept in pairs]
    _exchange(places)
    try:
        yield
    finally:
        _exchange(places)  # also where the model has another dtype by now: what is kept must not be lost


@torch.no_grad()
def _exchange(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for own, kept in pairs:
        before = own.clone()
        own.copy_(kept)
        kept.copy_(before)
