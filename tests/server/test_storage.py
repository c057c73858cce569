"""What the SuperLink keeps through kills and restarts; a damaged database is set aside, and a sound one never is."""

import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from polyclinic.server.coordinator.folder import CoordinatorFolder, CoordinatorTomlContent
from polyclinic.server.deployment.superlink import database as module
from polyclinic.server.deployment.superlink.database import (
    COMPANION_FILE_ENDINGS,
    DATABASE_FILE,
    describe_database_damage,
    set_aside_unusable_database,
)
from polyclinic.server.deployment.superlink.messages import (
    NoReplyReason,
    ReplyAcceptance,
    StoredMessage,
    SuperLinkStorage,
)
from polyclinic.server.deployment.superlink.object_store import ObjectFileStore
from polyclinic.server.deployment.superlink.registrations import RUN_HEARTBEAT_TIMEOUT_S, SiteConnectionState
from tests.server.superlinks import DATABASE, INTERVAL_S, Link, named


@pytest.fixture
def node(link: Link) -> int:
    """A site that is connected."""
    node = link.storage.sites.register_site("north", b"key")
    assert link.storage.sites.mark_site_connected(node, INTERVAL_S)
    return node


def write(link: Link, *contents: bytes) -> None:
    for content in contents:
        link.files.write_object(named(content), content)


def pushed(link: Link, node: int, *contents: bytes) -> str:
    """Send a request whose objects are all there; return its name."""
    write(link, *contents)
    assert link.storage.messages.store_requests([link.request(node, *contents)]) == ([named(contents[0])], [])
    return named(contents[0])


@pytest.fixture
def request_name(link: Link, node: int) -> str:
    """A request that the site was handed."""
    name = pushed(link, node, b"to north")
    assert link.storage.messages.hand_out_next_request(node)
    return name


def reply(link: Link, node: int, request_name: str, *contents: bytes) -> StoredMessage:
    message = link.request(node, *contents)
    message.is_reply, message.partner = True, request_name
    return message


def test_what_two_messages_share_stays_until_the_second_is_let_go(link: Link, node: int) -> None:
    first, second = pushed(link, node, b"to north", b"trunk"), pushed(link, node, b"to south", b"trunk")
    link.storage.messages.release_message_objects(first)
    assert link.files.list_object_ids() == {named(b"to south"), named(b"trunk")}
    link.storage.messages.release_message_objects(second)
    link.storage.messages.release_message_objects(second)  # said twice
    assert link.files.list_object_ids() == set()


def test_only_what_is_missing_is_asked_for_and_an_object_that_nobody_needs_is_not_stored(link: Link, node: int) -> None:
    write(link, b"trunk")
    request = link.request(node, b"to north", b"trunk")
    assert link.storage.messages.store_requests([request]) == ([request.root], [request.root])
    write(link, b"to north")
    assert link.storage.messages.store_requests([request]) == ([request.root], [])  # the same call made again
    link.storage.messages.release_message_objects(request.root)
    assert not link.storage.messages.store_needed_object(named(b"late"), b"late")
    assert link.files.list_object_ids() == set()


@pytest.mark.parametrize(
    "crash", [lambda path: path.write_bytes(b"tru"), lambda path: path.write_bytes(b"\0" * 5), Path.unlink]
)
def test_an_object_that_a_crash_damaged_is_asked_for_again(crash: Callable[[Path], Any], link: Link, node: int) -> None:
    pushed(link, node, b"whole", b"trunk")
    crash(link.folder / "objects" / named(b"trunk"))
    messages = link.restarted().messages
    assert link.files.list_object_ids() == {named(b"whole")}
    assert messages.store_requests([link.request(node, b"whole", b"trunk")])[1] == [named(b"trunk")]


def test_files_that_no_message_has_are_gone_after_a_restart(link: Link, node: int) -> None:
    pushed(link, node, b"to north")
    write(link, b"stray")
    (link.folder / "objects" / ".half.1.2.part").write_bytes(b"half")
    link.restarted()
    assert {path.name for path in (link.folder / "objects").iterdir()} == {named(b"to north")}


def test_a_request_is_handed_to_its_site_once_and_one_to_nobody_is_refused(link: Link, node: int) -> None:
    names = [pushed(link, node, content) for content in (b"first", b"second")]
    requests = [link.restarted().messages.hand_out_next_request(node) for _ in range(3)]
    assert [request and request.root for request in requests] == [*names, None]
    assert link.storages[-1].messages.store_requests([link.request(77, b"to nobody")]) == ([], [])


def test_a_reply_stays_until_the_run_lets_go_of_it(link: Link, node: int, request_name: str) -> None:
    answer = reply(link, node, request_name, b"from north", b"update")
    assert link.storage.messages.accept_reply(answer) == (
        ReplyAcceptance.ACCEPTED,
        [named(b"update"), named(b"from north")],
    )
    link.storage.sites.mark_site_signed_off(node)  # that its site is gone changes nothing
    for storage in (link.storage, link.restarted(), link.restarted()):
        (stored,) = storage.messages.find_replies(link.run, [request_name])
        assert isinstance(stored, StoredMessage)
        assert (stored.root, stored.partner, stored.node) == (answer.root, request_name, node)
    link.storage.sites.mark_site_connected(node, INTERVAL_S)
    for contents, outcome in (
        ((b"from north", b"update"), ReplyAcceptance.ACCEPTED),
        ((b"another",), ReplyAcceptance.ANOTHER_WAS_ACCEPTED),
    ):
        assert link.storage.messages.accept_reply(reply(link, node, request_name, *contents))[0] is outcome


def test_a_site_that_is_gone_is_reported_and_its_late_reply_refused(link: Link, node: int, request_name: str) -> None:
    assert list(link.storage.messages.find_replies(link.run, [request_name])) == []
    link.storage.sites.mark_site_signed_off(node)
    assert list(link.storage.messages.find_replies(link.run, [request_name])) == [
        (request_name, NoReplyReason.SITE_GONE)
    ]
    link.storage.sites.mark_site_connected(node, INTERVAL_S)
    for storage in (link.storage, link.restarted()):
        late = reply(link, node, request_name, b"late")
        assert storage.messages.accept_reply(late)[0] is ReplyAcceptance.NOBODY_WAITS


def test_a_request_whose_time_is_over_is_not_handed_out_and_is_gone(link: Link, node: int) -> None:
    name = pushed(link, node, b"to north")
    link.clock.now += 601
    link.storage.sites.record_site_heartbeat(node, INTERVAL_S)
    assert link.storage.messages.hand_out_next_request(node) is None
    replies = list(link.storage.messages.find_replies(link.run, [name, "unknown"]))
    assert replies == [(name, NoReplyReason.MESSAGE_GONE), ("unknown", NoReplyReason.MESSAGE_GONE)]


def test_another_runs_messages_are_gone(link: Link, request_name: str) -> None:
    other = link.storage.runs.begin_run()
    assert list(link.storage.messages.find_replies(other, [request_name])) == [
        (request_name, NoReplyReason.MESSAGE_GONE)
    ]
    assert list(link.storage.messages.find_replies(link.run, [request_name])) == []


def test_a_new_run_ends_the_one_that_was_left_and_removes_its_files(link: Link, node: int) -> None:
    pushed(link, node, b"to north")
    again = link.restarted()
    assert again.runs.is_run_active(link.run)
    run, _ = again.begin_run()
    assert (again.runs.is_run_active(link.run), again.runs.is_run_active(run)) == (False, True)
    assert again.messages.hand_out_next_request(node) is None
    assert link.files.list_object_ids() == set()
    assert not link.restarted().runs.is_run_active(link.run)


def test_a_reply_that_no_run_has_let_go_of_is_handed_to_each_later_run_until_one_does(link: Link, node: int) -> None:
    requests = [pushed(link, node, b"to north"), pushed(link, node, b"to north again")]
    for name, content in zip(requests, (b"noted", b"not noted"), strict=True):
        link.storage.messages.hand_out_next_request(node)
        link.storage.messages.accept_reply(reply(link, node, name, content))
        write(link, content)
    link.storage.messages.release_message_objects(named(b"noted"))
    for storage in (link.restarted(), link.restarted()):
        _, replies = storage.begin_run()
        assert [(message.root, message.partner) for message in replies] == [(named(b"not noted"), requests[1])]
    assert link.files.list_object_ids() == {named(b"not noted")}
    storage.messages.release_message_objects(named(b"not noted"))
    assert storage.begin_run()[1] == []
    assert link.files.list_object_ids() == set()


def test_a_run_whose_process_is_silent_is_over_and_one_that_gives_signs_of_life_is_not(link: Link) -> None:
    link.clock.now += RUN_HEARTBEAT_TIMEOUT_S - 1
    assert link.storage.runs.record_run_heartbeat(link.run)
    link.clock.now += RUN_HEARTBEAT_TIMEOUT_S - 1
    assert link.storage.runs.is_run_active(link.run)
    link.clock.now += 2
    assert not link.storage.runs.is_run_active(link.run)
    assert not link.storage.runs.record_run_heartbeat(link.run)
    assert link.restarted().runs.is_run_active(link.run)  # it has its time again after the SuperLink was away


def test_each_state_of_a_site_has_a_name_and_is_there_after_a_restart(link: Link) -> None:
    sites = link.storage.sites
    never, there, off, lost = (sites.register_site(name, name.encode()) for name in ("never", "there", "off", "lost"))
    for node, interval_s in ((there, 60.0), (off, 60.0), (lost, 10.0)):
        assert sites.mark_site_connected(node, interval_s)
        assert not sites.mark_site_connected(node, interval_s)
    assert sites.mark_site_signed_off(off)
    assert not sites.mark_site_signed_off(off)
    link.clock.now += 21
    assert {site.node_id: site.state for site in link.restarted().sites.list_registered_sites()} == {
        never: SiteConnectionState.NEVER,
        there: SiteConnectionState.CONNECTED,
        off: SiteConnectionState.SIGNED_OFF,
        lost: SiteConnectionState.LOST,
    }


def test_a_site_that_is_unregistered_is_unknown_and_may_come_back_under_its_number(link: Link, tmp_path: Path) -> None:
    node = link.storage.sites.register_site("north", b"key")
    link.storage.sites.unregister_site(node)
    assert link.storage.sites.map_keys_to_sites() == {}
    assert not link.storage.sites.record_site_heartbeat(node, INTERVAL_S)
    assert link.restarted().sites.list_registered_sites() == []
    (tmp_path / "other").mkdir()
    other = Link(tmp_path / "other")  # a site has the same number in every database
    for storage in (link.storage, other.storage):
        assert storage.sites.register_site("north", b"key") == node
    other.storage.close()


def test_a_change_that_cannot_be_written_has_not_happened(link: Link, node: int) -> None:
    pushed(link, node, b"to north")
    with closing(sqlite3.connect(link.folder / DATABASE)) as other:
        other.execute("CREATE TRIGGER full BEFORE UPDATE ON messages BEGIN SELECT RAISE(ABORT, 'disk full'); END")
        with pytest.raises(sqlite3.Error, match="disk full"):
            link.storage.messages.hand_out_next_request(node)
        other.execute("DROP TRIGGER full")
    assert link.storage.messages.hand_out_next_request(node)


def opened(path: Path) -> SuperLinkStorage:
    """Open the SuperLink's storage on a file."""
    return SuperLinkStorage.open_storage(path, ObjectFileStore(path.parent / "objects"), lambda: 1000.0)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with rows."""
    path = tmp_path_factory.mktemp("sound") / DATABASE_FILE
    storage = opened(path)
    for number in range(500):
        storage.sites.register_site(f"site-{number}", b"key %d" % number)
    storage.close()
    return path


@pytest.fixture
def coordinator(tmp_path: Path, sound: Path) -> CoordinatorFolder:
    made = CoordinatorFolder(tmp_path, CoordinatorTomlContent(name="trial", hosts=("127.0.0.1",), port=1))
    made.state_path.mkdir()
    shutil.copy(sound, made.state_path)
    return made


CUTS: dict[str, Callable[[bytes, bytes], bytes]] = {
    **{
        f"cut after {size}": lambda content, other, size=size: content[:size]
        for size in (0, 1, 50, 100, 1000, 4096, 5000)
    },
    "cut in the middle": lambda content, other: content[: len(content) // 2],
    "cut near the end": lambda content, other: content[: len(content) * 9 // 10],
    "text": lambda content, other: b"not a database\n" * 500,
    "random": lambda content, other: other,
    "another header": lambda content, other: other[:100] + content[100:],
    "another page": lambda content, other: (
        content[:4096] + other[: len(content) // 2] + content[4096 + len(content) // 2 :]
    ),
}


@pytest.mark.parametrize("damage", CUTS)
def test_a_damaged_database_is_renamed_and_a_new_one_can_be_made(damage: str, coordinator: CoordinatorFolder) -> None:
    path = coordinator.state_path / DATABASE_FILE
    content = path.read_bytes()
    damaged = CUTS[damage](content, random.Random(5).randbytes(len(content)))
    path.write_bytes(damaged)
    warning = set_aside_unusable_database(coordinator)
    assert warning.startswith("state/superlink.db is damaged (")
    assert "\n" not in warning
    assert not any(path.with_name(DATABASE_FILE + ending).exists() for ending in ("", *COMPANION_FILE_ENDINGS))
    (aside,) = [path for path in coordinator.state_path.iterdir() if path.name.endswith("Z")]
    assert aside.name in warning
    assert aside.read_bytes() == damaged
    storage = opened(path)
    assert storage.sites.register_site("site-1", b"key 1")
    storage.close()
    assert set_aside_unusable_database(coordinator) == ""


@pytest.mark.parametrize(
    ("statement", "reason"),
    [("PRAGMA application_id = 0", "it is Flower's own"), ("PRAGMA user_version = 99", "its number is 99, not 1")],
)
def test_a_database_of_another_release_is_renamed(statement: str, reason: str, coordinator: CoordinatorFolder) -> None:
    with closing(sqlite3.connect(coordinator.state_path / DATABASE_FILE)) as other:
        other.execute(statement)
    assert reason in set_aside_unusable_database(coordinator)
    (aside,) = coordinator.state_path.iterdir()
    assert aside.match("superlink.db.of-another-release-*Z")


def test_a_sound_database_stays_and_where_none_is_nothing_happens(coordinator: CoordinatorFolder) -> None:
    content = (coordinator.state_path / DATABASE_FILE).read_bytes()
    assert set_aside_unusable_database(coordinator) == ""
    assert (coordinator.state_path / DATABASE_FILE).read_bytes() == content
    for path in coordinator.state_path.iterdir():
        path.unlink()
    assert set_aside_unusable_database(coordinator) == ""


def test_a_sound_database_whose_last_writes_are_in_its_journal_stays_with_them(coordinator: CoordinatorFolder) -> None:
    path = coordinator.state_path / DATABASE_FILE
    with closing(sqlite3.connect(path)) as writer:
        writer.execute("PRAGMA journal_mode=WAL")
        writer.execute("CREATE TABLE more (value)")
        writer.execute("INSERT INTO more VALUES (7)")
        writer.commit()
        killed = path.parent / "killed"
        killed.mkdir()
        for ending in ("", "-wal"):  # as a kill leaves them: nobody has closed them
            shutil.copy(path.with_name(DATABASE_FILE + ending), killed)
    assert describe_database_damage(killed / DATABASE_FILE) == ""
    with closing(sqlite3.connect(killed / DATABASE_FILE)) as reader:
        assert reader.execute("SELECT value FROM more").fetchall() == [(7,)]


def test_a_journal_that_is_cut_off_or_random_loses_its_own_writes_only(coordinator: CoordinatorFolder) -> None:
    path = coordinator.state_path / DATABASE_FILE
    for cut in (0, 10, 40, 1000):
        path.with_name(f"{DATABASE_FILE}-wal").write_bytes(random.Random(7).randbytes(cut))
        assert set_aside_unusable_database(coordinator) == "", cut
        with closing(sqlite3.connect(path)) as reader:
            assert reader.execute("PRAGMA integrity_check").fetchall() == [("ok",)], cut


def test_parts_without_their_database_are_set_aside(coordinator: CoordinatorFolder) -> None:
    path = coordinator.state_path / DATABASE_FILE
    path.rename(path.with_name(f"{DATABASE_FILE}-wal"))
    assert "only parts of it are left" in set_aside_unusable_database(coordinator)
    assert not path.with_name(f"{DATABASE_FILE}-wal").exists()


def test_a_locked_database_is_no_damaged_one(coordinator: CoordinatorFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect
    monkeypatch.setattr(module.sqlite3, "connect", lambda path, timeout: connect(path, timeout=0.05))
    with closing(connect(coordinator.state_path / DATABASE_FILE)) as other:
        other.execute("PRAGMA journal_mode=DELETE")
        other.execute("BEGIN EXCLUSIVE")
        assert set_aside_unusable_database(coordinator) == ""
    assert (coordinator.state_path / DATABASE_FILE).exists()


def test_what_a_disk_answers_is_no_damage(coordinator: CoordinatorFolder) -> None:
    for code in ("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_BUSY", "SQLITE_CANTOPEN", "SQLITE_READONLY"):
        error = sqlite3.OperationalError(code)
        error.sqlite_errorcode = getattr(sqlite3, code)
        with patch.object(module.sqlite3, "connect", side_effect=error):
            assert set_aside_unusable_database(coordinator) == "", code
        assert (coordinator.state_path / DATABASE_FILE).exists(), code
