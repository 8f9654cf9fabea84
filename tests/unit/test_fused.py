"""The kernels of the step do what the operations in `step` do.

They need Triton, and a GPU or its interpreter: where there is no GPU, the tests below run once more in a process of
their own, under TRITON_INTERPRET=1, which must be set before Triton is imported.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoopt import AutoAdaGrad, AutoAdam, AutoAdamW, AutoNAdam, AutoSGD
from autoopt.optim import fused
from autoopt.optim.bucket import Bucket

GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if GPU else "cpu"
# Between the two lies rounding alone: the kernels multiply and add in one rounding, and sum a row in another order.
# A step differs by a few units in the last place (6e-8), and what the next ones make of that adds up.
TOLERANCE = {"rtol": 2e-5, "atol": 1e-7}

TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not TRITON, reason="Triton is not installed, and the kernels are written in it")
runs_kernels = [
    needs_triton,
    pytest.mark.skipif(not (GPU or INTERPRETED), reason="runs in a process of its own, see test_in_the_interpreter"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the interpreter's
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # its 0/0 in lanes that are masked out
]


@needs_triton
@pytest.mark.skipif(GPU or INTERPRETED, reason="the tests run here")
def test_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout


@contextlib.contextmanager
def path(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Have all steps take one path; the sweeps that were made."""
    sweeps: list[Any] = []

    class Counted(fused.Sweep):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            sweeps.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(fused, "available", lambda device: kernels)
        patch.setattr(fused, "Sweep", Counted)
        yield sweeps


class Net(nn.Module):
    """Tensors of more and of less than a row, of several and of many; one layer is not always used."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(37, 23), nn.Linear(23, 23)
        self.conv = nn.Conv2d(3, 5, 3)
        self.wide, self.out = nn.Linear(23, 1500), nn.Linear(1500, 3)
        self.still = nn.Linear(3, 3, bias=False)
        if last:
            self.conv.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor, images: Tensor, other: bool) -> Tensor:
        h = torch.tanh(self.first(x))
        if other:
            h = h + self.other(h)
        y = self.out(torch.relu(self.wide(h))) + self.conv(images).mean((1, 2, 3)).unsqueeze(1)
        return y + 0 * self.still(y)  # a gradient of zero


def start(make: Any, options: dict[str, Any], last: bool = False) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = Net(last).to(DEVICE)
    return model, make(model, **options)


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(6, 37, generator=generator).to(DEVICE), torch.randn(6, 3, 5, 5, generator=generator).to(DEVICE)


def step(model: nn.Module, optimizer: Any, number: int, *, bad: bool = False) -> None:
    optimizer.zero_grad()
    x, images = batch(number)
    loss = (model(x, images, other=number % 3 != 1) - x[:, :3]).square().mean()
    (loss * torch.inf if bad else loss).backward()
    if number % 5 == 4:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def held(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """All that a step may change."""
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": value.clone() for key, value in state.items()}
    return found


OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (AutoSGD, {}),
    "Adam": (AutoAdam, {}),
    "AdaGrad": (AutoAdaGrad, {}),
    "AdamW": (AutoAdamW, {"weight_decay": 0.1}),
    "SGD, lr": (AutoSGD, {"lr": 0.5}),
    "Adam, lr, no average": (AutoAdam, {"lr": 0.5, "average": False}),
    "AdaGrad, measure_every": (AutoAdaGrad, {"measure_every": 2}),
    "SGD, measure_every, layer": (AutoSGD, {"measure_every": 2, "granularity": "layer"}),
    "Adam, measure_every, group": (AutoAdam, {"measure_every": 2, "granularity": "group"}),
    "SGD, coupled decay": (AutoSGD, {"weight_decay": 0.1}),
    "Adam, coupled decay": (AutoAdam, {"weight_decay": 0.1}),
    "Adam, passes": (AutoAdam, {"spread": "passes"}),
}


class TestKernels:
    pytestmark = runs_kernels

    @pytest.mark.parametrize(("make", "options"), OPTIONS.values(), ids=OPTIONS)
    def test_twenty_steps_agree_with_the_twin(
        self, make: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ends = []
        for kernels in (False, True):
            with path(kernels, monkeypatch) as sweeps:
                model, optimizer = start(make, options)
                for number in range(20):
                    step(model, optimizer, number, bad=number == 7)
                assert len(sweeps) == (20 if kernels else 0)
            ends.append(held(model, optimizer))
        assert_close(*ends)

    @pytest.mark.parametrize("make", [AutoSGD, AutoAdam, AutoAdaGrad])
    def test_a_bad_batch_changes_no_bit(self, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        with path(True, monkeypatch):
            model, optimizer = start(make, {})
            for number in range(3):
                step(model, optimizer, number)
            before = held(model, optimizer)
            step(model, optimizer, 3, bad=True)
            after = held(model, optimizer)
        for name, value in before.items():
            assert torch.equal(value.nan_to_num(), after[name].nan_to_num()), name

    def test_what_has_no_gradient_or_one_of_zero_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with path(True, monkeypatch):
            model, optimizer = start(AutoAdam, {})
            before = held(model, optimizer)
            step(model, optimizer, 1)
            after = held(model, optimizer)
        same = {name for name, value in before.items() if torch.equal(value, after[name])}
        assert same == {"other.weight", "other.bias", "still.weight"}

    @pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
    def test_tensors_of_another_layout_are_written_back(self, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        ends = []
        for kernels in (False, True):
            with path(kernels, monkeypatch):
                model, optimizer = start(make, {}, last=True)
                assert not model.conv.weight.is_contiguous()
                for number in range(6):
                    step(model, optimizer, number)
            ends.append(held(model, optimizer))
        assert_close(*ends)

    @pytest.mark.parametrize("known", [False, True])
    @pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
    def test_rows_in_place_of_addresses_give_the_same(
        self, make: Any, known: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As while a CUDA graph is recorded, before which an ordinary step may have been taken or not."""
        ends = []
        for rows in (False, True):
            with path(True, monkeypatch):
                model, optimizer = start(make, {})
                if known:
                    step(model, optimizer, 0)
                monkeypatch.setattr(fused, "recording", lambda device, rows=rows: rows)
                for number in range(4):
                    step(model, optimizer, number)
            ends.append(held(model, optimizer))
        for name, value in ends[0].items():
            assert torch.equal(value.nan_to_num(), ends[1][name].nan_to_num()), name

    def test_two_runs_agree_to_the_last_bit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with path(True, monkeypatch):
            ends = []
            for _ in range(2):
                model, optimizer = start(AutoAdam, {})
                for number in range(3):
                    step(model, optimizer, number)
                ends.append(held(model, optimizer))
        for name, value in ends[0].items():
            assert torch.equal(value.nan_to_num(), ends[1][name].nan_to_num()), name

    def test_autograd_knows_that_the_weights_changed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with path(True, monkeypatch):
            model, optimizer = start(AutoSGD, {})
            version = model.out.weight._version
            step(model, optimizer, 0)
            assert model.out.weight._version > version

    def test_a_state_goes_from_one_path_to_the_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with path(True, monkeypatch):
            model, optimizer = start(AutoAdam, {})
            step(model, optimizer, 0)
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            step(model, optimizer, 2)
        with path(False, monkeypatch):
            resumed, other = start(AutoAdam, {})
            resumed.load_state_dict(saved[0])
            other.load_state_dict(saved[1])
            step(resumed, other, 2)
        assert_close(held(resumed, other), held(model, optimizer))


def assert_close(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        scale = value.abs().nan_to_num().max().item() or 1.0  # of a tensor, whose smallest elements are differences
        assert torch.allclose(found[name] / scale, value / scale, **TOLERANCE, equal_nan=True), name


class Changed(AutoAdam):
    """A user's."""

    def _metric(self, *args: Any) -> Tensor:
        return super()._metric(*args).square()


@pytest.mark.parametrize(
    ("make", "options", "chosen"),
    [
        (AutoSGD, {}, True),
        (AutoAdamW, {}, True),
        (AutoAdam, {"amsgrad": True}, False),
        (AutoNAdam, {}, False),
        (Changed, {}, False),
        (AutoSGD, {"rule": "paper"}, False),
    ],
)
def test_which_path_is_chosen(
    make: Any, options: dict[str, Any], chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, optimizer = start(make, options)
    bucket: Bucket = optimizer._made_buckets()[0][0]
    monkeypatch.setattr(fused, "available", lambda device: True)
    assert (optimizer._fused(optimizer.param_groups[0], bucket) is not None) == chosen
    monkeypatch.setattr(fused, "available", lambda device: False)
    assert optimizer._fused(optimizer.param_groups[0], bucket) is None


def test_without_a_compiler_the_step_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(fused, "available", lambda device: not fused._broken)
    monkeypatch.setattr(fused, "Sweep", type("Sweep", (fused.Sweep,), {"__init__": fail}))
    monkeypatch.setattr(fused, "_broken", [])
    monkeypatch.setattr(fused, "_built", [])
    model, optimizer = start(AutoSGD, {})
    before = model.out.weight.detach().clone()
    with pytest.warns(RuntimeWarning, match="C compiler"):
        step(model, optimizer, 0)
    step(model, optimizer, 2)  # without another warning
    assert not torch.equal(before, model.out.weight)
