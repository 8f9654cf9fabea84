"""Advice on the batch size, against problems whose noise scale is known and whose steps can be simulated."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from autoopt import AutoAdaGrad, AutoSGD, Tuned
from autoopt.watching import Advice, advise, noise_scale

ELEMENTS = 64


def measured(make: Any, scale: float, samples: int, steps: int = 500) -> list[dict[str, Tuned]]:
    """A loss that is linear in the weights: sample i's gradient is x_i, normal with a known mean and spread."""
    generator = torch.Generator().manual_seed(5)
    mean = torch.ones(ELEMENTS)  # |G|² = ELEMENTS, so that a spread of σ² in each element is a noise scale of σ²
    model = nn.Linear(ELEMENTS, 1, bias=False)
    optimizer = make(model)
    history = []
    for _ in range(steps):
        optimizer.zero_grad()
        model(mean + math.sqrt(scale) * torch.randn(samples, ELEMENTS, generator=generator)).mean().backward()
        optimizer.step()
        history.append(optimizer.tuned())
    return history[steps // 4 :]


@pytest.mark.parametrize("make", [AutoSGD, AutoAdaGrad])
@pytest.mark.parametrize(("scale", "samples"), [(3.0, 32), (32.0, 32), (300.0, 32), (32.0, 4)])
def test_the_noise_scale_is_found_whatever_the_batch_size(make: Any, scale: float, samples: int) -> None:
    """AdaGrad's metric, after its first steps, is the same for all elements here, and cancels."""
    advice = advise(measured(make, scale, samples), samples)
    assert advice.noise_scale == pytest.approx(scale, rel=0.15)


def test_pure_noise_has_no_scale() -> None:
    assert noise_scale([1.5, 1.2, 0.9], 32) == math.inf
    advice = Advice(32, math.inf)
    assert (advice.lost_to_noise, advice.samples_wasted) == (1.0, 0.0)
    assert "no signal above the noise" in str(advice)


@pytest.mark.parametrize("samples", [4, 16, 64])
def test_lost_and_wasted_are_what_a_simulated_step_loses_and_wastes(samples: int) -> None:
    """The loss |w|²/2 with noisy gradients w + ξ: many tries of the best step from one place."""
    generator = torch.Generator().manual_seed(6)
    weights, scale, tries = torch.ones(ELEMENTS, dtype=torch.float64), 16.0, 4_000
    noise = torch.randn(tries, ELEMENTS, generator=generator, dtype=torch.float64) * math.sqrt(scale / samples)
    gradients = weights + noise
    lengths = torch.linspace(0, 1, 101, dtype=torch.float64)  # the best of these, without knowing any formula
    before = weights.square().sum() / 2
    after = torch.stack([(weights - length * gradients).square().sum(1).mean() / 2 for length in lengths])
    gain = (before - after.min()).item()

    advice = Advice(samples, scale)
    assert gain / before.item() == pytest.approx(1 - advice.lost_to_noise, abs=0.01)
    per_sample, best = gain / samples, before.item() / scale  # of the smallest batches
    assert per_sample / best == pytest.approx(1 - advice.samples_wasted, abs=0.01)


def test_the_words_say_what_the_other_batch_size_costs() -> None:
    assert str(Advice(32, 128.0)) == (
        "batch size 32 loses 80% of each step to noise, 128 would lose 50%: 0.4 times the steps, 1.6 times the samples"
    )
    assert str(Advice(512, 128.0)) == (
        "batch size 512 wastes 80% of its samples, 128 would waste 50%: 1.6 times the steps, 0.4 times the samples"
    )
    assert str(Advice(100, 128.0)) == "batch size 100 suits the noise scale of 128"


def test_the_layer_in_the_middle_decides_and_unknown_noise_does_not_count() -> None:
    def tuned(noise: float) -> Tuned:
        return Tuned(lr=1.0, momentum=0.0, noise=noise)

    history = [{"a": tuned(0.5), "b": tuned(0.8), "c": tuned(0.9), "d": tuned(math.nan)}]
    assert advise(history, 10).noise_scale == pytest.approx(40.0)
    with pytest.raises(ValueError, match="no noise was measured yet"):
        advise([{"d": tuned(math.nan)}], 10)
    with pytest.raises(ValueError, match="at least 2"):
        advise(history, 1)
