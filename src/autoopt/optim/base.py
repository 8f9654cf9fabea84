"""What all automatic optimizers share: the lifecycle, and the paper's Algorithm 1 as the order of a step."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoopt import oracle
from autoopt.capture import Capture
from autoopt.diagnostics import Tuned, tuned
from autoopt.optim.bucket import Bucket
from autoopt.optim.options import choice, number

GRANULARITIES = ("tensor", "layer", "group")
RULES = ("paper",)


class AutoOptimizer(Optimizer, ABC):
    """An optimizer that sets learning rate and momentum by itself; a subclass says in which metric (Table 1).

    Args:
        model: the model to train. Its covered layers report their statistics from now on, until `detach`.
        param_groups: as in torch.optim, for parameters with options of their own; all of the model's by default.
        options: the defaults of the groups.
    """

    elementwise: bool  # whether the metric weighs the elements of the second moment

    _capture: Capture | None = None  # a copy or an unpickled optimizer has none: it knows no model
    _buckets: list[list[Bucket]] | None = None  # those of each group; made when needed
    _measured = False  # whether there was a step with two samples or more
    _zeroed: frozenset[nn.Parameter] | set[nn.Parameter] = frozenset()  # their .grad was set to zeros, not to None

    def __init__(
        self, model: nn.Module, param_groups: Iterable[dict[str, Any]] | None, options: dict[str, Any]
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"{type(self).__name__} takes the model, whose layers give the statistics, not {type(model).__name__}: "
                f"write {type(self).__name__}(model). For options of some parameters alone, use param_groups."
            )
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        if not any(parameter.requires_grad for parameter in self._names):
            raise ValueError(
                f"the model ({type(model).__name__}) has no trainable parameter: set requires_grad_(True) on some."
            )
        groups = [{"params": list(self._names)}] if param_groups is None else list(param_groups)
        self._capture = Capture(model, {}, elementwise=self.elementwise)
        try:
            super().__init__(groups, options)
        except Exception:
            self._capture.detach()  # leave no half-attached model behind
            raise
        weakref.finalize(self, self._capture.detach).atexit = False

    # Groups and their options.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train further parameters of the model, with options of their own."""
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        params = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
        named = [(self._name(parameter), parameter) for parameter in params]
        self._check_options({**self.defaults, **param_group})
        assert self._capture is not None
        self._capture.add(dict(named))
        super().add_param_group({**param_group, "params": named})
        self._buckets = None

    def _name(self, parameter: nn.Parameter) -> str:
        if parameter not in self._names:  # a layer may have been added since
            assert self._capture is not None
            self._names = {parameter: name for name, parameter in self._capture.model.named_parameters()}
        if parameter not in self._names:
            shape = tuple(parameter.shape)
            raise ValueError(f"a parameter group holds a tensor of shape {shape} that is not a parameter of the model.")
        return self._names[parameter]

    def _check_options(self, options: dict[str, Any]) -> None:
        number("lr", options["lr"], low=0.0)
        number("weight_decay", options["weight_decay"], low=0.0)
        number("smoothing", options["smoothing"], low=0.0, below=1.0)
        try:
            gamma1, gamma2 = options["start"]
        except (TypeError, ValueError):
            raise ValueError(f"start is {options['start']!r}; it must be a pair (γ1, γ2).") from None
        number("start[0] (γ1)", gamma1, low=0.0, high=oracle.GAMMA_MAX)
        number("start[1] (γ2)", gamma2, low=0.0, below=1.0 - gamma1)
        choice("rule", options["rule"], RULES)
        choice("granularity", options["granularity"], GRANULARITIES)

    # The step.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of Algorithm 1. Nothing of it is read back from the device.

        Left alone are: everything, if a gradient or a statistic anywhere is not finite; a unit whose gradient is zero;
        a parameter without gradient; a group whose `lr` is 0. A batch of one sample has no spread: it takes its step
        with the γ of the batches before it.

        Args:
            closure: as in torch.optim, reevaluates the model; what it returns, if anything, is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        capture = self._attached()
        if capture.current.unfinished:
            raise RuntimeError("the last backward pass did not come to its end: call zero_grad() before the next one.")
        if capture.current.gathered * capture.ranks == 1 and not self._measured:
            raise RuntimeError(
                "every batch so far held one sample, which has no spread to learn a rate from: use a batch size of at "
                "least 2, or accumulate gradients over several batches."
            )
        self._measured |= capture.current.gathered * capture.ranks > 1
        with torch.no_grad():
            readings = [
                self._read(capture, group, bucket)
                for group, buckets in zip(self.param_groups, self._made_buckets(), strict=True)
                for bucket in buckets
                if group["lr"] != 0 and any(p.grad is not None for p in bucket.params)
            ]
            if readings:
                bad = torch.stack([reading.bad.to(readings[0].bad.device) for reading in readings]).sum()
                finite = capture.over_ranks(bad) == 0
                for reading in readings:
                    self._update(capture, reading, finite.to(reading.bad.device))
        capture.clear()
        return loss

    def _read(self, capture: Capture, group: dict[str, Any], bucket: Bucket) -> "Reading":
        """Collect gradients and second moments of a bucket, and see whether they are finite."""
        found = [capture.second_moment(name) for name in bucket.names]
        gradients = [
            None if square is None and (capture.current.blank or parameter in self._zeroed) else parameter.grad
            for parameter, square in zip(bucket.params, found, strict=True)
        ]
        squares = [None if gradient is None else square for gradient, square in zip(gradients, found, strict=True)]
        for name, gradient, square in zip(bucket.names, gradients, squares, strict=True):
            if gradient is not None and square is None:
                raise RuntimeError(
                    f"parameter '{name}' has a gradient but no statistics. Either no backward() has reached its layer "
                    "since the last step() or zero_grad(), or the gradient did not come from the layer's own forward "
                    "pass (but from F.linear(x, layer.weight), say). Call the layer itself and backward() before each "
                    "step(), or leave the parameter to another optimizer through param_groups."
                )
        gradient = bucket.rows(gradients)
        (size,) = bucket.sums(gradient.square())
        square = bucket.rows(squares) if self.elementwise else bucket.stack(squares)
        changed = capture.changed(bucket.names, gradients)
        if changed is not None:  # what was done to g since the backward pass was not done to Σ c_i²: do it now
            factor = changed.square()
            square = square * (bucket.column(factor) if self.elementwise else factor)
        if self.elementwise:
            (spread,) = bucket.sums(square)
        else:
            square = spread = bucket.reduce(square, "sum")
        counts = [
            None if gradient is None else capture.samples(name)
            for name, gradient in zip(bucket.names, gradients, strict=True)
        ]
        samples = bucket.reduce(bucket.stack(counts), "max")
        bad = (size + spread).isfinite().logical_not().sum()
        return Reading(group, bucket, gradient, bucket.present(gradients), size, square, samples, bad)

    def _update(self, capture: Capture, reading: "Reading", finite: Tensor) -> None:
        """Algorithm 1 for the units of one bucket. Every change passes through a mask, since only the device knows.

        `live` units have a finite gradient that is not zero; the `rows` that move are theirs, less those of tensors
        without a gradient.
        """
        group, bucket = reading.group, reading.bucket
        live = finite & (reading.size > 0)
        moves = live[bucket.unit_of_tensor]
        if reading.present is not None:
            moves = moves & reading.present
        bucket.steps.add_(moves)
        rows = moves[bucket.tensor_of_row].unsqueeze(1)
        raw = torch.where(rows, reading.gradient, 0.0)
        weights = bucket.rows(bucket.params) if group["weight_decay"] else None
        coupled = weights is not None and not group["decoupled_weight_decay"]
        gradient = torch.where(rows, raw + group["weight_decay"] * weights, 0.0) if coupled else raw
        metric = self._metric(group, bucket, gradient, rows)  # Ĥ, Table 1

        self._learn(capture, reading, live, metric, raw, gradient)
        self._estimate(bucket, live, rows, gradient)
        scale = bucket.spread(group["lr"] / self._correction(bucket))
        change = over(bucket.buffers["estimate"], metric) * scale  # eq. w_update-1
        if weights is not None and not coupled:
            change = change + weights * bucket.spread(group["lr"] * group["weight_decay"] * (1 - bucket.gamma[:, 0]))
        torch._foreach_sub_(bucket.params, bucket.tensors(torch.where(rows, change, 0.0)))  # type: ignore[arg-type]

    def _learn(
        self, capture: Capture, reading: "Reading", live: Tensor, metric: Tensor | None, raw: Tensor, gradient: Tensor
    ) -> None:
        """γ, from the inner products of the gradient (`raw`: less weight decay) and the previous estimate."""
        bucket, estimate = reading.bucket, reading.bucket.buffers["estimate"]  # m = ĝ of the step before
        natural = over(gradient, metric)
        gg, gm, mm = bucket.sums(gradient * natural, natural * estimate, over(estimate.square(), metric))
        raw_gg = gg if raw is gradient else bucket.sums(over(raw.square(), metric))[0]
        square = bucket.sums(over(reading.square, metric))[0] if self.elementwise else reading.square
        square, samples = capture.over_ranks(torch.stack([square / capture.ranks**2, reading.samples]))

        variance = oracle.variance(square, raw_gg, samples)  # V̂, of the gradient alone: decay has no noise
        measured = live & (samples > 1) & (gg > 0)
        gamma = torch.stack(oracle.solve(variance, gg, gm, mm), 1)
        smooth = oracle.smooth(bucket.gamma, gamma, reading.group["smoothing"])
        bucket.gamma.copy_(torch.where(measured.unsqueeze(1), smooth, bucket.gamma))
        bucket.noise.copy_(torch.where(measured, variance / raw_gg, bucket.noise))

    def _estimate(self, bucket: Bucket, live: Tensor, rows: Tensor, gradient: Tensor) -> None:
        """ĝ = (1 - γ1 - γ2) g + γ2 ĝ, eq. g_est_1."""
        gamma1, gamma2 = bucket.gamma.unbind(1)
        bucket.carry.copy_(torch.where(live, bucket.carry * gamma2 / (1 - gamma1), bucket.carry))
        estimate = bucket.buffers["estimate"]
        estimate.mul_(torch.where(rows, bucket.spread(gamma2), 1.0))
        estimate.add_(bucket.spread(1 - gamma1 - gamma2) * gradient)

    @abstractmethod
    def _buffers(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The names of the tensors that are kept for each parameter; "estimate", ĝ, is always one."""

    @abstractmethod
    def _metric(self, group: dict[str, Any], bucket: Bucket, gradient: Tensor, rows: Tensor) -> Tensor | None:
        """The diagonal of Ĥ after this gradient, less a factor that is the same for a whole unit; None is the identity.

        Such a factor changes neither γ nor the noise (Â and b̂ scale alike): it belongs into `_correction`.
        """

    def _correction(self, bucket: Bucket) -> Tensor:
        """The factor of Ĥ that is the same for a whole unit."""
        return torch.ones_like(bucket.carry)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and with them the statistics that belong to them."""
        super().zero_grad(set_to_none)
        self._zeroed = set() if set_to_none else {p for group in self.param_groups for p in group["params"]}
        if self._capture is not None:
            self._capture.clear()

    # The layout of the state.

    def _made_buckets(self) -> list[list[Bucket]]:
        if self._buckets is None or not self._fits(self._buckets):
            self._buckets = [self._arrange(group) for group in self.param_groups]
        return self._buckets

    def _fits(self, made: list[list[Bucket]]) -> bool:
        placed = {p for buckets in made for bucket in buckets for p in bucket.params}
        trained = {p for group in self.param_groups for p in group["params"] if p.grad is not None}
        return trained <= placed and all(bucket.fits() for buckets in made for bucket in buckets)

    def _arrange(self, group: dict[str, Any]) -> list[Bucket]:
        """The buckets of a group: one for each device and dtype among its parameters that train."""
        places: dict[Any, list[tuple[str, nn.Parameter, Any]]] = {}
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if parameter.requires_grad:
                unit = {"tensor": name, "layer": name.rpartition(".")[0], "group": None}[group["granularity"]]
                places.setdefault((parameter.device, parameter.dtype), []).append((name, parameter, unit))
        buffers = self._buffers(group)
        return [
            Bucket(members, group["start"], buffers, [self.state[parameter] for _, parameter, _ in members])
            for members in places.values()
        ]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, bit by bit; torch alone would round all to the dtype of the parameters.

        As in torch.optim the state goes by the order of the parameters, unless the names are the same in another order.
        """
        own = [group["param_names"] for group in self.param_groups]
        state_dict = {**state_dict, "param_groups": [dict(group) for group in state_dict["param_groups"]]}
        for group, names in zip(state_dict["param_groups"], own, strict=False):
            saved = group.get("param_names", names)
            if sorted(saved) == sorted(names):
                group["params"] = [group["params"][saved.index(name)] for name in names]
            group["param_names"] = names  # the model's now, whatever wrapper it had when it was saved
        super().load_state_dict(state_dict)
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                self.state[parameter][name] = value
        self._buckets = None
        self._measured = bool(state_dict["state"])

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
                rate = 1 - bucket.gamma[:, 0]
                table = torch.stack([rate * group["lr"], bucket.gamma[:, 1] / rate, bucket.noise], 1)
                names += bucket.names
                tables.append(table[bucket.unit_of_tensor])
        return tuned(names, tables)

    def detach(self) -> None:
        """Give the model's layers back as they were. The optimizer cannot step after this."""
        if self._capture is not None:
            self._capture.detach()

    def _attached(self) -> Capture:
        kind = type(self).__name__
        if self._capture is None:
            raise RuntimeError(
                f"this {kind} is a copy and knows no model: make {kind}(model) and load_state_dict() from the original."
            )
        layer = self._capture.lost()
        if layer is not None:
            raise RuntimeError(
                f"layer '{layer}' no longer reports to this {kind}: it was detached, or another optimizer was made for "
                f"the same model. Step that one, or make {kind}(model) anew."
            )
        return self._capture


def over(x: Tensor, metric: Tensor | None) -> Tensor:
    """Ĥ⁻¹ x."""
    return x if metric is None else x / metric


class Reading(NamedTuple):
    """What a backward pass left for one bucket."""

    group: dict[str, Any]
    bucket: Bucket
    gradient: Tensor  # g, (rows, ROW)
    present: Tensor | None  # which tensors have a gradient; None: all
    size: Tensor  # Σ g², (units,)
    square: Tensor  # Σ_i c_i², (rows, ROW) where the metric weighs it, else its sum, (units,)
    samples: Tensor  # N, (units,)
    bad: Tensor  # how many units hold a number that is not finite
