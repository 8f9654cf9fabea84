"""One observed layer: its shadow leaves, its uses, and the checks that keep what they hold exact."""

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from autoopt.capture import inputs
from autoopt.capture.aside import recording
from autoopt.capture.current import Pass
from autoopt.capture.ledger import Ledger
from autoopt.capture.scattered import takes_rows
from autoopt.moments import Contributions, Prepare, precision

T = TypeVar("T")
ROLES = ("weight", "bias")


class Site:
    """The shadow leaves of one layer's parameters; see Note [shadow leaves].

    A parameter with one use in a backward pass has a shadow. Those that several layers share, those that a weight is
    computed from, and all of a layer that was seen to run twice before a backward pass, go through the ledger.
    """

    axis = 0  # that of the samples in the layer's input and output
    fold = 1  # so many consecutive rows of that axis are one sample
    folded = False  # whether `fold` is to be counted in every pass
    strided = False  # the rows of a sample are not consecutive: it is every N-th one
    settled = False  # all of this was seen when a sample was changed
    routed = False  # rows come to it in any number and order: a Watch has to tell which sample each belongs to
    advice = (  # for who gives it rows that nobody can tell apart
        "Rows that are routed, as to the experts of a mixture, are followed through indices and masks to Linear, "
        "Embedding, convolutions, LayerNorm, RMSNorm and GroupNorm, outside of checkpoints. Route them so, give the "
        "model the batch as first axis (batch_first=True), reshape to (batch, positions, features) before the layer, "
        "or leave it to another optimizer through param_groups."
    )

    def __init__(
        self, name: str, layer: nn.Module, plain: type[nn.Module], prepare: Prepare, current: Pass, ledger: Ledger
    ) -> None:
        self.name, self.layer, self.prepare = name, layer, prepare
        self.plain = plain  # the layer's own class
        self.current, self.ledger, self.total = current, ledger, ledger.total
        self.names: dict[str, str] = {}  # role -> name of the parameter that has it
        self.shadows: dict[str, Tensor] = {}  # role of a parameter that only this layer uses -> leaf, .grad is Σ_i c_i²
        self.rows = 0  # N of the eager passes
        self.counts = torch.zeros(2)  # leaf whose .grad is (N, number of uses) of a compiled pass
        self.origins: dict[str, list[nn.Parameter]] = {}  # role of a computed tensor -> what it is computed from
        self.lent = False  # some of the origins belong to other layers' tensors too
        self.repeated = False  # from when the layer is first seen to be used more than once
        self.usual: Any = None  # how it was looked at last, see `glance`
        self._looks = inputs.LOOKS if inputs.weights_of(layer) else 0  # at its inputs that are left
        self._waiting: dict[str, weakref.ref[Any]] = {}  # part of a call -> its last use that had no backward pass yet
        self.entered = -1  # the backward pass that last used a shadow

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a layer is nobody's."""

    # What is observed.

    def observe(self, role: str, name: str, *, shared: bool) -> None:
        """Report on the parameter that has this role; `shared`: other layers hold it too."""
        self.usual = None
        self.names[role] = name
        if shared:
            self.shadows.pop(role, None)
        else:
            self._shadow(role)
        self.names, self.shadows = in_order(self.names), in_order(self.shadows)

    def derive(self, role: str, origin: nn.Parameter, *, shared: bool) -> None:
        """Report on a parameter that the tensor in this role is computed from."""
        self.usual = None
        origins = self.origins.setdefault(role, [])
        if all(origin is not known for known in origins):
            origins.append(origin)
        self.lent |= shared

    def parameter(self, role: str) -> nn.Parameter:
        parameter = self.layer._parameters.get(role)
        if parameter is None:
            raise RuntimeError(
                f"'{role}' of layer '{self.name}' is no parameter any more (a parametrization, pruning): call the "
                "optimizer's detach() before such a change, and make it anew after."
            )
        return parameter

    def held(self, role: str) -> Any:
        """What the layer has in that role, as a rule a parameter: `getattr`, which is slow where modules look last."""
        parameters = self.layer._parameters
        return parameters[role] if role in parameters else getattr(self.layer, role, None)

    def replaced(self) -> bool:
        """Whether the layer has other parameters by now than those that are reported on, as after `fully_shard`."""
        parameters = self.ledger.parameters
        for role, name in self.names.items():  # noqa: SIM110 - a generator takes twice as long
            if self.parameter(role) is not parameters[name]:
                return True
        return False

    def refuse_others(self) -> None:
        """Know nothing of a tensor in a parameter's place that was computed from others, as by functional_call, nor of
        one that is another layer's, tied to it by now."""
        for role, name in self.names.items():
            parameter = self.parameter(role)
            if parameter.grad_fn is not None:
                raise RuntimeError(
                    f"layer '{self.name}' runs with a computed tensor in the place of its parameter '{role}' "
                    "(torch.func.functional_call), and of what it was computed from nothing is known. Compute it in a "
                    "parametrization of the layer (torch.nn.utils.parametrize), or make the optimizer with "
                    'spread="passes".'
                )
            if (other := self.ledger.names.get(parameter, name)) != name:
                raise RuntimeError(
                    f"layer '{self.name}' has parameter '{other}' in the place of its own '{name}', which it had when "
                    "the optimizer was made: tie weights first, and then make the optimizer (detach() the old one)."
                )

    def trains(self) -> bool:
        """Whether any of the observed parameters is not frozen at the moment."""
        for role in self.names:  # as a rule the first one says it
            if self.parameter(role).requires_grad:
                return True
        return any(origin.requires_grad for origins in self.origins.values() for origin in origins)

    @property
    def eager(self) -> bool:
        """Whether the layer's uses have to be seen one by one, outside of any compiled graph."""
        several = self.repeated or self.fold > 1 or self.routed
        return several or len(self.shadows) < len(self.names) or len(self.origins) > 0

    # The forward pass.

    def opened(self, ctx: Any) -> None:
        """A use begins, outside of any compiled graph. One whose graph still waits for its backward pass repeats it."""
        ctx.outer, ctx.spent = torch._C._current_graph_task_id(), False
        if ctx.outer != -1:  # a checkpoint runs it again, in a backward pass at whose end all that it adds is known
            self.current.met.add(self.name)
            self.current.due()
            return
        waiting = self._waiting.get(ctx.part)
        use = None if waiting is None else waiting()
        self.repeated |= use is not None and not use.spent
        self._waiting[ctx.part] = weakref.ref(ctx)

    def closed(self, ctx: Any) -> None:
        """The backward pass of a use begins."""
        part: str = ctx.part
        waiting = self._waiting.get(part)
        if waiting is not None and waiting() is ctx:
            del self._waiting[part]

    def reached(self) -> None:
        """Have the layer's layout found, outside of any compiled graph."""
        if self.current.entrance is not None and not torch.compiler.is_compiling():
            self.current.entrance.reach(self)

    def takes(self, given: Any) -> None:
        """Note how large the inputs are in the first passes, if they are data; outside of any graph."""
        if torch.compiler.is_compiling() or not self._looks:
            return
        self._looks -= 1
        size, noted = inputs.size(given), self.current.inputs
        for role in inputs.weights_of(self.layer):
            name = self.names.get(role)
            if size is not None and name is not None:
                noted[name] = torch.where(size > 0, size, noted[name]) if name in noted else size

    @property
    def known(self) -> bool:
        """Whether nothing is left to be learned of where its samples lie, and how large its inputs are."""
        entrance = self.current.entrance
        return not self._looks and (entrance is None or self.name in entrance.known)

    def takes_rows(self) -> bool:
        """Whether the layer may be given rows of any number, in any order."""
        return takes_rows(self.layer) and not self.origins

    def route(self) -> None:
        """Know that it is given such rows."""
        if not self.takes_rows():
            raise self.unknown()
        self.routed = True

    def unknown(self, x: Tensor | None = None) -> RuntimeError:
        """What to raise where nobody can tell which sample each row of the input belongs to."""
        shape = "" if x is None else f" (its shape is {tuple(x.shape)})"
        return RuntimeError(
            f"which rows of the input of layer '{self.name}' ({self.plain.__name__}) belong to one sample cannot be "
            f"told{shape}: where one sample changes, so do rows that are not one block of an axis. {self.advice}"
        )

    def grouped(self, x: Tensor) -> Tensor:
        """The input with the samples on its first axis, the rows of each together."""
        x = x.movedim(self.axis, 0) if self.axis else x
        self.count(x.shape[0])
        return x.unflatten(0, (self.fold, -1)).transpose(0, 1).flatten(0, 1) if self.strided and self.fold > 1 else x

    def ungrouped(self, y: Tensor) -> Tensor:
        """The output as the layer itself would lay it out."""
        y = y.unflatten(0, (-1, self.fold)).transpose(0, 1).flatten(0, 1) if self.strided and self.fold > 1 else y
        return y.movedim(0, self.axis) if self.axis else y

    def count(self, rows: int) -> None:
        """See how many of the rows of a call are one sample, where that is not always one."""
        entrance = self.current.entrance if self.folded else None
        if entrance is None or not entrance.samples:
            return
        self.fold = max(1, rows // entrance.samples)
        if self.fold > 1 and entrance.left and not torch.compiler.is_compiling():
            raise RuntimeError(
                f"layer '{self.name}' got {rows} rows in a call of its own, where several are one sample in a pass of "
                "the model, so that it is not clear how many samples these are. Call the model, or the module that "
                "makes them of the samples."
            )

    def blank(self, x: Tensor) -> bool:
        """Whether the input is an empty batch: it has nothing to tell."""
        empty = x.dim() > self.axis and x.shape[self.axis] == 0
        if empty:
            self.current.empty()
        return empty

    def check_fold(self, rows: int) -> None:
        """Whether so many rows are whole samples."""
        if rows % self.fold:
            raise RuntimeError(
                f"layer '{self.name}' got {rows} rows where {self.fold} consecutive ones are one sample: the batch is "
                "laid out in another way than when the optimizer was made. Make it anew."
            )

    def leaves(self, device: torch.device) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The leaves to run forward with: counts, weight, bias. A shadow only where the parameter trains."""
        trained = {}
        for role, shadow in self.shadows.items():
            parameter = self.parameter(role)
            if shadow.device != device or shadow.dtype != precision(parameter):  # the model was moved
                shadow = self._shadow(role)
            if parameter.requires_grad:
                trained[role] = shadow
        counts = self.counts if torch.compiler.is_compiling() else None
        return counts, trained.get("weight"), trained.get("bias")

    @property
    def counted(self) -> Tensor | int:
        """N behind what the shadows hold."""
        if self.counts.grad is None:
            return self.rows
        compiled = self.counts.grad[0]
        return compiled + self.rows if self.rows else compiled

    def _shadow(self, role: str) -> Tensor:
        """Put a shadow beside the parameter of that role, where the parameter now is."""
        parameter = self.parameter(role)
        leaf = torch.zeros((), dtype=precision(parameter), device=parameter.device)
        self.shadows[role] = leaf.expand(() if self.total else parameter.shape).requires_grad_()  # one number of memory
        self.counts = torch.zeros(2, device=parameter.device).requires_grad_()
        self.counts.register_post_accumulate_grad_hook(_arrival(weakref.ref(self)))
        return self.shadows[role]

    # The backward pass.

    def adds_to(self, role: str) -> bool:
        """Whether the pass that runs this adds to the gradient of the parameter that has this role."""
        return self.parameter(role).requires_grad and self.ledger.adds_to(self.names[role])

    def check(self, rows: int, ctx: Any) -> int:
        """Before the moments of a backward pass: is what they would be added to, and what they are, what it seems?

        Returns autograd's number for the pass.
        """
        self.closed(ctx)
        if ctx.spent:
            raise RuntimeError(
                f"backward ran twice through the same forward pass of layer '{self.name}' (retain_graph=True), which "
                "would count every sample twice: add the losses up and call backward() once."
            )
        ctx.spent = True
        graph = self.current.enter(self.name, rows // ctx.fold, ctx.outer)
        if graph == self.entered and not self.repeated:
            self.repeated = True
            raise RuntimeError(
                f"layer '{self.name}' was used more than once in one backward pass, which did not show before, as it "
                "runs in checkpoints with use_reentrant=True: use use_reentrant=False."
            )
        self.entered = graph
        if self.ledger.begins(graph):
            return graph
        if all(self.ledger.fresh(self.names[role]) for role in self.shadows):
            self.clear()  # left over from a backward pass that no step followed
            for role in self.shadows:
                self.ledger.drop(self.names[role])
        else:
            for role in self.shadows:
                if self.adds_to(role):
                    self.ledger.begin(self.names[role])
        return graph

    def compared(self) -> bool:
        """Whether none of what it adds to its own parameters is still to be held against their gradients."""
        return self.current.group is not None or self.ledger.besides.done.issuperset(self.names.values())

    def compares(self, role: str) -> bool:
        """Whether what the layer adds to the parameter of this role is to be held against its gradient."""
        name = self.names.get(role)  # None: it is left to another optimizer
        if name is None or name in self.ledger.besides.done or self.current.group is not None:
            return False
        return not recording(self.parameter(role).device)

    def note(self, role: str, gradient: Tensor) -> None:
        """The layer is about to add this."""
        self.ledger.besides.note(self.names[role], self.parameter(role), gradient, self.entered)

    def books(self, role: str, fold: int) -> bool:
        """Whether what is said of this role goes through the ledger."""
        if role in self.shadows:
            return self.repeated or fold > 1
        return role in self.names or role in self.origins

    def book(self, role: str, contributions: Contributions, rows: int, ctx: Any) -> None:
        """Enter a use into the ledger."""
        samples = rows // ctx.fold
        contributions = contributions if ctx.fold == 1 else folded(contributions, ctx.fold)
        if role in self.origins:
            sole = not (self.repeated or self.lent)
            self.ledger.add_derived(ctx.derived[role], samples, contributions, sole=sole, outer=ctx.outer)
        else:
            self.ledger.add(self.names[role], samples, contributions, ctx.outer)

    def holds(self, rows: int) -> None:
        """Of so many samples of an eager pass something comes to the leaves."""
        self.rows += rows
        self.ledger.holding[self] = None

    def clear(self) -> None:
        """Forget the statistics gathered so far."""
        if self not in self.ledger.holding:
            return
        del self.ledger.holding[self]
        self.rows = 0
        for leaf in (self.counts, *self.shadows.values()):
            leaf.grad = None


def in_order(by_role: dict[str, T]) -> dict[str, T]:
    """The weight first, whichever group of parameters came first."""
    return {role: by_role[role] for role in ROLES if role in by_role}


def _arrival(reference: "weakref.ref[Site]") -> Callable[[Tensor], None]:
    """A hook for the leaf that counts, in a compiled backward pass, which does not call `check`.

    It holds the site weakly: Python's collector does not see through a tensor's hooks, so that a strong reference would
    keep the model and the process group for ever.
    """

    def arrived(leaf: Tensor) -> None:
        site = reference()
        if site is not None:
            site.ledger.holding[site] = None
            site.current.due()

    return arrived


def folded(contributions: Contributions, fold: int) -> Contributions:
    """The contributions of samples that are `fold` consecutive rows each."""

    def of(rows: slice) -> Tensor:
        if rows.step in (None, 1):
            together: Tensor = contributions(slice(fold * rows.start, fold * rows.stop)).unflatten(0, (-1, fold))
            return together.sum(1)
        starts = range(fold * rows.start, fold * rows.stop, fold * rows.step)
        return torch.stack([contributions(slice(start, start + fold)).sum(0) for start in starts])

    return of
