"""Whether Triton's kernels can be built here: it needs a GPU and a C compiler, which is known when one was built.

And the tables that they go by.
"""

import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
ENABLED = os.environ.get("AUTOOPT_FUSED") != "0" and importlib.util.find_spec("triton") is not None
_broken: list[str] = []  # why the kernels cannot be built here
_built: list[bool] = []  # whether one has been


def available(device: torch.device) -> bool:
    """Whether the kernels run there."""
    return ENABLED and device.type == "cuda" and not _broken


def built(start: Callable[[], T]) -> T | None:
    """What the start of a kernel gives; None, after a warning, where none can be built: then nothing was done."""
    try:
        found = start()
    except Exception as error:
        if _built or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            raise
        _broken.append(str(error))
        warnings.warn(
            f"AutoOpt's kernels could not be built ({type(error).__name__}: {error}), so that training takes longer. "
            "Triton needs a C compiler; AUTOOPT_FUSED=0 does without and says nothing.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    _built[:] = [True]
    return found


def uploaded(numbers: Sequence[int], device: torch.device) -> Tensor:
    """A table on the device, without waiting for it."""
    return pinned(numbers, device).to(device, non_blocking=True)


def pinned(numbers: Sequence[int], device: torch.device) -> Tensor:
    """A table on the host, from where a GPU can take it by itself."""
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
