"""Flower (flwr 1.41 or later) as the way to reach clients: an adapter, which knows nothing of privacy.

The server's `FlowerClients` sends a message to the users whom the door drew and hands on what comes back. A Flower
`Strategy` is not used: it would draw the users itself, where here the sampler does that the ledger was charged for.
Flower needs other versions of some packages than Sfumato's command line has, so give it an environment of its own.
"""

from __future__ import annotations

import importlib
import io
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from sfumato.errors import InvalidArgument
from sfumato.federated.clients import Answers, Clients, Request
from sfumato.federated.work import LocalWork, update_of
from sfumato.objective import Batch, Objective

_WEIGHTS, _UPDATE, _ROUND, _USER = "weights", "update", "round", "user"
_HEADER = 4096  # bytes: more than the header of any array that numpy writes
_FLOATS = (np.float16, np.float32, np.float64)


def _flower(module: str) -> Any:
    try:
        return importlib.import_module(f"flwr.{module}")
    except ModuleNotFoundError as error:
        raise InvalidArgument(
            "flwr is missing: install flwr>=1.41 beside Sfumato, in an environment of its own."
        ) from (error)


# ------------------------------------------------------------------------------------------------ server


class FlowerClients(Clients):
    """The clients behind a Flower `Grid`; a user's address is its node.

    A round waits `seconds` for answers after the last user was asked. That clock is kept here, where answers arrive.
    """

    def __init__(self, grid: Any, nodes: Iterable[int], *, seconds: float = 60.0, poll: float = 0.2) -> None:
        if not (seconds > 0 and poll > 0):
            raise InvalidArgument(f"seconds={seconds} and poll={poll} must be positive.")
        self._grid, self._nodes, self._poll = grid, list(nodes), poll
        self._seconds = seconds

    @property
    def addresses(self) -> Sequence[int]:
        return self._nodes

    @property
    def directory(self) -> object:
        return self._grid

    def collect(self, request: Request, addresses: Sequence[int]) -> Iterator[Answers]:
        app = _flower("app")
        weights = app.ArrayRecord({n: app.Array(p.detach().cpu().numpy()) for n, p in request.params.items()})
        work = {"epochs": request.work.epochs, "learning_rate": request.work.learning_rate}
        if request.work.batch_size is not None:
            work["batch_size"] = request.work.batch_size
        told = app.ConfigRecord({_ROUND: request.round, **work})
        content = app.RecordDict({_WEIGHTS: weights, _ROUND: told})
        for node, reply in _replies(self._grid, content, "train", addresses, self._seconds, self._poll):
            yield Answers(str(reply.metadata.group_id), [node], _decoded(reply, request.params))


class Enrolled(NamedTuple):
    """Nodes by what their owners said of themselves."""

    private: list[int]
    public: list[int]


def enrol(grid: Any, *, at_least: int = 1, seconds: float = 60.0, poll: float = 0.2) -> Enrolled:
    """Wait for clients and ask who needs no protection. Whoever does not say so clearly is private.

    The number of private nodes is itself private: declare a size for `private_users`, do not take it from here.
    """
    app = _flower("app")
    ends = time.monotonic() + seconds
    nodes = sorted(grid.get_node_ids())
    while len(nodes) < at_least and time.monotonic() < ends:
        time.sleep(poll)
        nodes = sorted(grid.get_node_ids())
    if len(nodes) < at_least:
        raise InvalidArgument(f"at_least={at_least} clients did not come in {seconds:g} seconds: wait longer.")
    question = app.RecordDict({_USER: app.ConfigRecord({})})
    public = [n for n, reply in _replies(grid, question, "query", nodes, seconds, poll) if _says_public(reply)]
    return Enrolled([n for n in nodes if n not in set(public)], sorted(set(public)))


def _replies(
    grid: Any, content: Any, kind: str, nodes: Sequence[int], seconds: float, poll: float
) -> Iterator[tuple[int, Any]]:
    """What nodes answer in time; who sent it is known by the message that it answers, not by what it says."""
    message = _flower("app").Message
    waiting: dict[str, int] = {}
    for node in nodes:
        # One by one: of several at once Flower does not always tell which could not be sent. What came in time is kept
        # for as long again, until its turn to be pulled comes.
        sent = grid.push_messages([message(content, node, kind, ttl=2 * seconds, group_id=content_round(content))])
        waiting |= {str(identity): node for identity in sent if identity}
    ends, over = time.monotonic() + seconds, False  # from the last one on: nobody has less time because more are asked
    while waiting and not over:
        over = time.monotonic() >= ends  # everyone is looked at once more, however long the others took
        for identity in list(waiting):
            for reply in _pulled(grid, identity, waiting):
                node = waiting.pop(reply.metadata.reply_to_message_id, -1)
                if node != -1 and reply.has_content():
                    yield node, reply
        if waiting and not over:
            time.sleep(poll)


def _pulled(grid: Any, identity: str, waiting: dict[str, int]) -> list[Any]:
    """What has come in answer to one message; if Flower stumbles over it, that one is given up.

    Never of several messages at once: Flower then hands all of them out before it reads the first, and one that it
    cannot read takes the others with it.
    """
    try:
        return list(grid.pull_messages([identity]))
    except Exception:
        waiting.pop(identity, None)
        return []


def content_round(content: Any) -> str:
    """The round that a message is of; empty if of none."""
    told = content.get(_ROUND)
    return "" if told is None else str(told[_ROUND])


def _says_public(reply: Any) -> bool:
    try:
        return reply.content[_USER]["public"] is True
    except Exception:
        return False


def _decoded(reply: Any, params: Mapping[str, Tensor]) -> dict[str, Any]:
    """The tensors of a reply; empty, which counts as no answer, if it holds anything but what was asked for."""
    try:
        record = reply.content[_UPDATE]
        if set(record) != set(params):
            return {}
        return {name: _array(record[name], p).unsqueeze(0) for name, p in params.items()}
    except Exception:  # whatever a client sends, the round goes on without it
        return {}


def _array(array: Any, like: Tensor) -> Tensor:
    """An array whose size is checked before memory is taken for it: its header may say anything."""
    if array.stype != "numpy.ndarray" or len(array.data) > 8 * like.numel() + _HEADER:
        raise ValueError("no array of this size was asked for")
    stream = io.BytesIO(array.data)
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    if shape != tuple(like.shape) or dtype not in _FLOATS:
        raise ValueError("no array of this shape and type was asked for")
    return torch.from_numpy(np.ascontiguousarray(np.load(io.BytesIO(array.data), allow_pickle=False)))


# ------------------------------------------------------------------------------------------------ client


@dataclass(frozen=True, kw_only=True, eq=False)
class User:
    """Who lives on this client: what it minimises, its own rows, and whether it wants no protection."""

    objective: Objective
    rows: Batch
    public: bool = False


def client_app(user: Callable[[Any], User], *, mods: Sequence[Any] = ()) -> Any:
    """A Flower `ClientApp` that computes the update it is asked for and sends nothing else.

    `user` is given Flower's context, whose `node_config` says which client this is. It is called for every message.
    """
    for mod in mods:
        if "secagg" in getattr(mod, "__name__", ""):
            raise InvalidArgument(
                f"mods has {mod.__name__}, whose masks come from 32-bit seeds and whose sums carry no bounded weights: "
                "leave it out, and trust the server (docs/federated.md)."
            )
    app = _flower("clientapp").ClientApp(mods=list(mods))

    def train(message: Any, context: Any) -> Any:
        with _keeping_quiet():
            return _trained(message, user(context))

    def query(message: Any, context: Any) -> Any:
        flower = _flower("app")
        with _keeping_quiet():
            said = flower.ConfigRecord({"public": bool(user(context).public)})
        return flower.Message(flower.RecordDict({_USER: said}), reply_to=message)

    app.train()(train)
    app.query()(query)
    return app


@contextmanager
def _keeping_quiet() -> Iterator[None]:
    """Keeps the text of errors here: Flower sends it to the server, and it may quote the user's rows."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"The client failed with {type(error).__name__}; its own log says more.") from error


def _trained(message: Any, user: User) -> Any:
    flower = _flower("app")
    told = message.content[_ROUND]
    own = user.objective.parameters()
    device = next(iter(own.values())).device
    sent = message.content[_WEIGHTS]
    params = {name: torch.from_numpy(sent[name].numpy().copy()).to(device) for name in own}
    work = LocalWork(
        epochs=told["epochs"], batch_size=told.get("batch_size"), learning_rate=float(told["learning_rate"])
    )
    count = len(tree_flatten(user.rows)[0][0])
    update = update_of(user.objective, work, params, user.rows, torch.ones(count, device=device))
    arrays = flower.ArrayRecord({name: flower.Array(t.cpu().numpy()) for name, t in update.items()})
    return flower.Message(flower.RecordDict({_UPDATE: arrays}), reply_to=message)
