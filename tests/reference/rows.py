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


def transposed_convolution(layer: Any, x: Tensor, i: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """y[o, stride * p + dilation * k - padding] gets W[c, o, k] * x[c, p], for every group of channels."""
    assert weight is not None
    row, dims = x[i], x.dim() - 2
    reach = [layer.dilation[a] * (layer.kernel_size[a] - 1) for a in range(dims)]
    full = [(row.shape[a + 1] - 1) * layer.stride[a] + reach[a] + 1 + layer.output_padding[a] for a in range(dims)]
    outputs = []
    for channels, kernel in zip(row.chunk(layer.groups), weight.chunk(layer.groups), strict=True):
        y = torch.zeros(kernel.shape[1], *full, dtype=x.dtype)
        for p in itertools.product(*(range(size) for size in row.shape[1:])):
            for k in itertools.product(*(range(size) for size in layer.kernel_size)):
                at = [layer.stride[a] * p[a] + layer.dilation[a] * k[a] for a in range(dims)]
                place = torch.zeros(full, dtype=x.dtype)
                place[tuple(at)] = 1
                value = torch.einsum("co,c->o", kernel[(slice(None), slice(None), *k)], channels[(slice(None), *p)])
                y = y + _per_channel(value, y) * place
        for a in range(dims):
            y = y.narrow(a + 1, layer.padding[a], full[a] - 2 * layer.padding[a])
        outputs.append(y)
    return _channel_affine(torch.cat(outputs), None, bias)


def embedding_bag(layer: nn.EmbeddingBag, x: Tensor, i: int, weight: Tensor | None, _: Tensor | None) -> Tensor:
    assert weight is not None
    vectors = [weight[token] for token in x[i].tolist() if token != layer.padding_idx]
    if not vectors:
        return torch.zeros_like(weight[0])
    return sum(vectors, torch.zeros_like(weight[0])) / (len(vectors) if layer.mode == "mean" else 1)


def prelu(_: nn.PReLU, x: Tensor, i: int, weight: Tensor | None, __: Tensor | None) -> Tensor:
    assert weight is not None
    slope = weight if weight.numel() == 1 else _per_channel(weight, x[i])
    return torch.where(x[i] > 0, x[i], slope * x[i])


def instance_norm(layer: Any, x: Tensor, i: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    row = x[i]
    if layer.training or layer.running_mean is None:
        axes = tuple(range(1, row.dim()))
        mean = row.mean(axes)
        variance = ((row - _per_channel(mean, row)) ** 2).mean(axes)
    else:
        mean, variance = layer.running_mean, layer.running_var
    normalized = (row - _per_channel(mean, row)) / torch.sqrt(_per_channel(variance, row) + layer.eps)
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
    nn.ConvTranspose1d: transposed_convolution,
    nn.ConvTranspose2d: transposed_convolution,
    nn.ConvTranspose3d: transposed_convolution,
    nn.EmbeddingBag: embedding_bag,
    nn.InstanceNorm1d: instance_norm,
    nn.InstanceNorm2d: instance_norm,
    nn.InstanceNorm3d: instance_norm,
    nn.PReLU: prelu,
}
