"""What statistics of recurrent and attention layers cost: forward and backward pass with them over those without.

    python benchmarks/recurrent_attention.py --out docs/results/recurrent_attention.json

One CPU thread, process time; the plain layer takes turns with ours, in total (as for AutoSGD) and elementwise (as for
AutoAdam), and the median of the rounds' ratios is taken. 32 samples of 32 positions, 128 features.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoopt.capture import Capture
from autoopt_lab.memory import allocated

SAMPLES, TIMES, SIZE = 32, 32, 128
WARMUP, ROUNDS = 3, 40


class Called(nn.Module):
    """Self-attention from one input."""

    def __init__(self, layer: nn.MultiheadAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x, x, x, need_weights=False)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "RNN": lambda: nn.RNN(SIZE, SIZE, batch_first=True),
    "GRU": lambda: nn.GRU(SIZE, SIZE, batch_first=True),
    "LSTM": lambda: nn.LSTM(SIZE, SIZE, batch_first=True),
    "LSTM, two layers, both directions": lambda: nn.LSTM(SIZE, SIZE, 2, batch_first=True, bidirectional=True),
    "MultiheadAttention": lambda: Called(nn.MultiheadAttention(SIZE, 4, batch_first=True)),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(SIZE, 4, 4 * SIZE, 0.0, batch_first=True),
}


def passes(make: Callable[[], nn.Module], x: Tensor, elementwise: bool | None) -> Callable[[], None]:
    """A forward and a backward pass of a layer that is observed, elementwise or in total, or (None) is not."""
    torch.manual_seed(0)
    layer = make()
    capture = None if elementwise is None else Capture(layer, dict(layer.named_parameters()), elementwise=elementwise)

    def run() -> None:
        layer.zero_grad()
        if capture is not None:
            capture.clear()
        output = layer(x)
        (output[0] if isinstance(output, tuple) else output).square().sum().backward()

    for _ in range(WARMUP):
        run()
    return run


def measure(make: Callable[[], nn.Module]) -> dict[str, float]:
    x = torch.randn(SAMPLES, TIMES, SIZE).requires_grad_()
    runs = {"plain": passes(make, x, None), "total": passes(make, x, False), "elementwise": passes(make, x, True)}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    peak = {name: allocated(run).peak for name, run in runs.items()}
    ratios = {
        name: statistics.median(a / b for a, b in zip(seconds[name], seconds["plain"], strict=True)) for name in runs
    }
    return {
        "plain_ms": statistics.median(seconds["plain"]) * 1e3,
        "time_total": ratios["total"],
        "time_elementwise": ratios["elementwise"],
        "memory_total": peak["total"] / peak["plain"],
        "memory_elementwise": peak["elementwise"] / peak["plain"],
    }


def main() -> None:
    """Print the table; write it, if asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    conditions = (
        f"N={SAMPLES}, T={TIMES}, {SIZE} features, one CPU thread, process time, median of {ROUNDS} rounds; "
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    )
    figures = {name: measure(make) for name, make in LAYERS.items()}
    print(f"{'':34} {'plain':>9}  {'total':>6} {'elementwise':>11}  memory")
    for name, row in figures.items():
        print(
            f"{name:34} {row['plain_ms']:6.2f} ms {row['time_total']:6.2f}x {row['time_elementwise']:10.2f}x"
            f"  {row['memory_total']:.2f}x, {row['memory_elementwise']:.2f}x"
        )
    print(conditions)
    if options.out:
        options.out.write_text(json.dumps({"conditions": conditions, "layers": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
