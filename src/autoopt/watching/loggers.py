"""Where readings go: anything with a `log` method. TensorBoard and plain lines are here, the live table in `table`."""

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Protocol, runtime_checkable

from autoopt.watching.advice import Advice


@runtime_checkable
class Logger(Protocol):
    """Takes what was read at one step. A `close` method, where there is one, is called at the end."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Values by name: "rate/conv1.weight", "momentum/conv1.weight", "noise/conv1.weight", and where the batch size
        is known "batch/size" and "batch/noise_scale"."""


class TensorBoard:
    """Writes scalars for TensorBoard; needs `pip install tensorboard`.

    Args:
        folder: the run's folder, as `tensorboard --logdir` reads it.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoard needs the package: pip install tensorboard") from error
        self._writer = SummaryWriter(str(folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left, and end."""
        self._writer.close()


class Lines:
    """Prints one line for each reading: the median over the parameters."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Print the line."""
        parts = [f"step {step}"]
        for kind in ("rate", "momentum", "noise"):
            of_kind = [value for key, value in values.items() if key.startswith(f"{kind}/")]
            if of_kind:
                parts.append(f"{kind} {median(of_kind):.3g} ({min(of_kind):.2g} to {max(of_kind):.2g})")
        advice = batch_advice(values)
        print("  ".join(parts) + (f"  {advice}" if advice else ""), flush=True)


def batch_advice(values: Mapping[str, float]) -> Advice | None:
    """The advice among the values, where the batch size is known."""
    if "batch/noise_scale" not in values:
        return None
    return Advice(round(values["batch/size"]), values["batch/noise_scale"])
