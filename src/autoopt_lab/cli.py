"""The command line `autoopt`."""

import importlib.metadata
import math
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
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
    from autoopt_lab.compare import Comparison
    from autoopt_lab.demo import Row
    from autoopt_lab.record import Job, Manifest
    from autoopt_lab.results import Results

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


def _version(asked: bool) -> None:
    if asked:
        print(f"autoopt {importlib.metadata.version('autoopt')}")
        raise typer.Exit


@app.callback()
def laboratory(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
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


DataFolder = Annotated[Path | None, typer.Option(help="Folder of the data, else AUTOOPT_DATA, else it is downloaded.")]
Device = Annotated[
    str,
    typer.Option(
        help="auto, cpu, or a list: cuda:0,cuda:1 for a process on each, cuda:0,cuda:0 for two chunks at once."
    ),
]
On = Annotated[str, typer.Option(help="here, or ray: train on the Ray cluster at --address (autoopt[ray]).")]
Address = Annotated[str, typer.Option(help="Of the Ray cluster, HOST:PORT; auto: the one of this machine.")]
Minutes = Annotated[float, typer.Option(help="Begin nothing that would not end by then.", min=0)]
Average = Annotated[float | None, typer.Option(help="Also average the weights, with this share of the newest.")]


@app.command(epilog="Examples: autoopt paper --fast --data DATA; autoopt paper --data DATA --seeds 0:3")
def paper(
    out: Annotated[Path, typer.Option(help="Run folder: gone on with if it is there.")] = Path("runs/paper"),
    data: DataFolder = None,
    device: Device = "auto",
    on: On = "here",
    address: Address = "auto",
    fast: Annotated[bool, typer.Option("--fast", help="A small version, for a CPU and a few minutes.")] = False,
    seeds: Annotated[str | None, typer.Option(help="FIRST:END, only these now; all ten by default.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="TASK, TASK/OPTIMIZER or TASK/OPTIMIZER/BATCH, * for any; repeatable.")
    ] = None,
    minutes: Minutes = math.inf,
    average: Average = None,
    add: Annotated[list[Path] | None, typer.Option(help="First take in results packed elsewhere; repeatable.")] = None,
    tables: Annotated[
        bool, typer.Option("--tables", help="Train nothing: tables and figures of what is there.")
    ] = False,
) -> None:
    """Repeat the paper's search, and make its Table 2 and Figures 2, 3 and 4 of the results."""
    from autoopt_lab.pack import unpack
    from autoopt_lab.paper import chosen, protocol, small_protocol
    from autoopt_lab.record import Folder
    from autoopt_lab.report import paper_page

    with _mendable():
        for file in add or []:
            print(f"{file}: {unpack(file, Folder(out))} runs")
        if not tables:
            manifest = small_protocol(average) if fast else protocol(average)
            _train(manifest, chosen(manifest, seeds, only or []), out, data, (on, address, device), minutes)
        results = _results(out)
        page, table = paper_page.write(results, out)
    print(f"Table 2: {table}\nPage: {page}")


@app.command(epilog="Example: autoopt sweep --task mnist --optimizer sgd --lr 0.01,0.1 --momentum 0,0.9 --seeds 0:3")
def sweep(
    task: Annotated[str, typer.Option(help="digits, mnist, cifar10, or a Python file with NET and data(folder).")],
    optimizer: Annotated[
        str, typer.Option(help="sgd, adam, adagrad; auto-sgd, ...: the library's default; paper-sgd, ...: Algorithm 1.")
    ],
    out: Annotated[Path, typer.Option(help="Run folder: gone on with, or added to, if it is there.")] = Path(
        "runs/sweep"
    ),
    lr: Annotated[str | None, typer.Option(help="Learning rates, separated by commas.")] = None,
    momentum: Annotated[str | None, typer.Option(help="Momenta, separated by commas.")] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "128",
    seeds: Annotated[str, typer.Option(help="FIRST:END.")] = "0:3",
    epochs: Annotated[int, typer.Option(help="Epochs of every run.", min=1, max=1000)] = 10,
    data: DataFolder = None,
    device: Device = "auto",
    on: On = "here",
    address: Address = "auto",
    minutes: Minutes = math.inf,
    average: Average = None,
) -> None:
    """Train every combination of the settings, many side by side; interrupted, it goes on where it was."""
    from autoopt_lab.paper import seed_range
    from autoopt_lab.record import Conditions, Group, Manifest
    from autoopt_lab.sweep import check_rate

    with _mendable():
        check_rate(optimizer, lr is not None)
        grid: list[dict[str, float]] = [{}]
        for name, values in (("lr", lr), ("momentum", momentum)):
            if values is not None:
                grid = [{**options, name: value} for options in grid for value in _numbers(f"--{name}", values)]
        sizes = tuple(int(size) for size in _numbers("--batch", batch))
        group = Group(task, optimizer, sizes, tuple(grid), tuple(seed_range(seeds)))
        manifest = Manifest("sweep", Conditions(epochs, average=average), (group,))
        _train(manifest, lambda job: True, out, data, (on, address, device), minutes)
        results = _results(out)
    _show_best(results)
    print(f"Results: {out / 'results.parquet'}")


@app.command(epilog="Examples: autoopt train; autoopt train --task my_task.py:task --optimizer adam --lr 0.001")
def train(
    task: Annotated[str, typer.Option(help="digits, mnist, cifar10, or FILE.py:NAME, a Task of your own.")] = "digits",
    optimizer: Annotated[
        str, typer.Option(help="auto-sgd, auto-adam, auto-adagrad; paper-sgd, ...: Algorithm 1; sgd, adam, adagrad.")
    ] = "auto-sgd",
    out: Annotated[Path, typer.Option(help="Run folder: added to if it is there.")] = Path("runs/train"),
    lr: Annotated[float | None, typer.Option(help="Learning rate of a plain optimizer.", min=0)] = None,
    batch: Annotated[int, typer.Option(help="Batch size.", min=1)] = 64,
    seeds: Annotated[str, typer.Option(help="FIRST:END.")] = "0:1",
    epochs: Annotated[int, typer.Option(help="Epochs of every run.", min=1, max=1000)] = 10,
    data: DataFolder = None,
) -> None:
    """Train one task with one optimizer in a plain PyTorch loop, on the CPU; then see: autoopt report."""
    from autoopt_lab.paper import seed_range
    from autoopt_lab.progress import tracked
    from autoopt_lab.record import Folder
    from autoopt_lab.single import check_task, load_task, manifest, train_each
    from autoopt_lab.sweep import outstanding

    console, folder = Console(), Folder(out)
    with _mendable(), _resumable():
        wanted = manifest(task, optimizer, lr, batch, epochs, seed_range(seeds))
        check_task(load_task(task, data), batch)
        with outstanding(folder, wanted, "cpu") as todo:
            jobs = [job for chunk in todo for job in chunk]
            runs = train_each(folder, jobs, wanted.conditions, data)
            for _ in tracked(runs, len(jobs), "Training runs", console):
                pass
        results = _results(out)
    _show_best(results)
    print(f"For the page: autoopt report {out}")


@app.command(epilog="Examples: autoopt compare; autoopt compare --task mnist --optimizers auto-sgd,adamw,prodigy,dog")
def compare(
    task: Annotated[str, typer.Option(help="digits, mnist, cifar10, or FILE.py:NAME, a Task of your own.")] = "digits",
    optimizers: Annotated[
        str | None, typer.Option(help="Names separated by commas; by default all that are installed.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the page, the table and the numbers.")] = Path("runs/compare"),
    epochs: Annotated[int, typer.Option(help="Epochs of every run.", min=1, max=1000)] = 20,
    batch: Annotated[int, typer.Option(help="Batch size.", min=1)] = 64,
    seeds: Annotated[str, typer.Option(help="FIRST:END.")] = "0:3",
    data: DataFolder = None,
) -> None:
    """Train one task with the tuning-free optimizers of others beside ours, each as its authors recommend it."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read once, with torch: the memory profiler is talkative
    from autoopt_lab import compare as comparing
    from autoopt_lab import step_cost
    from autoopt_lab.paper import seed_range
    from autoopt_lab.peers import wanted
    from autoopt_lab.progress import tracked
    from autoopt_lab.report import compare_page
    from autoopt_lab.report.page import check_writable
    from autoopt_lab.single import check_task, load_task

    console, workers = Console(), min(4, os.cpu_count() or 1)
    with _mendable():
        names, left_out = wanted(optimizers)
        plan = comparing.Plan(task, epochs, batch, tuple(seed_range(seeds)), data)
        subject = load_task(task, data)
        check_task(subject, batch)
    with _writing(out):
        check_writable(out)
    if left_out:
        print(f"Left out, not installed: {', '.join(left_out)}; all of them: pip install 'autoopt[peers]'")
    print("Measuring a step of every optimizer")
    costs = step_cost.costs(subject, names, batch)
    try:
        runs = comparing.train_all(plan, names, workers)
        outcomes = list(tracked(runs, len(names) * len(plan.seeds), "Training runs", console))
    except BrokenProcessPool:
        raise typer.TyperException("a training process was killed, perhaps for memory: free some, run again") from None
    with _mendable():
        found = comparing.comparison(plan, outcomes, costs, left_out)
        page = compare_page.write(found, out)
    console.print(_compared(found))
    print(textwrap.fill(comparing.verdict(found), console.width))
    print(f"Page: {page}")


@app.command(epilog="Example: autoopt report runs/paper")
def report(run: Annotated[Path, typer.Argument(help="Run folder of train, sweep or paper.")]) -> None:
    """Write one HTML page on a run folder: verdict, every setting, learning curves, what was chosen per layer."""
    from autoopt_lab.report import run_page
    from autoopt_lab.results import load

    with _mendable():
        results, damaged = load(run)
        for sentence in damaged:
            print(sentence)
        page = run_page.write(results, run)
    print(f"Page: {page}")


def _numbers(option: str, values: str) -> list[float]:
    try:
        numbers = [float(value) for value in values.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise typer.TyperException(f"{option} {values} is not a list of numbers separated by commas, such as 0.01,0.1")
    if option == "--momentum" and not all(number < 1 for number in numbers):
        raise typer.TyperException(f"--momentum {values} is not a list of numbers below 1, such as 0,0.9")
    if option == "--batch" and not all(number >= 1 and number.is_integer() for number in numbers):
        raise typer.TyperException(f"--batch {values} is not a list of whole numbers, such as 64,128")
    return numbers


def _train(
    manifest: "Manifest",
    select: "Callable[[Job], bool]",
    out: Path,
    data: Path | None,
    where: tuple[str, str, str],
    minutes: float,
) -> None:
    from autoopt_lab.devices import chosen
    from autoopt_lab.progress import tracked
    from autoopt_lab.record import Folder
    from autoopt_lab.sweep import outstanding, sweep

    console, folder, deadline = Console(), Folder(out), time.monotonic() + 60 * minutes
    with _resumable(), chosen(*where) as pool, outstanding(folder, manifest, pool.device, select) as todo:
        total = sum(map(len, todo))
        finished = sweep(folder, todo, manifest.conditions, pool, data, deadline)
        done = [chunk.done for chunk in tracked(finished, total, "Training runs", console, lambda c: len(c.jobs))]
    if len(done) < len(todo) or not all(done):
        print("Time is up; the same command goes on where this one stopped.")


@contextmanager
def _resumable() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print("autoopt: stopped; what is finished is kept, and the same command goes on from there.", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


def _results(out: Path) -> "Results":
    """Of the folder, whose parts are made into Parquet on the way."""
    from autoopt_lab.results import compact, load

    results, damaged = load(out)
    for sentence in damaged:
        print(sentence)
    return compact(out) if any((out / "parts").glob("*.npz")) else results


def _show_best(results: "Results") -> None:
    from autoopt_lab.table2 import cells, spread

    ranked = sorted(cells(results), key=lambda cell: (math.isnan(cell.advised.mean), cell.advised.mean))
    table = Table(title=f"The best of {len(ranked)} settings", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("Optimizer", "Setting", "Test error", "Averaged", "Train error", "Seeds"):
        table.add_column(heading)
    for cell in ranked[:10]:
        averaged = spread(cell.averaged) if cell.averaged else ""
        table.add_row(cell.optimizer, cell.config, spread(cell.test), averaged, spread(cell.train), str(cell.seeds))
    Console().print(table)


def _compared(comparison: "Comparison") -> Table:
    from autoopt_lab.compare import HEADINGS, shown

    table = Table(title="Final test error, and the price of a step", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    rows = [shown(row) for row in comparison.rows]
    for k, heading in enumerate(HEADINGS):
        if heading != "Failures" or any(row[k] for row in rows):
            table.add_column(heading)
    for row in rows:
        table.add_row(*row[: len(table.columns)])
    return table


@contextmanager
def _mendable() -> Iterator[None]:
    from autoopt_lab.paper import ERRORS

    try:
        yield
    except ERRORS as error:
        raise typer.TyperException(str(error)) from None


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "choose a folder that you may write to and that has room, with --out"
        raise typer.TyperException(f"cannot write to {folder} ({error.strerror}): {remedy}") from None


def _table(rows: list["Row"]) -> Table:
    from autoopt_lab.demo import percent
    from autoopt_lab.names import label

    table = Table(title=f"Final test error, mean over {SEEDS} seeds", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("Optimizer", "Averaged", "Last", "Best of the grid", "Median", "Worst"):
        table.add_column(heading)
    for row in rows:
        errors = [percent(error) for error in (row.auto.error, row.auto.last, row.best.error)]
        errors[-1] += f" at {row.best.setting.lr:.2g}"
        rest = (percent(result.error) for result in (row.median, row.worst))
        table.add_row(label(row.auto.setting.optimizer), *errors, *rest)
    return table


if __name__ == "__main__":
    main()
