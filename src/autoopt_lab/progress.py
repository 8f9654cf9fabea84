"""How far along a long command is: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Item = TypeVar("Item")


def tracked(
    items: Iterable[Item], total: int, what: str, console: Console, size: Callable[[Item], int] = lambda item: 1
) -> Iterator[Item]:
    """Pass `items` on, showing how many of `total` there were and how long the rest will take.

    An item counts for its `size`.
    """
    return (_bar if console.is_terminal else _lines)(items, total, what, console, size)


def _bar(items: Iterable[Item], total: int, what: str, console: Console, size: Callable[[Item], int]) -> Iterator[Item]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    left = (TextColumn("· left"), TimeRemainingColumn(elapsed_when_finished=False))
    with Progress(*columns, *left, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        for item in items:
            progress.advance(task, size(item))
            yield item


def _lines(
    items: Iterable[Item], total: int, what: str, console: Console, size: Callable[[Item], int]
) -> Iterator[Item]:
    start, done = time.monotonic(), 0
    for item in items:
        before, done = done, done + size(item)
        if done * 10 // total > before * 10 // total:  # ten lines in all
            left = (time.monotonic() - start) / done * (total - done)
            console.print(f"{what}: {done} of {total}, about {left:.0f} s left")
        yield item
