"""What is read from folders of runs: all of it, under names of their own, or one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sfumato import Run
from sfumato.errors import InvalidArgument
from sfumato.experiments.records import COMMITTED
from sfumato.report import report
from sfumato.report.contents import Selection, Synthesis, Training, read_all

Changed = Callable[..., Path]
RECORDS = sorted((COMMITTED / "000-table9" / "paper").glob("*.json"))


def training(path: Path) -> Training:
    (found,) = read_all([path])
    assert isinstance(found, Training)
    return found


def test_a_folder_of_runs_stands_for_all_of_them(examples: Path) -> None:
    found = read_all([examples])
    kinds = {item.name: type(item) for item in found}
    assert kinds == {
        "averaged": Training,
        "dope-sgd": Training,
        "dp-sgd": Training,
        "synthetic": Synthesis,
        "to_label": Selection,
    }


def test_a_run_is_what_the_library_saved(examples: Path) -> None:
    saved, found = Run.load(examples / "dope-sgd"), training(examples / "dope-sgd")
    assert [dict(entry) for entry in found.history] == saved.history
    assert [list(entry) for entry in found.alignment] == saved.alignment
    assert len(found.alignment) == saved.steps_taken == found.steps["taken"]
    assert found.statement == saved.statement
    assert found.statement_text == saved.statement_text
    assert found.epsilon == saved.history[-1]["epsilon"]
    assert set(found.ensembles) == {"last", "ema"}
    assert set(training(examples / "averaged").ensembles) == {"last", "ema", "mean", "vote", "logits"}


def test_parameters_are_counted_without_reading_them(examples: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(examples / "dope-sgd", folder)
    weights = sum(t.numel() for t in load_file(folder / "weights.safetensors").values())
    run = json.loads((folder / "run.json").read_text())
    assert (training(folder).parameters, training(folder).only_trained) == (run["config"]["parameters"], True)
    del run["config"]["parameters"]  # as older runs are
    (folder / "run.json").write_text(json.dumps(run))
    assert (training(folder).parameters, training(folder).only_trained) == (weights, True)
    (folder / "ema.safetensors").unlink()
    assert (training(folder).parameters, training(folder).only_trained) == (weights, False)
    (folder / "weights.safetensors").write_bytes(b"\xff" * 9)
    assert training(folder).parameters is None
    (folder / "weights.safetensors").unlink()
    assert training(folder).parameters is None


def test_a_recorded_number_of_parameters_comes_first(changed: Changed) -> None:
    found = training(changed("dope-sgd", lambda run: run["config"].update(parameters=17)))
    assert (found.parameters, found.only_trained) == (17, True)


def test_records_of_experiments_are_runs(examples: Path) -> None:
    found = training(RECORDS[0])
    raw = json.loads(RECORDS[0].read_text())
    assert found.cell == ("000-table9", "epsilon 1", "DP-SGD, cold")
    assert found.ensembles["ema"] == pytest.approx(raw["metrics"]["ema"]["test"] / 100)
    assert found.config["noise_multiplier"] == raw["run"]["noise_multiplier"]
    assert found.note == raw["note"]


def test_names_tell_runs_apart(examples: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(examples / "dp-sgd", tmp_path / name / "run")
    shutil.copytree(examples / "dp-sgd", tmp_path / "b" / "other")
    found = read_all([tmp_path / "a" / "run", tmp_path / "b", tmp_path / "b" / ".." / "a" / "run"])
    assert [item.name for item in found] == ["a/run", "other", "b/run"]
    shutil.copy(examples / "to_label" / "chosen.json", tmp_path / "a" / "run")
    assert [item.name for item in read_all([tmp_path / "a" / "run"])] == ["run (run)", "run (selection)"]


def test_pictures_of_a_selection_come_best_first_with_their_labels(examples: Path, tmp_path: Path) -> None:
    folder = tmp_path / "chosen"
    shutil.copytree(examples / "to_label", folder)
    indices = json.loads((folder / "chosen.json").read_text())["indices"]
    (folder / "labels.csv").write_text(f"index,label\n{indices[1]},seven\nnonsense\n")
    (found,) = read_all([folder])
    assert isinstance(found, Selection)
    assert [picture.index for picture in found.pictures] == indices
    assert [picture.label for picture in found.pictures[:3]] == ["", "seven", ""]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere", "does not exist"),
        ("empty", "holds no run.json, provenance.json, chosen.json"),
        ("text.json", "is not valid JSON"),
        ("bytes.json", "is not valid JSON"),
        ("deep.json", "is not valid JSON"),
        ("list.json", "is no run, or damaged"),
        ("other.json", "is no run, or damaged"),
        ("convex.json", "see it by sfumato reproduce"),
        ("grid/provenance.json", "is no PNG image"),
    ],
)
def test_what_is_no_run_is_one_sentence(tmp_path: Path, path: str, said: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "grid").mkdir()
    (tmp_path / "grid" / "grid.png").write_text("<script>")
    (tmp_path / "grid" / "provenance.json").write_text('{"rows": 3, "statement": "none"}')
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "other.json").write_text('{"name": "left-pad"}')
    (tmp_path / "convex.json").write_text('{"spec": "001-figure2", "scores": []}')
    with pytest.raises(InvalidArgument, match=said) as error:
        read_all([tmp_path / path])
    assert "\n" not in str(error.value)


def test_nothing_is_no_report() -> None:
    with pytest.raises(InvalidArgument, match="run is missing"):
        report([])


# ------------------------------------------------------------------------------------------------ damage

JUNK: list[Any] = [None, "<b>", -1, 1e308, float("nan"), [], {}, [1], [{}], [[]]]


def ways(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """To everything in a JSON document, of lists only the beginning."""
    yield at
    if isinstance(value, dict):
        for name in value:
            yield from ways(value[name], (*at, name))
    elif value and isinstance(value, list):
        yield from ways(value[0], (*at, 0))


def put(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    if isinstance(value, list):
        return [put(inner, at[1:], new) if k == at[0] else inner for k, inner in enumerate(value)]
    return {name: put(inner, at[1:], new) if name == at[0] else inner for name, inner in value.items()}


@pytest.mark.parametrize(
    ("run", "file"),
    [
        ("dope-sgd", "run.json"),
        ("averaged", "config.json"),
        ("synthetic", "provenance.json"),
        ("to_label", "chosen.json"),
    ],
)
def test_whatever_is_damaged_there_is_a_report_or_a_sentence(
    examples: Path, tmp_path: Path, run: str, file: str
) -> None:
    folder = tmp_path / run
    shutil.copytree(examples / run, folder, ignore=shutil.ignore_patterns("*.png", "generator", "checkpoint*"))
    whole = json.loads((folder / file).read_text())
    told = 0
    for k, at in enumerate(ways(whole)):
        (folder / file).write_text(json.dumps(put(whole, at, JUNK[k % len(JUNK)])))
        try:
            found = report([folder])
        except InvalidArgument:
            told += 1
        else:
            assert "</html>" in found.to_html()
            json.dumps(found.to_json(), allow_nan=False)
    assert told or file == "config.json"
