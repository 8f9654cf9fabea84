"""What cannot be trained is refused when the optimizer is made, with the layer's name and what to do about it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoopt import AutoAdaGrad, AutoAdam, AutoSGD
from contract.small import batches, every_optimizer, mlp, moved, train, weights


class Turn(nn.Module):
    """A parameter that is complex, which none of the optimizers trains."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.factor).abs()


class Named(nn.Linear):
    """A subclass that computes what nn.Linear computes."""


class Around(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(4, 4), layer


@every_optimizer
def test_refused_parameter(make: Any) -> None:
    model = Around(Turn())
    with pytest.raises(ValueError, match=r"'layer\.factor'.*Turn(?s:.*)requires_grad_\(False\)"):
        make(model)
    assert type(model.first) is nn.Linear  # a refused model is left as it was


def test_frozen_refused_parameter_is_fine() -> None:
    model = Around(Turn())
    model.layer.requires_grad_(False)
    AutoSGD(model)


def test_refused_parameter_may_be_left_to_another_optimizer() -> None:
    model = Around(Turn())
    AutoSGD(model, param_groups=[{"params": model.first.parameters()}])
    with pytest.raises(ValueError, match="factor"):
        AutoSGD(model, param_groups=[{"params": model.parameters()}])


def test_refused_parameter_in_an_added_group() -> None:
    model = Around(Turn())
    optimizer = AutoSGD(model, param_groups=[{"params": model.first.parameters()}])
    with pytest.raises(ValueError, match=r"layer\.factor"):
        optimizer.add_param_group({"params": model.layer.parameters()})


@every_optimizer
def test_subclass_that_changes_nothing_is_covered(make: Any) -> None:
    model = nn.Sequential(Named(4, 3))
    before = weights(model)
    optimizer = make(model)
    train(model, optimizer, batches(1))
    assert moved(model, before) == {"0.weight", "0.bias"}
    optimizer.detach()
    assert type(model[0]) is Named


@every_optimizer
@pytest.mark.parametrize(
    "given", [torch.ones(3), 3, None, "model", [1.0]], ids=["tensor", "number", "nothing", "word", "numbers"]
)
def test_neither_a_model_nor_parameters(make: Any, given: Any) -> None:
    with pytest.raises(TypeError, match=rf"{type(given).__name__}.*{make.__name__}\(model\)"):
        make(given)


@every_optimizer
def test_an_option_that_does_not_exist(make: Any) -> None:
    with pytest.raises(TypeError, match=r"no option 'momentum'\. It sets the momentum by itself.*weight_decay"):
        make(mlp(), momentum=0.9)


@every_optimizer
def test_model_without_trainable_parameters(make: Any) -> None:
    with pytest.raises(ValueError, match=r"no trainable parameter.*requires_grad_"):
        make(nn.Sequential(nn.ReLU()))
    with pytest.raises(ValueError, match=r"no trainable parameter.*requires_grad_"):
        make(mlp().requires_grad_(False))


@every_optimizer
def test_stranger_in_a_group(make: Any) -> None:
    with pytest.raises(ValueError, match=r"\(2, 2\).*not a parameter of the model"):
        make(mlp(), param_groups=[{"params": [nn.Parameter(torch.zeros(2, 2))]}])


@every_optimizer
def test_complex_parameter(make: Any) -> None:
    with pytest.raises(ValueError, match=r"'0\.weight'.*complex"):
        make(nn.Sequential(nn.Linear(4, 3, dtype=torch.complex64)))


@every_optimizer
@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
def test_embedding_option(make: Any, option: str) -> None:
    embedding = nn.Embedding(5, 4)
    setattr(embedding, option, True)
    with pytest.raises(ValueError, match=rf"'0'.*{option}=True.*{option}=False"):
        make(nn.Sequential(embedding))


@every_optimizer
def test_lazy_layer(make: Any) -> None:
    with pytest.raises(ValueError, match=r"'0\.weight'.*run the model once"):
        make(nn.Sequential(nn.LazyLinear(3)))


NUMBERS: list[tuple[list[Any], str, list[Any]]] = [
    ([AutoSGD, AutoAdam, AutoAdaGrad], "lr", [-1.0, math.nan, math.inf, "fast"]),
    ([AutoSGD, AutoAdam, AutoAdaGrad], "smoothing", [-0.1, 1.5, math.nan, math.inf]),
    ([AutoSGD, AutoAdam, AutoAdaGrad], "weight_decay", [-0.1, math.nan, math.inf]),
    ([AutoAdam], "beta2", [-0.1, 1.0, 1.5, math.nan]),
    ([AutoAdam, AutoAdaGrad], "eps", [-1e-8, math.nan, math.inf]),
    (
        [AutoSGD, AutoAdam, AutoAdaGrad],
        "start",
        [
            (-0.1, 0.0),
            (1.0, 0.0),
            (0.5, -0.1),
            (0.5, 0.5),
            (math.nan, 0.0),
            (0.5, math.nan),
            (math.inf, 0.0),
            (0.5,),
            0.5,
        ],
    ),
    ([AutoSGD, AutoAdam, AutoAdaGrad], "rule", ["papr", None]),
    ([AutoSGD, AutoAdam, AutoAdaGrad], "granularity", ["neuron", None]),
]
OPTIONS = [(make, name, value) for makes, name, values in NUMBERS for make in makes for value in values]


@pytest.mark.parametrize(
    ("make", "name", "value"), OPTIONS, ids=[f"{make.__name__}-{name}-{value}" for make, name, value in OPTIONS]
)
def test_option_out_of_range(make: Any, name: str, value: Any) -> None:
    """The message holds the option's name, what was given and what is allowed."""
    model = mlp()
    with pytest.raises(ValueError, match=name) as raised:
        make(model, **{name: value})
    message = str(raised.value)
    wrong = value if name != "start" or not isinstance(value, tuple) else next((x for x in value if not _fine(x)), 0.5)
    assert repr(wrong) in message or str(wrong) in message
    assert "must be" in message
    assert type(model[0]) is nn.Linear  # nothing stays attached


def _fine(gamma: float) -> bool:
    return 0 <= gamma <= 0.999


@pytest.mark.parametrize("name", ["rule", "granularity"])
def test_choices_are_listed(name: str) -> None:
    with pytest.raises(ValueError, match="paper" if name == "rule" else "tensor.*layer.*group"):
        AutoSGD(mlp(), **{name: "other"})  # type: ignore[arg-type]


def test_option_of_a_group_is_checked_too() -> None:
    model = mlp()
    with pytest.raises(ValueError, match="lr"):
        AutoSGD(model, param_groups=[{"params": model.parameters(), "lr": -1.0}])


def test_a_nested_tensor() -> None:
    model = nn.Sequential(nn.Linear(5, 3))
    optimizer = AutoSGD(model)
    x = torch.nested.nested_tensor([torch.randn(n, 5) for n in (2, 4)], layout=torch.jagged)
    with pytest.raises(RuntimeError, match=r"layer '0' got a nested tensor.*pad it"):
        model(x)
    optimizer.detach()
    model(x)


def test_a_layer_called_with_more_than_its_input() -> None:
    """ConvTranspose takes an output size, EmbeddingBag offsets: refused by name while it trains, allowed otherwise."""
    model = nn.Sequential(nn.ConvTranspose1d(1, 1, 3, stride=2))
    optimizer = AutoSGD(model)
    x = torch.randn(2, 1, 4)
    with pytest.raises(RuntimeError, match=r"layer '0' \(ConvTranspose1d\) was called with more than its input"):
        model[0](x, output_size=[10])
    with torch.no_grad():
        assert model[0](x, output_size=[10]).shape == (2, 1, 10)
    optimizer.detach()
    assert model[0](x, output_size=[10]).shape == (2, 1, 10)
