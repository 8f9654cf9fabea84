"""`with opt.averaged()`: the average of the weights, in their place and taken back."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autoopt import AutoSGD
from autoopt.optim.average import RunningStatistics
from contract.small import assert_same, backward, batches, every_optimizer, mlp, of_the_paper, snapshot, train, weights


def newest(step: int) -> float:
    return 5 / (step + 4)


@of_the_paper  # by the robust rule n is not the count of steps: see equivalence/test_robust.py
def test_it_is_the_average(make: Any) -> None:
    model = mlp()
    optimizer = make(model)
    wanted: dict[str, Any] = {}
    for step, batch in enumerate(batches(30), 1):
        train(model, optimizer, [batch])
        for name, weight in weights(model).items():
            last = wanted.get(name, weight).double()
            wanted[name] = last + newest(step) * (weight.double() - last)
    with optimizer.averaged():
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.double(), wanted[name], rtol=1e-5, atol=1e-6)  # thirty float32 steps


@every_optimizer
def test_it_goes_back(make: Any) -> None:
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, batches(30))
    before = snapshot(model, optimizer)
    with optimizer.averaged():
        model(batches(1)[0][0])
    assert_same(snapshot(model, optimizer), before)


def test_an_error_inside_gives_the_weights_back() -> None:
    model = mlp()
    optimizer = AutoSGD(model)
    train(model, optimizer, batches(3))
    before = snapshot(model, optimizer)
    with pytest.raises(ZeroDivisionError), optimizer.averaged():
        _ = 1 / 0
    assert_same(snapshot(model, optimizer), before)


def test_before_the_first_step_the_average_is_the_weights() -> None:
    model = mlp()
    before = weights(model)
    with AutoSGD(model).averaged():
        assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_a_parameter_that_never_moves_keeps_its_value() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = AutoSGD(model)
    train(model, optimizer, batches(3))
    before = model[0].weight.clone()
    with optimizer.averaged():
        assert torch.equal(model[0].weight, before)


def test_batch_norm_statistics_are_averaged_with_the_weights() -> None:
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3), nn.BatchNorm1d(3, affine=False)
    )
    optimizer = AutoSGD(model, rule="paper")
    wanted: dict[str, torch.Tensor] = {}
    for step, batch in enumerate(batches(20), 1):
        train(model, optimizer, [batch])
        for name, buffer in model.named_buffers():
            if "running" in name:
                last = wanted.get(name, buffer.clone())
                wanted[name] = last + newest(step) * (buffer - last)
    before = snapshot(model, optimizer)
    with optimizer.averaged():
        for name, value in wanted.items():
            torch.testing.assert_close(model.get_buffer(name), value, rtol=1e-5, atol=1e-6)
            assert not torch.equal(model.get_buffer(name), before["model"][name])
    assert_same(snapshot(model, optimizer), before)


def test_the_average_survives_a_checkpoint() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    optimizer = AutoSGD(model)
    train(model, optimizer, batches(5))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other = copy.deepcopy(model)
    loaded = AutoSGD(other)
    other.load_state_dict(saved[0])
    loaded.load_state_dict(saved[1])
    for one, opt in ((model, optimizer), (other, loaded)):
        train(one, opt, batches(3))
    with optimizer.averaged(), loaded.averaged():
        assert_same(dict(other.state_dict()), dict(model.state_dict()))


def test_half_precision_weights_lose_nothing_by_an_evaluation() -> None:
    model = mlp(torch.bfloat16)
    optimizer = AutoSGD(model)
    train(model, optimizer, batches(5, dtype=torch.bfloat16))
    before = snapshot(model, optimizer)
    with optimizer.averaged():
        pass
    assert_same(snapshot(model, optimizer), before)


def test_what_cannot_be_done_inside_is_refused() -> None:
    model = mlp()
    optimizer = AutoSGD(model)
    train(model, optimizer, batches(2))
    with optimizer.averaged():
        backward(model, batches(1)[0])
        with pytest.raises(RuntimeError, match=r"inside `with opt\.averaged"):
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"inside `with opt\.averaged"):
            optimizer.state_dict()
        with pytest.raises(RuntimeError, match="inside itself"), optimizer.averaged():
            pass


def test_without_an_average() -> None:
    model = mlp()
    optimizer = AutoSGD(model, average=False)
    train(model, optimizer, batches(2))
    assert not any("average" in key for state in optimizer.state.values() for key in state)
    with pytest.raises(RuntimeError, match="average=True"), optimizer.averaged():
        pass


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize("loaded", [False, True], ids=["before the first step", "after a checkpoint"])
def test_an_evaluation_in_inference_mode_leaves_a_state_that_can_be_trained(loaded: bool) -> None:
    model = normed()
    optimizer = AutoSGD(model)
    if loaded:
        train(model, optimizer, batches(2))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.inference_mode(), optimizer.averaged():
        model(batches(1)[0][0])
        optimizer.tuned()
    before = weights(model)
    train(model, optimizer, batches(2))
    assert all(not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_a_skipped_batch_has_no_part_in_the_averaged_statistics() -> None:
    model = normed()
    optimizer = AutoSGD(model)
    train(model, optimizer, batches(3))
    before = copy.deepcopy(optimizer.state_dict()["state"])
    x, y = batches(1)[0]
    train(model, optimizer, [(x * torch.nan, y)])
    assert_same(optimizer.state_dict()["state"], before)


def test_the_averaged_statistics_survive_those_of_the_model() -> None:
    """A batch with NaNs spoils what BatchNorm keeps; after a reset the average is as good as ever."""
    model = normed()
    optimizer = AutoSGD(model)
    first, *rest = batches(6)
    train(model, optimizer, [first, (first[0] * torch.nan, first[1]), *rest])  # finite gradients, spoiled statistics
    model[1].reset_running_stats()
    train(model, optimizer, rest)
    model.eval()
    with optimizer.averaged():
        assert model(first[0]).isfinite().all()


def test_the_averaged_statistics_go_by_what_the_layer_has_now() -> None:
    """Another dtype, then another tensor in the place of the one that was averaged."""
    model = normed()
    norm: Any = model[1]
    optimizer = AutoSGD(model, rule="paper")
    train(model, optimizer, batches(2))
    for step, change in enumerate((model.double, lambda: setattr(norm, "running_mean", norm.running_mean + 3.0)), 3):
        last = optimizer.state[norm.weight]["average_running_mean"].double().clone()
        change()
        train(model, optimizer, batches(1, dtype=torch.float64))
        found = optimizer.state[norm.weight]["average_running_mean"]
        torch.testing.assert_close(found, last + newest(step) * (norm.running_mean - last), rtol=1e-6, atol=0)


def test_layers_that_share_a_weight_have_statistics_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 3))
    model[3].weight = model[1].weight
    optimizer = AutoSGD(model)
    train(model, optimizer, batches(3))
    before = snapshot(model, optimizer)
    with optimizer.averaged():
        assert not torch.equal(model.get_buffer("1.running_var"), model.get_buffer("3.running_var"))
    assert_same(snapshot(model, optimizer), before)


@pytest.mark.parametrize("kinds", [[torch.float32], [torch.float32, torch.float64]], ids=len)
def test_averaging_statistics_takes_as_many_operations_for_any_number_of_layers(kinds: list[torch.dtype]) -> None:
    found = []
    for layers in (1, 7):
        norms = nn.Sequential(*(nn.BatchNorm1d(2 + i).to(kind) for i in range(layers) for kind in kinds))
        running = RunningStatistics(norms, defaultdict(dict), list(norms.parameters()))
        before = [average.clone() for _, average in running.pairs()]
        torch._foreach_add_([own for own, _ in running.pairs()], 1.0)
        half = torch.tensor(0.5)
        with Counting() as mode:
            running.update(half)
        found.append(mode.count)
        for was, (_, average) in zip(before, running.pairs(), strict=True):
            assert torch.equal(average, was + 0.5)
    assert found[0] == found[1] == 4 * len(kinds)


class Counting(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **kwargs or {})


def test_a_cast_inside_loses_precision_alone() -> None:
    model = mlp()
    optimizer = AutoSGD(model)
    train(model, optimizer, batches(3))
    with optimizer.averaged():
        average = weights(model)
    torch._foreach_mul_([parameter.data for parameter in model.parameters()], 2.0)  # far from it
    with optimizer.averaged():
        model.bfloat16()
    model.float()
    with optimizer.averaged():
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), average[name], rtol=2**-8, atol=0)  # bfloat16's


def test_a_layer_with_a_running_mean_alone_is_left_alone() -> None:
    class Centred(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("running_mean", torch.zeros(3))

    model = Centred()
    train(model, AutoSGD(model), batches(2))


def test_layers_that_share_statistics_have_them_back() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 3))
    model[3].running_mean, model[3].running_var = model[1].running_mean, model[1].running_var
    optimizer = AutoSGD(model)
    train(model, optimizer, batches(3))
    before = snapshot(model, optimizer)
    with optimizer.averaged():
        pass
    assert_same(snapshot(model, optimizer), before)


def test_a_layer_that_is_told_to_keep_no_statistics_any_more() -> None:
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
    )
    optimizer = AutoSGD(model)
    train(model, optimizer, batches(3))
    model[1].running_mean = model[1].running_var = None
    train(model, optimizer, batches(3))
    kept, before = model[4].running_mean, model[4].running_mean.clone()
    with optimizer.averaged():
        assert not torch.equal(kept, before)
    assert torch.equal(kept, before)
