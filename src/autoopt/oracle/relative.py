"""The robust rule: a step relative to the size of the weights; docs/math.md derives it and justifies the constants.

Everything is a ratio of quantities with the same unit, so that neither the scale of the loss nor that of the metric
changes a step.
"""

import torch
from torch import Tensor

MOMENTUM = 0.9  # β of the gradient estimate while the data stays what it is
LIGHT = 0.85  # β after it has changed: the estimate is of what it was
SMOOTHING = 0.99  # of sizes and noise: the last hundred steps
LARGEST = 0.006  # relative step of the usual length that no tensor exceeds, but at the start
EARLY = 0.009  # that it does not exceed at the start, where
SIGNAL = 0.06  # it is at most this times s^1.5, s being the share of signal in the gradient
DECAY = 0.2  # the relative step after n steps is at most DECAY/√n, but less where
ENOUGH = 0.03  # s is below this: in proportion to its root,
LEAST = 0.5  # down to this part; and more where
CLEAR = 0.15  # s is above this: in proportion to its root,
MOST = 1.5  # up to so many times
WORST = -1.0  # share of signal that a unit has at least: where all that samples add cancels, V̂/<g, g> has no bound
WARM_UP = 100  # steps over which the relative step rises to its size
LONGEST = 1.6  # no direction counts as longer than so many times its usual length: gradients jump when the data shifts
FLOOR = 0.05  # root mean square weight that a tensor is taken to have at least: biases start at zero
SMALL = 0.5  # root mean square of data; the weight that takes smaller data is taken to be larger than it is,
ENLARGED = 7  # by at most so many powers of two: what is nearly zero may be so in the first batch alone
GROWTH = 2  # and at most so many times what it had at the start: noise makes weights grow, and must not feed on that
WINDOW = 4  # the average of the weights is over about the last 1/(WINDOW + 1) of the run
STEADY = 0.3  # alignment over noise from which on the weights travel: six deviations of the noise along one direction
FIRST = 10  # steps before anything is said of that
USUAL = 100  # steps before it is known how large an alignment is usual


def signal(variance: Tensor, gradient: Tensor, known: Tensor) -> Tensor:
    """s, the share of signal in the gradient: 1 - V̂/<g, g>, in the mean over the units of which that is known.

    One answer for all units: that of one is mostly noise, as few samples are looked at in a large layer, and that of a
    bias before BatchNorm, whose gradient is nothing but rounding, is anything. ENOUGH where nothing is known.

    Args:
        variance: V̂ of each unit, averaged.
        gradient: <g, g> of each unit, averaged.
        known: which units take this step, and had their V̂ measured at some time.
    """
    known = known & (gradient > 0)
    return torch.where(known.any(), _mean((1 - variance / gradient).clamp_min(WORST), known), ENOUGH)


def momentum(count: Tensor, age: Tensor) -> Tensor:
    """β, from LIGHT when the data has just changed to MOMENTUM when it never did.

    Args:
        count: n, steps since the data last changed.
        age: t, steps altogether.
    """
    return LIGHT + (MOMENTUM - LIGHT) * (count / age)


def reach(beta: Tensor) -> Tensor:
    """What to multiply a step by for noise to carry the weights as far as with β = MOMENTUM.

    k steps of one length along an estimate that is all noise lead √(k (1+β)/(1-β)) such lengths away.
    """
    return ((1 - beta) / (1 + beta) * ((1 + MOMENTUM) / (1 - MOMENTUM))).sqrt()


def relative_step(count: Tensor, age: Tensor, share: Tensor) -> Tensor:
    """ρ, the length of a step of the usual length over that of the weights: min(ρ₁, c/√n) · min(1, t/WARM_UP).

    ρ₁ is LARGEST, but for the start, while DECAY/√t is larger. c is DECAY, less where s is small, more where it is
    large.

    Args:
        count: n, steps since the data last changed.
        age: t, steps altogether.
        share: s, as `signal` says.
    """
    root = share.clamp_min(0).sqrt()
    largest = torch.minimum(DECAY * age.rsqrt(), SIGNAL * root**3).clamp(LARGEST, EARLY)
    decay = DECAY * (root / ENOUGH**0.5).clamp(LEAST, 1) * (root / CLEAR**0.5).clamp(1, MOST)
    return torch.minimum(decay * count.rsqrt(), largest) * (age / WARM_UP).clamp_max(1)  # n < 1: ρ₁ too


def enlarged(inputs: Tensor) -> Tensor:
    """By how much the square of a weight that takes data is to be larger: about 100 times for 0.05.

    The nearest power of 4, so that it hardly depends on which samples are in the batch that is looked at.

    Args:
        inputs: their mean square.
    """
    return 4.0 ** (SMALL**2 / inputs).log2().div(2).round().clamp(0, ENLARGED)


def rate(
    ratio: Tensor,
    weights: Tensor,
    start: Tensor,
    elements: Tensor,
    enlarged: Tensor,
    size: Tensor,
    now: Tensor,
    smallest: float,
) -> Tensor:
    """α such that a step α·d of the usual length has the length ρ·|w|, with |w| kept between two bounds.

    |w| is taken to be at least that of FLOOR in every element, and at most GROWTH times what it was at the start; where
    inputs are small, at least what they ask for, and at most GROWTH times that. A step of more than LONGEST times the
    usual length is shortened to that.

    It is zero where the direction is so short that its squares were lost to rounding, and with them its length.

    Args:
        ratio: ρ.
        weights: |w|².
        start: |w|² before the first step.
        elements: how many there are.
        enlarged: what small inputs ask for, over what the square was at the start; 1 where they are not small.
        size: the mean square length of the direction d over the last steps, this one among them.
        now: |d|² of this step.
        smallest: the square of an element that is still exact.
    """
    least = FLOOR**2 * elements
    least = enlarged * torch.where(enlarged > 1, torch.maximum(start, least), least)
    bounded = torch.minimum(torch.maximum(weights, least), GROWTH**2 * torch.maximum(start, least))
    alpha = ratio * (bounded / torch.maximum(size, now / LONGEST**2)).sqrt()
    return torch.where(size > smallest * elements, alpha, 0.0)


def travels(alignment: Tensor, lasting: Tensor, noise: Tensor, usual: Tensor, age: Tensor, live: Tensor) -> Tensor:
    """Whether the weights travel, one answer for all units: after a shift of the data, and at the very start.

    Around a minimum successive gradients share nothing but their noise, which is independent: <g_t, u_{t-1}> is zero or
    a little below on average. On the way to another minimum they share the slope. What noise alone can do is at most
    what V̂ says, were it all in one direction; of small batches, whose noise is large and in many directions, it is far
    less, and how much less is seen from the steps before. One rare sample can exceed that, by any factor, but does not
    last: at the next step it is among those.

    Args:
        alignment: <g_t, u_{t-1}> of each unit, averaged over the last steps.
        lasting: that, or what it was before this step if that is less.
        noise: V̂ of each unit, averaged; before this step.
        usual: the root mean square of <g_t, u_{t-1}>; before this step.
        age: t of each unit.
        live: which units take this step. What another one was like when it did says nothing.
    """
    aligned, limits = torch.stack([alignment, lasting]), torch.stack([STEADY * noise, usual])
    known = torch.stack([age > FIRST, age > USUAL]) & (limits > 0) & live
    return (_mean(aligned / limits, known) > 1).any()  # without any such unit it is no number, which is not above 1


def _mean(values: Tensor, known: Tensor) -> Tensor:
    """Over the units, on the last axis, of which it is known; no number where there are none."""
    return torch.where(known, values, 0.0).sum(-1) / known.sum(-1)


def newest(count: Tensor) -> Tensor:
    """The weight of the newest weights in their average: 1 at first, then WINDOW + 1 times that of a plain mean."""
    return (WINDOW + 1) / (count.clamp_min(1) + WINDOW)
