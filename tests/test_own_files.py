"""A user's own files with the names of our parts change nothing, wherever they lie: ours are inside ``polyclinic``."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.own_files import write_modules, write_packages
from tests.processes import environment

ROOT = Path(__file__).parents[1]
SIMULATION = """
import polyclinic as pc
run = pc.simulate("digits_surgical", settings={"run.rounds": 1, "simulation.backend": BACKEND}, out="run")
import sys
assert (run.folder / "summary.json").is_file()
assert not {"client", "common", "data", "server", "strategies", "studies"} & sys.modules.keys()
print("trained")
"""
ON_RAY = pytest.param("ray", marks=pytest.mark.network)


@pytest.fixture(params=[write_modules, write_packages], ids=["modules", "packages"])
def own(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with such files."""
    request.param(tmp_path)
    return tmp_path


def run_there(folder: Path, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the folder; the folder is first on the path where Python or the user puts it there."""
    return subprocess.run(
        [*command], cwd=folder, env=environment() | variables, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inline", ON_RAY])
def test_a_script_beside_them_trains(own: Path, backend: str) -> None:
    """Python puts a script's folder first on the path, also in the processes that Ray starts."""
    (own / "train.py").write_text(SIMULATION.replace("BACKEND", repr(backend)), encoding="utf-8")
    done = run_there(own, sys.executable, "train.py")
    assert done.stdout.endswith("trained\n"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inline", ON_RAY])
def test_flwr_sim_trains_where_they_are_on_the_path(own: Path, backend: str) -> None:
    paths = os.pathsep.join([str(own), str(ROOT)])
    code = "import sys; from polyclinic.studies.cli import main; main(sys.argv[1:])"
    words = ("run", ROOT / "experiments" / "digits_surgical.toml", "--out", "run", "--set", "run.rounds=1")
    done = run_there(own, sys.executable, "-c", code, *words, "--backend", backend, PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
    assert (own / "run" / "summary.json").is_file()


@pytest.mark.parametrize("program", ["studies", "server", "client"])
def test_a_program_starts_where_they_are_on_the_path(own: Path, program: str) -> None:
    paths = os.pathsep.join([str(own), str(ROOT)])
    done = run_there(own, sys.executable, "-m", f"polyclinic.{program}.cli", "--version", PYTHONPATH=paths)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_file_named_polyclinic_on_the_path_ends_a_program_as_the_page_on_troubles_says(tmp_path: Path) -> None:
    """Python takes the first module of a name; no code of ours runs that could refuse the file."""
    (tmp_path / "polyclinic.py").write_text("", encoding="utf-8")
    command = (sys.executable, "-c", "from polyclinic.client.cli import main; main(['--version'])")
    done = run_there(tmp_path / "..", *command, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert done.returncode == 1
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    (seen,) = re.findall(r"^\| `(.+?)` .* `env -u PYTHONPATH ", page, re.MULTILINE)
    assert seen in done.stderr
    without = run_there(tmp_path / "..", *command, PYTHONPATH=str(ROOT))  # of the tests, for a path without the file
    assert (without.returncode, without.stderr) == (0, "")


@pytest.mark.slow
def test_a_notebook_beside_them_trains(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's folder is first on the path."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    monkeypatch.setenv("IPYTHONDIR", str(own / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(own / "runtime"))
    cell = nbformat.v4.new_code_cell(SIMULATION.replace("BACKEND", repr("inline")))
    notebook = nbformat.v4.new_notebook(cells=[cell])
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(own)}}).execute()
    assert "trained\n" in "".join(output.get("text", "") for output in cell.outputs)
