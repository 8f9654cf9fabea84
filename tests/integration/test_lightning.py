"""Lightning: the same weights as the raw loop, in its order of calls; resume; the callback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autoopt import AutoAdam, AutoSGD
from contract.small import assert_same
from integration.agree import Run, assert_agree, either

lightning = pytest.importorskip("lightning.pytorch", reason="needs the extra autoopt[lightning]")

from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.loggers.logger import Logger  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from autoopt.integrations.lightning import AutoOptMonitor  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),  # lightning 2.6 with torch 2.13
]

EPOCHS = 3


class Classifier(lightning.LightningModule):
    """As a user writes it."""

    def __init__(self, make: Callable[..., Any], whole: bool = True, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))
        self.make, self.whole, self.automatic_optimization = make, whole, not manual

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return self.make(self if self.whole else self.model)


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(64, 4, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=4)


def trainer(**options: Any) -> Any:
    quiet = {
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "devices": 1,
    }
    return lightning.Trainer(
        **{"logger": False, "enable_checkpointing": False, "max_epochs": EPOCHS, **quiet, **options}
    )


def half() -> dict[str, Any]:
    """fp16 with a GradScaler; precision="16-mixed" itself means bfloat16 to Lightning on a CPU."""
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}


def raw_loop(make: Callable[..., Any], every: int, dtype: torch.dtype | None) -> Run:
    """The loop that everybody writes: zero_grad, forward, backward, step."""
    module = Classifier(make)
    optimizer = make(module)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    for _ in range(EPOCHS):
        batches = list(data())
        for start in range(0, len(batches), every):
            optimizer.zero_grad()
            for x, y in batches[start : start + every]:
                with torch.autocast("cpu", dtype, enabled=dtype is not None, cache_enabled=False):
                    loss = F.cross_entropy(module.model(x), y) / every
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    return module, optimizer


@either
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_it_does_what_the_raw_loop_does(make: Any, every: int, precision: str) -> None:
    """Lightning runs forward, zero_grad and backward inside `step`; in fp16 outside of it."""
    options = {"fp32": {}, "bf16": {"precision": "bf16-mixed"}, "fp16": half()}[precision]
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    module, start = Classifier(make), Classifier(make)
    fit = trainer(accumulate_grad_batches=every, **options)
    fit.fit(module, data())
    assert_agree((module, fit.optimizers[0]), raw_loop(make, every, dtype))
    assert not torch.equal(module.model[0].weight, start.model[0].weight)


@pytest.mark.parametrize("options", [{"whole": False}, {"manual": True}], ids=["inner model", "manual optimization"])
def test_other_ways_to_use_it(options: dict[str, bool]) -> None:
    module = Classifier(AutoAdam, **options)
    fit = trainer()
    fit.fit(module, data())
    assert_agree((module, fit.optimizers[0]), raw_loop(AutoAdam, 1, None))


def test_lightning_clips_by_norm_and_steps_a_scheduler() -> None:
    class Scheduled(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = AutoSGD(self)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    module = Scheduled(AutoSGD)
    fit = trainer(gradient_clip_val=0.1)
    fit.fit(module, data())

    plain = Classifier(AutoSGD)
    optimizer = AutoSGD(plain)
    for epoch in range(EPOCHS):
        optimizer.param_groups[0]["lr"] = 0.5**epoch
        for x, y in data():
            optimizer.zero_grad()
            F.cross_entropy(plain.model(x), y).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5**EPOCHS
    assert_agree((module, fit.optimizers[0]), (plain, optimizer))


@either
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "fp16"])
def test_a_lightning_checkpoint_resumes_bit_by_bit(make: Any, precision: str, tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        return half() if precision == "fp16" else {"precision": precision}

    whole = Classifier(make)
    uninterrupted = trainer(max_epochs=4, **options())
    uninterrupted.fit(whole, data())

    first = trainer(max_epochs=2, **options())
    first.fit(Classifier(make), data())
    first.save_checkpoint(tmp_path / "half.ckpt")
    resumed = Classifier(make)
    second = trainer(max_epochs=4, **options())
    second.fit(resumed, data(), ckpt_path=str(tmp_path / "half.ckpt"), weights_only=True)

    assert_same(dict(whole.state_dict()), dict(resumed.state_dict()))
    assert_same(uninterrupted.optimizers[0].state_dict(), second.optimizers[0].state_dict())


class Recorder(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []

    name = version = "recorder"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.points.append((step or 0, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


def test_the_monitor_logs_what_was_chosen_for_every_layer() -> None:
    recorder, module = Recorder(), Classifier(AutoAdam)
    fit = trainer(logger=recorder, accumulate_grad_batches=2, callbacks=[AutoOptMonitor(every=12)])
    fit.fit(module, data())

    assert [step for step, _ in recorder.points] == [12, 24]  # 16 batches, 8 steps an epoch
    names = [name for name, _ in module.named_parameters()]
    assert set(recorder.points[-1][1]) == {f"{kind}/{name}" for kind in ("rate", "momentum", "noise") for name in names}
    assert recorder.points[-1][1]["rate/model.0.weight"] == fit.optimizers[0].tuned()["model.0.weight"].lr


def test_the_monitor_leaves_the_run_as_it_is_and_writes_through_real_loggers(tmp_path: Path) -> None:
    watched, alone = Classifier(AutoSGD), Classifier(AutoSGD)
    trainer(logger=CSVLogger(tmp_path), callbacks=[AutoOptMonitor(every=5)]).fit(watched, data())
    trainer().fit(alone, data())
    assert_same(dict(watched.state_dict()), dict(alone.state_dict()))
    header = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()[0]
    assert "noise/model.3.weight" in header


def test_the_monitor_keeps_two_optimizers_apart() -> None:
    class Two(Classifier):
        def __init__(self) -> None:
            super().__init__(AutoSGD, manual=True)

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self.model(batch[0]), batch[1]))
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [AutoSGD(self.model[0]), AutoAdam(self.model[1:])]

    recorder = Recorder()
    trainer(logger=recorder, callbacks=[AutoOptMonitor(every=8)]).fit(Two(), data())
    assert {"0/rate/weight", "1/rate/3.weight"} <= set(recorder.points[-1][1])


def test_the_monitor_refuses_what_it_cannot_watch() -> None:
    with pytest.raises(ValueError, match="found no automatic optimizer: configure_optimizers returned SGD"):
        trainer(logger=Recorder(), callbacks=[AutoOptMonitor()]).fit(
            Classifier(lambda module: torch.optim.SGD(module.parameters())), data()
        )
    with pytest.raises(ValueError, match="nowhere to log to"):
        trainer(callbacks=[AutoOptMonitor()]).fit(Classifier(AutoSGD), data())
    with pytest.raises(ValueError, match="every is 0"):
        AutoOptMonitor(every=0)


def test_the_optimizer_that_self_optimizers_gives_is_ours() -> None:
    """A wrapper that imitates our class: what is read through it must be the real one's, and leave that alone."""

    class Curious(Classifier):
        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
            if index > 0:
                assert self.optimizers().tuned() == self.trainer.optimizers[0].tuned()
            return super().training_step(batch, index)

    curious, plain = trainer(), trainer()
    curious.fit(Curious(AutoAdam), data())
    plain.fit(Classifier(AutoAdam), data())
    assert_same(curious.optimizers[0].state_dict(), plain.optimizers[0].state_dict())
