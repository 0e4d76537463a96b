"""What leaves a training: `sfumato.load`, the model card, weights that carry their statement; from every format."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

import sfumato as library
from sfumato.data.tables import layout, read_table
from sfumato.errors import InvalidArgument
from tests.cli.conftest import edit
from tests.cli.test_init import NAMES, write_people

Sfumato = Callable[..., Any]
Array = npt.NDArray[Any]


def trained(sfumato: Sfumato, config: Path) -> dict[str, Any]:
    result = sfumato("train", config, "--json")
    assert result.status == 0, result.err
    found: dict[str, Any] = json.loads(result.out)
    return found


def features(path: Path) -> tuple[Array, Array]:
    header, *lines = path.read_text().split()
    rows = np.array([[float(cell) for cell in line.split(",")] for line in lines])
    order = [header.split(",").index(name) for name in ("a", "b", "c", "kind")]
    return rows[:, order[:3]], rows[:, order[3]]


def test_predictions_are_those_of_the_weights(sfumato: Sfumato, config: Path) -> None:
    told = trained(sfumato, config)
    folder = config.parent
    model = library.load(folder / "runs" / "a")
    weights = load_file(folder / "runs/a/weights.safetensors")
    matrix = next(w for w in weights.values() if w.ndim == 2)
    offset = next(w for w in weights.values() if w.ndim == 1)
    for name in ("test.csv", "public.csv"):  # whose columns are in another order
        x, y = features(folder / name)
        by_hand = (np.clip((x + 1) / 4, 0, 1) @ matrix.T + offset).argmax(1)
        np.testing.assert_array_equal(model.predict(folder / name), by_hand)
        np.testing.assert_array_equal(model.predict(x), by_hand)
        if name == "test.csv":
            assert (by_hand == y).mean() == told["metrics"]["test_accuracy"]
    assert not model.module.training
    (folder / "new.csv").write_text("c,b,a\n0,0,2\n")  # no labels: that is what predictions are for
    assert model.predict(folder / "new.csv").tolist() == [0]


def test_words_ranges_and_missing_cells(sfumato: Sfumato, tmp_path: Path) -> None:
    for k, name in enumerate(("private.data", "public.csv", "held_out.test")):
        write_people(tmp_path / name, (600, 100, 50)[k], k)
    places = [tmp_path / name for name in ("private.data", "public.csv", "held_out.test")]
    made = sfumato("init", *places, "-o", tmp_path / "c.toml", "--size", 600, "--columns", NAMES, "--json")
    assert made.status == 0, made.err
    told = trained(sfumato, tmp_path / "c.toml")
    model = library.load(told["out"])
    ranges = json.loads((Path(told["out"]) / "preprocessing.json").read_text())["scaling"]
    rows = ["50, Private, 2, 40, <=50K", "?, State-gov, 2, ?, >50K", "50, ?, 2, 40, >50K", "50, Self-emp, 2, 40, >50K"]
    (tmp_path / "new.data").write_text("\n".join(rows) + "\n")
    age = (50 - ranges["lower"][0]) / (ranges["upper"][0] - ranges["lower"][0])
    found = model.rows(tmp_path / "new.data")
    assert found.shape == (4, 6)  # age, three slots of workclass, city-size, hours
    assert found[:, 0].tolist() == pytest.approx([age, 0.5, age, age])
    assert found[:, 1:4].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]]
    assert found[1, 5] == 0.5
    assert set(model.predict(tmp_path / "held_out.test")) <= {"<=50K", ">50K"}
    labels = [line.rpartition(", ")[2] for line in (tmp_path / "held_out.test").read_text().split("\n") if line]
    right = model.predict(tmp_path / "held_out.test") == np.array(labels)
    assert right.mean() == told["metrics"]["test_accuracy"]
    without = "\n".join(row.rpartition(",")[0] for row in rows) + "\n"
    (tmp_path / "unlabelled.data").write_text(without)
    assert torch.equal(model.rows(tmp_path / "unlabelled.data"), found)


def test_weights_and_card_carry_the_statement(sfumato: Sfumato, config: Path) -> None:
    edit(config, "steps = 12", "steps = 12\nema = true")
    told = trained(sfumato, config)
    out = config.parent / "runs" / "a"
    for name in ("weights", "ema"):
        with safe_open(out / f"{name}.safetensors", framework="np") as file:
            kept = file.metadata()
        assert json.loads(kept["privacy_statement"])["epsilon"] == told["epsilon"]
        assert kept["privacy"] == (out / "statement.txt").read_text()
    card = (out / "README.md").read_text()
    assert "trained privately on flowers" in card
    assert (out / "statement.txt").read_text().strip() in card
    assert f"| test accuracy | {told['metrics']['test_accuracy']:.4g} |" in card
    assert f"| test accuracy, before the first private answer | {told['before']['test_accuracy']:.4g} |" in card
    assert "public.csv" in card
    assert "private.csv" not in card
    shown = next(line for line in card.splitlines() if line.startswith("| epsilon |"))
    assert float(shown.split("|")[2]) >= told["epsilon"]  # never rounded down


def test_a_model_of_ones_own_and_its_average(
    sfumato: Sfumato, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (config.parent / "mine_to_load.py").write_text(
        "import torch\ndef net(inputs, outputs, width):\n"
        "    inner = torch.nn.Linear(inputs, width)\n"
        "    return torch.nn.Sequential(inner, torch.nn.Tanh(), torch.nn.Linear(width, outputs))\n"
    )
    edit(config, 'kind = "linear"', 'kind = "mine_to_load:net"\noptions = {width = 5}')
    edit(config, "steps = 12", "steps = 12\nema = true")
    trained(sfumato, config)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    last, mean = (library.load(config.parent / "runs" / "a", ema=ema) for ema in (False, True))
    assert last.scores(config.parent / "test.csv").shape == (200, 3)
    assert not torch.equal(last.scores(config.parent / "test.csv"), mean.scores(config.parent / "test.csv"))


def test_numbers(sfumato: Sfumato, config: Path) -> None:
    edit(config, "outputs = 3", "outputs = 1")
    edit(config, "learning_rate = 4.0", 'learning_rate = 0.1\nloss = "squared-error"')
    trained(sfumato, config)
    found = library.load(config.parent / "runs" / "a").predict(config.parent / "test.csv")
    assert found.shape == (200,)
    assert found.dtype == np.float32


def test_the_best_on_held_back_public_rows_is_saved(sfumato: Sfumato, config: Path) -> None:
    edit(config, "steps = 12", "steps = 12\nema = true\nkeep_last = 6\nchoose = 0.5\nalignment = true")
    told = trained(sfumato, config)
    out = config.parent / "runs" / "a"
    run = library.Run.load(out)
    scores = run.config["chosen_on_public"]
    assert set(scores) == {"last", "ema", "mean"}
    assert scores[run.config["chosen"]] == max(scores.values())
    assert all((score * 15) == pytest.approx(round(score * 15)) for score in scores.values())  # of 30 rows, 15 judge
    right = library.load(out).predict(config.parent / "test.csv") == features(config.parent / "test.csv")[1]
    assert right.mean() == told["metrics"]["test_chosen_accuracy"]
    assert len(run.alignment) == 12
    assert told["steps_taken"] == 12


def test_synthetic_rows_join_the_public_ones(sfumato: Sfumato, config: Path) -> None:
    made = config.parent / "made"
    made.mkdir()
    (made / "synthetic.csv").write_text("a,b,c,kind\n9,0,0,0\n9,0,0,1\n")
    edit(config, 'public = "public.csv"', 'public = "public.csv"\nsynthetic = "made"')
    edit(config, "range = [-1, 3]", 'range = "public"')
    trained(sfumato, config)
    upper = json.loads((config.parent / "runs/a/preprocessing.json").read_text())["scaling"]["upper"]
    assert upper[0] == 9  # which only a synthetic row has


def test_what_cannot_be_loaded(sfumato: Sfumato, config: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"holds no run\.json"):
        library.load(config.parent)
    trained(sfumato, config)
    out = config.parent / "runs" / "a"
    model = library.load(out)
    with pytest.raises(InvalidArgument, match="ema = true"):
        library.load(out, ema=True)
    (config.parent / "new.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InvalidArgument, match="no column 'c'"):
        model.predict(config.parent / "new.csv")
    (out / "preprocessing.json").unlink()
    with pytest.raises(InvalidArgument, match=r"no preprocessing\.json"):
        library.load(out)


def test_what_cannot_be_predicted_of(sfumato: Sfumato, config: Path) -> None:
    folder = config.parent
    for role in ("private", "public", "test"):
        header, *lines = (folder / f"{role}.csv").read_text().splitlines()
        order = [header.split(",").index(name) for name in ("a", "b", "c", "kind")]
        cells = [[line.split(",")[k] for k in order] for line in lines]
        (folder / f"{role}.csv").write_text("".join(",".join(row) + "\n" for row in cells))
    edit(config, "size = 300", 'size = 300\ncolumns = ["a", "b", "c", "kind"]')
    trained(sfumato, config)
    model = library.load(folder / "runs" / "a")
    for header, row in (("a,b,c,kind", "1,2,3,0"), ("b, a ,c", "1,2,3")):
        (folder / "new.csv").write_text(f"{header}\n{row}\n")
        with pytest.raises(InvalidArgument, match=r"begins with a row of column names.*remove that line"):
            model.predict(folder / "new.csv")
        (folder / "new.csv").write_text(f"{row}\n")
        assert model.predict(folder / "new.csv").shape == (1,)
    with pytest.raises(InvalidArgument, match=r"README\.md' must be a \.csv or \.parquet file"):
        model.predict(folder / "runs" / "a" / "README.md")


def test_a_model_is_shown_in_one_line(sfumato: Sfumato, config: Path) -> None:
    told = trained(sfumato, config)
    shown = repr(library.load(config.parent / "runs" / "a"))
    found = re.fullmatch(r"Trained\(name='(.+)', kind='linear', epsilon=([\d.]+)\)", shown)
    assert found is not None, shown
    assert told["epsilon"] <= float(found[2]) <= told["epsilon"] + 1e-4  # never rounded down


@pytest.mark.parametrize(
    ("statement", "shown"),
    [({"epsilon": 1.0, "private": False}, ", epsilon=1, private=False)"), ({}, "kind='linear')")],
)
def test_what_is_not_private_is_shown_so(sfumato: Sfumato, config: Path, statement: dict[str, Any], shown: str) -> None:
    trained(sfumato, config)
    model = library.load(config.parent / "runs" / "a")
    assert repr(replace(model, run=replace(model.run, statement=statement))).endswith(shown)


# ------------------------------------------------------------------------------------------------ formats


def test_folders_of_images(sfumato: Sfumato, config: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    for role, count in (("private", 40), ("public", 8), ("test", 10)):
        for kind, colour in (("dark", 40), ("light", 210)):
            (config.parent / role / kind).mkdir(parents=True)
            for k in range(count):
                pixels = np.clip(rng.normal(colour, 20, (16, 16)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(config.parent / role / kind / f"{k}.png")
    for role in ("private", "public", "test"):
        edit(config, f"{role}.csv", role)
    edit(config, 'label = "kind"\n', 'classes = ["dark", "light"]\n')
    edit(config, "range = [-1, 3]", "range = [0, 255]")
    edit(config, "size = 300", "size = 80")
    edit(config, "outputs = 3", "outputs = 2")
    edit(config, "batch_size = 100", "batch_size = 40")
    edit(config, "epsilon = 3.0", "epsilon = 60.0")
    edit(config, "learning_rate = 4.0", "learning_rate = 0.3")
    edit(config, "steps = 12", "steps = 40")
    told = trained(sfumato, config)
    assert told["metrics"]["test_accuracy"] > 0.8
    found = library.load(told["out"]).predict(config.parent / "test")
    right = np.array(["dark"] * 10 + ["light"] * 10)
    assert (found == right).mean() == told["metrics"]["test_accuracy"]
    (config.parent / "private" / "dark" / "broken.png").write_text("no image")
    edit(config, "runs/a", "runs/b")
    refused = sfumato("train", config)
    assert refused.status == 2
    assert "broken" not in refused.err  # the name of a private file may be a person's


def test_what_is_handed_on_does_not_say_how_long_it_took(sfumato: Sfumato, config: Path) -> None:
    """Which depends on how many private rows there were; the one who trains may see it."""
    result = sfumato("train", config, "--report")
    assert result.status == 0
    assert re.search(r"seconds +\d", result.out)
    out = config.parent / "runs/a"
    assert "seconds" not in json.loads((out / "run.json").read_text())
    assert "seconds" not in (out / "README.md").read_text()
    assert "seconds" not in (out / "report.html").read_text()
    assert library.Run.load(out).seconds == 0.0
    edit(config, "runs/a", "runs/b")
    edit(config, "ledger.db", "other.db")
    assert "seconds" not in trained(sfumato, config)


def folders_of_colour(config: Path, *roles: str) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    for role in roles:
        for kind in ("cat", "dog"):
            (config.parent / role / kind).mkdir(parents=True)
            for k in range(6):
                pixels = rng.integers(0, 255, (6, 6, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(config.parent / role / kind / f"m{k}.png")
    for role in ("private", "public", "test"):
        edit(config, f'{role} = "{role}.csv"', f'{role} = "{role}"' if role in roles else "")
    edit(config, 'label = "kind"\n', 'classes = ["cat", "dog"]\n')
    edit(config, "range = [-1, 3]", "range = [0, 255]")
    edit(config, "size = 300", "size = 12")
    edit(config, "batch_size = 100", "batch_size = 6")
    edit(config, "outputs = 3", "outputs = 2")


@pytest.mark.parametrize("roles", [["private"], ["private", "public"], ["private", "test"]], ids="-".join)
def test_one_private_image_decides_nothing_for_the_others(sfumato: Sfumato, config: Path, roles: list[str]) -> None:
    """A grey one, or a small one, the first by its name: the model keeps its shape, and all others their colours."""
    from PIL import Image

    folders_of_colour(config, *roles)
    first = config.parent / "private" / "cat" / "a.png"
    Image.fromarray(np.zeros((6, 6), dtype=np.uint8)).save(first)
    if roles == ["private"]:
        refused = sfumato("train", config)
        assert refused.status == 2
        assert "[model] shape is missing" in refused.err
        edit(config, "outputs = 2", "outputs = 2\nshape = [3, 6, 6]")
    told = trained(sfumato, config)
    weights = load_file(Path(told["out"]) / "weights.safetensors")
    assert {tensor.shape for tensor in weights.values()} == {(2, 3 * 6 * 6), (2,)}
    table = read_table(
        layout(config.parent / "private", "private", label=None, image=(3, 6, 6)), label=None, classes=["cat", "dog"]
    )
    assert sum(len(np.unique(image, axis=0)) == 3 for image in table.features.reshape(-1, 3, 36)) == 12
    Image.fromarray(np.zeros((5, 6), dtype=np.uint8)).save(first)
    edit(config, "runs/a", "runs/b")
    refused = sfumato("train", config)
    assert refused.status == 2
    assert "5" not in refused.err.replace(str(config.parent), "")


def test_one_odd_private_image_is_not_warned_of(tmp_path: Path) -> None:
    """Pillow warns of a palette with transparency; warnings are errors here, and would tell of a row elsewhere."""
    from PIL import Image

    (tmp_path / "cat").mkdir()
    image = Image.fromarray(np.arange(36, dtype=np.uint8).reshape(6, 6)).convert("P")
    image.save(tmp_path / "cat" / "z.png", transparency=bytes([0, 128]))
    table = layout(tmp_path, "private", label=None, image=(3, 6, 6))
    assert read_table(table, label=None, classes=["cat", "dog"]).features.shape == (1, 3, 6, 6)
    with pytest.warns(UserWarning, match="Transparency"):
        read_table(layout(tmp_path, "public", label=None), label=None, classes=["cat"])


@pytest.mark.parametrize("kind", ["parquet", "dataset"])
def test_columns_of_arrow(sfumato: Sfumato, config: Path, kind: str) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pytest.importorskip("pyarrow.parquet")
    expected = trained(sfumato, config)["epsilon"]
    for role in ("private", "public", "test"):
        x, y = features(config.parent / f"{role}.csv")
        names = ["city", "town", "town", None]
        table = arrow.table(
            {"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "kind": y.astype(int), "where": [names[int(k)] for k in y]}
        )
        if kind == "parquet":
            arrow.parquet.write_table(table, config.parent / f"{role}.parquet")
            edit(config, f"{role}.csv", f"{role}.parquet")
        else:  # as Dataset.save_to_disk of Hugging Face writes it
            folder = config.parent / role
            folder.mkdir()
            (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
            with arrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as file:
                file.write_table(table)
            edit(config, f"{role}.csv", role)
    edit(config, "range = [-1, 3]", 'range = [-1, 3]\ncategories = {where = ["city", "town"]}')
    edit(config, "runs/a", "runs/b")
    edit(config, "ledger.db", "other.db")
    told = trained(sfumato, config)
    assert told["epsilon"] == expected
    assert told["metrics"]["test_accuracy"] > 0.9
    model = library.load(told["out"])
    file = config.parent / ("test.parquet" if kind == "parquet" else "test")
    assert (model.predict(file) == features(config.parent / "test.csv")[1]).mean() == told["metrics"]["test_accuracy"]


def test_copies_that_a_cache_keeps_of_the_rows_are_not_rows(tmp_path: Path) -> None:
    """`datasets` writes what map and sort give beside the data: with them everyone would be there twice."""
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    table = arrow.table({"a": [1.0, 2.0, 3.0], "kind": [0, 1, 1]})
    for name in ("data-00000-of-00001.arrow", "cache-7d3edaa06fc7e9d9.arrow"):
        with arrow.ipc.new_stream(str(tmp_path / name), table.schema) as file:
            file.write_table(table)
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    found = read_table(layout(tmp_path, "private", label="kind"), label="kind")
    assert found.features.tolist() == [[1.0], [2.0], [3.0]]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("{}", "does not name the files of its rows"),
        ("[]", "does not name the files of its rows"),
        ('{"_data_files": []}', "does not name the files of its rows"),
        ('{"_data_files": [{"filename": "../other/data.arrow"}]}', "in this folder"),
        ('{"_data_files": [{"filename": "data.arrow"}, {"filename": "data.arrow"}]}', "each once"),
        (
            '{"_data_files": [{"filename": "data.arrow"}], "_indices_data_files": [{"filename": "indices.arrow"}]}',
            "flatten_indices",
        ),
        ("no json", "cannot be read as a dataset"),
    ],
)
def test_a_dataset_that_does_not_say_which_files_are_its_rows_is_refused(tmp_path: Path, state: str, said: str) -> None:
    (tmp_path / "state.json").write_text(state)
    (tmp_path / "data.arrow").write_bytes(b"")
    with pytest.raises(InvalidArgument, match=said):
        layout(tmp_path, "private", label="kind")


def test_without_pyarrow_one_sentence_says_so(sfumato: Sfumato, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (config.parent / "private.parquet").write_bytes(b"PAR1")
    edit(config, "private.csv", "private.parquet")
    refused = sfumato("train", config)
    assert refused.status == 2
    assert refused.err.endswith("needs pyarrow to be read: pip install pyarrow.\n")


def test_without_timm_one_sentence_says_so(sfumato: Sfumato, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    edit(config, 'kind = "linear"', 'kind = "timm:resnet18"')
    refused = sfumato("train", config)
    assert refused.status == 2
    assert "kind='timm:resnet18' needs timm" in refused.err


def test_a_class_that_no_private_image_has_is_not_told(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "dark").mkdir()
    Image.fromarray(np.zeros((4, 4), dtype=np.uint8)).save(tmp_path / "dark" / "0.png")
    table = layout(tmp_path, "private", label=None, image=(1, 4, 4))
    found = read_table(table, label=None, classes=["dark", "light"])
    assert found.labels.tolist() == [0]
    with pytest.raises(InvalidArgument, match="no folder 'light'"):
        read_table(layout(tmp_path, "public", label=None), label=None, classes=["dark", "light"])


def test_a_classifier_of_tokens(sfumato: Sfumato, config: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokens = np.random.default_rng(0).integers(2, 20, (80, 6))
    labels = tokens[:, 0] % 3
    parts = {"train": slice(0, 60), "public": slice(60, 68), "test": slice(68, 80)}
    arrays = {f"{n}_{part}": rows[where] for part, where in parts.items() for n, rows in (("x", tokens), ("y", labels))}
    np.savez(config.parent / "all.npz", **arrays)
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    settings = transformers.BertConfig(vocab_size=20, max_position_embeddings=8, **small)
    settings.save_pretrained(config.parent / "bert")  # an architecture without weights
    for_arrays(config, "transformers:bert")
    told = trained(sfumato, config)
    found = library.load(told["out"]).predict(tokens[68:])
    assert (found == labels[68:]).mean() == told["metrics"]["test_accuracy"]


def for_arrays(config: Path, kind: str) -> None:
    for role in ("private", "public", "test"):
        edit(config, f"{role}.csv", "all.npz")
    edit(config, 'label = "kind"\n', "")
    edit(config, "range = [-1, 3]\n", "")
    edit(config, "size = 300", "size = 60")
    edit(config, "batch_size = 100", "batch_size = 20")
    edit(config, "steps = 12", "steps = 2")
    edit(config, 'kind = "linear"', f'kind = "{kind}"')


def test_a_classifier_of_transformers(sfumato: Sfumato, config: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    rng = np.random.default_rng(0)
    parts = {}
    for part, count in (("train", 60), ("public", 8), ("test", 12)):
        labels = np.arange(count) % 3
        parts[f"x_{part}"] = rng.normal(size=(count, 1, 8, 8)) * 0.1 + labels[:, None, None, None] / 2
        parts[f"y_{part}"] = labels
    np.savez(config.parent / "all.npz", **parts)
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    settings = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, **small)
    transformers.ViTForImageClassification(settings).save_pretrained(config.parent / "vit")
    for_arrays(config, "transformers:vit")
    told = trained(sfumato, config)
    found = library.load(told["out"]).predict(parts["x_test"])
    assert (found == parts["y_test"]).mean() == told["metrics"]["test_accuracy"]
