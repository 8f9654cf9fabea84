"""Parameters that a sample reaches several times: what it adds is summed over all uses before it is squared."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoopt import AutoAdam, AutoSGD
from equivalence.sharing import (
    CASES,
    MEETING,
    Case,
    D,
    N,
    Recurrent,
    T,
    Tied,
    TiedTokens,
    Twice,
    assert_exact,
    attach,
    by_copies,
    floats,
    loss_of,
    one_by_one,
    tokens,
)  # fmt: skip
from reference import NaiveAuto

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
both_statistics = pytest.mark.parametrize("elementwise", [True, False], ids=["elementwise", "total"])


@both_statistics
@every_case
def test_the_uses_of_a_sample_are_summed_before_they_are_squared(case: Case, elementwise: bool) -> None:
    model, inputs = case.build()
    expected = one_by_one(model, *inputs)
    capture = attach(model, elementwise)
    loss_of(model, *inputs).backward()
    assert_exact(capture, model, expected)


@both_statistics
@pytest.mark.parametrize("case", MEETING.values(), ids=MEETING)
def test_where_the_rows_meet(case: Case, elementwise: bool) -> None:
    model, inputs = case.build()
    expected = by_copies(model, *inputs)
    capture = attach(model, elementwise)
    loss_of(model, *inputs).backward()
    assert_exact(capture, model, expected)


@every_case
def test_nothing_else_changes(case: Case) -> None:
    plain, inputs = case.build()
    model = copy.deepcopy(plain)
    capture = attach(model)
    torch.testing.assert_close(model(*inputs), plain(*inputs), rtol=1e-12, atol=1e-14)
    capture.detach()
    assert [type(layer) for layer in model.modules()] == [type(layer) for layer in plain.modules()]


@both_statistics
@pytest.mark.parametrize("chunk", [1, 20, 100])
@every_case
def test_a_few_samples_at_a_time(case: Case, chunk: int, elementwise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoopt.moments.product.CPU_CHUNK", chunk)
    test_the_uses_of_a_sample_are_summed_before_they_are_squared(case, elementwise)


@both_statistics
@every_case
def test_accumulation_over_micro_batches(case: Case, elementwise: bool) -> None:
    model, first = case.build()
    second = tuple(x[:3] for x in case.inputs())
    expected = {
        name: torch.cat([c, more])
        for (name, c), more in zip(one_by_one(model, *first).items(), one_by_one(model, *second).values(), strict=True)
    }
    capture = attach(model, elementwise)
    for inputs in (first, second):
        loss_of(model, *inputs).backward()
    assert_exact(capture, model, expected, samples=N + 3)


def test_a_layer_that_is_used_once_in_one_micro_batch_and_twice_in_the_next() -> None:
    class Often(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, D)

        def forward(self, x: Tensor, times: Tensor) -> Tensor:
            for _ in range(int(times[0])):
                x = torch.tanh(self.layer(x))
            return x

    model = Often().double()
    batches = [(*floats(D)(), torch.full((N,), times)) for times in (1, 2, 1)]
    each = [one_by_one(model, *inputs) for inputs in batches]
    capture = attach(model)
    for inputs in batches:
        loss_of(model, *inputs).backward()
    assert_exact(capture, model, {name: torch.cat([c[name] for c in each]) for name in each[0]}, samples=3 * N)


@every_case
def test_statistics_of_a_pass_that_no_step_followed_are_left_behind(case: Case) -> None:
    model, inputs = case.build()
    expected = one_by_one(model, *inputs)
    capture = attach(model)
    for _ in range(2):
        model.zero_grad()  # the model's, of which the optimizer knows nothing
        loss_of(model, *inputs).backward()
    assert_exact(capture, model, expected)


@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("name", ["tied linear", "recurrent"])
def test_a_backward_pass_that_fails_leaves_nothing_behind(name: str, clears: bool) -> None:
    model, (x,) = CASES[name].build()
    expected = one_by_one(model, x)
    capture = attach(model)
    loss_of(model, x).backward()

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError

    x.requires_grad_().register_hook(fail)  # comes last
    with pytest.raises(ArithmeticError):
        loss_of(model, x).backward()
    model.zero_grad()
    if clears:
        capture.clear()
    loss_of(model, x.detach()).backward()
    assert_exact(capture, model, expected)


def test_frozen_parameters_are_left_alone() -> None:
    model, inputs = Case(TiedTokens, tokens(T)).build()
    model.embedding.weight.requires_grad_(False)
    expected = one_by_one(model, *inputs)
    capture = attach(model)
    loss_of(model, *inputs).backward()
    assert_exact(capture, model, expected)
    assert capture.second_moment("embedding.weight") is None


@pytest.mark.parametrize("name", ["tied tokens, repeated body", "recurrent", "siamese"])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_the_optimizers_do_what_the_paper_says(kind: str, name: str) -> None:
    model, _ = CASES[name].build()
    naive = NaiveAuto(dict(model.named_parameters()), kind, smoothing=0.5)
    optimizer = (AutoSGD if kind == "sgd" else AutoAdam)(model, rule="paper", smoothing=0.5)
    for _ in range(6):
        inputs = CASES[name].inputs()
        naive.step(one_by_one(model, *inputs))
        optimizer.zero_grad()
        loss_of(model, *inputs).backward()
        optimizer.step()
        for parameter, weight in naive.weights.items():
            torch.testing.assert_close(model.get_parameter(parameter), weight, rtol=1e-8, atol=1e-10, msg=parameter)


# Checkpoints.


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.before, self.reentrant = inner, nn.Linear(D, D), reentrant

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, self.before(x), use_reentrant=self.reentrant)
        return result


@pytest.mark.parametrize("make", [lambda: Twice(nn.Linear(D, D)), Recurrent], ids=["twice", "recurrent"])
def test_repeated_use_within_a_checkpoint(make: Callable[[], nn.Module]) -> None:
    model, inputs = Case(lambda: Checkpointed(make(), reentrant=False), floats(T, D)).build()
    expected = one_by_one(model, *inputs)
    capture = attach(model)
    loss_of(model, *inputs).backward()
    assert_exact(capture, model, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_tied_layers_inside_and_outside_of_a_checkpoint(reentrant: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = Checkpointed(nn.Linear(D, D), reentrant)
            self.outside = nn.Linear(D, D)
            self.outside.weight = self.inside.inner.weight

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.inside(torch.tanh(self.outside(self.inside(x))))
            return result

    model, inputs = Case(Model, floats(T, D)).build()
    expected = one_by_one(model, *inputs)
    capture = attach(model)
    if reentrant:  # the layer's bias is not tied: that the layer repeats cannot be seen beforehand
        with pytest.raises(RuntimeError, match=r"'inside\.inner' was used more than once.*use_reentrant=False"):
            loss_of(model, *inputs).backward()
        model.zero_grad()
        capture.clear()
    loss_of(model, *inputs).backward()
    assert_exact(capture, model, expected)


def test_tied_layers_of_which_all_lie_in_reentrant_checkpoints() -> None:
    """What ends is then only ever a part of the backward pass."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tied = Tied(nn.Linear(D, D), nn.Linear(D, D), "weight", "bias")

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.tied.first, x.requires_grad_(), use_reentrant=True)
            result: Tensor = checkpoint(self.tied.second, torch.tanh(x), use_reentrant=True)
            return result

    model, inputs = Case(Model, floats(T, D)).build()
    expected = one_by_one(model, *inputs)
    capture = attach(model)
    loss_of(model, *inputs).backward()
    assert_exact(capture, model, expected)


def test_reentrant_checkpoints_in_one_another_are_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            def both(h: Tensor) -> Tensor:
                result: Tensor = self.outer(checkpoint(self.inner, h, use_reentrant=True))
                return result

            result: Tensor = self.head(checkpoint(both, x.requires_grad_(), use_reentrant=True))
            return result

    model, inputs = Case(Model, floats(D)).build()
    capture = attach(model)
    with pytest.raises(RuntimeError, match=r"checkpoint lies in a checkpoint.*use_reentrant=False"):
        loss_of(model, *inputs).backward()
    capture.detach()


# The way of a layer that is used once.


def test_a_layer_that_is_used_once_does_not_go_through_the_ledger() -> None:
    model, inputs = Case(lambda: Checkpointed(nn.Linear(D, D), reentrant=False), floats(D)).build()
    capture = attach(model)
    for _ in range(3):
        model.zero_grad()
        loss_of(model, *inputs).backward()
        with torch.no_grad():
            model(*inputs)
        model(*inputs)  # records a graph that is gone at once
        model.eval()(*(x[:0] for x in inputs))
        model.train()
    assert not any(site.repeated for site in capture.sites.values())
    assert not capture.ledger.audit.done  # no use was entered one by one


@pytest.mark.parametrize("shared", [False, True])
def test_a_pass_that_adds_to_no_gradient_is_no_use(shared: bool) -> None:
    """Adversarial examples: before the pass that trains, and through its own graph."""
    model, (x,) = CASES["tied linear" if shared else "plain"].build()
    expected = one_by_one(model, x)
    capture = attach(model)
    x.requires_grad_()
    for _ in range(3):
        torch.autograd.grad(loss_of(model, x), x)
    loss = loss_of(model, x)
    torch.autograd.grad(loss, x, retain_graph=True)
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()
    assert_exact(capture, model, expected)
    assert not any(site.repeated for site in capture.sites.values())


def test_uses_with_another_backward_pass_in_between() -> None:
    """Virtual adversarial training: the first output waits for the loss while others come and go."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            first = self.layer(x)
            with torch.enable_grad():
                inner = x.detach().requires_grad_()
                (direction,) = torch.autograd.grad(self.layer(inner).square().sum(), inner)
            result: Tensor = first * self.layer(x + direction)
            return result

    model, inputs = Case(Pair, floats(D)).build()
    expected = one_by_one(model, *inputs)
    capture = attach(model)
    loss_of(model, *inputs).backward()
    assert_exact(capture, model, expected)


def test_rows_of_different_number_are_refused() -> None:
    layer = nn.Linear(D, D)
    capture = attach(layer)
    with pytest.raises(RuntimeError, match=r"got \d rows in one forward pass and \d in another"):
        (layer(torch.randn(5, D)).sum() + layer(torch.randn(4, D)).sum()).backward()
    capture.detach()


def test_an_empty_batch_of_a_tied_model() -> None:
    model, inputs = Case(TiedTokens, tokens(T)).build()
    capture = attach(model)
    loss_of(model, *(x[:0] for x in inputs)).backward()
    assert capture.second_moment("embedding.weight") is None
    assert capture.current.blank


def test_copies_stay_tied_and_plain() -> None:
    model, inputs = Case(TiedTokens, tokens(T)).build()
    plain = copy.deepcopy(model)
    capture = attach(model)
    clone = copy.deepcopy(model)
    assert clone.head.weight is clone.embedding.weight
    assert [type(layer) for layer in clone.modules()] == [type(layer) for layer in plain.modules()]
    loss_of(clone, *inputs).backward()
    assert capture.second_moment("embedding.weight") is None


@pytest.mark.parametrize("name", ["linear over positions", "recurrent", "tied tokens", "conv1d"])
def test_half_precision_is_squared_in_full(name: str) -> None:
    """Under autocast c_i is that of half precision, near the exact one; its square would vanish in float16."""
    model, inputs = CASES[name].build()
    expected = one_by_one(model, *inputs)
    model = model.float()
    capture = attach(model, elementwise=False)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(*(x.float() if x.is_floating_point() else x for x in inputs))
    (output.float().sin().sum() * 2.0**-70).backward()
    for parameter, c in expected.items():
        moment = capture.second_moment(parameter)
        assert moment is not None
        assert moment.dtype == torch.float32
        size = (c.square().sum() * 2.0**-140).item()
        assert abs(moment.item() - size) < 0.05 * size


def test_weights_that_are_tied_later_are_refused() -> None:
    """What a sample adds through the other layer would be missing, without a word."""
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
    opt = AutoSGD(model)
    model[2].weight = model[0].weight
    with pytest.raises(RuntimeError, match=r"layer '2' has parameter '0.weight' in the place of its own '2.weight'"):
        model(torch.randn(N, D))
    opt.detach()
    AutoSGD(model)
    model(torch.randn(N, D)).sum().backward()
