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

from autoopt import AutoAdam, AutoSGD
from autoopt.capture import Capture, alone, sampled
from autoopt.moments import building
from autoopt.moments.norm import BatchNorm
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

    def test_statistics_in_another_precision(self) -> None:
        """As those of a BatchNorm layer of half precision that is put into evaluation mode on the way."""
        torch.manual_seed(0)
        parameters = {"weight": torch.ones(8, device=DEVICE), "bias": torch.ones(8, device=DEVICE)}
        operation = BatchNorm(None, None, True, 0.1, 1e-5)
        own, some = alone.Alone(True, parameters), sampled.Some(slice(2, 6, 6), 1, 6.0)
        dy, x = torch.randn(2, 6, 8, 3, 3, device=DEVICE).half().unbind()
        mean, rstd = torch.randn(8, device=DEVICE), torch.rand(8, device=DEVICE) + 0.5
        for dtype in (torch.float32, torch.float16, torch.float32):
            tensors = dy, x, mean.to(dtype), rstd.to(dtype)
            assert own.add(operation, {"weight": "weight", "bias": "bias"}, tensors, some)
            wide = [tensor.double() for tensor in tensors]
            normal = (wide[1][2] - wide[2][:, None, None]) * wide[3][:, None, None]
            wanted = 6 * (wide[0][2] * normal).sum((1, 2)).square().sum()
            torch.testing.assert_close(own.squares()["weight"].double(), wanted, rtol=1e-4, atol=0.0)

    def test_more_parameters_than_rows_of_a_table(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        monkeypatch.setattr(alone, "ROWS", 3)
        model = nn.Sequential(*[nn.LayerNorm(4) for _ in range(5)], nn.Flatten(), nn.Linear(12, 5)).to(DEVICE)
        batches = [(torch.randn(6, 3, 4).to(DEVICE), torch.randint(0, 5, (6,)).to(DEVICE))] * 2
        found = self.squares(copy.deepcopy(model), True, batches)
        monkeypatch.setattr(alone, "available", lambda device: False)
        for name, square in self.squares(model, True, batches).items():
            torch.testing.assert_close(found[name], square, rtol=1e-5, atol=0.0)

    @pytest.mark.parametrize(
        "broken", [["product_of_one"], ["positions_of_one"], ["product_of_one", "positions_of_one"]]
    )
    def test_what_cannot_be_built_operations_do(self, broken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        class Broken:
            def __init__(self, name: str) -> None:
                self.__name__ = name

            def __getitem__(self, grid: Any) -> Any:
                raise OSError("no C compiler")

        monkeypatch.setattr(building, "_missed", set())
        for name in broken:
            monkeypatch.setattr(one, name, Broken(name))
        torch.manual_seed(0)
        model = network().to(DEVICE)
        twin = copy.deepcopy(model)
        batches = [(torch.randn(6, 3, 8, 8).to(DEVICE), torch.randint(0, 5, (6,)).to(DEVICE))]
        with pytest.warns(RuntimeWarning, match="no C compiler") as caught:
            found = self.squares(model, True, batches)
        assert len(caught) == len(broken)  # and not for each layer
        monkeypatch.setattr(alone, "available", lambda device: False)
        for name, square in self.squares(twin, True, batches).items():
            torch.testing.assert_close(found[name], square, rtol=1e-4, atol=1e-9)

    @pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
    def test_biases_in_a_group_before_the_weights(self, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        start, noises = network().to(DEVICE), []
        x, y = torch.randn(6, 3, 8, 8).to(DEVICE), torch.randint(0, 5, (6,)).to(DEVICE)
        for kernels in (True, False):
            monkeypatch.setattr(alone, "available", lambda device, kernels=kernels: kernels)
            model = copy.deepcopy(start)
            biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
            weights = [p for name, p in model.named_parameters() if not name.endswith("bias")]
            opt = make(model, param_groups=[{"params": biases}, {"params": weights, "weight_decay": 0.1}])
            F.cross_entropy(model(x), y).backward()
            opt.step()
            noises.append({name: chosen.noise for name, chosen in opt.tuned().items() if name != "0.bias"})
        assert noises[0] == pytest.approx(noises[1], rel=1e-3)  # but of 0.bias, which BatchNorm cancels
