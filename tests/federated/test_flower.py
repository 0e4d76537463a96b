"""Flower as transport: in this process, in Flower's simulation, and as real server and client processes on loopback.

Needs flwr in an environment of its own: `make federated`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch

from sfumato import Clip, Objective
from sfumato.errors import InvalidArgument
from sfumato.federated import Clients, LocalClients, LocalWork, Request, UpdateMean
from sfumato.federated.flower import FlowerClients, client_app, enrol
from tests.federated import simulation
from tests.federated.test_door import exact

flwr = pytest.importorskip("flwr", reason="flwr is not installed here: make federated has an environment with it")

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict  # noqa: E402
from flwr.serverapp import Grid  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

ROOT = Path(__file__).parents[2]
Tamper = Callable[[Message], None]


class Here(Grid):
    """A grid whose nodes are in this process: Flower's own messages and client apps, without its network."""

    def __init__(self, app: Any, nodes: int, tamper: dict[int, Tamper] | None = None) -> None:
        self._app, self._nodes, self._tamper = app, nodes, tamper or {}
        self._replies: dict[str, list[Message]] = {}
        self.again: list[Message] = []
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1  # which Flower's runtimes set

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return range(100, 100 + self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        sent = []
        for message in messages:
            identity = str(uuid4())
            message.metadata.__dict__["_message_id"] = identity
            number = message.metadata.dst_node_id - 100
            config = {"partition-id": number, "num-partitions": self._nodes}
            context = Context(run_id=1, node_id=number + 100, node_config=config, state=RecordDict(), run_config={})
            reply = self._app(message, context)
            self._tamper.get(number, lambda _: None)(reply)
            self._replies[identity] = [reply]
            sent.append(identity)
        return sent

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        found = [reply for identity in message_ids for reply in self._replies.pop(identity, [])]
        found += self.again
        self.again = found[:1]  # the first of all comes once more, in every later pull
        return found


def app() -> Any:
    return client_app(simulation.user)


def here(tamper: dict[int, Tamper] | None = None, nodes: int = 6) -> FlowerClients:
    grid = Here(app(), nodes, tamper)
    return FlowerClients(grid, grid.get_node_ids(), seconds=60.0, poll=0.01)


def local(objective: Objective, kept: Iterable[int] = range(6)) -> LocalClients:
    parts = [simulation.rows(number) for number in kept]
    x, y = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    return LocalClients(objective, (x, y), [i // 12 for i in range(len(y))])


@pytest.mark.parametrize("work", [LocalWork(), LocalWork(epochs=2, batch_size=5, learning_rate=0.1)])
def test_flower_gives_the_sums_that_local_users_give(work: LocalWork) -> None:
    objective = simulation.objective()
    question = UpdateMean(objective.parameters(), Clip(0.3), work)
    torch.testing.assert_close(exact(here(), question), exact(local(objective), question), atol=1e-6, rtol=1e-5)


def test_who_needs_no_protection_says_so_and_others_are_private() -> None:
    def lies(reply: Message) -> None:
        reply.content["user"]["public"] = "yes"

    grid = Here(app(), 10, {9: lies})
    found = enrol(grid, at_least=10, seconds=60.0, poll=0.01)
    assert found.public == [100]
    assert found.private == list(range(101, 110))


def test_too_few_clients_are_an_error() -> None:
    with pytest.raises(InvalidArgument, match="at_least=7"):
        enrol(Here(app(), 6), at_least=7, seconds=0.05, poll=0.01)


def _update(change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> Tamper:
    def tamper(reply: Message) -> None:
        update = reply.content["update"]
        reply.content["update"] = ArrayRecord({n: Array(change(a.numpy())) for n, a in update.items()})

    return tamper


def _bytes(change: Callable[[bytes], bytes], **more: Any) -> Tamper:
    def tamper(reply: Message) -> None:
        for name, a in list(reply.content["update"].items()):
            fields = {"dtype": a.dtype, "shape": a.shape, "stype": a.stype, "data": change(a.data), **more}
            reply.content["update"][name] = Array(**fields)

    return tamper


def _huge(_: bytes) -> bytes:
    """A header that asks for a terabyte, and no data."""
    stream = BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": (1 << 38,)})
    return stream.getvalue()


def _objects(_: bytes) -> bytes:
    stream = BytesIO()
    np.save(stream, np.array([print], dtype=object), allow_pickle=True)
    return stream.getvalue()


SILENCED: dict[str, Tamper] = {
    "NaN": _update(lambda a: a * np.nan),
    "another shape": _update(lambda a: a[..., :1]),
    "whole numbers": _update(lambda a: a.astype(np.int64)),
    "random bytes": _bytes(lambda _: os.urandom(200)),
    "no bytes": _bytes(lambda _: b""),
    "cut short": _bytes(lambda data: data[:-3]),
    "a header that lies": _bytes(_huge),
    "a pickle": _bytes(_objects),
    "megabytes": _bytes(lambda data: data + bytes(10_000_000)),
    "another format": _bytes(lambda data: data, stype="pickle"),
    "nothing": lambda reply: reply.content.clear(),
}


@pytest.mark.parametrize("attack", SILENCED)
def test_whatever_is_no_answer_counts_as_zero(attack: str) -> None:
    objective = simulation.objective()
    question = UpdateMean(objective.parameters(), Clip(0.3))
    expected = exact(local(objective, [0, 1, 2, 4, 5]), question)
    found = exact(here({3: SILENCED[attack]}), question)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_a_reply_of_another_round_is_dropped() -> None:
    def late(reply: Message) -> None:
        reply.metadata.__dict__["_group_id"] = "0" * 32

    objective = simulation.objective()
    question = UpdateMean(objective.parameters(), Clip(0.3))
    expected = exact(local(objective, [0, 1, 2, 4, 5]), question)
    torch.testing.assert_close(exact(here({3: late}), question), expected, atol=1e-6, rtol=1e-5)


def test_one_message_that_flower_cannot_read_does_not_stop_the_others() -> None:
    class Stumbling(Here):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            wanted = list(message_ids)
            if any(m.metadata.src_node_id == 103 for i in wanted for m in self._replies.get(i, [])):
                raise ValueError("cannot be inflated")
            return super().pull_messages(wanted)

    objective = simulation.objective()
    question = UpdateMean(objective.parameters(), Clip(0.3))
    grid = Stumbling(app(), 6)
    clients: Clients = FlowerClients(grid, grid.get_node_ids(), seconds=60.0, poll=0.01)
    expected = exact(local(objective, [0, 1, 2, 4, 5]), question)
    torch.testing.assert_close(exact(clients, question), expected, atol=1e-6, rtol=1e-5)


def test_a_client_sends_its_update_and_nothing_else() -> None:
    grid = Here(app(), 2)
    clients = FlowerClients(grid, grid.get_node_ids(), seconds=60.0, poll=0.01)
    next(clients.collect(Request(params=simulation.objective().parameters()), [100]))
    reply = grid.again[0]
    assert set(reply.content) == {"update"}
    assert set(reply.content["update"]) == {"weight", "bias"}


# ------------------------------------------------------------------------------------------------ secure aggregation


def test_flowers_masks_come_from_32_bits() -> None:
    """Why secure aggregation is refused: keys of 256 bits that fold to the same 32 give the same mask, so a server can
    try them all. When this fails, Flower has other masks: look at docs/federated.md again."""
    utils = pytest.importorskip("flwr.common.secure_aggregation.secaggplus_utils")
    key, other = bytes(range(32)), bytes(range(4, 32)) + bytes(range(4))
    masks = [utils.pseudo_rand_gen(k, 1 << 24, [(50,)])[0] for k in (key, other)]
    assert key != other
    assert np.array_equal(masks[0], masks[1])


def test_secure_aggregation_is_refused() -> None:
    from flwr.client.mod import secaggplus_mod

    with pytest.raises(InvalidArgument, match="32-bit"):
        client_app(simulation.user, mods=[secaggplus_mod])


# ------------------------------------------------------------------------------------------------ Flower's runtimes


def test_in_flowers_simulation_with_hostile_clients(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    environment = {**os.environ, "FLWR_HOME": str(tmp_path), "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": str(ROOT), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.federated.simulation", str(out)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert out.exists(), done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert (found["private"], found["public"]) == (8, 2)
    assert found["rounds"] == simulation.ROUNDS
    assert found["finite"]
    assert 0 < found["epsilon"] <= 8.0
    assert found["test_accuracy"] > 0.5, "of three classes"


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def _process(log: Path, environment: dict[str, str], *command: str) -> Iterator[None]:
    with log.open("w") as file:
        started = subprocess.Popen(
            [str(Path(sys.executable).parent / command[0]), *command[1:]], env=environment, stdout=file, stderr=file
        )
        try:
            yield
        finally:
            started.terminate()
            try:
                started.wait(20)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


def _until_open(port: int, log: Path) -> None:
    for _ in range(600):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError(log.read_text()[-2000:])


def test_as_real_processes_on_loopback(tmp_path: Path) -> None:
    """A SuperLink, two SuperNodes and the app of examples/federated, by the commands of docs/federated.md."""
    port, out = _free_port(), tmp_path / "out"
    address = f"127.0.0.1:{port}"
    (tmp_path / "config.toml").write_text(
        f'[superlink]\ndefault = "loopback"\n[superlink.loopback]\naddress = "{address}"\ninsecure = true\n'
    )
    here = str(Path(sys.executable).parent)
    environment = {**os.environ, "FLWR_HOME": str(tmp_path), "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{here}{os.pathsep}{environment['PATH']}"
    link = ("flower-superlink", "--insecure", "--port", str(port), "--disable-runtime-dependency-installation")

    def node(number: int) -> tuple[str, ...]:
        config = f"partition-id={number} num-partitions=2"
        where = ("--insecure", "--superlink", address, "--port", str(_free_port()))
        return ("flower-supernode", *where, "--node-config", config)

    with _process(tmp_path / "link.log", environment, *link):
        _until_open(port, tmp_path / "link.log")
        with (
            _process(tmp_path / "node0.log", environment, *node(0)),
            _process(tmp_path / "node1.log", environment, *node(1)),
        ):
            config = f'rounds=2 declared-users=4 users-per-round=2.0 seconds=240.0 delta=0.01 out="{out}"'
            run = [f"{here}/flwr", "run", "examples/federated", "loopback", "--stream", "--run-config", config]
            done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
            for _ in range(100):  # the stream may end a moment before the server app does
                if (out / "run" / "statement.txt").exists():
                    break
                time.sleep(0.2)
    assert (out / "run" / "run.json").exists(), done.stdout[-3000:] + done.stderr[-1000:]
    found = json.loads((out / "run" / "run.json").read_text())
    assert found["steps_taken"] == 2
    assert 0 < found["statement"]["epsilon"] <= 8.0
    assert (out / "ledger.db").exists()
