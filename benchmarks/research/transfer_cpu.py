"""Research: does the relative step transfer to BatchNorm and a character GPT? Short runs on a CPU (docs/research.md).

    python3 benchmarks/research/transfer_cpu.py --data DIR

Mean training loss of the last 40 of 300 steps, one seed: plain SGD and Adam at four rates, and
ρ = min(cap, 0.2/√t) · min(1, t/100) with β = 0.9, per tensor, in both metrics.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from autoopt_lab.tasks import cifar10

STEPS, LAST = 300, 40
TEXT = Path(F.__file__).read_text(encoding="utf-8")  # a text that every machine with torch has
ALPHABET = sorted(set(TEXT))


class Block(nn.Module):
    """A small residual block with BatchNorm."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.a, self.n = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.b, self.m = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.s = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.m(self.b(F.relu(self.n(self.a(x))))) + self.s(x))


def resnet() -> nn.Module:
    """Three blocks, 16 to 64 channels."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), Block(16, 16, 1), Block(16, 32, 2),
        Block(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


class GPT(nn.Module):
    """Two layers, 64 wide, 64 characters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(len(ALPHABET), 64), nn.Parameter(torch.randn(64, 64) * 0.02)
        layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, len(ALPHABET)))

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(64)
        hidden: Tensor = self.out(self.layers(self.tokens(x) + self.places, mask=mask, is_causal=True))
        return hidden.transpose(1, 2)


def images(data: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of 64 CIFAR-10 images."""
    samples = cifar10.data(data)
    order = torch.Generator().manual_seed(1)
    while True:
        index = torch.randint(0, len(samples.train_inputs), (64,), generator=order)
        yield samples.train_inputs[index], samples.train_targets[index]


def characters() -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of 32 pieces of text."""
    text = torch.tensor([ALPHABET.index(c) for c in TEXT])
    order = torch.Generator().manual_seed(1)
    while True:
        starts = torch.randint(0, len(text) - 65, (32,), generator=order)
        pieces = torch.stack([text[i : i + 65] for i in starts])
        yield pieces[:, :-1], pieces[:, 1:]


class Relative:
    """The candidate of relative_step.py, third run, as a plain loop."""

    def __init__(self, parameters: list[nn.Parameter], adam: bool, cap: float) -> None:
        self.parameters, self.adam, self.cap, self.t = parameters, adam, cap, 0
        self.u = [torch.zeros_like(p) for p in parameters]
        self.v = [torch.zeros_like(p) for p in parameters]
        self.energy = [torch.zeros(()) for _ in parameters]

    @torch.no_grad()
    def step(self) -> None:
        """One update."""
        self.t += 1
        t, ratio = self.t, min(self.cap, 0.2 / self.t**0.5) * min(1.0, self.t / 100)
        for i, p in enumerate(self.parameters):
            assert p.grad is not None
            self.u[i].lerp_(p.grad, 0.1)
            d = self.u[i] / (1 - 0.9**t)
            if self.adam:
                self.v[i].lerp_(p.grad.square(), 0.01)
                d = d / ((self.v[i] / (1 - 0.99**t)).sqrt() + 1e-8)
            self.energy[i].lerp_(d.square().sum(), 0.01)
            size = torch.maximum(p.norm(), torch.tensor(0.05 * p.numel() ** 0.5))
            p.sub_(ratio * size / ((self.energy[i] / (1 - 0.99**t)).sqrt() + 1e-30) * d)


def final_loss(
    model: Callable[[], nn.Module],
    batches: Iterator[tuple[Tensor, Tensor]],
    make: Callable[[list[nn.Parameter]], object],
) -> float:
    """Train and return the mean loss of the last steps."""
    torch.manual_seed(0)
    net = model()
    optimizer, losses = make(list(net.parameters())), []
    for _, (x, y) in zip(range(STEPS), batches, strict=False):
        loss = F.cross_entropy(net(x), y)
        net.zero_grad()
        loss.backward()
        optimizer.step()  # type: ignore[attr-defined]
        losses.append(loss.item())
    return sum(losses[-LAST:]) / LAST


def main() -> None:
    """Print one line per task and metric."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    data = parser.parse_args().data
    torch.set_num_threads(1)
    tasks: dict[str, tuple[Callable[[], nn.Module], Callable[[], Iterator[tuple[Tensor, Tensor]]]]] = {
        "GPT": (GPT, characters),
        "ResNet": (resnet, functools.partial(images, data)),
    }
    for name, (model, batches) in tasks.items():
        for adam in (False, True):
            rates = (3e-4, 1e-3, 3e-3, 1e-2) if adam else (0.03, 0.1, 0.3, 1.0)
            plain = functools.partial(torch.optim.Adam, betas=(0.9, 0.99)) if adam else functools.partial(
                torch.optim.SGD, momentum=0.9, dampening=0.9
            )  # fmt: skip
            tuned = {lr: final_loss(model, batches(), functools.partial(plain, lr=lr)) for lr in rates}
            caps = (0.004, 0.008, 0.016)
            ours = {cap: final_loss(model, batches(), functools.partial(Relative, adam=adam, cap=cap)) for cap in caps}
            words = [" ".join(f"{k:g}: {v:.3f}" for k, v in found.items()) for found in (tuned, ours)]
            print(f"{name} {'Adam' if adam else 'SGD'} | tuned {words[0]} | relative, cap {words[1]}", flush=True)


if __name__ == "__main__":
    main()
