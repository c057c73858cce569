"""What the images are made of: pinned, hashed, under licences that allow it; and no code of ours runs data."""

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from supply.audit import verdict
from supply.licences import Library, licence_of, locked, on_page
from supply.lock import entries

ROOT = Path(__file__).parents[2]
LOCKS = [ROOT / "supply" / name for name in ("build.lock", "torch.lock", "libraries.lock")]
PACKAGES = ("common", "strategies", "server", "client")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_every_line_of_a_lock_is_a_version_with_its_hashes_and_names_no_host(lock: Path) -> None:
    text = lock.read_text(encoding="utf-8")
    assert "://" not in text
    assert "index" not in text
    lines = entries(text)
    assert lines
    for name, entry in lines.items():
        assert re.match(r"[a-z0-9-]+==[\w.]+( ;.*)?$", name)
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), name
    assert "".join(lines[name] for name in sorted(lines)) == text.partition("\n")[2]


def test_every_dependency_of_the_project_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {re.split(r"[<>=!~\[; ]", line)[0].lower() for line in project["dependencies"]}
    assert needed <= {name for name, _ in locked()}


def test_the_images_install_nothing_without_a_hash_but_torch_of_an_index_of_ones_own() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    installs = [line for line in dockerfile.splitlines() if re.search(r"pip\b.* install\b", line)]
    assert len(installs) == 4
    assert all("--require-hashes" in line or "--no-index" in line for line in installs)
    assert all("--no-deps" in line for line in installs)


def test_no_library_is_of_an_unknown_or_strong_copyleft_licence() -> None:
    written = on_page()
    assert set(written) == {name for name, _ in locked()}
    libraries = [Library(name, "", licence_of(name) or text) for name, text in written.items()]
    assert {library.name: library.fault for library in libraries if library.fault} == {}


@pytest.mark.parametrize(
    ("licence", "fault"),
    [
        ("MIT", ""),
        ("", "its licence is unknown"),
        ("GPL-3.0-only", "GPL-3.0-only asks for the source of what uses it"),
        ("AGPL-3.0", "AGPL-3.0 asks for the source of what uses it"),
        ("GNU General Public License v3 (GPLv3)", "asks for the source"),
        ("LGPL-2.1", "LGPL-2.1 needs a note"),
        ("MPL-2.0", "MPL-2.0 needs a note"),
    ],
)
def test_licences_are_told_apart(licence: str, fault: str) -> None:
    reason = Library("anything", "1", licence).fault
    assert fault in reason
    assert bool(fault) == bool(reason)


FORBIDDEN = {
    "eval", "exec", "compile", "pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib",
    "yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen",
}  # fmt: skip
"""Calls and modules that run what they read."""


def dangers(source: str) -> list[str]:
    """Return the imports and calls by which data could become code."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN:
            names += [f"{node.module}.{alias.name}" for alias in node.names if not alias.name.endswith("Error")]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if name in FORBIDDEN or name.split(".")[0] in FORBIDDEN - {"compile"}:
                names.append(name)
            if name == "torch.load" and options.get("weights_only") != "True":
                names.append("torch.load without weights_only=True")
            if options.get("allow_pickle", "False") != "False" or options.get("shell", "False") != "False":
                names.append(f"{name} with a pickle or a shell")
    return names


def test_no_code_of_ours_runs_what_it_reads() -> None:
    by_file = {str(path.relative_to(ROOT)): dangers(path.read_text(encoding="utf-8")) for path in FILES}
    assert len(by_file) > 200
    assert {path: names for path, names in by_file.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "eval(text)", "exec(text)", "marshal.loads(data)",
        "torch.load(path)", "torch.load(path, weights_only=False)", "numpy.load(path, allow_pickle=True)",
        "yaml.load(text)", "subprocess.run(text, shell=True)", "os.system(text)", "import joblib",
    ],
)  # fmt: skip
def test_each_way_to_run_data_is_a_danger(source: str) -> None:
    assert dangers(source)


@pytest.mark.parametrize(
    "source",
    ["re.compile(text)", "torch.load(path, weights_only=True)", "network.eval()", "from pickle import UnpicklingError"],
)
def test_what_only_looks_like_one_is_not(source: str) -> None:
    assert dangers(source) == []


SAFE, FLAWED = {"name": "a", "version": "1", "vulns": []}, {"name": "b", "version": "2", "vulns": [{"id": "X-1"}]}
UNKNOWN = {"name": "c", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("libraries", "code"), [([SAFE], 0), ([SAFE, FLAWED], 1), ([SAFE, UNKNOWN], 1), ([UNKNOWN], 2), ([], 2)]
)
def test_an_audit_that_could_not_ask_does_not_pass(libraries: list[dict[str, Any]], code: int) -> None:
    assert verdict(libraries) == code
