"""An image classifier: a small CNN on scikit-learn's digits, with no learning rate and no momentum to choose.

pip install '.[lab]'; python examples/image_classifier.py --steps 400
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import autoopt


def main() -> None:
    parser = argparse.ArgumentParser(description="A small CNN on handwritten digits.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--watch", action="store_true", help="show the rate, momentum and noise of every layer")
    args = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels))
    train, test = order[:1440], order[1440:]

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip
    optimizer = autoopt.AutoSGD(model)
    if args.watch:
        autoopt.watch(optimizer, every=20, batch_size=args.batch_size)

    for _ in range(args.steps):
        batch = train[torch.randint(len(train), (args.batch_size,))]
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()

    def error() -> float:
        with torch.no_grad():
            return (model(images[test]).argmax(1) != labels[test]).float().mean().item()

    model.eval()
    with optimizer.averaged():
        averaged = error()
    print(f"test error {averaged:.2%}, with the last weights {error():.2%}")


if __name__ == "__main__":
    main()
