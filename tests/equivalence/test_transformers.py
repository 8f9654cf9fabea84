"""nn.Transformer and its parts, in both layouts: exact as a whole, and they train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt import AutoAdam, AutoSGD
from autoopt.capture import Capture
from equivalence.by_sample import assert_exact, contributions
from equivalence.cases import assert_close

N, QUERIES, KEYS, FEATURES, HEADS = 5, 4, 3, 6, 2
both_moments = pytest.mark.parametrize("elementwise", [True, False], ids=["elementwise", "total"])
both_layouts = pytest.mark.parametrize("batch_first", [True, False], ids=["batch-first", "time-first"])
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # nn.Transformer, of its own default


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def perturbed(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.double()


@pytest.fixture
def fixed_dropout(monkeypatch: pytest.MonkeyPatch) -> Callable[[nn.Module], nn.Module]:
    """Dropout layers drop the same elements in any order of memory, which is what random draws go by."""

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        assert training
        return x * (torch.arange(x.numel()).mul(0.618).frac() > p).view_as(x) / (1 - p)

    def fixed(model: nn.Module) -> nn.Module:
        for module in model.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0  # draws within attention are tested above
        return model

    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)
    return fixed


Fixed = Callable[[nn.Module], nn.Module]


@both_moments
@both_layouts
@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder(norm_first: bool, batch_first: bool, elementwise: bool, fixed_dropout: Fixed) -> None:
    layer = nn.TransformerEncoderLayer(
        FEATURES, HEADS, 8, dropout=0.1, norm_first=norm_first, batch_first=batch_first, activation="gelu"
    )
    encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(FEATURES), enable_nested_tensor=False)
    model = fixed_dropout(perturbed(encoder))
    x = randn(N, N, FEATURES)  # as many times as samples: the sizes do not tell the axes
    padding = torch.zeros(N, N, dtype=torch.bool)
    padding[2:, -1] = True
    batch = 0 if batch_first else 1
    assert_exact(
        model, lambda m: m(x, src_key_padding_mask=padding).movedim(batch, 0).square().flatten(1).sum(1), elementwise
    )


@both_moments
@both_layouts
def test_a_decoder(batch_first: bool, elementwise: bool, fixed_dropout: Fixed) -> None:
    layer = nn.TransformerDecoderLayer(FEATURES, HEADS, 8, dropout=0.1, batch_first=batch_first)
    model = fixed_dropout(perturbed(nn.TransformerDecoder(layer, 2, norm=nn.LayerNorm(FEATURES))))
    batch = 0 if batch_first else 1
    x, memory = (randn(N, times, FEATURES).movedim(0, batch).contiguous() for times in (QUERIES, KEYS))
    mask = nn.Transformer.generate_square_subsequent_mask(QUERIES, dtype=torch.float64)
    assert_exact(model, lambda m: m(x, memory, tgt_mask=mask).movedim(batch, 0).square().flatten(1).sum(1), elementwise)


@both_layouts
def test_a_transformer_without_a_batch_axis_is_refused(batch_first: bool) -> None:
    model = nn.TransformerEncoderLayer(FEATURES, HEADS, FEATURES, batch_first=batch_first)
    Capture(model, dict(model.named_parameters()), elementwise=True)
    with pytest.raises(RuntimeError, match=r"layer '(norm1|self_attn)' got"):
        model(torch.randn(FEATURES, FEATURES)).sum().backward()


class Translator(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.source, self.target = nn.Embedding(11, 8), nn.Embedding(7, 8)
        self.transformer = nn.Transformer(8, 2, 1, 1, 12, dropout=0.1, batch_first=batch_first)
        self.head = nn.Linear(8, 7)

    def forward(self, tokens: Tensor, words: Tensor) -> Tensor:
        x, y = self.source(tokens), self.target(words)
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], dtype=x.dtype)
        if not self.batch_first:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        output = self.transformer(x, y, tgt_mask=mask, tgt_is_causal=True)
        logits: Tensor = self.head(output if self.batch_first else output.transpose(0, 1))
        return logits


@both_moments
@both_layouts
def test_a_whole_transformer_is_exact(batch_first: bool, elementwise: bool, fixed_dropout: Fixed) -> None:
    model = fixed_dropout(perturbed(Translator(batch_first)))
    tokens, words = torch.randint(11, (N, 4)), torch.randint(7, (N, 3))
    assert_exact(model, lambda m: m(tokens, words).square().flatten(1).sum(1), elementwise)


@both_layouts
@pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
def test_a_transformer_trains(make: Callable[[nn.Module], Any], batch_first: bool) -> None:
    model = Translator(batch_first)
    tokens, words = torch.randint(11, (8, 5)), torch.randint(7, (8, 4))
    optimizer = make(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens, words).flatten(0, 1), words.flatten()).backward()
        optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(0 <= chosen.noise < float("inf") for chosen in optimizer.tuned().values())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo, tracing any Function
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo, between two graphs
@both_layouts
def test_a_compiled_encoder_runs_attention_between_graphs(batch_first: bool) -> None:
    model = perturbed(nn.TransformerEncoderLayer(FEATURES, HEADS, 8, dropout=0.0, batch_first=batch_first))
    x, batch = randn(N, QUERIES, FEATURES), 0 if batch_first else 1
    x = x.movedim(0, batch).contiguous()
    expected = contributions(model, lambda m: m(x).movedim(batch, 0).square().flatten(1).sum(1))
    capture = Capture(model, dict(model.named_parameters()), elementwise=True)
    torch.compile(model, backend="aot_eager")(x).movedim(batch, 0).square().flatten(1).sum(1).mean().backward()
    for name, c in expected.items():
        assert_close(capture.second_moment(name), c.square().sum(0), 1e-10, name)
