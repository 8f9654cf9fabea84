"""Lightning: return the optimizer from configure_optimizers; the monitor logs rate, momentum and noise of every layer.

pip install '.[lightning,lab]'; python examples/lightning_example.py --steps 200
"""

import argparse

import lightning.pytorch as lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset, random_split

from autoopt import AutoSGD
from autoopt.integrations.lightning import AutoOptMonitor


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("error", (self.model(batch[0]).argmax(1) != batch[1]).float().mean())

    def configure_optimizers(self) -> Optimizer:
        return AutoSGD(self)


def main() -> None:
    parser = argparse.ArgumentParser(description="Handwritten digits with Lightning.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", default="lightning_logs", help="where the curves go")
    args = parser.parse_args()

    lightning.seed_everything(0)
    pixels, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits))
    train, test = random_split(data, [0.8, 0.2])
    trainer = lightning.Trainer(
        max_steps=args.steps,
        logger=CSVLogger(args.folder),
        log_every_n_steps=20,
        callbacks=[AutoOptMonitor(every=20)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        accelerator="auto",
    )
    model = Classifier()
    trainer.fit(model, DataLoader(train, batch_size=64, shuffle=True))
    with trainer.optimizers[0].averaged():
        error = trainer.test(model, DataLoader(test, batch_size=500), verbose=False)[0]["error"]
    print(f"test error {error:.2%}")


if __name__ == "__main__":
    main()
