"""measure_every=k: the noise is measured at the first k steps and at every k-th one, and costs nothing in between.

What the steps between do is compared with the naive rules in tests/equivalence/test_{algorithm,robust}.py.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt import AutoAdam, AutoGaussNewton, AutoSGD
from contract.small import assert_same, backward, batches, every_optimizer, mlp, snapshot, train

K = 3
MEASURED = [True, True, True, True, False, False, True, False, False, True]  # of the first ten steps


class Everything(nn.Module):
    """A layer with a rule, one that is called twice, a composite, a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Linear(4, 4), nn.Linear(4, 4)
        self.recurrent, self.scale = nn.GRU(4, 3, batch_first=True), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(self.first(x)).tanh())
        return self.recurrent(x.unsqueeze(1))[0].squeeze(1) * self.scale


def nodes(output: Tensor) -> list[str]:
    """The names of the nodes of a graph."""
    seen: dict[Any, None] = {}
    ahead: list[Any] = [output.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen[node] = None
            ahead += [following for following, _ in node.next_functions]
    return sorted(node.name() for node in seen)


def noises(optimizer: Any) -> list[float]:
    """What was measured last; -1 for nothing yet."""
    return [-1 if math.isnan(chosen.noise) else chosen.noise for chosen in optimizer.tuned().values()]


@every_optimizer
def test_every_step_is_the_default(make: Any) -> None:
    one, other = mlp(), mlp()
    optimizers = make(one), make(other, measure_every=1)
    train(one, optimizers[0], batches(6))
    train(other, optimizers[1], batches(6))
    assert_same(snapshot(other, optimizers[1]), snapshot(one, optimizers[0]))


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("spread", ["samples", "passes"])
def test_the_passes_between_are_the_model_s_own(spread: str, accumulated: int) -> None:
    """The graph of such a step, of every pass that it accumulates, is that of a model without an optimizer."""
    plain = Everything()
    model = copy.deepcopy(plain)
    optimizer = AutoSGD(model, measure_every=K, spread=spread)
    for measures in MEASURED:
        optimizer.zero_grad()
        for x, _ in batches(accumulated):
            loss = model(x).square().mean()
            assert (nodes(loss) == nodes(plain(x).square().mean())) == (not measures or spread == "passes")
            loss.backward()
        before = noises(optimizer)
        optimizer.step()
        assert (noises(optimizer) != before) == (measures and (spread == "samples" or accumulated > 1))


@every_optimizer
@pytest.mark.parametrize("steps", [2, 4, 5, 6])
def test_resumed_run_is_the_uninterrupted_run(make: Any, steps: int) -> None:
    data = batches(10)
    model, other = mlp(), mlp()
    optimizer, fresh = make(model, measure_every=K), make(other, measure_every=K)
    train(model, optimizer, data[:steps])
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, data[steps:])
    train(other, fresh, data[steps:])
    assert_same(snapshot(other, fresh), snapshot(model, optimizer))


def test_a_run_that_measured_every_step_may_go_on_without() -> None:
    """The option may be changed on the way as any other in a group: the first k steps from then on measure."""
    model = mlp()
    optimizer = AutoAdam(model)
    train(model, optimizer, batches(5))
    optimizer.param_groups[0]["measure_every"] = K
    seen = []
    for batch in batches(6):
        before = noises(optimizer)
        train(model, optimizer, [batch])
        seen.append(noises(optimizer) != before)
    assert seen == MEASURED[:6]


@every_optimizer
def test_a_batch_that_is_not_finite_changes_nothing(make: Any) -> None:
    """Whether the step that it falls into measures or not; that step counts."""
    data = batches(8)
    for bad in (3, 4):  # measures; does not
        model = mlp()
        optimizer = make(model, measure_every=K)
        train(model, optimizer, data[:bad])
        before = snapshot(model, optimizer)
        train(model, optimizer, [(data[bad][0] * torch.nan, data[bad][1])])
        after = snapshot(model, optimizer)
        assert after["optimizer"]["param_groups"][0].pop("steps") == bad + 1
        del before["optimizer"]["param_groups"][0]["steps"]
        assert_same(after, before)
        train(model, optimizer, data[bad:])
        assert all(weight.isfinite().all() for weight in model.parameters())


def test_nothing_measured_yet() -> None:
    """Every step that was to measure was skipped: the steps between do without a spread."""
    model = mlp()
    optimizer = AutoSGD(model, measure_every=2)
    good = batches(2)
    bad = [(x * torch.inf, y) for x, y in batches(3)]
    train(model, optimizer, bad)
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, good[:1])
    assert all(not torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert all(weight.isfinite().all() for weight in model.parameters())
    train(model, optimizer, good[1:])
    assert all(noise >= 0 for noise in noises(optimizer))


@every_optimizer
def test_a_step_that_a_scaler_skips_does_not_count(make: Any) -> None:
    """And the scale of the loss, which changes between the steps, is in none of what is held."""
    data = batches(9)
    plain, other = mlp(), mlp()
    train(plain, make(plain, measure_every=K), data)
    optimizer = make(other, measure_every=K)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2)
    bad = (data[0][0] * torch.inf, data[0][1])
    for x, y in [*data[:3], bad, *data[3:5], bad, *data[5:]]:
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(other(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)  # the scales are powers of two


def test_clipping_between_the_steps() -> None:
    """What is held is the noise of the gradient that was stepped along: a constant factor leaves no trace."""
    plain, other = mlp(torch.float64), mlp(torch.float64)
    optimizers = AutoSGD(plain, measure_every=K), AutoSGD(other, measure_every=K)
    for x, y in batches(9, dtype=torch.float64):
        for model, optimizer, factor in ((plain, optimizers[0], 1.0), (other, optimizers[1], 0.25)):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(factor)
            optimizer.step()
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)  # a power of two, and the rule does not see the scale of the loss


def test_passes_that_no_step_follows() -> None:
    """Evaluations, and backward passes whose gradients are cleared, neither count nor leave anything behind."""
    plain, other = mlp(), mlp()
    one, two = AutoAdam(plain, measure_every=K), AutoAdam(other, measure_every=K)
    for batch in batches(9):
        train(plain, one, [batch])
        backward(other, batches(1)[0])
        with torch.no_grad():
            other(batch[0])
        train(other, two, [batch])
        other(batch[0])
    assert_same(snapshot(other, two), snapshot(plain, one))


def test_groups_with_their_own() -> None:
    """A pass is observed as a whole: when any group is due."""
    model = mlp()
    groups = [{"params": model[0].parameters(), "measure_every": 2}, {"params": model[3].parameters()}]
    optimizer = AutoSGD(model, param_groups=groups, measure_every=4)
    seen = []
    for batch in batches(8):
        before = noises(optimizer)
        train(model, optimizer, [batch])
        seen.append(noises(optimizer) != before)
    assert seen == [True, True, True, True, True, False, True, False]


def test_a_group_that_measures_every_step_has_all_observed() -> None:
    model = mlp()
    groups = [{"params": model[0].parameters(), "measure_every": 1}, {"params": model[3].parameters()}]
    optimizer = AutoSGD(model, param_groups=groups, measure_every=4)
    for batch in batches(7):
        before = noises(optimizer)
        train(model, optimizer, [batch])
        assert all(a != b for a, b in zip(before, noises(optimizer), strict=True))


def test_the_curvature_of_gauss_newton_stays_in_between() -> None:
    model = mlp()
    optimizer = AutoGaussNewton(model, measure_every=K)
    for measures, batch in zip(MEASURED, batches(10), strict=True):
        before = {p: state["curvature"].clone() for p, state in optimizer.state.items()}
        train(model, optimizer, [batch])
        for parameter, curvature in before.items():
            assert torch.equal(optimizer.state[parameter]["curvature"], curvature) == (not measures)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo, tracing any Function
def test_a_compiled_model_has_one_graph_for_each() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    plain, other = mlp(), mlp()
    compiled: Any = torch.compile(other, fullgraph=True, backend=backend)
    optimizers = AutoSGD(plain, measure_every=K), AutoSGD(other, measure_every=K)
    for batch in batches(10):
        train(plain, optimizers[0], [batch])
        train(compiled, optimizers[1], [batch])
    assert len(graphs) == 2
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)  # float32, ten steps


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4", None])
def test_refused_values(value: Any) -> None:
    with pytest.raises(ValueError, match=r"measure_every is .*must be a whole number of at least 1"):
        AutoSGD(mlp(), measure_every=value)
