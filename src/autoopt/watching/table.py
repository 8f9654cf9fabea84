"""The live table of layers; needs rich."""

from collections.abc import Mapping

from rich.console import Console
from rich.live import Live
from rich.table import Table

from autoopt.watching.loggers import batch_advice


class LiveTable:
    """One table, in a terminal or a notebook, that each reading replaces.

    Args:
        console: where to draw it.
    """

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False)  # no thread: it is drawn when there is news

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Draw the table anew."""
        if not self._live.is_started:
            self._live.start()
        self._live.update(draw(step, values), refresh=True)

    def close(self) -> None:
        """Leave the last table where it is."""
        self._live.stop()


def draw(step: int, values: Mapping[str, float]) -> Table:
    """The table of one reading. Signal is the share 1 - noise of the squared gradient."""
    advice = batch_advice(values)
    table = Table(title=f"step {step}", caption=str(advice) if advice else None)
    table.add_column("parameter")
    for heading in ("rate", "momentum", "noise", "signal"):
        table.add_column(heading, justify="right")
    for name in dict.fromkeys(key.partition("/")[2] for key in values if not key.startswith("batch/")):
        noise = values.get(f"noise/{name}")
        signal = "" if noise is None else f"{min(max(1 - noise, 0.0), 1.0):.0%}"
        rate, momentum = (_figure(values.get(f"{kind}/{name}")) for kind in ("rate", "momentum"))
        table.add_row(name, rate, momentum, _figure(noise), signal)
    return table


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
