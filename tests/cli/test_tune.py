"""`sfumato tune` on a small training: cost first, one charge, the best trial alone, errors in one sentence."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sfumato import Ledger, Run
from sfumato.cli.tune import _range
from sfumato.cli.tune_config import TuneSection, load_tune
from sfumato.cli.tune_job import hits, prepare_search
from tests.cli.conftest import add, edit, files, write_csv

TUNE = """
[tune]
mean = 3
candidates = 4

[tune.space]
"training.learning_rate" = {low = 0.5, high = 8.0, log = true}
"training.steps" = [8, 12]
"""


@pytest.fixture
def search(config: Path) -> Path:
    edit(config, "epsilon = 3.0", "epsilon = 3.0\nbudget = 8.0")
    edit(config, "batch_size = 100", 'sampling = "full"')  # whose divergences have a closed form, which is quick
    add(config, TUNE)
    return config


def test_the_page_has_every_key_with_its_default() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "tuning.md").read_text()
    said = dict(re.findall(r"^\| `(\w+)` \| .+ \| (.+) \|$", page, re.MULTILINE))
    assert list(said) == [f.name for f in fields(TuneSection)]
    for f in fields(TuneSection):
        if f.default is MISSING:
            assert said[f.name] == "required"
        elif f.default is None:
            assert "`" not in said[f.name]
        else:
            assert tomllib.loads(f"x = {said[f.name].strip('`')}")["x"] == f.default


def asked(config: Path) -> list[int]:
    with Ledger(config.parent / "ledger.db", make=False) as ledger:
        return [line.answers for line in ledger.account("flowers").statement().asked]


def test_a_dry_run_says_what_it_costs_and_touches_nothing(sfumato: Callable[..., Any], search: Path) -> None:
    before = files(search.parent)
    result = sfumato("tune", search, "--dry-run", "--json")
    assert result.status == 0, result.err
    facts = json.loads(result.out)
    assert facts["trial_epsilon"] == pytest.approx(3.0, rel=2e-3)
    assert facts["trial_epsilon"] < facts["epsilon"] < facts["budget"] == 8.0
    assert (facts["candidates"], facts["mean_trials"], facts["fits"]) == (4, 3, True)
    assert len(facts["noise_multipliers"]) == 2, "each number of steps has noise of its own, for the same epsilon"
    assert files(search.parent) == before
    shown = sfumato("tune", search, "--dry-run")
    assert "trial epsilon" in shown.out
    assert shown.err == "", "the status line is for terminals"


def test_many_noise_multipliers_are_shown_as_their_range() -> None:
    assert _range([0.5, 0.75, 2.0, 1.25]) == "4 different ones from 0.5 to 2"
    assert _range([0.5]) == "0.5"


def test_what_takes_long_is_told(search: Path) -> None:
    told: list[str] = []
    prepare_search(load_tune(search), told.append)
    assert [line for line in told if "candidate" in line] == [f"Noise of candidate {k} of 4" for k in (1, 2, 3, 4)]


def test_the_best_trial_is_saved_with_a_statement_of_the_whole_search(
    sfumato: Callable[..., Any], search: Path
) -> None:
    result = sfumato("tune", search, "--json")
    assert result.status == 0, result.err
    facts, out = json.loads(result.out), search.parent / "runs" / "a"
    assert facts["found"]
    assert 0.5 <= facts["options"]["training.learning_rate"] <= 8.0
    run = Run.load(out)
    assert run.statement["epsilon"] == pytest.approx(facts["epsilon"])
    assert facts["epsilon"] > 3.0
    assert "secret random number of trials, 3 in the mean" in run.statement_text
    assert json.loads((out / "config.json").read_text())["training"]["steps"] in (8, 12)
    saved = json.loads((out / "tune.json").read_text())
    assert saved["options"] == facts["options"]
    assert asked(search) == [1]
    names = {path.name for path in out.iterdir()}
    whole = {"run.json", "weights.safetensors", "statement.txt", "config.json", "tune.json", "preprocessing.json"}
    assert names == whole
    assert not {"trials", "count"} & {*facts, *saved}

    again = sfumato("tune", search)
    assert (again.status, again.err.count("\n")) == (2, 1)
    assert "choose another out" in again.err
    assert asked(search) == [1], "what is refused is not charged"


def test_candidates_are_raced_on_public_rows_and_chosen_by_public_score(
    sfumato: Callable[..., Any], search: Path
) -> None:
    write_csv(search.parent / "public.csv", 120, 1, order="cab")
    edit(
        search,
        '"training.learning_rate" = {low = 0.5, high = 8.0, log = true}',
        '"training.learning_rate" = [1e-9, 4.0]',
    )
    edit(search, '"training.steps" = [8, 12]', '"training.clip" = [1.0]')
    edit(search, "candidates = 4", 'candidates = 4\nkeep = 1\nscore = "public"')
    result = sfumato("tune", search, "--json")
    assert result.status == 0, result.err
    facts = json.loads(result.out)
    assert facts["options"]["training.learning_rate"] == 4.0, "the race left the useless one out"
    assert facts["score"] == facts["metrics"]["test_accuracy"] > 0.6


def test_a_search_that_does_not_fit_its_budget_is_refused_uncharged(sfumato: Callable[..., Any], search: Path) -> None:
    edit(search, "budget = 8.0", "budget = 3.5")
    result = sfumato("tune", search)
    assert result.status == 2
    assert "[privacy] budget=3.5 is less than the epsilon=" in result.err
    assert not (search.parent / "ledger.db").exists()
    edit(search, "budget = 3.5", "")
    assert "budget is missing" in sfumato("tune", search).err
    assert sfumato("tune", search, "--dry-run").status == 0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"training.steps"', '"training.step"', "did you mean 'training.steps'"),
        ('"training.steps"', '"privacy.delta"', "privacy.delta is fixed for the whole search"),
        ("[8, 12]", "[8, 0]", "steps=0 must be at least 1"),
        ("[8, 12]", "7", "must list values, or be a range"),
        ("mean = 3", "mean = 0.5", "[tune] mean=0.5"),
        ("mean = 3", 'mean = 3\nlaw = "binomial"', "[tune] law='binomial'"),
        ("mean = 3", 'mean = 3\nscore = "loss"', "[tune] score='loss'"),
        ("mean = 3", "mean = 3\nkeep = 9", "[tune] keep=9"),
        ("low = 0.5", "low = -0.5", "low=-0.5 must be positive"),
        (TUNE, "", "no [tune] section"),
    ],
)
def test_errors_are_one_sentence(sfumato: Callable[..., Any], search: Path, old: str, new: str, said: str) -> None:
    edit(search, old, new)
    result = sfumato("tune", search, "--dry-run")
    assert result.status == 2
    assert said in result.err
    assert result.err.count("\n") == 1


def test_an_interrupted_search_stays_charged(
    sfumato: Callable[..., Any], search: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sfumato.cli.tune_job.train", interrupted)
    result = sfumato("tune", search)
    assert result.status == 130
    assert "the whole search stays charged" in result.err
    assert asked(search) == [1]
    assert not (search.parent / "runs" / "a" / "run.json").exists()


class RoundedByTheBatch(nn.Module):
    """As kernels do: the last bits of a row's numbers go by how many rows there are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, rows: Tensor) -> Tensor:
        return rows * self.weight + torch.tensor([0.0, 1e-7 if len(rows) % 2 else -1e-7])


@pytest.mark.parametrize("count", [3, 4, 511, 600])
def test_one_row_more_moves_no_other_rows_hit(count: int) -> None:
    """Else the score of a trial would move by more than the one row that its noise is made for."""
    rows, labels = torch.full((count, 2), 0.5), torch.zeros(count, dtype=torch.int64)
    right = hits(RoundedByTheBatch(), torch.rand(16, 2))
    alone = right((rows, labels))
    more = right((torch.cat([rows[:1], rows]), torch.cat([labels[:1], labels])))
    assert alone.shape == (count, 1)
    assert torch.equal(more[1:], alone)
    plain = RoundedByTheBatch()
    assert not torch.equal(plain(rows).argmax(1), plain(torch.cat([rows[:1], rows])).argmax(1)[1:]), "it can flip"
