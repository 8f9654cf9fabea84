"""The support matrix is true: what it calls exact is, sample by sample; what it calls refused raises an error."""

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt import AutoSGD
from autoopt.moments.registry import FOREIGN, RULES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
N, T, D = 4, 5, 6  # samples, positions, features


def rows(section: str) -> list[list[str]]:
    """The cells of a section's table, less its head."""
    part = TEXT.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


STATUS = {
    name: cells[1]
    for section in ("Layers", "How parameters are used")
    for cells in rows(section)
    for name in re.findall(r"`([^`]+)`", cells[0])
}


class First(nn.Module):
    """Layers that return a tuple, or want more than one input."""

    def __init__(self, layer: nn.Module, *, times: int = 1) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(*[x] * self.times)
        return output[0] if isinstance(output, tuple) else output


class Unrolled(nn.Module):
    """A recurrent cell over time."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state


class Same(nn.Linear):
    pass


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 2, self.bias)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, D), nn.Linear(D, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids).tanh())


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.token = nn.Parameter(torch.ones(D)), nn.Parameter(torch.randn(1, 1, D))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(len(x), -1, -1), x * self.scale], 1)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(D, D))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix)


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(D, D).requires_grad_(False)
        self.down, self.up = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Experts(nn.Module):
    """Each position goes to one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])

    def forward(self, x: Tensor) -> Tensor:
        first, output = x[..., 0] > 0, torch.zeros_like(x)
        output[first], output[~first] = self.experts[0](x[first]), self.experts[1](x[~first])
        return output


class ExpertsInOne(nn.Module):
    """The weights of all experts in one parameter, rows sorted by the expert that they go to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, D, D))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        expert, order = (rows[:, 0] > 0).long().sort()
        y = torch.bmm(rows[order].unsqueeze(1), self.weight[expert]).squeeze(1)
        return y[order.argsort()].view_as(x)


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.flat = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.flat(self.first(x).flatten(0, 1))


class Words(nn.Module):
    def __init__(self, *, packs: bool = False) -> None:
        super().__init__()
        self.words, self.head, self.packs = nn.LSTM(D, D, batch_first=True), nn.Linear(D, 3), packs

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        lengths = torch.full((len(rows),), x.shape[2])
        given = nn.utils.rnn.pack_padded_sequence(rows, lengths, batch_first=True) if self.packs else rows
        return self.head(self.words(given)[1][0][0].unflatten(0, (len(x), -1)))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(9, D), nn.Embedding(T, D)

    def forward(self, ids: Tensor) -> Tensor:
        return self.token(ids) + self.position(torch.arange(T))


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0])


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(D, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x * self.phase)


def conv1d_of_transformers() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="the `hf` extra is not installed")
    layer: nn.Module = transformers.pytorch_utils.Conv1D(3, D)
    return layer


def image(axes: int) -> Tensor:
    return torch.randn(N, D, *[T] * axes)


def tokens() -> Tensor:
    return torch.randint(0, 9, (N, T))


def sequence() -> Tensor:
    return torch.randn(N, T, D)


def vectors() -> Tensor:
    return torch.randn(N, D)


# name in the matrix -> how to make the model, its input
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "Linear": (lambda: nn.Linear(D, 3), sequence),
    **{f"Conv{n}d": (lambda n=n: getattr(nn, f"Conv{n}d")(D, 4, 3), lambda n=n: image(n)) for n in (1, 2, 3)},
    **{
        f"ConvTranspose{n}d": (lambda n=n: getattr(nn, f"ConvTranspose{n}d")(D, 4, 3), lambda n=n: image(n))
        for n in (1, 2, 3)
    },
    "Embedding": (lambda: nn.Embedding(9, D), tokens),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(9, D, mode="sum"), tokens),
    "LayerNorm": (lambda: nn.LayerNorm(D), sequence),
    "RMSNorm": (lambda: nn.RMSNorm(D), sequence),
    "GroupNorm": (lambda: nn.GroupNorm(2, D), lambda: image(2)),
    **{f"BatchNorm{n}d": (lambda n=n: getattr(nn, f"BatchNorm{n}d")(D), lambda n=n: image(n)) for n in (1, 2, 3)},
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(D), lambda: image(2)),
    **{
        f"InstanceNorm{n}d": (
            lambda n=n: getattr(nn, f"InstanceNorm{n}d")(D, affine=True),
            lambda n=n: image(n),
        )
        for n in (1, 2, 3)
    },
    "PReLU": (lambda: nn.PReLU(), sequence),
    "transformers.pytorch_utils.Conv1D": (conv1d_of_transformers, sequence),
    "Bilinear": (lambda: First(nn.Bilinear(D, D, 3), times=2), vectors),
    "LSTM": (lambda: First(nn.LSTM(D, 3, batch_first=True)), sequence),
    "GRU": (lambda: First(nn.GRU(D, 3, batch_first=True)), sequence),
    "RNN": (lambda: First(nn.RNN(D, 3, batch_first=True)), sequence),
    "LSTMCell": (lambda: Unrolled(nn.LSTMCell(D, 3)), sequence),
    "GRUCell": (lambda: Unrolled(nn.GRUCell(D, 3)), sequence),
    "RNNCell": (lambda: Unrolled(nn.RNNCell(D, 3)), sequence),
    "MultiheadAttention": (lambda: First(nn.MultiheadAttention(D, 2, batch_first=True), times=3), sequence),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(D, 2, 8, 0.0, batch_first=True), sequence),
    "TransformerDecoderLayer": (
        lambda: First(nn.TransformerDecoderLayer(D, 2, 8, 0.0, batch_first=True), times=2), sequence,
    ),
    "a subclass that keeps forward": (lambda: Same(D, 3), sequence),
    "a subclass with its own forward": (lambda: Own(D, 3), sequence),
    "a module called twice": (Twice, sequence),
    "tied weights": (Tied, tokens),
    "a bare parameter": (Bare, sequence),
    "F.linear on an own parameter": (Functional, sequence),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(D, 3)), sequence),
    "spectral_norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(D, 3)), sequence),
    "LoRA of two Linear": (LoRA, sequence),
    "samples and time in one axis": (Flat, sequence),
    "words of a text in one axis": (Words, lambda: torch.randn(N, 2, T, D)),
    "words of a text, sorted and packed": (lambda: Words(packs=True), lambda: torch.randn(N, 2, T, D)),
    "a mixture of experts, each a module": (Experts, sequence),
    "a mixture of experts, all in one parameter": (ExpertsInOne, sequence),
    "positions without a batch axis": (Positions, tokens),
    "inputs of (time, batch, features)": (TimeFirst, lambda: torch.randn(T, N, D)),
    "a complex parameter": (Complex, sequence),
    "a sparse Embedding": (lambda: nn.Embedding(9, D, sparse=True), tokens),
}  # fmt: skip


MIXING = {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"}  # a sample alone is not what it is in a batch

SECOND = {"inputs of (time, batch, features)"}  # the samples lie on the second axis


def train(model: nn.Module, x: Tensor) -> dict[str, float]:
    """One step; the noise that the optimizer saw."""
    optimizer = AutoSGD(model)
    model(x).sin().sum().backward()
    optimizer.step()
    return {name: chosen.noise for name, chosen in optimizer.tuned().items()}


def noise(model: nn.Module, x: Tensor, axis: int) -> dict[str, float]:
    """V̂/|g|² of each parameter, one sample at a time."""
    gradients: dict[str, list[Tensor]] = {}
    for i in range(N):
        single = copy.deepcopy(model)
        single(x[i : i + 1] if axis == 0 else x[:, i : i + 1]).sin().sum().backward()
        for name, parameter in single.named_parameters():
            if parameter.grad is not None:
                gradients.setdefault(name, []).append(parameter.grad)
    result = {}
    for name, shares in gradients.items():
        size = torch.stack(shares).sum(0).square().sum()
        result[name] = float(N / (N - 1) * (torch.stack(shares).square().sum() - size / N) / size)
    return result


@pytest.mark.parametrize("name", CASES)
def test_row(name: str) -> None:
    make, data = CASES[name]
    model, x = make(), data()
    if name != "a complex parameter":
        model, x = model.double(), x.double() if x.is_floating_point() else x
    status = STATUS[name]
    if status == "refused":
        with pytest.raises((ValueError, RuntimeError)):
            train(model, x)
        return
    assert status in ("exact", "estimated")
    before = {key: value.clone() for key, value in model.named_parameters() if value.requires_grad}
    expected = {} if name in MIXING else noise(model, x, axis=int(name in SECOND))
    seen = train(model, x)
    for key, value in before.items():
        assert not torch.equal(value, model.get_parameter(key)), f"{key} did not move"
        assert math.isfinite(seen[key]), f"{key} has no statistics"
    if status == "exact":
        assert seen == pytest.approx({**seen, **expected}, rel=1e-8)


def test_every_row_is_tried() -> None:
    assert set(STATUS) == set(CASES)


def public(layer: type[nn.Module]) -> list[str]:
    """The names under which people know a layer class: _BatchNorm is BatchNorm1d, 2d and 3d."""
    if not layer.__name__.startswith("_"):
        return [layer.__name__]
    return [
        name
        for name, kind in vars(nn).items()
        if getattr(kind, "forward", None) is layer.forward and not name.startswith("Lazy")
    ]


def test_every_rule_is_in_the_matrix() -> None:
    for name in [name for layer in RULES for name in public(layer)] + list(FOREIGN):
        assert STATUS.get(name) in ("exact", "estimated"), f"{name} has a rule: docs/support.md should say so"


def test_what_is_said_to_be_checked_is_checked() -> None:
    for loop, _, where in rows("Training loops"):
        files = re.findall(r"`(tests/[^`]+)`", where)
        assert files, f"{loop}: no test is named"
        assert all((ROOT / file).is_file() for file in files), loop
