"""What kernels find of one sample is what the operations of `sampled` find.

They need Triton, and a GPU or its interpreter: where there is no GPU, the tests below run once more in a process of
their own.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt.capture import Capture, alone, sampled
from autoopt.moments import building
from interpreter import DEVICE, elsewhere, here, interpreted, run_interpreted

pytest.importorskip("triton", reason="the kernels are written in Triton")
from autoopt.moments import one

__all__ = ["interpreted"]  # a fixture


@elsewhere
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def network() -> nn.Module:
    """Layers that kernels know, and two that they do not: a grouped convolution, and an activation."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.PReLU(8), nn.Conv2d(8, 8, 3, groups=8), nn.GroupNorm(2, 8),
        nn.Flatten(2), nn.Linear(36, 12), nn.LayerNorm(12), nn.Flatten(), nn.Linear(96, 5),
    )  # fmt: skip


@here
@pytest.mark.usefixtures("interpreted")
class TestKernels:
    @pytest.fixture(autouse=True)
    def _everywhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Layers are small here, and an interpreter runs the kernels on a CPU."""
        monkeypatch.setattr(sampled, "ROOM", 0)
        monkeypatch.setattr(alone, "available", lambda device: True)

    def squares(self, model: nn.Module, total: bool, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        capture = Capture(model, dict(model.named_parameters()), elementwise=not total)
        capture.exact = False
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
        found = {name: capture.second_moment(name) for name, _ in model.named_parameters()}
        capture.detach()
        assert all(square is not None for square in found.values())
        return {name: square for name, square in found.items() if square is not None}

    @pytest.mark.parametrize("total", [False, True], ids=["elementwise", "total"])
    def test_a_network(self, total: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        model = network().to(DEVICE)
        twin = copy.deepcopy(model)
        # another size of the batch is another row, and comes back
        sizes = (6, 6, 9, 6)
        batches = [(torch.randn(n, 3, 8, 8).to(DEVICE), torch.randint(0, 5, (n,)).to(DEVICE)) for n in sizes]
        started: list[one.Plan] = []
        start = one.Plan.start
        monkeypatch.setattr(one.Plan, "start", lambda self, *a: started.append(self) or start(self, *a))
        found = self.squares(model, total, batches)
        # conv, batch norm, group norm, linear over positions, layer norm, in each pass, of which three are alike
        assert len(started) == 5 * len(sizes)
        assert len(set(map(id, started))) == 5 * 3
        monkeypatch.setattr(alone, "available", lambda device: False)
        wanted = self.squares(twin, total, batches)
        assert found.keys() == wanted.keys()
        for name, square in wanted.items():
            assert found[name].shape == square.shape
            # float32 in another order; that of what comes to nothing before BatchNorm is rounding alone
            torch.testing.assert_close(found[name], square, rtol=1e-4, atol=1e-9)

    def test_more_parameters_than_rows_of_a_table(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        monkeypatch.setattr(alone, "ROWS", 3)
        model = nn.Sequential(*[nn.LayerNorm(4) for _ in range(5)], nn.Flatten(), nn.Linear(12, 5)).to(DEVICE)
        batches = [(torch.randn(6, 3, 4).to(DEVICE), torch.randint(0, 5, (6,)).to(DEVICE))] * 2
        found = self.squares(copy.deepcopy(model), True, batches)
        monkeypatch.setattr(alone, "available", lambda device: False)
        for name, square in self.squares(model, True, batches).items():
            torch.testing.assert_close(found[name], square, rtol=1e-5, atol=0.0)

    def test_without_a_compiler_operations_do_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Broken:
            def __getitem__(self, grid: Any) -> Any:
                raise OSError("no C compiler")

        monkeypatch.setattr(building, "_broken", [])
        monkeypatch.setattr(building, "_built", [])
        monkeypatch.setattr(one, "product_of_one", Broken())
        monkeypatch.setattr(one, "positions_of_one", Broken())
        monkeypatch.setattr(alone, "available", lambda device: not building._broken)
        torch.manual_seed(0)
        model = network().to(DEVICE)
        twin = copy.deepcopy(model)
        batches = [(torch.randn(6, 3, 8, 8).to(DEVICE), torch.randint(0, 5, (6,)).to(DEVICE))]
        with pytest.warns(RuntimeWarning, match="no C compiler") as caught:
            found = self.squares(model, True, batches)
        assert len(caught) == 1
        for name, square in self.squares(twin, True, batches).items():
            assert torch.equal(found[name], square), name
