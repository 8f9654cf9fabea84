"""Accelerate: prepare() takes the optimizer like any other. Run it plainly, or with `accelerate launch`.

pip install '.[hf,lab]'; python examples/accelerate_example.py --steps 200
"""

import argparse
from itertools import chain, islice, repeat

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autoopt import AutoSGD


def main() -> None:
    parser = argparse.ArgumentParser(description="Handwritten digits with Accelerate.")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    torch.manual_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    order = torch.randperm(len(y))
    x, y = x[order], y[order]
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))
    loader = DataLoader(TensorDataset(x[:1440], y[:1440]), batch_size=32, shuffle=True)

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(model, AutoSGD(model), loader)
    for inputs, labels in islice(chain.from_iterable(repeat(loader)), 2 * args.steps):  # two batches for each step
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()

    x, y = x.to(accelerator.device), y.to(accelerator.device)
    with torch.no_grad(), optimizer.optimizer.averaged():
        wrong = (model(x[1440:]).argmax(1) != y[1440:]).float().mean().item()
    accelerator.print(f"test error {wrong:.2%}")


if __name__ == "__main__":
    main()
