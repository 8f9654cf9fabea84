"""From flat parameters (K, D) to one number per run and tensor (K, L), and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Layout:
    """Where every tensor lies in the flat buffer. A run's sums, and their order, never depend on the other runs."""

    def __init__(self, sizes: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.sizes = tuple(sizes)
        lengths = torch.tensor(self.sizes)
        self._tensor_of = torch.repeat_interleave(torch.arange(len(sizes)), lengths).to(device)
        self.elements = lengths.to(device)  # of each tensor
        self._ends = lengths.cumsum(0).to(device)
        self._on_gpu = self._ends.is_cuda

    def total(self, x: Tensor) -> Tensor:
        """(K, D) -> (K, L): the sum over each tensor."""
        if self._on_gpu:
            from autoopt_lab.engine import kernels  # Triton exists only where a GPU is

            return kernels.segment_sums(x, self._ends)
        return torch.stack([torch.stack([part.sum() for part in row.split(self.sizes)]) for row in x])

    def spread(self, x: Tensor) -> Tensor:
        """(K, L) -> (K, D): each tensor's number at each of its elements."""
        return x[:, self._tensor_of]
