"""Notes on tensors that a Watch takes."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from autoopt.capture.layout import of_one


class Marks:
    """Notes on tensors, as long as they live."""

    def __init__(self) -> None:
        self._notes: dict[int, tuple[weakref.ref[Tensor], Any]] = {}

    def get(self, tensor: Tensor) -> Any:
        noted = self._notes.get(id(tensor))
        return noted[1] if noted is not None and noted[0]() is tensor else None

    def put(self, tensor: Tensor, note: Any) -> None:
        self._notes[id(tensor)] = weakref.ref(tensor), note


class Layouts(Marks):
    """Where the samples are, in tensors that hold some."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.samples = samples

    def put(self, tensor: Tensor, note: int | None) -> None:
        super().put(tensor, of_one(tensor, note) if note is not None and self.samples == 1 else note)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())
