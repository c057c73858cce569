"""Ports, room, rights, dates and Flower's release: found in milliseconds, with what to do."""

import datetime as dt
import os
import select
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.system import preflight
from polyclinic.common.system.preflight import (
    MIN_FLOWER_RELEASE,
    delay_failure_until_change,
    find_certificate_date_faults,
    find_flower_release_faults,
    find_folder_write_faults,
    find_port_faults,
)
from tests.processes import ROOT

DAY = dt.timedelta(days=1)


def certificate(begin: dt.datetime, end: dt.datetime) -> x509.Certificate:
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "c")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(begin).not_valid_after(end)
    return builder.sign(key, hashes.SHA256())


def test_a_certificate_is_refused_outside_its_dates_with_the_date_the_clock_and_the_remedy() -> None:
    now = dt.datetime.now(dt.UTC)

    def faults(begin: int, end: int) -> list[str]:
        dates = certificate(now + begin * DAY, now + end * DAY)
        return [*map(str, find_certificate_date_faults("kit", dates, "Ask for a new kit."))]

    assert faults(-1, 1) == []
    (old,), (early,) = faults(-9, -1), faults(1, 9)
    assert f"expired on {now - DAY:%Y-%m-%d %H:%M} UTC; this machine's clock says {now:%Y-%m-%d}" in old
    assert old.endswith(" UTC. Ask for a new kit.")
    assert f"only from {now + DAY:%Y-%m-%d %H:%M} UTC; this machine's clock says" in early
    assert early.endswith("Set the clock. If it is right: ask for a new kit.")


def test_a_port_in_use_is_a_fault_and_any_port_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (fault,) = find_port_faults("port", "127.0.0.1", port, "Name another.")
        assert (fault.where, fault.remedy) == ("port", "Name another.")
        assert fault.problem == f"{port} of 127.0.0.1 cannot be opened: address already in use."
        assert find_port_faults("port", "127.0.0.1", 0, "") == []


def test_a_place_needs_a_folder_room_and_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert find_folder_write_faults(tmp_path / "new" / "deep") == []
    (fault,) = find_folder_write_faults(tmp_path / "file" / "run")
    assert fault.where == f"{tmp_path}/file"
    assert "is a file" in fault.problem
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1_500_000))
        (full,) = find_folder_write_faults(tmp_path / "new")
        assert full.where == str(tmp_path)
        assert "1.5 MB are free on its disk; 17 MB are needed" in full.problem
    denying = SimpleNamespace(**{**vars(os), "access": lambda place, mode: False})  # root may write anywhere
    monkeypatch.setattr(preflight, "os", denying)
    (fault,) = map(str, find_folder_write_faults(tmp_path / "new"))
    assert f"user {os.geteuid()} may not write there. Run: chown -R" in fault


@pytest.mark.parametrize(("installed", "right"), [("1.38.9", False), ("1.39.0", True), ("1.42.7", True), ("2.0", True)])
def test_another_flower_is_told_with_the_line_that_installs_ours(
    installed: str, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "version", lambda name: installed)
    faults = list(map(str, find_flower_release_faults()))
    assert len(faults) == (not right)
    assert all(installed in fault and 'pip install "flwr>=1.39"' in fault for fault in faults)


def test_the_releases_are_those_of_the_package() -> None:
    least = ".".join(map(str, MIN_FLOWER_RELEASE))
    assert f'"flwr>={least}"' in (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")


WAITING = """
import os, sys
from pathlib import Path
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.system import preflight
preflight.POLL_INTERVAL_S, preflight.MAX_HOLD_S = 0.01, float(sys.argv[2])
folder = Path(sys.argv[1])
print("process", os.getpid(), flush=True)
with preflight.delay_failure_until_change(folder, lambda line: print(line, flush=True), (BadInput,), held=True):
    if not (folder / "site.toml").exists():
        raise BadInput([Fault("site.toml", "is not there.")])
print("started")
"""


def test_a_refused_program_that_waits_starts_again_as_the_same_process_when_a_file_changes(tmp_path: Path) -> None:
    """The first process of a container must not end, because the container and all its sessions end with it."""
    command = [sys.executable, "-c", WAITING, str(tmp_path), "60"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as program:
        assert program.stdout is not None
        begins = [program.stdout.readline() for _ in range(3)]
        assert begins == [
            f"process {program.pid}\n",
            "refused: site.toml: is not there.\n",
            f"starts again when a file in {tmp_path} changes; ends in 1 min if none does\n",
        ]
        while not select.select([program.stdout], [], [], 0.5)[0]:
            (tmp_path / "other").touch()  # the fault stays: it is refused again
        assert [program.stdout.readline() for _ in range(3)] == begins
        while not select.select([program.stdout], [], [], 0.5)[0]:
            (tmp_path / "site.toml").touch()
        assert program.communicate(timeout=60)[0] == f"process {program.pid}\nstarted\n"
    assert program.returncode == 0


def test_a_refused_program_that_waits_ends_with_the_refusal_if_no_file_changes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITING, str(tmp_path), "0.1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("process ")) == (1, 1)
    assert "BadInput" in done.stderr


def test_a_refused_program_that_does_not_wait_ends_at_once(tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(BadInput), delay_failure_until_change(tmp_path, lines.append, (BadInput,), held=False):
        raise BadInput([Fault("site.toml", "is not there.")])
    assert lines == []
