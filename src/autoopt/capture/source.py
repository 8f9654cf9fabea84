"""Where an optimizer has its statistics from: the samples of a model (`Capture`) or the passes of a step (`Spread`)."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from autoopt.capture import sharded
from autoopt.capture.current import Pass
from autoopt.capture.distributed import total
from autoopt.moments import wide


class Source(ABC):
    """Answers, for each parameter by its name: Σ c², over how many, and what was done to the gradient since."""

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model  # that owns the parameters, if it is known
        self.sharded = False  # whether each rank holds only some rows of the parameters
        self.current = Pass(self._ended)
        self.sizes: dict[str, Tensor] = {}  # |g| of each parameter as the last backward pass left it

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
        self.sizes = {}

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
        gradients = {n: p.grad for n, p in self.parameters.items() if p.grad is not None and not p.grad.is_sparse}
        here = map(sharded.local, gradients.values()) if self.sharded else gradients.values()
        self.sizes = dict(zip(gradients, _sizes(list(here)), strict=True))

    def changed(self, names: Sequence[str], gradients: Sequence[Tensor | None]) -> Tensor | None:
        """|g| of each gradient now and as the backward pass left it, (tensors, 2); None where there was none."""
        if not self.sizes and not self.sharded:
            return None
        present = {name: gradient for name, gradient in zip(names, gradients, strict=True) if gradient is not None}
        if not present:
            return None
        sizes = _sizes(list(present.values()))
        found, before = dict(zip(present, sizes, strict=True)), self.sizes
        if len(found.keys() & before.keys()) < len(names):  # of some nothing is known
            ones = dict.fromkeys(names, torch.ones_like(sizes[0]))
            found, before = {**ones, **found}, {**ones, **before}
        return torch.stack([known[name] for name in names for known in (found, before)]).view(-1, 2)

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


def _sizes(gradients: list[Tensor]) -> list[Tensor]:
    """|g| of each, in one operation and in the precision that the step squares them in."""
    return list(torch._foreach_norm([wide(gradient) for gradient in gradients])) if gradients else []
