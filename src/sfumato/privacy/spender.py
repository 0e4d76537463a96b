"""Who spends: written beside every reservation, so that a team can see whose it was."""

from __future__ import annotations

import getpass
import json
import os
import socket
from dataclasses import asdict, dataclass, replace
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Spender:
    """A person, a machine and a process, as they declared themselves; the database user is the server's own word."""

    user: str
    host: str = ""
    process: int = 0
    database_user: str | None = None

    @classmethod
    def here(cls, declared: str | None = None) -> Self:
        """This process; `declared` goes before the name that the operating system knows."""
        return cls(user=declared or _login(), host=socket.gethostname(), process=os.getpid())

    def known_as(self, database_user: str) -> Self:
        return replace(self, database_user=database_user)

    def to_json(self) -> str:
        return json.dumps({key: value for key, value in asdict(self).items() if value is not None})

    @classmethod
    def from_json(cls, text: str) -> Self | None:
        """None where nobody was recorded: before version 2 of the ledger."""
        return cls(**json.loads(text)) if text else None

    def __str__(self) -> str:
        account = f", database user {self.database_user}" if self.database_user not in (None, self.user) else ""
        return f"{self.user}@{self.host} (process {self.process}{account})"


def _login() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's user may have a number and no name
        return f"uid {os.getuid()}" if hasattr(os, "getuid") else "unknown"
