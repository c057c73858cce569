"""The coverage-guided fuzzer finds no defect in a few seconds a target; ``make fuzz`` gives it a minute each."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.targets import TARGETS
from tests.network.real import ROOT

pytestmark = [
    pytest.mark.torture,
    pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="needs pip install polyclinic[fuzz]"),
]


@pytest.mark.parametrize("name", TARGETS)
def test_no_defect_is_found_in_a_few_seconds(name: str, tmp_path: Path, record_property: Any) -> None:
    record_property("survived", "reader under coverage-guided fuzzing")
    command = [sys.executable, "-m", "tests.fuzz.run", name, "4"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    assert "Done" in ended.stderr
