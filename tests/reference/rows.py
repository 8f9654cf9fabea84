"""Each covered layer, one row of the batch at a time, from its definition.

A row function takes the layer, the whole input, the row's index and that row's copy of weight and bias, and returns
that row of the output. Only BatchNorm looks at the other rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Row = Callable[[Any, Tensor, int, Tensor | None, Tensor | None], Tensor]


def linear(_: nn.Linear, x: Tensor, i: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    assert weight is not None
    y = torch.einsum("...k,ok->...o", x[i], weight)
    return y if bias is None else y + bias


def embedding(layer: nn.Embedding, x: Tensor, i: int, weight: Tensor | None, _: Tensor | None) -> Tensor:
    assert weight is not None
    rows = []
    for token in x[i].reshape(-1).tolist():
        vector = weight[token]
        rows.append(vector.detach() if token == layer.padding_idx else vector)  # the padding vector is not learned
    return torch.stack(rows).reshape(*x[i].shape, -1)


def _padding(layer: Any, axis: int) -> tuple[int, int]:
    if layer.padding == "valid":
        return 0, 0
    if layer.padding == "same":
        total = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
        return total // 2, total - total // 2
    return layer.padding[axis], layer.padding[axis]


def _pad(x: Tensor, axis: int, before: int, after: int, mode: str) -> Tensor:
    """Pad one axis by looking up, for every position from -before to size+after, which element stands there."""
    size = x.shape[axis]
    slices = []
    for position in range(-before, size + after):
        inside = 0 <= position < size
        if mode == "circular":
            source = position % size
        elif mode == "reflect":
            source = abs(position) if position < size else 2 * (size - 1) - position
        else:
            source = min(max(position, 0), size - 1)
        element = x.select(axis, source)
        slices.append(torch.zeros_like(element) if mode == "zeros" and not inside else element)
    return torch.stack(slices, dim=axis)


def convolution(layer: Any, x: Tensor, i: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """y[o, p] = b[o] + sum over c, k of W[o, c, k] * x[c, stride * p + dilation * k], for every group of channels."""
    assert weight is not None
    row, dims = x[i], x.dim() - 2
    for axis in range(dims):
        row = _pad(row, axis + 1, *_padding(layer, axis), layer.padding_mode)
    reach = [layer.dilation[a] * (layer.kernel_size[a] - 1) for a in range(dims)]
    sizes = [(row.shape[a + 1] - reach[a] - 1) // layer.stride[a] + 1 for a in range(dims)]
    outputs = []
    for channels, kernel in zip(row.chunk(layer.groups), weight.chunk(layer.groups), strict=True):
        y = torch.zeros(kernel.shape[0], *sizes, dtype=x.dtype)
        for offset in itertools.product(*(range(k) for k in layer.kernel_size)):
            seen = channels
            for a in range(dims):
                positions = torch.arange(sizes[a]) * layer.stride[a] + layer.dilation[a] * offset[a]
                seen = seen.index_select(a + 1, positions)
            tap = kernel
            for k in offset:
                tap = tap.select(2, k)  # W[:, :, k]
            y = y + torch.einsum("oc,c...->o...", tap, seen)
        outputs.append(y)
    y = torch.cat(outputs)
    return _channel_affine(y, None, bias)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _per_channel(values: Tensor, row: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (row.dim() - 1))


def _channel_affine(row: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    row = row if weight is None else row * _per_channel(weight, row)
    return row if bias is None else row + _per_channel(bias, row)


def layer_norm(layer: nn.LayerNorm, x: Tensor, i: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    axes = tuple(range(-len(layer.normalized_shape), 0))
    mean = x[i].mean(axes, keepdim=True)
    variance = ((x[i] - mean) ** 2).mean(axes, keepdim=True)
    return _affine((x[i] - mean) / torch.sqrt(variance + layer.eps), weight, bias)


def rms_norm(layer: nn.RMSNorm, x: Tensor, i: int, weight: Tensor | None, _: Tensor | None) -> Tensor:
    assert layer.eps is not None
    axes = tuple(range(-len(layer.normalized_shape), 0))
    return _affine(x[i] / torch.sqrt((x[i] ** 2).mean(axes, keepdim=True) + layer.eps), weight, None)


def group_norm(layer: nn.GroupNorm, x: Tensor, i: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    normalized = []
    for channels in x[i].chunk(layer.num_groups):
        mean = channels.mean()
        normalized.append((channels - mean) / torch.sqrt(((channels - mean) ** 2).mean() + layer.eps))
    return _channel_affine(torch.cat(normalized), weight, bias)


def batch_norm(layer: Any, x: Tensor, i: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if layer.training or layer.running_mean is None:
        axes = (0, *range(2, x.dim()))  # the statistics of the whole batch: here the rows meet
        mean = x.mean(axes)
        variance = ((x - _per_channel(mean, x[i])) ** 2).mean(axes)
    else:
        mean, variance = layer.running_mean, layer.running_var
    normalized = (x[i] - _per_channel(mean, x[i])) / torch.sqrt(_per_channel(variance, x[i]) + layer.eps)
    return _channel_affine(normalized, weight, bias)


ROWS: dict[type[nn.Module], Row] = {
    nn.Linear: linear,
    nn.Embedding: embedding,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Conv3d: convolution,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
    nn.GroupNorm: group_norm,
    nn.BatchNorm1d: batch_norm,
    nn.BatchNorm2d: batch_norm,
    nn.BatchNorm3d: batch_norm,
}
