"""Specs: the committed ones say what the papers say, and a file that is not right is refused in one sentence."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from sfumato.algorithms.method import algorithm
from sfumato.errors import InvalidArgument
from sfumato.experiments.build import make_augment, make_method, make_model, private_batch
from sfumato.experiments.data import load_rows
from sfumato.experiments.settings import Data, read_settings
from sfumato.experiments.spec import SCALES, Cell, Scale, Spec, find_spec, load_spec, spec_names
from tests.experiments.conftest import SMALL, write_spec

CPU = torch.device("cpu")


def numbers(name: str, column: str) -> list[float | None]:
    return [cell.paper for cell in find_spec(name).cells if cell.column == column]


def test_all_specs_are_there_in_the_papers_order() -> None:
    assert [name for name in spec_names() if name[:3].isdigit()] == [
        "000-table1",
        "000-table2",
        "000-table2-wikitext",
        "000-table3",
        "000-table4",
        "000-table5",
        "000-table7",
        "000-table9",
        "002-table1",
        "002-table2",
        "002-table3",
        "002-table5",
        "002-table9",
        "002-table15",
        "003-table1",
        "003-table1-wikitext",
        "004-figure1",
        "004-figure3",
        "004-figure4a",
        "004-figure5",
    ]
    assert [name for name in spec_names() if not name[:3].isdigit()] == [
        "backbone-head",
        "cifar10-public",
        "imperfect-public",
    ]


def test_the_papers_numbers() -> None:
    assert [cell.paper for cell in find_spec("000-table1").cells] == [64.9, 68.1, 72.0, 73.7, 74.8, 75.1]
    assert numbers("000-table2", "DP-SGD (cold)") == [56.8, 64.9, 71.9, 77.0]
    assert numbers("000-table2", "DP-SGD (warm)") == [60.1, 68.1, 72.4, 77.1]
    assert numbers("000-table2", "DP-SGD (warm-aug)") == [70.0, 72.0, 76.0, 78.7]
    assert numbers("000-table2", "DOPE-SGD") == [72.1, 75.1, 77.9, 80.0]
    assert numbers("000-table3", "original setting") == [68.7, 68.7, 73.1, 73.5, 77.2, 77.9]
    assert numbers("000-table9", "DP-SGD, cold") == [46.7, 50.1, 54.7, 58.4]
    assert numbers("000-table9", "DOPE-SGD, warm-ext.") == [70.3, 73.0, 73.2, 76.2]
    assert numbers("000-table4", "epsilon 2") == [66.6, 67.3, 68.9, 73.5, 75.1]
    assert numbers("000-table5", "epsilon 4") == [73.8, 75.3, 77.4, 77.9]
    assert numbers("002-table2", "CAS") == [62.82, 62.47, 64.61, 67.61, 66.53]
    assert numbers("002-table3", "epsilon 2") == [75.32, 83.97, 84.88, 82.2, 83.45, None]
    assert numbers("002-table9", "weight multiplicity") == [85.78, 86.71, 87.23]
    assert numbers("002-table15", "epsilon 6") == [87.01, 87.23, 85.38]
    assert numbers("003-table1", "sigma 1.51") == [62.9633, None, 66.3933, 67.03, None]
    assert numbers("003-table1", "sigma 20") == [40.6, 53.41, 55.395, None]


def test_which_cells_have_generated_images() -> None:
    made = {
        name: {(c.row, c.column) for c in find_spec(name).cells if c.settings["paper"].synthesis is not None}
        for name in spec_names()
    }
    for name in ("000-table4", "000-table5", "002-table2", "002-table5", "002-table9", "002-table15"):
        assert len(made[name]) == len(find_spec(name).cells)
    without = {name: {(c.row, c.column) for c in find_spec(name).cells} - made[name] for name in made}
    assert {column for _, column in without["000-table9"]} == {"DP-SGD, cold"}
    assert {column for _, column in without["000-table3"]} == {"original setting"}
    assert {column for _, column in without["000-table2"]} == {"DP-SGD (cold)", "DP-SGD (warm)"}
    assert {row for row, _ in without["002-table3"]} == {"common + cutout, public images alone"}
    assert len(without["000-table1"]) == len(without["002-table1"]) == 2
    assert made["cifar10-public"] == made["imperfect-public"] == set()


def test_nothing_is_chosen_on_images_that_were_trained_on() -> None:
    for cell in CELLS:
        settings = cell.settings["paper"]
        assert settings.data.hold_out or cell.report != "chosen"  # the rows of paper 004 have no labels to choose by
        assert settings.data.hold_out == 0 or settings.synthesis is None  # the generator has all 2,000 images


@pytest.mark.parametrize(("epsilon", "epochs", "rate"), [(1, 15, 0.5), (2, 30, 0.5), (4, 30, 1.0), (6, 20, 2.0)])
def test_warm_trainings_are_as_long_as_paper_002_says(epsilon: int, epochs: int, rate: float) -> None:
    steps = math.ceil(epochs * 48_000 / 4096)

    def warm(*names: str) -> dict[str, tuple[int, float]]:
        return {
            f"{name}, {cell.row}": (training.steps, training.learning_rate)
            for name in names
            for cell in find_spec(name).cells
            if (training := cell.settings["paper"].training).epsilon == epsilon
            and not training.setting.startswith("cold")
        }

    assert set(warm("000-table2", "000-table3", "002-table9").values()) == {(steps, rate)}
    ours = warm("cifar10-public")
    assert len(ours) >= 2
    for row, (count, size) in ours.items():
        if row.endswith("paper 002's length"):
            assert (count, size) == (steps, rate)
        else:  # fewer and larger steps, as far in all
            assert count * size == (2 if row.endswith("twice as far") else 1) * steps * rate, row


EVERY = [cell for name in spec_names() for cell in find_spec(name).cells]
CELLS = [cell for cell in EVERY if cell.settings["paper"].text is None]


@pytest.mark.parametrize("scale", SCALES)
def test_every_cell_can_be_built(scale: Scale) -> None:
    shapes = {
        "mnist": (1, 28, 28),
        "cifar10": (3, 32, 32),
        "digits": (1, 8, 8),
        "digits-rows": (64,),
        "cifar10-features": (1280,),
    }
    models = {}
    for cell in CELLS:
        settings = cell.settings[scale]
        training, data = settings.training, settings.data
        models[settings.model, data.name] = shapes[data.name]
        way = algorithm(make_method(settings))
        assert 1 <= way.answers(training.steps) <= training.steps
        assert 0 < private_batch(settings) <= training.batch_size
        make_augment(training.augment)
        if scale == "smoke":
            assert data.name in ("digits", "digits-rows")  # which need no download
            assert training.steps * training.batch_size * training.views <= 24 * 400 * 2
        else:
            assert training.delta == 1e-5
            if settings.federated is None:
                assert (data.private, data.public) == (30_000, 30_000) or data.private == 48_000
                assert data.public in (2_000, 30_000) or "public images" in cell.row
            assert data.name in ("mnist", "cifar10", "cifar10-features")
    for (model, _), shape in models.items():
        assert make_model(model, shape, seed=0)(torch.zeros(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("scale", SCALES)
def test_every_cell_of_text_can_be_built(scale: Scale) -> None:
    models = {}
    for cell in (cell for cell in EVERY if cell not in CELLS):
        settings = cell.settings[scale]
        models[settings.model] = settings.text
        assert 1 <= algorithm(make_method(settings)).answers(settings.training.steps) <= settings.training.steps
        assert 0 < private_batch(settings) <= settings.training.batch_size
        assert settings.data.name == ("tiny-text" if scale == "smoke" else "wikitext2")
        assert scale == "smoke" or settings.training.delta == 1e-5
    assert {model.name for model in models} == {"lstm", "bert"}
    for model, text in models.items():
        words = torch.zeros(2, text.length, dtype=torch.long)
        assert make_model(model, words.shape[1:], 0, text.words)(words).shape == (2, text.length, text.words)


def test_extended_takes_private_rows_at_their_true_rate() -> None:
    cell = next(c for c in find_spec("cifar10-public").cells if c.row == "extended")
    settings = cell.settings["paper"]
    assert private_batch(settings) == round(4096 * 48_000 / (48_000 + 1_800))


def test_methods_stand_on_each_other_as_written() -> None:
    cells = {c.row: c for c in find_spec("cifar10-public").cells if c.column == "epsilon 2"}
    paper = cells["DOPE-SGD + weight multiplicity, paper 002's length"].settings["paper"]
    outer = make_method(paper)
    assert outer.func.__name__ == "weight_multiplicity"  # type: ignore[union-attr]
    assert outer.keywords["views"] == 16  # type: ignore[union-attr]
    inner = outer.keywords["method"]  # type: ignore[union-attr]
    assert (inner.func.__name__, inner.keywords["public_batch"]) == ("dope_sgd", 640)
    bottom = inner.keywords["method"]
    assert (bottom.func.__name__, bottom.keywords["clip"], bottom.keywords["views"]) == ("dp_sgd", 1.0, 16)


def test_tables_share_trainings_and_nothing_else() -> None:
    def paper(name: str, row: str, column: str) -> str:
        cells = [c for c in find_spec(name).cells if (c.row, c.column) == (row, column)]
        return cells[0].settings["paper"].key()

    warm = paper("000-table2", "epsilon 2", "DP-SGD (warm)")
    assert warm == paper("cifar10-public", "warm, paper 002's length", "epsilon 2")
    assert warm == paper("000-table1", "+ pretraining on the public data (warm)", "test accuracy")
    assert warm != paper("cifar10-public", "warm", "epsilon 2")
    lengths = {paper("cifar10-public", "warm", f"epsilon {epsilon}") for epsilon in (1, 2, 4, 6)}
    assert len(lengths) == 4
    mirror = paper("000-table3", "epsilon 2, mirror gradient descent", "original setting")
    assert mirror not in {warm, paper("cifar10-public", "mirror descent", "epsilon 2")}
    assert mirror == paper("cifar10-public", "mirror descent, paper 002's length", "epsilon 2")


def test_what_plays_no_part_is_no_part_of_the_settings(tmp_path: Path) -> None:
    def key(text: str, row: str) -> str:
        spec = load_spec(write_spec(tmp_path, text))
        return next(c for c in spec.cells if c.row == row).settings["paper"].key()

    longer = SMALL.replace("steps = 30\n", "steps = 31\n")
    assert key(longer, "cold") == key(SMALL, "cold")
    assert key(longer, "warm") != key(SMALL, "warm")
    with_options = SMALL.replace("keep_last = 3", "keep_last = 3\ndope = { public_batch = 7 }")
    assert key(with_options, "warm") == key(SMALL, "warm")
    assert key(with_options, "extended") != key(SMALL, "extended")
    assert key(SMALL.replace("epsilon = 2", "epsilon = 2.0"), "warm") == key(SMALL, "warm")


def test_settings_survive_json(spec: Spec) -> None:
    for cell in spec.cells:
        for scale in SCALES:
            settings = cell.settings[scale]
            assert read_settings(settings.to_json(), "here") == settings


def test_smoke_wins_over_the_cell(tmp_path: Path) -> None:
    text = SMALL.replace('row = "warm"', 'row = "warm"\nviews = 5\nsmoke = { steps = 2 }')
    warm = load_spec(write_spec(tmp_path, text)).cells[1].settings
    assert (warm["paper"].training.views, warm["smoke"].training.views) == (5, 2)
    assert (warm["paper"].training.steps, warm["smoke"].training.steps) == (6, 2)


def test_a_base_is_begun_with(tmp_path: Path) -> None:
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases" / "other.toml").write_text("[training]\nsteps = 99\nviews = 3\n")
    training = load_spec(write_spec(tmp_path, 'base = "other"\n' + SMALL)).cells[0].settings["paper"].training
    assert (training.steps, training.views) == (6, 3)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('setting = "cold"', 'seting = "cold"', "did you mean 'setting'"),
        ('setting = "cold"', 'setting = "warmer"', "did you mean 'warm'"),
        ('setting = "cold"', "", "lacks the key 'setting'"),
        ("[warm_up]", "[warmup]", "did you mean 'warm_up'"),
        ("[smoke.training]", "[smoke.trainings]", "did you mean 'training'"),
        ("learning_rate = 0.5", 'learning_rate = "fast"', "must be a number"),
        ("learning_rate = 0.5", "learning_rate = -1", "must be a positive"),
        ("learning_rate = 0.5", "", "lacks the key 'learning_rate'"),
        ("keep_last = 3", "keep_last = 3\naugment = { pads = 1 }", "did you mean 'pad'"),
        ("noise = 2.5", "noise = 2.5\nepsilon = 1", "either epsilon or noise"),
        ('method = ["dope-sgd"]', 'method = ["dope"]', "did you mean 'dope-sgd'"),
        (
            'method = ["dope-sgd"]',
            'method = ["dope-sgd", "ada-dps"]',
            "must begin with those that carry state: ada-dps",
        ),
        (
            'method = ["mirror-descent"]',
            'method = ["mirror-descent", "ada-dps"]',
            "must begin with ada-dps, which scales",
        ),
        ('method = ["dope-sgd"]', 'method = ["dope-sgd"]\nada = { damping = 2 }', "gives ada"),
        ("mirror = { decay_steps = 4 }", "", "no decay_steps"),
        ('network = "digits"', 'network = "digit"', "did you mean 'digits'"),
        ("rows = 40", "rows = 0", "synthesis rows=0"),
        ("rows = 40", "", "lacks the key 'rows'"),
        ("paper = 70.5", "paper = 170.5", "must be a percentage"),
        ('row = "warm"', 'row = "cold"', "two cells 'cold'"),
        ("hold_out = 30", "hold_out = 0", "hold_out is 0"),
        ('name = "mlp"', 'name = "mpl"', "did you mean 'mlp'"),
        ('title = "A small table"', "", "title"),
        ('row = "warm"', 'row = "warm"\nreport = "best"', "report='best'"),
        ("[data]", "[data", "not valid TOML"),
    ],
)
def test_what_is_not_right_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert SMALL.count(old) >= 1
    path = write_spec(tmp_path, SMALL.replace(old, new, 1))
    with pytest.raises(InvalidArgument) as refusal:
        load_spec(path)
    assert said in str(refusal.value)
    assert path.name in str(refusal.value)


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(InvalidArgument, match="did you mean '000-table1'"):
        find_spec("000-tabel1")


def test_cells_are_chosen_by_name_or_by_a_part_of_it() -> None:
    spec = find_spec("000-table2")

    def names(cells: list[Cell]) -> set[str]:
        return {f"{c.row}, {c.column}" for c in cells}

    assert len(spec.select([], [])) == 16
    assert names(spec.select(["epsilon 2"], ["DP-SGD (warm)"])) == {"epsilon 2, DP-SGD (warm)"}
    assert len(spec.select([], ["warm"])) == 8  # both columns that have it in their name
    assert len(spec.select(["EPSILON 1", "epsilon 6"], [])) == 8
    with pytest.raises(InvalidArgument, match="no cell"):
        spec.select(["epsilon 3"], [])


# ------------------------------------------------------------------------------------------------ rows


def as_set(images: torch.Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in images}


def test_rows_are_of_the_declared_sizes_and_disjoint() -> None:
    rows = load_rows(Data(name="digits", private=900, public=100, hold_out=20, test=50), CPU)
    assert rows.hold_out is not None
    parts = (rows.private, rows.public, rows.hold_out, rows.test)
    assert [len(labels) for _, labels in parts] == [900, 80, 20, 50]
    assert sum(len(as_set(images)) for images, _ in parts) == len(set().union(*(as_set(i) for i, _ in parts)))
    assert rows.hold_out[1].bincount().tolist() == [2] * 10
    assert rows.shape == (1, 8, 8)


def test_shuffled_labels_are_the_same_labels_on_other_images() -> None:
    data = Data(name="digits", private=900, public=200)
    plain, shuffled = load_rows(data, CPU), load_rows(Data(**{**vars(data), "shuffled_labels": True}), CPU)
    assert torch.equal(plain.public[0], shuffled.public[0])
    assert torch.equal(plain.public[1].sort()[0], shuffled.public[1].sort()[0])
    assert float((plain.public[1] == shuffled.public[1]).double().mean()) < 0.25
    assert torch.equal(plain.private[1], shuffled.private[1])
    assert plain.hold_out is None


def test_missing_data_says_where_to_put_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SFUMATO_DATA", raising=False)
    with pytest.raises(InvalidArgument, match="SFUMATO_DATA"):
        load_rows(find_spec("000-table1").cells[0].settings["paper"].data, CPU)
    with pytest.raises(InvalidArgument, match="more than the 1200 rows"):
        load_rows(Data(name="digits", private=1300, public=200), CPU)
