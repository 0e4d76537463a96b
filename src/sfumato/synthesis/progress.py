"""A progress bar over images, with their speed and the time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LOOK_EVERY = 0.5  # seconds between looks, since a fact that is asked for may wait for the GPU

Tell = Callable[[int, Callable[[], str]], None]
"""Told how many images are done, and how to find a fact to show, which is done only now and then."""


@contextmanager
def bar(description: str, images: int, *, shown: bool, done: int = 0) -> Iterator[Tell]:
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[facts]}"))
    start = looked = time.perf_counter()
    with Progress(TextColumn("{task.description}"), *columns, disable=not shown) as progress:
        task = progress.add_task(description, total=images, completed=done, facts="")

        def tell(now_done: int, fact: Callable[[], str]) -> None:
            nonlocal looked
            now = time.perf_counter()
            if not shown or (now - looked < _LOOK_EVERY and now_done < images):
                return
            looked = now
            facts = fact()
            rate = (now_done - done) / max(1e-9, time.perf_counter() - start)
            progress.update(task, completed=min(now_done, images), facts=f"{facts} · {rate:,.0f} images/s".lstrip(" ·"))

        yield tell
