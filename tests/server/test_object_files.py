"""Contents as files named by their hash: whole or not there, also after a crash."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.deployment.superlink.object_store import ObjectFiles


def named(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def files(tmp_path: Path) -> ObjectFiles:
    return ObjectFiles(tmp_path / "objects")


@given(contents=st.lists(st.binary(max_size=200), max_size=5))
def test_what_was_written_is_there_after_a_restart(
    contents: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("objects")
    for content in contents:
        ObjectFiles(folder).write(named(content), memoryview(content))
    again = ObjectFiles(folder)
    assert [again.read(named(content)) for content in contents] == contents
    assert again.names() == {named(content) for content in contents}
    again.keep_only(again.names())
    assert again.names() == {named(content) for content in contents}


def test_a_file_is_not_there_until_it_is_whole(files: ObjectFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    name, seen, rename = named(b"abc"), [], Path.replace

    def watched(part: Path, target: Path) -> Path:
        seen.append((part.read_bytes(), files.has(name), files.read(name), files.names()))
        return rename(part, target)

    monkeypatch.setattr(Path, "replace", watched)
    files.write(name, b"abc")
    assert seen == [(b"abc", False, None, set())]
    assert (files.has(name), files.read(name), files.names()) == (True, b"abc", {name})


def test_a_write_that_was_cut_off_leaves_nothing_that_counts_and_can_be_made_again(
    files: ObjectFiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = named(b"abc")

    def power_cut(part: Path, target: Path) -> Path:
        raise OSError("power cut")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", power_cut)
        with pytest.raises(OSError, match="power cut"):
            files.write(name, b"abc")
    again = ObjectFiles(tmp_path / "objects")
    assert (again.has(name), again.read(name), again.names()) == (False, None, set())
    again.keep_only({name})
    assert list((tmp_path / "objects").iterdir()) == []
    again.write(name, b"abc")
    assert [path.name for path in (tmp_path / "objects").iterdir()] == [name]


@given(content=st.binary(min_size=1, max_size=200), data=st.data())
def test_a_file_whose_content_is_not_what_its_name_says_is_found_whatever_is_wrong_with_it(
    content: bytes, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("objects")
    files, whole = ObjectFiles(folder), named(b"whole")
    cut = content[: data.draw(st.integers(0, len(content) - 1), label="cut off after")]
    for name, stored in ((named(content), cut), (whole, b"whole")):
        files.write(name, stored)
    files.keep_only({named(content), whole})
    assert files.names() == {whole}


def test_a_file_that_nobody_asks_for_is_removed(files: ObjectFiles) -> None:
    for content in (b"wanted", b"stray"):
        files.write(named(content), content)
    files.keep_only({named(b"wanted")})
    assert files.names() == {named(b"wanted")}


def test_an_object_that_is_there_is_not_written_again(files: ObjectFiles, tmp_path: Path) -> None:
    name = named(b"abc")
    files.write(name, b"abc")
    before = (tmp_path / "objects" / name).stat()
    files.write(name, b"abc")
    after = (tmp_path / "objects" / name).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_what_is_removed_is_gone_and_may_be_removed_again(files: ObjectFiles) -> None:
    kept, removed = named(b"kept"), named(b"removed")
    files.write(kept, b"kept")
    files.write(removed, b"removed")
    files.remove(removed)
    files.remove(removed)
    assert files.read(removed) is None
    assert files.names() == {kept}


def test_nobody_else_may_look_into_the_folder(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir(mode=0o755)
    ObjectFiles(tmp_path / "objects")
    assert (tmp_path / "objects").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["../ca.key", "{folder}/ca.key"])
def test_no_name_leads_to_a_file_outside_the_folder(name: str, files: ObjectFiles, tmp_path: Path) -> None:
    (tmp_path / "ca.key").write_bytes(b"secret")
    asked = name.format(folder=tmp_path)
    files.remove(asked)
    assert (tmp_path / "ca.key").exists()
    assert files.read(asked) is None
    assert not files.has(asked)


@pytest.mark.parametrize("name", ["../ca.key", "", "a" * 63, "A" * 64, "a" * 64 + "\n"])
def test_nothing_is_written_under_what_is_no_name(name: str, files: ObjectFiles) -> None:
    with pytest.raises(ValueError, match="does not name an object"):
        files.write(name, b"abc")
    assert files.names() == set()
