"""A headless Chromium, driven through the pipe of its own DevTools protocol: needs the browser and no package."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WAIT = 60.0  # seconds after which the browser counts as hung; a slow machine starts it in ten
_STORED = "JSON.stringify(Object.entries(localStorage).sort())"


def find_chromium() -> str | None:
    """$SFUMATO_CHROMIUM, or what is on the path."""
    return os.environ.get("SFUMATO_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab, with the mouse and keyboard of a person."""

    def __init__(self, send: Callable[..., Any]) -> None:
        self._send = send

    def open(self, url: str) -> None:
        self._replaced(url, "Page.navigate", url=url)

    def reload(self) -> None:
        """Until the page sees what was stored before, which the browser may hear of after the new page has asked."""
        stored, url = self.run(_STORED), self.run("location.href")
        deadline = time.monotonic() + WAIT
        self._replaced(url, "Page.reload", ignoreCache=True)
        while self.run(_STORED) != stored:
            assert time.monotonic() < deadline, f"what was stored is gone: {stored}"
            self._replaced(url, "Page.reload", ignoreCache=True)

    def run(self, script: str) -> Any:
        """The value of an expression; an error in it is one here."""
        found = self._send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str) -> None:
        deadline = time.monotonic() + WAIT
        while not self.run(script):
            assert time.monotonic() < deadline, f"never became true: {script}"
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """In the middle of what a person would see there."""
        x, y = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView("
            "{block: 'center'}); const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self._send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self._send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def look_like(self, *, width: int, height: int, dark: bool = False) -> None:
        """Another screen, and how its owner likes it."""
        self._send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._send("Page.captureScreenshot")["data"]))

    def save_downloads_to(self, folder: Path) -> None:
        self._send("Browser.setDownloadBehavior", browser=True, behavior="allow", downloadPath=str(folder))

    def _replaced(self, url: str, method: str, /, **params: Any) -> None:
        self.run("window.old = true")  # else an old page of the same address would be taken for the new one
        self._send(method, **params)
        self.wait(f"!window.old && location.href === {json.dumps(url)} && document.readyState === 'complete'")


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[Page]:
    """A page in a browser of its own, whose profile is in this folder; it ends with the block."""
    chromium = find_chromium()
    assert chromium is not None
    to_browser, from_browser = os.pipe(), os.pipe()

    def as_3_and_4() -> None:  # where the browser expects its pipe
        ends = os.dup(to_browser[0]), os.dup(from_browser[1])
        high = [os.dup2(end, 100 + k) for k, end in enumerate(ends)]  # out of the way of 3 and 4
        for k, end in enumerate(high):
            os.dup2(end, 3 + k)
            os.close(end)

    process = subprocess.Popen(
        [
            *(chromium, "--headless", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run"),
            *("--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking"),
            # On a busy machine a page that comes in a new frame may find its store empty, and write to it in vain.
            "--disable-features=RenderDocument",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),  # which does not run as root
            "about:blank",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=as_3_and_4,
        close_fds=False,
        start_new_session=True,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    wire = _Wire(to_browser[1], from_browser[0])
    try:
        wire.send("Target.setDiscoverTargets", discover=True)
        targets = wire.send("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        session = wire.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

        def send(method: str, *, browser: bool = False, **params: Any) -> Any:
            return wire.send(method, None if browser else session, **params)

        send("Page.enable")
        yield Page(send)
    finally:
        with contextlib.suppress(AssertionError, OSError):
            wire.send("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its own session: nothing of it stays
        process.wait()
        wire.close()


class _Wire:
    """JSON messages with a zero byte after each; answers are found by number, and events are let pass."""

    def __init__(self, out: int, into: int) -> None:
        self._out, self._into, self._rest, self._number = out, into, b"", 0

    def send(self, method: str, session: str | None = None, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {} if session is None else {"sessionId": session}
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._out, content) :]
        while (answer := self._receive()).get("id") != self._number:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _receive(self) -> Any:
        while b"\0" not in self._rest:
            assert select.select([self._into], [], [], WAIT)[0], "the browser does not answer"
            part = os.read(self._into, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def close(self) -> None:
        os.close(self._out)
        os.close(self._into)
