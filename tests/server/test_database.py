"""A damaged database of the SuperLink is set aside and made anew; a sound one never is."""

import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from server.coordinator.folder import Coordinator, CoordinatorFile
from server.deployment.superlink import database as module
from server.deployment.superlink.database import COMPANIONS, FILE, describe_damage, set_aside_if_unusable
from server.deployment.superlink.messages import SuperLinkStorage
from server.deployment.superlink.object_store import ObjectFiles


def opened(path: Path) -> SuperLinkStorage:
    """The SuperLink's storage on a file."""
    return SuperLinkStorage.open(path, ObjectFiles(path.parent / "objects"), lambda: 1000.0)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with rows."""
    path = tmp_path_factory.mktemp("sound") / FILE
    storage = opened(path)
    for number in range(500):
        storage.sites.register(f"site-{number}", b"key %d" % number)
    storage.close()
    return path


@pytest.fixture
def coordinator(tmp_path: Path, sound: Path) -> Coordinator:
    made = Coordinator(tmp_path, CoordinatorFile(name="trial", hosts=("127.0.0.1",), port=1))
    made.state.mkdir()
    shutil.copy(sound, made.state)
    return made


@pytest.fixture(params=["nothing", 1, 50, 100, 1000, 4096, 5000, 0.5, 0.9, "garbage", "random", "header", "page"])
def damaged(request: pytest.FixtureRequest, coordinator: Coordinator) -> Coordinator:
    """Cut at several lengths, or with other bytes in it."""
    path, how = coordinator.state / FILE, request.param
    content = path.read_bytes()
    other = random.Random(5).randbytes(len(content))
    if how in ("garbage", "random"):
        content = b"not a database\n" * 500 if how == "garbage" else other
    elif how == "header":
        content = other[:100] + content[100:]
    elif how == "page":
        content = content[:4096] + other[: len(content) // 2] + content[4096 + len(content) // 2 :]
    else:
        content = content[: 0 if how == "nothing" else int(how * len(content)) if how < 1 else int(how)]
    path.write_bytes(content)
    return coordinator


def test_a_damaged_database_is_renamed_and_a_new_one_can_be_made(damaged: Coordinator) -> None:
    before = (damaged.state / FILE).read_bytes()
    said = set_aside_if_unusable(damaged)
    assert said.startswith("state/superlink.db is damaged (")
    assert "\n" not in said
    assert not any((damaged.state / FILE).with_name(FILE + ending).exists() for ending in ("", *COMPANIONS))
    (aside,) = [path for path in damaged.state.iterdir() if path.name.endswith("Z")]
    assert aside.name in said
    assert aside.read_bytes() == before
    storage = opened(damaged.state / FILE)
    assert storage.sites.register("site-1", b"key 1")
    storage.close()
    assert set_aside_if_unusable(damaged) == ""


@pytest.mark.parametrize(
    ("statement", "reason"),
    [("PRAGMA application_id = 0", "it is Flower's own"), ("PRAGMA user_version = 99", "its number is 99, not 1")],
)
def test_a_database_of_another_release_is_renamed(statement: str, reason: str, coordinator: Coordinator) -> None:
    with closing(sqlite3.connect(coordinator.state / FILE)) as other:
        other.execute(statement)
    said = set_aside_if_unusable(coordinator)
    assert said.startswith(f"state/superlink.db is of another release ({reason}")
    assert not (coordinator.state / FILE).exists()
    assert len(list(coordinator.state.glob("superlink.db.of-another-release-*Z"))) == 1


def test_a_sound_database_stays(coordinator: Coordinator) -> None:
    content = (coordinator.state / FILE).read_bytes()
    assert set_aside_if_unusable(coordinator) == ""
    assert (coordinator.state / FILE).read_bytes() == content


def test_where_none_is_nothing_happens(coordinator: Coordinator) -> None:
    for path in coordinator.state.iterdir():
        path.unlink()
    assert set_aside_if_unusable(coordinator) == ""


def test_a_sound_database_whose_last_writes_are_in_its_journal_stays_with_them(coordinator: Coordinator) -> None:
    path = coordinator.state / FILE
    with closing(sqlite3.connect(path)) as writer:
        writer.execute("PRAGMA journal_mode=WAL")
        writer.execute("CREATE TABLE more (value)")
        writer.execute("INSERT INTO more VALUES (7)")
        writer.commit()
        killed = path.parent / "killed"
        killed.mkdir()
        for ending in ("", "-wal"):  # as a kill leaves them: nobody has closed them
            shutil.copy(path.with_name(FILE + ending), killed)
    assert describe_damage(killed / FILE) == ""
    with closing(sqlite3.connect(killed / FILE)) as reader:
        assert reader.execute("SELECT value FROM more").fetchall() == [(7,)]


@pytest.mark.parametrize("cut", [0, 10, 40, 1000])
def test_a_journal_that_is_cut_off_or_random_loses_its_own_writes_only(cut: int, coordinator: Coordinator) -> None:
    path = coordinator.state / FILE
    path.with_name(f"{FILE}-wal").write_bytes(random.Random(7).randbytes(cut))
    assert set_aside_if_unusable(coordinator) == ""
    with closing(sqlite3.connect(path)) as reader:
        assert reader.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_parts_without_their_database_are_set_aside(coordinator: Coordinator) -> None:
    path = coordinator.state / FILE
    path.rename(path.with_name(f"{FILE}-wal"))
    assert "only parts of it are left" in set_aside_if_unusable(coordinator)
    assert not path.with_name(f"{FILE}-wal").exists()


def test_a_locked_database_is_no_damaged_one(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect
    monkeypatch.setattr(module.sqlite3, "connect", lambda path, timeout: connect(path, timeout=0.05))
    with closing(connect(coordinator.state / FILE)) as other:
        other.execute("PRAGMA journal_mode=DELETE")
        other.execute("BEGIN EXCLUSIVE")
        assert set_aside_if_unusable(coordinator) == ""
    assert (coordinator.state / FILE).exists()


@pytest.mark.parametrize("code", ["SQLITE_FULL", "SQLITE_IOERR", "SQLITE_BUSY", "SQLITE_CANTOPEN", "SQLITE_READONLY"])
def test_what_a_disk_answers_is_no_damage(code: str, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    error = sqlite3.OperationalError(code)
    error.sqlite_errorcode = getattr(sqlite3, code)

    def failing(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(module.sqlite3, "connect", failing)
    assert set_aside_if_unusable(coordinator) == ""
    assert (coordinator.state / FILE).exists()
