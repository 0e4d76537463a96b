"""Some faults once each, and what a checkpoint knows of its ledger; `python -m tests.faults.table` does them all."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from sfumato.data.samplers import FullBatch
from sfumato.errors import LedgerError
from sfumato.privacy.budget import Budget
from sfumato.privacy.ledger import Account, Ledger
from sfumato.privacy.ledger_tables import chained
from sfumato.privacy.mechanisms import Adjacency, Gaussian, Mechanism

ASK = Mechanism(question="sum", noise=Gaussian(100.0), sampler=FullBatch(size=1000), times=10)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="lives are forked")
def test_nothing_is_lost_and_the_harness_can_fail(tmp_path: Path) -> None:
    # A process of its own: the harness forks, and this one may have threads.
    names = ["disk full, for the ledger", "out of memory, fixed micro-batch"]
    out = tmp_path / "faults.json"
    command = [sys.executable, "-m", "tests.faults.table", "--times", "1", "--kills", "0", "--out", str(out)]
    done = subprocess.run([*command, "--only", *names], capture_output=True, text=True, timeout=240, check=False)
    assert out.exists(), done.stderr
    report = json.loads(out.read_text())
    assert [row["name"] for row in report["faults"]] == names
    for row in report["faults"]:
        assert (row["injected"], row["unpaid"], row["refused"], row["finished"]) == (1, 0, 1, 1)
        assert row["violations"] == []
    assert report["mutants"] == {"blind": {"caught": True}}
    assert done.returncode == 0


def open_account(path: Path) -> Account:
    return Ledger(path).account("people", unit="example", adjacency=Adjacency.ADD_REMOVE, budget=Budget(2.0, 1e-5))


def test_every_event_moves_the_head_and_a_ledger_knows_its_own_heads(tmp_path: Path) -> None:
    account = open_account(tmp_path / "ledger.db")
    heads = [account.head()]
    assert heads == [""]
    plan = account.plan([ASK], resume_key="run")
    heads.append(account.head())
    plan.take("sum")
    assert account.head() == heads[-1], "answers are counted by marks, which are written too often for a chain"
    plan.pause()
    again = account.resume("run")
    heads.append(account.head())
    again.close()
    heads.append(account.head())
    account.charge(ASK)
    heads.append(account.head())
    assert len(set(heads)) == 5
    for head in heads:
        account.check_head(head)
    with pytest.raises(LedgerError, match="lacks what the ledger of this checkpoint knew"):
        account.check_head("0" * 64)


def test_the_chain_can_be_computed_again_and_shows_a_line_that_was_changed(tmp_path: Path) -> None:
    account = open_account(tmp_path / "ledger.db")
    for _ in range(3):
        account.charge(ASK)
    lines = account._store.read(lambda tx: tx.chain(account._id))
    head = ""
    for line in lines:
        head = chained(head, line["event"])
        assert line["head"] == head
    assert account.head() == head
    assert chained(chained("", lines[0]["event"] + "x"), lines[1]["event"]) != lines[1]["head"]


def test_two_copies_of_a_ledger_part_at_their_next_event(tmp_path: Path) -> None:
    first = open_account(tmp_path / "a.db")
    first.charge(ASK)
    shutil.copy(tmp_path / "a.db", tmp_path / "b.db")
    second = open_account(tmp_path / "b.db")
    assert first.head() == second.head()
    first.charge(ASK)
    second.charge(ASK)  # the very same, and yet another line
    assert first.head() != second.head()
    with pytest.raises(LedgerError, match="backup"):
        second.check_head(first.head())


def test_a_ledger_without_a_chain_gets_one_and_refuses_no_checkpoint_of_before(tmp_path: Path) -> None:
    account = open_account(tmp_path / "ledger.db")
    account.charge(ASK)
    with sqlite3.connect(tmp_path / "ledger.db") as file:
        file.execute("DROP TABLE sfumato_heads")
        file.execute("UPDATE sfumato_meta SET value = '2'")
    file.close()
    again = open_account(tmp_path / "ledger.db")
    assert [line.answers for line in again.statement().asked] == [10]
    assert again.head() == ""
    again.check_head("")  # what a checkpoint of an earlier version has
    again.charge(ASK)
    again.check_head(again.head())
    assert len(again.head()) == 64
