"""Gradients and logits of K runs on a GPU by the kernels of `kernels`: the fast twin of `reference`."""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoopt_lab.engine import kernels, launches
from autoopt_lab.engine.launches import Launch, window
from autoopt_lab.engine.net import Net, Stage
from autoopt_lab.engine.reference import Gradients, loss_and_gradient

PRECISIONS = ("ieee", "tf32x3", "tf32")


class Output(NamedTuple):
    """A stage's output and what its backward pass needs, flat tensors over runs, samples, positions and channels."""

    y: Tensor
    origin: Tensor
    weight: Tensor  # expanded
    weight_run: int  # from one run's weight to the next


class Fused:
    """`precision` is that of the matrix products, whose sums are always float32.

    "ieee": float32 on the ordinary units; "tf32x3": three products of 10-bit mantissas, float32 but for the last bit or
    two, on the matrix units; "tf32": one such product, relative error about 1e-3 per product.
    """

    def __init__(self, net: Net, precision: str = "tf32x3") -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"there is no precision {precision!r}: choose one of {', '.join(PRECISIONS)}")
        self.net = net
        self.precision = precision
        # (kernel, stage's name) -> launch options other than the defaults. They may depend on the net and the batch
        # size, never on the number of runs.
        self.tuning: dict[tuple[str, str], dict[str, int]] = {}

    def logits(self, weights: Tensor, images: Tensor) -> Tensor:
        """(K, N, classes) for the same images in every run, without dropout."""
        x = images
        for stage in self.net.stages:
            x = self._forward(stage, weights, x, None, len(images), save=False).y
        return x.view(len(weights), len(images), -1)

    def gradients(
        self, weights: Tensor, images: Tensor, labels: Tensor, factors: Tensor | None, moments: bool
    ) -> Gradients:
        samples = labels.shape[1]
        inputs, outputs = [images], []
        for stage in self.net.stages:
            outputs.append(self._forward(stage, weights, inputs[-1], factors, samples, save=True))
            inputs.append(outputs[-1].y)
        loss, d = loss_and_gradient(inputs[-1].view(len(weights), samples, -1), labels)
        gradient = torch.empty_like(weights)
        second = torch.empty_like(weights) if moments else None
        for stage, x, output in reversed(list(zip(self.net.stages, inputs[:-1], outputs, strict=True))):
            outs = [buffer[:, stage.offset :] for buffer in (gradient, second) if buffer is not None]
            weight_gradient = self._linear_weight_gradient if stage.linear else self._conv_weight_gradient
            weight_gradient(stage, x, d, output.origin, factors, outs, samples)
            if stage.offset:
                d = self._input_gradient(stage, d, output, factors, len(weights), samples)
        return Gradients(gradient, weights[:, :0] if second is None else second, loss)

    def _launch(self, kernel: str, stage: Stage, default: Launch) -> dict[str, Any]:
        return default | self.tuning.get((kernel, stage.name), {})

    def _expanded(self, stage: Stage, weights: Tensor) -> tuple[Tensor, int]:
        flat = weights[:, stage.offset :]
        if stage.pool == 1:
            return flat, weights.shape[1]
        size = stage.pool**2 * stage.outputs * window(stage)
        out = weights.new_empty(len(weights), size)
        kernels.expand[(-(-size // 1024), len(weights))](
            flat, out, weights.shape[1], **_shape(stage), POOL=stage.pool, BLOCK=1024
        )
        return out, size

    def _forward(
        self, stage: Stage, weights: Tensor, x: Tensor, factors: Tensor | None, samples: int, save: bool
    ) -> Output:
        runs, (height, width) = len(weights), stage.output_size
        rows, per_sample = samples * height * width, stage.height * stage.width * stage.channels
        y = weights.new_empty(runs * rows * stage.outputs)
        origin = torch.empty_like(y, dtype=torch.int8) if save else y
        weight, weight_run = self._expanded(stage, weights)
        launch = self._launch("forward", stage, launches.forward(stage, rows))
        kernels.forward[(-(-rows // launch["BM"]), -(-stage.outputs // launch["BO"]), runs)](
            x,
            weight,
            weights[:, stage.offset + stage.outputs * stage.patch :],
            _factor(stage, factors, y),
            y,
            origin,
            samples * per_sample if x.numel() > samples * per_sample else 0,  # or every run sees the same images
            weight_run,
            weights.shape[1],
            rows,
            *_factor_strides(factors),
            H=stage.height,
            W=stage.width,
            **_shape(stage),
            POOL=stage.pool,
            RELU=stage.relu,
            DROP=_drops(stage, factors),
            SAVE=save,
            VECTOR=_vector(stage),
            PRECISION=self.precision,
            **launch,
        )
        return Output(y, origin, weight, weight_run)

    def _input_gradient(
        self, stage: Stage, d: Tensor, output: Output, factors: Tensor | None, runs: int, samples: int
    ) -> Tensor:
        height, width = stage.output_size
        rows, elements = samples * height * width, window(stage)
        windows = d.new_empty(runs * rows * elements)
        launch = self._launch("window_gradient", stage, launches.window_gradient(stage, rows))
        kernels.window_gradient[(-(-rows // launch["BM"]), -(-elements // launch["BE"]), runs)](
            d,
            output.origin,
            _factor(stage, factors, d),
            output.weight,
            windows,
            output.weight_run,
            rows,
            *_factor_strides(factors),
            **_shape(stage),
            POOL=stage.pool,
            POSITIONS=height * width,
            DROP=_drops(stage, factors),
            PRECISION=self.precision,
            **launch,
        )
        if stage.linear:
            return windows
        per_sample = stage.height * stage.width * stage.channels
        dx = d.new_empty(runs * samples * per_sample)
        launch = self._launch("fold", stage, launches.fold(stage))
        kernels.fold[(runs * samples, -(-per_sample // launch["BLOCK"]))](
            windows, dx, H=stage.height, W=stage.width, C=stage.channels, S=stage.kernel, POOL=stage.pool, **launch
        )
        return dx

    def _conv_weight_gradient(
        self,
        stage: Stage,
        x: Tensor,
        d: Tensor,
        origin: Tensor,
        factors: Tensor | None,
        outs: list[Tensor],
        samples: int,
    ) -> None:
        runs, moments, elements = len(outs[0]), len(outs) == 2, window(stage) + 1  # and the bias
        columns = stage.pool**2 * stage.outputs
        launch = self._launch("conv_weight_gradient", stage, launches.conv_weight_gradient(stage, samples, moments))
        splits = samples // launch["SPLIT"]
        parts = d.new_empty(runs * splits * columns * elements)
        kernels.conv_weight_gradient[(-(-elements // launch["BE"]), splits, runs)](
            x,
            d,
            origin,
            _factor(stage, factors, d),
            parts,
            samples * stage.height * stage.width * stage.channels,
            samples,
            splits,
            *_factor_strides(factors),
            H=stage.height,
            W=stage.width,
            **_shape(stage),
            POOL=stage.pool,
            DROP=_drops(stage, factors),
            VECTOR=_vector(stage),
            PRECISION=self.precision,
            **launch,
        )
        launch = self._launch("collect", stage, launches.collect())
        kernels.collect[(-(-stage.parameters // launch["BLOCK"]), runs)](
            parts,
            outs[0],
            outs[-1],
            outs[0].stride(0),
            splits,
            **_shape(stage),
            POOL=stage.pool,
            MOMENTS=moments,
            **launch,
        )

    def _linear_weight_gradient(
        self,
        stage: Stage,
        x: Tensor,
        d: Tensor,
        origin: Tensor,
        factors: Tensor | None,
        outs: list[Tensor],
        samples: int,
    ) -> None:
        launch = self._launch("linear_weight_gradient", stage, launches.linear_weight_gradient(stage, samples))
        kernels.linear_weight_gradient[
            (-(-(stage.patch + 1) // launch["BE"]), -(-stage.outputs // launch["BO"]), len(outs[0]))
        ](
            x,
            d,
            origin,
            _factor(stage, factors, d),
            outs[0],
            outs[-1],
            outs[0].stride(0),
            samples,
            *_factor_strides(factors),
            C=stage.channels,
            O=stage.outputs,
            DROP=_drops(stage, factors),
            MOMENTS=len(outs) == 2,
            PRECISION=self.precision,
            **launch,
        )


def _shape(stage: Stage) -> dict[str, int]:
    return {"C": stage.channels, "S": stage.kernel, "O": stage.outputs}


def _vector(stage: Stage) -> int:
    """How many neighbouring window elements can be read at once: they are contiguous and aligned at every window."""
    edge = stage.kernel + stage.pool - 1
    return gcd(4, edge * stage.channels, stage.pool * stage.channels, stage.width * stage.channels)


def _drops(stage: Stage, factors: Tensor | None) -> bool:
    return bool(stage.drop) and factors is not None


def _factor(stage: Stage, factors: Tensor | None, unused: Tensor) -> Tensor:
    return unused if factors is None else factors[..., stage.drop_offset :]


def _factor_strides(factors: Tensor | None) -> tuple[int, int]:
    return (0, 0) if factors is None else (factors.stride(0), factors.stride(1))
