"""A stream whose meaning changes half way: every batch is predicted first and learned from after.

At half time each label y becomes (3y + 1) mod 10. There is no schedule that would have to know of it.

pip install '.[lab]'; python examples/streaming_drift.py --steps 600
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from autoopt import AutoSGD


def main() -> None:
    parser = argparse.ArgumentParser(description="Online learning with a sudden drift.")
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()

    torch.manual_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = AutoSGD(model)
    errors = []
    for step in range(args.steps):
        batch = torch.randint(len(labels), (32,))
        x, y = images[batch], labels[batch]
        if step >= args.steps // 2:
            y = (3 * y + 1) % 10
        outputs = model(x)
        errors.append((outputs.argmax(1) != y).float().mean().item())  # before this batch was learned from
        optimizer.zero_grad()
        F.cross_entropy(outputs, y).backward()
        optimizer.step()

    half, window = args.steps // 2, max(1, args.steps // 20)
    parts = errors[half - window : half], errors[half : half + window], errors[-window:]
    before, after, end = (sum(part) / window for part in parts)
    print(f"error before the drift {before:.1%}, right after it {after:.1%}, at the end {end:.1%}")


if __name__ == "__main__":
    main()
