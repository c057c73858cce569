"""The two files of a saved model, looked for without torch."""

from pathlib import Path

from common.errors import Fault

TENSORS = "model.safetensors"
DESCRIPTION = "model.json"


def unreadable(path: Path, error: OSError) -> Fault:
    """Return why one of the two cannot be read."""
    remedy = "Name the folder of a finished run, or of a model that a site keeps."
    return Fault(str(path), f"cannot be read: {error.strerror}.", remedy)


def faults_of_folder(folder: Path) -> list[Fault]:
    """Return why there is no saved model in a folder, as far as that is known without reading it."""
    for name in (DESCRIPTION, TENSORS):
        try:
            (folder / name).open("rb").close()
        except OSError as error:
            return [unreadable(folder / name, error)]
    return []
