"""A model that is called by its parts, or in another way than at first: exact all the same, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

from autoopt import AutoAdam, AutoSGD
from equivalence.by_sample import assert_exact, contributions

N, D = 5, 8
BOTH = pytest.mark.parametrize("elementwise", [True, False], ids=["elementwise", "total"])


class Language(nn.Module):
    """Positions that are the same for all samples, and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position, self.layer = nn.Embedding(11, D), nn.Embedding(9, D), nn.Linear(D, D)

    def hidden(self, ids: Tensor) -> Tensor:
        result: Tensor = self.layer(self.token(ids) + self.position(torch.arange(ids.shape[1]))).tanh()
        return result

    def forward(self, ids: Tensor, *, tied: bool = True) -> Tensor:
        hidden = self.hidden(ids)
        return F.linear(hidden, self.token.weight) if tied else hidden


class Parent(nn.Module):
    """Is never called itself, as a Lightning module whose training step calls what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = Language(), nn.Sequential(nn.Linear(11, 3))


def squares(outputs: Tensor) -> Tensor:
    return outputs.flatten(1).square().mean(1)


@BOTH
@pytest.mark.parametrize("length", [N, 7], ids=["as many positions as samples", "seven positions"])
def test_a_part_that_is_called_is_watched(length: int, elementwise: bool) -> None:
    ids = torch.randint(11, (N, length))
    assert_exact(Parent().double(), lambda model: squares(model.head(model.net(ids))), elementwise, passes=2)


@pytest.mark.parametrize("options", [{}, {"exact": True}], ids=str)
@pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
def test_what_is_used_later_is_seen_then(make: Any, options: dict[str, Any]) -> None:
    """A head that comes with an argument, and an embedding that is thawed, are as if they had been there at first."""
    ids = torch.randint(11, (N, 7))
    found = []
    for late in (False, True):
        torch.manual_seed(1)
        model = Language().double()
        optimizer = make(model, **options)
        if late:
            model.requires_grad_(False)
            model.layer.requires_grad_(True)
            squares(model(ids, tied=False)).sum().backward()
            optimizer.zero_grad()
            model.requires_grad_(True)
            squares(model(ids, tied=False)).sum().backward()
            optimizer.zero_grad()
        squares(model(ids)).sum().backward()
        found.append({name: optimizer._now.source.second_moment(name) for name, _ in model.named_parameters()})
    for name, square in found[0].items():
        torch.testing.assert_close(found[1][name], square, rtol=1e-10, atol=0)


class Words(nn.Module):
    """Several rows of each sample in a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.reader, self.layer = nn.GRU(4, D, batch_first=True), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(self.reader(x.flatten(0, 1))[0][:, -1]).unflatten(0, (len(x), -1))
        return result


def test_a_part_that_is_called_later_with_another_batch() -> None:
    model = nn.Sequential(Words(), nn.Linear(2, 2)).double()
    batches = torch.randn(5, 2, 3, 4).double(), torch.randn(10, 2, 3, 4).double()
    optimizer = AutoSGD(model, exact=True)
    squares(model(batches[0])).sum().backward()
    optimizer.zero_grad()
    expected = contributions(model, lambda m: squares(m[0](batches[1])))
    squares(model[0](batches[1])).mean().backward()
    for name, parameter in model[0].named_parameters(prefix="0"):
        square = optimizer._now.source.second_moment(name)
        torch.testing.assert_close(square, expected[name].square().sum(), rtol=1e-10, atol=0)
        assert optimizer._now.source.samples(name) == 10
        assert parameter.grad is not None
    with pytest.raises(RuntimeError, match=r"layer '0.reader' got 20 rows in a call of its own"):
        model[0].reader(torch.randn(20, 3, 4).double())


class Summed(nn.Module):
    """Rows that are made of a parameter, and that meet each other before they meet the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.row = nn.Linear(4, D), nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) * self.row.expand(N, D).cumsum(0)
        return result


@BOTH
def test_rows_of_a_parameter_that_meet_each_other(elementwise: bool) -> None:
    x = torch.randn(N, 4).double()
    assert_exact(Summed().double(), lambda model: squares(model(x)), elementwise, passes=2)


class Shifted(nn.Module):
    """A constant, from inference mode, with a row for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.row = nn.Linear(4, D), nn.Parameter(torch.randn(D))
        with torch.inference_mode():
            self.constant = torch.randn(N, D).double()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) + self.row.add(self.constant)
        return result


@BOTH
def test_constants_from_inference_mode(elementwise: bool) -> None:
    x = torch.randn(N, 4).double()
    assert_exact(Shifted().double(), lambda model: squares(model(x)), elementwise, passes=2)


class Cast(nn.Module):
    """Rows of a parameter that go through a function which hands them on as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.row = nn.Linear(4, D), nn.Parameter(torch.randn(1, D))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) + self.row.expand(N, D).mul(2).to(x).contiguous()
        return result


@BOTH
def test_rows_of_a_parameter_that_are_handed_on_as_they_are(elementwise: bool) -> None:
    x = torch.randn(N, 4).double()
    assert_exact(Cast().double(), lambda model: squares(model(x)), elementwise, passes=2)


@pytest.mark.parametrize("role", ["weight", "bias"])
@pytest.mark.parametrize("options", [{}, {"exact": True}], ids=str)
@pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
def test_weights_or_biases_alone(make: Any, options: dict[str, Any], role: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    chosen = [parameter for name, parameter in model.named_parameters() if role in name]
    optimizer = make(model, param_groups=[{"params": chosen}], **options)
    before = [parameter.detach().clone() for parameter in chosen]
    model(torch.randn(N, 3, 4)).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, chosen, strict=True))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
def test_a_layer_that_replaces_another_is_trained(make: Any) -> None:
    model, x = mlp(), torch.randn(N, 3)
    optimizer = make(model)
    model(x).square().mean().backward()
    optimizer.step()
    old, model[2] = model[2], nn.Linear(4, 3)
    optimizer.add_param_group({"params": model[2].parameters()})
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert type(old) is nn.Linear
    optimizer.detach()
    assert type(model[2]) is nn.Linear


def test_computed_weights_are_refused() -> None:
    model = mlp()
    optimizer = AutoSGD(model, exact=True)
    doubled = {name: 2 * parameter for name, parameter in model.named_parameters()}
    with pytest.raises(RuntimeError, match=r"layer '0' runs with a computed tensor .* parameter 'weight'"):
        functional_call(model, doubled, (torch.randn(N, 3),))
    functional_call(model, dict(model.named_parameters()), (torch.randn(N, 3),)).square().mean().backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, in make_dual
def test_forward_mode_is_refused() -> None:
    model, x = mlp(), torch.randn(N, 3)
    optimizer = AutoSGD(model)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="layer '0' carries a tangent"):
        model(forward_ad.make_dual(x, torch.ones_like(x)))
    optimizer.detach()


def test_batches_of_two_sizes_in_one_pass_are_refused_with_the_remedy() -> None:
    model = mlp()
    optimizer = AutoSGD(model)
    loss = model(torch.randn(4, 3)).mean() + model(torch.randn(N, 3)).mean()
    with pytest.raises(RuntimeError, match=r"layer '2' got \d rows in one forward pass and \d in another.*torch\.cat"):
        loss.backward()
    optimizer.detach()


class Failing(torch.autograd.Function):
    fails = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if Failing.fails:
            raise MemoryError
        return gradient


def test_a_step_of_which_one_pass_failed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers behind the failure have added to their gradients what those before it have not."""
    model = mlp()
    optimizer = AutoSGD(model)

    def backward() -> None:
        hidden = Failing.apply(model[0](torch.randn(N, 3)))
        model[2](model[1](hidden)).square().mean().backward()  # type: ignore[no-untyped-call]

    backward()
    monkeypatch.setattr(Failing, "fails", True)
    with pytest.raises(MemoryError):
        backward()
    monkeypatch.setattr(Failing, "fails", False)
    backward()
    with pytest.raises(RuntimeError, match="a backward pass of this step did not come to its end"):
        optimizer.step()
    for clear in (optimizer, model):
        clear.zero_grad()
        monkeypatch.setattr(Failing, "fails", True)
        with pytest.raises(MemoryError):
            backward()
        monkeypatch.setattr(Failing, "fails", False)
        clear.zero_grad()
        backward()
        optimizer.step()
