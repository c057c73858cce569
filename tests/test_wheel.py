"""The wheel: complete, one name, and usable beside files that have the names of its parts."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
PARTS = ("common", "data", "strategies", "server", "client", "studies")
HOSTILE = (*(f"{part}.py" for part in PARTS), "polyclinic.py")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, unpacked: what an installation puts into site-packages."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"  # a build leaves files beside its sources
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        source, copy = ROOT / name, tree / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            copy.symlink_to(source.readlink())
        elif source.is_file():
            copy.write_bytes(source.read_bytes())
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet")
    subprocess.run([sys.executable, "-m", "pip", "wheel", ".", *options, "-w", folder], cwd=tree, check=True)
    (wheel,) = folder.glob("polyclinic-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A working folder whose files have the names of our packages."""
    for name in HOSTILE:
        (tmp_path / name).write_text("raise SystemExit('the wrong file was imported')\n")
    return tmp_path


def typed(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """``flwr-sim`` of the wheel, as its script runs it: the working folder is not on the path."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "COLUMNS": "200"}
    code = "import sys; from polyclinic.studies.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-P", "-c", code, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_it_holds_the_packages_the_experiments_and_the_licence(installed: Path) -> None:
    for name in (
        "polyclinic/py.typed",
        "polyclinic/flower/__init__.py",
        "polyclinic/studies/demo.toml",
        "polyclinic/common/security/phrase_words.txt",
    ):
        assert (installed / name).is_file(), name
    there = {path.name for path in (installed / "polyclinic" / "experiments").iterdir()}
    assert there == {"digits_surgical.toml", "digits_vanilla.toml", "organs_surgical.toml", "flower-quickstart"}
    assert (installed / "polyclinic" / "experiments" / "flower-quickstart" / "quickstart" / "client_app.py").is_file()
    (facts,) = installed.glob("*.dist-info")
    assert list(facts.rglob("LICENSE"))
    assert {path.name for path in installed.iterdir()} == {"polyclinic", facts.name}
    about = (facts / "METADATA").read_text(encoding="utf-8")
    assert "Description-Content-Type: text/markdown" in about
    assert "](docs/" not in about  # tests/test_package_page.py has the rest
    assert (facts / "top_level.txt").read_text(encoding="utf-8").split() == ["polyclinic"]


def test_it_holds_every_file_of_our_packages_that_git_has(installed: Path) -> None:
    folders = (*PARTS, "polyclinic")
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, check=True, capture_output=True).stdout
    names = [name for name in listed.decode().split("\0") if name and not (ROOT / name).is_symlink()]
    assert len(names) > 200  # the listing is not empty
    places = [name if name.startswith("polyclinic/") else f"polyclinic/{name}" for name in names]
    assert [place for place in places if not (installed / place).is_file()] == []


@pytest.mark.parametrize("backend", ["inline", pytest.param("ray", marks=pytest.mark.network)])
def test_examples_and_a_run_work_beside_files_named_as_our_packages(
    backend: str, installed: Path, hostile: Path
) -> None:
    examples = typed(installed, hostile, "examples")
    assert examples.returncode == 0, examples.stderr
    assert "experiments/digits_surgical.toml" in examples.stdout
    run = ("run", "experiments/digits_surgical.toml", "--out", "runs/first", "--set", "run.rounds=1")
    done = typed(installed, hostile, *run, "--backend", backend)
    assert done.returncode == 0, done.stderr
    assert "Report: runs/first/report.html" in done.stdout
    again = typed(installed, hostile, "examples")
    assert again.returncode == 2
    assert "experiments/digits_surgical.toml: is there already" in again.stderr


def test_a_superlink_starts_there_too(installed: Path, hostile: Path) -> None:
    program = [sys.executable, "-P", "-m", "polyclinic.server.deployment.superlink.program"]
    from polyclinic.server.coordinator.folder import CoordinatorFolder, CoordinatorTomlContent
    from polyclinic.server.deployment.superlink.process import make_superlink_command

    file = CoordinatorTomlContent(name="trial", hosts=("127.0.0.1",), port=9)
    command = make_superlink_command(CoordinatorFolder(hostile, file))
    assert command[: len(program)] == program
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    ended = subprocess.run(command, cwd=hostile, env=environment, capture_output=True, text=True, check=False)
    assert "the wrong file was imported" not in ended.stderr
    assert "authority/ca.crt" in ended.stderr  # it got as far as reading its folder, which this one is not
