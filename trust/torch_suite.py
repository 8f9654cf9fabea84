"""PyTorch's own optimizer tests, TestOptimRenewed of its test/test_optim.py, run against every automatic optimizer.

    python trust/torch_suite.py PATH/TO/test_optim.py

The file is not in torch's wheel: take it from the release of PyTorch that is installed. It needs the small package
`expecttest`. These tests know no model: they pass bare tensors, so they run the rule without per-sample statistics.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import types
import unittest
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal import common_optimizers as suite

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from trust.subjects import OPTIMIZERS

CLASS = "TestOptimRenewed"
NOT_OURS = {  # part of a test's name -> why it does not apply
    "fused": "there is one implementation and no fused= flag",
    "foreach": "there is one implementation, over all tensors at once, and no foreach= flag",
    "cpu_load_state_dict": "it is about the flags fused= and capturable=, which do not exist here",
    "mixed_device_dtype": "it compares foreach= and fused= with the plain loop, on two GPUs",
    "complex": "complex parameters are refused by name",
    "sparse": "sparse gradients are refused by name",
    "second_order": "it is for optimizers that need a closure",
    "multigpu": "it needs two GPUs",
    "cuda": "it needs a GPU",
}
CONFIGURATIONS: list[dict[str, Any]] = [
    {}, {"lr": 0.5}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True},
    {"granularity": "group"}, {"average": False}, {"rule": "paper", "lr": 1.0},
]  # fmt: skip


@dataclass
class Outcome:
    """What became of the suite."""

    passed: Counter[str] = field(default_factory=Counter)  # by optimizer
    failed: dict[str, str] = field(default_factory=dict)  # name of the case -> last line of its error
    not_applicable: dict[str, str] = field(default_factory=dict)  # name of the test, or optimizer -> why


def infos(outcome: Outcome) -> Iterator[Any]:
    """What the suite wants to know of each optimizer."""
    for kind in OPTIMIZERS:
        try:
            kind([torch.nn.Parameter(torch.ones(2))])
        except ValueError as refusal:
            outcome.not_applicable[kind.__name__] = str(refusal)
            continue
        yield suite.OptimizerInfo(
            kind,
            optim_inputs_func=inputs,
            optim_error_inputs_func=error_inputs,
            supported_impls=(),
            supports_complex=False,
            not_og_supported_flags=("average", "spread", "rule"),  # newer than the first version
        )


def inputs(device: Any, dtype: Any = None) -> list[Any]:
    return [suite.OptimizerInput(params=None, kwargs=dict(options), desc=str(options)) for options in CONFIGURATIONS]


def error_inputs(device: Any, dtype: Any) -> list[Any]:
    """Those of all optimizers, with our words for them, and some of our own."""
    wrong = [("lr", -1.0), ("weight_decay", -1.0), ("granularity", "network"), ("rule", "none")]
    ours = [
        suite.ErrorOptimizerInput(
            suite.OptimizerInput(params=[torch.nn.Parameter(torch.ones(2))], kwargs={option: value}),
            error_type=ValueError,
            error_regex=f"{option} is .*must be",
        )
        for option, value in wrong
    ]
    theirs = suite.get_error_inputs_for_all_optims(device, dtype)
    for error in theirs:
        if error.optimizer_error_input.desc == "invalid param type":
            error.error_regex = "an iterable of parameters"
    # torch wants names for all parameters or for none, here each has one; a Tensor as lr is refused whatever its size
    elsewhere = ("all optimizer param", "Tensor lr")
    return ours + [error for error in theirs if not error.optimizer_error_input.desc.startswith(elsewhere)]


class Result(unittest.TestResult):
    """Counts, and keeps the last line of each error."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        self.outcome.passed[optimizer_of(test)] += 1

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self.outcome.failed[name_of(test)] = f"{err[0].__name__}: {str(err[1]).partition(chr(10))[0]}"

    addError = addFailure  # noqa: N815

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self.outcome.not_applicable[name_of(test).partition(f"_{optimizer_of(test)}_")[0]] = reason


def name_of(test: unittest.TestCase) -> str:
    return test.id().rpartition(".")[2]


def optimizer_of(test: unittest.TestCase) -> str:
    return next((kind.__name__ for kind in OPTIMIZERS if f"_{kind.__name__}_" in name_of(test)), "none")


def load(path: Path) -> types.ModuleType:
    """The file as a module. What it imports from files beside it has nothing to do with ours and may be missing."""
    sys.path.insert(0, str(path.parent))
    for module, name in [("test_lrscheduler", "TestLRScheduler"), ("test_optim", "TestDifferentiableOptimizer"),
                         ("test_swa_utils", "TestSWAUtils")]:  # fmt: skip
        if importlib.util.find_spec("optim") is None:
            sys.modules[f"optim.{module}"] = types.ModuleType(module)
            vars(sys.modules[f"optim.{module}"])[name] = object
    spec = importlib.util.spec_from_file_location("torch_test_optim", path)
    assert spec is not None
    assert spec.loader is not None
    module_ = importlib.util.module_from_spec(spec)
    sys.modules["torch_test_optim"] = module_  # the suite looks its classes up there
    spec.loader.exec_module(module_)
    return module_


def tests_in(path: Path) -> list[str]:
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    (found,) = [node for node in classes if node.name == CLASS]
    return [node.name for node in found.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def run(path: Path) -> Outcome:
    """Run the suite."""
    torch.set_num_threads(1)
    outcome = Outcome()
    suite.optim_db[:] = infos(outcome)
    cases = unittest.defaultTestLoader.loadTestsFromTestCase(vars(load(path))[f"{CLASS}CPU"])
    for test in tests_in(path):
        if not any(name_of(case).startswith(f"{test}_") for case in cases):
            reasons = [why for part, why in NOT_OURS.items() if part in test]
            outcome.not_applicable[test] = reasons[0] if reasons else "torch made no case of it for the CPU"
    cases.run(Result(outcome))
    return outcome


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    outcome = run(Path(sys.argv[1]))
    for optimizer, count in sorted(outcome.passed.items()):
        print(f"{optimizer}: {count} passed")
    for name, why in outcome.not_applicable.items():
        print(f"not applicable: {name}: {why}")
    for name, error in outcome.failed.items():
        print(f"FAILED {name}: {error}")
    counts = sum(outcome.passed.values()), len(outcome.failed), len(outcome.not_applicable)
    print("{} passed, {} failed, {} not applicable".format(*counts))
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main())
