"""A page that stays open in a real browser, asked over its DevTools: what a page does while time goes by."""

import base64
import itertools
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

from tests.server.chromium import BROWSER, View

WITHIN_S = 60.0


class OpenPage:
    """One tab."""

    def __init__(self, line: ClientConnection) -> None:
        self._line, self._numbers = line, itertools.count(1)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A DevTools command; its result."""
        number = next(self._numbers)
        self._line.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while (said := json.loads(self._line.recv(WITHIN_S))).get("id") != number:
            pass  # an event
        assert "error" not in said, said
        return dict(said["result"])

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression in the page."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until it is true."""
        deadline = time.monotonic() + WITHIN_S
        while not self.value(expression):
            assert time.monotonic() < deadline, f"{expression}: {self.value('document.body.innerText')}"
            time.sleep(0.1)

    def picture(self, path: Path) -> None:
        """Of the whole page."""
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def open_page(url: str, view: View, trusts: str = "") -> Iterator[OpenPage]:
    """Open it; the browser ends with the context.

    Args:
        trusts: SHA-256 in base64 of the public key of a certificate that nobody vouches for.
    """
    assert BROWSER is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
        command += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}"]
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
    """Where the browser's only tab is talked to."""
    deadline = time.monotonic() + WITHIN_S
    while not (port_file.is_file() and port_file.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    port = port_file.read_text().split()[0]
    tabs = httpx.get(f"http://127.0.0.1:{port}/json/list", trust_env=False).json()
    return str(next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"))
