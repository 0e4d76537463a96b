"""Plain training on public data: it is the textbook loop, and what is added to it does what its paper says."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from sfumato import kernels
from sfumato.augment import TRIVIAL, Augmentation, AutoAugment, Chain, CutMix, recordable
from sfumato.averages import Ema
from sfumato.errors import InvalidArgument
from sfumato.generators import own_generators
from sfumato.gradients import Gradient
from sfumato.models.wide_resnet import wide_resnet
from sfumato.objective import Objective, cross_entropy, squared_error
from sfumato.public import Public
from sfumato.warmup import Sam, rotation_pretrain, top_eigenvalues, warm_up
from sfumato.warmup.rotation import rotations

SGD = partial(torch.optim.SGD, lr=0.1)


def network(seed: int = 0, outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def rows(count: int = 20, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(size=(count, 4)))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def by_hand(
    module: nn.Module, public: Public, make: Callable[[Any], torch.optim.Optimizer], steps: int, batch_size: int
) -> list[float]:
    """The loop that everybody writes, with torch's own schedule."""
    optimizer = make(module.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    losses: list[float] = []
    while len(losses) < steps:
        for x, y in public.batches(batch_size, shuffle=True):
            if len(x) == batch_size and len(losses) < steps:
                optimizer.zero_grad()
                loss = F.cross_entropy(module(x), y)
                loss.backward()
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
    return losses


# ------------------------------------------------------------------------------------------------ the loop


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=5e-4), {}),
        (partial(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=5e-4), {"learning_rate": 0.3}),
        (partial(torch.optim.AdamW, lr=0.01), {"optimizer": partial(torch.optim.AdamW, lr=0.01)}),
    ],
)
def test_it_is_the_loop_that_everybody_writes(make: Any, options: dict[str, Any]) -> None:
    ours, theirs = network(), network()
    losses = warm_up(Objective(ours, cross_entropy), Public(rows(), seed=1), steps=17, batch_size=6, **options)
    expected = by_hand(theirs, Public(rows(), seed=1), make, 17, 6)
    # torch's scheduler computes the cosine by a recurrence, hence not to the last bit
    assert losses == pytest.approx(expected, rel=1e-12)
    assert torch.allclose(flat(ours), flat(theirs), rtol=1e-11, atol=1e-13)
    assert not torch.allclose(flat(ours), flat(network()), rtol=1e-2)


def test_on_all_rows_at_a_constant_rate_it_is_gradient_descent_to_the_last_bit() -> None:
    """Three rows are fewer than a batch of ten, and one step is before the cosine has begun to fall."""
    x, y = rows(3)
    ours, theirs = network(), network()
    public = Public((x, y), seed=0)
    order = np.random.default_rng(0).permutation(3)
    (loss,) = warm_up(Objective(ours, cross_entropy), public, steps=1, batch_size=10, optimizer=SGD)
    mean = F.cross_entropy(theirs(x[order]), y[order], reduction="none").mean()
    mean.backward()
    with torch.no_grad():
        for p in theirs.parameters():
            assert p.grad is not None
            p.add_(p.grad, alpha=-0.1)
    assert loss == mean.item()
    assert torch.equal(flat(ours), flat(theirs))


class Watched(torch.optim.SGD):
    """Plain SGD that notes its learning rates."""

    def __init__(self, params: Any, rates: list[list[float]], first: Any = 0.1) -> None:
        ps = list(params)
        super().__init__([{"params": ps[:2], "lr": first}, {"params": ps[2:], "lr": 1.0}], lr=first)
        self.rates = rates

    def step(self, closure: Any = None) -> None:
        self.rates.append([float(group["lr"]) for group in self.param_groups])
        super().step(closure)


@pytest.mark.parametrize("first", [0.1, torch.tensor(0.1, dtype=torch.float64)])
def test_every_rate_falls_along_half_a_cosine(first: Any) -> None:
    rates: list[list[float]] = []
    make = partial(Watched, rates=rates, first=first)
    warm_up(Objective(network(), cross_entropy), Public(rows(), seed=0), steps=4, batch_size=5, optimizer=make)
    shares = [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]
    assert np.allclose(rates, [[0.1 * share, share] for share in shares], rtol=1e-12)


def test_passes_show_every_row_once_and_drop_the_ragged_rest() -> None:
    seen: list[Tensor] = []

    def note(batch: Any) -> Any:
        seen.append(batch[0])
        return batch

    x, y = rows(11)
    warm_up(Objective(network(), cross_entropy), Public((x, y), seed=0), steps=6, batch_size=5, augment=note)
    assert [len(part) for part in seen] == [5] * 6
    passes = [torch.cat(seen[at : at + 2]) for at in (0, 2, 4)]
    assert all(len(torch.unique(one, dim=0)) == 10 for one in passes)
    assert not torch.equal(passes[0], passes[1])


def test_the_generator_of_the_data_resumes() -> None:
    """What follows a warm-up depends on the state that it leaves, and on nothing else."""

    def then(public: Public) -> list[float]:
        return warm_up(Objective(network(), cross_entropy), public, steps=5, batch_size=5)

    public = Public(rows(), seed=3)
    before = public.random_state
    first, second = then(public), then(public)
    assert first != second
    public.random_state = before
    assert then(public) == first
    assert then(public) == second


def test_soft_labels_are_taken_as_they_are() -> None:
    x, y = rows(8)
    weights = torch.tensor([0.7, 0.3], dtype=torch.float64)

    def mixed(batch: Any) -> Any:
        inputs, labels = batch
        hot = F.one_hot(labels, 3).double()
        return inputs, weights[0] * hot + weights[1] * hot.flip(0)

    ours = network()
    (loss,) = warm_up(Objective(ours, cross_entropy), Public((x, y), seed=0), steps=1, optimizer=SGD, augment=mixed)
    order = np.random.default_rng(0).permutation(8)
    y = y[order]
    logits = network()(x[order])
    expected = weights[0] * F.cross_entropy(logits, y) + weights[1] * F.cross_entropy(logits, y.flip(0))
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    assert not torch.equal(flat(ours), flat(network()))


def test_another_loss_is_used_in_place_of_the_objectives() -> None:
    x, _ = rows(8)
    targets = x[:, :3] * 2
    losses = warm_up(
        Objective(network(), cross_entropy), Public((x, targets), seed=0), steps=1, loss=squared_error, batch_size=8
    )
    assert losses == [pytest.approx((network()(x) - targets).square().mean().item(), rel=1e-12)]


def test_the_average_is_what_remains() -> None:
    """An optimiser that notes where it has been, and the average of those places."""
    places: list[dict[str, Tensor]] = []
    ours = network()

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            places.append({name: p.detach().clone() for name, p in ours.named_parameters()})

    average = Ema(dict(network().named_parameters()))
    warm_up(
        Objective(ours, cross_entropy),
        Public(rows(), seed=0),
        steps=7,
        batch_size=5,
        ema=True,
        optimizer=partial(Noting, lr=0.5),
    )
    for t, place in enumerate(places):
        average.update(place, t + 1)
    for name, p in ours.named_parameters():
        assert torch.equal(p, average.weights[name])
        assert not torch.allclose(p, places[-1][name], rtol=1e-4)


def test_frozen_parameters_modes_and_gradients_are_left_alone() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    module[0].requires_grad_(False)
    module.eval()
    module[3].train()
    frozen, trained, mean = (module[0].weight.clone(), module[3].weight.clone(), module[2].running_mean.clone())
    inside: list[bool] = []

    def watching(m: nn.Module, batch: Any) -> Tensor:
        inside.extend(part.training for part in m.modules())
        return cross_entropy(m, batch)

    warm_up(Objective(module, watching), Public(rows(), seed=0), steps=3, batch_size=5)
    assert all(inside)
    assert [part.training for part in module] == [False, False, False, True]
    assert not module.training
    assert torch.equal(module[0].weight, frozen)
    assert not torch.equal(module[3].weight, trained)
    assert not torch.equal(module[2].running_mean, mean)  # as plain training does
    assert int(module[2].num_batches_tracked) == 3
    assert all(p.grad is None for p in module.parameters())


def test_sharpness_moves_running_statistics_once_per_step() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    warm_up(Objective(module, cross_entropy), Public(rows(), seed=0), steps=3, batch_size=5, sharpness=Sam())
    assert int(module[1].num_batches_tracked) == 3


@pytest.mark.parametrize("sharpness", [None, Sam()])
def test_a_parameter_without_a_gradient_stays(sharpness: Sam | None) -> None:
    module = network()
    module.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    warm_up(Objective(module, cross_entropy), Public(rows(), seed=0), steps=3, sharpness=sharpness)
    assert torch.equal(module.get_parameter("unused"), torch.ones(3, dtype=torch.float64))


def test_it_computes_in_the_objectives_precision() -> None:
    seen: list[torch.dtype] = []

    def noting(module: nn.Module, batch: Any) -> Tensor:
        seen.append(module[0](batch[0]).dtype)
        return cross_entropy(module, batch)

    x, y = rows()
    for autocast in (None, torch.bfloat16):
        module = network().float()
        warm_up(
            Objective(module, noting, autocast), Public((x.float(), y)), steps=1, batch_size=5, sharpness=Sam(radius=1)
        )
        assert all(p.dtype == torch.float32 for p in module.parameters())
    assert seen == [torch.float32] * 2 + [torch.bfloat16] * 2  # at the weights and at the moved ones


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"steps": 0}, "steps=0"),
        ({"steps": 2.5}, "steps=2.5"),
        ({"steps": 1, "batch_size": 0}, "batch_size=0"),
        ({"steps": 1, "learning_rate": -1.0}, "learning_rate=-1.0"),
        ({"steps": 1, "learning_rate": math.nan}, "learning_rate=nan"),
        ({"steps": 1, "loss": lambda m, b: cross_entropy(m, b).mean()}, "one value per example"),
    ],
)
def test_a_bad_argument_changes_nothing(options: dict[str, Any], named: str) -> None:
    module = network().eval()
    with pytest.raises(InvalidArgument, match=named):
        warm_up(Objective(module, cross_entropy), Public(rows(), seed=0), **options)
    assert torch.equal(flat(module), flat(network()))
    assert not any(part.training for part in module.modules())
    assert all(p.grad is None for p in module.parameters())


def test_without_trainable_parameters_it_says_so() -> None:
    with pytest.raises(InvalidArgument, match="requires_grad"):
        warm_up(Objective(network().requires_grad_(False), cross_entropy), Public(rows()), steps=1)


def test_the_bar_shows_loss_and_speed(capsys: pytest.CaptureFixture[str]) -> None:
    losses = warm_up(Objective(network(), cross_entropy), Public(rows()), steps=3, batch_size=5, progress=True)
    shown = capsys.readouterr().out
    assert "3/3" in shown
    assert f"loss {losses[-1]:.3f}" in " ".join(shown.split())
    assert "rows/s" in shown.replace("\n", "")


# ------------------------------------------------------------------------------------------------ sharpness


def quadratic(params: Any) -> Gradient:
    """Of w' A w / 2 + w2^4 / 4, a function whose gradient is easily written down."""
    w, v = params["w"], params["v"]
    A = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    return Gradient({"w": A @ w, "v": v**3})


POINT = {
    "w": torch.tensor([1.0, -2.0], dtype=torch.float64),
    "v": torch.tensor([0.5], dtype=torch.float64),
}


def test_the_gradient_is_that_of_the_moved_point() -> None:
    g = np.array([1.0, -3.0, 0.125])
    w = np.array([1.0, -2.0, 0.5]) + 0.3 * g / math.sqrt(1 + 9 + 0.125**2)
    ours = Sam(radius=0.3).gradient(POINT, quadratic)
    expected = [3 * w[0] + w[1], w[0] + 2 * w[1]]
    assert np.allclose(ours["w"], expected, rtol=1e-14)
    assert np.allclose(ours["v"], [w[2] ** 3], rtol=1e-14)


def test_the_adaptive_move_is_that_of_its_paper() -> None:
    """Kwon et al. 2021, equation (9): rho T^2 g / |T g|, T = |w| + eta."""
    w, g = np.array([1.0, -2.0, 0.5]), np.array([1.0, -3.0, 0.125])
    T = np.abs(w) + 0.25
    moved = Sam(radius=0.3, adaptive=True, stabiliser=0.25).moved(POINT, quadratic(POINT))
    there = np.concatenate([moved["w"].detach(), moved["v"].detach()])
    assert np.allclose(there, w + 0.3 * T**2 * g / np.linalg.norm(T * g), rtol=1e-14)


def test_the_move_has_the_radius_for_its_length() -> None:
    module = network()
    objective = Objective(module, cross_entropy)
    params = objective.parameters()
    gradient = Public(rows(), objective=objective).gradient(params)
    for radius in (0.05, 2.0):
        moved = Sam(radius=radius).moved(params, gradient)
        lengths = [float((moved[n] - p).detach().norm()) for n, p in params.items()]
        assert math.hypot(*lengths) == pytest.approx(radius, rel=1e-12)
    still = Gradient({name: torch.zeros_like(p) for name, p in params.items()})
    for adaptive in (False, True):
        moved = Sam(adaptive=adaptive).moved(params, still)
        assert all(torch.equal(moved[name], p) for name, p in params.items())


def test_radius_zero_is_plain_training() -> None:
    plain, adaptive, ordinary, moved = network(), network(), network(), network()
    for module, sharpness in (
        (plain, Sam(radius=0)),
        (adaptive, Sam(radius=0, adaptive=True)),
        (ordinary, None),
        (moved, Sam(radius=0.1)),
    ):
        warm_up(Objective(module, cross_entropy), Public(rows(), seed=0), steps=9, batch_size=5, sharpness=sharpness)
    assert torch.equal(flat(plain), flat(ordinary))
    assert torch.equal(flat(adaptive), flat(ordinary))
    assert not torch.allclose(flat(moved), flat(ordinary), rtol=1e-3)


def test_a_step_of_sharpness_by_hand() -> None:
    """Equation (4) on a network, with autograd by hand; the loss is that of the unmoved weights."""
    x, y = rows(6)
    order = np.random.default_rng(0).permutation(6)
    x, y = x[order], y[order]
    ours, theirs = network(), network()
    public = Public(rows(6), seed=0)
    sharpness = Sam(radius=0.5)
    (loss,) = warm_up(Objective(ours, cross_entropy), public, steps=1, optimizer=SGD, sharpness=sharpness)
    params = list(theirs.parameters())
    mean = F.cross_entropy(theirs(x), y)
    g = torch.autograd.grad(mean, params)
    norm = torch.cat([t.reshape(-1) for t in g]).norm()
    before = [p.detach().clone() for p in params]
    with torch.no_grad():
        for p, t in zip(params, g, strict=True):
            p += 0.5 * t / norm
    g = torch.autograd.grad(F.cross_entropy(theirs(x), y), params)
    expected = torch.cat([(w - 0.1 * t).reshape(-1) for w, t in zip(before, g, strict=True)])
    assert loss == pytest.approx(mean.item(), rel=1e-12)
    assert torch.allclose(flat(ours), expected, rtol=1e-12)


def test_the_adaptive_move_does_not_see_how_layers_are_scaled() -> None:
    """Kwon et al. 2021, theorem 2: a ReLU layer times a, the next one divided by it, is the same network."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False)).double()
    objective = Objective(module, cross_entropy)
    public = Public(rows(), objective=objective)
    a = {"0.weight": 10.0, "2.weight": 0.1}
    params = objective.parameters()
    scaled = {name: a[name] * p for name, p in params.items()}

    def rise(sharpness: Sam, at: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
        moved = sharpness.moved(at, public.gradient(at))
        return moved, float(public.losses(moved).mean())

    adaptive = Sam(radius=0.5, adaptive=True, stabiliser=0.0)
    (here, before), (there, after) = rise(adaptive, params), rise(adaptive, scaled)
    assert before == pytest.approx(after, rel=1e-12)
    assert before > float(public.losses(params).mean()) + 0.01
    for name, p in here.items():
        assert torch.allclose(there[name], a[name] * p, rtol=1e-10)
    assert rise(Sam(radius=0.5), params)[1] != pytest.approx(rise(Sam(radius=0.5), scaled)[1], rel=0.05)


def test_it_leaves_a_sharp_valley_for_its_flattest_place() -> None:
    """Of (u v - 1)^2 every place with u v = 1 is a minimum, of curvature 2 (u^2 + v^2): the least is 4, at u = v."""
    ones = torch.ones(4, 1, dtype=torch.float64)
    curvature = {}
    for sharpness in (None, Sam(radius=0.3)):
        module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
        nn.init.constant_(module[0].weight, 3.0)
        nn.init.constant_(module[1].weight, 0.1)
        objective = Objective(module, squared_error)
        make = partial(torch.optim.SGD, lr=0.05)
        losses = warm_up(objective, Public((ones, ones)), steps=300, optimizer=make, sharpness=sharpness)
        assert losses[-1] < 1e-6
        u, v = (layer.weight.item() for layer in module)
        (found,) = top_eigenvalues(objective, objective.parameters(), (ones, ones), count=1)
        assert found == pytest.approx(2 * (u**2 + v**2), rel=1e-3)
        curvature[sharpness] = found
    assert curvature[None] > 15
    assert 4 - 1e-3 < curvature[Sam(radius=0.3)] < 4.5


def test_what_it_finds_on_digits_is_flatter_at_no_higher_loss() -> None:
    images, labels = digits()
    batch = images[:300].flatten(1), labels[:300]
    found = {}
    for sharpness in (None, Sam(radius=0.1)):
        torch.manual_seed(0)
        objective = Objective(nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)), cross_entropy)
        losses = warm_up(objective, Public(batch, seed=0), steps=300, batch_size=50, sharpness=sharpness)
        found[sharpness] = np.mean(losses[-6:]), *top_eigenvalues(objective, objective.parameters(), batch, count=1)
    (loss, sharp), (flat_loss, flatter) = found.values()
    assert flatter < 0.85 * sharp
    assert flat_loss < 1.1 * loss


@pytest.mark.parametrize("options", [{"radius": -0.1}, {"radius": math.inf}, {"stabiliser": -1.0}])
def test_a_bad_radius_is_refused(options: dict[str, float]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(InvalidArgument, match=f"{name}={value}"):
        Sam(adaptive=True, **options)


# ------------------------------------------------------------------------------------------------ rotations


def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16, torch.from_numpy(labels)


def small_network(outputs: int = 10) -> nn.Sequential:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 16), nn.ReLU())
    return nn.Sequential(body, nn.Linear(16, outputs))


def test_rotations_are_quarter_turns() -> None:
    images = torch.arange(2 * 3 * 9.0).reshape(2, 3, 3, 3)
    views, turns = rotations(images)
    assert turns.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    for view, quarter, image in zip(views, turns.tolist(), images.repeat(4, 1, 1, 1), strict=True):
        assert np.array_equal(view, np.rot90(image, quarter, (1, 2)))


def test_the_body_learns_how_digits_are_turned() -> None:
    images, labels = digits()
    model = small_network()
    head = model[1]
    first = head.weight.clone()
    losses = rotation_pretrain(
        model, Public((images[:1000], labels[:1000]), seed=0), head="1", steps=250, batch_size=64
    )
    assert losses[0] == pytest.approx(math.log(4), abs=0.1)
    # A wrong answer costs at least log 2, so the share of right ones is at least this.
    assert 1 - np.mean(losses[-15:]) / math.log(2) > 0.5

    assert model[1] is head
    assert not torch.equal(head.weight, first)  # fresh
    assert model(images[:2]).shape == (2, 10)
    assert not any(getattr(part, "out_features", None) == 4 for part in model.modules())
    assert all(p.shape[0] != 4 for p in model.parameters())

    def probed(network: nn.Sequential) -> float:
        """How well a linear model on the body's features knows rotations of other digits."""
        with torch.no_grad():
            (x, y), (test_x, test_y) = (rotations(part) for part in (images[1000:1200], images[1200:]))
            classifier = LogisticRegression(max_iter=2000).fit(network[0](x), y)
            return float(classifier.score(network[0](test_x), test_y))

    assert probed(model) > 0.75
    assert probed(model) > probed(small_network()) + 0.2


def test_labels_do_not_matter() -> None:
    images, labels = digits()
    bodies = []
    for data in (images[:100], (images[:100], labels[:100]), [images[:100], labels[:100].flip(0)]):
        model = small_network()
        rotation_pretrain(model, Public(data, seed=0), head="1", steps=3, batch_size=10)
        bodies.append(flat(model[0]))
    assert torch.equal(bodies[0], bodies[1])
    assert torch.equal(bodies[0], bodies[2])


def test_an_augmentation_within_the_step_is_the_one_before_it() -> None:
    """Ours go into the recorded step; whoever calls something else in between keeps it outside."""
    views = Augmentation(pad=1, cutout=2)
    x, y = torch.rand(20, 3, 8, 8), torch.arange(20) % 10
    found = []
    for augment in (views, Chain(views), lambda batch: views(batch)):
        torch.manual_seed(0)
        objective = Objective(nn.Sequential(nn.Flatten(), nn.Linear(192, 10)), cross_entropy)
        with own_generators(0):
            options = {"steps": 6, "batch_size": 5, "augment": augment, "sharpness": Sam(radius=0.1)}
            found.append(warm_up(objective, Public((x, y), seed=0), **options))
    assert found[0] == found[1] == found[2]
    assert [recordable(a) for a in (views, Chain(views, AutoAugment(TRIVIAL)), AutoAugment())] == [True] * 3
    assert not any(recordable(a) for a in (None, CutMix(classes=3), Chain(views, CutMix(classes=3)), lambda b: b))


def test_a_wide_resnet_is_rotated_with_augmentation_and_sharpness() -> None:
    torch.manual_seed(0)
    model = wide_resnet(10, 1, groups=4)
    images = torch.randint(0, 256, (12, 3, 8, 8), dtype=torch.uint8)
    seen: list[torch.Size] = []
    model.first.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    before = model.first.weight.clone()
    losses = rotation_pretrain(
        model,
        Public(images, seed=0),
        head="head",
        steps=2,
        batch_size=6,
        augment=Augmentation(pad=1),
        sharpness=Sam(),
        autocast=torch.bfloat16,
    )
    assert all(math.isfinite(loss) for loss in losses)
    assert seen == [torch.Size([24, 16, 8, 8])] * 4
    assert not torch.equal(model.first.weight, before)
    assert model.head.out_features == 10


@pytest.mark.parametrize(
    ("shape", "head", "options", "named"),
    [
        ((4, 1, 8, 6), "1", {}, r"\(1, 8, 6\).*square"),
        ((4, 64), "1", {}, r"\(64,\).*square"),
        ((4, 1, 8, 8), "0", {}, r"head='0'.*\['0.3', '1'\]"),
        ((4, 1, 8, 8), "", {}, "head=''"),
        ((4, 1, 8, 8), "nowhere.head", {}, "head='nowhere.head'"),
        ((4, 1, 8, 8), "1", {"steps": 0}, "steps=0"),
    ],
)
def test_a_bad_rotation_changes_nothing(shape: Any, head: str, options: dict[str, Any], named: str) -> None:
    model = small_network()
    with pytest.raises(InvalidArgument, match=named):
        rotation_pretrain(model, Public(torch.rand(shape)), head=head, **{"steps": 1, **options})
    assert torch.equal(flat(model), flat(small_network()))


def test_a_head_that_is_not_last_is_refused_and_put_back() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.LayerNorm(4), nn.Linear(4, 10))
    layer = model[1]
    with pytest.raises(InvalidArgument, match="head must name the last layer"):
        rotation_pretrain(model, Public(torch.rand(4, 1, 8, 8)), head="1", steps=1)
    assert model[1] is layer


# ------------------------------------------------------------------------------------------------ on a GPU


@pytest.fixture
def exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or kernels.INTERPRETED, reason="no GPU")
@pytest.mark.usefixtures("exact_convolutions")
@pytest.mark.parametrize("sharpness", [None, Sam()])
def test_a_recorded_step_is_the_step(sharpness: Sam | None) -> None:
    images = torch.randint(0, 256, (64, 3, 16, 16), dtype=torch.uint8).cuda()
    labels = torch.arange(64).cuda() % 10
    found = []
    for cuda_graph in (True, False):
        torch.manual_seed(0)
        model = wide_resnet(10, 1, groups=4).cuda()
        objective = Objective(model, cross_entropy)
        public = Public((images, labels), seed=0)
        losses = warm_up(
            objective, public, steps=12, batch_size=16, sharpness=sharpness, learning_rate=0.01, cuda_graph=cuda_graph
        )
        found.append((losses, flat(model).cpu()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-3)
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-2, atol=1e-4)
