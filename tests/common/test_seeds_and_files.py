"""Seeds come from what they are for; files are whole or not there."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.common.config import read_experiment
from polyclinic.common.errors import BadInput
from polyclinic.common.system import stopping
from polyclinic.common.system.files import (
    make_missing_input_fault,
    make_temporary_path,
    open_input_file,
    open_own_file,
    write_atomically,
)
from polyclinic.common.system.hashing import derive_seed

purposes = st.lists(st.one_of(st.integers(0, 99), st.text("ab1", max_size=3)), min_size=1, max_size=4)


@given(purposes)
def test_a_seed_is_the_same_for_the_same_purpose_and_fits_63_bits(parts: list[object]) -> None:
    assert derive_seed(*parts) == derive_seed(*parts)
    assert 0 <= derive_seed(*parts) < 2**63


def test_run_round_and_site_each_change_the_seed_and_none_runs_into_the_next() -> None:
    purposes = [(1, 2, "north"), (2, 2, "north"), (1, 3, "north"), (1, 2, "south"), (12, "north"), (1, "2north")]
    assert len({derive_seed(*purpose) for purpose in purposes}) == len(purposes)


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_replaced_whole_or_not_at_all_and_nothing_is_left_beside_it(durable: bool, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file.json"
    for content in (b"first, and longer", b"second"):
        write_atomically(path, content, durable=durable)
        assert path.read_bytes() == content
    with pytest.raises(TypeError):
        write_atomically(path, [b"third", None], durable=durable)
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == {"file.json": b"second"}


@pytest.mark.parametrize(("owner", "name"), [(os, "open"), (Path, "replace")])
def test_a_program_that_is_stopped_while_it_writes_removes_what_is_half_done(
    owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removal is registered from before the temporary file exists until it has its own name; by this thread alone."""
    path, registered, real = tmp_path / "file.json", list[bool](), getattr(owner, name)

    def is_registered() -> bool:
        removals = [getattr(remove, "func", None) for remove in stopping._removal_callbacks]
        return any(getattr(function, "__self__", None) == make_temporary_path(path) for function in removals)

    def looking(*arguments: Any, **options: Any) -> Any:
        if arguments[0] == make_temporary_path(path):
            registered.append(is_registered())
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, looking)
    write_atomically(path, b"new")
    assert registered == [True]
    assert not is_registered()


def test_a_program_that_is_being_stopped_begins_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = list[int]()  # the threads that wait; others than this one may write files, too
    sleeping = SimpleNamespace(sleep=lambda seconds: waiting.append(threading.get_ident()))
    monkeypatch.setattr(stopping, "_program_is_ending", threading.Event())
    monkeypatch.setattr(stopping, "time", sleeping)
    write_atomically(tmp_path / "first", b"")
    assert threading.get_ident() not in waiting
    stopping._program_is_ending.set()
    write_atomically(tmp_path / "second", b"")
    assert waiting.count(threading.get_ident()) == 1


@pytest.mark.parametrize("late", [True, False])
def test_while_a_program_ends_nothing_is_begun(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    is_ending = list[bool]()
    monkeypatch.setattr(stopping, "_program_is_ending", threading.Event())
    monkeypatch.setattr(
        stopping, "_removal_callbacks", [lambda: is_ending.append(stopping._program_is_ending.is_set())]
    )
    monkeypatch.setattr(stopping, "_end_children", lambda: None)
    staying = SimpleNamespace(isatty=os.isatty, write=os.write, open=os.open, devnull=os.devnull, O_WRONLY=os.O_WRONLY)
    vars(staying).update(dup=lambda file: os.open(os.devnull, os.O_WRONLY), dup2=lambda *files: None)
    vars(staying).update(_exit=lambda code: None)
    monkeypatch.setattr(stopping, "os", staying)
    monkeypatch.setattr(stopping, "SHUTDOWN_TIMEOUT_S", 0.0)
    stopping._end_program(3, stopping._GracefulShutdown(3, None) if late else None)
    assert is_ending
    assert all(is_ending)


def test_what_a_path_is_instead_of_a_file_is_said_and_nothing_suggested(tmp_path: Path) -> None:
    folder, pipe, loop = tmp_path / "scans.toml", tmp_path / "pipe.toml", tmp_path / "loop.toml"
    folder.mkdir()
    os.mkfifo(pipe)
    loop.symlink_to("loop.toml")
    kinds = {
        folder: "folder", pipe: "pipe", loop: "loop", tmp_path / ("a" * 300): "longer", Path("/dev/null"): "device",
    }  # fmt: skip
    for path, kind in kinds.items():
        fault = make_missing_input_fault(path)
        assert (fault.where, kind in fault.problem) == (str(path), True)
        with pytest.raises(BadInput, match=kind):
            read_experiment(path)
    assert '"scans.toml"' in make_missing_input_fault(tmp_path / "scan.toml").remedy


@pytest.mark.parametrize("mode", ["ab", "ab+", "wb", "rb+"])
def test_a_file_of_ours_is_not_opened_through_a_link_and_no_pipe_is_waited_for(
    tmp_path: Path, mode: Literal["ab", "ab+", "wb", "rb+"]
) -> None:
    (tmp_path / "own").write_text("years of work")
    (tmp_path / "link").symlink_to("own")
    (tmp_path / "nowhere").symlink_to("new")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "nowhere", "pipe"):
        with pytest.raises(OSError, match=name):
            open_own_file(tmp_path / name, mode)
    assert (tmp_path / "own").read_text() == "years of work"
    assert not (tmp_path / "new").exists()
    with open_own_file(tmp_path / "own", "ab") as file:
        file.write(b".")
    assert (tmp_path / "own").read_text() == "years of work."


def test_a_whole_file_replaces_a_link_and_leaves_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("years of work")
    (tmp_path / "link").symlink_to("own")
    write_atomically(tmp_path / "link", b"page")
    assert (tmp_path / "own").read_text() == "years of work"
    assert (tmp_path / "link").read_text() == "page"
    assert not (tmp_path / "link").is_symlink()


def test_an_input_is_a_file_or_a_link_to_one_and_no_device_or_pipe(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("text")
    (tmp_path / "link").symlink_to("own")
    (tmp_path / "zero").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    with open_input_file(tmp_path / "link") as file:
        assert file.read() == b"text"
    for name in ("zero", "pipe"):
        with pytest.raises(OSError, match="a pipe or a device"):
            open_input_file(tmp_path / name)
