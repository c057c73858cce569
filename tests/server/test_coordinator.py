"""A coordinator's folder: its file, locks, port, modes and registrations, and the socket for its own programs."""

import ipaddress
import json
import os
import shutil
import socket
import string
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

import grpc
import psutil
import pytest
from cryptography import x509
from hypothesis import given, settings
from hypothesis import strategies as st

from polyclinic.common.errors import BadInput
from polyclinic.common.security.identity import (
    SiteAdmissionRequest,
    create_private_key,
    format_public_key_line,
    split_host_port,
)
from polyclinic.common.system.files import make_private_folder
from polyclinic.server.coordinator.admission import admit_site, revoke_site
from polyclinic.server.coordinator.folder import (
    CoordinatorFolder,
    CoordinatorTomlContent,
    is_coordinator_command_running,
    lock_coordinator_folder,
    lock_run_members,
    normalize_host,
    read_coordinator_folder,
    restrict_folder_to_owner,
    write_coordinator_toml,
)
from polyclinic.server.coordinator.preflight import find_hospital_port_faults, make_no_superlink_fault
from polyclinic.server.coordinator.state import CONTROL_SOCKET, ControlSocketPath, is_control_socket_listening
from polyclinic.server.deployment.serve import synchronize_site_registrations
from polyclinic.server.deployment.superlink.control_client import (
    CONTROL_SERVICE,
    SuperLinkControlClient,
    convert_openssh_key_to_pem,
    is_superlink_answering,
)
from polyclinic.server.deployment.superlink.process import SuperLinkProcess
from polyclinic.server.deployment.superlink.registrations import RegisteredSite, SiteConnectionState
from polyclinic.server.runs.live_status import CurrentRun
from tests.network.real import flwr_client, flwr_server, free_ports
from tests.processes import command_line
from tests.server.superlinks import refused

labels = st.text(string.ascii_letters + string.digits + "-_", min_size=1, max_size=20).filter(
    lambda text: text.strip("-") == text
)
names = st.lists(labels, min_size=1, max_size=4).map(".".join).filter(lambda text: set(text) - set("0123456789."))
addresses = st.ip_addresses().map(str)
ports = st.integers(1, 65535)


@settings(max_examples=settings().max_examples * 2 // 5)  # each writes a file
@given(hosts=st.lists(names | addresses, min_size=1, max_size=3), listen=addresses, port=ports)
def test_a_written_file_is_read(
    hosts: list[str], listen: str, port: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = CoordinatorTomlContent(name="trial", hosts=tuple(hosts), listen=listen, port=port)
    folder = tmp_path_factory.mktemp("made")
    assert write_coordinator_toml(folder, file) == read_coordinator_folder(folder)


@pytest.mark.parametrize(
    "host",
    [
        *("", " ", ".", "-fl.example", "fl-.example", "fl..example", "fl.example.", "fl.example:9092"),
        *("https://fl.example", "fl.example/", "fl example", "192.0.2", "192.0.2.300", "1.2.3.4.5", "[2001:db8::7]"),
        *("fe80::1%eth0", "münchen.example", "*.example", "a" * 64 + ".example", ".".join(["a" * 50] * 6)),
        "fl.example\n",
    ],
)
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="is neither a host name nor an address"):
        normalize_host(host)


@given(names)
def test_a_host_name_is_taken_as_it_is_and_can_stand_in_a_certificate(name: str) -> None:
    assert normalize_host(name) == x509.DNSName(name).value == name


@given(st.ip_addresses(v=6).map(lambda address: address.exploded.upper()))
def test_an_address_is_taken_in_its_one_canonical_form(address: str) -> None:
    assert normalize_host(address) == str(ipaddress.ip_address(address))


@given(host=names | addresses, port=ports)
def test_the_address_in_a_kit_leads_back_to_the_host_and_the_port(host: str, port: int) -> None:
    file = CoordinatorTomlContent(name="trial", hosts=(host, "other.example"), port=port)
    assert split_host_port(CoordinatorFolder(Path(), file).public_address) == (normalize_host(host), port)


def test_an_ipv6_address_to_listen_on_stands_in_brackets() -> None:
    file = CoordinatorTomlContent(name="trial", hosts=("a.example",), listen="::", port=9092)
    assert CoordinatorFolder(Path(), file).hospital_listen_address == "[::]:9092"


def test_a_lock_keeps_out_the_same_command_in_the_same_folder_alone(
    coordinator: CoordinatorFolder, tmp_path: Path
) -> None:
    """Neither an error nor the file that a killed process left keeps anybody out; the state is closed to others."""
    other = CoordinatorFolder(tmp_path / "other", coordinator.file)
    coordinator.state_path.mkdir(mode=0o755)
    (coordinator.state_path / "start.lock").write_text("left by a process that was killed", encoding="utf-8")
    with pytest.raises(OSError, match="disk full"), lock_coordinator_folder(coordinator, "run"):
        raise OSError("disk full")
    with (
        lock_coordinator_folder(coordinator, "start"),
        lock_coordinator_folder(coordinator, "run"),
        lock_coordinator_folder(other, "start"),
    ):
        assert mode(coordinator.state_path) == 0o700
        for command in COMMANDS:
            at_work = f"another flwr-server {command} is at work in this folder"
            with pytest.raises(BadInput, match=at_work), lock_coordinator_folder(coordinator, command):
                pytest.fail("two at a time")


def test_a_run_that_has_to_wait_names_the_runs_at_work_and_their_sites(coordinator: CoordinatorFolder) -> None:
    with lock_run_members(coordinator, ["north", "south"]):
        present = CurrentRun("runs/lungs", "lungs", pid=os.getpid(), members=("north", "south"))
        present.find_status_path(coordinator.state_path).write_text(json.dumps(asdict(present)), encoding="utf-8")
        at_work = r"at work in this folder: lungs \(north, south\)\. This experiment names no"
        with pytest.raises(BadInput, match=at_work), lock_run_members(coordinator, []):
            pytest.fail("two at a time")
        with pytest.raises(BadInput) as refused, lock_run_members(coordinator, ["south", "east", "north"]):
            pytest.fail("two at a time")
    assert [fault.problem.split()[0] for fault in refused.value.faults] == ["north", "south"]
    assert all("which has not ended: lungs (north, south)." in fault.problem for fault in refused.value.faults)


def test_of_many_at_once_exactly_one_gets_in(coordinator: CoordinatorFolder) -> None:
    together, inside, refused = threading.Barrier(8), threading.Semaphore(0), threading.Semaphore(0)
    over = threading.Event()

    def enter() -> None:
        together.wait()
        try:
            with lock_coordinator_folder(coordinator, "run"):
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


def test_a_port_in_use_is_named_within_two_seconds(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        words = ("--name", "trial", "--host", "127.0.0.1", "--listen", "127.0.0.1", "--port", port)
        made = flwr_server("init", tmp_path / "trial", *words)
        assert made.code == 0, made.err
        began = time.monotonic()
        ended = flwr_server("start", tmp_path / "trial")
        assert (ended.code, time.monotonic() - began < 2) == (2, True)
        assert f"coordinator.toml: port: {port} of 127.0.0.1 cannot be opened" in " ".join(ended.err.split())
        assert "Traceback" not in ended.out + ended.err
    assert find_hospital_port_faults(read_coordinator_folder(tmp_path / "trial")) == []


COMMANDS: tuple[Literal["start", "run"], ...] = ("start", "run")


def test_an_address_that_is_not_of_this_machine_is_named(coordinator: CoordinatorFolder) -> None:
    elsewhere = CoordinatorFolder(coordinator.folder, coordinator.file.model_copy(update={"listen": "192.0.2.1"}))
    (fault,) = find_hospital_port_faults(elsewhere)
    assert "of 192.0.2.1 cannot be opened: cannot assign requested address" in str(fault)


def test_a_start_at_work_is_seen_from_outside(coordinator: CoordinatorFolder) -> None:
    def read_state() -> tuple[bool, list[str]]:
        shown = " ".join(flwr_server("status", coordinator.folder).out.split())
        states = [state for state in ("starting: ", "down: ") if state in shown]
        return is_coordinator_command_running(coordinator, "start"), states

    with lock_coordinator_folder(coordinator, "start"):
        assert read_state() == (True, ["starting: "])
    assert read_state() == (False, ["down: "])


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_init_makes_folders_that_only_their_owner_can_look_into(tmp_path: Path) -> None:
    assert flwr_server("init", tmp_path / "new" / "trial", "--name", "trial", "--host", "127.0.0.1").code == 0
    assert flwr_client("init", tmp_path / "north", "--name", "north").code == 0
    assert [mode(tmp_path / name) for name in ("new/trial", "north")] == [0o700, 0o700]


@pytest.mark.parametrize("before", [0o755, 0o750, 0o711, 0o777, 0o705])
def test_a_folder_open_to_others_is_closed_and_that_is_said_once(before: int, coordinator: CoordinatorFolder) -> None:
    coordinator.folder.chmod(before)
    lines = list[str]()
    for _ in range(2):
        restrict_folder_to_owner(read_coordinator_folder(coordinator.folder), lines.append)
    assert [str(coordinator.folder) in line for line in lines] == [True]
    assert mode(coordinator.folder) == 0o700


def test_a_folder_of_another_account_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object) -> None:
        raise PermissionError

    tmp_path.chmod(0o755)
    monkeypatch.setattr(Path, "chmod", refused)
    assert not make_private_folder(tmp_path)
    assert mode(tmp_path) == 0o755


@dataclass
class Registrations:
    """The SuperLink's list of nodes; like the real one it lets no key be registered again."""

    there: list[RegisteredSite] = field(default_factory=list)
    ever: set[bytes] = field(default_factory=set)

    def list_registered_sites(self) -> list[RegisteredSite]:
        return list(self.there)

    def register_site(self, name: str, public_key: str) -> None:
        key = convert_openssh_key_to_pem(public_key)
        assert key not in self.ever
        self.ever.add(key)
        self.there.append(RegisteredSite(len(self.ever), name, key))

    def unregister_site(self, node: RegisteredSite) -> None:
        self.there.remove(node)


@dataclass
class Link:
    coordinator: CoordinatorFolder
    registrations: Registrations
    keys: list[str]

    def settled(self) -> dict[str, bytes]:
        """Synchronize; return name -> key."""
        nodes = synchronize_site_registrations(self.coordinator, cast(SuperLinkControlClient, self.registrations))
        return {node.name: node.public_key for node in nodes}

    def admit(self, name: str, key: int) -> None:
        admit_site(self.coordinator, SiteAdmissionRequest(site=name, public_key=self.keys[key]))


@pytest.fixture
def link(coordinator: CoordinatorFolder, tmp_path: Path) -> Link:
    """A coordinator with one site, which is registered."""
    keys = [format_public_key_line(create_private_key(tmp_path / f"{number}.key"), "comment") for number in range(3)]
    link = Link(coordinator, Registrations(), keys)
    link.admit("north", 0)
    assert link.settled() == {"north": convert_openssh_key_to_pem(keys[0])}
    return link


def test_whoever_is_admitted_is_registered_once_and_turned_out_when_revoked_removed_or_replaced(link: Link) -> None:
    first, second, third = map(convert_openssh_key_to_pem, link.keys)
    link.admit("south", 1)
    assert link.settled() == link.settled() == {"north": first, "south": second}
    revoke_site(link.coordinator, "north")
    link.admit("north", 2)  # between two looks
    assert link.settled() == {"north": third, "south": second}
    revoke_site(link.coordinator, "north")
    (link.coordinator.sites_path / "south.toml").unlink()
    assert link.settled() == link.settled() == {}


def test_a_connection_is_reported_as_the_superlink_sees_it(link: Link) -> None:
    link.registrations.there = [replace(node, state=SiteConnectionState.CONNECTED) for node in link.registrations.there]
    (node,) = synchronize_site_registrations(link.coordinator, cast(SuperLinkControlClient, link.registrations))
    assert node.is_online


SOMEBODY_ELSE = 65534
"""The account ``nobody``."""


def superlink() -> psutil.Process:
    (process,) = [child for child in psutil.Process().children() if "superlink.program" in command_line(child)]
    return process


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorFolder]:
    """A SuperLink that runs, in a folder whose path is longer than that of a socket may be."""
    folder = tmp_path_factory.mktemp("control") / ("long" * 20) / ("path" * 20) / "trial"
    folder.parent.mkdir(parents=True)
    words = ("--name", "trial", "--host", "127.0.0.1", "--port", free_ports(1)[0])
    assert flwr_server("init", folder, *words).code == 0
    made = read_coordinator_folder(folder)
    link = SuperLinkProcess(made)
    with lock_coordinator_folder(made, "start"):  # closes the folder, as flwr-server start does
        pass
    link.start()
    yield made
    link.stop()


@pytest.mark.slow
def test_who_can_open_the_folder_is_answered_and_no_other_port_is_open(running: CoordinatorFolder) -> None:
    assert (is_superlink_answering(running), is_control_socket_listening(running.state_path)) == (True, True)
    with closing(SuperLinkControlClient(running)) as control:
        assert control.list_registered_sites() == []
    with closing(ControlSocketPath(running.state_path)) as place, grpc.insecure_channel(place.grpc_address) as channel:
        code, _ = refused(channel.unary_unary(f"/{CONTROL_SERVICE}/None"), b"", timeout=20)
        assert code == grpc.StatusCode.UNIMPLEMENTED
    listening = [link for link in superlink().net_connections("inet") if link.status == psutil.CONN_LISTEN]
    assert {link.laddr.port for link in listening} == {running.file.port}


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another account")
def test_another_account_of_the_machine_cannot_connect(running: CoordinatorFolder) -> None:
    code = (
        "import os, socket, sys\n"
        f"os.setgroups([]); os.setgid({SOMEBODY_ELSE}); os.setuid({SOMEBODY_ELSE})\n"
        "os.chdir('/')\n"
        "with socket.socket(socket.AF_UNIX) as connection:\n"
        "    try: connection.connect(sys.argv[1])\n"
        "    except PermissionError: print('refused')\n"
    )
    short = Path("/tmp") / f"control-{os.getpid()}"  # every folder above is open, so that only the mode of state counts
    shutil.rmtree(short, ignore_errors=True)
    short.mkdir()
    short.chmod(0o755)
    try:
        state = short / "state"
        state.mkdir()
        state.chmod(0o755)
        with closing(ControlSocketPath(state)) as place, socket.socket(socket.AF_UNIX) as listening:
            listening.bind(place.path)
            listening.listen()
            (state / CONTROL_SOCKET).chmod(0o777)
            call = [sys.executable, "-P", "-c", code, str(state / CONTROL_SOCKET)]
            assert subprocess.run(call, capture_output=True, text=True, check=True).stdout == ""
            state.chmod(running.state_path.stat().st_mode & 0o777)  # as flwr-server start leaves it
            assert subprocess.run(call, capture_output=True, text=True, check=True).stdout == "refused\n"
    finally:
        shutil.rmtree(short)


@pytest.mark.slow
def test_the_socket_that_a_killed_superlink_left_takes_no_connections(tmp_path: Path) -> None:
    assert not is_control_socket_listening(tmp_path)
    with closing(ControlSocketPath(tmp_path)) as place, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place.path)
    assert (tmp_path / CONTROL_SOCKET).is_socket()
    assert not is_control_socket_listening(tmp_path)
    assert not is_control_socket_listening(tmp_path / "absent")


@pytest.mark.slow
def test_a_superlink_that_takes_seconds_to_answer_is_there(running: CoordinatorFolder) -> None:
    """As on a machine that has much to do."""
    process = superlink()
    process.suspend()
    later = threading.Timer(4, process.resume)
    later.start()
    try:
        assert is_superlink_answering(running)
    finally:
        later.cancel()
        process.resume()


@pytest.mark.slow
def test_a_run_that_comes_too_early_is_told_that_start_is_at_work(running: CoordinatorFolder) -> None:
    with lock_coordinator_folder(running, "start"):
        fault = make_no_superlink_fault(running)
    assert fault.problem == "flwr-server start is at work on this folder, but its SuperLink does not answer."
    assert str(running.log_path) in fault.remedy
    assert make_no_superlink_fault(running).problem == "flwr-server start does not run on this folder."
