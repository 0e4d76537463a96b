"""`sfumato init`: from raw files to a trained model in a few commands, and never a look at a private row."""

from __future__ import annotations

import io
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from sfumato.cli.init_text import batch_of, delta_of
from tests.cli.conftest import files

Sfumato = Callable[..., Any]
NAMES = "age,workclass,city-size,hours,income"
SECRET = "4711-secret"


def write_people(path: Path, rows: int, seed: int, *, header: bool = False) -> None:
    """Like the raw UCI form of Adult: no header, a space after each comma, question marks, words, and a label."""
    rng = np.random.default_rng(seed)
    lines = [", ".join(NAMES.split(","))] if header else []
    for _ in range(rows):
        age, hours = int(rng.integers(17, 91)), int(rng.integers(1, 100))
        work = ["Private", "State-gov", "?"][int(rng.choice(3, p=[0.6, 0.3, 0.1]))]
        rich = age + hours + (40 if work == "State-gov" else 0) > 110
        lines.append(f"{age}, {work}, {int(rng.integers(1, 5))}, {hours}, {'>50K' if rich else '<=50K'}")
    path.write_text("\n".join(lines) + "\n\n")  # the raw file ends with an empty line


@pytest.fixture
def people(tmp_path: Path) -> Path:
    for k, name in enumerate(("private.data", "public.csv", "held_out.test")):
        write_people(tmp_path / name, (1500, 200, 300)[k], k)
    return tmp_path


class Terminal(io.StringIO):
    """What a person types."""

    def isatty(self) -> bool:
        return True


def init(sfumato: Sfumato, folder: Path, *options: str, private: str = "private.data") -> dict[str, Any]:
    places = [folder / name for name in (private, "public.csv", "held_out.test")]
    result = sfumato("init", *places, "-o", folder / "config.toml", "--json", *options)
    assert result.status == 0, result.err
    found: dict[str, Any] = json.loads(result.out)
    return found


def test_from_raw_files_to_a_model(sfumato: Sfumato, people: Path) -> None:
    told = init(sfumato, people, "--columns", NAMES, "--size", "1500", "--epsilon", "4")
    assert told["of_private"] == "nothing was read"
    config = tomllib.loads((people / "config.toml").read_text())
    data = config["data"]
    assert data["columns"] == NAMES.split(",")
    assert data["classes"] == ["<=50K", ">50K"]
    assert data["missing"] == ["?"]
    assert data["categories"] == {"workclass": ["Private", "State-gov"]}
    ages = [float(line.split(",")[0]) for line in (people / "public.csv").read_text().split("\n") if line]
    assert data["ranges"]["age"] == [min(ages), max(ages)]
    assert (data["size"], config["privacy"]["delta"], config["model"]["outputs"]) == (1500, 1e-4, 2)

    result = sfumato("train", people / "config.toml", "--json")
    assert result.status == 0, result.err
    trained = json.loads(result.out)
    assert trained["epsilon"] <= 4
    assert trained["metrics"]["test_accuracy"] > 0.8  # always guessing the larger class has about 0.6

    made = with_synthesis(sfumato, people / "config.toml")["synthesis"]
    assert (made["generator"], made["rows"], made["samples"]) == ("Gaussian copula", 200, 400)


def test_no_private_row_is_read(sfumato: Sfumato, people: Path) -> None:
    (people / "private.data").write_bytes(b"\xff\xfe not even text")
    init(sfumato, people, "--columns", NAMES, "--size", "1500")
    text = (people / "config.toml").read_text()
    (people / "config.toml").unlink()
    write_people(people / "private.data", 9, 5)
    init(sfumato, people, "--columns", NAMES, "--size", "1500")
    assert (people / "config.toml").read_text() == text


def test_with_a_header_row_that_row_alone_is_read(sfumato: Sfumato, people: Path) -> None:
    for k, name in enumerate(("public.csv", "held_out.test")):
        write_people(people / name, 200, k, header=True)
    (people / "private.csv").write_bytes(NAMES.encode() + b"\n" + b"5" * 300_000 + b"\n\xff no text\n")
    told = init(sfumato, people, "--size", "1500", "--label", "income", private="private.csv")
    assert told["of_private"] == "the header row alone was read"
    assert "columns" not in tomllib.loads((people / "config.toml").read_text())["data"]
    (people / "config.toml").unlink()
    (people / "private.csv").write_text(f"{SECRET},a,b,c,d\n")
    refused = sfumato("init", people / "private.csv", people / "public.csv", "-o", people / "config.toml", "--size", 10)
    assert refused.status == 2
    assert "no column 'age'" in refused.err
    assert SECRET not in refused.err


def test_without_names_columns_are_numbered_and_the_last_is_predicted(sfumato: Sfumato, people: Path) -> None:
    told = init(sfumato, people, "--size", "1500", "--ignore", "c3")
    assert told["label"] == "c5"
    assert told["ignored"] == ["c3"]
    assert sfumato("train", people / "config.toml", "--dry-run").status == 0


def test_numbers_are_predicted_by_regression(sfumato: Sfumato, tmp_path: Path) -> None:
    for name in ("private.data", "public.csv", "held_out.test"):
        rows = (f"{k / 50},{np.sin(k):.4f}" for k in range(50))
        (tmp_path / name).write_text("x,y\n" + "\n".join(rows) + "\n")
    assert init(sfumato, tmp_path, "--size", "50")["outputs"] == 1
    assert sfumato("train", tmp_path / "config.toml", "--dry-run").status == 0


@pytest.mark.parametrize("role", ["public", "test"])
@pytest.mark.parametrize("kind", ["csv", "npz"])
@pytest.mark.parametrize("linked", [False, True])
def test_private_rows_are_not_looked_at_as_public_ones(
    sfumato: Sfumato, tmp_path: Path, role: str, kind: str, linked: bool
) -> None:
    """Their number and range would be told, and stand in the config."""
    private, other = tmp_path / f"private.{kind}", tmp_path / f"other.{kind}"
    if kind == "csv":
        for path in (private, other):
            path.write_text("a,y\n4711,0\n3,1\n")
    else:
        for path in (private, other):
            np.savez(path, X=np.full((3, 2), 4711.0), y=[0, 1, 0])
    same = private
    if linked:
        same = tmp_path / f"link.{kind}"
        same.hardlink_to(private)
    files = [private, same] if role == "public" else [private, other, same]
    result = sfumato("init", *files, "-o", tmp_path / "config.toml", "--size", 3, "--yes")
    assert result.status == 2
    assert "is also public or test" in result.err
    assert "4711" not in result.err + result.out
    assert not (tmp_path / "config.toml").exists()


def test_arrays_of_images(sfumato: Sfumato, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    parts = {f"x_{p}": rng.integers(0, 256, (20, 1, 16, 16), dtype=np.uint8) for p in ("train", "public", "test")}
    labels = {name.replace("x", "y"): np.arange(20) % 4 for name in parts}
    np.savez(tmp_path / "all.npz", **parts, **labels)
    result = sfumato("init", *[tmp_path / "all.npz"] * 3, "-o", tmp_path / "config.toml", "--size", 20, "--json")
    assert result.status == 0, result.err
    found = tomllib.loads((tmp_path / "config.toml").read_text())
    assert found["model"] == {"kind": "cnn", "outputs": 4, "shape": [1, 16, 16]}
    assert found["data"]["range"] == [0, 255]
    assert sfumato("train", tmp_path / "config.toml", "--dry-run").status == 0
    assert "synthesis" not in found
    assert with_synthesis(sfumato, tmp_path / "config.toml")["synthesis"]["generator"] == "digits"


@pytest.mark.parametrize(("row", "shape"), [((64,), None), ((8, 8), [1, 8, 8]), ((1, 8, 8), [1, 8, 8])])
def test_arrays_of_small_images(
    sfumato: Sfumato, tmp_path: Path, row: tuple[int, ...], shape: list[int] | None
) -> None:
    """Pixels from 0 to 16: with a range up to 255 they would all be next to black, and the cnn has no room in 8 x 8."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    parts = {"train": order[:1300], "public": order[1300:1500], "test": order[1500:]}
    arrays = {f"x_{name}": digits.data[part].reshape(-1, *row) for name, part in parts.items()}
    labels = {f"y_{name}": digits.target[part] for name, part in parts.items()}
    np.savez(tmp_path / "all.npz", **arrays, **labels)
    config = tmp_path / "config.toml"
    assert sfumato("init", *[tmp_path / "all.npz"] * 3, "-o", config, "--size", 1300, "--yes").status == 0
    found = tomllib.loads(config.read_text())
    assert found["data"]["range"] == [0, 16]
    assert "widen it if private values may lie outside" in config.read_text()
    assert (found["model"]["kind"], found["model"].get("shape")) == ("mlp" if shape else "linear", shape)
    assert found["training"]["batch_size"] == 512
    result = sfumato("train", config, "--json")
    assert result.status == 0, result.err
    assert json.loads(result.out)["metrics"]["test_accuracy"] > 0.8


@pytest.mark.parametrize(
    ("row", "model"),
    [
        ((28, 28), {"kind": "cnn", "outputs": 4, "shape": [1, 28, 28]}),
        ((28, 28, 1), {"kind": "cnn", "outputs": 4, "shape": [1, 28, 28]}),
        ((3, 14, 14), {"kind": "cnn", "outputs": 4, "shape": [3, 14, 14]}),
        ((3, 14, 13), {"kind": "mlp", "outputs": 4, "shape": [3, 14, 13]}),
        ((28, 28, 3), {"kind": "mlp", "outputs": 4}),  # colours last, where the cnn would take rows of pixels for them
    ],
)
def test_a_model_that_fits_the_rows(
    sfumato: Sfumato, tmp_path: Path, row: tuple[int, ...], model: dict[str, Any]
) -> None:
    rows = np.random.default_rng(0).random((20, *row), dtype=np.float32)
    rows[0, 0, 0] = np.nan  # which is in no range
    np.savez(tmp_path / "all.npz", x_train=rows, y_train=np.arange(20) % 4, x_public=rows, y_public=np.arange(20) % 4)
    config = tmp_path / "config.toml"
    result = sfumato("init", *[tmp_path / "all.npz"] * 2, "-o", config, "--size", 20, "--yes")
    assert result.status == 0, result.err
    found = tomllib.loads(config.read_text())
    assert found["model"] == model
    assert 0 <= found["data"]["range"][0] < 0.1 < 0.9 < found["data"]["range"][1] <= 1
    assert sfumato("train", config, "--dry-run").status == 0


def test_a_folder_of_small_images(sfumato: Sfumato, tmp_path: Path) -> None:
    for part in ("private", "public"):
        for kind in ("ant", "bee"):
            (tmp_path / part / kind).mkdir(parents=True)
            for k in range(4):
                image = Image.fromarray(np.full((8, 8), 200 * (kind == "bee") + k, np.uint8))
                image.save(tmp_path / part / kind / f"{k}.png")
    config = tmp_path / "config.toml"
    places = tmp_path / "private", tmp_path / "public"
    assert sfumato("init", *places, "-o", config, "--size", 8, "--yes").status == 0
    found = tomllib.loads(config.read_text())
    assert found["model"] == {"kind": "mlp", "outputs": 2, "shape": [1, 8, 8]}
    assert found["data"]["range"] == [0, 255]
    assert sfumato("train", config, "--json").status == 0


def with_synthesis(sfumato: Sfumato, config: Path) -> dict[str, Any]:
    """What a dry run says when the signs before [synthesis] are removed."""
    before, after = config.read_text().split("remove the signs. Costs no privacy.\n")
    config.write_text(before + "\n" + re.sub("^# ", "", after, flags=re.MULTILINE))
    result = sfumato("train", config, "--dry-run", "--json")
    assert result.status == 0, result.err
    found: dict[str, Any] = json.loads(result.out)
    return found


def test_questions_on_a_terminal(sfumato: Sfumato, people: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Terminal("income\nmany\n1500\n0.5\n")  # asked again for what is no number
    monkeypatch.setattr("sys.stdin", answers)
    places = [people / name for name in ("private.data", "public.csv")]
    result = sfumato("init", *places, "-o", people / "config.toml", "--columns", NAMES)
    assert result.status == 0, result.err
    found = tomllib.loads((people / "config.toml").read_text())
    assert (found["data"]["label"], found["data"]["size"], found["privacy"]["epsilon"]) == ("income", 1500, 0.5)
    assert not answers.read()


def test_the_size_is_declared_by_a_person(sfumato: Sfumato, people: Path) -> None:
    before = files(people)
    refused = sfumato("init", people / "private.data", people / "public.csv", "-o", people / "config.toml", "--yes")
    assert refused.status == 2
    assert "--size is missing" in refused.err
    assert files(people) == before


@pytest.mark.parametrize("size", [2, 9, 10, 99, 100, 31_561, 10**6])
def test_delta_lies_below_one_over_the_size(size: int) -> None:
    assert 1 / (100 * size) < delta_of(size) < 1 / size


@pytest.mark.parametrize("size", [2, 3, 9, 100, 1300, 31_561, 10**6])
def test_the_batch_has_some_of_the_rows_and_of_few_rows_many(size: int) -> None:
    assert min(256, size / 3) < batch_of(size) <= max(2, 3 * size / 4)
