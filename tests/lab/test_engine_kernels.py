"""The GPU kernels compute what their plain twin computes.

They need Triton, and a GPU or Triton's interpreter (TRITON_INTERPRET=1); benchmarks/engine_gpu.py checks whole runs.
"""

from __future__ import annotations

import os

import pytest
import torch
from engine_tools import NET

from autoopt_lab.engine import random
from autoopt_lab.engine.layout import Layout
from autoopt_lab.engine.reference import Reference

pytest.importorskip("triton", reason="the kernels are written in Triton")
if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
    pytest.skip("the kernels need a GPU or Triton's interpreter", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RATES = torch.tensor([0.25] * 4 + [0.5] * 6)


def batch(runs: int, samples: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = torch.stack([NET.initial(seed) for seed in range(runs)])
    images = torch.randn(runs, samples, 11, 11, 2, generator=generator)
    labels = torch.randint(NET.classes, (runs, samples), generator=generator)
    factors = random.dropout_factors(torch.arange(runs), torch.tensor(3), samples, RATES, torch.float32)
    return weights, images, labels, factors


@pytest.mark.parametrize("moments", [False, True])
@pytest.mark.parametrize("samples", [6, 8])
def test_kernels_give_the_gradients_and_second_moments_of_the_twin(samples: int, moments: bool) -> None:
    from autoopt_lab.engine.fused import Fused

    weights, images, labels, factors = batch(3, samples)
    expected = Reference(NET).gradients(weights.double(), images.double(), labels, factors.double(), moments)
    weights, images, labels, factors = (x.to(DEVICE) for x in (weights, images, labels, factors))
    found = Fused(NET, "ieee").gradients(weights, images, labels, factors, moments)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-4, atol=1e-6)


def test_kernels_give_the_logits_of_the_twin() -> None:
    from autoopt_lab.engine.fused import Fused

    weights, images, _, _ = batch(3, 7)
    found = Fused(NET, "ieee").logits(weights.to(DEVICE), images[0].to(DEVICE)).cpu()
    torch.testing.assert_close(
        found.double(), Reference(NET).logits(weights.double(), images[0].double()), rtol=1e-5, atol=1e-6
    )


def test_segment_sums_are_sums_over_each_tensor() -> None:
    from autoopt_lab.engine import kernels

    x = torch.randn(3, NET.parameters, generator=torch.Generator().manual_seed(0))
    ends = torch.tensor(NET.sizes).cumsum(0)
    found = kernels.segment_sums(x.to(DEVICE), ends.to(DEVICE)).cpu()
    torch.testing.assert_close(found, Layout(NET.sizes).total(x), rtol=1e-5, atol=1e-5)
