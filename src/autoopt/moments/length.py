# mypy: ignore-errors
# (Triton's kernel language is not typed Python.)
"""A GPU kernel for Σ x² of several tensors. The twin in plain PyTorch is `torch._foreach_norm`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoopt.moments.building import uploaded

BLOCK = 1024
PIECE = 1 << 16  # elements that a program sums up, or more, so that ...
PIECES = 128  # ... a tensor has no more of them: their sums are summed up one after the other


@triton.jit
def squares(addresses, tensors, starts, ends, out, BLOCK: tl.constexpr):
    """That of one piece of a tensor, of which each lane sums up some in float32, and these are summed in float64."""
    piece = tl.program_id(0)
    x = tl.load(addresses + tl.load(tensors + piece)).to(tl.pointer_type(tl.float32))
    end = tl.load(ends + piece)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.load(starts + piece), end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        part = tl.load(x + at, mask=at < end, other=0.0)
        sums += part * part
    tl.store(out + piece, tl.sum(sums.to(tl.float64), 0))


class Pieces:
    """What the kernel goes by, for tensors of so many elements."""

    def __init__(self, sizes: list[int], device: torch.device) -> None:
        starts, ends, tensors, offsets = [], [], [], [0]
        for tensor, size in enumerate(sizes):
            length = max(PIECE, BLOCK * triton.cdiv(size, BLOCK * PIECES))
            first = range(0, size, length)
            starts += first
            ends += [min(start + length, size) for start in first]
            tensors += [tensor] * len(first)
            offsets.append(len(starts))
        tables = [uploaded(numbers, device) for numbers in (tensors, starts, ends, offsets)]
        self.tensors, self.starts, self.ends, self.offsets = tables

    def lengths(self, addresses: Tensor) -> Tensor:
        """|x| of each of the tensors at these addresses, of float32 and without gaps."""
        out = torch.empty(len(self.starts), dtype=torch.float64, device=addresses.device)
        squares[(len(out),)](addresses, self.tensors, self.starts, self.ends, out, BLOCK=BLOCK, num_warps=4)
        return torch.segment_reduce(out, "sum", offsets=self.offsets, unsafe=True).sqrt_()
