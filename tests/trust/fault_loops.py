"""What loops do: other orders of the usual calls, passes in between, errors on the way, resumed runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from contract.small import Batch, backward, batches, mlp, train
from trust.faults import refused, survives
from trust.subjects import Make, trained

Models = tuple[nn.Module, nn.Module]
Between = Callable[[nn.Sequential, Any], object]


def beside(make: Make, *, before: Between | None = None, after: Between | None = None) -> Models:
    """A run that does something before each forward pass, or between backward() and step(), and one that does not."""
    model = mlp()
    optimizer = make(model)
    for batch in batches(3):
        optimizer.zero_grad()
        if before is not None:
            before(model, optimizer)
        backward(model, batch)
        if after is not None:
            after(model, optimizer)
        optimizer.step()
    return model, trained(make)


def looped(make: Make, body: Callable[[nn.Sequential, Any, Batch], object]) -> Models:
    """A run with a loop body of its own, and the usual one."""
    model = mlp()
    optimizer = make(model)
    for batch in batches(3):
        body(model, optimizer, batch)
    return model, trained(make)


def other_input() -> Tensor:
    return torch.ones(3, 4)


@survives()
def evaluation_before_the_step(make: Make) -> Models:
    def evaluate(model: nn.Sequential, _: Any) -> None:
        with torch.no_grad():
            model.eval()(other_input())
        model.train()

    return beside(make, before=evaluate, after=evaluate)


@survives()
def inference_mode_before_the_step(make: Make) -> Models:
    def infer(model: nn.Sequential, _: Any) -> None:
        with torch.inference_mode():
            model(other_input())

    return beside(make, before=infer, after=infer)


@survives(rounding=1e-6)  # a layer that ran twice is summed in another order
def forward_pass_without_backward(make: Make) -> Models:
    return beside(
        make, before=lambda model, _: model(other_input()).sum(), after=lambda model, _: model(other_input()).sum()
    )


@survives()
def gradient_of_the_input_in_between(make: Make) -> Models:
    """As for a saliency map or an adversarial example: no parameter is asked for."""

    def saliency(model: nn.Sequential, _: Any) -> None:
        x = other_input().requires_grad_()
        torch.autograd.grad(model(x).sum(), x)

    return beside(make, before=saliency, after=saliency)


@survives()
def gradient_of_the_parameters_by_autograd_grad(make: Make) -> Models:
    def grad(model: nn.Sequential, _: Any) -> None:
        torch.autograd.grad(model(other_input()).sum(), list(model.parameters()))

    return beside(make, before=grad, after=grad)


@survives()
def functional_transform_in_between(make: Make) -> Models:
    def hessian_product(model: nn.Sequential, _: Any) -> None:
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        torch.func.grad(lambda w: torch.func.functional_call(model, w, other_input()).sum())(weights)

    return beside(make, before=hessian_product, after=hessian_product)


@survives()
def discarded_backward(make: Make) -> Models:
    def discard(model: nn.Sequential, optimizer: Any) -> None:
        model(other_input()).sum().backward()
        optimizer.zero_grad()

    return beside(make, before=discard)


@survives()
def discarded_backward_cleared_by_the_model(make: Make) -> Models:
    def discard(model: nn.Sequential, _: Any) -> None:
        model(other_input()).sum().backward()
        model.zero_grad()

    return beside(make, before=discard)


@survives()
def zero_grad_to_zeros(make: Make) -> Models:
    return beside(make, before=lambda _, optimizer: optimizer.zero_grad(set_to_none=False))


@survives()
def model_zero_grad_to_zeros(make: Make) -> Models:
    return beside(make, before=lambda model, _: model.zero_grad(set_to_none=False))


@survives()
def zero_grad_between_forward_and_backward(make: Make) -> Models:
    def body(model: nn.Sequential, optimizer: Any, batch: Batch) -> None:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return looped(make, body)


@survives()
def closure_does_everything(make: Make) -> Models:
    def body(model: nn.Sequential, optimizer: Any, batch: Batch) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            return backward(model, batch)

        assert optimizer.step(closure) > 0

    return looped(make, body)


@survives()
def step_under_no_grad_with_a_closure(make: Make) -> Models:
    def body(model: nn.Sequential, optimizer: Any, batch: Batch) -> None:
        optimizer.zero_grad()
        with torch.no_grad():
            optimizer.step(lambda: backward(model, batch))

    return looped(make, body)


@survives()
def retained_graph_used_once(make: Make) -> Models:
    def body(model: nn.Sequential, optimizer: Any, batch: Batch) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward(retain_graph=True)
        optimizer.step()

    return looped(make, body)


@survives(rounding=1e-6)
def loss_in_two_terms(make: Make) -> Models:
    def body(model: nn.Sequential, optimizer: Any, batch: Batch) -> None:
        optimizer.zero_grad()
        output = model(batch[0])
        (0.25 * F.cross_entropy(output, batch[1]) + 0.75 * F.cross_entropy(output, batch[1])).backward()
        optimizer.step()

    return looped(make, body)


@refused(RuntimeError, "backward ran twice")
def backward_twice_through_one_graph(make: Make) -> Generator[nn.Module]:
    model = mlp()
    optimizer = make(model)
    loss = F.cross_entropy(model(batches(1)[0][0]), batches(1)[0][1])
    loss.backward(retain_graph=True)
    yield model
    loss.backward()
    optimizer.step()


@survives()
def step_before_any_backward(make: Make) -> Models:
    def body(model: nn.Sequential, optimizer: Any, batch: Batch) -> None:
        optimizer.zero_grad()
        optimizer.step()
        train(model, optimizer, [batch])

    return looped(make, body)


@refused(RuntimeError, "has a gradient but no statistics")
def second_step_after_one_backward(make: Make) -> Generator[nn.Module]:
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, batches(2))
    yield model
    optimizer.step()


@survives()
def backward_into_some_parameters_alone(make: Make) -> Models:
    """A parameter that a pass leaves out is one without a gradient."""

    def stepped(inputs: Callable[[nn.Sequential], Any]) -> nn.Module:
        model = mlp()
        optimizer = make(model)
        for x, y in batches(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward(inputs=inputs(model))
            for parameter in list(model.parameters())[1:]:
                parameter.grad = None
            optimizer.step()
        return model

    return stepped(lambda model: [model[0].weight]), stepped(lambda _: None)


@survives(rounding=1e-6)  # a layer that ran twice is summed in another order
def error_in_the_forward_pass(make: Make) -> Models:
    def fail(*_: Any) -> None:
        raise OSError("the data loader died")

    def stumble(model: nn.Sequential, _: Any) -> None:
        handle = model[2].register_forward_hook(fail)
        try:
            backward(model, batches(1)[0])
        except OSError:
            handle.remove()

    return beside(make, before=stumble)


def break_backward(model: nn.Sequential) -> None:
    """An error in the middle of the backward pass, as an out-of-memory error would be."""

    def fail(_: Tensor) -> None:
        raise MemoryError("no memory left")

    hidden = model[:3](batches(1)[0][0])
    hidden.register_hook(fail)
    try:
        model[3](hidden).sum().backward()
    except MemoryError:
        return


@survives(rounding=1e-6)  # a layer that ran twice is summed in another order
def error_in_the_backward_pass(make: Make) -> Models:
    def stumble(model: nn.Sequential, optimizer: Any) -> None:
        break_backward(model)
        optimizer.zero_grad()

    return beside(make, before=stumble)


@refused(RuntimeError, "did not come to its end")
def step_after_half_a_backward_pass(make: Make) -> Generator[nn.Module]:
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, batches(1))
    optimizer.zero_grad()
    break_backward(model)
    yield model
    optimizer.step()


@survives()
def error_in_a_step_hook(make: Make) -> Models:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    def stumble(_: nn.Sequential, optimizer: Any) -> None:
        handle = optimizer.register_step_pre_hook(fail)
        try:
            optimizer.step()
        except KeyboardInterrupt:
            handle.remove()

    return beside(make, after=stumble)


@survives()
def training_in_another_thread(make: Make) -> Models:
    def body(model: nn.Sequential, optimizer: Any, batch: Batch) -> None:
        thread = threading.Thread(target=train, args=(model, optimizer, [batch]))
        thread.start()
        thread.join()

    return looped(make, body)


@survives()
def checkpointed_activations(make: Make) -> Models:
    def body(model: nn.Sequential, optimizer: Any, batch: Batch) -> None:
        optimizer.zero_grad()
        output = checkpoint(model, batch[0], use_reentrant=False)
        F.cross_entropy(output, batch[1]).backward()
        optimizer.step()

    return looped(make, body)


@survives()
def checkpointed_activations_reentrant(make: Make) -> Models:
    def body(model: nn.Sequential, optimizer: Any, batch: Batch) -> None:
        optimizer.zero_grad()
        output = checkpoint(model, batch[0].clone().requires_grad_(), use_reentrant=True)
        F.cross_entropy(output, batch[1]).backward()
        optimizer.step()

    return looped(make, body)
