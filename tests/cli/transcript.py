"""Runs every command of docs/start.md for real, in a clone and on UCI's files, and writes down what they print.

    python -m tests.cli.transcript FOLDER_WITH_UCI_FILES [docs/transcript.md]

The clone is made of what is committed here. Some two minutes, most of them for the environment of `make demo`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
START = ROOT / "docs" / "start.md"
BLOCKS = ("demo", "table", "after")
_HEAD = """# Transcript

What the commands of [the first page](start.md) printed on two cores, after each other, in an empty folder:
`python -m tests.cli.transcript` ran them and wrote this page. Noise is fresh each time, so figures differ a little.
All of it took {seconds} seconds, the installation of the environment among them.
"""


def commands(name: str) -> list[str]:
    """Those of a block of the first page."""
    block = re.search(rf"<!-- {name} -->\n```sh\n(.*?)```", START.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    return block[1].splitlines()


def commands_of(page: str) -> list[str]:
    """Those of a transcript."""
    return re.findall(r"^\$ (.*)$", page, re.MULTILINE)


def labels(printed: str) -> set[str]:
    """What stands first in the lines of a table: the same in every run, unlike the figures."""
    return {found[1].strip() for found in re.finditer(r"^ ([a-z][\w ]*?)  +\S", printed, re.MULTILINE)}


def transcript(files: Path) -> str:
    """Everything in a folder of its own, which is gone afterwards."""
    started, parts = time.monotonic(), []
    with tempfile.TemporaryDirectory() as place:
        clone, mine = Path(place, "sfumato"), Path(place, "mine")
        mine.mkdir()
        for name in ("adult.data", "adult.test"):
            shutil.copy(files / name, mine)
        path = f"{clone / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "COLUMNS": "100"}
        for name in BLOCKS:
            for line in commands(name):
                folder = Path(place) if line.startswith("git clone") else clone if name == "demo" else mine
                real = line.replace("REPOSITORY", f"--quiet {ROOT}")
                done = subprocess.run(["bash", "-c", real], cwd=folder, env=environment, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(f"{line}\n{done.stdout}{done.stderr}")
                printed = "\n".join(text.rstrip() for text in done.stdout.splitlines()).strip("\n")
                parts.append(f"```text\n$ {line}\n{printed}\n```".replace("\n\n```", "\n```"))
    return "\n".join([_HEAD.format(seconds=round(time.monotonic() - started)), *parts, ""])


if __name__ == "__main__":
    where, *to = map(Path, sys.argv[1:])
    (to[0] if to else ROOT / "docs" / "transcript.md").write_text(transcript(where), encoding="utf-8")
