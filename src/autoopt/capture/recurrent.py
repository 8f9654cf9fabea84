"""Observed recurrent layers and cells. Each layer of an nn.LSTM, in each direction, is a part of the call."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from autoopt.capture.composite import Composite, LinearUse, describe, of_samples, summed
from autoopt.capture.current import operands
from autoopt.moments import Product, precision, recurrent
from autoopt.moments.operation import owned

State = tuple[Tensor, ...]


class Recur(torch.autograd.Function):
    """One layer in one direction. `tensors` are the weights as the module holds them."""

    @staticmethod
    def forward(
        ctx: Any,
        site: Composite,
        part: str,
        mode: str,
        lengths: Tensor | None,
        tensors: recurrent.Weights,
        x: Tensor,
        h: Tensor,
        c: Tensor | None,
        *weights: Tensor,
    ) -> State:
        state = (h,) if c is None else (h, c)
        output, *last = recurrent.run(mode, x, state, recurrent.Weights(*weights), lengths)
        ctx.save_for_backward(x, torch.cat([h.unsqueeze(0), output]), c, *weights)
        ctx.site, ctx.mode, ctx.lengths, ctx.tensors = site, mode, lengths, tensors
        describe(ctx, part)
        return owned(output), *(owned(end) for end in last)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, history, c, *saved = ctx.saved_tensors
        ctx.site.check(x.shape[1], ctx)
        exact = precision(saved[0])  # of what autocast ran in half precision, too
        weights = recurrent.Weights(*(_to(weight, exact) for weight in saved))
        needs_x, needs_h, needs_c, *needs = ctx.needs_input_grad[5:]
        with torch.autocast(x.device.type, enabled=False):
            back = recurrent.backward(
                ctx.mode, x.to(exact), history.to(exact), _to(c, exact), weights,
                tuple(gradient.to(exact) for gradient in gradients), ctx.lengths,
            )  # fmt: skip
            dx = (back.ih.delta @ weights.ih).to(x.dtype) if needs_x else None
            over_time = back.ih.delta.sum(0) if needs[2] or needs[3] else None
            same = back.hh.delta is back.ih.delta or not needs[3]  # as they are but in a GRU
            uses = (back.ih, back.hh, over_time, over_time if same else back.hh.delta.sum(0), back.hr)
            of_weights = [
                _reported(ctx, tensor, use).to(tensor.dtype) if needed else None
                for tensor, use, needed in zip(ctx.tensors, uses, needs, strict=True)
            ]
        dh, dc = (*back.state, None)[:2]
        return (None,) * 5 + (dx, dh if needs_h else None, dc if needs_c else None, *of_weights)


def _reported(ctx: Any, tensor: Tensor, use: Any) -> Tensor:
    """The gradient of a weight, from its use, or of a bias, from its contributions."""
    site: Composite = ctx.site
    if tensor.dim() == 1:
        return site.sum(tensor, summed(use, ctx), ctx)
    rows = Product(use.delta.transpose(0, 1), use.a.transpose(0, 1))
    return site.product(tensor, of_samples(rows, ctx), ctx)


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Any:
    return None if tensor is None else tensor.to(dtype)


def run(site: Composite, layer: Any, input: Any, hx: Any = None) -> Any:  # noqa: A002 - the layers' own name
    """The forward pass of an nn.LSTM, nn.GRU or nn.RNN."""
    if isinstance(input, PackedSequence):
        return _run_packed(site, layer, input, hx)
    single = input.dim() == 2
    if input.dim() not in (2, 3) or (hx is not None and any(part.dim() != input.dim() for part in _parts(hx))):
        return site.plain.forward(layer, input, hx)  # which says what is wrong
    batch_axis = 0 if layer.batch_first else 1
    x = input.unsqueeze(batch_axis) if single else input
    state = _zeros(layer, x, x.shape[batch_axis]) if hx is None else _parts(hx)
    state = tuple(part.unsqueeze(1) for part in state) if single and hx is not None else state
    layer.check_forward_args(x, _hidden(layer, state), None)
    output, last = _run(site, layer, x.transpose(0, 1) if layer.batch_first else x, state, None)
    output = output.transpose(0, 1) if layer.batch_first else output
    if single:
        output, last = output.squeeze(batch_axis), tuple(part.squeeze(1) for part in last)
    return output, _hidden(layer, last)


def _run_packed(site: Composite, layer: Any, packed: PackedSequence, hx: Any) -> Any:
    """Sequences of several lengths, padded while they are here, in the order in which they were packed."""
    x, lengths = pad_packed_sequence(packed)
    samples = None if site.current.entrance is None else site.current.entrance.entering(packed.data)
    ordered = packed.sorted_indices is not None and (samples is None or site.settled)
    site.count(x.shape[1])
    if not ordered and (site.fold > 1 or samples not in (None, x.shape[1])):
        raise site.unknown(x.transpose(0, 1))
    state = _zeros(layer, x, x.shape[1]) if hx is None else _parts(hx)
    site.sorted = not ordered
    try:
        output, last = _run(site, layer, x, state, lengths)
    finally:
        site.sorted = False
    if packed.sorted_indices is not None:
        output, lengths = output.index_select(1, packed.sorted_indices), lengths[packed.sorted_indices.cpu()]
    data = pack_padded_sequence(output, lengths).data
    return packed._replace(data=data), _hidden(layer, last)


def _run(site: Composite, layer: Any, x: Tensor, state: State, lengths: Tensor | None) -> tuple[Tensor, State]:
    site.begin(x.shape[1])

    def level(suffix: str, x: Tensor, state: State) -> State:
        kinds = "weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr"
        weights = recurrent.Weights(*(getattr(layer, kind + suffix, None) for kind in kinds))  # type: ignore[arg-type]
        h, c = (*state, None)[:2]
        result: State = Recur.apply(site, suffix, layer.mode, lengths, weights, x, h, c, *weights)  # type: ignore[no-untyped-call]
        return result

    stack = recurrent.Stack(layer.num_layers, layer.bidirectional, layer.dropout if layer.training else 0.0)
    return stack.forward(level, x, state, lengths)


def _parts(hx: Any) -> State:
    return (hx,) if isinstance(hx, Tensor) else tuple(hx)


def _hidden(layer: Any, state: State) -> Any:
    return state if layer.mode == "LSTM" else state[0]


def _zeros(layer: Any, x: Tensor, samples: int) -> State:
    levels = layer.num_layers * (2 if layer.bidirectional else 1)
    sizes = (layer.proj_size or layer.hidden_size, layer.hidden_size)[: 2 if layer.mode == "LSTM" else 1]
    return tuple(x.new_zeros(levels, samples, size) for size in sizes)


def run_cell(site: Composite, layer: Any, input: Tensor, hx: Any = None) -> Any:  # noqa: A002 - the layers' own name
    """The forward pass of an nn.LSTMCell, nn.GRUCell or nn.RNNCell: one step of time."""
    long = isinstance(layer, nn.LSTMCell)
    size = (*input.shape[:-1], layer.hidden_size)
    if input.dim() not in (1, 2) or (hx is not None and any(part.shape != size for part in _parts(hx))):
        return site.plain.forward(layer, input, hx)  # which says what is wrong
    single = input.dim() == 1
    x = input.unsqueeze(0) if single else input
    if hx is None:
        state: State = (x.new_zeros(len(x), layer.hidden_size),) * (2 if long else 1)
    else:
        state = tuple(part.unsqueeze(0) if single else part for part in _parts(hx))
    site.begin(len(x))
    mode = "LSTM" if long else "GRU" if isinstance(layer, nn.GRUCell) else f"RNN_{layer.nonlinearity.upper()}"
    last = recurrent.cell(mode, _gates(site, layer, "ih", x), _gates(site, layer, "hh", state[0]), state)
    last = tuple(part.squeeze(0) for part in last) if single else last
    return last if long else last[0]


def _gates(site: Composite, layer: Any, kind: str, x: Tensor) -> Tensor:
    """What a cell's input ("ih") or state ("hh") sends to its gates."""
    weight, bias = getattr(layer, f"weight_{kind}"), getattr(layer, f"bias_{kind}")
    x, lower_weight, lower_bias = operands(x, weight, bias)
    of_weight, of_bias = functools.partial(site.product, weight), functools.partial(site.sum, bias)
    gates: Tensor = LinearUse.apply(site, kind, of_weight, of_bias, x, lower_weight, lower_bias)  # type: ignore[no-untyped-call]
    return gates
