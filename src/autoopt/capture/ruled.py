"""Torch functions that the layer rules know, called by users' own modules on their own parameters.

With a rule no copy of the weight is made for each sample: F.linear, x @ w, F.conv*, F.embedding, w[i], F.layer_norm.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoopt.capture.copies import Sole, enter, once
from autoopt.capture.current import operands
from autoopt.capture.ledger import Ledger
from autoopt.capture.sampled import moments
from autoopt.moments import Operation
from autoopt.moments.conv import Conv
from autoopt.moments.embedding import Embedding
from autoopt.moments.linear import Linear, Transposed
from autoopt.moments.norm import LayerNorm


class Known(NamedTuple):
    """A call as a rule sees it."""

    operation: Operation
    x: Tensor
    weight: Tensor
    bias: Tensor | None = None


class Ruled(torch.autograd.Function):
    """Runs an operation; its backward pass tells the ledger what each sample adds to weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, operation: Operation, ledger: Ledger, known: Known, sole: Sole,
        x: Tensor, weight: Tensor, bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        output, kept = operation.forward(x, weight, bias)
        ctx.save_for_backward(weight if ctx.needs_input_grad[4] else None, *kept)
        ctx.operation, ctx.ledger, ctx.known, ctx.sole = operation, ledger, known, sole
        ctx.derived, ctx.spent, ctx.some = known.weight, False, ledger.sampler.of(operation, x, weight)
        ctx.outer = torch._C._current_graph_task_id()
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        once(ctx)
        operation, known, ledger = ctx.operation, ctx.known, ctx.ledger
        weight, *rest = ctx.saved_tensors
        kept = tuple(rest)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[4:]
        weight = weight if needs_x else None
        dx = dw = db = None
        if needs_weight and known.weight in ledger.names and ctx.sole(known.weight):
            dx, (dw, square) = moments(operation, dy, kept, weight, ctx.some, ledger.total)
            ledger.add_square(ledger.names[known.weight], len(dy), square, ctx.outer)
        elif needs_weight:
            dx, dw = operation.gradients(dy, kept, weight)
            use = operation.weight_use(dy, kept)
            enter(ledger, known.weight, len(dy), use, ctx.outer, sole=ctx.sole(known.weight))
        elif needs_x:
            dx = operation.input_gradient(dy, kept, weight)
        if needs_bias:
            c = operation.bias_contributions(dy)
            db = c.sum(0)
            enter(ledger, known.bias, len(dy), c.__getitem__, ctx.outer, sole=ctx.sole(known.bias))
        return None, None, None, None, dx, dw, db


def run(known: Known, ledger: Ledger, sole: Sole) -> Tensor:
    """The result of the call."""
    operation, x, weight, bias = known
    if operation.lowers:
        x, weight, bias = operands(x, weight, bias)
    output: Tensor = Ruled.apply(operation, ledger, known, sole, x, weight, bias)  # type: ignore[no-untyped-call]
    return output


def rule_for(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Known | None:
    """The rule for a call; None where there is none for it."""
    reader = READERS.get(name)
    return None if reader is None else reader(*args, **kwargs)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Known | None:  # noqa: A002 - torch's own name
    return Known(Linear(), input, weight, bias) if weight.dim() == 2 and input.dim() > 1 else None


def _matmul(input: Tensor, other: Tensor) -> Known | None:  # noqa: A002
    return Known(Transposed(), input, other) if other.dim() == 2 and input.dim() > 1 else None


def _embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,  # noqa: A002
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Known | None:  # fmt: skip
    if scale_grad_by_freq or sparse or input.dim() == 0:
        return None
    if padding_idx is not None and padding_idx < 0:
        padding_idx += len(weight)
    return Known(Embedding(len(weight), padding_idx, max_norm, norm_type), input, weight)


def _getitem(table: Tensor, index: Any) -> Known | None:
    plain = isinstance(index, Tensor) and index.dtype in (torch.int32, torch.int64) and table.dim() == 2
    return _embedding(index.remainder(len(table)), table) if plain and index.dim() > 0 else None


def _conv(dims: int) -> Callable[..., Known | None]:
    def read(
        input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,  # noqa: A002
        dilation: Any = 1, groups: int = 1,
    ) -> Known | None:  # fmt: skip
        if isinstance(padding, str) or input.dim() != dims + 2:
            return None
        stride, padding, dilation = (_tuple(value, dims) for value in (stride, padding, dilation))
        return Known(Conv(tuple(weight.shape[2:]), stride, padding, dilation, groups), input, weight, bias)

    return read


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None,  # noqa: A002
    eps: float = 1e-5,
) -> Known | None:  # fmt: skip
    shape = tuple(normalized_shape)
    if weight is None or input.dim() == len(shape):
        return None
    return Known(LayerNorm(shape, eps), input, weight, bias)


def _tuple(value: Any, dims: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


READERS: dict[str, Callable[..., Known | None]] = {
    "linear": _linear,
    "matmul": _matmul,
    "mm": _matmul,
    "__matmul__": _matmul,
    "embedding": _embedding,
    "__getitem__": _getitem,
    "layer_norm": _layer_norm,
    "conv1d": _conv(1),
    "conv2d": _conv(2),
    "conv3d": _conv(3),
}


# Functions in which the samples meet, or for which vmap has no rule, said in terms of others.


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return y if bias is None else y + bias


def _batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,  # noqa: A002
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    y = F.batch_norm(input, running_mean, running_var, None, None, training, momentum, eps)
    shape = (-1, *[1] * (input.dim() - 2))
    y = y if weight is None else y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


def _masked_assignment(x: Tensor, index: Any, value: Any) -> None:
    mask = index.reshape(*index.shape, *[1] * (x.dim() - index.dim()))
    x.copy_(torch.where(mask, value.to(x.dtype), x))


def _attention(constant: Callable[[Tensor], bool]) -> Callable[..., Tensor]:
    def run(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """With rows of its own for each sample, whatever kernel computes it gives their gradients."""
        parts = [query, key, value, attn_mask]
        zeros = torch.zeros_like(next(part for part in parts if part is not None and not constant(part))[..., :1, :1])
        parts = [part + zeros if part is not None and part.requires_grad and constant(part) else part for part in parts]
        return F.scaled_dot_product_attention(*parts, *args, **kwargs)  # type: ignore[arg-type]

    return run


def _multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, dim: int, heads: int, in_weight: Tensor | None, in_bias: Tensor | None,
    bias_k: None, bias_v: None, add_zero_attn: bool, dropout_p: float, out_weight: Tensor, out_bias: Tensor | None,
    training: bool = True, key_padding_mask: Tensor | None = None, need_weights: bool = True,
    attn_mask: Tensor | None = None, use_separate_proj_weight: bool = False, q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None, v_proj_weight: Tensor | None = None, static_k: None = None,
    static_v: None = None, average_attn_weights: bool = True, is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """F.multi_head_attention_forward, with the samples in front, which draws the same random numbers as that."""
    own = (q_proj_weight, k_proj_weight, v_proj_weight)
    weights: Any = own if in_weight is None or use_separate_proj_weight else in_weight.chunk(3)
    biases: Any = (None,) * 3 if in_bias is None else in_bias.chunk(3)
    projected = map(F.linear, (x.transpose(0, 1) for x in (query, key, value)), weights, biases)
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in projected)  # (samples, heads, places, features)
    dropped = dropout_p if training else 0.0
    if is_causal and key_padding_mask is None and not need_weights:
        y, seen = F.scaled_dot_product_attention(q, k, v, None, dropped, is_causal=True), None
    else:
        mask = None if attn_mask is None else _additive(attn_mask, q)
        mask = mask.unflatten(0, (-1, heads)) if mask is not None and mask.dim() == 3 and len(mask) > 1 else mask
        if key_padding_mask is not None:
            padding = _additive(key_padding_mask, q)[:, None, None]
            mask = padding if mask is None else mask + padding
        if need_weights:
            scores = (q * (q.shape[-1] ** -0.5)) @ k.mT
            shares = (scores if mask is None else scores + mask).softmax(-1)
            shares = F.dropout(shares.flatten(0, 1), dropped).unflatten(0, (-1, heads)) if dropped else shares
            y, seen = shares @ v, shares.mean(1) if average_attn_weights else shares
        else:
            y, seen = F.scaled_dot_product_attention(q, k, v, mask, dropped), None
    return F.linear(y.transpose(1, 2).flatten(2), out_weight, out_bias).transpose(0, 1), seen


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """A mask of numbers that are added to scores."""
    return mask if mask.is_floating_point() else torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)


REWRITTEN: dict[str, Callable[..., Any]] = {
    "multi_head_attention_forward": _multi_head_attention,
    "bilinear": _bilinear,
    "batch_norm": _batch_norm,
    "__setitem__": _masked_assignment,
}


def rewritten(name: str, args: tuple[Any, ...], constant: Callable[[Tensor], bool]) -> Callable[..., Any] | None:
    """The same call in other words, if it needs that. `constant`: whether the samples have no part in a tensor."""
    if name == "scaled_dot_product_attention":
        return _attention(constant)
    if name == "__setitem__":
        x, index, value = args
        masked = isinstance(index, Tensor) and index.dtype == torch.bool and isinstance(value, Tensor)
        if not masked or value.dim() > x.dim() - index.dim():
            return None
    if name == "multi_head_attention_forward" and (
        args[0].dim() != 3 or any(x is not None for x in args[7:9]) or args[9]
    ):
        return None
    return REWRITTEN.get(name)
