"""Models that hold what cannot be trained."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import nn
from torch.nn.utils import prune

from contract.small import backward, batches, mlp
from trust.faults import refused
from trust.subjects import Make


@refused(ValueError, "no trainable parameter")
def nothing_to_train(make: Make) -> Generator[nn.Module]:
    model = mlp().requires_grad_(False)
    yield model
    make(model)


@refused(ValueError, r"'0\.weight'.*is complex")
def complex_parameter(make: Make) -> Generator[nn.Module]:
    model = nn.Sequential(nn.Linear(4, 3, dtype=torch.complex64))
    yield model
    make(model)


@refused(ValueError, "'0' is an Embedding with sparse=True")
def sparse_gradients(make: Make) -> Generator[nn.Module]:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True))
    yield model
    make(model)


@refused(ValueError, "has no shape yet")
def lazy_layer(make: Make) -> Generator[nn.Module]:
    model = nn.Sequential(nn.Linear(4, 3))
    yield model
    make(nn.Sequential(model, nn.LazyLinear(3)))


@refused(RuntimeError, "'weight' of layer '0' is no parameter any more")
def parametrization_put_on_later(make: Make) -> Generator[nn.Module]:
    model = mlp()
    attached = make(model)
    nn.utils.parametrizations.weight_norm(model[0])
    yield model
    backward(model, batches(1)[0])
    attached.step()


@refused(RuntimeError, "'weight' of layer '0' is no parameter any more")
def pruning_put_on_later(make: Make) -> Generator[nn.Module]:
    model = mlp()
    attached = make(model)
    prune.l1_unstructured(model[0], "weight", 0.5)
    yield model
    backward(model, batches(1)[0])
    attached.step()


@refused(RuntimeError, "differentiate twice|create_graph=True, as for a gradient penalty")
def gradient_penalty(make: Make) -> Generator[nn.Module]:
    """Where a layer runs as torch runs it we refuse it, else torch: its gradients are not differentiable again."""
    model = mlp()
    optimizer = make(model)
    x = batches(1)[0][0].requires_grad_()
    yield model
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    optimizer.step()
