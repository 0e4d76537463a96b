"""Text as an experiment: rows, vocabulary, stamp, scores and tables."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sfumato.data.samplers import Poisson
from sfumato.errors import InvalidArgument
from sfumato.experiments import page
from sfumato.experiments.build import make_model
from sfumato.experiments.records import reported
from sfumato.experiments.runner import Job, run_job
from sfumato.experiments.scores import choice
from sfumato.experiments.settings import Data, Text, read_settings
from sfumato.experiments.spec import Spec, find_spec, load_spec
from sfumato.experiments.table import entries
from sfumato.experiments.texts import _cut, _tiny, load_text
from sfumato.experiments.warm import _key
from sfumato.privacy import accounting
from sfumato.privacy.mechanisms import Adjacency, Gaussian, Mechanism
from sfumato.questions import GradientMean
from sfumato.run import Run
from sfumato.text import word_loss

CPU = torch.device("cpu")
REAL = Path(os.environ.get("SFUMATO_DATA", "nowhere"))
TINY = Data(name="tiny-text", private=200, public=60, hold_out=20, test=30)
SMALL = """
title = "A small table"
paper = "003"
where = "Table 0"
measure = "perplexity"

[data]
name = "tiny-text"
private = 400
public = 80
hold_out = 30
test = 40

[text]
words = 30
length = 6

[model]
name = "lstm"
width = 8
depth = 1

[warm_up]
steps = 4
batch_size = 25

[training]
delta = 1e-4
steps = 3
batch_size = 40
learning_rate = 0.5
noise = 1.0
keep_last = 2

[[cell]]
row = "dope"
column = "as printed"
paper = 240
setting = "extended"
method = ["dope-sgd"]
dope = { public_batch = 20 }
text = { vocabulary = "not-private" }

[[cell]]
row = "dope"
column = "public"
report = "logits"
setting = "extended"
method = ["dope-sgd"]
dope = { public_batch = 20 }
"""


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    return written(tmp_path, SMALL)


def written(folder: Path, text: str) -> Spec:
    path = folder / "small.toml"
    path.write_text(text)
    return load_spec(path)


def test_a_public_vocabulary_knows_nothing_of_private_rows() -> None:
    """Neighbours: whichever rows are private, the words are those of the public ones."""
    text = Text(words=50, length=6)
    a, b = (load_text(replace(TINY, private=n), text, CPU) for n in (200, 100))
    assert a.words == b.words
    assert torch.equal(a.public[0], b.public[0])
    every = {word for row in _cut(_tiny()[0], text) for word in row}
    assert a.words is not None
    assert set(a.words.words[2:]) < every
    taken = load_text(TINY, replace(text, vocabulary="not-private"), CPU)
    assert taken.words is not None
    assert taken.words.counted_in_private_text
    assert not a.words.counted_in_private_text


def test_the_parts_are_disjoint_and_of_the_sizes_that_were_asked_for() -> None:
    rows = load_text(TINY, Text(words=1000, length=6), CPU)
    assert rows.hold_out is not None
    assert [len(part[0]) for part in (rows.private, rows.public, rows.hold_out, rows.test)] == [200, 40, 20, 30]
    assert rows.shape == (6,)
    known = {word for half in rows.public for word in half.flatten().tolist()}
    assert rows.classes == len(known) + 2  # public words, and the two special ones, which stand nowhere here
    seen = [tuple(row.tolist()) for part in (rows.private, rows.public, rows.hold_out) for row in part[0]]
    assert len(set(seen)) > 0.9 * len(seen)  # the made-up language may repeat a line by chance
    with pytest.raises(InvalidArgument, match="lower them"):
        load_text(replace(TINY, private=10**6), Text(), CPU)


def test_what_is_added_for_unknown_words_makes_a_likelihood_of_all_words() -> None:
    """A model that spreads the unknown word's probability evenly, summed up by hand over the test words."""
    text = Text(words=30, length=6)
    rows = load_text(TINY, text, CPU)
    assert rows.text is not None
    assert rows.words is not None
    targets = [word for row in _cut(_tiny()[1], text)[:30] for word in row[1:]]
    beyond = {f"w{i}" for i in range(60)} - set(rows.words.words)
    uniform = 1 / len(rows.words)  # of a model that knows nothing
    by_hand = -sum(math.log(uniform / (1 if word in rows.words.numbers else len(beyond))) for word in targets)
    expected = -math.log(uniform) + rows.text["nats_for_unknown"]
    assert by_hand / len(targets) == pytest.approx(expected, abs=1e-5)


def test_a_cell_is_trained_stamped_and_scored(spec: Spec, tmp_path: Path) -> None:
    printed, public = (
        run_job(Job(spec=spec, cell=cell, seed=0, scale="smoke", out=tmp_path), device=CPU) for cell in spec.cells
    )
    assert not printed["statement"]["private"]
    assert "counted in the private text" in str(printed["statement"]["warnings"])
    assert public["statement"]["private"]
    assert set(public["metrics"]) == {"last", "ema", "mean", "logits"}
    job = Job(spec=spec, cell=spec.cells[1], seed=0, scale="smoke", out=tmp_path)
    settings = job.settings
    assert settings.text is not None
    rows = load_text(settings.data, settings.text, CPU)
    module = make_model(settings.model, rows.shape, 9, rows.classes)
    weights = Run.load(job.work / "run").weights
    assert public["metrics"]["last"]["test"] == pytest.approx(word_loss(module, [weights], rows.test), abs=1e-6)
    shown = entries(spec, "smoke", tmp_path)
    assert shown[1].ours == pytest.approx(math.exp(public["metrics"]["logits"]["test"]), abs=1e-3)
    assert reported(printed, spec.cells[0]) == math.exp(printed["metrics"][printed["chosen"]]["test"])
    assert "Test perplexity per word" in page.block(spec, tmp_path)


def test_the_lowest_loss_is_chosen() -> None:
    scores = {"last": {"test": 1.0, "hold_out": 3.0}, "ema": {"test": 2.0, "hold_out": 2.5}}
    assert choice(scores, lowest=True) == "ema"
    assert choice(scores) == "last"


def test_a_warm_start_is_shared_where_the_vocabulary_is(spec: Spec) -> None:
    def key(cell: int, private: int) -> str:
        settings = spec.cells[cell].settings["smoke"]
        settings = replace(settings, data=replace(settings.data, private=private))
        assert settings.warm_up is not None
        return _key(settings, settings.warm_up)

    assert key(1, 400) == key(1, 300)  # private rows play no part
    assert key(0, 400) != key(0, 300)  # but here they chose the words
    assert key(0, 400) != key(1, 400)


def test_settings_of_before_there_was_text_keep_their_keys_and_records() -> None:
    settings = find_spec("cifar10-public").cells[0].settings["paper"]
    assert settings.key() == "315a83ababc21ae6"
    old = settings.to_json()
    del old["text"]
    assert read_settings(old, "config") == settings


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('name = "lstm"', 'name = "mlp"', "language models, and they alone"),
        ('name = "tiny-text"', 'name = "digits"', "language models, and they alone"),
        ("length = 6", 'length = 6\ncut = "page"', "cut='page' is not known"),
        ('vocabulary = "not-private"', 'vocabulary = "mine"', "vocabulary='mine' is not known"),
        ("words = 30", "words = 0", "text words=0"),
        ("hold_out = 30", "hold_out = 30\nsynthetic = true", "leave them out|add the table"),
        ('measure = "perplexity"', 'measure = "bits"', "measure='bits' is not known"),
        ('measure = "perplexity"', "", "must be a percentage|images have an accuracy"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, before: str, after: str, message: str) -> None:
    assert before in SMALL
    with pytest.raises(InvalidArgument, match=message):
        written(tmp_path, SMALL.replace(before, after))


def test_another_batch_size_costs_what_its_column_says() -> None:
    def epsilon(noise: float, batch: int, steps: int) -> float:
        sampler = Poisson(size=46_813, batch_size=batch)
        planned = Mechanism(question=GradientMean.kind(), noise=Gaussian(noise), sampler=sampler, times=steps)
        return accounting.epsilon([planned], delta=1e-5, adjacency=Adjacency.ADD_REMOVE).epsilon

    all_cells = [(c.column, c.settings["paper"].training) for c in find_spec("003-table1-wikitext").cells]
    own = {(column.split(",")[0], t.noise, t.batch_size, t.steps) for column, t in all_cells if t.batch_size != 250}
    assert len(own) == 2
    for column, noise, batch, steps in own:
        stated = epsilon(float(column.removeprefix("sigma ")), 250, 3745)
        assert noise is not None
        assert 0.995 * stated < epsilon(noise, batch, steps) <= stated


def test_the_papers_numbers_and_sizes() -> None:
    spec = find_spec("003-table1-wikitext")
    paper = {(c.row, c.column): c.paper for c in spec.cells if c.paper is not None}
    rows = ("DP-SGD cold", "DP-SGD warm", "PDA-DPMD")
    assert [paper[row, "sigma 0.5, as printed"] for row in rows] == [5.2626, 5.1914, 5.1736]
    assert [paper[row, "sigma 1.08, as printed"] for row in rows] == [5.5627, 5.3288, 5.2956]
    for cell in spec.cells:
        settings = cell.settings["paper"]
        assert settings.data.private + settings.data.public == 48_764
        assert settings.training.steps == round(20 * settings.data.private / settings.training.batch_size)
        assert settings.text is not None
        assert (settings.text.vocabulary == "public") == ("public vocabulary" in cell.column)
        assert not settings.training.bfloat16_on_gpu
    other = find_spec("000-table2-wikitext")
    assert [c.paper for c in other.cells if c.column == "DOPE-SGD"] == [198, 184, 177, 156]
    assert {c.settings["paper"].data.private + c.settings["paper"].data.public for c in other.cells} == {59_675}


@pytest.mark.skipif(
    not (REAL / "text" / "wikitext-2.train.txt.xz").is_file(), reason="SFUMATO_DATA has no text/wikitext-2.train.txt.xz"
)
def test_the_real_text_has_the_rows_that_the_specs_ask_for() -> None:
    settings = find_spec("003-table1-wikitext").cells[-1].settings["paper"]
    assert settings.text is not None
    rows = load_text(settings.data, settings.text, CPU)
    assert rows.private[0].shape == (46_813, 35)
    assert 7_000 < rows.classes <= 8_000  # there are hardly more words in so few rows
    assert rows.text is not None
    assert 0.1 < rows.text["unknown_of_test"] < 0.25
