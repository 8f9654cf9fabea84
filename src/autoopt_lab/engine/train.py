"""Trains a chunk: K runs of one task, one optimizer family and one batch size, side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from autoopt_lab.engine import random
from autoopt_lab.engine.evaluate import Evaluation, evaluate
from autoopt_lab.engine.layout import Layout
from autoopt_lab.engine.net import Net
from autoopt_lab.engine.reference import Gradients, Reference
from autoopt_lab.engine.registry import make_rule
from autoopt_lab.tasks import Data

_CAPTURING = threading.Lock()  # one CUDA graph at a time


@dataclass(frozen=True)
class Run:
    """One row of a chunk. What it computes depends on the task, these two and the chunk's options, on nothing else."""

    seed: int
    options: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What all runs of a chunk have in common."""

    optimizer: str
    batch: int  # N; samples that do not fill a last batch are left out of the epoch
    epochs: int
    average: float | None = None  # newest parameters' weight in a running average, of rules that keep none
    shift_at: int | None = None  # the epoch from which labels are y -> (3 y + 1) mod 10
    train_sample: int | None = 10_000  # training images the train error is taken from before the last epoch; None: all
    trace_points: int = 100


@dataclass(frozen=True)
class Result:
    """One run's outcome; lists have one entry per epoch. Errors are shares; NaN where the outputs are not finite."""

    run: Run
    test_error: list[float]
    train_error: list[float]
    test_loss: list[float]
    train_loss: list[float]
    average_test_error: list[float]  # of the averaged parameters (the rule's own, else the plan's); empty without
    trace_steps: list[int]
    trace: Tensor | None  # (points, 3, L): rate, momentum and noise of every tensor, for automatic rules
    weights: Tensor  # flat; Net.unpack gives PyTorch's tensors
    averaged_weights: Tensor | None  # likewise


class Backend(Protocol):
    def gradients(
        self, weights: Tensor, images: Tensor, labels: Tensor, factors: Tensor | None, moments: bool
    ) -> Gradients: ...

    def logits(self, weights: Tensor, images: Tensor) -> Tensor: ...


def make_backend(name: str, net: Net, device: torch.device | str, precision: str = "tf32x3") -> Backend:
    """ "triton" is for GPUs; "torch" is its plain twin; "auto" takes the faster one that the device has."""
    if name not in ("auto", "torch", "triton"):
        raise ValueError(f"there is no backend {name!r}: choose auto, torch or triton")
    if name == "torch" or (name == "auto" and torch.device(device).type != "cuda"):
        return Reference(net)
    from autoopt_lab.engine.fused import Fused  # Triton exists only where a GPU is

    return Fused(net, precision)


def train(
    net: Net,
    data: Data,
    plan: Plan,
    runs: Sequence[Run],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
    precision: str = "tf32x3",
    compile_update: bool = False,
    on_epoch: Callable[[int], None] | None = None,
) -> list[Result]:
    """`compile_update` fuses the optimizer's update with torch.compile: faster for small batches on a GPU, after some
    seconds of compiling per optimizer. Like `precision` it is part of what a run computes: the last bits may differ
    from those of an update that is not compiled.
    """
    chosen = make_backend(backend, net, device, precision)
    chunk = Chunk(net, data, plan, runs, chosen, device, dtype, compile_update)
    for epoch in range(plan.epochs):
        chunk.epoch(epoch)
        if on_epoch is not None:
            on_epoch(epoch + 1)
    return chunk.results()


class Chunk:
    """The buffers of K runs and one training step on them; on a GPU the step is replayed as one CUDA graph."""

    def __init__(
        self,
        net: Net,
        data: Data,
        plan: Plan,
        runs: Sequence[Run],
        backend: Backend,
        device: torch.device | str,
        dtype: torch.dtype,
        compile_update: bool = False,
    ) -> None:
        if not 1 <= plan.batch <= len(data.train_inputs):
            raise ValueError(f"a batch of {plan.batch} does not fit {len(data.train_inputs)} training samples")
        self.net, self.plan, self.runs, self.backend = net, plan, list(runs), backend
        self.images, self.test_images = (
            x.permute(0, 2, 3, 1).to(device, dtype).contiguous() for x in (data.train_inputs, data.test_inputs)
        )
        self.labels, self.test_labels = (y.to(device, copy=True) for y in (data.train_targets, data.test_targets))
        self.seeds = torch.tensor([run.seed for run in runs], device=device)
        starts = {seed: net.initial(seed) for seed in {run.seed for run in runs}}
        self.weights = torch.stack([starts[run.seed] for run in runs]).to(device, dtype)
        layout = Layout(net.sizes, device)
        self.rule = make_rule(plan.optimizer, layout, plan.batch, [run.options for run in runs], self.weights)
        self.rule.images = (self.images.norm().square() / self.images.count_nonzero()).item()
        self.state = {name: x.clone() for name, x in self.rule.start(self.weights).items()}
        self.averaged = self.weights.clone()
        self.rates = torch.cat([torch.full((s.outputs,), s.drop) for s in net.stages if s.drop] or [torch.zeros(0)]).to(
            device
        )
        self.step_count = torch.zeros((), dtype=torch.int64, device=device)
        self.order = torch.zeros(len(runs), self.steps * plan.batch, dtype=torch.int64, device=device)
        self.positions = torch.arange(plan.batch, device=device)
        self.trace = torch.zeros(3, len(runs), len(net.sizes), device=device, dtype=dtype)
        self.loss = torch.zeros(len(runs), device=device, dtype=dtype)
        self._update = _compiled_update() if compile_update else Chunk._move
        self._go: Callable[[], None] | None = None
        self._evaluations: list[tuple[Evaluation, Evaluation]] = []
        self._average_errors: list[Tensor] = []
        self._traces: dict[int, Tensor] = {}

    @property
    def steps(self) -> int:
        """Steps per epoch."""
        return len(self.images) // self.plan.batch

    def step(self) -> None:
        """One training step of every run, with no host read."""
        start = self.step_count % self.steps * self.plan.batch
        index = self.order.index_select(1, start + self.positions)
        images = self.images.index_select(0, index.flatten()).unflatten(0, index.shape)
        factors = None
        if len(self.rates):
            factors = random.dropout_factors(
                self.seeds, self.step_count, self.plan.batch, self.rates, self.weights.dtype
            )
        gradients = self.backend.gradients(self.weights, images, self.labels[index], factors, self.rule.moments)
        self.loss.copy_(gradients.loss)
        self.step_count += 1
        self._update(self, gradients.gradient, gradients.second)

    def _move(self, gradient: Tensor, second: Tensor) -> None:
        step = self.rule.step(self.state, self.weights, gradient, second)
        for name, x in step.state.items():
            self.state[name].copy_(x)
        self.weights.copy_(step.weights)
        if step.trace is not None:
            self.trace.copy_(torch.stack(step.trace))
        if self.plan.average is not None:  # a plain mean at first, so that the start is forgotten
            share = (1 / self.step_count.to(step.weights.dtype)).clamp_min(self.plan.average)
            self.averaged.copy_(self.averaged + share * (step.weights - self.averaged))

    def epoch(self, epoch: int) -> None:
        """Trains every run for one epoch and evaluates it."""
        if epoch == self.plan.shift_at:
            for labels in (self.labels, self.test_labels):
                labels.copy_((3 * labels + 1) % self.net.classes)
        self.order.copy_(random.orders(self.seeds, epoch, len(self.images))[:, : self.order.shape[1]])
        go = self._go or self.captured()
        if self.weights.is_cuda:  # on a CPU `go` is a method, and to hold it would keep the chunk's memory in a cycle
            self._go = go
        every = max(1, self.steps * self.plan.epochs // self.plan.trace_points)
        for step in range(epoch * self.steps, (epoch + 1) * self.steps):
            go()
            if self.rule.moments and step % every == 0:
                self._traces[step + 1] = self.trace.clone()
        last = epoch == self.plan.epochs - 1
        sample = slice(None) if last else slice(self.plan.train_sample)
        self._evaluations.append(
            (
                evaluate(self.backend, self.weights, self.test_images, self.test_labels),
                evaluate(self.backend, self.weights, self.images[sample], self.labels[sample]),
            )
        )
        average = self.average()
        if average is not None:
            self._average_errors.append(evaluate(self.backend, average, self.test_images, self.test_labels).error)

    def average(self) -> Tensor | None:
        """The averaged parameters: those of the rule where it keeps them, else as the plan asks for."""
        kept = self.rule.averaged(self.state)
        if kept is None and self.plan.average is not None:
            return self.averaged
        return kept

    def captured(self) -> Callable[[], None]:
        """The step as it is on a CPU, as one CUDA graph on a GPU."""
        if not self.weights.is_cuda:
            return self.step
        with _CAPTURING:
            return self._captured()

    def _captured(self) -> Callable[[], None]:
        buffers = [self.weights, self.averaged, self.step_count, self.trace, self.loss, *self.state.values()]
        kept = [x.clone() for x in buffers]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels are built and libraries set up outside the capture
            for _ in range(2):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may go on training
            self.step()
        for buffer, value in zip(buffers, kept, strict=True):
            buffer.copy_(value)
        return graph.replay

    def results(self) -> list[Result]:
        test, train = (
            Evaluation(*(torch.stack(column, 1).cpu() for column in zip(*part, strict=True)))
            for part in zip(*self._evaluations, strict=True)
        )
        averaged = torch.stack(self._average_errors, 1).cpu() if self._average_errors else None
        trace = torch.stack(list(self._traces.values())).cpu() if self._traces else None
        weights, average = self.weights.cpu(), self.average()
        average = None if average is None else average.cpu()
        return [
            Result(
                run=run,
                test_error=test.error[k].tolist(),
                train_error=train.error[k].tolist(),
                test_loss=test.loss[k].tolist(),
                train_loss=train.loss[k].tolist(),
                average_test_error=[] if averaged is None else averaged[k].tolist(),
                trace_steps=list(self._traces),
                trace=None if trace is None else trace[:, :, k],
                weights=weights[k],
                averaged_weights=None if average is None else average[k],
            )
            for k, run in enumerate(self.runs)
        ]


@cache
def _compiled_update() -> Callable[[Chunk, Tensor, Tensor], None]:
    """Chunk._move, in which each buffer is read and written once, which counts where batches are small.

    Without fused multiply-adds (emulate_precision_casts) every operation rounds by itself, however it is grouped: a run
    alone, for which torch compiles again, then has the bits it has in company. Where torch would give up after eight
    variants, and quietly change those bits, a full graph fails; a process that meets every rule has more than eight.
    """
    compiled = torch.compile(Chunk._move, dynamic=True, fullgraph=True, options={"emulate_precision_casts": True})

    def update(chunk: Chunk, gradient: Tensor, second: Tensor) -> None:
        with torch._dynamo.config.patch(recompile_limit=256):
            compiled(chunk, gradient, second)

    return update
