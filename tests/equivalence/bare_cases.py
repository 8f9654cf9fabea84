"""Modules that use parameters of their own in their forward pass, in the ways people do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


class Tokens(nn.Module):
    """A vision transformer's class token and position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.cls, self.positions, self.dropout = parameter(1, 1, 4), parameter(1, 6, 4), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1)
        return self.dropout(x + self.positions)


class LayerScale(nn.Module):
    """ConvNeXt's, over channels that are moved last."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = parameter(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.gamma * x.tanh().permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class RelativeBias(nn.Module):
    """Swin's: a table that is indexed, reshaped and added to the scores of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = parameter(9, 2)
        self.register_buffer("index", torch.randint(9, (16,)))

    def forward(self, scores: Tensor) -> Tensor:
        return (scores + self.table[self.index].view(4, 4, 2).permute(2, 0, 1).contiguous().unsqueeze(0)).softmax(-1)


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t = parameter()

    def forward(self, logits: Tensor) -> Tensor:
        return logits * self.t.exp()


class OwnLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = parameter(6, 4), parameter(6)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w, self.b)


class SubclassedLinear(nn.Linear):
    """With a forward pass of its own, so that the rule of nn.Linear is not for it."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return F.linear(input, self.weight * 2, self.bias) + self.weight.sum()


class StandardizedConv(nn.Module):
    def __init__(self, dims: int = 2) -> None:
        super().__init__()
        self.w, self.b = parameter(6, 2, *[3] * dims), parameter(6)
        self.convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[dims]

    def forward(self, x: Tensor) -> Tensor:
        axes = tuple(range(1, self.w.dim()))
        w = (self.w - self.w.mean(axes, keepdim=True)) / (self.w.std(axes, keepdim=True) + 1e-5)
        y: Tensor = self.convolve(x, w, self.b, padding=1, stride=2)
        return y


class TransposedConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = parameter(2, 3, 2, 2), parameter(3)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv_transpose2d(x, self.w, self.b, stride=2)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = parameter(4, 3), parameter(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w1 * torch.sigmoid(x @ self.w2)


class MaskToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = parameter(4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask[..., None], self.token, x)


class MaskTokenWritten(MaskToken):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x.clone()
        x[mask] = self.token
        return x


class MaskTokenMixed(nn.Module):
    """BEiT's."""

    def __init__(self) -> None:
        super().__init__()
        self.token = parameter(1, 1, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        tokens = self.token.expand(*x.shape[:2], -1)
        weight = mask.unsqueeze(-1).type_as(tokens)
        return x * (1 - weight) + tokens * weight


class ViewedBias(nn.Module):
    """A bias of pairs of places for each head, repeated for the samples, and seen as rows of them."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.gate = nn.Embedding(3, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        bias = self.bias((torch.arange(t * t) % 3).view(t, t)).permute(2, 0, 1)
        bias = bias.unsqueeze(0).repeat(n, 1, 1, 1).view(n * 2, t, t)
        gate = self.gate(x).transpose(1, 2).reshape(n * 2, t, 1)
        return (gate * bias).view(n, 2, t, t)


class CopiedBehind(nn.Module):
    """Time comes first, and parameters are copied for the samples on the second axis: a token in front, and places."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.places, self.layer = parameter(1, 1, 4), parameter(9, 1, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, n = x.transpose(0, 1), len(x)
        h = torch.cat([self.token.expand(1, n, 4), h * self.token.repeat(1, n, 1)])
        h = h + self.places[: len(h)].expand(-1, n, -1)
        y: Tensor = self.layer(h.tanh())
        return y.transpose(0, 1)


class CopiedColumns(nn.Module):
    """A matrix whose columns are copies, by chance as many as there are samples on the second axis of what it meets."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.column, self.columns = parameter(4, 1), columns

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(0, 1) @ self.column.expand(-1, self.columns)
        return y.transpose(0, 1)


class CopiedHeads(nn.Module):
    """Scales of heads, by chance as many as samples, which lie on another axis."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.scale, self.heads = parameter(1, 1, 2), heads

    def forward(self, x: Tensor) -> Tensor:
        h = x.unflatten(-1, (1, -1)).expand(-1, -1, self.heads, -1).transpose(0, 1)  # (time, samples, heads, features)
        return (h * self.scale.expand(1, self.heads, 2) + self.scale.repeat(1, self.heads, 1)).transpose(0, 1)


class ViewedByName(nn.Module):
    """A parameter that is viewed by keyword, and as another dtype and back."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = parameter(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.bias * 2).view(size=(4,)) + self.bias.reshape(-1).view(x.dtype)


class Sign(torch.autograd.Function):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Levels(torch.autograd.Function):
    """A learned step, as that of a quantisation."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, step: Tensor, most: int) -> Tensor:
        ctx.save_for_backward(w, step)
        return (w / step).round().clamp(-most, most) * step

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        w, step = ctx.saved_tensors
        return gradients[0], (gradients[0] * (w / step).sin()).sum().reshape(step.shape), None


class Quantised(nn.Module):
    """Weights that go through functions of the author's own."""

    def __init__(self) -> None:
        super().__init__()
        self.binary, self.few, self.step = parameter(3, 4), parameter(2, 3), parameter()

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, Sign.apply(self.binary)).tanh()
        return F.linear(h, Levels.apply(self.few, self.step, 3))


class Modulated(nn.Module):
    """StyleGAN's convolution, whose weights are the sample's own: a group for each."""

    def __init__(self, transposed: bool = False) -> None:
        super().__init__()
        self.weight, self.bias, self.style = parameter(2, 3, 3, 3), parameter(2), nn.Linear(3, 3)
        self.transposed = transposed

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        weight = self.weight * self.style(x.mean((2, 3)))[:, None, :, None, None]
        flat = x.reshape(1, n * c, h, w)
        if self.transposed:
            y = F.conv_transpose2d(flat, weight.transpose(1, 2).reshape(n * c, 2, 3, 3), stride=2, groups=n)
        else:
            y = F.conv2d(flat, weight.reshape(n * 2, c, 3, 3), padding=1, groups=n)
        return y.view(n, 2, *y.shape[2:]) + self.bias[:, None, None]


class Prompt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompt, self.layer = parameter(2, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        prompt = self.prompt.unsqueeze(0).repeat(len(x), 1, 1)
        y: Tensor = self.layer(torch.cat([prompt, x], 1))
        return y


class Queries(nn.Module):
    """DETR's or a Perceiver's: a layer sees nothing but what was computed from parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.layer, self.norm = parameter(3, 4), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        q = self.norm(self.layer(self.queries.expand(len(x), -1, -1)))
        return F.scaled_dot_product_attention(q, x, x)


class PlaceTokens(nn.Module):
    """A token for each place, the same for all samples: a layer sees as many rows as there are places."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.token, self.layer, self.places = parameter(1, 4), nn.Linear(4, 4), places

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tanh(self.layer(self.token.expand(self.places, 4)))


class DeepQueries(nn.Module):
    """Several layers, with dropout in between, before the queries meet the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.layers = parameter(5, 4), nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        q = self.queries.expand(len(x), -1, -1)
        for layer in self.layers:
            q = q + F.dropout(torch.tanh(layer(q)), 0.3)
        return q * x


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = parameter(2, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("btd,hde->bhte", x, self.w)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = parameter(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.w) @ self.w.T + x * self.w[0] + F.softmax(self.w, 0)[1]


class OwnRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(4)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class OwnNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = parameter(4), parameter(4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x, (4,), self.w, self.b).tanh()
        return F.group_norm(x.transpose(1, 2), 2, self.b, self.w)


class Containers(nn.Module):
    """nn.ParameterList and nn.ParameterDict have no forward pass: their parent uses what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([parameter(4), parameter(4)])
        self.named = nn.ParameterDict({"shift": parameter(4)})

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = torch.tanh(x) * scale
        return x + self.named["shift"]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift, self.first, self.scale = parameter(4), parameter(4), parameter(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        x += self.shift
        x[:, 0] = self.first
        x.mul_(self.scale)
        return x


class SequenceFirst(nn.Module):
    """Inside, samples are on the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.scale, self.layer = parameter(5, 1, 4), parameter(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.transpose(0, 1) + self.positions) * self.scale
        return y.transpose(0, 1)


class Windows(nn.Module):
    """Windows of all samples on one axis, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.w, self.layer = parameter(2, 4, 4), parameter(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        windows = self.layer(x.view(len(x), 2, 4, 4).reshape(-1, 4, 4)) @ self.w
        scores = (windows @ windows.mT).unsqueeze(1) + self.bias
        return scores.view(len(x), -1)


class OwnEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.positions = parameter(7, 4), parameter(9, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.w, padding_idx=3) + self.positions[: tokens.shape[1]]
        return x * self.w[tokens - 7]


class ConstantIndices(nn.Module):
    """Positions and types that are the same for all samples, looked up in covered layers."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.types, self.scale = nn.Embedding(9, 4), nn.Embedding(2, 4), parameter(4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions(torch.arange(x.shape[1])) + self.types(torch.zeros(x.shape[:2], dtype=torch.int64))
        return x * self.scale + self.positions(torch.arange(x.shape[1]).unsqueeze(0))


class Frequencies(nn.Module):
    """A constant of as many rows as positions meets a parameter before the samples do."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies = parameter(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(torch.arange(x.shape[1], dtype=x.dtype)[:, None] * self.frequencies)


class Borrowed(nn.Module):
    """Uses the weight of a covered layer outside of that layer: a tied head by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.scale = nn.Embedding(7, 4), parameter(4)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.embedding(tokens) * self.scale), self.embedding.weight)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.block, self.reentrant = nn.Linear(4, 4), OwnRMSNorm(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)
        return y


class Attention(nn.Module):
    """A learned bias, learned keys and values, and dropout, through the fused function."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.k, self.v = parameter(2, 3, 5), parameter(1, 2, 2, 4), parameter(1, 2, 2, 4)

    def forward(self, x: Tensor) -> Tensor:
        k, v = (torch.cat([part.expand(len(x), -1, -1, -1), x], 2) for part in (self.k, self.v))
        return F.scaled_dot_product_attention(x, k, v, self.bias, dropout_p=0.3)


class DroppedParameter(nn.Module):
    """One mask for all samples: part of what is computed from the parameter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.w = parameter(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x @ F.dropout(self.w, 0.5)


@dataclass(frozen=True)
class Case:
    name: str
    module: Callable[[], nn.Module]
    shape: tuple[int, ...]
    samples: int = 5
    kind: str = "float"  # "tokens": integers below 7; "mask": floats and a mask of their first axes; "pair": two

    def __str__(self) -> str:
        return self.name

    def inputs(self, samples: int | None = None) -> tuple[Tensor, ...]:
        samples = samples or self.samples
        if self.kind == "tokens":
            return (torch.randint(7, (samples, *self.shape)),)
        x = torch.randn(samples, *self.shape, dtype=torch.float64)
        if self.kind == "mask":
            return x, torch.rand(samples, self.shape[0]) < 0.5
        if self.kind == "pair":
            return x, torch.randn(samples, 3, dtype=torch.float64)
        return (x,)


CASES = [
    Case("class-token", Tokens, (5, 4)),
    Case("layer-scale", LayerScale, (3, 2, 4)),
    Case("layer-scale-as-many-samples-as-channels", LayerScale, (3, 3, 3), samples=3),
    Case("relative-bias", RelativeBias, (2, 4, 4)),
    Case("relative-bias-as-many-samples-as-positions", RelativeBias, (2, 4, 4), samples=4),
    Case("relative-bias-as-many-samples-as-indices", RelativeBias, (2, 4, 4), samples=16),
    Case("temperature", Temperature, (3,)),
    Case("linear", OwnLinear, (4,)),
    Case("linear-sequence", OwnLinear, (3, 4)),
    Case("linear-square", OwnLinear, (6, 4), samples=6),
    Case("linear-one-sample", OwnLinear, (3, 4), samples=1),
    Case("linear-subclass", lambda: SubclassedLinear(4, 3), (3, 4)),
    Case("conv1d", lambda: StandardizedConv(1), (2, 7)),
    Case("conv2d", StandardizedConv, (2, 5, 5)),
    Case("conv3d", lambda: StandardizedConv(3), (2, 4, 4, 3)),
    Case("conv-transpose", TransposedConv, (2, 3, 3)),
    Case("gated", Gated, (4,)),
    Case("gated-square", Gated, (4, 4), samples=4),
    Case("mask-token", MaskToken, (3, 4), kind="mask"),
    Case("mask-token-written", MaskTokenWritten, (3, 4), kind="mask"),
    Case("mask-token-mixed", MaskTokenMixed, (3, 4), kind="mask"),
    Case("prompt", Prompt, (3, 4)),
    Case("modulated", Modulated, (3, 5, 5)),
    Case("modulated-transposed", lambda: Modulated(transposed=True), (3, 4, 4)),
    Case("copied-behind", CopiedBehind, (5, 4)),
    Case("copied-behind-square", CopiedBehind, (5, 4), samples=5),
    Case("copied-columns", lambda: CopiedColumns(5), (3, 4), samples=5),
    Case("copied-heads", lambda: CopiedHeads(5), (3, 2), samples=5),
    Case("viewed-by-name", ViewedByName, (4,)),
    Case("quantised", Quantised, (4,)),
    Case("quantised-square", Quantised, (4,), samples=3),
    Case("quantised-sequence", Quantised, (5, 4)),
    Case("viewed-bias", ViewedBias, (5, 4)),
    Case("queries", Queries, (5, 4)),
    Case("place-tokens", lambda: PlaceTokens(3), (3, 4)),
    Case("place-tokens-as-many-samples-as-places", lambda: PlaceTokens(5), (5, 4)),
    Case("deep-queries", DeepQueries, (5, 4)),
    Case("einsum", Einsum, (3, 4)),
    Case("used-twice", Twice, (4,)),
    Case("used-twice-square", Twice, (4,), samples=4),
    Case("rms-norm", OwnRMSNorm, (3, 4)),
    Case("norms", OwnNorms, (3, 4)),
    Case("containers", Containers, (3, 4)),
    Case("in-place", InPlace, (3, 4)),
    Case("sequence-first", SequenceFirst, (5, 4), samples=3),
    Case("sequence-first-square", SequenceFirst, (5, 4), samples=5),
    Case("windows", Windows, (8, 4), samples=3),
    Case("embedding", OwnEmbedding, (6,), kind="tokens"),
    Case("embedding-square", OwnEmbedding, (5,), kind="tokens"),
    Case("constant-indices", ConstantIndices, (3, 4)),
    Case("constant-indices-square", ConstantIndices, (5, 4)),
    Case("frequencies", Frequencies, (3, 4)),
    Case("frequencies-square", Frequencies, (5, 4)),
    Case("borrowed-weight", Borrowed, (3,), kind="tokens"),
    Case("bilinear", lambda: nn.Bilinear(4, 3, 2), (4,), kind="pair"),
    Case("checkpoint", lambda: Checkpointed(reentrant=False), (3, 4)),
    Case("checkpoint-reentrant", lambda: Checkpointed(reentrant=True), (3, 4)),
    Case("attention", Attention, (2, 3, 4)),
    Case("dropped-parameter", DroppedParameter, (3, 4)),
]
