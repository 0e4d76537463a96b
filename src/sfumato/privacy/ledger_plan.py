"""A plan as its holder sees it: answers are taken one by one, and the ledger is written ahead of them in slabs."""

from __future__ import annotations

import bisect
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self

from sfumato.errors import BudgetExceeded, InvalidArgument, LedgerError
from sfumato.privacy import accounting
from sfumato.privacy.mechanisms import Mechanism

if TYPE_CHECKING:
    from sfumato.privacy.ledger_account import Account

# A slab lasts about half a second, or 200 times what writing it costs (0.5 % of the time). It begins with one answer
# and grows, since a crash loses what is left of it; for the same reason it is never more than a quarter of the plan.
SLAB_SECONDS = (0.5, 10.0)
SLAB_COST = 200.0
SLAB_GROWTH = 32
SLAB_PARTS = 4
SLAB_LIMIT = 4096


def planned_answers(mechanisms: Sequence[Mechanism]) -> dict[str, int]:
    """How many answers there are to each question."""
    planned: dict[str, int] = {}
    for mechanism in mechanisms:
        planned[mechanism.question] = planned.get(mechanism.question, 0) + mechanism.times
    return planned


@dataclass
class _Slab:
    """One question's answers: handed out, and covered by a durable mark."""

    taken: int
    mark: int
    planned: int
    size: int = 0
    since: float = 0.0


class Plan:
    """The right to a number of answers, reserved before the first of them. Made by `Account.plan`, `charge`, `resume`.

    As a context manager it closes after success; after an error it pauses, so that it can be resumed.
    """

    id: int
    """Its number in the ledger."""
    lost: int | None
    """After a resume: answers that were counted and that the checkpoint does not know (None: it did not say)."""

    def __init__(
        self,
        account: Account,
        id: int,
        owner: str,
        mechanisms: Sequence[Mechanism],
        *,
        taken: Mapping[str, int],
        marks: Mapping[str, int],
        epsilon: float | None,
        lost: int | None = 0,
        prepaid: bool = False,
    ) -> None:
        self.id = id
        self.owner = owner
        self.mechanisms = tuple(mechanisms)
        self.lost = lost
        self._account = account
        self._epsilon = epsilon
        self._prepaid = prepaid
        self._slabs = {q: _Slab(taken[q], marks[q], planned) for q, planned in planned_answers(mechanisms).items()}
        self._slab_seconds = SLAB_SECONDS[0]
        # For each question its mechanisms in declared order, and how many answers lie before the end of each.
        self._schedule: dict[str, tuple[list[Mechanism], list[int]]] = {}
        for question in self._slabs:
            mine = [m for m in mechanisms if m.question == question]
            self._schedule[question] = (mine, list(accumulate(m.times for m in mine)))
        self._ended = False  # no more answers
        self._settled = False  # and the ledger knows
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._grid: dict[int, float] = {}

    @property
    def taken(self) -> int:
        """Answers that are used up: handed out here, or counted before a resume."""
        return sum(slab.taken for slab in self._slabs.values())

    def taken_of(self, question: str) -> int:
        """Answers to one question that are used up."""
        return self._slab(question).taken

    def remaining(self, question: str | None = None) -> int:
        """Answers that can still be taken, of one question or of all."""
        slabs = self._slabs.values() if question is None else [self._slab(question)]
        return sum(slab.planned - slab.taken for slab in slabs)

    def take(self, question: str) -> Mechanism:
        """The right to draw the noise of one answer; call it before. When it returns, the answer is on the disk.

        Mechanisms of the same question are used in the order in which the plan names them.
        """
        with self._lock:
            self._check_alive()
            slab = self._slab(question)
            if slab.taken >= slab.planned:
                raise BudgetExceeded(
                    f"Plan {self.id} has no answer to {question!r} left out of {slab.planned}: plan more of them."
                )
            if slab.taken >= slab.mark:
                self._raise_mark(question, slab)
            mechanisms, ends = self._schedule[question]
            mechanism = mechanisms[0] if len(ends) == 1 else mechanisms[bisect.bisect_right(ends, slab.taken)]
            slab.taken += 1
            return mechanism

    def _raise_mark(self, question: str, slab: _Slab) -> None:
        start = time.monotonic()
        elapsed = max(start - slab.since, 1e-6)
        size = 1
        if slab.size:  # as many as were taken per second lately, times the seconds a slab should last
            size = math.ceil(slab.size / elapsed * self._slab_seconds)
            size = max(1, min(size, SLAB_GROWTH * slab.size, slab.planned // SLAB_PARTS, SLAB_LIMIT))
        mark = min(slab.taken + size, slab.planned)
        marks = {q: s.mark for q, s in self._slabs.items()} | {question: mark}
        self._account._mark(self, marks)
        # Only now, after the commit: what it says on the disk is never less than what may be handed out.
        end = time.monotonic()
        self._slab_seconds = min(max(SLAB_SECONDS[0], SLAB_COST * (end - start)), SLAB_SECONDS[1])
        slab.mark, slab.size, slab.since = mark, size, end

    @contextmanager
    def kept_open(self) -> Iterator[Self]:
        """As a context: after success the plan goes on, with its exact count written; after an error it pauses."""
        try:
            yield self
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        self.settle()

    def settle(self) -> None:
        """Writes the exact count, and goes on: a crash afterwards loses nothing that was not yet taken."""
        with self._lock:
            self._check_alive()
            if self._prepaid:
                return  # paid for as a whole: a smaller count would give back what can still be taken
            # Under the lock no answer slips in between; the next one has to raise the mark again first.
            for slab in self._slabs.values():
                slab.mark = slab.taken
            self._account._count(self, {q: slab.taken for q, slab in self._slabs.items()}, close=False)

    def pause(self) -> None:
        """Writes the exact count and lets go; the plan stays open for `Account.resume`."""
        self._end(close=False)

    def close(self) -> None:
        """Writes the exact count and ends the plan; what was not taken is given back to the filter."""
        self._end(close=True)

    def _end(self, *, close: bool) -> None:
        with self._lock:
            self._check_pid()
            if self._settled:
                return
            # First no more answers, then the smaller count; the other way round an answer could slip in between.
            self._ended = True
            if not (self._prepaid and self.remaining() == 0):  # else the ledger already says so
                taken = {q: slab.taken for q, slab in self._slabs.items()}
                self._account._count(self, taken, close=close or self._prepaid)
            self._settled = True

    def epsilon_after(self, answers: int) -> float:
        """About what the first `answers` answers cost, in declared order, as one composition. For progress bars only.

        Computed, for each run of answers to one question, at its length and its halves, quarters, ..., interpolated in
        between; so a whole training costs about ten accountings, whoever asks how often.
        """
        answers = min(answers, sum(m.times for m in self.mechanisms))
        if answers <= 0:
            return 0.0
        start = 0
        for _, run in groupby(self.mechanisms, key=lambda m: m.question):
            high = sum(m.times for m in run)
            if answers <= high:
                break
            start, answers = start + high, answers - high
        while high > 1 and high // 2 >= answers:
            high //= 2
        low = high // 2
        a, b = self._epsilon_at(start + low), self._epsilon_at(start + high)
        return a + (b - a) * (math.sqrt(answers) - math.sqrt(low)) / (math.sqrt(high) - math.sqrt(low))

    def _epsilon_at(self, answers: int) -> float:
        if answers == 0 or self._epsilon == 0:
            return 0.0
        if answers not in self._grid:
            prefix, rest = [], answers
            for mechanism in self.mechanisms:
                if rest > 0:
                    prefix.append(replace(mechanism, times=min(rest, mechanism.times)))
                rest -= mechanism.times
            if rest >= 0 and self._epsilon is not None:
                self._grid[answers] = self._epsilon
            else:
                account = self._account
                delta, adjacency = account.budget.delta, account.adjacency
                tolerance = accounting.TOLERANCE if rest >= 0 else 0.02  # the whole plan's is what a Run shows
                cost = accounting.epsilon(prefix, delta=delta, adjacency=adjacency, tolerance=tolerance)
                # Coarse grids overstate; but no part costs more than the whole.
                self._grid[answers] = min(cost.epsilon, math.inf if self._epsilon is None else self._epsilon)
        return self._grid[answers]

    def _slab(self, question: str) -> _Slab:
        try:
            return self._slabs[question]
        except KeyError:
            raise InvalidArgument(
                f"question={question!r} is not in plan {self.id}, which has {', '.join(map(repr, self._slabs))}: "
                "declare it when the plan is made."
            ) from None

    def _check_pid(self) -> None:
        if os.getpid() != self._pid:  # a forked copy would hand out the same slab again
            raise LedgerError(
                f"Plan {self.id} belongs to the process that made it: take answers there, not after a fork."
            )

    def _check_alive(self) -> None:
        self._check_pid()
        if self._ended:
            raise LedgerError(f"Plan {self.id} is closed here: resume it if it was paused, or make a new plan.")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.pause()
        except LedgerError as also:  # the first error matters more, and the ledger already counts enough
            error.add_note(str(also))

    def __getstate__(self) -> NoReturn:
        raise TypeError(f"Plan {self.id} cannot be copied or pickled: two copies would hand out the same answers.")
