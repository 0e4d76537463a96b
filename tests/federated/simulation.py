"""A small federation in Flower, with clients that attack: run as a program in Flower's simulation, used by the tests.

python -m tests.federated.simulation OUT.json
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sfumato import Budget, Objective, Public, cross_entropy
from sfumato.federated import PublicUsers, dope_sgd, federate, private_users
from sfumato.federated.flower import FlowerClients, User, client_app, enrol

NODES, ROUNDS, PUBLIC = 10, 3, (0, 9)
HOSTILE = {1: "NaN", 2: "dies", 3: "another shape", 4: "no arrays"}
CENTRES = 3.0 * torch.eye(3, 8)


def objective() -> Objective:
    torch.manual_seed(0)
    return Objective(nn.Linear(8, 3), cross_entropy)


def rows(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(number)
    y = torch.arange(12) % 3
    return CENTRES[y] + torch.randn(12, 8, generator=draws), y


def user(context: Any) -> User:
    number = int(context.node_config["partition-id"])
    return User(objective=objective(), rows=rows(number), public=number in PUBLIC)


def attack(message: Any, context: Any, call_next: Any) -> Any:
    """A Flower mod: what some of the clients do to their own answers."""
    from flwr.app import Array, ArrayRecord

    reply = call_next(message, context)
    kind = HOSTILE.get(int(context.node_config["partition-id"]))
    if kind is None or "update" not in reply.content:
        return reply
    if kind == "dies":
        raise RuntimeError("this client dies in every round")
    update = reply.content["update"]
    if kind == "NaN":
        reply.content["update"] = ArrayRecord({n: Array(a.numpy() * float("nan")) for n, a in update.items()})
    elif kind == "another shape":
        reply.content["update"] = ArrayRecord({n: Array(a.numpy()[..., :1]) for n, a in update.items()})
    else:
        del reply.content["update"]
    return reply


def serve(grid: Any, seconds: float) -> dict[str, Any]:
    """All rounds, and what is to be looked at afterwards."""
    enrolled = enrol(grid, at_least=NODES, seconds=seconds)
    users = private_users(
        FlowerClients(grid, enrolled.private, seconds=seconds), name="users", size=NODES, budget=Budget(8.0, 1e-2)
    )
    learned = objective()
    run = federate(
        learned,
        private=users,
        public=PublicUsers(FlowerClients(grid, enrolled.public, seconds=seconds)),
        test=Public(rows(77)),
        method=partial(dope_sgd, clip=0.5),
        rounds=ROUNDS,
        users_per_round=6,
    )
    finite = all(bool(torch.isfinite(t).all()) for t in run.weights.values())
    found = {"private": len(enrolled.private), "public": len(enrolled.public), "finite": finite}
    return {**found, "rounds": run.steps_taken, "epsilon": run.statement["epsilon"], **run.metrics}


def main(out: Path) -> None:
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    server = ServerApp()
    server.main()(lambda grid, context: out.write_text(json.dumps(serve(grid, 240.0))) and None)
    run_simulation(
        server,
        client_app(user, mods=[attack]),
        num_supernodes=NODES,
        backend_config={
            "client_resources": {"num_cpus": 1},
            "init_args": {"num_cpus": 2, "include_dashboard": False},
        },
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
