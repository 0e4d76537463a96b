"""The client: its own digits, and whether its owner needs protection."""

from __future__ import annotations

from typing import Any

from digits.task import PUBLIC_EVERY, objective, rows_of
from sfumato.federated.flower import User, client_app


def user(context: Any) -> User:
    number, clients = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
    return User(objective=objective(), rows=rows_of(number, clients), public=number % PUBLIC_EVERY == 0)


app = client_app(user)
