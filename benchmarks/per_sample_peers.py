"""Second moments of the samples' gradients, Σ_i c_i² for every element: ours beside BackPACK's and Opacus's.

    pip install --no-deps backpack-for-pytorch opacus einops unfoldNd opt_einsum scipy
    python benchmarks/per_sample_peers.py --out docs/results/per_sample_peers.json

Forward and backward pass that yield it, over the plain forward and backward pass of the same round; one CPU thread,
process time. The error is against one backward pass per sample. With BatchNorm in training mode the samples of a batch
depend on each other, so there is nothing to compare with: c_i is what row i adds to `.grad`. Who refuses says why.
"""

import argparse
import ctypes
import importlib.util
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt.capture import Capture
from autoopt_lab.memory import allocated
from autoopt_lab.step_cost import in_a_line

WARMUP, ROUNDS = 3, 30
PACKAGES = {"BackPACK": "backpack", "Opacus": "opacus"}
INSTALL = "pip install --no-deps backpack-for-pytorch opacus einops unfoldNd opt_einsum scipy"
Moments = dict[str, Tensor]


class Case:
    """A model, a batch of it, and its loss."""

    def __init__(self, model: Callable[[], nn.Module], x: Tensor, y: Tensor, *, alone: bool = True) -> None:
        self.model, self.x, self.y = model, x, y
        self.alone = alone  # whether a sample's gradient can be had without the others

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y)


def mnist_cnn() -> nn.Module:
    """The paper's, without its dropout, which would draw other masks for each sample."""
    return nn.Sequential(
        nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
        nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10),
    )  # fmt: skip


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


def resnet() -> nn.Module:
    """Two residual blocks with BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), Block(16),
        nn.MaxPool2d(2), Block(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


class GPT(nn.Module):
    """GPT-2 of the transformers package with random weights, small; the word embedding is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.body = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=200, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
            )
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.body(input_ids=x).logits
        return logits.mT  # (samples, classes, positions), as cross_entropy wants them


class Last(nn.Module):
    """The output of a recurrent layer at the last position."""

    def forward(self, output: tuple[Tensor, Any]) -> Tensor:
        return output[0][:, -1]


def lstm() -> nn.Module:
    return nn.Sequential(nn.LSTM(32, 64, batch_first=True), Last(), nn.Linear(64, 10))


def cases() -> dict[str, Case]:
    return {
        "MNIST CNN, N=128": Case(mnist_cnn, torch.randn(128, 1, 28, 28), torch.randint(0, 10, (128,))),
        "ResNet with BatchNorm, N=32": Case(
            resnet, torch.randn(32, 3, 16, 16), torch.randint(0, 10, (32,)), alone=False
        ),
        "GPT-2, tiny, N=16, T=32": Case(GPT, torch.randint(0, 200, (16, 32)), torch.randint(0, 200, (16, 32))),
        "LSTM classifier, N=64, T=24": Case(lstm, torch.randn(64, 24, 32), torch.randint(0, 10, (64,))),
    }


# A way prepares a model and returns a function that runs a forward and a backward pass and gives the second moments.


def plain(case: Case, model: nn.Module) -> Callable[[], Moments]:
    def run() -> Moments:
        model.zero_grad()
        case.loss(model(case.x), case.y).backward()
        return {}

    return run


def ours(case: Case, model: nn.Module) -> Callable[[], Moments]:
    parameters = dict(model.named_parameters())
    capture = Capture(model, parameters, elementwise=True)

    def run() -> Moments:
        model.zero_grad()
        capture.clear()
        case.loss(model(case.x), case.y).backward()
        return {name: square for name in parameters if (square := capture.second_moment(name)) is not None}

    return run


def backpack(case: Case, model: nn.Module) -> Callable[[], Moments]:
    import backpack
    from backpack.extensions import SumGradSquared

    extended, loss = backpack.extend(model), backpack.extend(nn.CrossEntropyLoss())

    def run() -> Moments:
        model.zero_grad()
        for parameter in model.parameters():
            vars(parameter).pop("sum_grad_squared", None)
        with backpack.backpack(SumGradSquared()):
            loss(extended(case.x), case.y).backward()
        return {n: p.sum_grad_squared for n, p in model.named_parameters() if hasattr(p, "sum_grad_squared")}

    return run


def opacus(case: Case, model: nn.Module) -> Callable[[], Moments]:
    from opacus import GradSampleModule

    wrapped = GradSampleModule(model, batch_first=True, loss_reduction="mean")

    def run() -> Moments:
        wrapped.zero_grad()
        case.loss(wrapped(case.x), case.y).backward()
        # its gradients of samples are of the sum of the losses
        return {n: (p.grad_sample / len(case.x)).square().sum(0) for n, p in model.named_parameters()}  # type: ignore[attr-defined]

    return run


WAYS = {"AutoOpt": ours, "BackPACK": backpack, "Opacus": opacus}


def truth(case: Case) -> Moments:
    """By one backward pass per sample."""
    torch.manual_seed(0)
    model = case.model()
    squares = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for row in range(len(case.x)):
        model.zero_grad()
        (case.loss(model(case.x[row : row + 1]), case.y[row : row + 1]) / len(case.x)).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            squares[name] += parameter.grad.square()
    return squares


def error(found: Moments, wanted: Moments) -> tuple[float, str]:
    """The largest error of a parameter's moments, over their size, and which one has it."""
    return max(((square - wanted[name]).norm().div(wanted[name].norm()).item(), name) for name, square in found.items())


def measure(case: Case) -> dict[str, dict[str, Any]]:
    """Of each way: time and memory over the plain passes, and error; or why there is none of it."""
    results: dict[str, dict[str, Any]] = {}
    runs: dict[str, Callable[[], Moments]] = {}
    wanted = truth(case) if case.alone else None
    for name, way in {"plain": plain, **WAYS}.items():
        torch.manual_seed(0)
        results[name] = {}
        if PACKAGES.get(name) and importlib.util.find_spec(PACKAGES[name]) is None:
            results[name]["refuses"] = f"not installed: {INSTALL}"
            continue
        try:
            with quiet():
                run = way(case, case.model())
                found = run()
                for _ in range(WARMUP):
                    run()
        except Exception as failure:  # another's code: whatever goes wrong in it is a result
            results[name]["refuses"] = in_a_line(failure)[:250]
            continue
        runs[name] = run
        if wanted is not None and name != "plain":
            results[name]["error"], results[name]["worst"] = error(found, wanted)
            results[name]["missing"] = f"{len(wanted) - len(found)} of {len(wanted)}"  # some say nothing of it
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    with quiet():
        for _ in range(ROUNDS):
            for name, run in runs.items():
                start = time.process_time()
                run()
                seconds[name].append(time.process_time() - start)
        peaks = {name: allocated(run).peak for name, run in runs.items()}
    for name in runs:
        results[name]["ms"] = statistics.median(seconds[name]) * 1e3
        ratios = [mine / its for mine, its in zip(seconds[name], seconds["plain"], strict=True)]
        results[name]["time"], results[name]["memory"] = statistics.median(ratios), peaks[name] / peaks["plain"]
    return results


def keep_memory() -> None:
    """Have glibc keep what is freed: what one way frees at the end of its pass, the next would pay for page by page."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            libc.mallopt(option, 1 << 30)


@contextmanager
def quiet() -> Iterator[None]:
    """Hooks of both warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main() -> None:
    """Print the table; write it, if asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    torch.manual_seed(0)
    installed = [p for p in ("backpack-for-pytorch", "opacus") if importlib.util.find_spec(p.split("-")[0])]
    conditions = (
        f"one CPU thread, process time, median of {ROUNDS} rounds; torch {torch.__version__}, "
        f"Python {platform.python_version()}, {platform.machine()}"
        + "".join(f", {package} {version(package)}" for package in installed)
    )
    figures = {}
    for title, case in cases().items():
        figures[title] = measure(case)
        print(title)
        for name, row in figures[title].items():
            said = row.get("refuses") or f"{row['ms']:8.2f} ms {row['time']:5.2f}x {row['memory']:5.2f}x memory"
            wrong = f"   error {row['error']:.0e}, {row['worst']}; missing: {row['missing']}" if "error" in row else ""
            print(f"  {name:9} {said}{wrong}")
    print(conditions)
    if options.out:
        options.out.write_text(json.dumps({"conditions": conditions, "models": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
