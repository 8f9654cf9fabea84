"""Research: whole runs on a GPU, ours without any tuning against a tuned baseline with a schedule.

    PYTHONPATH=src python3 benchmarks/research/whole_runs.py --data DIR --out FILE [--only gpt] [--minutes 3]
    PYTHONPATH=src python3 benchmarks/research/whole_runs.py --device cpu --small     # to try the script

Needs torch, numpy and a CUDA device; CIFAR-10 in DIR/cifar-10-batches-py. Both in bfloat16 autocast:

- ResNet-18 on CIFAR-10, 30 epochs, N = 128, cropped and flipped at random; test error in per cent. Against SGD with
  Nesterov's momentum 0.9 and weight decay 5e-4.
- A GPT of 11M weights on the characters of Python's standard library, 2,000 steps of 64 x 256; validation loss in nats.
  Against AdamW with β = (0.9, 0.95) and weight decay 0.1.

The baselines' rate rises over the first 5 % of the steps, then falls to zero by a cosine. Ours are evaluated twice,
with the last weights and with the averaged ones. A training step is one CUDA graph but for the batch and, of the
baselines, the optimizer's step, whose rate changes.
"""

import argparse
import functools
import gc
import json
import math
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_check import give_up_recording, resnet18

from autoopt import AutoAdam, AutoSGD
from autoopt_lab.tasks import Data, cifar10

EAGER = 20  # steps before the graph is recorded: they lay out the state and build the kernels
POINTS = 6  # evaluations in a run
CHECK = 100  # steps between looks at the clock, for which the host waits for the GPU
CHARACTERS = 10_000_000
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Pictures:
    """ResNet-18 on CIFAR-10."""

    measure = "test error, %"

    def __init__(self, options: argparse.Namespace) -> None:
        self.device, self.batch_size = options.device, 8 if options.small else 128
        if options.small:
            x, y = torch.rand(68, 3, 32, 32) * 2 - 1, torch.arange(68) % 10
            data = Data(x, y, x[:16], y[:16])
        else:
            data = cifar10.data(options.data)
        train, test = data.train_inputs.to(self.device), data.test_inputs.to(self.device)
        mean, deviation = train.mean((0, 2, 3), keepdim=True), train.std((0, 2, 3), keepdim=True)
        padded = (F.pad(train, (4, 4, 4, 4), value=-1.0) - mean) / deviation  # -1 is black
        self.images = padded.permute(0, 2, 3, 1).contiguous()  # channels last, as the model takes them
        self.test = ((test - mean) / deviation).contiguous(memory_format=torch.channels_last)
        self.labels, self.truth = data.train_targets.to(self.device), data.test_targets.to(self.device)
        self.per_epoch = len(train) // self.batch_size
        self.steps = (options.epochs or (2 if options.small else 30)) * self.per_epoch
        self.x = self.test.new_empty(self.batch_size, 3, 32, 32).to(memory_format=torch.channels_last)
        self.y = self.labels[: self.batch_size].clone()
        self.about = {"epochs": self.steps // self.per_epoch, "images": len(train)}

    def model(self) -> nn.Module:
        return resnet18().to(memory_format=torch.channels_last)

    def start(self, seed: int) -> None:
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def shuffle(self) -> None:
        """The order of an epoch, and the rows and columns that are left of each padded image."""
        draw = functools.partial(torch.randint, generator=self.generator, device=self.device)
        count, pixels = len(self.images), torch.arange(32, device=self.device)
        self.order = torch.randperm(count, generator=self.generator, device=self.device)
        self.rows = draw(0, 9, (count, 1)) + pixels
        self.columns = draw(0, 9, (count, 1)) + torch.where(draw(0, 2, (count, 1)) == 1, 31 - pixels, pixels)

    def fill(self, step: int) -> None:
        """Put the next batch into x and y."""
        place = step % self.per_epoch
        if place == 0:
            self.shuffle()
        some = slice(place * self.batch_size, (place + 1) * self.batch_size)
        order = self.order[some]
        images = self.images[order[:, None, None], self.rows[some, :, None], self.columns[some, None, :]]
        self.x.copy_(images.permute(0, 3, 1, 2))
        self.y.copy_(self.labels[order])

    def evaluate(self, model: nn.Module, last: bool) -> float:
        wrong = torch.zeros((), device=self.device)
        for x, y in zip(self.test.split(1000), self.truth.split(1000), strict=True):
            outputs = model(x)
            # argmax of NaN is a class all the same: divergence would look like chance
            wrong += torch.where(outputs.isfinite().all(), (outputs.argmax(1) != y).sum(), torch.nan)
        return 100 * wrong.item() / len(self.truth)


class Text:
    """A small GPT on the characters of Python's standard library, of which the last 5 % are to validate."""

    measure = "validation loss"

    def __init__(self, options: argparse.Namespace) -> None:
        self.device, self.small = options.device, options.small
        self.context, self.batch_size = (32, 4) if options.small else (256, 64)
        text = characters(100_000 if options.small else CHARACTERS).to(self.device)
        end = len(text) * 95 // 100
        self.train, self.valid = text[:end], text[end:]
        self.steps = options.steps or (12 if options.small else 2000)
        self.offsets = torch.arange(self.context + 1, device=self.device)
        places, generator = len(self.valid) - self.context, torch.Generator().manual_seed(0)
        self.fixed = torch.randint(0, places, (200 * self.batch_size,), generator=generator).to(self.device)
        self.x = torch.zeros(self.batch_size, self.context, dtype=torch.int64, device=self.device)
        self.y = self.x.clone()
        self.about = {"characters": len(text)}

    def model(self) -> nn.Module:
        return GPT(2, 32, 2, self.context) if self.small else GPT(6, 384, 6, self.context)

    def start(self, seed: int) -> None:
        generator = torch.Generator(self.device).manual_seed(seed)
        size, places = (self.steps, self.batch_size), len(self.train) - self.context
        self.starts = torch.randint(0, places, size, generator=generator, device=self.device)

    def fill(self, step: int) -> None:
        """Put the next batch into x and y."""
        windows = self.train[self.starts[step, :, None] + self.offsets]
        self.x.copy_(windows[:, :-1])
        self.y.copy_(windows[:, 1:])

    def evaluate(self, model: nn.Module, last: bool) -> float:
        """Over the 200 batches; on the way over the first 50 of them, since forward passes take their time, too."""
        starts = self.fixed if last else self.fixed[: len(self.fixed) // 4]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for some in starts.split(1000):
            windows = self.valid[some[:, None] + self.offsets]
            total += loss_of(model(windows[:, :-1]), windows[:, 1:]) * len(some)
        return total.item() / len(starts)


def characters(count: int) -> Tensor:
    """The first so many printable ASCII characters and newlines of the standard library, as 0 to 95."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    other = bytes(set(range(256)) - {10, *range(32, 127)})
    text = bytearray()
    for path in sorted(folder.rglob("*.py")):
        wanted = path.is_file() and not LEFT_OUT & set(path.relative_to(folder).parts)  # some are links to nothing
        if wanted and len(text) < count:
            text += path.read_bytes().translate(None, other)
    return (torch.frombuffer(text[:count], dtype=torch.uint8).long() - 31).clamp_(min=0)


class Block(nn.Module):
    """Attention and an MLP, each after a LayerNorm and added to what came in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """With the initial weights of GPT-2."""

    def __init__(self, layers: int, width: int, heads: int, context: int, dropout: float = 0.2) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(96, width), nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*[Block(width, heads, dropout) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 96, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                added = name.endswith(("out.weight", "down.weight"))  # to what goes past all blocks
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if added else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(self.drop(x))))


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def scheduled(step: int, steps: int) -> float:
    """The share of the rate that a baseline has: up over 5 % of the steps, then down by a cosine."""
    warm = max(1, steps // 20)
    return min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * max(0, step - warm) / (steps - warm)))


class Run:
    """One model under one optimizer; a baseline has a rate, ours none."""

    def __init__(self, task: Pictures | Text, make: Make, rate: float | None, seed: int) -> None:
        torch.manual_seed(seed)
        task.start(seed)
        self.task, self.rate = task, rate
        self.cuda = task.device == "cuda"
        self.model = task.model().to(task.device)
        self.optimizer = make(self.model)
        self.total = torch.zeros((), device=task.device)  # of the training losses since the last evaluation
        self.graph: torch.cuda.CUDAGraph | None = None

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.task.device, torch.bfloat16)

    def passes(self) -> None:
        """What the graph holds: all of a step of ours; of a baseline's, what leaves the gradients in their place."""
        self.optimizer.zero_grad(set_to_none=self.rate is None)
        with self.autocast():
            loss = loss_of(self.model(self.task.x), self.task.y)
        loss.backward()
        self.total += loss.detach()
        if self.rate is None:
            self.optimizer.step()

    def record(self) -> None:
        """Have the graph from now on, unless it cannot be recorded."""
        if self.rate is None:
            self.optimizer.zero_grad()
        stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.passes()
            self.graph = graph
        except Exception:
            traceback.print_exc(limit=-6)
            give_up_recording(stream)
            self.optimizer.zero_grad()

    def step(self, step: int) -> None:
        self.task.fill(step)
        if self.graph is None:
            self.passes()
        else:
            self.graph.replay()
        if self.rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate * scheduled(step, self.task.steps)
            self.optimizer.step()

    def evaluate(self, step: int, since: int) -> dict[str, float]:
        """The measure with the last weights, and with the averaged ones of ours."""
        point = {"step": step, "train loss": self.total.item() / (step - since)}  # waits for the GPU
        last = step == self.task.steps
        self.total.zero_()
        self.model.eval()
        with torch.no_grad(), self.autocast():
            point["last"] = self.task.evaluate(self.model, last)
        if self.rate is None:
            # autocast anew: it may keep the weights that it has cast
            with self.optimizer.averaged(), torch.no_grad(), self.autocast():  # type: ignore[attr-defined]
                point["averaged"] = self.task.evaluate(self.model, last)
            tuned = self.optimizer.tuned().values()  # type: ignore[attr-defined]
            point["momentum"] = sum(found.momentum for found in tuned) / len(tuned)  # below 0.9 where n is below t
        self.model.train()
        return point

    def train(self, until: float) -> dict[str, Any]:
        """All steps, or those before the time is over."""
        start, steps, since = time.perf_counter(), self.task.steps, 0
        stops = {steps * k // POINTS for k in range(1, POINTS + 1)}
        points: list[dict[str, float]] = []
        for step in range(1, steps + 1):
            self.step(step - 1)
            if step == EAGER and self.cuda:
                self.record()
            if step % CHECK == 0 and self.cuda:
                torch.cuda.synchronize()  # else the host would be far ahead
            over = time.perf_counter() > until
            if step in stops or over:
                points.append(self.evaluate(step, since))
                print(f"    {json.dumps(points[-1])} at {time.perf_counter() - start:.1f} s", flush=True)
                since = step
            if over:
                break
        found = {key: value for key, value in points[-1].items() if key in ("last", "averaged")}
        found |= {"steps": since, "cut": since < steps, "graph": self.graph is not None}
        return {**found, "seconds": round(time.perf_counter() - start, 2), "points": points}


Plan = tuple[str, str, Make, float | None]  # task, name, optimizer, a baseline's rate


def adamw(rate: float) -> Plan:
    make = functools.partial(torch.optim.AdamW, lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return "gpt", f"AdamW {rate:g}", lambda model: make(model.parameters()), rate


def sgd(rate: float) -> Plan:
    make = functools.partial(torch.optim.SGD, lr=rate, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)
    return "resnet", f"SGD {rate:g}", lambda model: make(model.parameters()), rate


def planned(options: argparse.Namespace) -> list[Plan]:
    """The more important first."""
    runs: list[Plan] = [
        *map(adamw, options.adamw[:1]),
        ("gpt", "AutoAdam", AutoAdam, None),
        *map(sgd, options.sgd[:1]),
        ("resnet", "AutoSGD", AutoSGD, None),
        ("resnet", "AutoSGD wd", functools.partial(AutoSGD, weight_decay=5e-4), None),
        ("gpt", "AutoSGD", AutoSGD, None),
        ("resnet", "AutoAdam", AutoAdam, None),
        *map(adamw, options.adamw[1:]),
        *map(sgd, options.sgd[1:]),
    ]
    return [run for run in runs if not options.only or any(part in f"{run[0]}:{run[1]}" for part in options.only)]


def main() -> None:
    """Run all, and write after each."""
    begun = time.perf_counter()
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="the folder that holds cifar-10-batches-py")
    parser.add_argument("--out", type=Path, help="a line of JSON for each run is added to it")
    parser.add_argument("--only", nargs="+", help="parts of task:name, such as gpt or resnet:AutoSGD")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no run begins after, the last one is cut")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, help="of the ResNet; default: 30")
    parser.add_argument("--steps", type=int, help="of the GPT; default: 2000")
    parser.add_argument("--sgd", type=float, nargs="+", default=[0.1], help="the baseline's rates")
    parser.add_argument("--adamw", type=float, nargs="+", default=[1e-3], help="the baseline's rates")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny sizes and noise for images, to try the script")
    options = parser.parse_args()
    machine = "CPU"
    if options.device == "cuda":
        machine = torch.cuda.get_device_name()
        torch.cuda.set_stream(torch.cuda.Stream())  # no step before a recording may be on the default stream
        torch.backends.cuda.enable_cudnn_sdp(False)  # flash attention is known to be recorded well, dropout and all
    runs, kinds = planned(options), {"resnet": Pictures, "gpt": Text}
    tasks = {name: kinds[name](options) for name in dict.fromkeys(run[0] for run in runs)}  # at once: fail early
    print(f"{len(runs)} runs on {machine}, data after {time.perf_counter() - begun:.1f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        for name, optimizer, make, rate in runs:
            if time.perf_counter() - begun > 60 * options.minutes:
                continue
            print(f"{name} {optimizer}, seed {seed}", flush=True)
            row = {"task": name, "name": optimizer, "seed": seed, "torch": torch.__version__, "device": machine}
            try:
                row |= tasks[name].about | Run(tasks[name], make, rate, seed).train(begun + 60 * options.minutes)
            except Exception as error:  # the other rows are worth having
                traceback.print_exc(limit=-6)
                row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()
            rows.append(row)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    for row in rows:
        table_row(row, tasks[row["task"]].measure)


def table_row(row: dict[str, Any], measure: str) -> None:
    line = f"{row['task']:7} {row['name']:12} seed {row['seed']}"
    if "failed" in row:
        print(f"{line}  {row['failed']}")
        return
    line += f"  {measure} {row['last']:8.4f}"
    line += f", averaged {row['averaged']:8.4f}" if "averaged" in row else " " * 19
    line += f"  {row['seconds']:6.1f} s, {row['steps']} steps"
    print(line + (", cut" if row["cut"] else "") + ("" if row["graph"] else ", no graph"))


if __name__ == "__main__":
    main()
