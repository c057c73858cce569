"""Write the example experiments into a folder, for ``flwr-sim examples``."""

from pathlib import Path

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.examples import EXAMPLE_FILES, copy_examples, find_examples_folder
from polyclinic.common.system.files import remove_outputs_on_failure


def write_examples(folder: Path) -> list[Path]:
    """Copy all examples into a folder; return the written files and folders.

    Raises:
        BadInput: If a file exists already; nothing is overwritten.
    """
    if existing := [str(folder / name) for name in EXAMPLE_FILES if (folder / name).exists()]:
        raise BadInput([Fault(path, "is there already, and nothing is written over") for path in existing])
    with remove_outputs_on_failure(folder, *(folder / name for name in EXAMPLE_FILES)):
        copy_examples(find_examples_folder(), folder)
    return [folder / name for name in EXAMPLE_FILES]
