"""Models that change under the optimizer, share it, or hold what cannot be trained."""

from __future__ import annotations

import copy
from collections.abc import Generator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contract.small import backward, batches, mlp, train
from trust.faults import refused, survives
from trust.subjects import Make, trained

Models = tuple[nn.Module, nn.Module]


def head_and_rest(model: nn.Sequential, **head: Any) -> list[dict[str, Any]]:
    return [
        {"params": [*model[0].parameters(), *model[1].parameters()]},
        {"params": list(model[3].parameters()), **head},
    ]


@survives()
def frozen_weight_with_a_trained_bias(make: Make) -> Models:
    """Freezing is leaving out."""
    frozen, left = mlp(), mlp()
    frozen[0].weight.requires_grad_(False)
    train(frozen, make(frozen), batches(3))
    others = [parameter for name, parameter in left.named_parameters() if name != "0.weight"]
    optimizer = make(left, param_groups=[{"params": others}])
    train(left, optimizer, batches(3))
    return frozen, left


@survives()
def frozen_for_a_while(make: Make) -> Models:
    """As if its gradients had been taken away before the step."""
    frozen, taken = mlp(), mlp()
    first, second = make(frozen), make(taken)
    for number, batch in enumerate(batches(5)):
        frozen[3].requires_grad_(number not in (1, 2))
        train(frozen, first, [batch])
        second.zero_grad()
        backward(taken, batch)
        for parameter in taken[3].parameters():
            parameter.grad = None if number in (1, 2) else parameter.grad
        second.step()
    return frozen, taken


class Branches(nn.Module):
    """Two heads of which a batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.left, self.right, self.unused = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)
        self.go_left = True

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.left(x) if self.go_left else self.right(x)
        return output


@survives()
def layer_without_a_gradient(make: Make) -> Models:
    """Each head learns as if it were alone."""
    both, alone = Branches(), Branches()
    optimizer = make(both)
    apart = {
        side: make(alone, param_groups=[{"params": alone.get_submodule(side).parameters()}])
        for side in ("left", "right")
    }
    for number, batch in enumerate(batches(4)):
        both.go_left = alone.go_left = number % 2 == 0
        train(both, optimizer, [batch])
        train(alone, apart["left" if alone.go_left else "right"], [batch])
    return both, alone


@survives()
def group_added_later(make: Make) -> Models:
    """As if it had been there with lr = 0."""
    late, early = mlp(), mlp()
    first = make(late, param_groups=head_and_rest(late)[:1])
    second = make(early, param_groups=head_and_rest(early, lr=0.0))
    train(late, first, batches(2))
    train(early, second, batches(2))
    first.add_param_group({"params": list(late[3].parameters())})
    second.param_groups[1]["lr"] = 1.0
    train(late, first, batches(2))
    train(early, second, batches(2))
    return late, early


@survives()
def layer_appended_later(make: Make) -> Models:
    found = []
    for at in (0, 2):
        torch.manual_seed(9)
        model, added = mlp(), nn.Linear(3, 3)
        optimizer = make(model)
        train(model, optimizer, batches(2) if at else [])
        model.append(added)
        optimizer.add_param_group({"params": added.parameters()})
        if not at:  # the same steps, with the new layer out of the way
            train(model[:4], optimizer, batches(2))
        train(model, optimizer, batches(2))
        found.append(model)
    return found[1], found[0]


@survives()
def two_optimizers_on_one_model(make: Make) -> Models:
    one, shared = mlp(), mlp()
    optimizer = make(one, param_groups=head_and_rest(one))
    pair = [make(shared, param_groups=[group]) for group in head_and_rest(shared)]
    train(one, optimizer, batches(3))
    for batch in batches(3):
        shared.zero_grad()
        backward(shared, batch)
        for half in pair:
            half.step()
    return shared, one


@refused(RuntimeError, "no longer reports to this .*another optimizer")
def optimizer_that_was_taken_over(make: Make) -> Generator[nn.Module]:
    model = mlp()
    first = make(model)
    second = make(model)
    backward(model, batches(1)[0])
    yield model
    try:
        first.step()
    finally:
        second.detach()


@survives()
def optimizer_made_anew(make: Make) -> Models:
    """Dropped, detached twice, made again: the last one counts."""
    model = mlp()
    make(model)
    gone = make(model)
    gone.detach()
    gone.detach()
    optimizer = make(model)
    del gone
    train(model, optimizer, batches(3))
    return model, trained(make)


@refused(RuntimeError, "no longer reports to this .*detached")
def step_after_detach(make: Make) -> Generator[nn.Module]:
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, batches(1))
    optimizer.detach()
    backward(model, batches(1)[0])
    yield model
    optimizer.step()


def moved_to(make: Make, dtype: torch.dtype) -> Models:
    """The model moves and the state with it, as if it had been saved and loaded there."""
    data = [(x.to(dtype), y) for x, y in batches(2)]
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, batches(2))
    state = copy.deepcopy(optimizer.state_dict())
    model.to(dtype)
    loaded = copy.deepcopy(model)
    train(model, optimizer, data)
    resumed = make(loaded)
    resumed.load_state_dict(state)
    train(loaded, resumed, data)
    return model, loaded


@survives()
def moved_to_double_on_the_way(make: Make) -> Models:
    return moved_to(make, torch.float64)


@survives()
def moved_to_bfloat16_on_the_way(make: Make) -> Models:
    return moved_to(make, torch.bfloat16)


class Mixed(nn.Sequential):
    """A body in float64 and a head in float32."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self[1](self[0](x.double()).tanh().float())
        return output


@survives()
def parameters_of_two_dtypes(make: Make) -> Models:
    """As two optimizers, one for each."""
    torch.manual_seed(6)
    one = Mixed(nn.Linear(4, 4).double(), nn.Linear(4, 3))
    two = copy.deepcopy(one)
    train(one, make(one), batches(3))
    pair = [make(two, param_groups=[{"params": layer.parameters()}]) for layer in two]
    for batch in batches(3):
        two.zero_grad()
        backward(two, batch)
        for half in pair:
            half.step()
    return one, two


@survives(rounding=1e-6)
def parameters_that_are_not_contiguous(make: Make) -> Models:
    model = mlp()
    for layer in (model[0], model[3]):
        layer.weight = nn.Parameter(layer.weight.detach().T.contiguous().T)
        assert not layer.weight.is_contiguous()
    train(model, make(model), batches(3))
    return model, trained(make)


def convolutions(make: Make, memory_format: torch.memory_format) -> nn.Module:
    torch.manual_seed(8)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.Flatten())
    model = model.double().to(memory_format=memory_format)
    optimizer = make(model)
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.randn(5, 3, 5, 5, dtype=torch.float64).to(memory_format=memory_format)
        model(x).square().mean().backward()
        optimizer.step()
    return model


@survives(rounding=1e-9)
def channels_last(make: Make) -> Models:
    return convolutions(make, torch.channels_last), convolutions(make, torch.contiguous_format)


@survives(rounding=1e-6)
def activation_in_place(make: Make) -> Models:
    found = []
    for inplace in (True, False):
        torch.manual_seed(2)
        activations = nn.ReLU(inplace), nn.ELU(inplace=inplace)
        model = nn.Sequential(nn.Linear(4, 6), activations[0], nn.LayerNorm(6), activations[1], nn.Linear(6, 3))
        train(model, make(model), batches(3))
        found.append(model)
    return found[0], found[1]


@survives()
def hooks_of_the_user(make: Make) -> Models:
    model = mlp()
    optimizer = make(model)
    for layer in model[1:]:
        layer.register_forward_pre_hook(lambda layer, args: args)
        layer.register_forward_hook(lambda layer, args, output: output)
        layer.register_full_backward_hook(lambda layer, before, after: None)
    train(model, optimizer, batches(3))
    return model, trained(make)


@survives()
def weights_loaded_on_the_way(make: Make) -> Models:
    """The optimizer goes on with the weights that it finds."""
    found = []
    for by_hand in (False, True):
        model = mlp()
        optimizer = make(model)
        train(model, optimizer, batches(2))
        if by_hand:
            with torch.no_grad():
                for parameter, first in zip(model.parameters(), mlp().parameters(), strict=True):
                    parameter.data = first.data.clone()
        else:
            model.load_state_dict(mlp().state_dict())
        train(model, optimizer, batches(2))
        found.append(model)
    return found[0], found[1]


@survives()
def parameter_exchanged_for_another(make: Make) -> Models:
    """As in torch.optim the new one is not trained, and the others do not notice."""
    exchanged, frozen = mlp(), mlp()
    optimizer = make(exchanged)
    exchanged[3].weight = nn.Parameter(exchanged[3].weight.detach().clone())
    train(exchanged, optimizer, batches(3))
    frozen[3].weight.requires_grad_(False)
    train(frozen, make(frozen), batches(3))
    return exchanged, frozen


@survives()
def layer_without_elements(make: Make) -> Models:
    """A weight of shape (3, 0) is nothing to train, and in nobody's way."""
    found = []
    for empty in (True, False):
        torch.manual_seed(5)
        model = nn.ModuleDict({"body": nn.Linear(4, 3)})
        if empty:
            model["empty"] = nn.Linear(1, 3, bias=False)
            model["empty"].weight = nn.Parameter(torch.zeros(3, 0))
        optimizer = make(model)
        for x, y in batches(3):
            optimizer.zero_grad()
            output = model["body"](x)
            F.cross_entropy(output + model["empty"](x[:, :0]) if empty else output, y).backward()
            optimizer.step()
        if empty:
            del model["empty"]
        found.append(model)
    return found[0], found[1]
