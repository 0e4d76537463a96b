"""The same code on a GPU: the engine, the probe and the door give what they give on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_map

from sfumato import Budget, Clip, GradientMean, Objective, Planned, Private, cross_entropy
from sfumato.gradients import Performance, clipped_sum
from tests.gradients import layers, oracle
from tests.gradients.test_engine import clip_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Using padding='same'"),
]


@pytest.mark.parametrize("name", layers.TABLE)
def test_layer(name: str) -> None:
    objective, batch = layers.make(name, torch.float64)
    params = objective.parameters()
    for mode in ("plain", "origin+scale"):
        clip = clip_for(mode, params, 0.5)
        truth = clipped_sum(objective, params, batch, clip=clip)
        moved, rows = Objective(objective.module.cuda(), objective.loss), tree_map(lambda t: t.cuda(), batch)
        on_gpu = {n: p.cuda() for n, p in params.items()}
        here = clip_for(mode, on_gpu, 0.5)
        for performance in (Performance(), Performance(ghost=False, micro_batch=2), Performance(only_fallback=True)):
            ours = clipped_sum(moved, on_gpu, rows, clip=here, performance=performance)
            allowed = 1e-6 if name == "weight-norm" else 1e-9  # torch's own CUDA kernel for it sums in float32
            assert oracle.relative_error({n: t.cpu() for n, t in ours.items()}, truth) <= allowed
        objective.module.cpu()


def test_door() -> None:
    """Data on the host, model on the GPU: the answer comes back on the GPU, noisy and charged."""
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 2).cuda()
    objective = Objective(model, cross_entropy)
    data = torch.randn(500, 20), torch.randint(0, 2, (500,))
    private = Private(data, name="on the host", size=500, objective=objective, budget=Budget(5.0, 1e-5))
    private.plan(Planned(GradientMean, 2.0, private.poisson(50), 3))
    for _ in range(3):
        answer = private.ask(GradientMean(objective.parameters(), Clip(1.0)))
        assert all(t.device.type == "cuda" and bool(torch.isfinite(t).all()) for t in answer.values())


def test_a_public_gradient_that_is_replayed_is_the_gradient() -> None:
    from sfumato.models.wide_resnet import wide_resnet
    from sfumato.objective import cross_entropy
    from sfumato.public import Public

    torch.manual_seed(0)
    objective = Objective(wide_resnet(10, 1).cuda(), cross_entropy, autocast=torch.bfloat16)
    images, labels = torch.randint(256, (64, 3, 16, 16), dtype=torch.uint8).cuda(), torch.arange(64).cuda() % 10
    public = Public((images, labels), objective=objective)
    for step in range(5):  # eager, watched, recorded, replayed with other parameters
        params = {n: p + 0.01 * step for n, p in objective.parameters().items()}
        fresh = Public((images, labels), objective=objective).gradient(params)
        again = public.gradient(params)
        assert float((again - fresh).norm()) < 1e-2 * float(fresh.norm())


def test_views_inside_the_door_leave_the_gpus_generator_alone() -> None:
    """Also where a recording is replayed; and every answer has views of its own."""
    drawn: list[torch.Tensor] = []

    def jitter(batch: object) -> object:
        x, y = batch  # type: ignore[misc]
        noise = torch.rand(len(x), 1, device=x.device)
        drawn.append(noise)
        return x * (1 + noise), y

    torch.manual_seed(0)
    objective = Objective(torch.nn.Linear(4, 2).cuda(), cross_entropy)
    data = torch.randn(64, 4).cuda(), torch.arange(64).cuda() % 2
    private = Private(data, name="d", size=64, objective=objective, budget=Budget(9.0, 1e-3))
    private.plan(Planned(GradientMean, 5.0, private.everyone(), 10))
    question = GradientMean(objective.parameters(), Clip(1.0), views=2, augment=jitter)
    before, seen = torch.cuda.get_rng_state(), []
    for _ in range(5):
        private.ask(question)
        seen.append(drawn[-1].sum().item())
    assert torch.equal(before, torch.cuda.get_rng_state())
    assert len(set(seen)) > 1


def test_made_up_integers_that_a_model_has_no_place_for_do_not_end_the_gpus_use() -> None:
    """An index out of range is an error on the CPU, and on a GPU the end of everything in the process."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(3, 4), torch.nn.Flatten(), torch.nn.Linear(8, 2)).cuda()
    objective = Objective(model, cross_entropy)
    for rows in (0, 30):
        data = torch.randint(0, 3, (rows, 2)), torch.arange(rows) % 2
        private = Private(data, name="d", size=64, objective=objective, budget=Budget(9.0, 1e-3))
        for _ in range(4):
            question = GradientMean(objective.parameters(), Clip(1.0))
            answer = private.ask(question, noise=20.0, sampler=private.poisson(10))
            assert all(bool(torch.isfinite(t).all()) for t in answer.values())
