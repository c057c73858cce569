"""Idle threads of torch sleep in our programs, so that sites which share cores do not burn each other's time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = "import os, polyclinic.common, torch\nprint(os.environ.get('OMP_WAIT_POLICY'))\n"


@pytest.mark.parametrize(
    ("name", "own", "expected"),
    [
        ("flwr-sim", {}, "passive"),
        ("flwr-client", {}, "passive"),
        ("flwr-server", {"OMP_WAIT_POLICY": "active"}, "active"),
        ("study.py", {}, "None"),
    ],
)
def test_only_our_programs_change_how_threads_wait_and_only_where_the_user_did_not(
    tmp_path: Path, name: str, own: dict[str, str], expected: str
) -> None:
    program = tmp_path / name
    program.write_text(PROGRAM, encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"} | own
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == expected
