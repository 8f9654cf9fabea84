"""The metrics are those of torch.optim: with γ held still, each optimizer is its plain counterpart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoopt import AutoAdaDelta, AutoAdaGrad, AutoAdam, AutoAdamW, AutoGaussNewton, AutoNAdam, AutoRMSprop, AutoSGD
from contract.small import batches, mlp, train

RATE = 0.01
STILL: dict[str, Any] = {"rule": "paper", "smoothing": 1 - 1e-15, "start": (1 - RATE, 0.0), "average": False}

CASES: dict[str, tuple[Any, Any]] = {
    "sgd": (lambda m: AutoSGD(m, **STILL), lambda p: torch.optim.SGD(p, lr=RATE)),
    "sgd, decay": (
        lambda m: AutoSGD(m, weight_decay=0.1, **STILL),
        lambda p: torch.optim.SGD(p, lr=RATE, weight_decay=0.1),
    ),
    "adam": (lambda m: AutoAdam(m, **STILL), lambda p: torch.optim.Adam(p, lr=RATE, betas=(0.0, 0.99))),
    "amsgrad, decay": (
        lambda m: AutoAdam(m, amsgrad=True, weight_decay=0.1, **STILL),
        lambda p: torch.optim.Adam(p, lr=RATE, betas=(0.0, 0.99), amsgrad=True, weight_decay=0.1),
    ),
    "adamw": (
        lambda m: AutoAdamW(m, weight_decay=0.1, **STILL),
        lambda p: torch.optim.AdamW(p, lr=RATE, betas=(0.0, 0.99), weight_decay=0.1),
    ),
    "adagrad": (lambda m: AutoAdaGrad(m, **STILL), lambda p: torch.optim.Adagrad(p, lr=RATE)),
    "rmsprop": (lambda m: AutoRMSprop(m, **STILL), lambda p: torch.optim.RMSprop(p, lr=RATE)),
    "rmsprop, centered": (
        lambda m: AutoRMSprop(m, centered=True, **STILL),
        lambda p: torch.optim.RMSprop(p, lr=RATE, centered=True),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_torch(case: str) -> None:
    automatic, plain = CASES[case]
    model, other = mlp(torch.float64), mlp(torch.float64)
    train(model, automatic(model), batches(20, dtype=torch.float64))
    train(other, plain(other.parameters()), batches(20, dtype=torch.float64))
    for one, wanted in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-8, atol=1e-10)


def one_step_each(make: Any, gradients: list[float]) -> list[float]:
    """The weights after each of some gradients, which two samples have half of each."""
    layer = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        layer.weight.fill_(1.0)
    optimizer = make(layer)
    found = []
    for gradient in gradients:
        optimizer.zero_grad()
        layer(torch.tensor([[0.75], [0.25]], dtype=torch.float64)).sum().mul(gradient).backward()
        optimizer.step()
        found.append(layer.weight.item())
    return found


def test_adadelta_is_its_definition() -> None:
    """w -= α g·√((D + ε)/(S + ε)); torch accumulates the change before its lr, here it is the change that was made."""
    S = D = 0.0
    weight, wanted = 1.0, []
    for g in (1.0, -2.0, 3.0):
        S = 0.9 * S + 0.1 * g * g
        change = RATE * g * ((D + 1e-6) / (S + 1e-6)) ** 0.5
        D = 0.9 * D + 0.1 * change**2
        weight -= change
        wanted.append(weight)
    assert one_step_each(lambda m: AutoAdaDelta(m, **STILL), [1.0, -2.0, 3.0]) == pytest.approx(wanted, rel=1e-12)


def test_nesterov_looks_one_filtering_ahead() -> None:
    alpha, beta = RATE, 0.5
    still = {**STILL, "start": (1 - alpha, alpha * beta)}
    estimate, square, product, weight, wanted = 0.0, 0.0, 1.0, 1.0, []
    for t, g in enumerate((1.0, -2.0, 3.0), 1):
        estimate = alpha * ((1 - beta) * g + beta * estimate)
        ahead = alpha * ((1 - beta) * g + beta * estimate)
        square = 0.99 * square + 0.01 * g * g
        product *= beta
        weight -= ahead / ((square / (1 - 0.99**t)) ** 0.5 + 1e-8) / (1 - product)
        wanted.append(weight)
    assert one_step_each(lambda m: AutoNAdam(m, **still), [1.0, -2.0, 3.0]) == pytest.approx(wanted, rel=1e-12)


def test_gauss_newton_divides_by_the_curvature_of_a_log_likelihood() -> None:
    """A Gaussian likelihood with inputs of known size: E[(∂ℓ_i)²] = E[x²] E[r²], the Hessian E[x²] times the noise."""
    torch.manual_seed(5)
    layer = nn.Linear(3, 1, bias=False).double()
    optimizer = AutoGaussNewton(layer, damping=1e-12, rule="paper", smoothing=1 - 1e-15, start=(1 - RATE, 0.0))
    sizes = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    for _ in range(400):
        x = torch.randn(256, 3, dtype=torch.float64) * sizes
        with torch.no_grad():
            layer.weight.zero_()
        optimizer.zero_grad()
        residual = layer(x) - torch.randn(256, 1, dtype=torch.float64)
        (residual.square() / 2).mean().backward()
        optimizer.step()
    curvature: Tensor = optimizer.state[layer.weight]["curvature"]
    # an average of about 200 batches of 256 draws: a spread of 2 % would be three standard deviations
    torch.testing.assert_close(curvature.flatten(), sizes.square(), rtol=0.03, atol=0.0)


def test_gauss_newton_starts_with_a_plain_mean() -> None:
    """An average that starts at zero made the first steps, by which the later ones are measured, far too long."""
    torch.manual_seed(6)
    layer = nn.Linear(3, 1, bias=False).double()
    optimizer = AutoGaussNewton(layer)
    seen = []
    for _ in range(5):
        x = torch.randn(4, 3, dtype=torch.float64)
        optimizer.zero_grad()
        each = torch.stack([torch.autograd.grad(layer(row).sum().square(), layer.weight)[0] for row in x])
        seen.append(each.square().mean(0))
        layer(x).square().mean().backward()
        optimizer.step()
        wanted = torch.stack(seen).mean(0)
        torch.testing.assert_close(optimizer.state[layer.weight]["curvature"], wanted, rtol=1e-12, atol=0.0)


def test_gauss_newton_takes_the_first_curvature_that_it_measures() -> None:
    """Also of a tensor whose first gradient comes at a step that measures none."""
    torch.manual_seed(7)
    layers = nn.ModuleList([nn.Linear(3, 1, bias=False) for _ in range(2)]).double()
    optimizer = AutoGaussNewton(layers, measure_every=2)
    for step in range(5):  # the first two measure, then every second one
        x = torch.randn(4, 3, dtype=torch.float64)
        optimizer.zero_grad()
        used = layers if step >= 3 else layers[:1]
        weight = layers[1].weight
        each = torch.stack([torch.autograd.grad(layers[1](row).sum().square(), weight)[0] for row in x])
        sum(layer(x).square().mean() for layer in used).backward()
        optimizer.step()
    torch.testing.assert_close(optimizer.state[weight]["curvature"], each.square().mean(0), rtol=1e-12, atol=0.0)
