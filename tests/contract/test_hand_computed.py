"""Two steps of each optimizer, computed by hand.

The loss is the sum of the outputs of a Linear without bias, so that c_i, what sample i adds to the gradient, is the
sample itself. All runs start at w = (1, 2) with υ = 1/2; <a, b> = a1 b1 / D1 + a2 b2 / D2.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

from autoopt import AutoAdaGrad, AutoAdam, AutoSGD


def model(*weight: float) -> nn.Linear:
    layer = nn.Linear(len(weight), 1, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([weight]))
    return layer


def step(layer: nn.Linear, optimizer: Any, *samples: tuple[float, ...]) -> None:
    optimizer.zero_grad()
    layer(torch.tensor(samples, dtype=torch.float64)).sum().backward()
    optimizer.step()


def check(layer: nn.Linear, optimizer: Any, weight: list[str], lr: str, momentum: str, noise: str) -> None:
    assert layer.weight.flatten().tolist() == pytest.approx([float(Fraction(w)) for w in weight], rel=1e-12)
    tuned = optimizer.tuned()["weight"]
    assert tuned.lr == pytest.approx(float(Fraction(lr)), rel=1e-12)
    assert tuned.momentum == pytest.approx(float(Fraction(momentum)), rel=1e-12)
    assert tuned.noise == pytest.approx(float(Fraction(noise)), rel=1e-12)


def test_sgd() -> None:
    layer = model(1, 2)
    optimizer = AutoSGD(layer, rule="paper", smoothing=0.5, start=(0.5, 0.0))

    # Step 1, N = 2: g = (4, 2), <g,g> = 20, sum <c,c> = 10 + 2 = 12, V = 2 (12 - 20/2) = 4. There is no ĝ_0, so
    # γ = (4/20, 0) = (1/5, 0) and γ_E = 1/2 (1/5, 0) + 1/2 (1/2, 0) = (7/20, 0): α = 13/20, β = 0.
    # ĝ = 13/20 (4, 2) = (13/5, 13/10), w = (1 - 13/5, 2 - 13/10) = (-8/5, 7/10).
    step(layer, optimizer, (3, 1), (1, 1))
    check(layer, optimizer, ["-8/5", "7/10"], lr="13/20", momentum="0", noise="1/5")

    # Step 2, N = 2: g = (2, 0), gg = 4, sum <c,c> = 17/8, V = 2 (17/8 - 2) = 1/4, m = (13/5, 13/10): gm = 26/5,
    # mm = 169/20, det = 4 * 169/20 - (26/5)^2 = 169/25.
    # γ1 = 1/4 (169/20 - 26/5) 25/169 = 25/208, γ2 = 1/4 * 26/5 * 25/169 = 5/26; both feasible.
    # γ_E = (25/416 + 7/40, 5/52) = (489/2080, 5/52): α = 1591/2080, β = 5/52 / α = 200/1591.
    # ĝ = (1 - 489/2080 - 200/2080) g + 5/52 m = 1391/2080 (2, 0) + (1/4, 1/8) = (127/80, 1/8).
    # w = (-8/5 - 127/80, 7/10 - 1/8) = (-51/16, 23/40).
    step(layer, optimizer, (1, 0.25), (1, -0.25))
    check(layer, optimizer, ["-51/16", "23/40"], lr="1591/2080", momentum="200/1591", noise="1/16")


def test_adam() -> None:
    layer = model(1, 2)
    optimizer = AutoAdam(layer, rule="paper", smoothing=0.5, start=(0.5, 0.25), beta2=0.5, eps=1.0)

    # Step 1, N = 2: g = (5, 1), v = g^2 / 2, v / (1 - 1/2) = g^2, D = (5 + 1, 1 + 1) = (6, 2).
    # <g,g> = 25/6 + 1/2 = 14/3, sum <c,c> = (9/6 + 1/2) + 4/6 = 8/3, V = 2 (8/3 - 7/3) = 2/3.
    # No ĝ_0: γ = (2/3 * 3/14, 0) = (1/7, 0).
    # γ_E = (1/14 + 1/4, 1/8) = (9/28, 1/8): α = 19/28, β = 1/8 * 28/19 = 7/38.
    # ĝ = (1 - 9/28 - 1/8) g = 31/56 (5, 1); it is divided by D (1 - β) = 31/38 D.
    # w = (1 - 31/56 * 38/31 * 5/6, 2 - 31/56 * 38/31 * 1/2) = (1 - 95/168, 2 - 19/56) = (73/168, 93/56).
    step(layer, optimizer, (3, 1), (2, 0))
    check(layer, optimizer, ["73/168", "93/56"], lr="19/28", momentum="7/38", noise="1/7")

    # Step 2, N = 2: g = (1, 1), v = 1/2 * g_1^2 / 2 + g^2 / 2, v / (1 - 1/4) = (g_1^2 + 2 g^2) / 3 = (9, 1),
    # D = (3 + 1, 1 + 1) = (4, 2).
    # gg = 3/4, sum <c,c> = 1/16 + 9/32 + 1/16 + 1/32 = 7/16, V = 2 (7/16 - 3/8) = 1/8. m = 31/56 (5, 1):
    # gm = 31/56 * 7/4 = 31/32, mm = (31/56)^2 * 27/4 = 25947/12544, det = (31/56)^2 (3/4 * 27/4 - 49/16) = 961/1568.
    # γ1 = 1/8 (25947/12544 - 31/32) 1568/961 = 445/1984, γ2 = 1/8 * 31/32 * 1568/961 = 49/248; both feasible.
    # γ_E = (445/3968 + 9/56, 49/496 + 1/16) = (7579/27776, 5/31): α = 20197/27776, β = 5/31 / α = 4480/20197.
    # ĝ = (1 - 7579/27776 - 4480/27776) g + 5/31 m = 15717/27776 (1, 1) + 5/56 (5, 1) = (907/896, 587/896);
    # it is divided by D (1 - 7/38 * 4480/20197) = 368063/383743 D.
    # w = (73/168 - 907/3584 * 383743/368063, 93/56 - 587/1792 * 383743/368063).
    step(layer, optimizer, (0.5, 0.75), (0.5, 0.25))
    weight = ["675425633/3957413376", "870098347/659568896"]
    check(layer, optimizer, weight, lr="20197/27776", momentum="4480/20197", noise="1/6")


def test_adagrad() -> None:
    layer = model(1, 2)
    optimizer = AutoAdaGrad(layer, rule="paper", smoothing=0.5, start=(0.5, 0.0), eps=1.0)

    # Step 1, N = 2, both samples the same: V = 0, γ = (0, 0), γ_E = (1/4, 0): α = 3/4, β = 0.
    # g = (4, 12), D = (4 + 1, 12 + 1) = (5, 13), ĝ = (3, 9), w = (1 - 3/5, 2 - 9/13) = (2/5, 17/13).
    step(layer, optimizer, (2, 6), (2, 6))
    check(layer, optimizer, ["2/5", "17/13"], lr="3/4", momentum="0", noise="0")

    # Step 2, N = 3: g = (3, 5), D = (sqrt(16 + 9) + 1, sqrt(144 + 25) + 1) = (6, 14). gg = 9/6 + 25/14 = 23/7,
    # sum <c,c> = (9/4 + 1/4 + 1)/6 + (4 + 4 + 1)/14 = 103/84, V = 3/2 (103/84 - 23/21) = 11/56. m = (3, 9):
    # gm = 9/6 + 45/14 = 33/7, mm = 9/6 + 81/14 = 51/7, det = (23 * 51 - 33^2)/49 = 12/7.
    # γ1 = 11/56 * 18/7 * 7/12 = 33/112, γ2 = 11/56 * 33/7 * 7/12 = 121/224; both feasible.
    # γ_E = (33/224 + 1/8, 121/448) = (61/224, 121/448): α = 163/224, β = 121/448 / α = 121/326.
    # ĝ = 205/448 (3, 5) + 121/448 (3, 9) = (489/224, 151/32).
    # w = (2/5 - 489/1344, 17/13 - 151/448) = (81/2240, 5653/5824).
    step(layer, optimizer, (1.5, 2), (0.5, 2), (1, 1))
    check(layer, optimizer, ["81/2240", "5653/5824"], lr="163/224", momentum="121/326", noise="11/184")


def test_one_weight_has_no_momentum() -> None:
    """With a single weight m is parallel to g, A is singular, and the rate alone is solved for."""
    layer = model(8)
    optimizer = AutoSGD(layer, rule="paper", smoothing=0.0)
    step(layer, optimizer, (1,), (3,))  # g = 4, gg = 16, V = 2 (10 - 8) = 4, γ1 = 1/4, w = 8 - 3/4 * 4
    check(layer, optimizer, ["5"], lr="3/4", momentum="0", noise="1/4")
    step(layer, optimizer, (1,), (1,))  # V = 0, γ1 = 0, w = 5 - 2
    check(layer, optimizer, ["3"], lr="1", momentum="0", noise="0")


def test_noise_caps_the_rate_at_one_thousandth() -> None:
    layer = model(8)
    optimizer = AutoSGD(layer, rule="paper", smoothing=0.0)
    step(layer, optimizer, (5,), (-4,))  # g = 1, V = 2 (41 - 1/2) = 81, γ1 = min(81, 0.999), w = 8 - 0.001
    check(layer, optimizer, ["7999/1000"], lr="1/1000", momentum="0", noise="81")


def test_lr_multiplies_the_step() -> None:
    layer = model(8)
    optimizer = AutoSGD(layer, rule="paper", smoothing=0.0, lr=0.5)
    step(layer, optimizer, (1,), (3,))
    check(layer, optimizer, ["13/2"], lr="3/8", momentum="0", noise="1/4")
