"""Reading tables: layouts without values, errors without cells."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sfumato.data.encoding import Encoding
from sfumato.data.tables import Layout, Role, Scaling, class_labels, layout, match, read_table
from sfumato.errors import InvalidArgument

SECRET = "4711-secret"


def test_csv_with_quotes_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('\ufeffage,"label",who\n1.5,0,ann\n\n"2e1",1,"bob, jr."\n', encoding="utf-8")
    found = layout(path, "private", label="label", users="who")
    assert found == Layout(path, "private", (1,), ("age",))
    table = read_table(found, label="label", users="who")
    np.testing.assert_array_equal(table.features, np.array([[1.5], [20.0]], dtype=np.float32))
    np.testing.assert_array_equal(table.labels, [0, 1])
    assert table.users is not None
    assert table.users.tolist() == ["ann", "bob, jr."]


def test_spaces_around_an_id_are_nobody_else(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,y,who\n1,0,ann\n2,1,ann \n")
    table = read_table(layout(path, "private", label="y", users="who"), label="y", users="who")
    assert table.users is not None
    assert table.users.tolist() == ["ann", "ann"]


@pytest.mark.parametrize("cell", ["", " ", "nan", "NaN", "?", " ?"])
def test_all_who_have_no_id_are_not_one_user(tmp_path: Path, cell: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"a,y,who\n1,0,{SECRET}\n2,1,{cell}\n3,1,{cell}\n")
    found = layout(path, "private", label="y", users="who", encoding=Encoding(missing=["?"]))
    with pytest.raises(InvalidArgument, match="'who' has a row without a user id") as error:
        read_table(found, label="y", users="who")
    assert SECRET not in str(error.value)
    assert "line" not in str(error.value)


def test_null_ids_of_parquet_are_missing(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    for ids in (["ann", None], [1.0, float("nan")]):
        parquet.write_table(arrow.table({"a": [1.0, 2.0], "y": [0, 1], "who": ids}), tmp_path / "t.parquet")
        with pytest.raises(InvalidArgument, match="without a user id"):
            read_table(layout(tmp_path / "t.parquet", "private", label="y", users="who"), label="y", users="who")


def test_text_labels_are_numbered_in_the_declared_order(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"a,y\n1,yes\n2, no\n3,yes\n4,{SECRET}\n")
    found = layout(path, "private", label="y")
    np.testing.assert_array_equal(read_table(found, label="y", classes=["no", SECRET, "yes"]).labels, [2, 0, 2, 1])
    for options, said in (({"classes": ["no", "yes"]}, "not in classes: declare"), ({}, "declare its labels, classes")):
        with pytest.raises(InvalidArgument, match=said) as error:
            read_table(found, label="y", **options)
        assert SECRET not in str(error.value)
    path.write_text("a,y\n1,yes\n2,nay\n")
    with pytest.raises(InvalidArgument, match="line 3"):
        read_table(layout(path, "public", label="y"), label="y", classes=["no", "yes"])


def test_long_files_are_read_in_chunks(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = np.arange(20_000)
    path.write_text("x,y\n" + "".join(f"{i},{i % 3}\n" for i in rows))
    table = read_table(layout(path, "test", label="y"), label="y")
    np.testing.assert_array_equal(table.features[:, 0], rows)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"a,y\n1,0\n{SECRET},1\n", "'a'"),
        (f"a,y\n1,0\n1,{SECRET}\n", "'y'"),
        (f"a,y\n1,0\n2,1,{SECRET}\n", "cells"),
        (f"a,y\n{SECRET}\n", "cells"),
        ("4711,0\n4712,1\n", "header"),
        (f"{SECRET},0\n4712,1\n", "'y'"),
        ("", "header"),
        ("a,y\n", "no rows"),
        ("a,a,y\n1,2,0\n", "twice"),
        ("y\n1\n", "nothing to learn"),
        (f'a,y\n"{SECRET}\x00,1\n', "private"),
    ],
)
def test_bad_private_csv_is_refused_without_a_value_or_a_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(InvalidArgument) as error:
        read_table(layout(path, "private", label="y"), label="y")
    assert said in str(error.value)
    assert "4711" not in str(error.value)
    assert "line 3" not in str(error.value)


def test_a_public_file_may_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,y\n1,0\nx,1\n")
    with pytest.raises(InvalidArgument, match="line 3"):
        read_table(layout(path, "public", label="y"), label="y")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"a,y\n\xff\xfe4711,1\n")
    with pytest.raises(InvalidArgument, match="UTF-8"):
        read_table(layout(path, "private", label="y"), label="y")


@pytest.mark.parametrize(("role", "ending"), [("private", "_train"), ("test", "_test"), ("public", "_public")])
def test_npz_by_role(tmp_path: Path, role: Role, ending: str) -> None:
    path = tmp_path / "t.npz"
    arrays = {
        f"{n}{e}": np.full((4, 2, 2) if n == "x" else 4, i)
        for i, e in enumerate(("_train", "_test", "_public"))
        for n in "xy"
    }
    np.savez(path, **arrays)
    found = layout(path, role, label=None)
    assert found.shape == (2, 2)
    table = read_table(found, label=None)
    np.testing.assert_array_equal(table.features, arrays[f"x{ending}"])
    np.testing.assert_array_equal(table.labels, arrays[f"y{ending}"])


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"X": np.ones((3, 2))}, "x and y"),
        ({"X": np.ones(3), "y": np.ones(3)}, "row of features"),
        ({"X": np.array([["a"]]), "y": np.ones(1)}, "numbers"),
        ({"X": np.ones((3, 2)), "y": np.ones(2)}, "one number per row"),
    ],
)
def test_bad_npz(tmp_path: Path, arrays: dict[str, np.ndarray], said: str) -> None:
    path = tmp_path / "t.npz"
    np.savez(path, **arrays)
    with pytest.raises(InvalidArgument, match=said):
        read_table(layout(path, "private", label=None), label=None)


def test_not_a_table(tmp_path: Path) -> None:
    (tmp_path / "t.npz").write_text("no zip")
    (tmp_path / "t.xlsx").write_text("")
    for name, said in (("t.npz", "NPZ"), ("t.xlsx", "csv"), ("gone.csv", "exist")):
        with pytest.raises(InvalidArgument, match=said):
            layout(tmp_path / name, "private", label="y")


def test_tables_must_have_the_same_features(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):  # two files, since whether they are one is looked at first
        (tmp_path / name).touch()
    private = Layout(tmp_path / "a.csv", "private", (2,), ("a", "b"))
    match(Layout(tmp_path / "b.csv", "test", (2,), ("b", "a")), private)
    for columns in (("a",), ("a", "b", "c"), ("a", "c")):
        with pytest.raises(InvalidArgument, match=r"test=.*column"):
            match(Layout(tmp_path / "b.csv", "test", (len(columns),), columns), private)


def test_labels_are_checked_without_saying_which() -> None:
    np.testing.assert_array_equal(class_labels(np.array([0.0, 2.0]), 3, "private"), [0, 2])
    for bad in (3, -1, 0.5, np.nan, np.inf):
        with pytest.raises(InvalidArgument, match="from 0 to 2") as error:
            class_labels(np.array([0, bad]), 3, "private")
        assert str(bad) not in str(error.value).replace("outputs=3", "")


def test_scaling_cuts_to_the_declared_range() -> None:
    scale = Scaling.declared([0, -1], [2, 1], (2,))
    np.testing.assert_array_equal(scale(np.array([[1.0, 9.0], [-5.0, 0.0]])), [[0.5, 1.0], [0.0, 0.5]])
    learned = Scaling.of_public(np.array([[0.0, 3.0], [4.0, 3.0]]))
    np.testing.assert_array_equal(learned(np.array([[2.0, 3.0]])), [[0.5, 0.0]])
    with pytest.raises(InvalidArgument, match="upper"):
        Scaling.declared(1, 1, (2,))
    with pytest.raises(InvalidArgument, match="lower"):
        Scaling.declared([0, 0, 0], 1, (2,))


def test_huge_values_pass_in_silence(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,y\n1e300,0\nnan,1\n")
    table = read_table(layout(path, "private", label="y"), label="y")
    scaled = Scaling.declared(-1, 1, (1,))(table.features)
    np.testing.assert_array_equal(scaled, [[1.0], [np.nan]])
