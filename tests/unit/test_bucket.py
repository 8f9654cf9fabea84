"""Between tensors and the rows of a bucket nothing is lost, whatever the tensors are like."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoopt.optim.bucket import ROW, Bucket, bits_of, mask_

SHAPES = [(), (3,), (ROW,), (2, 5, ROW), (4, 3, 2, 2)]


def bucket(dtype: torch.dtype) -> Bucket:
    members = [(str(i), nn.Parameter(torch.randn(shape, dtype=dtype)), i) for i, shape in enumerate(SHAPES)]
    return Bucket(members, {"count": 0.0}, ["estimate"], [{} for _ in members])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masked_is_where(dtype: torch.dtype) -> None:
    matrix = torch.randn(6, ROW, dtype=dtype)
    matrix[::2, 0], matrix[::3, 1], matrix[0, 2] = torch.inf, torch.nan, -0.0
    rows = torch.tensor([True, False, False, True, True, False]).unsqueeze(1)
    expected = torch.where(rows, matrix, 0.0)
    bits = bits_of(rows, matrix.dtype)
    assert torch.equal(mask_(matrix.clone(), bits).nan_to_num(7.0), expected.nan_to_num(7.0))
    assert mask_(matrix.clone(), bits)[~rows.squeeze(1)].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_there_and_back(dtype: torch.dtype) -> None:
    layout = bucket(dtype)
    tensors: list[torch.Tensor | None] = [torch.randn(shape).to(dtype) for shape in SHAPES]
    tensors[-1] = torch.randn(SHAPES[-1]).to(dtype).to(memory_format=torch.channels_last)
    tensors[1] = None
    rows = layout.rows(tensors, "gradient")
    assert rows.dtype == layout.compute
    assert rows.shape[1] == ROW
    found = layout.tensors(rows)
    assert found[1].count_nonzero() == 0
    for tensor, there in zip(tensors, found, strict=True):
        assert tensor is None or (there.shape == tensor.shape and torch.equal(there, tensor.to(layout.compute)))
    assert rows.count_nonzero() == sum(t.count_nonzero() for t in found)  # what fills up the rows is zero


def test_numbers_of_host_and_device() -> None:
    layout = bucket(torch.float32)
    assert torch.equal(layout.numbers([3] * 5), torch.full((5,), 3.0).double())
    mixed = [3, torch.tensor(4.0), 5, torch.tensor(6.0), 0]
    assert torch.equal(layout.numbers(mixed), torch.tensor([3.0, 4.0, 5.0, 6.0, 0.0]).double())
