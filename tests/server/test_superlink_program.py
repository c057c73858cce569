"""The contract with the installed Flower: what our SuperLink replaces is there to be replaced, and is replaced.

Whoever raises Flower's version sees here what its new one does otherwise.
"""

import hashlib
import importlib
import inspect
import shutil
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import pytest
from flwr.common.constant import NOOP_FLWR_AID, Status, SubStatus
from flwr.proto import fleet_pb2_grpc
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.server.superlink.fleet.grpc_rere.fleet_servicer import FleetServicer
from flwr.server.superlink.linkstate import LinkStateFactory, linkstate_factory
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.server.superlink.utils import check_abort
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.object_store import ObjectStoreFactory, object_store_factory
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.sql_mixin import SqlMixin
from flwr.supercore.state.schema.objectstore_models import StoredObject
from flwr.superlink.federation import NoOpFederationManager

from server.coordinator import Coordinator, CoordinatorFile
from server.superlink import object_store, program
from server.superlink.object_files import ObjectFiles
from server.superlink.object_service import parsed_push
from server.superlink.process import command
from server.superlink.program import LinkState, ObjectStore, superlink_command
from server.superlink.steady_clock import OF_THE_SUPERLINK

pytestmark = pytest.mark.filterwarnings("ignore:No path_separator found:DeprecationWarning")  # Flower's to mend
HandlerCallDetails = namedtuple("HandlerCallDetails", ("method", "invocation_metadata"))
FLOWER = f"Flower {version('flwr')} is not what server/superlink/program.py was written for:"
REPLACED = (
    (linkstate_factory, "SqlLinkState", LinkStateFactory.state),
    (object_store_factory, "SqlObjectStore", ObjectStoreFactory.store),
    (superlink_command, "add_FleetServicer_to_server", superlink_command._run_fleet_api_grpc_rere),
)
"""Module, the name in it that we replace, and Flower's function that must look it up there when it runs."""


def named(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# ---------------------------------------------------------------------- what Flower must have


@pytest.mark.parametrize(("module", "name", "user"), REPLACED)
def test_flower_looks_up_what_we_replace_where_we_replace_it(module: Any, name: str, user: Callable[..., Any]) -> None:
    assert hasattr(module, name), f"{FLOWER} {module.__name__} has no {name}"
    assert inspect.getmodule(user) is module, f"{FLOWER} {user.__qualname__} has moved to {inspect.getmodule(user)}"
    assert name in user.__code__.co_names, f"{FLOWER} {user.__qualname__} does not use {name}"


@pytest.mark.parametrize(
    ("owner", "method", "parameters"),
    [
        (SqlMixin, "session", "(self)"),
        (SqlMixin, "initialize", "(self, log_queries=False)"),
        (SqlObjectStore, "__init__", "(self, database_path, verify=True)"),
        (SqlObjectStore, "put", "(self, object_id, object_content)"),
        (SqlObjectStore, "get", "(self, object_id)"),
        (SqlObjectStore, "delete", "(self, object_id)"),
        (SqlObjectStore, "clear", "(self)"),
        (SqlObjectStore, "__contains__", "(self, object_id)"),
        (SqlLinkState, "__init__", "(self, database_path, federation_manager, object_store)"),
        (SqlLinkState, "get_run_status", "(self, run_ids)"),
        (SqlLinkState, "get_node_id_by_public_key", "(self, public_key)"),
        (SqlLinkState, "store_traffic", "(self, run_id, *, bytes_sent, bytes_recv)"),
        (SqlLinkState, "_cleanup_expired_task_tokens", "(self)"),
        (FleetServicer, "PushObject", "(self, request, context)"),
        (FleetServicer, "PullObject", "(self, request, context)"),
    ],
)
def test_a_method_that_we_override_or_call_has_the_signature_we_know(owner: type, method: str, parameters: str) -> None:
    assert hasattr(owner, method), f"{FLOWER} {owner.__name__} has no {method}"
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(getattr(owner, method)).parameters.values()
    ]
    found = str(inspect.Signature(plain))
    assert found == parameters, f"{FLOWER} {owner.__name__}.{method} takes {found}, not {parameters}"


def test_check_abort_takes_a_run_the_forbidden_statuses_and_the_state() -> None:
    assert list(inspect.signature(check_abort).parameters) == ["run_id", "abort_status_list", "state"], FLOWER
    assert {Status.PENDING, Status.STARTING, Status.FINISHED} == {"pending", "starting", "finished"}, FLOWER


def test_the_table_of_objects_has_the_columns_that_we_write() -> None:
    assert {"object_id", "content", "is_available"} <= set(StoredObject.__table__.columns.keys()), FLOWER


def test_flowers_servicer_hands_its_methods_over_in_the_two_calls_that_we_stand_behind() -> None:
    calls: list[str] = []
    methods: dict[str, Any] = {}

    class Recorder:
        def add_generic_rpc_handlers(self, handlers: Any) -> None:
            calls.append("generic")

        def add_registered_method_handlers(self, service: str, found: dict[str, Any]) -> None:
            calls.append(service)
            methods.update(found)

    fleet_pb2_grpc.add_FleetServicer_to_server(FleetServicer(None, None, True), Recorder())  # type: ignore[arg-type]
    assert calls == ["generic", "flwr.proto.Fleet"], FLOWER
    assert {"PushObject", "PullObject"} <= methods.keys(), FLOWER


def test_flowers_own_program_takes_every_argument_that_we_start_it_with(tmp_path: Path) -> None:
    file = CoordinatorFile(name="trial", hosts=("fl.example",), port=9092, control_port=8000)
    started = command(Coordinator(tmp_path, file))
    assert started[1:5] == ["-m", "server.superlink.program", "--objects", str(tmp_path / "state" / "objects")]
    assert started[5:7] == ["--clock", str(tmp_path / "state" / "clock.json")]
    parsed = superlink_command._parse_args_run_superlink().parse_args(started[7:])
    assert (parsed.host, parsed.port, parsed.fleet_api_address) == ("127.0.0.1", 8000, "0.0.0.0:9092"), FLOWER
    assert (parsed.enable_supernode_auth, parsed.isolation, parsed.insecure) == (True, "process", False), FLOWER
    assert parsed.runtime_dependency_install is False, FLOWER


# ---------------------------------------------------------------------- what is in effect


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class Link:
    """A SuperLink's two stores and one run that goes on, as Flower makes them after ``main()``."""

    folder: Path
    clock: Clock

    def __post_init__(self) -> None:
        self.files = ObjectStore.files
        self.stores = ObjectStoreFactory(str(self.folder / "superlink.db"))
        self.states = LinkStateFactory(self.stores.database, NoOpFederationManager(), self.stores)
        self.state, self.store = self.states.state(), self.stores.store()
        self.run, self.task = self.begun()

    def begun(self) -> tuple[int, int]:
        """A run that goes on, and its task."""
        run = self.created()
        (found,) = self.state.get_run_info(run_ids=[run])
        task = int(found.primary_task_id or 0)
        assert self.state.claim_task(task)
        assert self.state.activate_task(task)
        return run, task

    def created(self) -> int:
        """A run that has not begun."""
        return self.state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP)

    def announced(self, *contents: bytes) -> str:
        """Announce objects, the first one above the others; the push session they are expected in."""
        top, *below = (named(content) for content in contents)
        session = self.state.start_session(self.run)
        tree = ObjectTree(object_id=top, children=[ObjectTree(object_id=name) for name in below])
        self.state.preregister_object_tree(tree, session)
        return session

    def restarted(self) -> ObjectStore:
        """The store of a new process on the same database and files."""
        store = ObjectStore(self.stores.database)
        store.initialize()
        return store


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Flower's empty database, for to make it takes a second."""
    path = tmp_path_factory.mktemp("empty") / "superlink.db"
    store = SqlObjectStore(str(path))
    store.initialize()
    assert store._engine
    store._engine.dispose()
    return path


@pytest.fixture
def link(database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Link:
    """``main()`` has run, up to the place where Flower's program would begin."""
    shutil.copytree(database.parent, tmp_path, dirs_exist_ok=True)
    clock, begun = Clock(), list[list[str]]()
    for module, name, _ in REPLACED:
        monkeypatch.setattr(module, name, getattr(module, name))  # put back after the test
    monkeypatch.setattr(ObjectStore, "files", None, raising=False)
    monkeypatch.setattr(program, "time", clock)
    monkeypatch.setattr(superlink_command, "flower_superlink", lambda: begun.append(list(sys.argv)))
    for name in OF_THE_SUPERLINK:
        monkeypatch.setattr(f"{name}.now", vars(importlib.import_module(name))["now"])
    ours = ["--objects", str(tmp_path / "objects"), "--clock", str(tmp_path / "clock.json")]
    monkeypatch.setattr(sys, "argv", ["superlink", *ours, "--isolation", "process"])
    program.main()
    assert begun == [["superlink", "--isolation", "process"]]
    return Link(tmp_path, clock)


@pytest.fixture
def fleet(link: Link) -> Iterator[FleetStub]:
    """A site's end of Flower's own Fleet API over a socket; keys are looked at elsewhere."""
    server = superlink_command._run_fleet_api_grpc_rere("127.0.0.1:0", link.states, link.stores, False, None)
    try:
        with grpc.insecure_channel(server.bound_address) as channel:
            yield FleetStub(channel)
    finally:
        server.stop(None).wait()


def pushed(fleet: FleetStub, link: Link, session: str, content: bytes, name: str = "") -> bool:
    request = PushObjectRequest(
        run_id=link.run, session_id=session, object_id=name or named(content), object_content=content
    )
    return bool(fleet.PushObject(request).stored)


def pulled(fleet: FleetStub, link: Link, name: str) -> tuple[bool, bool, bytes]:
    """Found, available, content."""
    answer = fleet.PullObject(PullObjectRequest(run_id=link.run, object_id=name))
    return answer.object_found, answer.object_available, answer.object_content


def test_flower_makes_our_stores(link: Link) -> None:
    assert type(link.state) is LinkState
    assert type(link.store) is ObjectStore


def test_both_ways_in_which_grpc_looks_a_method_up_lead_to_ours(link: Link) -> None:
    found: list[Any] = []

    class Recorder:
        def add_generic_rpc_handlers(self, handlers: Any) -> None:
            if handlers[0].service_name() == "flwr.proto.Fleet":  # not what sites may ask beforehand
                found.append(lambda method: handlers[0].service(HandlerCallDetails(f"/flwr.proto.Fleet/{method}", ())))

        def add_registered_method_handlers(self, service: str, methods: Mapping[str, Any]) -> None:
            found.append(methods.get)

    server: Any = Recorder()
    superlink_command.add_FleetServicer_to_server(FleetServicer(link.states, link.stores, True), server)
    assert [way("PushObject").request_deserializer for way in found] == [parsed_push] * 2
    assert [way("PullObject").response_serializer for way in found] == [bytes] * 2
    assert all(way("ActivateNode") for way in found)


def test_what_a_site_pushes_lies_in_a_file_and_comes_back_and_not_in_the_database(fleet: FleetStub, link: Link) -> None:
    content = bytes(range(256)) * 1000
    session = link.announced(content)
    assert pulled(fleet, link, named(content)) == (True, False, b"")
    assert pushed(fleet, link, session, content)
    assert link.files.read(named(content)) == content
    assert SqlObjectStore.get(link.store, named(content)) == b""  # type: ignore[arg-type]
    assert pulled(fleet, link, named(content)) == (True, True, content)


def test_what_is_not_announced_is_not_kept(fleet: FleetStub, link: Link) -> None:
    session = link.announced(b"announced")
    assert not pushed(fleet, link, session, b"stray")
    assert link.files.names() == set()
    assert pulled(fleet, link, named(b"stray")) == (False, False, b"")


def test_content_of_another_hash_is_not_kept_and_the_right_one_may_still_come(fleet: FleetStub, link: Link) -> None:
    session = link.announced(b"right")
    assert not pushed(fleet, link, session, b"wrong", named(b"right"))
    assert link.files.names() == set()
    assert pulled(fleet, link, named(b"right")) == (True, False, b"")
    assert pushed(fleet, link, session, b"right")
    assert pulled(fleet, link, named(b"right")) == (True, True, b"right")


def test_nothing_is_handed_out_to_a_run_that_is_over_also_where_another_run_needs_it(
    fleet: FleetStub, link: Link
) -> None:
    over, task = link.begun()
    assert pushed(fleet, link, link.announced(b"weights"), b"weights")
    link.state.finish_task(task, SubStatus.COMPLETED, "")
    with pytest.raises(grpc.RpcError) as refused:
        fleet.PullObject(PullObjectRequest(run_id=over, object_id=named(b"weights")))
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert pulled(fleet, link, named(b"weights")) == (True, True, b"weights")


@pytest.mark.parametrize("name", ["../authority.key", "{folder}/authority.key"])
def test_a_site_cannot_read_the_coordinators_other_files(name: str, fleet: FleetStub, link: Link) -> None:
    (link.folder / "authority.key").write_bytes(b"secret")
    assert pulled(fleet, link, name.format(folder=link.folder))[2] == b""


@pytest.mark.parametrize("name", ["../authority.key", "{folder}/authority.key"])
def test_a_site_cannot_remove_the_coordinators_other_files(name: str, fleet: FleetStub, link: Link) -> None:
    (link.folder / "authority.key").write_bytes(b"secret")
    asked = name.format(folder=link.folder)
    fleet.ConfirmMessageReceived(ConfirmMessageReceivedRequest(run_id=link.run, message_object_id=asked))
    assert (link.folder / "authority.key").exists()


def test_a_message_that_has_been_received_leaves_no_file(fleet: FleetStub, link: Link) -> None:
    contents = (b"message", b"weights")
    session = link.announced(*contents)
    assert all(pushed(fleet, link, session, content) for content in contents)
    fleet.ConfirmMessageReceived(ConfirmMessageReceivedRequest(run_id=link.run, message_object_id=named(b"message")))
    assert link.files.names() == set()


def test_what_two_messages_share_stays_until_the_second_has_been_received(fleet: FleetStub, link: Link) -> None:
    first, second = link.announced(b"to north", b"trunk"), link.announced(b"to south", b"trunk")
    for session, content in ((first, b"to north"), (first, b"trunk"), (second, b"to south")):
        assert pushed(fleet, link, session, content)
    link.store.delete(named(b"to north"))
    assert link.files.names() == {named(b"to south"), named(b"trunk")}
    link.store.delete(named(b"to south"))
    assert link.files.names() == set()


def test_what_the_coordinators_run_has_written_needs_only_to_be_announced(link: Link) -> None:
    session = link.announced(b"trunk")
    link.files.write(named(b"trunk"), b"trunk")
    assert link.state.store_object(link.run, session, named(b"trunk"), b"")
    assert link.store.get(named(b"trunk")) == b"trunk"


def test_what_is_announced_as_written_and_is_not_there_is_refused(link: Link) -> None:
    session = link.announced(b"trunk")
    assert not link.state.store_object(link.run, session, named(b"trunk"), b"")
    assert link.store.get(named(b"trunk")) == b""


# ---------------------------------------------------------------------- after a restart


def test_a_whole_object_is_there_after_a_restart(link: Link) -> None:
    session = link.announced(b"trunk")
    assert link.state.store_object(link.run, session, named(b"trunk"), b"trunk")
    store = link.restarted()
    assert store.get(named(b"trunk")) == b"trunk"
    assert store.preregister(link.run, ObjectTree(object_id=named(b"trunk"))) == []


@pytest.mark.parametrize(
    "crash", [lambda path: path.write_bytes(b"tru"), lambda path: path.write_bytes(b"\0" * 5), Path.unlink]
)
def test_an_object_that_a_crash_damaged_counts_as_not_yet_arrived(crash: Callable[[Path], Any], link: Link) -> None:
    session = link.announced(b"whole", b"trunk")
    for content in (b"whole", b"trunk"):
        assert link.state.store_object(link.run, session, named(content), content)
    crash(link.folder / "objects" / named(b"trunk"))
    store = link.restarted()
    assert store.get(named(b"trunk")) == b""
    assert store.get(named(b"whole")) == b"whole"
    assert link.files.names() == {named(b"whole")}
    assert store.preregister(link.run, ObjectTree(object_id=named(b"trunk"))) == [named(b"trunk")]


def test_files_that_no_message_has_are_gone_after_a_restart(link: Link) -> None:
    link.files.write(named(b"stray"), b"stray")
    (link.folder / "objects" / ".half.1.2.part").write_bytes(b"half")
    link.restarted()
    assert list((link.folder / "objects").iterdir()) == []


def test_an_object_whose_file_is_there_need_not_be_sent(link: Link) -> None:
    link.files.write(named(b"there"), b"there")
    tree = ObjectTree(object_id=named(b"root"), children=[ObjectTree(object_id=named(b"there"))])
    assert link.store.preregister(link.run, tree) == [named(b"root")]
    assert link.store.get(named(b"there")) == b"there"
    link.store.delete(named(b"root"))
    assert link.files.names() == set()


def test_clearing_the_store_leaves_no_file(link: Link) -> None:
    assert link.state.store_object(link.run, link.announced(b"trunk"), named(b"trunk"), b"trunk")
    link.store.clear()
    assert ObjectFiles(link.folder / "objects").names() == set()


# ---------------------------------------------------------------------- what is asked of the database less often


def test_a_revoked_key_is_refused_after_at_most_a_second(link: Link) -> None:
    node = link.state.create_node(NOOP_FLWR_AID, "owner", b"key", 30.0)
    assert link.state.get_node_id_by_public_key(b"key") == node
    link.state.delete_node(NOOP_FLWR_AID, node)
    link.clock.now += 1.01
    assert link.state.get_node_id_by_public_key(b"key") is None


def test_a_key_that_is_registered_now_is_known_at_once(link: Link) -> None:
    assert link.state.get_node_id_by_public_key(b"key") is None
    node = link.state.create_node(NOOP_FLWR_AID, "owner", b"key", 30.0)
    assert link.state.get_node_id_by_public_key(b"key") == node


def test_a_stopped_run_is_known_as_stopped_after_at_most_a_second(link: Link) -> None:
    assert link.state.get_run_status({link.run})[link.run].status == Status.RUNNING
    link.state.finish_task(link.task, SubStatus.STOPPED, "")
    link.clock.now += 1.01
    assert link.state.get_run_status({link.run})[link.run].status == Status.FINISHED


def test_within_a_second_the_same_is_not_asked_twice_and_runs_are_not_taken_for_one_another(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[set[int]] = []
    ask = SqlLinkState.get_run_status

    def counting(state: SqlLinkState, run_ids: set[int]) -> Any:
        asked.append(run_ids)
        return ask(state, run_ids)

    monkeypatch.setattr(SqlLinkState, "get_run_status", counting)
    other = link.created()
    statuses = [link.state.get_run_status({run})[run].status for run in (link.run, other, link.run, other)]
    assert statuses == [Status.RUNNING, Status.PENDING] * 2
    assert asked == [{link.run}, {other}]


def test_traffic_is_not_counted_and_no_count_is_refused(link: Link) -> None:
    link.state.store_traffic(link.run, bytes_sent=0, bytes_recv=0)
    link.state.store_traffic(link.run, bytes_sent=7, bytes_recv=9)
    (run,) = link.state.get_run_info(run_ids=[link.run])
    assert (run.bytes_sent, run.bytes_recv) == (0, 0)


@pytest.mark.parametrize("which", ["state", "store"])
def test_one_session_with_the_database_at_a_time(which: str, link: Link) -> None:
    free: list[bool] = []

    def look() -> None:
        if taken := object_store._database.acquire(blocking=False):
            object_store._database.release()
        free.append(taken)

    def looked() -> bool:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return free[-1]

    with getattr(link, which).session():
        assert not looked()
    assert looked()
