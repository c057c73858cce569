"""A real browser without a window: pictures of a page, its layout and its print, and a page that stays open."""

import html
import itertools
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(NAMES)} is on the PATH")

# The page itself runs no script: this one goes into a copy without its content security policy.
_MEASURE = """
const box = e => e.getBoundingClientRect(), said = e => e.textContent.trim().slice(0, 60);
const labels = svg => [...svg.querySelectorAll("text")].filter(said);
const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1.5
  && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 0.25 * Math.min(a.height, b.height);
const figures = [...document.querySelectorAll("svg")];
const channels = colour => (colour.match(/[\\d.]+/g) || []).map(Number);
const light = colour => channels(colour).slice(0, 3).map(c => c / 255)
  .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
  if (channels(c)[3] !== 0) return c; } return "rgb(255, 255, 255)"; };
const contrast = e => { const style = getComputedStyle(e), ink = e.closest("svg") ? style.fill : style.color;
  const [a, b] = [light(ink), light(behind(e))].sort((x, y) => y - x); return (a + 0.05) / (b + 0.05); };
const written = [...document.querySelectorAll("body *")]
  .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()));
document.title = JSON.stringify({
  page: [document.documentElement.scrollWidth, innerWidth],
  beyond: [...document.querySelectorAll("body *")].filter(e => !e.closest(".wide, figure"))
    .filter(e => box(e).right > innerWidth + 1).map(said),
  overlapping: figures.flatMap(svg => labels(svg).flatMap((a, i) => labels(svg).slice(i + 1)
    .filter(b => meet(box(a), box(b))).map(b => [said(a), said(b)]))),
  cut: figures.flatMap(svg => labels(svg).filter(t => box(t).left < box(svg).left - 2
    || box(t).right > box(svg).right + 2 || box(t).bottom > box(svg).bottom + 2).map(said)),
  pale: written.filter(e => contrast(e) < 4.5).map(e => [said(e), contrast(e).toFixed(2), e.className]),
  pictures: [...document.images].map(i => i.naturalWidth),
  asked: performance.getEntriesByType("resource").map(r => r.name).filter(n => !n.startsWith("data:")),
});
"""


@dataclass(frozen=True)
class View:
    """How somebody looks at a page; width in CSS pixels."""

    width: int = 1100
    dark: bool = False


def picture(page: Path, view: View, height: int = 3000) -> np.ndarray:
    """Return the top of the page as a browser shows it, ``(height, width, 3)``."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.png"
        _browse(page, view, f"--screenshot={file}", f"--window-size={view.width},{height}")
        return np.asarray(Image.open(file).convert("RGB"))


def layout(page: Path, view: View) -> dict[str, Any]:
    """Measure a page: elements beyond the edge, labels that overlap or are cut, pale text, pictures, requests."""
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy.html"
        copy.write_text(text.replace("</body>", f"<script>{_MEASURE}</script></body>"), encoding="utf-8")
        dumped = _browse(copy, view, "--dump-dom", f"--window-size={view.width},3000")
    title = re.search(r"<title>(.*?)</title>", dumped, re.DOTALL)
    assert title, dumped[:500]
    measured: dict[str, Any] = json.loads(html.unescape(title[1]))
    return measured


def printed(page: Path, destination: Path) -> bytes:
    """Print the page as a PDF file; return its bytes."""
    _browse(page, View(), f"--print-to-pdf={destination}", "--no-pdf-header-footer")
    return destination.read_bytes()


def _command(profile: str) -> list[str]:
    """Return the start of a browser's command line, with a profile of its own and no services in the background."""
    assert BROWSER is not None
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars")
    quiet = ("--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}")
    return [BROWSER, *options, *quiet]


def _browse(page: Path, view: View, *arguments: str) -> str:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = _command(profile)
        scheme = 0 if view.dark else 1
        command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--blink-settings=preferredColorScheme={scheme}"]
        done = subprocess.run(
            [*command, *arguments, page.as_uri()], capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


WITHIN_S = 60.0


class OpenPage:
    """One tab."""

    def __init__(self, line: ClientConnection) -> None:
        self._line, self._numbers = line, itertools.count(1)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a DevTools command; return its result."""
        number = next(self._numbers)
        self._line.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while (answer := json.loads(self._line.recv(WITHIN_S))).get("id") != number:
            pass  # an event
        assert "error" not in answer, answer
        return dict(answer["result"])

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + WITHIN_S
        while not self.value(expression):
            assert time.monotonic() < deadline, f"{expression}: {self.value('document.body.innerText')}"
            time.sleep(0.1)


@contextmanager
def open_page(url: str, view: View, trusts: str = "") -> Iterator[OpenPage]:
    """Open a page in a browser that ends with the context.

    Args:
        trusts: SHA-256 in base64 of the public key of a certificate that nobody vouches for.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = _command(profile)
        command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--remote-debugging-port=0"]
        command += [f"--ignore-certificate-errors-spki-list={trusts}"] if trusts else []
        browser = subprocess.Popen([*command, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with connect(_tab(Path(profile) / "DevToolsActivePort"), proxy=None, max_size=None) as line:
                page = OpenPage(line)
                scheme = {"name": "prefers-color-scheme", "value": "dark" if view.dark else "light"}
                page.ask("Emulation.setEmulatedMedia", features=[scheme])
                metrics = {"width": view.width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
                page.ask("Emulation.setDeviceMetricsOverride", **metrics)
                page.ask("Page.navigate", url=url)
                page.until("document.readyState === 'complete'")
                yield page
        finally:
            browser.terminate()
            browser.wait(30)


def _tab(port_file: Path) -> str:
    """Return the address of the browser's only tab."""
    deadline = time.monotonic() + WITHIN_S
    while not (port_file.is_file() and port_file.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    port = port_file.read_text().split()[0]
    tabs = httpx.get(f"http://127.0.0.1:{port}/json/list", trust_env=False).json()
    return str(next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"))
