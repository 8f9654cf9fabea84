"""The Hugging Face Trainer: auto(...) makes the optimizer once the model is in place; the callback logs what it chose.

pip install '.[hf,lab]'; python examples/hf_trainer_example.py --steps 200
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from autoopt import AutoAdamW
from autoopt.integrations.huggingface import AutoOptCallback, auto


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.body(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    parser = argparse.ArgumentParser(description="Handwritten digits with the Hugging Face Trainer.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", default="hf_runs", help="where checkpoints go")
    args = parser.parse_args()

    torch.manual_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    rows = [{"x": x[i], "labels": y[i]} for i in torch.randperm(len(y))]
    trainer = Trainer(
        Classifier(),
        TrainingArguments(
            output_dir=args.folder,
            max_steps=args.steps,
            per_device_train_batch_size=64,
            lr_scheduler_type="constant",  # the rate is automatic; a schedule would multiply it
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=rows[:1440],
        eval_dataset=rows[1440:],
        optimizer_cls_and_kwargs=auto(AutoAdamW, weight_decay=0.01),
        compute_metrics=lambda result: {"error": (result.predictions.argmax(1) != result.label_ids).mean()},
    )
    trainer.add_callback(AutoOptCallback(trainer, every=100))
    trainer.train()
    with trainer.optimizer.optimizer.averaged():  # behind Accelerate's wrapper
        print(f"test error {trainer.evaluate()['eval_error']:.2%}")


if __name__ == "__main__":
    main()
