"""Flower's identity of a task, which ``Message()`` reads to fill its metadata; and a hospital's folder."""

from pathlib import Path

import pytest
from flwr.supercore.task_identity import TaskIdentity

from tests.client.check.sites import Hospital, hospital_in


@pytest.fixture(autouse=True)
def _task_identity() -> None:
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


@pytest.fixture
def hospital(tmp_path: Path) -> Hospital:
    return hospital_in(tmp_path / "north")
