"""Models of recurrent layers and cells: exact as a whole, and they train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from autoopt import AutoAdam, AutoSGD
from equivalence.by_sample import assert_exact

N = 5
both_moments = pytest.mark.parametrize("elementwise", [True, False], ids=["elementwise", "total"])


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.lstm = nn.LSTM(5, 6, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
        self.head = nn.Linear(12, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        output, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.head(output.mean(1))
        return logits


class Translator(nn.Module):
    """A GRU reads, a GRU cell writes in a loop, fed with what it was to write."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(11, 5), nn.Embedding(7, 5)
        self.reader, self.writer = nn.GRU(5, 6, batch_first=True), nn.GRUCell(5, 6)
        self.head = nn.Linear(6, 7)

    def forward(self, tokens: Tensor, words: Tensor) -> Tensor:
        _, hidden = self.reader(self.source(tokens))
        h, said = hidden[0], []
        for word in self.target(words).unbind(1):
            h = self.writer(word, h)
            said.append(h)
        logits: Tensor = self.head(torch.stack(said, 1))
        return logits


@pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
def test_a_classifier_trains(make: Callable[[nn.Module], Any]) -> None:
    model = Classifier()
    tokens, labels = torch.randint(11, (8, 5)), torch.randint(3, (8,))
    optimizer = make(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), labels).backward()
        optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(0 <= chosen.noise < float("inf") for chosen in optimizer.tuned().values())


@pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
def test_a_translator_with_a_loop_over_a_cell_trains(make: Callable[[nn.Module], Any]) -> None:
    model = Translator()
    tokens, words = torch.randint(11, (8, 5)), torch.randint(7, (8, 4))
    optimizer = make(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens, words).flatten(0, 1), words.flatten()).backward()
        optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(0 <= chosen.noise < float("inf") for chosen in optimizer.tuned().values())


class Speaker(nn.Module):
    """Its first word, and so the first input of its cell, is the same for all."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.words = nn.Linear(5, 6), nn.Embedding(7, 5)
        self.cell, self.head = nn.LSTMCell(5, 6), nn.Linear(6, 7)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        h, said = self.start(x), []
        c, word = torch.zeros_like(h), torch.zeros(len(x), dtype=torch.long)
        for following in words.unbind(1):
            h, c = self.cell(self.words(word), (h, c))
            said.append(h)
            word = following
        logits: Tensor = self.head(torch.stack(said, 1))
        return logits


class Slots(nn.Module):
    """Several learned states of each sample, which compete for its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.slots, self.embed = nn.Parameter(torch.randn(3, 6)), nn.Linear(4, 6)
        self.cell, self.head = nn.GRUCell(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        parts, slots = self.embed(x), self.slots.expand(len(x), -1, -1)
        for _ in range(2):
            seen = (slots @ parts.mT).softmax(1) @ parts
            slots = self.cell(seen.flatten(0, 1), slots.reshape(-1, 6)).view(len(x), 3, 6)
        logits: Tensor = self.head(slots)
        return logits


class Pooling(nn.Module):
    """Attention by a learned query over what an LSTM made of packed words, in their order or another."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(11, 5), nn.LSTM(5, 6, batch_first=True)
        self.query, self.head, self.order = nn.Parameter(torch.randn(6)), nn.Linear(6, 3), order

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x, back = self.words(tokens), torch.arange(len(tokens))
        if self.order == "by hand":
            lengths, order = lengths.sort(descending=True)
            x, back = x[order], order.argsort()
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.order != "by torch")
        h, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        h = h * (h * self.query).sum(-1, keepdim=True).softmax(1)
        logits: Tensor = self.head(h.sum(1))[back]
        return logits


class Interleaved(Slots):
    """Its rows lie slot by slot, and those of a sample apart."""

    def forward(self, x: Tensor) -> Tensor:
        parts, slots = self.embed(x), self.slots.unsqueeze(1).expand(-1, len(x), -1)
        rows = parts[:, :3].transpose(0, 1).flatten(0, 1)
        slots = self.cell(rows, slots.reshape(-1, 6)).view(3, len(x), 6).transpose(0, 1)
        logits: Tensor = self.head(slots)
        return logits


def test_learned_states_whose_rows_lie_apart_are_refused() -> None:
    model = Interleaved()
    optimizer = AutoSGD(model)
    model(torch.randn(N, 7, 4)).square().mean().backward()
    with pytest.raises(RuntimeError, match="parameter 'slots' has a gradient but no statistics"):
        optimizer.step()


@both_moments
@pytest.mark.parametrize("order", ["as it is", "by torch", "by hand"])
def test_what_was_packed_may_meet_parameters(order: str, elementwise: bool) -> None:
    lengths = torch.tensor([6, 5, 5, 3, 1] if order == "as it is" else [3, 6, 1, 5, 5])
    tokens = torch.randint(11, (N, 6))
    assert_exact(Pooling(order).double(), lambda m: m(tokens, lengths).square().sum(1), elementwise)


@both_moments
def test_a_cell_may_be_given_the_same_for_all(elementwise: bool) -> None:
    words = torch.randint(7, (N, 4))
    x = torch.randn(N, 5, dtype=torch.float64)
    assert_exact(Speaker().double(), lambda m: m(x, words).square().flatten(1).sum(1), elementwise)


@both_moments
def test_a_cell_may_be_given_several_learned_states_of_each_sample(elementwise: bool) -> None:
    x = torch.randn(N, 7, 4, dtype=torch.float64)
    assert_exact(Slots().double(), lambda m: m(x).square().flatten(1).sum(1), elementwise)


@both_moments
@pytest.mark.parametrize("make", [Classifier, Translator])
def test_whole_models_are_exact(make: Callable[[], nn.Module], elementwise: bool) -> None:
    model = make().double()
    inputs = (
        (torch.randint(11, (N, 5)),) if make is Classifier else (torch.randint(11, (N, 5)), torch.randint(7, (N, 4)))
    )
    assert_exact(model, lambda m: m(*inputs).square().flatten(1).sum(1), elementwise)
