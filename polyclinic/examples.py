"""The example experiments of Polyclinic, which need no data files; and a function that copies them for editing.

``setup.py`` also runs :func:`copy_examples`, so this file needs nothing but Python.
"""

import shutil
from pathlib import Path

NAMES = ("digits_surgical.toml", "digits_vanilla.toml", "flower-quickstart")


def write_examples(folder: Path) -> list[Path]:
    """Copy all examples into a folder; return the written files and folders.

    Raises:
        BadInput: If a file exists already; nothing is overwritten.
    """
    from polyclinic.common.errors import BadInput, Fault
    from polyclinic.common.system.files import remove_outputs_on_failure

    if existing := [str(folder / name) for name in NAMES if (folder / name).exists()]:
        raise BadInput([Fault(path, "is there already, and nothing is written over") for path in existing])
    with remove_outputs_on_failure(folder, *(folder / name for name in NAMES)):
        copy_examples(_find_examples_folder(), folder)
    return [folder / name for name in NAMES]


def example(name: str) -> Path:
    """Return the path of an example experiment; ``name`` is its file name, with or without ``.toml``.

    Raises:
        BadInput: If no example has that name.
    """
    from polyclinic.common.errors import BadInput, Fault, quote_names

    files = [file for file in NAMES if file.endswith(".toml")]
    file = f"{name.removesuffix('.toml')}.toml"
    if file not in files:
        examples = quote_names([example.removesuffix(".toml") for example in files])
        raise BadInput([Fault(name, f"is no file, and no example has this name. Examples are {examples}.")])
    return _find_examples_folder() / file


def copy_examples(source: Path, goal: Path) -> None:
    """Copy the examples from one folder to another, which is created if needed."""
    for name in NAMES:
        inner = [path for path in (source / name).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        for path in inner or [source / name]:
            copy = goal / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def _find_examples_folder() -> Path:
    """Return the folder of the examples: inside this package if installed from a wheel, else ``experiments``."""
    package = Path(__file__).parent
    installed = package / "experiments"
    return installed if installed.is_dir() else package.parent / "experiments"
