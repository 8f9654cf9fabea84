"""What an optimizer makes of the sample axes that it finds: exact moments, and a model that stays what it is."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoopt import AutoAdam, AutoSGD
from autoopt.capture import Capture
from equivalence.axes import (
    Attention,
    B,
    Contrast,
    Crossed,
    E,
    Flat,
    Frames,
    Loop,
    Mixer,
    T,
    Transformer,
    Windows,
    convolutions,
    tokens,
)  # fmt: skip
from reference import contributions


def one_by_one(model: nn.Module, x: Tensor, y: Tensor, axis: int) -> dict[str, Tensor]:
    """c_i of each parameter, (samples, *shape), for models in which the samples do not meet."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    samples = [
        torch.autograd.grad(squares(model, x.narrow(axis, i, 1), y.narrow(axis, i, 1)), list(parameters.values()))
        for i in range(x.shape[axis])
    ]
    return {name: torch.stack(c) for name, c in zip(parameters, zip(*samples, strict=True), strict=True)}


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A sum over samples, whatever axis they are on."""
    return (model(x).flatten() - y.flatten()).square().sum()


def assert_moments(capture: Capture, expected: dict[str, Tensor]) -> None:
    for name, c in expected.items():
        torch.testing.assert_close(capture.second_moment(name), c.square().sum(0), rtol=1e-10, atol=1e-14)
        assert capture.samples(name) == len(c)


def attach(model: nn.Module) -> Capture:
    return Capture(model, dict(model.named_parameters()), elementwise=True)


def plain_transformer(batch_first: bool) -> Transformer:
    model = Transformer(batch_first=batch_first)
    model.drop.p = 0.0
    return model


def plain_encoder(batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(E, 2, 16, dropout=0.0, batch_first=batch_first)
    return nn.Sequential(nn.Linear(3, E), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(E, 2))


class Scaled(nn.Module):
    """With parameters that belong to no layer."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn((T, E) if batch_first else (T, 1, E)))
        self.scale, self.mix, self.head = (
            nn.Parameter(torch.rand(E)),
            Attention(batch_first=batch_first),
            nn.Linear(E, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.mix(x + self.positions) * self.scale)
        return result


EXACT: list[tuple[str, Callable[[], nn.Module], Callable[[int, int], Tensor], int]] = [
    ("batch-first", lambda: plain_transformer(True), lambda b, t: tokens(b, t), 0),
    ("time-first", lambda: plain_transformer(False), lambda b, t: tokens(t, b), 1),
    ("encoder-batch-first", lambda: plain_encoder(True), lambda b, t: torch.randn(b, t, 3).double(), 0),
    ("encoder-time-first", lambda: plain_encoder(False), lambda b, t: torch.randn(t, b, 3).double(), 1),
    ("bare-batch-first", lambda: Scaled(batch_first=True), lambda b, t: torch.randn(b, T, E).double(), 0),
    ("bare-time-first", lambda: Scaled(batch_first=False), lambda b, t: torch.randn(T, b, E).double(), 1),
    ("loop", Loop, lambda b, t: tokens(t, b), 1),
    ("mixer", Mixer, lambda b, t: torch.randn(b, T, E).double(), 0),
    ("windows", Windows, lambda b, t: torch.randn(b, 3 * t, E).double(), 0),
    ("flat", Flat, lambda b, t: torch.randn(t, b, E).double(), 1),
]


@pytest.mark.parametrize(("model_of", "inputs", "axis"), [case[1:] for case in EXACT], ids=[case[0] for case in EXACT])
def test_moments_are_exact(model_of: Callable[[], nn.Module], inputs: Callable[[int, int], Tensor], axis: int) -> None:
    """Also in later passes with more samples, with shorter ones, and as many as they are long."""
    model = model_of().double()
    capture = attach(model)
    for b, t in ((B, T), (B + 1, T), (B, T - 1), (T, T)):
        x = inputs(b, t)
        with torch.no_grad():
            y = torch.randn_like(model(x))
        if y.dim() == 2 and len(y) == b * t:
            y = y.unflatten(0, (t, b))
        expected = one_by_one(copy.deepcopy(model), x, y, axis)
        model.zero_grad()
        squares(model, x, y).backward()
        assert_moments(capture, expected)
        capture.clear()


def test_frames_in_batch_statistics_are_exact() -> None:
    model = Frames().double()
    x, y = torch.randn(B, 5, 2, 6, 6, dtype=torch.float64), torch.randint(2, (B,))
    rows = contributions(model, lambda m: F.cross_entropy(m(x), y))
    expected = {name: c if len(c) == B else c.unflatten(0, (B, 5)).sum(1) for name, c in rows.items()}
    capture = attach(model)
    F.cross_entropy(model(x), y).backward()
    assert_moments(capture, expected)


# Inputs that all samples share.


class Places(nn.Module):
    """Features of (batch, places, 3) and coordinates of the places, the same for all samples."""

    def __init__(self, pools: bool = False) -> None:
        super().__init__()
        self.place, self.feature, self.head, self.pools = nn.Linear(2, E), nn.Linear(3, E), nn.Linear(E, 2), pools

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        h = torch.tanh(self.feature(x) + self.place(places))
        result: Tensor = self.head(h.mean(1) if self.pools else h)
        return result


class PlacesFirst(Places):
    def forward(self, places: Tensor, x: Tensor) -> Tensor:
        return super().forward(x, places)


class Weighted(nn.Module):
    """A weight for each time step comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, weights: Tensor, x: Tensor) -> Tensor:
        return (self.layer(x) * weights[:, None]).sum(1)


class Remembered(nn.Module):
    """Two inputs of samples, and a memory that all of them attend to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.memory, self.head = (
            nn.Linear(3, E), nn.Linear(2, E), nn.Linear(6, E), nn.Linear(E, 2),
        )  # fmt: skip

    def forward(self, x: Tensor, z: Tensor, memory: Tensor) -> Tensor:
        keys = self.memory(memory)
        h = torch.tanh(self.first(x) + self.second(z))
        result: Tensor = self.head(torch.softmax(h @ keys.T, -1) @ keys)
        return result


def by_sample(model: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    result: Tensor = model(*inputs).square().flatten(1).sum(1)
    return result


def assert_optimizer(optimizer: Any, model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Its statistics of a pass against a backward pass for each sample."""
    plain = copy.deepcopy(model)
    named = dict(plain.named_parameters())
    losses = by_sample(plain, inputs)
    single = [torch.autograd.grad(loss, list(named.values()), retain_graph=True) for loss in losses]
    optimizer.zero_grad()
    by_sample(model, inputs).sum().backward()
    source = optimizer._now.source
    for name, c in zip(named, map(torch.stack, zip(*single, strict=True)), strict=True):
        square, found = c.square().sum(0), source.second_moment(name)
        expected = square if found.shape == square.shape else square.sum()
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
        assert source.samples(name) == len(losses)
    source.clear()


SHARED: list[tuple[str, Callable[[], nn.Module], Callable[[int, int], tuple[Tensor, ...]]]] = [
    ("places", Places, lambda b, t: (torch.randn(b, t, 3), torch.randn(t, 2))),
    ("places-pooled", lambda: Places(pools=True), lambda b, t: (torch.randn(b, t, 3), torch.randn(t, 2))),
    ("places-first", lambda: PlacesFirst(pools=True), lambda b, t: (torch.randn(t, 2), torch.randn(b, t, 3))),
    ("weights", Weighted, lambda b, t: (torch.randn(t), torch.randn(b, t, 3))),
    ("memory", Remembered, lambda b, t: (torch.randn(b, 9, 3), torch.randn(b, 9, 2), torch.randn(t, 6))),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [AutoSGD, AutoAdam])
@pytest.mark.parametrize("sizes", [((5, 5), (4, 7), (7, 7)), ((5, 7), (7, 7), (5, 5))], ids=["square", "later"])
@pytest.mark.parametrize(("model_of", "inputs"), [case[1:] for case in SHARED], ids=[case[0] for case in SHARED])
def test_an_input_that_all_samples_share(
    model_of: Callable[[], nn.Module],
    inputs: Callable[[int, int], tuple[Tensor, ...]],
    sizes: tuple[tuple[int, int], ...],
    kind: type[Any],
) -> None:
    """It may be as long as the batch, when the model is probed or later."""
    model = model_of().double()
    optimizer = kind(model, exact=True)
    for b, t in sizes:
        assert_optimizer(optimizer, model, tuple(x.double() for x in inputs(b, t)))


@pytest.mark.parametrize("places", [5, 7])
def test_if_the_first_input_may_be_shared_it_is_a_doubt(places: int) -> None:
    """Nothing mixes the samples, nor the places."""
    model = PlacesFirst()
    attach(model)
    with pytest.warns(UserWarning, match=r"samples, on axis 1 of its input of shape .* make it the first input"):
        model(torch.randn(places, 2), torch.randn(5, places, 3))


class Operator(nn.Module):
    """A function that each sample stands for, at places that all share."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.feature = nn.Linear(2, E), nn.Linear(3, E)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return self.feature(x).tanh() @ self.place(places).tanh().T


class OperatorFirst(Operator):
    def forward(self, places: Tensor, x: Tensor) -> Tensor:
        return super().forward(x, places)


@pytest.mark.filterwarnings("error")
def test_a_matrix_of_samples_and_places() -> None:
    model = Operator().double()
    optimizer = AutoAdam(model, exact=True)
    for samples in (5, 4, 7):
        assert_optimizer(optimizer, model, (torch.randn(samples, 3).double(), torch.randn(7, 2).double()))


def test_if_the_samples_may_be_its_columns_it_is_a_doubt() -> None:
    model = OperatorFirst()
    attach(model)
    with pytest.warns(UserWarning, match=r"given 7 samples, the rows .* columns of what it returns.* first input"):
        model(torch.randn(7, 2), torch.randn(5, 3))


# When the probe runs.


def counted(model: nn.Module) -> list[int]:
    """The number of samples of each forward pass of the model, probes included."""
    passes: list[int] = []
    forward = type(model).forward

    class Counting(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            passes.append(len(args[0]))
            return forward(self, *args, **kwargs)

    model.__class__ = Counting
    return passes


def test_the_probe_runs_once_and_only_for_a_pass_that_trains() -> None:
    model = convolutions()
    passes, capture = counted(model), attach(model)
    x = torch.randn(B, 2, 6, 6)
    with torch.no_grad():
        model(x)
    assert len(passes) == 1
    for _ in range(2):
        model(x).sum().backward()
    assert len(passes) == 1 + 4 + 2
    capture.detach()
    model(x)
    assert len(passes) == 8


class Parts(nn.Module):
    """Has no forward pass of its own that anyone calls."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = plain_encoder(False), nn.ModuleList([plain_encoder(True), plain_encoder(True)])


def test_a_part_of_the_model_may_be_called() -> None:
    model = Parts().double()
    capture = attach(model)
    x = torch.randn(T, B, 3, dtype=torch.float64)
    expected = one_by_one(copy.deepcopy(model.encoder), x, x[..., :2], 1)
    squares(model.encoder, x, x[..., :2]).backward()
    assert_moments(capture, {f"encoder.{name}": c for name, c in expected.items()})
    model.zero_grad()
    capture.clear()
    x = x.transpose(0, 1)
    expected = one_by_one(copy.deepcopy(model.decoder[1]), x, x[..., :2], 0)
    squares(model.decoder[1], x, x[..., :2]).backward()
    assert_moments(capture, {f"decoder.1.{name}": c for name, c in expected.items()})


class Late(nn.Module):
    """Reaches one of its parts only when told to."""

    def __init__(self, bare: bool) -> None:
        super().__init__()
        self.early, self.late, self.on = plain_encoder(False), nn.Linear(2, 2), False
        self.scale = nn.Parameter(torch.rand(2)) if bare else 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.early(x) * self.scale
        return self.late(h) if self.on else h  # type: ignore[no-any-return]


@pytest.mark.parametrize("bare", [False, True])
def test_a_layer_that_is_reached_late_is_probed_then(bare: bool) -> None:
    model = Late(bare).double()
    passes, capture = counted(model), attach(model)
    x = torch.randn(T, B, 3, dtype=torch.float64)
    for _ in range(2):
        model(x).sum().backward()
    model.on = True
    expected = one_by_one(copy.deepcopy(model), x, x[..., :2], 1)
    model.zero_grad()
    capture.clear()
    squares(model, x, x[..., :2]).backward()
    assert_moments(capture, expected)
    probed = len(passes)
    model(x)
    assert len(passes) == probed + 1


def test_new_parameters_are_probed() -> None:
    model = plain_encoder(False).double()
    named = dict(model.named_parameters())
    capture = Capture(model, {name: named[name] for name in ("0.weight", "0.bias")}, elementwise=True)
    x = torch.randn(T, B, 3, dtype=torch.float64)
    model(x).sum().backward()
    capture.add({name: p for name, p in named.items() if not name.startswith("0.")})
    model.zero_grad()
    capture.clear()
    expected = one_by_one(copy.deepcopy(model), x, x[..., :2], 1)
    squares(model, x, x[..., :2]).backward()
    assert_moments(capture, expected)


class Hooked(nn.Module):
    """Puts a hook on its part in its first pass, as transformers does for hidden states, and keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.seen, self.hooked = nn.Linear(4, 3), [], False
        self.alias = self.seen  # of one list

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        if not self.hooked:
            self.part.register_forward_hook(lambda *_: self.seen.append("hook"))
            self.hooked = True
        if cache is not None:
            cache.append(x)
        y: Tensor = self.part(x) * len(self.alias)
        return y


def test_what_the_probe_adds_to_a_model_is_gone() -> None:
    plain, model = Hooked(), Hooked()
    model.load_state_dict(plain.state_dict())
    attach(model)
    x = torch.randn(5, 4)
    for _ in range(2):
        assert torch.equal(plain(x), model(x))
    assert model.seen is model.alias
    assert len(model.seen) == len(plain.seen) == 2
    assert len(model.part._forward_hooks) == 1


class Cache:
    """What a user's loop gives a model to fill."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def append(self, key: Tensor) -> None:
        self.keys.append(key)


def test_a_cache_that_is_passed_in_is_filled_once() -> None:
    model, cache = Hooked(), Cache()
    attach(model)
    model(torch.randn(5, 4), cache)
    assert len(cache.keys) == 1


WHOLE = Cache()  # which `forward` knows by its identity


class ByIdentity(nn.Module):
    """Time comes first where it is told so, by an object."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, how: Any) -> Tensor:
        if how is not WHOLE:
            raise TypeError("not known")
        y: Tensor = self.layer(x.transpose(0, 1)).transpose(0, 1)
        return y


@pytest.mark.filterwarnings("error")
def test_objects_that_are_passed_in_stay_what_they_are() -> None:
    model = ByIdentity()
    capture = attach(model)
    model(torch.randn(5, 6, 4), WHOLE).square().mean().backward()
    assert capture.samples("layer.weight") == 5


class Walked(nn.Module):
    """Goes through what it keeps, and reaches a layer on the way that the first probe did not."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.late, self.open = nn.Linear(4, 4), nn.Linear(4, 4), False
        self.order = OrderedDict((str(number), number) for number in range(4))
        del self.order["1"]

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order.values():
            x = (self.late if self.open and number == 2 else self.body)(x) + number
        return x


def test_a_probe_on_the_way_leaves_what_the_pass_goes_through() -> None:
    plain, model = Walked(), Walked()
    model.load_state_dict(plain.state_dict())
    capture = attach(model)
    x = torch.randn(5, 4)
    for plain.open in (False, True):
        model.open = plain.open
        assert torch.equal(plain(x), model(x))
    capture.detach()


def test_the_error_comes_with_every_pass() -> None:
    model = Crossed()
    attach(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="layer 'layer'"):
            model(torch.randn(B, T, E))


def test_a_doubt_is_a_warning_after_the_pass() -> None:
    model = Contrast(nn.Linear(3, E))
    attach(model)
    x = torch.randn(B, T, 3)
    with pytest.warns(UserWarning, match="'after'"):
        model(x)
    model(x)  # but not again


def test_a_model_that_cannot_be_probed_is_not_asked_again() -> None:
    class Training(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            assert torch.is_grad_enabled(), "trains only"
            result: Tensor = self.layers(x)
            return result

    model = Training()
    passes, capture = counted(model), attach(model)
    with pytest.warns(UserWarning, match="first axis.*trains only"):
        model(torch.randn(B, 3)).sum().backward()
    model(torch.randn(B, 3)).sum().backward()
    assert len(passes) == 3
    assert capture.samples("layers.0.weight") == 2 * B


def test_a_pass_that_fails_does_so_without_a_warning() -> None:
    model = convolutions()
    attach(model)
    with pytest.raises(RuntimeError, match="channels"):
        model(torch.randn(B, 5, 6, 6))


# The model stays what it is.


def cloned(model: nn.Module) -> list[nn.Module]:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]


@pytest.mark.parametrize("model_of", [convolutions, lambda: Scaled(batch_first=True)], ids=["plain", "bare"])
@pytest.mark.parametrize("passes", [0, 1])
def test_copies_are_plain(model_of: Callable[[], nn.Module], passes: int) -> None:
    model = model_of()
    types = [type(module) for module in model.modules()]
    keys = [set(vars(module)) for module in model.modules()]
    x = torch.randn(B, 2, 6, 6) if isinstance(model, nn.Sequential) else torch.randn(B, T, E)
    capture = attach(model)
    for _ in range(passes):
        model(x).sum().backward()
    for clone in cloned(model):
        assert [type(module) for module in clone.modules()] == types
        assert [set(vars(module)) for module in clone.modules()] == keys
        clone(x).sum().backward()
    capture.detach()
    assert [type(module) for module in model.modules()] == types
    assert [set(vars(module)) for module in model.modules()] == keys


def test_the_signature_of_forward_stays() -> None:
    """Trainers look at it to find which columns of a data set the model takes."""
    model = Transformer(batch_first=True)
    attach(model)
    assert list(inspect.signature(model.forward).parameters) == ["x"]


def test_two_optimizers_may_share_a_model() -> None:
    model = plain_encoder(False).double()
    named = dict(model.named_parameters())
    first = Capture(model, {n: p for n, p in named.items() if n.startswith("0.")}, elementwise=True)
    second = Capture(model, {n: p for n, p in named.items() if not n.startswith("0.")}, elementwise=True)
    x = torch.randn(T, B, 3, dtype=torch.float64)
    expected = one_by_one(copy.deepcopy(model), x, x[..., :2], 1)
    squares(model, x, x[..., :2]).backward()
    assert_moments(first, {n: c for n, c in expected.items() if n.startswith("0.")})
    assert_moments(second, {n: c for n, c in expected.items() if not n.startswith("0.")})
    first.detach()
    second.detach()
    assert type(model) is nn.Sequential


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside_the_model(reentrant: bool) -> None:
    class Saved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block, self.last = nn.Linear(3, E), Attention(batch_first=False), nn.Linear(E, 2)
            self.saves = False

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            h = checkpoint(self.block, h, use_reentrant=reentrant) if self.saves else self.block(h)
            result: Tensor = self.last(h)
            return result

    model = Saved().double()
    x = torch.randn(T, B, 3, dtype=torch.float64)
    expected = one_by_one(copy.deepcopy(model), x, x[..., :2], 1)
    capture, model.saves = attach(model), True
    squares(model, x, x[..., :2]).backward()
    assert_moments(capture, expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo, tracing any Function
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo, where a graph ends
def test_a_compiled_model_uses_what_an_eager_pass_found() -> None:
    model = Flat().double()
    capture = attach(model)
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(T, B, E, dtype=torch.float64)
    with torch.compiler.set_stance("force_eager"):
        compiled(x)
    for b in (B, B + 1):
        x = torch.randn(T, b, E, dtype=torch.float64)
        y = torch.randn(T, b, 3, dtype=torch.float64)
        expected = one_by_one(copy.deepcopy(model), x, y, 1)
        model.zero_grad()
        capture.clear()
        squares(compiled, x, y).backward()
        assert_moments(capture, expected)


def test_a_replica_of_the_model_runs() -> None:
    """As DataParallel makes them: other objects with the same attributes."""
    model = nn.Sequential(nn.Linear(E, E), nn.Tanh(), nn.Linear(E, 2))
    AutoSGD(model)
    x = torch.randn(B, E)
    torch.testing.assert_close(model._replicate_for_data_parallel()(x), model(x))


def test_an_optimizer_may_be_detached_while_the_model_runs() -> None:
    class Detaching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(E, 2)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                optimizer.detach()
            result: Tensor = self.inner(x)
            return result

    model = Detaching().eval()
    optimizer = AutoSGD(model)
    x = torch.randn(B, E)
    expected = model(x)
    torch.testing.assert_close(model.train()(x), expected)
