"""What all automatic optimizers share: the lifecycle, and the order of a step."""

import contextlib
import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoopt import oracle
from autoopt.capture import Capture, Source, Spread, sharded
from autoopt.diagnostics import Tuned, tuned
from autoopt.optim.average import RunningStatistics, exchanged
from autoopt.optim.bucket import AVERAGE, HELD, Bucket
from autoopt.optim.fused import Form, suits
from autoopt.optim.layout import arrange, fit, in_order, unique
from autoopt.optim.options import SPREADS, Shared, check, choice, number
from autoopt.optim.paper import Paper
from autoopt.optim.reading import Reading, Swept, read
from autoopt.optim.robust import Robust
from autoopt.optim.rule import Rule
from autoopt.optim.step import move, newest_of


@dataclass
class Now:
    """What an optimizer knows for the moment, and does not save but for the count of steps.

    One object, made with the optimizer, so that a wrapper that shares its attributes (Lightning's) shares these too.
    """

    source: Source | None = None  # of the statistics; a copy or an unpickled optimizer has none
    buckets: list[list[Bucket]] | None = None  # those of each group; made when needed
    running: RunningStatistics | None = None
    steps: int = 0  # taken since the noise is not measured at all of them
    measured: bool = False  # whether there was a step with two samples or more
    inside: bool = False  # whether the average is in the place of the weights
    zeroed: set[nn.Parameter] = field(default_factory=set)  # their .grad was set to zeros, not to None


class AutoOptimizer(Optimizer, ABC):
    """An optimizer that sets learning rate and momentum by itself; a subclass says in which metric (Table 1).

        opt = AutoSGD(model)  # the rest of the training loop stays as it is

    Args:
        model: the model to train; its layers report their statistics until `opt.detach()`. Or, as in torch.optim,
            parameters or groups of them: then the only spread to be seen is that between the passes of one step.
        param_groups: groups as in torch.optim, for options of some parameters alone; default: all of the model's.
        lr: multiplies the automatic rate, so that learning rate schedulers work; 1 leaves it as it is.
        rule: "robust", or "paper" for Algorithm 1.
        average: keep the average of the weights too, one more copy of them, for `with opt.averaged()`.
        spread: what the noise is measured between: "samples", or the backward "passes" that one step accumulates
            (and ranks), which leaves the model's classes alone and is less exact.
        measure_every: measure the noise at the first k steps and then at every k-th one. The passes of the steps
            between cost what they cost without this library, and those steps go by the noise measured last.
        exact: look at every sample of the batch everywhere. Else convolutions, normalisations and layers over
            sequences, which would take longer for that than for their gradients, look at one: see
            `autoopt.capture.sampled`. rule="paper" always looks at all.
        weight_decay: coupled, added to the gradient, or decoupled as in AdamW.
        decoupled_weight_decay: shrink the weights at each step instead, by this share of the step: of the rate α
            (rule="paper") or of the step relative to the weights (rule="robust").
        granularity: what shares one rate and momentum: each "tensor", a "layer" (weight and bias) or a "group".
        smoothing: for rule="paper", υ of eq. oracle_est_ewma; default: what reproduces the paper's table with SGD, Adam
            and AdaGrad. The others have Adam's, which nobody has measured.
        start: for rule="paper", the (γ1, γ2) to start from; the rate is 1 - γ1.
        metric: the options of the metric.
    """

    elementwise: bool  # whether the metric weighs the elements of the second moment
    corrected = False  # whether the metric has the factor 1 - β^t of eq. Hessian_Adam
    metric_options: tuple[str, ...] = ()  # what a group may set, besides `Shared`
    smoothing: float  # υ of rule="paper" where the user gives none
    asks_all = False  # whether the metric needs every sample

    def __init__(
        self,
        model: nn.Module | Iterable[Any],
        *,
        param_groups: Iterable[dict[str, Any]] | None = None,
        lr: float = 1.0,
        rule: str = "robust",
        average: bool = True,
        spread: str = "samples",
        measure_every: int = 1,
        exact: bool = False,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        granularity: str = "tensor",
        smoothing: float | None = None,
        start: tuple[float, float] = (oracle.GAMMA_MAX, 0.0),
        **metric: Any,
    ) -> None:
        if unknown := sorted(set(metric) - set(self.metric_options)):
            chosen = " It sets the momentum by itself." if unknown[0] in ("betas", "momentum", "nesterov") else ""
            raise TypeError(
                f"{type(self).__name__} has no option '{unknown[0]}'.{chosen} It has "
                f"{', '.join([*Shared.__annotations__, *self.metric_options])}."
            )
        options = {
            "lr": lr, "rule": rule, "average": average, "spread": spread, "measure_every": measure_every,
            "exact": exact, "weight_decay": weight_decay, "decoupled_weight_decay": decoupled_weight_decay,
            "granularity": granularity, "smoothing": self.smoothing if smoothing is None else smoothing, "start": start,
            **metric,
        }  # fmt: skip
        choice("spread", spread, SPREADS)
        self._now = Now()
        self._names: dict[nn.Parameter, str] = {}
        if isinstance(model, nn.Module):
            groups = self._groups(model, param_groups)
            kind = Capture if spread == "samples" else Spread
            self._now.source = kind(model, {}, elementwise=self.elementwise)
        elif param_groups is not None:
            raise TypeError(
                f"param_groups takes groups of the model's parameters, and {type(self).__name__} was given no model, "
                f"but {type(model).__name__}: write {type(self).__name__}(model, param_groups=...)."
            )
        else:
            groups, options["spread"] = _listed(type(self).__name__, model), "passes"
            self._now.source = Spread(None, {}, elementwise=self.elementwise)
        try:
            super().__init__(groups, options)
        except Exception:
            self._now.source.detach()  # leave no half-attached model behind
            raise
        weakref.finalize(self, self._now.source.detach).atexit = False

    def _groups(self, model: nn.Module, param_groups: Iterable[dict[str, Any]] | None) -> list[dict[str, Any]]:
        sharded.reshard(model)
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        if not any(parameter.requires_grad for parameter in self._names):
            raise ValueError(
                f"the model ({type(model).__name__}) has no trainable parameter: set requires_grad_(True) on some."
            )
        return [{"params": list(self._names)}] if param_groups is None else list(param_groups)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for option, default in self.defaults.items():
                if option != "differentiable":  # torch's own, in no group
                    group.setdefault(option, default)  # it was saved by an earlier version
        if "_now" not in self.__dict__:  # a copy
            self._now = Now()
            self._observe_passes()

    # Groups and their options.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train further parameters (of the model, where there is one), with options of their own."""
        params = param_group["params"]
        if isinstance(params, set):
            raise TypeError("the parameters of a group are a set, which has no order to save them by: give a list.")
        params = [params] if isinstance(params, Tensor) else list(params)
        taken = {name for group in self.param_groups for name in group["param_names"]}
        named: list[tuple[str, nn.Parameter]] = []
        for place, entry in enumerate(params, len(taken)):
            named.append(self._named(entry, place, taken))
            taken.add(named[-1][0])
        self._check_options({**self.defaults, **param_group})
        if self._now.source is not None:
            self._now.source.add(dict(named))
        names, parameters = [name for name, _ in named], [parameter for _, parameter in named]
        super().add_param_group({**param_group, "params": parameters, "param_names": names})
        self._now.buckets = self._now.running = None
        self._now.steps = 0  # what is new has nothing measured yet
        self._plan_step()
        self._plan_samples()

    def _named(self, entry: Any, place: int, taken: Container[str]) -> tuple[str, nn.Parameter]:
        """The parameter with its name in the model; without a model, the user's name for it or its number.

        A user's name that is `taken`, by a group of another model's parameters say, comes with a number.
        """
        given, parameter = entry if isinstance(entry, tuple) else (None, entry)
        model = None if self._now.source is None else self._now.source.model
        if model is None:
            return unique(given or str(place), taken), parameter
        if parameter not in self._names:  # a layer may have been added since
            self._names = {parameter: name for name, parameter in model.named_parameters()}
        if parameter not in self._names:
            shape = tuple(parameter.shape)
            raise ValueError(f"a parameter group holds a tensor of shape {shape} that is not a parameter of the model.")
        return self._names[parameter], parameter

    def _check_options(self, options: dict[str, Any]) -> None:
        check(options)

    def _rule(self, group: dict[str, Any]) -> Rule:
        return Paper(self.corrected) if group["rule"] == "paper" else Robust()

    # The step.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Nothing of it is read back from the device (but once, where gradients are cleared by zeros).

        Left alone are: everything, if a gradient or a statistic anywhere is not finite; a unit whose gradient is zero;
        a parameter without gradient; a group whose `lr` is 0. A batch of one sample has no spread: it takes its step
        by what the batches before it taught.

        Args:
            closure: as in torch.optim, reevaluates the model; what it returns, if anything, is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        source = self._attached()
        source.begin()
        self._refuse_step(source)
        with torch.no_grad():
            readings = [
                read(source, group, bucket, self.elementwise, self._now.zeroed, self._fused(group, bucket))
                for group, buckets in zip(self.param_groups, self._made_buckets(), strict=True)
                for bucket in buckets
                if group["lr"] != 0 and any(p.grad is not None for p in bucket.params)
            ]
            total = self._total(source, readings)
            for reading in readings:
                there = None if total is None else total.to(reading.bucket.device)
                move(self, self._rule(reading.group), source, reading, there)
            self._average_running(readings, total)
        source.clear()
        if not torch.compiler.is_compiling():
            source.current.inputs.clear()
        if readings and any(group["measure_every"] > 1 for group in self.param_groups):
            self._now.steps += 1
        self._plan_step()
        return loss

    def _total(self, source: Source, readings: list[Reading | Swept]) -> Tensor | None:
        """Finite where all is that was read, here and on the other ranks; None where that is one reading, or none."""
        if not readings or (len(readings) == 1 and source.ranks == 1):
            return None
        device = readings[0].bucket.device
        return source.over_ranks(functools.reduce(torch.add, [reading.largest().to(device) for reading in readings]))

    def _refuse_step(self, source: Source) -> None:
        if self._now.inside:
            raise RuntimeError(
                "step() was called inside `with opt.averaged()`, where the weights are the average: leave it."
            )
        if source.current.unfinished or source.current.failed:
            which = "the last backward pass" if source.current.unfinished else "a backward pass of this step"
            raise RuntimeError(f"{which} did not come to its end: call zero_grad() before the next one.")
        source.current.refuse_left()
        for group in self.param_groups:
            number("lr", group["lr"], low=0.0)  # a scheduler may have set it
        if not self._now.measured:  # else the number of samples matters no more, and a compiled step need not know it
            samples = source.current.gathered * source.ranks
            if samples == 1 and isinstance(source, Capture) and self._any_paper():
                raise RuntimeError(
                    'every batch so far held one sample, which has no spread for rule="paper" to learn a rate from: '
                    "use a batch size of at least 2, accumulate gradients over several batches, or take "
                    'rule="robust".'
                )
            self._now.measured = samples > 1

    def _any_paper(self) -> bool:
        return any(group["rule"] == "paper" for group in self.param_groups)

    def _plan_step(self) -> None:
        """Say whether the passes of the next step are observed: where any group is due.

        The first steps all measure, since the metric may be far from its size then: AdaGrad's grows by √2 from k to 2k.
        """
        every, steps = [group["measure_every"] for group in self.param_groups], self._now.steps
        if self._now.source is not None:
            self._now.source.current.resting = all(k > 1 and steps >= k and steps % k != 0 for k in every)

    def _plan_samples(self) -> None:
        """Say whether every sample is looked at: where any group needs it."""
        if isinstance(self._now.source, Capture):
            wanted = any(group["exact"] or group["rule"] == "paper" for group in self.param_groups)
            self._now.source.exact = self.asks_all or wanted

    @abstractmethod
    def _metric(self, source: Source, reading: Reading, gradient: Tensor, rows: Tensor) -> Tensor | None:
        """The diagonal of Ĥ after this gradient, less a factor that is the same for a whole unit; None is the identity.

        Such a factor changes neither γ nor the noise (Â and b̂ scale alike): see `corrected`.
        """

    def _form(self, group: dict[str, Any]) -> Form | None:
        """What `_metric` computes, if it is one that the kernels know."""
        return None

    def _fused(self, group: dict[str, Any], bucket: Bucket) -> Form | None:
        """The metric, if kernels do the step. A subclass that changes what `_form` tells of must tell it anew."""
        if not suits(group, bucket):
            return None
        order = type(self).__mro__
        told, *meant = (
            next(place for place, kind in enumerate(order) if name in vars(kind))
            for name in ("_form", "_metric", "_direction", "_moved")
        )
        return self._form(group) if told <= min(meant) else None

    def _buffers(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The names of the tensors that the metric keeps for each parameter."""
        return ()

    def _direction(self, bucket: Bucket, estimate: Tensor, gradient: Tensor, kept: Tensor, new: Tensor) -> Tensor:
        """What is stepped along, before the metric; ĝ was `kept`·ĝ + `new`·g."""
        return estimate

    def _moved(self, group: dict[str, Any], bucket: Bucket, change: Tensor, rows: Tensor) -> None:
        """Learn from the change of the weights, where the metric does; nothing needs it after this."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and with them the statistics that belong to them."""
        super().zero_grad(set_to_none)
        self._now.zeroed = set() if set_to_none else {p for group in self.param_groups for p in group["params"]}
        if self._now.source is not None:
            self._now.source.clear()

    # The average of the weights.

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the average of the weights, and of BatchNorm's running statistics, in their place for a while.

            with opt.averaged():
                evaluate(model)

        `model.state_dict()` inside saves the average. It is over about the last fifth of the steps since the data last
        changed.
        """
        if self._now.inside:
            raise RuntimeError("averaged() was entered inside itself: the weights are the average already.")
        if not any(group["average"] for group in self.param_groups):
            raise RuntimeError("this optimizer keeps no average of the weights: make it with average=True.")
        pairs = [
            pair
            for buckets in self._made_buckets()
            for bucket in buckets
            if AVERAGE in bucket.buffers
            for pair in zip(bucket.here(bucket.params), bucket.tensors(bucket.buffers[AVERAGE]), strict=True)
        ]
        self._reshard()
        with exchanged([*pairs, *self._made_running().pairs()]):
            self._now.inside = True
            try:
                yield
            finally:
                self._now.inside = False
                self._reshard()

    def _reshard(self) -> None:
        if self._now.source is not None:
            self._now.source.reshard()

    def _made_running(self) -> RunningStatistics:
        if self._now.running is None:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            model = None if self._now.source is None else self._now.source.model
            self._now.running = RunningStatistics(model, self.state, parameters)
        return self._now.running

    def _average_running(self, readings: list[Reading | Swept], total: Tensor | None) -> None:
        """`total` is what `_total` found: a step in which something is not finite teaches nothing."""
        if not any(group["average"] for group in self.param_groups):
            return
        running = self._made_running()  # there from the first step on, whatever became of it
        first = next((reading for reading in readings if reading.group["average"]), None)
        if first is not None and running.found:
            running.update(newest_of(first, total))

    # The layout of the state.

    def _made_buckets(self) -> list[list[Bucket]]:
        made = self._now.buckets
        if made is None or not (self._now.inside or fit(made, self.param_groups)):
            with torch.inference_mode(False), torch.no_grad():  # else no step outside of that mode could change it
                made = self._now.buckets = [self._arrange(group) for group in self.param_groups]
        return made

    def _arrange(self, group: dict[str, Any]) -> list[Bucket]:
        buffers = ["estimate", *self._buffers(group), *([AVERAGE] if group["average"] else [])]
        statistics = {**self._rule(group).statistics(group), "count": 0.0, "noise": torch.nan}
        if group["measure_every"] > 1:
            statistics[HELD] = torch.nan
        return arrange(group, statistics, buffers, self.state)

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim; the average of the weights is in it."""
        if self._now.inside:
            raise RuntimeError(
                "state_dict() was called inside `with opt.averaged()`, where the weights are the average."
            )
        state_dict = super().state_dict()
        for group in state_dict["param_groups"]:
            if group["measure_every"] > 1:
                group["steps"] = self._now.steps
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, bit by bit; torch alone would round all to the dtype of the parameters.

        As in torch.optim the state goes by the order of the parameters, unless the names are the same in another order.
        """
        state_dict = in_order(state_dict, self.param_groups)
        last = self.register_load_state_dict_pre_hook(lambda _, hooked: state_dict.update(hooked))  # by other hooks
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                # a copy: what another optimizer's state_dict() gave are views of what it trains on with
                with torch.inference_mode(False):
                    self.state[parameter][name] = value.clone() if isinstance(value, Tensor) else value
        self._now.buckets = self._now.running = None
        self._now.measured = bool(state_dict["state"])
        if self._now.source is not None and self._now.source.model is None:
            self._now.source.detach()
            self._observe_passes()  # the names may be others now
        self._now.steps = max(group.pop("steps", 0) for group in self.param_groups)
        self._plan_step()
        self._plan_samples()

    # What was chosen, and the tie to the model.

    @torch.no_grad()
    def tuned(self) -> dict[str, Tuned]:
        """The rate, the momentum and the noise of every parameter, by its name in `named_parameters`.

        Reads the device once, and is the only method that does.
        """
        names: list[str] = []
        tables: list[Tensor] = []
        for group, buckets in zip(self.param_groups, self._made_buckets(), strict=True):
            for bucket in buckets:
                rate, momentum = self._rule(group).chosen(bucket)
                table = torch.stack([rate * group["lr"], momentum, bucket.statistics["noise"]], 1)
                names += bucket.names
                tables.append(bucket.of_tensors(table))
        return tuned(names, tables)

    def detach(self) -> None:
        """Give the model's layers back as they were. The optimizer cannot step after this."""
        if self._now.source is not None:
            self._now.source.detach()

    def _observe_passes(self) -> None:
        """Have statistics again where that needs no model."""
        if self.defaults["spread"] == "passes":
            named = [zip(group["param_names"], group["params"], strict=True) for group in self.param_groups]
            parameters = dict(pair for pairs in named for pair in pairs)
            self._now.source = Spread(None, parameters, elementwise=self.elementwise)

    def _attached(self) -> Source:
        kind = type(self).__name__
        if self._now.source is None:
            raise RuntimeError(
                f"this {kind} is a copy and knows no model: make {kind}(model) and load_state_dict() from the original."
            )
        layer = self._now.source.lost()
        if layer is not None:
            raise RuntimeError(
                f"layer '{layer}' no longer reports to this {kind}: it was detached, or another optimizer was made for "
                f"the same model. Step that one, or make {kind}(model) anew."
            )
        return self._now.source


def _listed(kind: str, params: Any) -> list[Any]:
    """Parameters or groups as torch.optim takes them."""
    several = isinstance(params, Iterable) and not isinstance(params, Tensor)
    listed = list(params) if several else []
    if not several or any(not isinstance(entry, Tensor | tuple | dict) for entry in listed):
        raise TypeError(
            f"{kind} takes the model, whose layers give the statistics, or an iterable of parameters or of groups, not "
            f"{type(params).__name__}: write {kind}(model)."
        )
    if not listed:
        raise ValueError(f"{kind} got an empty list of parameters: write {kind}(model).")
    return listed
