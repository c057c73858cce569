"""The contract with the installed Flower: what our SuperLink replaces is there to be replaced, and is replaced.

Anyone who raises Flower's version sees here what its new one does otherwise.
"""

import hashlib
import inspect
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from flwr.common.constant import NOOP_FLWR_AID, Status, SubStatus
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.server.superlink.utils import check_abort
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.sql_mixin import SqlMixin
from flwr.supercore.state.schema.objectstore_models import StoredObject
from flwr.superlink.config_loader import SuperLinkLifespanConfig
from flwr.superlink.main import create_app

from server.coordinator.folder import Coordinator, CoordinatorFile
from server.deployment.superlink.local.process import command
from server.deployment.superlink.objects import store
from server.deployment.superlink.objects.files import ObjectFiles
from server.deployment.superlink.program import LinkState, ObjectStore, superlink_command
from tests.server.superlinks import REPLACED, Link

pytestmark = pytest.mark.filterwarnings("ignore:No path_separator found:DeprecationWarning")  # Flower's to fix
FLOWER = f"Flower {version('flwr')} is not what server/deployment/superlink/program.py was written for:"


def names_used_by(function: Any) -> set[str]:
    """The names that a function uses, or a function that is written inside it."""
    inner = [constant for constant in function.__code__.co_consts if inspect.iscode(constant)]
    return set(function.__code__.co_names).union(*(code.co_names for code in inner))


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
        (SqlLinkState, "get_node_info", "(self, *, node_ids=None, owner_aids=None, statuses=None)"),
        (SqlLinkState, "activate_node", "(self, node_id, heartbeat_interval)"),
        (SqlLinkState, "deactivate_node", "(self, node_id)"),
        (SqlLinkState, "acknowledge_node_heartbeat", "(self, node_id, heartbeat_interval)"),
        (SqlLinkState, "get_message_ins", "(self, node_id, limit, *, run_id=None)"),
        (SqlLinkState, "store_message_and_object_tree", "(self, message, object_tree, session_id)"),
        (SqlLinkState, "preregister_object_tree", "(self, object_tree, session_id)"),
        (SqlLinkState, "start_session", "(self, run_id)"),
        (SqlLinkState, "store_object", "(self, run_id, session_id, object_id, object_content)"),
        (SqlLinkState, "get_object", "(self, run_id, object_id)"),
        (SqlLinkState, "delete_messages", "(self, message_ins_ids)"),
        (SqlLinkState, "get_fab", "(self, fab_hash)"),
        (SqlObjectStore, "get_object_tree", "(self, object_id)"),
    ],
)
def test_a_method_that_we_override_or_call_has_the_signature_we_know(owner: type, method: str, parameters: str) -> None:
    assert hasattr(owner, method), f"{FLOWER} {owner.__name__} has no {method}"
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(getattr(owner, method)).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD  # options of a later release, which ours hand on
    ]
    found = str(inspect.Signature(plain))
    assert found == parameters, f"{FLOWER} {owner.__name__}.{method} takes {found}, not {parameters}"


def test_check_abort_takes_a_run_the_forbidden_statuses_and_the_state() -> None:
    assert list(inspect.signature(check_abort).parameters) == ["run_id", "abort_status_list", "state"], FLOWER
    assert {Status.PENDING, Status.STARTING, Status.FINISHED} == {"pending", "starting", "finished"}, FLOWER


def test_the_table_of_objects_has_the_columns_that_we_write() -> None:
    assert {"object_id", "content", "is_available"} <= set(StoredObject.__table__.columns.keys()), FLOWER


def test_flowers_services_begin_and_end_where_ours_are_added() -> None:
    """What ``with_hospital_link`` overrides and reads: no hook means that no hospital could connect."""
    theirs = superlink_command.SuperLinkLifespan
    for method in (theirs.startup, theirs.shutdown, theirs._start_fleet_api):
        assert list(inspect.signature(method).parameters) == ["self"], f"{FLOWER} {method.__qualname__} takes more"
    held = set(theirs.__init__.__code__.co_names)
    assert held >= {"config", "state_factory", "objectstore_factory"}, f"{FLOWER} a lifespan holds {sorted(held)}"
    config = SuperLinkLifespanConfig.__dataclass_fields__
    assert config.keys() >= {"fleet_api_address", "certificates"}, FLOWER
    assert "superlink_lifespan_class" in inspect.signature(create_app).parameters, FLOWER
    assert {"startup", "shutdown"} <= names_used_by(create_app), f"{FLOWER} it begins its services elsewhere"


def test_flowers_own_program_takes_every_argument_that_we_start_it_with(tmp_path: Path) -> None:
    file = CoordinatorFile(name="trial", hosts=("fl.example",), port=9092, control_port=8000)
    started = command(Coordinator(tmp_path, file))
    assert started[1:6] == ["-P", "-m", "server.deployment.superlink.program", "--state", str(tmp_path / "state")]
    assert started[6:10] == ["--connections", "1000", "--connections-per-address", "256"]
    parsed = superlink_command._parse_args_run_superlink().parse_args(started[10:])
    assert (parsed.host, parsed.port, parsed.fleet_api_address) == ("127.0.0.1", 8000, "0.0.0.0:9092"), FLOWER
    assert (parsed.enable_supernode_auth, parsed.isolation, parsed.insecure) == (True, "process", False), FLOWER
    assert parsed.runtime_dependency_install is False, FLOWER


# ---------------------------------------------------------------------- what is in effect


def test_flower_makes_our_stores(link: Link) -> None:
    assert type(link.state) is LinkState
    assert type(link.store) is ObjectStore


def test_what_two_messages_share_stays_until_the_second_has_been_received(link: Link) -> None:
    first, second = link.announced(b"to north", b"trunk"), link.announced(b"to south", b"trunk")
    for session, content in ((first, b"to north"), (first, b"trunk"), (second, b"to south")):
        assert link.state.store_object(link.run, session, named(content), content)
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
        if taken := store._database.acquire(blocking=False):
            store._database.release()
        free.append(taken)

    def looked() -> bool:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return free[-1]

    with getattr(link, which).session():
        assert not looked()
    assert looked()
