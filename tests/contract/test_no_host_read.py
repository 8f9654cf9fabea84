"""step() never reads the device: on a GPU every such read would stop the queue. Shown on the CPU by catching them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autoopt import AutoSGD
from contract.small import Batch, backward, batches, every_optimizer, mlp

# methods that hand a tensor's values to Python
READS = [
    *("item", "tolist", "numpy", "cpu", "nonzero", "equal", "is_nonzero", "unique", "masked_select"),
    *("__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__", "__contains__"),
    *("__format__", "__repr__", "__str__"),
]
# operations whose result, or whose size, is only known once the device is done
WAITS = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "allclose",
    "bincount",
    "_to_cpu",
}


class HostReadError(AssertionError):
    """A step read from the device."""


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        if name in WAITS or masks or func is torch.ops.aten.repeat_interleave.Tensor:
            raise HostReadError(f"aten.{name}")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def caught(name: str) -> Callable[..., Any]:
        def read(*_: Any, **__: Any) -> Any:
            raise HostReadError(f"Tensor.{name}")

        return read

    with monkeypatch.context() as patch, Watch():
        for name in READS:
            patch.setattr(Tensor, name, caught(name), raising=False)
        yield


def watched_run(model: torch.nn.Module, optimizer: Any, data: list[Batch], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step lays out the state, from sizes that the host knows; every later one is watched."""
    for number, batch in enumerate(data):
        optimizer.zero_grad()
        backward(model, batch)
        if number == 0:
            optimizer.step()
        else:
            with no_host_reads(monkeypatch):
                optimizer.step()


@every_optimizer
@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1}, {"granularity": "group"}, {"measure_every": 2}], ids=str
)
def test_step_does_not_read(make: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    data = [*batches(3), *batches(1, samples=1), *batches(1)]
    watched_run(model, make(model, **options), data, monkeypatch)


@every_optimizer
def test_skipping_does_not_read(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even to see that a gradient is not finite or zero."""
    model = mlp()
    data = batches(4)
    data[1] = (data[1][0] * torch.nan, data[1][1])
    data[2] = (data[2][0] * 0, data[2][1])
    model[3].weight.requires_grad_(False)
    watched_run(model, make(model), data, monkeypatch)


READERS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "bool": lambda x: 1 if x.sum() > 0 else 0,
    "any": lambda x: any((x > 0).flatten()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.detach().numpy(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x),
    "isfinite": lambda x: bool(torch.isfinite(x).all()),
    "unique": lambda x: torch.unique(x),
    "print": lambda x: f"{x}",
    "index": lambda x: [1, 2, 3][(x.sum() * 0).long()],
}


@pytest.mark.parametrize("read", READERS)
def test_the_watch_sees_every_kind_of_read(read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: an optimizer that reads is caught."""

    class Reading(AutoSGD):
        def step(self, closure: Any = None) -> Any:
            READERS[read](self.param_groups[0]["params"][0].detach())
            return super().step(closure)

    model = mlp()
    with pytest.raises(HostReadError):
        watched_run(model, Reading(model), batches(2), monkeypatch)


def test_the_watch_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with no_host_reads(monkeypatch):
        pass
    assert torch.ones(1).item() == 1
    assert bool(torch.ones(1))
