"""Fine-tuning with frozen layers: learn the digits 0 to 4, then 5 to 9 with a new head on the frozen body.

pip install '.[lab]'; python examples/fine_tuning.py --steps 200
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from autoopt import AutoAdam


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    optimizer = AutoAdam(model)  # frozen parameters are left alone
    for _ in range(steps):
        batch = torch.randint(len(y), (32,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    optimizer.detach()  # done: the model's layers are plain again, for the next optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description="A new head on a frozen body.")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    torch.manual_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    order = torch.randperm(len(y))
    x, y = x[order], y[order]

    body = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.ReLU())
    model = nn.Sequential(body, nn.Linear(256, 5))
    train(model, x[y < 5], y[y < 5], args.steps)

    body.requires_grad_(False)
    model[1] = nn.Linear(256, 5)
    new_x, new_y = x[y >= 5], y[y >= 5] - 5
    train(model, new_x[:600], new_y[:600], args.steps)

    with torch.no_grad():
        wrong = (model(new_x[600:]).argmax(1) != new_y[600:]).float().mean().item()
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    print(f"test error on the new digits {wrong:.2%}, with {trained} weights trained")


if __name__ == "__main__":
    main()
