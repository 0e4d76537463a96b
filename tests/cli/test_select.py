"""`sfumato select` from end to end: choose, label, read back, fine-tune; and every refusal without a trace."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from sfumato import Budget, Ledger, Objective, Public, Run, cross_entropy
from sfumato.cli.main import main
from sfumato.cli.select_config import SECTIONS, STRATEGIES, USED_BY, load_select_config
from sfumato.cli.select_job import prepare
from sfumato.models.basic import mlp
from sfumato.privacy.mechanisms import Adjacency
from sfumato.selection import DiversePublic, Entropy, KCenter, Margin, NearPrivate, Random, Released, fine_tune
from tests.browser import browsing, find_chromium
from tests.cli.conftest import add, edit, files

Sfumato = Callable[..., Any]
PAGE = (Path(__file__).parent.parent.parent / "docs" / "labelling.md").read_text()

TRAIN = """
[data]
private = "digits.npz"
name = "digits"
size = 700
range = [0, 16]

[model]
kind = "mlp"
outputs = 10
hidden = [16]

[privacy]
epsilon = 2.0
budget = 4.0
delta = 1e-4
ledger = "ledger.db"

[training]
steps = 10
batch_size = 200
learning_rate = 2.0
out = "runs/digits"
"""
SELECT = """
[model]
weights = "runs/digits"

[pool]
images = "digits.npz"

[select]
strategy = "entropy"
n = 30
out = "new/to_label"

[finetune]
out = "runs/labelled"
"""
PRIVATE = """
[private]
data = "digits.npz"
name = "digits"
size = 700
epsilon = 1.0
delta = 1e-4
ledger = "ledger.db"
"""


def digits() -> dict[str, Any]:
    found = load_digits()
    x, y = found.images.astype(np.uint8), found.target
    parts = {"train": slice(0, 700), "pool": slice(700, 1300), "test": slice(1300, None)}
    return {f"{v}_{name}": values[part] for name, part in parts.items() for v, values in (("x", x), ("y", y))}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits, and a private model of them."""
    folder = tmp_path_factory.mktemp("trained")
    np.savez(folder / "digits.npz", **digits())
    (folder / "train.toml").write_text(TRAIN)
    (folder / "select.toml").write_text(SELECT)
    assert main(["train", str(folder / "train.toml"), "--json"]) == 0
    return folder


@pytest.fixture
def config(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path / "select.toml"


@pytest.fixture
def near(config: Path) -> Path:
    edit(config, '"entropy"', '"near-private"')
    add(config, PRIVATE)
    return config


def ask_others(near: Path) -> None:
    """Of whom nothing was learned yet."""
    shutil.copy(near.parent / "digits.npz", near.parent / "others.npz")
    edit(near, 'data = "digits.npz"', 'data = "others.npz"')
    edit(near, 'name = "digits"', 'name = "others"')


def done(sfumato: Sfumato, config: Path, *options: object) -> dict[str, Any]:
    result = sfumato("select", config, "--json", *options)
    assert result.status == 0, result.err
    found: dict[str, Any] = json.loads(result.out)
    return found


def refused(sfumato: Sfumato, config: Path, said: str, *options: object) -> None:
    """In one sentence, and everything is as it was."""
    before, folders = files(config.parent), sorted(config.parent.rglob("*"))
    result = sfumato("select", config, *options)
    assert result.status == 2, result.err
    assert said in result.err
    assert result.err.count("\n") == 1
    assert files(config.parent) == before
    assert sorted(config.parent.rglob("*")) == folders


def record(config: Path) -> Any:
    return json.loads((config.parent / "new/to_label/chosen.json").read_text())


def label(config: Path, count: int, name: str = "labels.csv") -> Path:
    """What a person who knows digits does."""
    chosen, truth = record(config)["indices"], digits()["y_pool"]
    path = config.parent / name
    path.write_text("\n".join(["index,label", *(f"{i},{truth[i]}" for i in chosen[:count]), ""]))
    return path


def module_of(run: Run) -> torch.nn.Module:
    module = mlp(64, 10, [16])
    module.load_state_dict(dict(run.weights))
    return module


def pool() -> torch.Tensor:
    return torch.from_numpy(digits()["x_pool"] / np.float32(16)).float()


# ------------------------------------------------------------------------------------------------ choosing


def test_a_person_chooses_labels_and_trains(sfumato: Sfumato, config: Path) -> None:
    edit(config, 'out = "runs/labelled"', 'out = "runs/labelled"\ntest = "digits.npz"')
    plan = done(sfumato, config, "--dry-run")
    assert not (config.parent / "new").exists()
    chosen = done(sfumato, config)
    assert (chosen["images"], chosen["of"], chosen["epsilon_spent"]) == (30, 600, 0.0)
    assert {key: plan[key] for key in ("strategy", "sheet", "classes")} == {
        key: chosen[key] for key in ("strategy", "sheet", "classes")
    }
    assert Path(chosen["sheet"]).is_file()
    with Image.open(config.parent / "new/to_label/images" / f"{record(config)['indices'][0]:03d}.png") as image:
        pixels = digits()["x_pool"][record(config)["indices"][0]] / 16
        assert (np.asarray(image) == np.round(pixels * 255)).all()

    read = done(sfumato, config, "--labels", label(config, 20), "--dry-run")
    assert (read["labels"], read["missing"]) == (20, 10)
    assert not (config.parent / "runs/labelled").exists()
    tuned = done(sfumato, config, "--labels", label(config, 20))
    assert (tuned["labels"], tuned["missing"], tuned["epsilon_spent"], tuned["source"]) == (20, 10, 0.0, "by hand")
    assert sum(tuned["per_class"].values()) == 20
    before, after = Run.load(config.parent / "runs/digits"), Run.load(config.parent / "runs/labelled")
    assert after.statement == before.statement
    assert before.statement_text in after.statement_text
    assert "20 public images, labelled by hand, and on 570 others" in after.statement_text

    chosen_first = record(config)["indices"][:20]
    by_hand = Objective(module_of(before).train(), cross_entropy)
    rows = Public((pool()[chosen_first], torch.from_numpy(digits()["y_pool"])[chosen_first]), seed=0)
    others = [i for i in range(600) if i not in record(config)["indices"]]
    assert tuned["unlabelled"] == len(others) == 570
    fine_tune(by_hand, rows, unlabelled=Public(pool()[others]))
    for name, expected in by_hand.module.state_dict().items():
        torch.testing.assert_close(after.weights[name], expected)
    test = torch.from_numpy(digits()["x_test"] / np.float32(16)), torch.from_numpy(digits()["y_test"])
    for name, run in (("test_accuracy_before", before), ("test_accuracy", after)):
        assert tuned[name] == pytest.approx(float((module_of(run)(test[0]).argmax(1) == test[1]).double().mean()))


@pytest.mark.parametrize(("keys", "unlabelled"), [("labels_alone = true", 0), ("share = 0.2", 570), ("", 0)])
def test_the_rest_of_the_pool_is_used_as_the_config_says(
    sfumato: Sfumato, config: Path, keys: str, unlabelled: int
) -> None:
    edit(config, 'out = "runs/labelled"', f'out = "runs/labelled"\nepochs = 2\n{keys}')
    if not keys:  # all are chosen, so that there is no rest
        edit(config, "n = 30", "n = 600")
    done(sfumato, config)
    assert done(sfumato, config, "--labels", label(config, 30))["unlabelled"] == unlabelled
    chosen, truth = record(config)["indices"], torch.from_numpy(digits()["y_pool"])
    others = [i for i in range(600) if i not in chosen]
    run = Run.load(config.parent / "runs/labelled")
    by_hand = Objective(module_of(Run.load(config.parent / "runs/digits")).train(), cross_entropy)
    fine_tune(
        by_hand,
        Public((pool()[chosen[:30]], truth[chosen[:30]]), seed=0),
        unlabelled=Public(pool()[others]) if unlabelled else None,
        share=0.2,
        epochs=2,
    )
    for name, expected in by_hand.module.state_dict().items():
        torch.testing.assert_close(run.weights[name], expected)
    assert ("others" in run.statement_text.splitlines()[-1]) == bool(unlabelled)


@pytest.mark.parametrize(
    ("strategy", "keys", "by_hand"),
    [
        ("random", "seed = 3", Random(seed=3)),
        ("entropy", "", Entropy()),
        ("margin", "", Margin()),
        ("k-center", "seed = 3", KCenter(seed=3)),
        ("diverse-public", "each = 4\ncomponents = 5", DiversePublic(each=4, components=5)),
    ],
)
def test_strategies_that_need_nothing_private(
    sfumato: Sfumato, config: Path, strategy: str, keys: str, by_hand: Any
) -> None:
    (config.parent / "ledger.db").unlink()
    np.savez(config.parent / "digits.npz", x_pool=digits()["x_pool"])
    edit(config, 'strategy = "entropy"', f'strategy = "{strategy}"\n{keys}')
    done(sfumato, config)
    model = Released(module_of(Run.load(config.parent / "runs/digits")))
    assert record(config)["indices"] == by_hand(model, Public(pool()), 30).tolist()
    assert record(config)["privacy"]["epsilon"] == 0
    assert record(config)["privacy"]["statement"]["dataset"] == "digits"
    assert not (config.parent / "ledger.db").exists()


def test_the_same_command_again_puts_back_what_is_missing(sfumato: Sfumato, config: Path) -> None:
    assert done(sfumato, config)["new"] is True
    out = config.parent / "new/to_label"
    before = files(out)
    assert done(sfumato, config)["new"] is False
    assert files(out) == before
    (out / "labels.csv").write_text("index,label\n1,2\n")
    (out / "sheet.html").unlink()
    shutil.rmtree(out / "images")
    assert done(sfumato, config)["new"] is False
    assert files(out) == before | {"labels.csv": b"index,label\n1,2\n"}
    sorted((out / "images").iterdir())[3].unlink()
    (out / "labels.csv").unlink()
    assert done(sfumato, config)["new"] is False
    assert files(out) == before


def test_what_has_changed_since_is_refused(sfumato: Sfumato, config: Path) -> None:
    done(sfumato, config)
    labels = label(config, 5)
    arrays = digits()
    arrays["x_pool"][599, 0, 0] += 1
    np.savez(config.parent / "digits.npz", **arrays)
    refused(sfumato, config, "pool is not what it was")
    refused(sfumato, config, "pool is not what it was", "--labels", labels)
    np.savez(config.parent / "digits.npz", **digits())
    for old, new, said in [
        ("n = 30", "n = 31", "n is not what it was"),
        ('"entropy"', '"margin"', "strategy is not"),
        ('weights = "runs/digits"', 'weights = "runs/other"', "model is not"),
    ]:
        edit(config, old, new)
        if not (config.parent / "runs/other").exists():
            shutil.copytree(config.parent / "runs/digits", config.parent / "runs/other")
            run = Run.load(config.parent / "runs/other")
            Run(weights={name: t + 1e-3 for name, t in run.weights.items()}, config={}).save(
                config.parent / "runs/other"
            )
        refused(sfumato, config, said)
        refused(sfumato, config, said, "--labels", labels)
        edit(config, new, old)
    assert done(sfumato, config)["new"] is False


def test_images_in_a_folder(sfumato: Sfumato, config: Path) -> None:
    names = [f"{'ab'[k % 2]}/{k} <i>&.png" for k in range(40)]
    for name, pixels in zip(names, digits()["x_pool"], strict=False):
        path = config.parent / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    (config.parent / "photos/notes.txt").write_text("no image")
    edit(config, 'images = "digits.npz"', 'images = "photos"')
    done(sfumato, config)
    order = sorted(range(40), key=lambda k: names[k])
    in_order = pool()[order] * (16 / 255)  # image files are 0..255, whatever range the training declared
    model = Released(module_of(Run.load(config.parent / "runs/digits")))
    assert record(config)["indices"] == Entropy()(model, Public(in_order), 30).tolist()
    page = (config.parent / "new/to_label/sheet.html").read_text()
    data = json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[0])
    assert [point["name"] for point in data["points"]] == [names[order[i]] for i in record(config)["indices"]]
    edit(config, 'images = "photos"', 'images = "photos"\nrange = [0, 16]')
    edit(config, '"new/to_label"', '"declared"')
    done(sfumato, config)
    declared = json.loads((config.parent / "declared/chosen.json").read_text())
    assert declared["indices"] == Entropy()(model, Public(pool()[order]), 30).tolist()
    edit(config, "range = [0, 16]", "range = [0, 15]")
    refused(sfumato, config, "values from 0 to 16")
    config.parent.joinpath("photos/a/wide.png").write_bytes(b"no image")
    refused(sfumato, config, "wide.png")


def test_a_pool_in_other_numbers_is_the_same_pool(sfumato: Sfumato, config: Path) -> None:
    """Its own range is for the pool alone: private and test rows keep that of the training."""
    edit(config, 'out = "runs/labelled"', 'out = "runs/labelled"\ntest = "digits.npz"\nepochs = 1')
    np.savez(config.parent / "pool.npz", x_pool=digits()["x_pool"] * np.uint8(15))
    edit(config, 'images = "digits.npz"', 'images = "pool.npz"')
    refused(sfumato, config, "give [pool] range")
    edit(config, 'images = "pool.npz"', 'images = "pool.npz"\nrange = [0, 240]')
    done(sfumato, config)
    before = Run.load(config.parent / "runs/digits")
    assert record(config)["indices"] == Entropy()(Released(module_of(before)), Public(pool()), 30).tolist()
    tuned = done(sfumato, config, "--labels", label(config, 30))
    test = torch.from_numpy(digits()["x_test"] / np.float32(16)), torch.from_numpy(digits()["y_test"])
    hits = module_of(before)(test[0]).argmax(1) == test[1]
    assert tuned["test_accuracy_before"] == pytest.approx(float(hits.double().mean()))
    assert json.loads((config.parent / "runs/labelled/config.json").read_text())["data"] == {"range": [0, 16]}
    rows = prepare(load_select_config(config)).trained_rows(digits()["x_train"])  # as private rows are read
    torch.testing.assert_close(rows.reshape(700, 8, 8), torch.from_numpy(digits()["x_train"] / np.float32(16)))


def test_a_folder_of_synthesize_is_told_of(sfumato: Sfumato, config: Path) -> None:
    folder = config.parent / "made"
    folder.mkdir()
    Image.fromarray(digits()["x_pool"][0]).save(folder / "grid.png")
    np.savez(folder / "synthetic.npz", x_public=digits()["x_pool"])
    edit(config, 'images = "digits.npz"', 'images = "made"')
    refused(sfumato, config, "give the synthetic.npz in it")
    edit(config, 'images = "made"', 'images = "made/synthetic.npz"')
    done(sfumato, config, "--dry-run")


@pytest.mark.parametrize("how", ["flat", "stretched", "bytes"])
def test_what_a_person_sees_is_the_image(sfumato: Sfumato, config: Path, how: str) -> None:
    """However a file holds its numbers."""
    x = digits()["x_pool"]
    edit(config, 'images = "digits.npz"', 'images = "pool.npz"')
    (config.parent / "runs/digits/config.json").unlink()
    edit(config, 'weights = "runs/digits"', 'weights = "runs/digits"\nkind = "mlp"\noutputs = 10\nhidden = [16]')
    black, white = 0, 16
    if how == "flat":
        np.savez(config.parent / "pool.npz", X=x.reshape(600, 64) / 16)
        refused(sfumato, config, "shape = [channels, height, width]")
        edit(config, 'kind = "mlp"', 'kind = "mlp"\nshape = [1, 8, 8]')
    elif how == "stretched":
        np.savez(config.parent / "pool.npz", x_public=(x[..., None] - 8.0) * 3)
    else:
        np.savez(config.parent / "pool.npz", images=x * 10)
        white = 25.5
    done(sfumato, config)
    index = record(config)["indices"][7]
    with Image.open(config.parent / "new/to_label/images" / f"{index:03d}.png") as image:
        seen = np.asarray(image).astype(float)
    assert np.abs(seen - (x[index] - black) / white * 255).max() <= 0.5


# ------------------------------------------------------------------------------------------------ asking


def asked(config: Path) -> dict[str, tuple[int, float]]:
    with Ledger(config.parent / "ledger.db") as ledger:
        lines = ledger.account("digits").statement().asked
    return {line.mechanism.question: (line.answers, line.mechanism.noise.scale) for line in lines if line.answers}


@pytest.mark.parametrize("voters", ["threshold", "top-k"])
def test_near_private_asks_twice_and_pays_once(sfumato: Sfumato, near: Path, voters: str) -> None:
    edit(near, "n = 30", f'n = 30\nvoters = "{voters}"')
    plan = done(sfumato, near, "--dry-run")
    assert list(asked(near)) == ["GradientMean"]
    chosen = done(sfumato, near)
    assert len(set(record(near)["indices"])) == 30
    counted = "Histogram" if voters == "threshold" else "TopKHistogram"
    noise = plan["noise_multipliers"]
    after = asked(near)
    assert (after["Gram"], after[counted]) == ((1, noise["pca"]), (1, noise["support"]))
    assert noise["support"] == pytest.approx(2.0), "half of epsilon=1 is for counting"
    assert plan["epsilon_spent"] == chosen["epsilon_spent"] <= 1.0
    assert chosen["epsilon_spent"] == pytest.approx(1.0, abs=1e-3)
    assert done(sfumato, near)["new"] is False
    (near.parent / "new/to_label/sheet.html").unlink()
    done(sfumato, near)
    assert asked(near) == after
    statement = record(near)["privacy"]["statement"]
    assert {line["question"] for line in statement["mechanisms"]} == set(after)
    done(sfumato, near, "--labels", label(near, 9))
    assert Run.load(near.parent / "runs/labelled").statement == statement
    assert asked(near) == after


def test_one_exchanged_image_is_two_votes(sfumato: Sfumato, near: Path) -> None:
    """Under replace-one the counts move by 2, so that the noise doubles."""
    edit(near, "ledger = ", 'adjacency = "replace-one"\nledger = ')
    ask_others(near)
    assert done(sfumato, near, "--dry-run")["noise_multipliers"]["support"] == pytest.approx(4.0)
    assert done(sfumato, near)["epsilon_spent"] <= 1.0


def test_a_dry_run_reads_no_private_value(sfumato: Sfumato, near: Path) -> None:
    edit(near, 'data = "digits.npz"', 'data = "gone.npz"')
    before = files(near.parent)
    done(sfumato, near, "--dry-run")
    assert files(near.parent) == before
    refused(sfumato, near, "gone.npz")


# ------------------------------------------------------------------------------------------------ private files


def private_alone(config: Path) -> dict[str, Any]:
    """A file with the private rows and nothing else, where the training's was."""
    found = digits()
    np.savez(config.parent / "digits.npz", x_train=found["x_train"], X=found["x_train"], y=found["y_train"])
    np.savez(config.parent / "others.npz", **{k: v for k, v in found.items() if not k.endswith("train")})
    edit(config, 'images = "digits.npz"', 'images = "others.npz"')
    return found


@pytest.mark.parametrize("linked", [False, True])
def test_private_rows_are_no_pool_and_no_test(sfumato: Sfumato, config: Path, linked: bool) -> None:
    private_alone(config)
    name = "digits.npz"
    if linked:
        name = "link.npz"
        (config.parent / name).hardlink_to(config.parent / "digits.npz")
    edit(config, 'images = "others.npz"', f'images = "{name}"')
    refused(sfumato, config, "[pool] images")
    refused(sfumato, config, "holds private rows")
    edit(config, f'images = "{name}"', f'images = "others.npz"\n[finetune]\ntest = "{name}"\n')
    edit(config, '[finetune]\nout = "runs/labelled"', "")
    refused(sfumato, config, "[finetune] test")
    refused(sfumato, config, "holds private rows", "--dry-run")


def test_a_folder_of_private_images_is_no_pool(sfumato: Sfumato, config: Path) -> None:
    """Nor one of links to some of them."""
    folder = config.parent / "people"
    folder.mkdir()
    for number, image in enumerate(digits()["x_train"][:40]):
        Image.fromarray(image * 15).save(folder / f"{number}.png")
    record = json.loads((config.parent / "runs/digits/config.json").read_text())
    record["data"]["private"] = "people"
    (config.parent / "runs/digits/config.json").write_text(json.dumps(record))
    linked = config.parent / "linked"
    linked.mkdir()
    (linked / "a.png").symlink_to(folder / "3.png")
    edit(config, "n = 30", "n = 1")
    for name in ("people", "linked"):
        edit(config, re.search(r'images = ".*"', config.read_text())[0], f'images = "{name}"')  # type: ignore[index]
        refused(sfumato, config, "holds private rows")


def test_private_labels_teach_nothing(sfumato: Sfumato, config: Path) -> None:
    found = private_alone(config)
    np.savez(config.parent / "others.npz", x_pool=found["x_train"])
    done(sfumato, config)
    refused(sfumato, config, "--oracle", "--oracle", config.parent / "digits.npz")
    refused(sfumato, config, "holds private rows", "--oracle", config.parent / "digits.npz")
    refused(sfumato, config, "holds private rows", "--labels", config.parent / "digits.npz")


def test_near_private_is_not_asked_about_its_own_rows(sfumato: Sfumato, near: Path) -> None:
    private_alone(near)
    np.savez(near.parent / "people.npz", X=digits()["x_train"], y=digits()["y_train"])
    edit(near, 'data = "digits.npz"', 'data = "people.npz"')
    edit(near, 'name = "digits"', 'name = "people"')
    edit(near, 'images = "others.npz"', 'images = "people.npz"')
    refused(sfumato, near, "holds private rows")


def test_one_dataset_has_one_account(sfumato: Sfumato, near: Path) -> None:
    """Under another name nothing of what the training spent would count."""
    edit(near, 'name = "digits"', 'name = "others"')
    for options in ((), ("--dry-run",)):
        refused(sfumato, near, "give name = 'digits'", *options)


def test_a_model_of_labels_still_knows_whose_rows_it_rests_on(sfumato: Sfumato, near: Path) -> None:
    ask_others(near)
    done(sfumato, near)
    done(sfumato, near, "--labels", label(near, 9))
    edit(near, '"runs/digits"', '"runs/labelled"')
    edit(near, '"new/to_label"', '"again"')
    edit(near, 'name = "others"', 'name = "third"')
    refused(sfumato, near, "give name = 'others'")
    edit(near, 'name = "third"', 'name = "others"')
    np.savez(near.parent / "digits.npz", X=digits()["x_train"], y=digits()["y_train"])
    refused(sfumato, near, "holds private rows")


def test_what_is_not_left_is_not_asked(sfumato: Sfumato, near: Path) -> None:
    assert done(sfumato, near, "--dry-run")["fits"] is True
    edit(near, "epsilon = 1.0", "epsilon = 3.5")
    before, ledger = asked(near), (near.parent / "ledger.db").read_bytes()
    plan = done(sfumato, near, "--dry-run")
    assert (plan["fits"], plan["budget"]) == (False, 4.0)
    assert (near.parent / "ledger.db").read_bytes() == ledger
    result = sfumato("select", near)
    assert result.status == 2
    assert "[private] epsilon=3.5 does not fit" in result.err
    assert f"at most epsilon={plan['epsilon_that_fits']:g} fits" in result.err
    assert asked(near) == before
    assert not (near.parent / "new").exists()
    edit(near, "epsilon = 3.5", f"epsilon = {1.05 * plan['epsilon_that_fits']}")
    assert done(sfumato, near, "--dry-run")["fits"] is False
    edit(near, f"epsilon = {1.05 * plan['epsilon_that_fits']}", f"epsilon = {plan['epsilon_that_fits']}")
    assert done(sfumato, near, "--dry-run")["fits"] is True
    assert done(sfumato, near)["new"] is True


# ------------------------------------------------------------------------------------------------ what is promised


def test_the_ledger_of_the_training_and_no_other(sfumato: Sfumato, near: Path) -> None:
    """Else what the training spent would be forgotten."""
    edit(near, 'ledger = "ledger.db"', 'ledger = "other.db"')
    for options in ((), ("--dry-run",)):
        refused(sfumato, near, "is not the one of the training", *options)
    with Ledger(near.parent / "other.db") as ledger:
        assert ledger.account_names() == []
        refused(sfumato, near, "is not the one of the training")
        terms = {"unit": "example", "adjacency": Adjacency.ADD_REMOVE, "budget": Budget(4.0, 1e-4)}
        ledger.account("digits", **terms)
    for options in ((), ("--dry-run",)):
        refused(sfumato, near, "is not the one of the training", *options)


def test_two_datasets_have_two_statements(sfumato: Sfumato, near: Path) -> None:
    ask_others(near)
    chosen = done(sfumato, near)
    assert chosen["epsilon_in_all"] == {"digits": pytest.approx(2.0, abs=1e-2), "others": pytest.approx(1.0, abs=1e-3)}
    statement = record(near)["privacy"]["statement"]
    assert "epsilon" not in statement
    assert statement["private"] is True
    done(sfumato, near, "--labels", label(near, 9))
    run = Run.load(near.parent / "runs/labelled")
    assert run.statement == statement
    first = Run.load(near.parent / "runs/digits")
    assert {**first.statement, "text": first.statement_text} in run.statement["statements"]
    for name in ("digits", "others"):
        assert f"Privacy statement for the dataset '{name}'" in run.statement_text

    edit(near, '"runs/digits"', '"runs/labelled"')
    edit(near, '"new/to_label"', '"again"')
    edit(near, 'data = "others.npz"', 'data = "digits.npz"')
    edit(near, 'name = "others"', 'name = "digits"')
    edit(near, "epsilon = 1.0", "epsilon = 0.5")
    epsilons = done(sfumato, near)["epsilon_in_all"]
    assert epsilons == {"others": pytest.approx(1.0, abs=1e-3), "digits": 4.0}, "all that its budget allows"


@pytest.mark.parametrize("name", ["digits", "others"])
def test_what_is_not_private_stays_so(sfumato: Sfumato, near: Path, name: str) -> None:
    if name == "others":
        ask_others(near)
    path = near.parent / "runs/digits/run.json"
    run = json.loads(path.read_text())
    path.write_text(json.dumps({**run, "statement": {**run["statement"], "private": False}}))
    if name == "digits":
        refused(sfumato, near, "is not the one of the training")  # which knows of no stamp
        with Ledger(near.parent / "ledger.db") as ledger:
            ledger.account("digits").stamp("not-private", "Noise came from a known seed.")
    assert "NOT PRIVATE" in done(sfumato, near)["privacy"]
    assert record(near)["privacy"]["statement"]["private"] is False


def test_no_password_is_written_down(sfumato: Sfumato, near: Path) -> None:
    done(sfumato, near)
    assert "ledger" not in record(near)["settings"]["private"]
    edit(near, 'ledger = "ledger.db"', 'ledger = "postgresql://ann:hidden@nowhere/ledger"')
    assert done(sfumato, near)["new"] is False


def test_the_key_that_changed_is_named(sfumato: Sfumato, near: Path) -> None:
    done(sfumato, near)
    edit(near, "epsilon = 1.0", "epsilon = 0.9")
    refused(sfumato, near, "[private] epsilon is not what it was")
    edit(near, "epsilon = 0.9", "epsilon = 1.0")
    edit(near, "n = 30", "n = 30\ncomponents = 3")
    refused(sfumato, near, "[select] components is not what it was")


def test_a_worse_model_is_told_of(sfumato: Sfumato, config: Path) -> None:
    edit(config, 'out = "runs/labelled"', 'out = "runs/labelled"\ntest = "digits.npz"\nlabels_alone = true')
    done(sfumato, config)
    wrong = label(config, 30)
    lines = wrong.read_text().splitlines()
    wrong.write_text("\n".join([lines[0], *(f"{line.split(',')[0]},0" for line in lines[1:]), ""]))
    edit(config, "labels_alone = true", "labels_alone = true\nlearning_rate = 1.0")
    tuned = done(sfumato, config, "--labels", wrong)
    assert tuned["test_accuracy"] < tuned["test_accuracy_before"]
    assert "fell" in tuned["warning"]
    assert "warning" not in done(sfumato, config, "--labels", label(config, 30), "--dry-run")


def test_the_hint_is_for_where_one_stands(sfumato: Sfumato, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(config.parent.parent)
    told = done(sfumato, config)["next"]
    assert f"--labels {config.parent.name}/new/to_label/labels.csv" in told
    assert "Downloads" in told


def test_a_strategy_that_fails_gives_back_what_it_reserved(sfumato: Sfumato, near: Path) -> None:
    edit(near, "n = 30", "n = 30\ncomponents = 17")  # of 16
    with Ledger(near.parent / "ledger.db") as ledger:
        left = ledger.account("digits").left()
    result = sfumato("select", near)
    assert result.status == 2
    assert "components=17" in result.err
    assert not (near.parent / "new").exists()
    with Ledger(near.parent / "ledger.db") as ledger:
        assert ledger.account("digits").left() == left


def test_after_a_kill_the_same_command_goes_on(sfumato: Sfumato, near: Path) -> None:
    """The first answer is gone and stays paid for; the second was not given, and is not paid for."""
    edit(near, "epsilon = 1.0", "epsilon = 0.6")
    killed = (
        "import os, sys; from sfumato.cli.main import main; from sfumato.questions import Histogram; "
        "Histogram.check = lambda *_: os._exit(9); main(['select', sys.argv[1]])"
    )
    assert subprocess.run([sys.executable, "-c", killed, near], check=False, timeout=120).returncode == 9
    assert "Histogram" not in asked(near)
    assert done(sfumato, near)["new"] is True
    with Ledger(near.parent / "ledger.db") as ledger:
        statement = ledger.account("digits").statement()
    assert not any(line.open for line in statement.asked)
    answers = [line.answers for line in statement.asked if line.mechanism.question in ("Gram", "Histogram")]
    assert answers == [1, 0, 1, 1]


# ------------------------------------------------------------------------------------------------ labels


def test_an_oracle_knows_the_chosen_ones(sfumato: Sfumato, config: Path) -> None:
    done(sfumato, config)
    np.save(config.parent / "truth.npy", digits()["y_pool"])
    np.save(config.parent / "few.npy", digits()["y_pool"][:599])
    first = done(sfumato, config, "--oracle", config.parent / "digits.npz")
    assert (first["labels"], first["missing"], first["source"]) == (30, 0, "by an oracle")
    by_oracle = Run.load(config.parent / "runs/labelled").weights
    refused(sfumato, config, "--again", "--oracle", config.parent / "truth.npy")
    done(sfumato, config, "--again", "--labels", label(config, 30))
    by_hand = Run.load(config.parent / "runs/labelled").weights
    assert all(torch.equal(by_hand[name], weights) for name, weights in by_oracle.items())
    done(sfumato, config, "--again", "--labels", label(config, 3))
    assert not all(torch.equal(Run.load(config.parent / "runs/labelled").weights[n], w) for n, w in by_oracle.items())
    assert sorted(p.name for p in (config.parent / "runs").iterdir()) == ["digits", "labelled"]
    refused(sfumato, config, "599 labels", "--oracle", config.parent / "few.npy")
    refused(sfumato, config, "leave one of them out", "--oracle", config.parent / "truth.npy", "--labels", "labels.csv")


def test_a_second_round_begins_where_the_first_ended(sfumato: Sfumato, config: Path) -> None:
    done(sfumato, config)
    done(sfumato, config, "--labels", label(config, 30))
    edit(config, '"runs/digits"', '"runs/labelled"')
    edit(config, '"new/to_label"', '"again"')
    edit(config, 'out = "runs/labelled"', 'out = "runs/more"')
    done(sfumato, config)
    model = Released(module_of(Run.load(config.parent / "runs/labelled")))
    found = json.loads((config.parent / "again/chosen.json").read_text())
    assert found["indices"] == Entropy()(model, Public(pool()), 30).tolist()
    assert found["privacy"]["statement"]["dataset"] == "digits"


def test_wrong_labels_change_nothing(sfumato: Sfumato, config: Path) -> None:
    refused(sfumato, config, "choose first", "--labels", config.parent / "labels.csv")
    done(sfumato, config)
    outside = next(i for i in range(600) if i not in record(config)["indices"])
    first = record(config)["indices"][0]
    for text, said in [
        (f"index,label\n{outside},1\n", f"line 2: index '{outside}'"),
        (f"index,label\n{first},ten\n", "line 2: label 'ten'"),
        (f"index,label\n{first},1\n{first},1\n", "line 3"),
        ("index,label\n", "no label yet"),
    ]:
        (config.parent / "labels.csv").write_text(text)
        refused(sfumato, config, said, "--labels", config.parent / "labels.csv")
    refused(sfumato, config, "no.csv", "--labels", config.parent / "no.csv")
    labels = label(config, 10)
    edit(config, 'out = "runs/labelled"', 'out = "runs/labelled"\nlearning_rate = 1e30')
    refused(sfumato, config, "diverge", "--labels", labels)
    edit(config, "learning_rate = 1e30", 'test = "select.toml"')
    refused(sfumato, config, "select.toml", "--labels", labels)
    edit(config, 'out = "runs/labelled"\ntest = "select.toml"', 'out = "runs/digits"')
    refused(sfumato, config, "--again", "--labels", labels)
    refused(sfumato, config, "something else", "--labels", labels, "--again")


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[pool]", "[poll]", "did you mean 'pool'?"),
        ("n = 30", "n = 30\nsede = 1", "did you mean 'seed'?"),
        ("n = 30", "n = 30\nepochs = 1", "it belongs to [finetune]"),
        ("n = 30", "", "lacks the key 'n'"),
        ("n = 30", "n = 0", "at least 1"),
        ("n = 30", "n = 601", "at most 600"),
        ("n = 30", "n = 3.5", "a whole number"),
        ('"entropy"', '"entropie"', "must be one of"),
        ("n = 30", "n = 30\neach = 3", "diverse-public"),
        ("n = 30", "n = 30\nquantile = 0.5", "near-private"),
        ('"entropy"', '"near-private"', "add it, or choose diverse-public"),
        ("[finetune]", f"{PRIVATE}\n[finetune]", "leave the section out"),
        ('weights = "runs/digits"', 'weights = "runs"', "holds no run.json"),
        ('weights = "runs/digits"', 'weights = "runs/digits"\nhidden = [17]', "(17, 64)"),
        ('weights = "runs/digits"', 'weights = "runs/digits"\nkind = "mpl"', "'mpl'"),
        ('weights = "runs/digits"', 'weights = "runs/digits"\nema = true', "moving average"),
        ('weights = "runs/digits"', 'weights = "runs/digits"\nembedding = "nowhere"', "'nowhere'"),
        ('images = "digits.npz"', 'images = "gone.npz"', "does not exist"),
        ('images = "digits.npz"', 'images = "train.toml"', "cannot be read as an NPZ file"),
        ('images = "digits.npz"', 'images = "runs"', "holds no .png"),
        ('images = "digits.npz"', 'images = "digits.npz"\nclasses = ["a", "b"]', "2 names"),
        ('images = "digits.npz"', f'images = "digits.npz"\nclasses = {["a"] * 10}', "different names"),
        ('images = "digits.npz"', 'images = "digits.npz"\nrange = [0, 15]', "has values from 0 to 16"),
        ('images = "digits.npz"', 'images = "digits.npz"\nrange = [1, 0]', "[lowest, highest]"),
        ('out = "new/to_label"', 'out = "runs"', "holds other files"),
        ('out = "runs/labelled"', "crop = 2", "[channels, height, width]"),
        ('out = "runs/labelled"', "share = 1.0", "share=1.0 must be above 0 and below 1"),
        ('out = "runs/labelled"', "share = 0.5\nlabels_alone = true", "leave one of them out"),
        ("[model]", "private = 3\n[model]", "write [private] on a line"),
    ],
)
def test_bad_input_leaves_no_trace(sfumato: Sfumato, config: Path, old: str, new: str, said: str) -> None:
    edit(config, old, new)
    refused(sfumato, config, said)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("delta = 1e-4", "delta = 0.01", "publishing someone's row"),
        ("delta = 1e-4", "delta = 1e-5", "one delta"),
        ("size = 700", "size = 701", "size=701 was 700"),
        ("epsilon = 1.0", "epsilon = 1.0\nbudget = 0.5", "at least epsilon"),
        ("epsilon = 1.0", "epsilon = 1.0\nsupport = 1.0", "below 1"),
        ("n = 30", 'n = 30\nvoters = "top-k"\nquantile = 0.5', "leave it out, or give top"),
        ("n = 30", "n = 30\ntop = 5", "leave it out, or give quantile"),
        ('data = "digits.npz"', 'data = "digits.csv"', "must be an .npz file"),
        ('data = "digits.npz"', 'data = "small.npz"', "give images of one size"),
        ("size = 700", 'size = 700\nusers = "who"', "'who'"),
    ],
)
def test_bad_private_input_leaves_no_trace(sfumato: Sfumato, near: Path, old: str, new: str, said: str) -> None:
    np.savez(near.parent / "small.npz", x_train=np.zeros((5, 4, 4)), y_train=np.zeros(5))
    edit(near, old, new)
    refused(sfumato, near, said)


def test_a_run_without_its_config(sfumato: Sfumato, config: Path) -> None:
    (config.parent / "runs/digits/config.json").unlink()
    refused(sfumato, config, "[model] kind is missing")
    for name in ("run.json", "weights.safetensors"):
        whole = (config.parent / "runs/digits" / name).read_bytes()
        (config.parent / "runs/digits" / name).write_bytes(whole[:-20])
        refused(sfumato, config, "damaged")
        (config.parent / "runs/digits" / name).write_bytes(whole)


# ------------------------------------------------------------------------------------------------ the page, the browser


def rows_of(section: str) -> dict[str, str]:
    """The table of a section: key -> default."""
    found = next(part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE) if part.startswith(f"[{section}]"))
    return dict(re.findall(r"^\| `(\w+)` \| .+ \| (.+) \|$", found, re.MULTILINE))


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_on_the_page_with_its_default(section: str) -> None:
    assert list(rows_of(section)) == [f.name for f in fields(SECTIONS[section])]
    for f in fields(SECTIONS[section]):
        said = rows_of(section)[f.name]
        if f.default is MISSING:
            assert said == "required", f.name
        elif f.default is not None:
            assert tomllib.loads(f"x = {said.strip('`')}")["x"] == f.default, f.name


def test_the_options_are_those_of_the_strategies() -> None:
    kinds = dict(zip(STRATEGIES, (Random, Entropy, Margin, KCenter, DiversePublic, NearPrivate), strict=True))
    for name, kind in kinds.items():
        ours = {key for key, users in USED_BY.items() if name in users} - {"quantile", "top"}  # which are of the voters
        assert ours == {f.name for f in fields(kind)} - {"seed"}, name
    said = rows_of("select")
    assert (float(said["uncertain"]), int(said["components"])) == (NearPrivate().uncertain, NearPrivate().components)
    assert (float(said["uncertain"]), int(said["components"])) == (
        DiversePublic().uncertain,
        DiversePublic().components,
    )
    assert int(said["each"]) == DiversePublic().each
    assert float(said["quantile"]) == NearPrivate().voters.quantile  # type: ignore[union-attr]


def test_the_configs_on_the_page_are_taken(sfumato: Sfumato, config: Path) -> None:
    blocks = dict(re.findall(r"<!-- (\w+) -->\n```toml\n(.*?)```", PAGE, re.DOTALL))
    config.write_text(blocks["config"])
    assert done(sfumato, config)["images"] == 100
    assert done(sfumato, config, "--oracle", config.parent / "digits.npz")["test_accuracy"] > 0.5
    edit(config, '"diverse-public"', '"near-private"')
    add(config, blocks["private"])
    edit(config, '"to_label"', '"other"')
    assert done(sfumato, config, "--dry-run")["epsilon_spent"] <= 1.0


@pytest.fixture
def downloads(tmp_path: Path) -> Path:
    folder = tmp_path / "downloads"
    folder.mkdir()
    return folder


@pytest.mark.skipif(
    find_chromium() is None, reason="no Chromium on the path (Debian: apt install chromium), nor SFUMATO_CHROMIUM"
)
def test_five_labels_from_the_browser(sfumato: Sfumato, config: Path, downloads: Path, tmp_path: Path) -> None:
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", 'n"i,n<e>']
    edit(config, 'images = "digits.npz"', f'images = "digits.npz"\nclasses = {json.dumps(names)}')
    sheet = Path(done(sfumato, config)["sheet"])
    truth = [int(digits()["y_pool"][i]) for i in record(config)["indices"]]
    with browsing(tmp_path / "profile") as page:
        page.open(sheet.resolve().as_uri())
        for image in (0, 1, 2, 28, 29):
            page.click(f".tile:nth-child({image + 1})")
            page.click(f"#classes button:nth-child({truth[image] + 1})")
        page.reload()
        assert page.run("document.getElementById('left').textContent") == "5 labelled, 25 left"
        page.save_downloads_to(downloads)
        page.click("#save")
        deadline = time.monotonic() + 60
        while not (downloads / "labels.csv").exists():
            assert time.monotonic() < deadline, "nothing was downloaded"
            time.sleep(0.02)
    found = done(sfumato, config, "--labels", downloads / "labels.csv")
    assert (found["labels"], found["missing"]) == (5, 25)
    expected = np.bincount([truth[k] for k in (0, 1, 2, 28, 29)], minlength=10)
    assert list(found["per_class"].values()) == expected.tolist()
