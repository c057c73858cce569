"""Nobody but its own account looks into a coordinator's folder or a run's."""

from pathlib import Path

import pytest

from common.system.files import private_folder
from server.coordinator.folder import make_private, read_coordinator
from tests.network.real import flwr_client, flwr_server


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_init_makes_folders_that_only_their_owner_can_look_into(tmp_path: Path) -> None:
    assert flwr_server("init", tmp_path / "new" / "trial", "--name", "trial", "--host", "127.0.0.1").code == 0
    assert flwr_client("init", tmp_path / "north", "--name", "north").code == 0
    assert [mode(tmp_path / name) for name in ("new/trial", "north")] == [0o700, 0o700]


@pytest.mark.parametrize("before", [0o755, 0o750, 0o711, 0o777, 0o705])
def test_a_folder_that_others_can_look_into_is_closed_and_that_is_said_once(before: int, tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    assert flwr_server("init", folder, "--name", "trial", "--host", "127.0.0.1").code == 0
    folder.chmod(before)
    said = list[str]()
    for _ in range(2):
        make_private(read_coordinator(folder), said.append)
    assert said == [f"other accounts could look into {folder}; now only this one can (mode 700)"]
    assert mode(folder) == 0o700


def test_a_folder_of_another_account_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object) -> None:
        raise PermissionError

    tmp_path.chmod(0o755)
    monkeypatch.setattr(Path, "chmod", refused)
    assert not private_folder(tmp_path)
    assert mode(tmp_path) == 0o755
