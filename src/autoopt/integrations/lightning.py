"""Lightning: an automatic optimizer is returned from `configure_optimizers` like any other; this callback logs it."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from autoopt.watching import Automatic, readings, unwrap


class AutoOptMonitor(Callback):
    """Logs rate, momentum and noise of every parameter through the trainer's loggers.

        trainer = Trainer(callbacks=[AutoOptMonitor(every=50)])

    The names are "rate/NAME", "momentum/NAME" and "noise/NAME", with "0/", "1/" and so on in front where there are more
    optimizers than one. Reads the device once in `every` steps for each of them.

    Args:
        every: optimizer steps between two readings.
    """

    def __init__(self, every: int = 50) -> None:
        if every < 1:
            raise ValueError(f"every is {every}; it must be at least 1, the number of steps between two readings.")
        self.every = every
        self._optimizers: list[Automatic] = []
        self._last = 0  # the step after which was read last: several batches may share it

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the optimizers, and refuse a trainer that has none of ours or nowhere to log to."""
        if not trainer.loggers:
            raise ValueError("AutoOptMonitor has nowhere to log to: the trainer was made with logger=False.")
        self._optimizers = [unwrap(optimizer) for optimizer in trainer.optimizers if hasattr(optimizer, "tuned")]
        if not self._optimizers:
            kinds = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers)
            raise ValueError(f"AutoOptMonitor found no automatic optimizer: configure_optimizers returned {kinds}.")
        self._last = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Read and log, if it is time."""
        step = trainer.global_step
        if step // self.every == self._last // self.every:
            return
        self._last = step
        values: dict[str, float] = {}
        for number, optimizer in enumerate(self._optimizers):
            prefix = f"{number}/" if len(self._optimizers) > 1 else ""
            values |= {prefix + name: value for name, value in readings(optimizer.tuned()).items()}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let go of the optimizers."""
        self._optimizers = []
