"""The experiments that come with Polyclinic and need no files, copied to where a user can read and edit them.

``setup.py`` runs :func:`copy_examples` from this file too, where nothing but Python is installed.
"""

import shutil
from pathlib import Path

NAMES = ("digits_surgical.toml", "digits_vanilla.toml", "flower-quickstart")


def write_examples(folder: Path) -> list[Path]:
    """Copy them into a new or empty place; return the files and folders written.

    Raises:
        BadInput: If one is there already: nothing is written over.
    """
    from common.errors import BadInput, Fault
    from common.system.files import atomic_outputs

    if there := [str(folder / name) for name in NAMES if (folder / name).exists()]:
        raise BadInput([Fault(path, "is there already, and nothing is written over") for path in there])
    with atomic_outputs(folder, *(folder / name for name in NAMES)):
        copy_examples(_source(), folder)
    return [folder / name for name in NAMES]


def example(name: str) -> Path:
    """The file of an experiment that comes with Polyclinic.

    Args:
        name: With or without ``.toml``.

    Raises:
        BadInput: If there is none of that name.
    """
    from common.errors import BadInput, Fault, quoted

    files = [one for one in NAMES if one.endswith(".toml")]
    wanted = f"{name.removesuffix('.toml')}.toml"
    if wanted not in files:
        there = quoted([one.removesuffix(".toml") for one in files])
        raise BadInput([Fault(name, f"is no file, and no example has this name. Examples are {there}.")])
    return _source() / wanted


def copy_examples(source: Path, goal: Path) -> None:
    """Copy them from one folder into another, which is made if it is not there."""
    for name in NAMES:
        inner = [path for path in (source / name).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        for path in inner or [source / name]:
            copy = goal / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def _source() -> Path:
    """Where they lie: in this package where it was installed from a wheel, in a checkout in ``experiments``."""
    package = Path(__file__).parent
    installed = package / "experiments"
    return installed if installed.is_dir() else package.parent / "experiments"
