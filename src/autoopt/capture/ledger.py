"""Parameters that a sample reaches in several ways: what it adds in all of them is summed before it is squared.

A layer that is called twice, a weight that two layers share, a weight that is computed from other parameters: there
Σ_i c_i² is not the sum over the uses of their own Σ_i c_i². So each use enters what every sample adds in it, as a
function that is asked for a few samples at a time; at the end of the backward pass the entries of a parameter are
added up, squared and forgotten.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autoopt.capture import sharded
from autoopt.capture.alone import Alone
from autoopt.capture.aside import Aside
from autoopt.capture.audit import Audit, Besides
from autoopt.capture.current import Pass
from autoopt.capture.reach import Reach
from autoopt.capture.sampled import Few, Look, Sampler, Some, squared
from autoopt.moments import Contributions, Product, chunk, joined, precision, wide

if TYPE_CHECKING:
    from autoopt.capture.site import Site


class Ledger:
    """The uses of parameters in the backward pass that is under way, and the second moments of those before.

    Uses of one parameter in one pass are by the same samples: row i of each belongs to sample i.

    Args:
        current: the pass that the sites share.
        total: only the total of Σ_i c_i² is asked for.
    """

    def __init__(self, current: Pass, *, total: bool) -> None:
        self.current, self.total, self.sampler = current, total, Sampler()
        self.parameters: dict[str, nn.Parameter] = {}  # all that may be entered
        self.names: dict[nn.Parameter, str] = {}
        self.gathered: dict[str, nn.Parameter] = {}  # what stands for a sharded parameter while its module runs
        self.squares: dict[str, Tensor] = {}  # Σ_i c_i² since the last clear, elementwise or in total
        self.samples: dict[str, Tensor | int] = {}  # N behind it, on the device where compiled passes were counted
        self.audit, self.besides, self.aside, self.reach = Audit(), Besides(), Aside(), Reach()
        self.holding: dict[Any, None] = {}  # the sites to whose leaves something came, which `Capture` books
        self._uses: dict[str, list[Contributions]] = {}
        self._graph, self._rows = -1, 0  # the pass that they belong to, by autograd's number, and its N
        self._whole: dict[str, Tensor] = {}  # Σ_i c_i² in this pass of those of which all samples were looked at
        self._few, self.one = Few(total), Alone(total, self.parameters)
        current.cleared = self._cleared
        self._begun: tuple[int, bool] = (-1, False)  # for the pass of that number, what `begins` found
        self._squared: dict[str, int] = {}  # name -> autograd's number of the pass that entered a square
        self._smooth = -1  # the pass in which a layer may be looked at `as_usual`
        self._usual: list[Site] = []  # those that were, since it was last asked what was entered

    def keep(self, name: str, parameter: nn.Parameter) -> None:
        """Have an account for a parameter, in the place of another of that name that the model no longer has."""
        self.names.pop(self.parameters.get(name, parameter), None)
        self.parameters[name] = parameter
        self.names[parameter] = name

    def gather(self, name: str, plain: nn.Parameter) -> None:
        """Take the uses of a plain parameter for those of the sharded one that it stands for."""
        self.gathered[name] = plain
        self.names[plain] = name

    def used(self, name: str) -> nn.Parameter:
        """The parameter as the graph has it."""
        return self.gathered.get(name, self.parameters[name])

    def fresh(self, name: str) -> bool:
        """Whether nothing was added to the gradient of a parameter since it was cleared."""
        return self.parameters[name].grad is None and name not in self.current.withheld

    def _cleared(self) -> bool:
        """The same of all of them."""
        return not self.current.withheld and all(p.grad is None for p in self.parameters.values())

    def begins(self, graph: int) -> bool:
        """Whether all that is known comes from the pass of that number, and so does all that is in the gradients."""
        if self._begun[0] != graph:
            self._begun = graph, self.current.anew and not self.squares
            if self._begun[1]:
                self.reach.trust(self.parameters.values())
        return self._begun[1]

    def add(self, name: str, samples: int, contributions: Contributions, outer: int = -1) -> None:
        """Enter one use of a parameter, during a backward pass. `outer`: see `Pass.enter`."""
        if not self.adds_to(name):
            return
        graph = self._open(name, samples, outer)
        if self._squared.get(name) == graph:
            raise RuntimeError(_late(name))
        self._uses.setdefault(name, []).append(contributions)
        self._rows = samples

    def add_square(self, name: str, samples: int, square: Tensor, outer: int = -1) -> None:
        """Enter Σ_i c_i² of a parameter that has no other use in this pass."""
        if self.adds_to(name):
            self._alone(name, self._open(name, samples, outer))
            self.book(name, samples, square)

    def open(self, names: Iterable[str], samples: int, graph: int) -> None:
        """Say that one of the looks will follow for these parameters, before the pass that adds to them has done so.

        The number of the pass is `graph`.
        """
        if graph != self._graph:
            self._graph = graph
            self._drop()
        for name in names:
            self._alone(name, graph)
        self._rows = samples

    def smooth(self, graph: int) -> None:
        """A layer was looked at in the pass of that number: of the pass itself no more is to be asked, as a rule."""
        if self.reach.trusts(graph):
            self._smooth = graph

    def as_usual(self, site: "Site", samples: int) -> bool:
        """Say that one of the looks will follow, as `check` of a site and `open` do, in a pass that is smooth.

        False: something may be otherwise, and nothing was said.
        """
        graph, current, uses = self._smooth, self.current, self._uses
        if graph != torch._C._current_graph_task_id() or graph != current.graph or samples != current.samples:
            return False
        if site.entered == graph or (uses and not uses.keys().isdisjoint(site.names.values())):
            return False
        site.entered = graph
        self._usual.append(site)
        return True

    def _enter_usual(self) -> None:
        """Note of all the parameters at once what `as_usual` let pass: this is what a backward pass waits for."""
        usual, self._usual = self._usual, []
        for site in usual:
            for name in site.names.values():
                self._alone(name, site.entered)
                self.reach.take(name, self.parameters[name])

    def look_whole(self, name: str, square: Tensor) -> None:
        """Enter Σ_i c_i² of such a parameter."""
        self._whole[name] = square

    def look(self, look: Look, some: Some, *, early: bool) -> None:
        """Enter a layer of which `some` samples are looked at; `early`: what can be done before the pass ends is."""
        self._few.add(look, some, [self.parameters[name] for name in look.names.values()], early)

    def add_derived(
        self, derived: Tensor, samples: int, contributions: Contributions, *, sole: bool, outer: int = -1
    ) -> None:
        """Enter one use of a tensor that was computed from parameters.

        The graph behind it is there only during the backward pass, so what the samples add is pulled back at once, and
        kept until the end of the pass, unless this is the `sole` use of those parameters.
        """
        names = [self.names[parameter] for parameter in sources(derived) if parameter in self.names]
        names = [name for name in names if self.adds_to(name)]
        if not names:
            return
        parameters = [self.used(name) for name in names]
        some = self.sampler.choose(samples, derived.numel()) if sole else None
        parts = slices(samples, derived) if some is None else [some.rows]
        pulled = (pull_back(derived, parameters, contributions(rows)) for rows in parts)
        if sole:
            squares: dict[str, Tensor] = {}
            for part in pulled:
                for name, c in zip(names, part, strict=True):
                    if c is not None:
                        squares[name] = squares.get(name, 0) + squared(c, self.total)
            for name, square in squares.items():
                self.add_square(name, samples, square if some is None else square * some.share, outer)
            return
        for name, *parts in zip(names, *pulled, strict=True):
            if parts[0] is not None:
                self.add(name, samples, torch.cat(parts).__getitem__, outer)

    def settle(self) -> None:
        """The backward pass ended: sum the uses of each parameter, square, add to what earlier passes left."""
        if self._graph != self.current.graph:  # nothing was entered in this pass, and one before it failed
            self._drop()
        self.aside.join()
        self._enter_usual()
        uses, self._uses = self._uses, {}
        with torch.no_grad():
            if self.current.group is None:  # else the gradients are averages over ranks
                self.audit.check(uses, self._rows, self.parameters)
            for name, entered in uses.items():
                self.book(name, self._rows, self.second_moment(entered, self._rows, self.parameters[name]))
            looked = self._few.squares() | self.one.squares() | self._whole
            self._whole = {}
            for name in self.reach.missed():
                looked.pop(name, None)
            if self.squares.keys().isdisjoint(looked):  # as a rule, and these are many
                self.squares |= looked
                self.samples |= dict.fromkeys(looked, self._rows)
            else:
                for name, square in looked.items():
                    self.book(name, self._rows, square)

    def second_moment(self, uses: Sequence[Contributions], samples: int, parameter: Tensor) -> Tensor:
        """Σ_i c_i² with c_i = Σ over the uses, of all samples or by those that are looked at."""
        some = self.sampler.choose(samples, parameter.numel())
        if some is None:
            return second_moment(uses, samples, parameter, self.total)
        theirs = [restricted(use, some.rows) for use in uses]
        return second_moment(theirs, some.number, parameter, self.total) * some.share

    def clear(self) -> None:
        """Forget everything."""
        self.squares, self.samples = {}, {}
        self._drop()

    def _drop(self) -> None:
        """Forget the uses of a pass that did not come to its end."""
        self._uses, self._usual = {}, []
        self.aside.drop()
        self._few.clear()
        self.one.clear()
        self._whole = {}
        self.audit.drop()

    def adds_to(self, name: str) -> bool:
        """Whether the pass that runs this adds to the parameter's gradient. `autograd.grad` does not."""
        return self.reach.adds_to(self.used(name))

    def _alone(self, name: str, graph: int) -> None:
        """See that a parameter has no other use in the pass of that number."""
        if self._squared.get(name) == graph or name in self._uses:
            raise RuntimeError(_late(name))
        self._squared[name] = graph

    def _open(self, name: str, samples: int, outer: int) -> int:
        graph = self.current.enter(name, samples, outer)
        if graph != self._graph:
            self._graph = graph
            self._drop()
        self._enter_usual()
        self.audit.open(name, self.parameters[name])
        if name not in self._uses:
            self.begin(name)
        return graph

    def begin(self, name: str) -> None:
        """A pass is about to add to a parameter's gradient: see whether that and the statistics begin together."""
        if self.fresh(name):  # what is known is left from a pass that no step followed
            self.drop(name)
        elif name not in self.squares and (gradient := self.parameters[name].grad) is not None:
            self.current.leave(name, sharded.local(gradient))

    def drop(self, name: str) -> None:
        """Forget the second moment of a parameter."""
        self.squares.pop(name, None)
        self.samples.pop(name, None)

    def book(self, name: str, samples: Tensor | int, square: Tensor) -> None:
        """Add Σ_i c_i² of a pass, and over how many samples, to what is known."""
        known = name in self.squares
        self.squares[name] = self.squares[name] + square if known else square
        self.samples[name] = self.samples[name] + samples if known else samples


def _late(name: str) -> str:
    return (
        f"parameter '{name}' was used more than once in one backward pass, which its forward passes did not show: run "
        "all of its forward passes right before their backward pass."
    )


def second_moment(uses: Sequence[Contributions], samples: int, parameter: Tensor, total: bool) -> Tensor:
    """Σ_i c_i² with c_i = Σ over the uses, a few samples at a time."""
    uses = joined(uses)
    if total and len(uses) == 1 and isinstance(uses[0], Product) and uses[0].gram_pays():
        return uses[0].total().to(precision(parameter))
    square = torch.zeros(() if total else parameter.shape, dtype=precision(parameter), device=parameter.device)
    for rows in slices(samples, parameter):
        c = wide(uses[0](rows))
        for use in uses[1:]:
            c = c + use(rows)
        square += squared(c, total)
    return square


def restricted(use: Contributions, rows: slice) -> Contributions:
    """What some samples add, numbered anew."""
    if isinstance(use, Product):
        return use.of(rows)
    samples = range(rows.start, rows.stop, rows.step)

    def contributions(part: slice) -> Tensor:
        chosen = samples[part]
        return use(slice(chosen.start, chosen.stop, chosen.step))

    return contributions


def slices(samples: int, parameter: Tensor) -> Iterable[slice]:
    """The samples, as many at a time as may be held."""
    size = max(1, chunk(parameter.device) // max(1, parameter.numel()))
    return (slice(start, min(start + size, samples)) for start in range(0, samples, size))


def sources(derived: Tensor) -> list[nn.Parameter]:
    """The trainable parameters that a tensor was computed from."""
    if derived.grad_fn is None:
        return [derived] if isinstance(derived, nn.Parameter) and derived.requires_grad else []
    found: dict[int, nn.Parameter] = {}
    seen: set[Any] = set()
    ahead: list[Any] = [derived.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of an AccumulateGrad node: the leaf
        if isinstance(variable, nn.Parameter):
            found[id(variable)] = variable
        ahead += [following for following, _ in node.next_functions]
    return list(found.values())


def pull_back(derived: Tensor, parameters: Sequence[nn.Parameter], c: Tensor) -> list[Tensor | None]:
    """What samples that add c (samples, *shape of `derived`) to a tensor add to the parameters it was computed from.

    To be called in a backward pass, before the engine has freed the graph behind `derived`.
    """
    back = functools.partial(torch.autograd.grad, derived, parameters, retain_graph=True, allow_unused=True)
    rough, c = c.dtype == torch.bfloat16, c.to(derived.dtype)
    found: list[Tensor | None]
    try:
        found = list(back(grad_outputs=c, is_grads_batched=True))
    except RuntimeError:  # not every backward function of a user's own can run for many samples at once
        each = zip(*(back(grad_outputs=one) for one in c), strict=True)
        found = [None if parts[0] is None else torch.stack(parts) for parts in each]
    if rough:  # no more precise than what it comes from, by which it is judged; float16 may not hold it
        found = [None if one is None else one.bfloat16() for one in found]
    return found
