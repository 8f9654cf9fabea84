"""A batch of one sample, first, last or in between: wherever its axis lies, Σ c² is the square of its gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt.capture import Capture
from equivalence.bare_cases import parameter
from equivalence.by_sample import contributions
from equivalence.cases import assert_close

T, D = 6, 4


class Taught(nn.Module):
    """A decoder that is fed with what it was to write, behind a first word that is the same for all."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.reader = nn.Embedding(11, D), nn.GRU(D, D, batch_first=True)
        self.target, self.writer, self.out = nn.Embedding(11, D), nn.GRU(D, D, batch_first=True), nn.Linear(D, 11)

    def forward(self, x: Tensor) -> Tensor:
        _, hidden = self.reader(self.source(x))
        word, outputs = torch.zeros(len(x), 1, dtype=torch.long), []
        for i in range(x.shape[1]):
            output, hidden = self.writer(F.relu(self.target(word)), hidden)
            outputs.append(self.out(output))
            word = x[:, i].unsqueeze(1)
        return torch.cat(outputs, 1)


class TimeFirst(nn.Module):
    """A transformer that takes time first, with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, D), parameter(16, 1, D)
        self.body, self.head = nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.T
        return self.head(self.body(self.words(x) + self.places[: len(x)])).transpose(0, 1)


class OneByOne(nn.Module):
    """Takes its samples apart."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(11, D), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(sample) for sample in self.words(x)])


class Places(nn.Module):
    """Position embeddings of a table, and a scale, over as many places as there are features."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.scale = nn.Embedding(11, D), nn.Embedding(T, D), parameter(1, D)
        self.head = nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places(torch.arange(x.shape[1]))
        return self.head((h * self.scale).tanh())


class Routed(nn.Module):
    """Experts, of which some get no row of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.experts = nn.Embedding(11, D), nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.head = nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows, which, result = self.words(x).flatten(0, 1), x.flatten() % 3, []
        for number, expert in enumerate(self.experts):
            chosen = torch.where(which == number)[0]
            result.append((chosen, expert(rows[chosen])))
        y = torch.zeros_like(rows)
        for chosen, given in result:
            y = y.index_add(0, chosen, given)
        return self.head(y.view(*x.shape, D).tanh())


@pytest.mark.parametrize("sizes", [(4, 3, 1, 4), (1, 4, 1, T)], ids=["last", "first"])
@pytest.mark.parametrize("make", [Taught, TimeFirst, OneByOne, Places, Routed])
def test_is_exact(make: Callable[[], nn.Module], sizes: tuple[int, ...]) -> None:
    model = make().double()
    capture = Capture(model, dict(model.named_parameters()), elementwise=True)
    for samples in sizes:
        x = torch.randint(11, (samples, T))
        expected = contributions(model, lambda m, x=x: m(x).square().flatten(1).sum(1))
        model.zero_grad()
        capture.clear()
        model(x).square().flatten(1).sum(1).mean().backward()
        for name, c in expected.items():
            assert_close(capture.second_moment(name), c.square().sum(0), 1e-10, f"{name} of {samples}")
            assert capture.samples(name) == samples, name
