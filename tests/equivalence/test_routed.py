"""Rows that are routed, as to the experts of a mixture: exact, wherever the rows of a sample come to lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoopt import AutoAdam, AutoSGD
from autoopt.capture import Capture
from equivalence.by_sample import assert_exact

N, T, D, EXPERTS = 6, 5, 4, 3
both_moments = pytest.mark.parametrize("elementwise", [True, False], ids=["elementwise", "total"])


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return y


class Mixture(nn.Module):
    """Modules as experts, two for each position. A way takes rows, an expert and the weight of each row for it."""

    def __init__(self, way: Callable[..., Tensor]) -> None:
        super().__init__()
        self.gate, self.experts, self.way = nn.Linear(D, EXPERTS), nn.ModuleList(Expert() for _ in range(EXPERTS)), way

    def forward(self, x: Tensor) -> Tensor:
        weights = F.softmax(self.gate(x), -1)
        weights = torch.where(weights >= weights.topk(2, -1).values[..., -1:], weights, 0)
        return x + sum(self.way(x, expert, weights[..., i]) for i, expert in enumerate(self.experts))  # type: ignore[operator]


def by_numbers(x: Tensor, expert: nn.Module, weight: Tensor) -> Tensor:
    rows, weight = x.reshape(-1, D), weight.reshape(-1)
    (chosen,) = torch.where(weight > 0)
    y = expert(rows[chosen]) * weight[chosen].unsqueeze(-1)
    return torch.zeros_like(rows).index_add(0, chosen, y).view_as(x)


def by_mask(x: Tensor, expert: nn.Module, weight: Tensor) -> Tensor:
    mask = weight > 0
    y = expert(x[mask]) * weight[mask].unsqueeze(-1)
    return torch.zeros_like(x).masked_scatter(mask.unsqueeze(-1), y)


def by_mask_in_place(x: Tensor, expert: nn.Module, weight: Tensor) -> Tensor:
    output = torch.zeros_like(x)
    output[weight > 0] = expert(x[weight > 0])
    return output * weight.unsqueeze(-1)


def by_selection(x: Tensor, expert: nn.Module, weight: Tensor) -> Tensor:
    rows, chosen = x.flatten(0, 1), torch.where(weight.flatten() > 0)[0]
    y = expert(torch.index_select(rows, 0, chosen).unsqueeze(0).reshape(-1, D))
    return torch.zeros_like(rows).index_copy(0, chosen, y).view_as(x) * weight.unsqueeze(-1)


WAYS = [by_numbers, by_mask, by_mask_in_place, by_selection]


class Stack(nn.Module):
    """Two mixtures, or one that is used twice."""

    def __init__(self, way: Callable[..., Tensor], shared: bool = False) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, D), nn.Linear(D, 2)
        self.one = Mixture(way)
        self.two = self.one if shared else Mixture(way)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.two(self.one(self.first(x))))
        return y


def losses(x: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda model: model(x).square().flatten(1).sum(1)


@both_moments
@pytest.mark.parametrize("way", WAYS)
def test_experts_that_are_modules(way: Callable[..., Tensor], elementwise: bool) -> None:
    """In the first pass nobody knows that their rows are routed; in the others it is known."""
    assert_exact(Stack(way).double(), losses(torch.randn(N, T, 3).double()), elementwise, passes=3)


@both_moments
def test_a_mixture_used_twice(elementwise: bool) -> None:
    assert_exact(Stack(by_numbers, shared=True).double(), losses(torch.randn(N, T, 3).double()), elementwise, passes=2)


@both_moments
def test_an_expert_without_rows(elementwise: bool) -> None:
    model = Stack(by_mask).double()
    model.one.gate.bias.data[1] = -1e3
    capture = assert_exact(model, losses(torch.randn(N, T, 3).double()), elementwise, passes=2)
    assert capture.second_moment("one.experts.1.up.weight").count_nonzero() == 0


class Sorted(nn.Module):
    """Parameters of all experts in one tensor each; rows sorted by expert, in one product, and put back."""

    def __init__(self, product: Callable[..., Tensor]) -> None:
        super().__init__()
        self.gate, self.product = nn.Linear(D, EXPERTS), product
        self.weight, self.bias = nn.Parameter(torch.randn(EXPERTS, D, D)), nn.Parameter(torch.randn(EXPERTS, D))
        self.scale = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weight, expert = F.softmax(self.gate(rows), -1).topk(2, -1)
        expert, order = expert.reshape(-1).sort()
        ends = torch.bincount(expert, minlength=EXPERTS).cumsum(0)
        y = self.product(rows[order // 2], self.weight, expert, ends) + self.bias[expert]
        y = F.silu(y) * self.scale * weight.reshape(-1)[order].unsqueeze(-1)
        y = y[order.argsort()].view(-1, 2, D).sum(1)
        return x + y.view_as(x)


def looped(rows: Tensor, weight: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    return torch.cat([part @ weight[i] for i, part in enumerate(rows.split(sizes))])


def selected(rows: Tensor, weight: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
    return torch.bmm(rows.unsqueeze(1), weight[expert]).squeeze(1)


def everywhere(rows: Tensor, weight: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
    """Every expert sees all rows."""
    every = torch.bmm(rows.repeat(EXPERTS, 1).view(EXPERTS, -1, D), weight)
    return every[expert, torch.arange(len(rows))]


@both_moments
@pytest.mark.parametrize("product", [looped, selected, everywhere])
def test_experts_in_one_parameter(product: Callable[..., Tensor], elementwise: bool) -> None:
    model = nn.Sequential(nn.Linear(3, D), Sorted(product), nn.Linear(D, 2)).double()
    assert_exact(model, losses(torch.randn(N, T, 3).double()), elementwise, passes=2)


def test_a_grouped_product_as_torch_has_it() -> None:
    """It knows no float64."""
    if not hasattr(F, "grouped_mm"):
        pytest.skip("this version of torch has no F.grouped_mm")
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, D), Sorted(_grouped)), torch.randn(N, T, 3)
    twin = nn.Sequential(nn.Linear(3, D), Sorted(looped))
    twin.load_state_dict(model.state_dict())
    found = []
    for one in (model, twin):
        capture = Capture(one, dict(one.named_parameters()), elementwise=True)
        losses(x)(one).mean().backward()
        found.append({name: capture.second_moment(name) for name in capture.parameters})
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-7)  # float32, summed in two orders


def _grouped(rows: Tensor, weight: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
    product: Tensor = F.grouped_mm(rows, weight, offs=ends.to(torch.int32))
    return product


class Shuffled(nn.Module):
    """A parameter that meets all rows of the batch, in an order that they themselves decide on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(3, D), nn.Parameter(torch.randn(D, D))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x).flatten(0, 1)
        order = rows.detach().sum(1).argsort()
        y = torch.tanh(rows[order] @ self.weight)
        return torch.zeros_like(rows).index_copy(0, order, y).view(len(x), -1)


@both_moments
def test_rows_in_another_order(elementwise: bool) -> None:
    """As many as before, so that their number says nothing."""
    assert_exact(Shuffled().double(), losses(torch.randn(N, T, 3).double()), elementwise, passes=2)


class Some(nn.Module):
    """The first samples go through a layer more than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.more = nn.Linear(3, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return torch.cat([self.more(y[:2]), y[2:]])


@both_moments
def test_a_layer_that_is_given_some_of_the_samples(elementwise: bool) -> None:
    assert_exact(Some().double(), losses(torch.randn(N, 3).double()), elementwise, passes=2)


def order_of(rows: Tensor) -> Tensor:
    return rows.detach().sum(-1).argsort()


def copied(rows: Tensor) -> Tensor:
    y = torch.empty_like(rows)
    y[order_of(rows)] = rows
    return y


def overwritten(rows: Tensor) -> Tensor:
    order = order_of(rows)
    y = rows[order].clone()
    y[order] = rows[order]
    return y


def of_two_axes(rows: Tensor) -> Tensor:
    return rows[order_of(rows)].view(2, -1, D)


def added(rows: Tensor) -> Tensor:
    """In two halves, to a tensor that is not empty any more for the second."""
    order, half = order_of(rows), len(rows) // 2
    y = torch.zeros_like(rows)
    y.index_add_(0, order[:half], rows[:half])
    return y.index_add_(0, order[half:], rows[half:])


def added_to_others(rows: Tensor) -> Tensor:
    """In place, so that whose the rows were before must be known before."""
    return (rows * 1).index_add_(0, order_of(rows), rows)


def added_to_mixed(rows: Tensor) -> Tensor:
    """To sums over rows, which are nobody's."""
    return rows[order_of(rows)].cumsum(0).index_add(0, order_of(rows), rows)


def written_to_mixed(rows: Tensor) -> Tensor:
    y = rows[order_of(rows)].cumsum(0)
    y[HALF] = rows[HALF]
    return y


HALF = torch.arange(N * T // 2).flip(0)
# (N * T, D) -> other rows, and whether it is known whose they are; else a parameter behind them is refused
ORDERS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "index": (lambda r: r[order_of(r)], True),
    "index_select": (lambda r: r.index_select(-2, order_of(r)), True),
    "index_copy": (lambda r: torch.zeros_like(r).index_copy(0, order_of(r), r), True),
    "index_add": (lambda r: r.new_zeros(r.shape).index_add(0, order_of(r), r), True),
    "index_add in two halves": (added, True),
    "writing": (copied, True),
    "writing over": (overwritten, True),
    "a new axis": (lambda r: r[None, order_of(r)].squeeze(0), True),
    "a constant order": (lambda r: r[torch.arange(len(r)).flip(0)], True),
    "flip": (lambda r: r.flip(0), True),
    "roll": (lambda r: r.roll(1, 0), True),
    "some twice": (lambda r: r[torch.arange(len(r)) // 2], True),
    "slice": (lambda r: r[2:-3], True),
    "two axes": (lambda r: of_two_axes(r).index_select(1, HALF), True),
    "two axes, both by index": (lambda r: of_two_axes(r)[torch.zeros(7).long(), torch.arange(7)], True),
    "split and joined": (lambda r: torch.cat(r[order_of(r)].split([2, 5, len(r) - 7])[::-1]), True),
    "softmax": (lambda r: r[order_of(r)].softmax(-1), True),
    "two axes, behind an ellipsis": (lambda r: of_two_axes(r)[..., HALF, :], False),
    "scatter": (lambda r: torch.zeros_like(r).scatter(0, order_of(r)[:, None].expand_as(r), r), False),
    "gather": (lambda r: r.gather(0, order_of(r)[:, None].expand_as(r)), False),
    "embedding": (lambda r: F.embedding(order_of(r), r), False),
    "roll of all": (lambda r: r.roll(1), False),
    "softmax over rows": (lambda r: r[order_of(r)].softmax(0), False),
    "product": (lambda r: torch.eye(len(r), dtype=r.dtype)[order_of(r)] @ r, False),
    "index_add of several to one": (lambda r: r.new_zeros(r.shape).index_add(0, order_of(r) // 2, r), False),
    "index_add to others": (added_to_others, False),
    "index_add to sums": (added_to_mixed, False),
    "writing over sums": (written_to_mixed, False),
    "index_reduce": (lambda r: torch.zeros_like(r).index_reduce(0, order_of(r), r, "amax"), False),
    "cumulated": (lambda r: r[order_of(r)].cumsum(0), False),
}


class Reordered(nn.Module):
    def __init__(self, order: Callable[[Tensor], Tensor], layer: bool) -> None:
        super().__init__()
        self.first, self.order = nn.Linear(3, D), order
        self.layer = nn.Linear(D, D) if layer else None
        self.weight = None if layer else nn.Parameter(torch.randn(D, D))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.order(torch.tanh(self.first(x)).flatten(0, 1))
        y: Tensor = rows @ self.weight if self.layer is None else self.layer(rows)
        return y


@pytest.mark.parametrize("layer", [False, True], ids=["parameter", "layer"])
@pytest.mark.parametrize("order", ORDERS)
def test_any_order_is_exact_or_refused(order: str, layer: bool) -> None:
    """What a sample adds is δᵀa over the rows that come from it, and where a row is from shows in its values."""
    move, known = ORDERS[order]
    model, x = Reordered(move, layer).double(), torch.randn(N, T, 3).double()
    capture = Capture(model, dict(model.named_parameters()), elementwise=True)
    if not known:
        if layer and order in ("softmax over rows", "cumulated"):
            pytest.skip("samples meet in it, which a layer sees as it sees BatchNorm: rows are what counts")
        with pytest.raises(RuntimeError, match=r"cannot be told|is not known|do not go through it"):
            model(x)
        return
    for _ in range(2):
        model.zero_grad()
        capture.clear()
        y = model(x)
        y.square().sum().backward()
        rows = torch.tanh(model.first(x)).flatten(0, 1).detach()
        inputs, dy = move(rows).reshape(-1, D), 2 * y.detach().reshape(-1, D)
        place = order_of(rows) if order == "softmax" else (inputs.unsqueeze(1) == rows).all(-1).double().argmax(1)
        sample = place // T
        c = torch.stack([inputs[sample == i].T @ dy[sample == i] for i in range(N)])
        c = c.mT if layer else c
        found = capture.second_moment("layer.weight" if layer else "weight")
        torch.testing.assert_close(found, c.square().sum(0), rtol=1e-10, atol=1e-12)


def test_a_place_in_every_sample_is_no_order() -> None:
    """x[arange(N), lengths]: the pooling of many models costs nothing more."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(3, D), nn.Linear(D, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            last = y.detach().sum(-1).argmax(1)
            return self.head(y[torch.arange(len(x)), last])

    capture = assert_exact(Pooled().double(), losses(torch.randn(N, T, 3).double()), True, passes=2)
    assert not capture.sites["head"].routed


class ShiftedRight(nn.Module):
    """Tokens behind a first one, as decoders take them; and features behind a zero."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.scale = nn.Embedding(9, D), nn.Parameter(torch.randn(T + 1, D))

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[..., 0] > 0).long() + 2
        shifted = ids.new_zeros(len(x), T + 1)
        shifted[:, 1:] = ids
        features = x.new_zeros(len(x), T + 1, D)
        features[:, 1:, :3] = x
        return self.tokens(shifted) + features * self.scale


@both_moments
def test_what_is_written_into_something_new_holds_samples(elementwise: bool) -> None:
    assert_exact(ShiftedRight().double(), losses(torch.randn(N, T, 3).double()), elementwise, passes=2)


def test_autocast_runs_experts_in_its_precision() -> None:
    model, seen = Stack(by_numbers), []
    model.one.experts[0].up.register_forward_hook(lambda _, __, y: seen.append(y.dtype))
    optimizer = AutoAdam(model)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(torch.randn(N, T, 3)) - 1).square().mean()
        loss.backward()
        optimizer.step()
    assert seen[-1] == torch.bfloat16


@pytest.mark.parametrize("seed", range(8))
def test_routing_does_not_hide_which_axis_is_the_batch(seed: int) -> None:
    """With few samples and positions, rows that are routed often move as if the samples were on the second axis."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, D), Mixture(by_numbers), nn.Linear(D, 2)).double()
    assert_exact(model, losses(torch.randn(4, 2, 3).double()), True, passes=2)


class Mixed(nn.Module):
    """Rows that are sums of those of several samples, before a layer or a parameter."""

    def __init__(self, layer: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, D) if layer else None
        self.weight = None if layer else nn.Parameter(torch.randn(3, D))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        rows = torch.linspace(0, 1, len(rows) ** 2).view(len(rows), -1) @ rows
        return self.layer(rows) if self.layer is not None else rows @ self.weight


@pytest.mark.parametrize("layer", [True, False])
def test_rows_of_several_samples_are_refused(layer: bool) -> None:
    model = Mixed(layer)
    Capture(model, dict(model.named_parameters()), elementwise=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'layer'.* cannot be told|parameter 'weight'.* is not known"):
            model(torch.randn(N, T, 3))


class Checkpointed(nn.Module):
    """A mixture that a checkpoint runs again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one = nn.Linear(3, D), Mixture(by_mask)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.one, self.first(x), use_reentrant=False)
        return result


def test_routes_are_followed_in_a_module_that_a_checkpoint_runs() -> None:
    assert_exact(Checkpointed().double(), losses(torch.randn(N, T, 3).double()), True, passes=2)


class Pooled(nn.Module):
    """Nodes of some graphs, a row each, summed over each graph."""

    def __init__(self, layer: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, D), nn.Linear(D, 2) if layer else None
        self.weight = None if layer else nn.Parameter(torch.randn(D, 2))

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        y = torch.zeros(4, D, dtype=x.dtype).index_add(0, graph, self.first(x).tanh())
        return y @ self.weight if self.head is None else self.head(y)


@pytest.mark.parametrize("layer", [True, False])
@pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
def test_rows_of_several_samples_that_are_added_up_are_refused(make: Callable[..., Any], layer: bool) -> None:
    model, graph = Pooled(layer).double(), torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3])
    optimizer = make(model, exact=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'head'.* cannot be told|parameter 'weight'.* is not known"):
            model(torch.randn(14, 3).double(), graph)
    optimizer.detach()


class Several(nn.Module):
    """Two experts for each row, whose results are added to the row that they were made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.expert, self.scale = nn.Linear(3, D), nn.Linear(D, D), nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x).flatten(0, 1)
        chosen = torch.arange(2 * len(rows)).roll(3) // 2
        y = torch.zeros_like(rows).index_add(0, chosen, self.expert(rows[chosen]))
        return (y * self.scale).view(len(x), -1)


class Masked(nn.Module):
    """An autoencoder that sees some of the places, as many of each sample, and puts a token in front."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.token = nn.Linear(D, D), nn.Linear(D, 2), nn.Parameter(torch.randn(1, 1, D))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        h = self.embed(x)[seen].view(len(x), -1, D)
        y: Tensor = self.head(torch.cat([self.token.expand(len(x), -1, -1), h], 1))
        return y


class Real(nn.Module):
    """Some images of each sample, of which those that are only padding are left out, and words in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, D, 3, padding=1, groups=2), nn.GroupNorm(2, D)
        self.words, self.head = nn.Embedding(7, D, padding_idx=0), nn.Linear(D, 2)

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        flat = images.flatten(0, 1)
        real = (flat != 0).flatten(1).any(1)
        seen = self.head(self.norm(self.conv(flat[real]).tanh()).mean((2, 3)))
        order = words.flatten().sort().indices
        said = self.head(self.words(words.flatten()[order]))
        return torch.cat([seen, said])


@both_moments
def test_layers_of_one_row_after_the_other(elementwise: bool) -> None:
    images, words = torch.randn(N, 2, 2, 4, 5, dtype=torch.float64), torch.randint(7, (N, 3))
    images[1, 1] = images[3, 0] = 0
    real = (images != 0).flatten(2).any(2)
    owners = torch.cat([real.nonzero()[:, 0], words.flatten().sort().indices // 3])

    def of_each(model: nn.Module) -> Tensor:
        each = model(images, words).square().sum(1)
        return torch.zeros(N, dtype=each.dtype).index_add(0, owners, each)

    for frozen in ((), ("conv",), ("norm",), ("conv", "norm", "words")):
        model = Real().double()
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
        assert_exact(model, of_each, elementwise)


class Joined(nn.Module):
    """Takes two rows, which a mask chose, for the channels of one image."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(3, D), layer

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        y: Tensor = self.layer(self.first(x)[chosen].view(-1, 2, D))
        return y


@pytest.mark.parametrize("layer", [nn.Conv1d(2, 2, 1), nn.GroupNorm(1, 2), nn.LayerNorm((2, D))], ids=str)
def test_rows_that_a_layer_joins_are_refused(layer: nn.Module) -> None:
    model = Joined(layer)
    optimizer = AutoSGD(model)
    chosen = torch.zeros(N, T, dtype=torch.bool)
    chosen[:, 0] = True
    with pytest.raises(RuntimeError, match=r"'layer'.* cannot be told"):
        model(torch.randn(N, T, 3), chosen)
    optimizer.detach()


@both_moments
def test_rows_that_come_together_again(elementwise: bool) -> None:
    x = torch.randn(N, 6, D, dtype=torch.float64)
    seen = torch.stack([torch.randperm(6) < 2 for _ in range(N)])
    assert_exact(Masked().double(), lambda m: m(x, seen).square().flatten(1).sum(1), elementwise)


class Restored(Masked):
    """Its decoder is given a token at the places that were not seen, which are told apart by what a table says."""

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        places = torch.linspace(-1, 1, 6 * D, dtype=x.dtype).view(1, 6, D).expand(len(x), -1, -1)
        h = self.embed(x)[seen].view(len(x), -1, D) + places[seen].view(len(x), -1, D)
        missing = self.token + places[~seen].reshape(len(x), -1, D)
        y: Tensor = self.head(torch.cat([h, missing], 1).tanh().cumsum(1))
        return y


@both_moments
def test_rows_of_a_table_that_come_together_again(elementwise: bool) -> None:
    x = torch.randn(N, 6, D, dtype=torch.float64)
    seen = torch.stack([torch.randperm(6) < 2 for _ in range(N)])
    assert_exact(Restored().double(), lambda m: m(x, seen).square().flatten(1).sum(1), elementwise)


def test_rows_that_come_together_with_others_are_refused() -> None:
    """As many in all, and not of each sample."""
    model, seen = Masked(), torch.zeros(N, 6, dtype=torch.bool)
    seen[:, :2] = True
    seen[0, 2], seen[1, 0] = True, False
    optimizer = AutoSGD(model)
    with pytest.raises(RuntimeError, match=r"'token'.*which axis numbers the samples is not known"):
        model(torch.randn(N, 6, D), seen)
    optimizer.detach()


@both_moments
def test_rows_of_one_sample_may_be_added_up(elementwise: bool) -> None:
    assert_exact(Several().double(), losses(torch.randn(N, T, 3).double()), elementwise, passes=2)


@pytest.mark.parametrize("options", [{}, {"exact": True}, {"rule": "paper"}, {"measure_every": 2}], ids=str)
@pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
def test_a_mixture_trains(make: Callable[..., Any], options: dict[str, Any]) -> None:
    """Other batches are routed in other ways."""
    model = nn.Sequential(Stack(by_numbers), nn.Linear(2, D), Sorted(looped))
    optimizer = make(model, **options)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for size in (N, N, N - 1, N, N + 1, N):
        optimizer.zero_grad()
        (model(torch.randn(size, T, 3)) - 1).square().mean().backward()
        optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(0 <= chosen.noise < float("inf") for chosen in optimizer.tuned().values())
