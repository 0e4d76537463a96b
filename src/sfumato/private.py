"""The door: private data behind three verbs: `plan` or `reserve`, and `ask`.

The proof of the whole library is here. (1) A question states its unit and enforces it. (2) The ledger is charged,
durably, before anything is drawn, and refuses what the budget does not cover. (3) The sampler that was charged draws
the units. (4) `privatize` adds noise in proportion to the unit, once. Everything after that is post-processing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

import numpy as np
from torch.utils._pytree import tree_flatten

from sfumato.data.samplers import FixedSize, FullBatch, Indices, Poisson, Sampler
from sfumato.data.sources import DatasetSource, Source, TensorSource, as_source
from sfumato.distributed.processes import ALONE, Processes
from sfumato.distributed.tensors import form_of
from sfumato.errors import InvalidArgument, SfumatoError, shown
from sfumato.generators import own_generators
from sfumato.gradients import Performance
from sfumato.objective import Batch, Objective
from sfumato.privacy.budget import Budget
from sfumato.privacy.filters import Filter
from sfumato.privacy.ledger import Account, Ledger
from sfumato.privacy.ledger_plan import Plan
from sfumato.privacy.mechanisms import Adjacency, DiscreteGaussian, DiscreteLaplace, Gaussian, Mechanism, Noise
from sfumato.privacy.noise import NoiseSource, NotPrivateSeed, privatize
from sfumato.privacy.statement import NOT_PRIVATE, Statement
from sfumato.questions import Exact, Question, Sealed
from sfumato.sampled import WHOLE, Sampled, group_by_user
from sfumato.traces import no_traces, unquoted

_PART_BYTES, _CACHE_BYTES = 256 << 20, 2 << 20  # of gathered rows at a time, for models and for all other questions
_SHOWN = 64  # units that questions are checked with
_T = TypeVar("_T")


class Planned(NamedTuple):
    """One line of a plan: this kind of question, with this noise, on samples of this kind, so many times."""

    question: type[Question] | type[Sealed] | Question | Sealed
    noise: float | Noise
    sampler: Sampler
    times: int = 1


class Private:
    """A dataset behind the door. It cannot be iterated, indexed, counted, copied or pickled; it can be asked.

    Args:
        data: tensors or arrays (alone, or in a tuple, list or dict) with one row per example, or a map-style dataset.
        name: the declared name under which the ledger knows this dataset. The same data must keep the same name.
        size: the declared number of units (rows, or with unit="user" users), a public constant: rates and denominators
            are made from it. Under add/remove it may be approximate (a power of ten near the truth costs a little
            accuracy, never privacy); under replace-one it must be exact.
        objective: what gradients are taken of.
        ledger: where answers are charged: a `Ledger`, a path or a database URL; None keeps it in memory.
        budget: the most that may ever be spent on this dataset; None where the ledger already has one.
        unit: "example", or "user" with `users`: who is protected. A user's records are reduced before the clip.
        users: for unit="user", whose record each row is.
        reduction: "mean" or "sum" of a user's records; an origin needs the mean.
        records_per_user: of a user's records at most so many are used, the first ones.
        adjacency: which datasets count as neighbours.
        filter: how adaptive questions compose; fixed when the ledger's account is made.
        seed: only for tests and debugging: `NotPrivateSeed(...)` makes noise and sampling repeatable, and every
            statement about this dataset says that it was not private.
        device_noise: draw Gaussian noise on the GPU, by ChaCha20 with a new key for every answer; for models so large
            that noise from the host dominates the step. Without Triton the host draws all the same.
        performance: knobs of time and memory, a `sfumato.gradients.Performance`.
        processes: `sfumato.distributed.Processes`, for a training by several: `data` is then this one's own rows.

    >>> import torch
    >>> from sfumato import Budget, NoisyMean, Private
    >>> clinic = Private(torch.rand(1000, 1), name="clinic", size=1000, budget=Budget(1.0, 1e-5))
    >>> mean = clinic.ask(NoisyMean(lambda rows: rows, bound=1.0), noise=10.0, sampler=clinic.everyone())
    >>> bool(0.3 < mean < 0.7)
    True
    """

    def __init__(
        self,
        data: Any,
        *,
        name: str,
        size: int | None = None,
        objective: Objective | None = None,
        ledger: Ledger | str | os.PathLike[str] | None = None,
        budget: Budget | None = None,
        unit: Literal["example", "user"] = "example",
        users: Any = None,
        reduction: Literal["mean", "sum"] = "mean",
        records_per_user: int = 64,
        adjacency: Adjacency | str = Adjacency.ADD_REMOVE,
        filter: Filter | None = None,
        seed: NotPrivateSeed | None = None,
        device_noise: bool = False,
        performance: Performance | None = None,
        processes: Processes | None = None,
    ) -> None:
        if adjacency not in tuple(Adjacency):
            raise InvalidArgument(f"adjacency={adjacency!r} must be 'add-remove' or 'replace-one'.")
        adjacency = Adjacency(adjacency)
        if unit not in ("example", "user"):
            raise InvalidArgument(f"unit={unit!r} must be 'example' or 'user'.")
        if reduction not in ("mean", "sum"):
            raise InvalidArgument(f"reduction={reduction!r} must be 'mean' or 'sum'.")
        if (users is None) == (unit == "user"):
            raise InvalidArgument("users must be given for unit='user', and only then: one user id per row.")
        if records_per_user < 1:
            raise InvalidArgument(f"records_per_user={records_per_user} must be at least 1.")
        source = as_source(data)
        groups = None if users is None else group_by_user(users, len(source), records_per_user)
        present = len(source) if groups is None else len(groups)
        self.processes = processes or ALONE
        exactly = self.processes.total(present) if adjacency is Adjacency.REPLACE_ONE else 0
        if size is None and adjacency is Adjacency.REPLACE_ONE:
            size = exactly  # public under replace-one, where neighbours have equally many units
        if size is None:
            raise InvalidArgument(
                "size is missing: under add/remove the number of units is itself private, so declare it, for instance "
                "size=50000; it may be approximate."
            )
        if not isinstance(size, int | np.integer) or size < 1:
            raise InvalidArgument(f"size={size} must be a whole number of at least 1: declare the number of units.")
        if adjacency is Adjacency.REPLACE_ONE and size != exactly:
            raise InvalidArgument(
                f"size={size} must be the exact number of units under replace-one adjacency: declare that, or use "
                "add-remove."
            )
        if budget is not None:
            _check_delta(budget, size)
        self.name, self.size, self.unit, self.adjacency = name, int(size), unit, adjacency
        self.objective = objective
        self.performance = performance or Performance()
        self._reduction: Literal["mean", "sum"] = reduction
        self._source, self._groups, self._present = source, groups, present
        terms = {"unit": unit, "adjacency": adjacency, "budget": budget, "filter": filter}
        self.account = self.processes.account(ledger, name, **terms)
        _check_delta(self.account.budget, size)
        self._noise = NoiseSource(self.processes.seed(seed), device_generator=device_noise)
        if seed is not None:
            self.account.stamp(NOT_PRIVATE, f"Noise and sampling came from the repeatable seed {seed.seed}.")
        self._plan: Plan | None = None
        self._reserved: dict[str, Plan] = {}
        self._searched = self._rehearses = False
        self._shown: Batch | None = None
        self._some = np.unique(np.linspace(0, max(present - 1, 0), min(present, _SHOWN)).astype(np.int64))
        self.processes.check_apart(self._rows_to_check_with, users)

    # -------------------------------------------------------------------------------------------- samplers

    def poisson(self, batch_size: float) -> Poisson:
        """Each unit joins with probability batch_size / size."""
        return Poisson(size=self.size, batch_size=batch_size)

    def fixed(self, batch_size: int) -> FixedSize:
        """Exactly so many units, without replacement (replace-one adjacency only)."""
        return FixedSize(size=self.size, batch_size=batch_size)

    def everyone(self) -> FullBatch:
        """All units."""
        return FullBatch(size=self.size)

    # -------------------------------------------------------------------------------------------- verbs

    def plan(self, *lines: Planned | tuple[Any, ...], resume_key: str | None = None, note: str = "") -> Plan:
        """Reserve everything declared here in one go, composed tightly; `ask` then draws on it.

        Raises `BudgetExceeded`, with nothing charged, if it does not fit.
        """
        self._check_not_searched()
        if not lines:
            raise InvalidArgument("plan needs at least one line: Planned(question, noise, sampler, times).")
        mechanisms = [self._mechanism(Planned(*line)) for line in lines]
        self._plan = self.account.plan(mechanisms, resume_key=resume_key, note=note)
        self._reserved = {}
        return self._plan

    def reserve(self, line: Planned | tuple[Any, ...], *, note: str = "") -> Plan:
        """Reserve answers of one kind with noise chosen after seeing earlier answers; `ask` then draws on them.

        They are composed by the ledger's filter and paid for at once, so that taking them writes nothing. A new
        reservation of the same kind closes the one before: what was not asked is given back.
        """
        self._check_not_searched()
        mechanism = self._mechanism(Planned(*line))
        if (before := self._reserved.pop(mechanism.question, None)) is not None:
            before.close()
        self._reserved[mechanism.question] = plan = self.account.charge(mechanism, note=note)
        return plan

    def resume(self, resume_key: str, *, seen: int | Mapping[str, int] | None = None) -> Plan:
        """Take up a plan that was interrupted; answers that may have left the door stay counted."""
        self._check_not_searched()
        self._plan = self.account.resume(resume_key, seen=seen)
        self._reserved = {}
        return self._plan

    def ask(
        self, question: Question | Sealed, *, noise: float | Noise | None = None, sampler: Sampler | None = None
    ) -> Any:
        """One noisy answer, charged first.

        Without `noise` and `sampler` it is taken from what was reserved or planned. With both, it is an adaptive
        question, charged by itself under the ledger's filter. An empty sample is answered like any other: with noise,
        and charged.
        """
        self._check_not_searched()
        if (noise is None) != (sampler is None):
            raise InvalidArgument("noise and sampler go together: give both for an adaptive question, or neither.")
        self.processes.asked(question, partial(self._check, question), (noise, sampler))
        if noise is None or sampler is None:
            plan = self._reserved.get(question.kind(), self._plan)
            if plan is None:
                raise InvalidArgument(
                    f"No plan covers {question.kind()}: call plan(...) first, or give noise and sampler."
                )
            self._check_planned(question, plan)
            mechanism = plan.take(question.kind())
        else:
            one = self._mechanism(Planned(question, noise, sampler))
            mechanism = self.account.charge(one).take(question.kind())
        # From here on the answer is paid for. Sampling and noise come from the mechanism that was charged.
        if isinstance(question, Sealed):
            return self._inside(partial(self._answer_sealed, question, mechanism), charged=True)
        noisy = self._inside(partial(self._noisy, question, mechanism), charged=True)
        return question.release(noisy, mechanism.sampler.expected)

    def close(self) -> None:
        """End what is planned and reserved here; what was not asked is given back.

        But for a plan that fits the budget only as one composition, as a training calibrated to all of it does: its
        price is that of the whole.
        """
        for plan in (*self._reserved.values(), *([] if self._plan is None else [self._plan])):
            plan.close()
        self._plan, self._reserved = None, {}

    def statement(self) -> Statement:
        """What was promised to the people in this dataset, and what it rests on."""
        return self.account.statement()

    # -------------------------------------------------------------------------------------------- inside

    def _lend(self, account: Account, objective: Objective | None) -> Private:
        """The same rows behind the same door, whose answers `account` counts: they were paid for as a whole before."""
        lent: Private = object.__new__(Private)
        vars(lent).update(vars(self))  # with the same noise source: what one draws, the other never will
        vars(lent).pop("_rows_at_once", None)
        lent.account, lent.objective, lent._plan, lent._reserved = account, objective, None, {}
        lent._searched = False
        return lent

    @contextmanager
    def _set_aside(self) -> Iterator[None]:
        """While a search lends this door to trials: what they asked here would be charged, and so be counted."""
        self._searched = True
        try:
            yield
        finally:
            self._searched = False

    def _check_not_searched(self) -> None:
        if self._searched:
            raise InvalidArgument(
                f"private={self.name!r} is set aside while a search runs: in a trial ask the Private that it is given."
            )

    def _drawn(self, mechanism: Mechanism) -> Sampled:
        drawn = mechanism.sampler.draw(self._present, self._noise.sampling)
        return self._sample(drawn, largest=mechanism.sampler.largest(self.processes.count))

    def _noisy(self, question: Question, mechanism: Mechanism) -> Any:
        local = partial(self._inside, partial(self._exact, question, mechanism), charged=True)
        exact = self.processes.agree(local, said=form_of)
        law = {"unit": question.unit, "noise": mechanism.noise, "symmetric": question.symmetric}
        noised = partial(privatize, source=self._noise, **law)
        return self.processes.answer(exact, noised, discrete=question.discrete)

    def _exact(self, question: Question, mechanism: Mechanism) -> Exact:
        with self._no_traces(), self._own_randomness(question):
            return question.exact(self._drawn(mechanism))

    def _answer_sealed(self, question: Sealed, mechanism: Mechanism) -> Any:
        with self._no_traces(), self._own_randomness(question):
            return question.run(self._drawn(mechanism), self._sealed(question, mechanism))

    def _no_traces(self) -> AbstractContextManager[None]:
        """What private rows leave in modules, or would say on the screen. With a known seed all may be said."""
        own = () if self.objective is None else self.objective.module.modules()  # their buffers are lent as copies
        return no_traces(known=tuple(own), silent=self._noise.private)

    def _own_randomness(self, question: Any) -> AbstractContextManager[None]:
        """What private rows draw from the global generators comes from a secret seed, and leaves no trace in them."""
        draws = getattr(question, "draws", True)
        return own_generators(int(self._noise.sampling.integers(2**63))) if draws else nullcontext()

    def _inside(self, work: Callable[[], _T], *, charged: bool = False) -> _T:
        return unquoted(work, private=self._noise.private, charged=charged, advice=self._on_made_up_rows)

    def _on_made_up_rows(self) -> str:
        """What the objective says of made-up rows of the data's types and row shapes, which may be quoted.

        Those are the schema: neighbouring datasets have the same.
        """
        advice = "try it on public or made-up rows with seed=NotPrivateSeed(0) to see it."
        if self.objective is None or not isinstance(self._source, TensorSource):
            return advice
        rows = self._sample(np.arange(0), shown=self._source.made_up(2)).first_rows()
        kinds = ", ".join(f"{t.dtype} {tuple(t.shape[1:])}" for t in tree_flatten(rows)[0])
        try:
            self.objective.losses(self.objective.parameters(), rows)
        except Exception as error:
            said = str(error).partition("\n")[0].removesuffix(".")
            return f"made-up rows of {kinds} give {said}; loss(module, batch) must give one value per example."
        return advice

    def _sealed(self, question: Sealed, mechanism: Mechanism) -> Callable[[Exact], Any]:
        """Lends a sealed question its noise, as often as its proof allows."""
        left, inside = question.releases, question.inside  # the first so many draws do not leave

        def noisy(exact: Exact) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise SfumatoError(
                    f"{question.kind()} drew noise more than releases={question.releases} times: declare how often its "
                    "proof allows."
                )
            kept = question.releases - left <= inside
            return privatize(exact, unit=question.unit, noise=mechanism.noise, source=self._noise, inside=kept)

        return noisy

    def _mechanism(self, line: Planned) -> Mechanism:
        question, noise, sampler, times = line
        times = times.item() if hasattr(times, "item") else times  # numpy's whole numbers are whole numbers
        # One of these very classes: a subclass could draw otherwise than its parent is charged for.
        if type(sampler) not in (Poisson, FixedSize, FullBatch) or sampler.size != self.size:
            raise InvalidArgument(
                f"sampler={sampler!r} must be made for the declared size={self.size}: use private.poisson(...), "
                "private.fixed(...) or private.everyone()."
            )
        cls = question if isinstance(question, type) else type(question)
        if not issubclass(cls, Question | Sealed):
            raise InvalidArgument(f"question={question!r} must be a question, such as GradientMean.")
        self.processes.check_possible(cls, sampler)
        if isinstance(question, Sealed):
            self._check(question)
        if not isinstance(noise, Noise | int | float):
            raise InvalidArgument(f"noise={noise!r} must be a number or a noise, such as Gaussian(1.0).")
        if not isinstance(noise, Noise):
            noise = cls.law(float(noise))
        if not _fits(cls, noise):
            raise InvalidArgument(
                f"noise={noise!r} does not fit {cls.kind()}: counts take discrete noise, others Gaussian."
            )
        mechanism = Mechanism(
            question=cls.kind(), noise=noise, sampler=sampler, times=times, replace_factor=cls.replace_factor
        )
        mechanism.check_terms(question, self.adjacency)
        return mechanism

    def _check(self, question: Question | Sealed) -> None:
        if not isinstance(question, Question | Sealed):
            raise InvalidArgument(f"question={question!r} must be a question, such as GradientMean(params, Clip(1.0)).")
        self._inside(partial(self._check_rows, question))
        if not (np.isfinite(question.unit) and question.unit > 0):
            raise InvalidArgument(f"unit={question.unit} must be positive and finite: bound what one unit contributes.")

    def _check_rows(self, question: Question | Sealed) -> None:
        randomness = own_generators() if getattr(question, "draws", True) else nullcontext()
        with self._no_traces(), randomness:
            question.check(self._sample(self._some, shown=self._rows_to_check_with()))

    def _check_planned(self, question: Question | Sealed, plan: Plan) -> None:
        """Refuse a question that only shares its name with the one that was planned."""
        for mechanism in (m for m in plan.mechanisms if m.question == question.kind()):
            same = _fits(type(question), mechanism.noise) and mechanism.replace_factor >= question.replace_factor
            if not same:
                raise InvalidArgument(f"{question.kind()} is planned with another noise or replace_factor: rename it.")
            mechanism.check_terms(question, self.adjacency)

    def _sample(self, indices: Indices, *, shown: Batch | None = None, largest: int | None = None) -> Sampled:
        shared = (self._source, self._groups, indices, self._reduction, self.objective, self.performance)
        return Sampled(*shared, self._rows_at_once, shown=shown, largest=largest)

    @cached_property
    def _rows_at_once(self) -> int:
        limit = max(1, (_CACHE_BYTES if self.objective is None else _PART_BYTES) // max(1, self._source.row_bytes))
        limit = min(limit, self.performance.load_rows) if isinstance(self._source, DatasetSource) else limit
        return limit - limit % WHOLE if limit > WHOLE else limit

    def _rows_to_check_with(self) -> Batch | None:
        """Some rows from all over the data, since its first ones are often of one class; kept for later checks."""
        if self._shown is None and self._present:
            rows = self._some if self._groups is None else np.concatenate([self._groups[u][:1] for u in self._some])
            self._shown = self._source.gather(rows)
        return self._shown

    def _check_apart(self, public: Source, role: str) -> None:
        """Refuse rows behind this door that are given as public ones, too; the rows of a rehearsal are public."""
        if not self._rehearses and self._source.shares_rows(public):
            raise InvalidArgument(
                f"{role} holds rows of private={self.name!r} themselves: give rows of other people, since nothing "
                f"protects those in {role}."
            )

    def __repr__(self) -> str:
        declared = f"size={self.size} declared, unit={self.unit!r}, adjacency={str(self.adjacency)!r}"
        return f"Private(name={self.name!r}, {declared})"

    def _refuse(self, *_: Any) -> NoReturn:
        raise SfumatoError(f"{self!r} cannot be iterated, indexed, counted or copied: ask it a question instead.")

    __iter__ = __len__ = __getitem__ = __contains__ = __reduce_ex__ = __copy__ = __deepcopy__ = _refuse


def _fits(question: type[Question | Sealed], noise: Noise) -> bool:
    """Counts take discrete noise, everything else Gaussian."""
    discrete = issubclass(question, Question) and question.discrete
    return isinstance(noise, (DiscreteGaussian, DiscreteLaplace) if discrete else Gaussian)


def _check_delta(budget: Budget, size: int) -> None:
    if not isinstance(budget, Budget):
        raise InvalidArgument(f"budget={shown(budget)} must be a Budget: give Budget(epsilon=2.0, delta=1e-5).")
    if budget.delta >= 1 / size:
        raise InvalidArgument(
            f"delta={budget.delta} must be below 1/size={1 / size:.3g}: a larger delta permits publishing someone's "
            "row outright."
        )
