"""A layer that takes small data has longer steps: which layers these are, and what the size of the data is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from autoopt import AutoAdam, AutoSGD
from contract.small import assert_same, backward, batches, mlp, snapshot, train

SMALL = 0.01
FACTOR = 64.0**2  # 0.5 / SMALL is 50


def signs(*shape: int) -> Tensor:
    """Data of root mean square SMALL in every feature."""
    return SMALL * (1 - 2 * torch.randint(2, shape).double())


def enlarged(model: nn.Module, optimizer: Any) -> dict[str, float]:
    """By how much larger the square of each parameter is taken to be, where it is not 1."""
    found = {name: float(optimizer.state[p]["enlarged"]) for name, p in model.named_parameters() if p.requires_grad}
    return {name: value for name, value in found.items() if value != 1}


def step(model: nn.Module, optimizer: Any, *given: Any) -> None:
    optimizer.zero_grad()
    outputs = model(*given)
    (outputs[0] if isinstance(outputs, tuple) else outputs).sin().sum().backward()
    optimizer.step()


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, torch.tensor([3, 3, 2, 2, 1]), batch_first=True)
        result: Tensor = self.lstm(packed)[1][0].transpose(0, 1)
        return result


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(lambda x: self.b(self.a(x).tanh()), x, use_reentrant=False)
        return result


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(7, 4), nn.Linear(4, 2)
        nn.init.normal_(self.tokens.weight, std=SMALL)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.tokens(x))
        return result


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    nn.init.eye_(model[0].weight)
    return model.requires_grad_(True).apply(lambda part: part is model[0] and part.requires_grad_(False))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], set[str]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), lambda: signs(5, 4), {"0.weight"}),
    "over time": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), lambda: signs(5, 3, 4), {"0.weight"}),
    "conv": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 1)), lambda: signs(5, 2, 4, 4), {"0.weight"}),
    "transposed": (lambda: nn.ConvTranspose1d(2, 3, 3), lambda: signs(5, 2, 4), {"weight"}),
    "after views": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(8, 2)), lambda: signs(5, 2, 4), {"1.weight"}),
    "checkpointed": (Checkpointed, lambda: signs(5, 4), {"a.weight"}),
    "frozen layers before": (frozen, lambda: signs(5, 4), {"1.weight"}),
    "recurrent": (
        lambda: nn.GRU(4, 3, 2, bidirectional=True, batch_first=True), lambda: signs(5, 3, 4),
        {"weight_ih_l0", "weight_ih_l0_reverse"},
    ),
    "a cell": (lambda: nn.LSTMCell(4, 3), lambda: signs(5, 4), {"weight_ih"}),
    "packed": (Packed, lambda: signs(5, 3, 4), {"lstm.weight_ih_l0"}),
    "normalised first": (lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)), lambda: signs(5, 4), set()),
    "tokens": (Tokens, lambda: torch.randint(7, (5, 3)), set()),
    "categories": (lambda: nn.Linear(200, 2), lambda: F.one_hot(torch.arange(5), 200).double(), set()),
    "data with a gradient of its own": (
        lambda: nn.Linear(4, 2), lambda: signs(5, 4).requires_grad_(), {"weight"},
    ),
    "zeros": (lambda: nn.Linear(4, 2), lambda: torch.zeros(5, 4).double(), set()),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_weights_that_take_data_that_count_as_larger(case: str) -> None:
    make, data, expected = CASES[case]
    model = make().double()
    optimizer = AutoSGD(model)
    step(model, optimizer, data())
    found = enlarged(model, optimizer)
    assert found.keys() == expected
    assert list(found.values()) == pytest.approx([FACTOR] * len(expected))


def test_the_first_steps_are_as_much_longer() -> None:
    """Here 128 times, for inputs of 0.005."""
    lengths = {}
    for scale in (1.0, 0.005):
        torch.manual_seed(0)
        model = nn.Linear(8, 4, bias=False).double()
        optimizer, before = AutoSGD(model), model.weight.detach().clone()
        step(model, optimizer, scale / SMALL * signs(16, 8))
        lengths[scale] = (model.weight - before).norm().item()
    assert lengths[0.005] == pytest.approx(128 * lengths[1.0])


def test_small_inputs_are_learned_from_nearly_as_soon() -> None:
    """Steps as for inputs of ordinary size leave the loss at 1.4 where these come to 0.22; inputs of size 1 to 0.20."""
    teacher = torch.randn(20, 5, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = AutoSGD(model)
    for _ in range(300):
        x = torch.randn(64, 20)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(SMALL * x), (x @ teacher).argmax(1))
        loss.backward()
        optimizer.step()
    assert loss < 0.6


@pytest.mark.parametrize("granularity", ["layer", "group"])
def test_what_shares_a_rate_with_others_does_not(granularity: str) -> None:
    """They would have as much longer steps, and are not to."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    optimizer = AutoSGD(model, granularity=granularity)
    step(model, optimizer, signs(5, 4))
    assert enlarged(model, optimizer) == {}


def test_the_first_step_counts_and_no_pass_before_it_or_after() -> None:
    model = nn.Linear(4, 2).double()
    optimizer = AutoSGD(model)
    model(signs(1, 4) / SMALL)  # to see that it runs
    for scale in (1.0, 0.1, 100.0):
        step(model, optimizer, scale * signs(5, 4))
        assert enlarged(model, optimizer) == {"weight": FACTOR}


def test_what_is_nearly_zero_makes_no_step_of_any_length() -> None:
    model = nn.Linear(4, 2).double()
    optimizer = AutoSGD(model)
    step(model, optimizer, 1e-12 * signs(5, 4))
    assert enlarged(model, optimizer) == {"weight": 128.0**2}


def test_zeros_beside_the_data_tell_nothing() -> None:
    """A first frame of zeros, a micro-batch that is padding."""
    model = nn.Linear(4, 2).double()
    optimizer = AutoSGD(model)
    (model(torch.zeros(5, 4).double()) + model(signs(5, 4)) + model(torch.zeros(5, 4).double())).sin().sum().backward()
    optimizer.step()
    assert enlarged(model, optimizer) == {"weight": FACTOR}


def test_a_layer_that_comes_late_is_looked_at_then() -> None:
    model = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)]).double()
    optimizer = AutoSGD(model)
    for number in range(6):
        step(model[number // 3], optimizer, signs(5, 4) if number < 3 else 2 * signs(5, 4))
    assert enlarged(model, optimizer) == {"0.weight": FACTOR, "1.weight": FACTOR / 4}


@pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
def test_a_bad_first_batch_tells_nothing(make: Any) -> None:
    data = [(SMALL * x, y) for x, y in batches(4)]
    found = []
    for bad in (False, True):
        model = mlp()
        optimizer = make(model)
        if bad:
            optimizer.zero_grad()
            backward(model, (torch.full((8, 4), torch.nan), data[0][1]))
            optimizer.step()
        train(model, optimizer, data)
        found.append(snapshot(model, optimizer))
    assert_same(*found)


def test_it_is_saved_and_older_checkpoints_do_without() -> None:
    data = [(SMALL * x, y) for x, y in batches(6)]
    model = mlp()
    optimizer = AutoSGD(model)
    train(model, optimizer, data[:3])
    saved = copy.deepcopy(optimizer.state_dict())
    other = copy.deepcopy(model)
    resumed = AutoSGD(other)
    resumed.load_state_dict(saved)
    for each, on in ((model, optimizer), (other, resumed)):
        train(each, on, [(100 * x, y) for x, y in data[3:]])
    assert_same(snapshot(model, optimizer), snapshot(other, resumed))

    for state in saved["state"].values():
        del state["enlarged"]
    older = AutoSGD(other)
    older.load_state_dict(saved)
    train(other, older, data[3:])
    assert enlarged(other, older) == {}


def test_zero_grad_between_the_passes_forgets_nothing() -> None:
    """Lightning's order: forward, zero_grad, backward."""
    model = nn.Linear(4, 2).double()
    optimizer = AutoSGD(model)
    loss = model(signs(5, 4)).sin().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert enlarged(model, optimizer) == pytest.approx({"weight": FACTOR})


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo, tracing any Function
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_model_knows_too_and_is_compiled_once(fullgraph: bool) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = AutoSGD(model)
    fast = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    if fullgraph:
        step(model, optimizer, signs(5, 4))
    for _ in range(12):
        step(fast, optimizer, signs(5, 4))
    assert enlarged(model, optimizer) == {"0.weight": FACTOR}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_compiled_step_is_the_step() -> None:
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        optimizer = AutoSGD(model)
        step(model, optimizer, signs(5, 4))
        step_once = torch.compile(optimizer.step, fullgraph=True, backend="eager") if compiles else optimizer.step
        for number in range(4):
            optimizer.zero_grad()
            model(10**number * signs(5, 4)).sin().sum().backward()
            step_once()
        found.append(snapshot(model, optimizer))
    assert_same(*found)
