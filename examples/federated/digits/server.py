"""The server: the door, the ledger, and the rounds."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from digits.task import objective, test_rows
from sfumato import Budget, Public
from sfumato.federated import LocalWork, PublicUsers, dope_sgd, dp_sgd, federate, private_users
from sfumato.federated.flower import FlowerClients, enrol

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    seconds, out = float(config["seconds"]), str(config["out"])
    if out:
        Path(out).mkdir(parents=True, exist_ok=True)
    enrolled = enrol(grid, at_least=int(config["at-least"]), seconds=seconds)
    private = private_users(
        FlowerClients(grid, enrolled.private, seconds=seconds),
        name="digits of many people",
        size=int(config["declared-users"]),
        ledger=str(Path(out) / "ledger.db") if out else None,
        budget=Budget(float(config["epsilon"]), float(config["delta"])),
    )
    public = PublicUsers(FlowerClients(grid, enrolled.public, seconds=seconds)) if enrolled.public else None
    work = LocalWork(epochs=int(config["epochs"]))
    method = dope_sgd if config["method"] == "dope-sgd" and public is not None else dp_sgd
    learned = objective()
    run = federate(
        learned,
        private=private,
        public=public,
        test=Public(test_rows()),
        method=partial(method, work=work, clip=float(config["clip"])),
        rounds=int(config["rounds"]),
        users_per_round=float(config["users-per-round"]),
        optimizer=partial(torch.optim.SGD, lr=float(config["learning-rate"])),
    )
    print(json.dumps({"public": len(enrolled.public), **run.metrics}))  # how many are private is private
    if out:
        run.save(Path(out) / "run")
