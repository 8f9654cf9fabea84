"""The ways to the second moment of a product agree, whichever the sizes make the rule choose."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoopt.capture import Capture
from autoopt.moments.conv import Conv
from autoopt.moments.linear import sequence_moments
from equivalence.cases import CONV, LINEAR, Case, assert_close, network
from reference import contributions

# torch says so once when "same" needs one more zero on one side; the tests of "same" mean it
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


@pytest.mark.parametrize("case", [*LINEAR, *CONV], ids=str)
def test_gram_form_gives_the_total_of_the_squares(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for balance in (0, 1 << 60):  # never, always
        monkeypatch.setattr("autoopt.moments.product.BALANCE", balance)
        model, x, y = network(case, torch.float64)
        capture = Capture(model, dict(model.named_parameters()), elementwise=False)
        F.cross_entropy(model(x), y).backward()
        found.append({name: (capture.second_moment(name), p.grad) for name, p in model.named_parameters()})
    for name, (square, gradient) in found[0].items():
        if gradient is not None:
            assert_close(found[1][name][0], square, 1e-10, name)
            assert_close(found[1][name][1], gradient, 1e-10, f"gradient of {name}")


@pytest.mark.parametrize("elementwise", [True, False], ids=["elementwise", "total"])
@pytest.mark.parametrize("case", CONV, ids=str)
def test_convolutions_by_kernel_row(case: Case, elementwise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrow layers, which would be done at once, done as wide ones are."""
    monkeypatch.setattr("autoopt.moments.conv.WIDE", 1)
    monkeypatch.setattr("autoopt.moments.product.BALANCE", 0)
    model, x, y = network(case, torch.float64)
    expected = contributions(model, lambda m: F.cross_entropy(m(x), y))
    capture = Capture(model, dict(model.named_parameters()), elementwise=elementwise)
    F.cross_entropy(model(x), y).backward()
    for name, c in expected.items():
        square = c.square().sum(0)
        assert_close(capture.second_moment(name), square if elementwise else square.sum(), 1e-10, name)
        assert_close(model.get_parameter(name).grad, c.sum(0), 1e-10, f"gradient of {name}")


def test_gram_form_forms_no_contribution() -> None:
    """Where few positions meet a large weight, nothing of the size of one c_i for each sample is allocated."""
    samples, width = 8, 256
    dy, x = torch.randn(2, samples, 2, width).unbind()
    conv, image = Conv((1, 1), (1, 1), (0, 0), (1, 1), 1), torch.randn(samples, width, 1, 2)
    for run in (lambda: sequence_moments(dy, x, True), lambda: conv.weight_moments(image, (image,), True)):
        with torch.profiler.profile(profile_memory=True) as profile:
            run()
        largest = max(event.cpu_memory_usage for event in profile.events())
        assert largest < samples * width * width * 4 / 2


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler's own doing
def test_rules_compile_in_one_graph() -> None:
    """Every way a rule takes on this device is traced by torch.compile without a break."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(2, 8, 3, 2, 1),
        nn.Conv2d(8, 64, 2, bias=False),
        nn.Flatten(2),
        nn.Linear(9, 5),
        nn.Linear(5, 2),
    ]
    model, x = nn.Sequential(*layers), torch.randn(3, 2, 8, 8)
    for elementwise in (True, False):
        capture = Capture(model, dict(model.named_parameters()), elementwise=elementwise)
        runs = model, torch.compile(model, fullgraph=True, backend="aot_eager")
        found = []
        for run in runs:
            model.zero_grad()
            capture.clear()
            run(x).square().sum().backward()
            found.append([capture.second_moment(name) for name, _ in model.named_parameters()])
        for eager, compiled in zip(*found, strict=True):
            assert_close(compiled, eager, 1e-5, "compiled")
        capture.detach()
