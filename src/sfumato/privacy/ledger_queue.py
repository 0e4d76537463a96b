"""Waiting for budget: a reservation that does not fit now may wait for what open plans give back.

First come, first served: as long as one waits, nothing that came later is admitted, be it ever so small; so nobody
starves. What can no longer be given back is not waited for, so that nobody waits, or holds others up, for nothing. The
queue decides about turns only. Whether there is room is decided as always, under the account's lock, by its filter: a
queue that was lost or wrong could be unfair, and could not overspend.

Whoever waits gives a sign of life each second. A row without one for a minute is of a job that died: the next one who
looks removes it.
"""

from __future__ import annotations

import math
import secrets
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from sfumato.errors import InvalidArgument, LedgerError

if TYPE_CHECKING:
    from sfumato.privacy.ledger_store import Row, Store, Transaction

POLL_SECONDS = 1.0
LEASE_SECONDS = 60.0


class Turn:
    """A reservation's place in the queue of its account; as a context manager it leaves the queue at the end."""

    def __init__(self, store: Store, account: int, wait: float) -> None:
        if not (math.isfinite(wait) and wait >= 0):
            raise InvalidArgument(f"wait={wait} must be a number of seconds, 0 or more.")
        self._store, self._account = store, account
        self.wait = wait
        self._deadline = time.monotonic() + wait
        self._token = secrets.token_hex(16)
        self.queued = False

    @property
    def may_wait(self) -> bool:
        return time.monotonic() < self._deadline

    def ahead(self, tx: Transaction) -> int:
        """How many came before and still wait."""
        count = 0
        for row in tx.waiting(self._account):
            if row["token"] == self._token:
                break
            if is_alive(row, tx.clock):
                count += 1
            else:
                tx.leave(row["token"])
        return count

    def join(self, tx: Transaction, *, mechanisms: str, asks: float | None, note: str) -> None:
        """Takes a place at the end, or keeps the one it has."""
        if any(row["token"] == self._token for row in tx.waiting(self._account)):
            tx.still_waits(self._token)
        else:
            tx.wait(account_id=self._account, token=self._token, mechanisms=mechanisms, asks=asks, note=note)
        self.queued = True

    def leave(self, tx: Transaction) -> None:
        if self.queued:
            tx.leave(self._token)

    def pause(self) -> None:
        time.sleep(max(0.0, min(POLL_SECONDS, self._deadline - time.monotonic())))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or not self.queued:
            return  # it left the queue in the transaction that reserved, or was never in it
        try:
            self._store.write(lambda tx: tx.leave(self._token))
        except LedgerError as also:  # its place expires by itself
            error.add_note(str(also))


def is_alive(row: Row, clock: float) -> bool:
    return bool(clock - row["seen"] <= LEASE_SECONDS)
