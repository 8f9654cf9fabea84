"""Normalisations: y = x̂ · weight + bias, with x̂ = (x - mean) / spread. They differ in what they average over."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt.moments.operation import Operation, Positions, by_feature, fused, viewed, wide

ONLY_INPUT = (True, False, False)
KEPT = ("num_batches_tracked", "running_mean", "running_var")  # by a BatchNorm layer


@dataclass(frozen=True)
class LayerNorm(Operation):
    """Over the last axes, at every position of every sample."""

    shape: tuple[int, ...]
    eps: float

    positional = True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        y, mean, rstd = torch.native_layer_norm(x, self.shape, weight, bias, self.eps)
        return y, (x, mean, rstd)

    def input_gradient(self, dy: Tensor, kept: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        x, mean, rstd = kept
        backward = torch.ops.aten.native_layer_norm_backward
        gradient: Tensor = backward(dy, x, self.shape, mean, rstd, weight, None, ONLY_INPUT)[0]
        return gradient

    def weight_contributions(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        x, mean, rstd = kept
        if fused(x):
            return fused_over_positions(dy, x, mean, rstd, len(self.shape))
        return over_positions(dy * ((x - mean) * rstd), len(self.shape))

    def bias_contributions(self, dy: Tensor) -> Tensor:
        return over_positions(dy, len(self.shape))

    def of_one(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Positions | None:
        x, mean, rstd = kept
        return of_each_position(dy, x, mean, rstd, len(self.shape))


@dataclass(frozen=True)
class RMSNorm(Operation):
    """Over the last axes, at every position of every sample, without a mean."""

    shape: tuple[int, ...]
    eps: float | None

    positional = True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        full = wide(x)
        eps = torch.finfo(full.dtype).eps if self.eps is None else self.eps
        rstd = (full.square().mean(self.axes, keepdim=True) + eps).rsqrt()
        y = full * rstd * weight
        # torch 2.11 compiles a forward that ends in a conversion to the dtype at hand so that no gradient comes back
        return y if y.dtype == x.dtype else y.to(x.dtype), (x, rstd)

    def input_gradient(self, dy: Tensor, kept: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        x, rstd = kept
        normal, scaled = x * rstd, dy * weight
        gradient = rstd * (scaled - normal * (scaled * normal).mean(self.axes, keepdim=True))
        return gradient.to(x.dtype)

    def weight_contributions(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        x, rstd = kept
        if fused(x):
            return fused_over_positions(dy, x, None, rstd, len(self.shape))
        return over_positions(dy * (x * rstd), len(self.shape))

    def of_one(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Positions | None:
        x, rstd = kept
        return of_each_position(dy, x, None, rstd, len(self.shape))

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(range(-len(self.shape), 0))


@dataclass(frozen=True)
class GroupNorm(Operation):
    """Over groups of channels and all positions, within every sample."""

    groups: int
    eps: float

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        x = x.contiguous()
        y, mean, rstd = torch.native_group_norm(x, weight, bias, *self.sizes(x), self.groups, self.eps)
        return y, (x, mean, rstd)

    def input_gradient(self, dy: Tensor, kept: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        x, mean, rstd = kept
        backward = torch.ops.aten.native_group_norm_backward
        gradient: Tensor = backward(dy.contiguous(), x, mean, rstd, weight, *self.sizes(x), self.groups, ONLY_INPUT)[0]
        return gradient

    def weight_contributions(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        x, mean, rstd = kept
        if fused(x):
            per_group = x.shape[1] // self.groups
            return fused_by_channel(dy, x, mean, rstd, per_group, (self.groups, 0, 1))
        grouped = x.reshape(x.shape[0], self.groups, -1)
        normal = ((grouped - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)).view_as(x)
        return by_channel(dy * normal)

    def bias_contributions(self, dy: Tensor) -> Tensor:
        return by_channel(dy)

    def of_one(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Positions | None:
        x, mean, rstd = kept
        return of_each_channel(dy, x, mean, rstd, x.shape[1] // self.groups, (self.groups, 0, 1))

    @staticmethod
    def sizes(x: Tensor) -> tuple[int, int, int]:
        samples, channels = x.shape[:2]
        return samples, channels, x[0, 0].numel()


@dataclass(frozen=True)
class BatchNorm(Operation):
    """Over all samples and positions (training), or with the running statistics (evaluation).

    See Note [contributions] for what c_i means where the samples see each other.
    """

    running_mean: Tensor | None
    running_var: Tensor | None
    training: bool
    momentum: float
    eps: float

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        y, mean, rstd = torch.native_batch_norm(
            x, weight, bias, self.running_mean, self.running_var, self.training, self.momentum, self.eps
        )
        if not self.training:
            assert self.running_mean is not None
            assert self.running_var is not None
            mean, rstd = self.running_mean.clone(), (self.running_var + self.eps).rsqrt()
        return y, (x, mean, rstd)

    def input_gradient(self, dy: Tensor, kept: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        x, mean, rstd = kept
        if not self.training:
            return dy * per_channel(weight * rstd, dy)
        backward = torch.ops.aten.native_batch_norm_backward
        gradient: Tensor = backward(dy, x, weight, None, None, mean, rstd, True, self.eps, ONLY_INPUT)[0]
        return gradient

    def weight_contributions(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        x, mean, rstd = kept
        if fused(x):
            return fused_by_channel(dy, x, mean, rstd, 1, (mean.stride(0) if mean.dim() == 2 else 0, 0, 1))
        return by_channel(dy * ((x - per_channel(mean, x)) * per_channel(rstd, x)))

    def select(self, kept: tuple[Tensor, ...], rows: slice) -> tuple[Tensor, ...]:
        x, mean, rstd = kept  # the latter two are of all samples together
        x = x[rows]
        return x, mean.expand(len(x), -1), rstd.expand(len(x), -1)

    @property
    def kind(self) -> object:
        return BatchNorm

    def bias_contributions(self, dy: Tensor) -> Tensor:
        return by_channel(dy)

    def of_one(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Positions | None:
        x, mean, rstd = kept
        return of_each_channel(dy, x, mean, rstd, 1, (0, 0, 1))


@dataclass(frozen=True)
class InstanceNorm(GroupNorm):
    """Over all positions, within every channel of every sample; the running statistics only look on."""

    running_mean: Tensor | None
    running_var: Tensor | None
    momentum: float

    @property
    def kind(self) -> object:
        return InstanceNorm, self.groups

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        y, (x, mean, rstd) = super().forward(x, weight, bias)
        if self.running_mean is not None and self.running_var is not None:
            positions, mean, rstd = x[0, 0].numel(), mean.detach(), rstd.detach()
            variance = (rstd.square().reciprocal() - self.eps) * (positions / (positions - 1))
            self.running_mean.lerp_(mean.mean(0).to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(variance.mean(0).to(self.running_var.dtype), self.momentum)
        return y, (x, mean, rstd)


def over_positions(x: Tensor, normalized: int) -> Tensor:
    """Sum over all axes between the samples and the normalised ones."""
    positions = tuple(range(1, x.dim() - normalized))
    return x.sum(positions) if positions else x


def by_channel(x: Tensor) -> Tensor:
    """(samples, channels, *space) -> (samples, channels)."""
    return x.flatten(2).sum(2) if x.dim() > 2 else x


def fused_over_positions(dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, normalized: int) -> Tensor:
    """Σ_t δ x̂, (samples, *normalised axes), in one reading; mean and rstd are those of (sample, position)."""
    from autoopt.moments import triton

    samples, shape = x.shape[0], x.shape[x.dim() - normalized :]
    dy, x = (t.reshape(samples, -1, shape.numel()).mT for t in (dy, x))
    return triton.position_sums(dy, x, mean, rstd, shape.numel(), (x.shape[2], 1, 0)).view(samples, *shape)


def fused_by_channel(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, per_group: int, strides: tuple[int, int, int]
) -> Tensor:
    """Σ_t δ x̂, (samples, channels), in one reading; `strides` are those of mean and rstd, see `position_sums`."""
    from autoopt.moments import triton

    dy, x = (t.reshape(*t.shape[:2], -1) for t in (dy, x))
    return triton.position_sums(dy, x, mean, rstd, per_group, strides)


def of_each_position(dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, normalized: int) -> Positions | None:
    """For a kernel, where mean and rstd are those of (sample, position)."""
    left, right = (by_feature(part, normalized) for part in (dy, x))
    if left is None or right is None:
        return None
    return Positions(left, right, mean, rstd, right.shape[1], (right.shape[2], 1, 0))


def of_each_channel(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, per_group: int, strides: tuple[int, int, int]
) -> Positions | None:
    """For a kernel, where they are those of groups of channels."""
    left, right = (viewed(part, (*part.shape[:2], part.shape[2:].numel())) for part in (dy, x))
    return None if left is None or right is None else Positions(left, right, mean, rstd, per_group, strides)


def per_channel(values: Tensor, x: Tensor) -> Tensor:
    """(channels,), or those of each sample, so that it broadcasts with (samples, channels, *space)."""
    return values.reshape(-1, x.shape[1], *[1] * (x.dim() - 2))


def prepare_layer_norm(layer: nn.LayerNorm, x: Tensor) -> tuple[LayerNorm, Tensor]:
    """The operation of an nn.LayerNorm."""
    return LayerNorm(layer.normalized_shape, layer.eps), _batched(x, len(layer.normalized_shape))


def prepare_rms_norm(layer: nn.RMSNorm, x: Tensor) -> tuple[RMSNorm, Tensor]:
    """The operation of an nn.RMSNorm."""
    if x.shape[-len(layer.normalized_shape) :] != layer.normalized_shape:
        raise RuntimeError(f"RMSNorm over {layer.normalized_shape} got an input of shape {tuple(x.shape)}.")
    return RMSNorm(layer.normalized_shape, layer.eps), _batched(x, len(layer.normalized_shape))


def prepare_group_norm(layer: nn.GroupNorm, x: Tensor) -> tuple[GroupNorm, Tensor]:
    """The operation of an nn.GroupNorm."""
    F._verify_batch_size([x.shape[0] * x.shape[1] // layer.num_groups, layer.num_groups, *x.shape[2:]])  # type: ignore[attr-defined]
    return GroupNorm(layer.num_groups, layer.eps), x


def prepare_batch_norm(layer: nn.modules.batchnorm._BatchNorm, x: Tensor) -> tuple[BatchNorm, Tensor]:
    """The operation of an nn.BatchNormNd, which like the layer's own forward counts the batches that it has seen."""
    layer._check_input_dim(x)
    momentum, own = layer.momentum, layer._buffers  # where modules look last, and slowly
    counted, mean, var = [own[key] if key in own else getattr(layer, key) for key in KEPT]
    training = layer.training or mean is None
    if training:
        F._verify_batch_size(x.size())  # type: ignore[attr-defined]
    if layer.training and layer.track_running_stats and counted is not None:
        counted.add_(1)
        if momentum is None:  # a cumulative average
            momentum = 1.0 / float(counted)
    if layer.training and not layer.track_running_stats:
        mean = var = None
    return BatchNorm(mean, var, training, 0.0 if momentum is None else momentum, layer.eps), x


def prepare_instance_norm(
    layer: nn.modules.instancenorm._InstanceNorm, x: Tensor
) -> tuple[InstanceNorm | BatchNorm, Tensor]:
    """The operation of an nn.InstanceNormNd; with the running statistics, in evaluation, it is a BatchNorm."""
    layer._check_input_dim(x)
    x = x.unsqueeze(0) if x.dim() == layer._get_no_batch_dim() else x
    momentum = 0.0 if layer.momentum is None else layer.momentum
    if not layer.training and layer.track_running_stats:
        return BatchNorm(layer.running_mean, layer.running_var, False, momentum, layer.eps), x
    F._verify_spatial_size(x.size())  # type: ignore[attr-defined]
    return InstanceNorm(x.shape[1], layer.eps, layer.running_mean, layer.running_var, momentum), x


def _batched(x: Tensor, normalized: int) -> Tensor:
    return x if x.dim() > normalized else x.unsqueeze(0)
