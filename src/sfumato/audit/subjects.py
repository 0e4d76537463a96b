"""What is audited: every method of the package, each with the audits that apply to it.

The audits take what they audit as an argument; here they are given the real thing. Each method has sensitivity by
neighbours, a conversation, and an attack on what it releases; what the methods share, the door, has noise, sampler and
ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sfumato.algorithms.ada_dps import AdaDPS
from sfumato.algorithms.dope_sgd import dope_sgd
from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.algorithms.exact_mirror import ExactMirror
from sfumato.algorithms.extended import Extended
from sfumato.algorithms.method import Ask, Method, StatefulMethod
from sfumato.algorithms.mirror_descent import MirrorDescent
from sfumato.algorithms.shrunk_origin import ShrunkOrigin
from sfumato.algorithms.weight_multiplicity import weight_multiplicity
from sfumato.audit.canary import step_by_step, white_box
from sfumato.audit.conversation import conversation
from sfumato.audit.doors import SIZE, open_door, rows_objective, worlds
from sfumato.audit.estimators import DELTA, EPSILON, PUBLIC, ROWS, components, fitted
from sfumato.audit.fits import fit_audit
from sfumato.audit.ledger import ledger_audit
from sfumato.audit.membership import membership
from sfumato.audit.noise import noise_audit, pure_noise, resumed_noise
from sfumato.audit.one_run import one_run
from sfumato.audit.sampler import axes, drawn_by, planned, sampler_audit
from sfumato.audit.selections import gram_sensitivity, near_private_conversation, votes_audit, votes_sensitivity
from sfumato.audit.sensitivity import method_sensitivity
from sfumato.audit.trainings import confidences, large_digits, small_digits, white_box_scores
from sfumato.audit.verdict import Verdict
from sfumato.erm import (
    AGDAverageClassifier,
    AGDClassifier,
    DPSGDClassifier,
    HuberisedHinge,
    MirrorDescentClassifier,
    ObjectivePerturbationClassifier,
    OutputPerturbationClassifier,
    PNSGDClassifier,
    PPSGDClassifier,
    SgdAdvancedClassifier,
)
from sfumato.privacy.budget import Budget
from sfumato.private import Private
from sfumato.public import Public
from sfumato.selection import PrivatePCA, Threshold, TopK


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A method by its name, and what is found about it; `full` trains for minutes, or is None.

    `quick` has those of its audits that take at most two seconds of one core: most of them leave nothing to chance.
    """

    name: str
    audits: Callable[[], list[Verdict]]
    quick: Callable[[], list[Verdict]]
    full: Callable[[], list[Verdict]] | None = None


_FEW = 4  # public rows in a batch, of the six that a world has


def _method(name: str, method: Method | StatefulMethod) -> list[Verdict]:
    """What every method of gradients has to stand: one row, a conversation of three steps, and the canary.

    The first is exact, and tries all worlds; the canary, which is about chance, takes the two where most has leaked.
    """
    return [
        *_exact(name, method),
        *white_box(method, name=name, trials=300, among=[worlds()[1], worlds()[-1]]),
    ]


def _exact(name: str, method: Method | StatefulMethod) -> list[Verdict]:
    return [method_sensitivity(method, name=name), *_three_steps(name, method)]


def _three_steps(name: str, method: Method | StatefulMethod) -> list[Verdict]:
    world = worlds()[-1]
    objective = rows_objective()

    def talk(ask: Ask) -> None:
        public = Public(world.public, objective=objective, seed=0)
        step_by_step(method, objective.parameters(), public, ask, 3)

    one, other = (open_door(objective, rows, 0.02, 3, seed=5) for rows in (world.others, world.everybody))
    return conversation(talk, one, other, size=SIZE, name=name)


def _trained(name: str, method: Method | StatefulMethod) -> list[Verdict]:
    """With whole trainings: who was in, by the noisy answers and by the final model alone."""
    setting = small_digits()
    terms: dict[str, Any] = {"epsilon": setting.epsilon, "delta": setting.delta, "name": name}
    canaries = len(setting.canaries[1])
    return [
        *_method(name, method),
        one_run(white_box_scores(setting, method), canaries=canaries, **terms),
        membership(confidences(setting, method), candidates=canaries, shadows=8, **terms),
    ]


def _on_mnist(name: str, method: Method | StatefulMethod) -> list[Verdict]:
    setting = large_digits()
    return [
        one_run(
            white_box_scores(setting, method),
            canaries=len(setting.canaries[1]),
            epsilon=setting.epsilon,
            delta=setting.delta,
            name=name,
            audit="one run, MNIST",
        )
    ]


def _door() -> list[Verdict]:
    """What all methods stand on."""
    objective, nobody, noise = rows_objective(400), torch.zeros(0, 400, dtype=torch.float64), 1.0
    name, people, batch, draws = "the door", 20, 2.0, 600
    private = Private(axes(people), name="audit", size=people, budget=Budget(1e9, DELTA))
    private.plan(planned(batch, private, draws))
    return [
        *noise_audit(pure_noise(objective, nobody, noise=noise, steps=6), noise=noise, name=name),
        *noise_audit(resumed_noise(objective, nobody, noise=noise, steps=3), noise=noise, name=name, about="a resume"),
        *sampler_audit(
            drawn_by(private, present=people, batch=batch), present=people, rate=batch / people, name=name, draws=draws
        ),
        *ledger_audit(name=name),
    ]


_METHODS: tuple[tuple[str, Method | StatefulMethod], ...] = (
    ("shrunk-origin", ShrunkOrigin(public_batch=_FEW)),
    ("mirror-descent", MirrorDescent(decay_steps=4, public_batch=_FEW)),
    ("exact-mirror", ExactMirror(step_size=0.5, strength=1.0)),
    ("ada-dps", AdaDPS(public_batch=_FEW)),
    ("weight-multiplicity", partial(weight_multiplicity, views=2, public_batch=_FEW)),
    ("extended", Extended(private_batch=SIZE, public_batch=_FEW)),
)
_TRAINED: tuple[tuple[str, Method], ...] = (
    ("dp-sgd", dp_sgd),
    ("dope-sgd", partial(dope_sgd, public_batch=_FEW)),
)


def _classifier(kind: Any, **options: Any) -> partial[Any]:
    # Of the huberised hinge the slope at zero is the steepest there is: nothing of the row is left unused.
    shared = {"epsilon": EPSILON, "delta": DELTA, "classes": (0, 1), "fit_intercept": False, "loss": HuberisedHinge()}
    return partial(kind, **{**shared, **options})


_JOINED = ROWS + PUBLIC  # where public rows are put behind the door together with the private ones
_PLAIN = 1.0  # epsilon where no Gaussian law helps: then 100 fits prove less
_ESTIMATORS: tuple[tuple[str, partial[Any], bool], ...] = (
    ("ppsgd", _classifier(PPSGDClassifier, max_iter=2, batch_size=ROWS), True),
    ("ppsgd, adaptive", _classifier(PPSGDClassifier, max_iter=2, batch_size=ROWS, growth=0.3, shrink=0.3), True),
    ("dp-agd", _classifier(AGDClassifier, max_iter=1, candidates=3), True),
    ("dp-agd, averaged", _classifier(AGDAverageClassifier, max_iter=1, candidates=3), True),
    ("linear dp-sgd", _classifier(DPSGDClassifier, max_iter=2, batch_size=_JOINED, average=0.0), True),
    ("linear mirror-descent", _classifier(MirrorDescentClassifier, max_iter=2, batch_size=ROWS, strength=1.0), True),
    (
        "sgd, advanced composition",
        _classifier(SgdAdvancedClassifier, max_iter=2, batch_size=_JOINED, accounting="modern"),
        True,
    ),
    ("output-perturbation", _classifier(OutputPerturbationClassifier, max_iter=5), True),
    ("output-perturbation, minimiser", _classifier(OutputPerturbationClassifier, max_iter=None, l2=0.1), True),
    ("objective-perturbation", _classifier(ObjectivePerturbationClassifier, epsilon=_PLAIN), False),
    ("pnsgd", _classifier(PNSGDClassifier), True),
)


def _estimator(name: str, made: partial[Any], gaussian: bool) -> list[Verdict]:
    attacked = fitted(made, name=name, gaussian=gaussian, epsilon=EPSILON if gaussian else _PLAIN)
    return [*fit_audit(made, name=name), attacked]


_PCA = partial(PrivatePCA, 3, epsilon=EPSILON, delta=DELTA, bound=1.0)


def _pca() -> list[Verdict]:
    return [*_grams(), components(_PCA, name="dp-pca")]


def _grams() -> list[Verdict]:
    audited = fit_audit(_PCA, name="dp-pca", fit=lambda estimator, rows: estimator.fit(rows))
    return [*gram_sensitivity(name="dp-pca"), *audited]


def _near_private(voters: Threshold | TopK, name: str) -> list[Verdict]:
    return [*_votes(voters, name), votes_audit(voters, name=name)]


def _votes(voters: Threshold | TopK, name: str) -> list[Verdict]:
    return [*votes_sensitivity(voters, name=name), *near_private_conversation(voters, name=name)]


def subjects() -> Sequence[Subject]:
    """Everything that `sfumato audit --methods all` audits."""
    voters: tuple[tuple[str, Threshold | TopK], ...] = (
        ("near-private", Threshold()),
        ("near-private, top-k", TopK(k=3)),
    )
    return (
        Subject(name="the door", audits=_door, quick=_door),
        *(
            Subject(
                name=name,
                audits=partial(_trained, name, method),
                quick=partial(_exact, name, method),
                full=partial(_on_mnist, name, method),
            )
            for name, method in _TRAINED
        ),
        *(
            Subject(name=name, audits=partial(_method, name, method), quick=partial(_exact, name, method))
            for name, method in _METHODS
        ),
        *(
            Subject(name=name, audits=partial(_estimator, name, made, law), quick=partial(fit_audit, made, name=name))
            for name, made, law in _ESTIMATORS
        ),
        Subject(name="dp-pca", audits=_pca, quick=_grams),
        *(
            Subject(name=name, audits=partial(_near_private, who, name), quick=partial(_votes, who, name))
            for name, who in voters
        ),
    )
