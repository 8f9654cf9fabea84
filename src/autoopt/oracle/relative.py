"""The robust rule: a step relative to the size of the weights; docs/math.md derives it and justifies the constants.

Everything is a ratio of quantities with the same unit, so that neither the scale of the loss nor that of the metric
changes a step.
"""

import torch
from torch import Tensor

MOMENTUM = 0.9  # β of the gradient estimate
SMOOTHING = 0.99  # of sizes and noise: the last hundred steps
LARGEST = 0.008  # relative step that no tensor exceeds
DECAY = 0.2  # the relative step after n steps is at most DECAY/√n
WARM_UP = 100  # steps over which the relative step rises to its size
FLOOR = 0.05  # root mean square weight that a tensor is taken to have at least: biases start at zero
WINDOW = 4  # the average of the weights is over about the last 1/(WINDOW + 1) of the run
STEADY = 0.3  # alignment over noise from which on the weights travel: six deviations of the noise along one direction
FIRST = 10  # steps before anything is said of that


def relative_step(count: Tensor, age: Tensor) -> Tensor:
    """ρ, the length of a step over that of the weights.

    Args:
        count: n, steps since the data last changed.
        age: t, steps altogether.
    """
    return (DECAY * count.clamp_min(1).rsqrt()).clamp_max(LARGEST) * (age / WARM_UP).clamp_max(1)


def rate(ratio: Tensor, weights: Tensor, elements: Tensor, size: Tensor, smallest: float) -> Tensor:
    """α such that the step α·d has the length ρ·|w|, with |w| at least that of FLOOR in every element.

    It is zero where the direction is so short that its squares were lost to rounding, and with them its length.

    Args:
        ratio: ρ.
        weights: |w|².
        elements: how many there are.
        size: the mean square length of the direction d over the last steps.
        smallest: the square of an element that is still exact.
    """
    alpha = ratio * torch.maximum(weights, FLOOR**2 * elements).sqrt() / size.sqrt()
    return torch.where(size > smallest * elements, alpha, 0.0)


def travels(alignment: Tensor, noise: Tensor, age: Tensor) -> Tensor:
    """Whether the weights travel, one answer for all units: after a shift of the data, and at the very start.

    Around a minimum successive gradients share nothing but their noise, which is independent: <g_t, u_{t-1}> is zero or
    a little below on average. On the way to another minimum they share the slope.

    Args:
        alignment: <g_t, u_{t-1}> of each unit, averaged over the last steps.
        noise: V̂ of each unit, averaged; before this step.
        age: t of each unit.
    """
    known = (noise > 0) & (age > FIRST)
    ratio = torch.where(known, alignment / noise, 0.0).sum() / known.sum().clamp_min(1)
    return ratio > STEADY


def newest(count: Tensor) -> Tensor:
    """The weight of the newest weights in their average: 1 at first, then WINDOW + 1 times that of a plain mean."""
    return (WINDOW + 1) / (count.clamp_min(1) + WINDOW)
