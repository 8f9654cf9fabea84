"""What the vectorised engine promises: a run in a chunk is the same run alone, and is what plain PyTorch computes."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from engine_tools import NET, data, plain_loop
from torch import nn

from autoopt_lab.engine import RULES, Conv, Flatten, Linear, MaxPool, Net, Plan, Run, launches, random, train
from autoopt_lab.engine.reference import Reference, gradients
from autoopt_lab.engine.train import Chunk

PLAN = Plan("sgd", batch=8, epochs=2, average=0.1)


def run_options(optimizer: str) -> list[Mapping[str, float]]:
    """Four settings of every optimizer's own options."""
    if optimizer.startswith("auto"):
        return [{"lr": value} for value in (1.0, 0.5, 2.0, 0.1)]
    if optimizer.startswith("paper"):
        return [{"smoothing": value} for value in (0.9, 0.99, 0.5, 0.999)]
    return [{"lr": rate, "momentum": momentum} for rate in (0.3, 0.01) for momentum in (0.0, 0.9)]


def test_a_net_gets_pytorchs_default_initialisation_from_its_seed() -> None:
    torch.manual_seed(3)
    expected = NET.module().state_dict()
    found = NET.unpack(NET.initial(3))
    assert list(found) == list(expected) == list(NET.names)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("moments", [False, True])
def test_gradients_and_second_moments_are_those_of_autograd_sample_by_sample(moments: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(6, 2, 11, 11, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 4, 2, 1, 1, 3])
    module = NET.module().double().eval()
    per_sample = []
    for image, label in zip(images, labels, strict=True):
        module.zero_grad()
        nn.functional.nll_loss(module(image[None]), label[None]).backward()
        grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        per_sample.append(NET.pack(grads) / 6)
    contributions = torch.stack(per_sample)
    found = gradients(NET, NET.pack(module.state_dict()).detach(), images.permute(0, 2, 3, 1), labels, None, moments)
    torch.testing.assert_close(found.gradient, contributions.sum(0), rtol=1e-12, atol=1e-15)
    if moments:
        torch.testing.assert_close(found.second, contributions.square().sum(0), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("optimizer", RULES)
def test_a_run_in_a_chunk_equals_the_run_alone_to_the_last_bit(optimizer: str) -> None:
    plan = replace(PLAN, optimizer=optimizer)
    runs = [Run(seed, options) for options in run_options(optimizer) for seed in (1, 2)]
    together = train(NET, data(), plan, runs, dtype=torch.float64)
    for run, among in zip(runs, together, strict=True):
        (alone,) = train(NET, data(), plan, [run], dtype=torch.float64)
        assert torch.equal(alone.weights, among.weights)
        assert (alone.test_error, alone.train_loss) == (among.test_error, among.train_loss)
        assert alone.average_test_error == among.average_test_error
        if alone.trace is not None and among.trace is not None:
            torch.testing.assert_close(alone.trace, among.trace, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's compiler imports it
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.skipif(
    torch.__version__.startswith(("2.10.", "2.11.")), reason="auto-adam compiled by these on a CPU has other last bits"
)
@pytest.mark.parametrize("optimizer", ["adam", "auto-adam"])
def test_a_run_with_a_compiled_update_equals_the_run_alone_to_the_last_bit(optimizer: str) -> None:
    plan = replace(PLAN, optimizer=optimizer)
    runs = [Run(seed, options) for seed, options in enumerate(run_options(optimizer))]
    together = train(NET, data(), plan, runs, compile_update=True)
    (alone,) = train(NET, data(), plan, runs[2:3], compile_update=True)
    assert torch.equal(alone.weights, together[2].weights)
    plain = train(NET, data(), plan, runs)
    torch.testing.assert_close(together[2].weights, plain[2].weights, rtol=1e-3, atol=1e-5)


def test_a_chunk_that_is_done_with_gives_its_memory_back_at_once() -> None:
    chunk = Chunk(NET, data(), PLAN, [Run(1)], Reference(NET), "cpu", torch.float64)
    chunk.epoch(0)
    gone = weakref.ref(chunk)
    gc.disable()
    try:
        del chunk
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("outputs", [6, 20, 64])
def test_a_convolutions_weight_gradient_has_a_column_for_every_candidate(outputs: int) -> None:
    stage = Net((3, 32, 32), (Conv(outputs, 5), MaxPool(), Flatten(), Linear(10))).stages[0]
    assert launches.conv_weight_gradient(stage, samples=16, moments=False)["BQ"] >= 4 * outputs


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adagrad"])
def test_a_diverging_run_changes_no_bit_of_its_neighbours(optimizer: str) -> None:
    plan = replace(PLAN, optimizer=optimizer)
    calm = [Run(1, {"lr": 0.01}), Run(2, {"lr": 0.1})]
    wild = Run(3, {"lr": 1e200})
    quiet = train(NET, data(), plan, [calm[0], Run(3, {"lr": 0.01}), calm[1]], dtype=torch.float64)
    loud = train(NET, data(), plan, [calm[0], wild, calm[1]], dtype=torch.float64)
    assert not loud[1].weights.isfinite().all()
    assert loud[1].test_error[-1] != loud[1].test_error[-1]  # NaN, not the chance level
    for k in (0, 2):
        assert torch.equal(quiet[k].weights, loud[k].weights)
        assert quiet[k].test_error == loud[k].test_error


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.8, dampening=0.8),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, betas=(0.9, 0.99), eps=1e-8),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05, eps=1e-10),
}
OPTIONS = {"sgd": {"lr": 0.2, "momentum": 0.8}, "adam": {"lr": 0.01}, "adagrad": {"lr": 0.05}}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_equals_a_plain_loop_with_torchs_optimizer(optimizer: str) -> None:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        optim = OPTIMIZERS[optimizer](model)
        if optimizer == "sgd":  # torch's first step is undamped; ours starts from a zero average
            for p in model.parameters():
                optim.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return optim

    (found,) = train(NET, data(), replace(PLAN, optimizer=optimizer), [Run(7, OPTIONS[optimizer])], dtype=torch.float64)
    model, _ = plain_loop(data(), PLAN, 7, build)
    torch.testing.assert_close(found.weights, NET.pack(model.state_dict()), rtol=1e-9, atol=1e-12)
    model.eval()
    assert found.test_error[-1] == (model(data().test_inputs).argmax(1) != data().test_targets).double().mean()


def test_labels_are_permuted_from_the_shift_on() -> None:
    plan = Plan("sgd", batch=8, epochs=2, shift_at=1)
    shifted = data()
    (found,) = train(NET, shifted, plan, [Run(1, {"lr": 0.0})], dtype=torch.float64)
    assert shifted.train_targets.equal(data().train_targets)  # the caller's labels stay
    moved = replace(shifted, test_targets=(3 * shifted.test_targets + 1) % NET.classes)
    (expected,) = train(NET, moved, replace(plan, shift_at=None), [Run(1, {"lr": 0.0})], dtype=torch.float64)
    assert found.test_error == [
        train(NET, data(), plan, [Run(1, {"lr": 0.0})])[0].test_error[0],
        expected.test_error[1],
    ]
    assert found.test_loss[0] != found.test_loss[1]


@pytest.mark.parametrize("optimizer", ["auto-sgd", "paper-sgd"])
def test_automatic_runs_record_rate_momentum_and_noise_of_every_tensor(optimizer: str) -> None:
    plan = Plan(optimizer, batch=8, epochs=2, trace_points=4)
    (found,) = train(NET, data(), plan, [Run(1)], dtype=torch.float64)
    assert found.trace is not None
    assert found.trace.shape == (4, 3, len(NET.names))
    assert found.trace_steps == [1, 4, 7, 10]
    rate, momentum, noise = found.trace.unbind(1)
    assert (rate > 0).all()
    assert ((momentum >= 0) & (momentum < 1)).all()
    assert (noise >= 0).all()


def test_a_rules_own_average_comes_before_the_plans() -> None:
    def averaged(optimizer: str, average: float | None) -> torch.Tensor | None:
        (found,) = train(NET, data(), replace(PLAN, optimizer=optimizer, average=average), [Run(1)])
        assert (found.averaged_weights is None) == (found.average_test_error == [])
        return found.averaged_weights

    own, with_plan = averaged("auto-sgd", None), averaged("auto-sgd", 0.1)
    assert own is not None
    assert with_plan is not None
    assert own.equal(with_plan)
    assert averaged("paper-sgd", None) is None
    assert averaged("paper-sgd", 0.1) is not None


def test_orders_are_permutations_and_dropout_has_its_rate() -> None:
    seeds = torch.tensor([0, 1, 2**40 + 5])
    orders = random.orders(seeds, 3, 1000)
    assert orders.sort(1).values.equal(torch.arange(1000).expand(3, -1))
    assert not orders[0].equal(orders[1])
    assert not orders[0].equal(random.orders(seeds, 4, 1000)[0])
    factors = random.dropout_factors(seeds, torch.tensor(11), 5000, torch.tensor([0.5, 0.2, 0.9]), torch.float64)
    assert factors.unique().tolist() == pytest.approx([0, 1.25, 2, 10])
    assert (factors == 0).double().mean((0, 1)).tolist() == pytest.approx([0.5, 0.2, 0.9], abs=0.015)
    assert factors.mean((0, 1)).tolist() == pytest.approx([1, 1, 1], abs=0.1)


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (lambda: Net((1, 8, 8), (Linear(3),)), "put a Flatten before it"),
        (lambda: Net((1, 4, 4), (Conv(2, 5), Linear(3))), "5 x 5 kernel does not fit a 4 x 4 image"),
        (lambda: Net((1, 8, 8), (Conv(2, 5),)), "last layer must be a Linear"),
    ],
)
def test_a_net_that_cannot_be_says_why(net: Callable[[], Net], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _ = net().stages


def test_unknown_names_are_refused_with_the_choice() -> None:
    with pytest.raises(ValueError, match="no optimizer 'sdg': choose one of sgd, adam"):
        train(NET, data(), replace(PLAN, optimizer="sdg"), [Run(1)])
    with pytest.raises(ValueError, match="sgd has no option 'rate': it knows lr, momentum"):
        train(NET, data(), PLAN, [Run(1, {"rate": 0.1})])
    with pytest.raises(ValueError, match="a batch of 100 does not fit 48 training samples"):
        train(NET, data(), replace(PLAN, batch=100), [Run(1)])
