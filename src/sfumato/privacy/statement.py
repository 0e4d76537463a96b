"""The privacy statement: what is promised, to whom, for which questions, and what the promise does not cover."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sfumato.data.samplers import FixedSize, Poisson
from sfumato.privacy.budget import Budget, at_most
from sfumato.privacy.mechanisms import Adjacency, BestOf, Mechanism, SealedGaussian

NOT_PRIVATE = "not-private"
"""The kind of stamp that voids a statement: noise from a known seed, say."""
_WEAK = 8.0  # from here on even odds can become 3,000 to one

NOT_COVERED = (
    "Questions asked outside this ledger: trial runs, hyper-parameter search, plots or statistics of the private data.",
    "Choices made by looking at the private data: ranges, vocabularies, clip norms, rows left out, the declared size.",
    "The declared name: the ledger cannot tell if one name was used for two datasets, or two names for one.",
    "A person with several records where the unit is one example, or under several user names.",
    "A person whose data is also in the public data: what is public is not protected.",
    "Facts about groups and populations that would be learned without this person as well.",
    "Floating-point arithmetic: Gaussian noise is drawn in finite precision, a small risk that the figures leave out.",
    "A solver inside a method such as objective perturbation that ends without a solution in finite precision.",
    "Timing, memory use, logs, error messages and anything else that leaves other than as an answer.",
    "A ledger that was deleted, edited or put back from an old backup; a machine that was put back from a snapshot.",
    "Code that reads the private data without going through the ledger, including the user's own model code.",
)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One mechanism of one plan; `answers` is how many may have left, of mechanism.times planned."""

    plan: int
    resume_key: str | None
    open: bool
    mechanism: Mechanism
    answers: int
    note: str
    created: str

    def to_json(self) -> dict[str, Any]:
        data = self.mechanism.to_json()
        planned = data.pop("times")
        return {
            "plan": self.plan,
            "resume_key": self.resume_key,
            "open": self.open,
            **data,
            "times_planned": planned,
            "answers_counted": self.answers,
            "note": self.note,
            "created": self.created,
        }


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What an account promises. `epsilon` covers everything asked so far; `budget` everything that ever will be."""

    dataset: str
    unit: str
    adjacency: Adjacency
    budget: Budget
    epsilon: float
    left: float
    accountant: str
    composition: str
    asked: tuple[Asked, ...]
    stamps: tuple[tuple[str, str], ...]
    durable: bool
    created: str
    updated: str

    @property
    def private(self) -> bool:
        """False if something was stamped that voids the promise."""
        return all(kind != NOT_PRIVATE for kind, _ in self.stamps)

    @property
    def warnings(self) -> tuple[str, ...]:
        found = [f"NOT PRIVATE: {text}" if kind == NOT_PRIVATE else text for kind, text in self.stamps]
        if not self.durable:
            found.append(
                "This ledger is kept in memory only: it knows of no earlier runs, and is lost when the process ends."
            )
        sizes = [line.mechanism.sampler.size for line in self.asked]
        if sizes and self.budget.delta * min(sizes) >= 1:
            found.append(
                f"delta={self.budget.delta:g} is not below 1 / {min(sizes)}, one over the declared size: "
                "it would allow one person's data to be published."
            )
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Plain data, for machines."""
        return {
            "private": self.private,
            "dataset": self.dataset,
            "epsilon": self.epsilon,
            "delta": self.budget.delta,
            "unit": self.unit,
            "adjacency": str(self.adjacency),
            "budget": {"epsilon": self.budget.epsilon, "delta": self.budget.delta},
            "left": self.left,
            "composition": self.composition,
            "accountant": self.accountant,
            "mechanisms": [line.to_json() for line in self.asked],
            "warnings": list(self.warnings),
            "not_covered": list(NOT_COVERED),
            "versions": _versions(),
            "created": self.created,
            "updated": self.updated,
        }

    def to_text(self) -> str:
        """Plain language, for people."""
        parts = [f"Privacy statement for the dataset {self.dataset!r}"]
        if self.warnings:
            parts.append("\n".join(f"WARNING. {text}" for text in self.warnings))
        parts += [self._promise(), self._numbers(), self._questions()]
        parts.append("What this statement does not cover:\n" + "\n".join(f"- {text}" for text in NOT_COVERED))
        return "\n\n".join([*parts, self._made()]) + "\n"

    def to_markdown(self) -> str:
        """The same text with headings, for a repository or a web page."""
        parts = [f"# Privacy statement for the dataset `{self.dataset}`"]
        parts += [f"> **Warning.** {text}" for text in self.warnings]
        for text in (self._promise(), self._numbers(), self._questions()):
            # Each part begins with its own title: "What is promised. Everything ...".
            title, dot, rest = text.partition(". ")
            titled = title in ("What is promised", "The numbers", "What was asked")
            parts += [f"## {title}", rest.replace("\n- ", "\n\n- ", 1)] if titled and dot else [text]
        parts += ["## What this statement does not cover", "\n".join(f"- {text}" for text in NOT_COVERED), self._made()]
        return "\n\n".join(parts) + "\n"

    def _made(self) -> str:
        versions = ", ".join(f"{name} {number}" for name, number in _versions().items())
        return f"Account made {self.created}, last changed {self.updated}. Computed with {versions}."

    def _promise(self) -> str:
        if not self.private:
            return "There is no promise: see the warning. The figures below describe what was asked, not a protection."
        if self.epsilon == 0 and not any(line.answers for line in self.asked):
            return "Nothing has been asked of this dataset, so nothing has been learned about anyone in it."
        whom = "one person, with all of that person's records," if self.unit == "user" else "one record"
        change = "is in the dataset or not" if self.adjacency is Adjacency.ADD_REMOVE else "is exchanged for any other"
        # Bayes: even odds become at most e^epsilon to one.
        odds = math.exp(min(self.epsilon, 700.0))
        sure = f"{100 * odds / (1 + odds):.1f}" if odds < 1e4 else "almost 100"
        text = (
            f"What is promised. Whether {whom} {change} makes a limited difference to everything that was computed "
            f"from this dataset: any result was at most {odds:.4g} times as likely with the true data as with the "
            f"changed data, except with a probability of about {self.budget.delta:g}. That limits what whoever sees "
            "all results, and knows everything else in the dataset, learns about that one. If someone thought it a "
            f"matter of even odds which of the two was used, the results can move that belief to {sure} % at most."
        )
        if self.epsilon > _WEAK:
            text += f" An epsilon of {at_most(self.epsilon)} is a weak promise: by itself it rules out little."
        return text

    def _numbers(self) -> str:
        text = (
            f"The numbers. (epsilon, delta)-differential privacy with epsilon = {at_most(self.epsilon)} and "
            f"delta = {self.budget.delta:g}; unit of privacy: {self.unit}; neighbouring datasets: {self.adjacency}; "
            f"composition: {self.composition}; accountant: {self.accountant}. The budget of the dataset is "
            f"epsilon = {self.budget.epsilon:g} at delta = {self.budget.delta:g}, "
            f"of which about {self.left:.4g} can still be asked for."
        )
        if self.composition.startswith("planned"):
            text += (
                " The figure is that of the whole plan, also if it ended early. It covers everything asked so far; "
                "should more be asked, the promise for everything together becomes that of the budget."
            )
        return text

    def _questions(self) -> str:
        if not self.asked:
            return "What was asked. Nothing."
        lines = []
        for line in self.asked:
            m = line.mechanism
            note = f" ({line.note})" if line.note else ""
            still = ", still open" if line.open else ""
            lines.append(
                f"- Plan {line.plan}{note}, {line.created}: {m.question}, {_sample(m)}, {self._noise(m)}; "
                f"{line.answers} of {m.times} planned answers counted{still}."
            )
        return (
            "What was asked. An answer is counted before it is given, so after a crash the count may be too high.\n"
            + ("\n".join(lines))
        )

    def _noise(self, mechanism: Mechanism) -> str:
        noise = mechanism.noise
        if isinstance(noise, SealedGaussian):
            return (
                f"epsilon={noise.epsilon:g}, delta={noise.delta:g} by the method's own proof under {noise.adjacency} "
                f"(Gaussian noise of scale {noise.scale:g} inside the method)"
            )
        if isinstance(noise, BestOf):
            kinds = " or ".join(
                ", then ".join(f"{m.times} x {m.question}, {_sample(m)}, {self._noise(m)}" for m in trial)
                for trial in noise.trials
            )
            return (
                f"the best of a secret random number of trials, {noise.repetitions.mean:g} in the mean "
                f"(shape {noise.repetitions.shape:g}), each of them: {kinds}"
            )
        # What a method that runs inside the door passes on is bounded by its proof, everything else one by one.
        return (
            f"{type(noise).__name__} noise of scale {noise.scale:g} (in units of the most one {self.unit} can change "
            "the exact answer)"
        )


def _sample(mechanism: Mechanism) -> str:
    sampler = mechanism.sampler
    match sampler:
        case Poisson():
            return f"each of {sampler.size} declared units drawn with probability {sampler.rate:.4g}"
        case FixedSize():
            return f"{sampler.batch_size} of exactly {sampler.size} units drawn"
        case _:
            return f"all units ({sampler.size} declared)"


def _versions() -> dict[str, str]:
    found = {}
    for package in ("sfumato", "dp-accounting", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return {**found, "python": platform.python_version()}
