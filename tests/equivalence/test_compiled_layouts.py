"""torch.compile before any eager pass: the first pass runs as it would without, and the graphs come after it.

The backend is aot_eager: it tests what Dynamo and AOTAutograd trace, without the minute that a C++ build takes.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt import AutoSGD
from autoopt.capture.compiling import compiled, uncompiled

pytestmark = [  # Dynamo's own: of tracing any Function, and of looking at tensors between two graphs
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
T, D = 4, 6


class TimeFirst(nn.Module):
    """The batch on the second axis of what its layers see."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.inner(x.transpose(0, 1)).tanh()).mean(0))
        return result


class Flat(nn.Module):
    """All positions of all samples as rows of one axis."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.inner(x.reshape(-1, D)).tanh()
        result: Tensor = self.head(rows.view(x.shape).mean(1))
        return result


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(D, D), nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.scale * self.inner(x).tanh()
        return result


class Stack(nn.Module):
    """Position embeddings, and more blocks with a parameter of their own than Dynamo compiles versions of a code."""

    def __init__(self, blocks: int = 10) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(T, D))
        self.blocks = nn.ModuleList(Scaled() for _ in range(blocks))
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x.mean(1))
        return result


class Plain(nn.Module):
    """What needs no look at all but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.LayerNorm(D)), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x).mean(1))
        return result


class Activated(nn.Module):
    """Calls a function that is compiled by itself, in one graph, beside a parameter that has to be watched."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.inner, self.head = nn.Parameter(torch.randn(T, D)), nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(gated(self.inner(x + self.positions)).mean(1))
        return result


class Embedded(nn.Module):
    """Position embeddings, which have to be watched, and a block that need not be."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.block = nn.Embedding(T, D), nn.Sequential(nn.Linear(D, D), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.block(x + self.positions(torch.arange(T).unsqueeze(0)))
        return result


class Language(nn.Module):
    """All that has to be watched is in the body; but with the flag positions are used outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Embedded(), nn.Linear(D, 3)
        self.compiled: list[bool] = []

    def forward(self, x: Tensor, again: bool = False) -> Tensor:
        h = self.body(x)
        h = h + self.body.positions(torch.arange(T).unsqueeze(0)) if again else h
        self.compiled.append(torch.compiler.is_compiling())
        result: Tensor = self.head(h.mean(1))
        return result


@torch.compile(backend="aot_eager", fullgraph=True)
def gated(x: Tensor) -> Tensor:
    return F.gelu(x) * x.sigmoid()


def whole(model: nn.Module) -> nn.Module:
    result: nn.Module = torch.compile(model, backend="aot_eager")
    return result


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def in_parts(model: nn.Module) -> nn.Module:
    for part in model.children():
        for module in part if isinstance(part, nn.ModuleList) else (part,):
            module.compile(backend="aot_eager")
    return model


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def train(model: nn.Module, optimizer: AutoSGD) -> None:
    generator = torch.Generator().manual_seed(3)
    for size in (5, 5, 4, 5):
        x = torch.randn(size, T, D, dtype=torch.float64, generator=generator)
        y = torch.randint(0, 3, (size,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("compiling", [whole, in_place, in_parts])
@pytest.mark.parametrize("make", [TimeFirst, Flat, Stack, Plain, Activated, Language])
def test_a_model_that_is_compiled_from_the_start_trains_as_the_plain_one(
    make: Callable[[], nn.Module], compiling: Callable[[nn.Module], nn.Module]
) -> None:
    plain = make().double()
    other = copy.deepcopy(plain)
    optimizers = AutoSGD(plain, exact=True), AutoSGD(other, exact=True)
    with torch.compiler.set_stance("force_eager"):
        train(plain, optimizers[0])
    train(compiling(other), optimizers[1])
    for name, chosen in optimizers[0].tuned().items():
        assert optimizers[1].tuned()[name].noise == pytest.approx(chosen.noise, rel=1e-9), name
    for (name, a), b in zip(plain.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13, msg=name)


def test_from_the_second_pass_on_it_is_compiled() -> None:
    model = Plain().double()
    optimizer = AutoSGD(model)
    fast, x = whole(model), torch.randn(5, T, D, dtype=torch.float64)
    for passes in range(3):
        optimizer.zero_grad()
        fast(x).sum().backward()
        optimizer.step()
        assert (graphs() > 0) == (passes > 0)


def test_blocks_that_are_alike_share_a_graph() -> None:
    """Of ten blocks each would be compiled anew, and after eight Dynamo would give up, were they told apart."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(D, D), nn.ReLU()) for _ in range(10)), nn.Flatten()).double()
    optimizer = AutoSGD(model)
    for block in model:
        block.compile(backend="aot_eager")
    x = torch.randn(5, T, D, dtype=torch.float64)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    assert 0 < graphs() < 10


def test_between_two_graphs_nothing_is_compiled_but_what_asks_for_it() -> None:
    seen: list[bool] = []

    @torch.compile(backend="eager")
    def function(x: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    x = torch.zeros(2)
    with uncompiled():
        function(x)
        with uncompiled(), compiled():
            function(x)
            with uncompiled():
                function(x)
        function(x)
    function(x)
    assert seen == [False, True, False, False, True]


def test_two_threads_leave_the_compiler_as_it_was() -> None:
    """torch's stance is one for all threads, and the one that began first may end first."""
    inside, over = threading.Event(), threading.Event()

    def other() -> None:
        with uncompiled():
            inside.set()
            over.wait(10)

    thread = threading.Thread(target=other)
    with uncompiled():
        thread.start()
        inside.wait(10)
    over.set()
    thread.join()
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_what_the_first_pass_did_not_run_is_seen_when_it_does() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain, self.flat = Plain(), Flat()

        def forward(self, x: Tensor, flat: bool = False) -> Tensor:
            result: Tensor = (self.flat if flat else self.plain)(x)
            return result

    model = Branches().double()
    other = copy.deepcopy(model)
    optimizers = AutoSGD(model, exact=True), AutoSGD(other, exact=True)
    x = torch.randn(5, T, D, dtype=torch.float64)
    for run, optimizer in zip((model, whole(other)), optimizers, strict=True):
        for flat in (False, False, True, True):
            optimizer.zero_grad()
            run(x, flat).sin().sum().backward()
            optimizer.step()
    for name, chosen in optimizers[0].tuned().items():
        assert optimizers[1].tuned()[name].noise == pytest.approx(chosen.noise, rel=1e-9), name


def test_an_empty_first_batch_shows_nothing() -> None:
    model = Flat().double()
    other = copy.deepcopy(model)
    optimizers = AutoSGD(model, exact=True), AutoSGD(other, exact=True)
    for run, optimizer in zip((model, whole(other)), optimizers, strict=True):
        torch.manual_seed(0)
        for size in (0, 5, 5):
            optimizer.zero_grad()
            run(torch.randn(size, T, D, dtype=torch.float64)).sin().sum().backward()
            optimizer.step()
    for name, chosen in optimizers[0].tuned().items():
        assert optimizers[1].tuned()[name].noise == pytest.approx(chosen.noise, rel=1e-9), name


@pytest.mark.parametrize("flags", [(False,) * 6, (False, False, True, True, False, False)])
def test_of_a_compiled_model_only_the_part_is_watched_that_has_to_be(flags: tuple[bool, ...]) -> None:
    """A pass of another kind is watched as a whole, since something else may be used in it."""
    model = Language().double()
    other = copy.deepcopy(model)
    optimizers = AutoSGD(model, exact=True), AutoSGD(other, exact=True)
    ways: list[bool] = []  # whether each pass of the compiled model was compiled outside of the body
    for run, optimizer in zip((model, whole(other)), optimizers, strict=True):
        torch.manual_seed(0)
        for again in flags:
            optimizer.zero_grad()
            run(torch.randn(5, T, D, dtype=torch.float64), again).sin().sum().backward()
            optimizer.step()
            ways += other.compiled[-1:]
    for name, chosen in optimizers[0].tuned().items():
        assert optimizers[1].tuned()[name].noise == pytest.approx(chosen.noise, rel=1e-9), name
    seen = optimizers[1]._now.source.bare.focus
    assert seen is not None
    assert seen.module is other.body
    assert ways == [False, *(not again for again in flags[1:])]


def test_what_is_thawed_is_watched_in_the_whole_model_again() -> None:
    model = Language().double()
    model.head.requires_grad_(False)
    optimizer, fast = AutoSGD(model), whole(model)
    x = torch.randn(5, T, D, dtype=torch.float64)
    for passes in range(5):
        if passes == 2:
            model.head.requires_grad_(True)
        optimizer.zero_grad()
        fast(x).sin().sum().backward()
        optimizer.step()
        focus = optimizer._now.source.bare.focus
        assert (focus is None) == (passes == 2)
    assert focus.trained == (True,) * 5
