"""Backpropagation through time, against autograd through torch's own layers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from autoopt.moments import recurrent

TIMES, SAMPLES, INPUTS, HIDDEN, PROJECTED = 6, 4, 3, 5, 2
MODES = ["LSTM", "LSTM-projected", "GRU", "RNN_TANH", "RNN_RELU"]


def layer_of(mode: str, bias: bool) -> nn.RNNBase:
    if mode.startswith("LSTM"):
        layer: nn.RNNBase = nn.LSTM(INPUTS, HIDDEN, bias=bias, proj_size=PROJECTED if "projected" in mode else 0)
    elif mode == "GRU":
        layer = nn.GRU(INPUTS, HIDDEN, bias=bias)
    else:
        layer = nn.RNN(INPUTS, HIDDEN, bias=bias, nonlinearity=mode.removeprefix("RNN_").lower())
    return layer.double()


def weights_of(layer: nn.RNNBase, suffix: str) -> recurrent.Weights:
    named = dict(layer.named_parameters())
    kinds = "weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr"
    ih, hh, *rest = (named.get(kind + suffix) for kind in kinds)
    assert ih is not None
    assert hh is not None
    return recurrent.Weights(ih, hh, *rest)


def state_of(layer: nn.RNNBase) -> tuple[Tensor, ...]:
    levels = layer.num_layers * (2 if layer.bidirectional else 1)
    h = torch.randn(levels, SAMPLES, layer.proj_size or HIDDEN, dtype=torch.float64, requires_grad=True)
    c = torch.randn(levels, SAMPLES, HIDDEN, dtype=torch.float64, requires_grad=True)
    return (h, c) if layer.mode == "LSTM" else (h,)


@pytest.mark.parametrize("lengths", [None, torch.tensor([3, 6, 1, 4])], ids=["full", "ragged"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_outputs_and_gradients_are_those_of_the_layer(mode: str, bias: bool, lengths: Tensor | None) -> None:
    layer = layer_of(mode, bias)
    x = torch.randn(TIMES, SAMPLES, INPUTS, dtype=torch.float64, requires_grad=True)
    state = state_of(layer)
    hidden = state if layer.mode == "LSTM" else state[0]
    if lengths is None:
        output, last = layer(x, hidden)
    else:
        packed, last = layer(pack_padded_sequence(x, lengths, enforce_sorted=False), hidden)
        output, _ = pad_packed_sequence(packed)
    expected = (output, *(part[0] for part in (last if layer.mode == "LSTM" else (last,))))
    upstream = tuple(torch.randn_like(part) for part in expected)
    if lengths is not None:
        for sample, length in enumerate(lengths.tolist()):
            upstream[0][length:, sample] = 0  # as padding has it
    sum((a * b).sum() for a, b in zip(expected, upstream, strict=True)).backward()

    weights = weights_of(layer, "_l0")
    first = tuple(part[0] for part in state)
    with torch.no_grad():
        result = recurrent.run(layer.mode, x, first, weights, lengths)
        history = torch.cat([first[0].unsqueeze(0), result[0]])
        cell = first[1] if layer.mode == "LSTM" else None
        back = recurrent.backward(layer.mode, x, history, cell, weights, upstream, lengths)

    for mine, native in zip(result, expected, strict=True):
        torch.testing.assert_close(mine, native, rtol=1e-12, atol=1e-12)
    uses = [("weight_ih_l0", back.ih), ("weight_hh_l0", back.hh)] + ([("weight_hr_l0", back.hr)] if back.hr else [])
    for name, use in uses:
        gradient = torch.einsum("tbo,tbi->oi", use.delta, use.a)
        torch.testing.assert_close(gradient, layer.get_parameter(name).grad, rtol=1e-12, atol=1e-12, msg=name)
    if bias:
        for name, use in (("bias_ih_l0", back.ih), ("bias_hh_l0", back.hh)):
            gradient = use.delta.sum((0, 1))
            torch.testing.assert_close(gradient, layer.get_parameter(name).grad, rtol=1e-12, atol=1e-12, msg=name)
    torch.testing.assert_close(back.ih.delta @ weights.ih, x.grad, rtol=1e-12, atol=1e-12)
    for mine, part in zip(back.state, state, strict=True):
        assert part.grad is not None
        torch.testing.assert_close(mine, part.grad[0], rtol=1e-12, atol=1e-12)


# torch drops in packed data, in another order than that of the padded, so the two are not combined
@pytest.mark.parametrize(("dropout", "ragged"), [(0.0, False), (0.4, False), (0.0, True)])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_stack_of_levels_is_the_layer(
    kind: Callable[..., nn.RNNBase], both: bool, dropout: float, ragged: bool
) -> None:
    layer = kind(INPUTS, HIDDEN, num_layers=3, bidirectional=both, dropout=dropout).double()
    x, state = torch.randn(TIMES, SAMPLES, INPUTS, dtype=torch.float64), state_of(layer)
    hidden = state if layer.mode == "LSTM" else state[0]
    lengths = torch.tensor([3, 6, 1, 4]) if ragged else None
    torch.manual_seed(1)
    if lengths is None:
        expected, last = layer(x, hidden)
    else:
        packed, last = layer(pack_padded_sequence(x, lengths, enforce_sorted=False), hidden)
        expected, _ = pad_packed_sequence(packed)

    def level(suffix: str, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return recurrent.run(layer.mode, x, state, weights_of(layer, suffix), lengths)

    torch.manual_seed(1)
    output, ends = recurrent.Stack(3, both, dropout).forward(level, x, state, lengths)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    for mine, native in zip(ends, last if layer.mode == "LSTM" else (last,), strict=True):
        torch.testing.assert_close(mine, native, rtol=1e-12, atol=1e-12)
