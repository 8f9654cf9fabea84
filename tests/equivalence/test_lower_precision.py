"""Mixed precision: what the layers compute is what plain torch computes, and squares are never taken in half."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt.capture import Capture
from equivalence.cases import CASES, Case, assert_close, network
from reference import contributions, double

# torch says so once when "same" needs one more zero on one side; the tests of "same" mean it
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def attach(model: nn.Module) -> Capture:
    return Capture(model, dict(model.named_parameters()), elementwise=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bfloat16_autocast(case: Case) -> None:
    """Under autocast the moments are those of what was really computed, up to bfloat16's rounding.

    bfloat16 keeps 8 bits: a rounding moves a value by at most 2^-9 of it. c_i is a product of an input and an output
    gradient, each rounded several times on its way, then squared: 2 * 2 * 4 * 2^-9 = 2^-5 of the largest entry (the
    worst case here is half of that). The activation is smooth: rounding moves values across the kink of a ReLU, which
    is no small change.
    """
    model, x, y = network(case, torch.float32)
    model.after = nn.Tanh()
    exact = x.double() if x.is_floating_point() else x
    expected = contributions(model, lambda m: F.cross_entropy(m(exact), y))
    capture = attach(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    for name, c in expected.items():
        moment = capture.second_moment(name)
        assert moment is not None
        assert moment.dtype == torch.float32
        assert_close(moment, c.square().sum(0), 2**-5, name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bfloat16_parameters(case: Case) -> None:
    """The output is plain torch's to the last bit but one, 2^-7 of the largest entry; moments are kept in float32."""
    plain, x, y = network(case, torch.bfloat16)
    model = copy.deepcopy(plain)
    capture = attach(model)
    for m in (plain, model):
        F.cross_entropy(m(x).float(), y).backward()
    assert_close(model.layer(model.before(x)), plain.layer(plain.before(x)), 2**-7, "output")
    for name, parameter in model.named_parameters():
        moment = capture.second_moment(name)
        if parameter.requires_grad:
            assert moment is not None
            assert moment.dtype == torch.float32
            assert moment.isfinite().all()


CHAINS = {
    "convolutions": (
        [nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Tanh(), nn.GroupNorm(2, 4), nn.Conv2d(4, 3, 6)],
        torch.Size((5, 2, 8, 8)),
    ),
    "layer-norm": ([nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)], torch.Size((5, 2, 4))),
    "rms-norm": ([nn.Linear(4, 6), nn.RMSNorm(6), nn.Tanh(), nn.Linear(6, 3)], torch.Size((5, 2, 4))),
    "batch-norm": ([nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)], torch.Size((5, 4))),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # plain RMSNorm says so of its speed
@pytest.mark.parametrize("chain", CHAINS)
def test_autocast_through_a_chain_of_layers(chain: str) -> None:
    """A norm between two layers that autocast lowers gets bfloat16 with float32 weights, and gives what plain torch
    gives: the same type, and gradients as near to the exact ones."""
    layers, shape = CHAINS[chain]
    plain = nn.Sequential(*copy.deepcopy(layers))
    exact, model = double(plain), copy.deepcopy(plain)
    capture = attach(model)
    x = torch.randn(shape)

    def run(m: nn.Sequential) -> tuple[list[torch.dtype], Tensor]:
        types, h = [], x
        for layer in m:
            h = layer(h)
            types.append(h.dtype)
        return types, h

    exact_output = exact(x.double())
    weighting = torch.randn(exact_output.shape, dtype=torch.float64)
    (exact_output * weighting).sum().backward()
    types = []
    for m in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            seen, output = run(m)
        types.append(seen)
        (output.double() * weighting).sum().backward()
    assert types[1] == types[0]
    for name, parameter in exact.named_parameters():
        errors = []
        for m in (plain, model):
            gradient = m.get_parameter(name).grad
            assert gradient is not None
            assert parameter.grad is not None
            errors.append(((gradient.double() - parameter.grad).abs().max() / parameter.grad.abs().max()).item())
        assert errors[1] <= 2 * errors[0] + 2**-7, f"{name}: {errors}"
        moment = capture.second_moment(name)
        assert moment is not None
        assert moment.dtype == torch.float32


HALF: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(2, 2), (4, 2)),
    "sequence": (nn.Linear(2, 2), (4, 3, 2)),
    "convolution": (nn.Conv1d(2, 2, 1), (4, 2, 3)),
    "embedding": (nn.Embedding(3, 2), (4, 3)),
    "layer-norm": (nn.LayerNorm(2), (4, 3, 2)),
    "rms-norm": (nn.RMSNorm(2), (4, 3, 2)),
    "group-norm": (nn.GroupNorm(1, 2), (4, 2, 3)),
    "batch-norm": (nn.BatchNorm1d(2), (4, 2, 3)),
}


@pytest.mark.parametrize("elementwise", [True, False], ids=["elementwise", "total"])
@pytest.mark.parametrize("size", [1e-4, 1e4])
@pytest.mark.parametrize("layer", HALF)
def test_float16_squares_do_not_overflow_or_vanish(layer: str, size: float, elementwise: bool) -> None:
    """float16 ends at 65504 and at 6e-8: the square of a contribution above 255 or below 2.4e-4 is not in it."""
    kind, shape = HALF[layer]
    model = copy.deepcopy(kind).half()
    x = torch.randint(3, shape) if layer == "embedding" else torch.rand(shape).half()
    exact = x.double() if x.is_floating_point() else x
    expected = contributions(model, lambda m: m(exact).sum() * size)
    capture = Capture(model, dict(model.named_parameters()), elementwise=elementwise)
    (model(x).float().sum() * size).backward()
    for name, c in expected.items():
        square = c.square().sum(0) if elementwise else c.square().sum()
        assert_close(capture.second_moment(name), square, 0.02, name)
