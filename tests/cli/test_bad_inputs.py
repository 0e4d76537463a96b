"""Whatever is wrong with the input: one clear sentence on stderr, exit status 2, and not a file changed."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sfumato import Ledger
from tests.cli.conftest import add, edit, files

Sfumato = Callable[..., Any]

# What is changed in the config of conftest (old text, new text), and what the sentence must say.
CONFIGS = {
    "unknown key": ("steps = 12", "steqs = 12", "did you mean 'steps'?"),
    "unknown section": ("[training]", "[trainings]", "did you mean 'training'?"),
    "key of another section": ("size = 300", "size = 300\nepsilon = 1.0", "it belongs to [privacy]"),
    "missing key": ("size = 300\n", "", "lacks the key 'size'"),
    "not TOML": ("size = 300", "size = ", "is not valid TOML"),
    "wrong type": ("size = 300", 'size = "many"', "must be a whole number"),
    "negative size": ("size = 300", "size = -300", "must be at least 1"),
    "missing private file": ("private.csv", "gone.csv", "does not exist"),
    "missing public file": ('public = "public.csv"', 'public = "gone.csv"', "does not exist"),
    "unknown format": ("private.csv", "config.toml", "must be a .csv, .parquet or .npz file"),
    "private is public": ('public = "public.csv"', 'public = "./private.csv"', "holds the private rows themselves"),
    "private is test": ('test = "test.csv"', 'test = "private.csv"', "holds the private rows themselves"),
    "wrong column": ('label = "kind"', 'label = "sort"', "has no column 'sort'"),
    "wrong column of a file without a header row": (
        'label = "kind"',
        'label = "kid"\ncolumns = ["c", "a", "b", "kind"]',
        "has no column 'kid' among its declared columns: did you mean 'kind'?",
    ),
    "label not in classes": ("outputs = 3", "outputs = 2", "must be whole numbers from 0 to 1"),
    "names for fewer classes": ('label = "kind"', 'label = "kind"\nclasses = ["x", "y"]', "must be 3 different labels"),
    "categories that are no list": ("range = [-1, 3]", "[data.categories]\na = 3", "must be a list of words"),
    "range of no column": ("range = [-1, 3]", "[data.ranges]\nheight = [0, 1]", "'height', and private="),
    "range of no declared column": (
        "range = [-1, 3]",
        'columns = ["c", "a", "b", "kind"]\n[data.ranges]\nheight = [0, 1]',
        "height is no column: known are c, a, b, kind.",
    ),
    "range of some columns": ("range = [-1, 3]", "[data.ranges]\na = [0, 1]", "lacks b"),
    "range that is empty": ("range = [-1, 3]", "range = [3, 3]", "lower must be below upper"),
    "two ways of scaling": ("range = [-1, 3]", "range = [-1, 3]\nlower = 0\nupper = 1", "give one of them"),
    "columns declared twice": ("size = 300", 'size = 300\ncolumns = ["a", "a"]', "has a name twice"),
    "a header row where none is declared": (
        "size = 300",
        'size = 300\ncolumns = ["c", "a", "b", "kind"]',
        "not a number",
    ),
    "synthetic rows alone": ('public = "public.csv"', 'synthetic = "made"', "join public ones"),
    "impossible budget": ("epsilon = 3.0", "epsilon = 0.0", "must be a positive, finite number"),
    "budget below epsilon": ("epsilon = 3.0", "epsilon = 3.0\nbudget = 1.0", "must be at least epsilon=3.0"),
    "delta above 1/size": ("delta = 1e-4", "delta = 0.1", "must lie between 0 and 1/size"),
    "unknown adjacency": ("delta = 1e-4", 'delta = 1e-4\nadjacency = "swap"', "must be one of 'add-remove'"),
    "batch above size": ("batch_size = 100", "batch_size = 100000", "100000"),
    "unknown method": ("steps = 12", 'steps = 12\nmethod = "dope"', "did you mean 'dope-sgd'?"),
    "option of another method": ("[privacy]", "[method]\nradius = 1.0\n[privacy]", "is not used by method"),
    "unknown model": ('kind = "linear"', 'kind = "forest"', "must be 'linear'"),
    "model of nowhere": ('kind = "linear"', 'kind = "nowhere:model"', "cannot be made"),
    "pretrained folder of nowhere": ('kind = "linear"', 'kind = "transformers:nowhere"', "has no config.json"),
    "cnn without a shape": ('kind = "linear"', 'kind = "cnn"', "shape is missing"),
    "cnn for small images": (
        'kind = "linear"',
        'kind = "cnn"\nshape = [3, 1, 1]',
        "needs images of 14 x 14 pixels at least: give kind='mlp', or a network of your own as 'module:function'.",
    ),
    "choice of nothing": ("steps = 12", "steps = 12\nchoose = 0.2", "give ema or keep_last"),
    "out that is a file": ("runs/a", "test.csv", "is a file"),
    "ledger that is none": ("ledger.db", "test.csv", "is not a database"),
    "ledger in a folder of nowhere": ("ledger.db", "nowhere/ledger.db", "ledger.db"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_train(sfumato: Sfumato, config: Path, case: str) -> None:
    old, new, said = CONFIGS[case]
    edit(config, old, new)
    refused(sfumato, config.parent, said, "train", config)


# Commands and what the sentence must say; {} is the folder of the config.
COMMANDS = [
    ("train {}/gone.toml", "does not exist"),
    ("train", "config"),
    ("train {}/config.toml --steps 3", "--steps"),
    ("init {}/private.csv", "init was given 1 file(s)"),
    ("init {}/gone.csv {}/public.csv --size 300", "does not exist"),
    ("init {}/private.csv {}/private.csv --size 300", "other people's"),
    ("init {}/private.csv {}/public.csv -o {}/new.toml", "--size is missing"),
    ("init {}/private.csv {}/public.csv -o {}/new.toml --size many", "--size"),
    ("init {}/private.csv {}/public.csv -o {}/config.toml --size 300", "exists already"),
    ("init {}/private.csv {}/public.csv -o {}/new.toml --size 300 --label sort", "has no column 'sort'"),
    ("init {}/private.csv {}/public.csv -o {}/new.toml --size 300 --columns a,b", "4 cells"),
    ("init {}/private.csv {}/public.csv -o {}/new.toml --size 300 --epsilon -1", "positive"),
    ("init {}/private.csv {}/public.csv -o {}/nowhere/new.toml --size 300", "does not exist"),
    ("account --dataset-size 100 --delta 1e-5", "epsilon"),
    ("account --dataset-size 0 --delta 1e-5 --epsilon 1", "--dataset-size"),
    ("account --dataset-size 100 --delta 1e-5 --epsilon 1 --batch-size 1000 --steps 5", "batch"),
    ("budget {}/gone.db", "gone.db"),
    ("budget {}/test.csv", "is not a database"),
    ("predict {}/runs/a", "FILE"),
    ("predict {}/gone {}/test.csv", "holds no run.json"),
    ("predict {} {}/test.csv", "holds no run.json"),
    ("predict {}/runs/a {}/test.csv -o {}/config.toml", "holds something else than predictions"),
    ("predict {}/runs/a {}/test.csv -o {}/nowhere/new.csv", "must name a file in a folder that exists"),
    ("select {}/gone.toml", "does not exist"),
    ("select {}/config.toml", "unknown section"),
    ("synthesize {}/gone.toml", "does not exist"),
    ("synthesize {}/config.toml", "has no place in a synthesis"),
    ("reproduce 999-table9", "999-table9"),
    ("reproduce --scale huge", "huge"),
    ("report {}/nowhere", "does not exist"),
    ("report {}", "run.json"),
    ("audit {}/gone.toml", "does not exist"),
    ("audit nowhere:model", "nowhere"),
    ("audit --methods nothing", "nothing"),
    ("tune {}/config.toml", "has no [tune] section: add one with the space to search, see docs/tuning.md."),
    ("nonsense", "nonsense"),
]


@pytest.mark.parametrize(("line", "said"), COMMANDS, ids=[line.replace("{}/", "") for line, _ in COMMANDS])
def test_commands(sfumato: Sfumato, config: Path, line: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(config.parent)
    refused(sfumato, config.parent, said, *line.replace("{}", str(config.parent)).split())


def refused(sfumato: Sfumato, folder: Path, said: str, *arguments: object) -> None:
    before = files(folder)
    result = sfumato(*arguments)
    assert result.status == 2, result
    assert said in result.err
    assert result.err.startswith("sfumato: ")
    assert result.err.count("\n") == 1, "more than one line"
    assert result.err.rstrip()[-1] in ".?", "not a sentence"
    assert result.out == ""
    assert files(folder) == before


def test_a_ledger_that_another_process_has_locked(
    sfumato: Sfumato, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ledger(config.parent / "ledger.db").close()
    monkeypatch.setitem(Ledger.__init__.__kwdefaults__, "timeout", 0.1)  # type: ignore[index]
    other = sqlite3.connect(config.parent / "ledger.db")
    other.execute("BEGIN EXCLUSIVE")
    try:
        refused(sfumato, config.parent, "was locked by another process", "train", config)
    finally:
        other.close()


def test_a_budget_that_is_spent(sfumato: Sfumato, config: Path) -> None:
    assert sfumato("train", config).status == 0
    edit(config, "runs/a", "runs/b")
    refused(sfumato, config.parent, "is spent", "train", config)


def test_a_bad_cell_is_not_quoted(sfumato: Sfumato, config: Path) -> None:
    path = config.parent / "private.csv"
    path.write_text(path.read_text() + "1,2,SECRET,0\n")
    result = sfumato("train", config)
    assert (result.status, "SECRET" in result.err) == (2, False)
    assert "column 'c' has a cell that is not a number" in result.err


def test_a_label_that_is_no_class_is_named_where_it_is_public(sfumato: Sfumato, config: Path) -> None:
    for role in ("private", "public", "test"):
        path = config.parent / f"{role}.csv"
        right = path.read_text()
        lines = right.split("\n")
        lines[3] = lines[3].rpartition(",")[0] + ",violet"
        path.write_text("\n".join(lines))
        for classes in ('label = "kind"', 'label = "kind"\nclasses = ["0", "1", "2"]'):
            edit(config, 'label = "kind"', classes)
            result = sfumato("train", config)
            assert (result.status, result.err.count("\n")) == (2, 1)
            assert f"{role}=" in result.err
            assert ("violet" in result.err) == ("line" in result.err) == (role != "private")
            edit(config, classes, 'label = "kind"')
        path.write_text(right)


@pytest.mark.parametrize("row", ["0.5,SECRET,SECRET,1", "0.5,0.6,SECRET,1"], ids=["a cell twice", "no cell twice"])
@pytest.mark.parametrize("role", ["private", "public"])
def test_a_file_without_a_header_row(sfumato: Sfumato, config: Path, role: str, row: str) -> None:
    """It is told from a misspelt name by nothing, so that both are named; and none of its cells is."""
    (config.parent / f"{role}.csv").write_text(f"{row}\n{row}\n")
    refused(sfumato, config.parent, "or declare [data] columns if it has no header row.", "train", config)
    assert "SECRET" not in sfumato("train", config).err


def test_a_private_file_that_lacks_a_column(sfumato: Sfumato, config: Path) -> None:
    edit(config, "range = [-1, 3]", "[data.ranges]\na = [0, 1]\nb = [0, 1]\nc = [0, 1]")
    (config.parent / "private.csv").write_text("a,b,kind\n1,2,0\n")
    said = (
        f"[data.ranges] names 'c', and private={str(config.parent / 'private.csv')!r} has no such column in its header"
    )
    refused(sfumato, config.parent, said, "train", config)


def test_ranges_of_columns_where_there_are_none(sfumato: Sfumato, config: Path) -> None:
    np.savez(config.parent / "other.npz", X=np.zeros((4, 5)), y=np.zeros(4))
    edit(config, "private.csv", "other.npz")
    edit(config, "range = [-1, 3]", "[data.ranges]\na = [0, 1]")
    refused(sfumato, config.parent, "has no columns with names: give range = [lowest, highest]", "train", config)


def test_public_rows_of_another_shape(sfumato: Sfumato, config: Path) -> None:
    np.savez(config.parent / "other.npz", X=np.zeros((4, 5)), y=np.zeros(4))
    edit(config, 'public = "public.csv"', 'public = "other.npz"')
    refused(sfumato, config.parent, "give all tables the same features", "train", config)


def test_arrays_that_are_private_by_their_names(sfumato: Sfumato, config: Path) -> None:
    np.savez(config.parent / "all.npz", X=np.zeros((4, 3)), y=np.zeros(4))
    for role in ("private", "public", "test"):
        edit(config, f"{role}.csv", "all.npz")
    refused(sfumato, config.parent, "holds the private rows themselves", "train", config)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_links_to_the_private_rows_are_private(sfumato: Sfumato, config: Path, link: Callable[..., None]) -> None:
    for role in ("public", "test"):
        link(config.parent / "private.csv", config.parent / f"{role}_too.csv")
        edit(config, f'{role} = "{role}.csv"', f'{role} = "{role}_too.csv"')
        refused(sfumato, config.parent, "holds the private rows themselves", "train", config)
        edit(config, f'{role} = "{role}_too.csv"', f'{role} = "{role}.csv"')


def test_a_warm_up_without_public_rows(sfumato: Sfumato, config: Path) -> None:
    edit(config, 'public = "public.csv"\n', "")
    add(config, "[warmup]\nsteps = 3")
    refused(sfumato, config.parent, "needs public rows", "train", config)
