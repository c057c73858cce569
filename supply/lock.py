"""``make lock``: every library of the images with its version and the hashes of its files, for Python 3.11 and newer.

Four files, for the Dockerfile's layers: what builds the project; torch with CUDA; torch for CPUs, which lies on an
index of its own; and all other libraries. ``make lock-age`` tells how old they are and which releases are newer.
"""

import argparse
import datetime
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT, HERE = Path(__file__).parents[1], Path(__file__).parent
BUILDS = ("pip>=24",)
OF_TORCH = re.compile(r"(torch|torchvision|triton|cuda-.*|nvidia-.*)==")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""The index of torch without CUDA; the Dockerfile has the same."""
LOCKS = ("build.lock", "libraries.lock", "torch.lock", "torch-cpu.lock")
_MADE = re.compile(r"# Made by `make lock` on (\d{4}-\d{2}-\d{2})\.")


def entries(text: str) -> dict[str, str]:
    """Entries of a lock by name and marker: a version with its marker, and the hashes below it."""
    locked = re.findall(r"^[a-z0-9][^\n]*(?:\n    --hash[^\n]*)*\n", text, re.MULTILINE)
    return {entry.split(" \\")[0].strip(): entry for entry in locked}


def made_on(text: str) -> datetime.date:
    """The day in the first line of a lock."""
    first = _MADE.match(text)
    assert first, "the first line of a lock names the day on which it was made"
    return datetime.date.fromisoformat(first[1])


def resolved(requirements: Iterable[str], *options: str) -> dict[str, str]:
    """What these requirements come to, as :func:`entries`.

    Raises:
        subprocess.CalledProcessError: If the index is not reached or has no such release, or uv is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, lock = Path(folder, "wanted.in"), Path(folder, "lock.txt")
        source.write_text("\n".join(requirements), encoding="utf-8")
        options = ("--python-version", "3.11", "--generate-hashes", "--no-header", "--no-annotate", *options)
        # The uv of this environment, which is on no PATH where the environment is not activated.
        command = [sys.executable, "-m", "uv", "pip", "compile", *options, "--quiet"]
        subprocess.run([*command, "--output-file", str(lock), str(source)], check=True)
        return entries(lock.read_text(encoding="utf-8"))


def resolve_all() -> dict[str, dict[str, str]]:
    """All locks by name, but that of torch for CPUs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    locked = resolved(project["project"]["dependencies"], "--universal")
    locked = {key: entry for key, entry in locked.items() if "== 'emscripten'" not in key}  # Python in a browser
    return {
        "build.lock": resolved([*project["build-system"]["requires"], *BUILDS], "--universal"),
        "torch.lock": {key: entry for key, entry in locked.items() if OF_TORCH.match(key)},
        "libraries.lock": {key: entry for key, entry in locked.items() if not OF_TORCH.match(key)},
    }


def lock_torch_for_cpus(with_cuda: Iterable[str], index: str, before: dict[str, str]) -> dict[str, str]:
    """Lock the releases of torch and torchvision that ``with_cuda`` names, with the hashes of the CPU index.

    Where that index is not reached, hashes of the same releases stay from ``before``. Without these the lock has
    versions alone, and pip does not check these two downloads.
    """
    versions = sorted(key.split(" ")[0] for key in with_cuda if re.match(r"torch(vision)?==", key))
    try:
        return resolved(versions, "--no-deps", "--no-config", "--index-url", index)
    except subprocess.CalledProcessError:
        same_releases = sorted(key.partition("+")[0] for key in before) == versions
        if same_releases and all("--hash" in entry for entry in before.values()):
            return before
        message = f"torch-cpu.lock has no hashes: {index} was not reached, or has not all of {', '.join(versions)}."
        print(message, "Run `make lock` again on a machine that reaches it.", file=sys.stderr)
        return {version: f"{version}\n" for version in versions}


def text_of(locked: dict[str, str], day: datetime.date) -> str:
    """The text of one lock."""
    if all("--hash" in entry for entry in locked.values()):
        meaning = "Versions and SHA-256 of every file; pip installs nothing else from it."
    else:
        meaning = "Versions alone: the index that has the hashes was not reached. pip does not check these files."
    return f"# Made by `make lock` on {day}. {meaning}\n" + "".join(locked[key] for key in sorted(locked))


def newer_releases(before: Iterable[str], now: Iterable[str]) -> list[str]:
    """Return one line for each library whose version differs: name, the locked and the newest versions."""

    def versions(keys: Iterable[str]) -> dict[str, str]:
        by_name: dict[str, str] = {}
        for key in sorted(keys):
            name, _, version = key.split(" ")[0].partition("==")
            by_name[name] = f"{by_name[name]} or {version}" if name in by_name else version
        return by_name

    old, new = versions(before), versions(now)
    names = sorted(old.keys() | new.keys())
    return [
        f"{name}: {old.get(name, 'not locked')} -> {new.get(name, 'not needed')}"
        for name in names
        if old.get(name) != new.get(name)
    ]


def print_age(today: datetime.date) -> int:
    """Print how old each lock is, and what the index has that is newer.

    Returns:
        0 if the locks have the newest releases, 1 if not, 2 if the index did not answer.
    """
    texts = {name: (HERE / name).read_text(encoding="utf-8") for name in LOCKS}
    for name, text in texts.items():
        unchecked = "" if "--hash" in text else ", without hashes"
        print(f"supply/{name}: made on {made_on(text)}, {(today - made_on(text)).days} days ago{unchecked}")
    try:
        now = resolve_all()
    except subprocess.CalledProcessError:
        print("The locks were not compared with the package index, for the reason above.", file=sys.stderr)
        return 2
    newer = [line for name, locked in now.items() for line in newer_releases(entries(texts[name]), locked)]
    print(*newer or ["Every library has the newest release that pyproject.toml allows."], sep="\n")
    return 1 if newer else 0


def main() -> int:
    """Write the four locks, or tell their age."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--age", action="store_true", help="write nothing; print how old the locks are")
    parser.add_argument("--torch-index", default=CPU_INDEX, metavar="URL", help="the index of torch for CPUs")
    options = parser.parse_args()
    today = datetime.datetime.now(datetime.UTC).date()
    if options.age:
        return print_age(today)
    before = entries((HERE / "torch-cpu.lock").read_text(encoding="utf-8"))
    locks = resolve_all()
    locks["torch-cpu.lock"] = lock_torch_for_cpus(locks["torch.lock"], options.torch_index, before)
    for name, locked in locks.items():
        (HERE / name).write_text(text_of(locked, today), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
