"""All mutants, and all methods of the package, in two processes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from sfumato.audit.subjects import Subject, subjects
from sfumato.audit.verdict import Verdict
from tests.mutants import accounts, federated, gradients, publics, sampling, selections
from tests.mutants.mutant import Mutant

_FILES = (gradients, sampling, accounts, publics, selections, federated)
MUTANTS: tuple[Mutant, ...] = tuple(mutant for file in _FILES for mutant in file.MUTANTS)
PROCESSES = 2
_MEMORY = Path("/dev/shm")  # a folder in memory: what a ledger says is audited here, and no power is cut


@dataclass(frozen=True, kw_only=True)
class Job:
    """One thing to do, as another process can be told of it: a mutant by its place, or a method by its name."""

    mutant: int | None = None
    method: str = ""
    fast: bool = False  # of a method what is quick, and of a mutant the right one alone


@dataclass(frozen=True, kw_only=True)
class Done:
    """What came out: about what is right, all verdicts; about a mutant, what was found."""

    job: Job
    right: Sequence[Verdict]
    found: Sequence[Verdict] = ()


def rights() -> list[int]:
    """Mutants by their place, those that are fast, one for each pair of a right one and its audits."""
    places = {(id(m.right), id(m.audits)): i for i, m in reversed(list(enumerate(MUTANTS))) if not m.slow}
    return sorted(places.values())


def everything() -> list[Job]:
    """The whole suite, what takes longest first."""
    long = [place for place, mutant in enumerate(MUTANTS) if mutant.slow]
    short = [place for place, mutant in enumerate(MUTANTS) if not mutant.slow]
    methods = sorted((subject.name for subject in subjects()), key=lambda name: not name.startswith("near-private"))
    return [*(Job(method=name) for name in methods), *(Job(mutant=place) for place in (*long, *short))]


def fast_part() -> list[Job]:
    """The right ones under every audit that is fast."""
    mutants = [Job(mutant=place, fast=True) for place in rights()]
    return [*mutants, *(Job(method=subject.name, fast=True) for subject in subjects())]


def do(job: Job) -> Done:
    """In whatever process."""
    if job.mutant is not None:
        mutant = MUTANTS[job.mutant]
        # Of several mutants of one right thing the first one speaks for it; slow ones are tried by pytest -m slow.
        right = mutant.of_the_right_one() if job.mutant in rights() else []
        return Done(job=job, right=right, found=() if job.fast else mutant.found())
    subject: Subject = next(one for one in subjects() if one.name == job.method)
    return Done(job=job, right=subject.quick() if job.fast else subject.audits())


def workers(processes: int = PROCESSES) -> Executor:
    """Processes that live on, and so import and account once."""
    return ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_begin)


def done(jobs: Sequence[Job], pool: Executor) -> Iterator[Done]:
    """In the order in which they end."""
    for future in as_completed([pool.submit(do, job) for job in jobs]):
        yield future.result()


def _begin() -> None:
    torch.set_num_threads(1)  # there is a process for every core
    if _MEMORY.is_dir():
        tempfile.tempdir = str(_MEMORY)
