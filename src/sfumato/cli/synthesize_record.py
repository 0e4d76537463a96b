"""The folder of a synthesis: what it began with, how far it came, and that it goes on with that or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from sfumato.cli.config_file import check_same
from sfumato.cli.synthesize_config import SynthesisConfig
from sfumato.errors import InvalidArgument
from sfumato.synthesis import store

_MAY_CHANGE = {"data.public", "generator.checkpoint_every", "output.folder"}


@dataclass(frozen=True)
class Folder:
    """The files of a synthesis."""

    path: Path
    table: str | None = None  # the name of a table's file

    @property
    def began(self) -> Path:
        return self.path / "synthesis.json"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.safetensors"

    @property
    def generator(self) -> Path:
        return self.path / "generator"

    @property
    def discriminator(self) -> Path:
        return self.path / "discriminator.safetensors"

    @property
    def rows(self) -> Path:
        return self.path / (self.table or "synthetic.npz")

    @property
    def grid(self) -> Path:
        return self.path / "grid.png"

    @property
    def provenance(self) -> Path:
        """Written last: what is there is finished."""
        return self.path / "provenance.json"

    @property
    def aside(self) -> Folder:
        """Where --again works while what is finished here still stands."""
        return Folder(self.path / ".again", self.table)

    def clear(self) -> None:
        """Remove what an earlier synthesis left, and nothing else; first of all the sign that it is finished."""
        for path in self._files():
            path.unlink(missing_ok=True)
        if (self.generator / "generator.json").exists():
            shutil.rmtree(self.generator)

    def _files(self) -> list[Path]:
        """All but the generator's own, the sign that it is finished first."""
        rows = (self.path / name for name in ("synthetic.npz", "synthetic.csv"))
        return [self.provenance, *rows, self.grid, self.discriminator, self.checkpoint, self.began]

    def settle(self) -> None:
        """Put what was made aside in the place of the old, if it is finished; also where that was cut off before.

        Nothing new is removed: as long as the draft has its first name all that lies here is old, and afterwards new.
        """
        draft, ready = self.aside, Folder(self.path / ".again.ready", self.table)
        if draft.provenance.exists():
            self.clear()
            draft.path.replace(ready.path)
        if ready.path.exists():
            for path in (ready.generator, *reversed(ready._files())):
                if path.exists():
                    path.replace(self.path / path.name)
            ready.path.rmdir()

    def check(self, config: SynthesisConfig, *, again: bool) -> None:
        """Raise if a synthesis cannot begin or go on here; nothing is changed.

        A finished one is a training's to go on with.
        """
        public, called = config.file(config.data.public).resolve(), f"{config.target}={str(self.path)!r}"
        if self.path.resolve() in (public, *public.parents):
            raise InvalidArgument(f"{called} holds the public rows: choose another, since files in it are replaced.")
        if self.provenance.exists() and not again and config.within is None:
            raise InvalidArgument(
                f"{called} holds a finished synthesis: use --more N for more of it, --again to make it anew, or choose "
                "another folder."
            )
        if self.began.exists():
            if not again:
                check_unchanged(config, self.read())
            return
        for path in (self.rows, self.grid, self.discriminator, self.checkpoint, self.generator, self.provenance):
            if path.exists():
                raise InvalidArgument(f"{called} holds a {path.name} that is not of a synthesis: choose another.")

    def read(self) -> dict[str, Any]:
        return _read(self.began)

    def finished(self) -> dict[str, Any]:
        """The provenance of a finished synthesis."""
        if not self.provenance.exists():
            raise InvalidArgument(
                f"--more needs a finished synthesis in [output] folder={str(self.path)!r}: run without it first."
            )
        return _read(self.provenance)


class Record:
    """What a synthesis began with, and how many seconds its parts took, kept in a file from the first moment on."""

    def __init__(self, folder: Folder, config: SynthesisConfig) -> None:
        self._path = folder.began
        known = folder.read() if folder.began.exists() else {}
        self._facts = {"config": config.to_json(), "images": known.get("images"), "seconds": known.get("seconds", {})}
        self._write()

    @property
    def images(self) -> int | None:
        """How many images the generator is trained on, once it is known."""
        found: int | None = self._facts["images"]
        return found

    @images.setter
    def images(self, images: int) -> None:
        self._facts["images"] = images
        self._write()

    @property
    def seconds(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in self._facts["seconds"].items()}

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Also what was interrupted counts."""
        start = perf_counter()
        try:
            yield
        finally:
            seconds = self._facts["seconds"]
            seconds[part] = seconds.get(part, 0.0) + perf_counter() - start
            self._write()

    def _write(self) -> None:
        store.put(self._path, (json.dumps(self._facts, indent=2) + "\n").encode())


def check_unchanged(config: SynthesisConfig, record: Mapping[str, Any]) -> None:
    """A synthesis goes on with the config it began with."""
    began, before = f"the synthesis in {config.target}", record.get("config") or {}
    check_same(config, before, may_change=_MAY_CHANGE, began=began, otherwise=config.otherwise)


def is_unchanged(config: SynthesisConfig, record: Mapping[str, Any]) -> bool:
    try:
        check_unchanged(config, record)
    except InvalidArgument:
        return False
    return True


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"{str(path)!r} cannot be read ({type(error).__name__}): put it back, or choose another folder."
        ) from None
    return found
