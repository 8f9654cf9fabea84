"""The average of the weights: kept beside them, put in their place for an evaluation, and taken back."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

KEYS = ("running_mean", "running_var")


class RunningStatistics:
    """The average of what the BatchNorm layers of a model have seen, so that averaged weights meet averaged statistics.

    It lives in the optimizer's state, with the layer's weight where that trains, else with the first parameter. All
    that is of one kind lies side by side, so that one operation takes it: the state are views of that.

    Args:
        model: the model, if it is known.
        state: the optimizer's.
        parameters: what the optimizer trains.
    """

    def __init__(
        self, model: nn.Module | None, state: Mapping[Tensor, dict[str, Any]], parameters: list[nn.Parameter]
    ) -> None:
        self.found: list[tuple[Any, str, dict[str, Any], str]] = []  # layer, buffer, in which state, as what
        self.kinds: list[tuple[torch.device, torch.dtype]] = []  # of each
        self.joined: list[tuple[list[int], Tensor]] = []  # for each kind, the numbers of those, and their averages
        trained = set(parameters)
        for layer in model.modules() if model is not None else ():
            own: Any = layer._buffers
            if all(key in own and isinstance(own[key], Tensor) for key in KEYS):
                weight = getattr(layer, "weight", None)
                place = "" if weight in trained else f"_{len(self.found)}"
                owner = weight if weight in trained else parameters[0]
                self.found += [(layer, key, state[owner], f"average_{key}{place}") for key in KEYS]
                trained.discard(weight)  # another layer that has this weight has statistics of its own
        self._own()

    def _own(self) -> list[Tensor]:
        """What the layers have. The averages are where it is and of its dtype, also after the model was moved."""
        own: list[Any] = [layer._buffers.get(key) for layer, key, _, _ in self.found]
        if any([now is None for now in own]):  # noqa: C419 - a layer was told to keep none: half the time of a generator
            self.found = [known for known, now in zip(self.found, own, strict=True) if now is not None]
            own = [now for now in own if now is not None]
        kinds = [(tensor.device, tensor.dtype) for tensor in own]
        if kinds != self.kinds:
            self.kinds = kinds
            with torch.inference_mode(False):  # else no step outside of that mode could change them
                self.joined = [self._join(kind, own) for kind in dict.fromkeys(kinds)]
        return own

    def _join(self, kind: tuple[torch.device, torch.dtype], own: list[Tensor]) -> tuple[list[int], Tensor]:
        """Lay the averages of one kind side by side. One that is not there yet begins with what is to be averaged."""
        numbers = [i for i, other in enumerate(self.kinds) if other == kind]
        places = [(own[i], *self.found[i][2:]) for i in numbers]
        averages = torch.cat([state.get(name, now).to(now).flatten() for now, state, name in places])
        views = averages.split([now.numel() for now, _, _ in places])
        for (now, state, name), view in zip(places, views, strict=True):
            state[name] = view.view(now.shape)
        return numbers, averages

    def pairs(self) -> Iterable[tuple[Tensor, Tensor]]:
        """(the model's own, their average) of each."""
        return [(now, state[name]) for now, (_, _, state, name) in zip(self._own(), self.found, strict=True)]

    def update(self, share: Tensor) -> None:
        """Take what the layers have seen by now into the average, as this share of it, where it is finite.

        A batch that is skipped has left its mark in what the layers keep, which may be no number, for ever.
        """
        own = self._own()
        for numbers, averages in self.joined:
            seen = torch.cat([own[i].flatten() for i in numbers])
            change = seen.sub_(averages).nan_to_num_(0.0, 0.0, 0.0)
            averages.addcmul_(change, share.to(averages.device))


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
        # Backwards, as one tensor may be in several places. Also where the model has another dtype by now: what is kept
        # must not be lost.
        _exchange(places[::-1])


@torch.no_grad()
def _exchange(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for own, kept in pairs:
        before = own.clone()
        own.copy_(kept)
        kept.copy_(before)
