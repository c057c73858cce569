"""A hospital's folder."""

from pathlib import Path

import pytest

from tests.client.check.sites import Hospital, hospital_in


@pytest.fixture
def hospital(tmp_path: Path) -> Hospital:
    return hospital_in(tmp_path / "north")
