"""recorded(step, opt) is the step, and what it cannot be it refuses.

A CPU has no graphs. `Taped` is one: it notes the operations of a step while it undoes what they do, and does them again
on the same memory, without Python. benchmarks/gpu_check.py has a GPU record them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import autoopt
from autoopt import AutoAdam, AutoSGD
from autoopt.recording import EAGER, KINDS, MANY, Graph, Recorder
from contract.small import Batch, assert_same, batches, every_optimizer, mlp, snapshot, train


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class Tape(TorchDispatchMode):
    """The operations that were done, with the memory that they made, and what was in other memory before."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.before: dict[int, tuple[Any, Any]] = {}
        self.made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        named = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
        written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        for tensor in tensors([named.get(name) for name in written]):
            if storage(tensor) not in self.made | self.before.keys():
                memory = tensor.untyped_storage()
                self.before[storage(tensor)] = memory, memory.clone()
        found = func(*args, **kwargs)
        given = set(map(storage, tensors((args, kwargs))))
        own = [tensor for tensor in tensors(found) if storage(tensor) not in given]
        self.made |= set(map(storage, own))
        if own or written:  # else a view
            self.done.append((func, args, kwargs, own))
        return found

    def undo(self) -> None:
        for memory, content in self.before.values():
            memory.copy_(content)

    def play(self) -> None:
        for func, args, kwargs, own in self.done:
            given = set(map(storage, tensors((args, kwargs))))
            new = [tensor for tensor in tensors(func(*args, **kwargs)) if storage(tensor) not in given]
            for there, tensor in zip(own, new, strict=True):
                there.copy_(tensor)


class Taped(Graph):
    """As a CUDA graph: nothing is done while it is recorded, and no Python when it runs."""

    def _record(self, step: Callable[[], Any], stream: Any, other: Graph | None) -> Any:
        self.tape, self.runs = Tape(), 0
        try:
            with self.tape:
                return step()
        finally:
            self.tape.undo()

    def _run(self) -> None:
        self.runs += 1
        self.tape.play()


class Player(Recorder):
    """A recorder whose graphs are tapes."""

    graph = Taped

    def _device(self) -> torch.device:
        return torch.device("cpu")

    def _aside(self, step: Callable[[list[Tensor]], Any], inputs: list[Tensor], device: torch.device) -> Any:
        return step(inputs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self(args, kwargs)

    @property
    def runs(self) -> list[int]:
        """Of the graph of each kind of step that is known."""
        return [known.graph.runs if isinstance(known.graph, Taped) else 0 for known in self.known]


def made(make: Any = AutoSGD, **options: Any) -> tuple[nn.Module, Any, Callable[..., Tensor]]:
    model = mlp()
    optimizer = make(model, **options)

    def step(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        loss = scale * F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


def recorded(**options: Any) -> tuple[nn.Module, Any, Player, Batch]:
    """A player with one graph."""
    model, optimizer, step = made(**options)
    player, batch = Player(step, optimizer), batches(1)[0]
    for _ in range(EAGER + 2):
        player.run(*batch)
    assert player.runs == [2]
    return model, optimizer, player, batch


@every_optimizer
def test_is_the_step_on_a_cpu(make: Any) -> None:
    data = batches(6)
    model, optimizer, step = made(make)
    run = autoopt.recorded(step, optimizer)
    losses = [run(x, y) for x, y in data]
    plain = mlp()
    other = make(plain)
    train(plain, other, data)
    assert_same(snapshot(model, optimizer), snapshot(plain, other))
    assert not any(loss.requires_grad for loss in losses)


@every_optimizer
def test_a_graph_serves_all_calls_of_a_kind(make: Any) -> None:
    data = [*batches(8), *batches(5, samples=5), *batches(2)]
    model, optimizer, step = made(make)
    player = Player(step, optimizer)
    found = [player.run(x, y).item() for x, y in data]
    plain, losses = mlp(), []
    other = make(plain)
    for x, y in data:
        other.zero_grad()
        loss = F.cross_entropy(plain(x), y)
        loss.backward()
        other.step()
        losses.append(loss.item())
    assert player.runs == [2, 10 - EAGER]  # the one used last at the end
    assert found == losses
    assert_same(snapshot(model, optimizer), snapshot(plain, other))


def test_what_is_returned_is_a_copy() -> None:
    _, optimizer, step = made()
    player = Player(lambda x, y: {"loss": step(x, y), "count": len(x)}, optimizer)
    found = [player.run(x, y) for x, y in batches(EAGER + 3)]
    values = [one["loss"].item() for one in found]
    assert len(set(values)) == len(values)
    assert {one["count"] for one in found} == {8}
    assert not any(one["loss"].requires_grad for one in found)


def test_dropout_is_drawn_anew() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 3))
    optimizer, (x, y) = AutoSGD(model, lr=0.0), batches(1)[0]

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    player = Player(step, optimizer)
    assert len({player.run(x, y).item() for _ in range(EAGER + 4)}) == EAGER + 4


# Which step it is.


def change_option(model: nn.Module, optimizer: Any, batch: Batch) -> Any:
    optimizer.param_groups[0]["lr"] = 0.5
    return batch, {}


def freeze(model: nn.Module, optimizer: Any, batch: Batch) -> Any:
    next(model.parameters()).requires_grad_(False)
    return batch, {}


def move(model: nn.Module, optimizer: Any, batch: Batch) -> Any:
    first = next(model.parameters())
    first.data = first.data.clone()
    return batch, {}


def quieten(model: nn.Module, optimizer: Any, batch: Batch) -> Any:
    list(model.children())[-1].eval()
    return batch, {}


def by_name(model: nn.Module, optimizer: Any, batch: Batch) -> Any:
    return batch[:1], {"y": batch[1]}


def number(model: nn.Module, optimizer: Any, batch: Batch) -> Any:
    return batch, {"scale": 2.0}


CHANGES = [change_option, freeze, move, quieten, by_name, number]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_is_another_step(change: Any) -> None:
    model, optimizer, player, batch = recorded()
    player(*change(model, optimizer, batch))
    assert player.runs == [2, 0]
    assert [known.calls for known in player.known] == [EAGER, 1]


def test_another_dtype_is_another_step() -> None:
    model, optimizer, _ = made()

    def step(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x.float()), y).backward()
        optimizer.step()

    player, (x, y) = Player(step, optimizer), batches(1)[0]
    for dtype in (torch.float32, torch.float64, torch.float32):
        player.run(x.to(dtype), y)
    assert [known.calls for known in player.known] == [1, 2]


def test_another_autocast_is_another_step() -> None:
    _, _, player, batch = recorded()
    torch.set_autocast_enabled("cuda", True)  # torch.autocast does not, where there is none
    try:
        player.run(*batch)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert player.runs == [2, 0]


def test_a_replaced_buffer_is_another_step() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    optimizer = AutoSGD(model)

    def step(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    player, (x, y) = Player(step, optimizer), batches(1)[0]
    for _ in range(EAGER + 1):
        player.run(x, y)
    norm: Any = model[1]
    norm.running_mean = torch.zeros(6)
    player.run(x, y)
    assert player.runs == [1, 0]
    assert norm.running_mean.count_nonzero() > 0


def test_a_loaded_state_is_not_that_of_the_graphs() -> None:
    _, optimizer, player, batch = recorded()
    optimizer.load_state_dict(optimizer.state_dict())
    player.run(*batch)
    assert player.runs == [0]


def test_the_kinds_used_last_are_remembered() -> None:
    _, _, player, batch = recorded()
    for value in range(2 * KINDS):
        player.run(*batch, scale=2.0 + value)
        player.run(*batch)
    assert len(player.known) == KINDS
    assert player.runs[-1] == 2 + 2 * KINDS
    scales = [known.kind.arguments[-1][1] for known in player.known[:-1]]
    assert scales == [2.0 + value for value in range(KINDS + 1, 2 * KINDS)]


def test_says_so_when_nothing_is_recorded() -> None:
    _, optimizer, step = made()
    player, batch = Player(step, optimizer), batches(1)[0]
    for value in range(MANY - 1):
        player.run(*batch, scale=1.0 + value)
    with pytest.warns(UserWarning, match="nothing is recorded"):
        player.run(*batch, scale=0.0 + MANY)
    player.run(*batch, scale=1.0 + MANY)  # once: the tests take a warning for an error


# What runs besides.


def test_hooks_after_the_step_run_once_for_each_call() -> None:
    _, optimizer, step = made()
    player, (x, y) = Player(step, optimizer), batches(1)[0]
    rates: list[float] = []
    optimizer.register_step_post_hook(lambda opt, *_: rates.append(opt.tuned()["0.weight"].lr))
    for _ in range(EAGER + 4):
        player.run(x, y)
    assert player.runs == [4]
    assert len(set(rates)) == len(rates) == EAGER + 4
    assert len(optimizer._optimizer_step_post_hooks) == 1


def test_hooks_of_all_optimizers_run_once_for_each_call() -> None:
    _, optimizer, step = made()
    player, batch = Player(step, optimizer), batches(1)[0]
    ran: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda opt, *_: ran.append(opt))
    try:
        for _ in range(EAGER + 4):
            player.run(*batch)
    finally:
        handle.remove()
    assert ran == [optimizer] * (EAGER + 4)
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        with pytest.raises(RuntimeError, match="hooks that run before"):
            player.run(*batch)
    finally:
        handle.remove()


def test_refuses_what_the_step_itself_would() -> None:
    _, optimizer, player, batch = recorded()
    before = snapshot(player.optimizer._now.source.model, optimizer)  # type: ignore[union-attr,arg-type]
    with pytest.raises(RuntimeError, match=r"inside `with opt\.averaged"), optimizer.averaged():
        player.run(*batch)
    optimizer.detach()
    with pytest.raises(RuntimeError, match="no longer reports"):
        player.run(*batch)
    assert_same(snapshot(player.optimizer._now.source.model, optimizer), before)  # type: ignore[union-attr,arg-type]


def test_a_failed_call_does_not_count() -> None:
    _, optimizer, step = made()
    fails = [True]

    def sometimes(x: Tensor, y: Tensor) -> Tensor:
        if fails[0]:
            raise ValueError("not yet")
        return step(x, y)

    player, batch = Player(sometimes, optimizer), batches(1)[0]
    for _ in range(EAGER + 1):
        with pytest.raises(ValueError, match="not yet"):
            player.run(*batch)
    fails[0] = False
    for _ in range(EAGER):
        player.run(*batch)
    assert player.runs == [0]
    fails[0] = True
    with pytest.raises(ValueError, match="not yet"):  # while it is recorded: as it is
        player.run(*batch)


def test_a_step_that_reads_the_device_says_so_and_leaves_no_gradient() -> None:
    model, optimizer, step = made()
    player, batch = Player(lambda x, y: step(x, y).item(), optimizer), batches(1)[0]
    for _ in range(EAGER):
        player.run(*batch)
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match=r"cannot be recorded as a CUDA graph.*\.item"):
        player.run(*batch)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_same(snapshot(model, optimizer), before)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda step, optimizer: lambda *a: (step(*a), optimizer.zero_grad(), step(*a)), "called it 2 times"),
        (lambda _, optimizer: lambda x, y: None, "called it 0 times"),
    ],
    ids=["two steps", "no step"],
)
def test_refuses_what_is_no_training_step(change: Any, words: str) -> None:
    _, optimizer, step = made()
    with pytest.raises(RuntimeError, match=words):
        autoopt.recorded(change(step, optimizer), optimizer)(*batches(1)[0])


def test_refuses_the_step_of_the_optimizer_alone() -> None:
    model, optimizer, _ = made()
    F.cross_entropy(model(batches(1)[0][0]), batches(1)[0][1]).backward()
    with pytest.raises(RuntimeError, match="the forward and the backward pass, too"):
        autoopt.recorded(optimizer.step, optimizer)()


def test_refuses_what_a_graph_cannot_be_given_or_return() -> None:
    _, optimizer, step = made()
    x, y = batches(1)[0]
    run = autoopt.recorded(step, optimizer)
    with pytest.raises(TypeError, match="was given object"):
        run(object())
    with pytest.raises(ValueError, match=r"shape \(8, 4\) that requires a gradient"):
        run(x.clone().requires_grad_(), y)
    with pytest.raises(TypeError, match="returned object"):
        autoopt.recorded(lambda x, y: (step(x, y), object()), optimizer)(x, y)
    with pytest.raises(TypeError, match="one of this library's optimizers, not SGD"):
        autoopt.recorded(step, torch.optim.SGD(mlp().parameters(), lr=0.1))  # type: ignore[arg-type]


def test_refuses_steps_that_differ_and_hooks_before_them() -> None:
    _, optimizer, step = made(AutoAdam, measure_every=4)
    with pytest.raises(RuntimeError, match="leave the option out"):
        autoopt.recorded(step, optimizer)(*batches(1)[0])
    _, optimizer, player, batch = recorded()
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="hooks that run before"):
        player.run(*batch)


def test_refuses_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer, step = made()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="several processes"):
        Recorder(step, optimizer)._refuse()


def test_refuses_several_devices() -> None:
    model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3, device="meta")])
    optimizer = AutoSGD(model)
    with pytest.raises(RuntimeError, match=r"several devices \(cpu, meta\)"):
        Recorder(lambda: None, optimizer)._refuse()
