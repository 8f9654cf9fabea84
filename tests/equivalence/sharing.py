"""Models in which a parameter is used several times, and what each sample adds to it, in the most obvious ways."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt.capture import Capture
from reference.rows import ROWS

N, T, D = 5, 4, 3  # samples, positions, features; all different, so that no axis passes for another


def assert_exact(capture: Capture, model: nn.Module, expected: dict[str, Tensor], samples: int = N) -> None:
    """The capture holds Σ_i c_i² and N, and the gradient is Σ_i c_i."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            c = expected[name]
            square = c.square().sum() if capture.ledger.total else c.square().sum(0)
            torch.testing.assert_close(capture.second_moment(name), square, rtol=1e-10, atol=1e-13, msg=name)
            torch.testing.assert_close(parameter.grad, c.sum(0), rtol=1e-10, atol=1e-13, msg=f"gradient of {name}")
            assert capture.samples(name) == samples, name


def attach(model: nn.Module, elementwise: bool = True) -> Capture:
    return Capture(model, dict(model.named_parameters()), elementwise=elementwise)


def loss_of(model: nn.Module, *inputs: Tensor) -> Tensor:
    """A sum over the samples, so that those of one are those of a batch of one."""
    return model(*inputs).sin().sum()


def one_by_one(model: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    """c_i from a pass with sample i alone: where the rows do not meet."""
    model = copy.deepcopy(model)
    each: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for i in range(inputs[0].shape[0]):
        model.zero_grad()
        loss_of(model, *(x[i : i + 1] for x in inputs)).backward()
        for name, parameter in model.named_parameters():
            each[name].append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    return {name: torch.stack(found) for name, found in each.items()}


def by_copies(model: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    """c_i as the gradient of the copy of each parameter that all rows of sample i use: also where the rows meet."""
    model = copy.deepcopy(model)
    copies = {p: torch.stack([p.detach()] * inputs[0].shape[0]).requires_grad_() for p in model.parameters()}
    for layer in model.modules():
        if type(layer) in ROWS:
            layer.forward = _by_rows(layer, copies)
    named = {name: copies[parameter] for name, parameter in model.named_parameters()}
    gradients = torch.autograd.grad(loss_of(model, *inputs), list(named.values()))
    return dict(zip(named, gradients, strict=True))


def _by_rows(layer: Any, copies: dict[nn.Parameter, Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        rows = []
        for i in range(x.shape[0]):
            held = (getattr(layer, role, None) for role in ("weight", "bias"))
            weight, bias = (None if parameter is None else copies[parameter][i] for parameter in held)
            rows.append(ROWS[type(layer)](layer, x, i, weight, bias))
        return torch.stack(rows)

    return forward


class Case(NamedTuple):
    """A model and its input."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]

    def build(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        return self.make().double(), self.inputs()


def floats(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(N, *shape, dtype=torch.float64),)


def tokens(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(0, 7, (N, *shape)),)


class Twice(nn.Module):
    """A layer that sees its own output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(torch.tanh(self.layer(x)))
        return result


class TwoLookups(nn.Module):
    """A layer of tokens that is asked twice, for other tokens."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) * self.layer((x + 1) % 7)
        return result


class Recurrent(nn.Module):
    """A step in time, T times."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.onward = nn.Linear(D, 6), nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 6)
        for t in range(x.shape[1]):
            h = torch.tanh(self.inward(x[:, t]) + self.onward(h))
        return h


class TiedTokens(nn.Module):
    """The embedding is the head's weight; a bias of the head's own."""

    def __init__(self, repeat: bool = False) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(7, D, padding_idx=2), nn.Linear(D, D), nn.Linear(D, 7)
        self.head.weight = self.embedding.weight
        self.repeat = repeat

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(self.embedding(x)))
        h = torch.tanh(self.body(h)) if self.repeat else h
        result: Tensor = self.head(h)
        return result


class Tied(nn.Module):
    """Two layers of one kind with common parameters."""

    def __init__(self, first: nn.Module, second: nn.Module, *roles: str) -> None:
        super().__init__()
        self.first, self.second = first, second
        for role in roles:
            setattr(second, role, getattr(first, role))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.tanh(self.first(x)))
        return result


class Aliased(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.tanh(self.first(x)))
        return result


class Siamese(nn.Module):
    """Two inputs through one net."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return F.cosine_similarity(self.net(a), self.net(b), dim=-1)


CASES = {
    "plain": Case(lambda: nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 2)), floats(D)),
    "linear": Case(lambda: Twice(nn.Linear(D, D)), floats(D)),
    "linear over positions": Case(lambda: Twice(nn.Linear(D, D)), floats(T, D)),
    "linear with many outputs": Case(lambda: Twice(nn.Sequential(nn.Linear(D, 40), nn.Linear(40, D))), floats(2, D)),
    "conv1d": Case(lambda: Twice(nn.Conv1d(D, D, 3, padding=1)), floats(D, T)),
    "conv2d of groups": Case(lambda: Twice(nn.Conv2d(4, 4, 3, padding=1, groups=2)), floats(4, 5, 6)),
    "conv transpose": Case(lambda: Twice(nn.ConvTranspose1d(D, D, 3, padding=1)), floats(D, T)),
    "layer norm": Case(lambda: Twice(nn.LayerNorm(D)), floats(T, D)),
    "rms norm": Case(lambda: Twice(nn.RMSNorm(D, eps=1e-5)), floats(D)),
    "group norm": Case(lambda: Twice(nn.GroupNorm(2, 4)), floats(4, T)),
    "instance norm": Case(lambda: Twice(nn.InstanceNorm1d(D, affine=True)), floats(D, T)),
    "prelu": Case(lambda: Twice(nn.PReLU()), floats(T)),
    "prelu of channels": Case(lambda: Twice(nn.PReLU(D)), floats(D, T)),
    "embedding": Case(lambda: TwoLookups(nn.Embedding(7, D, padding_idx=1)), tokens(T)),
    "embedding bag": Case(lambda: TwoLookups(nn.EmbeddingBag(7, D, mode="mean", padding_idx=1)), tokens(T)),
    "recurrent": Case(Recurrent, floats(T, D)),
    "tied tokens": Case(TiedTokens, tokens(T)),
    "tied tokens, repeated body": Case(lambda: TiedTokens(repeat=True), tokens(T)),
    "tied linear": Case(lambda: Tied(nn.Linear(D, D), nn.Linear(D, D), "weight"), floats(T, D)),
    "tied bias": Case(lambda: Tied(nn.Linear(D, D), nn.Linear(D, D), "bias"), floats(D)),
    "tied conv": Case(lambda: Tied(nn.Conv1d(D, D, 1), nn.Conv1d(D, D, 1), "weight", "bias"), floats(D, T)),
    "tied norm": Case(lambda: Tied(nn.LayerNorm(D), nn.RMSNorm(D, eps=1e-5), "weight"), floats(T, D)),
    "two names": Case(Aliased, floats(D)),
    "siamese": Case(Siamese, lambda: (*floats(D)(), *floats(D)())),
}

MEETING = {  # rows meet
    "batch norm": Case(lambda: Twice(nn.BatchNorm1d(D)), floats(D)),
    "batch norm of channels": Case(lambda: Twice(nn.BatchNorm2d(D)), floats(D, 2, 4)),
    "linear and batch norm": Case(lambda: Twice(nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D))), floats(D)),
}
