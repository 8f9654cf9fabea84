"""Recurrent layers and cells: exact second moments of every parameter, outputs and gradients of the plain layer."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from autoopt.capture import Capture
from equivalence.by_sample import assert_exact, contributions
from equivalence.cases import assert_close

N, TIMES, INPUTS, HIDDEN = 5, 4, 3, 6
LAYERS: dict[str, Callable[..., nn.RNNBase]] = {
    "LSTM": nn.LSTM,
    "projected": lambda *sizes, **options: nn.LSTM(*sizes, proj_size=2, **options),
    "GRU": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
CELLS: dict[str, Callable[..., nn.RNNCellBase]] = {
    "LSTM": nn.LSTMCell,
    "GRU": nn.GRUCell,
    "tanh": nn.RNNCell,
    "relu": lambda *sizes, **options: nn.RNNCell(*sizes, nonlinearity="relu", **options),
}
every_layer = pytest.mark.parametrize("kind", list(LAYERS))
every_cell = pytest.mark.parametrize("kind", list(CELLS))
both_moments = pytest.mark.parametrize("elementwise", [True, False], ids=["elementwise", "total"])


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Reader(nn.Module):
    """A recurrent layer, and weights of its outputs and last states that make a loss of each sample."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer.double()
        self.features = (layer.proj_size or layer.hidden_size) * (2 if layer.bidirectional else 1)

    def forward(self, x: Any, hx: Any = None) -> Tensor:
        output, last = self.layer(x, hx)
        parts = [part.transpose(0, 1) for part in (last if isinstance(last, tuple) else (last,))]
        if isinstance(output, Tensor):
            parts.append(output if self.layer.batch_first else output.transpose(0, 1))
        else:
            parts.append(pad_packed_sequence(output, batch_first=True)[0])
        losses = [(part * torch.linspace(-1, 1, part[0].numel()).view_as(part[0])).flatten(1).sum(1) for part in parts]
        return torch.stack(losses).sum(0).square()


def state(layer: nn.RNNBase) -> Any:
    levels = layer.num_layers * (2 if layer.bidirectional else 1)
    h = randn(levels, N, layer.proj_size or HIDDEN)
    return (h, randn(levels, N, HIDDEN)) if layer.mode == "LSTM" else h


@both_moments
@pytest.mark.parametrize("given", [False, True], ids=["zeros", "hx"])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"num_layers": 2}, {"bidirectional": True}, {"num_layers": 2, "bidirectional": True}],
    ids=["plain", "no-bias", "two-layers", "both-ways", "two-layers-both-ways"],
)
@every_layer
def test_layers(kind: str, options: dict[str, Any], batch_first: bool, given: bool, elementwise: bool) -> None:
    model = Reader(LAYERS[kind](INPUTS, HIDDEN, batch_first=batch_first, **options))
    x = randn(N, TIMES, INPUTS) if batch_first else randn(TIMES, N, INPUTS)
    hx = state(model.layer) if given else None
    assert_exact(model, lambda m: m(x, hx), elementwise)


@both_moments
@every_layer
def test_dropout_between_layers(kind: str, elementwise: bool) -> None:
    model = Reader(LAYERS[kind](INPUTS, HIDDEN, num_layers=3, dropout=0.4))
    x = randn(TIMES, N, INPUTS)
    assert_exact(model, lambda m: m(x), elementwise)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.filterwarnings("ignore:the first axis of every layer")  # what is packed cannot be probed: said, and right
@both_moments
@pytest.mark.parametrize("given", [False, True], ids=["zeros", "hx"])
@pytest.mark.parametrize("ordered", [False, True])
@every_layer
def test_packed_sequences(kind: str, ordered: bool, given: bool, elementwise: bool) -> None:
    model = Reader(LAYERS[kind](INPUTS, HIDDEN, num_layers=2, bidirectional=True))
    lengths = torch.tensor([4, 3, 3, 2, 1] if ordered else [2, 4, 1, 3, 3])
    x, hx = randn(TIMES, N, INPUTS), state(model.layer) if given else None
    assert_exact(model, lambda m: m(pack_padded_sequence(x, lengths, enforce_sorted=ordered), hx), elementwise)


@every_layer
def test_a_packed_result_is_packed_as_the_input(kind: str) -> None:
    layer = LAYERS[kind](INPUTS, HIDDEN).double()
    packed = pack_padded_sequence(randn(TIMES, N, INPUTS), torch.tensor([3, 4, 3, 1, 3]), enforce_sorted=False)
    with torch.no_grad():
        expected, _ = layer(packed)
    Capture(layer, dict(layer.named_parameters()), elementwise=True)
    output, _ = layer(packed)
    assert type(output) is type(expected)
    for a, b in zip(output, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("given", [False, True], ids=["zeros", "hx"])
@every_layer
def test_input_without_a_batch_axis_is_one_sample(kind: str, given: bool) -> None:
    layer = LAYERS[kind](INPUTS, HIDDEN, bidirectional=True).double()
    x = randn(TIMES, INPUTS)
    hx = None
    if given:
        full = state(layer)
        hx = tuple(part[:, 0] for part in full) if layer.mode == "LSTM" else full[:, 0]
    with torch.no_grad():
        expected, last = layer(x, hx)
    capture = Capture(layer, dict(layer.named_parameters()), elementwise=True)
    output, ends = layer(x, hx)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(ends, last)
    output.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(capture.second_moment(name), parameter.grad.square())
        assert capture.samples(name) == 1


@every_layer
def test_gradients_of_input_and_first_state(kind: str) -> None:
    plain = Reader(LAYERS[kind](INPUTS, HIDDEN, num_layers=2, bidirectional=True, batch_first=True))
    model = copy.deepcopy(plain)
    Capture(model, dict(model.named_parameters()), elementwise=True)
    x, hx = randn(N, TIMES, INPUTS), state(plain.layer)
    found = []
    for m in (plain, model):
        leaves = [part.clone().requires_grad_() for part in (x, *(hx if isinstance(hx, tuple) else (hx,)))]
        first, *rest = leaves
        m(first, tuple(rest) if isinstance(hx, tuple) else rest[0]).mean().backward()
        found.append([leaf.grad for leaf in leaves])
    for a, b in zip(*found, strict=True):
        assert_close(a, b, 1e-11, "gradient")


@both_moments
@every_layer
def test_a_layer_used_twice(kind: str, elementwise: bool) -> None:
    model = Reader(LAYERS[kind](INPUTS, HIDDEN))
    x, z = randn(TIMES, N, INPUTS), randn(TIMES - 1, N, INPUTS)
    assert_exact(model, lambda m: m(x) + m(z).sqrt(), elementwise)


class Loop(nn.Module):
    """A cell in a user's own loop, which also feeds on what it said."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell = cell.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden: Any = None
        for step in x.unbind(1):
            hidden = self.cell(step, hidden)
        return torch.cat(hidden, 1) if isinstance(hidden, tuple) else hidden


@both_moments
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("times", [1, TIMES])
@every_cell
def test_cells(kind: str, times: int, bias: bool, elementwise: bool) -> None:
    model = Loop(CELLS[kind](INPUTS, HIDDEN, bias=bias))
    x = randn(N, times, INPUTS)
    assert_exact(model, lambda m: m(x).square().sum(1), elementwise)


@every_cell
def test_a_cell_without_a_batch_axis(kind: str) -> None:
    cell = CELLS[kind](INPUTS, HIDDEN).double()
    x, h = randn(INPUTS), randn(HIDDEN)
    hx = (h, h) if kind == "LSTM" else h
    with torch.no_grad():
        expected = cell(x, hx)
    capture = Capture(cell, dict(cell.named_parameters()), elementwise=True)
    output = cell(x, hx)
    torch.testing.assert_close(output, expected)
    (output[0] if kind == "LSTM" else output).square().sum().backward()
    for name, parameter in cell.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(capture.second_moment(name), parameter.grad.square())


@every_cell
def test_wrong_input_raises_what_the_cell_raises(kind: str) -> None:
    cell = CELLS[kind](INPUTS, HIDDEN).double()
    bad = [(randn(N, INPUTS + 1), randn(N, HIDDEN)), (randn(N, INPUTS), randn(1, HIDDEN)), (randn(N, 1, INPUTS), None)]
    said = []
    for _ in range(2):
        for x, h in bad:
            with pytest.raises((ValueError, RuntimeError)) as error:
                cell(x, (h, h) if kind == "LSTM" and h is not None else h)
            said.append(str(error.value))
        Capture(cell, dict(cell.named_parameters()), elementwise=True)
    assert said[1:3] == said[4:]


# What any layer can do.


def lstm_model() -> Reader:
    return Reader(nn.LSTM(INPUTS, HIDDEN, num_layers=2, batch_first=True))


def test_accumulation_and_clearing() -> None:
    model = lstm_model()
    x = randn(N, TIMES, INPUTS)
    capture = assert_exact(model, lambda m: m(x), True, passes=3)
    capture.clear()
    assert capture.second_moment("layer.weight_ih_l0") is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    model = lstm_model()
    x = randn(N, TIMES, INPUTS).requires_grad_()
    expected = contributions(model, lambda m: m(x))
    capture = Capture(model, dict(model.named_parameters()), elementwise=True)
    checkpoint(model, x, use_reentrant=reentrant).mean().backward()
    for name, c in expected.items():
        assert_close(capture.second_moment(name), c.square().sum(0), 1e-10, name)
        assert capture.samples(name) == N


def test_frozen_parameters() -> None:
    model = lstm_model()
    model.layer.weight_hh_l0.requires_grad_(False)
    x = randn(N, TIMES, INPUTS)
    assert_exact(model, lambda m: m(x), True)
    assert model.layer.weight_hh_l0.grad is None


def test_an_output_changed_in_place() -> None:
    plain = nn.LSTM(INPUTS, HIDDEN, batch_first=True).double()
    x = randn(N, TIMES, INPUTS)
    assert_exact(plain, lambda m: F.relu(m(x)[0], inplace=True).flatten(1).sum(1), True)


def test_a_parametrized_weight() -> None:
    model = lstm_model()
    parametrizations.weight_norm(model.layer, "weight_hh_l0")
    x = randn(N, TIMES, INPUTS)
    assert_exact(model, lambda m: m(x), True)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_autocast(kind: str) -> None:
    """Half precision within the layer; squares are taken in float32."""
    model = LAYERS[kind](8, 16, batch_first=True)
    x = torch.randn(N, 6, 8)
    losses: Callable[[Any], Tensor] = lambda m: m(x.to(m.weight_ih_l0.dtype))[0].float().square().flatten(1).mean(1)  # noqa: E731
    expected = contributions(copy.deepcopy(model).double(), losses)
    capture = Capture(model, dict(model.named_parameters()), elementwise=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = losses(model).mean()
    loss.backward()
    for name, c in expected.items():
        moment = capture.second_moment(name)
        assert moment is not None
        assert moment.dtype == torch.float32
        assert_close(moment, c.square().sum(0), 0.05, name)
        assert_close(model.get_parameter(name).grad, c.sum(0), 0.05, name)


@pytest.mark.parametrize("clone_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_plain_and_detaching_restores(clone_of: Callable[[nn.Module], nn.Module]) -> None:
    model, x = lstm_model(), randn(N, TIMES, INPUTS)
    before = model(x)
    capture = Capture(model, dict(model.named_parameters()), elementwise=True)
    clone = clone_of(model)
    assert type(clone.layer) is nn.LSTM
    torch.testing.assert_close(clone(x), before)
    assert isinstance(model.layer, nn.LSTM)
    capture.detach()
    assert type(model.layer) is nn.LSTM
    assert sorted(model.layer.__dict__) == sorted(lstm_model().layer.__dict__)
    torch.testing.assert_close(model(x), before)


@every_layer
def test_wrong_input_raises_what_the_layer_raises(kind: str) -> None:
    layer = LAYERS[kind](INPUTS, HIDDEN).double()
    bad = [(randn(2, 3, 4, INPUTS), None), (randn(TIMES, N, INPUTS + 1), None), (randn(TIMES, INPUTS), state(layer))]
    said = []
    for _ in range(2):
        for x, hx in bad:
            with pytest.raises((ValueError, RuntimeError)) as error:
                layer(x, hx)
            said.append(str(error.value))
        Capture(layer, dict(layer.named_parameters()), elementwise=True)
    assert said[:3] == said[3:]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo, tracing any Function
def test_a_compiled_model_runs_the_layer_between_graphs() -> None:
    model, x = lstm_model(), randn(N, TIMES, INPUTS)
    expected = contributions(model, lambda m: m(x))
    capture = Capture(model, dict(model.named_parameters()), elementwise=True)
    torch.compile(model, backend="aot_eager")(x).mean().backward()
    for name, c in expected.items():
        assert_close(capture.second_moment(name), c.square().sum(0), 1e-10, name)
