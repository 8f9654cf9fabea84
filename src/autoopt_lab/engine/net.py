"""A small net as a tuple of layers, and the flat layout of its parameters.

A net is cut into stages: one affine layer (Conv or Linear) followed by max pooling, ReLU and dropout, which commute
with each other because a ReLU is monotone and a dropout factor is not negative. A Linear is a convolution with a 1 x 1
kernel on a 1 x 1 image, so every stage has the same shape of description.

Activations are channels last, (N, height, width, channels), so that a patch of an image row is contiguous in memory.
The flat buffer therefore holds each weight as (outputs, kernel row, kernel column, channel), then its bias; `pack` and
`unpack` translate from and to PyTorch's layout.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

_SEEDING = threading.Lock()  # torch's generator is one for all threads, and several of them may make chunks at once


@dataclass(frozen=True)
class Conv:
    """A convolution with a square kernel, stride 1, no padding."""

    channels: int
    kernel: int = 5


@dataclass(frozen=True)
class Linear:
    features: int


@dataclass(frozen=True)
class ReLU:
    pass


@dataclass(frozen=True)
class MaxPool:
    """Maximum over 2 x 2 windows, stride 2; an odd last row or column is left out, as in PyTorch."""


@dataclass(frozen=True)
class Dropout:
    """Drops whole channels after a Conv (PyTorch's Dropout2d), single features after a Linear."""

    rate: float = 0.5


@dataclass(frozen=True)
class Flatten:
    pass


Layer = Conv | Linear | ReLU | MaxPool | Dropout | Flatten


@dataclass(frozen=True)
class Stage:
    """One affine layer and what follows it up to the next."""

    name: str  # of the module in Net.module(): "0" has the parameters 0.weight and 0.bias
    height: int
    width: int
    channels: int
    kernel: int
    outputs: int
    source: tuple[int, int, int]  # the weight's input axes in PyTorch's order: (channels, rows, columns)
    offset: int  # of the weight in the flat buffer; the bias follows it
    pool: int = 1
    relu: bool = False
    drop: float = 0.0
    drop_offset: int = 0  # of this stage's features among all that can be dropped

    @property
    def patch(self) -> int:
        return self.kernel * self.kernel * self.channels

    @property
    def linear(self) -> bool:
        return self.height == self.width == self.kernel == 1

    @property
    def affine_size(self) -> tuple[int, int]:
        return self.height - self.kernel + 1, self.width - self.kernel + 1

    @property
    def output_size(self) -> tuple[int, int]:
        rows, columns = self.affine_size
        return rows // self.pool, columns // self.pool

    @property
    def parameters(self) -> int:
        return self.outputs * self.patch + self.outputs


@dataclass(frozen=True)
class Net:
    """A classifier: `image` is (channels, height, width); the last layer is a Linear and a log-softmax follows it."""

    image: tuple[int, int, int]
    layers: tuple[Layer, ...]

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(_stages(self))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of every parameter tensor, in the order of the flat buffer and of `names`."""
        return tuple(size for s in self.stages for size in (s.outputs * s.patch, s.outputs))

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{s.name}.{kind}" for s in self.stages for kind in ("weight", "bias"))

    @property
    def parameters(self) -> int:
        return sum(self.sizes)

    @property
    def classes(self) -> int:
        return self.stages[-1].outputs

    @property
    def droppable(self) -> int:
        """Number of features per sample that have a dropout factor."""
        return sum(s.outputs for s in self.stages if s.drop)

    def module(self) -> nn.Sequential:
        """The same net as a PyTorch module, with PyTorch's default initialisation."""
        return nn.Sequential(*_modules(self), nn.LogSoftmax(dim=1))

    def initial(self, seed: int) -> Tensor:
        """The flat parameters a PyTorch user gets who builds the module after `torch.manual_seed(seed)`."""
        with _SEEDING, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.pack(self.module().state_dict())

    def pack(self, state: Mapping[str, Tensor]) -> Tensor:
        flat = []
        for s in self.stages:
            weight = state[f"{s.name}.weight"].reshape(s.outputs, *s.source)
            flat += [weight.permute(0, 2, 3, 1).reshape(-1), state[f"{s.name}.bias"]]
        return torch.cat(flat)

    def unpack(self, flat: Tensor) -> dict[str, Tensor]:
        state = {}
        shapes = {name: tensor.shape for name, tensor in self.module().state_dict().items()}
        for s, (weight, bias) in zip(self.stages, self.views(flat), strict=True):
            channels, rows, columns = s.source
            weight = weight.reshape(s.outputs, rows, columns, channels).permute(0, 3, 1, 2)
            state[f"{s.name}.weight"] = weight.reshape(shapes[f"{s.name}.weight"])
            state[f"{s.name}.bias"] = bias
        return state

    def views(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Weight (outputs, patch) and bias (outputs) of every stage, as views of one run's flat parameters."""
        parts = flat.split(self.sizes)
        return [
            (weight.view(s.outputs, s.patch), bias)
            for s, weight, bias in zip(self.stages, parts[::2], parts[1::2], strict=True)
        ]


def _stages(net: Net) -> Iterator[Stage]:
    channels, height, width = net.image
    source: tuple[int, int, int] | None = None  # the image shape that a Flatten turned into features
    offset = drop_offset = 0
    fields: dict[str, object] = {}

    def finished() -> Iterator[Stage]:
        nonlocal offset, drop_offset, channels, height, width
        if fields:
            stage = Stage(**fields)  # type: ignore[arg-type]
            offset += stage.parameters
            drop_offset += stage.outputs if stage.drop else 0
            channels, (height, width) = stage.outputs, stage.output_size
            fields.clear()
            yield stage

    for index, layer in enumerate(net.layers):
        if isinstance(layer, Conv | Linear | Flatten):
            yield from finished()
        if isinstance(layer, Flatten):
            source = channels, height, width
            channels, height, width = prod(source), 1, 1
        elif isinstance(layer, Conv | Linear):
            kernel = layer.kernel if isinstance(layer, Conv) else 1
            if isinstance(layer, Linear) and (height, width) != (1, 1):
                raise ValueError(f"layer {index} is a Linear on a {height} x {width} image: put a Flatten before it")
            if kernel > min(height, width):
                raise ValueError(f"layer {index}: a {kernel} x {kernel} kernel does not fit a {height} x {width} image")
            fields.update(name=str(index), height=height, width=width, channels=channels, kernel=kernel)
            fields.update(outputs=layer.channels if isinstance(layer, Conv) else layer.features)
            fields.update(source=source or (channels, kernel, kernel), offset=offset, drop_offset=drop_offset)
            source = None
        elif not fields:
            raise ValueError(f"layer {index}: {layer} must follow a Conv or a Linear")
        elif isinstance(layer, MaxPool):
            fields["pool"] = 2
        elif isinstance(layer, ReLU):
            fields["relu"] = True
        else:
            fields["drop"] = layer.rate
    if not isinstance(net.layers[-1], Linear):
        raise ValueError(f"the last layer must be a Linear without anything after it, not {net.layers[-1]}")
    yield from finished()


def _modules(net: Net) -> Iterator[nn.Module]:
    stages = iter(net.stages)
    stage = None
    for layer in net.layers:
        if isinstance(layer, Conv):
            stage = next(stages)
            yield nn.Conv2d(stage.channels, stage.outputs, stage.kernel)
        elif isinstance(layer, Linear):
            stage = next(stages)
            yield nn.Linear(stage.channels, stage.outputs)
        elif isinstance(layer, MaxPool):
            yield nn.MaxPool2d(2)
        elif isinstance(layer, ReLU):
            yield nn.ReLU()
        elif isinstance(layer, Flatten):
            yield nn.Flatten()
        else:
            yield nn.Dropout(layer.rate) if stage is not None and stage.linear else nn.Dropout2d(layer.rate)
