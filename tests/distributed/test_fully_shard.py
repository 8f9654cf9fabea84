"""FSDP2 (fully_shard): the ranks choose the same, and what one process does with all the samples.

Starting processes is what takes time here, so that all cases run in one start for each number of ranks.
"""

import functools
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from autoopt import AutoAdaGrad, AutoAdam, AutoGaussNewton, AutoRMSprop, AutoSGD
from autoopt.capture import sharded as sharding
from ranks import on_ranks

STEPS = 200
OPTIMIZERS: dict[str, Any] = {"sgd": AutoSGD, "adam": AutoAdam, "adagrad": AutoAdaGrad, "newton": AutoGaussNewton}
Batch = tuple[Tensor, Tensor]
Part = tuple[Tensor, Tensor, float]


class Block(nn.Module):
    """A layer, and a parameter without one."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(inputs, outputs), nn.Parameter(torch.ones(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale


class Language(nn.Module):
    """Embedding and head are tied, the body runs twice, the gate is computed from other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(7, 8), nn.Linear(8, 8), nn.Linear(8, 7)
        self.gate, self.attention = weight_norm(nn.Linear(8, 8)), nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.memory, self.start = (
            nn.LayerNorm(8),
            nn.GRU(8, 8, batch_first=True),
            nn.Parameter(torch.ones(8)),
        )
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens) + self.start
        h = torch.tanh(self.body(torch.tanh(self.body(h)))) * torch.sigmoid(self.gate(h))
        h = self.norm(h + self.attention(h, h, h)[0])
        result: Tensor = self.head(self.memory(h)[0])
        return result.flatten(1)


class Residual(nn.Module):
    """What its block gives, which a checkpoint runs again, is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Block(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.block, x, use_reentrant=False)
        h += x
        result: Tensor = self.last(h)
        return result


class Sequences(nn.Module):
    """Takes (time, batch, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.memory, self.last = nn.Linear(6, 5), nn.LSTM(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.memory(self.first(x))[0][-1])
        return result


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(6, 17), nn.Linear(17, 3)).double()  # of 3 rows, the last of 4 ranks has none


def batches(*steps: int) -> Iterable[Batch]:
    """The last one of each epoch of five is smaller."""
    for step in steps:
        x = torch.randn(10 if step % 5 < 4 else 7, 6, generator=torch.Generator().manual_seed(step))
        yield x, x[:, :3].argmax(1)


def texts(*steps: int) -> Iterable[Batch]:
    for step in steps:
        x = torch.randint(0, 7, (6, 5), generator=torch.Generator().manual_seed(step))
        yield x, x[:, 0]


class World:
    """A rank among others, with its part of every batch and of every parameter; or one process that has all."""

    def __init__(self, folder: Path, number: int = 0, ranks: int = 0) -> None:
        self.folder, self.number, self.ranks = folder, number, ranks

    def shard(self, model: Any, **options: Any) -> Any:
        if self.ranks and isinstance(model, nn.Sequential):
            fully_shard(model[0], **options)
        return fully_shard(model, **options) if self.ranks else model

    def parts(self, given: Iterable[Batch]) -> Iterable[Part]:
        """With what the loss is to be multiplied by, for the mean over the ranks to be that over the samples."""
        ranks = max(1, self.ranks)
        for x, y in given:
            x_here, y_here = (part.tensor_split(ranks)[self.number] for part in (x, y))
            yield x_here, y_here, ranks / max(1, len(x))

    def train(self, model: nn.Module, optimizer: Any, given: Iterable[Batch], clip: float | None = None) -> None:
        for part in self.parts(given):
            optimizer.zero_grad()
            backward(model, *part)
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()


def backward(model: nn.Module, x: Tensor, y: Tensor, factor: float) -> None:
    x = x.to(next(model.parameters()).dtype) if x.is_floating_point() else x
    (F.cross_entropy(model(x), y, reduction="sum") * factor).backward()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """All rows of all parameters."""
    found: dict[str, Any] = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in found.items()}


def result(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    tuned = list(optimizer.tuned().values())
    return {
        "weights": weights(model),
        "chosen": torch.tensor([[t.lr, t.momentum] for t in tuned], dtype=torch.float64),
        "noise": torch.tensor([t.noise for t in tuned], dtype=torch.float64),
    }


# What a rank does, and one process too.


def long(world: World, kind: str, rule: str) -> Any:
    torch.manual_seed(0)
    model = world.shard(nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3)))
    optimizer = OPTIMIZERS[kind](model, rule=rule, weight_decay=1e-3)
    world.train(model, optimizer, batches(*range(STEPS)))
    with torch.no_grad():
        before = model(torch.ones(2, 6))  # after which the parameters of the root stay gathered
        with optimizer.averaged():
            average = {"average": weights(model), "averaged": model(torch.ones(2, 6))}
        assert torch.equal(model(torch.ones(2, 6)), before)
    return {**result(model, optimizer), **average}


def sharing(world: World, kind: str) -> Any:
    torch.manual_seed(0)
    model = world.shard(Language().double())
    optimizer = OPTIMIZERS[kind](model)
    world.train(model, optimizer, texts(*range(4)))
    return result(model, optimizer)


def residual(world: World) -> Any:
    torch.manual_seed(0)
    model = Residual().double()
    if world.ranks:
        fully_shard(model.block)
    model = world.shard(model)
    with torch.no_grad():
        model(torch.zeros(2, 6).double())  # after which the parameters of the root stay gathered
    optimizer = AutoRMSprop(model, granularity="layer", weight_decay=0.1, decoupled_weight_decay=True)
    world.train(model, optimizer, batches(*range(4)))
    return result(model, optimizer)


def clipped(world: World) -> Any:
    model = world.shard(network())
    optimizer = AutoSGD(model, rule="paper", smoothing=0.5)
    world.train(model, optimizer, batches(*range(8)), clip=0.01)
    return result(model, optimizer)


def accumulated(world: World, synced: bool, **options: Any) -> Any:
    """With the gradients reduced after each of two passes, or after the second alone."""
    model = world.shard(network().float() if options else network(), **options)
    optimizer = AutoSGD(model, rule="paper", smoothing=0.5)
    for step in range(4):
        optimizer.zero_grad()
        for number, part in enumerate(world.parts(batches(step, step + 1))):
            if world.ranks:
                model.set_requires_gradient_sync(synced or number == 1)
            backward(model, *part)
        optimizer.step()
    return result(model, optimizer)


def with_bad_batch(world: World) -> Any:
    """The number that is not finite is in the last sample, which is on the last rank."""
    model = world.shard(network())
    optimizer = AutoAdam(model)
    world.train(model, optimizer, batches(0, 1))
    before = weights(model)
    ((x, y),) = batches(2)
    x[-1] = torch.inf
    world.train(model, optimizer, [(x, y)])
    assert all(torch.equal(weight, before[name]) for name, weight in weights(model).items())
    world.train(model, optimizer, batches(3))
    return result(model, optimizer)


def with_empty_parts(world: World) -> Any:
    """A batch of a single sample, so that all ranks but one have none."""
    model = world.shard(network())
    optimizer = AutoAdam(model, rule="paper", smoothing=0.5)
    single = [(x[:1], y[:1]) for x, y in batches(2)]
    world.train(model, optimizer, [*batches(0, 1), *single, *batches(3)], clip=0.01)
    return result(model, optimizer)


def replicated_with_empty_parts(world: World) -> Any:
    """Not sharded; the first batch may be empty, too."""
    model = DistributedDataParallel(network()) if world.ranks else network()
    optimizer = AutoAdam(model)
    single = [(x[:1], y[:1]) for x, y in batches(2)]
    world.train(model, optimizer, [*single, *batches(0, 1), *single, *batches(3)], clip=0.01)
    return result(model, optimizer)


def in_sequence(world: World) -> Any:
    """The samples are on the second axis, which the ranks find out together."""
    torch.manual_seed(0)
    model = world.shard(Sequences().double())
    optimizer = AutoAdam(model)
    for x, y, factor in world.parts(batches(*range(4))):
        optimizer.zero_grad()
        backward(model, torch.stack([x, x.flip(1), -x]), y, factor)
        optimizer.step()
    return result(model, optimizer)


def by_columns(world: World) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False)).double()
    model = world.shard(model, shard_placement_fn=lambda parameter: Shard(1))
    optimizer = AutoAdam(model)
    world.train(model, optimizer, batches(*range(4)))
    return result(model, optimizer)


def saved(world: World) -> Any:
    model = world.shard(network())
    optimizer = AutoAdam(model)
    world.train(model, optimizer, batches(*range(8)))
    if world.ranks == 2:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=world.folder / "checkpoint")
    world.train(model, optimizer, batches(*range(8, 12)))
    return result(model, optimizer)


def continued(world: World) -> Any:
    """From the state of an optimizer whose parameters were not sharded."""
    model = network()
    optimizer = AutoAdam(model)
    World(world.folder).train(model, optimizer, batches(*range(4)))
    state = optimizer.state_dict()
    optimizer.detach()
    again = AutoAdam(world.shard(model))
    again.load_state_dict(state)
    world.train(model, again, batches(*range(4, 8)))
    return result(model, again)


def gathered(world: World) -> Any:
    """Saved as whole tensors, and loaded again."""
    options = StateDictOptions(full_state_dict=True)
    model = world.shard(network())
    optimizer = AutoAdam(model)
    world.train(model, optimizer, batches(*range(4)))
    state = get_state_dict(model, optimizer, options=options)
    model = world.shard(network())
    optimizer = AutoAdam(model)
    set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1], options=options)
    world.train(model, optimizer, batches(*range(4, 8)))
    return result(model, optimizer)


def loaded(world: World) -> Any:
    """What two ranks saved, here on as many, on more or on one."""
    model = world.shard(network())
    optimizer = AutoAdam(model)
    state: Any = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=world.folder / "checkpoint", no_dist=not world.ranks)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    world.train(model, optimizer, batches(*range(8, 12)))
    return result(model, optimizer)


LONG: dict[str, Callable[[World], Any]] = {
    f"{kind} {rule}": functools.partial(long, kind=kind, rule=rule)
    for kind in ("sgd", "adam", "adagrad")
    for rule in ("robust", "paper")
}
CASES: dict[str, Callable[[World], Any]] = {
    **LONG,
    "sharing, sgd": functools.partial(sharing, kind="sgd"),
    "sharing, newton": functools.partial(sharing, kind="newton"),
    "residual": residual,
    "clipped": clipped,
    "accumulated": functools.partial(accumulated, synced=True),
    "accumulated, reduced once": functools.partial(accumulated, synced=False),
    "bad batch": with_bad_batch,
    "empty parts": with_empty_parts,
    "empty parts, DistributedDataParallel": replicated_with_empty_parts,
    "in sequence": in_sequence,
    "continued": continued,
    "gathered": gathered,
    "by columns": by_columns,
    "saved": saved,
    "loaded": loaded,
}
RUNS = {
    1: ["adagrad paper"],
    2: [
        "sgd robust", "adam paper", "sharing, sgd", "residual", "accumulated", "accumulated, reduced once", "bad batch",
        "empty parts", "empty parts, DistributedDataParallel", "in sequence", "by columns", "continued", "saved",
        "loaded",
    ],
    4: ["adam robust", "sharing, newton", "clipped", "empty parts", "gathered", "loaded"],
}  # fmt: skip


def rank(number: int, ranks: int, folder: Path) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # by torch 2.10, of its own checkpoints
    world = World(folder.parent, number, ranks)
    if ranks == 4:
        sharding.LARGEST = 100  # as if the model were large
    found = {name: CASES[name](world) for name in RUNS[ranks]}
    if ranks == 2:
        lower = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        found["bfloat16"] = accumulated(world, synced=True, mp_policy=lower)
        found["bfloat16, reduced once"] = accumulated(world, synced=False, mp_policy=lower)
    if ranks == 1:
        found["refusals"] = {name: refusal(ask, world) for name, ask in REFUSED.items()}
    torch.save(found, folder / f"{number}.pt")


# What is not supported.


def late(world: World) -> None:
    model = network()
    optimizer = AutoSGD(model)
    world.train(world.shard(model), optimizer, batches(0))


def late_in_part(world: World) -> None:
    model = network()
    optimizer = AutoSGD(model)
    fully_shard(model[0])
    world.train(model, optimizer, batches(0))


def in_part(world: World) -> None:
    model = network()
    fully_shard(model[0])
    AutoSGD(model)


def tensor_parallel(world: World) -> None:
    layer, mesh = nn.Linear(4, 4, bias=False), init_device_mesh("cpu", (1,))
    layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [Shard(0)]))
    AutoSGD(layer)


def two_axes(world: World) -> None:
    AutoSGD(world.shard(network(), mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))))


def first_generation(world: World) -> None:
    with warnings.catch_warnings(action="ignore"):
        AutoSGD(FullyShardedDataParallel(network(), device_id=torch.device("cpu")))


def factor(world: World) -> None:
    model = world.shard(network())
    model.set_gradient_divide_factor(2.0)
    world.train(model, AutoSGD(model), batches(0))


def first_empty(world: World) -> None:
    model = world.shard(network())
    world.train(model, AutoSGD(model), ((x[:0], y[:0]) for x, y in batches(0)))


REFUSED: dict[str, Callable[[World], Any]] = {
    "was sharded after the optimizer was made": late,
    "'0.scale' was sharded after": late_in_part,
    "'1.weight' is not sharded and others of the model are": in_part,
    "(tensor parallel, HSDP)": tensor_parallel,
    "use fully_shard with a mesh of one dimension": two_axes,
    "is wrapped in FullyShardedDataParallel": first_generation,
    "set_gradient_divide_factor(2.0)": factor,
    "has no samples on this rank": first_empty,
    "leave spread as it is": lambda world: AutoSGD(world.shard(network()), spread="passes"),
    "as in AutoSGD(model)": lambda world: AutoSGD(world.shard(network()).parameters()),
}


def refusal(ask: Callable[[World], Any], world: World) -> str:
    try:
        ask(world)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


Ran = Callable[[int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fully_shard")


@pytest.fixture(scope="module")
def ran(folder: Path) -> Ran:
    """What each rank found."""

    @functools.cache
    def run(ranks: int) -> list[dict[str, Any]]:
        if ranks == 4:
            run(2)  # which save what these load
        own = folder / str(ranks)
        own.mkdir()
        on_ranks(ranks, rank, own)
        return [torch.load(own / f"{number}.pt") for number in range(ranks)]

    return run


@pytest.mark.parametrize("ranks", RUNS)
def test_ranks_agree_bit_for_bit(ran: Ran, ranks: int) -> None:
    first, *others = ran(ranks)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0.0, atol=0.0)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of dcp.load in one process
@pytest.mark.parametrize(("ranks", "case"), [(ranks, case) for ranks, cases in RUNS.items() for case in cases])
def test_ranks_do_what_one_process_does(ran: Ran, folder: Path, ranks: int, case: str) -> None:
    """In weights, their average and what was chosen: to 1e-6 after 200 steps in float32, in float64 to 1e-10."""
    found, expected = ran(ranks)[0][case], CASES[case](World(folder))
    tolerance = 1e-6 if case in LONG else 1e-10
    for part in expected:
        # the noise is a difference of sums, with fewer digits than they have
        rtol, atol = (10 * tolerance, tolerance) if part == "noise" else (tolerance, tolerance)
        torch.testing.assert_close(found[part], expected[part], rtol=rtol, atol=atol)


def test_a_checkpoint_resumes_bit_by_bit(ran: Ran) -> None:
    found = ran(2)[0]
    torch.testing.assert_close(found["loaded"], found["saved"], rtol=0.0, atol=0.0)


def test_lower_precision_of_the_passes(ran: Ran) -> None:
    """As in float32 to the precision of bfloat16, and no sample is lost while gradients wait to be reduced."""
    found = ran(2)[0]
    for case in ("bfloat16", "bfloat16, reduced once"):
        torch.testing.assert_close(found[case], found["accumulated"], rtol=0.05, atol=0.02, check_dtype=False)


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_not_supported_is_refused_by_name(ran: Ran, said: str) -> None:
    assert said in ran(1)[0]["refusals"][said]
