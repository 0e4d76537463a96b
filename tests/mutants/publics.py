"""What is taken for public and is not, models that mix people, and a weight that turns against them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.algorithms.dope_sgd import dope_sgd
from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.algorithms.method import Ask, Method, Params, StatefulMethod, algorithm
from sfumato.algorithms.mirror_descent import MirrorDescent
from sfumato.algorithms.upon import Upon
from sfumato.audit.canary import step_by_step
from sfumato.audit.conversation import conversation
from sfumato.audit.doctor import examples_apart
from sfumato.audit.doors import SIZE, open_door, rows_objective, worlds
from sfumato.audit.verdict import Verdict
from sfumato.gradients import Gradient, clipped_sum
from sfumato.objective import Objective, cross_entropy
from sfumato.public import Public
from sfumato.questions import GradientMean
from tests import test_algorithms as contract
from tests.mutants.mutant import Mutant

DOPE = partial(dope_sgd, public_batch=None)

# ------------------------------------------------------------------------------------------------ duplicates

Prepared = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(private rows, public rows) -> those that are used"""


def _known(rows: Tensor, among: Tensor) -> Tensor:
    return (rows[:, None] == among[None]).all(2).any(1)


def private_rows_removed(private: Tensor, public: Tensor) -> tuple[Tensor, Tensor]:
    """Each private row is looked at alone, and compared with a public list: who is left depends on nobody else."""
    return private[~_known(private, public)], public


def public_rows_removed(private: Tensor, public: Tensor) -> tuple[Tensor, Tensor]:
    """Papers 000 and 003: public sequences are left out because they occur in the private set."""
    return private, public[~_known(public, private)]


def by_questions(prepared: Prepared) -> list[Verdict]:
    """A conversation about people of whom one has a row that is public, too."""
    unit, objective = torch.eye(24, dtype=torch.float64), rows_objective()
    others, public = unit[8:12], unit[:4]
    both = [prepared(rows, public) for rows in (others, torch.cat([others, public[:1]]))]
    lists = iter([known for _, known in both])

    def talk(ask: Ask) -> None:
        step_by_step(DOPE, objective.parameters(), Public(next(lists), objective=objective, seed=0), ask, 2)

    doors = [open_door(objective, rows, 0.02, 2, seed=5) for rows, _ in both]
    return conversation(talk, *doors, size=SIZE, name=prepared.__name__)


# ------------------------------------------------------------------------------------------------ history


class History:
    """DOPE-SGD's origin from earlier gradients (paper 000, section 5.3): as they were answered."""

    def __init__(self) -> None:
        self.last: Gradient | None = None

    def init(self, params: Params) -> None:
        return None

    def step(self, state: Any, params: Params, public: Any, ask: Ask, **_: Any) -> tuple[Gradient, Any]:
        update = dp_sgd(params, public, ask, origin=self.last)
        self.last = self.kept(update)
        return update, state

    def kept(self, update: Gradient) -> Gradient:
        return update

    def overhears(self, objective: Objective, question: GradientMean, rows: Tensor) -> None:
        """What the training loop also has at hand."""


class ExactHistory(History):
    """The same from gradients before the noise, which lie about in the training loop."""

    def kept(self, update: Gradient) -> Gradient:
        return self.heard

    def overhears(self, objective: Objective, question: GradientMean, rows: Tensor) -> None:
        total = clipped_sum(objective, question.params, rows, clip=question.clip)
        self.heard = Gradient({n: t / SIZE for n, t in total.items()})


def by_later_questions(kind: type[History]) -> list[Verdict]:
    world, objective = worlds()[-1], rows_objective()
    method = kind()

    def talk(ask: Ask) -> None:
        method.last = None
        step_by_step(method, objective.parameters(), None, ask, 3)

    def opened(rows: Tensor) -> Ask:
        ask = open_door(objective, rows, 0.02, 3, seed=5)

        def told(question: GradientMean) -> Any:
            method.overhears(objective, question, rows)
            return ask(question)

        return told

    return conversation(talk, opened(world.others), opened(world.everybody), size=SIZE, name=kind.__name__)


# ------------------------------------------------------------------------------------------------ models


def normalised(layer: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), layer(), nn.Linear(8, 2))


def by_other_rows(layer: Callable[[], nn.Module]) -> list[Verdict]:
    rows = torch.linspace(-1, 1, 64).reshape(16, 4), torch.arange(16) % 2
    return [examples_apart(Objective(normalised(layer), cross_entropy), rows, name="model")]


# ------------------------------------------------------------------------------------------------ the contract


@dataclass(frozen=True, kw_only=True)
class PrintedMirror(MirrorDescent):
    """Paper 003: alpha_t = cos(pi t / 2K) in every step, also after K, where it is negative."""

    def alpha(self, t: int) -> float:
        return math.cos(math.pi / 2 * t / self.decay_steps)

    def step(self, state: Any, params: Params, public: Any, ask: Ask, **handed: Any) -> tuple[Gradient, Any]:
        alpha = self.alpha(state["t"])
        private, below = Upon.step(self, state["below"], params, public, ask, **handed)
        update = alpha * private + (1 - alpha) * public.gradient(params, self.public_batch)
        return update, {"t": state["t"] + 1, "below": below}


def downhill(method: Method | StatefulMethod, *, name: str, steps: int = 12) -> Verdict:
    """Whether updates ever point against the private gradient, which all people agree about, and public rows lack."""
    objective = rows_objective()
    rows = torch.eye(24, dtype=torch.float64)[:1].repeat(SIZE, 1)
    public = Public(torch.zeros(6, 24, dtype=torch.float64), objective=objective, seed=0)

    def ask(q: GradientMean) -> Gradient:
        total = clipped_sum(objective, q.params, rows, clip=q.clip, views=q.views, offsets=q.offsets)
        return q.release(total, SIZE)

    along = [float(update["w"][0]) for update in step_by_step(method, objective.parameters(), public, ask, steps)]
    return Verdict(
        method=name,
        audit="contract, downhill",
        claimed=0.0,
        lower_bound=max(0.0, -min(along)),
        confidence=1.0,
        trials=steps,
        unit="ascent",
    )


def kept_contract(made: Callable[..., Any], *, name: str) -> Verdict:
    """tests/test_algorithms.py with one more row in its table of algorithms."""
    failed = ""
    contract.ALGORITHMS[name] = made
    try:
        contract.test_private_data_is_reached_through_ask_alone(name)
    except AssertionError:
        failed = "It asks more often than it says."
    finally:
        del contract.ALGORITHMS[name]
    return Verdict(
        method=name,
        audit="contract, tests/test_algorithms.py",
        claimed=0.0,
        lower_bound=float(bool(failed)),
        confidence=1.0,
        trials=1,
        unit="findings",
        told=failed,
    )


def by_contract(kind: type[MirrorDescent]) -> list[Verdict]:
    def made(**how: Any) -> MirrorDescent:
        return kind(decay_steps=3, public_batch=6, method=partial(dp_sgd, **how))

    return [
        downhill(algorithm(kind(decay_steps=4, public_batch=4)), name=kind.__name__),
        kept_contract(made, name=kind.__name__),
    ]


MUTANTS = (
    Mutant(
        name="M17",
        wrong="batch norm in train mode",
        right=partial(nn.GroupNorm, 2, 8),
        broken=partial(nn.BatchNorm1d, 8),
        audits=by_other_rows,
    ),
    Mutant(
        name="M18",
        wrong="public rows are left out because they are private ones, too",
        right=private_rows_removed,
        broken=public_rows_removed,
        audits=by_questions,
    ),
    Mutant(
        name="M19",
        wrong="an origin from earlier gradients without their noise",
        right=History,
        broken=ExactHistory,
        audits=by_later_questions,
    ),
    Mutant(
        name="M20",
        wrong="the weight of the private gradient turns negative (utility)",
        right=MirrorDescent,
        broken=PrintedMirror,
        audits=by_contract,
    ),
)
