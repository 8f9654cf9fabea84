"""torch.compile(opt.step, fullgraph=True) is the step, bit for bit, in a few graphs that stay.

The backends are eager and aot_eager: they run what Dynamo, and what AOTAutograd after it, have traced, without the
minute that a C++ build takes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt import AutoAdaDelta, AutoAdam, AutoAdamW, AutoGaussNewton, AutoNAdam, AutoRMSprop, AutoSGD
from contract.small import assert_same, backward, batches, every_optimizer, mlp, snapshot, train

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


class Counted:
    """A backend that counts the graphs it is given. AOTAutograd may have one made twice, to fix a number in it."""

    def __init__(self, name: str) -> None:
        self.inner, self.graphs = torch._dynamo.lookup_backend(name), 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return self.inner(graph, inputs)


class Branches(nn.Module):
    """A layer that is called twice, a bare parameter, BatchNorm, and two heads of which each step trains one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.twice = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.scale, self.heads = nn.Parameter(torch.ones(6)), nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(self.norm(self.first(x)).tanh()).tanh())
        result: Tensor = self.heads[self.number % 2](x * self.scale)
        return result


def both(
    make: Callable[..., Any],
    net: Callable[[], nn.Module],
    run: Callable[[Any, Any, Any], None],
    name: str = "eager",
    **compiling: Any,
) -> Counted:
    """`run(model, optimizer, wrap)` with the step and with the compiled step: they must end the same, bit for bit."""
    found, backend = [], Counted(name)
    for compiled in (False, True):
        torch.manual_seed(0)
        model = net()
        optimizer = make(model)
        compile_step = partial(torch.compile, **{"fullgraph": True, "backend": backend, **compiling})
        run(model, optimizer, compile_step if compiled else lambda step: step)
        found.append(snapshot(model, optimizer))
    assert_same(found[1], found[0])
    return backend


def plainly(model: nn.Module, optimizer: Any, wrap: Any) -> None:
    train(model, optimizer, batches(1))  # lays out the state
    step = wrap(optimizer.step)
    for batch in batches(4):
        optimizer.zero_grad()
        backward(model, batch)
        step()


@every_optimizer
def test_is_the_step(make: Any) -> None:
    assert both(make, mlp, plainly, "aot_eager").graphs <= 2


@pytest.mark.parametrize("make", [AutoAdamW, AutoNAdam, AutoRMSprop, AutoAdaDelta, AutoGaussNewton])
def test_is_the_step_of_the_others(make: Any) -> None:
    assert both(make, mlp, plainly).graphs == 1


def test_the_first_step_too() -> None:
    def run(model: nn.Module, optimizer: Any, wrap: Any) -> None:
        step = wrap(optimizer.step)
        for batch in batches(3):
            optimizer.zero_grad()
            backward(model, batch)
            step()

    assert both(AutoSGD, mlp, run).graphs == 2  # one of them lays out the state


@pytest.mark.parametrize("make", [AutoAdam, partial(AutoSGD, rule="paper")])
def test_with_all_that_a_loop_may_do(make: Any) -> None:
    """A schedule, batches of changing size, accumulation, clipping, a batch that is not finite, an evaluation.

    A scheduler of torch puts a function of its own in front of any optimizer's step, which Dynamo does not trace:
    without fullgraph the step behind it is one graph all the same.
    """

    def run(model: nn.Module, optimizer: Any, wrap: Any) -> None:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        train(model, optimizer, batches(1))  # lays out the state
        step = wrap(optimizer.step)
        data = [*batches(4), *batches(3, samples=5), *batches(2, samples=1), *batches(3)]
        data[5] = (data[5][0] * torch.nan, data[5][1])
        for number, batch in enumerate(data):
            optimizer.zero_grad()
            for part in zip(*(half.chunk(2 if len(half) > 1 else 1) for half in batch), strict=True):
                backward(model, part)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            step()
            schedule.step()
            if number == 6:
                with optimizer.averaged(), torch.no_grad():
                    model(batch[0])

    assert 0 < both(make, mlp, run, fullgraph=False).graphs <= 4


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_no_graph_is_made_after_the_first_steps(dynamic: bool | None) -> None:
    """Neither counts nor the number of samples nor a rate that changes are fixed in them."""

    def run(model: nn.Module, optimizer: Any, wrap: Any) -> None:
        step = wrap(optimizer.step)
        for number in range(12):
            with torch._dynamo.config.patch(error_on_recompile=number > 4):
                optimizer.zero_grad()
                moves = dynamic is not False  # which fixes every number
                backward(model, batches(1, samples=2 + number * moves)[0])
                step()
                if moves:
                    optimizer.param_groups[0]["lr"] *= 0.9

    both(AutoAdam, mlp, run, dynamic=dynamic)


def test_a_model_of_which_not_all_is_used() -> None:
    def run(model: Any, optimizer: Any, wrap: Any) -> None:
        step = wrap(optimizer.step)
        for number, batch in enumerate(batches(8)):
            with torch._dynamo.config.patch(error_on_recompile=number > 4):
                model.number = number
                optimizer.zero_grad()
                backward(model, batch)
                step()

    both(AutoAdam, Branches, run)


def test_measuring_at_every_third_step() -> None:
    def run(model: nn.Module, optimizer: Any, wrap: Any) -> None:
        step = wrap(optimizer.step)
        for number, batch in enumerate(batches(14)):
            with torch._dynamo.config.patch(error_on_recompile=number > 6):
                optimizer.zero_grad()
                backward(model, batch)
                step()

    both(partial(AutoAdam, measure_every=3), mlp, run)


def test_another_optimizer_of_another_model() -> None:
    """Dynamo takes all steps for one function, and what differs between them for variable."""

    def narrow() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))

    both(AutoSGD, mlp, plainly, "aot_eager")
    both(AutoAdam, mlp, plainly, "aot_eager")
    both(AutoAdam, narrow, plainly, "aot_eager")


def test_groups_and_units() -> None:
    def make(model: Any) -> Any:
        groups = [
            {"params": model[0].parameters(), "lr": 0.5, "weight_decay": 0.1},
            {"params": [*model[1].parameters(), *model[3].parameters()], "average": False},
        ]
        return AutoAdam(model, param_groups=groups, granularity="layer", amsgrad=True)

    both(make, mlp, plainly)


def test_parameters_without_their_model() -> None:
    both(lambda model: AutoSGD(model.parameters()), mlp, plainly)


def test_model_and_step_in_one_graph_each() -> None:
    plain, other = mlp(torch.float64), mlp(torch.float64)
    compiled: Any = torch.compile(other, fullgraph=True, backend="aot_eager")
    optimizers = AutoSGD(plain), AutoSGD(other)
    step = torch.compile(optimizers[1].step, fullgraph=True, backend="aot_eager")
    for batch in batches(5, dtype=torch.float64):
        train(plain, optimizers[0], [batch])
        optimizers[1].zero_grad()
        backward(compiled, batch)
        step()
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(other.get_parameter(name), weight, rtol=1e-9, atol=1e-12)  # sums in another order


def test_a_whole_loop_body() -> None:
    """Dynamo breaks the graph at backward(), and goes on behind it."""
    found = []
    for compiled in (False, True):
        model = mlp()
        optimizer = AutoSGD(model)
        train(model, optimizer, batches(1))

        def body(x: Tensor, y: Tensor, model: Any = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        run = torch.compile(body, backend="eager") if compiled else body
        for x, y in batches(4):
            run(x, y)
        found.append(snapshot(model, optimizer))
    for name, weight in found[0]["model"].items():
        torch.testing.assert_close(found[1]["model"][name], weight, rtol=1e-5, atol=1e-7)  # float32, in another order


def test_a_resumed_run() -> None:
    def run(model: nn.Module, optimizer: Any, wrap: Any) -> None:
        plainly(model, optimizer, wrap)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        plainly(model, optimizer, wrap)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        plainly(model, optimizer, wrap)

    both(AutoAdam, mlp, run)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_what_is_refused_says_the_same(fullgraph: bool) -> None:
    model = mlp()
    optimizer = AutoSGD(model)
    step = torch.compile(optimizer.step, fullgraph=fullgraph, backend="eager")
    for batch in batches(2):
        optimizer.zero_grad()
        backward(model, batch)
        step()
    with pytest.raises((RuntimeError, torch._dynamo.exc.Unsupported), match="has a gradient but no statistics"):
        step()
