"""Several processes give what one gives: the same sums, one noise, one charge, equal weights. They fail together."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sfumato import Budget, Clip, GradientMean, Ledger, Objective, Private, Public, Run, cross_entropy, train
from sfumato.algorithms.dope_sgd import dope_sgd
from sfumato.distributed import Processes, ProcessLost
from sfumato.distributed.account import SharedAccount, SharedPlan
from sfumato.errors import BudgetExceeded, InvalidArgument, SfumatoError
from sfumato.gradients import Gradient
from sfumato.gradients.reference import per_example_gradients
from sfumato.privacy.ledger import Account
from sfumato.privacy.ledger_plan import Plan
from sfumato.privacy.noise import NotPrivateSeed
from sfumato.questions import Exact, GradientSum, Gram, Histogram, Joint, NoisyArgmin, NoisyMean, Sample, Sealed
from sfumato.selection.support import TopKHistogram
from tests.statistics import FALSE_ALARM, binomial_p, correlation_p, normal_p, smallest, variance_p

ROWS, INPUTS, CLASSES = 60, 5, 3
BUDGET = Budget(epsilon=8.0, delta=1e-4)
STEPS, BATCH, NOISE = 6, 20, 3.0
WIDTH = 40_000  # values of one answer, whose noise is looked at
ASKED = 100  # samples that are counted
WORLDS = (2, 4)
# What takes seconds to import is imported once, by the server that the processes are forked from.
PRELOADED = ["tests.test_distributed", "torch._dynamo", "sfumato.privacy.ledger_store", "sfumato.privacy.accounting"]

# ------------------------------------------------------------------------------------------------ processes


def run_processes(
    scenario: Callable[..., Any], count: int, folder: Path, *args: Any, timeout: float = 60.0
) -> list[Any]:
    """What `scenario(processes, *args)` returns in each; an error as (its class, its text); None of one that died."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    token = uuid.uuid4().hex
    todo = (scenario, count, folder, token, timeout, args)
    children = [context.Process(target=_child, args=(rank, *todo)) for rank in range(count)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
        assert child.exitcode is not None, "a process hangs"
    paths = [folder / f"{token}-{rank}" for rank in range(count)]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in paths]


def _child(
    rank: int, scenario: Callable[..., Any], count: int, folder: Path, token: str, timeout: float, args: tuple[Any, ...]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(1000 + rank)  # as programs do by mistake
    dist.init_process_group("gloo", init_method=f"file://{folder / token}", rank=rank, world_size=count)
    try:
        with Processes(timeout=timeout) as processes:
            result = scenario(processes, *args)
    except Exception as error:
        result = (type(error), str(error))
    torch.save(result, folder / f"{token}-{rank}")
    dist.destroy_process_group()


def failure(compute: Callable[[], Any]) -> tuple[type, str]:
    with pytest.raises(SfumatoError) as caught:
        compute()
    return caught.type, str(caught.value)


# ------------------------------------------------------------------------------------------------ parts


def data(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, INPUTS, generator=generator), torch.arange(rows) % CLASSES


def objective() -> Objective:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(INPUTS, 4), nn.Tanh(), nn.Linear(4, CLASSES))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator)
    return Objective(model, cross_entropy)


def door(processes: Processes | None, rows: Any = None, **options: Any) -> Private:
    mine = slice(None) if processes is None else processes.mine
    rows = tuple(t[mine] for t in data()) if rows is None else rows
    options = {"name": "people", "size": ROWS, "objective": objective(), "budget": BUDGET, **options}
    return Private(rows, processes=processes, **options)


def origin(params: Mapping[str, Tensor]) -> Gradient:
    return Gradient({name: 0.01 * torch.ones_like(p) for name, p in params.items()})


def features(batch: Any) -> Tensor:
    return batch[0]  # type: ignore[no-any-return]


def labels(batch: Any) -> Tensor:
    return batch[1]  # type: ignore[no-any-return]


def zeros(batch: Any) -> Tensor:
    return torch.zeros(len(batch[0]), WIDTH)


def flat(answer: Any) -> Tensor:
    if isinstance(answer, tuple):
        return torch.cat([flat(part) for part in answer])
    if isinstance(answer, Mapping):
        return torch.cat([t.double().reshape(-1) for t in answer.values()])
    return torch.as_tensor(answer).double().reshape(-1)


def questions() -> dict[str, Any]:
    params = objective().parameters()
    mean = NoisyMean(features, bound=1.0, width=INPUTS)
    return {
        "sum": GradientSum(params, Clip(0.5)),
        "around": GradientMean(params, Clip(0.5, origin=origin(params))),
        "mean": mean,
        "gram": Gram(features, bound=1.0, width=INPUTS),
        "histogram": Histogram(labels, bins=CLASSES),
        "argmin": NoisyArgmin(lambda batch: batch[0][:, :2].abs(), candidates=2, loss_bound=1.0),
        "joint": Joint((mean, GradientSum(params, Clip(0.5)))),
    }


def seeded_answers(processes: Processes | None) -> dict[str, Tensor]:
    """All questions, of everyone, with noise that repeats: it is the same whoever sums."""
    found = {}
    for name, question in questions().items():
        private = door(processes, seed=NotPrivateSeed(7))
        found[name] = flat(private.ask(question, noise=20.0, sampler=private.everyone()))
    users = np.arange(ROWS) // 2
    held = slice(None) if processes is None else processes.holds(users)
    rows = tuple(t[held] for t in data())
    size = len(set(users.tolist()))
    private = door(processes, rows, unit="user", users=users[held], size=size, seed=NotPrivateSeed(7))
    params = objective().parameters()
    found["users"] = flat(private.ask(GradientSum(params, Clip(0.5)), noise=20.0, sampler=private.everyone()))
    return found


class Witness(NoisyMean):
    """Remembers which units were sampled."""

    draws: ClassVar[bool] = False
    seen: ClassVar[list[Any]] = []

    def exact(self, sample: Sample) -> Exact:
        self.seen.append(sample.indices)  # type: ignore[attr-defined]
        return super().exact(sample)


class FailsInTwo(NoisyMean):
    """Fails in the process that holds the second row, with that row's text."""

    def exact(self, sample: Sample) -> Exact:
        for batch, _ in sample.parts():
            if bool((batch[0] == data()[0][1]).all(1).any()):
                raise ValueError(f"row {batch[0][0].tolist()}")
        return super().exact(sample)


class Whole(Sealed):
    @property
    def unit(self) -> float:
        return 1.0

    def run(self, sample: Sample, noisy: Callable[[Exact], Any]) -> Any:
        return noisy(torch.zeros(1))


def votes(batch: Any) -> Tensor:
    """Every row's uncertainty, and its bin."""
    return torch.stack([batch[0][:, 0].double(), torch.zeros(len(batch[0]), dtype=torch.float64)], 1)


# ------------------------------------------------------------------------------------------------ the same answers


def everything(processes: Processes) -> dict[str, Any]:
    found: dict[str, Any] = {"seeded": seeded_answers(processes)}

    private = door(processes, seed=None)
    question = NoisyMean(zeros, bound=1.0, width=WIDTH)
    found["noise"] = [private.ask(question, noise=50.0, sampler=private.everyone()) * ROWS for _ in range(2)]

    Witness.seen.clear()
    private = door(processes)
    sampler = private.poisson(0.3 * ROWS)
    private.plan((Witness, 20.0, sampler, ASKED))
    for _ in range(ASKED if processes.count == 2 else 1):
        private.ask(Witness(features, bound=1.0, width=INPUTS))
    found["sampled"] = list(Witness.seen)

    found["refused"] = refusals(processes)
    found["moved"] = moved(processes)
    return found


def refusals(processes: Processes) -> dict[str, tuple[type, str]]:
    private = door(processes)
    mean, everyone = NoisyMean(features, bound=1.0, width=INPUTS), private.everyone()
    found = {
        "costs too much": failure(lambda: private.plan((NoisyMean, 0.01, everyone, 5))),
        "fixed size": failure(lambda: private.plan((NoisyMean, 9.0, private.fixed(5), 1))),
        "sealed": failure(lambda: private.ask(Whole(), noise=9.0, sampler=everyone)),
        "top k": failure(lambda: private.ask(TopKHistogram(votes, 3, 10), noise=20.0, sampler=everyone)),
        "top k in a joint": failure(
            lambda: private.ask(Joint((mean, TopKHistogram(votes, 3, 10))), noise=20.0, sampler=everyone)
        ),
        "in one only": failure(
            lambda: private.ask(FailsInTwo(features, bound=1.0, width=INPUTS), noise=20.0, sampler=everyone)
        ),
        "same rows": failure(lambda: door(processes, data())),
        "a user in two": failure(
            lambda: door(processes, unit="user", users=np.arange(len(range(ROWS)[processes.mine])))
        ),
    }
    private.plan((NoisyMean, 20.0, everyone, 1))
    private.ask(mean)  # nobody is out of step after all these
    found["no answer left"] = failure(lambda: private.ask(mean))
    bounds = 1.0 + processes.rank
    found["different question"] = failure(
        lambda: private.ask(NoisyMean(features, bound=bounds, width=INPUTS), noise=20.0, sampler=everyone)
    )
    fresh = Processes()  # which compares the first question that is asked
    private = door(fresh)
    assert private.objective is not None
    with torch.no_grad():
        for p in private.objective.module.parameters():
            p += 0.01 * torch.randn(p.shape)
    question = GradientMean(private.objective.parameters(), Clip(1.0))
    found["different weights"] = failure(lambda: private.ask(question, noise=20.0, sampler=private.everyone()))
    return found


def moved(processes: Processes) -> list[float]:
    """How far the answer moves when one process's row goes, or becomes another, in units."""
    params = objective().parameters()
    clip = Clip(0.5, origin=origin(params))

    def asked(rows: Any, **options: Any) -> Tensor:
        private = door(processes, rows, seed=NotPrivateSeed(3), **options)
        return flat(private.ask(GradientSum(params, clip), noise=20.0, sampler=private.everyone()))

    mine = tuple(t[processes.mine].clone() for t in data())
    whole, found = asked(mine), []
    for rank in (0, processes.count - 1):
        for kind in ("gone", 1e6, math.nan):
            rows = tuple(t.clone() for t in mine)
            if rank == processes.rank and kind == "gone":
                rows = tuple(t[1:] for t in rows)
            elif rank == processes.rank:
                rows[0][0] = kind
            # Replacing one is removing one and adding another.
            found.append(float((asked(rows) - whole).norm()) / 0.5 / (1 if kind == "gone" else 2))
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("answers")
    return {count: run_processes(everything, count, folder) for count in WORLDS}


def clipped_by_hand() -> Tensor:
    target, (x, y) = objective(), data()
    gradients = per_example_gradients(target, target.parameters(), (x, y))
    whole = torch.cat([g.double().flatten(1) for g in gradients.values()], 1)
    return (whole * (0.5 / whole.norm(dim=1, keepdim=True)).clamp_max(1.0)).sum(0)


def test_any_number_of_processes_gives_the_same_sums(answers: dict[int, list[dict[str, Any]]]) -> None:
    alone = seeded_answers(None)
    for count, ranks in answers.items():
        for rank in ranks:
            for name, answer in rank["seeded"].items():
                assert torch.allclose(answer, alone[name], rtol=0, atol=2e-5), (count, name)
    # The noise of the seed is about as long as it should be, so that what is compared is not all noise; and a sum that
    # lacks one process, or counts it twice, would be found.
    exact = clipped_by_hand()
    left = alone["sum"] - exact
    assert variance_p(left, 20.0 * 0.5) > FALSE_ALARM
    assert float(exact.norm()) > 1000 * 2e-5


def test_all_processes_hear_the_same_noise_drawn_once(answers: dict[int, list[dict[str, Any]]]) -> None:
    for count, ranks in answers.items():
        first, second = ranks[0]["noise"]
        for rank in ranks[1:]:
            assert torch.equal(rank["noise"][0], first)
            assert torch.equal(rank["noise"][1], second)
        assert smallest([variance_p(first, 50.0), normal_p(second, 50.0), correlation_p(first, second)]) > FALSE_ALARM
        assert variance_p(first, 50.0 * math.sqrt(count)) < FALSE_ALARM  # noise in every process
        assert variance_p(first, 50.0 / math.sqrt(count)) < FALSE_ALARM  # each a share, counted in one


def test_units_join_at_the_planned_rate_independently_in_each_process(answers: dict[int, list[dict[str, Any]]]) -> None:
    held = ROWS // 2
    joined = np.zeros((2, ASKED, held))
    for rank, found in enumerate(answers[2]):
        assert len(found["sampled"]) == ASKED
        for time_, units in enumerate(found["sampled"]):
            joined[rank, time_, units] = 1
    per_unit = [binomial_p(int(n), ASKED, 0.3) for n in joined.sum(1).ravel()]
    assert smallest([*per_unit, binomial_p(int(joined.sum()), joined.size, 0.3)]) > FALSE_ALARM
    assert binomial_p(int(joined.sum()), joined.size, 0.3 / 2) < FALSE_ALARM
    assert correlation_p(joined[0] - 0.3, joined[1] - 0.3) > FALSE_ALARM


def test_all_processes_refuse_together_and_go_on(answers: dict[int, list[dict[str, Any]]]) -> None:
    expected = {
        "costs too much": (BudgetExceeded, "The plan costs"),
        "fixed size": (InvalidArgument, "use private.poisson"),
        "sealed": (InvalidArgument, "needs all rows in one process"),
        "top k": (InvalidArgument, "TopKHistogram compares rows with each other"),
        "top k in a joint": (InvalidArgument, "Joint compares rows with each other"),
        "in one only": (SfumatoError, "was charged and failed inside the door with ValueError"),
        "same rows": (InvalidArgument, "data is the same in two processes"),
        "a user in two": (InvalidArgument, "who would count twice"),
        "no answer left": (BudgetExceeded, "has no answer to 'NoisyMean' left"),
        "different question": (SfumatoError, "asked different questions"),
        "different weights": (SfumatoError, "ask at different weights"),
    }
    for ranks in answers.values():
        for rank in ranks:
            assert rank["refused"].keys() == expected.keys()
            for name, (kind, text) in rank["refused"].items():
                assert kind is expected[name][0], (name, kind, text)
                assert expected[name][1] in text, (name, text)
                assert text == ranks[0]["refused"][name][1]
                assert "row [" not in text  # the private text of the one that failed


def test_one_row_of_any_process_moves_the_answer_by_at_most_its_unit(answers: dict[int, list[dict[str, Any]]]) -> None:
    for ranks in answers.values():
        distances = ranks[-1]["moved"]
        assert len(distances) == 6
        assert max(distances) <= 1 + 1e-5
        assert max(distances) > 0.3  # rows do matter


# ------------------------------------------------------------------------------------------------ training


def trained(processes: Processes | None, folder: Path, **options: Any) -> Run:
    private = door(processes, ledger=folder / "ledger.db")
    assert private.objective is not None
    public = Public(data(12), objective=private.objective)  # no seed: every process would choose its own batches
    with torch.no_grad():
        for p in private.objective.module.parameters():
            p += 0.1 * torch.randn(p.shape)  # nor the same first weights
    defaults: dict[str, Any] = {
        "public": public,
        "steps": STEPS,
        "batch_size": BATCH,
        "noise": NOISE,
        "method": partial(dope_sgd, public_batch=6),
        "optimizer": partial(torch.optim.SGD, lr=0.2, momentum=0.9),
        "checkpoint": folder / "checkpoint",
        "keep_last": 2,
        "progress": False,
    }
    return train(private.objective.module, private=private, **(defaults | options))


def shared_training(processes: Processes, folder: Path) -> dict[str, Any]:
    run = trained(processes, folder)
    again = trained(processes, folder)  # asks nothing: it is finished
    kept = None if run.iterates is None else len(run.iterates)
    return {"weights": run.weights, "again": again.weights, "run": run.to_json(), "kept": kept}


def counted(folder: Path) -> list[int]:
    return [line.answers for line in Ledger(folder / "ledger.db").account("people").statement().asked]


def test_weights_are_bitwise_equal_and_the_ledger_is_charged_once(tmp_path: Path) -> None:
    (alone := tmp_path / "alone").mkdir()
    torch.manual_seed(0)
    one = trained(None, alone)
    for count in (2, 4):
        (folder := tmp_path / str(count)).mkdir()
        ranks = run_processes(shared_training, count, folder, folder)
        assert counted(folder) == counted(alone) == [STEPS]
        for rank in ranks:
            for name, weight in rank["weights"].items():
                assert torch.equal(weight, ranks[0]["weights"][name])
                assert torch.equal(weight, rank["again"][name])
            assert rank["run"]["statement"]["epsilon"] == one.statement["epsilon"]
            assert rank["run"]["config"]["processes"] == count
            assert rank["run"]["history"] == ranks[0]["run"]["history"]
        assert [rank["kept"] for rank in ranks] == [2] + [None] * (count - 1)
    assert "processes" not in one.config


def dies(processes: Processes, folder: Path, rank: int, step: int, moment: str) -> dict[str, Any]:
    """Kills one process in the middle of a step: before it asks, or after it was answered."""
    taken = 0

    @wraps(dope_sgd)
    def method(params: Any, public: Any, ask: Any, *, public_batch: int) -> Gradient:
        nonlocal taken
        taken += 1

        def last() -> None:
            if taken == step and processes.rank == rank:
                os.kill(os.getpid(), signal.SIGKILL)

        if moment == "before":
            last()
        update = ask(GradientMean(params, Clip(1.0)))
        last()
        return update  # type: ignore[no-any-return]

    start = time.monotonic()
    kind, text = failure(
        lambda: trained(processes, folder, method=partial(method, public_batch=6), keep_last=0, checkpoint_every=0.0)
    )
    return {
        "kind": kind,
        "text": text,
        "seconds": time.monotonic() - start,
        "again": failure(lambda: processes.total(1)),
    }


def finish(processes: Processes, folder: Path) -> dict[str, Any]:
    run = trained(processes, folder, keep_last=0)
    return {"weights": run.weights, "run": run.to_json()}


@pytest.mark.parametrize(("rank", "moment", "left"), [(1, "before", 2), (0, "after", 1)])
def test_a_killed_process_ends_the_others_and_others_resume(tmp_path: Path, rank: int, moment: str, left: int) -> None:
    count = 1 + left
    ranks = run_processes(dies, count, tmp_path, tmp_path, rank, 4, moment)
    assert ranks.pop(rank) is None
    for survivor in ranks:
        assert survivor["kind"] is ProcessLost
        assert "start all of them again to resume" in survivor["text"]
        assert survivor["again"] == (ProcessLost, survivor["text"])  # at once, without waiting
        assert survivor["seconds"] < 60  # the time limit of `run_processes`
    before = counted(tmp_path)
    assert before[0] >= (3 if moment == "before" else 4)  # what may have been answered is counted
    if rank == 0:
        ended = trained(None, tmp_path, keep_last=0).to_json()  # one process instead of two
    else:
        finished = run_processes(finish, 2, tmp_path, tmp_path)  # two instead of three
        ended = finished[0]["run"]
        for name, weight in finished[0]["weights"].items():
            assert torch.equal(weight, finished[1]["weights"][name])
    assert counted(tmp_path) == [STEPS]
    assert ended["steps_taken"] + ended["steps_lost"] == STEPS
    assert ended["steps_lost"] >= before[0] - 3  # three steps were whole
    assert ended["steps_taken"] >= 3


def interrupted(processes: Processes, folder: Path) -> str:
    """Ctrl-C in one process, in its third step."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    taken = 0

    @wraps(dope_sgd)
    def method(params: Any, public: Any, ask: Any, *, public_batch: int) -> Gradient:
        nonlocal taken
        taken += 1
        if taken == 3 and processes.rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return ask(GradientMean(params, Clip(1.0)))  # type: ignore[no-any-return]

    try:
        trained(processes, folder, method=partial(method, public_batch=6), keep_last=0)
    except KeyboardInterrupt:
        return f"interrupted in step {taken}"
    return "not interrupted"


def test_an_interrupt_of_one_process_ends_all_after_the_same_step(tmp_path: Path) -> None:
    assert run_processes(interrupted, 2, tmp_path, tmp_path) == ["interrupted in step 3"] * 2
    assert counted(tmp_path) == [3]
    ended = trained(None, tmp_path, keep_last=0)
    assert (ended.steps_taken, ended.steps_lost) == (STEPS, 0)


def waits(processes: Processes) -> Any:
    private = door(processes)
    if not processes.leads:
        time.sleep(4.0)
    return private.ask(NoisyMean(features, bound=1.0, width=INPUTS), noise=20.0, sampler=private.everyone())


def test_a_process_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    first, second = run_processes(waits, 2, tmp_path, timeout=1.0)
    assert first[0] is ProcessLost
    assert "timeout=1 s" in first[1]
    assert second[0] is ProcessLost


# ------------------------------------------------------------------------------------------------ one process, torchrun


def test_one_process_is_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone = Processes()
    assert (alone.rank, alone.count, alone.leads) == (0, 1, True)
    with_one, without = seeded_answers(alone), seeded_answers(None)
    assert all(torch.equal(with_one[name], without[name]) for name in without)
    with pytest.raises(InvalidArgument, match="timeout=0"):
        Processes(timeout=0)


def test_shares_cover_all_rows_once() -> None:
    users = np.array(["a", "b", "c", "a", "d", "b", "e"])
    shares = []
    for rank in range(3):
        processes = Processes(alone=True)
        processes.rank, processes.count = rank, 3
        shares.append((set(np.arange(7)[processes.mine].tolist()), processes.holds(users)))
    assert set.union(*(rows for rows, _ in shares)) == set(range(7))
    assert sum(len(rows) for rows, _ in shares) == 7
    assert (np.sum([mask for _, mask in shares], axis=0) == 1).all()
    assert all(len({rank for rank in range(3) if shares[rank][1][users == user].any()}) == 1 for user in users)


def script() -> str:
    page = (Path(__file__).parent.parent / "docs" / "distributed.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[0]


def _as_torchrun_does(rank: int, count: int, port: int, folder: Path) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in places.items()}
    os.environ |= {"MASTER_ADDR": "localhost", "GLOO_SOCKET_IFNAME": "lo", "FOLDER": str(folder)}
    torch.set_num_threads(1)
    sys.stdout = (folder / f"said-{rank}").open("w")
    exec(compile(script(), "script.py", "exec"), {})
    sys.stdout.flush()


def check_what_the_script_left(folder: Path, said: str) -> None:
    run = Run.load(folder / "run")
    assert run.config["processes"] == 2
    assert run.steps_taken == 20
    assert said.count("at epsilon") == 1  # one process speaks
    lines = Ledger(folder / "ledger.db").account("photos").statement().asked
    assert [line.answers for line in lines] == [20]


def test_the_script_of_the_docs(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    children = [context.Process(target=_as_torchrun_does, args=(rank, 2, port, tmp_path)) for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0]
    check_what_the_script_left(tmp_path, (tmp_path / "said-0").read_text() + (tmp_path / "said-1").read_text())


@pytest.mark.slow
def test_the_script_of_the_docs_under_torchrun(tmp_path: Path) -> None:
    (path := tmp_path / "script.py").write_text(script())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "FOLDER": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    check_what_the_script_left(tmp_path, done.stdout)


def test_the_benchmark_compares_turns_of_the_same_round() -> None:
    from benchmarks.distributed import summary

    base = [{"seconds": s, "cpu_seconds": s, "parameters": 10, "gpu": None} for s in (1.0, 4.0, 8.0)]
    twice = [turn | {"seconds": turn["seconds"] / 2, "cpu_seconds": turn["seconds"] * 1.25} for turn in base]
    row = summary("mlp", 2, 64, twice, base, 1)
    assert (row["speedup"], row["slowest"], row["fastest"], row["cpu_efficiency"]) == (2.0, 2.0, 2.0, 0.8)
    assert row["efficiency"] == 2.0 / min(2, os.cpu_count() or 1)


def test_shared_accounts_and_plans_have_all_that_is_public_of_one() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert public(Account) <= public(SharedAccount)
    assert public(Plan) <= public(SharedPlan)
