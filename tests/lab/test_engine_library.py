"""The engine's automatic runs are those of the library's optimizers on the same batches, start and dropout."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest
import torch
from engine_tools import NET, data, plain_loop
from torch import nn

from autoopt import AutoAdaGrad, AutoAdam, AutoSGD, oracle
from autoopt_lab.engine import RULES, Plan, Result, Run, robust, train
from autoopt_lab.tasks import Data

CLASSES = {"sgd": AutoSGD, "adam": AutoAdam, "adagrad": AutoAdaGrad}
SMOOTHING = {"sgd": 0.9, "adam": 0.99, "adagrad": 0.99}

Automatic = AutoSGD | AutoAdam | AutoAdaGrad


def both(data: Data, plan: Plan, **options: Any) -> tuple[Result, nn.Module, Automatic]:
    """A run by the engine and by the library."""
    rule, _, kind = plan.optimizer.partition("-")
    (found,) = train(NET, data, plan, [Run(4, options)], dtype=torch.float64)
    if rule == "paper":
        options["rule"] = "paper"
    model, optim = plain_loop(data, plan, 4, lambda model: CLASSES[kind](model, **options))
    assert isinstance(optim, Automatic)
    return found, model, optim


def same_weights(found: torch.Tensor | None, model: nn.Module) -> None:
    assert found is not None
    torch.testing.assert_close(found, NET.pack(model.state_dict()), rtol=1e-9, atol=1e-12)


def same_choices(found: Result, optim: Automatic) -> None:
    tuned = optim.tuned()
    assert found.trace is not None
    rate, momentum, noise = found.trace[-1]
    assert rate.tolist() == pytest.approx([tuned[name].lr for name in NET.names], rel=1e-9)
    assert momentum.tolist() == pytest.approx([tuned[name].momentum for name in NET.names], rel=1e-7, abs=1e-12)
    assert noise.tolist() == pytest.approx([tuned[name].noise for name in NET.names], rel=1e-9)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_run_by_the_papers_rule_is_the_librarys(kind: str) -> None:
    plan = Plan(f"paper-{kind}", batch=8, epochs=3, trace_points=1000)
    found, model, optim = both(data(), plan, smoothing=SMOOTHING[kind])
    same_weights(found.weights, model)
    same_choices(found, optim)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_run_by_the_default_rule_is_the_librarys_and_so_is_its_average(kind: str) -> None:
    """Twenty epochs: past the warm-up, and with steps at which the weights travel, so that every constant counts."""
    plan = Plan(f"auto-{kind}", batch=8, epochs=20, trace_points=1000)
    found, model, optim = both(data(), plan)
    same_weights(found.weights, model)
    same_choices(found, optim)
    assert travelled(optim, 20 * 6)
    with optim.averaged():
        same_weights(found.averaged_weights, model)
        model.eval()
        with torch.no_grad():
            wrong = model(data().test_inputs).argmax(1) != data().test_targets
        assert found.average_test_error[-1] == pytest.approx(wrong.double().mean().item())


@pytest.mark.parametrize("kind", CLASSES)
def test_a_run_on_small_images_is_the_librarys_too(kind: str) -> None:
    """The library goes by the first batch and the engine by all images, so that all of these are of one size."""
    given = data()
    small = Data(
        0.05 * given.train_inputs.sign(), given.train_targets, 0.05 * given.test_inputs.sign(), given.test_targets
    )
    found, model, optim = both(small, Plan(f"auto-{kind}", batch=8, epochs=4, trace_points=1000))
    same_weights(found.weights, model)
    same_choices(found, optim)
    assert optim.state[next(model.parameters())]["enlarged"] == 8**2


def test_images_that_are_all_zero_have_no_size() -> None:
    given = data()
    blank = Data(0 * given.train_inputs, given.train_targets, 0 * given.test_inputs, given.test_targets)
    found, model, _ = both(blank, Plan("auto-sgd", batch=8, epochs=1))
    same_weights(found.weights, model)


def test_a_run_on_single_samples_is_the_librarys_too() -> None:
    """There is no spread to compare with; the same sample again and again makes the weights travel all the same."""
    first = torch.zeros(48, dtype=torch.int64)
    one = Data(data().train_inputs[first], data().train_targets[first], data().test_inputs, data().test_targets)
    found, model, optim = both(one, Plan("auto-sgd", batch=1, epochs=2))
    same_weights(found.weights, model)
    assert travelled(optim, 2 * 48)
    with optim.averaged():
        same_weights(found.averaged_weights, model)


def travelled(optim: Automatic, steps: int) -> bool:
    return all(float(state["count"]) < steps for state in optim.state.values())


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("rule", ["auto", "paper"])
def test_the_engine_has_the_librarys_defaults(kind: str, rule: str) -> None:
    group = CLASSES[kind](NET.module()).param_groups[0]
    own, metric = RULES[f"{rule}-{kind}"]
    options = {**own.options, **metric.options}
    if rule == "paper":
        assert (options.pop("start1"), options.pop("start2")) == tuple(group["start"])
    assert options == {name: group[name] for name in options}


def test_the_engine_has_the_librarys_relative_step() -> None:
    """Also where the runs above do not come to: after thousands of steps, with any share of signal."""
    grid = [torch.tensor(values, dtype=torch.float64) for values in ((0.5, 7, 400, 4e3, 1e5), (1, 250, 1e5))]
    share = torch.linspace(-1, 1, 41, dtype=torch.float64)
    count, age, share = (table.reshape(-1, 1) for table in torch.meshgrid(*grid, share, indexing="ij"))
    engines = robust.Robust._ratio(None, count, age, share)  # type: ignore[arg-type]
    torch.testing.assert_close(engines, oracle.relative.relative_step(count, age, share), rtol=1e-14, atol=0)


def test_the_engine_has_the_librarys_constants() -> None:
    def constants(module: Any) -> dict[str, float]:
        assigned = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.Assign)]
        return {node.targets[0].id: ast.literal_eval(node.value) for node in assigned}  # type: ignore[attr-defined]

    assert constants(robust) == constants(oracle.relative)
