"""Two ranks under each framework: bit-identical to each other, and what one process does with all the samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from autoopt import AutoAdam
from integration.ranks import EPOCHS, SAMPLES, network, samples
from ranks import torchrun


@pytest.mark.parametrize(
    ("framework", "package"),
    [("lightning", "lightning.pytorch"), ("accelerate", "accelerate"), ("trainer", "transformers")],
)
def test_two_ranks_do_what_one_process_does(framework: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package, reason="needs an extra of autoopt: lightning or hf")
    torchrun(Path(__file__).with_name("ranks.py"), framework, tmp_path, seconds=300)

    model = network()
    optimizer = AutoAdam(model)
    x, y = samples()
    for _ in range(EPOCHS):
        for rows in torch.arange(len(y)).split(SAMPLES):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()

    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    for name, weight in model.state_dict().items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], weight, rtol=0, atol=1e-6)
    assert not torch.equal(first["0.weight"], network()[0].weight)
