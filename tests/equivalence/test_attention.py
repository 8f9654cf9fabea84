"""nn.MultiheadAttention and nn.Transformer*: exact second moments of every parameter, outputs of the plain layer."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoopt.capture import Capture
from equivalence.by_sample import assert_exact, contributions
from equivalence.cases import assert_close

N, QUERIES, KEYS, FEATURES, HEADS = 5, 4, 3, 6, 2
both_moments = pytest.mark.parametrize("elementwise", [True, False], ids=["elementwise", "total"])
both_layouts = pytest.mark.parametrize("batch_first", [True, False], ids=["batch-first", "time-first"])


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def attention(**options: Any) -> nn.MultiheadAttention:
    layer = nn.MultiheadAttention(FEATURES, HEADS, dtype=torch.float64, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)  # biases start at zero, which hides mistakes
    return layer


def losses(layer: nn.MultiheadAttention, inputs: tuple[Tensor, ...], **call: Any) -> Tensor:
    """A loss of each sample from all that the layer gives; the inputs are (samples, positions, features)."""
    if not layer.batch_first:
        given = {id(x): x.transpose(0, 1) for x in inputs}
        inputs = tuple(given[id(x)] for x in inputs)
    output, weights = layer(*inputs, **call)
    parts = [output if layer.batch_first else output.transpose(0, 1)] + ([] if weights is None else [weights])
    return torch.stack([part.flatten(1).square().mean(1) for part in parts]).sum(0)


def inputs_of(kind: str) -> tuple[Tensor, ...]:
    query, key = randn(N, QUERIES, FEATURES), randn(N, KEYS, FEATURES)
    return {
        "self": (query, query, query),
        "memory": (query, key, key),
        "three": (query, key, randn(N, KEYS, FEATURES)),
        "separate": (query, randn(N, KEYS, 2), randn(N, KEYS, 7)),
    }[kind]


@both_moments
@both_layouts
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"dropout": 0.3, "add_bias_kv": True}],
    ids=["plain", "no-bias", "bias-kv", "zero", "dropout"],
)
@pytest.mark.parametrize("kind", ["self", "memory", "three", "separate"])
def test_layer_options(
    kind: str, options: dict[str, Any], need_weights: bool, batch_first: bool, elementwise: bool
) -> None:
    inputs = inputs_of(kind)
    if kind == "separate":
        options = {**options, "kdim": 2, "vdim": 7}
    layer = attention(batch_first=batch_first, **options)
    assert_exact(layer, lambda m: losses(m, inputs, need_weights=need_weights), elementwise)


@both_moments
@both_layouts
@pytest.mark.parametrize("heads_apart", [True, False])
@pytest.mark.parametrize("attn", [None, 2, 3])
@pytest.mark.parametrize("padding", [False, True])
def test_masks(padding: bool, attn: int | None, heads_apart: bool, batch_first: bool, elementwise: bool) -> None:
    layer, inputs = attention(batch_first=batch_first), inputs_of("memory")
    call: dict[str, Any] = {"need_weights": True, "average_attn_weights": not heads_apart}
    if attn:
        call["attn_mask"] = torch.rand(*(() if attn == 2 else (N * HEADS,)), QUERIES, KEYS) < 0.3
        call["attn_mask"][..., 0] = False  # somewhere to look
    if padding:
        call["key_padding_mask"] = torch.zeros(N, KEYS, dtype=torch.bool)
        call["key_padding_mask"][1:, -1] = True
    assert_exact(layer, lambda m: losses(m, inputs, **call), elementwise)
    call["need_weights"] = False
    assert_exact(copy.deepcopy(layer), lambda m: losses(m, inputs, **call), elementwise)


@both_layouts
@pytest.mark.parametrize("need_weights", [True, False])
def test_causal(need_weights: bool, batch_first: bool) -> None:
    layer, inputs = attention(batch_first=batch_first), inputs_of("self")
    mask = nn.Transformer.generate_square_subsequent_mask(QUERIES, dtype=torch.float64)
    call = {"attn_mask": mask, "is_causal": True, "need_weights": need_weights}
    assert_exact(layer, lambda m: losses(m, inputs, **call), elementwise=True)


@both_layouts
def test_input_without_a_batch_axis_is_one_sample(batch_first: bool) -> None:
    layer, (query, key, value) = (
        attention(batch_first=batch_first, add_bias_kv=True),
        (x[0] for x in inputs_of("three")),
    )
    call = {"key_padding_mask": torch.tensor([False, True, False]), "attn_mask": torch.rand(HEADS, QUERIES, KEYS) < 0.1}
    with torch.no_grad():
        expected = layer(query, key, value, **call)
    capture = Capture(layer, dict(layer.named_parameters()), elementwise=True)
    actual = layer(query, key, value, **call)
    torch.testing.assert_close(actual, expected)
    actual[0].square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(capture.second_moment(name), parameter.grad.square())
        assert capture.samples(name) == 1


@both_moments
@pytest.mark.parametrize("kind", ["self", "memory"])
def test_a_layer_used_twice(kind: str, elementwise: bool) -> None:
    first, second = inputs_of(kind), inputs_of(kind)
    layer = attention(batch_first=True, add_bias_kv=True)
    assert_exact(layer, lambda m: losses(m, first) + losses(m, second).sqrt(), elementwise)


def test_accumulation() -> None:
    inputs = inputs_of("memory")
    assert_exact(attention(batch_first=True), lambda m: losses(m, inputs), True, passes=3)


def test_gradients_of_the_inputs() -> None:
    plain = attention(batch_first=True)
    layer = copy.deepcopy(plain)
    Capture(layer, dict(layer.named_parameters()), elementwise=True)
    given = inputs_of("three")
    found = []
    for m in (plain, layer):
        leaves = tuple(x.clone().requires_grad_() for x in given)
        losses(m, leaves).mean().backward()
        found.append([leaf.grad for leaf in leaves])
    for a, b in zip(*found, strict=True):
        assert_close(a, b, 1e-11, "gradient")


@pytest.mark.parametrize("frozen", ["in_proj_weight", "out_proj.weight", "bias_k"])
def test_frozen_parameters(frozen: str) -> None:
    layer, inputs = attention(batch_first=True, add_bias_kv=True), inputs_of("self")
    layer.get_parameter(frozen).requires_grad_(False)
    assert_exact(layer, lambda m: losses(m, inputs), True)
    assert layer.get_parameter(frozen).grad is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    layer, x = attention(batch_first=True), randn(N, QUERIES, FEATURES).requires_grad_()
    expected = contributions(layer, lambda m: losses(m, (x, x, x)))
    capture = Capture(layer, dict(layer.named_parameters()), elementwise=True)
    checkpoint(lambda z: losses(layer, (z, z, z)), x, use_reentrant=reentrant).mean().backward()
    for name, c in expected.items():
        assert_close(capture.second_moment(name), c.square().sum(0), 1e-10, name)
        assert capture.samples(name) == N


def test_autocast() -> None:
    """The projections run in bfloat16, squares are taken in float32."""
    layer, x = attention(batch_first=True, add_bias_kv=True).float(), torch.randn(N, QUERIES, FEATURES)
    expected = contributions(copy.deepcopy(layer).double(), lambda m: losses(m, (x.double(),) * 3, need_weights=False))
    capture = Capture(layer, dict(layer.named_parameters()), elementwise=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = losses(layer, (x, x, x), need_weights=False).float().mean()
    loss.backward()
    for name, c in expected.items():
        moment = capture.second_moment(name)
        assert moment is not None
        assert moment.dtype == torch.float32
        assert_close(moment, c.square().sum(0), 0.1, name)


@pytest.mark.parametrize("clone_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_plain_and_detaching_restores(clone_of: Callable[[Any], Any]) -> None:
    layer, x = attention(batch_first=True), randn(N, QUERIES, FEATURES)
    kinds = [type(module) for module in layer.modules()]
    attributes = sorted(layer.__dict__)
    capture = Capture(layer, dict(layer.named_parameters()), elementwise=True)
    clone = clone_of(layer)
    assert [type(module) for module in clone.modules()] == kinds
    torch.testing.assert_close(clone(x, x, x), layer(x, x, x))
    capture.detach()
    assert [type(module) for module in layer.modules()] == kinds
    assert sorted(layer.__dict__) == attributes


def test_wrong_input_raises_what_the_layer_raises() -> None:
    layer, x = attention(batch_first=True), randn(N, QUERIES, FEATURES)
    bad: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = [
        ((x, x[0], x[0]), {}),
        ((x[..., 1:], x, x), {}),
        ((x, x, x[:, 1:]), {}),
        ((x, x, x), {"attn_mask": torch.zeros(QUERIES, QUERIES + 1, dtype=torch.float64)}),
        ((x, x, x), {"key_padding_mask": torch.zeros(N, QUERIES + 1, dtype=torch.float64)}),
        ((x, x, x), {"is_causal": True}),
    ]
    said = []
    for _ in range(2):
        for inputs, call in bad:
            with pytest.raises((AssertionError, RuntimeError)) as error:
                layer(*inputs, **call)
            said.append(str(error.value))
        Capture(layer, dict(layer.named_parameters()), elementwise=True)
    assert said[: len(bad)] == said[len(bad) :]


def test_evaluation_takes_torchs_own_path() -> None:
    layer = nn.TransformerEncoderLayer(FEATURES, HEADS, 8, batch_first=True)
    x = torch.randn(N, QUERIES, FEATURES)
    with torch.no_grad():
        expected = layer.eval()(x)
        Capture(layer, dict(layer.named_parameters()), elementwise=True)
        torch.testing.assert_close(layer(x), expected)
