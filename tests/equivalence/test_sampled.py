"""Where not every sample is looked at, Σ c_i² is an unbiased estimate, and the gradient what it always is."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from autoopt import AutoAdam, AutoGaussNewton, AutoSGD
from autoopt.capture import Capture, glance, sampled
from autoopt.moments.linear import Linear

SAMPLES, DRAWS = 24, 150


class Twice(nn.Module):
    """One layer, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh())


class Recurrent(nn.Module):
    """The outputs of an LSTM at all times."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.lstm(x)[0]
        return output


class Own(nn.Module):
    """A parameter that no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv1d(x, self.kernel)


class Routed(nn.Module):
    """Each position goes to one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(5, 8), nn.Linear(5, 8)])

    def forward(self, x: Tensor) -> Tensor:
        first = x[..., 0] > 0
        output = x.new_zeros(*x.shape[:2], 8)
        for expert, mask in zip(self.experts, (first, ~first), strict=True):
            output[mask] = expert(x[mask])
        return output


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv": (lambda: nn.Conv2d(3, 6, 3, padding=1), (3, 7, 7)),
    "strided conv": (lambda: nn.Conv1d(3, 6, 3, stride=2), (3, 9)),
    "grouped conv": (lambda: nn.Conv2d(4, 8, 3, groups=2), (4, 6, 6)),
    "transposed conv": (lambda: nn.ConvTranspose2d(3, 4, 2), (3, 5, 5)),
    "sequence": (lambda: nn.Linear(5, 8), (6, 5)),
    "batch norm": (lambda: nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(inplace=True)), (3, 5, 5)),
    "layer norm": (lambda: nn.LayerNorm(5), (6, 5)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 5)),
    "rms norm": (lambda: nn.RMSNorm(5), (6, 5)),
    "prelu": (lambda: nn.PReLU(3), (3, 5, 5)),
    "twice": (Twice, (6,)),
    "lstm": (Recurrent, (5, 5)),
    "weight norm": (lambda: weight_norm(nn.Linear(5, 8)), (4, 5)),
    "own parameter": (Own, (3, 8)),
    "experts": (Routed, (4, 5)),
}


def squares(capture: Capture, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    capture.clear()
    model(x).square().sum().backward()
    found = {name: capture.second_moment(name) for name in capture.parameters}
    return {name: square.clone() for name, square in found.items() if square is not None}


@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize("case", MODELS)
def test_estimate_is_unbiased(case: str, elementwise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over batches in random order is the exact value, within five standard errors of what was drawn."""
    make, shape = MODELS[case]
    model, x = make().double(), torch.randn(SAMPLES, *shape, dtype=torch.float64)
    capture = Capture(model, dict(model.named_parameters()), elementwise=elementwise)
    exact = squares(capture, model, x)
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    capture.exact = False
    monkeypatch.setattr(sampled, "ROOM", 60)
    draws: dict[str, list[Tensor]] = {name: [] for name in exact}
    for _ in range(DRAWS):
        for name, square in squares(capture, model, x[torch.randperm(SAMPLES)]).items():
            draws[name].append(square.sum())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-10, atol=1e-12)
    estimated = False
    for name, values in draws.items():
        drawn = torch.stack(values)
        error = 5 * drawn.std() / DRAWS**0.5 + 1e-10 * exact[name].sum()
        assert (drawn.mean() - exact[name].sum()).abs() <= error, name
        estimated |= bool(drawn.std() > 1e-6 * drawn.mean())
    assert estimated, "every sample was looked at: the case tests nothing"


@given(samples=st.integers(1, 4096), each=st.integers(0, 1 << 22), exact=st.booleans())
def test_choice(samples: int, each: int, exact: bool) -> None:
    """A few samples where there is no room for all, all in the batch, standing for all of them."""
    some = sampled.Sampler(exact=exact).choose(samples, each)
    if some is None:
        assert exact or samples <= sampled.FEW or samples * each <= sampled.ROOM
        return
    rows = range(samples)[some.rows]
    assert len(rows) == some.number
    assert 1 <= some.number <= sampled.FEW
    assert some.number * some.share == pytest.approx(samples)


def spread_of(make: Any, model: nn.Module, **options: Any) -> bool:
    """Whether the optimizer looks at every sample."""
    optimizer = make(model, **options)
    every: bool = optimizer._now.source.exact
    optimizer.detach()
    return every


def test_who_looks_at_every_sample() -> None:
    """The paper's rule, a metric made of samples, and who asks for it."""
    model = nn.Linear(2, 2)
    assert not spread_of(AutoSGD, model)
    assert spread_of(AutoSGD, model, exact=True)
    assert spread_of(AutoAdam, model, rule="paper")
    assert spread_of(AutoGaussNewton, model)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "rule": "paper"}]
    assert spread_of(AutoSGD, model, param_groups=groups)


def test_exact_is_true_or_false() -> None:
    with pytest.raises(ValueError, match="exact is 'yes'; it must be True or False"):
        AutoSGD(nn.Linear(2, 2), exact="yes")  # type: ignore[arg-type]


def test_the_paper_does_not_depend_on_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    one = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(64, 2))
    other = copy.deepcopy(one)
    x = torch.randn(16, 1, 6, 6)
    for room, model in ((1 << 16, one), (10, other)):
        monkeypatch.setattr(sampled, "ROOM", room)
        optimizer = AutoSGD(model, rule="paper")
        for _ in range(5):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_an_estimate_below_zero_counts_in_the_steps_between_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample looked at adds nothing, so V̂ is below zero; to leave that out would bias the average."""
    monkeypatch.setattr(sampled, "ROOM", 10)
    model = nn.Conv1d(1, 2, 3, bias=False)
    optimizer = AutoSGD(model, measure_every=2)
    x = torch.randn(8, 1, 6)
    some = sampled.Sampler(exact=False).choose(8, 6)
    assert some is not None
    x[some.rows] = 0
    for _ in range(4):  # the last one does not measure
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    state = optimizer.state[model.weight]
    assert state["held"] < 0
    assert state["measured"] == 4
    assert optimizer.tuned()["weight"].noise == 0


class Pair(nn.Module):
    """A convolution and its normalisation, used once or twice."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.conv, self.norm, self.times = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.relu_(self.norm(self.conv(x)))
        return x


@pytest.fixture
def glanced(monkeypatch: pytest.MonkeyPatch) -> list[glance.Glance]:
    """Every layer that may be is glanced at; the glances that were taken."""
    taken: list[glance.Glance] = []

    class Counted(glance.Glance):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.held = len(self.kept)

        def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
            super().__call__(gradients)
            taken.append(self)

    monkeypatch.setattr(sampled, "ROOM", 0)
    monkeypatch.setattr(glance, "Glance", Counted)
    return taken


def watched(model: nn.Module, elementwise: bool = True) -> Capture:
    capture = Capture(model, dict(model.named_parameters()), elementwise=elementwise)
    capture.exact = False
    return capture


def naive(model: nn.Module, x: Tensor, rows: slice) -> dict[str, Tensor]:
    """N/m Σ c_i² over some samples, each c_i from a backward pass in which the other rows of every layer's output
    gradient are zero."""
    found: dict[str, Tensor] = {}
    chosen = range(len(x))[rows]
    for i in chosen:
        twin = copy.deepcopy(model)
        mask = torch.zeros(len(x), 1, 1, 1, dtype=x.dtype)
        mask[i] = 1
        y = twin.norm(twin.conv(x))
        y.register_hook(lambda dy, mask=mask: dy * mask)
        torch.relu(y).square().sum().backward()
        # to the convolution the other rows come, too, through the normalisation
        whole = copy.deepcopy(model)
        h2 = whole.conv(x)
        h2.register_hook(lambda dy, mask=mask: dy * mask)
        torch.relu(whole.norm(h2)).square().sum().backward()
        for name, source in {"conv": whole, "norm": twin}.items():
            for key, parameter in source.get_submodule(name).named_parameters():
                add = parameter.grad.square() * len(x) / len(chosen)
                found[f"{name}.{key}"] = found.get(f"{name}.{key}", 0) + add
    return found


@pytest.mark.parametrize("elementwise", [True, False])
def test_a_glance_is_exact_for_the_samples_it_looks_at(elementwise: bool, glanced: list[glance.Glance]) -> None:
    model, x = Pair().double(), torch.randn(8, 3, 5, 5, dtype=torch.float64)
    some = sampled.Sampler(exact=False).choose(8, 75)
    assert some is not None
    expected = naive(model, x, some.rows)
    for name, square in squares(watched(model, elementwise), model, x).items():
        truth = expected[name] if elementwise else expected[name].sum()
        torch.testing.assert_close(square, truth, rtol=1e-10, atol=1e-14)
    assert len(glanced) == 2


class Kinds(nn.Module):
    """Layers of several kinds, of which some are alike, and some of those not quite."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(4, 4, 3, padding=1, bias=bias) for bias in (True, True, False, True)]
        wide = nn.Conv2d(4, 4, 3, padding=2, dilation=2)
        last = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)
        linear = [nn.Linear(6, 6) for _ in range(3)]
        linear[1].bias.requires_grad_(False)
        batch = [nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=None), nn.BatchNorm2d(4).eval()]
        instance = [nn.InstanceNorm2d(4, affine=True, track_running_stats=tracks) for tracks in (True, True, False)]
        group = [nn.GroupNorm(groups, 4) for groups in (2, 4, 2)]
        others = [nn.LayerNorm(6), nn.RMSNorm(6), nn.PReLU(4), nn.PReLU(), nn.ConvTranspose2d(4, 4, 3, padding=1)]
        rest = [*batch, *instance, *group, *others, *copy.deepcopy(others), wide, last]
        pairs = zip(rest, [*convolutions, *linear] * 3, strict=True)
        self.layers = nn.ModuleList(dict.fromkeys(layer for pair in pairs for layer in pair))  # each of them once

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + 0.5 * x.roll(1, 1)
        return x


@pytest.mark.parametrize("limit", ["HELD", "TOGETHER", "SMALL", None])
@pytest.mark.parametrize("elementwise", [True, False])
def test_what_is_formed_together_is_what_it_is_apart(
    elementwise: bool, limit: str | None, glanced: list[glance.Glance], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is formed in the pass or at its end, all at once or not, kept as it is or copied."""
    if limit is not None:
        monkeypatch.setattr(sampled, limit, {"HELD": 20_000, "TOGETHER": 300, "SMALL": 0}[limit])
        monkeypatch.setattr(glance, "SMALL", sampled.SMALL)
    torch.manual_seed(3)
    model, x = Kinds().double(), torch.randn(6, 4, 6, 6, dtype=torch.float64)
    assert_alike(*observed_twin(model, lambda model: model(x).square().sum().backward(), elementwise))
    assert len(glanced) == len(model.layers)


def test_layers_that_are_alike_are_formed_together(
    glanced: list[glance.Glance], monkeypatch: pytest.MonkeyPatch
) -> None:
    formed: list[int] = []

    class Counted(Linear):
        def weight_contributions(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
            formed.append(len(dy))
            return super().weight_contributions(dy, kept)

    monkeypatch.setattr("autoopt.moments.linear.Linear", Counted)
    model, x = nn.Sequential(*(nn.Linear(5, 5) for _ in range(7)), nn.Linear(5, 2)), torch.randn(4, 3, 5)
    ends: list[int] = []
    x.requires_grad_().register_hook(lambda _: ends.append(len(formed)))  # the last of the pass
    squares(watched(model), model, x)
    assert ends == [0]
    assert sorted(formed) == [1, 7]


@pytest.mark.parametrize("small", [True, False])
def test_the_rest_of_a_batch_is_not_kept(
    small: bool, glanced: list[glance.Glance], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a layer that had its backward pass there is one sample, though nothing is formed yet; unless all are small."""
    if not small:
        monkeypatch.setattr(glance, "SMALL", 0)
    model, x = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), torch.randn(4, 3, 5, requires_grad=True)
    watched(model)
    between = model[0](x)
    storage, kept = weakref.ref(between.untyped_storage()), []
    x.register_hook(lambda _: kept.append(storage() is not None))  # the last of the pass
    loss = model[1](between).square().sum()
    del between
    loss.backward()
    assert kept == [small]
    assert storage() is None


def test_micro_batches_add_up(glanced: list[glance.Glance]) -> None:
    model = Pair().double()
    capture, parts = watched(model), torch.randn(2, 8, 3, 5, 5, dtype=torch.float64)
    apart = [squares(capture, model, x) for x in parts]
    model.zero_grad()
    capture.clear()
    for x in parts:
        model(x).square().sum().backward()
    for name in capture.parameters:
        torch.testing.assert_close(capture.second_moment(name), apart[0][name] + apart[1][name])
        assert capture.samples(name) == 16
    assert len(glanced) == 8


def test_a_layer_used_twice_is_seen_in_both_uses(glanced: list[glance.Glance], monkeypatch: pytest.MonkeyPatch) -> None:
    """When the first use ran it was not known. What both add is summed before it is squared, as without glances."""
    model, x = Pair(times=2).double(), torch.randn(8, 3, 5, 5, dtype=torch.float64)
    twin = copy.deepcopy(model)
    found = squares(watched(model), model, x)
    assert len(glanced) == 4
    monkeypatch.setattr(glance, "suits", lambda *_: None)
    expected = squares(watched(twin), twin, x)
    assert found.keys() == expected.keys() == {"conv.weight", "conv.bias", "norm.weight", "norm.bias"}
    for name, square in found.items():
        torch.testing.assert_close(square, expected[name], rtol=1e-10, atol=1e-14)


def test_two_passes_through_one_graph_are_refused(glanced: list[glance.Glance]) -> None:
    model = Pair()
    capture = watched(model)
    loss = model(torch.randn(8, 3, 5, 5)).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran twice through the same forward pass of layer 'norm'"):
        loss.backward()
    capture.detach()


def test_a_pass_that_adds_to_no_gradient_leaves_no_statistics(glanced: list[glance.Glance]) -> None:
    model, x = Pair(), torch.randn(8, 3, 5, 5, requires_grad=True)
    capture = watched(model)
    torch.autograd.grad(model(x).square().sum(), x)
    assert all(capture.second_moment(name) is None for name in capture.parameters)
    torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert all(capture.second_moment(name) is None for name in capture.parameters)
    assert len(glanced) == 4


def test_a_gradient_penalty_is_refused(glanced: list[glance.Glance]) -> None:
    """The second backward pass would add to the weights past the hook."""
    model, x = nn.Conv1d(2, 3, 2), torch.randn(8, 2, 4, requires_grad=True)
    watched(model)
    with pytest.raises(RuntimeError, match="create_graph=True, as for a gradient penalty"):
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    for parameter in model.parameters():  # as the remedy says
        parameter.requires_grad_(False)
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()


class Potential(nn.Module):
    """An energy, and by its slope the forces."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, places: Tensor) -> Tensor:
        places = places.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(places).sum(), places, create_graph=True)
        return slope


def test_forces_are_refused(glanced: list[glance.Glance]) -> None:
    model = Potential()
    watched(model)
    with pytest.raises(RuntimeError, match=r"layer 'net\.\d' with create_graph=True.*for forces"):
        model(torch.randn(8, 5, 3))


def test_a_frozen_weight_keeps_no_input(glanced: list[glance.Glance]) -> None:
    model = Pair()
    capture = watched(model)
    model.conv.weight.requires_grad_(False)
    model(torch.randn(8, 3, 5, 5)).square().sum().backward()
    assert capture.second_moment("conv.weight") is None
    assert capture.second_moment("conv.bias") is not None
    assert [use.held for use in glanced if use.site.name == "conv"] == [0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("reentrant", [True, False])
def test_in_a_checkpoint_nothing_is_kept(reentrant: bool, glanced: list[glance.Glance]) -> None:
    """The statistics are those of a pass without one."""
    model, x = Pair().double(), torch.randn(8, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    model.norm.momentum = 0.0
    capture = watched(model)
    plain = squares(capture, model, x)
    model.zero_grad()
    capture.clear()
    before = len(glanced)
    checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    for name in capture.parameters:
        torch.testing.assert_close(capture.second_moment(name), plain[name], rtol=1e-10, atol=1e-14)
    assert reentrant or len(glanced) == before


def test_what_is_kept_goes_with_the_pass(glanced: list[glance.Glance]) -> None:
    """After the backward pass nothing of the input is held, though the loss is."""
    model = Pair()
    capture, x = watched(model), torch.randn(8, 3, 5, 5)
    alive = weakref.ref(x)
    loss = model(x).square().sum()
    loss.backward()
    del x
    assert alive() is None
    assert all(not use.kept for use in glanced)
    assert loss.item() > 0
    capture.detach()


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)], ids=str)
def test_a_pass_without_a_backward_leaves_nothing(norm: nn.Module, glanced: list[glance.Glance]) -> None:
    """What a hook keeps must not lead back to the node that has the hook: nobody would ever free the two."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm)
    capture, x = watched(model), torch.randn(8, 3, 6, 6, requires_grad=True)
    alive = weakref.ref(x)
    torch.autograd.grad(model(x).sum(), x)
    model(x)
    del x
    assert alive() is None
    assert not capture.sites["0"].repeated


def observed_twin(
    model: nn.Module, run: Callable[[nn.Module], None], elementwise: bool = True
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The second moments after `run`, with glances, and by `Observe` with the same samples."""
    twin, found = copy.deepcopy(model), []
    for one, suits in ((model, glance.suits), (twin, lambda *_: None)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(glance, "suits", suits)
            capture = watched(one, elementwise)
            run(one)
        trained = [name for name, parameter in capture.parameters.items() if parameter.requires_grad]
        found.append({name: capture.second_moment(name) for name in trained})
        assert all(square is not None for square in found[-1].values())
    return found[0], found[1]


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, square in found.items():
        torch.testing.assert_close(square, expected[name], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("layer", [nn.Linear(5, 8), nn.Conv1d(6, 8, 2), nn.LayerNorm(5)], ids=str)
def test_an_output_changed_in_place(layer: nn.Module, glanced: list[glance.Glance]) -> None:
    """A linear layer over positions gives a view, whose node goes when it is changed."""
    model, x = layer.double(), torch.randn(8, 6, 5, dtype=torch.float64)

    def run(model: nn.Module) -> None:
        y = model(x)
        y.relu_()
        y.square().sum().backward()

    assert_alike(*observed_twin(model, run))
    assert len(glanced) == 1


@pytest.mark.parametrize("part", [slice(None), slice(2, 4)], ids=["whole", "part"])
def test_an_output_that_is_a_view_of_another_shape(part: slice, glanced: list[glance.Glance]) -> None:
    """The gradient that is looked at is laid out as the output, whatever reaches what it is a view of."""
    model, x = nn.Linear(5, 8).double(), torch.randn(8, 2, 3, 5, dtype=torch.float64)

    def run(model: nn.Module) -> None:
        y = model(x)
        z = y.view(8, 6, 8)[:, part]
        z.mul_(2)
        (y.square().sum() + z.sum()).backward()

    assert_alike(*observed_twin(model, run))
    assert len(glanced) == 1


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("elementwise", [True, False])
def test_where_no_contribution_is_formed_a_glance_sees_all_samples(
    elementwise: bool, exact: bool, glanced: list[glance.Glance]
) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False)).double()
    x = torch.randn(6, 5, dtype=torch.float64)
    expected = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for i in range(len(x)):
        twin = copy.deepcopy(model)
        twin(x[i : i + 1]).square().sum().backward()
        for name, parameter in twin.named_parameters():
            expected[name] += parameter.grad.square()
    capture = watched(model, elementwise)
    capture.exact = exact
    for name, square in squares(capture, model, x).items():
        truth = expected[name] if elementwise else expected[name].sum()
        torch.testing.assert_close(square, truth, rtol=1e-10, atol=1e-14)
        assert capture.samples(name) == 6
    assert len(glanced) == 2


def test_glances_at_all_samples_and_at_one_keep_their_shares(glanced: list[glance.Glance]) -> None:
    model = nn.Sequential(nn.Conv1d(3, 4, 2), nn.Flatten(), nn.Linear(20, 6), nn.ReLU(inplace=True), nn.Linear(6, 2))
    x = torch.randn(8, 3, 6, dtype=torch.float64)

    def run(model: nn.Module) -> None:
        for part in x.split(4):  # which add up
            model(part).square().sum().backward()

    assert_alike(*observed_twin(model.double(), run))
    assert [use.some is glance.ALL for use in glanced] == 2 * [True, True, False]


@pytest.mark.parametrize("layer", [nn.Conv1d(3, 4, 3), nn.Linear(6, 4), nn.LayerNorm(6)], ids=str)
def test_hooks_of_others_come_first(layer: nn.Module, glanced: list[glance.Glance]) -> None:
    """What they do to the gradient of the output reaches the weight."""
    model, x = layer.double(), torch.randn(8, 3, 6, dtype=torch.float64)

    def run(model: nn.Module) -> None:
        y = model(x)
        y.register_hook(lambda dy: dy * 0.5)
        y.square().sum().backward()

    assert_alike(*observed_twin(model, run))
    assert len(glanced) == 1


def test_running_statistics_stay_out_of_the_graph(glanced: list[glance.Glance]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.InstanceNorm2d(3, affine=True, track_running_stats=True))
    optimizer = AutoSGD(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 3, 6, 6)).square().mean().backward()
        optimizer.step()
    assert len(glanced) == 4
    assert not model[1].running_mean.requires_grad
    model.eval()(torch.randn(8, 3, 6, 6))


class Failing(torch.autograd.Function):
    """As when the memory does not suffice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        raise RuntimeError("no memory")


def test_what_a_failed_pass_left_is_forgotten(glanced: list[glance.Glance]) -> None:
    """Also if the next one takes no glance: it has two samples."""
    model = nn.Sequential(nn.Conv1d(3, 3, 3, padding=1), nn.Conv1d(3, 4, 3))
    capture = watched(model)
    with pytest.raises(RuntimeError, match="no memory"):
        model[1](Failing.apply(model[0](torch.randn(8, 3, 6)))).square().sum().backward()
    model.zero_grad()
    model(torch.randn(2, 3, 6)).square().sum().backward()
    assert capture.samples("1.weight") == 2


class Block(nn.Module):
    """Layers, and on request a parameter of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        x = x + torch.tanh(self.layer(self.norm(x)))
        return x if shift is None else x + shift


class Tokens(nn.Module):
    """A parameter that no layer holds, and blocks that do not know of it, or are given it."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 5, 4))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.given = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x + self.positions)
        return self.blocks[1](x, self.positions) if self.given else self.blocks[1](x)


@pytest.mark.parametrize("given", [False, True])
def test_modules_that_need_not_be_watched(given: bool, glanced: list[glance.Glance]) -> None:
    """From the second pass on, what a module does with its own layers is not followed; all is seen as in the first."""
    model, x = Tokens().double(), torch.randn(8, 5, 4, dtype=torch.float64)
    capture = watched(model)
    first = squares(capture, model, x)
    assert {key[0] for key in capture.bare._quiet if capture.bare.quiet(key)} == set(model.blocks)
    model.given = given  # a parameter comes in as an argument
    fresh = copy.deepcopy(model)
    found, expected = squares(capture, model, x), squares(watched(fresh), fresh, x)
    assert first.keys() == found.keys() == expected.keys() == dict(model.named_parameters()).keys()
    for name, square in found.items():
        torch.testing.assert_close(square, expected[name], rtol=1e-10, atol=1e-14)


def test_exact_statistics_watch_everything() -> None:
    model, x = Tokens(), torch.randn(8, 5, 4)
    capture = Capture(model, dict(model.named_parameters()), elementwise=True)
    for _ in range(2):
        squares(capture, model, x)
    assert not capture.bare._quiet


def test_under_autocast_nothing_more_is_kept_than_autograd_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The input in the lower precision, and not the one that it was made of, which is twice as large."""
    made: list[glance.Glance] = []

    class Noted(glance.Glance):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(sampled, "ROOM", 0)
    monkeypatch.setattr(glance, "Glance", Noted)
    model, x = nn.Linear(6, 4), torch.randn(8, 5, 6)
    capture = watched(model)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    (kept,) = made[0].kept
    assert kept.dtype == y.dtype == torch.bfloat16
    node: Any = y.grad_fn
    while not hasattr(node, "_saved_mat1"):
        node = node.next_functions[0][0]
    assert kept.data_ptr() == node._saved_mat1.data_ptr()
    y.float().square().sum().backward()
    assert capture.second_moment("weight").isfinite().all()


class Scaled(nn.Module):
    """A block with a scale of its own, which it does not always use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.skips = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), False

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x) if self.skips else x + self.layer(x) * self.scale


class Turned(nn.Module):
    """A block that gives (positions, samples, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).transpose(0, 1)


class Around(nn.Module):
    """A block between uses of position embeddings."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.positions = block, nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(x * self.positions)
        return (h + self.positions.unsqueeze(1)).transpose(0, 1) if isinstance(self.block, Turned) else h


def test_a_module_with_parameters_of_its_own_is_always_watched(glanced: list[glance.Glance]) -> None:
    model, x = Around(Scaled()).double(), torch.randn(8, 5, 4, dtype=torch.float64)
    capture = watched(model)
    first = squares(capture, model, x)
    model.block.skips = True
    squares(capture, model, x)
    model.block.skips = False
    assert_alike(squares(capture, model, x), first)


@pytest.mark.parametrize("samples", [5, 8])
def test_a_module_that_turns_the_samples_is_always_watched(samples: int, glanced: list[glance.Glance]) -> None:
    """With as many positions as samples its result could be taken for one that has the samples first."""
    model, x = Around(Turned()).double(), torch.randn(samples, 5, 4, dtype=torch.float64)
    capture = watched(model)
    first = squares(capture, model, x)
    assert_alike(squares(capture, model, x), first)


class Noting(TorchFunctionMode):
    """A mode of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_modes_of_others_see_quiet_modules(glanced: list[glance.Glance]) -> None:
    """As torch.device does, which says where tensors are made."""
    model, x = Around(Block()), torch.randn(8, 5, 4)
    capture = watched(model)
    squares(capture, model, x)
    assert any(capture.bare._quiet.values())
    with Noting() as mode:
        squares(capture, model, x)
    assert "tanh" in mode.seen
