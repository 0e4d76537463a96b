"""[synthesis] of `sfumato train`: public rows are made of public rows, once, before anything private is touched."""

from __future__ import annotations

import csv
import json
import os
import signal
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch.nn.modules.module import register_module_forward_pre_hook

from sfumato import Ledger, Public, Run
from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.cli import job, method
from sfumato.synthesis import Generator
from sfumato.synthesis.images import PublicImages
from sfumato.synthesis.unet import UNet
from tests.cli.conftest import add, edit, files

Sfumato = Callable[..., Any]
DIGITS = load_digits()

IMAGES = """
[data]
private = "digits.npz"
public = "digits.npz"
test = "digits.npz"
name = "digits"
size = 300
range = [0, 16]

[model]
kind = "linear"
outputs = 10
shape = [1, 8, 8]

[privacy]
epsilon = 3.0
delta = 1e-4
ledger = "ledger.db"

[training]
steps = 4
batch_size = 100
checkpoint_every = 0
out = "runs/a"

[synthesis.generator]
channels = 8
multipliers = [1]
blocks = 1
attention = []
images = 120
batch_size = 40

[synthesis.sample]
n = 30
steps = 3
"""

TABLE = "[synthesis.sample]\nn = 50\n"


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    parts = {"train": slice(0, 300), "public": slice(300, 400), "test": slice(400, 500)}
    arrays = {f"x_{name}": DIGITS.images[part].reshape(-1, 64) for name, part in parts.items()}
    np.savez(tmp_path / "digits.npz", **arrays, **{f"y_{name}": DIGITS.target[part] for name, part in parts.items()})
    path = tmp_path / "config.toml"
    path.write_text(IMAGES)
    return path


def trained(sfumato: Sfumato, config: Path, *options: str) -> dict[str, Any]:
    result = sfumato("train", config, "--json", *options)
    assert result.status == 0, result.err
    found: dict[str, Any] = json.loads(result.out)
    return found


def refused(sfumato: Sfumato, config: Path, *options: object) -> str:
    before = files(config.parent)
    result = sfumato("train", config, *options)
    assert result.status == 2, result.out
    assert (result.out, result.err.count("\n")) == ("", 1)
    assert files(config.parent) == before
    said: str = result.err
    return said


def provenance(config: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((config.parent / "runs/a/synthetic/provenance.json").read_text())
    return found


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[Public]:
    """The public rows that trainings were given."""
    found: list[Public] = []

    def spied(*args: Any, **options: Any) -> Any:
        found.append(options["public"])
        return train(*args, **options)

    train = job.train
    monkeypatch.setattr(job, "train", spied)
    return found


# ------------------------------------------------------------------------------------------------ from end to end


def test_images_are_made_and_trained_on(sfumato: Sfumato, digits: Path, handed: list[Public]) -> None:
    add(digits, "[warmup]\nsteps = 2")
    before = files(digits.parent)
    plan = trained(sfumato, digits, "--dry-run")
    assert files(digits.parent) == before
    told = plan["synthesis"]
    assert (told["rows"], told["trained_on"], told["held_out"], told["samples"]) == (100, 100, 0, 30)
    assert (told["finished"], told["continues"], told["images"]) == (False, False, 120)
    assert told["training_seconds_estimate"] > 0

    found = trained(sfumato, digits)
    assert (found["steps_taken"], found["synthesis"]["rows"]) == (4, 30)
    written = {str(digits.parent / name) for name in set(files(digits.parent)) - set(before)}
    assert {name for name in written if not Path(name).name.startswith(".")} == {*plan["would_write"], plan["ledger"]}
    folder = digits.parent / "runs/a/synthetic"
    with np.load(folder / "synthetic.npz") as made:
        x, y = made["X"], made["y"]
    assert x.shape == (30, 64)
    assert 0 <= x.min() < x.max() <= 16
    assert np.asarray(Image.open(folder / "grid.png")).ndim == 3
    assert provenance(digits)["statement"].startswith("No private data was touched")
    assert Generator.load(folder / "generator").provenance["rows"] == 100

    features, labels = handed[0].batch()  # those of the file, and those that were made, scaled alike
    assert len(labels) == 130
    assert torch.equal(labels[100:], torch.from_numpy(y))
    assert torch.allclose(features[100:].reshape(30, 64), torch.from_numpy(x).float() / 16)
    assert "made of the public rows" in (digits.parent / "runs/a/README.md").read_text()
    assert trained(sfumato, digits, "--dry-run")["synthesis"]["finished"] is True
    report = json.loads(sfumato("report", digits.parent / "runs", "--json").out)
    assert [(one["name"], one["rows"]) for one in report["syntheses"]] == [("synthetic", 30)]


def test_rows_that_judge_are_not_shown_to_the_generator(sfumato: Sfumato, digits: Path, handed: list[Public]) -> None:
    """Of 100 public rows 20 judge; the generator sees the other 80, and the training those and what was made."""
    edit(digits, "steps = 4", "steps = 4\nema = true\nchoose = 0.2")
    add(digits, '[synthesis.measure]\nfid = true\nmemorised = true\ncas = true\nmodel = "linear"\nsteps = 3')
    found = trained(sfumato, digits)
    assert (found["synthesis"]["trained_on"], found["synthesis"]["held_out"]) == (80, 20)
    assert found["synthesis"]["measures"]["fid"]["reference"] == 20  # the judges, which it has not seen either
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    seen = order[20:].sort().values
    with np.load(digits.parent / "digits.npz") as file:
        x, y = torch.from_numpy(file["x_public"]).float() / 16, torch.from_numpy(file["y_public"])
    kept = PublicImages.of(Public((x[seen].reshape(-1, 1, 8, 8), y[seen])))
    assert provenance(digits)["generator"]["sha256"] == kept.facts()["sha256"]

    features, labels = handed[0].batch()
    rows = {tuple(row) for row in features.reshape(-1, 64).tolist()}
    assert len(labels) == 80 + 30
    assert all(tuple(row) not in rows for row in x[order[:20]].tolist())
    scores = Run.load(digits.parent / "runs/a").config["chosen_on_public"]
    assert all(score * 20 == pytest.approx(round(score * 20)) for score in scores.values())  # 20 judge, and no made one


def test_rows_of_a_file_judge_and_those_of_synthetic_do_not(sfumato: Sfumato, config: Path) -> None:
    (config.parent / "made.csv").write_text("a,b,c,kind\n" + "0,0,0,0\n" * 70)
    edit(config, 'public = "public.csv"', 'public = "public.csv"\nsynthetic = "made.csv"')
    edit(config, "steps = 12", "steps = 2\nema = true\nchoose = 0.5")
    trained(sfumato, config)
    scores = Run.load(config.parent / "runs/a").config["chosen_on_public"]
    assert all(score * 15 == pytest.approx(round(score * 15)) for score in scores.values())  # of 30 rows of the file


def test_a_table_with_words_and_names(sfumato: Sfumato, config: Path, handed: list[Public]) -> None:
    """Words stay words, undeclared ones stay undeclared, columns that are left out stay away."""
    rng = np.random.default_rng(0)
    for name, count in (("private", 310), ("public", 60), ("test", 40)):
        lines = ["id, city ,age,kind"] if name == "public" else ["city,age,id,kind"]
        for k in range(count):
            kind = int(rng.integers(0, 2))
            city, age = ("Bern", "Rome", "Oslo")[int(rng.integers(0, 3))], 20 + 30 * kind + int(rng.integers(0, 9))
            cells = [f"p{k}", city, str(age)] if name == "public" else [city, str(age), f"p{k}"]
            lines.append(",".join([*cells, ("no", "yes")[kind]]))
        (config.parent / f"{name}.csv").write_text("\n".join(lines) + "\n")
    edit(config, "range = [-1, 3]", 'classes = ["no", "yes"]\nignore = ["id"]')
    edit(config, "[model]", '[data.categories]\ncity = ["Bern", "Rome"]\n[data.ranges]\nage = [0, 100]\n[model]')
    edit(config, "outputs = 3", "outputs = 2")
    add(config, TABLE)
    plan = trained(sfumato, config, "--dry-run")["synthesis"]
    assert (plan["generator"], plan["training_seconds_estimate"]) == ("Gaussian copula", None)
    trained(sfumato, config)
    rows = rows_of(config.parent / "runs/a/synthetic/synthetic.csv")
    assert list(rows[0]) == ["city", "age", "kind"]
    assert {row["city"] for row in rows} == {"Bern", "Rome", ""}
    assert all((int(row["age"]) >= 50) == (row["kind"] == "yes") for row in rows)
    features, labels = handed[0].batch()
    assert len(labels) == 60 + 50
    assert bool((features[:, :3].sum(1) == 1).all())


def test_images_in_folders_keep_the_declared_order_of_classes(
    sfumato: Sfumato, digits: Path, handed: list[Public]
) -> None:
    """Folders are named in another order than the alphabet's, also for what `sfumato synthesize` made of them."""
    names = ["zero", "one"]
    for role, first in (("private", 0), ("public", 600)):
        for k, name in enumerate(names):
            place = digits.parent / role / name
            place.mkdir(parents=True)
            for i in np.flatnonzero(DIGITS.target[first:] == k)[:20] + first:
                Image.fromarray((DIGITS.images[i] * 15).astype(np.uint8)).save(place / f"{i}.png")
    edit(digits, 'private = "digits.npz"\npublic = "digits.npz"\ntest = "digits.npz"', 'private = "private"')
    edit(digits, "range = [0, 16]", 'range = [0, 255]\npublic = "public"\nclasses = ["zero", "one"]')
    edit(digits, "outputs = 10", "outputs = 2")
    edit(digits, "size = 300", "size = 40")
    edit(digits, "batch_size = 100", "batch_size = 20")
    trained(sfumato, digits)
    with np.load(digits.parent / "runs/a/synthetic/synthetic.npz") as made:
        assert (made["X"].shape, made["X"].dtype) == ((30, 1, 8, 8), np.uint8)
        assert torch.equal(handed[0].batch()[1][40:], torch.from_numpy(made["y"]))
    assert provenance(digits)["public"]["classes"] == names

    other = digits.with_name("synthesize.toml")
    section = IMAGES.split("[synthesis.generator]")[1].replace("synthesis.", "")
    other.write_text(f'[data]\npublic = "public"\n[generator]{section}\n[output]\nfolder = "made"\n')
    assert sfumato("synthesize", other).status == 0
    text = digits.read_text()
    digits.write_text(text[: text.index("[synthesis.generator]")])
    edit(digits, "range = [0, 255]", 'range = [0, 255]\nsynthetic = "made"')
    edit(digits, "runs/a", "runs/b")
    edit(digits, "ledger.db", "other.db")
    trained(sfumato, digits)
    with np.load(digits.parent / "made/synthetic.npz") as made:
        assert torch.equal(handed[1].batch()[1][40:], 1 - torch.from_numpy(made["y"]))  # there "one" comes first
    (digits.parent / "made/provenance.json").unlink()
    edit(digits, "runs/b", "runs/c")
    edit(digits, "other.db", "third.db")
    assert "nothing beside it says which of classes=['zero', 'one'] they are" in refused(sfumato, digits)


def test_numbers_to_predict_and_columns_of_codes(sfumato: Sfumato, config: Path) -> None:
    edit(config, "outputs = 3", "outputs = 1")
    edit(config, "steps = 12", 'steps = 2\nloss = "squared-error"')
    lines = (config.parent / "public.csv").read_text().splitlines()
    codes = [f"{(7, 11)[k % 2]},{line.split(',', 1)[1]}" for k, line in enumerate(lines[1:])]
    (config.parent / "public.csv").write_text("\n".join([lines[0], *codes]) + "\n")
    add(config, '[synthesis]\ncategorical = ["c"]\nsample = {n = 40}')
    trained(sfumato, config)
    assert {row["c"] for row in rows_of(config.parent / "runs/a/synthetic/synthetic.csv")} == {"7", "11"}


def test_made_rows_join_an_extended_batch(sfumato: Sfumato, config: Path) -> None:
    edit(config, "batch_size = 100", "batch_size = 38\nextended = true")
    add(config, TABLE)
    plan = trained(sfumato, config, "--dry-run")
    assert (plan["private_in_batch"], plan["public_in_batch"]) == (30, 8)  # of 300, and of 30 + 50
    assert trained(sfumato, config)["steps_taken"] == 12


# ------------------------------------------------------------------------------------------------ once


def test_an_interrupted_synthesis_goes_on_and_is_not_made_twice(
    sfumato: Sfumato, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = pressed(sfumato, digits, at=2)
    folder = digits.parent / "runs/a/synthetic"
    assert stopped.status == 130
    said = f"sfumato: Interrupted; {folder} keeps what was done: the same command goes on from there.\n"
    assert stopped.err.endswith(f"\n{said}")
    assert (folder / "checkpoint.safetensors").exists()
    assert not (digits.parent / "ledger.db").exists()  # and nothing private was touched
    assert trained(sfumato, digits, "--dry-run")["synthesis"]["continues"] is True
    edit(digits, "images = 120", "images = 160")
    assert "[synthesis.generator] images=160 was 120 when the synthesis in [training] out began" in refused(
        sfumato, digits
    )
    edit(digits, "images = 160", "images = 120")

    calls = []

    @wraps(dp_sgd)
    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return dp_sgd(*args, **options)

    monkeypatch.setattr(method, "dp_sgd", interrupted)
    assert sfumato("train", digits).status == 130
    monkeypatch.undo()
    made = files(folder)
    assert "provenance.json" in made
    for old, new, named in (
        ("n = 30", "n = 31", "[synthesis.sample] n=31 was 30"),
        ("[synthesis.sample]", "[synthesis.guidance]\nweight = 1\n[synthesis.sample]", "[synthesis.guidance] was not"),
        ("[synthesis.sample]", "[synthesis]\nheld_out = 0.5\n[synthesis.sample]", "[synthesis] held_out=0.5 was 0.0"),
    ):
        edit(digits, old, new)
        assert named in refused(sfumato, digits)
        edit(digits, new, old)
    text = digits.read_text()
    digits.write_text(text[: text.index("[synthesis.generator]")])
    assert "[synthesis] was there when the training" in refused(sfumato, digits)
    digits.write_text(text)

    steps: list[bool] = []
    hook = register_module_forward_pre_hook(lambda m, x: steps.append(True) if isinstance(m, UNet) else None)
    try:
        assert trained(sfumato, digits)["steps_taken"] == 4
    finally:
        hook.remove()
    assert not steps
    assert files(folder) == made


def pressed(sfumato: Sfumato, config: Path, *, at: int) -> Any:
    """Ctrl-C in a step of the generator's training."""
    calls = iter(range(1000))

    def press(module: Any, inputs: Any) -> None:
        if isinstance(module, UNet) and next(calls) == at:
            os.kill(os.getpid(), signal.SIGINT)

    hook = register_module_forward_pre_hook(press)
    try:
        return sfumato("train", config)
    finally:
        hook.remove()


def test_other_rows_and_a_changed_file_are_noticed(sfumato: Sfumato, config: Path) -> None:
    """Before the training begins: the private file is broken at first, so that nothing but the synthesis is done."""
    private = (config.parent / "private.csv").read_text()
    (config.parent / "private.csv").write_text("a,b,c,kind\nthese,are,no,numbers\n")
    add(config, TABLE)
    assert sfumato("train", config).status == 2
    made = config.parent / "runs/a/synthetic"
    assert {path.name for path in made.iterdir()} == {"synthetic.csv", "provenance.json", "synthesis.json"}
    assert not (config.parent / "ledger.db").exists()
    (config.parent / "private.csv").write_text(private)

    public = (config.parent / "public.csv").read_text()
    (config.parent / "public.csv").write_text(public + "0,0,0,1\n")
    assert "has other rows than those that the generator in" in refused(sfumato, config)
    (config.parent / "public.csv").write_text(public)
    content = (made / "synthetic.csv").read_bytes()
    (made / "synthetic.csv").write_bytes(content + b"0,0,0,1\n")
    assert "is not what provenance.json beside it tells of: put it back" in refused(sfumato, config)
    (made / "synthetic.csv").write_bytes(content)
    assert trained(sfumato, config)["steps_taken"] == 12


def test_nothing_is_made_for_a_training_without_budget(sfumato: Sfumato, config: Path) -> None:
    trained(sfumato, config)
    edit(config, "runs/a", "runs/b")
    add(config, TABLE)
    assert "is spent" in refused(sfumato, config)
    with Ledger(config.parent / "ledger.db") as ledger:
        assert sum(line.answers for line in ledger.account("flowers").statement().asked) == 12


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('test = "digits.npz"', 'test = "digits.npz"\nsynthetic = "made"', "leave one of them out"),
        ('public = "digits.npz"\n', "", "[synthesis] needs public rows"),
        ("[synthesis.sample]\nn = 30\nsteps = 3", "", "[synthesis] lacks the key 'sample'"),
        ("n = 30", "n = 0", "[synthesis.sample] n=0 must be at least 1"),
        ("n = 30", "m = 30", "[synthesis.sample] has no key 'm'"),
        ("images = 120", "imagse = 120", "[synthesis.generator] has no key 'imagse': did you mean 'images'?"),
        ("images = 120", "", "[synthesis.generator] needs images or seconds"),
        ("images = 120", "images = 120\nshrinkage = 0.1", "[synthesis.generator] shrinkage is for tables"),
        ("[synthesis.sample]", "[synthesis]\nn = 3\n[synthesis.sample]", "it belongs to [synthesis.sample]"),
        ("[synthesis.sample]", "[synthesis]\nheldout = 1\n[synthesis.sample]", "did you mean 'held_out'?"),
        ("[synthesis.sample]", "[synthesis]\nheld_out = 1\n[synthesis.sample]", "[synthesis] held_out=1.0 must be"),
        (
            "[synthesis.sample]",
            "[synthesis]\nheld_out = 0.001\n[synthesis.sample]",
            "[synthesis] held_out=0.001 of 100",
        ),
        ("[synthesis.sample]", '[synthesis]\ncategorical = ["a"]\n[synthesis.sample]', "categorical is for tables"),
        ("[synthesis.sample]", "[synthesis.measure]\nfid = true\n[synthesis.sample]", "give [synthesis] held_out"),
        (
            "[synthesis.sample]",
            "[synthesis.guidance]\nweight = 1\nseed = 0\n[synthesis.sample]",
            "[synthesis.sample], too",
        ),
        ("[synthesis.generator]", "[synthesys.generator]", "did you mean 'synthesis'"),
        ("shape = [1, 8, 8]", "shape = [4, 4, 4]", "images of 1 or 3 channels"),
        ("shape = [1, 8, 8]", "", "is for images, and the public rows are a table"),
        ('"runs/a"', '"full"', "holds a synthetic.npz that is not of a synthesis"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(
    sfumato: Sfumato, digits: Path, old: str, new: str, named: str
) -> None:
    (digits.parent / "full/synthetic").mkdir(parents=True)
    (digits.parent / "full/synthetic/synthetic.npz").write_bytes(b"mine")
    edit(digits, old, new)
    assert named in refused(sfumato, digits)


def test_missing_numbers_and_other_columns(sfumato: Sfumato, config: Path) -> None:
    edit(config, "range = [-1, 3]", 'range = [-1, 3]\nmissing = ["?"]')
    add(config, TABLE)
    public = config.parent / "public.csv"
    text = public.read_text()
    public.write_text(f"{text}?,0,0,1\n")
    assert "column 'c' of [data] public has cells without a number" in refused(sfumato, config)
    public.write_text(text)
    edit(config, TABLE, '[synthesis]\ncategorical = ["d"]\nsample = {n = 4}')
    assert "[synthesis] categorical names 'd', no column of numbers: known are a, b, c." in refused(sfumato, config)


def test_images_have_classes(sfumato: Sfumato, digits: Path) -> None:
    edit(digits, "outputs = 10", "outputs = 1")
    edit(digits, "steps = 4", 'steps = 4\nloss = "squared-error"')
    assert "[synthesis] makes images of classes" in refused(sfumato, digits)


def test_rows_in_the_folder_of_a_private_run_are_not_public(sfumato: Sfumato, config: Path) -> None:
    trained(sfumato, config)
    (config.parent / "public.csv").rename(config.parent / "runs/a/public.csv")
    edit(config, 'public = "public.csv"', 'public = "runs/a/public.csv"')
    edit(config, '"runs/a"', '"runs/b"')
    add(config, TABLE)
    assert "belongs to a run that private answers went into" in refused(sfumato, config)


def test_a_search_names_rows_that_are_made(sfumato: Sfumato, config: Path) -> None:
    add(config, f'{TABLE}\n[tune]\nmean = 2\ncandidates = 2\n[tune.space]\n"training.learning_rate" = [1.0, 2.0]')
    edit(config, "delta = 1e-4", "delta = 1e-4\nbudget = 50")
    result = sfumato("tune", config)
    assert result.status == 2
    assert "[synthesis] is of `sfumato train`" in result.err


# ------------------------------------------------------------------------------------------------ what is told


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_without_a_terminal_a_line_for_every_tenth(sfumato: Sfumato, digits: Path, options: tuple[str, ...]) -> None:
    """On stderr, since stdout may be a program's; and nothing of measures that nobody asked for."""
    edit(digits, "images = 120", "images = 400")
    result = sfumato("train", digits, *options)
    assert result.status == 0, result.err
    assert [line.split(",")[0] for line in result.err.splitlines() if line.startswith("generator")] == [
        f"generator {k}/400" for k in range(40, 401, 40)
    ]
    assert "images/s" not in result.out
    if options:
        assert json.loads(result.out)["synthesis"]["measures"] is None
    else:
        assert "measures" not in result.out
    again = sfumato("train", digits, *options)
    assert "generator" not in again.err  # what is made is made
