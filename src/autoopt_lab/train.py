"""One run: a pure function of (task, setting, seed)."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer

from autoopt import AutoAdaGrad, AutoAdam, AutoOptimizer, AutoSGD
from autoopt_lab.tasks import Task

# By the names of autoopt_lab.names.
AUTO: dict[str, Callable[[nn.Module], AutoOptimizer]] = {
    "auto-sgd": AutoSGD,
    "auto-adam": AutoAdam,
    "auto-adagrad": AutoAdaGrad,
    "paper-sgd": partial(AutoSGD, rule="paper", average=False),
    "paper-adam": partial(AutoAdam, rule="paper", average=False),
    "paper-adagrad": partial(AutoAdaGrad, rule="paper", average=False),
}
# The paper's plain optimizers; its momentum is damped: ĝ = β ĝ + (1 - β) g.
PLAIN: dict[str, Callable[[nn.Module, float], Optimizer]] = {
    "sgd": lambda model, lr: SGD(model.parameters(), lr=lr, momentum=0.9, dampening=0.9),
    "adam": lambda model, lr: Adam(model.parameters(), lr=lr, betas=(0.9, 0.99)),
    "adagrad": lambda model, lr: Adagrad(model.parameters(), lr=lr),
}


@dataclass(frozen=True)
class Setting:
    """Everything about a run but its task and its seed. An Auto optimizer takes no learning rate."""

    optimizer: str
    epochs: int
    lr: float | None = None
    batch_size: int = 64

    def __post_init__(self) -> None:
        if self.optimizer not in AUTO and self.optimizer not in PLAIN:
            raise ValueError(f"unknown optimizer {self.optimizer!r}: choose one of {', '.join([*AUTO, *PLAIN])}")
        if (self.lr is None) != (self.optimizer in AUTO):
            raise ValueError(f"lr={self.lr} with {self.optimizer}: plain optimizers need a rate, Auto ones take none")


@dataclass
class Trace:
    """What an Auto optimizer chose for one tensor, at the steps where it was asked."""

    step: list[int] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    momentum: list[float] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """The record of one run. Errors are shares in [0, 1] before the first and after every epoch; NaN: diverged."""

    task: str
    setting: Setting
    seed: int
    test_errors: list[float]  # of the last weights
    averaged_errors: list[float]  # on the test data too, of the averaged weights; empty where there are none
    train_error: float
    traces: dict[str, Trace]  # by parameter name; empty for plain optimizers
    seconds: float = field(compare=False)  # in the optimisation steps alone: not part of the result

    @property
    def test_error(self) -> float:
        return self.test_errors[-1]

    @property
    def advised_errors(self) -> list[float]:
        """Of the weights to evaluate: their average where the optimizer keeps one."""
        return self.averaged_errors or self.test_errors


def train(task: Task, setting: Setting, seed: int, trace_every: int = 4) -> Run:
    data = task.data()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = task.model()
        optimizer = _optimizer(setting, model)
        order = torch.Generator().manual_seed(seed)  # of its own: a model with dropout sees the same batches
        traces: dict[str, Trace] = {}
        test_errors = [_error(task, model, data.test_inputs, data.test_targets)]
        averages = isinstance(optimizer, AutoOptimizer) and optimizer.defaults["average"]
        averaged_errors = test_errors[:] if averages else []
        seconds, step = 0.0, 0
        for _ in range(setting.epochs):
            shuffled = torch.randperm(len(data.train_targets), generator=order)
            for first in range(0, len(shuffled), setting.batch_size):
                batch = shuffled[first : first + setting.batch_size]
                start = time.perf_counter()
                _step(task, model, optimizer, data.train_inputs[batch], data.train_targets[batch])
                seconds += time.perf_counter() - start
                if step % trace_every == 0 and isinstance(optimizer, AutoOptimizer):
                    _trace(traces, step + 1, optimizer)
                step += 1
            test_errors.append(_error(task, model, data.test_inputs, data.test_targets))
            if isinstance(optimizer, AutoOptimizer) and averages:
                with optimizer.averaged():
                    averaged_errors.append(_error(task, model, data.test_inputs, data.test_targets))
        train_error = _error(task, model, data.train_inputs, data.train_targets)
    return Run(task.name, setting, seed, test_errors, averaged_errors, train_error, traces, seconds)


def _optimizer(setting: Setting, model: nn.Module) -> Optimizer:
    if setting.lr is None:
        return AUTO[setting.optimizer](model)
    return PLAIN[setting.optimizer](model, setting.lr)


def _step(task: Task, model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor) -> None:
    optimizer.zero_grad()
    task.loss(model(inputs), targets).backward()
    optimizer.step()


def _error(task: Task, model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        error = task.error(model(inputs), targets)
    model.train()
    return error


def _trace(traces: dict[str, Trace], step: int, optimizer: AutoOptimizer) -> None:
    for name, tuned in optimizer.tuned().items():
        trace = traces.setdefault(name, Trace())
        trace.step.append(step)
        trace.lr.append(tuned.lr)
        trace.momentum.append(tuned.momentum)
        trace.noise.append(tuned.noise)
