"""A hospital's image: what the Dockerfile leaves out of it, and that the hospital's program runs without it."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from supply import bundle

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")


@pytest.fixture(scope="module")
def hospital(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source of a hospital's image, after the commands of the stage that builds it."""
    (stage,) = re.findall(r"AS client-project\nRUN cd /source && (.*?) && /opt/pip", DOCKERFILE)
    source = tmp_path_factory.mktemp("image") / "source"
    bundle.copy_source(source)
    subprocess.run(["sh", "-euc", stage], cwd=source, check=True)
    return source


def run(hospital: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """``flwr-client`` with the image's source before this checkout's."""
    code = "import sys; from polyclinic.client.cli import main; main(sys.argv[1:])"
    environment = os.environ | {"PYTHONPATH": str(hospital), "COLUMNS": "200"}
    command = [sys.executable, "-P", "-c", code, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_it_has_one_command_and_no_module_of_the_coordinator(hospital: Path) -> None:
    project = tomllib.loads((hospital / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"flwr-client": "polyclinic.client.cli:main"}
    files = [path.relative_to(hospital) for path in hospital.rglob("*")]
    assert not [path for path in files if path.parts[0] in ("server", "studies", "experiments")]
    assert {path.name for path in (hospital / "polyclinic").iterdir() if path.is_symlink()} == {
        *("client", "common", "data", "strategies"),
    }
    sources = [path.read_text(encoding="utf-8") for path in hospital.rglob("*.py")]
    assert len(sources) > 150
    assert not [text for text in sources if re.search(r"^\s*(from|import) polyclinic\.(server|studies)\b", text, re.M)]


@pytest.mark.slow
def test_the_hospitals_program_makes_a_folder_and_trains_a_step_without_the_coordinators_modules(
    hospital: Path, tmp_path: Path
) -> None:
    assert run(hospital, tmp_path, "init", "north", "--name", "north").returncode == 0
    assert (tmp_path / "north" / "north.request").is_file()
    settings = 'name = "north"\n[data]\nkind = "digits"\nannotates = ["0", "1"]\n[policy]\nlevel = "trusted"\n'
    (tmp_path / "north" / "site.toml").write_text(settings, encoding="utf-8")
    checked = run(hospital, tmp_path, "check", "north", "--offline")
    assert checked.returncode == 0, checked.stderr
