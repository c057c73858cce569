"""In a notebook, runs and comparisons show a bar that a saved notebook keeps, after the notes on the data."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
PREPARE = """
import polyclinic as pc
from tests.polyclinic.pictures import SMALL, pictures
tables = {**SMALL, "run": {"method": "surgical", "rounds": 3}}
"""
RUN = 'run = pc.simulate(tables, dataset=pictures(), out="run")'
QUIET = 'run = pc.simulate(tables, dataset=pictures(), out="quiet", quiet=True)'
HERE = 'own = pc.compare({"<b>a</b>": tables, "b": tables}, dataset=pictures(count=480), seeds=1, out="own")'
PROCESSES = """
settings = {"run.rounds": 2, "simulation.backend": "inline"}
both = pc.compare(["digits_surgical", "digits_vanilla"], seeds=1, jobs=2, settings=settings, out="both")
"""
SHOWN = "own"


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Run the cells in one kernel; return source -> outputs."""
    folder = tmp_path_factory.mktemp("notebook")
    sources = (PREPARE, RUN, QUIET, HERE, PROCESSES, SHOWN)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(ROOT), prepend=":")
        patched.setenv("IPYTHONDIR", str(folder / "ipython"))
        patched.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
        NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    return {cell.source: cell.outputs for cell in notebook.cells}


@pytest.mark.slow
def test_a_run_leaves_one_full_bar_with_its_time(cells: dict[str, list[Any]]) -> None:
    note, output = cells[RUN]
    assert "fall to no simulated hospital" in note.data["text/plain"]
    assert output.output_type == "display_data"
    assert '<progress value="3" max="3"' in output.data["text/html"]
    assert output.data["text/plain"].startswith("surgical seed 0: round 3 of 3, 0:00:")


@pytest.mark.slow
@pytest.mark.parametrize("source", [HERE, PROCESSES], ids=["in this process", "in others"])
def test_a_comparison_leaves_one_full_bar(source: str, cells: dict[str, list[Any]]) -> None:
    (output,) = cells[source]
    assert '<progress value="2" max="2"' in output.data["text/html"]
    assert output.data["text/plain"] == "2 of 2 runs"


@pytest.mark.slow
def test_quiet_shows_nothing(cells: dict[str, list[Any]]) -> None:
    assert cells[QUIET] == []


@pytest.mark.slow
def test_a_comparison_is_shown_as_tables_in_which_names_are_text(cells: dict[str, list[Any]]) -> None:
    (output,) = cells[SHOWN]
    html = output.data["text/html"]
    assert "<th>AUROC, all</th>" in html
    assert "&lt;b&gt;a&lt;/b&gt;" in html
    assert "<b>a</b>" not in html
