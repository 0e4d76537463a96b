"""`sfumato synthesize` from end to end on 8 x 8 digits: make, interrupt, go on, add more, and every refusal."""

from __future__ import annotations

import csv
import inspect
import json
import os
import re
import signal
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch.nn.modules.module import register_module_forward_pre_hook

from sfumato import Public
from sfumato.cli import synthesize_config
from sfumato.cli.synthesize_measures import measured
from sfumato.cli.synthesize_rows import Scale, read_rows, split
from sfumato.cli.synthesize_speed import images_in, images_per_second
from sfumato.synthesis import Churn, Edm, Generator, train_generator, unet
from sfumato.synthesis.images import PublicImages
from sfumato.synthesis.store import read
from sfumato.synthesis.unet import UNet
from tests.cli.conftest import add, edit, files

Sfumato = Callable[..., Any]
DIGITS = load_digits()
PAGE = (Path(__file__).parent.parent.parent / "docs" / "synthesis.md").read_text()

CONFIG = """
[data]
public = "digits.npz"
range = [0, 16]
held_out = 0.25

[generator]
channels = 8
multipliers = [1]
blocks = 1
attention = []
images = 240
batch_size = 40

[sample]
n = 30
steps = 3

[output]
folder = "made"
"""

GUIDANCE = """
[guidance]
weight = 2.0
steps = 3
rows = 20
batch_size = 8
channels = 4
multipliers = [1]
"""

MEASURE = """
[measure]
cas = true
model = "linear"
steps = 20
fid = true
precision_recall = true
memorised = true
"""

TABLE = """
[data]
public = "people.csv"
label = "kind"
classes = ["cat", "dog"]
held_out = 0.25

[sample]
n = 50

[output]
folder = "made"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    digits = DIGITS
    np.savez(tmp_path / "digits.npz", X=digits.images[:200, None], y=digits.target[:200])
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, 2, 120)
    lines = ["age,weight,coat,kind"]
    lines += [
        f"{int(3 + 9 * rng.random())},{4 + 20 * k + rng.random():.3f},{(7, 2, 9)[k]},{('cat', 'dog')[k]}" for k in kinds
    ]
    (tmp_path / "people.csv").write_text("\n".join(lines) + "\n")
    path = tmp_path / "config.toml"
    path.write_text(TABLE)
    return path


def made(sfumato: Sfumato, config: Path, *options: object) -> dict[str, Any]:
    result = sfumato("synthesize", config, "--json", *options)
    assert result.status == 0, result.err
    assert result.err == ""
    found: dict[str, Any] = json.loads(result.out)
    return found


def refused(sfumato: Sfumato, config: Path, *options: object) -> str:
    before = files(config.parent)
    result = sfumato("synthesize", config, *options)
    assert result.status == 2, result.out
    assert result.out == ""
    assert result.err.count("\n") == 1
    assert files(config.parent) == before
    said: str = result.err
    return said


def arrays(folder: Path) -> tuple[Any, Any]:
    with np.load(folder / "synthetic.npz") as file:
        return file["X"], file["y"]


def provenance(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "provenance.json").read_text())
    return found


# ------------------------------------------------------------------------------------------------ images


def test_images_from_end_to_end(sfumato: Sfumato, config: Path) -> None:
    add(config, GUIDANCE + MEASURE)
    before = files(config.parent)
    plan = made(sfumato, config, "--dry-run")
    assert files(config.parent) == before
    assert (plan["rows"], plan["trained_on"] + plan["held_out"], plan["classes"]) == (200, 200, 10)
    assert plan["measures"] == ["cas", "fid", "precision_recall", "memorised"]

    told = made(sfumato, config)
    folder = config.parent / "made"
    assert set(told) == {
        *("folder", "statement", "rows", "sha256", "trained_on", "held_out", "images_seen", "draws", "measures"),
        "seconds",
    }
    assert told["images_seen"] == 240
    assert (told["rows"], told["draws"]) == (30, 1)
    assert set(told["measures"]) == {"cas", "fid", "precision", "recall", "memorised"}
    assert told["measures"]["cas"]["by"] == "linear, 20 steps"
    assert told["measures"]["fid"]["by"] == "pixels"
    assert told["measures"]["fid"]["reference"] == told["held_out"]
    assert told["measures"]["memorised"]["reference"] == told["trained_on"]
    assert set(told["seconds"]) == {"training", "guidance", "sampling", "measuring"}
    written = {str(config.parent / name) for name in set(files(config.parent)) - set(before)}
    assert written == set(plan["would_write"])

    x, y = arrays(folder)
    assert (x.shape, x.dtype) == ((30, 1, 8, 8), np.float64)  # as the public file has them
    assert 0 <= x.min() < x.max() <= 16
    assert np.bincount(y).tolist() == [3] * 10
    picture = np.asarray(Image.open(folder / "grid.png"))
    assert picture.shape == (10 * 50 + 2, 12 * 50 + 2, 3)
    assert picture[2 + 6, 2 + 6].tolist() == [round(float(x[0, 0, 1, 1]) / 16 * 255)] * 3  # six pixels for one

    facts = provenance(folder)
    assert facts["statement"].startswith("No private data was touched")
    assert facts["config"]["generator"]["images"] == 240
    assert facts["generator"]["versions"]["torch"] == torch.__version__
    assert facts["draws"][0]["guide"] == "Guidance(weight=2.0, between=(0.0, inf))"
    assert facts["measures"] == told["measures"]
    assert parameters(Generator.load(folder / "generator")) == plan["parameters"]


def parameters(generator: Generator) -> int:
    return sum(p.numel() for p in generator.network.parameters())


def test_held_out_rows_are_not_seen(sfumato: Sfumato, config: Path) -> None:
    """As many of each class, to the nearest, are kept away; the hash in the provenance is of all the others."""
    facts = made(sfumato, config)
    said = provenance(config.parent / "made")["generator"]
    with np.load(config.parent / "digits.npz") as file:
        y = file["y"]
        x = torch.from_numpy((file["X"] / 16).astype(np.float32))
    per_class = [n - round(0.25 * n) for n in np.bincount(y)]
    assert said["rows_per_class"] == per_class
    assert facts["trained_on"] == sum(per_class)
    all_rows = PublicImages.of(Public((x, torch.from_numpy(y)))).facts()
    assert said["sha256"] != all_rows["sha256"]
    edit(config, "held_out = 0.25", "")
    edit(config, '"made"', '"all"')
    made(sfumato, config)
    assert provenance(config.parent / "all")["generator"]["sha256"] == all_rows["sha256"]


def test_what_is_made_is_public_data_for_train(sfumato: Sfumato, config: Path) -> None:
    made(sfumato, config)
    digits = DIGITS
    np.savez(config.parent / "private.npz", X=digits.images[200:500, None], y=digits.target[200:500])
    training = config.parent / "train.toml"
    training.write_text(
        """
        [data]
        private = "private.npz"
        public = "made/synthetic.npz"
        name = "digits"
        size = 300
        range = [0, 16]
        [model]
        kind = "linear"
        outputs = 10
        [privacy]
        epsilon = 2.0
        delta = 1e-4
        ledger = "ledger.db"
        [training]
        steps = 2
        batch_size = 50
        method = "dope-sgd"
        out = "run"
        [warmup]
        steps = 2
        batch_size = 10
        """
    )
    result = sfumato("train", training, "--json")
    assert result.status == 0, result.err
    assert json.loads(result.out)["steps_taken"] == 2


def test_ctrl_c_keeps_the_step_and_the_same_command_goes_on_exactly(sfumato: Sfumato, config: Path) -> None:
    add(config, GUIDANCE)
    made(sfumato, config)
    edit(config, '"made"', '"again"')
    stopped = interrupted(sfumato, config)
    whole, parts = config.parent / "made", config.parent / "again"
    assert stopped.status == 130
    assert stopped.err == f"sfumato: Interrupted; {parts} keeps what was done: the same command goes on from there.\n"
    assert read(parts / "checkpoint.safetensors")[1]["step"] == 3
    assert not (parts / "provenance.json").exists()

    assert made(sfumato, config, "--dry-run")["continues"] is True
    edit(config, "batch_size = 40", "batch_size = 20")
    assert "[generator] batch_size=20 was 40" in refused(sfumato, config)
    edit(config, "batch_size = 20", "batch_size = 40")
    made(sfumato, config)
    one, other = files(whole), files(parts)
    changes = {"provenance.json", "synthesis.json"}  # which tell the seconds and the folder
    assert {n: c for n, c in one.items() if n not in changes} == {n: c for n, c in other.items() if n not in changes}
    left_out = {"seconds", "config"}
    a, b = ({k: v for k, v in provenance(f).items() if k not in left_out} for f in (whole, parts))
    assert a == b


def test_after_the_generator_is_saved_only_the_rest_is_done(sfumato: Sfumato, config: Path) -> None:
    made(sfumato, config)
    folder = config.parent / "made"
    first = files(folder)
    (folder / "provenance.json").unlink()
    (folder / "synthetic.npz").unlink()
    shapes = []
    hook = register_module_forward_pre_hook(lambda m, x: shapes.append(m.training) if isinstance(m, UNet) else None)
    try:
        made(sfumato, config)
    finally:
        hook.remove()
    assert set(shapes) == {False}  # it was sampled, and not trained
    assert files(folder)["synthetic.npz"] == first["synthetic.npz"]


def test_a_finished_folder_is_replaced_only_if_asked_to(sfumato: Sfumato, config: Path) -> None:
    made(sfumato, config)
    assert "finished synthesis" in refused(sfumato, config)
    x, _ = arrays(config.parent / "made")
    (config.parent / "made" / "notes.txt").write_text("mine")
    edit(config, "steps = 3", "steps = 3\nseed = 5")
    assert provenance(config.parent / "made")["public"]["classes"] == list(range(10))
    made(sfumato, config, "--again")
    assert not np.array_equal(arrays(config.parent / "made")[0], x)
    assert (config.parent / "made" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_what_is_finished_stands_until_the_new_is(sfumato: Sfumato, config: Path, how: signal.Signals) -> None:
    made(sfumato, config)
    folder = config.parent / "made"
    (folder / "notes.txt").write_text("mine")
    before = files(folder)
    edit(config, "batch_size = 40", "batch_size = 40\nseed = 3")
    stopped = interrupted(sfumato, config, "--again", how=how)
    assert stopped.status == 130
    assert "the same command goes on from there" in stopped.err
    now = files(folder)
    assert {name: now[name] for name in before} == before
    assert read(folder / ".again/checkpoint.safetensors")[1]["step"] == 3
    trained = trained_steps(sfumato, config, "--again")
    assert trained == 3, "of six, the others were done"
    after = files(folder)
    assert set(after) == set(before)
    assert after["notes.txt"] == b"mine"
    assert not list(folder.glob(".*"))
    edit(config, '"made"', '"fresh"')
    made(sfumato, config)
    for name in ("synthetic.npz", "generator/weights.safetensors", "grid.png"):
        assert after[name] == files(config.parent / "fresh")[name] != before[name], name


def test_a_draft_of_another_config_or_other_rows_is_begun_anew(sfumato: Sfumato, config: Path) -> None:
    made(sfumato, config)
    interrupted(sfumato, config, "--again")
    edit(config, "batch_size = 40", "batch_size = 40\nseed = 3")
    assert trained_steps(sfumato, config, "--again") == 6
    interrupted(sfumato, config, "--again")
    np.savez(config.parent / "digits.npz", X=DIGITS.images[200:400, None], y=DIGITS.target[200:400])
    assert sfumato("synthesize", config, "--again").status == 2
    assert (config.parent / "made/provenance.json").exists()
    assert trained_steps(sfumato, config, "--again") == 6


@pytest.mark.parametrize("moved", [[], ["generator"], ["generator", "synthesis.json", "grid.png", "synthetic.npz"]])
def test_a_swap_that_was_cut_off_is_finished_first(sfumato: Sfumato, config: Path, moved: list[str]) -> None:
    made(sfumato, config)
    folder, ready = config.parent / "made", config.parent / "made/.again.ready"
    whole = files(folder)
    ready.mkdir()
    for path in [path for path in folder.iterdir() if path != ready and path.name not in moved]:
        path.rename(ready / path.name)
    assert made(sfumato, config, "--more", 2)["rows"] == 32
    now = files(folder)
    assert set(now) == set(whole)
    assert now["generator/weights.safetensors"] == whole["generator/weights.safetensors"]


def test_checkpoints_are_written_by_time_too(tmp_path: Path) -> None:
    network = unet(image=(1, 8, 8), classes=0, channels=8, multipliers=(1,), blocks=1, attention=())
    path, seen = tmp_path / "checkpoint.safetensors", []

    def look() -> bool:
        seen.append(path.exists())
        return False

    rows, options = Public(torch.rand(20, 1, 8, 8)), {"process": Edm(), "images": 40, "batch_size": 10, "stop": look}
    train_generator(rows, network=network, checkpoint=path, checkpoint_seconds=1e9, **options)
    assert not any(seen)
    path.unlink()
    seen.clear()
    train_generator(rows, network=network, checkpoint=path, checkpoint_seconds=1e-9, **options)
    assert seen == [False, True, True, True]


def test_without_a_terminal_there_is_a_line_for_every_tenth(sfumato: Sfumato, config: Path) -> None:
    edit(config, "images = 240", "images = 800")
    out = sfumato("synthesize", config).out
    assert re.findall(r"^generator (\d+)/800, loss", out, re.MULTILINE) == [str(80 * k) for k in range(1, 11)]


def test_more_is_added_without_training(sfumato: Sfumato, config: Path) -> None:
    add(config, GUIDANCE)
    assert "--more needs a finished synthesis" in refused(sfumato, config, "--more", 5)
    made(sfumato, config)
    folder = config.parent / "made"
    x, y = arrays(folder)
    (config.parent / "digits.npz").unlink()  # not needed any more
    told = made(sfumato, config, "--more", 12)
    assert (told["rows"], told["draws"]) == (42, 2)
    more, labels = arrays(folder)
    assert np.array_equal(more[:30], x)
    assert np.array_equal(labels[:30], y)
    assert labels[30:].tolist() == [*range(10), 0, 1]
    assert not np.array_equal(more[30:40], x[:10])
    made(sfumato, config, "--more", 12)
    third = arrays(folder)[0][42:]
    assert third.shape == (12, 1, 8, 8)
    assert not np.array_equal(third, more[30:])
    assert [draw["rows"] for draw in provenance(folder)["draws"]] == [30, 12, 12]
    assert {draw["guide"] for draw in provenance(folder)["draws"]} == {"Guidance(weight=2.0, between=(0.0, inf))"}
    assert "--more=3 goes without --again" in refused(sfumato, config, "--more", 3, "--again")
    (folder / "synthetic.npz").write_bytes(b"something else")
    assert "not what provenance.json beside it tells of" in refused(sfumato, config, "--more", 3)


def test_bytes_stay_bytes_and_flat_rows_flat(sfumato: Sfumato, config: Path) -> None:
    digits = DIGITS
    for name, x, extra in (
        ("bytes", (digits.images[:100] * 15).astype(np.uint8), ""),
        ("flat", digits.data[:100].astype(np.int32), "range = [0, 16]\nshape = [1, 8, 8]"),
    ):
        np.savez(config.parent / "digits.npz", x_public=x, y_public=digits.target[:100])
        config.write_text(CONFIG.replace("range = [0, 16]", extra).replace('"made"', f'"{name}"'))
        made(sfumato, config)
        found, _ = arrays(config.parent / name)
        assert (found.dtype, found.shape[1:]) == (x.dtype, x.shape[1:])
        assert found.max() > 0.5 * x.max()


def test_whole_numbers_are_rounded_to_the_nearest() -> None:
    images = torch.tensor([0, 127, 128, 255], dtype=torch.uint8).reshape(4, 1, 1, 1)
    for dtype, limits, expected in (
        ("int16", (0.0, 16.0), [0, 8, 8, 16]),  # 127 is 7.97
        ("float64", (-1.0, 1.0), [-1, 2 * 127 / 255 - 1, 2 * 128 / 255 - 1, 1]),
        ("uint8", (0.0, 255.0), [0, 127, 128, 255]),
    ):
        written = Scale(row_shape=(1,), limits=limits, dtype=dtype).written(images, None)
        assert list(written) == ["X"]
        assert written["X"].dtype == dtype
        assert written["X"][:, 0].tolist() == pytest.approx(expected, abs=1e-12)


def test_memorised_rows_are_those_that_the_generator_saw(config: Path) -> None:
    add(config, "[measure]\nmemorised = true")
    checked = synthesize_config.load_synthesis_config(config)
    rows = read_rows(checked)
    kept, held = split(rows, 0.25, 0, by_class=True)
    for which, share in ((kept, 1.0), (held, 0.0)):
        copies = Public((rows.rows[which], torch.zeros(len(which), dtype=torch.long)))
        found = measured(checked, rows, kept, held, copies, torch.device("cpu"), shown=False)
        assert found["memorised"]["value"] == share
        assert found["memorised"]["synthetic"] == len(which)


def test_folders_of_pictures(sfumato: Sfumato, config: Path) -> None:
    digits = DIGITS
    folder = config.parent / "pictures"
    for i, (image, kind) in enumerate(zip(digits.images[:40], digits.target[:40], strict=True)):
        place = folder / ("even" if kind % 2 == 0 else "odd")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15).astype(np.uint8)).save(place / f"{i:03}.png")
    config.write_text(CONFIG.replace("digits.npz", "pictures").replace("range = [0, 16]", "").replace("0.25", "0.0"))
    made(sfumato, config)
    x, y = arrays(config.parent / "made")
    assert (x.dtype, x.shape) == (np.uint8, (30, 1, 8, 8))
    assert np.bincount(y).tolist() == [15, 15]
    facts = provenance(config.parent / "made")
    assert facts["public"]["classes"] == ["even", "odd"]
    even = [(digits.images[i] * 15).astype(np.uint8) for i in range(40) if digits.target[i] % 2 == 0]
    odd = [(digits.images[i] * 15).astype(np.uint8) for i in range(40) if digits.target[i] % 2 == 1]
    rows = Public((torch.from_numpy(np.stack(even + odd))[:, None], torch.tensor([0] * len(even) + [1] * len(odd))))
    assert facts["generator"]["sha256"] == PublicImages.of(rows).facts()["sha256"]

    for kind in ("even", "odd"):  # without classes
        for path in (folder / kind).iterdir():
            path.rename(folder / path.name)
        (folder / kind).rmdir()
    edit(config, '"made"', '"plain"')
    made(sfumato, config)
    with np.load(config.parent / "plain" / "synthetic.npz") as file:
        assert file.files == ["X"]
    Image.fromarray(np.zeros((9, 9), dtype=np.uint8)).save(folder / "999.png")
    edit(config, '"plain"', '"other"')
    assert "bring all images to one size" in refused(sfumato, config)


def test_seconds_instead_of_images(sfumato: Sfumato, config: Path) -> None:
    edit(config, "images = 240", "seconds = 0.4")
    told = made(sfumato, config)
    assert told["images_seen"] % 40 == 0
    record = json.loads((config.parent / "made" / "synthesis.json").read_text())
    assert record["images"] == told["images_seen"] >= 40


def test_seconds_are_turned_into_images_by_speed() -> None:
    """Whole batches; and the network that was tried with is as it was."""
    network = unet(image=(1, 8, 8), classes=0, channels=8, multipliers=(1,), blocks=1, attention=())
    before = [p.detach().clone() for p in network.parameters()]
    settings: dict[str, Any] = {"process": Edm(), "batch_size": 4}
    found = images_in(1.0, Public(torch.rand(10, 1, 8, 8)), network, settings)
    assert found >= 4
    assert found % 4 == 0
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
    assert images_per_second((100, 3.0), (1100, 8.0)) == 200
    assert images_per_second((100, 3.0), (100, 3.0)) == pytest.approx(100 / 3)  # one step each, of a slow network


def test_the_stochastic_sampler_and_its_options(sfumato: Sfumato, config: Path) -> None:
    edit(config, "steps = 3", "steps = 3\nstochastic = true")
    made(sfumato, config)
    facts = provenance(config.parent / "made")
    assert facts["draws"][0]["stochastic"] == vars(Churn())
    edit(config, "stochastic = true", "stochastic = {S_churn = 10, S_max = 1.0}")
    made(sfumato, config, "--again")
    assert provenance(config.parent / "made")["draws"][0]["stochastic"] == vars(Churn(S_churn=10.0, S_max=1.0))


def interrupted(sfumato: Sfumato, config: Path, *options: object, how: signal.Signals = signal.SIGINT) -> Any:
    """In the third step of the training."""
    calls = iter(range(1000))

    def press(module: Any, inputs: Any) -> None:
        if isinstance(module, UNet) and next(calls) == 2:
            os.kill(os.getpid(), how)

    hook = register_module_forward_pre_hook(press)
    try:
        return sfumato("synthesize", config, *options)
    finally:
        hook.remove()


def trained_steps(sfumato: Sfumato, config: Path, *options: object) -> int:
    modes: list[bool] = []
    hook = register_module_forward_pre_hook(lambda m, x: modes.append(m.training) if isinstance(m, UNet) else None)
    try:
        made(sfumato, config, *options)
    finally:
        hook.remove()
    return sum(modes)


# ------------------------------------------------------------------------------------------------ tables


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_tables_from_end_to_end(sfumato: Sfumato, table: Path) -> None:
    add(table, '[measure]\ncas = true\nmodel = "linear"\nsteps = 100\nmemorised = true\nfid = true')
    told = made(sfumato, table)
    assert told["measures"]["cas"]["value"] > 0.9  # kinds differ in weight
    assert told["measures"]["fid"]["by"] == "columns over their deviations"
    rows = rows_of(table.parent / "made" / "synthetic.csv")
    assert list(rows[0]) == ["age", "weight", "coat", "kind"]
    assert len(rows) == 50
    assert {row["kind"] for row in rows} == {"cat", "dog"}
    assert all(row["age"].isdigit() for row in rows)
    assert all((float(row["weight"]) > 15) == (row["kind"] == "dog") for row in rows)
    assert all(row["coat"] == {"cat": "7", "dog": "2"}[row["kind"]] for row in rows)
    assert provenance(table.parent / "made")["statement"].startswith("No private data was touched")

    made(sfumato, table, "--more", 10)
    more = rows_of(table.parent / "made" / "synthetic.csv")
    assert more[:50] == rows
    assert len(more) == 60
    text = (table.parent / "people.csv").read_text()
    (table.parent / "people.csv").write_text(text.replace("\n", "\n5,5.5,7,cat\n", 1))
    assert "other rows than those" in refused(sfumato, table, "--more", 10)


def test_columns_of_codes_and_numbers_to_predict(sfumato: Sfumato, table: Path) -> None:
    edit(
        table, 'label = "kind"\nclasses = ["cat", "dog"]', 'label = "weight"\ntarget = "number"\ncategorical = ["age"]'
    )
    path = table.parent / "people.csv"
    path.write_text("\n".join(",".join(line.split(",")[:3]) for line in path.read_text().splitlines()) + "\n")
    made(sfumato, table)
    rows, given = rows_of(table.parent / "made" / "synthetic.csv"), rows_of(path)
    assert {row["age"] for row in rows} <= {row["age"] for row in given}
    assert len({row["weight"] for row in rows}) > 20


def test_tables_of_arrays(sfumato: Sfumato, table: Path) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    np.savez(table.parent / "people.npz", X=rng.normal(size=(60, 4)) + 5 * y[:, None], y=y)
    edit(table, "people.csv", "people.npz")
    assert "[data] label is for CSV files" in refused(sfumato, table)
    edit(table, 'label = "kind"\nclasses = ["cat", "dog"]\n', "")
    made(sfumato, table)
    made(sfumato, table, "--more", 10)
    x, labels = arrays(table.parent / "made")
    assert x.shape == (60, 4)
    assert np.abs(x.mean(1) - 5 * labels).max() < 3


def test_a_made_table_is_public_data_for_train(sfumato: Sfumato, table: Path) -> None:
    made(sfumato, table)
    training = table.parent / "train.toml"
    training.write_text(
        """
        [data]
        private = "people.csv"
        public = "made/synthetic.csv"
        label = "kind"
        classes = ["cat", "dog"]
        name = "people"
        size = 120
        range = "public"
        [model]
        kind = "linear"
        outputs = 2
        [privacy]
        epsilon = 2.0
        delta = 1e-3
        ledger = "ledger.db"
        [training]
        steps = 2
        batch_size = 50
        out = "run"
        """
    )
    assert sfumato("train", training, "--dry-run").status == 0


# ------------------------------------------------------------------------------------------------ refusals


def test_nothing_private_is_taken(sfumato: Sfumato, config: Path) -> None:
    text = config.read_text()
    sentence = "a generator that has seen private rows or answers is not public any more"
    for old, new in (
        ("range = [0, 16]", 'private = "digits.npz"'),
        ("[generator]", '[privacy]\nledger = "ledger.db"\n[generator]'),
        ("[generator]", '[private]\ndata = "digits.npz"\n[generator]'),
    ):
        config.write_text(text)
        edit(config, old, new)
        assert sentence in refused(sfumato, config)

    config.write_text(text)
    run = config.parent / "runs" / "a"
    (run / "deep").mkdir(parents=True)
    (config.parent / "digits.npz").rename(run / "deep" / "digits.npz")
    edit(config, '"digits.npz"', '"runs/a/deep/digits.npz"')
    asked = {"statement": {"private": True, "mechanisms": [{"question": "GradientMean"}]}}
    for record in (json.dumps(asked), json.dumps({"statement": {"epsilon": 1.0}}), "no JSON"):
        (run / "run.json").write_text(record)
        assert sentence in refused(sfumato, config)
        assert "runs/a" in refused(sfumato, config)
    for harmless in ({"statement": {}}, {"statement": {"mechanisms": []}}):
        (run / "run.json").write_text(json.dumps(harmless))
        assert sfumato("synthesize", config, "--dry-run").status == 0


def test_a_real_private_run_is_recognised(sfumato: Sfumato, config: Path) -> None:
    digits = DIGITS
    np.savez(config.parent / "private.npz", X=digits.images[:100, None], y=digits.target[:100])
    training = config.parent / "train.toml"
    training.write_text(
        '[data]\nprivate = "private.npz"\nname = "d"\nsize = 100\nrange = [0, 16]\n[model]\nkind = "linear"\n'
        'outputs = 10\n[privacy]\nepsilon = 2.0\ndelta = 1e-3\nledger = "ledger.db"\n'
        '[training]\nsteps = 1\nbatch_size = 20\nout = "run"\n'
    )
    assert sfumato("train", training).status == 0
    edit(config, '"digits.npz"', '"run"')
    assert "a run that private answers went into" in refused(sfumato, config)
    (config.parent / "digits.npz").rename(config.parent / "run" / "digits.npz")
    edit(config, '"run"', '"run/digits.npz"')
    assert "a run that private answers went into" in refused(sfumato, config)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("batch_size = 40", "batchsize = 40", "did you mean 'batch_size'"),
        ("batch_size = 40", "held_out = 0.5", "it belongs to [data]"),
        ("[generator]", "[generater]", "did you mean 'generator'"),
        ("[sample]\nn = 30\nsteps = 3", "", "[sample] is missing"),
        ("n = 30", "", "lacks the key 'n'"),
        ("n = 30", "n = 0", "n=0 must be at least 1"),
        ("n = 30", "n = 2.5", "n=2.5 must be a whole number"),
        ("steps = 3", "steps = 1", "steps=1 must be at least 2"),
        ("steps = 3", "stochastic = {S_chrn = 1}", "did you mean 'S_churn'"),
        ("steps = 3", "stochastic = {S_churn = -1}", "S_churn=-1.0 must not be negative"),
        ("images = 240", "", "needs images or seconds"),
        ("images = 240", "images = 240\nseconds = 3", "needs images or seconds"),
        ("images = 240", 'images = 240\nsize = "digits"', "needs a size"),
        ("channels = 8", "channels = 7", "channels=7 must be a multiple of 4"),
        ("channels = 8\nmultipliers = [1]\nblocks = 1\nattention = []", 'size = "huge"', "size='huge' must be one of"),
        ("channels = 8\nmultipliers = [1]\nblocks = 1\nattention = []", "", "needs a size"),
        ("multipliers = [1]", "multipliers = [1, 1, 1, 1, 1]", "multipliers=(1, 1, 1, 1, 1)"),
        ("images = 240", "images = 240\naugment_p = 2", "augment_p=2.0 must be between 0 and 1"),
        ("images = 240", 'images = 240\nprocess = "vp"', "process='vp' must be one of"),
        ("images = 240", "images = 240\nshrinkage = 0.1", "shrinkage is for tables"),
        ("images = 240", "images = 240\nlearning_rate = nan", "learning_rate=nan must be"),
        ("images = 240", "images = -1", "images=-1 must be at least 1"),
        ("range = [0, 16]", "range = [0, 8]", "pixels from 0 to 16, outside of 0 to 8"),
        ("range = [0, 16]", "", "pixels from 0 to 16, outside of 0 to 1"),
        ("range = [0, 16]", "range = [16, 0]", "range=[16, 0] must be"),
        ("range = [0, 16]", "shape = [8, 8]", "shape=[8, 8] must be"),
        ("range = [0, 16]", "shape = [1, 4, 4]", "which are no images [1, 4, 4]"),
        ("range = [0, 16]", 'label = "kind"\nrange = [0, 16]', "label is for tables"),
        ("held_out = 0.25", "held_out = 1.0", "held_out=1.0 must be"),
        ("held_out = 0.25", "held_out = 0.001", "leaves 200 to train on and 0"),
        ('"digits.npz"', '"gone.npz"', "gone.npz' does not exist"),
        ('"digits.npz"', '"config.toml"', "must be an .npz or .csv file"),
        ('"digits.npz"', '"named.npz"', "called x and y, or x_public and y_public"),
        ('"digits.npz"', '"broken.npz"', "cannot be read"),
        ('"digits.npz"', '"texts.npz"', "one row of numbers each"),
        ('"digits.npz"', '"empty"', "holds no images"),
        ('"made"', '"."', "holds the public rows"),
        ('"made"', '"full"', "holds a synthetic.npz that is not of a synthesis"),
        ("[output]", "[guidance]\nweight = 1\nseed = 0\n[output]", "seed=0 is that of [sample], too"),
        ("[output]", "[guidance]\nweight = inf\n[output]", "weight=inf must be a finite number"),
        ("[output]", "[guidance]\nweight = 1\nlowest = 2\nhighest = 1\n[output]", "lowest=2.0 must be below"),
        ("[output]", "[guidance]\nweight = 1\nchannels = 3\n[output]", "channels=3 must be a multiple of 4"),
        ("[output]", "[guidance]\n[output]", "lacks the key 'weight'"),
        ("[output]", '[measure]\nfid = true\nfeatures = "columns"\n[output]', "does not suit the public rows"),
        ("[output]", '[measure]\nfid = true\nfeatures = "lite0"\n[output]', "go together"),
        ("[output]", '[measure]\nfeatures = "lite0"\nweights = "no.pt"\n[output]', "no.pt' does not exist"),
        ("[output]", '[measure]\ncas = true\nmodel = "cnn"\n[output]', "larger images than 8 x 8"),
        ("[output]", "[measure]\ncas = true\ncrop = 8\n[output]", "crop=8"),
        ("[output]", "[measure]\nprecision_recall = true\nneighbours = 40\n[output]", "needs 41 rows of either kind"),
        ("held_out = 0.25", "[measure]\nfid = true", "give [data] held_out"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(
    sfumato: Sfumato, config: Path, old: str, new: str, named: str
) -> None:
    np.savez(config.parent / "named.npz", x_train=np.zeros((3, 1, 8, 8)), y_train=np.zeros(3))
    np.savez(config.parent / "texts.npz", X=np.full((3, 4), "a"), y=np.zeros(3))
    (config.parent / "broken.npz").write_bytes(b"PK no")
    (config.parent / "empty").mkdir()
    (config.parent / "full").mkdir()
    (config.parent / "full" / "synthetic.npz").write_bytes(b"mine")
    edit(config, old, new)
    assert named in refused(sfumato, config)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("[sample]", "[generator]\nimages = 10\n[sample]", "images is for images"),
        ("[sample]", "[guidance]\nweight = 1\n[sample]", "[guidance] is for images"),
        ("n = 50", "n = 50\nsteps = 20", "steps is for images"),
        ('label = "kind"', 'label = "sort"', "'sort'"),
        ('label = "kind"', 'label = "kind"\ncategorical = ["size"]', "'size'"),
        ('"cat", "dog"', '"cat"', "not in classes"),
        ("[output]", '[measure]\ncas = true\nmodel = "wrn-16-4"\n[output]', "is for images"),
        ("[output]", '[measure]\nfid = true\nfeatures = "pixels"\n[output]', "'columns' for a table"),
    ],
)
def test_bad_input_about_tables(sfumato: Sfumato, table: Path, old: str, new: str, named: str) -> None:
    edit(table, old, new)
    assert named in refused(sfumato, table)


def test_classes_without_rows_are_refused(sfumato: Sfumato, config: Path) -> None:
    digits = DIGITS
    np.savez(config.parent / "digits.npz", X=digits.images[:50, None], y=np.array([0, 1, 3, 1, 0] * 10))
    assert "no row of class 2 to train on, of 4 classes" in refused(sfumato, config)


def test_changed_rows_are_noticed(sfumato: Sfumato, config: Path) -> None:
    made(sfumato, config)
    (config.parent / "made" / "provenance.json").unlink()
    digits = DIGITS
    np.savez(config.parent / "digits.npz", X=digits.images[1:201, None], y=digits.target[1:201])
    result = sfumato("synthesize", config)
    assert result.status == 2
    assert "other rows than those" in result.err


# ------------------------------------------------------------------------------------------------ the page


def test_the_example_on_the_page_is_true(sfumato: Sfumato, tmp_path: Path) -> None:
    block = re.search(r"<!-- synthesize -->\n```toml\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    config = tmp_path / "config.toml"
    config.write_text(block[1])
    digits = DIGITS
    np.savez(tmp_path / tomllib.loads(block[1])["data"]["public"], X=digits.images[:400, None], y=digits.target[:400])
    plan = made(sfumato, config, "--dry-run")
    assert plan["parameters"] > 0
    for old, new in ((r"^images = .*$", "images = 100"), (r"^n = .*$", "n = 20"), (r"^steps = \d+", "steps = 3")):
        config.write_text(re.sub(old, new, config.read_text(), flags=re.MULTILINE))
    assert made(sfumato, config)["rows"] == 20


def test_the_page_names_every_key_with_its_default() -> None:
    for section, kind in synthesize_config.SECTIONS.items():
        found = next(part for part in re.split(r"^### ", PAGE, flags=re.MULTILINE) if part.startswith(f"[{section}]"))
        said = dict(re.findall(r"^\| `(\w+)` \| .+ \| (.+) \|$", found, re.MULTILINE))
        assert list(said) == [f.name for f in fields(kind)], section
        for f in fields(kind):
            if f.default is MISSING:
                assert said[f.name] == "required", f.name
            elif f.default is None:
                assert "`" not in said[f.name], f.name  # in words: it depends on something else
            else:
                told = tomllib.loads(f"x = {said[f.name].strip('`')}")["x"]
                assert (tuple(told) if isinstance(told, list) else told) == f.default, f.name


def test_sizes_and_churn_have_the_library_s_defaults() -> None:
    of_unet = {name: p.default for name, p in inspect.signature(unet).parameters.items()}
    for name in ("channels", "blocks", "dropout"):
        assert f"| `{name}` | " in PAGE
        assert re.search(rf"^\| `{name}` \| .+ \| {of_unet[name]} \|$", PAGE, re.MULTILINE), name
    assert vars(synthesize_config.ChurnSection()) == vars(Churn())
