"""Recurrent layers: one layer in one direction, whose weights are used at every step of time.

torch's own kernel runs the forward pass, and what it leaves out, the gates, is formed again in the backward pass: with
all states h_t known they no longer wait for each other, so that one matrix product gives those of all times at once.
What remains of backpropagation through time is one small product per step. It ends in δ, the gradients that reach the
gates at all times, and with them a recurrent weight is a linear layer over a sequence: c_i = Σ_t δ_it h_i,t-1ᵀ.

Time stands on the first axis, samples on the second, as torch's kernels have it. Sequences may end at times of their
own (`lengths`): what lies behind the end of one is padding, which no gradient reaches.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

KERNELS: dict[str, Callable[..., Any]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}


class Weights(NamedTuple):
    """The parameters of one layer in one direction, in torch's order."""

    ih: Tensor  # from the input to the gates
    hh: Tensor  # from the state to the gates
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    hr: Tensor | None = None  # from an LSTM's hidden values to its state, where proj_size asks for it


Level = Callable[[str, Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]
"""(suffix of the parameters' names, input, first state) -> what `run` gives, for one layer in one direction."""


class Use(NamedTuple):
    """A weight multiplied `a` and received `delta`, both (time, samples, ·): a sample contributes Σ_t δ_t a_tᵀ."""

    delta: Tensor
    a: Tensor


class Backward(NamedTuple):
    """What backpropagation through time gives."""

    ih: Use
    hh: Use
    hr: Use | None
    state: tuple[Tensor, ...]  # the gradients of the first state


@dataclass(frozen=True)
class Stack:
    """The settings of a recurrent layer of torch: how its levels stand behind and beside each other."""

    layers: int
    both: bool  # forwards and backwards in time
    dropout: float  # the share that is dropped now between layers

    def forward(
        self, level: Level, x: Tensor, state: tuple[Tensor, ...], lengths: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The outputs at all times, and the last states, which have (levels, samples, ·) as the first ones do."""
        last = []
        firsts = iter(zip(*(part.unbind() for part in state), strict=True))
        for layer in range(self.layers):
            output, *ends = level(f"_l{layer}", x, next(firsts))
            last.append(ends)
            if self.both:
                backwards, *ends = level(f"_l{layer}_reverse", reverse(x, lengths), next(firsts))
                output = torch.cat([output, reverse(backwards, lengths)], -1)
                last.append(ends)
            x = F.dropout(output, self.dropout) if self.dropout and layer + 1 < self.layers else output
        return x, tuple(torch.stack(ends) for ends in zip(*last, strict=True))


def cell(mode: str, from_x: Tensor, from_h: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The state after one step, from what input and state send to the gates, all (samples, ·)."""
    if mode == "LSTM":
        i, f, g, o = (from_x + from_h).chunk(4, 1)
        c = torch.addcmul(f.sigmoid() * state[1], i.sigmoid(), g.tanh())
        return o.sigmoid() * c.tanh(), c
    if mode == "GRU":
        size = state[0].shape[1]
        r, z = (from_x[:, : 2 * size] + from_h[:, : 2 * size]).sigmoid().chunk(2, 1)
        n = torch.addcmul(from_x[:, 2 * size :], r, from_h[:, 2 * size :]).tanh()
        return (torch.addcmul(n, z, state[0] - n),)
    gate = from_x + from_h
    return (gate.tanh() if mode == "RNN_TANH" else gate.relu(),)


def reverse(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Every sequence from its end to its beginning, the padding behind it where it was."""
    if lengths is None:
        return x.flip(0)
    times = torch.arange(x.shape[0]).unsqueeze(1)
    source = torch.where(times < lengths, lengths - 1 - times, times).to(x.device, non_blocking=True)
    return x.gather(0, source.unsqueeze(-1).expand_as(x))


def run(
    mode: str, x: Tensor, state: tuple[Tensor, ...], weights: Weights, lengths: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The states at all times, and the last state: h, and for an LSTM c."""
    packed = None if lengths is None else pack_padded_sequence(x, lengths, enforce_sorted=False)
    hidden = tuple(part.unsqueeze(0) for part in state)
    if packed is not None:
        hidden = tuple(_ordered(part, packed.sorted_indices) for part in hidden)
    rest: tuple[Any, ...] = (
        hidden if mode == "LSTM" else hidden[0],
        [weight for weight in weights if weight is not None],
        weights.bias_ih is not None,
        1,  # layer
        0.0,  # dropout behind it
        False,  # in training
        False,  # in both directions
    )
    with warnings.catch_warnings() if x.is_cuda else nullcontext():
        if x.is_cuda:  # cuDNN would have all layers' weights in one piece of memory, and copies those of one
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk of memory")
        if packed is None:
            output, *last = KERNELS[mode](x, *rest, False)
        else:
            data, *last = KERNELS[mode](packed.data, packed.batch_sizes, *rest)
    if packed is not None:
        output, _ = pad_packed_sequence(packed._replace(data=data), total_length=x.shape[0])
        last = [_ordered(part, packed.unsorted_indices) for part in last]
    return output, *(part.squeeze(0) for part in last)


def _ordered(state: Tensor, order: Tensor | None) -> Tensor:
    return state if order is None else state.index_select(1, order)


def backward(
    mode: str,
    x: Tensor,
    history: Tensor,
    cell: Tensor | None,
    weights: Weights,
    gradients: tuple[Tensor, ...],
    lengths: Tensor | None = None,
) -> Backward:
    """Backpropagation through time.

    Args:
        mode: as torch's layers name their kind.
        x: the input, (time, samples, in).
        history: h before the first step and after each, (1 + time, samples, state).
        cell: an LSTM's c before the first step.
        weights: those of the forward pass.
        gradients: of what `run` returns, zero where there is padding.
        lengths: as in `run`.
    """
    d_output, d_last, *d_cell = gradients
    d_output = d_output + _at_the_end(d_last, x.shape[0], lengths)
    if mode == "LSTM":
        assert cell is not None
        return _lstm(x, history, cell, weights, d_output, _at_the_end(d_cell[0], x.shape[0], lengths))
    if mode == "GRU":
        return _gru(x, history, weights, d_output)
    return _simple(mode, x, history, weights, d_output)


def _at_the_end(gradient: Tensor, times: int, lengths: Tensor | None) -> Tensor:
    """The gradient of the last state as one of the states at all times."""
    everywhere = gradient.new_zeros(times, *gradient.shape)
    if lengths is None:
        everywhere[-1] = gradient
    else:
        samples = torch.arange(len(lengths), device=gradient.device)
        everywhere[(lengths - 1).to(gradient.device, non_blocking=True), samples] = gradient
    return everywhere


def _gates(x: Tensor, weight: Tensor, bias: Tensor | None, count: int) -> Tensor:
    """(time, samples, gates, hidden)."""
    gates: Tensor = F.linear(x, weight, bias).unflatten(-1, (count, -1))
    return gates


def _backwards(*series: Tensor) -> list[tuple[Tensor, ...]]:
    """The tensors at each time, the last time first."""
    return list(zip(*(tensor.unbind() for tensor in series), strict=True))[::-1]


def _lstm(x: Tensor, history: Tensor, cell: Tensor, w: Weights, d_output: Tensor, d_cell: Tensor) -> Backward:
    before = history[:-1]
    gates = _gates(x, w.ih, w.bias_ih, 4).add_(_gates(before, w.hh, w.bias_hh, 4))
    g = gates[:, :, 2].tanh()
    i, f, _, o = gates.sigmoid_().unbind(2)
    cells = cell.new_empty(x.shape[0] + 1, *cell.shape)
    cells[0] = cell
    for new, kept, c, c_next in zip((i * g).unbind(), f.unbind(), cells.unbind(), cells[1:].unbind(), strict=False):
        torch.addcmul(new, kept, c, out=c_next)
    seen = cells[1:].tanh()
    c_slope = torch.addcmul(o, o * seen, seen, value=-1)  # how far the hidden values follow the cell
    slopes = torch.addcmul(gates, gates, gates, value=-1)  # and how far they, or before that the cell, the gates
    slopes[:, :, 0] *= g
    slopes[:, :, 1] *= cells[:-1]
    torch.mul(1 - g * g, i, out=slopes[:, :, 2])
    slopes[:, :, 3] *= seen

    d_states = torch.empty_like(before)
    d_state, carried = torch.zeros_like(history[0]), torch.zeros_like(cell)
    steps = _backwards(d_output, d_states, d_cell, c_slope, f, slopes, slopes[:, :, :3], slopes[:, :, 3])
    for dy, d_now, d_c, by_cell, kept, delta, in_cell, in_o in steps:
        dh = torch.add(dy, d_state, out=d_now)
        if w.hr is not None:
            dh = dh @ w.hr
        dc = torch.addcmul(d_c + carried, dh, by_cell)
        in_cell.mul_(dc.unsqueeze(1))  # the slopes become δ
        in_o.mul_(dh)
        d_state = delta.flatten(1) @ w.hh
        carried = dc * kept
    delta = slopes.flatten(2)
    projection = None if w.hr is None else Use(d_states, o * seen)
    return Backward(Use(delta, x), Use(delta, before), projection, (d_state, carried))


def _gru(x: Tensor, history: Tensor, w: Weights, d_output: Tensor) -> Backward:
    before = history[:-1]
    from_x, from_h = _gates(x, w.ih, w.bias_ih, 3), _gates(before, w.hh, w.bias_hh, 3)
    r, z = (from_x[:, :, :2] + from_h[:, :, :2]).sigmoid_().unbind(2)
    n_from_h = from_h[:, :, 2]
    n = torch.addcmul(from_x[:, :, 2], r, n_from_h).tanh_()
    n_slope = (1 - z) * (1 - n * n)  # how far the state follows the input of n
    slopes = torch.stack([n_slope * n_from_h * r * (1 - r), (before - n) * z * (1 - z), n_slope * r], 2)

    d_states = torch.empty_like(before)
    d_state = torch.zeros_like(history[0])
    for dy, d_now, kept, delta in _backwards(d_output, d_states, z, slopes):
        torch.add(dy, d_state, out=d_now)
        delta.mul_(d_now.unsqueeze(1))  # the slopes become δ
        d_state = torch.addmm(d_now * kept, delta.flatten(1), w.hh)
    from_x = torch.cat([slopes[:, :, :2].flatten(2), d_states * n_slope], 2)  # r stands before n's share of h alone
    return Backward(Use(from_x, x), Use(slopes.flatten(2), before), None, (d_state,))


def _simple(mode: str, x: Tensor, history: Tensor, w: Weights, d_output: Tensor) -> Backward:
    state = history[1:]
    slope = 1 - state * state if mode == "RNN_TANH" else (state > 0).to(state.dtype)
    d_state = torch.zeros_like(history[0])
    for dy, delta in _backwards(d_output, slope):
        delta.mul_(dy + d_state)  # the slope becomes δ
        d_state = delta @ w.hh
    return Backward(Use(slope, x), Use(slope, history[:-1]), None, (d_state,))
