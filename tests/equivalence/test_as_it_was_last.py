"""A layer that is used as it was last is seen as if everything had been asked of it again, whatever the loop does.

Each loop below is a step that is not like those before it. A run with that step in its middle is the same, statistics
and errors, with and without what `glance.as_usual` spares it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoopt import AutoSGD
from autoopt.capture import glance, inputs, sampled

N = 6


class Net(nn.Module):
    """Layers that are looked at by one sample, one of them used in the way that `use` says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.middle = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1)
        self.linear, self.last, self.head = (
            nn.Linear(16, 5),
            nn.LayerNorm(5),
            nn.Linear(20, 2),
        )  # this one by all samples
        self.use = "once"

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.used(torch.tanh(self.norm(self.first(x)))))

    def used(self, h: Tensor) -> Tensor:
        match self.use:
            case "checkpoint":
                return checkpoint(self.middle, h, use_reentrant=False)
            case "reentrant checkpoint":
                return checkpoint(self.middle, h, use_reentrant=True)
            case "twice":
                return self.middle(self.middle(h))
            case "function":
                return F.conv2d(self.middle(h), self.middle.weight)
            case "skipped":
                return h
            case _:
                return self.middle(h)

    def end(self, h: Tensor) -> Tensor:
        return self.head(self.last(self.linear(h.flatten(2))).flatten(1))


def images(seed: int, samples: int = N) -> Tensor:
    return torch.randn(samples, 3, 4, 4, generator=torch.Generator().manual_seed(seed))


def loss(model: Net, seed: int, samples: int = N) -> Tensor:
    return model(images(seed, samples)).square().mean()


def ordinary(model: Net, opt: AutoSGD, seed: int) -> None:
    loss(model, seed).backward()


def another_use(model: Net, opt: AutoSGD, seed: int, *, use: str) -> None:
    model.use = use
    loss(model, seed).backward()
    model.use = "once"


def two_passes_in_one(model: Net, opt: AutoSGD, seed: int, *, samples: int = N) -> None:
    (loss(model, seed) + loss(model, seed + 50, samples)).backward()


def accumulated(model: Net, opt: AutoSGD, seed: int, *, samples: int = N) -> None:
    for number in (N, samples):
        loss(model, seed, number).backward()


def through_one_graph(model: Net, opt: AutoSGD, seed: int, *, times: int) -> None:
    end = loss(model, seed)
    for _ in range(times):
        end.backward(retain_graph=True)


def differentiated_again(model: Net, opt: AutoSGD, seed: int) -> None:
    loss(model, seed).backward(create_graph=True, retain_graph=False)


def gradients_given_back(model: Net, opt: AutoSGD, seed: int) -> None:
    end = loss(model, seed)
    torch.autograd.grad(end, list(model.parameters()), retain_graph=True)
    end.backward()


def gradient_of_the_input(model: Net, opt: AutoSGD, seed: int) -> None:
    x = images(seed).requires_grad_()
    end = model(x).square().mean()
    torch.autograd.grad(end, x, retain_graph=True)
    end.backward()


def to_some(model: Net, opt: AutoSGD, seed: int, *, of: tuple[str, ...]) -> None:
    loss(model, seed).backward(inputs=[p for name in of for p in model.get_submodule(name).parameters()])


def another_pass_is_held(model: Net, opt: AutoSGD, seed: int) -> None:
    held = model(images(seed + 9))
    loss(model, seed).backward()
    del held


def frozen_meanwhile(model: Net, opt: AutoSGD, seed: int) -> None:
    end = loss(model, seed)
    model.middle.weight.requires_grad_(False)
    end.backward()
    model.middle.weight.requires_grad_(True)


def frozen(model: Net, opt: AutoSGD, seed: int) -> None:
    model.middle.weight.requires_grad_(False)
    loss(model, seed).backward()
    model.middle.weight.requires_grad_(True)


def another_parameter(model: Net, opt: AutoSGD, seed: int) -> None:
    model.middle.weight = nn.Parameter(model.middle.weight.detach().clone())
    loss(model, seed).backward()


def without_gradients_first(model: Net, opt: AutoSGD, seed: int) -> None:
    with torch.no_grad():
        model(images(seed))
    loss(model, seed).backward()


def one_layer_more(model: Net, opt: AutoSGD, seed: int) -> None:
    loss(model, seed).backward()
    model.middle(torch.ones(N, 4, 4, 4)).sum().backward()


def saved_elsewhere(model: Net, opt: AutoSGD, seed: int) -> None:
    with torch.autograd.graph.save_on_cpu():
        end = loss(model, seed)
    end.backward()


def computed_weights(model: Net, opt: AutoSGD, seed: int) -> None:
    parameters = {name: parameter * 1.0 for name, parameter in model.named_parameters()}
    torch.func.functional_call(model, parameters, (images(seed),)).square().mean().backward()


def all_samples(model: Net, opt: AutoSGD, seed: int) -> None:
    opt.param_groups[0]["exact"] = True
    opt.add_param_group({"params": []})  # has the options read again
    loss(model, seed).backward()


def in_lower_precision(model: Net, opt: AutoSGD, seed: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        y = model(images(seed))
    y.float().square().mean().backward()


def changed_in_place(model: Net, opt: AutoSGD, seed: int) -> None:
    h = model.first(images(seed)).mul_(2)
    model.end(model.middle(model.norm(h))).square().mean().backward()


def cleared_by_zeros(model: Net, opt: AutoSGD, seed: int) -> None:
    opt.zero_grad(set_to_none=False)
    loss(model, seed).backward()


def after_an_empty_batch(model: Net, opt: AutoSGD, seed: int) -> None:
    model(images(seed)[:0]).square().sum().backward()
    loss(model, seed).backward()


def after_a_pass_that_failed(model: Net, opt: AutoSGD, seed: int) -> None:
    def fail(gradient: Tensor) -> None:
        raise ZeroDivisionError

    h = model.norm(model.first(images(seed)))
    h.register_hook(fail)
    with contextlib.suppress(ZeroDivisionError):
        model.end(model.middle(h)).square().mean().backward()
    opt.zero_grad()
    loss(model, seed).backward()


Loop = Callable[[Net, AutoSGD, int], None]
LOOPS: dict[str, Loop] = {
    **{
        f"a layer's use: {use}": functools.partial(another_use, use=use)
        for use in ("checkpoint", "reentrant checkpoint", "twice", "function", "skipped")
    },
    "two passes in one": two_passes_in_one,
    "two passes in one, of two sizes": functools.partial(two_passes_in_one, samples=4),
    "accumulated": accumulated,
    "accumulated, of two sizes": functools.partial(accumulated, samples=4),
    "another size": lambda model, opt, seed: loss(model, seed, 4).backward(),
    "retained": functools.partial(through_one_graph, times=1),
    "twice through one graph": functools.partial(through_one_graph, times=2),
    "to the middle and the end": functools.partial(to_some, of=("middle", "last")),
    "to the end": functools.partial(to_some, of=("last",)),
    **{
        loop.__name__.replace("_", " "): loop
        for loop in (
            differentiated_again, gradients_given_back, gradient_of_the_input, another_pass_is_held, frozen_meanwhile,
            frozen, another_parameter, without_gradients_first, one_layer_more, saved_elsewhere, computed_weights,
            all_samples, in_lower_precision, changed_in_place, cleared_by_zeros, after_an_empty_batch,
            after_a_pass_that_failed,
        )
    },
}  # fmt: skip


def run(loop: Loop, **options: Any) -> list[Any]:
    """Of each step: N and Σ c² of every parameter, or the error."""
    torch.manual_seed(0)
    model = Net()
    opt, seen = AutoSGD(model, **options), []
    for number in range(8):
        try:
            opt.zero_grad()
            (loop if number in (4, 5) else ordinary)(model, opt, number)
            source = opt._now.source
            found = {name: source.second_moment(name) for name, _ in model.named_parameters()}
            seen.append({name: (square, source.samples(name)) for name, square in found.items() if square is not None})
            opt.step()
        except RuntimeError as error:
            seen.append(str(error))
            opt.zero_grad()
    return seen


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_nothing_is_lost(name: str, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "ROOM", 0)  # each layer is large, ...
    monkeypatch.setattr(inputs, "LOOKS", 1)  # ... and soon known
    spared: list[bool] = []
    as_usual = glance.as_usual

    def noted(site: Any, x: Tensor) -> Any:
        some = as_usual(site, x)
        spared.append(some is not None)
        return some

    monkeypatch.setattr(glance, "as_usual", noted)
    found = run(LOOPS[name], measure_every=every)
    assert any(spared)
    monkeypatch.setattr(glance, "as_usual", lambda site, x: None)
    wanted = run(LOOPS[name], measure_every=every)
    for ours, all_asked in zip(found, wanted, strict=True):
        if isinstance(all_asked, str):
            assert ours == all_asked
            continue
        assert ours.keys() == all_asked.keys()
        for parameter, (square, samples) in all_asked.items():
            assert ours[parameter][1] == samples
            torch.testing.assert_close(ours[parameter][0], square, rtol=1e-5, atol=1e-12)  # summed in another order
