"""Where rows go that are routed, as to the experts of a mixture.

Each row belongs to one sample, but those of a sample lie apart. So a number is carried along for each row, that of its
sample: the owners of a tensor, which have as many axes as there are leading ones of the tensor that number rows. Behind
an operation that is not known to keep rows apart nothing is known any more. What is taken of one sample alone, as x[3]
is, stays that sample's behind any operation.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoopt.capture.aside import recording
from autoopt.capture.layout import FOLDED, LOST
from autoopt.capture.marks import Marks, tensors_in
from autoopt.capture.rerun import patient
from autoopt.capture.rowwise import ELEMENTWISE

Owners = list[Tensor | None]
"""Of each result; None: not known."""

FILLED = {  # holds nothing of what it is called on but the shape
    "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full",
}  # fmt: skip
RESHAPING = {"__getitem__", "unsqueeze", "view", "reshape", "expand", "repeat", "to", "long"}
JOINING = {"stack", "cat", "concat", "concatenate"}
INTO = {"index_add", "index_copy", "index_add_", "index_copy_", "__setitem__"}  # rows are written into a tensor
PRODUCTS = {"linear", "matmul", "mm", "bmm", "__matmul__", "_grouped_mm", "grouped_mm", "grouped_mm_fallback"}
KEEPING = {  # every row as it is given
    "relu", "silu", "gelu", "tanh", "sigmoid", "softplus", "leaky_relu", "elu", "mish", "hardswish", "square", "exp",
    "dropout", "clamp", "neg", "abs", "sqrt", "rsqrt", "log", "sin", "cos", "erf", "gt", "lt", "ge", "le", "eq", "ne",
    "to", "type_as", "float", "half", "bfloat16", "double", "long", "int", "clone", "contiguous", "detach",
}  # fmt: skip


class Routes:
    """The owners of the tensors of one forward pass.

    Args:
        layouts: those that are known.
        samples: N.
    """

    def __init__(self, layouts: Marks, samples: int) -> None:
        self.layouts, self.samples = layouts, samples
        self._owners, self._singles, self._counting, self._filled = Marks(), Marks(), Marks(), Marks()
        self._packed = Marks()  # batch sizes of packed sequences -> the owners of these

    def owner(self, tensor: Tensor) -> Tensor | None:
        """The sample of each row, where that is known."""
        if self.samples == 1 and self.layouts.get(tensor) is not None:
            return torch.zeros(tensor.shape[:1], dtype=torch.long, device=tensor.device)
        if self.layouts.get(tensor) in (0, FOLDED):
            rows = torch.arange(tensor.shape[0], device=tensor.device)
            return rows // (tensor.shape[0] // self.samples)
        if (single := self.single(tensor)) is not None:
            return torch.full((), single, device=tensor.device)
        owners: Tensor | None = self._owners.get(tensor)
        return owners

    def single(self, tensor: Tensor) -> int | None:
        """The sample that all of a tensor is of, as of x[3], if there is one."""
        number: int | None = self._singles.get(tensor)
        return number

    def known(self, tensor: Tensor) -> bool:
        """Whether its rows were routed, and are known all the same."""
        return self._owners.get(tensor) is not None or self.single(tensor) is not None

    def lies(self, tensor: Tensor, layout: int, owners: Tensor | None = None, single: int | None = None) -> None:
        """Note where the samples of a tensor are."""
        self.layouts.put(tensor, layout)
        self._owners.put(tensor, owners)
        self._singles.put(tensor, single)

    def gather(self, tensor: Tensor) -> bool:
        """Note that the rows of each sample lie together again, if they do: as many of each, in a row of their own.

        So they do in x[mask].view(N, -1, C). This reads the device, for which a call with such a mask has waited, too.
        """
        owners: Tensor | None = self._owners.get(tensor)
        if owners is None or owners.shape[:1] != (self.samples,) or recording(owners.device):
            return False
        own = torch.arange(self.samples, device=owners.device)
        together = _holds((owners == own.view(-1, *[1] * (owners.dim() - 1))).all())
        if together:
            self.lies(tensor, 0)
        return together

    def count(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Note what a call gave, if its rows are 0, 1, ..., N - 1, or if it is a constant."""
        if name == "arange":
            if args in ((self.samples,), (0, self.samples)):
                self._counting.put(result, result._version)
        elif name in RESHAPING and args:
            if self._counts(args[0]) and result.shape[:1] == (self.samples,) and _keeps_rows(name, args, result):
                self._counting.put(result, result._version)
        elif name in FILLED:
            self._filled.put(result, result._version)

    def blank(self, tensor: Tensor) -> bool:
        """Whether it was filled with a constant, and nothing was written into it since."""
        return _unchanged(tensor, self._filled)

    def _counts(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and _unchanged(tensor, self._counting)

    def one_of_each(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether parts are taken of every sample, one after the other.

        As x[arange(N), lengths] does, or x[arange(N)[:, None], places]: no other index has more axes than the first. Or
        whether they are put together again, by torch.stack.
        """
        if name in JOINING:
            parts, dim = _argument(args, kwargs, 0, "tensors"), _argument(args, kwargs, 1, "dim", 0)
            rows = name == "stack" or all(part.shape[:1] == (1,) for part in parts)
            return rows and dim == 0 and [self.single(part) for part in parts] == list(range(self.samples))
        if name != "__getitem__" or self.layouts.get(args[0]) != 0 or not isinstance(args[1], tuple):
            return False
        first, *rest = args[1]
        return self._counts(first) and all(_axes(part) <= first.dim() for part in rest)

    def follow(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], sampled: Sequence[Tensor],
        results: list[Tensor], *, blank: bool = False,
    ) -> None:  # fmt: skip
        """Note the owners of what a call without parameters gave, where nothing else tells the samples apart.

        `sampled`: what it took that holds samples. `blank`: rows are written into a tensor that held none; of others
        the layouts are still those of before.
        """

        given = functools.partial(_argument, args, kwargs)
        found: Owners = [None] * len(results)
        singles = self._single(name, args, sampled, len(results))
        if name == "_pack_padded_sequence" and args[2]:  # batch first
            self._packed.put(results[1], self.owner(args[0]))
        elif name == "_pad_packed_sequence" and args[2]:
            found[0] = self._packed.get(args[1])
        elif name in JOINING and name != "stack":
            found = [joined([self._rows(part) for part in given(0, "tensors")], given(1, "dim", 0), *results)]
        elif name in INTO:
            owners = self.owner(given(3, "source"))
            if owners is not None and given(1, "dim") == 0:
                before = self._before(given(0, "input"), owners, blank)
                found = [put_back(given(2, "index"), owners, before, added=name.startswith("index_add"))]
        elif name == "__getitem__" and _masks(args[1]) and self.layouts.get(args[0]) is None:
            owners = self.owner(args[1])  # what is the same for all, where the samples say
            found = [None if owners is None else _indexed(args[1], owners, args[0].dim())]
        elif name == "embedding" and self.layouts.get(args[1]) is None:  # frozen: a row for each word
            found = [self.owner(args[0])]
        elif args and isinstance(args[0], Tensor):
            for tensor in tensors_in(args[:2]):
                if self.single(tensor) is not None:  # and others are of other samples
                    continue
                owners = self.owner(tensor) if tensor is args[0] or (self.known(tensor) and keeps(name)) else None
                if owners is not None:
                    found = route(name, (tensor, *args[1:]), kwargs, owners, results)
                    break
        for tensor, owners, single in zip(results, found, singles, strict=True):
            self._owners.put(tensor, owners if single is None else None)
            self._singles.put(tensor, single)

    def _single(self, name: str, args: tuple[Any, ...], sampled: Sequence[Tensor], results: int) -> list[int | None]:
        """The sample that each of so many results is of."""
        alone = {self.single(tensor) for tensor in sampled}
        if len(alone) == 1 and alone != {None}:
            return [*alone] * results
        if (
            self.samples > 1
            and args
            and len(sampled) == 1
            and sampled[0] is args[0]
            and (rows := self._fold(sampled[0]))
        ):
            length = len(sampled[0])
            if name == "unbind" and args[1:] in ((), (0,)) and results == length:
                return [row // rows for row in range(length)]
            index = args[1] if name == "__getitem__" else args[2] if name == "select" and args[1:2] == (0,) else None
            first = index[0] if isinstance(index, tuple) else index
            if type(first) is int:
                return [first % length // rows] * results
        return [None] * results

    def _fold(self, tensor: Tensor) -> int:
        """How many rows of its first axis are one sample; 0 where they are on another."""
        return tensor.shape[0] // self.samples if self.layouts.get(tensor) in (0, FOLDED) else 0

    def _rows(self, tensor: Tensor) -> Tensor | None:
        """The owner of each row."""
        owners = self.owner(tensor)
        return owners.expand(tensor.shape[:1]) if owners is not None and owners.dim() == 0 else owners

    def written(self, target: Tensor, index: Any, value: Tensor, *, blank: bool) -> None:
        """Samples were written into a tensor; `blank`: it held none."""
        first = index[0] if isinstance(index, tuple) else index
        if isinstance(first, Tensor) and first.dtype != torch.bool and first.dim() > 0:  # to rows, in any order
            owners = self.owner(value)
            known = None if owners is None else put_back(index, owners, self._before(target, owners, blank))
            self.lies(target, LOST, known)
        elif type(first) is int and self.single(value) not in (None, first % len(target)):
            self.lies(target, LOST)
        elif self.layouts.get(target) is None:
            self.layouts.put(target, 0 if target.shape[0] == self.samples else LOST)

    def _before(self, target: Tensor, owners: Tensor, blank: bool) -> Tensor | None:
        """The owners of what others are written into: nobody's, -1, if it is blank."""
        return owners.new_full(target.shape[:1], -1) if blank else self.owner(target)


def _unchanged(tensor: Tensor, versions: Marks) -> bool:
    """Whether a tensor is the one that was noted, as it was then."""
    noted = versions.get(tensor)
    return noted is not None and bool(noted == tensor._version)  # which tensors from inference mode do not have


def _argument(args: Sequence[Any], kwargs: dict[str, Any], place: int, key: str, default: Any = None) -> Any:
    """An argument of a call, by its place or its name."""
    return kwargs.get(key, args[place] if len(args) > place else default)


def elementwise(name: str) -> bool:
    """Of functions, methods, and what operators call: mul, mul_, __rmul__, __imul__."""
    plain = name.strip("_")
    return any(one in ELEMENTWISE for one in (plain, plain.removeprefix("r"), plain.removeprefix("i")))


def keeps(name: str) -> bool:
    """Whether a call by that name gives every row as it was given one, whatever else it takes."""
    return name.strip("_") in KEEPING or elementwise(name)


def route(name: str, args: Sequence[Any], kwargs: dict[str, Any], owners: Tensor, results: Sequence[Tensor]) -> Owners:
    """The owners of what a call made of its first argument, whose owners are given, and of others."""
    found = _routed(name, args, kwargs, owners, results)
    if len(found) != len(results):
        return [None] * len(results)
    return [o if o is not None and r.shape[: o.dim()] == o.shape else None for o, r in zip(found, results, strict=True)]


def _routed(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], owners: Tensor, results: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    x: Tensor = args[0]

    given = functools.partial(_argument, args, kwargs)

    def within(dim: Any) -> bool:
        """Whether an axis, or each of several, is none of those that number rows."""
        dims = dim if isinstance(dim, (tuple, list)) else (dim,)
        return len(dims) > 0 and all(type(one) is int and one % x.dim() >= owners.dim() for one in dims)

    match name:
        case "__getitem__":
            return [_indexed(args[1], owners, x.dim())]
        case "index_select" if type(given(1, "dim")) is int:
            dim = given(1, "dim") % x.dim()
            return [owners if within(dim) else owners.index_select(dim, given(2, "index"))]
        case "sort" | "argsort" if x.dim() == 1:
            return [owners[results[-1]]] * len(results)
        case "flip" if given(1, "dims") in (0, (0,), [0]):
            return [owners.flip(0)]
        case "roll" if given(2, "dims") in (0, (0,), [0]):
            return [owners.roll(given(1, "shifts"), 0)]
        case "split" | "chunk" | "tensor_split" if len(args) > 1:
            return [owners] * len(results) if within(given(2, "dim", 0)) else getattr(owners, name)(args[1])
        case "softmax" | "log_softmax" | "sum" | "mean" | "amax" | "topk":
            return [owners] * len(results) if within(given(2 if name == "topk" else 1, "dim")) else []
        case "repeat_interleave" if given(2, "dim") == 0:
            return [owners.repeat_interleave(given(1, "repeats"))]
        case "repeat":
            times = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
            return [owners.repeat(times[: owners.dim()])] if len(times) == x.dim() else []
        case "squeeze" | "unsqueeze" if type(given(1, "dim")) is int:
            at = given(1, "dim") % (x.dim() + (name == "unsqueeze"))
            return [getattr(owners, name)(at) if at < owners.dim() else owners]
        case "conv1d" | "conv2d" | "conv3d" | "group_norm" if owners.dim() == 1:  # frozen: each row for itself
            spatial = int(name[4]) if name.startswith("conv") else x.dim() - 2
            return [owners] if x.dim() == spatial + 2 else []
        case "layer_norm" | "rms_norm":
            return [owners] if owners.dim() <= x.dim() - len(given(1, "normalized_shape")) else []
        case "view" | "reshape" | "flatten" | "unflatten":
            return [_reshaped(owners, x.shape, results[0].shape)]
    return [owners] if keeps(name) or name in PRODUCTS else []


def _indexed(index: Any, owners: Tensor, dims: int) -> Tensor | None:
    """The owners of a part of a tensor of so many dimensions."""
    parts = index if isinstance(index, tuple) else (index,)
    if parts[0] is None:
        within = _indexed(parts[1:], owners, dims) if len(parts) > 1 else owners
        return None if within is None else within.unsqueeze(0)
    if parts[0] is Ellipsis:
        after = [part for part in parts[1:] if part is not None]
        return owners if len(after) <= dims - owners.dim() and not any(map(_masks, after)) else None
    if any(isinstance(part, list) or (isinstance(part, Tensor) and part.dim() > 1) for part in parts[1:]):
        return None
    first = parts[0]
    if _masks(first):
        owners = owners.view(*owners.shape, *[1] * max(0, first.dim() - owners.dim()))
        return owners.expand(first.shape)[first] if owners.dim() == first.dim() else None
    rows = parts[: owners.dim()]
    if any(part is None or part is Ellipsis or _masks(part) for part in rows):
        return None
    found: Tensor = owners[rows]
    return found if found.dim() else None


def _keeps_rows(name: str, args: Sequence[Any], result: Tensor) -> bool:
    """Whether what reshapes a tensor gives, on as long a first axis, the rows as they were."""
    if name == "__getitem__":
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(part is None or part is Ellipsis or isinstance(part, slice) for part in parts)
    return name not in ("expand", "repeat") or result.dim() == args[0].dim()


def _axes(index: Any) -> int:
    """How many axes one part of an index has itself."""
    if isinstance(index, list):
        return 1 + max(map(_axes, index), default=0)
    return index.dim() if isinstance(index, Tensor) else 0


def _masks(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype == torch.bool


def _reshaped(owners: Tensor, before: torch.Size, after: torch.Size) -> Tensor | None:
    """Where the rows stay whole."""
    of_one = math.prod(before[owners.dim() :])
    for axes in range(1, len(after) + 1):
        if math.prod(after[:axes]) == owners.numel() and math.prod(after[axes:]) == of_one:
            return owners.reshape(after[:axes])
    return None


def joined(owners: Owners, dim: int, result: Tensor) -> Tensor | None:
    """The owners of what `torch.cat` made of tensors that have these."""
    known = [one for one in owners if one is not None]
    if len(known) < len(owners) or any(one.dim() != known[0].dim() for one in known):
        return None
    if dim % result.dim() >= known[0].dim():
        return known[0]
    return torch.cat(known) if dim % result.dim() == 0 else None


def put_back(index: Any, owners: Tensor, before: Tensor | None, *, added: bool = False) -> Tensor | None:
    """The owners of a tensor to some rows of which others were written, or `added`: all to one row have one owner."""
    if before is None or any(one.dim() != 1 for one in (before, owners)):
        return None
    if not isinstance(index, Tensor) or index.shape != owners.shape or index.dtype == torch.bool:
        return None
    index = index.long()
    if not added:
        return before.index_copy(0, index, owners)
    found = before.scatter_reduce(0, index, owners, "amax")
    one = (found[index] == owners).all() & ((before == -1) | (before == found)).all()
    return found if _holds(one) else None


def _holds(condition: Tensor) -> bool:
    """Read from the device; a CUDA graph cannot be asked, so it fails where the condition does not hold."""
    if recording(condition.device):
        torch._assert_async(condition, "rows of several samples were added up, which statistics need apart")
        return True
    with patient():
        return bool(condition)
