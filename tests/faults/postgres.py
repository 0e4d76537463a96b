"""A PostgreSQL server of the tests' own, from what is installed: `python -m tests.faults.postgres start` (or stop).

Its data lies in a folder of its own, it listens on a socket in a folder that only this user can enter, and nothing of
the system's own servers is touched. PostgreSQL does not run as root; there it runs as the packages' user `postgres`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

SERVICES = Path(__file__).parents[2] / "build" / "services"
OWNER = "sfumato"  # the database's superuser; nothing to do with users of the machine
SETTINGS = {
    "listen_addresses": "",
    "max_connections": "120",
    "shared_buffers": "32MB",
    "autovacuum": "off",  # so that an idle server of the tests stays idle
    "log_min_messages": "fatal",
}


def programs() -> Path | None:
    """Where the server's programs are: on the path, or where Debian puts them."""
    on_path = shutil.which("initdb")
    if on_path is not None and shutil.which("postgres") is not None:
        return Path(on_path).resolve().parent
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[-3]))
    return found[-1].parent if found else None


def missing() -> str | None:
    """Why there can be no server here, in words; None if there can."""
    if importlib.util.find_spec("psycopg") is None:
        return "psycopg is not installed: pip install 'sfumato[postgres]'"
    if programs() is None:
        return "PostgreSQL is not installed: apt-get install postgresql"
    if os.geteuid() == 0 and _other_user() is None:
        return "PostgreSQL does not run as root, and there is no user postgres or nobody"
    return None


def _other_user() -> pwd.struct_passwd | None:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    return None


class Server:
    """A cluster in `folder`, which is made if there is none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            other = _other_user()
            assert other is not None
            self._as = {"user": other.pw_uid, "group": other.pw_gid, "extra_groups": []}

    def _run(self, program: str, *arguments: str) -> None:
        found = programs()
        assert found is not None, missing()
        # Output to a file: the server keeps what it inherits open, and a pipe would never end.
        with open(self.folder / "log", "ab") as log:
            command = [str(found / program), *arguments]
            done = subprocess.run(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd="/", **self._as)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{(self.folder / 'log').read_text()[-3000:]}")

    def make(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Sockets have short names, and a folder that others cannot enter is all the authentication there is.
        sockets = Path(tempfile.mkdtemp(prefix="sfumato-pg-"))
        (self.folder / "sockets").write_text(str(sockets))
        self.data.mkdir(mode=0o700)
        if self._as:
            for path in (sockets, self.data):
                os.chown(path, self._as["user"], self._as["group"])
        options = ["--auth=trust", f"--username={OWNER}", "--encoding=UTF8", "--locale=C", "--no-sync"]
        self._run("initdb", f"--pgdata={self.data}", *options)
        with open(self.data / "postgresql.conf", "a") as settings:
            for name, value in {**SETTINGS, "unix_socket_directories": str(sockets)}.items():
                settings.write(f"{name} = '{value}'\n")

    @property
    def sockets(self) -> Path:
        return Path((self.folder / "sockets").read_text())

    def start(self) -> None:
        # After a kill the old server's children take a moment to go; until then the new one refuses to start.
        for attempt in range(20):
            try:
                return self._run("pg_ctl", "start", f"--pgdata={self.data}", "--wait", "--timeout=60", "--silent")
            except RuntimeError:
                if attempt == 19:
                    raise
                time.sleep(0.25)

    def stop(self) -> None:
        if self.process() is not None:
            self._run("pg_ctl", "stop", f"--pgdata={self.data}", "--mode=fast", "--wait", "--silent")

    def kill(self) -> None:
        """As a power cut would: the server and every process of it, at once and without a word."""
        pid = self.process()
        assert pid is not None, "there is no server to kill"
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        for process in (pid, *children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def process(self) -> int | None:
        try:
            pid = int((self.data / "postmaster.pid").read_text().split()[0])
            os.kill(pid, 0)
        except (FileNotFoundError, IndexError, ProcessLookupError):
            return None
        return pid

    def url(self, *, user: str = OWNER, database: str = "postgres", schema: str | None = None) -> str:
        options = "" if schema is None else f"&options={quote(f'-csearch_path={schema}')}"
        return f"postgresql+psycopg://{user}@/{database}?host={quote(str(self.sockets))}{options}"

    def sql(self, *statements: str, user: str = OWNER) -> None:
        import psycopg

        with psycopg.connect(host=str(self.sockets), user=user, dbname="postgres", autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)  # type: ignore[call-overload]

    @contextlib.contextmanager
    def schema(self) -> Iterator[str]:
        """An empty place for one ledger, and its name."""
        name = f"t{secrets.token_hex(6)}"
        self.sql(f"CREATE SCHEMA {name}")
        try:
            yield name
        finally:
            self.sql(f"DROP SCHEMA IF EXISTS {name} CASCADE")

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.sockets, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def throw_away() -> Iterator[Server]:
    """A server that may be killed: it is nobody else's."""
    folder = Path(tempfile.mkdtemp(prefix="sfumato-pg-data-"))
    folder.chmod(0o755)
    server = Server(folder)
    server.make()
    try:
        server.start()
        yield server
    finally:
        server.remove()


def running() -> Server | None:
    """The server that `make services` started."""
    server = Server(SERVICES / "postgres")
    return server if server.process() is not None else None


def main() -> int:
    parser = argparse.ArgumentParser(description="The services that some tests need.")
    parser.add_argument("what", choices=("start", "stop", "url"))
    what = parser.parse_args().what
    server = Server(SERVICES / "postgres")
    if what == "stop":
        if server.data.exists():
            server.remove()
        return 0
    if (reason := missing()) is not None:
        print(f"No services: {reason}.", file=sys.stderr)
        return 1
    if what == "start" and server.process() is None:
        if not server.data.exists():
            server.make()
        server.start()
    if server.process() is None:
        print("The server is not running: make services.", file=sys.stderr)
        return 1
    print(server.url())
    return 0


if __name__ == "__main__":
    sys.exit(main())
