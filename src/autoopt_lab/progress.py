"""How far along a long command is: a bar on a terminal, a line now and then elsewhere."""

import math
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Item = TypeVar("Item")


def tracked(items: Iterable[Item], total: int, what: str, console: Console) -> Iterator[Item]:
    """Pass `items` on, showing how many of `total` there were and how long the rest will take."""
    return (_bar if console.is_terminal else _lines)(items, total, what, console)


def _bar(items: Iterable[Item], total: int, what: str, console: Console) -> Iterator[Item]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    left = (TextColumn("· left"), TimeRemainingColumn(elapsed_when_finished=False))
    with Progress(*columns, *left, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        for item in items:
            progress.advance(task)
            yield item


def _lines(items: Iterable[Item], total: int, what: str, console: Console) -> Iterator[Item]:
    first = math.nan  # the clock starts with the first item: what came before was preparation
    for done, item in enumerate(items, start=1):
        if done == 1:
            first = time.monotonic()
        elif done * 10 // total > (done - 1) * 10 // total:  # ten lines in all
            left = (time.monotonic() - first) / (done - 1) * (total - done)
            console.print(f"{what}: {done} of {total}, about {left:.0f} s left")
        yield item
