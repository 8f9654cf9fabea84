"""The kernel for |x| of several tensors gives what torch's own operation does, where these lie in one piece.

It needs Triton, and a GPU or its interpreter: where there is no GPU, the tests below run once more in a process of
their own.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autoopt.capture import lengths
from autoopt.capture.lengths import Lengths
from interpreter import DEVICE, elsewhere, here, interpreted, run_interpreted

pytest.importorskip("triton", reason="the kernels are written in Triton")
from autoopt.moments import length

__all__ = ["interpreted"]  # a fixture


@elsewhere
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def tensors(sizes: tuple[tuple[int, ...], ...] = ((3, 5), (), (0, 2), (70, 40), (4, 3, 2, 2))) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size, device=DEVICE) for size in sizes]


@here
@pytest.mark.usefixtures("interpreted")
class TestKernel:
    @pytest.fixture(autouse=True)
    def _everywhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tensors are small here, and an interpreter runs the kernel on a CPU."""
        monkeypatch.setattr(lengths, "available", lambda device: True)
        monkeypatch.setattr(length, "BLOCK", 16)
        monkeypatch.setattr(length, "PIECE", 32)

    @pytest.fixture
    def planned(self, monkeypatch: pytest.MonkeyPatch) -> list[object]:
        """What was made to go by."""
        made: list[object] = []
        plain = length.Pieces.__init__
        monkeypatch.setattr(length.Pieces, "__init__", lambda self, *a: (made.append(self), plain(self, *a))[1])
        return made

    def test_each_has_its_own(self, planned: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(length, "PIECES", 4)
        given = tensors()
        given[-1] = given[-1].to(memory_format=torch.channels_last)
        wanted = torch.stack([tensor.double().norm() for tensor in given])
        torch.testing.assert_close(Lengths()(given), wanted, rtol=1e-6, atol=0.0)
        assert len(planned) == 1

    def test_they_may_move_and_change_their_shape(self, planned: list[object]) -> None:
        take = Lengths()
        for number, given in enumerate((tensors(), tensors(), tensors(((7, 9), (5,))))):
            wanted = torch.stack([tensor.double().norm() for tensor in given])
            torch.testing.assert_close(take(given), wanted, rtol=1e-6, atol=0.0)
            assert len(planned) == (1 if number < 2 else 2)

    def test_what_nobody_touched_has_the_same_to_the_last_bit(self) -> None:
        take, given = Lengths(), tensors()
        before = take(given)
        assert torch.equal(take(given), before)
        given[3].data.mul_(1 + 1e-6)
        assert (take(given) != before).tolist() == [False, False, False, True, False]

    @pytest.mark.parametrize("kind", ["half", "double", "gaps"])
    def test_others_go_the_ordinary_way(self, kind: str, planned: list[object]) -> None:
        given = tensors()
        given[0] = {"half": given[0].half(), "double": given[0].double(), "gaps": given[0][:, ::2]}[kind]
        wanted = torch.stack([tensor.double().norm() for tensor in given])
        torch.testing.assert_close(Lengths()(given).double(), wanted, rtol=1e-3 if kind == "half" else 1e-6, atol=0.0)
        assert not planned

    def test_what_is_no_number_is_none(self) -> None:
        given = tensors()
        given[0][0, 0], given[3][1, 1] = torch.nan, torch.inf
        found = Lengths()(given)
        assert found.isfinite().tolist() == [False, True, True, False, True]
