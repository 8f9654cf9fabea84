"""`watch`: read an optimizer every so many steps and hand what was read to loggers."""

import math
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from torch.optim import Optimizer

from autoopt.diagnostics import Tuned
from autoopt.watching.advice import Advice, advise
from autoopt.watching.loggers import Lines, Logger
from autoopt.watching.readings import readings, unwrap

WINDOW, ENOUGH = 20, 5  # readings that the advice is drawn from, at most and at least: one step says little


def watch(
    optimizer: Any, *loggers: Logger, every: int = 100, batch_size: int | None = None, first_step: int = 0
) -> "Watcher":
    """Watch an optimizer work: a live table of its layers, or whatever the loggers make of it.

        with autoopt.watch(opt, batch_size=32):
            train()

        watching = autoopt.watch(opt, TensorBoard("runs/first"), every=50)
        ...
        watching.close()

    Reads the device once in `every` steps. Nothing of the optimizer is kept alive, and it stops with the optimizer.

    Args:
        optimizer: an automatic optimizer, or the wrapper that Accelerate or Lightning put around it.
        loggers: where to; by default a live table in a terminal or notebook (with rich), else one line per reading.
        every: steps between two readings.
        batch_size: samples per step, over all ranks and accumulated batches; with it comes advice on the batch size.
        first_step: the number of steps done before, after a resume.
    """
    if every < 1:
        raise ValueError(f"every is {every}; it must be at least 1, the number of steps between two readings.")
    if batch_size is not None and batch_size < 2:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 2, as one sample has no spread.")
    for logger in loggers:
        if not isinstance(logger, Logger):
            raise TypeError(f"{type(logger).__name__} is no logger: it needs a method log(step, values).")
    watcher = Watcher(loggers or (_display(),), every, batch_size, first_step)
    watcher.attach(unwrap(optimizer))  # type: ignore[arg-type]
    return watcher


class Watcher:
    """What `watch` returns: a context manager, or to be closed by hand."""

    def __init__(self, loggers: Sequence[Logger], every: int, batch_size: int | None, first_step: int) -> None:
        self._loggers, self._every, self._batch_size = loggers, every, batch_size
        self._step = first_step
        self._history: deque[Mapping[str, Tuned]] = deque(maxlen=WINDOW)

    def attach(self, optimizer: Optimizer) -> None:
        """Begin. The optimizer holds the hook, and the hook does not hold the optimizer."""
        self._hook = optimizer.register_step_post_hook(self._stepped)
        self._end = weakref.finalize(optimizer, _close, self._loggers)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._step += 1
        if self._step % self._every == 0:
            tuned = optimizer.tuned()
            if any(math.isfinite(chosen.noise) for chosen in tuned.values()):
                self._history.append(tuned)
            values = readings(tuned)
            advice = self.advice
            if advice is not None:
                values |= {"batch/size": float(advice.batch_size), "batch/noise_scale": advice.noise_scale}
            for logger in self._loggers:
                logger.log(self._step, values)

    @property
    def advice(self) -> Advice | None:
        """Advice on the batch size from the last readings; None without a batch size, or while there are too few."""
        if self._batch_size is None or len(self._history) < ENOUGH:
            return None
        return advise(self._history, self._batch_size)

    def close(self) -> None:
        """Stop watching, and end the loggers."""
        self._hook.remove()
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close(loggers: Sequence[Logger]) -> None:
    for logger in loggers:
        if hasattr(logger, "close"):
            logger.close()


def _display() -> Logger:
    """A live table where it can be drawn, else lines."""
    try:
        from rich import get_console

        from autoopt.watching.table import LiveTable
    except ImportError:
        return Lines()
    console = get_console()
    return LiveTable(console) if console.is_terminal or console.is_jupyter else Lines()
