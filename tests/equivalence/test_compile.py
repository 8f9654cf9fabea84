"""torch.compile of the model, in one graph: the statistics flow through it as gradients do.

The backend is aot_eager: it tests what Dynamo and AOTAutograd trace, without the minute that a C++ build takes.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoopt import AutoAdam, AutoSGD
from autoopt.capture import Capture
from equivalence.cases import CASES, Case, assert_close
from equivalence.cases import network as around

ONE_OF_EACH = {type(case.layer()): case for case in reversed(CASES)}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, stride=2), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.GroupNorm(2, 4),
        nn.Flatten(2), nn.Linear(16, 8), nn.LayerNorm(8), nn.Flatten(), nn.RMSNorm(32), nn.Linear(32, 3),
    ).double()  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo, tracing any Function
@pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
def test_a_compiled_model_trains_as_the_plain_one(make: type) -> None:
    plain = network()
    other = copy.deepcopy(plain)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    optimizers = make(plain), make(other)
    for _ in range(5):
        x, y = torch.randn(6, 1, 8, 8, dtype=torch.float64), torch.randint(0, 3, (6,))
        for model, optimizer in zip((plain, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    for name, chosen in optimizers[0].tuned().items():
        assert optimizers[1].tuned()[name].lr == pytest.approx(chosen.lr, rel=1e-9)
        # a bias before a normalisation has a gradient of rounding errors, whose noise means nothing
        if name not in ("0.bias", "5.bias"):
            assert optimizers[1].tuned()[name].noise == pytest.approx(chosen.noise, rel=1e-9)
    for (name, a), b in zip(plain.named_parameters(), other.parameters(), strict=True):
        if make is AutoSGD or name not in ("0.bias", "5.bias"):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-10, msg=name)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo, tracing any Function
def test_eager_and_compiled_passes_of_one_step_are_counted_together() -> None:
    """N of the one is counted on the host, of the other on the device."""
    plain = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    other = copy.deepcopy(plain)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    batches = [(torch.randn(size, 4).double(), torch.randint(0, 3, (size,))) for size in (6, 4)]
    optimizers = AutoSGD(plain), AutoSGD(other)
    for model, (x, y) in zip((other, compiled), batches, strict=True):
        F.cross_entropy(model(x), y).backward()
    for x, y in batches:
        F.cross_entropy(plain(x), y).backward()
    for optimizer in optimizers:
        optimizer.step()
    for name, chosen in optimizers[0].tuned().items():
        assert optimizers[1].tuned()[name].noise == pytest.approx(chosen.noise, rel=1e-9)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo, tracing any Function
@pytest.mark.parametrize("case", ONE_OF_EACH.values(), ids=str)
def test_gradients_and_second_moments_of_a_layer_are_those_of_an_eager_pass(case: Case) -> None:
    """Also those of the layer before it: torch 2.11 lost the gradient behind RMSNorm in a graph, without a word."""
    torch.compiler.reset()
    found = []
    for compiles in (False, True):
        model, x, y = around(case, torch.float64)
        capture = Capture(model, dict(model.named_parameters()), elementwise=True)
        forward = torch.compile(model, fullgraph=True, backend="aot_eager") if compiles else model
        F.cross_entropy(forward(x), y).backward()
        found.append({name: (p.grad, capture.second_moment(name)) for name, p in model.named_parameters()})
        capture.detach()
    eager, compiled = found
    for name, (gradient, square) in eager.items():
        assert square is not None
        assert_close(compiled[name][0], gradient, 1e-10, f"gradient of {name}")
        assert_close(compiled[name][1], square, 1e-10, name)
