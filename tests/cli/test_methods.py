"""`sfumato train` with the methods and settings of the papers: what a file names is what is run, planned and paid."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sfumato import Ledger, Run
from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.cli import method as stacking
from sfumato.cli.config import load_config
from sfumato.cli.sections import METHODS, USED_BY, MethodSection
from sfumato.data.samplers import Poisson
from sfumato.models.basic import linear
from sfumato.privacy import calibration
from sfumato.privacy.mechanisms import Adjacency
from tests.cli.conftest import add, edit, files

Sfumato = Callable[..., Any]

# What [training] names, and what is then run, from the outside.
STACKS = {
    '"dp-sgd"': ["dp_sgd"],
    '"dope-sgd"': ["dope_sgd", "dp_sgd"],
    '"shrunk-origin"': ["ShrunkOrigin", "dp_sgd"],
    '"mirror-descent"': ["MirrorDescent", "dp_sgd"],
    '"ada-dps"': ["AdaDPS", "dp_sgd"],
    '"weight-multiplicity"': ["weight_multiplicity", "dp_sgd"],
    '["weight-multiplicity", "dope-sgd"]': ["dope_sgd", "weight_multiplicity", "dp_sgd"],
    '["dp-sgd", "shrunk-origin", "mirror-descent", "weight-multiplicity", "ada-dps"]': [
        "AdaDPS",
        "MirrorDescent",
        "ShrunkOrigin",
        "weight_multiplicity",
        "dp_sgd",
    ],
}


def trained(sfumato: Sfumato, config: Path, *options: str) -> dict[str, Any]:
    result = sfumato("train", config, "--json", *options)
    assert result.status == 0, result.err
    found: dict[str, Any] = json.loads(result.out)
    return found


def run_of(config: Path) -> Run:
    return Run.load(config.parent / "runs/a")


def chain(run: Run) -> list[tuple[str, dict[str, Any]]]:
    """Names and options of the stack that a run says it was made with."""
    found = [(run.config["method"], dict(run.config["method_options"]))]
    while "method" in found[-1][1]:
        below = found[-1][1].pop("method")
        found.append((below.pop("name"), below))
    return found


def answers(config: Path) -> int:
    with Ledger(config.parent / "ledger.db") as ledger:
        return sum(line.answers for line in ledger.account("flowers").statement().asked)


@pytest.mark.parametrize("named", STACKS)
def test_every_method_and_how_they_stack(sfumato: Sfumato, config: Path, named: str) -> None:
    edit(config, "momentum = 0.5", f"method = {named}")
    edit(config, "steps = 12", "steps = 4")
    if "mirror" in named:
        add(config, "[method]\ndecay_steps = 3")
    if "multiplicity" in named:
        edit(config, "[training]", "[training]\nviews = 2")
    plan = trained(sfumato, config, "--dry-run")
    done = trained(sfumato, config)
    run = run_of(config)
    assert [name for name, _ in chain(run)] == STACKS[named]
    assert len(plan["method"]) == len(STACKS[named])
    asked = 3 if "mirror" in named else 4  # where alpha is 0, nothing is asked and nothing is paid
    assert (plan["answers"], answers(config), run.steps_taken) == (asked, asked, 4)
    assert plan["noise_multiplier"] == done["noise_multiplier"] == run.config["noise_multiplier"]
    wanted = calibration.noise_multiplier(
        epsilon=3.0,
        delta=1e-4,
        sampler=Poisson(size=300, batch_size=100),
        steps=asked,
        adjacency=Adjacency.ADD_REMOVE,
    )
    assert done["noise_multiplier"] == pytest.approx(wanted, rel=1e-9)


def test_options_reach_their_method(sfumato: Sfumato, config: Path) -> None:
    edit(
        config, "momentum = 0.5", 'method = ["ada-dps", "mirror-descent", "dope-sgd", "weight-multiplicity"]\nviews = 3'
    )
    edit(config, "steps = 12", "steps = 2")
    options = {
        "origin_clip": 0.7,
        "public_batch": 20,
        "public_clip": 0.3,
        "decay_steps": "inf",
        "alpha_min": 0.5,
        "answer_clip": 2.5,
        "damping": 3.0,
        "scale_memory": 0.5,
        "radius": 0.2,
        "offset_batch": 11,
    }
    add(config, "[method]\n" + "\n".join(f"{key} = {value}" for key, value in options.items()))
    plan = trained(sfumato, config, "--dry-run")["method"]
    assert plan["mirror-descent"]["decay_steps"] == "inf"
    shown = {key: value for layer in plan.values() for key, value in layer.items()}
    assert {key: shown[key] for key in options} == options
    trained(sfumato, config)
    ada, mirror, dope, multiplicity, bottom = (found for _, found in chain(run_of(config)))
    assert ada == {"damping": 3.0, "memory": 0.5, "public_batch": 20}
    assert mirror.pop("step_size") is None
    assert mirror == {
        "decay_steps": float("inf"),
        "alpha_min": 0.5,
        "answer_clip": 2.5,
        "public_batch": 20,
        "public_clip": 0.3,
    }
    assert dope == {"clip": 1.0, "origin_clip": 0.7, "public_batch": 20}
    assert multiplicity == {"views": 3, "radius": 0.2, "public_batch": 11}
    assert bottom == {"clip": 1.0, "views": 3, "augment": None}


def test_every_option_is_of_some_method_and_every_other_refuses_it(config: Path) -> None:
    assert [f.name for f in fields(MethodSection)] == list(USED_BY)
    base = config.read_text()
    for key, users in USED_BY.items():
        for name in METHODS:
            needed = "decay_steps = 5\n" if name == "mirror-descent" and key != "decay_steps" else ""
            value = True if key == "line_search" else 5 if "batch" in key else 0.5
            written = str(value).lower()
            config.write_text(
                base.replace("momentum = 0.5", f'method = "{name}"') + f"\n[method]\n{needed}{key} = {written}\n"
            )
            if name in users:
                assert getattr(load_config(config).method, key) == value
            else:
                with pytest.raises(ValueError, match=rf"\[method\] {key}=.* not used by method='{name}'"):
                    load_config(config)


@pytest.mark.parametrize("named", ["dope-sgd", "shrunk-origin", "mirror-descent"])
def test_a_line_search_knows_how_long_steps_are(sfumato: Sfumato, config: Path, named: str) -> None:
    """In the long run, a learning rate of 4 with momentum 0.5 makes 8 of every gradient."""
    edit(config, "momentum = 0.5", f'momentum = 0.5\nmethod = "{named}"')
    edit(config, "steps = 12", "steps = 2")
    add(config, "[method]\nline_search = true" + ("\ndecay_steps = 5" if "mirror" in named else ""))
    plan = trained(sfumato, config, "--dry-run")["method"]
    assert plan[named]["step_size"] == 8.0
    trained(sfumato, config)
    assert chain(run_of(config))[0][1]["step_size"] == 8.0
    edit(config, "learning_rate = 4.0\nmomentum = 0.5", 'learning_rate = 4.0\noptimizer = "adamw"')
    with pytest.raises(ValueError, match="line_search needs optimizer='sgd'"):
        load_config(config)


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ("views = 2", "'views': it belongs to [training]"),
        ("publicbatch = 2", "did you mean 'public_batch'"),
        ("public_batch = 0", "public_batch=0"),
        ("origin_clip = 0", "origin_clip=0"),
        ("origin_clip = nan", "origin_clip=nan"),
        ("origin_memory = 1", "origin_memory=1"),
        ('origin_clip = "clip"', "must be a number"),
    ],
)
def test_options_that_make_no_sense(config: Path, section: str, named: str) -> None:
    edit(config, "momentum = 0.5", 'method = "shrunk-origin"')
    add(config, f"[method]\n{section}")
    with pytest.raises(ValueError) as error:
        load_config(config)
    assert named in str(error.value)


@pytest.mark.parametrize(
    "wanted",
    [
        'method = "dope-sgd"',
        'method = ["dp-sgd", "ada-dps"]',
        "extended = true",
        'clip = "public"',
        "[warmup]\nsteps = 3",
    ],
)
def test_what_needs_public_rows_says_so(config: Path, wanted: str) -> None:
    edit(config, 'public = "public.csv"\n', "")
    add(config, wanted)
    with pytest.raises(ValueError, match="needs public rows"):
        load_config(config)


# ------------------------------------------------------------------------------------------------ extended


def test_public_rows_join_the_batch_and_the_private_rate_is_the_true_one(sfumato: Sfumato, config: Path) -> None:
    alone = trained(sfumato, config, "--dry-run")
    edit(config, "batch_size = 100", "batch_size = 110\nextended = true")  # of 300 private and 30 public rows
    plan = trained(sfumato, config, "--dry-run")
    assert (plan["batch_size"], plan["private_in_batch"], plan["public_in_batch"]) == (110, 100, 10)
    assert plan["setting"] == "cold, extended"
    assert list(plan["method"]) == ["extended", "dp-sgd"]
    assert plan["noise_multiplier"] == alone["noise_multiplier"]  # a batch of 100 private rows costs what it costs
    trained(sfumato, config)
    run = run_of(config)
    assert run.config["sampler"]["batch_size"] == 100
    assert chain(run)[0] == ("Extended", {"private_batch": 100, "public_batch": 10, "public_clip": None})


def test_public_rows_that_join_can_be_bounded(sfumato: Sfumato, config: Path) -> None:
    edit(config, "batch_size = 100", "batch_size = 110\nextended = true")
    add(config, "[method]\npublic_clip = 0.5")
    assert trained(sfumato, config, "--dry-run")["method"]["extended"]["public_clip"] == 0.5
    trained(sfumato, config)
    assert chain(run_of(config))[0] == ("Extended", {"private_batch": 100, "public_batch": 10, "public_clip": 0.5})


def test_a_full_batch_is_extended_by_all_public_rows(sfumato: Sfumato, config: Path) -> None:
    edit(config, "batch_size = 100", 'sampling = "full"\nextended = true')
    plan = trained(sfumato, config, "--dry-run")
    assert (plan["batch_size"], plan["private_in_batch"], plan["public_in_batch"]) == (330, 300, 30)


# ------------------------------------------------------------------------------------------------ clip


def public_norms(folder: Path) -> np.ndarray:
    """Lengths of softmax regression's gradients at the first weights, |p - y| * |(x, 1)|, one row at a time."""
    torch.manual_seed(0)
    weight, bias = (p.detach().double().numpy() for p in linear(3, 3).parameters())
    found = []
    for *x, kind in np.loadtxt(folder / "public.csv", delimiter=",", skiprows=1)[:, [1, 2, 0, 3]]:
        features = np.clip((np.array(x) + 1) / 4, 0, 1)
        logits = weight @ features + bias
        p = np.exp(logits) / np.exp(logits).sum()
        found.append(np.linalg.norm(p - np.eye(3)[int(kind)]) * np.sqrt(features @ features + 1))
    return np.array(found)


def test_a_clip_from_public_gradients_survives_an_interruption(
    sfumato: Sfumato, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(config, "momentum = 0.5", 'clip = "public"')
    seen: list[float] = []

    def interrupted(*args: Any, clip: float, **options: Any) -> Any:
        seen.append(clip)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return dp_sgd(*args, clip=clip, **options)

    monkeypatch.setattr(stacking, "dp_sgd", interrupted)
    assert sfumato("train", config).status == 130
    norms = np.sort(public_norms(config.parent))
    assert norms[14] <= seen[0] * (1 + 1e-5)  # the lower of the two in the middle of 30, as torch has it
    assert seen[0] == pytest.approx(norms[14], rel=1e-5)
    found = trained(sfumato, config)
    assert set(seen) == {seen[0]}
    assert len(seen) == 13
    assert found["clip"] == seen[0]

    edit(config, 'clip = "public"', 'clip = "auto"')
    refused = sfumato("train", config)
    assert refused.status == 2
    assert "clip='auto' was 'public'" in refused.err


def test_automatic_clipping_normalises(sfumato: Sfumato, config: Path) -> None:
    edit(config, "momentum = 0.5", 'clip = "auto"')
    edit(config, "steps = 12", "steps = 2")
    trained(sfumato, config)
    assert chain(run_of(config))[0][1]["clip"] == "Clip(norm=1.0, origin=None, scale=None, stability=0.01)"


# ------------------------------------------------------------------------------------------------ before and after


@pytest.mark.parametrize(
    "how",
    [
        "",
        'optimizer = "adamw"\nlearning_rate = 0.05\nweight_decay = 0.0',
        "sam_radius = 0.05\nmomentum = 0.8\nbatch_size = 10",
        "sam_radius = 0.5\nadaptive = true",
    ],
)
def test_a_warm_start(sfumato: Sfumato, config: Path, how: str) -> None:
    edit(config, "learning_rate = 4.0\nmomentum = 0.5", "learning_rate = 1e-9")  # nothing is learned after the warm-up
    edit(config, "steps = 12", "steps = 1")
    assert trained(sfumato, config)["metrics"]["public_accuracy"] < 0.7
    add(config, f"[warmup]\nsteps = 200\n{how}")
    for old, new in (("runs/a", "runs/b"), ("ledger.db", "other.db")):
        edit(config, old, new)
    assert trained(sfumato, config, "--dry-run")["setting"] == "warm"
    assert trained(sfumato, config)["metrics"]["public_accuracy"] > 0.85


def test_a_training_goes_on_with_the_sections_it_began_with(sfumato: Sfumato, config: Path) -> None:
    edit(config, "momentum = 0.5", 'method = "dope-sgd"')
    add(config, "[method]\npublic_batch = 20\n[warmup]\nsteps = 3")
    trained(sfumato, config)
    base = config.read_text()
    for old, new, said in (
        ("public_batch = 20", "public_batch = 21", "[method] public_batch=21 was 20"),
        ("public_batch = 20", "", "[method] public_batch=None was 20"),
        ("[warmup]\nsteps = 3", "[warmup]\nsteps = 4", "[warmup] steps=4 was 3"),
        ("[warmup]\nsteps = 3", "", "[warmup] was there"),
    ):
        config.write_text(base)
        edit(config, old, new)
        refused = sfumato("train", config)
        assert refused.status == 2
        assert said in refused.err


def test_averages_and_ensembles_are_measured_and_kept(sfumato: Sfumato, config: Path) -> None:
    edit(config, "momentum = 0.5", "ema = true\nkeep_last = 5")
    before = set(files(config.parent))
    plan = trained(sfumato, config, "--dry-run")
    metrics = trained(sfumato, config)["metrics"]
    assert Run.load(config.parent / "runs/a").metrics.items() >= metrics.items()
    folder = config.parent / "runs/a/checkpoint.pt.iterates"
    kept = [load_file(path) for path in sorted(folder.iterdir())]
    assert len(kept) == 5

    rows = np.loadtxt(config.parent / "test.csv", delimiter=",", skiprows=1)
    features, kinds = np.clip((rows[:, :3] + 1) / 4, 0, 1), rows[:, 3].astype(int)
    outputs = [features @ k["1.weight"].numpy().T + k["1.bias"].numpy() for k in kept]
    votes = np.stack([np.bincount(column, minlength=3) for column in np.stack([o.argmax(1) for o in outputs]).T])
    clear = np.sort(votes, 1)[:, -1] > np.sort(votes, 1)[:, -2]
    mean = sum(features @ k["1.weight"].numpy().T + k["1.bias"].numpy() for k in kept) / 5  # linear: as of mean weights
    assert metrics["test_logits_accuracy"] == pytest.approx((mean.argmax(1) == kinds).mean(), abs=1e-9)
    assert metrics["test_mean_accuracy"] == pytest.approx((mean.argmax(1) == kinds).mean(), abs=1e-9)
    right = (votes.argmax(1) == kinds)[clear].sum()
    assert right <= metrics["test_vote_accuracy"] * len(kinds) + 1e-9 <= right + (~clear).sum() + 1e-6
    assert "test_ema_accuracy" in metrics

    made = {str(config.parent / name) for name in set(files(config.parent)) - before}
    made = {name for name in made if not Path(name).name.startswith(".")}
    expected = {*plan["would_write"], plan["ledger"]} - {str(folder)}
    assert {name for name in made if not name.startswith(str(folder))} == expected

    edit(config, "runs/a", "runs/b")  # refused, for want of budget: no folder is left behind
    assert sfumato("train", config).status == 2
    assert not (config.parent / "runs/b").exists()


def test_ensembles_of_a_regression(sfumato: Sfumato, config: Path) -> None:
    edit(config, "momentum = 0.5", 'keep_last = 3\nloss = "squared-error"')
    for old, new in (("outputs = 3", "outputs = 1"), ("learning_rate = 4.0", "learning_rate = 0.1")):
        edit(config, old, new)
    metrics = trained(sfumato, config)["metrics"]
    assert metrics["test_mean_loss"] == pytest.approx(metrics["test_loss"], rel=0.5)
    assert "test_vote_accuracy" not in metrics


# ------------------------------------------------------------------------------------------------ images


@pytest.fixture
def images(config: Path) -> Path:
    rng = np.random.default_rng(0)
    arrays = {f"x_{part}": rng.random((40, 1, 8, 8)) for part in ("train", "public", "test")}
    np.savez(config.parent / "images.npz", **arrays, **{f"y{n[1:]}": rng.integers(0, 3, 40) for n in arrays})
    for name in ("private", "public", "test"):
        edit(config, f'"{name}.csv"', '"images.npz"')
    for old, new in (
        ('label = "kind"\n', ""),
        ("size = 300\nrange = [-1, 3]", "size = 40"),
        ("batch_size = 100", "batch_size = 20"),
        ("delta = 1e-4", "delta = 1e-3"),
        ("steps = 12", "steps = 2"),
    ):
        edit(config, old, new)
    return config


def test_views_of_images(sfumato: Sfumato, images: Path) -> None:
    edit(images, "momentum = 0.5", 'method = "weight-multiplicity"\nviews = 2\ncrop = 2\nflip = true\ncutout = 3')
    add(images, "[warmup]\nsteps = 3\nbatch_size = 10\ncrop = 1\ncutout = 2")
    plan = trained(sfumato, images, "--dry-run")
    assert plan["setting"] == "warm-aug"
    assert plan["method"]["dp-sgd"]["augment"] == "Augmentation(pad=2, flip=True, cutout=3)"
    trained(sfumato, images)
    assert chain(run_of(images))[1][1]["augment"] == "Augmentation(pad=2, flip=True, cutout=3)"


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("momentum = 0.5", "crop = 8", "[training] crop=8"),
        ("momentum = 0.5", "cutout = 9", "[training] cutout=9"),
        ("outputs = 3", "outputs = 3\nshape = [64]\n[warmup]\nsteps = 3\nflip = true", "[warmup] flip"),
        ("momentum = 0.5", "views = 0", "views=0"),
    ],
)
def test_views_that_cannot_be(sfumato: Sfumato, images: Path, old: str, new: str, named: str) -> None:
    edit(images, old, new)
    before = files(images.parent)
    refused = sfumato("train", images)
    assert refused.status == 2
    assert named in refused.err
    assert files(images.parent) == before


def test_the_plan_for_people_names_the_stack(sfumato: Sfumato, config: Path) -> None:
    edit(config, "momentum = 0.5", 'method = ["weight-multiplicity", "dope-sgd"]\nextended = true')
    add(config, "[warmup]\nsteps = 7")
    out = " ".join(sfumato("train", config, "--dry-run").out.split())
    assert "extended on dope-sgd on weight-multiplicity on dp-sgd" in out
    for text in ("warm, extended", "views 16", "radius 0.1", "public_batch 640", "steps 7", "private in batch 91"):
        assert text in out
