"""Tables from files: written here in each of their forms, and read back; and the real ones, where they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sfumato.data import tabular
from sfumato.data.tabular import TabularData
from sfumato.errors import InvalidArgument

REAL = Path(os.environ.get("SFUMATO_DATA", "nowhere"))
RNG = np.random.default_rng(0)
Loader = Callable[[Path], TabularData]

LOADERS: list[Loader] = [
    tabular.adult_a,
    tabular.ipums_br,
    tabular.ipums_us,
    tabular.magic04,
    tabular.mini_boo_ne,
    tabular.skin,
    tabular.cadata,
    tabular.stability,
]


def lines(rows: np.ndarray, last: list[str], between: str) -> str:
    return "".join(
        between.join([*(repr(float(v)) for v in row), end]) + "\n" for row, end in zip(rows, last, strict=True)
    )


def written(folder: Path, name: str, text: str) -> Path:
    (folder / "tabular").mkdir(exist_ok=True)
    (folder / "tabular" / name).write_text(text)
    return folder


def test_adult_as_libsvm_hands_it_out(tmp_path: Path) -> None:
    X = (RNG.random((4, 123)) < 0.1).astype(float)
    X[0, 0], X[1, 122] = 1, 1  # indices begin at 1
    text = "".join(
        f"{sign} " + " ".join(f"{j + 1}:1" for j in np.flatnonzero(row)) + " \n"
        for row, sign in zip(X, ["-1", "+1", "+1", "-1"], strict=True)
    )
    found = tabular.adult_a(written(tmp_path, "a9a", text))
    np.testing.assert_array_equal(found.X, X)
    assert found.y.tolist() == [-1, 1, 1, -1]
    assert found.classification


@pytest.mark.parametrize(
    ("loader", "name", "columns"), [(tabular.ipums_br, "IPUMS-BR.dat", 52), (tabular.ipums_us, "IPUMS-US.dat", 57)]
)
def test_ipums_has_its_label_last(tmp_path: Path, loader: Loader, name: str, columns: int) -> None:
    X = RNG.integers(0, 3, (3, columns)).astype(float)
    found = loader(written(tmp_path, name, lines(X, ["0", "1.0", "0"], " ")))
    np.testing.assert_array_equal(found.X, X)
    assert found.y.tolist() == [-1, 1, -1]


def test_magic_and_skin_as_uci_hands_them_out(tmp_path: Path) -> None:
    X = RNG.random((3, 10))
    magic = tabular.magic04(written(tmp_path, "magic04.data", lines(X, ["g", "h", "g"], ",")))
    np.testing.assert_array_equal(magic.X, X)
    assert magic.y.tolist() == [1, -1, 1]
    skin = tabular.skin(written(tmp_path, "Skin_NonSkin.txt", "74\t85\t123\t1\n1\t2\t255\t2\n"))
    assert skin.X.tolist() == [[74, 85, 123], [1, 2, 255]]
    assert skin.y.tolist() == [1, -1]


def test_miniboone_counts_signal_and_background_first(tmp_path: Path) -> None:
    X = RNG.random((5, 50))
    text = "  2  3\n" + lines(X, [""] * 5, "  ")
    found = tabular.mini_boo_ne(written(tmp_path, "MiniBooNE_PID.txt", text))
    np.testing.assert_array_equal(found.X, X)
    assert found.y.tolist() == [1, 1, -1, -1, -1]
    assert found.lower is None
    with pytest.raises(InvalidArgument, match="damaged"):
        tabular.mini_boo_ne(written(tmp_path, "MiniBooNE_PID.txt", text.replace("  2  3", "  2  4")))


def test_both_forms_of_california_have_the_same_columns(tmp_path: Path) -> None:
    row = {
        "lon": -122.23,
        "lat": 37.88,
        "age": 41,
        "rooms": 880,
        "bed": 129,
        "people": 322,
        "houses": 126,
        "income": 8.3,
    }
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    plain = written(tmp_path / "a", "cal_housing.data", ",".join(str(v) for v in row.values()) + ",452600.0\n")
    order = ("income", "age", "rooms", "bed", "people", "houses", "lat", "lon")
    sparse = written(tmp_path / "b", "cadata", "452600.0 " + " ".join(f"{i + 1}:{row[k]}" for i, k in enumerate(order)))
    for folder in (plain, sparse):
        found = tabular.cadata(folder)
        assert found.X.tolist() == [list(row.values())]
        assert found.y.tolist() == [452600.0]
        assert not found.classification


def test_stability_is_the_number_and_not_the_class(tmp_path: Path) -> None:
    X = RNG.random((2, 12))
    head = ",".join(f'"{n}{i}"' for n in ("tau", "p", "g") for i in range(1, 5)) + ',"stab","stabf"\n'
    body = lines(X, ['0.055,"unstable"', '-0.006,"stable"'], ",")
    found = tabular.stability(written(tmp_path, "Data_for_UCI_named.csv", head + body))
    np.testing.assert_array_equal(found.X, X)
    assert found.y.tolist() == [0.055, -0.006]


def test_the_original_is_preferred_and_the_top_of_the_folder_is_looked_at(tmp_path: Path) -> None:
    np.savez(tmp_path / "skin.npz", X=np.zeros((4, 3), np.uint8), y=np.array([1, 2, 2, 1]))
    assert tabular.skin(tmp_path).y.tolist() == [1, -1, -1, 1]
    assert tabular.skin(written(tmp_path, "Skin_NonSkin.txt", "1\t2\t3\t2\n")).y.tolist() == [-1]


@pytest.mark.parametrize("loader", LOADERS)
def test_what_is_missing_is_told_in_one_sentence(
    loader: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        loader(tmp_path)
    assert "https://" in str(refusal.value)
    assert "tabular/" in str(refusal.value)
    monkeypatch.delenv("SFUMATO_DATA", raising=False)
    with pytest.raises(InvalidArgument, match="SFUMATO_DATA is not set"):
        loader(None)  # type: ignore[arg-type]
    monkeypatch.setenv("SFUMATO_DATA", str(tmp_path))
    with pytest.raises(InvalidArgument, match=f"{tmp_path}"):
        loader(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "said"),
    [("1\t2\t3\t4\t1\n", "3 columns"), ("1\t2\n1\t2\t3\n", "damaged"), ("1\tb\t3\t1\n", "damaged"), ("", "damaged")],
    ids=["too many columns", "ragged", "letters", "empty"],
)
def test_a_damaged_file_is_told(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        tabular.skin(written(tmp_path, "Skin_NonSkin.txt", text))


def test_a_class_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="damaged"):
        tabular.magic04(written(tmp_path, "magic04.data", lines(np.zeros((1, 10)), ["x"], ",")))


@pytest.mark.skipif(not (REAL / "tabular").is_dir(), reason="SFUMATO_DATA has no folder tabular")
@pytest.mark.parametrize(
    ("loader", "rows", "columns", "about"),
    [  # paper 001, table 1: the share of positives in percent, or the variance of targets that span [-1, 1]
        (tabular.adult_a, 32561, 123, 24.1),
        (tabular.ipums_br, 38000, 52, 50.6),
        (tabular.magic04, 19020, 10, 64.8),
        (tabular.skin, 245057, 3, 20.8),
        (tabular.cadata, 20640, 8, 0.23),
        (tabular.stability, 10000, 12, 0.15),
    ],
)
def test_the_real_tables_are_those_of_the_paper(loader: Loader, rows: int, columns: int, about: float) -> None:
    found = loader(REAL)
    assert found.X.shape == (rows, columns)
    assert found.lower is not None
    assert found.upper is not None
    assert found.lower.shape == found.upper.shape == (columns,)
    outside = ((found.lower > found.X) | (found.upper < found.X)).mean(0)
    assert outside.max() < 0.08  # ranges are about right, although no row decided them
    if found.y_range is None:
        assert round(100 * float(np.mean(found.y == 1)), 1) == about
    else:
        assert round(float(found.y.var() / (np.ptp(found.y) / 2) ** 2), 2) == about
        low, high = found.y_range
        assert np.mean((found.y < low) | (found.y > high)) < 1e-3
        assert high - low < 1.1 * np.ptp(found.y)
