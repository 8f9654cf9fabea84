"""The decomposition of nn.MultiheadAttention, against the layer itself."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt.moments.attention import Attention, Block, merged

SAMPLES, QUERIES, KEYS, FEATURES, HEADS = 3, 4, 5, 6, 2


class Plain:
    """The parameters as they are."""

    def __init__(self, layer: nn.MultiheadAttention) -> None:
        self.parameters = dict(layer.named_parameters())

    def linear(self, x: Tensor, weight: Block, bias: Block | None) -> Tensor:
        return F.linear(x, self.rows(weight), None if bias is None else self.rows(bias))

    def append(self, x: Tensor, name: str) -> Tensor:
        return torch.cat([x, self.parameters[name].expand(x.shape[0], -1, -1)], 1)

    def rows(self, block: Block) -> Tensor:
        return self.parameters[block.name][block.start : block.stop]


def settings(layer: nn.MultiheadAttention) -> Attention:
    return Attention(
        FEATURES, HEADS, layer.in_proj_weight is None, layer.in_proj_bias is not None, layer.bias_k is not None,
        layer.add_zero_attn, layer.dropout,
    )  # fmt: skip


def assert_same(layer: nn.MultiheadAttention, inputs: tuple[Tensor, ...], mask: Tensor | None, **call: Any) -> None:
    """Outputs and gradients of the decomposition and of the layer, under the same dropout."""
    torch.manual_seed(3)
    expected = layer(*inputs, need_weights=call["need_weights"], **call.pop("native"))
    torch.manual_seed(3)
    query, key, value = inputs
    actual = settings(layer).forward(Plain(layer), query, key, value, mask, **call)
    assert (actual[1] is None) == (expected[1] is None)
    targets = [*layer.parameters(), *{id(x): x for x in inputs}.values()]
    gradients = []
    for result in (actual, expected):
        parts = [part.flatten() for part in result if part is not None]
        loss = torch.stack([part.dot(torch.linspace(-1, 1, len(part), dtype=torch.float64)) for part in parts]).sum()
        gradients.append(torch.autograd.grad(loss, targets, allow_unused=True))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def leaf(positions: int, features: int = FEATURES) -> Tensor:
    return torch.randn(SAMPLES, positions, features, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("bias_kv", "zero", "dropout"), [(0, 0, 0.0), (1, 0, 0.0), (0, 1, 0.4), (1, 1, 0.4)])
@pytest.mark.parametrize("inputs", ["self", "memory", "three", "separate"])
def test_layer_options(inputs: str, bias_kv: int, zero: int, dropout: float, bias: bool, need_weights: bool) -> None:
    query, key = leaf(QUERIES), leaf(KEYS)
    given = {
        "self": (query, query, query),
        "memory": (query, key, key),
        "three": (query, key, leaf(KEYS)),
        "separate": (query, leaf(KEYS, 3), leaf(KEYS, 5)),
    }[inputs]
    layer = nn.MultiheadAttention(
        FEATURES, HEADS, dropout, bias, bool(bias_kv), bool(zero), batch_first=True,
        kdim=given[1].shape[2], vdim=given[2].shape[2], dtype=torch.float64,
    )  # fmt: skip
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    assert_same(layer, given, None, need_weights=need_weights, average=bias, native={"average_attn_weights": bias})


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("bias_kv", [False, True])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(("attention", "padding"), [(2, False), (3, False), (0, True), (2, True), (3, True)])
def test_masks(attention: int, padding: bool, kind: str, bias_kv: bool, need_weights: bool) -> None:
    layer = nn.MultiheadAttention(FEATURES, HEADS, add_bias_kv=bias_kv, batch_first=True, dtype=torch.float64)
    shapes = (QUERIES, KEYS) if attention == 2 else (SAMPLES * HEADS, QUERIES, KEYS), (SAMPLES, KEYS)
    attn_mask, padding_mask = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    if kind == "bool":
        attn_mask, padding_mask = attn_mask > 0.5, padding_mask > 0.5
        attn_mask[..., 0] = padding_mask[:, 0] = False  # somewhere to look
    native = {
        "attn_mask": attn_mask if attention else None,
        "key_padding_mask": padding_mask if padding else None,
    }
    mask = merged(native["attn_mask"], native["key_padding_mask"], SAMPLES, HEADS, torch.float64)
    assert_same(layer, (leaf(QUERIES), leaf(KEYS), leaf(KEYS)), mask, need_weights=need_weights, native=native)


def test_causal_without_a_mask() -> None:
    layer = nn.MultiheadAttention(FEATURES, HEADS, batch_first=True, dtype=torch.float64)
    x = leaf(QUERIES)
    mask = nn.Transformer.generate_square_subsequent_mask(QUERIES, dtype=torch.float64)
    assert_same(layer, (x, x, x), None, causal=True, need_weights=False, native={"attn_mask": mask, "is_causal": True})
