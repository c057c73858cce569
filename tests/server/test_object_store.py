"""Contents as files named by their hash, our own reading and writing of protobuf's wire format, and reply bounds."""

import hashlib
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from common.wire.codec import encode
from common.wire.fleet_protocol import CONTENT_OF_PUSH, Node, PullObjectResponse, PushObjectRequest, extract_field
from common.wire.secure_aggregation import MaskedRequest, RevealRequest
from server.deployment.superlink import object_store
from server.deployment.superlink.object_store import (
    SPARE_BYTES,
    SPARE_OBJECTS,
    ObjectFiles,
    ObjectPush,
    PullResponseCache,
    ReplyBound,
    masked_update_bytes,
)


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


# ---------------------------------------------------------------------- through gRPC


pushes = st.builds(
    PushObjectRequest,
    node=st.none() | st.builds(Node, node_id=st.integers(0, 2**64 - 1)),
    run_id=st.integers(0, 2**64 - 1),
    object_id=st.text(max_size=80),
    object_content=st.binary(max_size=300),
    session_id=st.text(max_size=40),
)
BIG = b"\x22" * 2**21
"""2 MiB of the byte that opens the content's field: a length of four bytes, and nothing inside is to be read."""


def pull_response(content: bytes) -> bytes:
    """The serialized response with this content, as a site gets it."""
    with tempfile.TemporaryDirectory() as folder:
        files, name = ObjectFiles(Path(folder)), "a" * 64
        files.write(name, content)
        return PullResponseCache(files).response(name) or b""


def without_content(request: PushObjectRequest) -> PushObjectRequest:
    rest = PushObjectRequest()
    rest.CopyFrom(request)
    rest.ClearField("object_content")
    return rest


@given(pushes)
@example(PushObjectRequest())
@example(PushObjectRequest(object_content=BIG, session_id="after it"))
def test_a_request_is_read_as_protobuf_reads_it_and_its_content_is_apart(request: PushObjectRequest) -> None:
    push = ObjectPush.parse(request.SerializeToString())
    assert push.request == without_content(request)
    assert bytes(push.content) == request.object_content


def test_the_content_is_not_copied() -> None:
    data = PushObjectRequest(object_id="a", object_content=BIG, session_id="b").SerializeToString()
    assert ObjectPush.parse(data).content.obj is data


@given(st.lists(pushes, max_size=3))
def test_fields_in_any_order_and_more_than_once_are_read_as_protobuf_reads_them(
    requests: list[PushObjectRequest],
) -> None:
    data = b"".join(request.SerializeToString() for request in requests)  # protobuf: the last one of a field counts
    push, whole = ObjectPush.parse(data), PushObjectRequest.FromString(data)
    assert (push.request, bytes(push.content)) == (without_content(whole), whole.object_content)


@given(request=pushes, data=st.data())
def test_a_request_that_was_cut_off_anywhere_is_refused_or_read_as_protobuf_reads_it(
    request: PushObjectRequest, data: st.DataObject
) -> None:
    whole = request.SerializeToString()
    agree(whole[: data.draw(st.integers(0, len(whole)), label="cut off after")])


@given(request=pushes, place=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_a_request_with_one_wrong_byte_is_refused_or_read_as_protobuf_reads_it(
    request: PushObjectRequest, place: int, byte: int
) -> None:
    data = bytearray(request.SerializeToString() or b"\x00")
    data[place % len(data)] = byte
    agree(bytes(data))


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_read_as_protobuf_reads_them(data: bytes) -> None:
    agree(data)


def agree(data: bytes) -> None:
    """What we take for a request, protobuf takes for the same one; we may refuse more, and never take more."""
    try:
        push = ObjectPush.parse(data)
    except (ValueError, DecodeError):
        return
    whole = PushObjectRequest.FromString(data)
    assert (push.request, bytes(push.content)) == (without_content(whole), whole.object_content)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x22", "the message is cut off"),  # the content's tag alone
        (b"\x22\x05abcd", "the message is cut off"),  # five bytes announced, four there
        (b"\x22\x80", "the message is cut off"),  # a length without its end
        (b"\x22\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "the message is cut off"),  # 2**64 - 1 bytes announced
        (b"\x10" + b"\x80" * 40 + b"\x01", "the message is cut off"),  # a number that takes no end
        (b"\x25\x00\x00\x00\x00", "field 4 is of an unexpected kind"),  # the content's number as 32 fixed bits
        (b"\x11" + bytes(8), "field 2 is of an unexpected kind"),  # 64 fixed bits
        (b"\x0b\x0c", "field 1 is of an unexpected kind"),  # a group
    ],
)
def test_bytes_that_are_no_request_are_refused(data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ObjectPush.parse(data)


@given(st.binary(max_size=300))
def test_a_field_that_a_newer_flower_may_add_does_not_disturb(content: bytes) -> None:
    newer = b"\xfa\x07" + bytes([len(b"new")]) + b"new" + b"\xf0\x07\x96\x01"  # fields 127 and 126, as text and number
    request = PushObjectRequest(object_id="a", object_content=content)
    rest, cut = extract_field(newer + request.SerializeToString() + newer, CONTENT_OF_PUSH)
    assert bytes(cut) == content
    assert PushObjectRequest.FromString(rest).object_id == "a"


def test_flowers_request_has_only_fields_that_we_can_step_over() -> None:
    numbers = {FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_BOOL}
    sized = {FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE}
    strange = [field.name for field in PushObjectRequest.DESCRIPTOR.fields if field.type not in numbers | sized]
    assert strange == []
    content = PushObjectRequest.DESCRIPTOR.fields_by_name["object_content"]
    assert content.type == FieldDescriptor.TYPE_BYTES


@given(st.binary(max_size=300))
@example(b"")
@example(bytes(127))  # the longest and the shortest for one, two and three bytes of length
@example(bytes(128))
@example(bytes(2**14 - 1))
@example(bytes(2**14))
@example(BIG)
def test_an_answer_is_read_by_protobuf_as_found_available_and_with_its_content(content: bytes) -> None:
    answer = PullObjectResponse.FromString(pull_response(content))
    assert answer == PullObjectResponse(object_found=True, object_available=True, object_content=content)


def test_what_is_pulled_is_kept_for_a_while_and_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, now = ObjectFiles(tmp_path), [100.0]
    monkeypatch.setattr(object_store, "time", SimpleNamespace(monotonic=lambda: now[0]))
    old, new = "a" * 64, "b" * 64
    files.write(old, b"1" * 1000)
    files.write(new, b"2" * 2000)
    answers = PullResponseCache(files)
    first = answers.response(old)
    assert first == pull_response(b"1" * 1000)
    now[0] += object_store.PULL_CACHE_S - 1
    assert answers.response(old) is first  # and it counts as pulled anew
    now[0] += object_store.PULL_CACHE_S - 1
    both = answers.response(new)
    assert both is not None
    assert answers.size == len(first) + len(both)
    now[0] += 2
    assert answers.response(new) is both
    assert answers.size == len(both)
    assert answers.response("c" * 64) is None


def test_no_more_is_kept_than_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "PULL_CACHE_BYTES", 3000)
    files = ObjectFiles(tmp_path)
    answers = PullResponseCache(files)
    for name in "abc":
        files.write(name * 64, name.encode() * 1200)
        assert answers.response(name * 64) == pull_response(name.encode() * 1200)
    assert answers.size == 2 * len(pull_response(b"a" * 1200))


# ---------------------------------------------------------------------- how large a reply may be


def test_a_masked_update_may_be_as_long_as_its_request_says() -> None:
    numbers = 11_000_000
    request = encode(MaskedRequest("run", 1, ("south",), (b"letter",), numbers))
    assert masked_update_bytes(request) == 4 * numbers
    bound = ReplyBound.for_request([100, 100], 150, masked_update_bytes(request))
    # 44 MB in chunks of 4 MiB are eleven.
    assert bound == ReplyBound(2 + 11 + SPARE_OBJECTS, 200 + 4 * numbers + SPARE_BYTES, 150 + 4 * numbers + SPARE_BYTES)
    assert not bound.fault(8, 4 * numbers + 1000)
    assert "weighs more" in bound.fault(8, 4 * numbers + 2 * SPARE_BYTES)


def test_other_requests_ask_for_no_more_than_they_hold() -> None:
    assert masked_update_bytes(encode(RevealRequest("run", 1, ("north",)))) == 0


def test_a_reply_as_large_as_its_request_fits_with_room_for_figures() -> None:
    bound = ReplyBound.for_request([100, 44_000_000, 3], 44_000_000)
    assert bound.fault(3, 44_000_103) == ""
    assert bound.fault(3 + SPARE_OBJECTS, 44_000_103 + SPARE_BYTES) == ""


def test_a_reply_of_more_parts_or_more_bytes_is_refused_with_the_figures() -> None:
    bound = ReplyBound.for_request([100, 44_000_000, 3], 44_000_000)
    assert bound.fault(16, 10) == "its reply has 16 parts; what was asked for has at most 15"
    said = "its reply weighs more than 61 MB, the most that what was asked for can weigh"
    assert bound.fault(3, 44_000_104 + SPARE_BYTES) == said
