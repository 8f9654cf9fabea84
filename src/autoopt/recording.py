"""A whole training step as one CUDA graph, in which Python costs nothing."""

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autoopt.optim.base import AutoOptimizer
from autoopt.optim.bucket import Bucket

P = ParamSpec("P")
R = TypeVar("R")

EAGER = 3  # steps of a kind before it is recorded: they lay out the state and build the kernels
KINDS = 8  # of steps to remember: a last batch of fewer samples is one, and so is another option

GIVEN = (Tensor, int, float, str, bool, type(None))


def recorded(step: Callable[P, R], optimizer: AutoOptimizer) -> Callable[P, R]:
    """The same training step, on a GPU as one CUDA graph. On a CPU it runs as it is.

        def step(x, y):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            return loss

        step = autoopt.recorded(step, opt)
        for x, y in loader:
            loss = step(x, y)

    The first three calls run as they are. The fourth is recorded, and from there on the step's kernels run without its
    Python: what it prints, counts or draws at random on the host is not done again. The values of tensors may change
    from call to call. With other shapes, dtypes, numbers or options of the optimizer, other frozen parameters, another
    autocast or `model.train()` and `eval()` it is another step, which is recorded at its own fourth call; eight such
    kinds are remembered. So an option that changes at every call, as by a scheduler, keeps all steps as they are.
    Tensors may come from the CPU; what is returned is detached and safe to keep. Hooks that run after
    `optimizer.step()` (`watch` has one) are called after each call.

    A call is one whole training step: gradients are cleared before it, and `optimizer.step()` is called in it once.

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
    modes: tuple[Any, ...]  # of the model, of autograd and of autocast


@dataclass
class Known:
    """A kind of step, and its graph once it is recorded."""

    kind: Kind
    calls: int = 0
    graph: "Graph | None" = None


class Graph:
    """One recorded step.

    Args:
        step: does it.
        inputs: the tensors that it reads, of which it has copies of its own from now on.
        pool: the memory that all graphs of one optimizer share, since they run one after the other.
        stream: to record on.
    """

    def __init__(
        self, step: Callable[[list[Tensor]], Any], inputs: list[Tensor], pool: Any, stream: torch.cuda.Stream
    ) -> None:
        self.inputs = [torch.empty_like(x).copy_(x) for x in inputs]
        self.graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream()
        try:
            # other threads, a loader's say, may go on
            with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self.outputs = step(self.inputs)
        except Exception:
            torch.cuda.set_stream(before)  # torch may leave its own, and the generator as in a recording
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            raise

    def replay(self, inputs: list[Tensor]) -> Any:
        """Do the step with these inputs; what it returns."""
        if inputs:
            torch._foreach_copy_(self.inputs, inputs, non_blocking=True)
        self.graph.replay()
        return pytree.tree_map_only(Tensor, torch.clone, self.outputs)


class Recorder:
    """A step and its graphs, one for each kind of call."""

    def __init__(self, step: Callable[..., Any], optimizer: AutoOptimizer) -> None:
        self.step, self.optimizer = step, optimizer
        self.known: list[Known] = []  # the newest last
        self.buckets: list[list[Bucket]] | None = None  # the optimizer's state as the graphs know it
        self.stream: torch.cuda.Stream | None = None
        self.pool: Any = None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = self._device()
        if device is None:
            return self._once(args, kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        known = self._known(self._kind(leaves, structure))
        known.calls += 1
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        def step(inputs: list[Tensor]) -> Any:
            given = iter(inputs)
            whole = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return self._once(*pytree.tree_unflatten(whole, structure))

        if known.graph is None:
            inputs = [x.to(device, non_blocking=True) for x in tensors]
            if known.calls <= EAGER:
                return self._aside(step, inputs, device)
            with self._without_hooks():
                known.graph = self._record(step, inputs, device)
        found = known.graph.replay(tensors)
        for hook in list(self.optimizer._optimizer_step_post_hooks.values()):  # Python, which no graph holds
            hook(self.optimizer, (), {})
        return found

    def _device(self) -> torch.device | None:
        """Where the step is recorded; None: nowhere."""
        groups = self.optimizer.param_groups
        devices: set[torch.device] = {parameter.device for group in groups for parameter in group["params"]}
        if all(device.type != "cuda" for device in devices):
            return None
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise RuntimeError(f"a step on several devices ({names}) cannot be recorded: call the step itself.")
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if distributed and torch.distributed.get_world_size() > 1:
            raise RuntimeError("a step of several processes cannot be recorded: call the step itself.")
        if self.optimizer._optimizer_step_pre_hooks:
            raise RuntimeError(
                "the optimizer has hooks that run before its step(), which a graph would leave out: remove them, or "
                "call the step itself. (Hooks that run after it are called after each recorded step.)"
            )
        if any(group["measure_every"] > 1 for group in groups):
            raise RuntimeError(
                "the steps of an optimizer with measure_every= differ, and a graph is always the same: leave the "
                "option out, since in a graph it saves little."
            )
        return devices.pop()

    def _kind(self, leaves: list[Any], structure: pytree.TreeSpec) -> Kind:
        arguments: list[Any] = []
        for leaf in leaves:
            if not isinstance(leaf, GIVEN):
                raise TypeError(
                    f"a recorded step was given {type(leaf).__name__}: give it tensors, numbers, words and None, in "
                    "lists, tuples and dicts if need be."
                )
            arguments.append((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf))
        groups = self.optimizer.param_groups
        names = {"params", "param_names"}
        options = [{name: value for name, value in group.items() if name not in names} for group in groups]
        parameters = [(p.data_ptr(), p.requires_grad) for group in groups for p in group["params"]]
        return Kind(structure, arguments, options, parameters, self._modes())

    def _modes(self) -> tuple[Any, ...]:
        source = self.optimizer._now.source
        training = source is None or source.model is None or source.model.training
        return training, torch.is_grad_enabled(), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")

    def _known(self, kind: Kind) -> Known:
        """What is known of a kind of step; nothing of any, if the optimizer's state has moved."""
        buckets = self.optimizer._made_buckets()
        if buckets is not self.buckets:
            self.known, self.buckets = [], buckets
        found = next((known for known in self.known if known.kind == kind), None)
        if found is None:
            found = Known(kind)
            self.known = [*self.known[1 - KINDS :], found]
        return found

    def _once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The step, with what it returns detached."""
        stepped = 0

        def count(*_: Any) -> None:
            nonlocal stepped
            stepped += 1

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
        return pytree.tree_map_only(Tensor, Tensor.detach, found)

    @contextlib.contextmanager
    def _without_hooks(self) -> Iterator[None]:
        """While a step is recorded the optimizer's hooks do not run: they may ask for values."""
        hooks = self.optimizer._optimizer_step_post_hooks
        self.optimizer._optimizer_step_post_hooks = OrderedDict()
        try:
            yield
        finally:
            self.optimizer._optimizer_step_post_hooks = hooks

    def _aside(self, step: Callable[[list[Tensor]], Any], inputs: list[Tensor], device: torch.device) -> Any:
        """The step as it is, on the stream that it is recorded on."""
        if self.stream is None or self.stream.device != device:
            self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            found = step(inputs)
        torch.cuda.current_stream(device).wait_stream(self.stream)
        return found

    def _record(self, step: Callable[[list[Tensor]], Any], inputs: list[Tensor], device: torch.device) -> Graph:
        assert self.stream is not None
        try:
            with torch.cuda.device(device):
                return Graph(step, inputs, self.pool, self.stream)
        except Exception as error:
            raise RuntimeError(
                f"this step cannot be recorded as a CUDA graph: {error}. Something in it asks the GPU for a value "
                "(.item(), float(loss), print(loss), a GradScaler, clip_grad_norm_(error_if_nonfinite=True), a mask as "
                "an index) or moves data from the CPU: take that out of it, or call the step itself."
            ) from error
