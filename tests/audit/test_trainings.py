"""Counts, one run and membership: silent about private trainings, loud about those that are not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.audit.counts import counts_audit
from sfumato.audit.estimators import fitted
from sfumato.audit.membership import likelihood_ratio, membership
from sfumato.audit.one_run import one_run
from sfumato.audit.selections import votes_audit
from sfumato.audit.subjects import subjects
from sfumato.audit.trainings import confidences, small_digits, white_box_scores
from sfumato.audit.verdict import Verdict, findings
from sfumato.erm import NonPrivateClassifier, OutputPerturbationClassifier
from sfumato.errors import InvalidArgument
from sfumato.selection import Threshold, TopK

RNG = np.random.default_rng(3)


def laplace(moved: Any, scale: float) -> Any:
    return lambda present, times: present * np.array(moved) + RNG.laplace(0, scale, (times, len(moved)))


def test_counts_that_move_by_two_need_twice_the_noise() -> None:
    enough = counts_audit(laplace([1, -1], 2.0), towards=[1, -1], epsilon=1.0, name="x", trials=8000)
    assert enough.holds
    assert enough.lower_bound > 0.3
    assert not counts_audit(laplace([1, -1], 1.0), towards=[1, -1], epsilon=1.0, name="x", trials=8000).holds
    # One vote is one vote: the same noise is then enough.
    assert counts_audit(laplace([1, 0], 1.0), towards=[1, 0], epsilon=1.0, name="x", trials=8000).holds


@pytest.mark.parametrize("voters", [Threshold(), TopK(k=3)])
def test_votes_through_the_door(voters: Any) -> None:
    assert votes_audit(voters, name="x", trials=200).holds


# ------------------------------------------------------------------------------------------------ trainings


def test_a_private_training_holds_and_the_same_without_noise_does_not() -> None:
    setting = replace(small_digits(200), steps=4)
    told: dict[str, Any] = {"canaries": 200, "epsilon": 2.0, "delta": setting.delta, "name": "x"}
    assert one_run(white_box_scores(setting, dp_sgd), **told).holds
    careless = replace(setting, epsilon=300.0, batch=1400)  # next to no noise
    proven = one_run(white_box_scores(careless, dp_sgd), **{**told, "epsilon": 0.5})
    assert not proven.holds
    assert "guesses were right" in proven.told


def test_the_final_model_tells_nothing_of_members_that_were_protected() -> None:
    setting = replace(small_digits(100), steps=2, epsilon=0.9)
    train = confidences(setting, dp_sgd)
    found = membership(train, candidates=100, epsilon=0.9, delta=setting.delta, name="x", shadows=4)
    assert found.holds
    assert found.trials == 100


def test_what_a_candidate_is_known_for_decides() -> None:
    scores = np.array([[5.0, 1.0, 0.0], [1.0, 5.0, 0.0], [5.1, 0.9, 0.0], [0.9, 5.1, 0.0]])
    included = np.array([[True, False, True], [False, True, True], [True, False, True], [False, True, True]])
    ratio = likelihood_ratio(scores, included, np.array([5.0, 1.0, 9.0]))
    assert ratio[0] > 10
    assert ratio[1] < -10
    assert ratio[2] == 0.0  # always in: nothing is known


def test_what_could_not_be_found_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="delta=1e-05"):
        one_run(lambda included: included * 1.0, canaries=500, epsilon=1.0, delta=1e-5, name="x")
    with pytest.raises(InvalidArgument, match="shadows=2"):
        membership(lambda i: i * 1.0, candidates=5, epsilon=1.0, delta=1e-12, name="x", shadows=2)


# ------------------------------------------------------------------------------------------------ whole fits


def test_a_fit_without_noise_is_found() -> None:
    made = partial(NonPrivateClassifier, classes=(0, 1), fit_intercept=False, l2=0.1)

    class Public:
        """Takes the public rows that it has no use for."""

        def fit(self, X: Any, y: Any, *_: Any) -> Any:
            return made().fit(X, y)

    assert not fitted(Public, name="x", gaussian=True).holds


def test_a_private_fit_holds() -> None:
    made = partial(OutputPerturbationClassifier, epsilon=0.5, delta=1e-5, classes=(0, 1), fit_intercept=False)
    assert fitted(made, name="x", gaussian=True, epsilon=0.5, trials=24, confidence=0.99).holds


def test_every_method_of_the_package_is_a_subject() -> None:
    names = [subject.name for subject in subjects()]
    assert len(set(names)) == len(names)
    assert {"dp-sgd", "dope-sgd", "mirror-descent", "ada-dps", "weight-multiplicity", "extended"} <= set(names)
    assert {"shrunk-origin", "ppsgd", "dp-agd", "output-perturbation", "objective-perturbation"} <= set(names)
    assert {"pnsgd", "dp-pca", "near-private"} <= set(names)
    assert [s.name for s in subjects() if s.full is not None] == ["dp-sgd", "dope-sgd"]


def test_findings_are_the_broken_ones() -> None:
    good = Verdict(method="x", audit="y", claimed=1.0, lower_bound=0.5, confidence=1.0, trials=1)
    bad = replace(good, lower_bound=float("nan"))
    assert findings([good, bad]) == [bad]
