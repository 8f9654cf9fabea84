"""Optimizers that can be compared, each as its authors recommend it: nothing here is tuned by us.

The peers are packages of their own (extra `peers`), imported when they are used. Every one runs at a constant rate: the
automatic optimizers know nothing of a run's length, and where a README has a word on schedules, it allows for none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from autoopt_lab.names import ALGORITHM_1, DEFAULT, label
from autoopt_lab.sweep import SweepError
from autoopt_lab.tasks import Task
from autoopt_lab.train import AUTO

REFRESH = 50  # batches; schedule_free's README, "Caveats": running statistics of BatchNorm


@dataclass(frozen=True)
class Method:
    """An optimizer, and what it needs around it."""

    label: str
    setting: str  # for people
    source: str  # of the recommendation
    make: Callable[[nn.Module], Any]
    package: str = "torch"  # that has it
    module: str = "torch"
    needs_loss: bool = False  # step(loss=...)
    switches: bool = False  # the optimizer's train() and eval(): the weights to evaluate are those after eval()
    averager: Callable[[nn.Module], Any] | None = None  # has step(), after the optimizer's, and averaged_model
    exchanges: bool = False  # the optimizer's averaged(): a context in which the weights are the averaged ones

    @property
    def averages(self) -> bool:
        """Its authors say to evaluate averaged weights, not the last ones."""
        return self.switches or self.exchanges or self.averager is not None

    @property
    def installed(self) -> bool:
        return find_spec(self.module) is not None


def _prodigy(model: nn.Module) -> Any:
    return import_module("prodigyopt").Prodigy(model.parameters(), lr=1.0)


def _schedulefree_adamw(model: nn.Module) -> Any:
    return import_module("schedulefree").AdamWScheduleFree(model.parameters(), lr=0.0025)


def _schedulefree_sgd(model: nn.Module) -> Any:
    return import_module("schedulefree").SGDScheduleFree(model.parameters(), lr=1.0)


def _dadapt_adam(model: nn.Module) -> Any:
    return import_module("dadaptation").DAdaptAdam(model.parameters(), lr=1.0)


def _dog(model: nn.Module) -> Any:
    return import_module("dog").DoG(model.parameters(), reps_rel=_first_distance(model))


def _ldog(model: nn.Module) -> Any:
    return import_module("dog").LDoG(model.parameters(), reps_rel=_first_distance(model))


def _first_distance(model: nn.Module) -> float:
    """README of dog-optimizer, "Choosing `reps_rel`"."""
    return 1e-4 if _batch_norms(model) else 1e-6


def _polynomial_average(model: nn.Module) -> Any:
    return import_module("dog").PolynomialDecayAverager(model)


def _momo(model: nn.Module) -> Any:
    return import_module("momo").Momo(model.parameters(), lr=1.0)


def _momo_adam(model: nn.Module) -> Any:
    return import_module("momo").MomoAdam(model.parameters(), lr=1e-2)


def _mechanic_adamw(model: nn.Module) -> Any:
    return import_module("mechanic_pytorch").mechanize(torch.optim.AdamW)(model.parameters(), lr=1.0)


def _prodigy_plus(model: nn.Module) -> Any:
    # split_groups: one group cannot be split, and the package prints a line to say so
    return import_module("prodigyplus").ProdigyPlusScheduleFree(model.parameters(), split_groups=False)


def _adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters())


def _sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _ours(name: str, setting: str, make: Callable[[nn.Module], Any], exchanges: bool = False) -> Method:
    return Method(label(name), setting, "defaults", make, "autoopt", "autoopt", exchanges=exchanges)


METHODS = {
    **{name: _ours(name, "no setting", AUTO[name], exchanges=True) for name in DEFAULT},
    **{name: _ours(name, "the paper's rule, last weights", AUTO[name]) for name in ALGORITHM_1},
    "adamw": Method("AdamW", "rate 0.001, decay 0.01", "defaults of torch.optim.AdamW", _adamw),
    "sgd": Method("SGD", "rate 0.01, momentum 0.9", "the first example on torch.optim's page", _sgd),
    "prodigy": Method("Prodigy", "lr 1", "README of prodigyopt, “How to use”", _prodigy, "prodigyopt", "prodigyopt"),
    "schedulefree-adamw": Method(
        "Schedule-Free AdamW",
        "rate 0.0025, no warm-up",
        "default; the package's own MNIST example",
        _schedulefree_adamw,
        "schedulefree",
        "schedulefree",
        switches=True,
    ),
    "schedulefree-sgd": Method(
        "Schedule-Free SGD",
        "rate 1, no warm-up",
        "defaults of SGDScheduleFree",
        _schedulefree_sgd,
        "schedulefree",
        "schedulefree",
        switches=True,
    ),
    "dadapt-adam": Method(
        "D-Adapt Adam", "lr 1", "README of dadaptation, “Details”", _dadapt_adam, "dadaptation", "dadaptation"
    ),
    "dog": Method(
        "DoG",
        "reps_rel 1e-6 (BatchNorm: 1e-4)",
        "README of dog-optimizer, “Iterate averaging”, “Choosing reps_rel”",
        _dog,
        "dog-optimizer",
        "dog",
        averager=_polynomial_average,
    ),
    "ldog": Method(
        "L-DoG",
        "reps_rel 1e-6 (BatchNorm: 1e-4)",
        "README of dog-optimizer, “Iterate averaging”, “Choosing reps_rel”",
        _ldog,
        "dog-optimizer",
        "dog",
        averager=_polynomial_average,
    ),
    "momo": Method(
        "MoMo", "lr 1, bound 0", "README of momo-opt, “Recommendations”", _momo, "momo-opt", "momo", needs_loss=True
    ),
    "momo-adam": Method(
        "MoMo-Adam",
        "lr 0.01, bound 0",
        "README of momo-opt, “Recommendations”",
        _momo_adam,
        "momo-opt",
        "momo",
        needs_loss=True,
    ),
    "mechanic-adamw": Method(
        "Mechanic AdamW",
        "lr 1 (any)",
        "README of mechanic-pytorch",
        _mechanic_adamw,
        "mechanic-pytorch",
        "mechanic_pytorch",
    ),
    "prodigy-plus-sf": Method(
        "Prodigy + Schedule-Free",
        "defaults (lr 1)",
        "README of prodigy-plus-schedule-free, “TLDR”",
        _prodigy_plus,
        "prodigy-plus-schedule-free",
        "prodigyplus",
        switches=True,
    ),
}


def wanted(names: str | None) -> tuple[list[str], list[str]]:
    """Which to compare, of a list with commas, and which are left out: without a list, those that are not installed."""
    if names is None:
        chosen = [name for name, method in METHODS.items() if method.installed]
        return chosen, [name for name in METHODS if name not in chosen]
    given = list(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in given:
        if name not in METHODS:
            raise SweepError(f"there is no optimizer {name!r}: choose from {', '.join(METHODS)}")
        if not METHODS[name].installed:
            remedy = f"pip install {METHODS[name].package}, or all peers: pip install 'autoopt[peers]'"
            raise SweepError(f"{name} needs the package {METHODS[name].package}, which is not installed; run: {remedy}")
    return given, []


def versions(names: Iterable[str]) -> dict[str, str]:
    """Of the packages behind the optimizers; a module on the path that no package brought has none."""
    found = {}
    for package in dict.fromkeys(METHODS[name].package for name in names):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found


class Training:
    """A model and its optimizer, driven the way the method asks for."""

    def __init__(self, task: Task, method: Method, model: nn.Module) -> None:
        self.task, self.method, self.model = task, method, model
        self.optimizer = method.make(self.model)
        self.averager = method.averager(self.model) if method.averager else None
        if method.switches:
            self.optimizer.train()

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = self.task.loss(self.model(inputs), targets)
        loss.backward()
        if self.method.needs_loss:
            self.optimizer.step(loss=loss)
        else:
            self.optimizer.step()
        if self.averager is not None:
            self.averager.step()

    @contextmanager
    def averaged(self, batches: Iterable[Tensor]) -> Iterator[nn.Module]:
        """The model with the averaged weights; `batches` of inputs are there for BatchNorm's running statistics."""
        if self.averager is not None:
            yield self.averager.averaged_model
            return
        if self.method.exchanges:
            with self.optimizer.averaged():
                yield self.model
            return
        self.optimizer.eval()
        if _batch_norms(self.model):
            self.model.train()
            with torch.no_grad():
                for inputs in itertools.islice(batches, REFRESH):
                    self.model(inputs)
        yield self.model
        self.optimizer.train()


def _batch_norms(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
