"""Files of a user's own that have the names of our parts, and end a program that imports one."""

from pathlib import Path

PARTS = ("client", "common", "data", "server", "strategies", "studies")
WRONG = "raise ImportError('a user\\'s own file was taken for a part of Polyclinic')\n"


def write_modules(folder: Path) -> None:
    """Write ``client.py`` and the like, as Flower's older quickstarts have them."""
    for part in PARTS:
        (folder / f"{part}.py").write_text(WRONG, encoding="utf-8")


def write_packages(folder: Path) -> None:
    """Write ``client/__init__.py`` and the like."""
    for part in PARTS:
        (folder / part).mkdir()
        (folder / part / "__init__.py").write_text(WRONG, encoding="utf-8")
