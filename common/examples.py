"""The example experiments of Polyclinic, which need no data files: find them by name, and copy them for editing.

``setup.py`` also runs :func:`copy_examples`, so this file imports only Python's standard library when it is loaded.
"""

import os
import shlex
import shutil
from pathlib import Path

EXAMPLE_FILES = ("digits_surgical.toml", "digits_vanilla.toml", "organs_surgical.toml", "flower-quickstart")
EXAMPLE_EXPERIMENT_NAMES = tuple(Path(name).stem for name in EXAMPLE_FILES if name.endswith(".toml"))
EXAMPLES_FOLDER = "experiments"
"""Folder of the examples in the checkout, and where ``flwr-sim examples`` writes them."""


def find_experiment_file(path: Path) -> Path:
    """Return the path of an experiment file, or of the example with this name, such as ``digits_surgical``.

    A path with a folder or a suffix is returned as it is, also if there is no such file.

    Raises:
        BadInput: If there is neither a file nor an example of this name.
    """
    from polyclinic.common.errors import BadInput, Fault, quote_names, suggest_nearest_name

    if os.path.lexists(path) or path.suffix or len(path.parts) != 1:
        return path
    folder = find_examples_folder()
    # The container image of a hospital has no examples.
    examples = {file.stem: file for file in sorted(folder.glob("*.toml")) if file.name in EXAMPLE_FILES}
    if path.name in examples:
        return examples[path.name]
    problem = f"is no file, and no example has this name. Examples are {quote_names(examples)}."
    near = suggest_nearest_name(path.name, [*examples, *(file.name for file in Path().glob("*.toml"))])
    raise BadInput([Fault(str(path), problem, near)])


def suggest_examples(path: Path) -> str:
    """Return a remedy for a missing file that is an example or belongs to a checkout; empty for other files."""
    if path.suffix == ".toml" and path.stem in EXAMPLE_EXPERIMENT_NAMES:
        folder = "" if str(path.parent) == EXAMPLES_FOLDER else f" {shlex.quote(str(path.parent))}"
        return f"It is an example. Give its name alone, {path.stem}, or write the file with: flwr-sim examples{folder}"
    if path.parts[:1] == (EXAMPLES_FOLDER,) and not Path(EXAMPLES_FOLDER).is_dir():
        names = ", ".join(EXAMPLE_EXPERIMENT_NAMES)
        return f"Run this in the project's checkout. Examples that need no files are {names}: give the name alone."
    return ""


def copy_examples(source: Path, destination: Path) -> None:
    """Copy the examples from one folder to another, which is created if needed."""
    for name in EXAMPLE_FILES:
        files_in_folder = [
            path for path in (source / name).rglob("*") if path.is_file() and "__pycache__" not in path.parts
        ]
        for path in files_in_folder or [source / name]:
            copy = destination / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def find_examples_folder() -> Path:
    """Return the folder of the examples: inside the package if installed from a wheel, else that of the checkout."""
    package = Path(__file__).parents[1]
    installed = package / EXAMPLES_FOLDER
    return installed if installed.is_dir() else package.parent / EXAMPLES_FOLDER
