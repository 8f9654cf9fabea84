"""Where an optimizer has its statistics from: the samples of a model (`Capture`) or the passes of a step (`Spread`)."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autoopt.capture import sharded
from autoopt.capture.current import Pass
from autoopt.capture.distributed import total
from autoopt.capture.lengths import Lengths
from autoopt.moments.building import uploaded

PATTERNS = 64  # of missing gradients to remember


class Sizes(NamedTuple):
    """|g| of some parameters."""

    names: list[str]
    lengths: Tensor


class Source(ABC):
    """Answers, for each parameter by its name: Σ c², over how many, and what was done to the gradient since."""

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model  # that owns the parameters, if it is known
        self.sharded = False  # whether each rank holds only some rows of the parameters
        self.current = Pass(self._ended)
        self.sizes: dict[torch.device, Sizes] = {}  # |g| as the last backward pass left it
        self._found: dict[torch.device, Sizes] | None = None  # as the step that is under way finds it
        self._taking: dict[tuple[str, ...], Lengths] = {}  # those of some parameters' gradients
        self._places: dict[Any, Tensor] = {}  # of some parameters among others

    @property
    @abstractmethod
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Those that are observed, by name."""

    @abstractmethod
    def add(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Observe further parameters."""

    @abstractmethod
    def second_moment(self, name: str) -> Tensor | None:
        """Σ c² of a parameter since the last clear, elementwise or in total; None where it was missed."""

    def second_moments(self, names: Sequence[str]) -> list[Tensor | None]:
        """That of several."""
        return [self.second_moment(name) for name in names]

    @abstractmethod
    def samples(self, name: str) -> Tensor | int:
        """N behind `second_moment`: a 0-dim tensor where only the device knows."""

    @abstractmethod
    def lost(self) -> str | None:
        """The name of a layer that no longer reports here."""

    def detach(self) -> None:
        """Observe no more, and leave the model as it was. A process group must not outlive its optimizer here: its
        threads abort the process when they end after the interpreter does."""
        self.current.group = None

    def clear(self) -> None:
        """Forget what was gathered."""
        self.current.gathered, self.current.unfinished, self.current.blank = 0, False, False
        self.current.failed, self.current.left = False, None
        self.current.withheld.clear()
        self.sizes, self._found = {}, None

    # Ranks.

    @property
    def ranks(self) -> int:
        """How many ranks share the batch."""
        return 1 if self.current.group is None else self.current.group.size()

    def over_ranks(self, numbers: Tensor) -> Tensor:
        """The sum over the ranks that share the batch. Every rank must ask, in the same order."""
        return numbers if self.current.group is None else total(numbers, self.current.group)

    def reshard(self) -> None:
        """Have no copy of sharded parameters about that does not see when they are changed."""
        if self.sharded and self.model is not None:
            sharded.reshard(self.model)

    # What happens to a gradient between the backward pass and the step.

    def _ended(self) -> None:
        """A backward pass ended. DDP averages the gradients in a callback too, which may stand behind this one."""
        torch.autograd.Variable._execution_engine.queue_callback(self._measure)

    @torch.no_grad()
    def _measure(self) -> None:
        """Note the sizes of the gradients, so that `changed` can tell what is done to them."""
        self.sizes, self._found = self._sized(), None

    def _sized(self) -> dict[torch.device, Sizes]:
        """|g| of each parameter that has a gradient, by the device that it is on."""
        listed: dict[torch.device, tuple[list[str], list[Tensor]]] = {}
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse:
                continue
            here = sharded.local(gradient) if self.sharded else gradient
            device = here.device
            if device not in listed:
                listed[device] = [], []
            names, gradients = listed[device]
            names.append(name)
            gradients.append(here)
        return {device: Sizes(names, self._lengths(names)(tensors)) for device, (names, tensors) in listed.items()}

    def _lengths(self, names: list[str]) -> Lengths:
        """What takes those of these parameters' gradients."""
        key = tuple(names)
        if key not in self._taking:
            if len(self._taking) == PATTERNS:
                self._taking.clear()
            self._taking[key] = Lengths()
        return self._taking[key]

    def begin(self) -> None:
        """A step begins; one before it may not have come to its end, and gradients may have been changed since."""
        self._found = None

    def changed(self, names: list[str], gradients: Sequence[Tensor | None]) -> Tensor | None:
        """|g| of each gradient now and as the backward pass left it, (tensors, 2); None where there was none.

        All are on one device.
        """
        given = next((gradient for gradient in gradients if gradient is not None), None)
        if given is None or not (self.sizes or self.sharded):
            return None
        if self._found is None:
            self._found = self._sized()
        now, before = self._found.get(given.device), self.sizes.get(given.device)
        if now is not None and before is not None and now.names == before.names:
            lengths = torch.stack([now.lengths, before.lengths], 1)
            return lengths if names == now.names else self._rows(lengths, now.names, names)
        one = given.new_ones(())
        found = [{} if known is None else dict(zip(known.names, known.lengths, strict=True)) for known in (now, before)]
        return torch.stack([known.get(name, one) for name in names for known in found]).view(-1, 2)

    def _rows(self, lengths: Tensor, names: list[str], wanted: list[str]) -> Tensor:
        """The rows of `names` in another order; ones for those that are not there."""
        key = tuple(names), tuple(wanted)
        places = self._places.get(key)
        if places is None or places.device != lengths.device:
            place = {name: number for number, name in enumerate(names)}
            places = uploaded([place.get(name, len(names)) for name in wanted], lengths.device)
            if not torch.compiler.is_compiling():
                if len(self._places) == PATTERNS:
                    self._places.clear()
                self._places[key] = places
        return torch.cat([lengths, torch.ones_like(lengths[:1])])[places]

    def factors(self, changed: Tensor) -> Tensor:
        """The factor that each gradient was multiplied by since the backward pass: clipping, a GradScaler.

        Exactly 1 for a gradient that nobody touched.
        """
        now, before = changed.unbind(1)
        if self.sharded:
            # |g| is over the rows of all ranks. One that had no samples has not seen its rows before: it abstains.
            seen = float(bool(self.sizes))
            parts = torch.stack([now.square(), before.square(), (now != before).to(now)]) * seen
            now, before, touched = self.over_ranks(parts).sqrt()
            now = torch.where(touched > 0, now, before)  # two sums may be taken in two orders
        return torch.where(before > 0, now / before, 1.0)
