"""The Hugging Face Trainer: made by our factory or given, it does what the raw loop does; resume; the callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from autoopt import AutoAdam, AutoSGD
from contract.small import assert_same
from integration.agree import Run, assert_agree, either

transformers = pytest.importorskip("transformers", reason="needs the extra autoopt[hf]")

from transformers import Trainer, TrainingArguments  # noqa: E402

from autoopt.integrations.huggingface import AutoOptCallback, auto  # noqa: E402

STEPS, SAMPLES = 12, 8


class Classifier(nn.Module):
    """What the Trainer asks of a model: a loss in what forward returns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.body(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def data() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(64, 4, generator=generator)
    return [{"x": row, "labels": label} for row, label in zip(x, x[:, :3].argmax(1), strict=True)]


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    defaults = {
        "max_steps": STEPS, "per_device_train_batch_size": SAMPLES, "lr_scheduler_type": "constant",
        "save_strategy": "no", "logging_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True,
        "dataloader_pin_memory": False, "train_sampling_strategy": "sequential",
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **{**defaults, **options})


def fit(model: nn.Module, folder: Path, made: Any, **options: Any) -> Trainer:
    trainer = Trainer(model, arguments(folder, **options), train_dataset=data(), optimizer_cls_and_kwargs=made)
    trainer.train()
    return trainer


def raw_loop(make: Any, accumulate: int = 1, bfloat16: bool = False, clip: float = 1.0) -> Run:
    model = Classifier()
    optimizer = make(model)
    batches = list(DataLoader(data(), batch_size=SAMPLES))  # type: ignore[arg-type]
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(accumulate):
            batch = batches[(step * accumulate + micro) % len(batches)]
            with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                loss = model(**batch)["loss"] / accumulate
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model, optimizer


@either
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("bfloat16", [False, True], ids=["fp32", "bf16"])
def test_it_does_what_the_raw_loop_does(make: Any, accumulate: int, bfloat16: bool, tmp_path: Path) -> None:
    """The Trainer clears the gradients through the model and clips them: here often, to a norm of 0.5."""
    model, start = Classifier(), Classifier()
    trainer = fit(model, tmp_path, auto(make), gradient_accumulation_steps=accumulate, bf16=bfloat16, max_grad_norm=0.5)
    assert_agree((model, trainer.optimizer), raw_loop(make, accumulate, bfloat16, clip=0.5))
    assert not torch.equal(model.body[0].weight, start.body[0].weight)


def test_an_optimizer_and_a_scheduler_can_be_given(tmp_path: Path) -> None:
    model = Classifier()
    optimizer = AutoSGD(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    Trainer(model, arguments(tmp_path), train_dataset=data(), optimizers=(optimizer, scheduler)).train()
    assert_agree((model, optimizer), raw_loop(AutoSGD))


def test_the_trainers_own_schedule_multiplies_the_automatic_rate(tmp_path: Path) -> None:
    trainer = fit(Classifier(), tmp_path, auto(AutoSGD), lr_scheduler_type="linear", learning_rate=123.0)
    assert trainer.optimizer.param_groups[0]["initial_lr"] == 1.0
    assert trainer.optimizer.param_groups[0]["lr"] == 0.0  # decayed to the end
    assert trainer.optimizer.optimizer.tuned()["body.0.weight"].lr == 0.0


def test_weight_decay_leaves_biases_and_norms_alone() -> None:
    model = Classifier()
    factory, options = auto(AutoAdam, weight_decay=0.1, decoupled_weight_decay=True)
    optimizer = factory()(model, **options)
    decay = {name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]}
    assert decay == {name: 0.1 if name in ("body.0.weight", "body.3.weight") else 0.0 for name in decay}
    assert len(decay) == len(list(model.parameters()))


@either
def test_a_checkpoint_of_the_trainer_resumes_bit_by_bit(make: Any, tmp_path: Path) -> None:
    whole, resumed = Classifier(), Classifier()
    uninterrupted = fit(whole, tmp_path, auto(make), save_strategy="steps", save_steps=STEPS // 2)
    trainer = Trainer(
        resumed, arguments(tmp_path / "second"), train_dataset=data(), optimizer_cls_and_kwargs=auto(make)
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    assert_same(dict(whole.state_dict()), dict(resumed.state_dict()))
    assert_same(uninterrupted.optimizer.state_dict(), trainer.optimizer.state_dict())


def language(name: str) -> nn.Module:
    torch.manual_seed(4)
    if name == "gpt2":  # tied embeddings, Conv1D
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=16, n_positions=12, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
                loss_type="ForCausalLMLoss",
            )
        )  # fmt: skip
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=16, max_position_embeddings=12, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=32, pad_token_id=0,
        )
    )  # fmt: skip


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_transformers_train_when_positions_come_with_the_batch(name: str, tmp_path: Path) -> None:
    """Counting up from a random number, so that every next token is known."""
    counting = [{"input_ids": (torch.arange(12) + start) % 16} for start in range(16)]

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        ids = torch.stack([row["input_ids"] for row in rows])
        return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(12).expand_as(ids)}

    trainer = Trainer(
        language(name),
        arguments(tmp_path, max_steps=150, logging_strategy="steps", logging_steps=10),
        train_dataset=counting,
        data_collator=collate,
        optimizer_cls_and_kwargs=auto(AutoAdam),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.6 * losses[0]


def test_the_callback_logs_what_was_chosen_for_every_layer(tmp_path: Path) -> None:
    model, alone = Classifier(), Classifier()
    trainer = Trainer(model, arguments(tmp_path), train_dataset=data(), optimizer_cls_and_kwargs=auto(AutoAdam))
    trainer.add_callback(AutoOptCallback(trainer, every=5))
    trainer.train()
    fit(alone, tmp_path, auto(AutoAdam))

    logged = [entry for entry in trainer.state.log_history if "rate/body.0.weight" in entry]
    assert [entry["step"] for entry in logged] == [5, 10]
    for name, _ in model.named_parameters():
        assert {f"rate/{name}", f"momentum/{name}", f"noise/{name}"} <= logged[0].keys()
    assert_same(dict(model.state_dict()), dict(alone.state_dict()))


def test_the_callback_writes_through_the_trainers_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    trainer = Trainer(
        Classifier(), arguments(tmp_path, report_to="tensorboard"), train_dataset=data(),
        optimizer_cls_and_kwargs=auto(AutoSGD),
    )  # fmt: skip
    trainer.add_callback(AutoOptCallback(trainer, every=6))
    trainer.train()
    events = accumulator.EventAccumulator(str(tmp_path / "board")).Reload()
    assert [event.step for event in events.Scalars("train/noise/body.3.bias")] == [6, 12]


def test_the_callback_refuses_other_optimizers(tmp_path: Path) -> None:
    trainer = Trainer(Classifier(), arguments(tmp_path), train_dataset=data())
    trainer.add_callback(AutoOptCallback(trainer, every=1))
    with pytest.raises(TypeError, match=r"AdamW has no tuned\(\)"):
        trainer.train()
    with pytest.raises(ValueError, match="every is 0"):
        AutoOptCallback(trainer, every=0)
