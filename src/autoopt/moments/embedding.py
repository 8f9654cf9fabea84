"""Embeddings: each sample adds the output gradients of all positions at which it holds a token."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt.moments.operation import Moments, owned, wide


@dataclass(frozen=True)
class Embedding:
    """Indices (samples, *positions) -> (samples, *positions, features)."""

    tokens: int
    padding_idx: int | None
    max_norm: float | None
    norm_type: float

    lowers = False

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        return owned(F.embedding(x, weight, self.padding_idx, self.max_norm, self.norm_type)), (x,)

    def input_gradient(self, dy: Tensor, kept: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        raise AssertionError("indices have no gradient")

    def weight_moments(self, dy: Tensor, kept: tuple[Tensor, ...], total: bool) -> Moments:
        (x,) = kept
        padding = -1 if self.padding_idx is None else self.padding_idx
        gradient = torch.ops.aten.embedding_dense_backward(dy, x, self.tokens, padding, False)
        token, contribution = self.contributions(x, wide(dy))
        square = contribution.square()
        if total:
            return Moments(gradient, square.sum())
        return Moments(gradient, square.new_zeros(self.tokens, dy.shape[-1]).index_add_(0, token, square))

    def bias_moments(self, dy: Tensor, total: bool) -> Moments:
        raise AssertionError("an embedding has no bias")

    def contributions(self, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """For every (sample, token) that occurs, the token and what the sample adds to its row; zeros fill up the rest.

        Sorting brings the occurrences of a token in a sample together, so that they are summed before they are squared;
        the shapes do not depend on the data, so nothing waits for the device.
        """
        token = x.reshape(x.shape[0], -1)
        if self.padding_idx is not None:
            dy = dy * (x != self.padding_idx).unsqueeze(-1)
        sample = torch.arange(token.shape[0], device=x.device).unsqueeze(1)
        pair, order = (sample * self.tokens + token).flatten().sort()
        starts = torch.cat([pair.new_zeros(1), (pair[1:] != pair[:-1]).long()])
        slot = starts.cumsum(0)
        sums = dy.new_zeros(pair.shape[0], dy.shape[-1]).index_add_(0, slot, dy.reshape(-1, dy.shape[-1])[order])
        return pair.new_zeros(pair.shape[0]).scatter_(0, slot, pair % self.tokens), sums


def prepare(layer: nn.Embedding, x: Tensor) -> tuple[Embedding, Tensor]:
    """The operation of an nn.Embedding."""
    operation = Embedding(layer.num_embeddings, layer.padding_idx, layer.max_norm, layer.norm_type)
    return operation, x if x.dim() > 0 else x.unsqueeze(0)
