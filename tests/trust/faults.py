"""The fault matrix: what real training does to optimizers, one named case each.

A case either survives, which means that its run ends with the weights of another run that it must be like, or it is
refused, which means an error of ours that says what is wrong, and not one weight changed by it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from contract.small import weights
from trust.subjects import Make


@dataclass(frozen=True)
class Survives:
    """`run` gives the model that suffered and the one whose weights it must have: to the bit, or but for rounding."""

    run: Callable[[Make], tuple[nn.Module, nn.Module]]
    rounding: float = 0.0

    def check(self, make: Make) -> None:
        model, expected = (weights(model) for model in self.run(make))
        assert model.keys() == expected.keys()
        for name, weight in model.items():
            assert weight.isfinite().all(), f"{name} is not finite"
            if self.rounding:
                torch.testing.assert_close(weight, expected[name], rtol=self.rounding, atol=self.rounding, msg=name)
            else:
                assert torch.equal(weight, expected[name]), f"{name} is not what it would have been"


@dataclass(frozen=True)
class Refused:
    """`run` yields its model, and then does what must be refused with these words."""

    run: Callable[[Make], Generator[nn.Module]]
    error: type[Exception]
    says: str

    def check(self, make: Make) -> None:
        going = self.run(make)
        model = next(going)
        before = weights(model)
        try:
            next(going, None)
        except self.error as error:
            assert re.search(self.says, str(error), re.DOTALL), f"refused with other words: {error}"  # noqa: PT017
        else:
            raise AssertionError("was not refused")
        for name, weight in weights(model).items():
            assert torch.equal(weight, before[name]), f"{name} changed all the same"


FAULTS: dict[str, Survives | Refused] = {}


def survives(rounding: float = 0.0) -> Callable[[Any], Any]:
    """Enter a run that must end like another one."""

    def enter(run: Any) -> Any:
        FAULTS[run.__name__] = Survives(run, rounding)
        return run

    return enter


def refused(error: type[Exception], says: str) -> Callable[[Any], Any]:
    """Enter a run that must be refused."""

    def enter(run: Any) -> Any:
        FAULTS[run.__name__] = Refused(run, error, says)
        return run

    return enter
