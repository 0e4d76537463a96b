"""Whole fits by neighbours: right ones pass, and each way to be wrong is found by the verdict that is there for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from sfumato.audit.estimators import DELTA, EPSILON, PUBLIC, ROWS
from sfumato.audit.fits import fit_audit
from sfumato.erm import DPSGDClassifier, HuberisedHinge, OutputPerturbationClassifier
from sfumato.erm.output_perturbation import DescentWeights
from sfumato.erm.questions import LinearGradientMean

SHARED = {"epsilon": EPSILON, "delta": DELTA, "classes": (0, 1), "fit_intercept": False, "loss": HuberisedHinge()}
SGD = partial(DPSGDClassifier, **SHARED, max_iter=2, batch_size=ROWS + PUBLIC)


def failed(made: Any) -> list[str]:
    found = fit_audit(made, name="x")
    assert [v.audit for v in found] == ["conversation, answers", "conversation, questions", "ledger, whole fit"]
    assert all(v.confidence == 1 for v in found)
    return [v.audit for v in found if not v.holds]


def test_a_right_fit_passes_and_its_bounds_are_tight() -> None:
    assert failed(SGD) == []
    answers, _, ledger = fit_audit(SGD, name="x")
    assert answers.lower_bound > 0.999
    assert ledger.lower_bound > 0.999 * ledger.claimed


def test_an_answer_that_moves_too_far_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(LinearGradientMean):
        def exact(self, sample: Any) -> Any:
            return 2 * super().exact(sample)

        @classmethod
        def kind(cls) -> str:
            return LinearGradientMean.kind()

    monkeypatch.setattr("sfumato.erm.descent.LinearGradientMean", Twice)
    assert failed(SGD) == ["conversation, answers"]


def test_weights_that_move_too_far_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made = partial(OutputPerturbationClassifier, **SHARED, max_iter=5)
    assert failed(made) == []
    unit = DescentWeights.unit.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(DescentWeights, "unit", property(lambda question: unit(question) / 2))
    assert failed(made) == ["conversation, answers"]


def test_a_question_that_knows_private_rows_is_found() -> None:
    @dataclass(kw_only=True, eq=False, repr=False)
    class ClipsByTheRows(DPSGDClassifier):
        def _rows(self, X: Any, *others: Any) -> Any:
            self.clip = float(abs(X[-1]).max()) if abs(X[-1]).max() < 100 and X[-1, 0] > 0 else 1.5
            return super()._rows(X, *others)

    assert failed(partial(ClipsByTheRows, **SGD.keywords)) == ["conversation, questions"]


def test_a_statement_that_says_too_little_is_found() -> None:
    @dataclass(kw_only=True, eq=False, repr=False)
    class Understates(DPSGDClassifier):
        def fit(self, *args: Any) -> Any:
            super().fit(*args)
            self.ledger_ = replace(self.ledger_, epsilon=self.ledger_.epsilon / 2)
            return self

    assert failed(partial(Understates, **SGD.keywords)) == ["ledger, whole fit"]
