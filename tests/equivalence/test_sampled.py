"""Where not every sample is looked at, Σ c_i² is an unbiased estimate, and the gradient what it always is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from autoopt import AutoAdam, AutoGaussNewton, AutoSGD
from autoopt.capture import Capture, sampled

SAMPLES, DRAWS = 24, 150


class Twice(nn.Module):
    """One layer, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh())


class Recurrent(nn.Module):
    """The outputs of an LSTM at all times."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.lstm(x)[0]
        return output


class Own(nn.Module):
    """A parameter that no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv1d(x, self.kernel)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv": (lambda: nn.Conv2d(3, 6, 3, padding=1), (3, 7, 7)),
    "strided conv": (lambda: nn.Conv1d(3, 6, 3, stride=2), (3, 9)),
    "grouped conv": (lambda: nn.Conv2d(4, 8, 3, groups=2), (4, 6, 6)),
    "transposed conv": (lambda: nn.ConvTranspose2d(3, 4, 2), (3, 5, 5)),
    "sequence": (lambda: nn.Linear(5, 8), (6, 5)),
    "twice": (Twice, (6,)),
    "lstm": (Recurrent, (5, 5)),
    "weight norm": (lambda: weight_norm(nn.Linear(5, 8)), (4, 5)),
    "own parameter": (Own, (3, 8)),
}


def squares(capture: Capture, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    capture.clear()
    model(x).square().sum().backward()
    found = {name: capture.second_moment(name) for name in capture.parameters}
    return {name: square.clone() for name, square in found.items() if square is not None}


@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize("case", MODELS)
def test_estimate_is_unbiased(case: str, elementwise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over batches in random order is the exact value, within five standard errors of what was drawn."""
    make, shape = MODELS[case]
    model, x = make().double(), torch.randn(SAMPLES, *shape, dtype=torch.float64)
    capture = Capture(model, dict(model.named_parameters()), elementwise=elementwise)
    exact = squares(capture, model, x)
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    capture.exact = False
    monkeypatch.setattr(sampled, "CPU_ROOM", 60)
    draws: dict[str, list[Tensor]] = {name: [] for name in exact}
    for _ in range(DRAWS):
        for name, square in squares(capture, model, x[torch.randperm(SAMPLES)]).items():
            draws[name].append(square.sum())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-10, atol=1e-12)
    estimated = False
    for name, values in draws.items():
        drawn = torch.stack(values)
        error = 5 * drawn.std() / DRAWS**0.5 + 1e-10 * exact[name].sum()
        assert (drawn.mean() - exact[name].sum()).abs() <= error, name
        estimated |= bool(drawn.std() > 1e-6 * drawn.mean())
    assert estimated, "every sample was looked at: the case tests nothing"


@given(samples=st.integers(1, 4096), each=st.integers(0, 1 << 22), exact=st.booleans())
def test_choice(samples: int, each: int, exact: bool) -> None:
    """A few samples where there is no room for all, all in the batch, standing for all of them."""
    some = sampled.Sampler(exact=exact).choose(samples, each, torch.device("cpu"))
    if some is None:
        assert exact or samples <= sampled.FEW or samples * each <= sampled.CPU_ROOM
        return
    rows = range(samples)[some.rows]
    assert len(rows) == some.number
    assert 1 <= some.number <= sampled.FEW
    assert some.number * some.share == pytest.approx(samples)


def spread_of(make: Any, model: nn.Module, **options: Any) -> bool:
    """Whether the optimizer looks at every sample."""
    optimizer = make(model, **options)
    every: bool = optimizer._now.source.exact
    optimizer.detach()
    return every


def test_who_looks_at_every_sample() -> None:
    """The paper's rule, a metric made of samples, and who asks for it."""
    model = nn.Linear(2, 2)
    assert not spread_of(AutoSGD, model)
    assert spread_of(AutoSGD, model, exact=True)
    assert spread_of(AutoAdam, model, rule="paper")
    assert spread_of(AutoGaussNewton, model)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "rule": "paper"}]
    assert spread_of(AutoSGD, model, param_groups=groups)


def test_exact_is_true_or_false() -> None:
    with pytest.raises(ValueError, match="exact is 'yes'; it must be True or False"):
        AutoSGD(nn.Linear(2, 2), exact="yes")  # type: ignore[arg-type]


def test_the_paper_does_not_depend_on_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    one = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(64, 2))
    other = copy.deepcopy(one)
    x = torch.randn(16, 1, 6, 6)
    for room, model in ((1 << 18, one), (10, other)):
        monkeypatch.setattr(sampled, "CPU_ROOM", room)
        optimizer = AutoSGD(model, rule="paper")
        for _ in range(5):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_an_estimate_below_zero_counts_in_the_steps_between_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two samples looked at add nothing, so V̂ is below zero; to leave that out would bias the average."""
    monkeypatch.setattr(sampled, "CPU_ROOM", 10)
    model = nn.Conv1d(1, 2, 3, bias=False)
    optimizer = AutoSGD(model, measure_every=2)
    x = torch.randn(8, 1, 6)
    x[[1, 5]] = 0
    for _ in range(4):  # the last one does not measure
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    state = optimizer.state[model.weight]
    assert state["held"] < 0
    assert state["measured"] == 4
    assert optimizer.tuned()["weight"].noise == 0
