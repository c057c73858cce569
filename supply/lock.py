"""``make lock``: every library of the images with its version and the hashes of its files, for Python 3.11 and newer.

Three files, for the Dockerfile's layers: what builds the project; torch with CUDA, in the place of which there are
other builds; and the rest.
"""

import re
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT, HERE = Path(__file__).parents[1], Path(__file__).parent
HEAD = "# Made by `make lock`. Versions and SHA-256 of every file; pip installs nothing else from it.\n"
BUILDS = ("pip>=24",)
OF_TORCH = re.compile(r"(torch|torchvision|triton|cuda-.*|nvidia-.*)==")


def entries(text: str) -> dict[str, str]:
    """Entries of a lock by name and marker: a version with its marker, and the hashes below it."""
    locked = re.findall(r"^[a-z0-9][^\n]*(?:\n    --hash[^\n]*)*\n", text, re.MULTILINE)
    return {entry.split(" \\")[0]: entry for entry in locked}


def resolved(requirements: Iterable[str]) -> dict[str, str]:
    """What these requirements come to, as :func:`entries`."""
    with tempfile.TemporaryDirectory() as folder:
        source, lock = Path(folder, "wanted.in"), Path(folder, "lock.txt")
        source.write_text("\n".join(requirements), encoding="utf-8")
        options = ["--universal", "--python-version", "3.11", "--generate-hashes", "--no-header", "--no-annotate"]
        command = ["uv", "pip", "compile", *options, "--quiet", "--output-file", str(lock), str(source)]
        subprocess.run(command, check=True)
        return entries(lock.read_text(encoding="utf-8"))


def write(name: str, locked: dict[str, str]) -> None:
    """One lock."""
    (HERE / name).write_text(HEAD + "".join(locked[key] for key in sorted(locked)), encoding="utf-8")


def main() -> None:
    """Write the three locks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    locked = resolved(project["project"]["dependencies"])
    locked = {key: entry for key, entry in locked.items() if "== 'emscripten'" not in key}  # Python in a browser
    write("torch.lock", {key: entry for key, entry in locked.items() if OF_TORCH.match(key)})
    write("libraries.lock", {key: entry for key, entry in locked.items() if not OF_TORCH.match(key)})
    write("build.lock", resolved([*project["build-system"]["requires"], *BUILDS]))


if __name__ == "__main__":
    main()
