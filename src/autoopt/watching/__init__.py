"""Watching an optimizer work: loggers, a live table, and advice on the batch size."""

from autoopt.watching.advice import Advice, advise, noise_scale
from autoopt.watching.loggers import Logger, TensorBoard
from autoopt.watching.readings import Automatic, readings, unwrap
from autoopt.watching.watcher import Watcher, watch

__all__ = [
    "Advice",
    "Automatic",
    "Logger",
    "TensorBoard",
    "Watcher",
    "advise",
    "noise_scale",
    "readings",
    "unwrap",
    "watch",
]
