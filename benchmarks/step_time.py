"""The price of automatic tuning: step time and peak memory, as ratios over the plain torch step of the same run.

    make bench
    python benchmarks/step_time.py --compile    # the steps of both compiled by torch.compile; takes minutes more

The paper's MNIST CNN, 128 samples, one CPU thread. A step is forward, backward and optimizer step. The optimizers take
turns within each round, so that a slow moment of the machine hits all of them; medians over the rounds are compared.
Peak memory is what the step allocates on top of the model, by torch's profiler.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt import AutoAdaGrad, AutoAdam, AutoSGD
from autoopt_lab.memory import allocated

SAMPLES, WARMUP, ROUNDS, BURST = 128, 5, 60, 3


def mnist_cnn() -> nn.Module:
    """The paper's network for MNIST, section 5."""
    return nn.Sequential(
        nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(10, 20, 5), nn.Dropout2d(), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
        nn.Linear(320, 50), nn.ReLU(), nn.Dropout(), nn.Linear(50, 10), nn.LogSoftmax(1),
    )  # fmt: skip


def stepper(
    make: Callable[[nn.Module], torch.optim.Optimizer], x: Tensor, y: Tensor, *, compiled: bool = False
) -> Callable[[], None]:
    """A function that trains one step of a model and optimizer of its own."""
    torch.manual_seed(0)
    model = mnist_cnn()
    optimizer = make(model)
    update: Callable[[], object] = optimizer.step

    def step() -> None:
        optimizer.zero_grad()
        F.nll_loss(model(x), y).backward()
        update()

    step()
    if compiled:
        update = torch.compile(optimizer.step)
    for _ in range(WARMUP):
        step()
    return step


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true")
    compiled = parser.parse_args().compile
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = torch.randn(SAMPLES, 1, 28, 28), torch.randint(0, 10, (SAMPLES,))
    pairs = {
        "AutoSGD": (lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9), AutoSGD),
        "AutoAdam": (lambda m: torch.optim.Adam(m.parameters(), lr=0.001), AutoAdam),
        "AutoAdaGrad": (lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01), AutoAdaGrad),
    }
    steps = {
        (name, i): stepper(make, x, y, compiled=compiled) for name, pair in pairs.items() for i, make in enumerate(pair)
    }
    times: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
    for _ in range(ROUNDS):
        for key, step in steps.items():
            start = time.perf_counter()
            for _ in range(BURST):
                step()
            times[key].append((time.perf_counter() - start) / BURST)
    print(f"{'':12} {'plain':>9} {'auto':>9} {'time':>7} {'memory':>7}")
    for name in pairs:
        plain, auto = (statistics.median(times[name, i]) * 1e3 for i in range(2))
        memory = allocated(steps[name, 1]).peak / allocated(steps[name, 0]).peak
        print(f"{name:12} {plain:6.2f} ms {auto:6.2f} ms {auto / plain:6.2f}x {memory:6.2f}x")
    print(
        f"MNIST CNN, N={SAMPLES}, one CPU thread, {'compiled steps, ' if compiled else ''}"
        f"median of {ROUNDS} rounds of {BURST} steps; "
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    )


if __name__ == "__main__":
    main()
