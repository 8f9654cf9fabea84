"""Random numbers that depend on nothing but (seed, stream, time, index): a run draws the same ones alone or in company.

A counter-based generator: every number is an integer hash of its coordinates, computed with exact integer arithmetic,
so it is the same on every device, needs no state, and can be replayed inside a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

ORDER, DROPOUT = 0, 1  # streams
_LOW = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers (held in int64) in which every input bit flips half of the output bits."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW
    return x ^ (x >> 16)


def hashes(seeds: Tensor, stream: int, time: Tensor, count: int) -> Tensor:
    """(K, count) independent 32-bit integers for K seeds at one time (an epoch or a step, a 0-dim tensor)."""
    key = _mix((_mix((_mix(seeds & _LOW) + stream) & _LOW) + time) & _LOW)
    index = _mix((torch.arange(count, device=seeds.device) * _GOLDEN) & _LOW)
    return _mix(_mix(index ^ key[:, None]) ^ _mix((key + _GOLDEN) & _LOW)[:, None])


def orders(seeds: Tensor, epoch: int, count: int) -> Tensor:
    """(K, count): for every seed a permutation of range(count), by sorting hashes; the index breaks ties."""
    time = torch.tensor(epoch, device=seeds.device)
    keys = (hashes(seeds, ORDER, time, count) << 31) | torch.arange(count, device=seeds.device)
    return keys.sort(dim=1).values & 0x7FFFFFFF


def dropout_factors(seeds: Tensor, step: Tensor, batch: int, rates: Tensor, dtype: torch.dtype) -> Tensor:
    """(K, batch, features): 0 with the feature's rate, 1 / (1 - rate) otherwise."""
    uniform = hashes(seeds, DROPOUT, step, batch * len(rates)).view(len(seeds), batch, -1)
    threshold = (rates.double() * (_LOW + 1)).long()
    return torch.where(uniform >= threshold, 1 / (1 - rates.to(dtype)), 0)
