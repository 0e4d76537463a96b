"""docs/config.md names every key with its default, and its examples are files that `sfumato train` takes."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sfumato.cli.config import SECTIONS

PAGE = (Path(__file__).parent.parent.parent / "docs" / "config.md").read_text()


def rows_of(section: str) -> dict[str, str]:
    """The table of a section: key -> default."""
    text = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    found = next(part for part in text if part.startswith(f"[{section}]"))
    return dict(re.findall(r"^\| `(\w+)` \| .+ \| (.+) \|$", found, re.MULTILINE))


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_on_the_page_and_no_other(section: str) -> None:
    assert list(rows_of(section)) == [f.name for f in fields(SECTIONS[section])]


@pytest.mark.parametrize("section", SECTIONS)
def test_defaults_are_the_real_ones(section: str) -> None:
    for f in fields(SECTIONS[section]):
        said = rows_of(section)[f.name]
        if f.default is MISSING and f.default_factory is MISSING:
            assert said == "required", f.name
        elif default_of(f) is None:
            assert "`" not in said, f.name  # in words: it depends on something else
        else:
            assert tomllib.loads(f"x = {said.strip('`')}")["x"] == default_of(f), f.name


def default_of(f: Field[Any]) -> Any:
    return f.default if f.default_factory is MISSING else f.default_factory()


def test_defaults_in_words_are_those_of_the_methods() -> None:
    from sfumato.algorithms.ada_dps import AdaDPS
    from sfumato.algorithms.mirror_descent import MirrorDescent
    from sfumato.algorithms.shrunk_origin import ShrunkOrigin

    said = rows_of("method")
    assert float(said["origin_memory"]) == ShrunkOrigin().memory
    assert int(said["public_batch"]) == AdaDPS().public_batch == ShrunkOrigin().public_batch
    assert float(said["alpha_min"]) == MirrorDescent(decay_steps=1).alpha_min
    assert float(said["damping"]) == AdaDPS().damping
    assert float(said["scale_memory"]) == AdaDPS().memory


@pytest.mark.parametrize("name", ["table", "images"])
def test_the_examples_are_taken(name: str, sfumato: Callable[..., Any], tmp_path: Path) -> None:
    block = re.search(rf"<!-- {name} -->\n```toml\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    (tmp_path / "config.toml").write_text(block[1])
    data = tomllib.loads(block[1])["data"]
    if name == "table":
        for role in ("private", "public", "test"):
            (tmp_path / data[role]).write_text("age,weight,outcome\n1,2,0\n3,1,1\n2,2,2\n")
    else:
        parts = {"train": 4, "public": 2000, "test": 4}
        arrays = {f"x_{part}": np.zeros((count, 3, 32, 32), dtype=np.uint8) for part, count in parts.items()}
        labels = {f"y_{part}": np.zeros(count) for part, count in parts.items()}
        np.savez_compressed(tmp_path / data["private"], **arrays, **labels)
    result = sfumato("train", tmp_path / "config.toml", "--dry-run", "--json")
    assert result.status == 0, result.err
    assert json.loads(result.out)["warning"] is None
