"""Whether everything that reached a parameter was seen: then the samples' contributions add up to its gradient.

Asked once for each parameter, at the end of the first backward pass that enters uses of it. A use that nobody can see,
as in a user's own autograd.Function, would else be missing from the statistics without a word.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from autoopt.moments import Contributions, wide

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}


class Audit:
    """The parameters that were asked for, and the gradients that those to be asked for had before the pass."""

    def __init__(self) -> None:
        self.done: set[str] = set()
        self._before: dict[str, Tensor | None] = {}

    def open(self, name: str, parameter: nn.Parameter) -> None:
        """A use of the parameter is about to be entered; nothing was added to its gradient in this pass so far."""
        if name not in self.done and name not in self._before:
            self._before[name] = None if parameter.grad is None else parameter.grad.clone()

    def drop(self) -> None:
        """Forget the gradients before a pass that did not come to its end."""
        self._before = {}

    def check(
        self, uses: Mapping[str, Sequence[Contributions]], samples: int, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        """Compare what was entered with what was added to the gradients, and read the answer, once for all."""
        asked = [name for name in uses if name in self._before and _comparable(parameters[name])]
        fits = [_fits(uses[name], samples, parameters[name], self._before[name]) for name in asked]
        self.done |= uses.keys()
        self._before = {}
        if not fits:
            return
        wrong = [name for name, fit in zip(asked, torch.stack(fits).tolist(), strict=True) if not fit]
        if wrong:
            self.done -= set(wrong)
            raise RuntimeError(
                f"parameter '{wrong[0]}' has a gradient that is not the sum of what the samples add to it: some use of "
                "it was not seen. It may be used in a custom autograd.Function, in a function that a checkpoint runs "
                "again outside of its module, in a compiled part of the model, or in the loss itself. Use it in the "
                "forward pass of a module, or leave it to another optimizer through param_groups."
            )


def _comparable(parameter: nn.Parameter) -> bool:
    """Whether its gradient is what autograd made it."""
    return parameter.grad is not None and not parameter._backward_hooks


def _fits(uses: Sequence[Contributions], samples: int, parameter: nn.Parameter, before: Tensor | None) -> Tensor:
    assert parameter.grad is not None
    added = wide(parameter.grad if before is None else parameter.grad - before)
    total, size = torch.zeros_like(added), torch.zeros((), dtype=added.dtype, device=added.device)
    rounding = 0.0
    for i in range(samples):
        parts = [use(slice(i, i + 1)) for use in uses]
        rounding = max(TOLERANCE[part.dtype] for part in parts)
        c = sum((wide(part)[0] for part in parts), torch.zeros_like(added))
        total, size = total + c, size + c.norm()
    fits: Tensor = (total - added).norm() <= rounding * torch.maximum(size, added.norm())
    return fits
