"""The axis of the samples is found in every layer, without a trace; where it cannot be, the layer is named."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt.capture.answer import Found, Layout
from autoopt.capture.probe import probe
from autoopt.moments import prepare_for
from equivalence.axes import (
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
    encoder,
    randn,
    tokens,
)  # fmt: skip

FIRST, SECOND = Layout(0), Layout(1)


def covered(model: nn.Module) -> dict[str, nn.Module]:
    layers = {name: layer for name, layer in model.named_modules() if prepare_for(type(layer)) is not None}
    return {name: layer for name, layer in layers.items() if any(True for _ in layer.parameters(recurse=False))}


def found(model: nn.Module, *args: Any, **kwargs: Any) -> Found:
    return probe(model, args, kwargs, covered(model))


def layouts(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Layout | None]:
    result = found(model, *args, **kwargs)
    assert result.doubt is None
    return result.layouts


@dataclass(frozen=True)
class Case:
    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    everywhere: Layout | None
    but: dict[str, Layout | None] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


batch_first, time_first = (functools.partial(Transformer, batch_first=first) for first in (True, False))
SHARED: dict[str, Layout | None] = {"positions": None}  # the same for all samples

CASES = [
    Case("mlp", lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), lambda: (randn(B, 3),), FIRST),
    Case("cnn", convolutions, lambda: (randn(B, 2, 6, 6),), FIRST),
    Case("batch-first", batch_first, lambda: (tokens(B, T),), FIRST, SHARED),
    Case("batch-first-square", batch_first, lambda: (tokens(T, T),), FIRST, SHARED),
    Case("batch-first-one", batch_first, lambda: (tokens(1, T),), FIRST, SHARED),
    Case("time-first", time_first, lambda: (tokens(T, B),), SECOND, SHARED),
    Case("time-first-one", time_first, lambda: (tokens(T, 1),), SECOND, SHARED),
    Case("time-first-two", time_first, lambda: (tokens(T, 2),), SECOND, SHARED),
    Case("encoder-batch-first", lambda: encoder(True), lambda: (randn(B, T, 3),), FIRST),
    Case("encoder-time-first", lambda: encoder(False), lambda: (randn(T, B, 3),), SECOND),
    Case("encoder-time-first-square", lambda: encoder(False), lambda: (randn(T, T, 3),), SECOND),
    Case("loop", Loop, lambda: (tokens(T, B),), SECOND, {"step": FIRST}),
    Case("mixer", Mixer, lambda: (randn(B, T, E),), FIRST),
    Case(
        "windows", Windows, lambda: (randn(B, T, E),), Layout(0, 2), {"before": FIRST, "after": FIRST},
    ),
    Case("frames", Frames, lambda: (randn(B, 5, 2, 6, 6),), Layout(0, 5), {"head": FIRST}),
    Case("flat", Flat, lambda: (randn(T, B, E),), SECOND, {"head": Layout(0, T, True)}),
    Case("zeros", convolutions, lambda: (torch.zeros(B, 2, 6, 6),), FIRST),
    Case("identical", lambda: encoder(False), lambda: (randn(T, 1, 3).repeat(1, B, 1),), SECOND),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_every_layer_has_its_layout(case: Case, dtype: torch.dtype) -> None:
    model = case.model().to(dtype)
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in case.inputs())
    expected = {name: case.but.get(name, case.everywhere) for name in covered(model)}
    result = layouts(model, *inputs)
    assert {name: layout for name, layout in expected.items() if name in result} == result
    assert all("out_proj" in name for name in expected.keys() - result.keys())  # attention does not call it


def test_a_mask_may_have_the_batch_on_another_axis() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = nn.TransformerEncoderLayer(E, 2, 16), nn.Linear(E, 2)

        def forward(self, x: Tensor, options: dict[str, Any]) -> Tensor:
            result: Tensor = self.head(self.encoder(x, src_key_padding_mask=options["padding"][0]).mean(0))
            return result

    padding = torch.arange(T) >= torch.tensor([[6], [5], [4], [2], [2], [1]])
    for samples in (B, T):  # or cannot tell which is which
        inputs = torch.randn(T, samples, E)
        result = layouts(Masked(), inputs, options={"padding": [padding[:samples]], "name": "any"})
        assert result.pop("head") == FIRST
        assert set(result.values()) == {SECOND}


def test_a_state_may_have_the_batch_on_another_axis() -> None:
    class Carried(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recur, self.head = nn.GRU(3, E, batch_first=True), nn.Linear(E, 2)

        def forward(self, x: Tensor, state: Tensor) -> Tensor:
            result: Tensor = self.head(self.recur(x, state)[0])
            return result

    assert layouts(Carried(), torch.randn(B, T, 3), torch.zeros(1, B, E)) == {"head": FIRST}


def test_lengths_may_decide_on_shapes() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.recur, self.head = nn.Embedding(11, E), nn.LSTM(E, E, batch_first=True), nn.Linear(E, 2)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(self.tokens(x), lengths, batch_first=True)
            padded, _ = nn.utils.rnn.pad_packed_sequence(self.recur(packed)[0], batch_first=True)
            result: Tensor = self.head(padded)
            return result

    result = layouts(Packed(), tokens(B, T), torch.tensor([6, 5, 3, 2]))
    assert result == {"tokens": FIRST, "head": FIRST}


def test_identical_samples_of_tokens_leave_a_doubt() -> None:
    result = found(Transformer(batch_first=False), tokens(T, 1).repeat(1, B))
    assert set(result.layouts.values()) == {SECOND, None}
    assert result.doubt is not None
    assert "'tokens'" in result.doubt


def test_a_dead_layer_has_the_axis_of_that_length() -> None:
    model = nn.Sequential(nn.Linear(3, E), nn.ReLU(), encoder(False)[1], nn.ReLU(), nn.Linear(E, 2))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(-1.0)
    # Nothing moves behind the first layer, so that nothing mixes: the first axis, and no claim about the second.
    result = layouts(model, torch.randn(B, T, 3))
    assert set(result.values()) == {FIRST}


def test_what_is_not_asked_for_bears_witness() -> None:
    model = nn.Sequential(nn.Linear(3, E), encoder(False)[1])
    result = probe(model, (torch.randn(T, B, 3),), {}, {"0": model[0]})
    assert result.layouts == {"0": SECOND}

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(11, E)

        def forward(self, x: Tensor) -> Tensor:
            return self.words(x).mean(0).softmax(-1)  # type: ignore[no-any-return]

    assert layouts(Words(), tokens(T, B)) == {"words": SECOND}


def test_layers_that_are_not_reached_are_not_spoken_of() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.used(x)
            return result

    assert layouts(TwoHeads(), torch.randn(B, 3)) == {"used": FIRST}


def test_an_input_without_a_batch_axis_is_one_sample() -> None:
    assert layouts(nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU()), torch.randn(2, 6, 6)) == {"0": FIRST}


def test_layers_after_samples_met_keep_the_first_axis() -> None:
    assert set(layouts(Contrast(nn.Linear(3, E)), torch.randn(B, 3)).values()) == {FIRST}
    without_averages = nn.BatchNorm2d(3, track_running_stats=False)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), without_averages, nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))
    assert set(layouts(model, torch.randn(B, 1, 6, 6)).values()) == {FIRST}


def test_it_is_a_doubt_if_the_other_axis_might_be_the_batch() -> None:
    result = found(Contrast(nn.Linear(3, E)), torch.randn(B, T, 3))
    assert set(result.layouts.values()) == {FIRST}
    assert result.doubt is not None
    assert "'after'" in result.doubt
    assert "'before'" not in result.doubt


class Towers(nn.Module):
    """CLIP's: samples of both inputs meet in a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(3, E), nn.Linear(2, E)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        a, b = (h.mean(1) if h.dim() == 3 else h for h in (self.image(image).tanh(), self.text(text).tanh()))
        return a @ b.T, b @ a.T


@pytest.mark.parametrize(
    ("image", "text"),
    [((5, 3), (5, 2)), ((5, 5, 3), (5, 2)), ((5, 7, 3), (5, 7, 2)), ((5, 3), (5, 5, 2)), ((5, 5, 3), (5, 5, 2))],
)
def test_both_inputs_of_two_towers_are_samples(image: tuple[int, ...], text: tuple[int, ...]) -> None:
    result = found(Towers(), torch.randn(image), torch.randn(text))
    assert set(result.layouts.values()) == {FIRST}
    assert (result.axis, result.shared, result.doubt) == (0, frozenset(), None)


class Sums(nn.Module):
    """All samples add what was made of all rows of the other input."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, E), nn.Linear(3, E)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = self.one(x) + self.other(y).sum(0)
        return result


def test_it_is_a_doubt_if_an_input_as_long_as_the_batch_may_be_shared() -> None:
    result = found(Sums(), torch.randn(B, 3), torch.randn(B, 3))
    assert result.doubt is not None
    assert "shared by all samples" in result.doubt


def test_time_may_be_mixed_in_a_later_input_alone() -> None:
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.mix, self.head = nn.Linear(3, E), nn.GRU(2, E), nn.Linear(E, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            result: Tensor = self.head(self.one(x) + self.mix(y)[0])
            return result

    result = found(Later(), torch.randn(T, B, 3), torch.randn(T, B, 2))
    assert set(result.layouts.values()) == {SECOND}
    assert (result.axis, result.shared, result.doubt) == (1, frozenset(), None)


def test_ranks_ask_alike() -> None:
    """One that has nothing to ask runs as often as one that has."""
    runs, said = [], []

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place, self.feature = nn.Linear(2, E), nn.Linear(3, E)

        def forward(self, x: Tensor, places: Tensor) -> Tensor:
            runs[-1] += 1
            result: Tensor = self.feature(x) + self.place(places)
            return result

    def tell(mine: bool) -> bool:
        said.append(mine)
        return mine

    for samples, agree in ((5, tell), (4, lambda _: said.pop(0))):
        model = Counted()
        runs.append(0)
        probe(model, (torch.randn(samples, 5, 3), torch.randn(5, 2)), {}, covered(model), agree)
    assert runs[0] == runs[1] > 8
    assert not said


class Experts(nn.Module):
    """Each position goes to one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(E, 2), nn.ModuleList([nn.Linear(E, E), nn.Linear(E, E)])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        choice, output = self.gate(flat).argmax(-1), torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            output[choice == number] = expert(flat[choice == number])
        return output.view_as(x)


@pytest.mark.parametrize(("model", "layer"), [(Experts, "experts.0"), (Crossed, "layer")])
def test_rows_that_cannot_be_told_apart_are_named(model: Callable[[], nn.Module], layer: str) -> None:
    """Others may know where they come from: test_routed.py."""
    assert layer in found(model(), torch.randn(B, T, E)).routed


def test_a_model_that_cannot_run_again_leaves_a_doubt() -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.ran = nn.Linear(3, 2), []

        def forward(self, x: Tensor) -> Tensor:
            self.ran.append(True)
            assert len(self.ran) < 2, "only once"
            result: Tensor = self.layer(x)
            return result

    result = found(Once(), torch.randn(B, 3))
    assert result.layouts == {}
    assert result.doubt is not None
    assert "AssertionError: only once" in result.doubt


@pytest.mark.parametrize("given", ["text", [torch.randn(2, 5, 5), torch.randn(2, 6, 6)], torch.eye(3).to_sparse()])
def test_inputs_without_an_axis_for_samples_leave_a_doubt(given: Any) -> None:
    result = found(nn.Sequential(nn.Linear(3, 2)), given)
    assert result.layouts == {}
    assert result.doubt is not None


class Stateful(nn.Module):
    """A forward pass with every kind of side effect that can be undone."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, E, max_norm=0.1)
        self.norm, self.drop, self.frozen = nn.BatchNorm1d(E), nn.Dropout(0.5), nn.Linear(E, E).requires_grad_(False)
        self.head = nn.Linear(E, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x
        self.seen += 1
        self.replaced = self.replaced + random.random()
        hidden = self.norm(self.tokens(x).mean(1)) + torch.rand(E)
        result: Tensor = self.head(F.dropout(self.drop(self.frozen(hidden)), training=self.training))
        return result


def test_nothing_is_left_behind() -> None:
    model, x = Stateful(), tokens(B, T)
    model.drop.eval()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: tensor.clone() for name, tensor in tensors.items()}

    def picture() -> list[object]:
        modules = [(sorted(vars(m)), m.training, len(m._forward_pre_hooks)) for m in model.modules()]
        return [modules, [(p.requires_grad, p._version) for p in model.parameters()], model.calls, random.getstate()]

    before, state, same = picture(), torch.get_rng_state(), x.clone()
    assert set(layouts(model, x).values()) == {FIRST}
    assert picture() == before
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, same)
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        assert after[name] is tensor
        assert torch.equal(tensor, values[name])
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert model.tokens.max_norm == 0.1


def test_under_autocast_the_weights_keep_their_gradients() -> None:
    """Autocast remembers weights in half precision: those that the probe made would have no gradient."""
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.randn(B, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layouts(model, x) == {"0": FIRST}
        model(x).sum().backward()
    assert model[0].weight.grad is not None


def test_users_inputs_may_need_gradients_and_be_changed_in_place() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2))
    x = torch.randn(B, 3)
    same = x.clone()
    assert layouts(model, x) == {"1": FIRST}
    assert torch.equal(x, same)
    assert layouts(nn.Sequential(nn.Linear(3, 2)), x.requires_grad_()) == {"0": FIRST}
    assert x.grad is None


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def language(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

    x = tokens(B, T)
    if kind == "gpt2":
        config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=11, bos_token_id=0, eos_token_id=0)
        return GPT2LMHeadModel(config), {"input_ids": x, "attention_mask": torch.ones_like(x), "labels": x}
    bert = BertForSequenceClassification(BertConfig(vocab_size=11, **SMALL))
    return bert, {"input_ids": x, "labels": torch.tensor([0, 1, 1, 0])}


def vision(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import SwinConfig, SwinForImageClassification, ViTConfig, ViTForImageClassification

    x = torch.randn(B, 3, 16, 16)
    if kind == "vit":
        return ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, **SMALL)), {"pixel_values": x}
    config = SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4)
    return SwinForImageClassification(config), {"pixel_values": x}


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        ("gpt2", {"transformer.wpe": None}),
        ("bert", {"bert.embeddings.position_embeddings": None}),
        ("vit", {}),
        ("swin", {".attention.": Layout(0, 4)}),  # four windows, then one
    ],
)
def test_models_that_others_wrote(kind: str, other: dict[str, Layout | None]) -> None:
    model, inputs = language(kind) if kind in ("gpt2", "bert") else vision(kind)
    result = layouts(model, **inputs)
    assert result.keys() == covered(model).keys()
    for name, layout in result.items():
        expected = next((value for part, value in other.items() if part in name), FIRST)
        assert layout == (FIRST if "layers.1" in name else expected), name
