"""The engine's automatic runs are those of the library's optimizers on the same batches, start and dropout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine_tools import NET, data, plain_loop
from torch import nn

from autoopt import AutoAdaGrad, AutoAdam, AutoSGD
from autoopt_lab.engine import RULES, Plan, Run, train

LIBRARY: dict[str, Callable[[nn.Module], AutoSGD | AutoAdam | AutoAdaGrad]] = {
    "auto-sgd": lambda model: AutoSGD(model, smoothing=0.9),
    "auto-adam": lambda model: AutoAdam(model, smoothing=0.99),
    "auto-adagrad": lambda model: AutoAdaGrad(model, smoothing=0.99),
}
SMOOTHING = {"auto-sgd": 0.9, "auto-adam": 0.99, "auto-adagrad": 0.99}


@pytest.mark.parametrize("optimizer", LIBRARY)
def test_an_automatic_run_equals_a_plain_loop_with_the_librarys_optimizer(optimizer: str) -> None:
    plan = Plan(optimizer, batch=8, epochs=3, trace_points=1000)
    run = Run(4, {"smoothing": SMOOTHING[optimizer]})
    (found,) = train(NET, data(), plan, [run], dtype=torch.float64)
    model, optim = plain_loop(data(), plan, 4, LIBRARY[optimizer])
    torch.testing.assert_close(found.weights, NET.pack(model.state_dict()), rtol=1e-9, atol=1e-12)
    assert found.trace is not None
    assert isinstance(optim, AutoSGD | AutoAdam | AutoAdaGrad)
    tuned = optim.tuned()
    rate, momentum, noise = found.trace[-1]
    assert rate.tolist() == pytest.approx([tuned[name].lr for name in NET.names], rel=1e-9)
    assert momentum.tolist() == pytest.approx([tuned[name].momentum for name in NET.names], rel=1e-7, abs=1e-12)
    assert noise.tolist() == pytest.approx([tuned[name].noise for name in NET.names], rel=1e-9)


@pytest.mark.parametrize("optimizer", LIBRARY)
def test_the_engine_has_the_librarys_defaults(optimizer: str) -> None:
    classes = {"auto-sgd": AutoSGD, "auto-adam": AutoAdam, "auto-adagrad": AutoAdaGrad}
    group = classes[optimizer](NET.module()).param_groups[0]
    rule, metric = RULES[optimizer]
    options = {**rule.options, **metric.options}
    assert (options.pop("start1"), options.pop("start2")) == tuple(group["start"])
    assert options == {name: group[name] for name in options}
