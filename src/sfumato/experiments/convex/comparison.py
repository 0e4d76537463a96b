"""Our methods against the best of the others, repeat by repeat: a repeat has the same rows for all of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sfumato.experiments.convex.records import all_records, has_settings
from sfumato.experiments.convex.spec import Spec
from sfumato.experiments.records import COMMITTED

CAPTION = (
    "How far our methods are ahead of the best of the others, paired over repeats, ± the standard error of the "
    "difference; for errors, how far below."
)

Scores = Mapping[int, float]  # by repeat


@dataclass(frozen=True, kw_only=True)
class Pair:
    """How far one of our methods is ahead of the best of the others on one problem; positive is better."""

    row: str
    ours: str
    other: str
    ahead: float
    stderr: float
    repeats: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def pairs(spec: Spec, folder: Path = COMMITTED) -> list[Pair]:
    """Row by row, for all methods that the spec calls ours; rows that lack one of the others are left out."""
    if spec.compare is None:
        return []
    ours, others = spec.compare.ours, spec.compare.others
    records = list(all_records(folder, spec).values())
    found = []
    for row in dict.fromkeys(cell.row for cell in spec.cells):
        cells = {cell.column: cell for cell in spec.cells if cell.row == row}
        sign = -1.0 if cells[ours[0]].settings.data.name in spec.compare.errors else 1.0
        scores: dict[str, Scores] = {}
        for name in (*ours, *others):
            record = next((r for r in records if has_settings(r, cells[name].settings)), None)
            if record is not None:
                scores[name] = dict(zip(record["repeats"], (sign * s for s in record["scores"]), strict=True))
        if not all(scores.get(name) for name in others):
            continue
        best = max(others, key=lambda name: statistics.fmean(scores[name].values()))
        found += [_pair(row, name, best, scores) for name in ours if name in scores]
    return found


def _pair(row: str, ours: str, other: str, scores: Mapping[str, Scores]) -> Pair:
    both = sorted(scores[ours].keys() & scores[other].keys())
    ahead = [scores[ours][r] - scores[other][r] for r in both]
    stderr = statistics.stdev(ahead) / math.sqrt(len(ahead)) if len(ahead) > 1 else math.nan
    return Pair(row=row, ours=ours, other=other, ahead=statistics.fmean(ahead), stderr=stderr, repeats=len(both))


def markdown(found: Sequence[Pair]) -> str:
    """Problems down, our methods across, and below in how many problems each is ahead."""
    methods = list(dict.fromkeys(pair.ours for pair in found))
    by_place = {(pair.row, pair.ours): pair for pair in found}
    lines = [f"| problem | best of the others | {' | '.join(methods)} |", "|" + " --- |" * (2 + len(methods))]
    for row in dict.fromkeys(pair.row for pair in found):
        here = [by_place.get((row, method)) for method in methods]
        texts = ["" if pair is None else f"{pair.ahead:+.4f} ± {pair.stderr:.4f}" for pair in here]
        other = next(pair.other for pair in here if pair is not None)
        lines.append(f"| {row} | {other} | {' | '.join(texts)} |")
    counts = []
    for method in methods:
        mine = [pair for pair in found if pair.ours == method]
        counts.append(f"{sum(pair.ahead > 0 for pair in mine)} of {len(mine)}")
    lines.append(f"| ahead in | | {' | '.join(counts)} |")
    return "\n".join(lines)
