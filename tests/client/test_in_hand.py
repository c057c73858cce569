"""A message that a site works on is not lost with the process that works on it, and does not end one for ever."""

import hashlib
import io
import json
import multiprocessing
import os
import signal
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st

import polyclinic.client.connection.service
from polyclinic.client.connection.exit_codes import ClientExitCode, ConnectionNotAccepted
from polyclinic.client.connection.fleet_client import is_message_expired
from polyclinic.client.connection.service import (
    LONG_POLL_S,
    MAX_ATTEMPTS,
    HospitalMessageLoop,
    PendingMessage,
    lock_site_folder,
)
from polyclinic.client.connection.status import ClientStatus
from polyclinic.client.site.settings import load_site, read_site_settings
from polyclinic.client.site.site_file import make_site_folder
from polyclinic.common.errors import WireVersionError
from polyclinic.common.security.call_signatures import WAIT_HEADER, parse_wait_header_s
from polyclinic.common.security.identity import SiteConnectionKit, read_admission_request
from polyclinic.common.wire import fleet_protocol as fleet
from polyclinic.common.wire.fleet_protocol import list_tree_object_ids
from polyclinic.common.wire.flower_messages import make_request, replace_metadata
from polyclinic.common.wire.message_objects import decode_message_objects, encode_message_objects, make_announcement
from polyclinic.server.coordinator.authority import ensure_valid_signing_key
from polyclinic.server.deployment.superlink.request_signing import RequestRecipient, RequestSigner
from tests.client.handshakes import coordinator_in, tls_of
from tests.client.rounds import Killed
from tests.fleet_stub import add_fleet_servicer


@settings(max_examples=25)
@given(received=st.binary(min_size=1), attempt=st.integers(1, MAX_ATTEMPTS))
def test_a_pending_message_outlives_the_process(
    received: bytes, attempt: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("state") / "in-hand"
    PendingMessage(path).store_message(b"an earlier one, and longer", 2)
    PendingMessage(path).store_message(received, attempt)
    assert PendingMessage(path).read_message() == (attempt, received)


def test_what_is_done_is_forgotten_and_may_be_forgotten_again(tmp_path: Path) -> None:
    pending = PendingMessage(tmp_path / "state" / "in-hand")
    assert pending.read_message() is None
    pending.store_message(b"train")
    assert pending.read_message() == (0, b"train")  # no work on it has begun
    pending.remove_message()
    pending.remove_message()
    assert pending.read_message() is None
    assert list((tmp_path / "state").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"\1"])
def test_a_file_without_a_message_counts_for_nothing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "in-hand").write_bytes(content)
    assert PendingMessage(tmp_path / "in-hand").read_message() is None


def test_a_process_killed_while_it_takes_a_message_leaves_the_one_before_whole(tmp_path: Path) -> None:
    pending = PendingMessage(tmp_path / "in-hand")
    pending.store_message(b"first, and longer", 2)

    def die_while_writing() -> None:
        os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
        pending.store_message(b"second")

    process = multiprocessing.get_context("fork").Process(target=die_while_writing)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert pending.read_message() == (2, b"first, and longer")


ARCHIVE = io.BytesIO()
with zipfile.ZipFile(ARCHIVE, "w") as packed:
    packed.writestr("pyproject.toml", "")
BUNDLE = ARCHIVE.getvalue()
"""An app that is a name and nothing more."""


def train(ttl: float = 3600.0, age_s: float = 0.0, **fields: str) -> Message:
    content = RecordDict({"fields": ConfigRecord({"run": "abc", "round": 1, **fields})})
    request = make_request(content, 5, "train", ttl=ttl)
    return replace_metadata(request, run_id=7, src_node_id=1, created_at=time.time() - age_s)


class Desk:
    """As much of Flower's Fleet API as one message takes; anyone who then asks for another is sent away."""

    def __init__(self, message: Message) -> None:
        self._tree, self._contents = encode_message_objects(message)
        self.name: str = self._tree.object_id
        announced = [make_announcement(message, self.name)]
        self.waiting = [fleet.PullMessagesResponse(messages_list=announced, message_object_trees=[self._tree])]
        self._announced: list[Any] = []
        self._objects: dict[str, bytes] = {}
        self.confirmed: list[str] = []
        self.trouble: dict[str, list[grpc.StatusCode]] = {}
        self.lost = False  # whether the content of the message is gone
        self.waits: list[str] = []
        self.beat_s = 0.0  # how long a sign of life is under way
        self.beats = 0
        self.beats_at_leaving = 99
        self.leaving: Callable[[], None] = lambda: None

    @property
    def replies(self) -> list[Message]:
        """Those of which everything has arrived."""
        trees = [tree for tree in self._announced if self._objects.keys() >= set(list_tree_object_ids(tree))]
        return [decode_message_objects(tree.object_id, dict(self._objects), 1e9) for tree in trees]

    def _perhaps_fail(self, call: str, context: grpc.ServicerContext) -> None:
        if self.trouble.get(call):
            context.abort(self.trouble[call].pop(0), "for a test")

    def ActivateNode(self, request: Any, context: grpc.ServicerContext) -> Any:
        return fleet.ActivateNodeResponse(node_id=5)

    def DeactivateNode(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.beats_at_leaving = self.beats
        self.leaving()
        return fleet.DeactivateNodeResponse()

    def SendNodeHeartbeat(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.beats += 1
        time.sleep(self.beat_s)
        self.beats -= 1
        return fleet.SendNodeHeartbeatResponse(success=True)

    def PullMessages(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.waits += [str(value) for name, value in context.invocation_metadata() if name == WAIT_HEADER]
        if not self.waiting:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "timestamp")
        return self.waiting.pop()

    def PullObject(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._perhaps_fail("PullObject", context)
        if self.lost:
            return fleet.PullObjectResponse(object_found=False)
        content = self._contents[request.object_id]
        return fleet.PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def GetRun(self, request: Any, context: grpc.ServicerContext) -> Any:
        return fleet.GetRunResponse(run=fleet.Run(run_id=7, fab_hash=hashlib.sha256(BUNDLE).hexdigest()))

    def GetFab(self, request: Any, context: grpc.ServicerContext) -> Any:
        return fleet.GetFabResponse(fab=fleet.Fab(content=BUNDLE))

    def PushMessages(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._perhaps_fail("PushMessages", context)
        self._announced += request.message_object_trees
        return fleet.PushMessagesResponse(
            objects_to_push=list_tree_object_ids(request.message_object_trees[0]), session_id="session"
        )

    def PushObject(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._objects[request.object_id] = request.object_content
        return fleet.PushObjectResponse(stored=True)

    def ConfirmMessageReceived(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._perhaps_fail("ConfirmMessageReceived", context)
        self.confirmed.append(request.message_object_id)
        return fleet.ConfirmMessageReceivedResponse()


def fail(death: BaseException) -> None:
    raise death


STOPPED, KILLED_AT_WORK = partial(fail, SystemExit(0)), partial(fail, Killed())
REFUSED = partial(fail, WireVersionError("the other side is of another release"))


class Hospital:
    """A site whose work is to count how often it was begun, or what a test sets."""

    def __init__(self, folder: Path, desk: Desk) -> None:
        self.folder, self.desk, self.begun = folder, desk, 0
        self.lines: list[str] = []
        self.work: Callable[[], None] = lambda: None

    def start(self, work: Callable[[], None] = lambda: None) -> ClientExitCode:
        """Run as ``flwr-client start``, until the desk sends it away or its process is ended."""
        self.work = work
        settings = read_site_settings(self.folder)
        kit = SiteConnectionKit.model_validate_json((self.folder / "kit.json").read_text(encoding="utf-8"))
        service = HospitalMessageLoop(
            settings, kit, load_site(settings), self.lines.append, ClientStatus("north"), self._app
        )
        with pytest.raises((ConnectionNotAccepted, SystemExit, Killed)) as ended:
            service.run_message_loop()
        return getattr(ended.value, "exit_code", ClientExitCode.STOPPED)

    def _app(self, *_: object) -> ClientApp:
        app = ClientApp()

        @app.train()
        def _(message: Message, context: Context) -> Message:
            self.begun += 1
            self.work()
            return Message(RecordDict({"fields": ConfigRecord({"begun": self.begun})}), reply_to=message)

        return app

    @property
    def left(self) -> tuple[int, bytes] | None:
        return PendingMessage(self.folder / "state" / "in-hand").read_message()

    @property
    def reply(self) -> Message:
        """The one reply that has arrived."""
        (reply,) = self.desk.replies
        return reply


SITE = 'name = "north"\ndevice = "cpu"\n[data]\nkind = "phantom"\nimages = 20\nimage_size = 16\n'


HospitalOf = Callable[..., Hospital]


@pytest.fixture
def hospital_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HospitalOf]:
    """Makes a site, and the desk at which a message of :func:`train` waits for it, over TLS."""
    monkeypatch.setattr(polyclinic.client.connection.service, "FIRST_RETRY_S", 0.0)
    coordinator, folder = coordinator_in(tmp_path / "trial"), tmp_path / "north"
    make_site_folder(folder, "north")
    (folder / "site.toml").write_text(SITE, encoding="utf-8")
    public_key = read_admission_request(folder / "north.request").public_key
    signing = RequestSigner(*ensure_valid_signing_key(coordinator), lambda: {5: RequestRecipient("north", public_key)})
    server = grpc.server(ThreadPoolExecutor(4))
    port = server.add_secure_port("127.0.0.1:0", tls_of(coordinator))
    kit = SiteConnectionKit(
        coordinator="trial",
        address=f"127.0.0.1:{port}",
        site="north",
        public_key=public_key,
        ca_certificate=coordinator.ca_certificate_path.read_text(encoding="ascii"),
    )
    (folder / "kit.json").write_text(kit.model_dump_json(), encoding="utf-8")

    def make(**message: Any) -> Hospital:
        request = train(**message)
        signing.sign_request(request)
        hospital = Hospital(folder, Desk(request))
        add_fleet_servicer(hospital.desk, server)
        server.start()
        return hospital

    yield make
    server.stop(None).wait()


def test_an_answered_message_is_done_and_the_site_says_why_its_last_reply_was_left_out(hospital_of: HospitalOf) -> None:
    hospital = hospital_of(left_out="round 4: trunk was expected")
    assert hospital.start() == ClientExitCode.CLOCK
    assert hospital.reply.content.config_records["fields"]["begun"] == 1
    assert hospital.reply.metadata.reply_to_message_id == hospital.desk.name
    assert (hospital.desk.confirmed, hospital.left) == ([hospital.desk.name], None)
    assert sum("round 4: trunk was expected" in line for line in hospital.lines) == 1


def test_a_site_gives_back_the_memory_of_its_work_once_while_it_waits(
    hospital_of: HospitalOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = list[int]()
    hospital = hospital_of()
    monkeypatch.setattr(
        polyclinic.client.connection.service, "release_free_memory", lambda: released.append(hospital.begun)
    )
    monkeypatch.setattr(polyclinic.client.connection.service, "MIN_POLL_PAUSE_S", 0.01)
    nothing = fleet.PullMessagesResponse()
    hospital.desk.waiting[:0] = [nothing]  # before the first message there is nothing to give back
    hospital.desk.waiting += [nothing, nothing]
    assert hospital.start() == ClientExitCode.CLOCK
    assert released == [1]


def test_a_refusal_stands_where_a_site_is_stopped_while_it_leaves(hospital_of: HospitalOf) -> None:
    hospital = hospital_of()
    hospital.desk.leaving = lambda: os.kill(os.getpid(), signal.SIGTERM)
    before = signal.signal(signal.SIGTERM, lambda number, frame: STOPPED())
    try:
        assert hospital.start(REFUSED) == ClientExitCode.VERSION
    finally:
        signal.signal(signal.SIGTERM, before)


def test_no_heartbeat_is_sent_when_a_site_signs_off(hospital_of: HospitalOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polyclinic.client.connection.service, "HEARTBEAT_PAUSE_S", 0.001)
    hospital = hospital_of()
    hospital.desk.beat_s = 0.2

    def work() -> None:
        time.sleep(0.1)  # a heartbeat has begun
        REFUSED()

    assert hospital.start(work) == ClientExitCode.VERSION
    assert hospital.desk.beats_at_leaving == 0


@pytest.mark.parametrize("times", [1, 4])  # more often than a message may kill a process
def test_work_at_which_a_process_was_stopped_is_done_by_the_next(times: int, hospital_of: HospitalOf) -> None:
    hospital = hospital_of()
    for _ in range(times):
        assert hospital.start(STOPPED) == ClientExitCode.STOPPED
        assert (hospital.desk.replies, hospital.desk.confirmed) == ([], [])
    assert hospital.start() == ClientExitCode.CLOCK
    assert hospital.reply.content.config_records["fields"]["begun"] == 1 + times
    assert "taking up again the work that was interrupted" in hospital.lines
    assert hospital.left is None


def test_a_message_that_killed_two_processes_is_put_aside_with_the_reason(hospital_of: HospitalOf) -> None:
    hospital = hospital_of()
    for _ in range(2):
        assert hospital.start(KILLED_AT_WORK) == ClientExitCode.STOPPED
        assert hospital.desk.replies == []
    assert hospital.start() == ClientExitCode.CLOCK
    assert "died 2 times" in hospital.reply.error.reason
    assert (hospital.begun, hospital.left) == (2, None)
    (aside,) = (hospital.folder / "state" / "set-aside").iterdir()
    assert "died 2 times" in json.loads(aside.read_bytes())["reason"]


@pytest.mark.parametrize(("ttl", "age_s", "later_s", "done"), [(60, 0, 400, False), (60, 300, 0, True)])
def test_a_message_is_taken_up_again_until_it_is_later_than_clocks_may_differ(
    ttl: float, age_s: float, later_s: float, done: bool, hospital_of: HospitalOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    hospital = hospital_of(ttl=ttl, age_s=age_s)
    hospital.start(STOPPED)
    assert hospital.left is not None
    monkeypatch.setattr(
        polyclinic.client.connection.service,
        "is_message_expired",
        lambda received, now: is_message_expired(received, now + later_s),
    )
    assert hospital.start() == ClientExitCode.CLOCK
    assert (hospital.begun, len(hospital.desk.replies), hospital.left) == (1 + done, done, None)


def test_work_for_a_run_that_has_ended_meanwhile_is_forgotten(hospital_of: HospitalOf) -> None:
    hospital = hospital_of()
    hospital.start(STOPPED)
    hospital.desk.trouble["PullObject"] = [grpc.StatusCode.PERMISSION_DENIED] * 9
    hospital.desk.trouble["ConfirmMessageReceived"] = [grpc.StatusCode.PERMISSION_DENIED]
    assert hospital.start() == ClientExitCode.CLOCK
    assert (hospital.begun, hospital.desk.replies, hospital.left) == (1, [], None)


def test_a_message_whose_content_is_gone_is_confirmed_so_that_it_does_not_come_again(hospital_of: HospitalOf) -> None:
    hospital = hospital_of()
    hospital.desk.lost = True
    assert hospital.start() == ClientExitCode.CLOCK
    assert (hospital.begun, hospital.desk.confirmed, hospital.left) == (0, [hospital.desk.name], None)
    assert [parse_wait_header_s(wait) for wait in hospital.desk.waits] == [LONG_POLL_S, LONG_POLL_S]


@pytest.mark.parametrize(("call", "failures"), [("PushMessages", 4), ("PullObject", 12)], ids=["sent", "fetched"])
def test_a_line_that_breaks_while_a_message_is_fetched_or_its_reply_sent_costs_no_more_work(
    call: str, failures: int, hospital_of: HospitalOf
) -> None:
    """So many failures break each connection three times."""
    hospital = hospital_of()
    hospital.desk.trouble[call] = [grpc.StatusCode.UNAVAILABLE] * failures
    assert hospital.start() == ClientExitCode.CLOCK
    assert hospital.reply.content.config_records["fields"]["begun"] == 1
    assert (hospital.begun, hospital.left) == (1, None)


def test_half_written_files_of_a_killed_process_are_gone_at_the_next_start(tmp_path: Path) -> None:
    state = tmp_path / "state"
    left = [state / folder / f".a.json.{2**22 + 1}-7.part" for folder in ("", "questions", "memory/run", "privacy")]
    being_written = state / "masked" / f".a.json.{os.getppid()}-7.part"
    for path in (*left, being_written):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    with lock_site_folder(state):
        assert not any(path.exists() for path in left)  # no process can have this number
        assert being_written.exists()
