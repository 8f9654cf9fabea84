"""Parameters with several uses under DistributedDataParallel: as in one process with all the samples."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm

from autoopt import AutoAdam, AutoSGD
from ranks import on_ranks

OPTIMIZERS = {"sgd": AutoSGD, "adam": AutoAdam}
STEPS, SAMPLES = 50, 12


class Language(nn.Module):
    """Embedding and head are tied, the body runs twice, the gate is computed from other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(7, 8), nn.Linear(8, 8), nn.Linear(8, 7)
        self.gate = weight_norm(nn.Linear(8, 8))
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        h = torch.tanh(self.body(torch.tanh(self.body(h)))) * torch.sigmoid(self.gate(h))
        result: Tensor = self.head(h)
        return result


def train(model: nn.Module, forward: nn.Module, kind: str, part: slice) -> None:
    optimizer = OPTIMIZERS[kind](model)
    for step in range(STEPS):
        tokens = torch.randint(0, 7, (SAMPLES, 5), generator=torch.Generator().manual_seed(step))[part]
        optimizer.zero_grad()
        F.cross_entropy(forward(tokens[:, :-1]).flatten(0, 1), (tokens[:, :-1] + 1).remainder(7).flatten()).backward()
        optimizer.step()


def made() -> Language:
    torch.manual_seed(0)
    return Language().double()


def rank(number: int, ranks: int, folder: Path, kind: str) -> None:
    model, share = made(), SAMPLES // ranks
    train(model, DistributedDataParallel(model), kind, slice(number * share, (number + 1) * share))
    torch.save(model.state_dict(), folder / f"{number}.pt")


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_ranks_agree_with_each_other_and_with_one_process(kind: str, tmp_path: Path) -> None:
    on_ranks(2, rank, tmp_path, kind)
    first, second = (torch.load(tmp_path / f"{number}.pt", weights_only=True) for number in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    model = made()
    train(model, model, kind, slice(None))
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(first[name], weight, rtol=1e-8, atol=1e-10, msg=name)
