"""A coordinator's folder: its file as a person may write it, locks, the port that is checked early, and modes."""

import ipaddress
import socket
import string
import threading
import time
from pathlib import Path
from typing import Literal

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from common.errors import BadInput
from common.security.identity import split_address
from common.system.files import make_private_folder
from server.coordinator.folder import (
    Coordinator,
    CoordinatorFile,
    checked_host,
    is_running,
    lock_coordinator,
    make_private,
    read_coordinator,
    write_coordinator,
)
from server.coordinator.preflight import hospital_port_faults
from tests.network.real import flwr_client, flwr_server

GOOD = """
name = "trial"
hosts = ["fl.hospital.example", "192.0.2.7"]
listen = "0.0.0.0"
port = 9092
"""

labels = st.text(string.ascii_letters + string.digits + "-_", min_size=1, max_size=20).filter(
    lambda text: text.strip("-") == text
)
names = st.lists(labels, min_size=1, max_size=4).map(".".join).filter(lambda text: set(text) - set("0123456789."))
addresses = st.ip_addresses().map(str)
ports = st.integers(1, 65535)


def written(folder: Path, text: str) -> Path:
    (folder / "coordinator.toml").write_text(text, encoding="utf-8")
    return folder


@given(hosts=st.lists(names | addresses, min_size=1, max_size=3), listen=addresses, port=ports)
def test_what_is_written_is_read_again(
    hosts: list[str], listen: str, port: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = CoordinatorFile(name="trial", hosts=tuple(hosts), listen=listen, port=port)
    folder = tmp_path_factory.mktemp("made")
    assert write_coordinator(folder, file) == read_coordinator(folder)


def test_all_faults_come_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("9092", "0").replace('"0.0.0.0"', '"everywhere"').replace("trial", "")
    with pytest.raises(BadInput) as refused:
        read_coordinator(written(tmp_path, text))
    keys = {fault.where.removeprefix("coordinator.toml: ") for fault in refused.value.faults}
    assert keys == {"name", "listen", "port"}


@pytest.mark.parametrize(
    "host",
    [
        *("", " ", ".", "-fl.example", "fl-.example", "fl..example", "fl.example.", "fl.example:9092"),
        *(
            "https://fl.example",
            "fl.example/",
            "fl example",
            "192.0.2",
            "192.0.2.300",
            "1.2.3.4.5",
            "[2001:db8::7]",
            "fe80::1%eth0",
        ),
        *("münchen.example", "*.example", "a" * 64 + ".example", ".".join(["a" * 50] * 6), "fl.example\n"),
    ],
)
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="is neither a host name nor an address; give it without https:// and port"):
        checked_host(host)


@given(names)
def test_a_host_name_is_taken_as_it_is_and_can_stand_in_a_certificate(name: str) -> None:
    assert checked_host(name) == x509.DNSName(name).value == name


@given(st.ip_addresses(v=6).map(lambda address: address.exploded.upper()))
def test_an_address_is_taken_in_its_one_canonical_form(address: str) -> None:
    assert checked_host(address) == str(ipaddress.ip_address(address))


@given(host=names | addresses, port=ports)
def test_the_address_in_a_kit_leads_back_to_the_host_and_the_port(host: str, port: int) -> None:
    file = CoordinatorFile(name="trial", hosts=(host, "other.example"), port=port)
    assert split_address(Coordinator(Path(), file).public_address) == (checked_host(host), port)


def test_an_ipv6_address_to_listen_on_stands_in_brackets() -> None:
    file = CoordinatorFile(name="trial", hosts=("a.example",), listen="::", port=9092)
    assert Coordinator(Path(), file).fleet_address == "[::]:9092"


# ---------------------------------------------------------------------- locks


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    return read_coordinator(written(tmp_path, GOOD))


@pytest.mark.parametrize("what", ["start", "run"])
def test_what_one_process_does_in_a_folder_no_other_does(
    what: Literal["start", "run"], coordinator: Coordinator
) -> None:
    with (
        lock_coordinator(coordinator, what),
        pytest.raises(BadInput, match=f"another flwr-server {what} is at work in this folder"),
        lock_coordinator(coordinator, what),
    ):
        pytest.fail("two at a time")


def test_a_run_goes_beside_the_start_that_it_needs(coordinator: Coordinator) -> None:
    with lock_coordinator(coordinator, "start"), lock_coordinator(coordinator, "run"):
        assert (coordinator.state / "run.lock").exists()


def test_two_folders_do_not_lock_one_another(coordinator: Coordinator, tmp_path: Path) -> None:
    other = Coordinator(tmp_path / "other", coordinator.file)
    with lock_coordinator(coordinator, "start"), lock_coordinator(other, "start"):
        assert (other.state / "start.lock").exists()


def test_a_lock_is_free_again_after_an_error(coordinator: Coordinator) -> None:
    with pytest.raises(OSError, match="disk full"), lock_coordinator(coordinator, "run"):
        raise OSError("disk full")
    with lock_coordinator(coordinator, "run"):
        pass


def test_a_lock_file_that_a_killed_process_left_locks_nobody_out(coordinator: Coordinator) -> None:
    coordinator.state.mkdir()
    (coordinator.state / "start.lock").write_text("left by a process that was killed", encoding="utf-8")
    with lock_coordinator(coordinator, "start"):
        pass


def test_of_many_at_once_exactly_one_gets_in(coordinator: Coordinator) -> None:
    together, inside, refused = threading.Barrier(8), threading.Semaphore(0), threading.Semaphore(0)
    over = threading.Event()

    def enter() -> None:
        together.wait()
        try:
            with lock_coordinator(coordinator, "run"):
                inside.release()
                over.wait()
        except BadInput:
            refused.release()

    threads = [threading.Thread(target=enter, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(7):
        assert refused.acquire(timeout=60)
    over.set()
    for thread in threads:
        thread.join()
    assert inside.acquire(blocking=False)
    assert not inside.acquire(blocking=False)


def test_nobody_else_may_look_into_the_state_of_a_folder(coordinator: Coordinator) -> None:
    coordinator.state.mkdir(mode=0o755)
    with lock_coordinator(coordinator, "start"):
        assert coordinator.state.stat().st_mode & 0o777 == 0o700


# ---------------------------------------------------------------------- the port


def test_a_port_in_use_is_named_within_two_seconds(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        words = ("--name", "trial", "--host", "127.0.0.1", "--listen", "127.0.0.1", "--port", port)
        made = flwr_server("init", tmp_path / "trial", *words)
        assert made.code == 0, made.err
        began = time.monotonic()
        ended = flwr_server("start", tmp_path / "trial")
        assert time.monotonic() - began < 2
        said = " ".join(ended.err.split())
        assert ended.code == 2
        assert f"coordinator.toml: port: {port} of 127.0.0.1 cannot be opened: address already in use." in said
        assert "set another port in coordinator.toml" in said
        assert "Traceback" not in ended.out + ended.err
    assert hospital_port_faults(read_coordinator(tmp_path / "trial")) == []


def test_an_address_that_is_not_of_this_machine_is_named(tmp_path: Path) -> None:
    assert (
        flwr_server("init", tmp_path / "trial", "--name", "trial", "--host", "a.example", "--listen", "192.0.2.1").code
        == 0
    )
    (fault,) = hospital_port_faults(read_coordinator(tmp_path / "trial"))
    assert "of 192.0.2.1 cannot be opened: cannot assign requested address." in str(fault)


def test_a_start_at_work_is_seen_from_outside(tmp_path: Path) -> None:
    assert flwr_server("init", tmp_path / "trial", "--name", "trial", "--host", "a.example").code == 0
    coordinator = read_coordinator(tmp_path / "trial")
    assert not is_running(coordinator, "start")
    with lock_coordinator(coordinator, "start"):
        assert is_running(coordinator, "start")
        assert "starting: it takes up to a minute" in " ".join(flwr_server("status", tmp_path / "trial").out.split())
    assert not is_running(coordinator, "start")
    assert "down: start it" in " ".join(flwr_server("status", tmp_path / "trial").out.split())


# ---------------------------------------------------------------------- private folders


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
    assert not make_private_folder(tmp_path)
    assert mode(tmp_path) == 0o755
