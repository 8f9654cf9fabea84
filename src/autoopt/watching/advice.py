"""What the noise says about the batch size. Note [noise scale].

Let a step use the gradient g, the mean over B samples of a gradient with mean G and covariance Σ, all in the metric of
the optimizer. Its variance is V = tr Σ / B, and E<g,g> = |G|² + V. `Tuned.noise` is ν = V̂/<g,g>. So E<g,g>/V - 1 is
|G|²/V, the ratio of signal to noise, and

    noise scale   S = tr Σ / |G|² = B · V / |G|² = B / (mean of 1/ν over some steps - 1)

is the batch size at which both are equal. It does not depend on the B it was measured with. The mean is taken of 1/ν
because V̂, an average over samples and elements, varies little and <g,g> much: the mean of 1/ν is then right, those of
ν and of single steps' S are not (S has no mean at all). With k steps and n elements of like noise, the mean is known to
about √(2/(kn)): a B/S below that is not told from none. (V̂ adds 2/(n(B-1)) of itself to it, for normal samples.)

On a quadratic with the metric as curvature, a step of length ε lowers the loss by ε|G|² - ε²(|G|² + V)/2 on average.
That is most for ε = |G|²/(|G|² + V), where it is |G|²/2 · B/(B + S); an endless batch would gain |G|²/2. So

    lost to noise     S / (B + S)   of what a step could gain: it takes (B + S)/B times the steps of an endless batch
    samples wasted    B / (B + S)   of the samples: it takes (B + S)/S times the samples of the smallest batches

The second line is the first one in samples: one sample gains |G|²/2 / (B + S), most for B → 0, where it is |G|²/2 / S.
Both are 1/2 at B = S. So no batch size is right by itself: below S it is steps that are wasted (time, where a device is
not full), above S it is samples (computation). A rule that does not find the best ε wastes more than that, never less.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", find the same trade-off well beyond quadratics. S
grows as training proceeds and |G| shrinks, so the advice is about now.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from autoopt.diagnostics import Tuned


@dataclass(frozen=True)
class Advice:
    """How well a batch size suits a noise scale; see Note [noise scale]. `str(advice)` says it in words."""

    batch_size: int
    """B, samples per step: those of all ranks and of all accumulated batches."""
    noise_scale: float
    """S, the batch size at which signal and noise are equal; infinite where no signal could be told from noise."""

    @property
    def lost_to_noise(self) -> float:
        """The share of a step's possible gain that a larger batch would add."""
        return 1.0 if math.isinf(self.noise_scale) else self.noise_scale / (self.batch_size + self.noise_scale)

    @property
    def samples_wasted(self) -> float:
        """The share of the samples that a smaller batch would not need for the same gain."""
        return 1.0 - self.lost_to_noise

    @property
    def better(self) -> int:
        """The power of two nearest to the noise scale: as many steps lost there as samples wasted."""
        return self.batch_size if math.isinf(self.noise_scale) else 2 ** max(0, round(math.log2(self.noise_scale)))

    def __str__(self) -> str:
        if math.isinf(self.noise_scale):
            return f"batch size {self.batch_size}: no signal above the noise; try a larger one"
        other = Advice(self.better, self.noise_scale)
        steps = (1 - self.lost_to_noise) / (1 - other.lost_to_noise)  # of the other batch size, over those of this one
        samples = steps * other.batch_size / self.batch_size
        price = f"{steps:.2g} times the steps, {samples:.2g} times the samples"
        if 0.5 <= self.noise_scale / self.batch_size <= 2:
            return f"batch size {self.batch_size} suits the noise scale of {self.noise_scale:.3g}"
        if self.batch_size < self.noise_scale:
            return (
                f"batch size {self.batch_size} loses {self.lost_to_noise:.0%} of each step to noise, "
                f"{other.batch_size} would lose {other.lost_to_noise:.0%}: {price}"
            )
        return (
            f"batch size {self.batch_size} wastes {self.samples_wasted:.0%} of its samples, "
            f"{other.batch_size} would waste {other.samples_wasted:.0%}: {price}"
        )


def noise_scale(noise: Sequence[float], batch_size: int) -> float:
    """S of one layer from its `Tuned.noise` at some steps, each with `batch_size` samples; infinite without signal."""
    ratio = _signal_to_noise(noise)
    return batch_size / ratio if ratio > 0 else math.inf


def _signal_to_noise(noise: Sequence[float]) -> float:
    """|G|²/V; below 0 where chance made it so, infinite where the samples agreed exactly."""
    if not noise:
        raise ValueError("no noise was measured yet: it needs a step with at least two samples.")
    return fmean(1 / value if value > 0 else math.inf for value in noise) - 1


def advise(history: Iterable[Mapping[str, Tuned]], batch_size: int) -> Advice:
    """Advice on the batch size from what `opt.tuned()` gave at some steps.

    Every layer has a noise scale of its own; the one in the middle (the median) is taken.

        history = []
        for x, y in batches:
            ...
            opt.step()
            history.append(opt.tuned())
        print(advise(history[-50:], batch_size=32))

    Args:
        history: one mapping for each step.
        batch_size: samples per step: those of all ranks and of all accumulated batches.
    """
    if batch_size < 2:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 2, as one sample has no spread.")
    noise: dict[str, list[float]] = {}
    for tuned in history:
        for name, chosen in tuned.items():
            if math.isfinite(chosen.noise):
                noise.setdefault(name, []).append(chosen.noise)
    if not noise:
        raise ValueError("no noise was measured yet: it needs a step with at least two samples.")
    middle = median(_signal_to_noise(values) for values in noise.values())
    return Advice(batch_size, batch_size / middle if middle > 0 else math.inf)
