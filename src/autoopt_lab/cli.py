"""The command line `autoopt`."""

import os
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

try:
    import typer
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
except ImportError as missing:
    print(f"autoopt: {missing.name} is not installed; run: pip install 'autoopt[lab]'", file=sys.stderr)
    raise SystemExit(2) from None

if TYPE_CHECKING:  # commands import what they need when they run: --help need not wait for torch
    from autoopt_lab.demo import Result, Row

app = typer.Typer(add_completion=False, no_args_is_help=True)

SEEDS = 3
INTERRUPTED = 130  # what typer makes of Ctrl-C


def main() -> None:
    """Run the command line; a mistake the user can mend is one sentence on stderr and exit code 2, no traceback."""
    try:
        status = app(standalone_mode=False)
    except typer.TyperException as error:
        if message := error.format_message().strip().rstrip("."):  # empty: the help was shown instead
            context = getattr(error, "ctx", None)  # typer's own errors have one; ours name the remedy themselves
            hint = f"; see {context.command_path} --help" if context else ""
            print(f"autoopt: {message}{hint}.", file=sys.stderr)
        status = 2
    if status == INTERRUPTED:
        print("autoopt: stopped; nothing was written.", file=sys.stderr)
    sys.exit(status)


@app.callback()
def laboratory() -> None:
    """AutoOpt's laboratory: optimizers that set their own learning rate and momentum, put to the test."""


@app.command(epilog="Example: autoopt demo --epochs 10 --out runs/quick")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page, index.html.")] = Path("runs/demo"),
    epochs: Annotated[int, typer.Option(help="Epochs of every run.", min=1, max=1000)] = 20,
    seed: Annotated[int, typer.Option(help=f"First of {SEEDS} seeds.", min=0, max=2**31)] = 0,
) -> None:
    """Train a small CNN on scikit-learn's digits: no learning rate against a grid of nine, in about a minute."""
    from autoopt_lab.demo import settings, train_all
    from autoopt_lab.progress import tracked
    from autoopt_lab.report.page import Report, check_writable, write
    from autoopt_lab.tasks.digits import task

    console = Console()
    grid, seeds = settings(epochs), list(range(seed, seed + SEEDS))
    workers = min(4, os.cpu_count() or 1)
    with _writing(out):
        check_writable(out)  # before a minute of training, not after it
    start = time.monotonic()
    try:
        runs = list(tracked(train_all(task, grid, seeds, workers), len(grid) * SEEDS, "Training runs", console))
    except BrokenProcessPool:
        raise typer.TyperException("a training process was killed, perhaps for memory: free some, run again") from None
    report = Report(task, runs, workers, time.monotonic() - start)
    with _writing(out):
        path = write(report, out)
    console.print(_table(report.rows))
    print(textwrap.fill(report.verdict, console.width))
    print(f"Page: {path}")  # not through rich, which would wrap a long path


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "choose a folder that you may write to and that has room, with --out"
        raise typer.TyperException(f"cannot write to {folder} ({error.strerror}): {remedy}") from None


def _table(rows: list["Row"]) -> Table:
    table = Table(title=f"Final test error, mean over {SEEDS} seeds", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("Optimizer", "Auto", "Best of the grid", "Median", "Worst"):
        table.add_column(heading)
    for row in rows:
        cells = (_cell(result) for result in (row.auto, row.best, row.median, row.worst))
        table.add_row(row.auto.setting.optimizer, *cells)
    return table


def _cell(result: "Result") -> str:
    from autoopt_lab.demo import percent

    rate = "" if result.setting.lr is None else f" at {result.setting.lr:.2g}"
    return f"{percent(result.error)}{rate}"


if __name__ == "__main__":
    main()
