"""What the images are made of: pinned, hashed, under licences that allow it; and no code of ours runs data."""

import ast
import datetime
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from supply.audit import verdict
from supply.licences import Library, licence_of, locked, on_page
from supply.lock import LOCKS, entries, lock_torch_for_cpus, made_on, newer_releases, text_of

ROOT = Path(__file__).parents[2]
TEXTS = {name: (ROOT / "supply" / name).read_text(encoding="utf-8") for name in LOCKS}
PACKAGES = ("common", "data", "strategies", "server", "client")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("lock", LOCKS)
def test_every_line_of_a_lock_is_a_version_and_it_names_no_host(lock: str) -> None:
    text = TEXTS[lock]
    assert "://" not in text
    lines = entries(text)
    assert lines
    assert all(re.match(r"[a-z0-9-]+==[\w.+]+( ;.*)?$", name) for name in lines)
    assert "".join(lines[name] for name in sorted(lines)) == text.partition("\n")[2]


@pytest.mark.parametrize("lock", ["build.lock", "libraries.lock", "torch.lock"])
def test_every_version_of_a_lock_has_its_hashes(lock: str) -> None:
    lines = entries(TEXTS[lock])
    assert [name for name, entry in lines.items() if not re.search(r"--hash=sha256:[0-9a-f]{64}", entry)] == []


def test_torch_for_cpus_is_of_the_releases_of_torch_with_cuda_and_has_all_hashes_or_says_that_it_has_none() -> None:
    for_cpus = entries(TEXTS["torch-cpu.lock"])
    with_cuda = {key.split(" ")[0] for key in entries(TEXTS["torch.lock"])}
    assert {key.partition("+")[0] for key in for_cpus} == {key for key in with_cuda if key.startswith("torch")}
    hashed = ["--hash" in entry for entry in for_cpus.values()]
    assert all(hashed) or not any(hashed)
    assert TEXTS["torch-cpu.lock"] == text_of(for_cpus, made_on(TEXTS["torch-cpu.lock"]))


def test_every_lock_says_on_which_day_it_was_made() -> None:
    days = {name: made_on(text) for name, text in TEXTS.items()}
    assert min(days.values()) >= datetime.date(2026, 11, 29)
    assert made_on(text_of({"a==1": "a==1\n"}, datetime.date(2027, 1, 2))) == datetime.date(2027, 1, 2)


@pytest.mark.parametrize("python", ["3.11.0", "3.12.0", "3.13.0"])
def test_the_locks_satisfy_every_dependency_of_the_project(python: str) -> None:
    """A lock that is behind pyproject.toml installs what the project does not run with; `make lock` makes it anew."""
    surroundings = {"python_full_version": python, "python_version": python[:4], "sys_platform": "linux"}
    versions = {}
    for key in (*entries(TEXTS["libraries.lock"]), *entries(TEXTS["torch.lock"])):
        requirement = Requirement(key)
        if requirement.marker is None or requirement.marker.evaluate(surroundings):
            (specifier,) = requirement.specifier
            versions[requirement.name] = specifier.version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [Requirement(line) for line in project["dependencies"]]
    needed = [each for each in needed if each.marker is None or each.marker.evaluate(surroundings)]
    assert [str(each) for each in needed if versions.get(canonicalize_name(each.name)) not in each.specifier] == []
    assert "99" not in Requirement("flwr>=1.39,<2").specifier  # a version out of range is not in it


def test_a_lock_that_is_behind_names_each_library_with_both_versions() -> None:
    before = ["flwr==1.41.0", "gone==1", "numpy==2.4 ; python_full_version < '3.12'", "numpy==2.5 ; x", "same==3"]
    now = ["flwr==1.42.0", "new==7", "numpy==2.4 ; python_full_version < '3.12'", "numpy==2.6 ; x", "same==3"]
    assert newer_releases(before, now) == [
        "flwr: 1.41.0 -> 1.42.0",
        "gone: 1 -> not needed",
        "new: not locked -> 7",
        "numpy: 2.4 or 2.5 -> 2.4 or 2.6",
    ]
    assert newer_releases(before, before) == []


def test_hashes_of_torch_for_cpus_stay_where_its_index_is_not_reached(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    nowhere = (tmp_path / "index").as_uri()
    hashed = {"torch==9.9.1+cpu": "torch==9.9.1+cpu \\\n    --hash=sha256:" + 64 * "a" + "\n"}
    assert lock_torch_for_cpus(["torch==9.9.1 ; x", "triton==1"], nowhere, hashed) == hashed
    assert lock_torch_for_cpus(["torch==9.9.2 ; x"], nowhere, hashed) == {"torch==9.9.2": "torch==9.9.2\n"}
    assert "torch-cpu.lock has no hashes" in capfd.readouterr().err


def test_the_images_install_nothing_without_a_hash_but_torch_for_cpus_whose_lock_may_have_none() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    installs = [line for line in dockerfile.splitlines() if re.search(r"pip\b.* install\b", line)]
    assert len(installs) == 5
    assert all("--require-hashes" in line or "--no-index" in line for line in installs)
    assert all("--no-deps" in line for line in installs)
    (of_torch,) = [line for line in installs if "torch.lock" in line]
    assert "WARNING: torch-cpu.lock has no hashes" in of_torch


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
