"""Every mutant is found, and nothing is found about what is right; the costly attacks are slow."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sfumato.audit.subjects import subjects
from sfumato.audit.verdict import CONFIDENCE, Verdict, findings
from tests import test_algorithms as contract
from tests.mutants.accounts import least_cost_of_the_best
from tests.mutants.mutant import Mutant, killed_by
from tests.mutants.publics import downhill
from tests.mutants.repeated import RECORD, Record, code, filled, repeated, stored
from tests.mutants.suite import MUTANTS, Done, Job, rights

ROOT = Path(__file__).parents[2]
FAST = [mutant for mutant in MUTANTS if not mutant.slow]
SLOW = [mutant for mutant in MUTANTS if mutant.slow]
QUICK = [subject for subject in subjects() if subject.name != "the door"]
# Which audit must find it: another one might by accident.
EXPECTED = {
    "M1": "sensitivity",
    "M2": "sensitivity",
    "M3": "sampler, batch sizes",
    "M4": "sensitivity",
    "M5": "noise, variance over steps",
    "M6": "noise, variance over steps",
    "M7": "noise, variance over steps",
    "M8": "sensitivity",
    "M9": "sensitivity",
    "M10": "sensitivity",
    "M11": "sensitivity, add-remove",
    "M12": "sensitivity, add-remove",
    "M13": "noise, correlation over a resume",
    "M14": "sampler, rate of each person",
    "M15": "ledger",
    "M16": "sensitivity, replace-one",
    "M17": "examples apart",
    "M18": "conversation, questions",
    "M19": "conversation, questions",
    "M20": "contract, downhill",
    "M21": "noise, variance over steps",
    "M22": "sensitivity",
    "M23": "sensitivity",
    "M24": "sensitivity",
    "M25": "sampler, successive draws",
    "M26": "sensitivity",
    "M27": "ledger, after a crash",
    "M28": "ledger, the best of several",
    "M29": "sensitivity",
}


def test_the_list_is_complete() -> None:
    assert {mutant.name for mutant in FAST} == EXPECTED.keys() == {f"M{i}" for i in range(1, 30)}


def _marked(mutant: Mutant) -> Any:
    """Those that need many draws are tried by `make mutants` and `make slow`."""
    return pytest.param(mutant, id=mutant.name, marks=[pytest.mark.slow] if mutant.name in ("M3", "M15", "M25") else [])


@pytest.mark.parametrize("mutant", [_marked(mutant) for mutant in FAST])
def test_a_mutant_is_killed_by_the_audit_that_is_there_for_it(mutant: Mutant) -> None:
    assert EXPECTED[mutant.name] in killed_by(mutant.found())


@pytest.mark.thinned(3)
@pytest.mark.parametrize("mutant", [MUTANTS[place] for place in rights()], ids=lambda mutant: mutant.name)
def test_the_same_audits_have_nothing_to_say_about_the_right_one(mutant: Mutant) -> None:
    verdicts = mutant.of_the_right_one()
    assert verdicts
    assert all(verdict.confidence >= CONFIDENCE for verdict in verdicts)
    assert findings(verdicts) == []


@pytest.mark.slow
@pytest.mark.parametrize("mutant", SLOW, ids=lambda mutant: mutant.name)
def test_attacks_find_what_neighbours_find(mutant: Mutant) -> None:
    assert killed_by(mutant.found())
    assert findings(mutant.of_the_right_one()) == []


@pytest.mark.slow
@pytest.mark.parametrize("subject", QUICK, ids=lambda subject: subject.name)
def test_every_method_of_the_package_passes(subject) -> None:  # type: ignore[no-untyped-def]
    verdicts = subject.quick()
    assert verdicts
    assert findings(verdicts) == []


@pytest.mark.parametrize("name", contract.ALGORITHMS)
def test_no_method_turns_against_the_private_gradient(name: str) -> None:
    assert downhill(contract.ALGORITHMS[name](), name=name).holds


def test_what_the_best_of_several_costs_at_the_least() -> None:
    """One trial is a Gaussian mechanism, whose epsilon is 1.99; more trials cost more."""
    once, ten = (least_cost_of_the_best(((k, 1.0),), 0.5, 1e-5) for k in (1, 10))
    assert 1.5 < once < 1.994
    assert ten > 2 * once


def test_no_mutant_is_part_of_the_package() -> None:
    mutants = {mutant.broken.__name__ for mutant in FAST if isinstance(mutant.broken, type)}
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    assert "SkipsEmptyBatches" in mutants
    assert not [name for name in mutants if re.search(rf"\b{name}\b", text)]
    assert "tests.mutants" not in text


def test_the_page_lists_them_all() -> None:
    page = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
    for mutant in FAST:
        assert re.search(rf"^\| {mutant.name} \| {re.escape(mutant.wrong)} \| .+ \|$", page, re.MULTILINE), mutant.name
        assert EXPECTED[mutant.name] in page


def test_the_page_says_how_often_what_is_right_was_audited() -> None:
    page, record = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8"), stored(RECORD)
    assert filled(page, record) == page
    assert record.told() in page
    assert record.alarms == ()
    assert record.repetitions >= 200


def test_a_record_counts_alarms_and_is_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = {"method": "x", "audit": "y", "claimed": 1.0, "trials": 1}
    right = Verdict(**told, lower_bound=0.0, confidence=1.0)
    alarm = Verdict(**told, lower_bound=2.0, confidence=CONFIDENCE)
    record = Record(code=code()).after([Done(job=Job(method="x"), right=[right, alarm])], 3.0)
    assert (record.repetitions, record.audits, record.by_chance, len(record.alarms)) == (1, 2, 1, 1)
    assert "1 alarms" in record.told()
    path = tmp_path / "repeated.json"
    path.write_text(json.dumps(asdict(record)))
    assert stored(path) == record
    assert repeated(1, path, processes=1) == 1  # as many as are wanted, so that nothing is done
    assert "FALSE ALARM" in capsys.readouterr().out
    assert stored(path) == record
