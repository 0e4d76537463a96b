"""The shape of the code: imports point downwards, noise is drawn in one place, public names are few and documented."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import sfumato

ROOT = Path(sfumato.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# From low to high; what stands on one line does not import each other, except within one package.
LAYERS: list[set[str]] = [
    {"errors", "generators", "patience"},
    {"kernels", "reading", "traces"},
    {"nn", "augment"},
    {"objective"},
    {"data", "models", "averages"},
    {"gradients"},
    {"privacy"},
    {"questions", "sampled"},
    {"distributed"},
    {"private", "public"},
    {"mirror_map"},
    {"algorithms", "erm", "synthesis", "warmup", "ensembles", "diagnostics"},
    {"selection", "text"},
    {"run", "checkpoint", "standing", "setup", "arguments"},
    {"training", "federated", "tuning", "card", "tracking"},
    {"experiments"},
    {"report"},
    {"audit"},
    {"cli"},
    {"loading", "__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# The samplers are data that mechanisms are made of, so data lies below privacy; the gradients know nothing of noise.


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every sfumato module that a file imports, however deep inside it, with the line."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path.name}:{node.lineno} imports relatively"
            names = [node.module] if node.module != "sfumato" else [f"sfumato.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.split(".")[0] == "sfumato" and "." in name:
                yield name.split(".")[1], node.lineno


def wrong_imports(path: Path) -> list[str]:
    own = module_of(path)
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for name, line in imports(path)
        if own != name and not RANK[name] < RANK[own]
    ]


def test_imports_point_downwards() -> None:
    failures = [found for path in FILES if module_of(path) != "__init__" for found in wrong_imports(path)]
    assert not failures, failures


def test_an_upward_import_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gradients"
    folder.mkdir()
    (folder / "bad.py").write_text("def f():\n    from sfumato.privacy.noise import privatize\n")
    monkeypatch.setattr("tests.test_architecture.ROOT", tmp_path)
    assert wrong_imports(folder / "bad.py") == ["gradients/bad.py:2 imports privacy"]


def test_every_module_has_its_place() -> None:
    unknown = {module_of(path) for path in FILES} - set(RANK) - {"__init__"}
    assert not unknown, f"add them to LAYERS: {sorted(unknown)}"


# ------------------------------------------------------------------------------------------------ noise

DRAWS = {
    "randn",
    "randn_like",
    "normal",
    "normal_",
    "standard_normal",
    "laplace",
    "exponential",
    "exponential_",
    "standard_exponential",
    "gumbel",
    "geometric",
    "geometric_",
    "cauchy_",
    "log_normal_",
    "multivariate_normal",
    "gauss",
    "normalvariate",
    "privatize",
    "discrete_gaussian",
    "discrete_laplace",
    "NoiseSource",
}
# Where noise is made; and the door, the one caller of `privatize` and owner of a `NoiseSource`.
NOISE = {
    "privacy/noise.py": DRAWS,
    "privacy/discrete.py": DRAWS,
    "privacy/normals.py": {"standard_normal"},
    "private.py": {"privatize", "NoiseSource"},
}
# Draws that have nothing to do with privacy: the audit's own attacks, and the weights that a model begins with.
ELSEWHERE = ("audit", "models", "warmup")
# Generators noise public images and begin their samples with noise, so they draw normal numbers. They answer no
# question about private rows: of what privacy is made from, they have nothing to call.
NORMAL = {"randn", "randn_like", "normal_", "standard_normal"}


def draws(path: Path) -> list[str]:
    allowed = NOISE.get(path.relative_to(ROOT).as_posix(), set())
    allowed = allowed | NORMAL if module_of(path) == "synthesis" else allowed
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in DRAWS - allowed:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} calls {name}")
    return found


def test_noise_is_drawn_in_one_place() -> None:
    failures = [found for path in FILES if module_of(path) not in ELSEWHERE for found in draws(path)]
    assert not failures, failures


def test_noise_elsewhere_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sneaky.py").write_text("def f(x, rng):\n    return x + rng.standard_normal(3)\n")
    monkeypatch.setattr("tests.test_architecture.ROOT", tmp_path)
    assert draws(tmp_path / "sneaky.py") == ["sneaky.py:2 calls standard_normal"]


def test_a_generator_may_draw_normal_numbers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "synthesis"
    folder.mkdir()
    (folder / "fine.py").write_text("def f(x):\n    return torch.randn_like(x)\n")
    (folder / "bad.py").write_text("def f(x):\n    return privatize(x, unit=1.0), rng.laplace()\n")
    monkeypatch.setattr("tests.test_architecture.ROOT", tmp_path)
    assert draws(folder / "fine.py") == []
    assert sorted(draws(folder / "bad.py")) == [
        "synthesis/bad.py:2 calls laplace",
        "synthesis/bad.py:2 calls privatize",
    ]


# ------------------------------------------------------------------------------------------------ names and sizes


def test_public_names_are_few_and_documented() -> None:
    assert len(sfumato.__all__) < 20
    bare = [name for name in sfumato.__all__ if not (getattr(sfumato, name).__doc__ or "").strip()]
    assert not bare, bare


def test_documented_names_have_their_own_docstring() -> None:
    """Dataclasses make one up from their signature, which says nothing."""
    made_up = [
        name
        for name in sfumato.__all__
        if inspect.isclass(cls := getattr(sfumato, name)) and (cls.__doc__ or "").startswith(f"{name}(")
    ]
    assert not made_up, made_up


def module_names() -> list[str]:
    names = [".".join(("sfumato", *path.relative_to(ROOT).with_suffix("").parts)) for path in FILES]
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


def test_examples_in_docstrings_are_run() -> None:
    """By pytest itself, one by one; here it is made sure that it looks for them, and that there are some."""
    options = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert "src" in options["testpaths"]
    assert "--doctest-modules" in options["addopts"]
    finder = doctest.DocTestFinder(exclude_empty=True)
    files = {name: Path(ROOT.parent, *name.split(".")).with_suffix(".py") for name in module_names()}
    with_examples = [name for name, path in files.items() if path.is_file() and ">>>" in path.read_text()]
    found = [len(test.examples) for name in with_examples for test in finder.find(importlib.import_module(name))]
    assert sum(found) >= 100, "the examples were not found"


def test_files_are_short_and_have_names() -> None:
    long = {str(path.relative_to(ROOT)): n for path in FILES if (n := len(path.read_text().splitlines())) > 450}
    assert not long, long
    vague = [path.name for path in FILES if path.stem in ("utils", "util", "helpers", "misc", "common")]
    assert not vague, vague


def test_no_path_of_a_machine_is_written_down() -> None:
    home = os.path.expanduser("~")
    for path in FILES:
        text = path.read_text()
        assert "/work/" not in text, path
        assert len(home) < 3 or f"{home}/" not in text, path
