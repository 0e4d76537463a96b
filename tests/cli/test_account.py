"""`sfumato account` against known figures, an independent formula, and bad input."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from scipy.stats import norm

KEYS = ["epsilon", "delta", "noise_multiplier", "steps", "sampling", "adjacency", "accountant"]
SETTING = "--dataset-size 48000 --batch-size 4096 --delta 1e-5"
Run = Callable[..., Any]


def answer(sfumato: Run, options: str) -> dict[str, Any]:
    result = sfumato("account", *options.split(), "--json")
    assert result.status == 0, result.err
    assert result.err == ""
    found: dict[str, Any] = json.loads(result.out)
    assert list(found) == KEYS
    return found


def test_noise_for_a_budget(sfumato: Run) -> None:
    found = answer(sfumato, f"{SETTING} --steps 352 --epsilon 2")
    assert found["noise_multiplier"] == pytest.approx(3.346, abs=0.002)
    assert 1.999 < found["epsilon"] <= 2.0
    assert (found["steps"], found["sampling"], found["adjacency"]) == (352, "poisson", "add-remove")
    assert found["accountant"].startswith("PLD")


def test_epsilon_of_a_noise(sfumato: Run) -> None:
    assert answer(sfumato, f"{SETTING} --steps 352 --noise-multiplier 3.346")["epsilon"] == pytest.approx(2.0, abs=2e-3)


def test_the_most_steps(sfumato: Run) -> None:
    found = answer(sfumato, f"{SETTING} --epsilon 2 --noise-multiplier 3.346")
    assert found["steps"] == pytest.approx(352, abs=1)
    more = f"{SETTING} --noise-multiplier 3.346 --steps {found['steps'] + 1}"
    assert found["epsilon"] <= 2 < answer(sfumato, more)["epsilon"]


@pytest.mark.parametrize(("adjacency", "moved"), [("add-remove", 1), ("replace-one", 2)])
def test_full_batch_is_the_gaussian_mechanism(sfumato: Run, adjacency: str, moved: int) -> None:
    found = answer(
        sfumato,
        f"--dataset-size 900 --delta 1e-5 --sampling full --steps 9 --noise-multiplier 20 --adjacency {adjacency}",
    )
    mu, epsilon = math.sqrt(9) * moved / 20, found["epsilon"]  # Balle and Wang (2018), theorem 8
    delta = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(1e-5, rel=0.02)


def test_fixed_size_is_accounted_by_rdp(sfumato: Run) -> None:
    options = "--dataset-size 48000 --batch-size 200 --delta 1e-5 --steps 20 --noise-multiplier 5 --sampling fixed"
    found = answer(sfumato, f"{options} --adjacency replace-one")
    assert found["accountant"].startswith("RDP")
    assert 0 < found["epsilon"] < 1


def test_the_table_holds_the_same_figures(sfumato: Run) -> None:
    result = sfumato("account", *f"{SETTING} --steps 352 --epsilon 2".split())
    assert result.status == 0
    for text in ("noise multiplier", "3.345", "1.99", "PLD", "add-remove"):
        assert text in result.out


def test_a_meaningless_delta_is_warned_of(sfumato: Run) -> None:
    options = "--dataset-size 100 --sampling full --steps 1 --noise-multiplier 5 --delta 0.01 --json"
    result = sfumato("account", *options.split())
    assert result.status == 0
    assert json.loads(result.out)["delta"] == 0.01
    assert "delta=0.01" in result.err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (f"{SETTING} --steps 352", "--epsilon"),
        (f"{SETTING} --steps 352 --epsilon 2 --noise-multiplier 3", "--noise-multiplier"),
        (f"{SETTING} --epsilon 2", "--steps"),
        (f"{SETTING} --steps 0 --epsilon 2", "--steps"),
        (f"{SETTING} --steps two --epsilon 2", "--steps"),
        (f"{SETTING} --steps 352 --epsilon -1", "--epsilon"),
        (f"{SETTING} --steps 352 --epsilon nan", "--epsilon"),
        (f"{SETTING} --steps 352 --epsilon inf", "--epsilon"),
        (f"{SETTING} --steps 352 --noise-multiplier 0", "--noise-multiplier"),
        (f"{SETTING} --steps 352 --noise-multiplier 1e-9", "--noise-multiplier"),
        (f"{SETTING} --steps 352 --epsilon 2 --sampling poison", "--sampling"),
        (f"{SETTING} --steps 352 --epsilon 2 --adjacency both", "--adjacency"),
        (f"{SETTING} --steps 352 --epsilon 2 --sampling fixed", "adjacency"),
        (f"{SETTING} --steps 352 --epsilon 2 --sampling full", "batch_size"),
        ("--dataset-size 48000 --delta 1e-5 --steps 3 --epsilon 2", "batch_size"),
        ("--dataset-size 48000 --batch-size 50000 --delta 1e-5 --steps 3 --epsilon 2", "batch_size"),
        ("--dataset-size 48000 --batch-size 0 --delta 1e-5 --steps 3 --epsilon 2", "--batch-size"),
        ("--dataset-size 0 --batch-size 1 --delta 1e-5 --steps 3 --epsilon 2", "--dataset-size"),
        ("--batch-size 1 --delta 1e-5 --steps 3 --epsilon 2", "--dataset-size"),
        ("--dataset-size 48000 --batch-size 1 --steps 3 --epsilon 2", "--delta"),
        ("--dataset-size 48000 --batch-size 1 --delta 0 --steps 3 --epsilon 2", "--delta"),
        ("--dataset-size 48000 --batch-size 1 --delta 1 --steps 3 --epsilon 2", "--delta"),
        (f"{SETTING} --steps 3 --epsilon 2 --epochs 3", "--epochs"),
    ],
)
def test_bad_input_is_one_line_and_status_2(sfumato: Run, options: str, named: str) -> None:
    result = sfumato("account", *options.split())
    assert result.status == 2
    assert result.out == ""
    assert result.err.count("\n") == 1
    assert named in result.err
    assert "Traceback" not in result.err


def test_from_the_shell() -> None:
    command = [
        sys.executable,
        "-m",
        "sfumato.cli.main",
        "account",
        *f"{SETTING} --steps 352 --epsilon 2 --json".split(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["noise_multiplier"] == pytest.approx(3.346, abs=0.002)
