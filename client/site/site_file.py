"""``site.toml`` as it lies in a site's folder, read without torch: most wrong calls end here, at once."""

from pathlib import Path
from typing import Any

from common.errors import BadInput, Fault
from common.system.files import is_file
from common.system.toml import read_toml

FILE = "site.toml"


def read_site_toml(folder: Path) -> dict[str, Any]:
    """Read the file; nothing in it is checked yet.

    Raises:
        BadInput: If the folder holds none, or it is no TOML.
    """
    if not is_file(folder / FILE):
        problem = f"is no site's folder: it holds no {FILE}."
        raise BadInput([Fault(str(folder), problem, "Make one with flwr-client init.")])
    return read_toml(folder / FILE)
