"""`sfumato predict`: what `sfumato.load` says of a file, in a file; and of private rows no score."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file

import sfumato as library
from sfumato.cli.main import main
from tests.cli.conftest import CONFIG, edit, files, write_csv
from tests.cli.test_bad_inputs import refused
from tests.cli.test_init import NAMES, write_people

Sfumato = Callable[..., Any]


def make_files(folder: Path) -> Path:
    write_csv(folder / "private.csv", 310, 0)
    write_csv(folder / "public.csv", 30, 1, order="cab")
    write_csv(folder / "test.csv", 200, 2)
    (folder / "config.toml").write_text(CONFIG.replace("steps = 12", "steps = 12\nema = true"))
    return folder / "config.toml"


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    assert main(["train", str(make_files(folder)), "--json"]) == 0
    return folder


@pytest.fixture
def folder(trained_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a run of its own in runs/a, and the place where commands are given."""
    shutil.copytree(trained_once, tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    return tmp_path / "mine"


def told(sfumato: Sfumato, *arguments: object) -> dict[str, Any]:
    result = sfumato("predict", *arguments, "--json")
    assert result.status == 0, result.err
    found: dict[str, Any] = json.loads(result.out)
    return found


def lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_what_is_written_is_what_load_predicts(sfumato: Sfumato, folder: Path) -> None:
    facts = told(sfumato, "runs/a", "test.csv")
    model = library.load("runs/a")
    found = lines(folder / "predictions.csv")
    assert [line["row"] for line in found] == [str(k) for k in range(1, 201)]
    assert [int(line["prediction"]) for line in found] == model.predict("test.csv").tolist()
    scores = model.scores("test.csv").double().numpy()
    by_hand = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    assert [float(line["probability"]) for line in found] == pytest.approx(by_hand.max(1).tolist(), abs=1e-6)
    counts = np.bincount(model.predict("test.csv"), minlength=3)
    assert facts["predicted"] == {str(k): int(n) for k, n in enumerate(counts) if n}
    assert (facts["rows"], facts["out"], facts["note"]) == (200, "predictions.csv", None)
    statement = json.loads((folder / "runs/a/run.json").read_text())["statement"]
    assert [facts[name] for name in ("epsilon", "delta", "private")] == [statement["epsilon"], statement["delta"], True]
    assert "accuracy" not in facts


def test_a_score_is_that_of_the_training(sfumato: Sfumato, folder: Path) -> None:
    metrics = json.loads((folder / "runs/a/run.json").read_text())["metrics"]
    facts = told(sfumato, "runs/a", "test.csv", "--score")
    assert facts["accuracy"] == metrics["test_accuracy"]
    assert facts["loss"] == pytest.approx(metrics["test_loss"], rel=1e-5)
    facts = told(sfumato, "runs/a", "test.csv", "--score", "--ema")
    assert facts["accuracy"] == metrics["test_ema_accuracy"]
    assert lines(folder / "predictions.csv")[0]["probability"] == pytest.approx(
        f"{torch.softmax(library.load('runs/a', ema=True).scores('test.csv').double(), 1).amax(1)[0]:.6g}"
    )
    shown = sfumato("predict", "runs/a", "test.csv", "--score")
    assert (shown.status, shown.err) == (0, "")
    assert "Predicted by runs/a" in shown.out
    assert f"{metrics['test_accuracy']:.6g}" in shown.out


def test_columns_in_another_order_without_labels(sfumato: Sfumato, folder: Path) -> None:
    told(sfumato, "runs/a", "public.csv", "-o", "labelled.csv")  # whose columns are c, a, b
    rows = [line.rpartition(",")[0] for line in (folder / "public.csv").read_text().split()]
    (folder / "new.csv").write_text("\n".join(f"{row},note" for row in rows))  # one that the model does not know
    told(sfumato, "runs/a", "new.csv", "-o", "unlabelled.csv")
    assert (folder / "labelled.csv").read_bytes() == (folder / "unlabelled.csv").read_bytes()
    refused(sfumato, folder, "has no column 'kind', which a score compares", "predict", "runs/a", "new.csv", "--score")


def test_predictions_in_the_shell(sfumato: Sfumato, folder: Path) -> None:
    before = set(files(folder))
    printed = sfumato("predict", "runs/a", "test.csv", "-o", "-", "--score")
    assert printed.status == 0
    found = list(csv.DictReader(io.StringIO(printed.out)))
    assert [int(line["prediction"]) for line in found] == library.load("runs/a").predict("test.csv").tolist()
    assert "accuracy" in printed.err  # aside, where it spoils no pipe
    facts = told(sfumato, "runs/a", "test.csv", "-o", "-")
    assert facts["out"] is None
    assert [{k: str(v) for k, v in line.items()} for line in facts["predictions"]] == found
    assert set(files(folder)) == before


def test_a_pipe_that_has_seen_enough(folder: Path) -> None:
    line = [sys.executable, "-m", "sfumato.cli.main", "predict", "runs/a", "test.csv", "-o", "-"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode == 0, said
    assert "Predicted by runs/a" in said
    assert "Broken" not in said


def test_a_file_of_predictions_is_written_anew_and_no_other(sfumato: Sfumato, folder: Path) -> None:
    told(sfumato, "runs/a", "public.csv")
    told(sfumato, "runs/a", "test.csv")
    assert len(lines(folder / "predictions.csv")) == 200
    (folder / "empty.csv").write_text("")
    told(sfumato, "runs/a", "public.csv", "-o", "empty.csv")
    assert len(lines(folder / "empty.csv")) == 30
    (folder / "mine.csv").write_text("row,prediction_by_doctor\n1,2\n")
    for out in ("mine.csv", "test.csv", "runs/a/weights.safetensors"):
        refused(sfumato, folder, "holds something else", "predict", "runs/a", "test.csv", "-o", out)
    for out in ("runs", "nowhere/p.csv"):
        refused(sfumato, folder, "must name a file in a folder that exists", "predict", "runs/a", "test.csv", "-o", out)
    told(sfumato, "runs/a", "public.csv", "-o", "/dev/null")


# ------------------------------------------------------------------------------------------------ private rows


def test_private_rows_are_not_scored_however_they_are_named(sfumato: Sfumato, folder: Path) -> None:
    (folder / "link.csv").symlink_to(folder / "private.csv")
    os.link(folder / "private.csv", folder / "hard.csv")
    (folder / "other").symlink_to(folder, target_is_directory=True)
    for name in (
        "private.csv",
        "runs/../private.csv",
        folder / "private.csv",
        "link.csv",
        "hard.csv",
        "other/link.csv",
    ):
        refused(sfumato, folder, "holds the private rows", "predict", "runs/a", name, "--score")
        facts = told(sfumato, "runs/a", name, "-o", "-")
        assert "keep their predictions as private" in facts["note"]
    shown = sfumato("predict", "runs/a", "link.csv", "-o", "-")
    assert "as private as they are" in " ".join(shown.err.split())


def test_private_rows_are_known_from_another_folder(
    sfumato: Sfumato, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "run").symlink_to(folder / "runs" / "a", target_is_directory=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    refused(sfumato, tmp_path, "holds the private rows", "predict", "run", folder / "private.csv", "--score")


def test_a_bad_private_label_is_not_told(sfumato: Sfumato, folder: Path) -> None:
    path = folder / "private.csv"
    path.write_text(path.read_text() + "1,2,3,SECRET\n")
    result = sfumato("predict", "runs/a", "private.csv", "--score")
    assert result.status == 2
    assert "line" not in result.err
    assert "SECRET" not in result.err


def test_private_rows_are_not_counted_on_the_screen(sfumato: Sfumato, folder: Path) -> None:
    """Their number, which the training was not told either, and what the model says of them, go into the file alone."""
    facts = told(sfumato, "runs/a", "private.csv")
    assert {name: facts[name] for name in ("rows", "predicted", "undeclared_words")} == {
        "rows": None,
        "predicted": None,
        "undeclared_words": None,
    }
    assert len(lines(folder / "predictions.csv")) == 310
    shown = sfumato("predict", "runs/a", "private.csv")
    assert "310" not in shown.out + shown.err


def test_a_bad_private_row_is_not_found_for_anyone(sfumato: Sfumato, folder: Path) -> None:
    path = folder / "private.csv"
    whole = path.read_text()
    for bad, said in (
        ("1,SECRET,3,0", "no number"),
        ("1,2", "more or fewer cells"),
        ("nan,2,3,0", "no finite output for a row"),
    ):
        path.write_text(f"{whole}{bad}\n")
        result = sfumato("predict", "runs/a", "private.csv")
        assert result.status == 2
        assert said in result.err
        assert not any(word in result.err for word in ("line", "SECRET", "311", "312"))


# ------------------------------------------------------------------------------------------------ other files


def test_words_and_files_without_a_header_row(
    sfumato: Sfumato, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for k, name in enumerate(("private.data", "public.csv", "held_out.test")):
        write_people(tmp_path / name, (600, 100, 50)[k], k)
    made = sfumato("init", "private.data", "public.csv", "held_out.test", "--size", 600, "--columns", NAMES, "--json")
    assert made.status == 0, made.err
    done = sfumato("train", "config.toml", "--json")
    assert done.status == 0, done.err
    run, metrics = json.loads(done.out)["out"], json.loads(done.out)["metrics"]
    facts = told(sfumato, run, "held_out.test", "--score")
    assert facts["accuracy"] == metrics["test_accuracy"]
    assert set(facts["predicted"]) <= {"<=50K", ">50K"}
    predicted = library.load(run).predict("held_out.test").tolist()
    assert [line["prediction"] for line in lines(tmp_path / "predictions.csv")] == predicted
    rows = ["50, Private, 2, 40, <=50K", "?, Baker, 2, ?, >50K", "50, ?, 2, 40, >50K", "50, Potter, 2, 40, >50K"]
    (tmp_path / "new.data").write_text("\n".join(rows))
    (tmp_path / "unlabelled.data").write_text("\n".join(row.rpartition(",")[0] for row in rows))
    found = [told(sfumato, run, name, "-o", "-") for name in ("new.data", "unlabelled.data")]
    assert found[0]["predictions"] == found[1]["predictions"]
    assert found[0]["undeclared_words"] == {"workclass": 2}  # and not what is missing
    said = "has 2 words in column 'workclass' that the training did not declare"
    refused(sfumato, tmp_path, said, "predict", run, "new.data", "--strict")
    refused(sfumato, tmp_path, "has no column 'income'", "predict", run, "unlabelled.data", "--score")
    (tmp_path / "new.data").write_text("50, Private, 2, 40, SECRET")
    said = "has in column 'income' a label other than <=50K, >50K (about line 1)"
    refused(sfumato, tmp_path, said, "predict", run, "new.data", "--score")
    (tmp_path / "new.data").write_text("SECRET, Private, 2, 40, >50K")
    refused(sfumato, tmp_path, "in column 'age' a cell that is no number", "predict", run, "new.data")


@pytest.fixture
def of_arrays(sfumato: Sfumato, config: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on one NPZ file with x_train and x_test."""
    folder = config.parent
    monkeypatch.chdir(folder)
    arrays: dict[str, Any] = {}
    for role, ending in (("private", "train"), ("public", "public"), ("test", "test")):
        table = np.genfromtxt(folder / f"{role}.csv", delimiter=",", names=True)
        arrays |= {f"x_{ending}": np.stack([table[c] for c in "abc"], 1), f"y_{ending}": table["kind"]}
        edit(config, f"{role}.csv", "all.npz")
    np.savez(folder / "all.npz", **arrays)
    edit(config, 'label = "kind"\n', "")
    done = sfumato("train", config, "--json")
    assert done.status == 0, done.err
    return folder


def test_arrays(sfumato: Sfumato, of_arrays: Path) -> None:
    metrics = json.loads((of_arrays / "runs/a/run.json").read_text())["metrics"]
    facts = told(sfumato, "runs/a", "all.npz", "--score")  # the test rows in it, and not the private ones
    assert (facts["array"], facts["accuracy"], facts["note"]) == ("x_test", metrics["test_accuracy"], None)
    found = [int(line["prediction"]) for line in lines(of_arrays / "predictions.csv")]
    arrays = np.load(of_arrays / "all.npz")
    assert found == library.load("runs/a").predict(arrays["x_test"]).tolist()
    np.savez(of_arrays / "new.npz", X=arrays["x_test"])
    assert told(sfumato, "runs/a", "new.npz")["array"] == "X"
    refused(sfumato, of_arrays, "has no array 'y', which a score compares", "predict", "runs/a", "new.npz", "--score")


# Arrays of a file, and what the sentence must say; with --score.
ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "another shape": ({"X": np.zeros((2, 5)), "y": np.zeros(2)}, "has rows of shape (5,), and the model was trained"),
    "no features": ({"z": np.zeros((2, 3))}, "must hold an array x or x_test"),
    "words": ({"X": np.array([["a", "b", "c"]]), "y": np.zeros(1)}, "'X' must hold numbers"),
    "objects": ({"X": np.array([[1, None, "c"]], dtype=object), "y": np.zeros(1)}, "cannot be read as plain arrays"),
    "no rows": ({"X": np.zeros((0, 3)), "y": np.zeros(0)}, "one row of features per example"),
    "too few labels": ({"X": np.zeros((2, 3)), "y": np.zeros(1)}, "'y' must hold one number per row of 'X'"),
    "labels that are no classes": ({"X": np.zeros((2, 3)), "y": np.array([0, 3])}, "whole numbers from 0 to 2"),
    "a label that is nan": ({"X": np.zeros((2, 3)), "y": np.array([0, np.nan])}, "whole numbers from 0 to 2"),
    "a row that is nan": ({"X": np.array([[0, 0, 0], [0, np.nan, 0]]), "y": np.zeros(2)}, "no finite output for row 2"),
}


def test_arrays_that_cannot_be_scored(sfumato: Sfumato, of_arrays: Path) -> None:
    for arrays, said in ARRAYS.values():
        np.savez(of_arrays / "new.npz", **arrays)
        refused(sfumato, of_arrays, said, "predict", "runs/a", "new.npz", "--score")
    (of_arrays / "new.npz").write_text("no archive")
    refused(sfumato, of_arrays, "is not an NPZ file", "predict", "runs/a", "new.npz")
    refused(sfumato, of_arrays, "must be an .npz file or a folder of images", "predict", "runs/a", "test.csv")


def test_private_arrays_are_not_scored(sfumato: Sfumato, of_arrays: Path) -> None:
    with np.load(of_arrays / "all.npz") as arrays:
        np.savez(of_arrays / "all.npz", X=arrays["x_train"], y=arrays["y_train"])
    refused(sfumato, of_arrays, "holds the private rows", "predict", "runs/a", "./all.npz", "--score")


def test_folders_of_images(sfumato: Sfumato, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = config.parent
    monkeypatch.chdir(folder)
    rng = np.random.default_rng(0)
    for role, count in (("private", 40), ("public", 8), ("test", 10)):
        for kind, colour in (("dark", 40), ("light", 210)):
            (folder / role / kind).mkdir(parents=True)
            for k in range(count):
                pixels = np.clip(rng.normal(colour, 20, (6, 4)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / role / kind / f"{k}.png")
        edit(config, f"{role}.csv", role)
    edit(config, 'label = "kind"\n', 'classes = ["dark", "light"]\n')
    edit(config, "range = [-1, 3]", "range = [0, 255]")
    edit(config, "size = 300", "size = 80")
    edit(config, "outputs = 3", "outputs = 2")
    edit(config, "batch_size = 100", "batch_size = 40")
    done = sfumato("train", config, "--json")
    assert done.status == 0, done.err
    facts = told(sfumato, "runs/a", "test", "--score")
    assert facts["accuracy"] == json.loads(done.out)["metrics"]["test_accuracy"]
    found = lines(folder / "predictions.csv")
    assert [line["file"] for line in found[:2]] == ["dark/0.png", "dark/1.png"]
    assert [line["prediction"] for line in found] == library.load("runs/a").predict("test").tolist()
    assert told(sfumato, "runs/a", "test/dark")["rows"] == 10  # no classes needed
    refused(sfumato, folder, "'0.png', which is no folder of a class", "predict", "runs/a", "test/dark", "--score")
    private_images(sfumato, folder)
    (folder / "odd").mkdir()
    refused(sfumato, folder, "holds no images", "predict", "runs/a", "odd")
    Image.fromarray(np.zeros((4, 6), dtype=np.uint8)).save(folder / "odd" / "0.png")
    refused(
        sfumato, folder, "has images of 6 x 4 pixels, and the model was trained on 4 x 6", "predict", "runs/a", "odd"
    )


def private_images(sfumato: Sfumato, folder: Path) -> None:
    """The folder, one in it, the one around it, and links to some of its images are all private."""
    (folder / "some" / "dark").mkdir(parents=True)
    (folder / "some" / "dark" / "a.png").symlink_to(folder / "private" / "dark" / "0.png")
    for name in ("private", "some"):
        refused(sfumato, folder, "holds the private rows", "predict", "runs/a", name, "--score")
    for name in ("private/dark", "some", "."):
        assert "as private as they are" in told(sfumato, "runs/a", name, "-o", "-")["note"]


def test_numbers(sfumato: Sfumato, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(config.parent)
    edit(config, "outputs = 3", "outputs = 1")
    edit(config, "learning_rate = 4.0", 'learning_rate = 0.1\nloss = "squared-error"')
    done = sfumato("train", config, "--json")
    assert done.status == 0, done.err
    facts = told(sfumato, "runs/a", "test.csv", "--score")
    assert facts["loss"] == pytest.approx(json.loads(done.out)["metrics"]["test_loss"], rel=1e-5)
    assert "accuracy" not in facts
    found = lines(config.parent / "predictions.csv")
    assert list(found[0]) == ["row", "prediction"]
    predicted = library.load("runs/a").predict("test.csv")
    np.testing.assert_array_equal(np.array([float(line["prediction"]) for line in found], np.float32), predicted)
    assert facts["predicted"]["highest"] == pytest.approx(float(predicted.max()))
    (config.parent / "new.csv").write_text("a,b,c,kind\n1,1,1,nan\n")
    refused(sfumato, config.parent, "has labels that are not finite", "predict", "runs/a", "new.csv", "--score")


# ------------------------------------------------------------------------------------------------ what is refused

# The text of a file of rows, and what the sentence must say.
ROWS = {
    "a row that is not finite": ("a,b,c\n1,1,1\n1,nan,1\n", "has no finite output for row 2"),
    "no rows": ("a,b,c\n", "has no rows"),
    "an empty file": ("", "has no header row"),
    "a missing column": ("a,b\n1,2\n", "has no column 'c', which the model was trained with: check its header row"),
    "a column twice": ("a,a,b,c\n1,1,1,1\n", "names a column twice"),
    "a row in place of a header": (
        "1,x,2,0\n",
        "or add a header row if it has none: the model was trained on files with",
    ),
    "a cell twice in place of a header": ("1,x,x,0\n", "add a header row if it has none"),
    "numbers in place of a header": (
        "1,2,3,0\n",
        "must name the columns, as in the files that the model was trained on.",
    ),
    "a ragged row": ("a,b,c\n1,2,3\n1,2\n", "more or fewer cells than columns (about line 3)"),
    "a cell that is no number": ("a,b,c\n1,SECRET,3\n", "has in column 'b' a cell that is no number (about line 2)"),
    "no header row": ("1,2,3\n", "has no header row"),
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_that_cannot_be_predicted(sfumato: Sfumato, folder: Path, case: str) -> None:
    text, said = ROWS[case]
    (folder / "new.csv").write_text(text)
    refused(sfumato, folder, said, "predict", "runs/a", "new.csv")
    assert "SECRET" not in sfumato("predict", "runs/a", "new.csv").err


def test_infinite_cells_are_cut_to_the_range_as_in_training(sfumato: Sfumato, folder: Path) -> None:
    (folder / "new.csv").write_text("a,b,c\n3,-1,1\ninf,-inf,1\n1e300,-9,1\n")
    assert len({str(line | {"row": 0}) for line in told(sfumato, "runs/a", "new.csv", "-o", "-")["predictions"]}) == 1


# A file of the run and its text, None where it is gone; and what the sentence must say.
RUNS: dict[str, tuple[str, str | None, str]] = {
    "no run.json": ("run.json", None, "holds a training that has not come to its end"),
    "run.json that is no JSON": ("run.json", "{", "has a run.json of another kind"),
    "run.json of something else": ("run.json", '{"scripts": {}}', "has a run.json of another kind"),
    "run.json that is a list": ("run.json", "[]", "has a run.json of another kind"),
    "run.json without a statement": ("run.json", '{"metrics": {}, "config": {}, "statement": 3}', "of another kind"),
    "no weights": ("weights.safetensors", None, "has no weights.safetensors"),
    "broken weights": ("weights.safetensors", "no weights", "has a weights.safetensors that cannot be read"),
    "broken average": ("ema.safetensors", "no weights", "has a ema.safetensors that cannot be read"),
    "no config.json": ("config.json", None, "has no config.json"),
    "config.json that is no JSON": ("config.json", "{", "has a config.json that is no JSON"),
    "config.json of something else": ("config.json", "{}", "was not written by `sfumato train`"),
    "config.json that is a list": ("config.json", "[]", "was not written by `sfumato train`"),
    "config.json of odd values": (
        "config.json",
        '{"model": null, "training": {"loss": 1}, "data": {"private": null}}',
        "was not written by `sfumato train`",
    ),
    "no preprocessing.json": ("preprocessing.json", None, "has no preprocessing.json"),
    "preprocessing.json of something else": ("preprocessing.json", "{}", "was not written by `sfumato train`"),
}


@pytest.mark.parametrize("case", RUNS)
def test_runs_that_cannot_be_used(sfumato: Sfumato, folder: Path, case: str) -> None:
    name, text, said = RUNS[case]
    (folder / "runs" / "a" / name).unlink()
    if text is not None:
        (folder / "runs" / "a" / name).write_text(text)
    refused(sfumato, folder, said, "predict", "runs/a", "test.csv")


def test_weights_of_another_model(sfumato: Sfumato, folder: Path) -> None:
    path = folder / "runs/a/weights.safetensors"
    save_file({name: value[:1].copy() for name, value in load_file(path).items()}, path)
    refused(sfumato, folder, "has weights that do not fit its model, kind='linear'", "predict", "runs/a", "test.csv")
    save_file({name: np.full_like(value, np.nan) for name, value in load_file(path).items()}, path)
    (folder / "runs/a/config.json").write_text(
        (folder / "runs/a/config.json").read_text().replace('"outputs": 3', '"outputs": 1')
    )
    refused(sfumato, folder, "a training that diverged", "predict", "runs/a", "test.csv")


def test_an_average_that_was_not_kept(sfumato: Sfumato, folder: Path) -> None:
    (folder / "runs/a/ema.safetensors").unlink()
    refused(sfumato, folder, "train with ema = true", "predict", "runs/a", "test.csv", "--ema")
