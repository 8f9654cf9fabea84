"""Running a model again, without a trace, to see what its layers are given.

Gradients are not recorded; random numbers of devices, Python and NumPy, buffers, attributes with the lists and dicts
among them (so hooks, too), training flags and tensors that are assigned to parameters are put back. It cannot put back
what a forward pass writes elsewhere (a parameter that it changes in place, a list within a list that the model keeps),
and hooks that users put on the parts of the model do run. Modules without children, so BatchNorm, run in evaluation
mode, where samples do not meet; those that hold them keep theirs, since some take another path in evaluation, past
their layers.
"""

import copy
import operator
import random
import sys
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, MutableSet, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

from autoopt.capture import sharded

CHANNELS_SECOND = (
    nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.EmbeddingBag, nn.Bilinear, nn.PReLU,
)  # fmt: skip
HOLDING = dict, OrderedDict, defaultdict, list, deque, set  # what a forward pass may add something to
MOST = 10_000  # of them in what a model is given
KNOWN = (nn.RNNBase, nn.MultiheadAttention, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.Linear, *CHANNELS_SECOND)


class Seen(NamedTuple):
    """The input of one call of a layer: its shape and, for each axis that may be the batch, a number for each index."""

    shape: torch.Size
    prints: dict[int, Tensor]
    slack: float  # by which the numbers may differ through rounding


Trace = dict[str, list[Seen]]
OUTPUT = "output"  # under which, with a number, a trace has what the model returned


class CannotRunError(Exception):
    """The model cannot be run again, for what it raised."""


def rerun(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], layers: Mapping[str, nn.Module]) -> Trace:
    """What the layers are given in a forward pass, and what it returns. To be called when `undisturbed`."""
    with _recorded(layers) as trace:
        try:
            result = type(model).forward(model, *args, **kwargs)
        except Exception as error:  # whatever the user's code may raise
            raise CannotRunError(f"{type(error).__name__}: {error}") from error
    for number, output in enumerate(tree_leaves(result)):
        if isinstance(output, Tensor):
            trace[f"{OUTPUT} {number}"] = [_seen(output, range(output.dim()))]
    return trace


def sample_axes(layer: nn.Module, shape: torch.Size) -> Sequence[int]:
    """The axes of a layer's input that may hold samples: not those that the layer itself gives a meaning to."""
    dims = len(shape)
    if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
        return () if dims < 3 else (0,) if layer.batch_first else (1,)
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        return range(dims - len(layer.normalized_shape))
    if isinstance(layer, nn.Embedding) or (isinstance(layer, nn.PReLU) and layer.num_parameters == 1):
        return range(dims)
    if isinstance(layer, CHANNELS_SECOND):
        unbatched = isinstance(layer, nn.modules.conv._ConvNd) and dims == len(layer.kernel_size) + 1
        return () if unbatched else (0,)
    return range(dims - 1)  # the last one holds the features


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put back what forward passes change in the model."""
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    # FSDP changes what it holds itself; others assign to a parameter or to its data, as an average of another does
    parameters = [] if any(map(sharded.is_sharded, model.parameters())) else list(model.parameters())
    data = [parameter.data for parameter in parameters]
    values = {id(value): value for _, own in before for value in own.values() if type(value) in HOLDING}
    held = [(value, copy.copy(value)) for value in values.values()] if parameters else []
    casts, weights = torch.is_autocast_cache_enabled(), parametrize._cache_enabled
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled parts would not show their layers
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(torch.no_grad())
        try:
            torch.set_autocast_cache_enabled(False)  # or training would find weights without a gradient there
            parametrize._cache_enabled = 0
            for module in model.modules():
                own = vars(module)
                own["_buffers"] = {name: b if b is None else b.clone() for name, b in module._buffers.items()}
                if next(module.children(), None) is None and not isinstance(module, nn.modules.dropout._DropoutNd):
                    own["training"] = False  # dropout draws the same numbers in every run
                if own.get("max_norm") is not None:
                    own["max_norm"] = None  # an embedding would rescale its weights
            yield
        finally:
            for now, then in before:
                now.clear()
                now.update(then)
            for value, content in held:
                _refill(value, content)
            for parameter, was in zip(parameters, data, strict=True):
                if parameter.data_ptr() != was.data_ptr():
                    parameter.data = was
            torch.set_autocast_cache_enabled(casts)
            parametrize._cache_enabled = weights


@contextmanager
def as_before(values: Sequence[Any]) -> Iterator[None]:
    """Put back what a forward pass adds to objects that it is given, a cache of keys and values say."""
    held = _held(values)
    try:
        yield
    finally:
        for value, content in held:
            _refill(value, content)


def _held(values: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The lists, dicts and sets in these and in their attributes, with what they hold; not in modules and tensors."""
    found: dict[int, tuple[Any, Any]] = {}
    ahead = list(values)
    while ahead and len(found) < MOST:
        value = ahead.pop()
        own = value if type(value) in HOLDING else getattr(value, "__dict__", None)
        if own is None or id(own) in found or isinstance(value, Tensor | nn.Module | type | ModuleType | FunctionType):
            continue
        if isinstance(own, MutableMapping | MutableSequence | MutableSet):  # a class has a proxy
            found[id(own)] = own, copy.copy(own)
            ahead += own.values() if isinstance(own, dict) else own
    return list(found.values())


def _same(own: list[Any], then: list[Any]) -> bool:
    """Whether two lists hold the same things, or pairs of them."""
    pairs = zip(own, then, strict=False)
    return len(own) == len(then) and all(
        a is b or (type(a) is type(b) is tuple and len(a) == len(b) and all(map(operator.is_, a, b))) for a, b in pairs
    )


def _refill(value: Any, content: Any) -> None:
    """Have a list, dict or set hold what it held: itself, as others may know it, too, or be on their way through it."""
    own, then = (list(x.items()) if isinstance(x, dict) else list(x) for x in (value, content))
    if _same(own, then):
        return
    value.clear()
    if isinstance(value, list | deque):
        value.extend(content)
    else:
        value.update(content)


@contextmanager
def patient() -> Iterator[None]:
    """Waiting for a GPU is no error here, whatever the user set."""
    if not torch.cuda.is_initialized():
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def random_numbers() -> Callable[[], None]:
    """What puts the random numbers of Python, the host and, if it is in use, NumPy to where they are now."""
    state, host = random.getstate(), torch.get_rng_state()
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    numbers = None if numpy is None else numpy.get_state()

    def put() -> None:
        random.setstate(state)
        torch.set_rng_state(host)
        if numpy is not None:
            numpy.set_state(numbers)

    return put


@contextmanager
def same_random_numbers(devices: set[torch.device]) -> Iterator[None]:
    """Leave the random numbers of Python, NumPy, the host and the devices as they were."""
    with ExitStack() as stack:
        stack.callback(random_numbers())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for device in devices:
            if device.type not in ("cpu", "meta"):
                stack.enter_context(torch.random.fork_rng([device], device_type=device.type))
        yield


@contextmanager
def _recorded(layers: Mapping[str, nn.Module]) -> Iterator[Trace]:
    """A trace that fills while the layers are called."""
    trace: Trace = defaultdict(list)

    def record(name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor | PackedSequence)), None)
        if isinstance(x, PackedSequence):
            x, _ = pad_packed_sequence(x, batch_first=bool(getattr(layer, "batch_first", False)))
        if x is not None:
            trace[name].append(_seen(x, sample_axes(layer, x.shape)))

    with ExitStack() as stack:
        for name, layer in layers.items():
            hook = layer.register_forward_pre_hook(
                lambda layer, args, kwargs, name=name: record(name, layer, args, kwargs), with_kwargs=True
            )
            stack.callback(hook.remove)
        yield trace


def _seen(x: Tensor, axes: Sequence[int]) -> Seen:
    return Seen(x.shape, {axis: _print(x, axis) for axis in axes} if x.numel() else {}, _slack(x))


def _print(x: Tensor, axis: int) -> Tensor:
    """One number for each index of an axis, another one if anything there changes."""
    rows = x.movedim(axis, 0).reshape(x.shape[axis], -1).double()
    return rows @ torch.arange(1, rows.shape[1] + 1, dtype=rows.dtype, device=x.device).cos()


def _slack(x: Tensor) -> float:
    """Rows that are computed together with others than before, as by a mixture of experts, round differently."""
    if not x.is_floating_point():
        return 0.0
    share = 1e-14 if x.dtype == torch.float64 else 1e-6
    return share * float(x.double().norm().nan_to_num(posinf=0.0))
