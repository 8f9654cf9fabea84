"""Multi-head attention as nn.MultiheadAttention defines it, in terms of the uses of its parameters.

Everything is (samples, positions, features) here. Between the projections there are no parameters, so all that a caller
must supply is how a parameter is used: plain F.linear gives the layer itself, an observed one its statistics too.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Block(NamedTuple):
    """Some rows of a parameter."""

    name: str
    start: int
    stop: int


class Parameters(Protocol):
    """How the parameters of an attention layer are used."""

    def linear(self, x: Tensor, weight: Block, bias: Block | None) -> Tensor:
        """x Wᵀ + b over the last axis."""

    def append(self, x: Tensor, name: str) -> Tensor:
        """x with the parameter (1, 1, features) as one more position of every sample."""


@dataclass(frozen=True)
class Attention:
    """The settings of a layer.

    Args:
        features: of the query and of the output.
        heads: how many parts of the features attend on their own.
        separate: whether query, key and value have projections of their own, not one that holds all three.
        bias: whether the projections have one.
        bias_kv: whether a learned key and value stand behind the given ones.
        zero: whether a key and a value of zeros do.
        dropout: what share of the weights is dropped now.
    """

    features: int
    heads: int
    separate: bool
    bias: bool
    bias_kv: bool
    zero: bool
    dropout: float

    def forward(
        self,
        parameters: Parameters,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        *,
        causal: bool = False,
        need_weights: bool = True,
        average: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's output and, if asked for, the weights of its positions, of every head or their average.

        Args:
            parameters: how to use them.
            query, key, value: (samples, positions, features).
            mask: what `merged` gives.
            causal: no mask is given, and none may see what comes after it.
            need_weights: the weights are asked for.
            average: over the heads.
        """
        q, k, v = self._project(parameters, query, key, value)
        if self.bias_kv:
            k, v = parameters.append(k, "bias_k"), parameters.append(v, "bias_v")
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        if self.zero:
            k, v = (torch.cat([part, torch.zeros_like(part[:, :, :1])], 2) for part in (k, v))
        added = self.bias_kv + self.zero
        if mask is not None and added:
            mask = F.pad(mask, (0, added))
        weights = None
        if need_weights:
            weights = _weights(q, k, mask, self.dropout)
            output = weights @ v
        else:
            output = F.scaled_dot_product_attention(q, k, v, mask, self.dropout, causal)
        output = output.transpose(1, 2).flatten(2)
        bias = Block("out_proj.bias", 0, self.features) if self.bias else None
        output = parameters.linear(output, Block("out_proj.weight", 0, self.features), bias)
        return output, weights.mean(1) if weights is not None and average else weights

    def _project(self, parameters: Parameters, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value in the space where they meet; of the same input all at once."""
        query, key, value = inputs
        if self.separate:
            names = "q_proj_weight", "k_proj_weight", "v_proj_weight"
            q, k, v = (
                parameters.linear(x, Block(name, 0, self.features), self._bias(part, part + 1))
                for part, (name, x) in enumerate(zip(names, inputs, strict=True))
            )
        elif query is key is value:
            q, k, v = self._packed(parameters, query, 0, 3)
        elif key is value:
            (q,), (k, v) = self._packed(parameters, query, 0, 1), self._packed(parameters, key, 1, 3)
        else:
            q, k, v = (self._packed(parameters, x, part, part + 1)[0] for part, x in enumerate(inputs))
        return q, k, v

    def _packed(self, parameters: Parameters, x: Tensor, first: int, end: int) -> tuple[Tensor, ...]:
        """Some of the three projections that lie in one parameter."""
        weight = Block("in_proj_weight", first * self.features, end * self.features)
        return parameters.linear(x, weight, self._bias(first, end)).chunk(end - first, -1)

    def _bias(self, first: int, end: int) -> Block | None:
        return Block("in_proj_bias", first * self.features, end * self.features) if self.bias else None


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.mT
    weights = F.softmax(scores if mask is None else scores + mask, -1)
    return F.dropout(weights, dropout) if dropout > 0 else weights


def merged(
    attention_mask: Tensor | None, padding_mask: Tensor | None, samples: int, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """Both masks as one that is added to the scores (samples, heads, queries, keys); where it is True, -inf.

    Args:
        attention_mask: (queries, keys) or (samples · heads, queries, keys).
        padding_mask: (samples, keys).
        samples, heads: how many there are.
        dtype: of the scores.
    """
    masks = []
    if attention_mask is not None:
        shape = (samples, heads) if attention_mask.dim() == 3 else (1, 1)
        masks.append(_additive(attention_mask, dtype).view(*shape, *attention_mask.shape[-2:]))
    if padding_mask is not None:
        masks.append(_additive(padding_mask, dtype).view(samples, 1, 1, -1))
    return sum(masks[1:], masks[0]) if masks else None


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
