"""One run's forward and backward pass in plain torch: the twin that every faster implementation is compared with.

On the CPU the runs of a chunk are looped over, so that a run is computed by the same calls whatever its neighbours are.
On a GPU the same function is mapped over the runs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autoopt_lab.engine.net import Net, Stage


class Gradients(NamedTuple):
    """For every run: the mini-batch gradient g, the second moments sum_i c_i^2 (or nothing), the mean loss."""

    gradient: Tensor
    second: Tensor
    loss: Tensor


class Reference:
    """Gradients and logits of K runs, whose flat parameters are the rows of `weights`."""

    def __init__(self, net: Net) -> None:
        self.net = net

    def gradients(
        self, weights: Tensor, images: Tensor, labels: Tensor, factors: Tensor | None, moments: bool
    ) -> Gradients:
        arguments = [weights, images, labels] + ([] if factors is None else [factors])

        def one(weights: Tensor, images: Tensor, labels: Tensor, factors: Tensor | None = None) -> Gradients:
            return gradients(self.net, weights, images, labels, factors, moments)

        if weights.is_cuda:
            return Gradients(*torch.vmap(one)(*arguments))
        return Gradients(*(torch.stack(parts) for parts in zip(*map(one, *arguments), strict=True)))

    def logits(self, weights: Tensor, images: Tensor) -> Tensor:
        """(K, N, classes) for the same images in every run, without dropout."""
        if weights.is_cuda:
            return torch.vmap(lambda w: forward(self.net, w, images, None)[-1].output)(weights)
        return torch.stack([forward(self.net, w, images, None)[-1].output for w in weights])


class Pass(NamedTuple):
    """What one stage's backward pass needs."""

    patches: Tensor  # (N, positions, patch)
    origin: Tensor  # which pixel of the pooling window was the largest, or -1 where the ReLU is off
    output: Tensor


def forward(net: Net, weights: Tensor, images: Tensor, factors: Tensor | None) -> list[Pass]:
    x, passes = images, []
    for stage, (weight, bias) in zip(net.stages, net.views(weights), strict=True):
        patches = _patches(x, stage)
        z = (patches.flatten(0, 1) @ weight.T + bias).view(len(x), *stage.affine_size, stage.outputs)
        y, origin = _pool(z, stage)
        if stage.relu:
            origin = torch.where(y > 0, origin, -1)
            y = torch.where(y <= 0, 0, y)  # keeps NaN, as torch does
        if stage.drop and factors is not None:
            y = y * _factor(factors, stage)
        passes.append(Pass(patches, origin, y))
        x = y
    passes[-1] = passes[-1]._replace(output=x.flatten(1))
    return passes


def gradients(
    net: Net, weights: Tensor, images: Tensor, labels: Tensor, factors: Tensor | None, moments: bool
) -> Gradients:
    passes = forward(net, weights, images, factors)
    loss, d = loss_and_gradient(passes[-1].output, labels)
    gradient: list[Tensor] = []
    second: list[Tensor] = []
    for stage, (weight, _), kept in reversed(list(zip(net.stages, net.views(weights), passes, strict=True))):
        d = d.view(len(images), *stage.output_size, stage.outputs)
        if stage.drop and factors is not None:
            d = d * _factor(factors, stage)
        dz = _unpool(d, kept.origin, stage).flatten(1, 2)
        for part, tensor in zip((gradient, second), _affine_gradients(kept.patches, dz, stage, moments), strict=True):
            part.append(tensor)
        if stage.offset:
            d = _fold((dz.flatten(0, 1) @ weight).view(len(images), *stage.affine_size, -1), stage)
    return Gradients(torch.cat(gradient[::-1]), torch.cat(second[::-1]), loss)


def loss_and_gradient(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean negative log likelihood over the batch (last axis but one), and its gradient."""
    logs = F.log_softmax(logits, -1)
    hit = labels[..., None] == torch.arange(logits.shape[-1], device=logits.device)
    loss = -torch.where(hit, logs, 0).sum(-1).mean(-1)
    return loss, (logs.exp() - hit.to(logits.dtype)) / logits.shape[-2]


def _patches(x: Tensor, stage: Stage) -> Tensor:
    if stage.linear:
        return x.reshape(len(x), 1, stage.patch)
    windows = x.unfold(1, stage.kernel, 1).unfold(2, stage.kernel, 1)  # N, rows, columns, channel, i, j
    return windows.permute(0, 1, 2, 4, 5, 3).reshape(len(x), -1, stage.patch)


def _fold(d: Tensor, stage: Stage) -> Tensor:
    """The transpose of `_patches`: every patch element is added to the pixel it came from."""
    if stage.linear:
        return d.flatten(1)
    (rows, columns), k = stage.affine_size, stage.kernel
    pieces = d.unflatten(-1, (k * k, stage.channels))
    x = torch.zeros_like(d[:, :1, :1, : stage.channels]).repeat(1, stage.height, stage.width, 1)
    for tap in range(k * k):
        i, j = divmod(tap, k)
        x[:, i : i + rows, j : j + columns] += pieces[..., tap, :]
    return x


def _pool(z: Tensor, stage: Stage) -> tuple[Tensor, Tensor]:
    """The maximum of every window and where it was; the first one of equals, as in torch."""
    rows, columns = stage.output_size
    places = [divmod(q, stage.pool) for q in range(stage.pool**2)]
    candidates = [z[:, i :: stage.pool, j :: stage.pool][:, :rows, :columns] for i, j in places]
    best = candidates[0]
    origin = torch.zeros_like(best, dtype=torch.int8)
    for q, candidate in enumerate(candidates[1:], 1):
        better = (candidate > best) | candidate.isnan()
        best, origin = torch.where(better, candidate, best), torch.where(better, q, origin)
    return best, origin


def _unpool(d: Tensor, origin: Tensor, stage: Stage) -> Tensor:
    pool = stage.pool
    pieces = torch.stack([torch.where(origin == q, d, 0) for q in range(pool**2)])
    rows, columns = stage.output_size
    pieces = pieces.view(pool, pool, len(d), rows, columns, stage.outputs).permute(2, 3, 0, 4, 1, 5)
    dz = pieces.reshape(len(d), rows * pool, columns * pool, stage.outputs)
    left_out = [size - pool * (size // pool) for size in stage.affine_size]
    return F.pad(dz, (0, 0, 0, left_out[1], 0, left_out[0])) if any(left_out) else dz


def _affine_gradients(patches: Tensor, dz: Tensor, stage: Stage, moments: bool) -> tuple[Tensor, Tensor]:
    """Gradient and second moments of weight and bias, flat: sum over samples i of c_i and of c_i^2."""
    if not moments:
        rows = dz.flatten(0, 1)
        return torch.cat([(rows.T @ patches.flatten(0, 1)).flatten(), rows.sum(0)]), dz.new_zeros(0)
    if stage.linear:  # one position: c_i is an outer product, so its square is the outer product of the squares
        d, a = dz[:, 0], patches[:, 0]
        weight, weight_second, bias = d.T @ a, d.square().T @ a.square(), d
    else:
        each = dz.transpose(1, 2) @ patches
        weight, weight_second, bias = each.sum(0), each.square().sum(0), dz.sum(1)
    return (
        torch.cat([weight.flatten(), bias.sum(0)]),
        torch.cat([weight_second.flatten(), bias.square().sum(0)]),
    )


def _factor(factors: Tensor, stage: Stage) -> Tensor:
    return factors[:, None, None, stage.drop_offset : stage.drop_offset + stage.outputs]
