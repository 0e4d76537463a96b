"""`sfumato budget`: who spent what, what is left, who waits, what a training would cost."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sfumato.data.samplers import Poisson
from sfumato.errors import BudgetExceeded
from sfumato.privacy import accounting
from sfumato.privacy.budget import Budget
from sfumato.privacy.ledger import Account, Ledger
from sfumato.privacy.mechanisms import Adjacency, Gaussian, Mechanism
from tests.faults.postgres import missing, running

Run = Callable[..., Any]
BUDGET = Budget(2.0, 1e-5)


def train(noise: float = 3.0, steps: int = 100) -> Mechanism:
    sampler = Poisson(size=10_000, batch_size=200)
    return Mechanism(question="gradients", noise=Gaussian(noise), sampler=sampler, times=steps)


def planned(noise: float, steps: int) -> list[object]:
    return ["--dataset-size", 10_000, "--batch-size", 200, "--steps", steps, "--noise-multiplier", noise]


def open_account(where: Path, user: str, name: str = "clinic") -> Account:
    ledger = Ledger(where, user=user)
    return ledger.account(name, unit="user", adjacency=Adjacency.ADD_REMOVE, budget=BUDGET)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.db"
    with open_account(path, "anna").plan([train()], note="[bold]first[/bold]") as plan:
        for _ in range(7):
            plan.take("gradients")
    bert = open_account(path, "bert")
    bert.charge(train(50.0, 3)).take("gradients")
    bert.plan([train(4.0)], resume_key="night").take("gradients")
    open_account(path, "anna", "school")
    return path


def test_it_says_who_spent_what_and_what_is_left(sfumato: Run, ledger: Path) -> None:
    result = sfumato("budget", ledger, "--json")
    assert (result.status, result.err) == (0, "")
    clinic, school = json.loads(result.out)["datasets"]
    account = Ledger(ledger).account("clinic")
    assert (clinic["dataset"], clinic["budget"]) == ("clinic", {"epsilon": 2.0, "delta": 1e-5})
    assert (clinic["spent"], clinic["left"]) == (account.epsilon_spent(), account.left())
    assert [(p["made_by"]["user"], p["questions"]["gradients"], p["open"]) for p in clinic["plans"]] == [
        ("anna", [7, 100], False),
        ("bert", [3, 3], False),
        ("bert", [1, 100], True),
    ]
    assert all(p["made_by"]["process"] == os.getpid() for p in clinic["plans"])
    shares = {share["user"]: share for share in clinic["shares"]}
    assert (shares["anna"]["answers"], shares["bert"]["answers"], shares["bert"]["plans"]) == (7, 4, 2)
    assert sum(share["epsilon"] for share in clinic["shares"]) == pytest.approx(clinic["spent"], rel=0.2)
    assert (school["dataset"], school["plans"], school["spent"], school["left"]) == ("school", [], 0.0, 2.0)


def test_the_same_in_words(sfumato: Run, ledger: Path) -> None:
    words = " ".join(sfumato("budget", ledger).out.split())
    assert "clinic" in words
    assert "school" in words
    assert "epsilon 2, delta 1e-05" in words
    assert "night" not in words
    shown = " ".join(sfumato("budget", ledger, "--dataset", "clinic").out.split())
    assert "school" not in shown
    assert "7/100" in shown
    assert "bold" in shown, "a note is no markup"


def test_whoever_waits_is_shown(sfumato: Run, ledger: Path) -> None:
    account = open_account(ledger, "cleo")

    def wait(tx: Any) -> None:
        facts = {"mechanisms": json.dumps([train().to_json()]), "asks": 0.5, "note": "please"}
        tx.wait(account_id=account._id, token="x", **facts)

    account._store.write(wait)
    (clinic, _) = json.loads(sfumato("budget", ledger, "--json").out)["datasets"]
    (waits,) = clinic["waiting"]
    assert (waits["place"], waits["made_by"]["user"], waits["asks"], waits["note"]) == (1, "cleo", 0.5, "please")
    assert waits["questions"] == {"gradients": 100}
    assert "please" in sfumato("budget", ledger).out


def test_a_planned_training_is_quoted_and_not_charged(sfumato: Run, ledger: Path) -> None:
    before = ledger.read_bytes()
    for noise in (3.0, 0.8):
        quote = json.loads(sfumato("budget", ledger, "--dataset", "clinic", *planned(noise, 100), "--json").out)[
            "planned"
        ]
        alone = accounting.epsilon([train(noise)], delta=1e-5, adjacency=Adjacency.ADD_REMOVE)
        assert (quote["alone"], quote["first"]) == (alone.epsilon, False)
        assert quote["fits"] == (noise == 3.0)
        assert ledger.read_bytes() == before
    words = sfumato("budget", ledger, "--dataset", "clinic", *planned(3.0, 100)).out
    assert "fits now" in words
    account = Ledger(ledger).account("clinic")
    with pytest.raises(BudgetExceeded):
        account.plan([train(0.8)])
    said = account.quote([train(3.0)])
    account.plan([train(3.0)])
    assert account.left() == pytest.approx(said.left)


def test_the_first_training_of_a_dataset_is_quoted_as_one_composition(sfumato: Run, ledger: Path) -> None:
    quote = json.loads(sfumato("budget", ledger, "--dataset", "school", *planned(1.13, 400), "--json").out)["planned"]
    school = Ledger(ledger).account("school")
    plan = school.plan([train(1.13, 400)])
    assert (quote["alone"], quote["first"], quote["fits"]) == (school.epsilon_spent(), True, True)
    assert quote["left"] == pytest.approx(school.left())
    view = school.view()
    assert view.plans[0].epsilon == view.spent == plan.epsilon_after(400)


@pytest.mark.parametrize("form", ["markdown", "json"])
def test_the_statement(sfumato: Run, ledger: Path, form: str) -> None:
    said = Ledger(ledger).account("clinic").statement()
    result = sfumato("budget", ledger, "--dataset", "clinic", "--statement", form)
    if form == "json":
        assert json.loads(result.out) == said.to_json()
        return
    assert result.out == said.to_markdown()
    assert result.out.startswith("# Privacy statement for the dataset `clinic`\n")
    headings = [line for line in result.out.splitlines() if line.startswith("## ")]
    titles = ["What is promised", "The numbers", "What was asked", "What this statement does not cover"]
    assert headings == [f"## {title}" for title in titles]
    flat = "".join(c for c in result.out if c.isalnum())
    for paragraph in said.to_text().split("\n\n")[1:]:
        assert "".join(c for c in paragraph if c.isalnum()) in flat, paragraph


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dataset", "hospital"], "it holds 'clinic', 'school'"),
        (["--statement", "json"], "give --dataset"),
        (["--steps", 3], "give --dataset"),
        (["--dataset", "clinic", "--steps", 3], "needs --dataset-size, --steps and --noise-multiplier"),
        (["--dataset", "clinic", *planned(-1.0, 3)], "--noise-multiplier=-1.0"),
        (["--roles"], "the rights of the file decide"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(sfumato: Run, ledger: Path, arguments: list[object], words: str) -> None:
    before = ledger.read_bytes()
    result = sfumato("budget", ledger, *arguments)
    assert result.status == 2
    assert words in result.err
    assert result.err.count("\n") == 1
    assert ledger.read_bytes() == before


def test_looking_at_a_ledger_makes_none(sfumato: Run, tmp_path: Path) -> None:
    result = sfumato("budget", tmp_path / "typo.db")
    assert result.status == 2
    assert "does not exist" in result.err
    assert list(tmp_path.iterdir()) == []


def test_roles_are_printed_for_the_database(sfumato: Run) -> None:
    result = sfumato("budget", "postgresql+psycopg://owner@host/ledgers", "--roles", "--schema", "team")
    assert result.status == 0
    assert "GRANT SELECT ON team.sfumato_meta" in result.out
    assert "CREATE ROLE sfumato_reader" in result.out


@pytest.mark.postgres
def test_a_database_is_shown_as_a_file_is(sfumato: Run) -> None:
    server = running()
    if server is None or missing() is not None:
        pytest.skip(missing() or "no PostgreSQL server is running: make services")
    with server.schema() as schema:
        url = server.url(schema=schema)
        assert "another program" in sfumato("budget", url).err
        account = Ledger(url, user="anna").account("clinic", unit="user", adjacency=Adjacency.ADD_REMOVE, budget=BUDGET)
        account.charge(train(50.0, 3))
        (clinic,) = json.loads(sfumato("budget", url, "--json").out)["datasets"]
        assert clinic["plans"][0]["made_by"]["database_user"] == "sfumato"
        assert "anna as sfumato" in " ".join(sfumato("budget", url).out.split())
