"""F.multi_head_attention_forward on a module's own parameters, as CLIP's pooling and WavLM call it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equivalence.by_sample import assert_exact

N, T, E, HEADS = 5, 4, 6, 2
both_moments = pytest.mark.parametrize("elementwise", [True, False], ids=["elementwise", "total"])


class Attention(nn.Module):
    """Without a bias of the keys, to which attention does not react."""

    def __init__(self, separate: bool, **options: Any) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(E, E) for _ in range(4))
        self.k.bias = None
        self.joint = None if separate else nn.Parameter(torch.randn(3 * E, E))
        self.separate, self.options = separate, options

    def forward(self, x: Tensor, memory: Tensor, **masks: Tensor) -> Tensor:
        own = {"q_proj_weight": self.q.weight, "k_proj_weight": self.k.weight, "v_proj_weight": self.v.weight}
        bias = torch.cat([self.q.bias, torch.zeros_like(self.q.bias), self.v.bias])
        y, seen = F.multi_head_attention_forward(
            x.transpose(0, 1), memory.transpose(0, 1), memory.transpose(0, 1), E, HEADS, self.joint, bias, None, None,
            False, 0.3, self.out.weight, self.out.bias, training=self.training, use_separate_proj_weight=self.separate,
            **{**masks, **self.options}, **(own if self.separate else {}),
        )  # fmt: skip
        y = y.transpose(0, 1).tanh()
        return y if seen is None else y * seen.flatten(1).square().sum(1)[:, None, None]


MASKS: dict[str, dict[str, Tensor]] = {
    "none": {},
    "padding": {"key_padding_mask": torch.arange(T) >= torch.tensor([4, 3, 1, 4, 2])[:, None]},
    "causal": {"attn_mask": torch.ones(T, T).triu(1).bool()},
    "of each head": {"attn_mask": torch.linspace(-1, 1, N * HEADS * T * T, dtype=torch.float64).view(-1, T, T)},
    "both": {
        "key_padding_mask": torch.arange(T) >= torch.tensor([4, 3, 2, 4, 2])[:, None],
        "attn_mask": torch.linspace(-1, 1, T * T, dtype=torch.float64).view(T, T),
    },
}
WEIGHTS: list[dict[str, bool]] = [
    {"need_weights": False},
    {"need_weights": True},
    {"need_weights": True, "average_attn_weights": False},
]


@both_moments
@pytest.mark.parametrize("options", WEIGHTS, ids=str)
@pytest.mark.parametrize("separate", [False, True], ids=["joint", "separate"])
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning")
def test_is_exact(masks: dict[str, Tensor], separate: bool, options: dict[str, bool], elementwise: bool) -> None:
    """With dropout, of which the same numbers are drawn."""
    model = Attention(separate, **options).double()
    for linear in () if separate else (model.q, model.k, model.v):
        linear.weight.requires_grad_(False)
    x, memory = torch.randn(N, T, E).double(), torch.randn(N, T, E).double()
    assert_exact(model, lambda m: m(x, memory, **masks).square().flatten(1).sum(1), elementwise)


def test_a_causal_mask_may_be_said_in_words() -> None:
    model = Attention(True, need_weights=False, is_causal=True, attn_mask=torch.ones(T, T).triu(1).bool()).double()
    x = torch.randn(N, T, E).double()
    assert_exact(model, lambda m: m(x, x).square().flatten(1).sum(1), True)
