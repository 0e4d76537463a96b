"""`sfumato demo` at reduced size: what it says about privacy must be what the ledger says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sfumato import Ledger, Run
from sfumato.cli import demo

Sfumato = Callable[..., Any]


def test_the_demo_and_its_ledger(sfumato: Sfumato, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    result = sfumato("demo", "--out", out, "--steps", 12, "--json")
    assert result.status == 0, result.err
    said = json.loads(result.out)
    public_only, cold, warm, mirror, dope, unprotected = said["rows"]
    assert public_only["accuracy"] > 0.8
    assert cold["accuracy"] > 0.5
    assert min(row["accuracy"] for row in (warm, mirror, dope)) > 0.85
    assert unprotected["accuracy"] > 0.95
    assert [row["epsilon"] for row in said["rows"]] == [0.0, *[demo.EPSILON] * 4, None]

    with Ledger(out / "ledger.db") as ledger:
        assert ledger.account_names() == ["digits"]  # one dataset has one account, whatever is trained on it
        statement = ledger.account("digits").statement()
    assert [line.answers for line in statement.asked] == [12] * 4
    assert statement.epsilon == said["together"]["epsilon"] == demo.BUDGET
    methods = {"cold": "dp_sgd", "warm": "dp_sgd", "mirror": "MirrorDescent", "dope": "dope_sgd"}
    for name, method in methods.items():
        run = Run.load(out / name)
        assert run.config["method"] == method
        assert run.statement["epsilon"] == demo.BUDGET
        assert run.steps_taken == 12
        assert run.history[-1]["epsilon"] == pytest.approx(demo.EPSILON, abs=0.01)

    page = (out / "report.html").read_text()
    assert said["report"] == str(out / "report.html")
    assert all(name in page for name in methods)

    again = sfumato("demo", "--out", out)
    assert again.status == 2
    assert "--out" in again.err


def test_the_table_says_what_each_costs_and_all_together(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [demo.Row("cold", 0.9, 2.0, "x/cold"), demo.Row("no privacy", 0.97, None)]
    demo._show(rows, Path("x"), "x/report.html", 1.0)
    out = " ".join(capsys.readouterr().out.split())
    assert f"all four together {demo.BUDGET:g} x/ledger.db" in out
    assert f"together they cost epsilon {demo.BUDGET:g}" in out
    assert "cold 90.0 % 2 x/cold" in out
    assert "not private" in out
    assert "x/report.html" in out


def test_the_budget_covers_all_trainings_and_no_more_than_needed() -> None:
    from sfumato.algorithms.method import algorithm
    from sfumato.data.samplers import Poisson
    from sfumato.privacy import calibration
    from sfumato.privacy.budget import Budget
    from sfumato.privacy.filters import RenyiFilter
    from sfumato.privacy.mechanisms import Adjacency, Gaussian, Mechanism

    sampler = Poisson(size=demo.PRIVATE, batch_size=demo.BATCH)
    noise = calibration.noise_multiplier(
        epsilon=demo.EPSILON, delta=demo.DELTA, sampler=sampler, steps=demo.STEPS, adjacency=Adjacency.ADD_REMOVE
    )
    times = [algorithm(demo._method(way, demo.STEPS)).answers(demo.STEPS) for way in demo.WAYS]
    assert times == [demo.STEPS] * 4  # so that one noise is that of all
    together = Mechanism(question="all", noise=Gaussian(noise), sampler=sampler, times=sum(times))

    def fits(epsilon: float) -> bool:
        budget = Budget(epsilon, demo.DELTA)
        rule = RenyiFilter.around(budget)
        return rule.fits(
            rule.price([together], adjacency=Adjacency.ADD_REMOVE, budget=budget, delta_share=None)[0], budget
        )

    assert fits(demo.BUDGET)
    assert not fits(demo.BUDGET - 0.1)


def test_the_split_is_disjoint_stratified_and_of_the_declared_sizes() -> None:
    parts = demo.split(3)
    assert tuple(len(y) for _, y in parts) == (demo.PRIVATE, demo.PUBLIC, demo.TEST)
    assert len(demo.split(3)[0][1]) == demo.PRIVATE
    for _, labels in parts:
        counts = labels.bincount(minlength=10).double()
        assert float(counts.max() / counts.min()) < 1.4
