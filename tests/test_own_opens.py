"""Every place in the product that opens a file to append to, lock, empty or change it does so without following a link.

A folder that somebody hands out may hold a link under the name of any file of ours. Found by the syntax tree, so that
a new place cannot escape; places where a plain ``open`` is right are reviewed here, with their reasons.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.processes import ROOT

PACKAGES = ("client", "server", "common", "data", "strategies", "studies", "polyclinic")
READING = {"r", "rb", "rt"}
WRITERS = {"write_text", "write_bytes", "touch"}
REVIEWED = {
    ("client/connection/authority.py", "settings.kit_path.touch()"): "the hospital's own kit; only its time changes",
    ("client/site/patient_ledger.py", "os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 384)"): "O_EXCL",
    ("common/security/identity.py", "os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 384)"): "O_EXCL",
    ("common/system/files.py", "open(path, mode, buffering, encoding, opener=opener)"): "open_own_file itself",
    ("common/system/files.py", "os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)"): "itself",
    ("common/system/files.py", "os.open(folder, os.O_RDONLY)"): "reads a folder",
    ("common/system/files.py", "os.open(name, flags | os.O_NONBLOCK)"): "open_input_file reads",
    ("common/system/stopping.py", "os.open(os.devnull, os.O_WRONLY)"): "a device of the system",
    ("server/coordinator/state.py", "os.open(state, os.O_PATH | os.O_DIRECTORY)"): "names a folder",
    (
        "server/deployment/superlink/process.py",
        "os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 384)",
    ): "the coordinator's own log, which an administrator may link to another disk",
    ("server/deployment/superlink/process.py", "coordinator.log_path.touch(mode=384)"): "the same log",
    ("server/deployment/superlink/process.py", "open(descriptor, 'a', encoding='utf-8')"): "the descriptor of that log",
    ("server/export/exported_model.py", "path.write_bytes(archive.getbuffer())"): "a new file: nothing is at its name",
    ("server/runs/folder.py", "os.open(self.path, os.O_RDONLY)"): "locks a folder",
    ("studies/runner.py", "open(os.devnull, 'wb')"): "a device of the system",
}


def find_plain_writing_opens() -> set[tuple[str, str]]:
    """Return file and expression of every call that may open a file for writing, but for those of our functions."""
    packages = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    names = {path.resolve(): path.resolve().relative_to(ROOT.resolve()).as_posix() for path in packages}
    return {(name, ast.unparse(call)) for path, name in names.items() for call in _iterate_opens(path)}


def _iterate_opens(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        owner, name = "", getattr(node.func, "id", "")
        if isinstance(node.func, ast.Attribute):
            owner, name = ast.unparse(node.func.value), node.func.attr
        if (owner, name) == ("os", "open") or (owner and name in WRITERS):
            yield node
        elif name == "open" and (owner in ("", "io") or _is_path_open(node)):
            place = 0 if owner not in ("", "io") else 1
            modes = [*node.args[place : place + 1], *(key.value for key in node.keywords if key.arg == "mode")]
            mode = modes[0] if modes else ast.Constant("r")
            if not (isinstance(mode, ast.Constant) and mode.value in READING):
                yield node


def _is_path_open(node: ast.Call) -> bool:
    """Return True for ``path.open("a")``; ``Image.open(file)`` and ``gzip.open(path)`` name a file first."""
    first = node.args[0] if node.args else None
    return isinstance(first, ast.Constant) and isinstance(first.value, str)


def test_every_place_that_opens_a_file_for_writing_follows_no_link_or_is_reviewed() -> None:
    assert find_plain_writing_opens() == REVIEWED.keys()
