"""Research: what does the spread do in the paper's rule? The same runs with V̂ = 0, which leaves only the ramp of υ.

    python benchmarks/research/without_variance.py        # CPU, under a minute

The digits task of the demo (a small CNN, N = 64), 20 epochs, seeds 0 to 4; test error in %.
"""

import statistics

import torch
from torch import Tensor

from autoopt import oracle
from autoopt_lab.tasks.digits import task
from autoopt_lab.train import AUTO, Setting, train

SEEDS = range(5)


def main() -> None:
    """Print one line per optimizer."""
    torch.set_num_threads(1)
    measured = oracle.variance

    def nothing(square: Tensor, gradient_square: Tensor, samples: Tensor) -> Tensor:
        return torch.zeros_like(measured(square, gradient_square, samples))

    for name in (name for name in AUTO if name.startswith("paper-")):
        errors = []
        for variance in (measured, nothing):
            oracle.variance = variance
            errors.append([100 * train(task, Setting(name, epochs=20), seed).test_error for seed in SEEDS])
        oracle.variance = measured
        words = [f"{statistics.fmean(e):.2f} ({statistics.stdev(e):.2f})" for e in errors]
        print(f"{name}: {words[0]}, with V = 0: {words[1]}", flush=True)


if __name__ == "__main__":
    main()
