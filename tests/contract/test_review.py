"""What a hostile reader found in the first version, each as the promise that it broke."""

import copy
import io
import random
import warnings
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


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")  # still in use
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


# A second reading, as the models and loops of people.


class Dropped(nn.Module):
    """Blocks that take (time, batch, features), any of which may be left out of a pass."""

    class Block(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.inner, self.mix = nn.Linear(8, 8), nn.Linear(times, times)

        def forward(self, x: Tensor) -> Tensor:
            mixed: Tensor = self.mix(self.inner(x).permute(1, 2, 0)).permute(2, 0, 1)
            return x + mixed.tanh()

    def __init__(self, times: int, draw: Callable[[], float]) -> None:
        super().__init__()
        self.first, self.last, self.draw = nn.Linear(3, 8), nn.Linear(8, 4), draw
        self.blocks = nn.ModuleList(self.Block(times) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).transpose(0, 1)
        for block in self.blocks:
            h = block(h) if self.draw() < 0.5 else h
        result: Tensor = self.last(h.mean(0))
        return result


@pytest.mark.parametrize("draw", [lambda: torch.rand(()).item(), random.random], ids=["torch", "Python"])
@pytest.mark.parametrize("times", [5, 7])
def test_a_block_that_is_first_run_in_a_later_pass(times: int, draw: Callable[[], float]) -> None:
    torch.manual_seed(1)
    random.seed(1)
    model = Dropped(times, draw).double()
    optimizer = AutoSGD(model, exact=True)
    x, y = torch.randn(5, times, 3, dtype=torch.float64), torch.randint(0, 4, (5,))
    met = set()
    for _ in range(8):
        states, twin = (torch.get_rng_state(), random.getstate()), copy.deepcopy(model)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        after = torch.get_rng_state(), random.getstate()
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        losses, named = F.cross_entropy(twin(x), y, reduction="none") / 5, dict(twin.named_parameters())
        torch.set_rng_state(after[0])
        random.setstate(after[1])
        rows = [torch.autograd.grad(a, list(named.values()), retain_graph=True, allow_unused=True) for a in losses]
        for name, *gradients in zip(named, *rows, strict=True):
            if gradients[0] is not None:
                square = torch.stack(gradients).square().sum()
                torch.testing.assert_close(optimizer._now.source.second_moment(name), square, rtol=1e-10, atol=0)
                met.add(name)
        optimizer.step()
    assert met == set(named)


def test_another_function_in_the_place_of_forward_is_warned_of() -> None:
    model = network()
    model.forward = model.forward  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="another function in the place of its forward"):
        AutoSGD(model)


def test_parameters_that_forward_assigns_are_put_back_by_the_probe() -> None:
    """The keys of MoCo follow the queries at every pass, and the first one is no exception."""

    class MoCo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                key.data = 0.9 * key.data + 0.1 * query.data
            result: Tensor = self.query(x) * self.key(x)
            return result

    torch.manual_seed(0)
    model = MoCo().double()
    plain = copy.deepcopy(model)
    optimizer = AutoSGD(model)
    x, _ = data()
    assert torch.equal(model(x), plain(x))
    assert torch.equal(model.key.weight, plain.key.weight)
    optimizer.detach()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(torch.stack([x, x], 1))[0][:, -1]
        return result


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        result: Tensor = self.inner(x, x, x)[0].squeeze(1)
        return result


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@pytest.mark.parametrize("kind", [Recurrent, Attending, Own])
def test_a_gradient_of_the_input_before_the_backward_pass(kind: type[nn.Module]) -> None:
    """As for saliency, or an adversarial example."""
    torch.manual_seed(0)
    model = kind().double()
    twin = copy.deepcopy(model)
    x, y = data()
    found = []
    for each, asks in ((model, True), (twin, False)):
        optimizer = AutoSGD(each, exact=True)
        given = x.clone().requires_grad_()
        loss = F.cross_entropy(each(given), y)
        if asks:
            torch.autograd.grad(loss, given, retain_graph=True)
        loss.backward()
        optimizer.step()
        found.append(noises(optimizer))
    assert found[0] == found[1]
    assert all(noise == noise for noise in found[0].values())


def test_a_list_of_samples() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, samples: list[Tensor]) -> Tensor:
            padded = nn.utils.rnn.pad_sequence(samples, batch_first=True)
            result: Tensor = self.outer(self.inner(padded).mean(1))
            return result

    model = Padded().double()
    optimizer = AutoSGD(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.zero_grad()
            samples = [torch.randn(length, 4, dtype=torch.float64) for length in (7, 3, 5)]
            F.cross_entropy(model(samples), torch.tensor([0, 1, 2])).backward()
            optimizer.step()
    assert [str(each.message)[:14] for each in caught] == ["the first axis"]


@pytest.mark.parametrize("compiled", [torch.jit.script, lambda part: torch.jit.trace(part, torch.zeros(2, 4).double())])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated")
def test_torchscript_is_refused_by_name(compiled: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), compiled(nn.Sequential(nn.Linear(4, 4)).double())).double()
    with pytest.raises(ValueError, match=r"module '1' is TorchScript .*spread=\"passes\""):
        AutoSGD(model)
    optimizer = AutoSGD(model, spread="passes")
    step(model, optimizer, *data())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated")
def test_an_observed_model_can_be_scripted_exported_and_saved_as_a_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    x, y = data()
    optimizer = AutoSGD(model)
    step(model, optimizer, x, y)
    model.eval()
    wanted = model(x)
    assert torch.equal(torch.jit.script(model)(x), wanted)
    exported = torch.export.export(model, (x,))
    assert torch.equal(exported.module()(x), wanted)
    operations = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert operations == {"aten.linear.default", "aten.batch_norm.default"}
    optimizer.detach()

    traced = torch.fx.symbolic_trace(model.train())
    optimizer = AutoSGD(traced)
    step(traced, optimizer, x, y)
    file = io.BytesIO()
    torch.save(traced.eval(), file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), traced(x))
    step(traced.train(), optimizer, x, y)
