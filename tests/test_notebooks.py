"""The notebooks run from top to bottom, as somebody who presses "Run all" has them."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "experiments" / "notebooks").glob("*.ipynb"))
SHORT = ROOT / "experiments" / "notebooks" / "2_own_data_and_network.ipynb"
"""The one that make test runs; make test-network runs all."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=[] if path == SHORT else pytest.mark.long) for path in NOTEBOOKS]
)
def test_a_notebook_runs_and_shows_something(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    text = path.read_text(encoding="utf-8").replace('\\"rounds\\": 10', '\\"rounds\\": 2')
    notebook = nbformat.reads(text, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in shown if output.output_type == "error"]
    assert not [output for output in shown if output.output_type == "stream" and output.name == "stderr"]
    pictures = [output for output in shown if "image/png" in output.get("data", {})]
    tables = [output for output in shown if "text/html" in output.get("data", {})]
    assert pictures
    assert tables


def test_notebooks_are_stored_without_outputs() -> None:
    """Outputs are of one machine, and make every change large."""
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        assert not [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")], path.name
    assert len(NOTEBOOKS) == 3
