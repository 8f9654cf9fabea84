"""How far the engine is from what the GPU allows; prints docs/engine.md's table from the results of engine_gpu.py.

python3 benchmarks/engine_bounds.py docs/results/engine_gpu.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from engine_cases import NETS

from autoopt_lab.engine import Net
from autoopt_lab.engine.launches import conv_weight_gradient, window

TF32, BYTES = 494e12, 4.8e12  # per second: H200, by its datasheet, dense
PRODUCTS = 3  # of tf32 numbers in one product at tf32x3
EPOCH = {"cifar10": 50_000, "mnist": 60_000}
STATE = {  # values per parameter
    "sgd": 1, "adam": 2, "adagrad": 2, "paper-sgd": 1, "paper-adam": 2, "paper-adagrad": 2,
    "auto-sgd": 2, "auto-adam": 3, "auto-adagrad": 3,
}  # fmt: skip


def multiply_adds(net: Net) -> int:
    """Per training sample: forward, weight gradient, and input gradient of all but the first layer."""
    forward = [s.affine_size[0] * s.affine_size[1] * s.outputs * s.patch for s in net.stages]
    return 3 * sum(forward) - forward[0]


def bytes_moved(net: Net, rule: str, batch: int) -> int:
    """Per run and step, if each kernel read its inputs and wrote its outputs once, and the update were one kernel."""
    moments = rule.startswith(("auto", "paper"))
    channels, height, width = net.image
    floats = 2 * batch * channels * height * width  # the batch is gathered from the data set
    origins = 0
    for s in net.stages:
        rows, elements = batch * s.output_size[0] * s.output_size[1], window(s)
        inputs, outputs = batch * s.height * s.width * s.channels, rows * s.outputs
        expanded = s.pool**2 * s.outputs * elements if s.pool > 1 else 0
        floats += s.parameters + 2 * expanded + inputs + outputs  # forward
        floats += inputs + outputs + (1 + moments) * s.parameters  # weight gradient
        origins += 2 * outputs
        if not s.linear:
            split = conv_weight_gradient(s, batch, moments)["SPLIT"]
            floats += 2 * batch // split * s.pool**2 * s.outputs * (elements + 1)
        if s.offset:  # input gradient; for a convolution by way of its windows
            floats += outputs + (expanded or s.parameters) + inputs + (0 if s.linear else 2 * rows * elements)
            origins += outputs
    floats += net.parameters * (3 + moments + 2 * STATE[rule])  # update: gradients, weights, state
    return 4 * floats + origins


def shares(row: dict[str, Any]) -> tuple[float, float]:
    """Of the arithmetic (three tf32 products for each multiplication) and of the memory bound, in per cent."""
    net = NETS[row["net"]]
    steps = 1e3 / row["ms"]
    arithmetic = row["samples_per_s"] * 2 * multiply_adds(net) * PRODUCTS / TF32
    return 100 * arithmetic, 100 * row["runs"] * steps * bytes_moved(net, row["rule"], row["batch"]) / BYTES


def table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| net | rule | N | runs | M samples/s | 10-epoch runs/min | arithmetic | memory |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in results["speed"]:
        if row["variant"] == "triton tf32x3":
            arithmetic, memory = shares(row)
            millions = row["samples_per_s"] / 1e6
            epochs = EPOCH[row["net"]] // row["batch"] * row["batch"] * 10
            lines.append(
                f"| {row['net']} | {row['rule']} | {row['batch']} | {row['runs']} | {millions:.2f} "
                f"| {60e6 * millions / epochs:.0f} | {arithmetic:.1f} % | {memory:.0f} % |"
            )
    return lines


if __name__ == "__main__":
    print("\n".join(table(json.loads(Path(sys.argv[1]).read_text()))))
