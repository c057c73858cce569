"""The docs site: it is built without a warning, whole in itself, and every page of it is in the navigation."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer

import polyclinic.client.cli
import polyclinic.server.cli
import polyclinic.studies.cli

ROOT = Path(__file__).parents[1]
PROGRAMS = {
    "flwr-sim": polyclinic.studies.cli.app,
    "flwr-server": polyclinic.server.cli.app,
    "flwr-client": polyclinic.client.cli.app,
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` builds it; strict, so that a dead link or a warning fails."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


class Fetched(HTMLParser):
    """What a browser fetches with a page: scripts, styles and pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes)
        if tag in ("script", "img", "iframe") and named.get("src"):
            self.places.append(str(named["src"]))
        if tag == "link" and named.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.places.append(str(named["href"]))


def test_every_page_of_the_docs_is_on_the_site_and_fetches_nothing_from_elsewhere(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages <= {path.stem for path in site.glob("*.html")}
    for page in site.glob("*.html"):
        fetched = Fetched()
        fetched.feed(page.read_text(encoding="utf-8"))
        assert [place for place in fetched.places if re.match("(https?:)?//", place)] == [], page.name


def test_every_command_and_the_python_package_are_in_the_reference(site: Path) -> None:
    commands = (site / "commands.html").read_text(encoding="utf-8")
    for program, app in PROGRAMS.items():
        names = [f"{program} {name}" for name in typer.main.get_command(app).commands]  # type: ignore[attr-defined]
        assert len(names) > 3
        assert [name for name in names if name not in commands] == []
    package = (site / "api.html").read_text(encoding="utf-8")
    names = ["simulate", "compare", "FinishedRun", "check_network", "LabelledImages"]
    assert [name for name in names if name not in package] == []
