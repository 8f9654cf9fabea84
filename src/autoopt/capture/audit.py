"""Whether everything that reached a parameter was seen: then the samples' contributions add up to its gradient.

Asked once for each parameter, at the end of the first backward pass that enters uses of it. A use that nobody can see,
as in a user's own autograd.Function, would else be missing from the statistics without a word.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autoopt.moments import Contributions, wide

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
MATTERS = 0.01  # of what the samples add through a layer; what reaches its parameter besides, and is less, is let be
NOTHING = 1e-3  # of what they add to that parameter which they add most to: what is less may be nothing but rounding


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
        found = [_difference(uses[name], samples, parameters[name], self._before[name]) for name in asked]
        self.done |= uses.keys()
        self._before = {}
        if not found:
            return
        if wrong := _wrong(asked, *(_together(numbers) for numbers in zip(*found, strict=True))):
            self.done -= set(wrong)
            raise RuntimeError(
                f"parameter '{wrong[0]}' has a gradient that is not the sum of what the samples add to it: some use of "
                "it was not seen. It may be used in a custom autograd.Function, in a function that a checkpoint runs "
                "again outside of its module, in a compiled part of the model, or in the loss itself. Use it in the "
                "forward pass of a module, or leave it to another optimizer through param_groups."
            )


class Besides:
    """Whether something else than its layer added to a parameter, or changed its gradient.

    Its length is compared, and its part along the parameter, where a penalty acts: so no gradient is copied. A penalty
    in the loss is ordinary, and has no noise, so that the statistics are nearly right: this warns.
    """

    def __init__(self) -> None:
        self.done: set[str] = set()
        self._expected: dict[str, tuple[Tensor, float]] = {}  # and how far off they may be, as a part of Σ_i |c_i|
        self._graph = -1  # the pass that this is of, by autograd's number

    def note(self, name: str, parameter: nn.Parameter, gradient: Tensor, graph: int) -> None:
        """A layer is about to add this to the gradient of its parameter, in the pass of that number."""
        if graph != self._graph:  # the one before it may not have come to its end
            self._graph, self._expected = graph, {}
        expected = _lengths(gradient, parameter)
        if parameter.grad is not None:
            expected += _lengths(parameter.grad, parameter)
            expected[0] = torch.nan  # lengths do not add up, and NaN is not far from anything
        self._expected[name] = expected, max(MATTERS, TOLERANCE[gradient.dtype])

    def check(
        self,
        graph: int,
        squares: Mapping[str, Tensor],
        samples: Mapping[str, Any],
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        """At the end of the pass, by Σ_i c_i² and N of each parameter: compare, and read the answer, once for all.

        The root of N Σ_i |c_i|² is at least Σ_i |c_i|, by which rounding is to be measured: the c_i may cancel.
        """
        expected, self._expected = self._expected, {}
        if graph != self._graph or not expected:
            return
        self.done |= expected.keys()
        there = [name for name in expected if name in squares and parameters[name].grad is not None]
        asked = {name: expected[name] for name in there}
        if not asked:
            return
        sizes = _together((squares[name].sum() * samples[name]).sqrt() for name in asked)
        off = _together(_off(parameters[name], *noted) for name, noted in asked.items())
        if wrong := _wrong(asked, off, sizes):
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            warnings.warn(
                f"the gradient of parameter '{wrong[0]}'{more} is not what the samples add to it through its layer. "
                "Is there a penalty on the weights in the loss, a hook that changes the gradient, or a use of the "
                "parameter outside of its layer? The noise is measured in the layer alone, without that. For a penalty "
                "of |w|² give the optimizer weight_decay= instead.",
                stacklevel=2,
            )


def _lengths(gradient: Tensor, parameter: nn.Parameter) -> Tensor:
    """That of a gradient, and of its part along the parameter."""
    g, w = wide(gradient).flatten(), wide(parameter.detach()).flatten()
    return torch.stack([g.norm(), g.to(w.dtype).dot(w) / w.norm()])


def _off(parameter: nn.Parameter, expected: Tensor, slack: float) -> Tensor:
    """How far the gradient is from what was expected, over how far it may be. NaN is not far."""
    assert parameter.grad is not None
    return (_lengths(parameter.grad, parameter) - expected).abs().nan_to_num(0.0, 0.0).max() / slack


def _together(numbers: Iterable[Tensor]) -> Tensor:
    """Numbers that may lie on several devices."""
    listed = list(numbers)
    return torch.stack([number.to(listed[0].device) for number in listed])


def _wrong(names: Iterable[str], off: Tensor, sizes: Tensor) -> list[str]:
    """Those that are off by more than the size of what the samples add. This reads the device."""
    far = off > sizes.maximum(NOTHING * sizes.max())
    return [name for name, is_far in zip(names, far.tolist(), strict=True) if is_far]


def _comparable(parameter: nn.Parameter) -> bool:
    """Whether its gradient is what autograd made it."""
    return parameter.grad is not None and not parameter._backward_hooks


def _difference(
    uses: Sequence[Contributions], samples: int, parameter: nn.Parameter, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    """How far what was added to a gradient is from the sum of the contributions, over rounding, and their size."""
    assert parameter.grad is not None
    added = wide(parameter.grad if before is None else parameter.grad - before)
    total, size = torch.zeros_like(added), torch.zeros((), dtype=added.dtype, device=added.device)
    rounding = 0.0
    for i in range(samples):
        parts = [use(slice(i, i + 1)) for use in uses]
        rounding = max(TOLERANCE[part.dtype] for part in parts)
        for part in parts:  # which may cancel: rounding goes by the size of each
            total, size = total + wide(part)[0], size + wide(part).norm()
    return (total - added).norm() / rounding, torch.maximum(size, added.norm())
