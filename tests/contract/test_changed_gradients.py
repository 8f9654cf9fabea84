"""What a loop does to the gradients between backward() and step(), it does to their spread too.

The noise V/<g,g> is a ratio: it must not see a common factor. Each test compares with the same run without the change,
or with the change applied to the loss, where nothing has to be recovered.
"""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt import AutoAdaGrad, AutoAdam, AutoSGD

OPTIMIZERS = [AutoSGD, AutoAdam, AutoAdaGrad]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def data(steps: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(5, 6, dtype=torch.float64), torch.randint(0, 3, (5,))) for _ in range(steps)]


def train(
    make: type,
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    change: Callable[[nn.Module], None],
    scale: float = 1,
) -> dict[str, list[float]]:
    """The noise of every parameter at every step."""
    optimizer = make(model)
    noises: dict[str, list[float]] = {}
    for x, y in batches:
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) * scale).backward()
        change(model)
        optimizer.step()
        for name, chosen in optimizer.tuned().items():
            noises.setdefault(name, []).append(chosen.noise)
    return noises


def scaled(factor: float) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(factor)

    return change


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("factor", [1e-4, 0.3, 65536.0])
def test_scaling_the_gradient_is_scaling_the_loss(make: type, factor: float) -> None:
    plain = network()
    changed = copy.deepcopy(plain)
    batches = data(8)
    wanted = train(make, plain, batches, lambda _: None, scale=factor)
    found = train(make, changed, batches, scaled(factor))
    for name in wanted:
        assert found[name] == pytest.approx(wanted[name], rel=1e-9)
    for a, b in zip(plain.parameters(), changed.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_clipping_by_norm_leaves_the_noise_alone(make: type) -> None:
    """On the first step, from the same weights: a clipped gradient is no noisier than it was."""
    plain = network()
    clipped = copy.deepcopy(plain)
    batches = data(1)
    wanted = train(make, plain, batches, lambda _: None)
    found = train(make, clipped, batches, lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1) and None)
    for name in wanted:  # Adam's and AdaGrad's metric scales with |g|, but for ε: 1e-8 beside the elements of g
        assert found[name] == pytest.approx(wanted[name], rel=1e-9 if make is AutoSGD else 1e-3)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_untouched_gradients_are_bit_equal(make: type) -> None:
    """Recovering a factor of one must be exactly nothing."""
    plain = network()
    other = copy.deepcopy(plain)
    batches = data(5)
    train(make, plain, batches, lambda _: None)
    train(make, other, batches, scaled(1.0))
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(make: type, unscale: bool) -> None:
    """A GradScaler multiplies the loss and divides the gradient again, by itself or when asked to before clipping."""
    plain = network().float()
    other = copy.deepcopy(plain)
    batches = [(x.float(), y) for x, y in data(6)]
    wanted = train(make, plain, batches, lambda _: None)
    optimizer, scaler = make(other), torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for number, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(other(x), y)).backward()
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(other.parameters(), 1e6)
        scaler.step(optimizer)
        scaler.update()
        for name, chosen in optimizer.tuned().items():
            assert chosen.noise == pytest.approx(wanted[name][number], rel=1e-3)  # float32, a few steps on
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_step_that_the_scaler_skips_leaves_nothing_behind(make: type) -> None:
    """On an overflow GradScaler does not call step(): the next step must not see the statistics of the bad batch."""
    plain = network().float()
    other = copy.deepcopy(plain)
    batches = [(x.float(), y) for x, y in data(4)]
    train(make, plain, batches, lambda _: None)
    optimizer, scaler = make(other), torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1000)
    bad = (torch.full((5, 6), torch.inf), torch.zeros(5, dtype=torch.int64))
    for number, (x, y) in enumerate([*batches[:2], bad, *batches[2:]]):
        optimizer.zero_grad() if number % 2 else other.zero_grad()
        scaler.scale(F.cross_entropy(other(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)  # the scale halves at the overflow: rounding alone


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_clipping_after_accumulation(make: type) -> None:
    """The factor is that of the whole gradient, not of the last micro-batch."""
    plain = network()
    other = copy.deepcopy(plain)
    (first, second) = data(2)
    found = []
    for model, factor in ((plain, 1.0), (other, 0.5)):
        optimizer = make(model)
        for x, y in (first, second):
            F.cross_entropy(model(x), y).backward()
        scaled(factor)(model)
        optimizer.step()
        found.append([chosen.noise for chosen in optimizer.tuned().values()])
    assert found[1] == pytest.approx(found[0], rel=1e-9 if make is AutoSGD else 1e-3)  # ε again


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_change_after_a_step_that_was_refused(make: type) -> None:
    """What the step saw of the gradients before it was refused is not what the next one goes by."""
    torch.manual_seed(0)
    (x, y), found = data(1)[0], []
    start = network()
    for refused in (False, True):
        model = copy.deepcopy(start)
        optimizer = make(model, param_groups=[{"params": list(layer.parameters())} for layer in (model[0], model[2])])
        F.cross_entropy(model(x), y).backward()
        if refused:
            whole, bias = model[2].bias.grad, model[2].bias
            bias.grad = whole.to_sparse()
            with pytest.raises(RuntimeError, match="sparse"):
                optimizer.step()
            bias.grad = whole
        scaled(0.01)(model)
        optimizer.step()
        found.append({name: chosen.noise for name, chosen in optimizer.tuned().items()})
    assert found[0] == pytest.approx(found[1], rel=1e-12)
