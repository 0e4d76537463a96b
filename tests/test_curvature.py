"""Curvature: against exact Hessians, and against finite differences where there are too many parameters for those."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato import kernels
from sfumato.errors import InvalidArgument
from sfumato.models.wide_resnet import wide_resnet
from sfumato.objective import Objective, cross_entropy, squared_error
from sfumato.warmup import top_eigenvalues, trace
from sfumato.warmup.curvature import _Hessian


def batch(rows: int = 12, inputs: int = 3, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(0)
    return torch.from_numpy(rng.normal(size=(rows, inputs))).to(dtype), torch.arange(rows) % 3


def objective(dtype: torch.dtype = torch.float64) -> Objective:
    torch.manual_seed(0)
    return Objective(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype), cross_entropy)


def exact(wanted: Objective, rows: Any) -> np.ndarray[Any, Any]:
    """The whole Hessian of the mean loss, by torch's own means."""
    params = wanted.parameters()
    names, sizes = list(params), [p.numel() for p in params.values()]

    def mean(flat: Tensor) -> Tensor:
        parts = zip(names, flat.split(sizes), strict=True)
        return wanted.losses({name: part.reshape(params[name].shape) for name, part in parts}, rows).mean()

    flat = torch.cat([p.reshape(-1) for p in params.values()])
    hessian = torch.autograd.functional.hessian(mean, flat).numpy()
    assert np.allclose(hessian, hessian.T)
    return hessian


def test_eigenvalues_are_those_of_the_whole_hessian() -> None:
    wanted, rows = objective(), batch()
    expected = np.linalg.eigvalsh(exact(wanted, rows))[::-1]
    found = top_eigenvalues(wanted, wanted.parameters(), rows, 5, tolerance=1e-10)
    assert found == pytest.approx(expected[:5].tolist(), rel=1e-8)
    assert expected[-1] < -0.01  # the least is negative here: the largest are wanted, not the longest
    every = top_eigenvalues(wanted, wanted.parameters(), rows, len(expected) - 1, tolerance=1e-10)
    assert every == pytest.approx(expected[:-1].tolist(), rel=1e-7, abs=1e-9)


def test_float32_is_enough_for_the_usual_tolerance() -> None:
    rows = batch(dtype=torch.float32)
    wanted = objective(torch.float32)
    expected = np.linalg.eigvalsh(exact(objective(), (rows[0].double(), rows[1])))[::-1]
    assert top_eigenvalues(wanted, wanted.parameters(), rows) == pytest.approx(expected[:5].tolist(), rel=1e-4)


def test_logistic_regression_has_the_hessian_of_the_textbook() -> None:
    """X' diag(p (1 - p)) X / n."""
    x, _ = batch(30)
    y = torch.arange(30) % 2
    torch.manual_seed(0)
    module = nn.Linear(3, 1, bias=False).double()

    def loss(module: nn.Module, rows: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(module(rows[0])[:, 0], rows[1].double(), reduction="none")

    wanted = Objective(module, loss)
    p = 1 / (1 + np.exp(-(x.numpy() @ module.weight.detach().numpy()[0])))
    hessian = x.numpy().T @ np.diag(p * (1 - p)) @ x.numpy() / 30
    expected = np.linalg.eigvalsh(hessian)[::-1]
    assert top_eigenvalues(wanted, wanted.parameters(), (x, y), 2) == pytest.approx(expected[:2].tolist(), rel=1e-6)
    mean, error = trace(wanted, wanted.parameters(), (x, y), samples=500)
    assert 0 < error < 0.1 * mean
    assert abs(mean - np.trace(hessian)) < 4 * error


def test_the_trace_is_as_close_as_it_says() -> None:
    """Many estimates: their spread is their standard error's size, and they are right on average."""
    wanted, rows = objective(), batch()
    expected = float(np.trace(exact(wanted, rows)))
    estimates = [trace(wanted, wanted.parameters(), rows, samples=8, seed=seed) for seed in range(40)]
    scores = np.array([(found.mean - expected) / found.standard_error for found in estimates])
    spread = np.std([found.mean for found in estimates])
    typical = math.sqrt(np.mean([found.standard_error**2 for found in estimates]))
    assert 0.7 < spread / typical < 1.4
    assert abs(np.mean([found.mean for found in estimates]) - expected) < 4 * typical / math.sqrt(40)
    assert 0.3 < np.abs(scores).mean() < 1.7


def test_micro_batches_change_nothing() -> None:
    wanted, rows = objective(), batch()
    whole = trace(wanted, wanted.parameters(), rows, samples=3)
    parts = trace(wanted, wanted.parameters(), rows, samples=3, micro_batch=5)
    assert parts == pytest.approx(whole, rel=1e-12)
    eigenvalues = [
        top_eigenvalues(wanted, wanted.parameters(), rows, 2, micro_batch=size, tolerance=1e-9) for size in (5, 12)
    ]
    assert eigenvalues[0] == pytest.approx(eigenvalues[1], rel=1e-8)


def test_only_the_given_parameters_are_differentiated_by() -> None:
    wanted, rows = objective(), batch()
    last = {name: p for name, p in wanted.parameters().items() if name.startswith("2.")}
    hessian = exact(wanted, rows)[16:, 16:]  # after the first layer's 16
    expected = np.linalg.eigvalsh(hessian)[::-1]
    assert top_eigenvalues(wanted, last, rows, 3, tolerance=1e-9) == pytest.approx(expected[:3].tolist(), rel=1e-7)


@pytest.mark.parametrize("switched", [kernels.Use.AUTO, kernels.Use.INTERPRETER])
def test_a_wide_resnet_is_differentiated_twice(switched: kernels.Use) -> None:
    """Its layers' kernels are not: they are left out, whatever was wanted outside. By central differences of gradients.

    On a CPU in float64; the kernels take float32, for which a coarser comparison has to do.
    """
    torch.manual_seed(0)
    images, labels = torch.rand(6, 3, 8, 8), torch.arange(6) % 10
    model = wide_resnet(10, 1, groups=4)
    vector = np.random.default_rng(0).normal(size=sum(p.numel() for p in model.parameters()))
    vector /= np.linalg.norm(vector)
    products = []
    for dtype in (torch.float32, torch.float64):
        wanted = Objective(model.to(dtype), cross_entropy)
        with kernels.using(switched):
            hessian = _Hessian(wanted, wanted.parameters(), (images.to(dtype), labels), 4)
            with hessian.measured():
                products.append(hessian.times(vector))

    params = wanted.parameters()  # float64 now

    def gradient(step: float) -> np.ndarray[Any, Any]:
        moves = torch.from_numpy(vector).split([p.numel() for p in params.values()])
        pairs = zip(params.items(), moves, strict=True)
        moved = {name: (p + step * move.reshape(p.shape)).requires_grad_() for (name, p), move in pairs}
        losses = wanted.losses(moved, (images.double(), labels))
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(losses.mean(), list(moved.values()))]).numpy()

    differences = (gradient(1e-5) - gradient(-1e-5)) / 2e-5
    size = np.linalg.norm(differences)
    assert np.linalg.norm(products[1] - differences) < 1e-4 * size
    assert np.linalg.norm(products[0] - differences) < 2e-2 * size


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(3, 12), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t[:, None] for t in self.qkv(x).chunk(3, -1))
        result: Tensor = self.out(F.scaled_dot_product_attention(q, k, v)[:, 0]).mean(1)
        return result


def test_attention_is_differentiated_twice() -> None:
    torch.manual_seed(0)
    wanted = Objective(Attention().double(), cross_entropy)
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 4, 3))), torch.arange(5) % 3
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = np.linalg.eigvalsh(exact(wanted, rows))[::-1]
    found = top_eigenvalues(wanted, wanted.parameters(), rows, 2, tolerance=1e-9)
    assert found == pytest.approx(expected[:2].tolist(), rel=1e-7)


def test_a_loss_without_curvature() -> None:
    module = nn.Linear(3, 1).double()
    flat = Objective(module, lambda m, x: m(x)[:, 0])
    assert trace(flat, flat.parameters(), batch()[0], samples=2) == (0.0, 0.0)
    assert top_eigenvalues(flat, flat.parameters(), batch()[0], 2) == [0.0, 0.0]
    half = Objective(module, lambda m, x: m.weight.square().sum() + 0 * x[:, 0])  # the bias is not used at all
    mean, error = trace(half, half.parameters(), batch()[0], samples=2)
    assert mean == pytest.approx(6.0)
    assert error == pytest.approx(0.0, abs=1e-12)


def test_dropout_is_off_and_modes_come_back() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 3)).double()
    module[0].eval()
    wanted = Objective(module, cross_entropy)
    assert trace(wanted, wanted.parameters(), batch(), samples=2) == trace(
        wanted, wanted.parameters(), batch(), samples=2
    )
    assert [part.training for part in module.modules()] == [True, False, True, True]
    before = wanted.parameters()["0.weight"].clone()
    with pytest.raises(InvalidArgument, match="one value per example"):
        trace(Objective(module, lambda m, b: cross_entropy(m, b).mean()), wanted.parameters(), batch())
    assert [part.training for part in module.modules()] == [True, False, True, True]
    assert torch.equal(wanted.parameters()["0.weight"], before)
    assert all(p.grad is None for p in module.parameters())


def test_autocast_is_left_out() -> None:
    rows = batch(dtype=torch.float32)
    plain = objective(torch.float32)
    low = Objective(plain.module, plain.loss, torch.bfloat16)
    assert trace(low, low.parameters(), rows, samples=2) == trace(plain, plain.parameters(), rows, samples=2)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda o, p, b: top_eigenvalues(o, p, b, 0), "count=0"),
        (lambda o, p, b: top_eigenvalues(o, p, b, 31), "count=31 .* from 1 to 30"),
        (lambda o, p, b: top_eigenvalues(o, p, b, tolerance=-1.0), "tolerance=-1.0"),
        (lambda o, p, b: top_eigenvalues(o, p, b, restarts=0), "restarts=0"),
        (lambda o, p, b: top_eigenvalues(o, p, b, micro_batch=0), "micro_batch=0"),
        (lambda o, p, b: top_eigenvalues(o, {}, b), "params is empty"),
        (lambda o, p, b: trace(o, p, b, samples=1), "samples=1"),
        (lambda o, p, b: trace(o, p, (b[0][:0], b[1][:0])), "batch has no rows"),
    ],
)
def test_bad_arguments_are_named(call: Any, named: str) -> None:
    wanted = objective()
    with pytest.raises(InvalidArgument, match=named):
        call(wanted, wanted.parameters(), batch())


def test_a_parameter_alone_has_no_count_to_ask_for() -> None:
    wanted = Objective(nn.Linear(1, 1, bias=False).double(), squared_error)
    ones = torch.ones(2, 1, dtype=torch.float64)
    with pytest.raises(InvalidArgument, match="count=1"):
        top_eigenvalues(wanted, wanted.parameters(), (ones, ones), 1)
    assert trace(wanted, wanted.parameters(), (ones, ones), samples=2) == (2.0, 0.0)


def test_what_is_not_finite_is_said() -> None:
    wanted = objective()
    diverged = {name: p * math.inf for name, p in wanted.parameters().items()}
    with pytest.raises(InvalidArgument, match="not finite"):
        top_eigenvalues(wanted, diverged, batch())
    with pytest.raises(InvalidArgument, match="not finite"):
        trace(wanted, diverged, batch())


def test_iterations_end() -> None:
    """A spectrum that crowds at its end, which Lanczos iterations hardly tell apart."""
    d = torch.cos(torch.linspace(0, math.pi, 100, dtype=torch.float64))
    wanted = Objective(nn.Linear(100, 1, bias=False).double(), lambda m, x: (d * m.weight[0] ** 2).sum() / 2 + x[:, 0])
    params, rows = wanted.parameters(), torch.zeros(1, 1, dtype=torch.float64)
    with pytest.raises(InvalidArgument, match="tolerance=1e-12 was not reached in 2 restarts"):
        top_eigenvalues(wanted, params, rows, tolerance=1e-12, restarts=2)
    assert top_eigenvalues(wanted, params, rows, tolerance=1e-12) == pytest.approx(d[:5].tolist(), rel=1e-9)
