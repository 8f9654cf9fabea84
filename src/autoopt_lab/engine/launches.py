"""Block sizes, warps and pipeline depths of the kernels: the fastest of those measured on an H200 (docs/engine.md).

They may depend on the net and the batch size, never on the number of runs: the blocks fix the order of a run's sums.
Kernels that take less than a launch by the host (about 50 us) could not be told apart, and keep what is simplest.
"""

from __future__ import annotations

from math import gcd

from autoopt_lab.engine.net import Stage

Launch = dict[str, int]


def forward(stage: Stage, rows: int) -> Launch:
    columns = clamp(stage.outputs, 8, 64)
    if columns == 8:  # narrow: cheap accumulators leave room for long blocks and a deep pipeline
        block, elements, depth = 128, _block(window(stage)), 3
    elif columns == 16:
        block, elements, depth = 64, _block(window(stage)), 3
    else:  # wide: registers go to the accumulators, and other programs hide the loads better than a pipeline
        block, elements, depth = 128, 32, 1
    return {"BM": clamp(rows, 16, block), "BE": elements, "BO": columns, "num_warps": 4, "num_stages": depth}


def window_gradient(stage: Stage, rows: int) -> Launch:
    return {
        "BM": clamp(rows, 16, 64),
        "BK": clamp(stage.pool**2 * stage.outputs, 16, 32),
        "BE": clamp(window(stage), 16, 64),
        "num_warps": 4,
        "num_stages": 1,
    }


def fold(stage: Stage) -> Launch:
    return {"BLOCK": clamp(stage.height * stage.width * stage.channels, 64, 2048), "num_warps": 4}


def conv_weight_gradient(stage: Stage, samples: int, moments: bool) -> Launch:
    elements = window(stage) + 1  # and the bias
    # A window that fits one block of 128 is best read at once, a larger one by 64; only the former gains by a pipeline.
    block = clamp(elements, 16, 128) if elements <= 128 else 64
    return {
        "SPLIT": 1 if moments else gcd(samples, 8),  # squares are of single samples
        "BP": 32,
        "BE": block,
        "BQ": clamp(stage.pool**2 * stage.outputs, 16, 1024),  # one block holds all columns
        "num_warps": 4,
        "num_stages": 2 if block == 128 else 1,
    }


def collect() -> Launch:
    return {"BLOCK": 128, "num_warps": 4}


def linear_weight_gradient(stage: Stage, samples: int) -> Launch:
    return {
        "BN": clamp(samples, 16, 32),
        "BE": 64,
        "BO": clamp(stage.outputs, 16, 64),
        "num_warps": 4,
        "num_stages": 2,
    }


def window(stage: Stage) -> int:
    """Elements under one output: the patches of all its pooling candidates."""
    return (stage.kernel + stage.pool - 1) ** 2 * stage.channels


def clamp(n: int, least: int, most: int) -> int:
    """The smallest power of two that is not below n, between two others."""
    return max(least, min(most, 1 << (n - 1).bit_length()))


def _block(elements: int) -> int:
    """16 or 32 window elements at a time, whichever leaves fewer idle."""
    return min((32, 16), key=lambda block: -(-elements // block) * block)
