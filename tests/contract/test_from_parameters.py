"""Constructed from parameters, as torch's optimizers are: the spread is that between the passes of a step, if any."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt import AutoAdam, AutoGaussNewton, AutoSGD
from contract.small import assert_same, backward, batches, every_optimizer, mlp, moved, train, weights


@every_optimizer
def test_it_trains_without_any_statistics(make: Any) -> None:
    model = mlp()
    optimizer = make(model.parameters())
    before = weights(model)
    first = backward(model, batches(1)[0]).item()
    train(model, optimizer, batches(1) * 100)
    assert moved(model, before) == set(before)
    assert backward(model, batches(1)[0]).item() < first
    assert all(chosen.noise != chosen.noise for chosen in optimizer.tuned().values())  # not a number: not measured


@pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
def test_passes_of_one_step_are_its_samples(make: Any) -> None:
    """N passes of one sample each: exactly what the samples of one batch would say."""
    model, other = mlp(torch.float64), mlp(torch.float64)
    by_sample, by_pass = make(model), make(other.named_parameters())
    for x, y in batches(4, dtype=torch.float64):
        by_sample.zero_grad()
        by_pass.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for row in range(len(x)):
            (F.cross_entropy(other(x[row : row + 1]), y[row : row + 1]) / len(x)).backward()
        by_sample.step()
        by_pass.step()
        for name, chosen in by_sample.tuned().items():
            assert by_pass.tuned()[name].noise == pytest.approx(chosen.noise, rel=1e-9)
            assert by_pass.tuned()[name].lr == pytest.approx(chosen.lr, rel=1e-9)


def test_clipping_does_not_change_the_noise() -> None:
    noises = []
    for clip in (False, True):
        model = mlp(torch.float64)
        optimizer = AutoSGD(model.named_parameters())
        for batch in batches(4, dtype=torch.float64):
            backward(model, batch)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        noises.append([chosen.noise for chosen in optimizer.tuned().values()])
    assert noises[1] == pytest.approx(noises[0], rel=1e-5)  # torch adds 1e-6 to the norm it clips by


def test_names_and_numbers() -> None:
    model = mlp()
    assert list(AutoSGD(model.named_parameters()).tuned()) == [name for name, _ in model.named_parameters()]
    numbered = AutoSGD([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[3].parameters()}])
    assert list(numbered.tuned()) == ["0", "1", "2", "3"]
    assert [group["lr"] for group in numbered.param_groups] == [0.5, 1.0]


def test_the_model_can_be_asked_for_passes_instead_of_samples() -> None:
    model = mlp()
    optimizer = AutoSGD(model, spread="passes")
    assert type(model[0]) is nn.Linear  # nothing is attached
    for batch in batches(3):
        backward(model, batch)
    optimizer.step()
    assert all(chosen.noise >= 0 for chosen in optimizer.tuned().values())
    assert list(optimizer.tuned()) == [name for name, _ in model.named_parameters()]


def test_a_gradient_set_by_hand_moves_the_weights() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = AutoSGD([weight])
    weight.grad = torch.tensor([1.0, -1.0])
    optimizer.step()
    assert weight[0] < 1
    assert weight[1] > 2


def test_copies_train_on() -> None:
    model = mlp()
    optimizer = AutoSGD(model.parameters())
    train(model, optimizer, batches(3))
    other, copied = copy.deepcopy((model, optimizer))
    unpickled = pickle.loads(pickle.dumps(optimizer))
    for one, opt in ((model, optimizer), (other, copied)):
        train(one, opt, batches(3))
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    unpickled.step()  # its parameters have no gradients: nothing happens, and nothing is missing


def accumulate(model: nn.Module, optimizer: Any) -> None:
    """Two steps of two passes each."""
    data = batches(4)
    for pair in (data[:2], data[2:]):
        optimizer.zero_grad()
        for batch in pair:
            backward(model, batch)
        optimizer.step()


def test_the_first_step_after_loading_or_copying_has_its_statistics() -> None:
    model = mlp()
    optimizer = AutoSGD(model.parameters())
    accumulate(model, optimizer)
    copied_model, copied = copy.deepcopy((model, optimizer))
    loaded_model = copy.deepcopy(model)
    loaded = AutoSGD(loaded_model.parameters())
    loaded.load_state_dict(optimizer.state_dict())
    for one, opt in ((model, optimizer), (copied_model, copied), (loaded_model, loaded)):
        accumulate(one, opt)
    for other, opt in ((copied_model, copied), (loaded_model, loaded)):
        assert_same(dict(other.state_dict()), dict(model.state_dict()))
        assert opt.tuned() == optimizer.tuned()


def test_no_hook_outlives_the_optimizer() -> None:
    model = mlp()
    before: list[Tensor] = list(model.parameters())
    optimizer = AutoSGD(before)
    assert all(parameter._backward_hooks for parameter in before)
    del optimizer
    gc.collect()
    assert not any(parameter._backward_hooks for parameter in before)


def test_what_needs_the_model_says_so() -> None:
    model = mlp()
    with pytest.raises(ValueError, match=r"AutoGaussNewton\(model\)"):
        AutoGaussNewton(model.parameters())
    with pytest.raises(TypeError, match="param_groups"):
        AutoSGD(model.parameters(), param_groups=[])
    with pytest.raises(ValueError, match="empty"):
        AutoSGD([])
    with pytest.raises(ValueError, match="complex"):
        AutoSGD([nn.Parameter(torch.ones(2, dtype=torch.complex64))])


def test_a_sparse_gradient_is_refused_by_name() -> None:
    layer = nn.Embedding(5, 2, sparse=True)
    optimizer = AutoSGD(layer.named_parameters())
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"'weight' is sparse.*sparse=False"):
        optimizer.step()


def test_names_that_two_groups_share_stay_apart() -> None:
    first, second = mlp(), mlp()
    optimizer = AutoSGD([{"params": list(model.named_parameters())} for model in (first, second)])
    x, y = batches(1)[0]
    F.cross_entropy(first(x) + second(x), y).backward()
    optimizer.step()
    chosen = optimizer.tuned()
    assert {"0.weight", "0.weight_2"} <= set(chosen)
    assert len(chosen) == 2 * len(list(first.parameters()))
    assert all(each.noise != each.noise for each in chosen.values())  # one pass has no spread


@pytest.mark.parametrize("by", ["parameters", "passes"])
def test_what_is_frozen_at_first_has_a_spread_when_it_is_thawed(by: str) -> None:
    model = mlp().requires_grad_(False)
    model[3].requires_grad_(True)
    optimizer = AutoSGD(model.named_parameters()) if by == "parameters" else AutoSGD(model, spread="passes")
    model.requires_grad_(True)
    for batch in batches(4):
        backward(model, batch)
    optimizer.step()
    assert all(chosen.noise == chosen.noise for chosen in optimizer.tuned().values())
    assert len(optimizer.tuned()) == len(list(model.parameters()))
