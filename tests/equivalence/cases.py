"""Every covered layer in the ways people configure it, each inside a small network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

N = 5  # samples in a batch: odd, so that no power of two hides a wrong factor
CLASSES = 3


@dataclass(frozen=True)
class Case:
    name: str
    layer: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of one sample
    tokens: int = 0  # vocabulary, for an embedding
    eval_mode: bool = False
    frozen: str = ""  # the parameter that does not learn

    def __str__(self) -> str:
        return self.name

    @property
    def rows_meet(self) -> bool:
        layer = self.layer()
        return isinstance(layer, nn.modules.batchnorm._BatchNorm) and not (self.eval_mode and layer.track_running_stats)


class Network(nn.Module):
    """nonlinearity, layer, in-place nonlinearity, head: the layer has something to pass the gradient to and from."""

    def __init__(self, before: nn.Module, layer: nn.Module, features: int) -> None:
        super().__init__()
        self.before, self.layer = before, layer
        self.after: nn.Module = nn.ReLU(inplace=True)
        self.head = nn.Linear(features, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.after(self.layer(self.before(x)))
        logits: Tensor = self.head(h.flatten(1))
        return logits


def network(case: Case, dtype: torch.dtype) -> tuple[Network, Tensor, Tensor]:
    """A seeded network around the case's layer, with a batch. Called twice, it gives the same numbers."""
    torch.manual_seed(7)
    layer = case.layer().to(dtype)
    for name, parameter in layer.named_parameters():
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)  # norms start at 1 and 0, which hides mistakes
        parameter.requires_grad_(name != case.frozen)
    if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is not None:
        assert layer.running_var is not None
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2.0)
    if case.tokens:
        x = torch.randint(case.tokens, (N, *case.shape))
        before: nn.Module = nn.Identity()
    else:
        x = torch.randn(N, *case.shape, dtype=dtype)
        before = nn.Tanh()
    layer.eval()  # sizing must not touch the running statistics
    with torch.no_grad():
        features = layer(before(x)).flatten(1).shape[1]
    model = Network(before, layer, features).to(dtype)
    model.train(not case.eval_mode)
    return model, x, torch.randint(CLASSES, (N,))


def assert_close(actual: Tensor | None, expected: Tensor | None, tolerance: float, what: str) -> None:
    """The greatest difference over the greatest entry of the tensor."""
    assert actual is not None, what
    assert expected is not None, what
    assert actual.shape == expected.shape, what
    difference = (actual.double() - expected.double()).abs().max().item()
    assert difference <= tolerance * expected.double().abs().max().item(), f"{what}: off by {difference}"


def _conv(kind: type[nn.Module], *arguments: object, **options: object) -> Callable[[], nn.Module]:
    return lambda: kind(*arguments, **options)


LINEAR = [
    Case("linear", lambda: nn.Linear(4, 6), (4,)),
    Case("linear-no-bias", lambda: nn.Linear(4, 6, bias=False), (4,)),
    Case("linear-one-output", lambda: nn.Linear(4, 1), (4,)),
    Case("linear-sequence", lambda: nn.Linear(4, 6), (3, 4)),
    Case("linear-long-sequence", lambda: nn.Linear(2, 2), (33, 2)),  # 2 T^2 > in * out
    Case("linear-short-sequence", lambda: nn.Linear(24, 16), (2, 24)),  # 2 T^2 < in * out
    Case("linear-sequence-no-bias", lambda: nn.Linear(4, 6, bias=False), (3, 4)),
    Case("linear-sequence-of-one", lambda: nn.Linear(4, 6), (1, 4)),
    Case("linear-4d", lambda: nn.Linear(4, 6), (2, 3, 4)),
    Case("linear-frozen-weight", lambda: nn.Linear(4, 6), (4,), frozen="weight"),
    Case("linear-frozen-bias", lambda: nn.Linear(4, 6), (3, 4), frozen="bias"),
]

CONV = [
    Case("conv1d", _conv(nn.Conv1d, 3, 4, 3), (3, 8)),
    Case("conv1d-stride-padding", _conv(nn.Conv1d, 3, 4, 3, stride=2, padding=1), (3, 9)),
    Case("conv1d-dilation-same", _conv(nn.Conv1d, 3, 4, 4, dilation=2, padding="same"), (3, 9)),
    Case("conv1d-groups-no-bias", _conv(nn.Conv1d, 4, 6, 3, groups=2, bias=False), (4, 8)),
    Case("conv1d-depthwise", _conv(nn.Conv1d, 4, 4, 3, groups=4, padding=1), (4, 8)),
    Case("conv1d-circular", _conv(nn.Conv1d, 3, 4, 3, padding=2, padding_mode="circular"), (3, 8)),
    Case("conv1d-reflect", _conv(nn.Conv1d, 3, 4, 3, padding=2, padding_mode="reflect"), (3, 8)),
    Case("conv1d-replicate", _conv(nn.Conv1d, 3, 4, 3, padding=2, padding_mode="replicate"), (3, 8)),
    Case("conv2d", _conv(nn.Conv2d, 3, 4, 3), (3, 6, 5)),
    Case("conv2d-1x1", _conv(nn.Conv2d, 3, 4, 1), (3, 4, 5)),
    Case("conv2d-1x1-stride", _conv(nn.Conv2d, 3, 4, 1, stride=2), (3, 5, 5)),
    Case("conv2d-1x1-padding", _conv(nn.Conv2d, 3, 4, 1, padding=1), (3, 3, 3)),
    Case("conv2d-no-bias", _conv(nn.Conv2d, 3, 4, 3, bias=False), (3, 5, 5)),
    Case("conv2d-uneven", _conv(nn.Conv2d, 2, 3, (3, 2), (2, 1), (1, 2), (1, 2)), (2, 7, 6)),
    Case("conv2d-stride-leaves-rest", _conv(nn.Conv2d, 2, 3, 2, stride=3), (2, 7, 6)),
    Case("conv2d-same", _conv(nn.Conv2d, 2, 3, (3, 2), padding="same"), (2, 5, 5)),
    Case("conv2d-valid", _conv(nn.Conv2d, 2, 3, 3, padding="valid", dilation=2), (2, 6, 6)),
    Case("conv2d-groups", _conv(nn.Conv2d, 4, 6, 3, groups=2, padding=1), (4, 5, 5)),
    Case("conv2d-depthwise", _conv(nn.Conv2d, 4, 4, 3, groups=4), (4, 5, 5)),
    Case("conv2d-depthwise-multiplier", _conv(nn.Conv2d, 3, 6, 3, groups=3, stride=2, padding=1), (3, 5, 5)),
    Case("conv2d-circular", _conv(nn.Conv2d, 2, 3, 3, padding=(1, 2), padding_mode="circular"), (2, 5, 5)),
    Case("conv2d-reflect-same", _conv(nn.Conv2d, 2, 3, (3, 2), padding="same", padding_mode="reflect"), (2, 5, 5)),
    Case("conv2d-replicate-stride", _conv(nn.Conv2d, 2, 3, 3, 2, 1, padding_mode="replicate"), (2, 6, 5)),
    Case("conv2d-whole-image", _conv(nn.Conv2d, 2, 7, (4, 4)), (2, 4, 4)),
    Case("conv2d-many-positions", _conv(nn.Conv2d, 1, 2, 2), (1, 12, 12)),
    Case("conv2d-frozen-weight", _conv(nn.Conv2d, 2, 3, 3), (2, 4, 4), frozen="weight"),
    Case("conv2d-frozen-bias", _conv(nn.Conv2d, 2, 3, 3), (2, 4, 4), frozen="bias"),
    Case("conv3d", _conv(nn.Conv3d, 2, 3, 2), (2, 3, 4, 3)),
    Case("conv3d-everything", _conv(nn.Conv3d, 4, 4, (2, 1, 2), (1, 2, 1), (1, 0, 1), (1, 1, 2), 2), (4, 3, 4, 4)),
    Case("conv3d-same-no-bias", _conv(nn.Conv3d, 2, 2, (3, 2, 1), padding="same", bias=False), (2, 3, 3, 3)),
    Case("conv3d-depthwise", _conv(nn.Conv3d, 2, 2, 2, groups=2), (2, 3, 3, 3)),
    Case("conv3d-replicate", _conv(nn.Conv3d, 1, 2, 2, padding=1, padding_mode="replicate"), (1, 3, 3, 3)),
]

EMBEDDING = [
    Case("embedding-one-token", lambda: nn.Embedding(3, 4), (), tokens=3),  # repeated across samples
    Case("embedding-sequence", lambda: nn.Embedding(4, 3), (6,), tokens=4),  # and within one
    Case("embedding-rare", lambda: nn.Embedding(50, 3), (4,), tokens=50),
    Case("embedding-padding", lambda: nn.Embedding(4, 3, padding_idx=2), (6,), tokens=4),
    Case("embedding-max-norm", lambda: nn.Embedding(4, 3, max_norm=0.5), (6,), tokens=4),
    Case("embedding-2d", lambda: nn.Embedding(4, 3), (2, 3), tokens=4),
]

NORM = [
    Case("layer-norm", lambda: nn.LayerNorm(6), (6,)),
    Case("layer-norm-sequence", lambda: nn.LayerNorm(6), (4, 6)),
    Case("layer-norm-two-axes", lambda: nn.LayerNorm((3, 4)), (3, 4)),
    Case("layer-norm-two-axes-sequence", lambda: nn.LayerNorm((3, 4), eps=1e-2), (2, 3, 4)),
    Case("layer-norm-no-bias", lambda: nn.LayerNorm(6, bias=False), (4, 6)),
    Case("layer-norm-frozen-weight", lambda: nn.LayerNorm(6), (4, 6), frozen="weight"),
    Case("layer-norm-frozen-bias", lambda: nn.LayerNorm(6), (4, 6), frozen="bias"),
    Case("group-norm", lambda: nn.GroupNorm(2, 6), (6, 3, 3)),
    Case("group-norm-one-group", lambda: nn.GroupNorm(1, 6), (6, 5)),
    Case("group-norm-each-channel", lambda: nn.GroupNorm(6, 6), (6, 5)),
    Case("group-norm-no-positions", lambda: nn.GroupNorm(2, 6), (6,)),
    Case("group-norm-frozen-weight", lambda: nn.GroupNorm(2, 6), (6, 3), frozen="weight"),
    Case("rms-norm", lambda: nn.RMSNorm(6), (6,)),
    Case("rms-norm-sequence", lambda: nn.RMSNorm(6, eps=1e-2), (4, 6)),
    Case("rms-norm-two-axes", lambda: nn.RMSNorm((3, 4)), (2, 3, 4)),
]

BATCH_NORM = [
    Case("batch-norm-1d", lambda: nn.BatchNorm1d(4), (4,)),
    Case("batch-norm-1d-sequence", lambda: nn.BatchNorm1d(4), (4, 5)),
    Case("batch-norm-2d", lambda: nn.BatchNorm2d(3), (3, 4, 3)),
    Case("batch-norm-3d", lambda: nn.BatchNorm3d(2), (2, 3, 2, 2)),
    Case("batch-norm-1d-eval", lambda: nn.BatchNorm1d(4), (4,), eval_mode=True),
    Case("batch-norm-2d-eval", lambda: nn.BatchNorm2d(3), (3, 4, 3), eval_mode=True),
    Case("batch-norm-momentum-none", lambda: nn.BatchNorm2d(3, momentum=None), (3, 4, 3)),
    Case("batch-norm-no-running", lambda: nn.BatchNorm2d(3, track_running_stats=False), (3, 4, 3)),
    Case("batch-norm-no-running-eval", lambda: nn.BatchNorm1d(4, track_running_stats=False), (4,), eval_mode=True),
    Case("batch-norm-frozen-weight", lambda: nn.BatchNorm2d(3), (3, 4, 3), frozen="weight"),
    Case("batch-norm-frozen-bias", lambda: nn.BatchNorm2d(3), (3, 4, 3), frozen="bias"),
]

CONV_TRANSPOSE = [
    Case("conv-transpose-1d", _conv(nn.ConvTranspose1d, 3, 4, 3), (3, 5)),
    Case("conv-transpose-1d-stride", _conv(nn.ConvTranspose1d, 3, 4, 3, 2, 1, 1), (3, 5)),
    Case("conv-transpose-1d-long-output-padding", _conv(nn.ConvTranspose1d, 2, 3, 3, 1, 2, 2, dilation=3), (2, 5)),
    Case("conv-transpose-2d", _conv(nn.ConvTranspose2d, 2, 3, 3), (2, 3, 4)),
    Case("conv-transpose-2d-no-bias", _conv(nn.ConvTranspose2d, 2, 3, 2, 2, bias=False), (2, 3, 3)),
    Case("conv-transpose-2d-groups", _conv(nn.ConvTranspose2d, 4, 6, 2, groups=2), (4, 3, 3)),
    Case("conv-transpose-2d-uneven", _conv(nn.ConvTranspose2d, 2, 3, (3, 2), (2, 1), (1, 0), (1, 0)), (2, 3, 3)),
    Case("conv-transpose-2d-depthwise", _conv(nn.ConvTranspose2d, 3, 3, 2, groups=3), (3, 3, 3)),
    Case("conv-transpose-3d", _conv(nn.ConvTranspose3d, 2, 2, 2, 2, 1, 1), (2, 2, 2, 2)),
    Case("conv-transpose-2d-frozen-weight", _conv(nn.ConvTranspose2d, 2, 3, 2), (2, 3, 3), frozen="weight"),
]

BAG = [
    Case("embedding-bag-sum", lambda: nn.EmbeddingBag(4, 3, mode="sum"), (6,), tokens=4),
    Case("embedding-bag-mean", lambda: nn.EmbeddingBag(4, 3, mode="mean"), (6,), tokens=4),
    Case("embedding-bag-padding", lambda: nn.EmbeddingBag(4, 3, mode="mean", padding_idx=1), (5,), tokens=4),
    Case("embedding-bag-all-padding", lambda: nn.EmbeddingBag(2, 3, mode="mean", padding_idx=1), (2,), tokens=2),
]

PRELU = [
    Case("prelu", nn.PReLU, (4,)),
    Case("prelu-image", nn.PReLU, (3, 4, 2)),
    Case("prelu-channels", lambda: nn.PReLU(3), (3, 4, 2)),
    Case("prelu-features", lambda: nn.PReLU(4), (4,)),
]

INSTANCE_NORM = [
    Case("instance-norm-1d", lambda: nn.InstanceNorm1d(4, affine=True), (4, 5)),
    Case("instance-norm-2d", lambda: nn.InstanceNorm2d(3, affine=True, eps=1e-2), (3, 4, 3)),
    Case("instance-norm-3d", lambda: nn.InstanceNorm3d(2, affine=True), (2, 3, 2, 2)),
    Case("instance-norm-running", lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (3, 4, 3)),
    Case(
        "instance-norm-running-eval",
        lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
        (3, 4),
        eval_mode=True,
    ),
    Case("instance-norm-frozen-bias", lambda: nn.InstanceNorm2d(3, affine=True), (3, 4, 3), frozen="bias"),
]

CASES = [*LINEAR, *CONV, *EMBEDDING, *NORM, *BATCH_NORM, *CONV_TRANSPOSE, *BAG, *PRELU, *INSTANCE_NORM]
