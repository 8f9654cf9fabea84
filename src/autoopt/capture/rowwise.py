"""An operation on samples and parameters, run on one sample at a time, with a copy of the parameter for each.

It runs by broadcasting or by vmap. That this is the operation itself, row by row, is compared once for each kind of
call (`Plan`), with values of the parameter other than its own too, since zeros and ones hide differences.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from autoopt.capture.layout import FOLDED, LOST, axis_of, folded, folds

ELEMENTWISE = {
    "add", "sub", "mul", "div", "true_divide", "pow", "where", "maximum", "minimum", "lerp", "addcmul", "addcdiv",
}  # fmt: skip
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def differentiable(tensor: Tensor) -> bool:
    """Whether it is of a kind that has gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def in_place(name: str) -> bool:
    """Whether a function of that name changes its first argument."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


@dataclass(frozen=True)
class Call:
    """A call of a torch function, its tensors sorted by what they depend on."""

    func: Callable[..., Any]
    leaves: tuple[Any, ...]
    structure: Any  # how the leaves make up the arguments: (number, names), or a TreeSpec where some are nested
    derived: frozenset[int]  # positions among the leaves
    layouts: dict[int, int]  # position of a tensor with samples -> layout
    samples: int

    @classmethod
    def of(
        cls, func: Callable[..., Any], args: Any, kwargs: Any, derived: Callable[[Tensor], bool],
        layout: Callable[[Tensor], int | None], samples: int,
    ) -> "Call":  # fmt: skip
        leaves: Sequence[Any] = (*args, *kwargs.values())
        structure: Any = len(args), tuple(kwargs)
        if any(isinstance(leaf, (list, tuple, dict)) for leaf in leaves):
            leaves, structure = tree_flatten((args, kwargs))
        tensors = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        layouts = {i: place for i, leaf in tensors if (place := layout(leaf)) is not None}
        return cls(
            func, tuple(leaves), structure, frozenset(i for i, leaf in tensors if derived(leaf)), layouts, samples
        )

    @property
    def name(self) -> str:
        return getattr(self.func, "__name__", str(self.func))

    @property
    def in_place(self) -> bool:
        return in_place(self.name)

    def run(self, leaves: Sequence[Any]) -> Any:
        """The result, which of a change in place is what was changed."""
        if isinstance(self.structure, TreeSpec):
            args, kwargs = tree_unflatten(list(leaves), self.structure)
        else:
            count, names = self.structure
            args, kwargs = leaves[:count], dict(zip(names, leaves[count:], strict=True))
        result = self.func(*args, **kwargs)
        return args[0] if self.in_place else result

    def refusal(self) -> str:
        """What the call is, and why it has no plan."""
        known = {**dict.fromkeys(self.layouts, " of samples"), **dict.fromkeys(self.derived, " from parameters")}
        shapes = [f"{tuple(x.shape)}{known.get(i, '')}" for i, x in enumerate(self.leaves) if isinstance(x, Tensor)]
        lost = LOST in self.layouts.values()
        why = "which axis numbers the samples is not known" if lost else "the samples do not go through it one by one"
        return f"'{self.name}' on tensors {', '.join(shapes)}: {why}"

    def key(self) -> Any:
        """What the plan depends on: of sizes and other numbers only which are the same."""
        numbers: dict[Any, int] = {1: 1, self.samples: 0}

        def kind(i: int, leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                sizes = tuple(numbers.setdefault(size, len(numbers)) for size in leaf.shape)
                rows = bool(rows_of(leaf, self.samples))
                return sizes, rows, leaf.dtype, leaf.device, i in self.derived, self.layouts.get(i)
            return (
                numbers.setdefault(leaf, len(numbers))
                if type(leaf) is int
                else float
                if type(leaf) is float
                else repr(leaf)
            )

        nested = str(self.structure) if isinstance(self.structure, TreeSpec) else self.structure
        return self.func, nested, tuple(kind(i, leaf) for i, leaf in enumerate(self.leaves)), self.samples == 1


@dataclass(frozen=True)
class Plan:
    """How to run a call sample by sample. `by_row` are tensors without known samples whose rows belong to them."""

    by_row: frozenset[int] = frozenset()
    axes: tuple[int, ...] = ()  # of each result, the one that numbers the samples
    layouts: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    spec: TreeSpec | None = None  # the structure of the results
    free: bool = False  # nothing that the call gives can have a gradient

    def run(self, call: Call, values: Sequence[Any]) -> list[Tensor]:
        """Results (samples, *those of one sample), from the leaves, in which those mapped have the samples in front."""
        mapped = [i for i in range(len(values)) if i in call.derived or i in call.layouts or i in self.by_row]

        def one(*rows: Tensor) -> tuple[Tensor, ...]:
            leaves = list(values)
            for i, row in zip(mapped, rows, strict=True):
                leaves[i] = row
            result = call.run(leaves)
            return (result,) if isinstance(result, Tensor) else tuple(tree_leaves(result))

        tensors = [values[i] for i in mapped]
        if call.name.rstrip("_") in ELEMENTWISE:
            rest = [value.dim() for i, value in enumerate(values) if isinstance(value, Tensor) and i not in mapped]
            most = max(rest + [tensor.dim() - 1 for tensor in tensors])
            views = (
                t[:, *[None] * (most + 1 - t.dim())] for t in tensors
            )  # and no copies: one may be changed in place
            return list(one(*views))
        return list(torch.vmap(one, randomness="error")(*tensors))

    def results(self, call: Call, parts: Sequence[Tensor]) -> list[Tensor]:
        """The results as the plain call gives them, the samples where it has them."""
        together = zip(parts, self.axes, self.dtypes, strict=True)
        if call.samples == 1:
            return [part.squeeze(0).to(dtype) for part, _, dtype in together]
        return [part.movedim(0, axis).flatten(axis, axis + 1).to(dtype) for part, axis, dtype in together]


def in_front(tensor: Tensor, layout: int, samples: int) -> Tensor:
    """(samples, *a tensor of the same dimensions that holds one of them)."""
    if samples == 1:
        return tensor.unsqueeze(0)
    if folds(layout):
        axis = axis_of(layout)
        parts: Tensor = tensor.unflatten(axis, (samples, -1))
        return parts.movedim(axis, 0)
    return tensor.movedim(layout, 0).unsqueeze(layout + 1) if layout else tensor.unsqueeze(1)


def compact(call: Call, tensor: Tensor) -> Tensor:
    """A part of a larger tensor as it was when the plan was made: vmap has functions that take none with gaps."""
    if call.in_place or call.name in ELEMENTWISE:
        return tensor
    size = 1
    for stride, length in sorted((st, n) for st, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != size:
            return tensor.clone()
        size *= length
    return tensor


def rows_of(tensor: Tensor, samples: int) -> int:
    """How many rows a tensor has for each sample, 0 where they cannot be the samples'."""
    return 0 if tensor.dim() == 0 or tensor.shape[0] % samples else tensor.shape[0] // samples


@torch.no_grad()
def make_plan(call: Call) -> Plan | None:
    """The plan whose results are those of the plain call, for the parameters' own values and for others."""
    if LOST in call.layouts.values() and call.samples > 1:
        return None
    candidates = [
        i for i, leaf in enumerate(call.leaves)
        if isinstance(leaf, Tensor) and i not in call.layouts and rows_of(leaf, call.samples) and call.samples > 1
    ]  # fmt: skip
    choices = sorted(itertools.chain.from_iterable(itertools.combinations(candidates, n) for n in range(4)), key=len)
    own, other = (dict(_values(call, changed)) for changed in (False, True))
    plain, spec = _plain(call, own)
    if not any(isinstance(result, Tensor) and differentiable(result) for result in plain):
        return Plan(free=True)
    if not all(isinstance(result, Tensor) for result in plain):
        return None
    for by_row in choices:
        asked = Plan(frozenset(by_row), dtypes=tuple(result.dtype for result in plain), spec=spec)
        plan = _placed(asked, call, own, plain)
        if plan is not None and _placed(plan, call, other, _plain(call, other)[0]) == plan:
            return plan
    return None


def _values(call: Call, changed: bool) -> Iterator[tuple[int, Tensor]]:
    """Copies of the tensors of a call; `changed`: those computed from parameters get other values."""
    for i, leaf in enumerate(call.leaves):
        if isinstance(leaf, Tensor):
            value = leaf.detach().clone()
            if changed and i in call.derived:
                value += torch.arange(value.numel(), device=value.device).add(1).mul(12.9898).sin().view(value.shape)
            yield i, value


def _filled(call: Call, tensors: dict[int, Tensor]) -> list[Any]:
    return [tensors[i].clone() if i in tensors else leaf for i, leaf in enumerate(call.leaves)]


def _plain(call: Call, tensors: dict[int, Tensor]) -> tuple[list[Any], TreeSpec]:
    return tree_flatten(call.run(_filled(call, tensors)))


def _placed(plan: Plan, call: Call, tensors: dict[int, Tensor], expected: list[Tensor]) -> Plan | None:
    """The plan with the axes on which its results have the samples; None where they are not those expected."""
    values = _filled(call, tensors)
    for i, value in enumerate(values):
        if i in call.layouts or i in plan.by_row:
            values[i] = in_front(value, call.layouts.get(i, FOLDED), call.samples)
        elif i in call.derived:
            values[i] = value.expand(call.samples, *value.shape)
    try:
        parts = plan.run(call, values)
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
        return None
    if len(parts) != len(expected):
        return None
    axes = tuple(_axis(part, whole, call.samples) for part, whole in zip(parts, expected, strict=True))
    if LOST in axes:
        return None
    kept = [part.shape[1 + axis] == 1 or call.samples == 1 for part, axis in zip(parts, axes, strict=True)]
    layouts = [axis if whole else folded(axis) for axis, whole in zip(axes, kept, strict=True)]
    placed = replace(plan, axes=axes, layouts=tuple(layouts))
    together = zip(placed.results(call, parts), expected, strict=True)
    return placed if all(_same(result, whole) for result, whole in together) else None


def _axis(part: Tensor, whole: Tensor, samples: int) -> int:
    """Where results (samples, *one) must be put together to have the shape of the whole."""
    one = part.shape[1:]
    if samples == 1 and one == whole.shape:
        return 0
    if part.dim() - 1 != whole.dim():
        return LOST
    grown = [a for a in range(whole.dim()) if one[a] != whole.shape[a]]
    return grown[0] if len(grown) == 1 and one[grown[0]] * samples == whole.shape[grown[0]] else LOST


def _same(result: Tensor, expected: Tensor) -> bool:
    if not differentiable(expected):
        return torch.equal(result, expected)
    scale = expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 0.0
    tolerance = TOLERANCE.get(expected.dtype.to_real(), 0.0) * scale
    return torch.allclose(result, expected, rtol=0.0, atol=tolerance, equal_nan=True)
