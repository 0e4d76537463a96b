"""Paper 001's tables from files, in the forms in which they are handed around, with ranges that nobody's row decides.

Each loader takes a folder ($SFUMATO_DATA by default) and looks in its `tabular/` and at its top, first for the original
distribution and then for a compact NPZ. Ranges of columns are declared from what the columns mean: units, codes,
borders and top-codes. Some are narrower than the table, since a few huge values would squeeze all others; what lies
outside is cut by whoever scales. `None` means that nothing is known, and public rows must tell.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sfumato.errors import InvalidArgument

Array = npt.NDArray[Any]
Raw = tuple[Array, Array]

_FOLDER = "tabular"
_UNREADABLE = (EOFError, LookupError, OSError, TypeError, ValueError, zipfile.BadZipFile)


@dataclass(frozen=True, kw_only=True, eq=False)
class TabularData:
    """Rows as they are in the file. `y` is -1 or 1 for two classes, else a number whose declared range is `y_range`."""

    X: Array
    y: Array
    lower: Array | None  # the declared range of each column
    upper: Array | None
    y_range: tuple[float, float] | None = None

    @property
    def classification(self) -> bool:
        return self.y_range is None


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Where a table comes from: names of files, each with what reads it, the original first."""

    name: str
    columns: int
    origin: str
    files: dict[str, Callable[[Path], Raw]]

    def read(self, folder: str | Path | None) -> Raw:
        path = self._found(folder)
        try:
            X, y = self.files[path.name](path)
            X, y = np.asarray(X, dtype=np.float64), np.asarray(y, dtype=np.float64)
        except _UNREADABLE:
            raise InvalidArgument(f"{str(path)!r} cannot be read: it is damaged; download it again.") from None
        if X.ndim != 2 or X.shape[1] != self.columns or y.shape != X.shape[:1] or not len(y):
            raise InvalidArgument(
                f"{str(path)!r} is not {self.name}, whose rows have {self.columns} columns and a target: download it "
                f"again from {self.origin}."
            )
        return X, y

    def _found(self, folder: str | Path | None) -> Path:
        given = os.environ.get("SFUMATO_DATA") if folder is None else folder
        if not given:
            raise InvalidArgument(
                f"folder is None and SFUMATO_DATA is not set: give the folder whose {_FOLDER}/ holds {self.name}, or "
                "set the variable."
            )
        places = [place / name for name in self.files for place in (Path(given) / _FOLDER, Path(given))]
        for path in places:
            if path.is_file():
                return path
        raise InvalidArgument(
            f"folder={str(given)!r} does not hold {self.name}: put {next(iter(self.files))}, from {self.origin}, into "
            f"{_FOLDER}/ there."
        )


def adult_a(folder: str | Path | None = None) -> TabularData:
    """Adult in the a9a coding: 32,561 rows of 123 columns that are 0 or 1; 1 is an income above 50,000 dollars."""
    X, y = _ADULT.read(folder)
    return TabularData(X=X, y=np.where(y > 0, 1, -1), lower=np.zeros(123), upper=np.ones(123))


def ipums_br(folder: str | Path | None = None) -> TabularData:
    """IPUMS-BR, 38,000 rows of 52 columns, as the authors of DP-AGD prepared it.

    The file has no names of columns. Most hold the codes 0 and 1, or 1 and 2; the others are numbers of people and
    rooms (up to 9 or 30), an age (to 100), weekly hours (to 140, their top-code) and years (to 100).
    """
    X, y = _IPUMS_BR.read(folder)
    lower, upper = np.zeros(52), np.ones(52)
    for column in (5, 7, 13, 18, 50):
        lower[column], upper[column] = 1, 2
    for column, most in {6: 9, 8: 30, 9: 30, 10: 9, 11: 9, 12: 100, 49: 140, 51: 100}.items():
        upper[column] = most
    return TabularData(X=X, y=np.where(y > 0, 1, -1), lower=lower, upper=upper)


def ipums_us(folder: str | Path | None = None) -> TabularData:
    """IPUMS-US, 39,928 rows of 57 columns, as the authors of DP-AGD prepared it; its columns have no names."""
    X, y = _IPUMS_US.read(folder)
    return TabularData(X=X, y=np.where(y > 0, 1, -1), lower=None, upper=None)


def magic04(folder: str | Path | None = None) -> TabularData:
    """MAGIC gamma telescope, 19,020 images of air showers described by 10 numbers; 1 is a gamma.

    Lengths are in millimetres in a camera of about one metre across; two columns are shares, one an angle from 0 to 90
    degrees, and one the logarithm (to base 10) of a number of photons, from a hundred to a hundred thousand.
    """
    X, y = _MAGIC.read(folder)
    lower = np.array([0, 0, 2, 0, 0, -250, -250, -100, 0, 0], dtype=np.float64)
    upper = np.array([250, 125, 5, 1, 1, 250, 250, 100, 90, 500], dtype=np.float64)
    return TabularData(X=X, y=np.where(y > 0, 1, -1), lower=lower, upper=upper)


def mini_boo_ne(folder: str | Path | None = None) -> TabularData:
    """MiniBooNE, 130,064 events of 50 columns; 1 is an electron neutrino. -999 stands where a value is missing."""
    X, y = _MINI_BOO_NE.read(folder)
    return TabularData(X=X, y=np.where(y > 0, 1, -1), lower=None, upper=None)


def skin(folder: str | Path | None = None) -> TabularData:
    """Skin segmentation, 245,057 pixels (blue, green, red, each a byte); 1 is skin, which the file calls class 1."""
    X, y = _SKIN.read(folder)
    return TabularData(X=X, y=np.where(y == 1, 1, -1), lower=np.zeros(3), upper=np.full(3, 255.0))


def cadata(folder: str | Path | None = None) -> TabularData:
    """California housing, 20,640 block groups of 8 columns; the target is the median value of a house, in dollars.

    Longitude and latitude range over California; ages end at 52, incomes (in 10,000 dollars) at 0.4999 and 15.0001 and
    values at 14,999 and 500,001, the lowest and highest codes of the census of 1990. A block group is meant to have 600
    to 3,000 inhabitants, so people are counted up to 3,000, households to 1,000, rooms to 6,000 and bedrooms to 1,500.
    """
    X, y = _CADATA.read(folder)
    lower = np.array([-124.5, 32.5, 1, 0, 0, 0, 0, 0.4999])
    upper = np.array([-114, 42, 52, 6000, 1500, 3000, 1000, 15.0001])
    return TabularData(X=X, y=y, lower=lower, upper=upper, y_range=(14_999.0, 500_001.0))


def stability(folder: str | Path | None = None) -> TabularData:
    """Electrical grid stability, 10,000 simulations of 12 columns; the target, `stab`, is the largest real part of a
    root: positive where the grid is unstable.

    The columns were drawn from ranges that the documentation states: reaction times from 0.5 to 10, power consumed from
    -2 to -0.5 (and produced, the sum of three, from 1.5 to 6), price elasticity from 0.05 to 1. No range of the target
    is stated; -0.08 to 0.11 is a round one of ours.
    """
    X, y = _STABILITY.read(folder)
    lower = np.array([0.5] * 4 + [1.5] + [-2.0] * 3 + [0.05] * 4)
    upper = np.array([10.0] * 4 + [6.0] + [-0.5] * 3 + [1.0] * 4)
    return TabularData(X=X, y=y, lower=lower, upper=upper, y_range=(-0.08, 0.11))


# ------------------------------------------------------------------------------------------------ forms


def _npz(target: str = "y") -> Callable[[Path], Raw]:
    def read(path: Path) -> Raw:
        with np.load(path) as arrays:
            return arrays["X"], arrays[target]

    return read


def _svmlight(columns: int) -> Callable[[Path], Raw]:
    def read(path: Path) -> Raw:
        from sklearn.datasets import load_svmlight_file

        X, y = load_svmlight_file(str(path), n_features=columns, zero_based=False)
        return X.toarray(), y

    return read


def _last_is_target(path: Path) -> Raw:
    """Numbers between blanks, tabs or commas."""
    rows = np.array([line.replace(",", " ").split() for line in _lines(path)], dtype=np.float64)
    return rows[:, :-1], rows[:, -1]


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="ascii").splitlines() if line.strip()]


def _magic_csv(path: Path) -> Raw:
    rows = [line.split(",") for line in _lines(path)]
    kinds = [row[-1].strip() for row in rows]
    if not set(kinds) <= {"g", "h"}:
        raise ValueError("not a class of this table")
    return np.array([row[:-1] for row in rows], dtype=np.float64), np.array([kind == "g" for kind in kinds])


def _stability_csv(path: Path) -> Raw:
    names, *rows = (line.replace('"', "").split(",") for line in _lines(path))
    target = names.index("stab")
    return np.array([row[:target] for row in rows], dtype=np.float64), np.array([float(row[target]) for row in rows])


def _cadata_svmlight(path: Path) -> Raw:
    """Its columns are income, age, rooms, bedrooms, population, households, latitude, longitude."""
    X, y = _svmlight(8)(path)
    return X[:, [7, 6, 1, 2, 3, 4, 5, 0]], y


def _signal_first(path: Path) -> Raw:
    """The first line counts signal and background; then come the events, signal first."""
    with path.open(encoding="ascii") as file:
        signal, background = (int(count) for count in file.readline().split())
        X = np.loadtxt(file, ndmin=2)
    if len(X) != signal + background:
        raise ValueError("not as many events as the first line says")
    return X, np.arange(len(X)) < signal


_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets"
_AGD = "https://github.com/ppmlguy/DP-AGD or its authors (Lee and Kifer 2018)"
_UCI = "https://archive.ics.uci.edu/dataset"

_ADULT = _Source(
    name="adult-a",
    columns=123,
    origin=_LIBSVM,
    files={"a9a": _svmlight(123), "a9a.txt": _svmlight(123), "a9a.npz": _npz()},
)
_IPUMS_BR = _Source(
    name="ipums-br", columns=52, origin=_AGD, files={"IPUMS-BR.dat": _last_is_target, "ipums_br.npz": _npz()}
)
_IPUMS_US = _Source(
    name="ipums-us", columns=57, origin=_AGD, files={"IPUMS-US.dat": _last_is_target, "ipums_us.npz": _npz()}
)
_MAGIC = _Source(
    name="magic04", columns=10, origin=f"{_UCI}/159", files={"magic04.data": _magic_csv, "magic04.npz": _npz()}
)
_MINI_BOO_NE = _Source(
    name="MiniBooNE",
    columns=50,
    origin=f"{_UCI}/199",
    files={"MiniBooNE_PID.txt": _signal_first, "miniboone.npz": _npz()},
)
_SKIN = _Source(
    name="skin", columns=3, origin=f"{_UCI}/229", files={"Skin_NonSkin.txt": _last_is_target, "skin.npz": _npz()}
)
_CADATA = _Source(
    name="cadata",
    columns=8,
    origin=f"https://www.dcc.fc.up.pt/~ltorgo/Regression/cal_housing.html (or cadata, from {_LIBSVM})",
    files={"cal_housing.data": _last_is_target, "cadata": _cadata_svmlight, "cadata.npz": _npz()},
)
_STABILITY = _Source(
    name="stability",
    columns=12,
    origin=f"{_UCI}/471",
    files={"Data_for_UCI_named.csv": _stability_csv, "grid_stability.npz": _npz("stab")},
)
