"""Dataclasses from TOML: what fits is taken and brought to its type, and what does not is one sentence."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sfumato.errors import InvalidArgument
from sfumato.reading import check_keys, read, read_toml, required


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: int = 1


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    rate: float = 0.5
    clip: float | str = 1.0
    sizes: list[int] = field(default_factory=lambda: [3])
    range: tuple[float, ...] | None = None
    flip: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    inner: bool | Inner = False


def test_values_become_what_their_types_say() -> None:
    found = read(
        Outer,
        {"name": "a", "rate": 1, "clip": 2, "sizes": [4], "range": [0, 16], "options": {"x": [1]}, "inner": {}},
        "[outer]",
    )
    expected = Outer(name="a", rate=1.0, clip=2.0, sizes=[4], range=(0, 16), options={"x": [1]}, inner=Inner())
    assert found == expected
    assert [type(found.rate), type(found.clip), type(found.sizes), type(found.range)] == [float, float, list, tuple]
    assert read(Outer, {"name": "a", "clip": "auto", "flip": True, "inner": True}, "").inner is True
    assert required(Outer) == ["name"]
    check_keys(Outer, {"rate": 1.0}, "[outer]")  # without the name, which may come from elsewhere


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({}, "[outer] lacks the key 'name': add it."),
        ({"name": 3}, "[outer] name=3 must be a string."),
        ({"nme": "a"}, "[outer] has no key 'nme': did you mean 'name'?"),
        ({"name": "a", "rate": True}, "rate=True must be a number."),
        ({"name": "a", "clip": [1]}, "clip=[1] must be a number or a string."),
        ({"name": "a", "sizes": [1.5]}, "sizes=[1.5] must be a list of whole numbers."),
        ({"name": "a", "sizes": 3}, "sizes=3 must be a list of whole numbers."),
        ({"name": "a", "range": ["x"]}, "range=['x'] must be a list of numbers."),
        ({"name": "a", "flip": 1}, "flip=1 must be true or false."),
        ({"name": "a", "options": []}, "options=[] must be a table."),
        ({"name": "a", "inner": 3}, "inner=3 must be true or false or a table."),
        ({"name": "a", "inner": {"dept": 3}}, "[outer.inner] has no key 'dept': did you mean 'depth'?"),
        ([], "[outer] is []: it must be a table."),
    ],
)
def test_what_does_not_fit_is_one_sentence(raw: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(said)):
        read(Outer, raw, "[outer]")


def test_a_file_that_is_no_toml_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    with pytest.raises(InvalidArgument, match="does not exist"):
        read_toml(path)
    for content in (b"a = ", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(InvalidArgument, match="is not valid TOML"):
            read_toml(path)
    path.write_text("[a]\nb = 1\n")
    assert read_toml(path) == {"a": {"b": 1}}
