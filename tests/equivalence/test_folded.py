"""Recurrent layers and attention that are given several rows of each sample: words of a text, windows of an image."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from autoopt import AutoAdam, AutoSGD
from autoopt.capture import Capture
from autoopt.capture.sampled import ROOM
from equivalence.by_sample import assert_exact, contributions
from equivalence.cases import assert_close

N, PARTS, TIMES, E = 5, 3, 4, 6
LAYERS: dict[str, Callable[[bool], nn.Module]] = {
    "LSTM": lambda first: nn.LSTM(E, E, batch_first=first),
    "projected": lambda first: nn.LSTM(E, 8, proj_size=E, batch_first=first),
    "GRU": lambda first: nn.GRU(E, E, batch_first=first),
    "RNN": lambda first: nn.RNN(E, E, batch_first=first),
    "two-layers-both-ways": lambda first: nn.GRU(E, E // 2, num_layers=2, bidirectional=True, batch_first=first),
    "attention": lambda first: nn.MultiheadAttention(E, 2, batch_first=first),
    "attention-bias": lambda first: nn.MultiheadAttention(E, 2, add_bias_kv=True, batch_first=first),
    "attention-separate": lambda first: nn.MultiheadAttention(E, 2, kdim=E, vdim=E, batch_first=first),
    "encoder": lambda first: nn.TransformerEncoderLayer(E, 2, 8, 0.0, batch_first=first),
}
CELLS: list[type[nn.RNNCellBase]] = [nn.LSTMCell, nn.GRUCell, nn.RNNCell]
every_layer = pytest.mark.parametrize("kind", list(LAYERS))
both_moments = pytest.mark.parametrize("elementwise", [True, False], ids=["elementwise", "total"])


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def texts() -> Tensor:
    return randn(N, PARTS, TIMES, E)


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def losses(x: Tensor) -> Callable[[Any], Tensor]:
    return lambda m: m(x).square().flatten(1).sum(1)


class Words(nn.Module):
    """Reads the parts of each sample apart: (samples · parts, times, features), in one order or another.

    With `scale` it has a parameter that belongs to no layer, so that it is watched.
    """

    def __init__(self, layer: nn.Module, how: str = "batch-first", scale: bool = False) -> None:
        super().__init__()
        self.layer, self.how, self.head = layer, how, nn.Linear(E, 2)
        self.scale = nn.Parameter(torch.rand(E)) if scale else 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        rows = (x.transpose(0, 1) if self.how == "strided" else x).flatten(0, 1)
        outputs = self.read(rows.transpose(0, 1)).transpose(0, 1) if self.how == "time-first" else self.read(rows)
        result: Tensor = self.head(outputs.mean(1))
        return result.unflatten(0, (-1, len(x))).transpose(0, 1) if self.how == "strided" else result.view(len(x), -1)

    def read(self, rows: Tensor) -> Tensor:
        if isinstance(self.layer, nn.MultiheadAttention):
            return first(self.layer(rows, rows.flip(-1), rows))
        return first(self.layer(rows))


@both_moments
@pytest.mark.parametrize("scale", [False, True], ids=["layers", "bare"])
@pytest.mark.parametrize("how", ["batch-first", "time-first", "strided"])
@every_layer
def test_what_a_sample_adds_by_all_of_its_rows_is_summed(kind: str, how: str, scale: bool, elementwise: bool) -> None:
    model = Words(LAYERS[kind](how != "time-first"), how, scale).double()
    assert_exact(model, losses(texts()), elementwise)


@both_moments
@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_as_a_gate(cell: type[nn.RNNCellBase], elementwise: bool) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = cell(E, E), nn.Linear(E, 2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(first(self.cell(x.flatten(0, 2))))
            return result.view(len(x), -1)

    assert_exact(Gated().double(), losses(texts()), elementwise)


@pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
@pytest.mark.parametrize("kind", ["LSTM", "encoder"])
def test_optimizers_see_the_spread_of_samples(kind: str, make: Callable[..., Any]) -> None:
    model, x = Words(LAYERS[kind](True)).double(), texts()
    expected = contributions(model, losses(x))
    optimizer = make(model, exact=True)
    losses(x)(model).mean().backward()
    for name, c in expected.items():
        square = c.square().sum(0) if make is AutoAdam else c.square().sum()
        assert_close(optimizer._now.source.second_moment(name), square, 1e-10, name)
    optimizer.step()
    assert all(0 <= chosen.noise < float("inf") for chosen in optimizer.tuned().values())


@pytest.mark.parametrize("kind", ["LSTM", "attention"])
def test_later_passes_may_have_other_numbers(kind: str) -> None:
    model = Words(LAYERS[kind](True)).double()
    capture = Capture(model, dict(model.named_parameters()), elementwise=True)
    for samples, parts in ((N, PARTS), (N + 1, PARTS + 1), (N, 1), (PARTS, PARTS), (1, PARTS)):
        x = randn(samples, parts, TIMES, E)
        expected = contributions(model, losses(x))
        model.zero_grad()
        losses(x)(model).mean().backward()
        for name, c in expected.items():
            assert_close(capture.second_moment(name), c.square().sum(0), 1e-10, name)
            assert capture.samples(name) == samples
        capture.clear()


class Levels(Words):
    """One layer reads words, then the text that they are."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        words = self.read(x.flatten(0, 1)).mean(1).unflatten(0, (len(x), -1))
        result: Tensor = self.head(self.read(words).mean(1))
        return result


@both_moments
@pytest.mark.parametrize("scale", [False, True], ids=["layers", "bare"])
@pytest.mark.parametrize("kind", ["LSTM", "attention"])
def test_several_numbers_of_rows_in_one_pass(kind: str, scale: bool, elementwise: bool) -> None:
    assert_exact(Levels(LAYERS[kind](True), scale=scale).double(), losses(texts()), elementwise)


class Dead(Words):
    """Nothing reaches the layer at first, so that no change of a sample shows there."""

    def __init__(self, layer: nn.Module, both: bool) -> None:
        super().__init__(layer)
        self.before, self.both = nn.Linear(E, E), both
        nn.init.zeros_(self.before.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        result = super().forward(x)
        return result + self.head(self.read(x[:, 0]).mean(1)).repeat(1, PARTS) if self.both else result


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "attention"])
def test_rows_of_which_none_moves_are_followed(kind: str, both: bool) -> None:
    assert_exact(Dead(LAYERS[kind](True), both).double(), losses(texts()), True, passes=2)


def test_space_and_time() -> None:
    class Video(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time, self.space = LAYERS["encoder"](True), LAYERS["encoder"](True)
            self.places, self.head = nn.Parameter(torch.randn(TIMES, E)), nn.Linear(E, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = (x + self.places).transpose(1, 2)
            x = self.time(x.flatten(0, 1)).view_as(x).transpose(1, 2)
            x = self.space(x.flatten(0, 1)).view_as(x)
            result: Tensor = self.head(x.mean((1, 2)))
            return result

    assert_exact(Video().double(), losses(texts()), True)


def test_tied_and_computed_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.text = nn.LSTM(E, E, batch_first=True), nn.LSTM(E, E, batch_first=True)
            self.head = nn.Linear(E, 2)
            self.text.weight_ih_l0 = self.words.weight_ih_l0

        def forward(self, x: Tensor) -> Tensor:
            words = first(self.words(x.flatten(0, 1)))[:, -1].unflatten(0, (len(x), -1))
            result: Tensor = self.head(first(self.text(words))[:, -1])
            return result

    assert_exact(Tied().double(), losses(texts()), True)
    model = Words(LAYERS["LSTM"](True)).double()
    parametrizations.weight_norm(model.layer, "weight_hh_l0")
    assert_exact(model, losses(texts()), True)


def test_a_layer_that_is_reached_late() -> None:
    class Late(Words):
        on = False

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.on else self.head(x.mean((1, 2)))

    model, x = Late(LAYERS["LSTM"](True)).double(), texts()
    capture = Capture(model, dict(model.named_parameters()), elementwise=True)
    losses(x)(model).mean().backward()
    model.on = True
    expected = contributions(model, losses(x))
    model.zero_grad()
    capture.clear()
    losses(x)(model).mean().backward()
    for name, c in expected.items():
        assert_close(capture.second_moment(name), c.square().sum(0), 1e-10, name)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    class Saved(Words):
        def read(self, rows: Tensor) -> Tensor:
            saves = torch.is_grad_enabled() and self.how == "saved"
            return checkpoint(super().read, rows, use_reentrant=reentrant) if saves else super().read(rows)

    model, x = Saved(LAYERS["LSTM"](True)).double(), texts().requires_grad_()
    expected = contributions(model, losses(x))
    capture, model.how = Capture(model, dict(model.named_parameters()), elementwise=True), "saved"
    losses(x)(model).mean().backward()
    for name, c in expected.items():
        assert_close(capture.second_moment(name), c.square().sum(0), 1e-10, name)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo, tracing any Function
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo, where a graph ends
def test_a_compiled_model_uses_what_an_eager_pass_found() -> None:
    model = Words(LAYERS["LSTM"](True)).double()
    capture = Capture(model, dict(model.named_parameters()), elementwise=True)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.compiler.set_stance("force_eager"):
        compiled(texts())
    x = texts()
    expected = contributions(model, losses(x))
    compiled(x).square().flatten(1).sum(1).mean().backward()
    for name, c in expected.items():
        assert_close(capture.second_moment(name), c.square().sum(0), 1e-10, name)


def test_one_sample_is_looked_at_with_all_of_its_rows() -> None:
    """In a large layer, as anywhere: the one in the middle stands for all."""
    model, x = Words(nn.LSTM(E, 600, proj_size=E, batch_first=True)).double(), texts()
    expected = contributions(model, losses(x))
    capture = Capture(model, dict(model.named_parameters()), elementwise=True)
    capture.exact = False
    losses(x)(model).mean().backward()
    for name in ("layer.weight_ih_l0", "layer.weight_hh_l0"):
        c = expected[name]
        assert N * c[0].numel() > ROOM
        assert_close(capture.second_moment(name), N * c[N // 2].square(), 1e-10, name)


# What recurrent layers give beside their output.


@both_moments
@pytest.mark.parametrize("samples", [2, N])
def test_a_bare_parameter_behind_the_last_state(samples: int, elementwise: bool) -> None:
    """Which has as many levels as there are samples in one of the cases."""

    class State(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = (
                nn.GRU(E, E, bidirectional=True, batch_first=True),
                nn.Parameter(torch.rand(2, 1, E)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x)[1] * self.scale).transpose(0, 1)

    assert_exact(State().double(), losses(randn(samples, TIMES, E)), elementwise)


# Sequences that are packed inside of the model.


class Packs(nn.Module):
    """`sorts`: who sorts the sequences by their lengths, the model or torch; or they come sorted."""

    def __init__(self, sorts: str, scale: bool = False, twice: bool = False) -> None:
        super().__init__()
        self.layer, self.head, self.sorts, self.twice = nn.LSTM(E, E, batch_first=True), nn.Linear(E, 2), sorts, twice
        self.scale = nn.Parameter(torch.rand(E)) if scale else 1.0

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = x * self.scale
        read = self.read(x, lengths)
        return self.head(read + self.layer(x)[0].sum(1) if self.twice else read)  # type: ignore[no-any-return]

    def read(self, x: Tensor, lengths: Tensor) -> Tensor:
        order = lengths.argsort(descending=True, stable=True) if self.sorts == "model" else None
        x, lengths = (x, lengths) if order is None else (x[order], lengths[order])
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.sorts != "torch")
        y = pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0].sum(1)
        return y if order is None else y[order.argsort()]


def lengths_for(sorts: str) -> Tensor:
    return torch.tensor([4, 3, 3, 2, 1] if sorts == "nobody" else [2, 4, 1, 3, 3])


@both_moments
@pytest.mark.parametrize("scale", [False, True], ids=["layers", "bare"])
@pytest.mark.parametrize("sorts", ["nobody", "model", "torch"])
def test_packed_sequences(sorts: str, scale: bool, elementwise: bool) -> None:
    x, lengths = randn(N, TIMES, E), lengths_for(sorts)
    assert_exact(Packs(sorts, scale).double(), lambda m: m(x, lengths).square().sum(1), elementwise)


@both_moments
def test_packed_sequences_of_a_layer_that_is_used_twice(elementwise: bool) -> None:
    x, lengths = randn(N, TIMES, E), lengths_for("torch")
    assert_exact(Packs("torch", twice=True).double(), lambda m: m(x, lengths).square().sum(1), elementwise)


@pytest.mark.parametrize("sorts", ["nobody", "model"])
def test_an_order_that_may_be_another_one_is_refused(sorts: str) -> None:
    model = Packs(sorts, twice=True)
    Capture(model, dict(model.named_parameters()), elementwise=True)
    loss = model(torch.randn(N, TIMES, E), lengths_for(sorts)).sum()
    with pytest.raises(RuntimeError, match=r"layer 'layer' \(LSTM\) .*PackedSequence.*enforce_sorted=False.*padded"):
        loss.backward()


class Spelled(Packs):
    """Words of a text that are packed, all in one."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        words = self.read((x * self.scale).flatten(0, 1), lengths.flatten())
        result: Tensor = self.head(words.unflatten(0, (len(x), -1)).mean(1))
        return result


@both_moments
@pytest.mark.parametrize("scale", [False, True], ids=["layers", "bare"])
def test_packed_words(scale: bool, elementwise: bool) -> None:
    x, lengths = texts(), torch.randint(1, TIMES + 1, (N, PARTS))
    assert_exact(Spelled("torch", scale).double(), lambda m: m(x, lengths).square().sum(1), elementwise)


@pytest.mark.parametrize("same", [False, True], ids=["several-lengths", "one-length"])
@pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
def test_packed_words_that_the_model_sorts_are_refused(make: Callable[..., Any], same: bool) -> None:
    """Also where they stay in their places for once."""
    model, x = Spelled("model"), torch.randn(N, PARTS, TIMES, E)
    lengths = torch.full((N, PARTS), TIMES) if same else torch.randint(1, TIMES + 1, (N, PARTS))
    plain, optimizer = copy.deepcopy(model), make(model)
    with pytest.raises(RuntimeError, match=r"layer 'layer' \(LSTM\) .*PackedSequence.*enforce_sorted=False.*padded"):
        model(x, lengths)
    optimizer.detach()
    optimizer = make(plain, spread="passes")  # one of the ways out that it names
    for half in (slice(0, 2), slice(2, N)):
        plain(x[half], lengths[half]).square().sum().backward()
    optimizer.step()


def test_an_order_of_the_models_own_is_refused() -> None:
    """Nobody can tell that it is another one from how the sequences are packed."""

    class Shuffled(Packs):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            order = torch.tensor([3, 1, 0, 4, 2])
            result: Tensor = self.head(self.read(x, lengths) + self.read(x[order], lengths)[order.argsort()])
            return result

    model = Shuffled("torch")
    Capture(model, dict(model.named_parameters()), elementwise=True)
    loss = model(torch.randn(N, TIMES, E), lengths_for("torch")).sum()
    with pytest.raises(RuntimeError, match=r"layer 'layer' \(LSTM\) .*PackedSequence.*enforce_sorted=False.*padded"):
        loss.backward()
