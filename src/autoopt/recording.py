"""A whole training step as one CUDA graph, in which Python costs hardly anything."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _pytree as pytree

from autoopt.capture import sharded
from autoopt.optim.base import AutoOptimizer
from autoopt.optim.bucket import Bucket

P = ParamSpec("P")
R = TypeVar("R")

EAGER = 3  # calls of a kind before it is recorded: they lay out the state and build the kernels
KINDS = 8  # to remember: a last batch of fewer samples is one, and so is another option
MANY = 4 * KINDS  # of which none came often enough to be recorded: worth a warning
PLAIN = (Tensor, int, float, str, type(None))  # what a step is given and returns, in lists, tuples and dicts


def recorded(step: Callable[P, R], optimizer: AutoOptimizer) -> Callable[P, R]:
    """The same training step, on a GPU as one CUDA graph.

        def step(x, y):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            return loss

        step = autoopt.recorded(step, opt)
        for x, y in loader:
            loss = step(x, y)

    The first three calls run in Python. The fourth is recorded, and from there on the step's kernels run and its Python
    does not: **what changes from call to call must be an argument, and what you want back must be returned.** A print,
    a counter, a random number of the host, a scheduler or another optimizer whose options change stay as they were when
    the step was recorded. Gradients are not to be read after a call, nor is an argument to be written to in it.

    With other shapes, dtypes, numbers, options of the optimizer, frozen parameters, modes of a layer (`train()`,
    `eval()`) or another autocast it is another kind of step, which is recorded at its own fourth call; the eight used
    last are remembered. An option that changes at every call keeps all of them in Python, with a warning.

    A call is one whole training step: gradients are cleared before it, `optimizer.step()` is called in it once, and
    hooks after that (`watch` has one) run as always. Tensors may come from the CPU and go to the GPU; what is returned
    is detached and a copy. On a CPU all of this is the same, without a graph.

    Args:
        step: takes tensors, numbers, words and None, in lists, tuples and dicts if need be, and returns such.
        optimizer: the one whose step() it calls.
    """
    if not isinstance(optimizer, AutoOptimizer):
        raise TypeError(
            f"recorded(step, optimizer) takes one of this library's optimizers, not {type(optimizer).__name__}."
        )
    recorder = Recorder(step, optimizer)

    @functools.wraps(step)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        found: R = recorder(args, kwargs)
        return found

    return run


class Kind(NamedTuple):
    """What all calls that one graph serves have in common."""

    structure: pytree.TreeSpec
    arguments: list[Any]  # shape and dtype of a tensor, anything else as it is
    options: list[dict[str, Any]]
    parameters: list[tuple[int, bool]]  # address, and whether it trains
    buffers: list[int]  # addresses
    training: list[bool]  # of each layer
    modes: tuple[Any, ...]  # of autograd and autocast


class Graph:
    """One recorded step.

    Args:
        step: does it.
        inputs: the tensors that it reads; the graph has copies of its own.
        stream: to record on.
        other: a graph that runs before or after this one, never at the same time: they share their memory.
    """

    def __init__(
        self,
        step: Callable[[list[Tensor]], Any],
        inputs: list[Tensor],
        stream: torch.cuda.Stream | None,
        other: "Graph | None",
    ) -> None:
        self.inputs = [torch.empty_like(x).copy_(x) for x in inputs]
        self.outputs = self._record(lambda: step(self.inputs), stream, other)

    @torch.no_grad()
    def replay(self, inputs: list[Tensor]) -> Any:
        """Do the step with these inputs; what it returns."""
        if inputs:
            torch._foreach_copy_(self.inputs, inputs, non_blocking=True)
        self._run()
        return _copied(self.outputs)

    def _record(self, step: Callable[[], Any], stream: torch.cuda.Stream | None, other: "Graph | None") -> Any:
        assert stream is not None
        self.graph = torch.cuda.CUDAGraph()
        before, failed = torch.cuda.current_stream(stream.device), None
        pool = None if other is None else other.graph.pool()
        try:
            # other threads, a loader's say, may go on
            with (
                torch.cuda.device(stream.device),
                torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            ):
                try:
                    return step()
                except BaseException as error:
                    failed = error
                    raise
        except BaseException as error:
            torch.cuda.set_stream(before)  # torch may leave its own, and the generator as in a recording
            generator = torch.cuda.default_generators[stream.device.index]
            generator.graphsafe_set_state(generator.clone_state())
            if failed is not None and failed is not error:
                raise failed from None  # the end of a recording complains of what the error left open
            raise

    def _run(self) -> None:
        self.graph.replay()


@dataclass
class Known:
    """A kind of step, and its graph once it is recorded."""

    kind: Kind
    calls: int = 0  # that came to their end
    graph: Graph | None = None


class Recorder:
    """A step and its graphs, one for each kind of call."""

    graph = Graph

    def __init__(self, step: Callable[..., Any], optimizer: AutoOptimizer) -> None:
        self.step, self.optimizer = step, optimizer
        self.known: list[Known] = []  # the one used last at the end
        self.kinds = 0  # met so far
        self.buckets: list[list[Bucket]] | None = None  # the optimizer's state as the graphs know it
        self.layers: list[nn.Module] = []
        self.stream: torch.cuda.Stream | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        arguments, device = _arguments(leaves), self._device()
        if device is None:
            self._refuse()
            return self._once(args, kwargs)
        known = self._known(self._kind(structure, arguments))
        tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]

        def step(inputs: list[Tensor]) -> Any:
            given = iter(inputs)
            whole = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return self._once(*pytree.tree_unflatten(whole, structure))

        if known.graph is not None:
            self._refuse_hooks()
            self.optimizer._refuse_step(self.optimizer._attached())  # as step() itself would
        else:
            self._refuse()
            inputs = [x.to(device, non_blocking=True) for x in tensors]
            if known.calls < EAGER:
                found = self._aside(step, inputs, device)
                known.calls += 1
                return found
            known.graph = self._recorded(step, inputs)
        found = known.graph.replay(tensors)
        torch.autograd.graph.increment_version(self._parameters())
        for hook in [hook for hooks in self._post_hooks() for hook in hooks.values()]:
            hook(self.optimizer, (), {})
        return found

    # Which step it is.

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _kind(self, structure: pytree.TreeSpec, arguments: list[Any]) -> Kind:
        buckets = self.optimizer._made_buckets()
        if buckets is not self.buckets:  # the state has moved: no graph knows where to
            source = self.optimizer._now.source
            self.layers = [] if source is None or source.model is None else list(source.model.modules())
            self.known, self.buckets = [], buckets
        names = {"params", "param_names"}
        return Kind(
            structure,
            arguments,
            [{k: v for k, v in group.items() if k not in names} for group in self.optimizer.param_groups],
            [(parameter.data_ptr(), parameter.requires_grad) for parameter in self._parameters()],
            [b.data_ptr() for layer in self.layers for b in layer._buffers.values() if b is not None],
            [layer.training for layer in self.layers],
            (torch.is_grad_enabled(), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        )

    def _known(self, kind: Kind) -> Known:
        """What is known of a kind of step."""
        found = next((known for known in self.known if known.kind == kind), None)
        if found is None:
            found = Known(kind)
            self.kinds += 1
            if self.kinds == MANY and not any(known.graph for known in self.known):
                warnings.warn(
                    f"{MANY} kinds of step have come, and none of them four times: nothing is recorded. Give the step "
                    "batches of few shapes, no number that changes from call to call (a tensor may), and let a "
                    "scheduler step once in a while, not at every batch.",
                    stacklevel=4,
                )
        self.known = [*(known for known in self.known if known is not found), found][-KINDS:]
        return found

    def _device(self) -> torch.device | None:
        """Where the step is recorded; None: nowhere."""
        device: torch.device = self._parameters()[0].device
        return device if device.type == "cuda" else None

    def _refuse(self) -> None:
        parameters = self._parameters()
        devices = {parameter.device for parameter in parameters}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise RuntimeError(f"a step on several devices ({names}) cannot be recorded: call the step itself.")
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if (distributed and torch.distributed.get_world_size() > 1) or any(map(sharded.is_sharded, parameters)):
            raise RuntimeError("a step of several processes cannot be recorded: call the step itself.")
        if any(group["measure_every"] > 1 for group in self.optimizer.param_groups):
            raise RuntimeError(
                "the steps of an optimizer with measure_every= differ, and a graph is always the same: leave the "
                "option out, since in a graph it saves little."
            )
        self._refuse_hooks()

    def _refuse_hooks(self) -> None:
        if self.optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks:
            raise RuntimeError(
                "the optimizer has hooks that run before its step(), which a graph would leave out: remove them, or "
                "call the step itself. (Hooks that run after it are called after each recorded step.)"
            )

    # Doing it.

    def _once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The step, in Python."""
        stepped, trained = 0, False

        def count(*_: Any) -> None:
            nonlocal stepped, trained
            stepped += 1
            trained = any(parameter.grad is not None for parameter in self._parameters())

        self.optimizer.zero_grad()
        handle = self.optimizer.register_step_post_hook(count)
        try:
            found = self.step(*args, **kwargs)
        finally:
            handle.remove()
        if stepped != 1:
            raise RuntimeError(
                f"a recorded step must call the optimizer's step() once, and this one called it {stepped} times: give "
                "recorded() a function that does one whole training step, all accumulated passes included."
            )
        if not trained:
            raise RuntimeError(
                "a recorded step clears the gradients first, and this one came to the optimizer's step() without new "
                "ones: give recorded() a function that does the forward and the backward pass, too."
            )
        for leaf in pytree.tree_leaves(found):
            if not isinstance(leaf, PLAIN):
                raise TypeError(
                    f"a recorded step returned {type(leaf).__name__}: let it return tensors, numbers, words and None, "
                    "in lists, tuples and dicts if need be."
                )
        return _copied(found)

    def _aside(self, step: Callable[[list[Tensor]], Any], inputs: list[Tensor], device: torch.device) -> Any:
        """The step, in Python, on the stream that it is recorded on."""
        if self.stream is None or self.stream.device != device:
            self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            found = step(inputs)
        torch.cuda.current_stream(device).wait_stream(self.stream)
        return found

    def _recorded(self, step: Callable[[list[Tensor]], Any], inputs: list[Tensor]) -> Graph:
        other = next((known.graph for known in self.known if known.graph is not None), None)
        try:
            with self._without_hooks():
                return self.graph(step, inputs, self.stream, other)
        except BaseException as error:
            self.optimizer.zero_grad()  # what was to be computed never was
            if not isinstance(error, RuntimeError) or not any(word in str(error) for word in ("CUDA", "captur")):
                raise
            raise RuntimeError(
                f"this step cannot be recorded as a CUDA graph: {error}. Something in it asks the GPU for a value "
                "(.item(), float(loss), print(loss), a GradScaler, clip_grad_norm_(error_if_nonfinite=True), a mask as "
                "an index) or moves data from the CPU: take that out of it, or call the step itself."
            ) from error

    @contextlib.contextmanager
    def _without_hooks(self) -> Iterator[None]:
        """While a step is recorded, hooks after it do not run: they may ask for values."""
        before = [dict(hooks) for hooks in self._post_hooks()]
        for hooks in self._post_hooks():
            hooks.clear()
        try:
            yield
        finally:
            for hooks, then in zip(self._post_hooks(), before, strict=True):
                hooks.update(then)

    def _post_hooks(self) -> tuple[dict[int, Any], dict[int, Any]]:
        """Those of the optimizer, and those that torch runs after the steps of all optimizers."""
        return self.optimizer._optimizer_step_post_hooks, _global_optimizer_post_hooks


def _arguments(leaves: list[Any]) -> list[Any]:
    """Shape and dtype of a tensor, anything else as it is."""
    found: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, PLAIN):
            raise TypeError(
                f"a recorded step was given {type(leaf).__name__}: give it tensors, numbers, words and None, in lists, "
                "tuples and dicts if need be."
            )
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise ValueError(
                f"a recorded step was given a tensor of shape {tuple(leaf.shape)} that requires a gradient, which it "
                "would not get: detach it."
            )
        found.append((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf))
    return found


def _copied(found: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), found)
