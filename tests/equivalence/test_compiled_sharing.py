"""torch.compile and parameters that are used several times: exact, or an error that says what to do.

The backend is aot_eager: it tests what Dynamo and AOTAutograd trace, without the minute that a C++ build takes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from autoopt import AutoAdam
from equivalence.sharing import CASES, Case, D, N, T, assert_exact, attach, floats, loss_of, one_by_one
from equivalence.test_parametrizations import CASES as PARAMETRIZED

pytestmark = [  # Dynamo's own: of tracing any Function, and of looking at tensors between two graphs
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

KNOWN = {name: case for name, case in CASES.items() if name.startswith("tied") and "repeated" not in name} | {
    name: PARAMETRIZED[name] for name in ("weight norm", "adapter", "an adapter for two", "among others")
}
UNKNOWN = {name: CASES[name] for name in ("linear over positions", "embedding", "recurrent", "two names", "siamese")}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: nn.Module, fullgraph: bool = False) -> nn.Module:
    result: nn.Module = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    return result


@pytest.mark.parametrize(
    ("case", "elementwise"),
    [*((case, True) for case in KNOWN.values()), (KNOWN["tied tokens"], False), (KNOWN["adapter"], False)],
    ids=[*KNOWN, "tied tokens, total", "adapter, total"],
)
def test_what_is_known_beforehand_runs_between_the_graphs(case: Case, elementwise: bool) -> None:
    model, inputs = case.build()
    expected = one_by_one(model, *inputs)
    capture = attach(model, elementwise)
    fast = compiled(model)
    for _ in range(2):
        model.zero_grad()
        capture.clear()
        loss_of(fast, *inputs).backward()
        assert_exact(capture, model, expected)


@pytest.mark.parametrize("case", UNKNOWN.values(), ids=UNKNOWN)
def test_what_shows_only_when_it_runs_is_seen_in_the_first_pass_which_is_not_compiled(case: Case) -> None:
    model, inputs = case.build()
    expected = one_by_one(model, *inputs)
    capture = attach(model)
    fast = compiled(model)
    for _ in range(3):
        model.zero_grad()
        capture.clear()
        loss_of(fast, *inputs).backward()
        assert_exact(capture, model, expected)


@pytest.mark.parametrize("case", UNKNOWN.values(), ids=UNKNOWN)
def test_in_one_graph_it_is_refused_and_without_fullgraph_exact(case: Case) -> None:
    model, inputs = case.build()
    expected = one_by_one(model, *inputs)
    capture = attach(model)
    with pytest.raises(RuntimeError, match=r"layer '.*' was used \d times .*without fullgraph=True"):
        loss_of(compiled(model, fullgraph=True), *inputs).backward()

    fast = compiled(model)
    for _ in range(3):
        model.zero_grad()
        capture.clear()
        loss_of(fast, *inputs).backward()
        assert_exact(capture, model, expected)


def test_a_compiled_model_that_is_called_twice_is_refused() -> None:
    """Every layer is used as often as any other, so that only the count of uses tells."""
    model = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    capture = attach(model)
    fast = compiled(model, fullgraph=True)
    a, b = floats(D)()[0], floats(D)()[0]
    with pytest.raises(RuntimeError, match=r"layer '[02]' was used 2 times"):
        (fast(a) * fast(b)).sum().backward()
    capture.detach()


def test_one_graph_for_all_is_refused_where_a_layer_must_run_outside() -> None:
    model, inputs = CASES["tied tokens"].build()
    capture = attach(model)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(model, fullgraph=True)(*inputs)
    capture.detach()


def test_rows_of_different_number_are_refused() -> None:
    class Flattens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.second(self.first(x).flatten(0, 1))
            return result

    model = Flattens().double()
    capture = attach(model)
    with pytest.raises(RuntimeError, match=f"'second' got {N * T} rows where 'first' got {N}"):
        compiled(model, fullgraph=True)(*floats(T, D)()).sum().backward()
    capture.detach()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_batches_of_one_sample_are_known_as_such(micro_batches: int) -> None:
    model = nn.Linear(D, 2)
    optimizer = AutoAdam(model, rule="paper")
    fast = compiled(model, fullgraph=True)
    for _ in range(micro_batches):
        fast(torch.randn(1, D)).sum().backward()
    if micro_batches == 1:
        with pytest.raises(RuntimeError, match="one sample"):
            optimizer.step()
    else:
        optimizer.step()


def test_the_device_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(D, 4), nn.Linear(4, 2))
    optimizer = AutoAdam(model)
    fast = compiled(model, fullgraph=True)
    reads: list[int] = []
    plain = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: reads.append(1) or plain(tensor))
    for _ in range(3):
        optimizer.zero_grad()
        fast(torch.randn(N, D)).sum().backward()
        optimizer.step()
    assert len(reads) == 1
