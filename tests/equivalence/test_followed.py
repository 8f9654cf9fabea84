"""Models in which the samples go a long way: exact against each sample alone, with the optimizers people use."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt import AutoAdam, AutoSGD
from equivalence.bare_cases import parameter
from equivalence.cases import assert_close

N = 5


class OwnGroupNorm(nn.GroupNorm):
    """With a forward pass of its own, so that the rule of nn.GroupNorm is not for it."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class HalfNormed(nn.Module):
    """A part of a larger tensor, with gaps between its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 1), OwnGroupNorm(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).split([4, 4], 1)
        return torch.cat([self.norm(a), b], 1)


class WindowAttention(nn.Module):
    """Swin's: windows of all samples on one axis, which for a moment is not the first."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.table = nn.Linear(3, 12), parameter(2, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        windows = x.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
        q, k, v = self.qkv(windows).reshape(-1, 4, 3, 2, 2).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-1, -2) + self.table
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, -1, 4)


class Frames(nn.Module):
    """A video's: frames of all samples on one axis, behind one more, and then by themselves again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.times, self.scale = nn.Linear(3, 8), parameter(2, 8, 1), parameter(8)

    def forward(self, x: Tensor) -> Tensor:
        b, t = x.shape[:2]
        h = self.first(x.flatten(0, 1))
        h = h[None, :] * self.scale
        return h.reshape(b, t, 4, 8, 1).permute(0, 2, 1, 3, 4) + self.times


class Between(nn.Module):
    """A layer, a norm and a parameter that meet windows on the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.scale, self.last = nn.Linear(3, 4), nn.LayerNorm(4), parameter(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.reshape(-1, 4, 3)).transpose(0, 1).contiguous()
        return self.last(self.norm(h).tanh() * self.scale).transpose(0, 1).reshape(len(x), -1)


class EllipsisAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(4, 4), parameter(4)

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.first(x) @ x.mT).softmax(-1)
        return torch.einsum("...ij,...jd->...id", weights, x) * self.scale


class PatchDropout(nn.Module):
    """Some positions of every sample, those that the sample itself decides on, behind a class token."""

    def __init__(self, numbers: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.first, self.token, self.numbers = nn.Linear(4, 8), parameter(1, 1, 8), numbers

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        kept = h[..., 0].argsort(1)[:, :3]
        return torch.cat([self.token.expand(len(x), 1, 8), h[self.numbers(len(x)), kept]], 1)


class Filter(nn.Module):
    """GFNet's: a complex filter, held as pairs of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.first = parameter(6, 4, 8, 2), nn.Linear(3, 8)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(self.first(x), dim=(1, 2)) * torch.view_as_complex(self.filter)
        return torch.fft.irfft2(spectrum, s=(6, 6), dim=(1, 2))


class Operator(nn.Module):
    """A Fourier neural operator's: the lowest frequencies, mixed over the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = parameter(3, 4, 2, 2), parameter(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)[..., :2]
        weight = torch.view_as_complex(self.weight)
        y = torch.zeros(len(x), 4, 4, dtype=spectrum.dtype)
        y[..., :2] = torch.einsum("bik,iok->bok", spectrum, weight)
        return torch.fft.irfft(y, n=6) + torch.view_as_real(y * self.scale).sum((-1, -2)).unsqueeze(-1)


class SpecialToken(nn.Module):
    """Tokens of the samples, behind one that all have, from one table; and positions through a layer of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        first = self.table(torch.tensor([1])).expand(len(x), 1, 8)
        h = self.mix(torch.cat([first, self.table(x)], 1).tanh())
        return self.head(h + self.mix(torch.linspace(0, 1, 8, dtype=h.dtype).expand(x.shape[1] + 1, 8)))


class SpecialRow(nn.Module):
    """An expert that is given some rows of the samples, and one that is the same for all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.expert = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        mask = h.detach()[..., 0] > 0
        rows = self.expert(h[mask])
        return h + torch.zeros_like(h).masked_scatter(mask.unsqueeze(-1), rows) + self.expert(torch.ones(4).to(h))


class OneByOne(nn.Module):
    """A loop over the samples, in which each goes through layers and meets parameters by itself."""

    def __init__(self, way: Callable[[OneByOne, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.layer, self.norm, self.way = nn.Linear(3, 4), nn.Linear(4, 4), nn.LayerNorm(4), way
        self.inner, self.scale = parameter(4), parameter(4)

    def one(self, h: Tensor) -> Tensor:
        h = h + self.norm(self.layer(h).tanh() * self.inner)
        return (h.reshape(-1, 4).T @ h.reshape(-1, 4)).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, self.first(x)) * self.scale


def by_number(model: OneByOne, h: Tensor) -> Tensor:
    return torch.stack([model.one(h[i]) for i in range(len(h))])


def by_iteration(model: OneByOne, h: Tensor) -> Tensor:
    return torch.stack([model.one(one) for one in h], dim=0)


def by_rows(model: OneByOne, h: Tensor) -> Tensor:
    return torch.cat([model.one(h[i - len(h)]).unsqueeze(0) for i in range(len(h))])


def by_writing(model: OneByOne, h: Tensor) -> Tensor:
    y = torch.zeros(len(h), 4, 4).to(h)
    for i in range(len(h)):
        y[i] = model.one(h[i])
    return y


def backwards(model: OneByOne, h: Tensor) -> Tensor:
    return torch.stack([model.one(one) for one in h][::-1])


def backwards_by_writing(model: OneByOne, h: Tensor) -> Tensor:
    y = torch.zeros(len(h), 4, 4).to(h)
    for i in range(len(h)):
        y[-1 - i] = model.one(h[i])
    return y


def neighbours(model: OneByOne, h: Tensor) -> Tensor:
    return torch.stack([torch.lerp(h[i], h[i - 1], model.inner) for i in range(len(h))])


def sums(model: OneByOne, h: Tensor) -> Tensor:
    return torch.stack([h[i] + h[i - 1] for i in range(len(h))])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "a part with gaps": (HalfNormed, lambda: torch.randn(N, 3, 5, 5)),
    "windows": (WindowAttention, lambda: torch.randn(N, 4, 4, 3)),
    "as many windows as samples": (WindowAttention, lambda: torch.randn(N, 2, 10, 3)),
    "frames": (Frames, lambda: torch.randn(N, 2, 4, 3)),
    "windows on the second axis": (Between, lambda: torch.randn(N, 8, 3)),
    "an ellipsis": (EllipsisAttention, lambda: torch.randn(N, 3, 4)),
    "an ellipsis over two axes": (EllipsisAttention, lambda: torch.randn(N, N, 3, 4)),
    "a filter of frequencies": (Filter, lambda: torch.randn(N, 6, 6, 3)),
    "an operator on frequencies": (Operator, lambda: torch.randn(N, 3, 6)),
    "tokens of the samples and one of all": (SpecialToken, lambda: torch.randint(20, (N, 4))),
    "as many tokens as samples": (SpecialToken, lambda: torch.randint(20, (N, N))),
    "as many tokens as samples, with the first": (SpecialToken, lambda: torch.randint(20, (N, N - 1))),
    "rows of the samples and one of all": (SpecialRow, lambda: torch.randn(N, 6, 3)),
    "one by one": (lambda: OneByOne(by_number), lambda: torch.randn(N, 3)),
    "one by one, sequences": (lambda: OneByOne(by_number), lambda: torch.randn(N, 2, 3)),
    "one by one, as long as the batch": (lambda: OneByOne(by_number), lambda: torch.randn(N, N, 3)),
    "one by one, by iteration": (lambda: OneByOne(by_iteration), lambda: torch.randn(N, N, 3)),
    "one by one, by rows": (lambda: OneByOne(by_rows), lambda: torch.randn(N, 2, 3)),
    "one by one, by writing": (lambda: OneByOne(by_writing), lambda: torch.randn(N, 2, 3)),
    "patch dropout": (lambda: PatchDropout(lambda n: torch.arange(n)[:, None]), lambda: torch.randn(N, 6, 4)),
    "patch dropout, expanded": (
        lambda: PatchDropout(lambda n: torch.arange(n).view(-1, 1).expand(n, 3)),
        lambda: torch.randn(N, N, 4),
    ),
}


def flipped(samples: int) -> Tensor:
    return torch.arange(samples)[torch.arange(samples).flip(0)][:, None]


def changed(samples: int) -> Tensor:
    numbers = torch.arange(samples)
    numbers.copy_(numbers.flip(0))
    return numbers[:, None]


# What must not be taken for one of each, in order: x[numbers, places].
@pytest.mark.parametrize(
    "numbers",
    [flipped, changed, lambda n: torch.arange(n).expand(n, n)[:, :3]],
)
@pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
def test_parts_of_samples_in_another_order_are_refused(
    make: Callable[..., Any], numbers: Callable[[int], Tensor]
) -> None:
    model = PatchDropout(numbers)
    optimizer = make(model, exact=True)
    with pytest.raises(RuntimeError, match=r"parameter 'token' .* is not known"):
        model(torch.randn(N, 6, 4))
    optimizer.detach()


@pytest.mark.parametrize("way", [backwards, backwards_by_writing, neighbours, sums])
@pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
def test_samples_that_meet_or_change_places_one_by_one_are_refused(make: Callable[..., Any], way: Any) -> None:
    model = OneByOne(way)
    optimizer = make(model, exact=True)
    with pytest.raises(RuntimeError, match=r"parameter '(scale|inner)' .* is not known"):
        model(torch.randn(N, 3))
    optimizer.detach()


def test_tensors_from_inference_mode_are_followed() -> None:
    """A frozen part's results, which know no versions."""

    class Frozen(PatchDropout):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.view(x.shape).index_add(0, torch.arange(len(x)), torch.ones_like(x)) + x.clone())

    model = Frozen(lambda n: torch.arange(n)[:, None])
    optimizer = AutoSGD(model, exact=True)
    with torch.inference_mode():
        x = torch.randn(N, 6, 4)
    model(x).sum().backward()
    optimizer.step()
    optimizer.detach()


def squares(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Σ_i c_i², each sample alone in a plain copy of the model."""
    plain = copy.deepcopy(model)
    found = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    for i in range(len(x)):
        plain.zero_grad()
        plain(x[i : i + 1]).square().sum().backward()
        for name, p in plain.named_parameters():
            found[name] += 0 if p.grad is None else p.grad.square()
    return found


@pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
@pytest.mark.parametrize("name", MODELS)
def test_exact(name: str, make: Callable[..., Any]) -> None:
    make_model, inputs = MODELS[name]
    model, x = make_model().double(), inputs()
    x = x.double() if x.is_floating_point() else x
    expected = squares(model, x)
    optimizer = make(model, exact=True)
    source = optimizer._now.source
    for _ in range(3):
        optimizer.zero_grad()
        source.clear()
        model(x).square().sum().backward()
        for path, square in expected.items():
            found = source.second_moment(path)
            assert_close(found, square.sum() if found.dim() < square.dim() else square, 1e-10, path)
            assert source.samples(path) == N, path
    optimizer.step()
    optimizer.detach()
