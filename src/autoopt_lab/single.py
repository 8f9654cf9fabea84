"""One task, one optimizer, in a plain PyTorch loop: for any model. The results go into a run folder like a sweep's."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from autoopt_lab.provenance import provenance
from autoopt_lab.record import Columns, Conditions, Folder, Group, Job, Manifest, Part, three_digits
from autoopt_lab.sweep import SweepError, check_batch, check_rate, module_of
from autoopt_lab.tasks import Data, Task
from autoopt_lab.train import AUTO, PLAIN, Run, Setting, train


def load_task(name: str, folder: Path | None = None) -> Task:
    """digits, mnist, cifar10, or FILE.py:NAME, a Task in a file of the user's own."""
    if name == "digits":
        from autoopt_lab.tasks import digits

        return digits.task
    if name in ("mnist", "cifar10"):
        from autoopt_lab.tasks import cifar10, mnist

        return mnist.task(folder) if name == "mnist" else cifar10.task(folder)
    file, _, attribute = name.partition(":")
    path = Path(file)
    if path.suffix != ".py" or not attribute:
        raise SweepError(f"there is no task {name!r}: choose digits, mnist, cifar10 or FILE.py:NAME of your own")
    if not path.is_file():
        raise SweepError(f"there is no task {name!r}: {file} does not exist")
    module = module_of(path)
    if not hasattr(module, attribute):
        raise SweepError(f"there is no task {name!r}: {file} has no {attribute!r}")
    task = getattr(module, attribute)
    if not isinstance(task, Task):
        raise SweepError(f"{name} is {type(task).__name__}, not an autoopt_lab.tasks.Task: make it one")
    return task


def check_task(task: Task, batch: int) -> None:
    """SweepError where the parts of a task do not fit together, found with two samples before anything is trained."""
    data = task.data()
    if not isinstance(data, Data):
        raise SweepError(f"the task's data() returned {type(data).__name__}, not an autoopt_lab.tasks.Data")
    check_batch(batch, data, task.name)
    for split, inputs, targets in (
        ("train", data.train_inputs, data.train_targets),
        ("test", data.test_inputs, data.test_targets),
    ):
        if len(inputs) != len(targets) or len(inputs) < 2:
            sizes = f"{len(inputs)} inputs and {len(targets)} targets"
            raise SweepError(f"the task's {split} data has {sizes}: they must be as many, and two or more")
    model, inputs, targets = task.model(), data.train_inputs[:2], data.train_targets[:2]
    try:
        outputs = model(inputs)
        loss, error = task.loss(outputs, targets), task.error(outputs.detach(), targets)
    except (RuntimeError, ValueError, IndexError, TypeError) as problem:
        reason = str(problem).splitlines()[0].rstrip(".")
        shapes = f"inputs {tuple(inputs.shape)}, targets {tuple(targets.shape)}"
        raise SweepError(f"the task's model, loss and error do not fit its data ({shapes}): {reason}") from None
    if len(outputs) != len(inputs):
        raise SweepError(f"the task's model made {len(outputs)} outputs of {len(inputs)} inputs: samples come first")
    if loss.shape != () or not isinstance(error, float):
        found = f"the task's loss has shape {tuple(loss.shape)} and its error is a {type(error).__name__}"
        raise SweepError(f"{found}: the loss must be a 0-dim tensor, the error a float")


def manifest(task: str, optimizer: str, lr: float | None, batch: int, epochs: int, seeds: Sequence[int]) -> Manifest:
    if optimizer not in {**AUTO, **PLAIN}:
        raise SweepError(f"there is no optimizer {optimizer!r}: choose one of {', '.join([*AUTO, *PLAIN])}")
    check_rate(optimizer, lr is not None)
    options: dict[str, float] = {} if lr is None else {"lr": lr}
    group = Group(task, optimizer, (batch,), (options,), tuple(seeds))
    return Manifest("train", Conditions(epochs, precision="float32"), (group,))


def train_each(folder: Folder, jobs: Sequence[Job], conditions: Conditions, data: Path | None) -> Iterator[Job]:
    """Train the jobs one after the other and put each into the folder."""
    for job in jobs:
        task = load_task(job.task, data)
        setting = Setting(job.optimizer, conditions.epochs, dict(job.options).get("lr"), job.batch)
        start = time.monotonic()
        run = train(task, setting, job.seed)
        made = provenance("cpu") | {"seconds": round(time.monotonic() - start, 3), "conditions": asdict(conditions)}
        folder.add(Part(_columns(job, run), _trace(run), made))
        yield job


def _columns(job: Job, run: Run) -> Columns:
    missing = np.array([np.nan], np.float32)
    return {
        "task": np.array([job.task]),
        "optimizer": np.array([job.optimizer]),
        "batch": np.array([job.batch], np.int32),
        "seed": np.array([job.seed], np.int32),
        **{name: np.array([value]) for name, value in job.options},
        "test_error": np.array([run.test_errors[1:]], np.float32),
        "train_error": np.array([run.train_error], np.float32),
        "average_test_error": np.array(run.averaged_errors[-1:], np.float32) if run.averaged_errors else missing,
        "test_loss": missing,
        "train_loss": missing,
    }


def _trace(run: Run) -> Columns:
    if not run.traces:
        return {}
    traces = list(run.traces.values())
    value = np.array([[trace.lr, trace.momentum, trace.noise] for trace in traces], np.float32)  # (L, 3, P)
    return {
        "step": np.array(traces[0].step, np.int32),
        "tensor": np.array(list(run.traces)),
        "value": three_digits(value.transpose(2, 1, 0)[None]),
    }
