"""Models that nobody here wrote, from transformers, built from small configs with random weights, in training mode.

Dropout and BatchNorm are on; where the model ties embeddings, they are tied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import reference
from autoopt import AutoAdam, AutoSGD

VOCABULARY, LENGTH, CLASSES, SAMPLES = 13, 7, 2, 3
SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
IMAGE = {"image_size": 8, "patch_size": 4, "num_channels": 2}
TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Model:
    make: Callable[[], nn.Module]
    kind: str  # of what it learns: "image" of so many pixels, "text", "masked image", or the "pixels" themselves
    pixels: int = 8
    rows_meet: bool = False  # BatchNorm


def resnet(layer: str) -> nn.Module:
    config = hf.ResNetConfig(num_channels=2, embedding_size=4, hidden_sizes=[8, 12], depths=[2, 1], layer_type=layer)
    return hf.ResNetForImageClassification(config)


def convnext() -> nn.Module:
    config = hf.ConvNextConfig(
        num_channels=2, num_stages=2, hidden_sizes=[4, 6], depths=[1, 2], patch_size=2, layer_scale_init_value=0.3,
        drop_path_rate=0.2,
    )  # fmt: skip
    return hf.ConvNextForImageClassification(config)


def swin() -> nn.Module:
    config = hf.SwinConfig(
        image_size=16, patch_size=2, num_channels=2, embed_dim=4, depths=[2, 1], num_heads=[2, 2], window_size=4,
        drop_path_rate=0.1, hidden_dropout_prob=0.1, use_absolute_embeddings=True,
    )  # fmt: skip
    return hf.SwinForImageClassification(config)


def beit() -> nn.Module:
    config = hf.BeitConfig(
        **SMALL, **IMAGE, use_relative_position_bias=True, use_absolute_position_embeddings=True, use_mask_token=True,
        hidden_dropout_prob=0.1,
    )  # fmt: skip
    return hf.BeitForMaskedImageModeling(hf.BeitConfig(**{**config.to_dict(), "vocab_size": VOCABULARY}))


def vit() -> nn.Module:
    config = hf.ViTConfig(**SMALL, **IMAGE, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    return hf.ViTForImageClassification(config)


def dinov2() -> nn.Module:
    small = {key: value for key, value in SMALL.items() if key != "intermediate_size"}
    return hf.Dinov2ForImageClassification(hf.Dinov2Config(**small, **IMAGE, hidden_dropout_prob=0.1))


def vit_mae() -> nn.Module:
    config = hf.ViTMAEConfig(
        **SMALL, **IMAGE, decoder_hidden_size=8, decoder_num_hidden_layers=1, decoder_num_attention_heads=2,
        decoder_intermediate_size=12, hidden_dropout_prob=0.1,
    )  # fmt: skip
    return hf.ViTMAEForPreTraining(config)


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(**TEXT, n_positions=9, n_embd=8, n_layer=2, n_head=2))


def bert() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**SMALL, **TEXT, max_position_embeddings=9))


def mixtral() -> nn.Module:
    config = hf.MixtralConfig(
        **SMALL, **TEXT, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2, max_position_embeddings=9,
        attention_dropout=0.1, use_cache=False,
    )  # fmt: skip
    model = hf.MixtralForCausalLM(config)
    model.set_experts_implementation("eager")  # the grouped product of torch knows no float64
    return model


MODELS = {
    "resnet-18": Model(lambda: resnet("basic"), "image", 32, rows_meet=True),
    "resnet-50": Model(lambda: resnet("bottleneck"), "image", 32, rows_meet=True),
    "vit": Model(vit, "image"),
    "convnext": Model(convnext, "image", 16),
    "gpt2": Model(gpt2, "text"),
    "bert": Model(bert, "text"),
    "swin": Model(swin, "image", 16),
    "beit": Model(beit, "masked image"),
    "dinov2": Model(dinov2, "image"),
    "vit-mae": Model(vit_mae, "pixels"),
    "mixtral": Model(mixtral, "text"),
}


def batch(model: Model) -> tuple[dict[str, Tensor], Tensor]:
    """The inputs, and a target for each sample."""
    if model.kind == "text":
        return {"input_ids": torch.randint(3, VOCABULARY, (SAMPLES, LENGTH))}, torch.randint(
            VOCABULARY, (SAMPLES, LENGTH)
        )
    inputs = {"pixel_values": torch.randn(SAMPLES, 2, model.pixels, model.pixels, dtype=torch.float64)}
    if model.kind == "pixels":
        return inputs, torch.randn(SAMPLES, 4, 32, dtype=torch.float64)
    if model.kind == "image":
        return inputs, torch.randint(CLASSES, (SAMPLES,))
    inputs["bool_masked_pos"] = torch.rand(SAMPLES, 4) < 0.5
    return inputs, torch.randint(VOCABULARY, (SAMPLES, 4))


def losses(model: nn.Module, inputs: dict[str, Tensor], target: Tensor) -> Tensor:
    """One for each sample; they add up to a mean over all."""
    torch.manual_seed(5)  # for dropout
    logits = model(**inputs).logits
    if target.is_floating_point():
        return F.mse_loss(logits, target, reduction="none").sum((1, 2)) / target.numel()
    each = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none")
    return each.view(len(target), -1).sum(1) / target.numel()


def contributions(model: nn.Module, case: Model, inputs: dict[str, Tensor], target: Tensor) -> dict[str, Tensor]:
    """c_i in a plain copy of the model."""
    if case.rows_meet:
        return reference.contributions(model, lambda m: losses(m, inputs, target).sum())
    plain = copy.deepcopy(model)
    trained = ((name, p) for name, p in plain.named_parameters() if p.requires_grad)
    names, parameters = zip(*trained, strict=True)
    parts = [
        torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        for loss in losses(plain, inputs, target)
    ]
    by_name = zip(names, zip(*parts, strict=True), strict=True)
    return {name: torch.stack(c) for name, c in by_name if c[0] is not None}


def assert_exact(optimizer: Any, c: dict[str, Tensor], what: str) -> None:
    """To 1e-10 of a tensor's greatest entry, or to rounding: a bias that softmax or BatchNorm takes out has none."""
    rounding = 1e-26 * max(single.square().max().item() for single in c.values())
    for name, single in c.items():
        expected = single.square().sum(0) if optimizer.elementwise else single.square().sum()
        found = optimizer._now.source.second_moment(name)
        assert found is not None, f"{name} {what}"
        difference = (found - expected).abs().max().item()
        assert difference <= 1e-10 * expected.max().item() + rounding, f"{name} {what}: off by {difference}"
        assert optimizer._now.source.samples(name) == SAMPLES, f"{name} {what}"


@pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_are_exact(name: str, make: type[Any]) -> None:
    case = MODELS[name]
    model = case.make().double().train()
    with torch.no_grad():
        for parameter in model.parameters():  # zeros and ones hide mistakes
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    optimizer = make(model)
    for step in range(10):
        inputs, target = batch(case)
        if step in (0, 9):
            c = contributions(model, case, inputs, target)
        optimizer.zero_grad()
        losses(model, inputs, target).sum().backward()
        if step in (0, 9):
            assert_exact(optimizer, c, f"at step {step}")
        optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
