"""V̂ is unbiased (Appendix A), and the estimated γ approaches the true oracle as the batch grows."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from autoopt import AutoSGD
from autoopt.oracle import solve, true_oracle, variance

P = 6  # parameters


def problem() -> tuple[Tensor, Tensor]:
    """A true gradient and a Cholesky factor of the covariance of one sample's gradient, far from diagonal."""
    gradient = torch.tensor([1.0, -0.5, 2.0, 0.0, 0.3, -1.5], dtype=torch.float64)
    factor = torch.randn(P, P, dtype=torch.float64)
    return gradient, factor


def metric(kind: str) -> Tensor:
    if kind == "identity":
        return torch.ones(P, dtype=torch.float64)
    return torch.tensor([0.1, 0.5, 1.0, 2.0, 5.0, 0.3], dtype=torch.float64)


def samples(batches: int, N: int, gradient: Tensor, factor: Tensor) -> Tensor:
    """c_i = g^(i) / N, (batches, N, p). The noise is skewed: the estimator needs no normal distribution."""
    noise = torch.empty(batches, N, P, dtype=torch.float64).exponential_() - 1
    return (gradient + noise @ factor.T) / N


def inner(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
    return (a * b / h).sum(-1)


def estimated_variance(c: Tensor, h: Tensor) -> Tensor:
    g = c.sum(1)
    return variance(inner(c, c, h).sum(1), inner(g, g, h), torch.tensor(float(c.shape[1]), dtype=torch.float64))


@pytest.mark.parametrize("kind", ["identity", "diagonal"])
@pytest.mark.parametrize("N", [2, 3, 16])
def test_variance_is_unbiased(N: int, kind: str) -> None:
    batches, h = 20_000, metric(kind)
    gradient, factor = problem()
    estimates = estimated_variance(samples(batches, N, gradient, factor), h)
    truth = ((factor @ factor.T).diagonal() / h).sum() / N  # eq. Vgt: the trace of Ĥ^-1 Cov(g_t)
    standard_error = estimates.std() / batches**0.5
    assert abs(estimates.mean() - truth) <= 3 * standard_error
    assert standard_error < 0.02 * truth  # else the bound above would let a wrong factor N/(N-1) pass for N = 16


def test_variance_is_the_papers_sum_of_squared_differences() -> None:
    gradient, factor = problem()
    h, N = metric("diagonal"), 5
    c = samples(100, N, gradient, factor)
    g = c.sum(1, keepdim=True)
    literal = inner(N * c - g, N * c - g, h).sum(1) / (N * (N - 1))  # eq. Vgt_est
    torch.testing.assert_close(estimated_variance(c, h), literal, rtol=1e-10, atol=0)


def test_equal_samples_have_no_variance() -> None:
    c = torch.full((1, 7, P), 0.1, dtype=torch.float32)  # Σ<c,c> - <g,g>/N is rounding, of either sign
    V = estimated_variance(c, torch.ones(P))
    assert 1e-5 * c.sum(1).square().sum() >= V.abs()


@pytest.mark.parametrize("rule", ["robust", "paper"])
def test_rounding_gives_no_negative_noise(rule: str) -> None:
    """Equal samples: Σ<c,c> - <g,g>/N is rounding, of either sign."""
    model = nn.Linear(5, 3)
    optimizer = AutoSGD(model, rule=rule)
    for _ in range(30):
        optimizer.zero_grad()
        model(torch.randn(1, 5).expand(7, 5)).square().mean().backward()
        optimizer.step()
        for name, chosen in optimizer.tuned().items():
            assert 0 <= chosen.noise < 1e-5, name
            assert chosen.lr >= 0, name


def expected_loss(gamma: Tensor, g: Tensor, m: Tensor, gradient: Tensor, hessian: Tensor, h: Tensor) -> Tensor:
    """Mean over draws g of Ĵ(w_{t+1}) - J(w_t), eq. Taylor-3, after the update with γ; one value for each γ."""
    first, second = gamma[:, 0, None, None], gamma[:, 1, None, None]
    d = -((1 - first - second) * g + second * m) / h
    return (d @ gradient + 0.5 * ((d @ hessian) * d).sum(-1)).mean(-1)


@pytest.mark.parametrize("kind", ["identity", "diagonal"])
def test_true_oracle_minimises_the_expected_loss(kind: str) -> None:
    """Brute force: over draws whose mean and covariance are exactly ḡ and Σ, no γ around γ_O is better."""
    h = metric(kind)
    gradient, factor = problem()
    root = torch.randn(P, P, dtype=torch.float64)
    hessian = root @ root.T + torch.eye(P, dtype=torch.float64)
    m = gradient + torch.randn(P, dtype=torch.float64)
    directions = P**0.5 * factor.T
    g = torch.cat([gradient + directions, gradient - directions])  # 2p points with mean ḡ and covariance L L^T
    gamma = true_oracle(gradient, hessian, h, factor @ factor.T, m)

    best = expected_loss(gamma[None], g, m, gradient, hessian, h)
    steps = torch.arange(-20, 21, dtype=torch.float64)
    offsets = torch.cartesian_prod(steps, steps)
    offsets = offsets[offsets.any(1)]
    for width in (0.05, 1e-4):
        assert (expected_loss(gamma + width * offsets, g, m, gradient, hessian, h) > best).all()


def test_true_oracle_by_simulation() -> None:
    """Eq. A_matrix and eq. b_vector with their expectations replaced by means over many draws."""
    h = metric("diagonal")
    gradient, factor = problem()
    hessian = torch.diag(h) + 0.1 * torch.ones(P, P, dtype=torch.float64)
    m = 0.7 * gradient + 0.3
    draws = 200_000
    g = gradient + (torch.empty(draws, P, dtype=torch.float64).exponential_() - 1) @ factor.T
    G = torch.stack([g, g - m], dim=2)
    scaled = G / h[:, None]
    A = torch.einsum("npi,pq,nqj->ij", scaled, hessian, scaled) / draws
    bracket = (g - gradient) + (g / h) @ hessian - g
    b = torch.einsum("npi,np->i", scaled, bracket) / draws
    gamma = true_oracle(gradient, hessian, h, factor @ factor.T, m)
    torch.testing.assert_close(gamma, torch.linalg.solve(A, b), rtol=0.05, atol=0.01)


def estimated_gamma(c: Tensor, m: Tensor, h: Tensor) -> Tensor:
    g = c.sum(1)
    return torch.stack(solve(estimated_variance(c, h), inner(g, g, h), inner(g, m, h), inner(m, m, h)), dim=-1)


@pytest.mark.parametrize("kind", ["identity", "diagonal"])
def test_estimate_approaches_the_oracle_as_the_batch_grows(kind: str) -> None:
    """On a noisy quadratic whose Hessian is the optimizer's metric, eq. oracle is what eq. oracle_est estimates."""
    h = metric(kind)
    gradient, factor = problem()
    across = torch.ones(P, dtype=torch.float64)
    across -= inner(across, gradient, h) / inner(gradient, gradient, h) * gradient
    across *= (inner(gradient, gradient, h) / inner(across, across, h)).sqrt()
    m = 0.8 * gradient + across  # longer than ḡ and far from parallel to it: A is regular and γ feasible
    errors = []  # root mean square, relative to the size of γ_O, which itself falls as the noise does
    for N in (16, 64, 256, 1024):
        truth = true_oracle(gradient, torch.diag(h), h, factor @ factor.T / N, m)
        estimates = estimated_gamma(samples(1000, N, gradient, factor), m, h)
        errors.append(((estimates - truth).square().sum(-1).mean().sqrt() / truth.norm()).item())
    assert all(later < 0.7 * earlier for earlier, later in itertools.pairwise(errors)), errors
    assert errors[-1] < 0.2
