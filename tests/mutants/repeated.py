"""The fast part again and again: how often does it alarm about what is right? The outcome is a record, and a sentence.

The record is written after every repetition, so that a run that was stopped has told the truth so far and is gone on
with; one of other code begins anew.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sfumato.audit.verdict import CONFIDENCE, findings
from tests.mutants.suite import Done, done, fast_part, workers

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "repeated.json"
_BLOCK = re.compile(r"(<!-- repeated -->\n).*?(<!-- /repeated -->)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Record:
    """What was found in so many whole repetitions; of `audits`, those `by_chance` may alarm once in a million."""

    code: str
    repetitions: int = 0
    audits: int = 0
    by_chance: int = 0
    alarms: tuple[str, ...] = ()
    seconds: float = 0.0

    def after(self, results: list[Done], seconds: float) -> Record:
        verdicts = [verdict for one in results for verdict in one.right]
        assert all(verdict.confidence >= CONFIDENCE for verdict in verdicts)
        return replace(
            self,
            repetitions=self.repetitions + 1,
            audits=self.audits + len(verdicts),
            by_chance=self.by_chance + sum(verdict.confidence < 1 for verdict in verdicts),
            alarms=(*self.alarms, *map(str, findings(verdicts))),
            seconds=self.seconds + seconds,
        )

    def told(self) -> str:
        alarms = f"{len(self.alarms)} alarms" if self.alarms else "no alarm"
        return (
            f"{self.repetitions} repetitions, {self.audits:,} audits of what is right, {self.by_chance:,} of them with "
            f"a chance of at most {1 - CONFIDENCE:.0e} to alarm, the others with none: {alarms}."
        )


def code() -> str:
    """Of all that is audited, and all that audits it."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "src").rglob("*.py"), *Path(__file__).parent.glob("[!t]*.py")]):  # no tests
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\n" + path.read_bytes())
    return digest.hexdigest()[:16]


def stored(path: Path) -> Record:
    values = json.loads(path.read_text(encoding="utf-8"))
    return Record(**{**values, "alarms": tuple(values["alarms"])})


def filled(page: str, record: Record) -> str:
    """The page with its sentence made anew."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{record.told()}\n\n{found[2]}", page)


def repeated(times: int, path: Path, processes: int) -> int:
    """Until the record has so many repetitions."""
    record = Record(code=code())
    if path.exists() and (before := stored(path)).code == record.code:
        record = before
    path.parent.mkdir(parents=True, exist_ok=True)
    with workers(processes) as pool:
        while record.repetitions < times:
            start = time.monotonic()
            record = record.after(list(done(fast_part(), pool)), time.monotonic() - start)
            draft = path.with_suffix(".draft")
            draft.write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")
            draft.replace(path)
            print(f"{record.told()} {record.seconds:.0f} s", flush=True)
    for alarm in record.alarms:
        print(f"FALSE ALARM: {alarm}")
    return int(bool(record.alarms))
