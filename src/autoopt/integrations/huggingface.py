"""The Hugging Face Trainer: a factory for `optimizer_cls_and_kwargs`, and a callback that logs.

What is not an Optimizer class the Trainer (transformers 5) takes for a factory and calls `factory()(model, **options)`,
once the model is where it trains. It clips gradients to a norm of 1 and clears them through the model; both are fine.
Its scheduler, a decay to zero unless TrainingArguments say otherwise, multiplies the automatic rate; the argument
`learning_rate` is not used. Accelerate, which it is built on, needs nothing from here.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from autoopt.watching import readings, unwrap

Factory = Callable[[], Callable[..., Optimizer]]


def auto(optimizer: Callable[..., Optimizer], **options: Any) -> tuple[Factory, dict[str, Any]]:
    """What the Trainer's `optimizer_cls_and_kwargs` takes.

        Trainer(model, args, train_dataset=data, optimizer_cls_and_kwargs=auto(AutoAdam, weight_decay=0.01))

    Weight decay is given here, not in TrainingArguments, and leaves biases and norms alone as the Trainer's own does.

    Args:
        optimizer: AutoSGD, AutoAdam or another automatic optimizer.
        options: its options.
    """

    def make(model: nn.Module, **given: Any) -> Optimizer:
        if given.get("weight_decay") and "param_groups" not in given:
            given["param_groups"] = _decayed_apart(model)
        return optimizer(model, **given)

    return lambda: make, options


def _decayed_apart(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: matrices, which weight decay is for, and biases and norms, which it is not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


class AutoOptCallback(TrainerCallback):
    """Logs rate, momentum and noise of every parameter wherever the Trainer logs to.

        trainer = Trainer(...)
        trainer.add_callback(AutoOptCallback(trainer, every=50))

    The names are "rate/NAME", "momentum/NAME" and "noise/NAME". Reads the device once in `every` steps.

    Args:
        trainer: whose `log` method takes the values; callbacks have no other way to it.
        every: optimizer steps between two readings.
    """

    def __init__(self, trainer: Trainer, every: int = 50) -> None:
        if every < 1:
            raise ValueError(f"every is {every}; it must be at least 1, the number of steps between two readings.")
        self.trainer, self.every = trainer, every

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Read and log, if it is time."""
        if state.global_step % self.every == 0:
            self.trainer.log(readings(unwrap(self.trainer.optimizer).tuned()))
