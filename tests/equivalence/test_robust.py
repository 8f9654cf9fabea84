"""rule="robust" is what docs/math.md says: the library against one tensor and one sample at a time."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt import AutoAdaGrad, AutoAdam, AutoGaussNewton, AutoSGD
from autoopt.oracle import relative
from autoopt.oracle.relative import signal
from reference import NaiveRobust, contributions
from reference.robust import momentum, reach

KINDS: dict[str, Any] = {"sgd": AutoSGD, "adam": AutoAdam, "adagrad": AutoAdaGrad}
TOLERANCE = 1e-9  # float64, some hundred operations on each number


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).double()


def batch(samples: int, shifts: bool = False) -> tuple[Tensor, Tensor]:
    x = torch.randn(samples, 4, dtype=torch.float64)
    return x, (x[:, :3].argmax(1) + shifts) % 3


def loss_of(x: Tensor, y: Tensor, model: nn.Module) -> Tensor:
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize("sizes", [(12, 16), (4, 1), (1,)], ids=["several", "sometimes one", "always one sample"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("every", [1, 4])
def test_equals_the_naive_rule(kind: str, sizes: tuple[int, ...], every: int) -> None:
    """Three regimes: the warm-up, a steady phase, and another teacher, while whose lesson is learned n falls."""
    naive = assert_equal(kind, every, [batch(sizes[step % len(sizes)], shifts=step >= 120) for step in range(160)])
    if 1 not in sizes:  # noise as large as that of one sample hides the change for longer
        assert any(later < earlier for earlier, later in itertools.pairwise(naive.counts))  # n did fall


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_naive_rule_where_all_is_noise(kind: str) -> None:
    """There the steps fall sooner, down to half of what they would be."""
    noise = [(batch(4)[0], torch.randint(3, (4,))) for _ in range(420)]
    naive = assert_equal(kind, 1, noise)
    assert max(naive.counts) > 300  # from 278 on it shows
    assert naive.decay < 0.15


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [0.03, 0.3, 30.0])
def test_equals_the_naive_rule_on_inputs_of_another_size(kind: str, scale: float) -> None:
    """That of what is not zero, here the same in all batches."""
    batches = [batch(8) for _ in range(60)]
    for x, _ in batches:
        x *= torch.tensor([0.5, 1.0, 0.0, 0.2])
        x *= scale / x[:, [0, 1, 3]].square().mean().sqrt()
    naive = assert_equal(kind, 1, batches, {"0.weight": scale})
    plain = assert_equal(kind, 1, batches[:2]) if scale > 0.5 else None  # what is large enough changes nothing
    assert plain is None or naive.tensors["0.weight"].least == plain.tensors["0.weight"].least


def assert_equal(
    kind: str, every: int, batches: list[tuple[Tensor, Tensor]], inputs: dict[str, float] | None = None
) -> NaiveRobust:
    """The library and the naive rule, which is returned, on the same batches."""
    model = net()
    shadow = copy.deepcopy(model)
    naive = NaiveRobust(dict(model.named_parameters()), kind, every, inputs)
    optimizer = KINDS[kind](model, measure_every=every)
    for step, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        loss_of(x, y, model).backward()
        optimizer.step()
        with torch.no_grad():
            for name, parameter in shadow.named_parameters():
                parameter.copy_(naive.tensors[name].weight)
        naive.step(contributions(shadow, partial(loss_of, x, y)))
        for name, chosen in optimizer.tuned().items():
            where = f"{name} at step {step}"
            assert chosen.lr == pytest.approx(naive.tensors[name].rate, rel=TOLERANCE), where
            to_come = momentum(naive.count + 1, naive.tensors[name].t + 1)
            assert chosen.momentum == pytest.approx(to_come, rel=TOLERANCE), where
            wanted = naive.tensors[name].weight
            assert (model.get_parameter(name) - wanted).abs().max() <= TOLERANCE * wanted.abs().max(), where
    with optimizer.averaged():
        for name, parameter in model.named_parameters():
            wanted = naive.tensors[name].average
            assert (parameter - wanted).abs().max() <= TOLERANCE * wanted.abs().max(), name
    return naive


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [2.0**-20, 2.0**20])
def test_the_scale_of_the_loss_changes_nothing(kind: str, scale: float) -> None:
    """A power of two, so that not even rounding differs; eps of the metrics is the one thing with a unit."""
    options: dict[str, Any] = {} if kind == "sgd" else {"eps": 1e-30}
    found = []
    for factor in (1.0, scale):
        torch.manual_seed(1)
        model = net()
        optimizer = KINDS[kind](model, **options)
        for _ in range(20):
            x, y = batch(8)
            optimizer.zero_grad()
            (factor * loss_of(x, y, model)).backward()
            optimizer.step()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() <= 1e-12 * one.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_one_sample_in_between_are_taken_for_no_signal(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch of an epoch may be that small: its gradient is large, and it has no spread to be held against."""
    shares: list[float] = []
    monkeypatch.setattr(relative, "signal", lambda *given: noted(shares, signal(*given)))
    model = nn.Linear(20, 10).double()
    optimizer = KINDS[kind](model)
    for step in range(300):
        x = torch.randn(1 if step % 20 == 19 else 32, 20, dtype=torch.float64)
        optimizer.zero_grad()
        loss_of(x, torch.randint(10, (len(x),)), model).backward()  # labels that mean nothing
        optimizer.step()
    late = shares[100:]
    assert len(late) == 200
    assert abs(sum(late)) / len(late) < 0.1  # 0.4 to 0.6, were they taken in


def noted(values: list[float], value: Tensor) -> Tensor:
    values.append(value.item())
    return value


@pytest.mark.parametrize("kind", ["sgd", "adam"])  # AdaGrad's metric grows with the gradient at once
def test_no_step_is_long_even_where_the_gradient_jumps(kind: str) -> None:
    """Lengths are relative to those of the last steps, which know nothing of a loss that is 10,000 times larger."""
    model = nn.Linear(40, 30).double()
    optimizer = KINDS[kind](model)
    for step in range(300):
        x = torch.randn(16, 40, dtype=torch.float64)
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        ((1e4 if step >= 200 else 1) * (model(x) - x[:, :30]).square().mean()).backward()
        optimizer.step()
        largest = 0.009 if kind == "sgd" else 0.006  # of Adam's gradient, in its metric, little is signal
        largest *= reach(0.85)
        assert (model.weight - before).norm() <= 1.6 * largest * before.norm() * (1 + 1e-12), step


@pytest.mark.parametrize("kind", KINDS)
def test_one_rare_sample_is_no_shift(kind: str) -> None:
    """Late in training most samples are learned, and one that is not has a gradient many times that of all others."""
    model = nn.Linear(20, 10).double()
    optimizer = KINDS[kind](model)
    counts = []
    for step in range(600):
        x, y = torch.randn(8, 20, dtype=torch.float64), torch.randint(10, (8,))  # labels that mean nothing
        if step % 100 >= 98 and step > 300:  # two in a row, and wrong: <g, u> is large, and positive
            x[0] = 10
            y[0] = model(x[0]).argmin()
        optimizer.zero_grad()
        loss_of(x, y, model).backward()
        optimizer.step()
        counts.append(optimizer._made_buckets()[0][0].statistics["count"].min().item())
    assert all(later > earlier for earlier, later in itertools.pairwise(counts[200:]))


def test_layers_frozen_while_they_travelled_hold_nobody_back() -> None:
    """n would be halved at every step, and the steps would never become shorter."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)).double()
    optimizer = AutoSGD(model)
    for step in range(400):
        if step == 30:
            model[:2].requires_grad_(False)
        x, y = batch(8)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y if step < 30 else torch.randint(3, (8,))).backward()
        optimizer.step()
    assert optimizer.state[model[2].weight]["count"] > 200


@pytest.mark.parametrize("kind", ["adam", "adagrad"])  # Σ c²/ĥ is infinite where g is zero, and with it ĥ
def test_a_variance_that_overflows_harms_nobody(kind: str) -> None:
    """What huge contributions that cancel leave is a gradient of zero and no V̂; that one tensor knows none is all."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = KINDS[kind](model)
    for step in range(10):
        x = torch.randn(8, 4)
        loss = (model(x) - x[:, :3])[:, 1:].square().mean()
        if step == 0:
            loss = loss + (1e16 * torch.tensor([1.0, -1.0] * 4) * model[2](torch.ones(8, 8))[:, 0]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("make", [*KINDS.values(), AutoGaussNewton])
def test_a_gradient_too_small_to_square_moves_no_weight_far(make: Any) -> None:
    """Squares of float32 are inexact from 1e-38 on and zero from 1e-45 on; g may keep one where u = g/10 does not."""
    for exponent in range(170, 250):
        model = nn.Linear(8, 4)
        optimizer = make(model)
        x, before = torch.randn(16, 8), model.weight.detach().clone()
        (10 ** (-exponent / 10) * (model(x) - x[:, :4]).square().mean()).backward()
        optimizer.step()
        optimizer.detach()
        assert (model.weight - before).norm() <= 0.006 * before.norm(), exponent
        assert model.bias.isfinite().all(), exponent
