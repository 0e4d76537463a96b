"""Running a cell, going on after an interruption, and what a table is made of."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sfumato import Ledger
from sfumato.algorithms.ada_dps import AdaDPS
from sfumato.algorithms.extended import Extended
from sfumato.algorithms.shrunk_origin import ShrunkOrigin
from sfumato.algorithms.weight_multiplicity import weight_multiplicity
from sfumato.data.samplers import Poisson
from sfumato.ensembles import Iterates
from sfumato.errors import InvalidArgument
from sfumato.experiments import page, runner
from sfumato.experiments.build import make_method, make_model, private_batch
from sfumato.experiments.data import load_rows
from sfumato.experiments.records import read_record, write_record
from sfumato.experiments.runner import Job, jobs, run_job
from sfumato.experiments.scores import all_scores, choice
from sfumato.experiments.settings import Crops, stated
from sfumato.experiments.spec import Cell, Spec, load_spec
from sfumato.experiments.synthetic import with_synthetic
from sfumato.experiments.table import entries, entry, markdown
from sfumato.experiments.warm import _key
from sfumato.objective import Objective, cross_entropy
from sfumato.privacy import accounting
from sfumato.privacy.mechanisms import Adjacency, Gaussian, Mechanism
from sfumato.public import Public
from sfumato.run import Run
from sfumato.synthesis.images import PublicImages
from tests.experiments.conftest import SMALL, write_spec

CPU = torch.device("cpu")


def job_of(spec: Spec, row: str, out: Path, seed: int = 0) -> Job:
    cell = next(c for c in spec.cells if c.row == row)
    return Job(spec=spec, cell=cell, seed=seed, scale="smoke", out=out)


def accuracy(job: Job, weights: dict[str, torch.Tensor]) -> float:
    """Percent on the test rows, in plain torch."""
    rows = load_rows(job.settings.data, CPU)
    module = make_model(job.settings.model, rows.shape, seed=99)
    module.load_state_dict(weights)
    images, labels = rows.test
    with torch.no_grad():
        return 100 * float((module(images).argmax(1) == labels).double().mean())


def test_a_cell_leaves_a_whole_record(spec: Spec, tmp_path: Path) -> None:
    job = job_of(spec, "warm", tmp_path / "out")
    record = run_job(job, device=CPU)
    assert record == json.loads(job.path.read_text())
    assert job.path == tmp_path / "out" / "small" / "smoke" / "warm-accuracy-seed0.json"
    assert (record["spec"], record["cell"], record["seed"], record["scale"]) == (
        "small",
        {"row": "warm", "column": "accuracy"},
        0,
        "smoke",
    )
    assert set(record["metrics"]) == {"last", "ema", "mean", "vote", "logits"}
    assert all(set(parts) == {"test", "hold_out"} for parts in record["metrics"].values())
    assert record["metrics"][record["chosen"]]["hold_out"] == max(m["hold_out"] for m in record["metrics"].values())
    for name, file in (("last", "weights"), ("ema", "ema")):
        kept = load_file(job.work / "run" / f"{file}.safetensors")
        assert record["metrics"][name]["test"] == pytest.approx(accuracy(job, kept), abs=1e-3)
    (warm,) = (tmp_path / "out" / "warm-ups").iterdir()
    assert record["warm_up"]["test"] == pytest.approx(accuracy(job, load_file(warm)), abs=1e-3)
    assert record["warm_up"]["test"] > 40
    assert record["run"]["sampler"]["batch_size"] == 120
    assert 1.99 < record["statement"]["epsilon"] <= 2.0
    assert record["config"] == job.settings.to_json()
    assert record["machine"]["torch"] == torch.__version__
    assert "everybody has" in record["note"]
    assert [path.name for path in job.work.glob("checkpoint*")] == []


def test_what_was_run_is_not_run_again_unless_wanted(spec: Spec, tmp_path: Path) -> None:
    job = job_of(spec, "warm", tmp_path)
    run_job(job, device=CPU)
    (warm,) = (tmp_path / "warm-ups").iterdir()
    before, made = job.path.read_bytes(), warm.stat().st_mtime_ns
    run_job(job, device=CPU)
    assert job.path.read_bytes() == before
    run_job(job, device=CPU, again=True)
    assert job.path.read_bytes() != before
    assert warm.stat().st_mtime_ns == made  # public weights do not change by training anew

    other = replace(job, spec=replace(spec, name="other"))  # a cell of another table with the same settings
    run_job(other, device=CPU)
    assert not other.path.exists()
    assert other.finished() == job.path
    assert job_of(spec, "warm", tmp_path, seed=1).finished() is None

    job.path.unlink()
    with pytest.raises(InvalidArgument, match="--again"):
        run_job(job, device=CPU)


def test_one_warm_up_serves_all_warm_cells(spec: Spec, tmp_path: Path) -> None:
    records = [run_job(job_of(spec, row, tmp_path), device=CPU) for row in ("warm", "extended")]
    assert len(list((tmp_path / "warm-ups").iterdir())) == 1
    assert records[0]["warm_up"] == records[1]["warm_up"]
    private = 120 * 600 / (600 + 70)  # public rows take the place of the others, and 30 are held out
    assert records[1]["run"]["sampler"]["batch_size"] == round(private)
    run_job(job_of(spec, "warm", tmp_path, seed=1), device=CPU)
    assert len(list((tmp_path / "warm-ups").iterdir())) == 2


@pytest.mark.parametrize("change", [{"split": 1}, {"resolution": 224}], ids=["split", "resolution"])
def test_other_public_rows_have_another_warm_up(spec: Spec, change: dict[str, int]) -> None:
    settings = next(c for c in spec.cells if c.row == "warm").settings["smoke"]
    assert settings.warm_up is not None
    before, after = (
        _key(replace(settings, data=data), settings.warm_up)
        for data in (settings.data, replace(settings.data, **change))
    )
    assert before != after


def test_public_rows_join_below_the_methods_that_carry_state(tmp_path: Path) -> None:
    text = SMALL.replace('method = ["dope-sgd"]', 'method = ["ada-dps", "shrunk-origin", "weight-multiplicity"]')
    cell = next(c for c in load_spec(write_spec(tmp_path, text)).cells if c.row == "extended")
    method: Any = make_method(cell.settings["smoke"])
    stack = [type(method), type(method.method), type(method.method.method), method.method.method.method.func]
    assert stack == [AdaDPS, ShrunkOrigin, Extended, weight_multiplicity]


@pytest.mark.parametrize("row", ["extended", "mirror"])
def test_public_gradients_that_join_are_bounded_if_asked(tmp_path: Path, row: str) -> None:
    bounded = SMALL.replace("decay_steps = 4", "decay_steps = 4, public_clip = 0.5")
    bounded = bounded.replace('setting = "extended"', 'setting = "extended"\nextended_clip = 0.5')

    def joining(text: str) -> Any:
        cell = next(c for c in load_spec(write_spec(tmp_path, text)).cells if c.row == row)
        return make_method(cell.settings["smoke"])

    assert (joining(SMALL).public_clip, joining(bounded).public_clip) == (None, 0.5)


def test_given_noise_is_charged_for_what_is_asked(spec: Spec, tmp_path: Path) -> None:
    job = job_of(spec, "mirror", tmp_path)
    record = run_job(job, device=CPU)
    assert record["steps_taken"] == 6
    assert record["run"]["noise_multiplier"] == 2.5
    asked = Mechanism(  # two of the six steps have no private part
        question="GradientMean", noise=Gaussian(2.5), sampler=Poisson(size=600, batch_size=120), times=4
    )
    cost = accounting.epsilon([asked], delta=1e-4, adjacency=Adjacency.ADD_REMOVE)
    assert record["statement"]["epsilon"] == pytest.approx(cost.epsilon)
    with Ledger(job.work / "ledger.db") as ledger:
        (name,) = ledger.account_names()
        assert [line.answers for line in ledger.account(name).statement().asked] == [4]


def test_an_interrupted_cell_goes_on(spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(spec, "cold", tmp_path)
    calls = Counter[str]()

    def ctrl_c(at: int) -> Callable[..., Any]:
        def made(*arguments: Any) -> Any:
            method: Any = make_method(*arguments)

            def step(*inner: Any, **handed: Any) -> Any:
                calls["steps"] += 1
                if calls["steps"] == at:
                    os.kill(os.getpid(), signal.SIGINT)
                return method(*inner, **handed)

            return step

        return made

    monkeypatch.setattr(runner, "make_method", ctrl_c(4))
    with pytest.raises(KeyboardInterrupt):
        run_job(job, device=CPU)
    assert not job.path.exists()
    assert (job.work / "checkpoint.pt").exists()
    # The same training from another table: it is known by its settings.
    record = run_job(replace(job, spec=replace(spec, name="other")), device=CPU)
    assert calls["steps"] == 6  # 4 before, 2 after
    assert (record["steps_taken"], record["steps_lost"], record["steps_short"]) == (6, 0, 0)
    assert len(record["metrics"]) == 5
    with Ledger(job.work / "ledger.db") as ledger:
        (name,) = ledger.account_names()
        statement = ledger.account(name).statement()
    assert [line.answers for line in statement.asked] == [6]
    assert statement.epsilon <= 2.0


def test_a_record_of_other_settings_is_not_taken_for_this_one(spec: Spec, tmp_path: Path) -> None:
    out = tmp_path / "out"
    cell = next(c for c in spec.cells if c.row == "cold")
    run_job(job_of(spec, "cold", out), device=CPU)
    changed = load_spec(write_spec(tmp_path, SMALL.replace("learning_rate = 0.5", "learning_rate = 0.25")))
    new = job_of(changed, "cold", out)
    assert next(e.state for e in entries(changed, "smoke", out)) == "not run"
    assert next(e.state for e in entries(spec, "smoke", out)) == "measured"
    with pytest.raises(InvalidArgument, match="other settings"):
        jobs(changed, [new.cell], "smoke", [0], out, again=False)
    before = new.path.read_bytes()
    (again,) = jobs(changed, [new.cell], "smoke", [0], out, again=True)
    run_job(again, device=CPU, again=True)
    assert new.path.read_bytes() != before
    assert next(e.state for e in entries(changed, "smoke", out)) == "measured"
    assert next(e.state for e in entries(spec, "smoke", out)) == "not run"
    assert cell.settings["smoke"] != new.settings


def test_generated_rows_join_the_public_ones(spec: Spec, tmp_path: Path) -> None:
    job = job_of(spec, "synthetic", tmp_path)
    public = load_rows(job.settings.data, CPU).public
    record = run_job(job, device=CPU)
    facts = record["synthetic"]
    assert facts["generator_images"] == 200
    assert facts["generator_sha256"] == PublicImages.of(Public(public)).facts()["sha256"]  # of those and no others
    assert record["warm_up"] != run_job(job_of(spec, "warm", tmp_path), device=CPU)["warm_up"]

    rows = load_rows(job.settings.data, CPU)
    joined, again = with_synthetic(rows, job.settings, folder=tmp_path / "synthetic", progress=False)
    assert again == facts  # made once
    assert len(joined.public[0]) == len(joined.public[1]) == 70 + 40 == job.settings.public_rows
    torch.testing.assert_close(joined.public[0][:70], rows.public[0])
    assert joined.public[0].dtype == rows.public[0].dtype
    assert 0 <= float(joined.public[0].min()) <= float(joined.public[0].max()) <= 1
    assert joined.hold_out is rows.hold_out
    extended = replace(job.settings, training=replace(job.settings.training, setting="extended"))
    assert private_batch(extended) == round(120 * 600 / (600 + 110))


def test_guided_rows_are_of_the_same_generator(spec: Spec, tmp_path: Path) -> None:
    settings = job_of(spec, "synthetic", tmp_path).settings
    assert settings.synthesis is not None
    rows = load_rows(settings.data, CPU)
    made = {}
    for weight in (0.0, 30.0):
        guided = replace(settings, synthesis=replace(settings.synthesis, guidance=weight, alone=True))
        made[weight] = with_synthetic(rows, guided, folder=tmp_path, progress=False)
    assert len(list(tmp_path.glob("generator-*"))) == 1
    assert len(list(tmp_path.glob("*.npz"))) == 2
    plain, guided_rows = (made[w][0].public[0] for w in (0.0, 30.0))
    assert plain.shape == guided_rows.shape == (40, 1, 8, 8)
    assert not torch.equal(plain, guided_rows)
    assert made[30.0][1]["generator_sha256"] == made[0.0][1]["generator_sha256"]


def test_a_warm_start_alone_asks_nothing(spec: Spec, tmp_path: Path) -> None:
    job = job_of(spec, "warm", tmp_path)
    training = replace(job.settings.training, setting="warm-only", epsilon=None)
    cell = replace(job.cell, settings={"smoke": replace(job.settings, training=training)})
    record = run_job(replace(job, cell=cell), device=CPU)
    assert record["metrics"]["last"]["test"] == record["warm_up"]["test"]
    assert (record["steps_taken"], record["statement"]["epsilon"]) == (0, 0.0)
    assert not list(tmp_path.glob("work/*/ledger.db"))


# ------------------------------------------------------------------------------------------------ scores


def test_votes_are_those_of_the_iterates(spec: Spec) -> None:
    settings = spec.cells[0].settings["smoke"]
    rows = load_rows(settings.data, CPU)
    module = make_model(settings.model, rows.shape, seed=0)
    objective = Objective(module, cross_entropy)
    iterates = Iterates(last=5, total=5)
    models = [make_model(settings.model, rows.shape, seed=step) for step in range(1, 6)]
    for step, model in enumerate(models, start=1):
        iterates.keep(dict(model.named_parameters()), step)
    run = Run(weights=module.state_dict(), config={}, iterates=iterates)
    scores = all_scores(objective, run, rows)
    assert set(scores) == {"last", "mean", "vote", "logits"}  # no moving average was kept

    images, labels = rows.test
    with torch.no_grad():
        each = [model(images).double() for model in models]
    total = sum(each)
    right = 0
    for row, label in enumerate(labels.tolist()):
        votes = Counter(int(outputs[row].argmax()) for outputs in each)
        best = max(votes, key=lambda guess: (votes[guess], float(total[row, guess])))  # type: ignore[index]
        right += best == label
    assert scores["vote"]["test"] == pytest.approx(100 * right / len(labels))
    hits = (total.argmax(1) == labels).double()  # type: ignore[union-attr]
    assert scores["logits"]["test"] == pytest.approx(100 * float(hits.mean()))


def test_an_image_and_its_mirror_image_are_judged_together(spec: Spec) -> None:
    settings = spec.cells[0].settings["smoke"]
    rows = load_rows(settings.data, CPU)
    module, ema = (make_model(settings.model, rows.shape, seed=seed) for seed in (0, 1))
    run = Run(weights=module.state_dict(), config={}, ema=ema.state_dict())
    objective = Objective(module, cross_entropy)
    assert "mirrored" not in all_scores(objective, run, rows)
    scores = all_scores(objective, run, rows, mirrors=True)
    images, labels = rows.test
    with torch.no_grad():
        both = ema(images) + ema(images.flip(3))
    assert scores["mirrored"]["test"] == pytest.approx(
        100 * float((both.argmax(1) == labels).double().mean()), abs=1e-3
    )
    assert scores["mirrored"] != scores["ema"]
    assert choice({**scores, "mirrored": {"test": 100.0, "hold_out": 100.0}}) in ("last", "ema")  # it is no average


def test_the_choice_looks_at_the_rows_held_out_only() -> None:
    scores = {
        "last": {"test": 90.0, "hold_out": 70.0},
        "ema": {"test": 60.0, "hold_out": 80.0},
        "vote": {"test": 99.0, "hold_out": 80.0},
    }
    assert choice(scores) == "ema"  # of equals the first
    assert choice({"last": {"test": 90.0}}) is None


# ------------------------------------------------------------------------------------------------ tables


def made_up(cell: Cell, seed: int, value: float, **changes: Any) -> dict[str, Any]:
    metrics = {"ema": {"test": value, "hold_out": 1.0}, "last": {"test": value - 10, "hold_out": 0.0}}
    config = cell.settings["paper"].to_json()
    return {"seed": seed, "scale": "paper", "chosen": "ema", "metrics": metrics, "config": config, **changes}


def test_a_table_has_mean_and_standard_error(spec: Spec, tmp_path: Path) -> None:
    cold, warm = (next(c for c in spec.cells if c.row == row) for row in ("cold", "warm"))
    for seed, value in enumerate((70.0, 72.0, 75.0)):
        write_record(tmp_path / "small" / "paper" / f"a-seed{seed}.json", made_up(cold, seed, value))
    write_record(tmp_path / "another" / "paper" / "b-seed3.json", made_up(warm, 3, 80.0))
    found = {e.row: e for e in entries(spec, "paper", tmp_path)}
    mean = (70 + 72 + 75) / 3
    spread = math.sqrt(((70 - mean) ** 2 + (72 - mean) ** 2 + (75 - mean) ** 2) / 2)
    expected = {"row": "cold", "column": "accuracy", "paper": 60.0, "seeds": 3}
    assert found["cold"].to_json() == expected | {
        "ours": pytest.approx(mean, abs=1e-4),
        "stderr": pytest.approx(spread / math.sqrt(3), abs=1e-4),
    }
    assert (found["warm"].ours, found["warm"].stderr, found["warm"].seeds) == (80.0, None, 1)
    assert (found["synthetic"].ours, found["synthetic"].state) == (None, "not run")  # as "warm", but on other rows
    assert (found["mirror"].ours, found["mirror"].seeds, found["mirror"].state) == (None, 0, "not run")
    assert all(e.ours is None for e in entries(spec, "smoke", tmp_path))
    assert entry(replace(cold, report="last"), [made_up(cold, 0, 70.0)]).ours == 60.0
    with pytest.raises(InvalidArgument, match="no 'vote'"):
        entry(replace(cold, report="vote"), [made_up(cold, 0, 70.0)])

    lines = markdown(spec, folder=tmp_path).splitlines()
    assert lines[0] == "| | accuracy: paper | ours |"
    assert lines[2] == "| cold | 60 | 72.33 ± 1.45 (3) |"
    assert lines[4] == "| extended | – | not run |"
    assert len({line.count("|") for line in lines}) == 1


def test_a_broken_record_is_not_passed_over(spec: Spec, tmp_path: Path) -> None:
    path = tmp_path / "small" / "paper" / "a-seed0.json"
    write_record(path, {**made_up(spec.cells[0], 0, 70.0), "history": [math.nan]})
    assert read_record(path)["history"] == [None]
    path.write_text("{")
    with pytest.raises(InvalidArgument, match="no record"):
        entries(spec, "paper", tmp_path)
    write_record(path, made_up(spec.cells[0], 0, 70.0, config={"other": 1}))
    assert entries(spec, "paper", tmp_path)[0].ours is None


def test_pages_change_between_their_markers_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kept in (Path(__file__).parents[2] / "docs" / "papers").iterdir():
        if not kept.name.startswith("003"):  # which is begun anew; pictures of pages that are up to date are not drawn
            shutil.copy(kept, tmp_path)
    assert page.main([str(tmp_path)]) == 0
    assert sorted(p.name for p in tmp_path.glob("*.md")) == [
        *(f"00{number}.md" for number in range(5)),
        "index.md",
    ]
    text = (tmp_path / "003.md").read_text()
    assert "| PDA-DPMD | 67.03 |" in text
    assert "003-table1" in text
    (tmp_path / "003.md").write_text("1. By hand.\n\n" + text.replace("67.03", "99.99") + "\n2. By hand, too.\n")
    assert page.main([str(tmp_path), "--check"]) == 1
    assert page.main([str(tmp_path)]) == 0
    assert (tmp_path / "003.md").read_text() == "1. By hand.\n\n" + text + "\n2. By hand, too.\n"
    capsys.readouterr()


def test_keys_of_public_weights_outlive_new_options(spec: Spec) -> None:
    settings = next(c for c in spec.cells if c.row == "warm").settings["smoke"]
    assert settings.warm_up is not None
    assert "momentum" not in stated(settings.warm_up)  # a default, as an option of a later version would be
    assert stated(replace(settings.warm_up, augment=Crops(flip=True)))["augment"] == {"flip": True}
    assert _key(settings, settings.warm_up) == "b782eebd093c4b31"
    changed = replace(settings.warm_up, momentum=0.5)
    assert _key(settings, changed) != _key(settings, settings.warm_up)
