"""Ensembles of iterates: the last n are kept whole, and they predict as arithmetic by hand does."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.ensemble import VotingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import LabelEncoder
from torch import Tensor, nn

from sfumato.averages import Ema
from sfumato.ensembles import Iterates, best_on_public, majority_vote, mean_logits
from sfumato.errors import InvalidArgument, SfumatoError
from sfumato.objective import Objective, cross_entropy
from sfumato.public import Public

N, FEATURES, CLASSES = 40, 5, 3


def number(step: int) -> dict[str, Tensor]:
    return {"w": torch.full((2,), float(step))}


def steps_of(iterates: Iterates) -> list[int]:
    return [int(params["w"][0]) for params in iterates]


def trained(iterates: Iterates, first: int, last: int) -> Iterates:
    for step in range(first, last + 1):
        iterates.keep(number(step), step)
    return iterates


@pytest.fixture(params=["memory", "folder"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "iterates" if request.param == "folder" else None


@pytest.fixture
def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES)


@pytest.fixture
def weights() -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{"weight": torch.randn(CLASSES, FEATURES), "bias": torch.randn(CLASSES)} for _ in range(7)]


@pytest.fixture
def inputs() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(N, FEATURES)


def by_hand(weights: list[dict[str, Tensor]], inputs: Tensor) -> np.ndarray[Any, Any]:
    """Logits (weights, N, classes)."""
    x = inputs.double().numpy()
    return np.stack([x @ w["weight"].double().numpy().T + w["bias"].double().numpy() for w in weights])


# ------------------------------------------------------------------------------------------------ what is kept


def test_exactly_the_last_n_are_kept(folder: Path | None) -> None:
    iterates = trained(Iterates(last=4, total=11, folder=folder), 1, 7)
    assert len(iterates) == 0
    assert folder is None or list(folder.iterdir()) == [], "nothing is written before the window begins"
    assert steps_of(trained(iterates, 8, 8)) == [8]
    assert steps_of(trained(iterates, 9, 11)) == [8, 9, 10, 11]
    assert steps_of(iterates) == [8, 9, 10, 11], "it can be read again"
    assert len(iterates) == 4


def test_files_are_named_by_their_step(tmp_path: Path) -> None:
    iterates = Iterates(total=1100, folder=tmp_path)
    iterates.keep(number(1000), 1000)
    iterates.keep(number(1001), 1001)
    assert [path.name for path in tmp_path.iterdir()] == ["step-001001.safetensors"]


def test_a_training_shorter_than_the_window_keeps_all(folder: Path | None) -> None:
    assert steps_of(trained(Iterates(last=100, total=3, folder=folder), 1, 3)) == [1, 2, 3]


def test_a_training_that_ends_short_has_what_it_kept(folder: Path | None) -> None:
    iterates = trained(Iterates(last=4, total=11, folder=folder), 1, 9)
    assert steps_of(iterates) == [8, 9]
    assert torch.equal(iterates.mean()["w"], torch.tensor([8.5, 8.5]))


def test_copies_do_not_follow_the_parameters(folder: Path | None) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    iterates = Iterates(last=2, total=2, folder=folder)
    for step in (1, 2):
        with torch.no_grad():
            parameter.fill_(step)
        iterates.keep({"w": parameter}, step)
    first, second = iterates
    assert torch.equal(first["w"], torch.ones(3))
    assert torch.equal(second["w"], torch.full((3,), 2.0))
    assert not first["w"].requires_grad
    assert type(first["w"]) is Tensor


def test_a_device_can_be_named(folder: Path | None) -> None:
    iterates = trained(Iterates(last=2, total=2, folder=folder, device="cpu"), 1, 2)
    assert steps_of(iterates) == [1, 2]
    assert iterates.mean()["w"].device.type == "cpu"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_files_hold_the_very_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    kept = {"a": torch.randn(4, 3, 2, 2).to(dtype).to(memory_format=torch.channels_last), "b": torch.randn(3).to(dtype)}
    iterates = Iterates(last=1, total=1, folder=tmp_path)
    iterates.keep(kept, 1)
    (read,) = Iterates(last=1, total=1, folder=tmp_path)
    assert read.keys() == kept.keys()
    for name, t in kept.items():
        assert read[name].dtype == dtype
        assert torch.equal(read[name], t)


# ------------------------------------------------------------------------------------------------ resuming


def test_another_process_continues_the_folder(tmp_path: Path) -> None:
    trained(Iterates(last=4, total=11, folder=tmp_path), 1, 9)
    resumed = Iterates(last=4, total=11, folder=tmp_path)
    assert steps_of(resumed) == [8, 9]
    resumed.rewind(9)
    assert steps_of(trained(resumed, 10, 11)) == [8, 9, 10, 11]


def test_rewinding_removes_later_steps_and_their_files(folder: Path | None) -> None:
    iterates = trained(Iterates(last=4, total=11, folder=folder), 1, 10)
    iterates.rewind(8)
    assert steps_of(iterates) == [8]
    assert folder is None or [path.name for path in folder.iterdir()] == ["step-000008.safetensors"]
    iterates.rewind(0)
    assert len(iterates) == 0


def test_only_the_steps_of_this_training_are_retained(folder: Path | None) -> None:
    iterates = trained(Iterates(last=4, total=11, folder=folder), 1, 10)
    iterates.retain([3, 9])
    assert iterates.steps == steps_of(iterates) == [9]
    assert folder is None or [path.name for path in folder.iterdir()] == ["step-000009.safetensors"]


def test_steps_done_again_replace_the_lost_past_even_without_rewind(folder: Path | None) -> None:
    iterates = trained(Iterates(last=4, total=11, folder=folder), 1, 11)
    iterates.keep({"w": torch.full((2,), 99.0)}, 9)
    assert steps_of(iterates) == [8, 99]


def test_a_new_training_in_an_old_folder_mixes_nothing(tmp_path: Path) -> None:
    trained(Iterates(last=4, total=20, folder=tmp_path), 1, 20)
    again = Iterates(last=4, total=11, folder=tmp_path)
    assert len(again) == 0, "the old ones are not of this window"
    again.keep(number(1), 1)
    assert list(tmp_path.iterdir()) == []


def test_a_longer_training_forgets_what_left_the_window(tmp_path: Path) -> None:
    trained(Iterates(last=4, total=11, folder=tmp_path), 1, 11)
    longer = trained(Iterates(last=4, total=13, folder=tmp_path), 12, 13)
    assert steps_of(longer) == [10, 11, 12, 13]
    assert len(longer) == 4


def test_many_steps_are_read_in_order(tmp_path: Path) -> None:
    edge = 1_000_000  # one digit more than the names are padded to
    trained(Iterates(last=4, total=edge + 1, folder=tmp_path), edge - 2, edge + 1)
    steps = steps_of(Iterates(last=4, total=edge + 1, folder=tmp_path))
    assert steps == [edge - 2, edge - 1, edge, edge + 1]


class Crash(BaseException):
    pass


def test_a_crash_between_draft_and_rename_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    iterates = trained(Iterates(last=4, total=4, folder=tmp_path), 1, 2)

    def crash(*_: object) -> None:
        raise Crash

    for where in ("os.fsync", "pathlib.Path.replace"):
        with monkeypatch.context() as patched:
            patched.setattr(where, crash)
            with pytest.raises(Crash):
                iterates.keep(number(3), 3)
        assert sorted(path.name for path in tmp_path.glob("step-*")) == [f"step-00000{s}.safetensors" for s in (1, 2)]
        assert steps_of(iterates) == steps_of(Iterates(last=4, total=4, folder=tmp_path)) == [1, 2]
    assert len(list(tmp_path.iterdir())) == 3, "the draft lies there"
    assert steps_of(trained(Iterates(last=4, total=4, folder=tmp_path), 3, 4)) == [1, 2, 3, 4]
    assert len(list(tmp_path.iterdir())) == 4, "the draft was used up"


def test_the_file_is_whole_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    fsync = os.fsync

    def spy(handle: int) -> None:
        assert not list(tmp_path.glob("step-*"))
        fsync(handle)
        (draft,) = tmp_path.iterdir()
        seen.append(int(load_file(draft)["w"][0]))

    monkeypatch.setattr(os, "fsync", spy)
    trained(Iterates(last=1, total=5, folder=tmp_path), 1, 5)
    assert seen == [5]


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    iterates = Iterates(last=1, total=1, folder=tmp_path)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SfumatoError, match=r"No space left on device.*free some space"):
        iterates.keep(number(1), 1)
    assert len(iterates) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SfumatoError, match="name another folder"):
        Iterates(total=3, folder=tmp_path / "file" / "deeper")


@pytest.mark.parametrize(("name", "value"), [("last", 0), ("last", 2.5), ("total", 0), ("total", -1)])
def test_counts_are_checked(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}={value}"):
        Iterates(**{"last": 2, "total": 3, name: value})


@pytest.mark.parametrize("step", [0, -1, 4])
def test_steps_are_counted_from_1_to_total(step: int) -> None:
    with pytest.raises(InvalidArgument, match=f"step={step} must be between 1 and total=3"):
        Iterates(last=2, total=3).keep(number(1), step)


# ------------------------------------------------------------------------------------------------ the mean of weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_mean_is_the_mean_in_float64(folder: Path | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    all_ = [{"a": (1000 + torch.randn(3, 4)).to(dtype), "b": torch.randn(2).to(dtype)} for _ in range(50)]
    iterates = Iterates(last=50, total=50, folder=folder)
    for step, params in enumerate(all_, 1):
        iterates.keep(params, step)
    for _ in range(2):  # a second time: the first must not have written into what is kept
        mean = iterates.mean()
        for name in ("a", "b"):
            exact = torch.stack([params[name].double() for params in all_]).mean(0)
            assert mean[name].dtype == dtype
            assert torch.allclose(mean[name].double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-15)


def test_the_sum_is_not_rounded_on_its_way() -> None:
    """In bfloat16 256 + 1 is 256, so a sum of 256 ones and one 256 in that type would be wrong by half."""
    iterates = Iterates(last=257, total=257)
    for step in range(1, 258):
        iterates.keep({"w": torch.tensor([256.0 if step == 1 else 1.0], dtype=torch.bfloat16)}, step)
    assert float(iterates.mean()["w"]) == float(torch.tensor(512 / 257).bfloat16())


def test_the_mean_of_none_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="before step 8"):
        trained(Iterates(last=4, total=11), 1, 7).mean()


# ------------------------------------------------------------------------------------------------ predictions


@pytest.mark.parametrize("batch_size", [1, 7, N, 1000])
def test_logits_and_votes_are_those_of_numpy(
    linear: nn.Module, weights: list[dict[str, Tensor]], inputs: Tensor, batch_size: int
) -> None:
    logits = by_hand(weights, inputs)
    mean = mean_logits(linear, weights, inputs, batch_size=batch_size)
    assert mean.dtype == torch.float32
    assert np.allclose(mean.numpy(), logits.mean(0), atol=1e-5)

    voted = majority_vote(linear, weights, inputs, batch_size=batch_size)
    winners = []
    for row in range(N):
        counts = np.bincount(logits[:, row].argmax(1), minlength=CLASSES)
        winners.append(max(range(CLASSES), key=lambda c: (counts[c], logits[:, row, c].sum())))
    assert voted.tolist() == winners
    assert voted.tolist() != mean.argmax(1).tolist(), "the two differ here, so neither stands in for the other"


def test_votes_are_those_of_scikit_learn(linear: nn.Module, inputs: Tensor) -> None:
    rng = np.random.default_rng(0)
    x = inputs.double().numpy()
    labels = np.concatenate([np.arange(CLASSES), rng.integers(0, CLASSES, N - CLASSES)])
    fitted: list[tuple[str, Any]] = []
    weights: list[dict[str, Tensor]] = []
    for _ in range(9):
        rows = np.concatenate([np.arange(CLASSES), rng.choice(N, 12)])
        model = LogisticRegression(max_iter=500).fit(x[rows], labels[rows])
        fitted.append((str(len(fitted)), model))
        weights.append({"weight": torch.tensor(model.coef_), "bias": torch.tensor(model.intercept_)})
    voting = VotingClassifier(fitted)
    voting.estimators_, voting.le_ = [model for _, model in fitted], LabelEncoder().fit(labels)
    votes = np.stack([model.predict(x) for _, model in fitted])
    top = np.sort([[(votes[:, row] == c).sum() for c in range(CLASSES)] for row in range(N)], 1)
    clear = top[:, -1] > top[:, -2]  # it breaks ties otherwise
    assert clear.sum() > N / 2
    ours = majority_vote(linear.double(), weights, inputs.double()).numpy()
    assert (ours[clear] == voting.predict(x)[clear]).all()
    assert len(set(ours[clear])) > 1


def constant(*logits: float) -> dict[str, Tensor]:
    return {"weight": torch.zeros(CLASSES, FEATURES), "bias": torch.tensor(logits)}


@pytest.mark.parametrize(
    ("logits", "label"),
    [
        ([(1.0, 0.0, 0.5), (0.0, 3.0, 0.5)], 1),  # one vote each: 1 against 3
        ([(9.0, 0.0, 0.5), (0.0, 3.0, 0.5)], 0),
        ([(1.0, 0.0, 0.9), (0.0, 1.0, 0.9)], 0),  # 2 has the largest sum, and no vote
        ([(0.0, 1.0, 0.0), (0.0, 1.0, 0.0), (9.0, 0.0, 0.0)], 1),  # two votes beat one, whatever the sum
        ([(-9.0, -np.inf, 5.0), (-9.0, 7.0, -np.inf)], 1),  # both tied sums are -inf; 0 has the only finite one
    ],
)
def test_ties_go_to_the_tied_label_with_the_largest_sum(
    linear: nn.Module, inputs: Tensor, logits: list[tuple[float, ...]], label: int
) -> None:
    weights = [constant(*each) for each in logits]
    assert set(majority_vote(linear, weights, inputs).tolist()) == {label}


def test_one_iterate_predicts_as_the_model_itself(
    linear: nn.Module, weights: list[dict[str, Tensor]], inputs: Tensor
) -> None:
    linear.load_state_dict(weights[0])
    with torch.no_grad():
        own = linear(inputs)
    assert torch.allclose(mean_logits(linear, weights[:1], inputs), own, atol=1e-6)
    assert torch.equal(majority_vote(linear, weights[:1], inputs), own.argmax(1))


def test_of_a_linear_model_mean_logits_are_the_logits_of_the_mean(
    linear: nn.Module, weights: list[dict[str, Tensor]], inputs: Tensor
) -> None:
    iterates = Iterates(last=7, total=7)
    for step, params in enumerate(weights, 1):
        iterates.keep(params, step)
    of_the_mean = mean_logits(linear, [iterates.mean()], inputs)
    assert torch.allclose(mean_logits(linear, iterates, inputs), of_the_mean, atol=1e-5)


def test_a_folder_predicts_as_memory_does(
    linear: nn.Module, weights: list[dict[str, Tensor]], inputs: Tensor, tmp_path: Path
) -> None:
    iterates = Iterates(last=7, total=7, folder=tmp_path)
    for step, params in enumerate(weights, 1):
        iterates.keep(params, step)
    assert torch.equal(mean_logits(linear, iterates, inputs), mean_logits(linear, weights, inputs))
    assert torch.equal(majority_vote(linear, iterates, inputs), majority_vote(linear, weights, inputs))


class Restless(nn.Module):
    """Tied weights, a frozen part, dropout, and a buffer of two names that every pass writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.inner.weight
        self.frozen = nn.Linear(4, 3).requires_grad_(False)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("passes", torch.zeros(()))
        self.passes: Tensor
        self.register_buffer("alias", self.passes)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        logits: Tensor = self.frozen(self.drop(torch.tanh(self.again(torch.tanh(self.inner(x))))))
        return logits + self.passes * torch.arange(3)


@pytest.fixture
def restless() -> Restless:
    torch.manual_seed(3)
    module = Restless()
    module.drop.eval()
    return module


def test_tied_and_frozen_weights(restless: Restless, folder: Path | None) -> None:
    objective = Objective(restless, cross_entropy)
    iterates = Iterates(last=3, total=3, folder=folder)
    x, outputs = torch.randn(6, 4), []
    for step in (1, 2, 3):
        with torch.no_grad():
            restless.inner.weight += torch.randn(4, 4)
            hidden = torch.tanh(torch.tanh(x @ restless.inner.weight.T) @ restless.inner.weight.T)
            outputs.append(hidden @ restless.frozen.weight.T + restless.frozen.bias + torch.arange(3))
        iterates.keep(objective.parameters(), step)
    assert [sorted(params) for params in iterates] == [["inner.weight"]] * 3
    assert torch.allclose(mean_logits(restless, iterates, x), torch.stack(outputs).mean(0), atol=1e-6)


def test_a_state_dict_with_tied_weights_will_do(restless: Restless) -> None:
    x = torch.randn(6, 4)
    state = {name: t.clone() + 0.5 for name, t in restless.state_dict().items()}
    assert {"inner.weight", "again.weight", "passes", "alias"} <= state.keys()
    before = {name: t.clone() for name, t in state.items()}
    outputs = mean_logits(restless, [state], x)
    assert all(torch.equal(state[name], t) for name, t in before.items()), "a pass wrote into the weights it was lent"
    alias = {name: t for name, t in state.items() if name != "inner.weight"}
    assert torch.equal(outputs, mean_logits(restless, [alias], x)), "either name of a tied weight counts"
    restless.load_state_dict(state)
    with torch.no_grad():
        assert torch.allclose(outputs, restless.eval()(x), atol=1e-6)


def test_the_module_is_left_as_it_was(restless: Restless) -> None:
    before = {name: t.clone() for name, t in restless.state_dict().items()}
    modes = {name: part.training for name, part in restless.named_modules()}
    assert len(set(modes.values())) == 2
    x = torch.randn(6, 4)
    iterates = [{"inner.weight": torch.randn(4, 4)} for _ in range(3)]
    restless.drop.train()
    first = mean_logits(restless, iterates, x)
    assert torch.equal(first, mean_logits(restless, iterates, x)), "dropout was on"
    assert restless.drop.training
    restless.drop.eval()
    assert not first.requires_grad
    majority_vote(restless, iterates, x)
    with pytest.raises(RuntimeError):
        majority_vote(restless, iterates, torch.randn(6, 5))
    assert {name: part.training for name, part in restless.named_modules()} == modes
    for name, t in restless.state_dict().items():
        assert torch.equal(t, before[name]), name
    assert restless.inner.weight is restless.again.weight
    assert restless.inner.weight.requires_grad
    assert torch.is_grad_enabled()


def test_the_mode_is_restored_while_a_lazy_iterator_is_waiting(restless: Restless) -> None:
    seen: list[bool] = []

    def lazily() -> Any:
        for _ in range(3):
            seen.append(restless.training and torch.is_grad_enabled())
            yield {"inner.weight": torch.eye(4)}

    mean_logits(restless, lazily(), torch.randn(2, 4))
    assert seen == [True, True, True]


def test_no_graph_is_kept_where_the_weights_name_only_some(linear: nn.Module, inputs: Tensor) -> None:
    assert linear.weight.requires_grad
    assert not mean_logits(linear, [{"bias": torch.zeros(CLASSES)}], inputs).requires_grad


def test_logits_are_not_rounded_while_they_are_summed(linear: nn.Module, inputs: Tensor) -> None:
    weights = [constant(1e9, 0.0, 0.0), constant(3.0, 0.0, 0.0), constant(-1e9, 0.0, 0.0)]
    assert mean_logits(linear, weights, inputs)[0].tolist() == [1.0, 0.0, 0.0]
    tied = [constant(1e9, 0.0, -9.0), constant(3.0, 4.0, 0.0), constant(-1e9, -3.0, 5.0)]  # sums 3, 1, -4
    assert majority_vote(linear, tied, inputs)[0].item() == 0


def test_views_are_averaged_beside_the_inputs_as_they_are(
    linear: nn.Module, weights: list[dict[str, Tensor]], inputs: Tensor
) -> None:
    views = [lambda x: x.flip(1), lambda x: 3 * x]
    logits = sum(by_hand(weights, see(inputs)) for see in (lambda x: x, *views)) / 3
    assert np.allclose(mean_logits(linear, weights, inputs, views=views).numpy(), logits.mean(0), atol=1e-5)
    one = majority_vote(linear, weights[:1], inputs, views=views).numpy()
    assert (one == logits[0].argmax(1)).all()
    assert (one != by_hand(weights, inputs)[0].argmax(1)).any()


def test_autocast_is_respected(linear: nn.Module, weights: list[dict[str, Tensor]], inputs: Tensor) -> None:
    low = mean_logits(linear, weights[:1], inputs, autocast=torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = torch.nn.functional.linear(inputs, weights[0]["weight"], weights[0]["bias"])
    assert expected.dtype == torch.bfloat16
    assert low.dtype == torch.float32
    assert torch.equal(low, expected.float())
    assert not torch.equal(low, mean_logits(linear, weights[:1], inputs))


def test_bfloat16_models(linear: nn.Module, weights: list[dict[str, Tensor]], inputs: Tensor) -> None:
    low = [{name: t.bfloat16() for name, t in params.items()} for params in weights]
    outputs = mean_logits(linear.bfloat16(), low, inputs.bfloat16())
    assert outputs.dtype == torch.float32, "a mean of 100 in bfloat16 would undo what averaging is for"
    assert np.allclose(outputs.numpy(), by_hand(low, inputs.bfloat16()).mean(0), atol=0.05)


def test_means_have_any_shape_and_votes_have_not(inputs: Tensor) -> None:
    module = nn.Sequential(nn.Linear(FEATURES, 6), nn.Unflatten(1, (2, 3)))
    weights = [{"0.weight": torch.ones(6, FEATURES) * k, "0.bias": torch.zeros(6)} for k in (1, 3)]
    mean = mean_logits(module, weights, inputs)
    assert torch.allclose(mean, (2 * inputs.sum(1))[:, None, None].expand(N, 2, 3), atol=1e-5)
    with pytest.raises(InvalidArgument, match=r"\(40, 2, 3\)"):
        majority_vote(module, weights, inputs)


@pytest.mark.parametrize("wrong", [{"wieght": torch.zeros(CLASSES, FEATURES)}, {"weight": torch.zeros(CLASSES, 1)}])
def test_weights_of_another_model_are_refused(linear: nn.Module, inputs: Tensor, wrong: dict[str, Tensor]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        mean_logits(linear, [wrong], inputs)


def test_nothing_to_predict_with_or_for(linear: nn.Module, weights: list[dict[str, Tensor]], inputs: Tensor) -> None:
    for how in (mean_logits, majority_vote):
        with pytest.raises(InvalidArgument, match="weights is empty"):
            how(linear, Iterates(last=1, total=1), inputs)
        with pytest.raises(InvalidArgument, match="inputs has 0 rows"):
            how(linear, weights, inputs[:0])
        with pytest.raises(InvalidArgument, match="batch_size=0"):
            how(linear, weights, inputs, batch_size=0)


# ------------------------------------------------------------------------------------------------ the choice


def test_the_best_on_public_rows(linear: nn.Module, weights: list[dict[str, Tensor]], inputs: Tensor) -> None:
    logits = by_hand(weights, inputs)
    labels = torch.from_numpy(logits.mean(0).argmax(1))
    public = Public((inputs, labels))
    right = weights[0] | {"weight": sum(w["weight"] for w in weights), "bias": sum(w["bias"] for w in weights)}
    candidates: dict[str, Any] = {
        "first": weights[0],
        "vote": partial(majority_vote, linear, weights),
        "sum": right,
        "equal": lambda x: mean_logits(linear, weights, x).argmax(1),
    }
    name, table = best_on_public(linear, candidates, public, batch_size=7)
    assert name == "sum", "the first of equals"
    assert table["sum"] == table["equal"] == 1.0
    assert table["first"] == (logits[0].argmax(1) == labels.numpy()).mean() < 1.0
    assert table["vote"] == (majority_vote(linear, weights, inputs) == labels).double().mean().item() < 1.0
    assert list(table) == list(candidates)


def test_more_public_rows_than_are_held_at_once(linear: nn.Module) -> None:
    x = torch.zeros(8200, FEATURES)
    labels = (torch.arange(8200) < 8196).long()
    _, table = best_on_public(linear, {"one": constant(0.0, 1.0, 0.0)}, Public((x, labels)))
    assert table["one"] == 8196 / 8200


def test_what_cannot_be_chosen_from(linear: nn.Module, weights: list[dict[str, Tensor]], inputs: Tensor) -> None:
    labels = torch.zeros(N, dtype=torch.long)
    public = Public((inputs, labels))
    with pytest.raises(InvalidArgument, match="candidates is empty"):
        best_on_public(linear, {}, public)
    with pytest.raises(InvalidArgument, match=r"candidates\['logits'\].*one label per row"):
        best_on_public(linear, {"logits": partial(mean_logits, linear, weights)}, public)
    with pytest.raises(InvalidArgument, match="must be a Public"):
        best_on_public(linear, {"one": weights[0]}, (inputs, labels))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="needs labels"):
        best_on_public(linear, {"one": weights[0]}, Public(inputs))


def test_averaging_noisy_iterates_gains_what_theory_says() -> None:
    """Iterates that jitter about a good point: the mean of n is nearer to it by about sqrt(n)."""
    torch.manual_seed(0)
    centre, total, last = torch.zeros(400, dtype=torch.float64), 60, 50
    iterates, ema = Iterates(last=last, total=total), Ema({"w": centre})
    for step in range(1, total + 1):
        noisy = {"w": centre + torch.randn(400, dtype=torch.float64)}
        iterates.keep(noisy, step)
        ema.update(noisy, step)
    far = {"last": noisy["w"].norm(), "ema": ema.weights["w"].norm(), "mean": iterates.mean()["w"].norm()}
    assert far["mean"] < far["ema"] < far["last"]
    assert 0.9 < float(far["mean"]) / (400 / last) ** 0.5 < 1.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_iterates_on_a_gpu(weights: list[dict[str, Tensor]], inputs: Tensor, tmp_path: Path) -> None:
    module = nn.Linear(FEATURES, CLASSES).cuda()
    expected = majority_vote(nn.Linear(FEATURES, CLASSES), weights, inputs)
    for options, where in (({}, "cuda"), ({"device": "cpu"}, "cpu"), ({"folder": tmp_path}, "cpu")):
        iterates = Iterates(last=7, total=7, **options)
        for step, params in enumerate(weights, 1):
            iterates.keep({name: t.cuda() for name, t in params.items()}, step)
        assert {t.device.type for params in iterates for t in params.values()} == {where}
        assert iterates.mean()["weight"].device.type == where
        assert torch.equal(majority_vote(module, iterates, inputs).cpu(), expected)  # inputs on the CPU
        assert mean_logits(module, iterates, inputs.cuda(), autocast=torch.bfloat16).dtype == torch.float32
    on_gpu = Iterates(last=7, total=7, folder=tmp_path, device="cuda")
    assert {t.device.type for params in on_gpu for t in params.values()} == {"cuda"}
    name, _ = best_on_public(module, {"vote": partial(majority_vote, module, on_gpu)}, Public((inputs, expected)))
    assert name == "vote"
