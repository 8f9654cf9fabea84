"""The kernels of the step do what the operations in `step` do.

They need Triton, and a GPU or its interpreter: where there is no GPU, the tests below run once more in a process of
their own, under TRITON_INTERPRET=1, which must be set before Triton is imported.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autoopt import AutoAdaGrad, AutoAdam, AutoAdamW, AutoNAdam, AutoSGD
from autoopt.capture import Source, lengths
from autoopt.moments import building
from autoopt.optim import bucket, fused
from autoopt.optim.bucket import ENLARGED, HELD, Bucket
from autoopt.optim.reading import Swept
from autoopt.optim.robust import Robust
from autoopt.optim.step import decided
from autoopt.oracle import relative
from interpreter import DEVICE, elsewhere, here, run_interpreted

# Between the two lies rounding alone: the kernels multiply and add in one rounding, and sum a row in another order.
# A step differs by a few units in the last place (6e-8), and what the next ones make of that adds up.
TOLERANCE = {"rtol": 2e-5, "atol": 1e-7}

# After a shift of the data V̂ and <g, u> are small differences of large sums, of which rounding takes a larger share.
AFTER_A_SHIFT = {"rtol": 1e-3, "atol": 1e-5}
# What is decided follows from sums in float64, and in another order of the same operations.
DECIDED = {"rtol": 1e-9, "atol": 0.0}

TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not TRITON, reason="Triton is not installed, and the kernels are written in it")
runs_kernels = [
    needs_triton,
    here,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the interpreter's
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # its 0/0 in lanes that are masked out
]


@needs_triton
@elsewhere
@pytest.mark.parametrize("name", ["TestKernels", "TestDecision"])
def test_in_the_interpreter(name: str) -> None:
    run_interpreted(f"{__file__}::{name}")


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
        self.wide, self.out = nn.Linear(23, 120), nn.Linear(120, 3)
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

    @pytest.fixture(autouse=True)
    def _short_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of which the widest tensor has two, as large ones have: an interpreter takes long for every row."""
        monkeypatch.setattr(bucket, "RUN", 4)

    @pytest.mark.parametrize(("make", "options"), OPTIONS.values(), ids=OPTIONS)
    def test_ten_steps_agree_with_the_twin(
        self, make: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ends = []
        for kernels in (False, True):
            with path(kernels, monkeypatch) as sweeps:
                model, optimizer = start(make, options)
                for number in range(10):
                    step(model, optimizer, number, bad=number == 7)
                assert len(sweeps) == (10 if kernels else 0)
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

    def test_the_same_memory_in_another_layout(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A gradient and a weight keep their addresses, which are known, and are turned."""
        ends = []
        for kernels in (False, True):
            with path(kernels, monkeypatch):
                model, optimizer = start(AutoAdam, {})
                weight, before = model.other.weight, (0, 0)
                for number in range(4):
                    optimizer.zero_grad(set_to_none=False)
                    if number == 3:
                        weight.data = weight.data.t()
                    model(*batch(number), other=True).square().mean().backward()
                    places = weight.data_ptr(), weight.grad.data_ptr()
                    if number == 2:
                        weight.grad = weight.grad.t()
                    optimizer.step()
                    assert before in (places, (0, 0))
                    before = places
            ends.append(held(model, optimizer))
        assert_close(*ends)

    @pytest.mark.parametrize("known", [False, True])
    @pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
    def test_rows_in_place_of_addresses_give_the_same(
        self, make: Any, known: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As while CUDA graphs are recorded, before which an ordinary step may have left memory for a table or not."""
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

    def test_a_last_tensor_without_elements_is_not_looked_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its unit has no row, and what lies behind those of the others is somebody else's."""
        parameters = [nn.Parameter(torch.ones(5, device=DEVICE)), nn.Parameter(torch.ones(0, device=DEVICE))]
        with path(True, monkeypatch) as sweeps:
            optimizer = AutoSGD(parameters)
            (bucket,) = optimizer._made_buckets()[0]
            guarded = torch.full((len(bucket.unit_of_row) + 1,), 10**12, device=DEVICE)
            guarded[:-1] = bucket.unit_of_row
            bucket.unit_of_row = guarded[:-1]
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        assert sweeps
        assert (parameters[0] < 1).all()


def statistics(bucket: Bucket) -> dict[str, Tensor]:
    return {**bucket.statistics, "step": bucket.steps}


def by_both(sweep: Any, samples: Tensor | int | None, total: Tensor | None, decide: Callable[..., Any]) -> list[Any]:
    """What the kernel and its twin make of the same sums and the same statistics, which are the twin's then."""
    bucket, made = sweep.bucket, []
    before = {name: value.clone() for name, value in statistics(bucket).items()}
    swept = Swept(sweep.group, bucket, sweep, samples)
    for way in (lambda: decide(sweep, samples, total), lambda: decided(Robust(), swept, total)):
        for name, value in statistics(bucket).items():
            value.copy_(before[name])
        decision = way()
        units = len(sweep.matrix)
        ends = {"moves": decision.moves != 0, "scale": decision.scale[:units], "shrink": decision.shrink[:units]}
        ends |= {"newest": decision.newest[: units + 1]}
        made.append({**ends, **{name: value.clone() for name, value in statistics(bucket).items()}})
    kernel, twin = made
    for name, value in twin.items():
        torch.testing.assert_close(kernel[name], value, **DECIDED, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")
    return [before, kernel, decision]


class Small(nn.Module):
    """For many steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9, bias=False)  # one would have no gradient before the BatchNorm
        self.other, self.out = nn.Linear(9, 9), nn.Linear(9, 2)
        self.norm = nn.BatchNorm1d(9)

    def forward(self, x: Tensor, other: float | None) -> Tensor:
        h = self.norm(self.first(x)) if len(x) > 1 else self.first(x)
        if other is not None:
            h = h + other * self.other(h)
        y: Tensor = self.out(torch.tanh(h))
        return y


def eventful(model: nn.Module, optimizer: Any, number: int) -> None:
    """A step of forty, in which all happens that may."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(1 if number == 9 else 8, 7, generator=generator).to(DEVICE)
    optimizer.zero_grad()
    y = model(x, {0: None, 5: None, 6: 0.0}.get(number, 1.0))
    loss = (y - x[:, :2] - (20.0 if number >= 20 else 0.0)).square().mean()  # the data shifts
    (loss * torch.nan if number == 12 else loss).backward()
    if number % 5 == 4:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


MANY: dict[str, tuple[Any, dict[str, Any], bool]] = {  # the last: in two groups of parameters
    "SGD": (AutoSGD, {}, False),
    "SGD, layer, measure_every": (AutoSGD, {"granularity": "layer", "measure_every": 3, "weight_decay": 0.1}, False),
    "Adam, measure_every, groups": (AutoAdam, {"measure_every": 3}, True),
    "AdamW, layer": (AutoAdamW, {"granularity": "layer", "weight_decay": 0.1}, False),
    "Adam, group": (AutoAdam, {"granularity": "group"}, False),
    "AdaGrad, coupled decay, groups": (AutoAdaGrad, {"weight_decay": 0.1}, True),
}


class TestDecision:
    pytestmark = runs_kernels

    @pytest.mark.parametrize(("make", "options", "several"), MANY.values(), ids=MANY)
    def test_all_of_forty_steps_agree_with_the_twin(
        self, make: Any, options: dict[str, Any], several: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On the same sums to what float64 gives, and altogether to what float32 does."""
        seen: Counter[str] = Counter()

        def decide(sweep: Any, samples: Any, total: Any, plain: Any = fused.Sweep.decide) -> Any:
            before, after, decision = by_both(sweep, samples, total, plain)
            seen["halved"] += bool((after["count"] < before["count"]).any())
            seen["bad"] += not after["moves"].any()
            seen["held"] += samples is None
            seen["one sample"] += samples == 1
            seen["others"] += total is not None
            seen["missing"] += sweep.present is not None
            seen["still"] += bool((after["age"] == before["age"]).any()) and bool(after["moves"].any())
            return decision

        def made() -> tuple[nn.Module, Any]:
            torch.manual_seed(3)
            model = Small().to(DEVICE)
            first, *rest = model.parameters()
            groups = {"param_groups": [{"params": [first]}, {"params": rest, "lr": 0.5}]} if several else {}
            return model, make(model, **options, **groups)

        pairs = [made(), made()]
        for number in range(40):
            for kernels, pair in zip((False, True), pairs, strict=True):
                with path(kernels, monkeypatch), monkeypatch.context() as patch:
                    patch.setattr(fused.Sweep, "decide", decide)
                    eventful(*pair, number)
            assert_close(*(held(*pair) for pair in pairs), TOLERANCE if number < 20 else AFTER_A_SHIFT)
        happened = {"halved", "bad", "one sample", "missing"} | ({"others"} if several else set())
        happened |= {"held"} if "measure_every" in options else set()
        happened |= {"still"} if options.get("granularity") != "group" else set()
        assert {name for name, times in seen.items() if times} == happened

    @pytest.mark.parametrize("layers", [1, 2, 19])
    @pytest.mark.parametrize("granularity", ["tensor", "layer", "group"])
    def test_any_statistics_and_sums(self, granularity: str, layers: int) -> None:
        torch.manual_seed(layers)
        model = nn.Sequential(*(nn.Linear(3, 4) for _ in range(layers))).to(DEVICE)
        optimizer = AutoSGD(model, granularity=granularity, measure_every=2)
        bucket: Bucket = optimizer._made_buckets()[0][0]
        halved = Counter[bool]()
        for number in range(60):
            sweep = object.__new__(fused.Sweep)
            sweep.bucket, sweep.group = bucket, optimizer.param_groups[0]
            sweep.matrix, samples, total = self._drawn(bucket, number)
            present = torch.rand(len(bucket.params), device=DEVICE) < 0.7
            sweep.present = present if number % 2 else None
            before, after, _ = by_both(sweep, samples, total, fused.Sweep.decide)
            halved[bool((after["count"] < before["count"]).any())] += 1
        assert min(halved[True], halved[False]) > 2

    @pytest.mark.parametrize("above", [False, True])
    @pytest.mark.parametrize(("age", "by"), [(11, "noise"), (101, "usual")])
    def test_the_border_from_which_on_the_weights_travel(self, age: int, by: str, above: bool) -> None:
        model = nn.Linear(3, 4).to(DEVICE)
        optimizer = AutoSGD(model, granularity="group")
        bucket: Bucket = optimizer._made_buckets()[0][0]
        carry, noise, usual = 0.9**age, 3.0 if by == "noise" else 1e9, 2.0
        border = relative.STEADY * noise if by == "noise" else usual**0.5
        alignment = (1 - carry) * border * (1 + (1e-9 if above else -1e-9))
        known = {
            "age": age, "carry": carry, "count": age, "measured": 7, "alignment": alignment,
            "variance": noise * (1 - relative.SMOOTHING**7), "usual": usual * (1 - relative.SMOOTHING ** (age - 1)),
        }  # fmt: skip
        for name, value in known.items():
            bucket.statistics[name].fill_(value)
        sweep = object.__new__(fused.Sweep)
        sweep.bucket, sweep.group, sweep.present = bucket, optimizer.param_groups[0], None
        row = [1.0, alignment * (1 - carry), 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
        sweep.matrix = torch.tensor([row], dtype=torch.float64, device=DEVICE)
        _, after, _ = by_both(sweep, 8, None, fused.Sweep.decide)
        assert after["count"].item() == (age + 1) / (2 if above else 1)

    def _drawn(self, bucket: Bucket, number: int) -> tuple[Tensor, Any, Tensor | None]:
        """Statistics, in the bucket, and sums that may come up, or may not."""
        units = len(bucket.elements)

        def numbers(spread: float = 3.0, zeros: float = 0.0) -> Tensor:
            value = (spread * torch.randn(units, dtype=torch.float64)).exp()
            return torch.where(torch.rand(units) < zeros, 0.0, value).to(DEVICE)

        def signed(spread: float = 3.0) -> Tensor:
            return numbers(spread) * torch.randn(units, dtype=torch.float64).to(DEVICE)

        longest = (3, 15, 400, 20_000)[number % 4]
        age = torch.randint(0, longest, (units,)).double().to(DEVICE)
        known = {
            "count": (age * torch.rand(units, dtype=torch.float64).to(DEVICE)).ceil(), "noise": signed(),
            HELD: torch.where(numbers() < 0.3, torch.nan, signed()), "carry": 0.9**age, "age": age,
            "start": numbers(), ENLARGED: numbers(1.0).clamp_min(1),
            "size": numbers() * (1e-39 if number % 7 == 0 else 1.0),
            "gradient": numbers(), "variance": signed(),
            "measured": torch.minimum(age, torch.randint(0, longest, (units,)).double().to(DEVICE)),
            "alignment": signed().abs() * (-1.0, 1.0, 100.0)[number % 3], "usual": numbers(), "rate": numbers(),
        }  # fmt: skip
        if number % 2:  # a share of signal between its bounds
            noise = 1.1 - 0.7 * torch.rand(units, dtype=torch.float64).to(DEVICE)
            known["variance"] = known["gradient"] * noise
        assert known.keys() == bucket.statistics.keys()
        for name, value in known.items():
            bucket.statistics[name].copy_(value)
        bucket.steps.copy_(torch.randint(0, longest, bucket.steps.shape))
        gg = numbers()
        columns = [numbers(zeros=0.2), signed(), gg * (numbers() > 0.1), gg, numbers(), numbers(), numbers(), numbers()]
        if number % 7 == 0:
            columns[6] *= 1e-37  # so short that its squares were lost
        if number % 10 == 7:
            columns[(0, 4)[number % 20 // 10]][0] = (torch.nan, torch.inf)[number % 3 % 2]
        several = torch.randint(0, 9, (units,)).double().to(DEVICE)
        samples: Any = (None, 1, 2, 64, several)[number % 5]
        total = (None, 3.0, torch.inf, None, torch.nan, 0.0)[number % 6]
        return torch.stack(columns, 1), samples, None if total is None else gg.new_tensor(total)

    @pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
    def test_zeros_without_a_pass_are_no_gradients(self, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        with path(True, monkeypatch) as sweeps:
            torch.manual_seed(3)
            model = Small().to(DEVICE)
            optimizer = make(model)
            eventful(model, optimizer, 1)
            optimizer.zero_grad(set_to_none=False)
            before = held(model, optimizer)
            optimizer.step()
            after = held(model, optimizer)
            assert len(sweeps) == 2
        for name, value in before.items():
            assert torch.equal(value, after[name]) or "running" in name, name  # those go by the layer

    def test_beyond_one_program_operations_decide(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ends = []
        for units in (fused.UNITS, 3):
            monkeypatch.setattr(fused, "UNITS", units)
            with path(True, monkeypatch):
                torch.manual_seed(3)
                model = Small().to(DEVICE)
                optimizer = AutoAdamW(model)
                for number in range(8):
                    eventful(model, optimizer, number)
            ends.append(held(model, optimizer))
        assert_close(*ends)

    @pytest.mark.parametrize("blank", [False, True])
    @pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
    def test_ranks_add_up_first(self, make: Any, blank: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """As if a second rank had the same samples. One without any has the gradients, and no squares to read."""
        monkeypatch.setattr(Source, "ranks", 2)
        monkeypatch.setattr(Source, "over_ranks", lambda self, numbers: 2 * numbers)
        ends = []
        for kernels in (False, True):
            with path(kernels, monkeypatch):
                torch.manual_seed(3)
                model = Small().to(DEVICE)
                optimizer = make(model, granularity="layer")
                for number in range(8):
                    eventful(model, optimizer, number)
                if blank:
                    optimizer.zero_grad()
                    for parameter in model.parameters():
                        parameter.grad = torch.ones_like(parameter)
                    monkeypatch.setattr(optimizer._now.source.current, "group", object())
                    optimizer._now.source.current.blank = True
                    optimizer.step()
            ends.append(held(model, optimizer))
        assert_close(*ends)

    @pytest.mark.parametrize("options", [{}, {"granularity": "layer", "measure_every": 2, "weight_decay": 0.1}])
    @pytest.mark.parametrize("make", [AutoSGD, AutoAdam, AutoAdaGrad])
    def test_a_step_takes_few_operations(
        self, make: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each costs a launch, or at least the host's time; as many for 40 tensors as for 5, and none takes all 40,
        as torch's operations on many tensors do, of which some hundred are one launch."""
        found = [self._operations(make, options, tensors, monkeypatch) for tensors in (5, 40)]
        assert found[0] == found[1]
        assert found[0].total() <= 18, found[0]

    def _operations(
        self, make: Any, options: dict[str, Any], tensors: int, monkeypatch: pytest.MonkeyPatch
    ) -> Counter[str]:
        from autoopt.moments import length
        from autoopt.optim import kernels

        class Counting(TorchDispatchMode):
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                found[f"{function} of {sum(len(each) for each in args if isinstance(each, list))}"] += 1
                return function(*args, **kwargs or {})

        class Counted:
            """A kernel, whose interpreter takes operations of its own."""

            def __init__(self, module: Any, name: str) -> None:
                self.name, self.kernel = name, getattr(module, name)

            def __getitem__(self, grid: Any) -> Any:
                return lambda *args, **kwargs: self.launch(grid, args, kwargs)

            def launch(self, grid: Any, args: Any, kwargs: Any) -> None:
                found[self.name] += 1
                with _disable_current_modes():
                    self.kernel[grid](*args, **kwargs)

        found = Counter[str]()
        with path(True, monkeypatch), monkeypatch.context() as patch:
            patch.setattr(lengths, "available", lambda device: True)
            for module, name in [(kernels, "sums"), (kernels, "decide"), (kernels, "update"), (length, "squares")]:
                patch.setattr(module, name, Counted(module, name))
            layers = [nn.Linear(4, 4) for _ in range(tensors // 2)] + [nn.Linear(4, 4, bias=False)] * (tensors % 2)
            model = nn.Sequential(*layers).to(DEVICE)
            optimizer = make(model, **options)
            optimizer._made_buckets()[0][0].looks = 0  # the first steps also ask how large the inputs are
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(6, 4, device=DEVICE)).square().mean().backward()
                found.clear()
                with Counting():
                    optimizer.step()
        assert found["sums"] == found["decide"] == found["update"] == found["squares"] == 1
        return found


def assert_close(
    expected: dict[str, Tensor], found: dict[str, Tensor], tolerance: dict[str, float] = TOLERANCE
) -> None:
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        scale = value.abs().nan_to_num().max().item() or 1.0  # of a tensor, whose smallest elements are differences
        assert torch.allclose(found[name] / scale, value / scale, **tolerance, equal_nan=True), name


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

    monkeypatch.setattr(fused, "available", lambda device: True)
    monkeypatch.setattr(fused, "Sweep", type("Sweep", (fused.Sweep,), {"__init__": fail}))
    monkeypatch.setattr(building, "_missed", set())
    model, optimizer = start(AutoSGD, {})
    before = model.out.weight.detach().clone()
    with pytest.warns(RuntimeWarning, match="C compiler"):
        step(model, optimizer, 0)
    step(model, optimizer, 2)  # without another warning
    assert not torch.equal(before, model.out.weight)
