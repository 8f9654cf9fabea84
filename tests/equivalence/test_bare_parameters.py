"""Parameters that no layer holds for us: whatever a forward pass does with them, what each sample adds is exact.

The samples do not meet in these modules, so c_i is the gradient of the sample's own term of the loss in plain autograd.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt import AutoAdam, AutoSGD
from autoopt.capture import Capture
from equivalence import by_sample
from equivalence.bare_cases import CASES, Case, LayerScale, OwnLinear, Quantised, Tokens, parameter
from equivalence.cases import assert_close


class Network(nn.Module):
    """The module between two covered parts, so that it has something to pass the gradient to and from."""

    def __init__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.module = module
        x, *rest = inputs
        self.before = nn.Linear(x.shape[-1], x.shape[-1]) if x.is_floating_point() else nn.Identity()
        features = module(self.before(*_floats([x])), *_floats(rest))
        self.head = nn.Linear(features.flatten(1).shape[1], 3)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.module(self.before(x), *rest)).flatten(1))
        return logits


def _floats(tensors: list[Tensor]) -> list[Tensor]:
    return [t.float() if t.is_floating_point() else t for t in tensors]


def network(case: Case) -> tuple[Network, tuple[Tensor, ...], Tensor]:
    inputs = case.inputs()
    return Network(case.module(), inputs).double(), inputs, torch.randint(3, (case.samples,))


def losses(model: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
    torch.manual_seed(3)  # for dropout
    return F.cross_entropy(model(*inputs), y, reduction="none") / len(y)


def contributions(model: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> dict[str, Tensor]:
    """c_i, the gradient of each sample's term of the loss, in a plain copy of the model."""
    plain = copy.deepcopy(model)
    trained = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    c: dict[str, list[Tensor]] = {name: [] for name in trained}
    for i in range(len(y)):
        plain.zero_grad()
        losses(plain, inputs, y)[i].backward()
        for name, p in trained.items():
            c[name].append(torch.zeros_like(p) if p.grad is None else p.grad.clone())
    return {name: torch.stack(parts) for name, parts in c.items()}


def attach(model: nn.Module, elementwise: bool) -> Capture:
    return Capture(model, dict(model.named_parameters()), elementwise=elementwise)


def assert_exact(capture: Capture, c: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    for name, single in c.items():
        square = single.square()
        expected = square.sum() if capture.ledger.total else square.sum(0)
        assert_close(capture.second_moment(name), expected, tolerance, name)
        assert capture.samples(name) == len(single), name


@pytest.mark.parametrize("elementwise", [True, False], ids=["elementwise", "total"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact(case: Case, elementwise: bool) -> None:
    model, inputs, y = network(case)
    c = contributions(model, inputs, y)
    outputs = losses(model, inputs, y)
    capture = attach(model, elementwise)
    for _ in range(2):  # the second pass knows how to run each call
        model.zero_grad()
        capture.clear()
        observed = losses(model, inputs, y)
        torch.testing.assert_close(observed, outputs, rtol=1e-12, atol=1e-12)
        observed.sum().backward()
        assert_exact(capture, c)
        for name, single in c.items():
            assert_close(model.get_parameter(name).grad, single.sum(0), 1e-10, name)
    capture.detach()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_batches_of_any_size_add_up(case: Case) -> None:
    model, _, _ = network(case)
    capture = attach(model, elementwise=True)
    expected: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for samples in (case.samples, case.samples + 2):
        inputs, y = case.inputs(samples), torch.randint(3, (samples,))
        for name, c in contributions(model, inputs, y).items():
            expected[name].append(c)
        losses(model, inputs, y).sum().backward()
    assert_exact(capture, {name: torch.cat(parts) for name, parts in expected.items()})


def test_passes_in_between_change_nothing() -> None:
    case = Case("tokens", Tokens, (5, 4))
    model, inputs, y = network(case)
    c = contributions(model, inputs, y)
    capture = attach(model, elementwise=True)
    loss = losses(model, inputs, y).sum()
    with torch.no_grad():
        model(*case.inputs(7))
    with torch.inference_mode():
        model.eval()(*case.inputs(2))
    model.train()(*case.inputs(4))  # a training pass whose loss nobody takes
    loss.backward()
    assert_exact(capture, c)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_forward_passes_before_one_backward_pass(case: Case) -> None:
    """Sample i is row i of both: what it adds in both is summed before it is squared."""
    model, inputs, y = network(case)
    others = case.inputs()
    c, more = contributions(model, inputs, y), contributions(model, others, y)
    capture = attach(model, elementwise=True)
    losses(model, inputs, y).sum().backward()  # in the next pass nothing is kept that has one use
    model.zero_grad()
    capture.clear()
    (losses(model, inputs, y) + losses(model, others, y)).sum().backward()
    assert_exact(capture, {name: c[name] + more[name] for name in c})


def test_passes_that_were_not_expected_to_meet_are_refused() -> None:
    model, inputs, y = network(Case("linear", OwnLinear, (3, 4)))
    attach(model, elementwise=True)
    losses(model, inputs, y).sum().backward()
    first = losses(model, inputs, y).sum()
    model.module(*inputs).mean(1).square().sum().backward()
    model.zero_grad()
    with pytest.raises(RuntimeError, match="more than once in one backward pass"):
        (first + losses(model, inputs, y).sum()).backward()


def test_frozen_parameters_cost_nothing() -> None:
    model, inputs, y = network(Case("tokens", Tokens, (5, 4)))
    model.module.requires_grad_(False)
    c = contributions(model, inputs, y)
    assert c.keys() == {"before.weight", "before.bias", "head.weight", "head.bias"}
    capture = attach(model, elementwise=True)
    losses(model, inputs, y).sum().backward()
    assert_exact(capture, c)
    assert model.module.cls.grad is None


@pytest.mark.parametrize("clone_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_nothing_leaks_into_the_model(clone_of: Callable[[nn.Module], nn.Module]) -> None:
    model, inputs, y = network(Case("tokens", Tokens, (5, 4)))
    plain = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    capture = attach(model, elementwise=True)
    output = model(*inputs)
    assert type(output) is Tensor
    assert not vars(output)
    F.cross_entropy(output, y).backward()
    assert all(model.get_parameter(name) is p and type(p) is nn.Parameter for name, p in parameters.items())
    assert list(model.state_dict()) == list(plain.state_dict())

    clone = clone_of(model)
    assert [type(m) for m in clone.modules()] == [type(m) for m in plain.modules()]
    assert all(set(vars(a)) == set(vars(b)) for a, b in zip(clone.modules(), plain.modules(), strict=True))
    capture.detach()
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert all(set(vars(a)) == set(vars(b)) for a, b in zip(model.modules(), plain.modules(), strict=True))


def test_two_optimizers_share_a_model() -> None:
    model, inputs, y = network(Case("tokens", Tokens, (5, 4)))
    c = contributions(model, inputs, y)
    some = ("module.cls", "head.weight", "head.bias")
    groups = [{n: p for n, p in model.named_parameters() if (n in some) == chosen} for chosen in (True, False)]
    captures = [Capture(model, group, elementwise=True) for group in groups]
    losses(model, inputs, y).sum().backward()
    for capture, group in zip(captures, groups, strict=True):
        assert capture.lost() is None
        assert_exact(capture, {name: c[name] for name in group})
    newer = Capture(model, groups[0], elementwise=True)
    assert captures[0].lost() is not None
    assert captures[1].lost() is None
    for capture in (*captures, newer):
        capture.detach()
    assert type(model) is Network
    assert type(model.module) is Tokens


def test_a_part_of_the_model_may_be_called_on_its_own() -> None:
    model, inputs, _ = network(Case("linear", OwnLinear, (3, 4)))
    capture = attach(model, elementwise=True)
    (x,) = inputs
    model.module(x).square().sum().backward()
    c = torch.einsum("bto,bti->boi", 2 * F.linear(x, model.module.w, model.module.b), x)
    assert_close(capture.second_moment("module.w"), c.square().sum(0), 1e-10, "module.w")


def test_lower_precision_keeps_squares_in_full() -> None:
    model, inputs, y = network(Case("linear", OwnLinear, (3, 4)))
    c = contributions(model, inputs, y)
    model, inputs = model.float(), tuple(x.float() for x in inputs)
    capture = attach(model, elementwise=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = losses(model, inputs, y).sum()
    loss.backward()
    square = capture.second_moment("module.w")
    assert square is not None
    assert square.dtype == torch.float32
    assert_exact(capture, c, tolerance=0.05)


class TimeFirst(nn.Module):
    """(time, batch, features) from the start: the axis of the samples is the one along which nothing is mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.scale = parameter(6, 1, 4), parameter(4)
        self.mix, self.head = nn.MultiheadAttention(4, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions
        x = x + self.scale * self.mix(x, x, x, need_weights=False)[0]
        logits: Tensor = self.head(x.mean(0))
        return logits


@pytest.mark.parametrize("samples", [5, 6])
def test_samples_on_the_second_axis(samples: int) -> None:
    model, y = TimeFirst().double(), torch.randint(3, (samples,))
    inputs = (torch.randn(6, samples, 4, dtype=torch.float64),)
    c = contributions(model, inputs, y)
    capture = attach(model, elementwise=True)
    losses(model, inputs, y).sum().backward()
    assert_exact(capture, {name: single for name, single in c.items() if name != "mix.in_proj_bias"})


# What forward returns.


class Policy(nn.Module):
    """A mean, and a logarithm of the deviation that is a parameter."""

    def __init__(self, returned: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.mean, self.log_std, self.returned = nn.Linear(4, 2), parameter(2), returned

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean: Tensor = self.mean(x)
        return mean, self.returned(self.log_std, mean)


def likelihood(model: nn.Module, x: Tensor) -> Tensor:
    """Of each sample."""
    mean, log_std = model(x)
    result: Tensor = ((mean - 1).square() * torch.exp(-log_std) + log_std).sum(1)
    return result


RETURNED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "expand_as": lambda p, mean: p.expand_as(mean),
    "then-tanh": lambda p, mean: torch.tanh(p.expand(len(mean), 2)) * 2,
    "repeat": lambda p, mean: p.exp().repeat(len(mean), 1).log().clamp(-3, 3),
    "ones_like": lambda p, mean: p * torch.ones_like(mean),
}


@pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
@pytest.mark.parametrize("samples", [2, 5])
@pytest.mark.parametrize("returned", RETURNED.values(), ids=RETURNED.keys())
def test_a_parameter_that_is_returned_for_each_sample(
    returned: Callable[[Tensor, Tensor], Tensor], samples: int, make: type[Any]
) -> None:
    model = Policy(returned).double()
    x = torch.randn(samples, 4, dtype=torch.float64)
    named = dict(model.named_parameters())
    single = [torch.autograd.grad(loss, list(named.values()), retain_graph=True) for loss in likelihood(model, x)]
    optimizer = make(model, exact=True)
    likelihood(model, x).sum().backward()
    assert_exact(optimizer._now.source, dict(zip(named, map(torch.stack, zip(*single, strict=True)), strict=True)))


@pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
@pytest.mark.parametrize("samples", [2, 5])
@pytest.mark.parametrize(
    "returned",
    [
        lambda p, _: p,
        lambda p, _: p.exp().log(),
        lambda p, mean: torch.ones(2, 1, dtype=p.dtype) * p if len(mean) == 2 else p,
    ],
    ids=["itself", "computed", "table"],
)
def test_a_parameter_that_is_returned_as_it_is_has_no_statistics(
    returned: Callable[[Tensor, Tensor], Tensor], samples: int, make: type[Any]
) -> None:
    """Also where it is as long as the batch."""
    model = Policy(returned).double()
    optimizer = make(model, exact=True)
    likelihood(model, torch.randn(samples, 4, dtype=torch.float64)).sum().backward()
    with pytest.raises(RuntimeError, match=r"'log_std' has a gradient but no statistics.*expand_as.*spread='passes'"):
        optimizer.step()


@pytest.mark.parametrize("samples", [2, 5])  # as many as levels of the state, and more
@pytest.mark.parametrize("elementwise", [True, False])
def test_a_learned_first_state(samples: int, elementwise: bool) -> None:
    """The first axis of a state numbers the levels, however many samples there are."""

    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state, self.recur = parameter(2, 1, 4), nn.GRU(3, 4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.recur(x, self.state.expand(-1, len(x), -1).contiguous())[0]
            return result

    x = torch.randn(samples, 6, 3, dtype=torch.float64)
    by_sample.assert_exact(Learned().double(), lambda model: model(x).square().sum((1, 2)), elementwise)


@pytest.mark.parametrize("samples", [3, 5])  # as many as queries, and more
def test_learned_queries_of_attention_with_time_first(samples: int) -> None:
    class Queried(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.attention = parameter(3, 1, 4), nn.MultiheadAttention(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = x.transpose(0, 1)
            result: Tensor = self.attention(self.queries.expand(-1, x.shape[1], -1), x, x)[0]
            return result.transpose(0, 1)

    x = torch.randn(samples, 6, 4, dtype=torch.float64)
    by_sample.assert_exact(Queried().double(), lambda model: model(x).square().sum((1, 2)), True)


# torch.compile.


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo, tracing any Function
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo, at a graph break
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in ("class-token", "layer-scale", "linear")], ids=str
)
def test_a_compiled_model_gives_the_same(case: Case) -> None:
    model, inputs, y = network(case)
    model.eval()  # dropout draws other numbers in a compiled graph
    c = contributions(model, inputs, y)
    capture = attach(model, elementwise=True)
    compiled = torch.compile(model, backend="aot_eager")
    losses(compiled, inputs, y).sum().backward()
    assert_exact(capture, c)
    torch._dynamo.reset()


# What cannot be exact.


class Mean(nn.Module):
    """The parameter meets a mean over the samples, which is nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.p = parameter(4)

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) * self.p


class Mixed(Mean):
    """One operation that takes the parameter and mixes the samples."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bd,cd,d->bc", x, x, self.p)


class Penalty(Mean):
    """Adds to the gradient what belongs to no sample."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.p).sum() + self.p.square().sum()


class Changed(Mean):
    def forward(self, x: Tensor) -> Tensor:
        p = self.p * 2
        y = x * p
        p.add_(1)
        return y + p


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Tensor:
        ctx.save_for_backward(x, p)
        return x * p

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, p = ctx.saved_tensors
        return dy * p, (dy * x).sum(0)


class Unseen(Mean):
    """Nobody can look into a user's autograd.Function; one use is seen, the other is not."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Own.apply(x, self.p)  # type: ignore[no-untyped-call]
        return y + self.p


@pytest.mark.parametrize(
    ("module", "operation"),
    [(Mean, "mul"), (Mixed, "einsum"), (Penalty, "add"), (Changed, "add_"), (Unseen, "not seen")],
)
def test_what_cannot_be_exact_is_refused_by_name(module: Callable[[], nn.Module], operation: str) -> None:
    model = module().double()
    x = torch.randn(5, 4, dtype=torch.float64)
    capture = attach(model, elementwise=True)
    with pytest.raises(RuntimeError, match=f"'p'.*{operation}|{operation}.*'p'"):
        model(x).sum().backward()
    capture.detach()
    model(x).sum().backward()  # and the model is as it was


def test_a_parameter_that_no_sample_meets_is_refused_at_the_step() -> None:
    model = nn.Sequential(nn.Linear(4, 3), LayerScale()).double()
    optimizer = AutoSGD(model)
    (model[0](torch.randn(5, 4, dtype=torch.float64)).square().sum() + model[1].gamma.sum()).backward()
    with pytest.raises(RuntimeError, match=r"'1\.gamma' has a gradient but no statistics"):
        optimizer.step()


@pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[3]], ids=str)
def test_ten_steps_lower_the_loss(make: type[Any], case: Case) -> None:
    model, inputs, y = network(case)
    optimizer = make(model)
    history = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = losses(model, inputs, y).sum()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    assert history[-1] < history[0]
    assert all(tuned.lr > 0 for tuned in optimizer.tuned().values())


def test_quantised_weights_train_under_autocast() -> None:
    """What is computed from parameters in float32 is judged by the precision of what the samples add to it."""
    torch.manual_seed(0)
    model = Quantised()
    optimizer = AutoSGD(model, exact=True)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(4, 6, 4)).square().mean()
        loss.backward()
        optimizer.step()
    assert all(0 < chosen.noise < 10 for chosen in optimizer.tuned().values())


class Changed(nn.Module):
    """Copies of a parameter for the samples, on the second axis, that are changed in place."""

    def __init__(self, change: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.token, self.change = parameter(1, 1, 4), change

    def forward(self, x: Tensor) -> Tensor:
        own = self.token * 1
        tokens = own.repeat(1, len(x), 1)
        self.change(own, tokens)
        return torch.cat([tokens, x.transpose(0, 1)]).transpose(0, 1)


CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "by a function": lambda own, tokens: F.relu(tokens, inplace=True),
    "by a view": lambda own, tokens: tokens[..., :1].mul_(3),
    "what they are of": lambda own, tokens: own.mul_(2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_copies_that_were_changed_are_not_what_they_are_of(change: Callable[[Tensor, Tensor], Any]) -> None:
    model = Changed(change)
    optimizer = AutoSGD(model)
    with pytest.raises(RuntimeError, match="no exact statistics for parameter 'token'"):
        model(torch.randn(3, 5, 4))
    optimizer.detach()
