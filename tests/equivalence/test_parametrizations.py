"""Weights that are computed from other parameters: what a sample adds to the weight is pulled back to them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from autoopt import AutoAdam, AutoSGD
from equivalence.sharing import (
    Case,
    D,
    N,
    T,
    Tied,
    Twice,
    assert_exact,
    attach,
    by_copies,
    floats,
    loss_of,
    one_by_one,
    tokens,
)  # fmt: skip

both_statistics = pytest.mark.parametrize("elementwise", [True, False], ids=["elementwise", "total"])


class Adapter(nn.Module):
    """W + B A, of low rank."""

    def __init__(self, outputs: int, inputs: int, rank: int = 2) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(rank, inputs)), nn.Parameter(torch.randn(outputs, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


class Mixed(nn.Module):
    """A parametrization that holds a layer, which sees the rows of a weight and no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, weight: Tensor) -> Tensor:
        result: Tensor = weight + torch.tanh(self.layer(weight))
        return result


class SideAdapter(nn.Module):
    """A frozen layer beside which two small ones learn."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(D, 6), nn.Linear(D, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + 0.5 * self.b(self.a(x))
        return result


def with_(parametrization: nn.Module, layer: nn.Module, role: str = "weight") -> nn.Module:
    return parametrize.register_parametrization(layer, role, parametrization)


def frozen(layer: nn.Module, name: str) -> nn.Module:
    layer.get_parameter(name).requires_grad_(False)
    return layer


def two_adapters() -> nn.Module:
    """One adapter for two layers."""
    adapter = Adapter(D, D)
    return Tied(with_(adapter, nn.Linear(D, D)), with_(adapter, nn.Linear(D, D)))


def both_roles() -> nn.Module:
    layer = parametrizations.weight_norm(nn.Linear(D, 4))
    return with_(Square(), layer, "bias")


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square()


def pruned(layer: nn.Module) -> nn.Module:
    return prune.random_unstructured(layer, "weight", amount=0.5)


def chain() -> nn.Module:
    return with_(Adapter(D, D), parametrizations.weight_norm(nn.Linear(D, D)))


def sequence(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(layer() for layer in layers))


orthogonal, weight_norm, spectral_norm = (
    parametrizations.orthogonal, parametrizations.weight_norm, parametrizations.spectral_norm,
)  # fmt: skip

CASES = {
    "weight norm": Case(lambda: weight_norm(nn.Linear(D, 4)), floats(D)),
    "weight norm over positions": Case(lambda: weight_norm(nn.Linear(D, 4), dim=1), floats(T, D)),
    "weight norm of a convolution": Case(lambda: weight_norm(nn.Conv1d(D, 4, 2)), floats(D, T)),
    "weight norm, frozen size": Case(
        lambda: frozen(weight_norm(nn.Linear(D, 4)), "parametrizations.weight.original0"), floats(D)
    ),
    "weight norm of an embedding": Case(lambda: weight_norm(nn.Embedding(7, D)), tokens(T)),
    "weight and bias": Case(both_roles, floats(D)),
    "orthogonal": Case(lambda: orthogonal(nn.Linear(D, 4)), floats(D)),
    "orthogonal by Cayley": Case(lambda: orthogonal(nn.Linear(4, 4), orthogonal_map="cayley"), floats(4)),
    "orthogonal by Householder": Case(lambda: orthogonal(nn.Linear(4, 4), orthogonal_map="householder"), floats(4)),
    "adapter": Case(lambda: with_(Adapter(4, D), nn.Linear(D, 4)), floats(T, D)),
    "adapter alone": Case(
        lambda: frozen(with_(Adapter(4, D), nn.Linear(D, 4)), "parametrizations.weight.original"), floats(D)
    ),
    "adapter beside": Case(SideAdapter, floats(T, D)),
    "chain": Case(chain, floats(D)),
    "a layer within": Case(lambda: with_(Mixed(), nn.Linear(D, D)), floats(D)),
    "an adapter for two": Case(two_adapters, floats(D)),
    "bias": Case(lambda: with_(Square(), nn.Linear(D, 4), "bias"), floats(T, D)),
    "called twice": Case(lambda: Twice(weight_norm(nn.Linear(D, D))), floats(T, D)),
    "among others": Case(
        sequence(lambda: nn.Linear(D, D), nn.Tanh, lambda: weight_norm(nn.Linear(D, 4)), lambda: nn.LayerNorm(4)),
        floats(D),
    ),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@both_statistics
@every_case
def test_what_a_sample_adds_reaches_the_original_parameters(case: Case, elementwise: bool) -> None:
    model, inputs = case.build()
    expected = one_by_one(model, *inputs)
    capture = attach(model, elementwise)
    loss_of(model, *inputs).backward()
    assert_exact(capture, model, expected)


@both_statistics
@pytest.mark.parametrize("chunk", [1, 30])
@every_case
def test_a_few_samples_at_a_time(case: Case, chunk: int, elementwise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoopt.moments.product.CPU_CHUNK", chunk)
    test_what_a_sample_adds_reaches_the_original_parameters(case, elementwise)


@pytest.mark.parametrize("make", [lambda: spectral_norm(nn.Linear(D, 4)), lambda: spectral_norm(nn.Conv1d(D, 4, 2))])
def test_spectral_norm_in_training(make: Callable[[], nn.Module]) -> None:
    """Its buffers move with every pass, and by as much as without the optimizer."""
    model = nn.Sequential(make(), nn.Tanh()).double()
    x = torch.randn(N, D, T, dtype=torch.float64) if isinstance(model[0], nn.Conv1d) else floats(D)()[0]
    plain = copy.deepcopy(model)
    still = copy.deepcopy(model)
    still(x)
    expected = one_by_one(still.eval(), x)  # with the buffers that the first pass leaves
    capture = attach(model)
    loss_of(model, x).backward()
    loss_of(plain, x).backward()
    assert_exact(capture, model, expected)
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("older", [nn.utils.weight_norm, nn.utils.spectral_norm, pruned])
def test_weights_that_a_hook_computes(older: Callable[[nn.Module], nn.Module]) -> None:
    layer = nn.Linear(D, 4).double()
    older(layer)
    x = floats(D)()[0]
    layer(x)
    layer.eval()  # spectral_norm moves its buffers in training
    names = [name for name, _ in layer.named_parameters()]

    def each(*values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), x).sin().sum(1)

    c = torch.autograd.functional.jacobian(each, tuple(p.detach() for p in layer.parameters()))
    capture = attach(layer)
    loss_of(layer, x).backward()
    assert_exact(capture, layer, dict(zip(names, c, strict=True)))


def test_cached_weights() -> None:
    """Within `parametrize.cached` both uses are of one and the same tensor."""
    model, inputs = CASES["called twice"].build()
    expected = one_by_one(model, *inputs)
    capture = attach(model)
    with parametrize.cached():
        loss_of(model, *inputs).backward()
    assert_exact(capture, model, expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["weight norm", "adapter", "orthogonal"])
def test_within_a_checkpoint(name: str, reentrant: bool) -> None:
    model, (x,) = CASES[name].build()
    expected = one_by_one(model, x)
    capture = attach(model)
    checkpoint(model, x.requires_grad_(), use_reentrant=reentrant).sin().sum().backward()
    assert_exact(capture, model, expected)


@both_statistics
def test_accumulation(elementwise: bool) -> None:
    model, first = CASES["weight norm"].build()
    second = CASES["weight norm"].inputs()
    each = [one_by_one(model, *inputs) for inputs in (first, second)]
    capture = attach(model, elementwise)
    for inputs in (first, second):
        loss_of(model, *inputs).backward()
    assert_exact(capture, model, {name: torch.cat([c[name] for c in each]) for name in each[0]}, samples=2 * N)


def test_batch_norm_after_a_parametrized_layer() -> None:
    """Rows meet behind it: c_i of the weight is what row i adds, and that is pulled back."""
    model = nn.Sequential(with_(Adapter(4, D), nn.Linear(D, 4)), nn.BatchNorm1d(4)).double()
    x = floats(D)()[0]
    plain = nn.Sequential(nn.Linear(D, 4), nn.BatchNorm1d(4)).double()
    plain[0].weight.data, plain[0].bias.data = model[0].weight.detach(), model[0].bias.detach()
    c = by_copies(plain, x)["0.weight"]
    capture = attach(model)
    loss_of(model, x).backward()
    adapter = model[0].parametrizations.weight[0]
    square = torch.einsum("nij,ir->nrj", c, adapter.b).square().sum(0)
    torch.testing.assert_close(capture.second_moment("0.parametrizations.weight.0.a"), square, rtol=1e-10, atol=1e-13)


def test_autocast_keeps_the_originals_in_full_precision() -> None:
    model, (x,) = CASES["adapter"].build()
    expected = one_by_one(model, x)
    model = model.float()
    capture = attach(model, elementwise=False)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x.float())
    output.float().sin().sum().backward()
    for name, c in expected.items():
        moment = capture.second_moment(name)
        assert moment is not None
        assert moment.dtype == torch.float32
        assert abs(moment.item() / c.square().sum().item() - 1) < 0.05


@pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
@pytest.mark.parametrize("name", ["weight norm", "orthogonal", "adapter alone", "called twice"])
def test_the_optimizers_train_them(name: str, make: Callable[[nn.Module], AutoSGD | AutoAdam]) -> None:
    model, (x,) = CASES[name].build()
    target = torch.randn_like(model(x))
    optimizer = make(model)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    optimizer.detach()
    assert "Parametrized" in str([type(layer) for layer in model.modules()])


def test_copies_of_a_parametrized_layer_are_plain() -> None:
    model, (x,) = CASES["weight norm"].build()
    plain = copy.deepcopy(model)
    capture = attach(model)
    clone = copy.deepcopy(model)
    assert type(clone) is type(plain)
    assert set(clone.__dict__) == set(plain.__dict__)
    loss_of(clone, x).backward()
    assert capture.second_moment("parametrizations.weight.original0") is None
    with pytest.raises(RuntimeError, match="Serialization of parametrized modules"):
        pickle.dumps(model)  # as torch has it
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_a_backward_function_that_looks_at_its_numbers() -> None:
    """It cannot run for all samples at once: they are pulled back one by one."""

    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.round(decimals=1)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            assert gradient.isfinite().all().item()
            return gradient

    class Quantized(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            result: Tensor = Round.apply(weight)  # type: ignore[no-untyped-call]
            return result

    model, (x,) = Case(lambda: with_(Quantized(), nn.Linear(D, 4)), floats(D)).build()
    expected = one_by_one(model, x)
    capture = attach(model)
    loss_of(model, x).backward()
    assert_exact(capture, model, expected)
