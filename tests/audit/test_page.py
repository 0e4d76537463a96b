"""The page is made from stored verdicts, and the noise of several processes is one noise."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sfumato.audit.doors import open_door, rows_objective
from sfumato.audit.noise import noise_audit, pure_noise
from sfumato.audit.page import filled, main
from sfumato.distributed import Processes
from sfumato.errors import InvalidArgument
from tests.test_distributed import run_processes

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_made_from_the_stored_verdicts() -> None:
    assert main([str(DOCS), "--check"]) == 0
    stored = json.loads((DOCS / "audit.json").read_text())
    assert {one["verdict"] for one in stored} == {"holds"}
    assert all(one["confidence"] >= 1 - 1e-6 for one in stored)
    page = (DOCS / "audit.md").read_text()
    assert filled(page, stored[:1]) != page


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="--write"):
        main(["docs", "--write"])


def noises(processes: Processes) -> Any:
    door = partial(open_door, processes=processes)
    return pure_noise(rows_objective(1500), torch.zeros(0, 1500, dtype=torch.float64), noise=1.0, steps=3, door=door)


def test_two_processes_add_one_noise(tmp_path: Path) -> None:
    first, second = run_processes(noises, 2, tmp_path)
    assert all(verdict.holds for verdict in noise_audit(first, noise=1.0, name="x", about="processes")), first
    assert all(torch.equal(a[n], b[n]) for a, b in zip(first, second, strict=True) for n in a)
    # Each adding its own would make sqrt(2) of it, which is another law; half each, one that is too small.
    doubled = [{n: 2**0.5 * t for n, t in answer.items()} for answer in first]
    assert [v.holds for v in noise_audit(doubled, noise=1.0, name="x")][1] is False
    halved = [{n: t / 2**0.5 for n, t in answer.items()} for answer in first]
    assert noise_audit(halved, noise=1.0, name="x")[0].holds is False
