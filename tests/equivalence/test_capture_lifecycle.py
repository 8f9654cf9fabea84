"""Accumulation, checkpointing, passes in between, copies and detaching: the moments and the model stay right."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoopt.capture import Capture
from reference import contributions


def small_cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3)
    ).double()


def batch(samples: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 1, 6, 6, dtype=torch.float64), torch.randint(3, (samples,))


def attach(model: nn.Module) -> Capture:
    return Capture(model, dict(model.named_parameters()), elementwise=True)


def moments(capture: Capture, model: nn.Module) -> dict[str, Tensor]:
    result = {}
    for name, _ in model.named_parameters():
        moment = capture.second_moment(name)
        assert moment is not None
        result[name] = moment.clone()
    return result


def assert_moments(capture: Capture, expected: dict[str, Tensor]) -> None:
    for name, c in expected.items():
        torch.testing.assert_close(capture.second_moment(name), c.square().sum(0), rtol=1e-10, atol=1e-14)


def test_accumulation_gives_the_moments_of_the_union() -> None:
    model = small_cnn()
    (x1, y1), (x2, y2) = batch(5), batch(3)
    first = contributions(model, lambda m: F.cross_entropy(m(x1), y1))
    second = contributions(model, lambda m: F.cross_entropy(m(x2), y2))
    capture = attach(model)
    F.cross_entropy(model(x1), y1).backward()
    F.cross_entropy(model(x2), y2).backward()
    assert_moments(capture, {name: torch.cat([first[name], second[name]]) for name in first})
    assert all(capture.samples(name) == 8 for name in first)


def test_accumulation_of_one_summed_loss() -> None:
    model = nn.Linear(3, 2).double()
    (x1, x2) = torch.randn(2, 4, 3, dtype=torch.float64)
    expected = contributions(model, lambda m: m(torch.cat([x1, x2])).square().sum())
    capture = attach(model)
    model(x1).square().sum().backward()
    model(x2).square().sum().backward()
    assert_moments(capture, expected)


def test_clear_forgets() -> None:
    model = small_cnn()
    x, y = batch()
    expected = contributions(model, lambda m: F.cross_entropy(m(x), y))
    capture = attach(model)
    for _ in range(2):
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        assert_moments(capture, expected)
        capture.clear()


def test_non_reentrant_checkpointing() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2)).double()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randint(2, (6,))
    expected = contributions(model, lambda m: F.cross_entropy(m(x), y))
    capture = attach(model)
    hidden = checkpoint(model[:3], x, use_reentrant=False)
    F.cross_entropy(checkpoint(model[3], hidden, use_reentrant=False), y).backward()
    assert_moments(capture, expected)
    assert all(capture.samples(name) == 6 for name in expected)


def test_passes_in_between_change_nothing() -> None:
    model = small_cnn()
    x, y = batch()
    expected = contributions(model, lambda m: F.cross_entropy(m(x), y))
    capture = attach(model)
    loss = F.cross_entropy(model(x), y)
    with torch.no_grad():
        model(batch(7)[0])
    with torch.inference_mode():
        model.eval()(batch(2)[0])
    model.train()(batch(4)[0])  # a training pass whose loss nobody takes
    loss.backward()
    with torch.no_grad():
        model(batch(7)[0])
    assert_moments(capture, expected)
    assert all(capture.samples(name) == 5 for name in expected)


@pytest.mark.parametrize(
    ("model", "shape"),
    [(nn.Linear(4, 3), (4,)), (nn.Conv1d(2, 3, 2), (2, 5)), (nn.Conv2d(2, 3, 2), (2, 4, 4)), (nn.LayerNorm(4), (4,))],
    ids=["linear", "conv1d", "conv2d", "layer-norm"],
)
def test_input_without_a_batch_axis_is_one_sample(model: nn.Module, shape: tuple[int, ...]) -> None:
    model = copy.deepcopy(model).double()
    x = torch.randn(shape, dtype=torch.float64)
    expected = model(x)
    capture = attach(model)
    output = model(x)
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(capture.second_moment(name), parameter.grad.square())
        assert capture.samples(name) == 1


def test_unused_and_frozen_layers_do_not_disturb_the_others() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.used, self.unused = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.used(torch.tanh(self.body(x)))
            return result

    model = TwoHeads().double()
    model.body.requires_grad_(False)
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randint(2, (6,))
    expected = contributions(model, lambda m: F.cross_entropy(m(x), y))
    assert expected.keys() == {"used.weight", "used.bias"}
    capture = attach(model)
    F.cross_entropy(model(x), y).backward()
    assert_moments(capture, expected)
    assert model.body.weight.grad is None


def test_frozen_layer_needs_no_backward_pass() -> None:
    """A frozen backbone costs what it costs without the optimizer: no graph, no gradients through it."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[:2].requires_grad_(False)
    capture = attach(model)
    assert not model[:2](torch.randn(5, 3)).requires_grad
    model[1].requires_grad_(True)
    model(torch.randn(5, 3)).sum().backward()
    assert capture.second_moment("1.weight") is not None


def test_batch_norm_refuses_a_single_value_as_torch_does() -> None:
    model = nn.BatchNorm1d(3)
    capture = attach(model)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.randn(1, 3))
    capture.detach()


def through_pickle(model: nn.Module) -> nn.Module:
    clone: nn.Module = pickle.loads(pickle.dumps(model))  # what this test wrote itself
    return clone


def through_torch_save(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    clone: nn.Module = torch.load(buffer, weights_only=False)  # what this test wrote itself
    return clone


@pytest.mark.parametrize("clone_of", [copy.deepcopy, through_pickle, through_torch_save])
def test_a_copy_is_a_plain_model(clone_of: Callable[[nn.Module], nn.Module]) -> None:
    model = small_cnn()
    plain = copy.deepcopy(model)
    x, y = batch()
    capture = attach(model)
    F.cross_entropy(model(x), y).backward()
    before = moments(capture, model)

    clone = clone_of(model)
    assert [type(m) for m in clone.modules()] == [type(m) for m in plain.modules()]
    assert all(set(a.__dict__) == set(b.__dict__) for a, b in zip(clone.modules(), plain.modules(), strict=True))
    assert {name for name, _ in clone.named_parameters()} == {name for name, _ in plain.named_parameters()}
    F.cross_entropy(clone(x), y).backward()  # training the copy ...
    for name, moment in moments(capture, model).items():
        assert torch.equal(moment, before[name])  # ... does not reach the original


def test_state_dict_and_names_are_untouched() -> None:
    model = small_cnn()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    capture = attach(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert isinstance(model[0], nn.Conv2d)
    capture.detach()


def test_detach_restores_everything() -> None:
    model = small_cnn()
    x, y = batch()
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

    def picture() -> list[object]:
        return [(type(m), sorted(m.__dict__), [len(getattr(m, name)) for name in hooks]) for m in model.modules()] + [
            (id(p), p._backward_hooks, p._post_accumulate_grad_hooks, vars(p)) for p in model.parameters()
        ]

    before = picture()
    capture = attach(model)
    F.cross_entropy(model(x), y).backward()
    capture.detach()
    assert picture() == before
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()  # and it trains as before


def test_detach_keeps_the_users_hooks() -> None:
    model = nn.Linear(3, 2)
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("forward"))
    model.weight.register_hook(lambda _: calls.append("weight"))
    capture = attach(model)
    model(torch.randn(4, 3)).sum().backward()
    capture.detach()
    model(torch.randn(4, 3)).sum().backward()
    assert calls == ["forward", "weight"] * 2
