"""What the SuperLink keeps: through kills and restarts, and for as long as somebody needs it."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from server.deployment.superlink.messages import NoReplyReason, ReplyOutcome, StoredMessage
from server.deployment.superlink.registrations import RUN_SILENT_S, Presence
from tests.server.superlinks import DATABASE, Link, named


@pytest.fixture
def node(link: Link) -> int:
    """A site that is connected."""
    node = link.storage.sites.register("north", b"key")
    assert link.storage.sites.activate(node, 30.0)
    return node


def write(link: Link, *contents: bytes) -> None:
    for content in contents:
        link.files.write(named(content), content)


def pushed(link: Link, node: int, *contents: bytes) -> str:
    """Send a request whose objects are all there; return its name."""
    write(link, *contents)
    taken, missing = link.storage.messages.push([link.request(node, *contents)])
    assert (taken, missing) == ([named(contents[0])], [])
    return named(contents[0])


def reply(link: Link, node: int, asked: str, *contents: bytes) -> StoredMessage:
    message = link.request(node, *contents)
    message.is_reply, message.partner = True, asked
    return message


# ---------------------------------------------------------------------- objects


def test_what_two_messages_share_stays_until_the_second_is_let_go(link: Link, node: int) -> None:
    first, second = pushed(link, node, b"to north", b"trunk"), pushed(link, node, b"to south", b"trunk")
    link.storage.messages.release(first)
    assert link.files.names() == {named(b"to south"), named(b"trunk")}
    link.storage.messages.release(second)
    link.storage.messages.release(second)  # said twice
    assert link.files.names() == set()


def test_only_what_is_missing_is_asked_for(link: Link, node: int) -> None:
    write(link, b"trunk")
    request = link.request(node, b"to north", b"trunk")
    assert link.storage.messages.push([request]) == ([request.root], [request.root])
    write(link, b"to north")
    assert link.storage.messages.push([request]) == ([request.root], [])  # the same call made again


def test_an_object_that_nobody_needs_is_not_kept(link: Link, node: int) -> None:
    name = pushed(link, node, b"to north")
    link.storage.messages.release(name)
    assert not link.storage.messages.store(named(b"late"), b"late")
    assert link.files.names() == set()


@pytest.mark.parametrize(
    "crash", [lambda path: path.write_bytes(b"tru"), lambda path: path.write_bytes(b"\0" * 5), Path.unlink]
)
def test_an_object_that_a_crash_damaged_is_asked_for_again(crash: Callable[[Path], Any], link: Link, node: int) -> None:
    pushed(link, node, b"whole", b"trunk")
    crash(link.folder / "objects" / named(b"trunk"))
    messages = link.restarted().messages
    assert link.files.names() == {named(b"whole")}
    assert messages.push([link.request(node, b"whole", b"trunk")])[1] == [named(b"trunk")]


def test_files_that_no_message_has_are_gone_after_a_restart(link: Link, node: int) -> None:
    pushed(link, node, b"to north")
    write(link, b"stray")
    (link.folder / "objects" / ".half.1.2.part").write_bytes(b"half")
    link.restarted()
    assert {path.name for path in (link.folder / "objects").iterdir()} == {named(b"to north")}


# ---------------------------------------------------------------------- messages


def test_a_request_is_handed_to_its_site_once_also_after_a_restart(link: Link, node: int) -> None:
    first, second = pushed(link, node, b"first"), pushed(link, node, b"second")
    handed = link.storage.messages.hand_out_next(node)
    assert handed
    assert handed.root == first
    again = link.restarted().messages
    handed = again.hand_out_next(node)
    assert handed
    assert handed.root == second
    assert again.hand_out_next(node) is None


def test_a_request_to_nobody_is_not_taken(link: Link) -> None:
    assert link.storage.messages.push([link.request(77, b"to nobody")]) == ([], [])


def test_a_reply_is_told_until_the_run_has_let_go_of_it_and_through_a_restart(link: Link, node: int) -> None:
    asked = pushed(link, node, b"to north")
    link.storage.messages.hand_out_next(node)
    answer = reply(link, node, asked, b"from north", b"update")
    assert link.storage.messages.answer(answer) == (ReplyOutcome.ACCEPTED, [named(b"update"), named(b"from north")])
    for storage in (link.storage, link.restarted(), link.restarted()):
        (found,) = storage.messages.replies(link.run, [asked])
        assert isinstance(found, StoredMessage)
        assert (found.root, found.partner, found.node) == (answer.root, asked, node)
    assert link.storage.messages.answer(reply(link, node, asked, b"from north", b"update"))[0] is ReplyOutcome.ACCEPTED
    assert link.storage.messages.answer(reply(link, node, asked, b"another"))[0] is ReplyOutcome.ANOTHER_WAS_ACCEPTED


def test_a_site_that_is_gone_is_told_and_its_late_reply_is_not_taken(link: Link, node: int) -> None:
    asked = pushed(link, node, b"to north")
    link.storage.messages.hand_out_next(node)
    assert list(link.storage.messages.replies(link.run, [asked])) == []
    link.storage.sites.deactivate(node)
    assert list(link.storage.messages.replies(link.run, [asked])) == [(asked, NoReplyReason.SITE_GONE)]
    link.storage.sites.activate(node, 30.0)
    for storage in (link.storage, link.restarted()):
        late = reply(link, node, asked, b"late")
        assert storage.messages.answer(late)[0] is ReplyOutcome.NOBODY_WAITS


def test_a_reply_that_came_counts_although_its_site_is_gone(link: Link, node: int) -> None:
    asked = pushed(link, node, b"to north")
    link.storage.messages.hand_out_next(node)
    link.storage.messages.answer(reply(link, node, asked, b"from north"))
    link.storage.sites.deactivate(node)
    (found,) = link.storage.messages.replies(link.run, [asked])
    assert isinstance(found, StoredMessage)


def test_a_request_whose_time_is_over_is_not_handed_out_and_is_told_to_be_gone(link: Link, node: int) -> None:
    asked = pushed(link, node, b"to north")
    link.clock.now += 601
    link.storage.sites.heartbeat(node, 30.0)
    assert link.storage.messages.hand_out_next(node) is None
    assert list(link.storage.messages.replies(link.run, [asked, "unknown"])) == [
        (asked, NoReplyReason.MESSAGE_GONE),
        ("unknown", NoReplyReason.MESSAGE_GONE),
    ]


def test_another_runs_messages_are_not_told(link: Link, node: int) -> None:
    asked = pushed(link, node, b"to north")
    other = link.storage.runs.begin()
    assert list(link.storage.messages.replies(other, [asked])) == [(asked, NoReplyReason.MESSAGE_GONE)]
    assert list(link.storage.messages.replies(link.run, [asked])) == []


# ---------------------------------------------------------------------- runs


def test_a_new_run_ends_the_one_that_was_left_and_removes_its_files(link: Link, node: int) -> None:
    pushed(link, node, b"to north")
    again = link.restarted()
    assert again.runs.is_active(link.run)
    run, _ = again.begin_run()
    assert (again.runs.is_active(link.run), again.runs.is_active(run)) == (False, True)
    assert again.messages.hand_out_next(node) is None
    assert link.files.names() == set()
    assert not link.restarted().runs.is_active(link.run)


def test_a_reply_that_no_run_has_let_go_of_is_handed_to_each_later_run_until_one_does(link: Link, node: int) -> None:
    first, second = pushed(link, node, b"to north"), pushed(link, node, b"to north again")
    for asked, content in ((first, b"noted"), (second, b"not noted")):
        link.storage.messages.hand_out_next(node)
        answer = reply(link, node, asked, content)
        link.storage.messages.answer(answer)
        link.files.write(named(content), content)
    link.storage.messages.release(named(b"noted"))
    again = link.restarted()
    for storage in (again, link.restarted()):
        _, left = storage.begin_run()
        assert [(one.root, one.partner) for one in left] == [(named(b"not noted"), second)]
    assert link.files.names() == {named(b"not noted")}
    storage.messages.release(named(b"not noted"))
    assert storage.begin_run()[1] == []
    assert link.files.names() == set()


def test_a_run_whose_process_is_silent_is_over_and_one_that_gives_signs_of_life_is_not(link: Link) -> None:
    link.clock.now += RUN_SILENT_S - 1
    assert link.storage.runs.heartbeat(link.run)
    link.clock.now += RUN_SILENT_S - 1
    assert link.storage.runs.is_active(link.run)
    link.clock.now += 2
    assert not link.storage.runs.is_active(link.run)
    assert not link.storage.runs.heartbeat(link.run)


def test_a_run_has_its_time_again_after_the_superlink_was_away(link: Link) -> None:
    link.clock.now += 10 * RUN_SILENT_S
    assert link.restarted().runs.is_active(link.run)


# ---------------------------------------------------------------------- sites


def test_a_site_has_the_same_number_in_every_database(link: Link, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Link(tmp_path / "other")
    assert other.storage.sites.register("north", b"key") == link.storage.sites.register("north", b"key")
    other.close()


def test_each_state_of_a_site_has_a_name_and_is_there_after_a_restart(link: Link) -> None:
    sites = link.storage.sites
    never, there, off, lost = (sites.register(name, name.encode()) for name in ("never", "there", "off", "lost"))
    for node, interval_s in ((there, 60.0), (off, 60.0), (lost, 10.0)):
        assert sites.activate(node, interval_s)
        assert not sites.activate(node, interval_s)
    assert sites.deactivate(off)
    assert not sites.deactivate(off)
    link.clock.now += 21
    states = {node: site.state for site in link.restarted().sites.all() for node in [site.node_id]}
    assert states == {
        never: Presence.NEVER,
        there: Presence.CONNECTED,
        off: Presence.SIGNED_OFF,
        lost: Presence.LOST,
    }


def test_a_site_that_is_unregistered_is_unknown_and_may_come_back(link: Link) -> None:
    node = link.storage.sites.register("north", b"key")
    link.storage.sites.unregister(node)
    assert link.storage.sites.by_key() == {}
    assert not link.storage.sites.heartbeat(node, 30.0)
    assert link.restarted().sites.all() == []
    assert link.storage.sites.register("north", b"key") == node


# ---------------------------------------------------------------------- the disk


def test_what_cannot_be_written_has_not_happened(link: Link, node: int) -> None:
    pushed(link, node, b"to north")
    with closing(sqlite3.connect(link.folder / DATABASE)) as other:
        other.execute("CREATE TRIGGER full BEFORE UPDATE ON messages BEGIN SELECT RAISE(ABORT, 'disk full'); END")
    with pytest.raises(sqlite3.Error, match="disk full"):
        link.storage.messages.hand_out_next(node)
    with closing(sqlite3.connect(link.folder / DATABASE)) as other:
        other.execute("DROP TRIGGER full")
    assert link.storage.messages.hand_out_next(node)
