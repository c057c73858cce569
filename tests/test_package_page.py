"""The README as a package index shows it: no link or picture that leads nowhere."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
URL = "https://example.org/polyclinic"
TARGET = re.compile(r"(!?)\[[^\]]*\]\(([^)]+)\)")


CALL = f"""
import json, pathlib, runpy, sys
name, arguments = json.load(sys.stdin)
if name == "read_project_url":
    arguments = map(pathlib.Path, arguments)
print(json.dumps(runpy.run_path({str(ROOT / "setup.py")!r})[name](*arguments)))
"""


def call_setup(name: str, *arguments: str) -> Any:
    """Return what a function of setup.py returns; in a process of its own, because setuptools replaces distutils."""
    sent = json.dumps([name, arguments])
    done = subprocess.run([sys.executable, "-c", CALL], input=sent, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_without_a_public_repository_the_page_has_no_pictures_and_no_link_into_the_tree() -> None:
    text = call_setup("make_package_page", README, "")
    targets = TARGET.findall(text)
    assert targets
    assert [(picture, target) for picture, target in targets if picture or not target.startswith("https://")] == []
    assert "(docs/" not in text
    assert "pip install ." in text
    assert call_setup("make_project_urls", "") == {}


def test_with_a_public_repository_every_link_and_picture_is_absolute_and_names_a_file() -> None:
    targets = TARGET.findall(call_setup("make_package_page", README, URL))
    ours = [(picture, target.removeprefix(URL)) for picture, target in targets if target.startswith(URL)]
    assert len([picture for picture, _ in ours if picture]) >= 2
    assert len(ours) == len([target for _, target in TARGET.findall(README) if not target.startswith("https://")])
    for picture, path in ours:
        place = path.removeprefix("/raw/main/" if picture else "/blob/main/").partition("#")[0]
        assert (ROOT / place).exists(), path
    assert set(call_setup("make_project_urls", URL)) == {"Homepage", "Source", "Documentation", "Changelog", "Issues"}


@pytest.mark.parametrize(
    ("line", "url"),
    [
        (f'repository-code: "{URL}/"\n', URL),
        (f"repository-code: {URL}\n", URL),
        ("title: x\n", ""),
    ],
)
def test_the_repositorys_address_is_that_of_the_citation_file(line: str, url: str, tmp_path: Path) -> None:
    (tmp_path / "CITATION.cff").write_text(f"cff-version: 1.2.0\n{line}license: Apache-2.0\n", encoding="utf-8")
    assert call_setup("read_project_url", str(tmp_path / "CITATION.cff")) == url
    assert call_setup("read_project_url", str(tmp_path / "absent")) == ""
