"""Models that lay out their samples in the ways people do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

B, T, E = 4, 6, 8


class Attention(nn.Module):
    """Self-attention over (batch, time, features), or over (time, batch, features)."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.norm, self.qkv, self.out = nn.LayerNorm(E), nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        how = "bte,bse->bts" if self.batch_first else "tbe,sbe->bts"
        weights = torch.einsum(how, q, k).softmax(-1)
        mixed = torch.einsum("bts,bse->bte" if self.batch_first else "bts,sbe->tbe", weights, v)
        result: Tensor = x + self.out(mixed)
        return result


class Transformer(nn.Module):
    """Tokens of (batch, time) or of (time, batch) to scores of the next one."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.tokens, self.positions = nn.Embedding(11, E), nn.Embedding(T, E)
        self.blocks = nn.Sequential(*(Attention(batch_first=batch_first) for _ in range(2)))
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(E, 11)

    def forward(self, x: Tensor) -> Tensor:
        axis = 1 if self.batch_first else 0
        where = torch.arange(x.shape[axis]).unsqueeze(1 - axis)
        result: Tensor = self.head(self.drop(self.blocks(self.tokens(x) + self.positions(where))))
        return result


class Loop(nn.Module):
    """A recurrent network that users write themselves, over (time, batch, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.step, self.head = nn.Embedding(11, E), nn.Linear(2 * E, E), nn.Linear(E, 11)

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.tokens(x)
        state, outputs = inputs.new_zeros(inputs.shape[1:]), []
        for now in inputs:
            state = torch.tanh(self.step(torch.cat([now, state], -1)))
            outputs.append(state)
        result: Tensor = self.head(torch.stack(outputs))
        return result


class Mixer(nn.Module):
    """One block of an MLP mixer: over the tokens, then over the features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.tokens, self.features, self.head = (
            nn.LayerNorm(E),
            nn.Linear(T, T),
            nn.Linear(E, E),
            nn.Linear(E, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
        result: Tensor = self.head((x + self.features(x)).mean(1))
        return result


class Windows(nn.Module):
    """Attention in windows of three positions, which lie folded into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside, self.after = nn.Linear(E, E), Attention(batch_first=True), nn.Linear(E, 3)

    def forward(self, x: Tensor) -> Tensor:
        windows = self.before(x).unflatten(1, (-1, 3)).flatten(0, 1)
        result: Tensor = self.after(self.inside(windows).reshape(x.shape).mean(1))
        return result


class Frames(nn.Module):
    """A convolution on each frame of (batch, time, channels, height, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.frame, self.norm, self.head = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        maps = torch.relu(self.norm(self.frame(x.flatten(0, 1))))
        result: Tensor = self.head(maps.mean((2, 3)).unflatten(0, x.shape[:2]).mean(1))
        return result


class Flat(nn.Module):
    """Rows of all times, then of all samples: (time · batch, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = Attention(batch_first=False), nn.Linear(E, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.mix(x).flatten(0, 1))
        return result


def randn(*shape: int) -> Tensor:
    return torch.randn(shape)


def tokens(*shape: int) -> Tensor:
    return torch.randint(11, shape)


def encoder(batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(E, 2, 16, batch_first=batch_first)
    return nn.Sequential(nn.Linear(3, E), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(E, 2))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(), nn.Linear(48, 2)
    )


class Contrast(nn.Module):
    """Samples attend to each other between the layers."""

    def __init__(self, before: nn.Module) -> None:
        super().__init__()
        self.before, self.after = before, nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        if h.dim() == 3:
            h = h.mean(1)
        result: Tensor = self.after((h @ h.T).softmax(-1) @ h)
        return result


class Crossed(nn.Module):
    """Time and batch in one axis, after time was reversed for some: no block of it is a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        order = torch.randperm(x.shape[0] * x.shape[1], generator=torch.Generator().manual_seed(1))
        result: Tensor = self.layer(torch.eye(len(order))[order] @ x.flatten(0, 1))  # not by an index: that would show
        return result
