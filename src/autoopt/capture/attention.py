"""Observed nn.MultiheadAttention. Every projection is a part of the call."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from autoopt.capture.composite import Composite, LinearUse
from autoopt.capture.copies import Copies
from autoopt.capture.current import operands
from autoopt.moments import Contributions, Product
from autoopt.moments.attention import Attention, Block, merged


class Shares:
    """What samples add to a parameter of which several parts of one call use some rows each."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.parts: list[tuple[Block, Contributions]] = []

    def __call__(self, rows: slice) -> Tensor:
        pieces = [(block, contributions(rows)) for block, contributions in self.parts]
        first = pieces[0][1]
        c = first.new_zeros(len(first), *self.tensor.shape)
        for block, piece in pieces:
            c[:, block.start : block.stop] += piece
        return c


class Call:
    """One call of an attention layer: how it uses its parameters."""

    def __init__(self, site: Composite, layer: Any) -> None:
        self.site, self.layer = site, layer
        self.tensors: dict[str, Tensor] = {}
        self.shares: dict[str, Shares] = {}

    def linear(self, x: Tensor, weight: Block, bias: Block | None) -> Tensor:
        """As `attention.Parameters` has it."""
        x, w, b = operands(x, self._rows(weight), None if bias is None else self._rows(bias))
        output: Tensor = LinearUse.apply(  # type: ignore[no-untyped-call]
            self.site,
            f"{weight.name}[{weight.start}]",
            functools.partial(self.weight_gradient, weight),
            None if bias is None else functools.partial(self.bias_gradient, bias),
            x,
            w,
            b,
        )
        return output

    def append(self, x: Tensor, name: str) -> Tensor:
        """As `attention.Parameters` has it."""
        parameter = self._tensor(name)
        samples = len(x) // self.site.fold
        copies: Tensor = Copies.apply(parameter, samples, self.site.ledger)  # type: ignore[no-untyped-call]
        return torch.cat([x, self.site.spread(copies.squeeze(1))], 1)

    def weight_gradient(self, block: Block, use: Product, ctx: Any) -> Tensor:
        """The gradient of the rows of a weight, whose contributions are reported."""
        tensor = self.tensors[block.name]
        if self._whole(block):
            return self.site.product(tensor, use, ctx)
        self._share(block, use, len(use.delta), ctx)
        return use.gradient()

    def bias_gradient(self, block: Block, c: Tensor, ctx: Any) -> Tensor:
        """The gradient of the rows of a bias, whose contributions c are reported."""
        if self._whole(block):
            return self.site.sum(self.tensors[block.name], c, ctx)
        self._share(block, c.__getitem__, len(c), ctx)
        return c.sum(0)

    def _share(self, block: Block, contributions: Contributions, samples: int, ctx: Any) -> None:
        """Enter a use of some rows: the first to come makes the entry, to which the others add until it is settled."""
        tensor = self.tensors[block.name]
        known = block.name in self.shares
        self.shares.setdefault(block.name, Shares(tensor)).parts.append((block, contributions))
        if not known:
            self.site.enter(tensor, samples, self.shares[block.name], ctx)

    def _whole(self, block: Block) -> bool:
        return block.stop - block.start == len(self.tensors[block.name])

    def _rows(self, block: Block) -> Tensor:
        tensor = self._tensor(block.name)
        return tensor if self._whole(block) else tensor[block.start : block.stop]

    def _tensor(self, name: str) -> Tensor:
        """A parameter, or what is computed from one, which must be the same for all parts."""
        if name not in self.tensors:
            owner, _, key = name.rpartition(".")
            self.tensors[name] = getattr(self.layer.get_submodule(owner), key)
        return self.tensors[name]


def run(
    site: Composite,
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The forward pass of an nn.MultiheadAttention."""
    single = query.dim() == 2
    if not _valid(layer, query, key, value, key_padding_mask, attn_mask, is_causal):
        result: tuple[Tensor, Tensor | None] = site.plain.forward(
            layer, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )  # which says what is wrong
        return result
    given = {
        id(x): x.unsqueeze(0) if single else x if layer.batch_first else x.transpose(0, 1) for x in (query, key, value)
    }
    inputs = given[id(query)], given[id(key)], given[id(value)]  # of the same tensor the same one
    site.begin(len(inputs[0]))
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = merged(None if causal else attn_mask, key_padding_mask, len(inputs[0]), layer.num_heads, query.dtype)
    settings = Attention(
        features=layer.embed_dim,
        heads=layer.num_heads,
        separate=not layer._qkv_same_embed_dim,
        bias=layer.in_proj_bias is not None,
        bias_kv=layer.bias_k is not None,
        zero=layer.add_zero_attn,
        dropout=layer.dropout if layer.training else 0.0,
    )
    output, weights = settings.forward(
        Call(site, layer), *inputs, mask, causal=causal, need_weights=need_weights, average=average_attn_weights
    )
    if single:
        return output.squeeze(0), None if weights is None else weights.squeeze(0)
    return output if layer.batch_first else output.transpose(0, 1), weights


def _valid(layer: Any, query: Tensor, key: Tensor, value: Tensor, padding: Any, mask: Any, causal: bool) -> bool:
    """Whether the layer itself would take these arguments."""
    if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim() or query.is_nested:
        return False
    batch, time = (0, 1) if layer.batch_first else (1, 0)
    if query.dim() == 2:
        samples, times, keys = 1, query.shape[0], key.shape[0]
    else:
        samples, times, keys = query.shape[batch], query.shape[time], key.shape[time]
    sizes = (times, keys) if mask is not None and mask.dim() == 2 else (samples * layer.num_heads, times, keys)
    return (
        key.shape[:-1] == value.shape[:-1]
        and (query.dim() == 2 or key.shape[batch] == samples)
        and (query.shape[-1], key.shape[-1], value.shape[-1]) == (layer.embed_dim, layer.kdim, layer.vdim)
        and (padding is None or padding.shape == ((keys,) if query.dim() == 2 else (samples, keys)))
        and (tuple(mask.shape) == sizes if mask is not None else not causal)
    )


def sequence_first(model: nn.Module) -> set[nn.Module]:
    """The layers in torch's transformers that take (time, batch, features), as their owners were told to."""
    found: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            if not module.self_attn.batch_first:
                found |= set(module.modules())
        elif isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder) and module.norm is not None:
            first = module.layers[0]
            if not getattr(getattr(first, "self_attn", None), "batch_first", True):
                found |= set(module.norm.modules())
    return found
