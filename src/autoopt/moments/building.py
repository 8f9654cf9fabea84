"""Whether Triton's kernels can be built here, and the tables that they go by.

That takes a GPU and a C compiler, and a Triton that can make something of a kernel: it is known when it was tried. What
could not be built is done by operations, and whoever tried remembers that.
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
_missed: set[str] = set()  # kernels that could not be built, and were warned of


def available(device: torch.device) -> bool:
    """Whether kernels are to run there."""
    return ENABLED and device.type == "cuda"


def built(kernel: str, start: Callable[[], T]) -> T | None:
    """What the start of a kernel gives; None, after a warning, where it cannot be built: then nothing was done."""
    try:
        return start()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise
        if kernel not in _missed:
            _missed.add(kernel)
            why = next(iter(str(error).splitlines()), "")
            warnings.warn(
                f"AutoOpt's kernel '{kernel}' could not be built ({type(error).__name__}: {why}), so that training "
                "takes longer. Triton needs a C compiler; AUTOOPT_FUSED=0 does without kernels and says nothing.",
                RuntimeWarning,
                stacklevel=2,
            )
        return None


def stream(device: torch.device) -> int:
    """What tells the stream of a GPU that is current from others."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def uploaded(numbers: Sequence[int], device: torch.device) -> Tensor:
    """A table on the device, without waiting for it."""
    return pinned(numbers, device).to(device, non_blocking=True)


def pinned(numbers: Sequence[int], device: torch.device) -> Tensor:
    """A table on the host, from where a GPU can take it by itself."""
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
