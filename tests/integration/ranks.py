"""Run by torchrun: trains with one framework on two ranks and saves each rank's weights. See test_ranks.py.

ranks.py FRAMEWORK FOLDER
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autoopt import AutoAdam

EPOCHS, SAMPLES = 4, 8  # samples of a step, over all ranks


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))


def samples() -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(11))
    return x, x[:, :3].argmax(1)


def with_lightning(folder: Path) -> nn.Module:
    import lightning.pytorch as lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return AutoAdam(self)

    module = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=EPOCHS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,  # its own would shuffle
    )  # fmt: skip
    mine = [part[int(os.environ["RANK"]) :: 2] for part in samples()]
    trainer.fit(module, DataLoader(TensorDataset(*mine), batch_size=SAMPLES // 2))
    return module.model


def with_accelerate(folder: Path) -> nn.Module:
    from accelerate import Accelerator

    accelerator, plain = Accelerator(cpu=True), network()
    loader = DataLoader(TensorDataset(*samples()), batch_size=SAMPLES // 2)
    model, optimizer, loader = accelerator.prepare(plain, AutoAdam(plain), loader)
    for _ in range(EPOCHS):
        for x, y in loader:
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return plain


def with_trainer(folder: Path) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    from autoopt.integrations.huggingface import auto

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.body(x), labels)}

    model = Classifier()
    arguments = TrainingArguments(
        str(folder), num_train_epochs=EPOCHS, per_device_train_batch_size=SAMPLES // 2, lr_scheduler_type="constant",
        max_grad_norm=0.0, save_strategy="no", logging_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        train_sampling_strategy="sequential", ddp_find_unused_parameters=False,
    )  # fmt: skip
    rows = [{"x": x, "labels": y} for x, y in zip(*samples(), strict=True)]
    Trainer(model, arguments, train_dataset=rows, optimizer_cls_and_kwargs=auto(AutoAdam)).train()
    return model.body


if __name__ == "__main__":
    torch.set_num_threads(1)
    framework, target = sys.argv[1], Path(sys.argv[2])
    trained = {"lightning": with_lightning, "accelerate": with_accelerate, "trainer": with_trainer}[framework](target)
    torch.save(trained.state_dict(), target / f"{torch.distributed.get_rank()}.pt")
    sys.stdout.flush()
    os._exit(0)  # the frameworks leave their process groups open: see torchrun in tests/ranks.py
