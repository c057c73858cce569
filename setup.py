"""What ``pyproject.toml`` cannot say: the experiments that need no files travel in the wheel, beside ``polyclinic``.

And the README becomes the page of a package index, where a relative link or picture leads nowhere.
"""

import re
import runpy
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

ROOT = Path(__file__).parent
EXAMPLES = runpy.run_path(str(ROOT / "polyclinic" / "common" / "examples.py"))
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)\n*")
LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)]+)\)")


def read_project_url(citation: Path) -> str:
    """Return the repository's public address, ``repository-code`` of CITATION.cff; empty if it has none."""
    text = citation.read_text(encoding="utf-8") if citation.is_file() else ""
    address = re.search(r'^repository-code: *"?(https://[^"\s]+?)/?"?$', text, re.MULTILINE)
    return address[1] if address else ""


def make_project_urls(url: str) -> dict[str, str]:
    """Return the addresses that a package index shows; none without a public repository."""
    if not url:
        return {}
    return {
        "Homepage": url,
        "Source": url,
        "Documentation": f"{url}/tree/main/docs",
        "Changelog": f"{url}/blob/main/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }


def make_package_page(readme: str, url: str) -> str:
    """Return the README with absolute links and pictures; without a repository's address, with neither."""
    if not url:
        return LINK.sub(r"\1", PICTURE.sub("", readme))
    page = PICTURE.sub(lambda found: found[0].replace(f"({found[1]})", f"({url}/raw/main/{found[1]})"), readme)
    return LINK.sub(rf"[\1]({url}/blob/main/\2)", page)


class WithPackagePage(egg_info):
    """Writes the metadata of a wheel and of a source archive."""

    def run(self) -> None:
        url, about = read_project_url(ROOT / "CITATION.cff"), self.distribution.metadata
        about.project_urls = make_project_urls(url)
        about.long_description = make_package_page((ROOT / "README.md").read_text(encoding="utf-8"), url)
        super().run()


class WithExperiments(build_py):
    """Copies them at build time; an editable installation reads the checkout's own."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        goal = Path(self.build_lib, "polyclinic", "experiments")
        shutil.rmtree(goal, ignore_errors=True)
        EXAMPLES["copy_examples"](ROOT / "experiments", goal)


if __name__ == "__main__":
    setup(cmdclass={"build_py": WithExperiments, "egg_info": WithPackagePage})
