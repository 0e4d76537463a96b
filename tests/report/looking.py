"""A report in a browser: screens and themes, what it complains of, how it prints, and what axe-core finds."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from tests.browser import Page

WIDTHS = {360: 780, 768: 1024, 1280: 900}  # with their heights: a phone, a tablet, a desk
THEMES = ("light", "dark")
AXE = "4.14.0"
_AXE_SHA256 = "20c09fe157a8a34a30e241aaa1fcdade657734f08ab379ecfbeb7d45cc46e878"

# In the page before anything of it runs: what went wrong is kept, since nobody looks at the console.
_WATCH = """
window.complaints = [];
addEventListener("error", (event) => complaints.push(String(event.message)), true);
addEventListener("unhandledrejection", (event) => complaints.push(String(event.reason)));
document.addEventListener("securitypolicyviolation", (event) => complaints.push(event.violatedDirective));
for (const name of ["error", "warn"]) console[name] = (...all) => complaints.push(all.join(" "));
"""


def show(page: Page, report: Path, *, width: int, dark: bool = False, media: str = "") -> None:
    """Open a report as somebody with such a screen sees it; media "print" as their printer does."""
    page.look_like(width=width, height=WIDTHS.get(width, 900), dark=dark)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    page._send("Emulation.setEmulatedMedia", media=media, features=[scheme])
    watch = page._send("Page.addScriptToEvaluateOnNewDocument", source=_WATCH)["identifier"]
    page.open("about:blank")
    page.open(report.as_uri())
    page._send("Page.removeScriptToEvaluateOnNewDocument", identifier=watch)


def picture(page: Page, *, top: float = 0.0, height: float | None = None) -> Image.Image:
    """What is on the screen, or so much of the page from a place on."""
    clip: dict[str, Any] = {}
    if height is not None:
        area = {"x": 0, "y": top, "width": page.run("innerWidth"), "height": height, "scale": 1}
        clip = {"clip": area, "captureBeyondViewport": True}
    data = page._send("Page.captureScreenshot", **clip)["data"]
    return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")


def printed(page: Page) -> bytes:
    """As a PDF file."""
    return base64.b64decode(page._send("Page.printToPDF", printBackground=False)["data"])


def find_axe() -> tuple[str | None, str]:
    """axe.min.js, kept in the user's cache after the first time; or None, and why there is none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sfumato-tests"
    kept = cache / f"axe-{AXE}.min.js"
    if not kept.exists():
        npm = shutil.which("npm")
        if npm is None:
            return None, f"axe-core {AXE} is not in {cache}, and there is no npm to get it with"
        with tempfile.TemporaryDirectory() as folder:
            command = [npm, "pack", f"axe-core@{AXE}", "--silent", "--pack-destination", folder]
            try:
                subprocess.run(command, capture_output=True, timeout=120, check=True)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
                return None, f"axe-core {AXE} cannot be had from npm: is the registry within reach?"
            with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
                member = archive.extractfile("package/axe.min.js")
                assert member is not None
                content = member.read()
        cache.mkdir(parents=True, exist_ok=True)
        draft = kept.with_name(f"{kept.name}.{os.getpid()}")
        draft.write_bytes(content)
        draft.replace(kept)
    content = kept.read_bytes()
    assert hashlib.sha256(content).hexdigest() == _AXE_SHA256, f"{kept} is not axe-core {AXE}: delete it"
    return content.decode(), ""


def axe_findings(page: Page, axe: str, *rules: str) -> list[dict[str, Any]]:
    """Rules that the page breaks, of all or of these, with how bad that is and where."""
    page.run(f"window.axe || (() => {{ {axe} }})(); true")
    options: dict[str, Any] = {"resultTypes": ["violations"]} | ({"runOnly": list(rules)} if rules else {})
    found = page.run(f"axe.run(document, {json.dumps(options)}).then((r) => JSON.stringify(r.violations))")
    violations: list[dict[str, Any]] = json.loads(found)
    return [
        {"rule": v["id"], "impact": v["impact"], "where": [node["target"] for node in v["nodes"]][:3]}
        for v in violations
    ]


def contrast(one: str, other: str) -> float:
    """Of two colours as CSS computes them, `rgb(0, 0, 0)`: by WCAG 2, 1 to 21.

    >>> round(contrast("rgb(0, 0, 0)", "rgb(255, 255, 255)"))
    21
    """

    def luminance(colour: str) -> float:
        values = [int(v) / 255 for v in re.findall(r"\d+", colour)[:3]]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
        return math.fsum(share * v for share, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)
