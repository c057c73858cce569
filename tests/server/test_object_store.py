"""Contents as files named by their hash, our own reading and writing of protobuf's wire format, and reply bounds."""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polyclinic.common.wire.codec import encode_record
from polyclinic.common.wire.fleet_protocol import (
    PUSH_CONTENT_FIELD,
    Node,
    PullObjectResponse,
    PushObjectRequest,
    extract_protobuf_field,
)
from polyclinic.common.wire.secure_aggregation import MaskedRequest, RevealRequest
from polyclinic.server.deployment.superlink import object_store
from polyclinic.server.deployment.superlink.object_store import (
    SPARE_BYTES,
    SPARE_OBJECTS,
    ObjectFileStore,
    ParsedObjectPush,
    PullObjectResponseCache,
    ReplySizeBound,
    read_masked_update_size,
)
from tests.server.superlinks import named

FEWER = settings(max_examples=settings().max_examples * 2 // 5)
"""For properties whose examples write files."""


@pytest.fixture
def files(tmp_path: Path) -> ObjectFileStore:
    return ObjectFileStore(tmp_path / "objects")


@FEWER
@given(contents=st.lists(st.binary(max_size=200), max_size=5))
def test_contents_are_there_after_a_restart(contents: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("objects")
    for content in contents:
        ObjectFileStore(folder).write_object(named(content), memoryview(content))
    again = ObjectFileStore(folder)
    assert [again.read_object(named(content)) for content in contents] == contents
    assert again.list_object_ids() == {named(content) for content in contents}
    again.remove_unneeded_objects(again.list_object_ids())
    assert again.list_object_ids() == {named(content) for content in contents}


def test_a_file_is_not_there_until_it_is_whole(files: ObjectFileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    name, looks, rename = named(b"abc"), [], Path.replace

    def watched(part: Path, target: Path) -> Path:
        looks.append((part.read_bytes(), files.has_object(name), files.read_object(name), files.list_object_ids()))
        return rename(part, target)

    monkeypatch.setattr(Path, "replace", watched)
    files.write_object(name, b"abc")
    assert looks == [(b"abc", False, None, set())]
    assert (files.has_object(name), files.read_object(name), files.list_object_ids()) == (True, b"abc", {name})


def test_a_write_that_was_cut_off_leaves_nothing_that_counts_and_can_be_made_again(
    files: ObjectFileStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = named(b"abc")

    def power_cut(part: Path, target: Path) -> Path:
        raise OSError("power cut")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", power_cut)
        with pytest.raises(OSError, match="power cut"):
            files.write_object(name, b"abc")
    again = ObjectFileStore(tmp_path / "objects")
    assert (again.has_object(name), again.read_object(name), again.list_object_ids()) == (False, None, set())
    again.remove_unneeded_objects({name})
    assert list((tmp_path / "objects").iterdir()) == []
    again.write_object(name, b"abc")
    assert [path.name for path in (tmp_path / "objects").iterdir()] == [name]


@FEWER
@given(content=st.binary(min_size=1, max_size=200), data=st.data())
def test_a_file_whose_content_has_another_hash_than_its_name_is_removed(
    content: bytes, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    files, whole = ObjectFileStore(tmp_path_factory.mktemp("objects")), named(b"whole")
    files.write_object(named(content), content[: data.draw(st.integers(0, len(content) - 1), label="cut off after")])
    files.write_object(whole, b"whole")
    files.remove_unneeded_objects({named(content), whole})
    assert files.list_object_ids() == {whole}


def test_an_object_is_written_once_and_may_be_removed_twice(files: ObjectFileStore, tmp_path: Path) -> None:
    name, other = named(b"abc"), named(b"other")
    files.write_object(other, b"other")
    files.write_object(name, b"abc")
    before = (tmp_path / "objects" / name).stat()
    files.write_object(name, b"abc")
    after = (tmp_path / "objects" / name).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    for _ in range(2):
        files.remove_object(name)
        assert (files.read_object(name), files.list_object_ids()) == (None, {other})


def test_nobody_else_may_look_into_the_folder(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir(mode=0o755)
    ObjectFileStore(tmp_path / "objects")
    assert (tmp_path / "objects").stat().st_mode & 0o777 == 0o700


def test_no_name_leads_to_a_file_outside_the_folder_and_nothing_is_written_under_what_is_none(
    files: ObjectFileStore, tmp_path: Path
) -> None:
    (tmp_path / "ca.key").write_bytes(b"secret")
    for path in ("../ca.key", f"{tmp_path}/ca.key"):
        files.remove_object(path)
        assert (files.read_object(path), files.has_object(path)) == (None, False)
    for name in ("../ca.key", "", "a" * 63, "A" * 64, "a" * 64 + "\n"):
        with pytest.raises(ValueError, match="does not name an object"):
            files.write_object(name, b"abc")
    assert ((tmp_path / "ca.key").read_bytes(), files.list_object_ids()) == (b"secret", set())


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
    """Return the serialized response with this content, as a site gets it."""
    with tempfile.TemporaryDirectory() as folder:
        files, name = ObjectFileStore(Path(folder)), "a" * 64
        files.write_object(name, content)
        return PullObjectResponseCache(files).get_pull_response(name) or b""


def without_content(request: PushObjectRequest) -> PushObjectRequest:
    rest = PushObjectRequest()
    rest.CopyFrom(request)
    rest.ClearField("object_content")
    return rest


def agree(data: bytes) -> None:
    """Check that what we take for a request, protobuf takes for the same one; we may refuse more, never take more."""
    try:
        push = ParsedObjectPush.parse_push_request(data)
    except (ValueError, DecodeError):
        return
    whole = PushObjectRequest.FromString(data)
    assert (push.request, bytes(push.content)) == (without_content(whole), whole.object_content)


@given(st.lists(pushes, max_size=3))
@example([PushObjectRequest()])
@example([PushObjectRequest(object_content=BIG, session_id="after it")])
def test_fields_in_any_order_and_again_are_read_as_protobuf_does(requests: list[PushObjectRequest]) -> None:
    data = b"".join(request.SerializeToString() for request in requests)  # protobuf: the last one of a field counts
    push, whole = ParsedObjectPush.parse_push_request(data), PushObjectRequest.FromString(data)
    assert (push.request, bytes(push.content)) == (without_content(whole), whole.object_content)


def test_the_content_is_not_copied() -> None:
    data = PushObjectRequest(object_id="a", object_content=BIG, session_id="b").SerializeToString()
    assert ParsedObjectPush.parse_push_request(data).content.obj is data


@given(request=pushes, place=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_a_request_cut_off_or_with_one_wrong_byte_is_refused_or_read_as_protobuf_reads_it(
    request: PushObjectRequest, place: int, byte: int
) -> None:
    data = bytearray(request.SerializeToString() or b"\x00")
    agree(bytes(data[: place % (len(data) + 1)]))
    data[place % len(data)] = byte
    agree(bytes(data))


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_read_as_protobuf_reads_them(data: bytes) -> None:
    agree(data)


@pytest.mark.parametrize(
    ("data", "fault"),
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
def test_bytes_that_are_no_request_are_refused(data: bytes, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        ParsedObjectPush.parse_push_request(data)


@given(st.binary(max_size=300))
def test_a_field_that_a_newer_flower_may_add_does_not_disturb(content: bytes) -> None:
    newer = b"\xfa\x07" + bytes([len(b"new")]) + b"new" + b"\xf0\x07\x96\x01"  # fields 127 and 126, as text and number
    request = PushObjectRequest(object_id="a", object_content=content)
    rest, cut = extract_protobuf_field(newer + request.SerializeToString() + newer, PUSH_CONTENT_FIELD)
    assert bytes(cut) == content
    assert PushObjectRequest.FromString(rest).object_id == "a"


def test_flowers_request_has_only_fields_that_we_can_step_over() -> None:
    numbers = {FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_BOOL}
    sized = {FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE}
    types = {field.name: field.type for field in PushObjectRequest.DESCRIPTOR.fields}
    assert set(types.values()) <= numbers | sized
    assert types["object_content"] == FieldDescriptor.TYPE_BYTES


@FEWER
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
    files, now = ObjectFileStore(tmp_path), [100.0]
    monkeypatch.setattr(object_store, "time", SimpleNamespace(monotonic=lambda: now[0]))
    old, new = "a" * 64, "b" * 64
    files.write_object(old, b"1" * 1000)
    files.write_object(new, b"2" * 2000)
    answers = PullObjectResponseCache(files)
    first = answers.get_pull_response(old)
    assert first == pull_response(b"1" * 1000)
    now[0] += object_store.PULL_CACHE_LIFETIME_S - 1
    assert answers.get_pull_response(old) is first  # and it counts as pulled anew
    now[0] += object_store.PULL_CACHE_LIFETIME_S - 1
    both = answers.get_pull_response(new)
    assert both is not None
    assert answers.size == len(first) + len(both)
    now[0] += 2
    assert answers.get_pull_response(new) is both
    assert answers.size == len(both)
    assert answers.get_pull_response("c" * 64) is None


def test_no_more_is_kept_than_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "MAX_PULL_CACHE_BYTES", 3000)
    files = ObjectFileStore(tmp_path)
    answers = PullObjectResponseCache(files)
    for name in "abc":
        files.write_object(name * 64, name.encode() * 1200)
        assert answers.get_pull_response(name * 64) == pull_response(name.encode() * 1200)
    assert answers.size == 2 * len(pull_response(b"a" * 1200))


def test_a_masked_update_may_be_as_long_as_its_request_says() -> None:
    numbers = 11_000_000
    request = encode_record(MaskedRequest("run", 1, ("south",), (b"letter",), numbers))
    assert read_masked_update_size(request) == 4 * numbers
    bound = ReplySizeBound.compute_bound_for_request([100, 100], 150, read_masked_update_size(request))
    # 44 MB in chunks of 4 MiB are eleven.
    assert bound == ReplySizeBound(
        2 + 11 + SPARE_OBJECTS, 200 + 4 * numbers + SPARE_BYTES, 150 + 4 * numbers + SPARE_BYTES
    )
    assert not bound.find_reply_size_fault(8, 4 * numbers + 1000)
    assert "weighs more" in bound.find_reply_size_fault(8, 4 * numbers + 2 * SPARE_BYTES)
    assert read_masked_update_size(encode_record(RevealRequest("run", 1, ("north",)))) == 0


@pytest.mark.parametrize(
    ("parts", "size", "fault"),
    [
        (3, 44_000_103, ""),
        (3 + SPARE_OBJECTS, 44_000_103 + SPARE_BYTES, ""),
        (3 + SPARE_OBJECTS + 1, 10, "has 16 parts; what was asked for has at most 15"),
        (3, 44_000_104 + SPARE_BYTES, "weighs more than 61 MB"),
    ],
)
def test_a_reply_fits_that_is_as_large_as_its_request_with_room_for_figures(parts: int, size: int, fault: str) -> None:
    reason = ReplySizeBound.compute_bound_for_request([100, 44_000_000, 3], 44_000_000).find_reply_size_fault(
        parts, size
    )
    assert fault in reason
    assert bool(fault) == bool(reason)
