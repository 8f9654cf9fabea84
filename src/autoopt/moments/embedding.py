"""Embeddings: each sample adds the output gradients of all positions at which it holds a token."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt.moments.operation import Moments, Operation, owned, wide


@dataclass(frozen=True)
class Embedding(Operation):
    """Indices (samples, *positions) -> (samples, *positions, features)."""

    tokens: int
    padding_idx: int | None
    max_norm: float | None
    norm_type: float

    positional = True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        return owned(F.embedding(x, weight, self.padding_idx, self.max_norm, self.norm_type)), (x,)

    def input_gradient(self, dy: Tensor, kept: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        raise AssertionError("indices have no gradient")

    def forms(self, x: Tensor) -> bool:
        return False

    def weight_moments(self, dy: Tensor, kept: tuple[Tensor, ...], total: bool) -> Moments:
        gradient = self.weight_gradient(dy, kept)
        token, contribution = self._occurring(kept[0], wide(dy))
        square = contribution.square()
        if total:
            return Moments(gradient, square.sum())
        return Moments(gradient, square.new_zeros(self.tokens, dy.shape[-1]).index_add_(0, token, square))

    def weight_gradient(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        (x,) = kept
        padding = -1 if self.padding_idx is None else self.padding_idx
        gradient: Tensor = torch.ops.aten.embedding_dense_backward(dy, x, self.tokens, padding, False)
        return gradient

    def weight_contributions(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        (x,) = kept
        token = x.reshape(x.shape[0], -1)
        place = token + self.tokens * torch.arange(token.shape[0], device=x.device).unsqueeze(1)
        c = wide(dy).new_zeros(token.shape[0] * self.tokens, dy.shape[-1])
        c.index_add_(0, place.flatten(), self._learned(x, wide(dy)).reshape(-1, dy.shape[-1]))
        return c.view(token.shape[0], self.tokens, -1)

    def _learned(self, x: Tensor, dy: Tensor) -> Tensor:
        return dy if self.padding_idx is None else dy * (x != self.padding_idx).unsqueeze(-1)

    def _occurring(self, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """For every (sample, token) that occurs, the token and what the sample adds to its row; zeros fill up the rest.

        Sorting brings the occurrences of a token in a sample together, so that they are summed before they are squared;
        the shapes do not depend on the data, so nothing waits for the device.
        """
        token = x.reshape(x.shape[0], -1)
        dy = self._learned(x, dy)
        sample = torch.arange(token.shape[0], device=x.device).unsqueeze(1)
        pair, order = (sample * self.tokens + token).flatten().sort()
        starts = torch.cat([pair.new_zeros(1), (pair[1:] != pair[:-1]).long()])
        slot = starts.cumsum(0)
        sums = dy.new_zeros(pair.shape[0], dy.shape[-1]).index_add_(0, slot, dy.reshape(-1, dy.shape[-1])[order])
        return pair.new_zeros(pair.shape[0]).scatter_(0, slot, pair % self.tokens), sums


@dataclass(frozen=True)
class EmbeddingBag(Operation):
    """Indices (samples, positions) -> (samples, features): the sum or mean of an embedding over the positions."""

    embedding: Embedding
    mean: bool

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        own, mode = self.embedding, "mean" if self.mean else "sum"
        y = F.embedding_bag(
            x, weight, max_norm=own.max_norm, norm_type=own.norm_type, mode=mode, padding_idx=own.padding_idx
        )
        return y, (x,)

    def input_gradient(self, dy: Tensor, kept: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        raise AssertionError("indices have no gradient")

    def forms(self, x: Tensor) -> bool:
        return False

    def weight_moments(self, dy: Tensor, kept: tuple[Tensor, ...], total: bool) -> Moments:
        return self.embedding.weight_moments(self._at_positions(dy, *kept), kept, total)

    def weight_gradient(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        return self.embedding.weight_gradient(self._at_positions(dy, *kept), kept)

    def weight_contributions(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        return self.embedding.weight_contributions(self._at_positions(dy, *kept), kept)

    def _at_positions(self, dy: Tensor, x: Tensor) -> Tensor:
        """The output gradient of the embedding within."""
        if self.mean:
            counted = torch.ones_like(x) if self.embedding.padding_idx is None else x != self.embedding.padding_idx
            dy = dy / counted.sum(1, keepdim=True).clamp(min=1)
        return dy.unsqueeze(1).expand(*x.shape, -1)


def prepare(layer: nn.Embedding, x: Tensor) -> tuple[Embedding, Tensor]:
    """The operation of an nn.Embedding."""
    operation = Embedding(layer.num_embeddings, layer.padding_idx, layer.max_norm, layer.norm_type)
    return operation, x if x.dim() > 0 else x.unsqueeze(0)


def prepare_bag(layer: nn.EmbeddingBag, x: Tensor) -> tuple[EmbeddingBag, Tensor]:
    """The operation of an nn.EmbeddingBag whose bags are the rows of x."""
    if layer.mode == "max" or layer.sparse or layer.scale_grad_by_freq or x.dim() != 2:
        raise ValueError(
            "exact statistics of an EmbeddingBag need mode='sum' or 'mean', sparse=False, scale_grad_by_freq=False and "
            f"input of shape (samples, positions). This one is EmbeddingBag({layer.extra_repr()}) and got "
            f"{tuple(x.shape)}: freeze it, or leave it to another optimizer through param_groups."
        )
    embedding = Embedding(layer.num_embeddings, layer.padding_idx, layer.max_norm, layer.norm_type)
    return EmbeddingBag(embedding, layer.mode == "mean"), x
