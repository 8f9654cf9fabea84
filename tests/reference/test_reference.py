"""The reference against plain torch: its outputs, its gradients, and one-sample passes where the rows do not meet."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equivalence.cases import CASES, Case, N, network
from reference import contributions, double
from reference.rows import ROWS

# torch says so once when "same" needs one more zero on one side; the tests of "same" mean it
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def close(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual - expected).abs().max() <= 1e-12 * expected.abs().max())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_contributions_sum_to_the_gradient(case: Case) -> None:
    model, x, y = network(case, torch.float64)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    c = contributions(model, lambda m: F.cross_entropy(m(x), y))
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert c.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert gradient is not None
        assert c[name].shape == (N, *gradient.shape)
        assert close(c[name].sum(0), gradient), name


@pytest.mark.parametrize("case", [case for case in CASES if not case.rows_meet], ids=str)
def test_contributions_equal_one_sample_passes(case: Case) -> None:
    model, x, y = network(case, torch.float64)
    c = contributions(model, lambda m: F.cross_entropy(m(x), y))
    for i in range(N):
        model.zero_grad()
        (F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]) / N).backward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None
                assert close(c[name][i], parameter.grad), name


def test_batch_norm_contribution_is_output_gradient_times_normalized_input() -> None:
    model = nn.BatchNorm1d(3).double()
    x, y = torch.randn(N, 3, dtype=torch.float64), torch.randn(N, 3, dtype=torch.float64)
    c = contributions(model, lambda m: F.mse_loss(m(x), y))
    output = model(x)
    (delta,) = torch.autograd.grad(F.mse_loss(output, y), output)
    assert close(c["bias"], delta)
    assert close(c["weight"], delta * F.batch_norm(x, None, None, training=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_row_function_computes_the_layer(case: Case) -> None:
    model, x, _ = network(case, torch.float64)
    model = double(model)
    layer, h = model.layer, model.before(x)
    weight, bias = (getattr(layer, key, None) for key in ("weight", "bias"))
    rows = torch.stack([ROWS[type(layer)](layer, h, i, weight, bias) for i in range(N)])
    assert close(rows, layer(h))
