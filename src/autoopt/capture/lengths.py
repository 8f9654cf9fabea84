"""|g| of many gradients, twice a step: what the host has to do for each of them adds up."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autoopt.capture.aside import recording
from autoopt.moments import wide
from autoopt.moments.building import available, built, uploaded

if TYPE_CHECKING:  # it imports Triton
    from autoopt.moments.length import Pieces


class Lengths:
    """|x| of some tensors, all on one device, in the precision that a step squares them in.

    On a GPU a kernel finds them by a table of their addresses, which is sent there when one of them changes. While a
    graph is recorded nothing can be sent, and what the host does costs nothing.
    """

    def __init__(self) -> None:
        self._layout: list[tuple[torch.Size, tuple[int, ...]]] = []
        self._pieces: Pieces | None = None  # of tensors that lie so; None: not for the kernel
        self._addresses: list[int] = []
        self._table = torch.empty(0, dtype=torch.int64)  # of them

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """(tensors,)."""
        device = tensors[0].device
        if not torch.compiler.is_compiling() and available(device) and not recording(device):
            found = self._by_kernel(tensors, device)
            if found is not None:
                return found
        return torch.stack(torch._foreach_norm([wide(tensor) for tensor in tensors]))

    def _by_kernel(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor | None:
        if any([tensor.dtype != torch.float32 for tensor in tensors]):  # noqa: C419 - half the time of a generator
            return None
        layout = [(tensor.shape, tensor.stride()) for tensor in tensors]
        if layout != self._layout or device != self._table.device:
            self._layout, self._pieces = layout, _pieces(tensors, device)
            self._addresses = []
        pieces = self._pieces
        if pieces is None:
            return None
        addresses = [tensor.data_ptr() for tensor in tensors]
        if addresses != self._addresses:
            self._addresses, self._table = addresses, uploaded(addresses, device)
        with torch.cuda.device_of(self._table):
            found = built("squares", lambda: pieces.lengths(self._table))
        if found is None:
            self._pieces = None
        return found


def _pieces(tensors: Sequence[Tensor], device: torch.device) -> "Pieces | None":
    if not all(map(_dense, tensors)):
        return None
    from autoopt.moments.length import Pieces

    return Pieces([tensor.numel() for tensor in tensors], device)


def _dense(tensor: Tensor) -> bool:
    """Whether its elements fill one piece of memory."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()
