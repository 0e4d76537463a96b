"""Where ledgers are kept: in a file, and in a PostgreSQL database if one is running."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.postgres import Server, missing, running


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def server() -> Server:
    """The server that `make services` started; not to be killed."""
    found = running()
    if found is None or missing() is not None:
        pytest.skip(missing() or "no PostgreSQL server is running: make services")
    return found


@pytest.fixture(params=["file", pytest.param("postgres", marks=pytest.mark.postgres)])
def where(request: pytest.FixtureRequest, path: Path) -> Iterator[Path | str]:
    """An empty place for a ledger, in a file and in a database."""
    if request.param == "file":
        yield path
        return
    server: Server = request.getfixturevalue("server")
    with server.schema() as schema:
        yield server.url(schema=schema)
