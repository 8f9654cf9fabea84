"""What a hostile reader found in the first version, each as the promise that it broke."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoopt import AutoAdam, AutoSGD


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def data(samples: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 4, dtype=torch.float64), torch.randint(0, 4, (samples,))


def step(model: Callable[[Tensor], Tensor], optimizer: AutoSGD | AutoAdam, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def noises(optimizer: AutoSGD | AutoAdam) -> dict[str, float]:
    return {name: chosen.noise for name, chosen in optimizer.tuned().items()}


@pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
def test_state_follows_the_names_and_not_the_order_of_the_groups(make: type) -> None:
    model = network()
    other = copy.deepcopy(model)
    first = make(model)
    batch = data()
    step(model, first, *batch)
    other.load_state_dict(model.state_dict())
    second = make(other, param_groups=[{"params": [*other[2].parameters(), *other[0].parameters()]}])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    more = data()
    step(model, first, *more)
    step(other, second, *more)
    assert noises(second) == pytest.approx(noises(first))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_state_saved_under_a_wrapper_loads_without_it() -> None:
    model = network()
    wrapped = nn.Sequential()
    wrapped.add_module("module", copy.deepcopy(model))
    first, second = AutoSGD(wrapped), AutoSGD(model)
    batch = data()
    step(wrapped, first, *batch)
    model.load_state_dict(wrapped.module.state_dict())
    saved = io.BytesIO()
    torch.save(first.state_dict(), saved)
    saved.seek(0)
    second.load_state_dict(torch.load(saved, weights_only=True))
    more = data()
    step(wrapped, first, *more)
    step(model, second, *more)
    for a, b in zip(model.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(a, b)


def test_state_of_another_shape_is_refused() -> None:
    small, large = nn.Linear(4, 1), nn.Linear(4, 5)
    first, second = AutoSGD(small), AutoSGD(large)
    first.tuned()
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="state of 'weight' has 'estimate' of shape"):
        second.tuned()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo, tracing any Function
def test_clipping_behind_a_compiled_model() -> None:
    plain = network()
    other = copy.deepcopy(plain)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    batch = data()
    found = []
    for model, target, factor in ((plain, plain, 1.0), (compiled, other, 0.01)):
        optimizer = AutoSGD(target)
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        for parameter in target.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(factor)
        optimizer.step()
        found.append(noises(optimizer))
    assert found[1] == pytest.approx(found[0], rel=1e-9)


def test_a_layer_in_two_reentrant_checkpoints_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    optimizer = AutoSGD(model)
    h = model[0](data()[0])
    for _ in range(2):
        h = checkpoint(model[1], h, use_reentrant=True)
    with pytest.raises(RuntimeError, match="layer '1' was used more than once"):
        h.sum().backward()
    with pytest.raises(RuntimeError, match="did not come to its end"):
        optimizer.step()
    optimizer.zero_grad()
    step(model, optimizer, *data())


def test_one_layer_in_each_reentrant_checkpoint() -> None:
    plain = network()
    other = copy.deepcopy(plain)
    batch = data()
    first, second = AutoSGD(plain), AutoSGD(other)
    step(plain, first, *batch)
    x = batch[0].clone().requires_grad_()
    F.cross_entropy(checkpoint(other, x, use_reentrant=True), batch[1]).backward()
    second.step()
    assert noises(second) == pytest.approx(noises(first))


@pytest.mark.parametrize("granularity", ["layer", "group"])
def test_a_gradient_taken_away_before_the_step_takes_its_spread_along(granularity: str) -> None:
    plain = network()
    other = copy.deepcopy(plain)
    batch = data()
    frozen = AutoSGD(plain, granularity=granularity)
    for layer in (plain[0], plain[2]):
        layer.bias.requires_grad_(False)
    step(plain, frozen, *batch)
    taken = AutoSGD(other, granularity=granularity)
    F.cross_entropy(other(batch[0]), batch[1]).backward()
    for layer in (other[0], other[2]):
        layer.bias.grad = None
    taken.step()
    assert noises(taken)["0.weight"] == pytest.approx(noises(frozen)["0.weight"])


def test_gradients_of_zeros_for_a_layer_that_was_not_used() -> None:
    """zero_grad(set_to_none=False) leaves a tensor of zeros behind, which is no gradient."""
    heads = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]).double()
    optimizer = AutoSGD(heads)
    x, y = data()
    for number in (0, 1, 0):
        optimizer.zero_grad(set_to_none=False)
        before = copy.deepcopy(heads[1 - number].state_dict())
        F.cross_entropy(heads[number](x), y).backward()
        optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in heads[1 - number].state_dict().items())


def test_a_layer_added_later() -> None:
    model = network()
    optimizer = AutoSGD(model)
    model.append(nn.Linear(4, 4).double())
    optimizer.add_param_group({"params": model[3].parameters()})
    step(model, optimizer, *data())
    assert "3.weight" in optimizer.tuned()


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(1, 2, 3), (0, 1, 4, 4)),
        (nn.Linear(4, 2), (0, 3, 4)),
        (nn.GroupNorm(2, 4), (0, 4, 3)),
        (nn.Embedding(5, 2), (0, 3)),
    ],
    ids=["conv", "sequence", "group-norm", "embedding"],
)
def test_an_empty_batch_changes_nothing(layer: nn.Module, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(layer)
    optimizer = AutoSGD(model)
    before = copy.deepcopy(model.state_dict())
    x = torch.zeros(shape, dtype=torch.int64) if isinstance(layer, nn.Embedding) else torch.zeros(shape)
    model(x).sum().backward()
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_parametrization_put_on_an_attached_layer() -> None:
    model = network()
    optimizer = AutoSGD(model)
    nn.utils.parametrizations.weight_norm(model[0])
    with pytest.raises(RuntimeError, match="'weight' of layer '0' is no parameter any more"):
        model(data()[0])
    optimizer.detach()
    assert model(data()[0]).shape == (8, 4)
    assert "_autoopt_site" not in copy.deepcopy(model)[0].__dict__


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")  # still in use
def test_functional_transforms_run_plain() -> None:
    model = network()
    optimizer = AutoSGD(model)
    x, _ = data()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, x).sum())(parameters)
    assert set(jacobian) == set(parameters)
    assert torch.jit.trace(model, x, check_trace=False)(x).shape == (8, 4)
    step(model, optimizer, *data())


def test_layers_refuse_what_they_refuse_without_us() -> None:
    for layer, shape in (
        (nn.RMSNorm(4), (8, 1)),
        (nn.GroupNorm(4, 4), (1, 4)),
        (nn.InstanceNorm1d(4, affine=True), (8, 4, 1)),
    ):
        model = nn.Sequential(layer)
        with pytest.raises((RuntimeError, ValueError)):
            model(torch.randn(shape))
        optimizer = AutoSGD(model)
        with pytest.raises((RuntimeError, ValueError)):
            model(torch.randn(shape))
        optimizer.detach()


def test_moving_to_double_keeps_the_precision() -> None:
    plain = network()
    other = copy.deepcopy(plain).float()
    second = AutoSGD(other)
    other.load_state_dict({name: value.float() for name, value in plain.state_dict().items()})
    other.double()
    plain.load_state_dict(other.state_dict())
    first = AutoSGD(plain)
    batch = data()
    step(plain, first, *batch)
    step(other, second, *batch)
    assert noises(second) == pytest.approx(noises(first), rel=1e-12)
