"""What only a GPU can show: no host synchronisation, a kernel count that does not grow, the same numbers, the cost.

    PYTHONPATH=src python3 benchmarks/gpu_check.py [--out FILE]

Needs torch and a CUDA device, nothing else. Exits with an error if a promise is broken.
"""

import argparse
import copy
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoopt
from autoopt import AutoAdaGrad, AutoAdam, AutoSGD, recorded
from autoopt.capture import Capture
from autoopt.recording import Recorder

OPTIMIZERS = (AutoSGD, AutoAdam, AutoAdaGrad)
EVERY = [getattr(autoopt, name) for name in autoopt.__all__ if name.startswith("Auto") and name != "AutoOptimizer"]


def every_layer() -> nn.Module:
    """A small network with each covered layer family but Embedding."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, groups=8),
        nn.GroupNorm(4, 8), nn.Flatten(2), nn.Linear(196, 12), nn.LayerNorm(12), nn.ReLU(), nn.Conv1d(8, 4, 3),
        nn.RMSNorm(10), nn.Flatten(), nn.Linear(40, 10),
    )  # fmt: skip


def small() -> nn.Module:
    """A network without a bias before BatchNorm, whose gradient would be nothing but rounding."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(288, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 10),
    )  # fmt: skip


class Block(nn.Module):
    """The residual block of ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.skip = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


def resnet18(width: int = 64) -> nn.Module:
    """ResNet-18 for images of 32 x 32; `width`: the channels of its first stage."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage, stride in enumerate((1, 2, 2, 2)):
        outputs = width << stage
        layers += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


def give_up_recording(stream: torch.cuda.Stream) -> None:
    """After a recording that failed: torch may leave its own stream, and the generator as in a recording."""
    torch.cuda.set_stream(stream)
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())


def moments_agree() -> float:
    """The largest relative difference of a second moment on the GPU (float32) from the CPU's (float64)."""
    torch.manual_seed(0)
    slow, x, y = every_layer().double(), torch.randn(32, 3, 16, 16).double(), torch.randint(0, 10, (32,))
    fast = copy.deepcopy(slow).float().cuda()
    captures = [Capture(model, dict(model.named_parameters()), elementwise=True) for model in (slow, fast)]
    F.cross_entropy(slow(x), y).backward()
    F.cross_entropy(fast(x.float().cuda()), y.cuda()).backward()
    worst = 0.0
    for name, _ in slow.named_parameters():
        wanted, got = (capture.second_moment(name) for capture in captures)
        assert wanted is not None
        assert got is not None
        worst = max(worst, ((got.cpu() - wanted).abs().max() / wanted.abs().max()).item())
    assert worst < 1e-4, worst  # float32 convolutions in another order
    return worst


def no_synchronisation() -> None:
    """Forward, backward and step with every synchronising call an error."""
    x, y = torch.randn(32, 3, 16, 16, device="cuda"), torch.randint(0, 10, (32,), device="cuda")
    for make in OPTIMIZERS:
        model = every_layer().cuda()
        optimizer = make(model)
        for step in range(6):
            torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step lays the state out
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
        assert all(0 < chosen.lr < math.inf for chosen in optimizer.tuned().values())


def optimizers_agree() -> float:
    """The largest difference of a weight between a CPU and the GPU after ten steps in float64, over all optimizers."""
    worst = 0.0
    for make in EVERY:
        for rule in ("robust", "paper"):
            ends = []
            for device in ("cpu", "cuda"):
                torch.manual_seed(0)
                model = small().double().to(device)
                x, y = torch.randn(10, 16, 3, 16, 16).double(), torch.randint(0, 10, (10, 16))
                optimizer = make(model, rule=rule)
                for inputs, labels in zip(x.to(device), y.to(device), strict=True):
                    optimizer.zero_grad()
                    F.cross_entropy(model(inputs), labels).backward()
                    optimizer.step()
                ends.append(torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()]))
            worst = max(worst, (ends[0] - ends[1]).abs().max().item())
            assert worst < 1e-8, (make.__name__, rule, worst)
    return worst


def graphs_agree() -> dict[str, float]:
    """How far a recorded run is from an eager one, beside how far that is from another eager one.

    In the largest difference of a weight, relative to the largest change of one: rounding, which grows from step to
    step. (With the ten bits that tf32 leaves of a number it would come to two per cent.) Batches of two sizes, from the
    CPU and the GPU, and a change of an option.
    """
    torch.manual_seed(1)
    sizes = [32] * 8 + [20] * 5 + [32] * 12
    data = [(torch.randn(n, 3, 32, 32), torch.randint(0, 10, (n,))) for n in sizes]
    ends, losses, before = [], [], Tensor()
    for records in (False, False, True):
        torch.manual_seed(0)
        model = resnet18().cuda()
        before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        optimizer = AutoSGD(model)

        def step(x: Tensor, y: Tensor, model: nn.Module = model, optimizer: AutoSGD = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        recorder = Recorder(step, optimizer)
        found = []
        for number, (x, y) in enumerate(data):
            if number == 18:
                optimizer.param_groups[0]["lr"] = 0.5
            batch = (x.cuda(), y.cuda()) if number % 2 or not records else (x, y)
            found.append(recorder(batch, {}) if records else step(*batch))
        graphs = [known.graph is not None for known in recorder.known]
        assert graphs == ([True, True, True] if records else []), graphs
        assert all(math.isfinite(chosen.noise) for chosen in optimizer.tuned().values())
        ends.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        losses.append(torch.stack(found))
    change = (ends[0] - before).abs().max()
    again, by_graphs = (((end - ends[0]).abs().max() / change).item() for end in ends[1:])
    assert by_graphs < max(0.002, 3 * again), (again, by_graphs)
    torch.testing.assert_close(losses[2], losses[0], rtol=0.01, atol=0.01)
    return {"another eager run": again, "a recorded run": by_graphs}


def reads_are_refused() -> None:
    """A step that reads the device cannot be recorded, and says so; training goes on without."""
    model = nn.Linear(8, 3).cuda()
    optimizer = AutoSGD(model)
    x, y = torch.randn(16, 8, device="cuda"), torch.randint(0, 3, (16,), device="cuda")

    def step(x: Tensor, y: Tensor) -> float:
        loss = F.cross_entropy(F.dropout(model(x)), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    run = recorded(step, optimizer)
    first = [run(x, y) for _ in range(3)]
    try:
        run(x, y)
        message = "nothing"
    except RuntimeError as error:
        message = str(error)
    assert "cannot be recorded" in message, message
    optimizer.zero_grad()
    assert math.isfinite(step(x, y) + sum(first))


def kernels_of_step(depth: int, make: type[torch.optim.Optimizer]) -> int:
    """How many kernels a step launches for an MLP of so many layers."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(depth)]).cuda()
    optimizer = make(model)  # type: ignore[arg-type]
    x = torch.randn(16, 64, device="cuda")
    for _ in range(20):  # the first 16 also look how large the inputs are
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        optimizer.step()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def cost(make: Callable[[nn.Module], torch.optim.Optimizer], *, records: bool = False) -> tuple[float, float]:
    """Milliseconds and peak bytes of a training step of ResNet-18, 128 images, bf16 autocast, channels_last."""
    torch.manual_seed(0)
    model = resnet18().cuda().to(memory_format=torch.channels_last)
    optimizer = make(model)
    x = torch.randn(128, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (128,), device="cuda")

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    if records:
        step = recorded(step, optimizer)  # type: ignore[arg-type]
    times = []
    for number in range(50):
        if number == 10:
            torch.cuda.reset_peak_memory_stats()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step(x, y)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[10:]), float(torch.cuda.max_memory_allocated())


def main() -> None:
    """Run the checks, print what they found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    found: dict[str, object] = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    found["largest relative error of Σ c_i²"] = moments_agree()
    found["largest difference of a weight from a CPU's, ten steps of each optimizer, float64"] = optimizers_agree()
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        found["largest difference of a weight after 25 steps over the largest change"] = graphs_agree()
    reads_are_refused()
    no_synchronisation()
    found["synchronisations in forward, backward and step"] = 0
    for make in OPTIMIZERS:
        counts = [kernels_of_step(depth, make) for depth in (4, 40, 200)]
        found[f"kernels in {make.__name__}.step, 8 / 80 / 400 tensors"] = counts
    plains = {
        "AutoSGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, fused=True),
        "AutoAdam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-3, fused=True),
    }
    for auto in (AutoSGD, AutoAdam):
        plain = cost(plains[auto.__name__])
        for records in (False, True):
            own = cost(auto, records=records)
            found[f"ResNet-18 bf16, {'recorded ' * records}{auto.__name__} over fused eager: ms, ms, time, memory"] = [
                round(plain[0], 3), round(own[0], 3), round(own[0] / plain[0], 3), round(own[1] / plain[1], 3),
            ]  # fmt: skip
    for key, value in found.items():
        print(f"{key}: {value}")
    if out:
        out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
