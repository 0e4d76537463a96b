"""`sfumato train` from end to end: train, resume, dry run, and every refusal without a trace."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sfumato import Ledger, Run
from sfumato.algorithms.dp_sgd import dp_sgd
from sfumato.cli import config as config_module
from sfumato.cli import method
from tests.cli.conftest import add, edit, files, write_csv

Sfumato = Callable[..., Any]


def trained(sfumato: Sfumato, config: Path, *options: str) -> dict[str, Any]:
    result = sfumato("train", config, "--json", *options)
    assert result.status == 0, result.err
    found: dict[str, Any] = json.loads(result.out)
    return found


def answers(config: Path) -> int:
    with Ledger(config.parent / "ledger.db") as ledger:
        return sum(line.answers for line in ledger.account("flowers").statement().asked)


def test_a_training_from_csv(sfumato: Sfumato, config: Path) -> None:
    found = trained(sfumato, config)
    assert found["before"]["test_accuracy"] < 0.9 < found["metrics"]["test_accuracy"]
    assert found["epsilon"] == pytest.approx(3.0, abs=1e-3)
    assert found["epsilon"] <= 3.0
    assert found["private"] is True
    assert (found["steps_taken"], found["steps_lost"], found["steps_short"]) == (12, 0, 0)
    run = Run.load(config.parent / "runs" / "a")
    assert run.steps_taken == 12
    assert run.statement["dataset"] == "flowers"
    assert run.config["parameters"] == 12
    assert "What is promised" in run.statement_text
    assert answers(config) == 12


def test_labels_may_be_text(sfumato: Sfumato, config: Path) -> None:
    names = {"0": "setosa", "1": "versicolor", "2": "virginica"}
    for path in config.parent.glob("*.csv"):
        header, *rows = path.read_text().splitlines()
        parts = [row.rsplit(",", 1) for row in rows]
        path.write_text("\n".join([header, *(f"{x},{names[k.removesuffix('.0')]}" for x, k in parts)]) + "\n")
    told = config.read_text()
    config.write_text(told.replace('label = "kind"', 'label = "kind"\nclasses = ["setosa", "versicolor", "virginica"]'))
    assert trained(sfumato, config)["metrics"]["test_accuracy"] > 0.9
    config.write_text(told.replace('label = "kind"', 'label = "kind"\nclasses = ["setosa", "virginica"]'))
    refused = sfumato("train", config, "--dry-run")
    assert refused.status == 2
    assert "must be 3 different labels" in refused.err


def test_what_the_dry_run_says_is_what_is_done(sfumato: Sfumato, config: Path) -> None:
    before = files(config.parent)
    plan = trained(sfumato, config, "--dry-run")
    assert files(config.parent) == before
    assert (plan["parameters"], plan["batch_size"], plan["steps"]) == (12, 100.0, 12)
    assert plan["features"] == ["a", "b", "c"]
    done = trained(sfumato, config)
    assert done["noise_multiplier"] == plan["noise_multiplier"]
    assert done["epsilon"] == plan["epsilon"]
    written = {str(config.parent / name) for name in files(config.parent)} - {str(config.parent / n) for n in before}
    locks = {name for name in written if Path(name).name.startswith(".")}
    assert written - locks == {*plan["would_write"], plan["ledger"]}

    # The ledger has room for the first one, which then goes on; another one is not told that it could begin.
    assert plan["fits_the_ledger"] is True
    assert trained(sfumato, config, "--dry-run")["fits_the_ledger"] is None
    another = config.with_name("another.toml")
    another.write_text(config.read_text().replace("runs/a", "runs/b"))
    assert trained(sfumato, another, "--dry-run")["fits_the_ledger"] is False


def test_a_dry_run_says_how_long_and_how_large(sfumato: Sfumato, config: Path) -> None:
    plan = trained(sfumato, config, "--dry-run")
    assert plan["seconds_estimate"] == pytest.approx(12 * plan["seconds_per_step"], rel=0.02)
    assert plan["seconds_per_step"] > 0
    edit(config, "size = 300", "size = 30_000_000")
    edit(config, "delta = 1e-4", "delta = 1e-9")
    larger = trained(sfumato, config, "--dry-run")
    rows = 30_000_000 * 3 * 4 / 2**20  # float32
    assert rows <= larger["memory_mb_estimate"] - plan["memory_mb_estimate"] <= 3 * rows


def test_a_dry_run_changes_nothing_of_the_training(sfumato: Sfumato, config: Path) -> None:
    """The steps that are timed are those of a copy: what is prepared afterwards starts as ever."""
    from sfumato.cli.config import load_config
    from sfumato.cli.estimates import estimates
    from sfumato.cli.job import prepare

    job = prepare(load_config(config))
    before = {name: p.clone() for name, p in job.objective.parameters().items()}
    estimates(job)
    assert all(bool((p == before[name]).all()) for name, p in job.objective.parameters().items())
    assert not (config.parent / "ledger.db").exists()


def test_a_dry_run_reads_no_private_value(sfumato: Sfumato, config: Path) -> None:
    (config.parent / "private.csv").write_text("a,b,c,kind\nthese,are,no,numbers\n")
    result = sfumato("train", config, "--dry-run")
    assert result.status == 0, result.err
    assert "noise multiplier" in result.out
    refused = sfumato("train", config)
    assert refused.status == 2
    assert "'a'" in refused.err
    assert not (config.parent / "ledger.db").exists()


def test_an_interrupted_training_goes_on(sfumato: Sfumato, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    @wraps(dp_sgd)
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return dp_sgd(*args, **kwargs)

    monkeypatch.setattr(method, "dp_sgd", interrupted)
    result = sfumato("train", config)
    assert result.status == 130
    assert (
        result.err
        == "sfumato: Interrupted; what was answered until now stays charged, and the same command goes on from there.\n"
    )
    assert (config.parent / "runs/a/checkpoint.pt").exists()
    monkeypatch.undo()

    assert sfumato("train", config, "--no-resume").status == 2
    edit(config, "momentum = 0.5", "momentum = 0.6")
    changed = sfumato("train", config)
    assert changed.status == 2
    assert "momentum" in changed.err
    edit(config, "momentum = 0.6", "momentum = 0.5")

    found = trained(sfumato, config)
    assert (found["steps_taken"] + found["steps_short"], found["steps_short"]) == (12, found["steps_lost"])
    assert found["steps_lost"] == 0
    assert answers(config) == 12


def test_a_finished_training_is_not_paid_twice(sfumato: Sfumato, config: Path) -> None:
    first = trained(sfumato, config)
    again = trained(sfumato, config)
    assert again["metrics"] == first["metrics"]
    assert answers(config) == 12


def test_a_second_training_needs_budget(sfumato: Sfumato, config: Path) -> None:
    edit(config, "epsilon = 3.0", "epsilon = 3.0\nbudget = 6.0")
    trained(sfumato, config)
    edit(config, "runs/a", "runs/b")
    trained(sfumato, config)
    edit(config, "runs/b", "runs/c")
    before = files(config.parent)
    refused = sfumato("train", config)
    assert refused.status == 2
    assert "epsilon" in refused.err
    assert files(config.parent) == before
    assert answers(config) == 24


def test_one_huge_private_label_is_not_warned_of(sfumato: Sfumato, config: Path) -> None:
    """Warnings are errors here, and would tell of a row elsewhere; its gradient is clipped as any other."""
    with (config.parent / "private.csv").open("a") as file:
        file.write("1,1,1,1e300\n")
    edit(config, "outputs = 3", "outputs = 1")
    edit(config, "steps = 12", 'steps = 12\nloss = "squared-error"')
    result = sfumato("train", config, "--json")
    assert (result.status, result.err) == (0, "")


def test_a_warm_start_from_npz_with_users_and_the_other_options(sfumato: Sfumato, config: Path) -> None:
    folder = config.parent
    tables = {}
    for name in ("private", "public", "test"):
        values = np.loadtxt(folder / f"{name}.csv", delimiter=",", skiprows=1)
        if name == "public":
            values = values[:, [1, 2, 0, 3]]  # its columns are in another order
        tables[name] = (values[:, :3], values[:, 3])
    (x, y), (xp, yp), (xt, yt) = tables["private"], tables["public"], tables["test"]
    np.savez(
        folder / "all.npz",
        x_train=x,
        y_train=y,
        x_test=xt,
        y_test=yt,
        x_public=xp,
        y_public=yp,
        who=np.arange(len(x)) // 2,
    )
    for name in ("private", "public", "test"):
        edit(config, f'"{name}.csv"', '"all.npz"')
    edit(config, 'label = "kind"', 'users = "who"\nrecords_per_user = 2')
    edit(config, "size = 300", "size = 150")
    edit(config, "range = [-1, 3]", 'range = "public"')
    edit(config, 'kind = "linear"', 'kind = "mlp"\nhidden = [8]')
    edit(
        config,
        "batch_size = 100\nlearning_rate = 4.0\nmomentum = 0.5",
        'batch_size = 60\noptimizer = "adamw"\nlearning_rate = 0.01\nreserve = 3',
    )
    add(config, '[warmup]\nsteps = 60\noptimizer = "adamw"\nlearning_rate = 0.02')
    found = trained(sfumato, config)
    assert found["metrics"]["test_accuracy"] > 0.8
    assert Run.load(folder / "runs/a").statement["unit"] == "user"


def test_images_squared_error_and_your_own_module(sfumato: Sfumato, config: Path) -> None:
    folder = config.parent
    rng = np.random.default_rng(0)
    x = rng.random((60, 1, 16, 16))
    np.savez(folder / "images.npz", X=x, y=rng.integers(0, 3, 60))
    base = config.read_text()
    for old, new in (
        ('"private.csv"', '"images.npz"'),
        ('public = "public.csv"\ntest = "test.csv"\nlabel = "kind"\n', ""),
        ("size = 300", "size = 60"),
        ("batch_size = 100", "batch_size = 20"),
        ("delta = 1e-4", "delta = 1e-3"),
        ("steps = 12", "steps = 2"),
        ('kind = "linear"', 'kind = "cnn"\nshape = [1, 16, 16]'),
    ):
        edit(config, old, new)
    assert trained(sfumato, config)["steps_taken"] == 2

    (folder / "my_net_of_this_test.py").write_text(
        "from torch import nn\n"
        "def net(inputs, outputs, width=4):\n"
        "    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))\n"
        "def mixes(inputs, outputs):\n"
        "    return nn.Sequential(nn.BatchNorm1d(inputs), nn.Linear(inputs, outputs))\n"
    )
    config.write_text(base)
    edit(config, 'kind = "linear"', 'kind = "my_net_of_this_test:net"\noptions = {width = 5}')
    edit(config, "outputs = 3", "outputs = 1")
    edit(config, "steps = 12", 'steps = 2\nloss = "squared-error"')
    for old, new in (("runs/a", "runs/b"), ("ledger.db", "other.db")):
        edit(config, old, new)
    assert trained(sfumato, config, "--dry-run")["parameters"] == 26
    assert "test_loss" in trained(sfumato, config)["metrics"]

    config.write_text(base)
    edit(config, 'kind = "linear"', 'kind = "my_net_of_this_test:mixes"')
    edit(config, "ledger.db", "third.db")
    refused = sfumato("train", config)
    assert refused.status == 2
    assert not (folder / "third.db").exists()


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("steps = 12", "step = 12", "did you mean 'steps'"),
        ("[training]", "[trainings]", "trainings"),
        ("[model]", "[modle]", "did you mean 'model'"),
        ("steps = 12", "", "'steps'"),
        ("steps = 12", "steps = 0", "steps=0"),
        ("steps = 12", 'steps = "12"', "steps='12'"),
        ("steps = 12", "steps = 1.5", "steps=1.5"),
        ("steps = 12", "steps = true", "steps=True"),
        ("steps = 12", "steps = = 12", "TOML"),
        ("batch_size = 100", "batch_size = 400", "batch_size=400"),
        ("batch_size = 100", "", "batch_size"),
        ("momentum = 0.5", "momentum = 1.0", "momentum"),
        ("momentum = 0.5", "clip = 0", "clip=0"),
        ("momentum = 0.5", "clip = inf", "clip=inf"),
        ("learning_rate = 4.0", "learning_rate = -1", "learning_rate"),
        ("momentum = 0.5", 'optimizer = "adam"', "optimizer='adam'"),
        ("momentum = 0.5", 'method = "sgd"', "method='sgd'"),
        ("momentum = 0.5", 'sampling = "fixed"', "adjacency"),
        ("momentum = 0.5", "reserve = -1", "reserve"),
        ("momentum = 0.5", 'loss = "squared-error"', "outputs=3"),
        ("epsilon = 3.0", "epsilon = 0", "epsilon=0"),
        ("epsilon = 3.0", "epsilon = nan", "epsilon=nan"),
        ("epsilon = 3.0", "epsilon = 3.0\nbudget = 2", "budget=2"),
        ("epsilon = 3.0", 'epsilon = 3.0\nadjacency = "both"', "adjacency='both'"),
        ("epsilon = 3.0", 'epsilon = 3.0\nadjacency = "replace-one"', "size=300"),
        ("delta = 1e-4", "delta = 0.01", "delta=0.01"),
        ("size = 300", "", "'size'"),
        ("size = 300", "size = -3", "size=-3"),
        ('label = "kind"', 'label = "sort"', "'sort'"),
        ('label = "kind"', "", "label"),
        ('label = "kind"', 'label = "kind"\nusers = "nobody"', "'nobody'"),
        ('label = "kind"', 'label = "kind"\nunit = "user"', "users"),
        ("range = [-1, 3]", "range = [1]", "range=[1]"),
        ("range = [-1, 3]", "range = [4, -4]", "lower"),
        ("range = [-1, 3]", 'range = "private"', "range='private'"),
        ("range = [-1, 3]", "lower = 0", "upper"),
        ("range = [-1, 3]", "lower = [0, 0]\nupper = 1", "lower"),
        ("outputs = 3", "outputs = 2", "outputs=2"),
        ("outputs = 3", "outputs = 1", "outputs=1"),
        ('kind = "linear"', 'kind = "liner"', "kind='liner'"),
        ('kind = "linear"', 'kind = "cnn"', "shape"),
        ('kind = "linear"', 'kind = "linear"\nshape = [2, 2]', "shape=[2, 2]"),
        ('kind = "linear"', 'kind = "no_such_module:net"', "no_such_module"),
        ('kind = "linear"', 'kind = "torch.nn:ReLU"', "kind='torch.nn:ReLU'"),
        ('kind = "linear"', 'kind = "mlp"\nhidden = []', "hidden"),
        ("momentum = 0.5", 'method = "dope-sdg"', "did you mean 'dope-sgd'"),
        ("momentum = 0.5", "method = []", "method=[]"),
        ("momentum = 0.5", 'method = ["dope-sgd", "dope-sgd"]', "twice"),
        ("momentum = 0.5", 'method = ["dope-sgd", "shrunk-origin"]', "two origins"),
        ("momentum = 0.5", 'method = "mirror-descent"', "decay_steps"),
        ("momentum = 0.5", 'clip = "outo"', "clip='outo'"),
        ("momentum = 0.5", "ema = 1", "ema=1"),
        ("momentum = 0.5", "keep_last = -1", "keep_last=-1"),
        ("momentum = 0.5", "views = 4", "views=4"),
        ("momentum = 0.5", "crop = 2", "crop"),
        ("batch_size = 100", "batch_size = 331\nextended = true", "batch_size=331"),
        ("batch_size = 100", "batch_size = 5\nextended = true", "batch_size=5"),
        ("batch_size = 100", 'batch_size = 300\nsampling = "full"\nextended = true', "batch_size=300"),
        ("batch_size = 100", "extended = true", "batch_size is missing"),
        ("[training]", "[warmup]\n[training]", "'steps'"),
        ("[training]", "[warmup]\nsteps = 5\nadaptive = true\n[training]", "sam_radius"),
        ("[training]", '[warmup]\nsteps = 5\nmomentum = 0.5\noptimizer = "adamw"\n[training]', "momentum"),
        ("[training]", "[warmup]\nsteps = 5\nflip = true\n[training]", "[warmup] flip"),
        ("[training]", "[warmup]\nsteps = 5\nlearning_rate = 1e30\n[training]", "diverge"),
        ('"private.csv"', '"gone.csv"', "gone.csv"),
        ('"test.csv"', '"test.txt"', "test.txt"),
        ('"ledger.db"', '"no/such/folder/ledger.db"', "ledger.db"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(
    sfumato: Sfumato, config: Path, old: str, new: str, named: str
) -> None:
    (config.parent / "test.txt").write_text("")
    edit(config, old, new)
    before = files(config.parent)
    result = sfumato("train", config)
    assert result.status == 2, result.out
    assert result.out == ""
    assert result.err.count("\n") == 1
    assert named in result.err
    assert files(config.parent) == before


def test_private_cells_are_never_quoted(sfumato: Sfumato, config: Path) -> None:
    private = config.parent / "private.csv"
    lines = private.read_text().splitlines()
    for bad in ("0.5,0.5,48151623,9", "0.5,0.5,0.5,48151623", "0.5,x48151623,0.5,1", "48151623"):
        private.write_text("\n".join([*lines, bad]) + "\n")
        result = sfumato("train", config)
        assert result.status == 2
        assert "48151623" not in result.err
        assert not (config.parent / "ledger.db").exists()


def test_from_the_shell(config: Path) -> None:
    write_csv(config.parent / "private.csv", 280, 5)
    command = [sys.executable, "-m", "sfumato.cli.main", "train", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "test accuracy" in done.stdout


@pytest.mark.parametrize(
    ("sent", "control_c"),
    [(signal.SIGINT, signal.SIG_DFL), (signal.SIGTERM, signal.SIG_DFL), (signal.SIGTERM, signal.SIG_IGN)],
)
def test_control_c_keeps_the_last_step(
    sfumato: Sfumato, config: Path, sent: signal.Signals, control_c: signal.Handlers
) -> None:
    """And so does SIGTERM, by which schedulers end a program; also one that a script put into the background."""
    edit(config, "steps = 12", "steps = 20000")
    process = subprocess.Popen(
        [sys.executable, "-m", "sfumato.cli.main", "train", str(config)],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, control_c),  # ignored where tests run in the background
    )
    try:
        deadline = time.monotonic() + 120
        while not (config.parent / "runs/a/checkpoint.pt").exists() and process.poll() is None:
            assert time.monotonic() < deadline, "the first step takes too long"
            time.sleep(0.1)
        process.send_signal(sent)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert err.count("\n") == 1
    plan = trained(sfumato, config, "--dry-run")
    assert plan["continues"] is True


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["in front", "in the background"])
def control_c(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a shell leaves of Ctrl-C."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


class Dropped:
    """A signal where Python drops what its handler raises."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.usefixtures("control_c")
def test_sigterm_in_a_destructor_ends_the_training_after_the_step(
    sfumato: Sfumato, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    @wraps(dp_sgd)
    def method_(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 6:
            Dropped()
        return dp_sgd(*args, **kwargs)

    monkeypatch.setattr(method, "dp_sgd", method_)
    result = sfumato("train", config)
    assert (result.status, len(calls), answers(config)) == (130, 6, 6)
    monkeypatch.undo()
    assert trained(sfumato, config)["steps_lost"] == 0


@pytest.mark.usefixtures("control_c")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_sigterm_that_was_dropped_before_the_training_ends_it_after_a_step(
    sfumato: Sfumato, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_config(path: Path) -> Any:
        Dropped()
        return loaded(path)

    loaded = config_module.load_config
    monkeypatch.setattr(config_module, "load_config", load_config)
    assert sfumato("train", config).status == 130
    assert answers(config) == 1
    monkeypatch.undo()
    assert trained(sfumato, config)["steps_lost"] == 0


@pytest.mark.usefixtures("control_c")
def test_a_second_sigterm_does_not_wait(sfumato: Sfumato, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @wraps(dp_sgd)
    def hang(*_: Any, **__: Any) -> Any:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        raise AssertionError("not interrupted")

    monkeypatch.setattr(method, "dp_sgd", hang)
    assert sfumato("train", config).status == 130
    assert answers(config) == 0


# ------------------------------------------------------------------------------------------------ a second training


def second(config: Path, **changes: str) -> Path:
    """The same config into another folder, with changed lines."""
    path = config.with_name("second.toml")
    text = config.read_text().replace('out = "runs/a"', 'out = "runs/b"')
    for old, new in changes.items():
        text = re.sub(rf"^{old} = .*$", f"{old} = {new}", text, flags=re.MULTILINE)
    path.write_text(text)
    return path


def test_without_a_budget_an_account_is_opened_as_it_is(sfumato: Sfumato, config: Path) -> None:
    edit(config, "epsilon = 3.0", "epsilon = 3.0\nbudget = 9.0")
    trained(sfumato, config)
    edit(config, "\nbudget = 9.0", "")
    other = second(config, epsilon="1.0")
    plan = trained(sfumato, other, "--dry-run")
    assert plan["fits_the_ledger"] is True
    assert (plan["epsilon"] < 1.001, plan["promise_afterwards"]) == (True, 9.0)  # of both together, the whole budget
    assert trained(sfumato, other)["epsilon"] == 9.0


def test_a_dry_run_finds_what_the_ledger_will_refuse(sfumato: Sfumato, config: Path) -> None:
    edit(config, "epsilon = 3.0", "epsilon = 3.0\nbudget = 4.0")
    trained(sfumato, config)
    plan = trained(sfumato, second(config, epsilon="3.9"), "--dry-run")
    assert (plan["fits_the_ledger"], plan["promise_afterwards"]) == (False, None)
    assert re.search(r"epsilon=3\.9 does not fit .* about [\d.]+ % of its budget of 4: lower it", plan["warning"])
    for changes in ({"budget": "5.0"}, {"delta": "1e-6"}):
        messages = {sfumato("train", second(config, **changes), *dry).err for dry in ((), ("--dry-run",))}
        assert all(next(iter(changes)) in message for message in messages), messages


def test_a_finished_training_says_that_nothing_was_asked(sfumato: Sfumato, config: Path) -> None:
    first = trained(sfumato, config)
    result = sfumato("train", config)
    assert result.status == 0
    assert "nothing was asked or charged now" in " ".join(result.out.split())
    assert trained(sfumato, config)["metrics"] == first["metrics"]


def test_names_are_shown_with_their_brackets(sfumato: Sfumato, config: Path) -> None:
    text = re.sub(r'^name = ".*"$', 'name = "clinic [bold]2024[/] [site]"', config.read_text(), flags=re.MULTILINE)
    config.write_text(text)
    assert "clinic [bold]2024[/] [site]" in sfumato("train", config, "--dry-run").out
