"""``flwr-client init --renew-key``: a new key in the same folder, and nothing else begins anew."""

import shutil
import stat
from pathlib import Path

import pytest

from polyclinic.client.gate.audit_report import describe_audit_entry
from polyclinic.client.site.key_renewal import read_own_public_keys
from polyclinic.client.site.site_file import read_site_toml_without_data
from polyclinic.common.errors import Fault
from polyclinic.common.security.audit import AuditLog, check_audit_log
from polyclinic.common.security.identity import is_same_public_key, read_admission_request
from polyclinic.common.security.phrase import compute_public_key_phrase
from polyclinic.common.system.files import lock_file
from tests.network.real import flwr_client, flwr_server


@pytest.fixture
def north(tmp_path: Path) -> Path:
    folder = tmp_path / "north"
    assert flwr_client("init", folder, "--name", "north").code == 0
    return folder


def public_key(folder: Path) -> str:
    return read_admission_request(folder / "north.request").public_key


def test_the_key_and_the_request_are_new_and_all_else_stays(north: Path) -> None:
    state = north / "state"
    for name in ("privacy/ledger.json", "noise.key", "runs.json", "masked/run.json", "memory/run/x"):
        (state / name).parent.mkdir(parents=True, exist_ok=True)
        (state / name).write_text(name, encoding="utf-8")
    for name in ("node-id", "in-hand"):
        (state / name).touch()
    (north / "north.kit").write_text("kit", encoding="utf-8")
    before = {path: path.read_bytes() for path in north.rglob("*") if path.is_file()}
    old_key = public_key(north)
    ended = flwr_client("init", north, "--renew-key")
    assert ended.code == 0, ended.err
    after = {path: path.read_bytes() for path in north.rglob("*") if path.is_file()}
    changed = {str(path.relative_to(north)) for path in before if after.get(path) != before[path]}
    assert changed == {"north.key", "north.request", "state/node-id", "state/in-hand"}
    made = {str(path.relative_to(north)) for path in after.keys() - before.keys()}
    assert made == {"state/lock", "state/old-keys", "state/audit.jsonl", "state/audit.head"}
    assert stat.S_IMODE((north / "north.key").stat().st_mode) == 0o600
    keys = read_own_public_keys(read_site_toml_without_data(north))
    assert is_same_public_key(keys[0], public_key(north))
    assert not is_same_public_key(keys[0], old_key)
    assert [is_same_public_key(key, old_key) for key in keys[1:]] == [True]


def test_the_audit_says_so_and_its_chain_holds(north: Path) -> None:
    flwr_client("init", north, "--renew-key")
    flwr_client("init", north, "--renew-key")
    state = north / "state"
    first, second = AuditLog(state).read_entries()
    assert first["new"] == second["old"]
    assert f"the key was renewed: {first['new']} in the place of {first['old']}" in describe_audit_entry(first)
    assert check_audit_log(state).faults == []


def test_a_lost_key_is_renewed_too(north: Path) -> None:
    (north / "north.key").unlink()
    assert flwr_client("init", north, "--renew-key").code == 0
    (entry,) = AuditLog(north / "state").read_entries()
    assert "old" not in entry


def test_a_running_program_another_name_and_a_folder_of_no_site_are_refused(north: Path, tmp_path: Path) -> None:
    key = (north / "north.key").read_bytes()
    (north / "state").mkdir()
    with (north / "state" / "lock").open("w") as lock:
        lock_file(lock, Fault("", ""))
        running = flwr_client("init", north, "--renew-key")
    other = flwr_client("init", north, "--renew-key", "--name", "south")
    nothing = flwr_client("init", tmp_path / "none", "--renew-key")
    assert [ended.code for ended in (running, other, nothing)] == [2, 2, 2]
    assert "Stop it first" in running.err
    assert (north / "north.key").read_bytes() == key
    assert flwr_client("init", tmp_path / "new").code == 2  # without a name and without a folder


def test_a_revoked_hospital_is_admitted_with_the_new_key_and_not_with_the_old_one(north: Path, tmp_path: Path) -> None:
    trial, request = tmp_path / "trial", north / "north.request"
    assert flwr_server("init", trial, "--name", "trial", "--host", "127.0.0.1").code == 0
    assert flwr_server("admit", trial, request, "--yes").code == 0
    old = request.read_bytes()
    assert flwr_server("revoke", trial, "north", "--yes").code == 0
    refused = flwr_server("admit", trial, request, "--yes")
    assert refused.code == 2
    assert "flwr-client init DIR --renew-key" in refused.err
    flwr_client("init", north, "--renew-key")
    assert flwr_server("admit", trial, request, "--yes").code == 0
    request.write_bytes(old)
    assert flwr_server("admit", trial, request, "--yes").code == 2


@pytest.mark.parametrize("lost", [False, True])
def test_until_the_new_kit_comes_the_way_on_is_the_new_key(north: Path, tmp_path: Path, *, lost: bool) -> None:
    """Nobody can put the old key back: it was deleted. The coordinator asks for the new one's phrase first."""
    trial = tmp_path / "trial"
    assert flwr_server("init", trial, "--name", "trial", "--host", "127.0.0.1").code == 0
    assert flwr_server("admit", trial, north / "north.request", "--yes").code == 0
    shutil.copy(trial / "kits" / "north.kit", north)
    if lost:
        (north / "north.key").unlink()
    renewed = flwr_client("init", north, "--renew-key")
    assert compute_public_key_phrase(public_key(north)) in renewed.out
    for command in ("check", "confirm"):
        ended = flwr_client(command, north)
        assert "Send north.request to the coordinator" in ended.out + ended.err
        assert "put the old key back" not in ended.out + ended.err
