"""Arrays of an NPZ file that is public, by their names."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sfumato.errors import InvalidArgument

Array = npt.NDArray[Any]


def first_array(path: Path, names: Sequence[str]) -> str | None:
    """Which of these arrays an NPZ file has, the first of them, in small letters; no value is read."""
    with zipfile.ZipFile(path) as archive:
        known = {name.removesuffix(".npy").lower() for name in archive.namelist()}
    return next((name for name in names if name in known), None)


def read_arrays(path: Path, what: str, choices: Sequence[Sequence[str]]) -> list[Array | None]:
    """The arrays of the first choice whose first name the file has; of its other names, None for one that is missing.

    Names are told apart without regard to case. `what` is what a person calls the file, as errors do: `[pool] images`.
    """
    try:
        with path.open("rb") as opened:  # which numpy leaves open where it is no NPZ file
            file = np.load(opened, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("one array without a name")
            known = {name.lower(): name for name in file.files}
            wanted = next((names for names in choices if names[0] in known), None)
            if wanted is not None:
                return [file[known[name]] if name in known else None for name in wanted]
    except (ValueError, EOFError, zipfile.BadZipFile):
        raise InvalidArgument(
            f"{what}={str(path)!r} cannot be read as an NPZ file: write it with numpy.savez."
        ) from None
    called = ", or ".join(" and ".join(names) for names in choices)
    raise InvalidArgument(
        f"{what}={str(path)!r} holds the arrays {', '.join(known.values())}: they are to be called {called}."
    )
