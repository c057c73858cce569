"""Everything that reads bytes of the other side or of a disk, and what it may make of them.

A target takes any bytes. It either turns them down by the one error that it declares, or makes something of them that
survives being written and read again; whatever else comes out of it is a defect.
"""

import contextlib
import gzip
import hashlib
import io
import json
import struct
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from flwr.app import Message, RecordDict
from PIL import Image

from polyclinic.client.connection.fleet_client import MessageContentGone, find_app_bundle_fault, is_message_expired
from polyclinic.client.connection.service import PendingMessage
from polyclinic.client.gate.incoming_request import PlanRefused, read_plan
from polyclinic.client.site.memory import LostRoundState, SiteRoundState, SiteRoundStateFolder
from polyclinic.client.site.settings import load_site, read_site_settings
from polyclinic.common.config import read_experiment
from polyclinic.common.errors import BadInput, WireError
from polyclinic.common.models.network import Head, build_network
from polyclinic.common.models.saved import load_model, save_model
from polyclinic.common.models.state import ModelState
from polyclinic.common.models.weights import convert_checkpoint
from polyclinic.common.models.zoo.spec import DESCRIPTION_FILE, TENSORS_FILE, ModelSpec
from polyclinic.common.prediction.pictures import read_unlabelled_pictures
from polyclinic.common.security.identity import (
    check_public_key,
    read_admission_request,
    read_connection_kit,
    read_private_key,
    write_commented_toml_file,
)
from polyclinic.common.security.signatures import SignatureFault
from polyclinic.common.wire.codec import (
    decode_record,
    encode_record,
    pack_numbers,
    round_to_number_format,
    unpack_numbers,
)
from polyclinic.common.wire.fleet_protocol import (
    Envelope,
    HelloAnswer,
    MetadataFields,
    ObjectTree,
    PullMessagesResponse,
    append_protobuf_field,
    extract_protobuf_field,
)
from polyclinic.common.wire.flower_messages import make_request
from polyclinic.common.wire.message_objects import decode_message_objects, encode_message_objects
from polyclinic.common.wire.records import NUMBER_FORMATS, ModelGroups, RefusalNoted, RollCall
from polyclinic.data.base.spec import FolderDatasetSpec, NpzDatasetSpec, PictureRenderingOptions
from polyclinic.data.images.headers import (
    DicomHeader,
    compute_rle_plane_sizes,
    estimate_jpeg_2000_decoder_memory,
    read_dicom_headers,
    read_encoded_frame_shape,
)
from polyclinic.data.images.reading import DecodedImageFormat
from polyclinic.data.images.store import decode_pictures
from polyclinic.data.load import load_dataset
from polyclinic.data.tables.csv import read_csv_table
from polyclinic.data.tables.labels import open_folder_label_table
from polyclinic.server.coordinator.authority import (
    find_server_certificate_faults,
    issue_server_certificate,
    make_certificate_authority,
)
from polyclinic.server.coordinator.folder import COORDINATOR_FILE as COORDINATOR_FILE
from polyclinic.server.coordinator.folder import CoordinatorFolder, CoordinatorTomlContent, read_coordinator_folder
from polyclinic.server.deployment.superlink.request_signing import RequestRecipient, RequestSigner
from polyclinic.server.federation.checkpoints import Checkpoint, CheckpointFolder
from polyclinic.server.runs.folder import RunFolder
from polyclinic.strategies.engine.exchange import decode_reply
from polyclinic.strategies.engine.state import FederationState, deserialize_federation_state, serialize_federation_state
from polyclinic.strategies.privacy.secure_aggregation.crypto import (
    MaskingStatementError,
    encode_public_key_hex,
    make_key_pair,
    read_masking_statement,
)
from tests.bad_input.coordinator_files import GOOD
from tests.bad_input.data_sets import FOLDER, TABLE, arrays_with
from tests.bad_input.images import dicom, encoded
from tests.bad_input.site_files import DATA, HEAD, KEY, LINE, kit_text, request_text
from tests.bad_input.wire_records import ANSWER, COMPARED, COUNTED, MODEL, REPLY, REQUEST, SCORED, SCORES, SPREAD
from tests.common.flower_messages import message, same
from tests.data.bombs import jpeg_2000, jpeg_ls, run_lengths
from tests.data.damaged import nifti_files, valid_files
from tests.federations import DIGITS
from tests.fuzz.contents import content_as_bytes, content_of_bytes
from tests.fuzz.hospital import hospital
from tests.hostile_requests import MESSAGE_TYPES, HostileRequest, RequestMutator, honest_requests

Seeds = Callable[[], Sequence[bytes]]
Check = Callable[[bytes], None]


@dataclass(frozen=True)
class Target:
    """One reader.

    Attributes:
        seeds: Bytes that it accepts, to start from.
        check: Gives it bytes; raises for what it should not have accepted.
    """

    seeds: Seeds
    check: Check


TARGETS: dict[str, Target] = {}


def target(name: str, seeds: Seeds) -> Callable[[Check], Check]:
    """Make a function that is given bytes a target."""

    def register(check: Check) -> Check:
        TARGETS[name] = Target(seeds, check)
        return check

    return register


Read = Callable[[Path], object]


def file_target(name: str, file: str, seeds: Seeds) -> Callable[[Read], Read]:
    """Make a reader of a folder a target; the bytes are this file of it, and may be refused as bad input."""

    def register(read: Read) -> Read:
        def check(data: bytes) -> None:
            with folder_with({file: data}) as folder, contextlib.suppress(BadInput):
                read(folder)

        TARGETS[name] = Target(seeds, check)
        return read

    return register


@contextlib.contextmanager
def folder_with(files: Mapping[str, bytes]) -> Iterator[Path]:
    """A folder of these files, each readable by its owner only."""
    with TemporaryDirectory() as name:
        for file, content in files.items():
            path = Path(name, file)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
            path.chmod(0o600)
        yield Path(name)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---------------------------------------------------------------------- from the other side

_NOTED = RefusalNoted("run", "north")
RECORDS = (RollCall("run", "{}"), _NOTED, ANSWER, REQUEST, REPLY, SCORES, SPREAD, COMPARED, COUNTED, SCORED)


def record_seeds() -> list[bytes]:
    """The number of a record's kind, and the record as it travels."""
    contents = [content_as_bytes(encode_record(record)) for record in RECORDS]
    return [bytes([kind]) + content for kind, content in enumerate(contents)]


@target("record", record_seeds)
def record(data: bytes) -> None:
    try:
        content = content_of_bytes(data[1:])
    except Exception:  # Flower's own, long before any of our records
        return
    accepts(content, type(RECORDS[data[0] % len(RECORDS)]) if data else RollCall)


def accepts(content: RecordDict, kind: Any) -> None:
    """A record that is accepted comes back from the wire as it was."""
    try:
        accepted = decode_record(content, kind)
    except WireError:
        return
    assert same(decode_record(encode_record(accepted), kind), accepted)


_OBJECT = struct.Struct("<64sI")


def object_seeds() -> list[bytes]:
    """All objects of a message with their names, the message first."""
    whole = message(trunk=np.arange(7, dtype=np.float32), bias=np.zeros(2, np.float32))
    tree, objects = encode_message_objects(whole)
    ordered = {tree.object_id: objects[tree.object_id], **objects}
    return [b"".join(_OBJECT.pack(name.encode(), len(content)) + content for name, content in ordered.items())]


@target("objects", object_seeds)
def objects(data: bytes) -> None:
    contents: dict[str, bytes] = {}
    while len(data) >= _OBJECT.size:
        name, size = _OBJECT.unpack_from(data)
        contents[name.decode("latin-1")] = data[_OBJECT.size : _OBJECT.size + size]
        data = data[_OBJECT.size + size :]
    with contextlib.suppress(ValueError):
        decode_message_objects(next(iter(contents), ""), contents, 1e9)


@target("large-field", lambda: [append_protobuf_field(b"\x08\x01", 3, b"content")])
def large_field(data: bytes) -> None:
    try:
        rest, content = extract_protobuf_field(data, 3)
    except ValueError:
        return
    assert extract_protobuf_field(append_protobuf_field(rest, 3, content), 3) == (rest, content)


def compact_seeds() -> list[bytes]:
    values = np.linspace(-3, 5, 40, dtype=np.float32)
    packed = [pack_numbers(round_to_number_format(values, form), form) for form in NUMBER_FORMATS]
    return [bytes([place, 40]) + content for place, content in enumerate(packed)]


@target("compact", compact_seeds)
def compact(data: bytes) -> None:
    form, n = NUMBER_FORMATS[data[0] % len(NUMBER_FORMATS)] if data else "float32", data[1] if len(data) > 1 else 0
    with contextlib.suppress(ValueError):
        values = unpack_numbers(data[2:], n, form)
        assert (values.shape, values.dtype) == ((n,), np.float32)
        assert form != "int8" or np.isfinite(values).all()


def received_seeds() -> list[bytes]:
    metadata = MetadataFields(run_id=7, message_id="a", created_at=5.0, ttl=60.0, message_type="train")
    trees = [ObjectTree(object_id="a")]
    answer = PullMessagesResponse(messages_list=[Envelope(metadata=metadata)], message_object_trees=trees)
    return [answer.SerializeToString()]


@target("received-message", received_seeds)
def received(data: bytes) -> None:
    with contextlib.suppress(MessageContentGone):
        assert isinstance(is_message_expired(data, 30.0), bool)


def saved(save: Callable[..., None], **arrays: Any) -> bytes:
    content = io.BytesIO()
    save(content, **arrays)
    return content.getvalue()


@target("bundle", lambda: [saved(np.savez, a=np.zeros(1))])
def bundle(data: bytes) -> None:
    assert isinstance(find_app_bundle_fault(data, hashlib.sha256(data).hexdigest()), str)


# ---------------------------------------------------------------------- whole messages, through a hospital's loop


@lru_cache
def _requests() -> tuple[Any, ...]:
    with TemporaryDirectory() as name:
        path = Path(name, "it.toml")
        path.write_text(DIGITS, encoding="utf-8")
        return honest_requests(read_experiment(path), hospital().class_names, "run")


def signed_message_seeds() -> list[bytes]:
    """The number of a request's kind, and the request as it travels."""
    contents = [content_as_bytes(encode_record(request)) for request in _requests()]
    return [bytes([kind]) + content for kind, content in enumerate(contents)]


@target("signed-message", signed_message_seeds)
def signed_message(data: bytes) -> None:
    """A record of any content, signed by the coordinator: answered, in the audit, and nothing outside is changed."""
    requests = _requests()
    kind = MESSAGE_TYPES[type(requests[data[0] % len(requests)])] if data else "train"
    try:
        content = content_of_bytes(data[1:])
        signed = hospital().sign(HostileRequest("fuzz", kind, content, {}))
        received = hospital().announce(signed, kind)
    except Exception:  # Flower's own: a record that no coordinator can send
        return
    assert hospital().take(received)


def mutated_message_seeds() -> list[bytes]:
    return [bytes([number]) for number in range(20)]


@target("mutated-request", mutated_message_seeds)
def mutated_request(data: bytes) -> None:
    """The bytes are the seed of a request in which one thing was changed on purpose."""
    outside = str(hospital().folder / "outside")
    request = RequestMutator(_requests(), (outside,), int.from_bytes(data[:8], "big")).make_request()
    kind = request.message_type if request.message_type in MESSAGE_TYPES.values() else "query.bogus"
    assert hospital().take(hospital().announce(hospital().sign(request), kind))


@target("announced-message", received_seeds)
def announced_message(data: bytes) -> None:
    """What announces a message, of which no object is at the coordinator."""
    hospital().link.contents = {}
    hospital().take(data)


@lru_cache
def _objects() -> dict[str, bytes]:
    hospital().announce(hospital().sign(HostileRequest("fuzz", "train", encode_record(_requests()[0]), {})), "train")
    return dict(hospital().link.contents)


@target("message-object", lambda: [bytes([i]) + content for i, content in enumerate(_objects().values())])
def message_object(data: bytes) -> None:
    """One object of a message is of other bytes than its name says."""
    received = hospital().announce(
        hospital().sign(HostileRequest("fuzz", "train", encode_record(_requests()[0]), {})), "train"
    )
    name = sorted(hospital().link.contents)[data[0] % len(hospital().link.contents)] if data else ""
    hospital().link.contents = {**hospital().link.contents, name: data[1:]}
    assert hospital().take(received)


@target("plan", lambda: [_requests()[0].plan.encode()])
def plan(data: bytes) -> None:
    with contextlib.suppress(PlanRefused):
        read_plan(data.decode("utf-8", "replace"), 64.0)


def hello_seeds() -> list[bytes]:
    return [HelloAnswer(time=1.5, release="1", wire=17, key="admitted", site="north").model_dump_json().encode()]


@target("hello", hello_seeds)
def hello(data: bytes) -> None:
    with contextlib.suppress(ValueError):  # gRPC makes a lost connection of it
        assert HelloAnswer.model_validate_json(data).release.isprintable()


def masking_statement_seeds() -> list[bytes]:
    names = {"run": "run", "round": 1, "site": "north", "members": ["east", "north"], "opened": []}
    rules = {"cohort": 2, "divisor": 2, "shared": {}, "rows": ["0"], "alone": False}
    hashes = {"plan": "a" * 64, "model": "b" * 64}
    keys = {name: encode_public_key_hex(make_key_pair()) for name in ("sealing_key", "masking_key")}
    return [json.dumps({**names, **rules, **hashes, **keys}).encode()]


@target("masking-statement", masking_statement_seeds)
def masking_statement(data: bytes) -> None:
    with contextlib.suppress(MaskingStatementError):
        statement = read_masking_statement(data)
        assert read_masking_statement(statement.bytes_to_sign()) == statement


@file_target("nonces", "run.txt", lambda: [b"0" * 32 + b" " + b"a" * 64 + b"\n"])
def nonces(folder: Path) -> None:
    """A file of the site's own that a full disk or a power failure has cut."""
    requests = hospital().site_folder / "state" / "requests"
    requests.mkdir(parents=True, exist_ok=True)
    (requests / "run.txt").write_bytes((folder / "run.txt").read_bytes())
    signed = hospital().sign(HostileRequest("fuzz", "query.roll_call", encode_record(_requests()[0]), {}))
    assert hospital().take(hospital().announce(signed, "query.roll_call"))


# ---------------------------------------------------------------------- replies, at the coordinator

_ANSWERS = (ANSWER, RefusalNoted("run", "north"), REPLY, SCORES, SPREAD, COMPARED, COUNTED, SCORED)


def signed_reply_seeds() -> list[bytes]:
    contents = [content_as_bytes(encode_record(record)) for record in _ANSWERS]
    return [bytes([kind]) + content for kind, content in enumerate(contents)]


@target("signed-reply", signed_reply_seeds)
def signed_reply(data: bytes) -> None:
    """A record of any content, signed by its site: it counts or has a reason, and nothing is raised."""
    try:
        content = content_of_bytes(data[1:])
        signed = hospital().link._statements.sign_reply(content, "a" * 64)  # type: ignore[union-attr]
    except Exception:  # a record that no site can send
        return
    reply = Message(signed, reply_to=make_request(RecordDict(), 1, "train"))
    signer = RequestSigner(*hospital().signing, lambda: {5: RequestRecipient("north", hospital().public_key)})
    with contextlib.suppress(SignatureFault):  # a record that had fields of a signature before
        assert signer.verify_earlier_run_reply(5, signed).site == "north"
    kind = type(_ANSWERS[data[0] % len(_ANSWERS)]) if data else RefusalNoted
    record, reason = decode_reply(reply, kind)
    assert (record is None) == bool(reason)


# ---------------------------------------------------------------------- credentials


def read_again(read: Callable[[Path], Any]) -> Callable[[Path], None]:
    """A file that is accepted is written and read again as it was."""

    def reading(folder: Path) -> None:
        content = read(folder / "it")
        write_commented_toml_file(folder / "again", content, "Written again.")
        assert read(folder / "again") == content

    return reading


file_target("request", "it", lambda: [request_text().encode()])(read_again(read_admission_request))
file_target("kit", "it", lambda: [kit_text().encode()])(read_again(read_connection_kit))
file_target("private-key", "key", lambda: [KEY.encode()])(lambda folder: read_private_key(folder / "key"))


@target("public-key", lambda: [LINE.encode()])
def public_key(data: bytes) -> None:
    line = data.decode("utf-8", "replace")
    with contextlib.suppress(ValueError):
        assert check_public_key(line) == line


def _coordinator(folder: str) -> CoordinatorFolder:
    return CoordinatorFolder(Path(folder), CoordinatorTomlContent(name="trial", hosts=("fl.example",), port=1))


@lru_cache
def _authority() -> dict[str, bytes]:
    with TemporaryDirectory() as name:
        coordinator = _coordinator(name)
        make_certificate_authority(coordinator)
        issue_server_certificate(coordinator)
        return files_of(coordinator.authority_path)


@target("certificates", lambda: [bytes([i]) + _authority()[n] for i, n in enumerate(sorted(_authority()))])
def certificates(data: bytes) -> None:
    """First which file it is, then the file."""
    names = sorted(_authority())
    files = _authority() | ({names[data[0] % len(names)]: data[1:]} if data else {})
    with folder_with({f"authority/{file}": content for file, content in files.items()}) as folder:
        coordinator = _coordinator(str(folder))
        with contextlib.suppress(BadInput):
            find_server_certificate_faults(coordinator)
            issue_server_certificate(coordinator)


# ---------------------------------------------------------------------- what a run and a site write and read again


@lru_cache
def _state() -> FederationState:
    head = Head(("b", "a"), np.ones((2, 3), np.float32), np.zeros(2, np.float32))
    model = ModelState(np.arange(5, dtype=np.float32), np.zeros(2, np.float32), head)
    moments = {"trunk m": np.ones(5), "head b": np.ones((), np.float64)}
    return FederationState(
        2,
        model,
        best=model,
        best_round=1,
        best_losses={"north": 0.5},
        lowest_losses={"north": 0.4},
        counted={"north": 2},
        moments=moments,
        statistics={"prior": np.ones(2, np.float32)},
    )


@target("state", lambda: [serialize_federation_state(_state())])
def state(data: bytes) -> None:
    try:
        written = serialize_federation_state(deserialize_federation_state(data))
    except ValueError:
        return
    assert serialize_federation_state(deserialize_federation_state(written)) == written


@lru_cache
def _checkpoint() -> dict[str, bytes]:
    with TemporaryDirectory() as name:
        CheckpointFolder(Path(name), durable=False).save_checkpoint(Checkpoint("run", _state(), {"run": {}}, {}, {}))
        return files_of(Path(name, "checkpoints"))


@target("checkpoint", lambda: [_checkpoint()["round-000002.json"]])
def checkpoint(data: bytes) -> None:
    """Its JSON file beside a state that is whole."""
    files = _checkpoint() | {"round-000002.json": data}
    with folder_with({f"checkpoints/{file}": content for file, content in files.items()}) as folder:
        newest, broken = CheckpointFolder(folder, durable=False).read_newest_undamaged_checkpoint()
        assert (newest is None) == bool(broken)
        assert all(broken.values())


@file_target("rounds", "rounds.jsonl", lambda: [b'{"round": 1}\n{"round": 2}\n'])
def rounds(folder: Path) -> None:
    RunFolder(folder).remove_rounds_after(3)
    before = (folder / "rounds.jsonl").read_bytes()
    RunFolder(folder).remove_rounds_after(3)
    assert (folder / "rounds.jsonl").read_bytes() == before


def memory_seeds() -> list[bytes]:
    with TemporaryDirectory() as name:
        site = SiteRoundState(3, MODEL, ModelGroups(), 2, MODEL, 1, 0.25, {"head.weight/step": np.ones((), np.float32)})
        SiteRoundStateFolder(Path(name) / "run", durable=False).store_state_of_round(site)
        return [(Path(name) / "run" / "round-000003.safetensors").read_bytes()]


@target("memory", memory_seeds)
def memory(data: bytes) -> None:
    """Damaged, it is refused as lost; also where it was damaged before its digest was taken."""
    for content in (data, hashlib.sha256(data[32:]).digest() + data[32:]):
        with folder_with({"run/round-000003.safetensors": content}) as folder, contextlib.suppress(LostRoundState):
            assert SiteRoundStateFolder(folder / "run").read_last_counted_state(3).round == 3


@target("in-hand", lambda: [hashlib.sha256(b"\1train").digest() + b"\1train"])
def in_hand(data: bytes) -> None:
    with folder_with({"it": data}) as folder:
        pending = PendingMessage(folder / "it").read_message()
        assert pending is None or data[32:] == bytes([pending[0]]) + pending[1]


@lru_cache
def _model() -> dict[str, bytes]:
    spec = ModelSpec(architecture="tiny_cnn", channels=1, image_size=16)
    with TemporaryDirectory() as name:
        save_model(Path(name), build_network(spec, ("a", "b"), seed=0), label_contract_sha256="")
        return files_of(Path(name))


@file_target("model-description", DESCRIPTION_FILE, lambda: [_model()[DESCRIPTION_FILE]])
def model_description(folder: Path) -> None:
    (folder / TENSORS_FILE).write_bytes(_model()[TENSORS_FILE])
    load_model(folder)


@file_target("model-tensors", TENSORS_FILE, lambda: [_model()[TENSORS_FILE]])
def model_tensors(folder: Path) -> None:
    """With the hash that belongs to them."""
    sha256 = hashlib.sha256((folder / TENSORS_FILE).read_bytes()).hexdigest()
    (folder / DESCRIPTION_FILE).write_text(
        json.dumps(json.loads(_model()[DESCRIPTION_FILE]) | {"safetensors_sha256": sha256})
    )
    load_model(folder)


# ---------------------------------------------------------------------- what people write


@file_target("experiment", "it.toml", lambda: [DIGITS.encode()])
def experiment(folder: Path) -> None:
    settings = read_experiment(folder / "it.toml").experiment
    assert type(settings).model_validate_json(settings.model_dump_json()) == settings


@file_target("site-file", "site.toml", lambda: [(HEAD + DATA + 'annotates = ["Mass"]\n').encode()])
def site(folder: Path) -> None:
    settings = read_site_settings(folder)
    if settings.file.data.kind == "phantom" and settings.file.data.images <= 40:
        load_site(settings)


file_target("coordinator-file", COORDINATOR_FILE, lambda: [GOOD.encode()])(read_coordinator_folder)


@file_target("table", "labels.csv", lambda: [TABLE.encode()])
def table(folder: Path) -> None:
    keys = tomllib.loads(FOLDER) | {"split_column": "part", "missing_files": "ignore"}
    (folder / "pictures").mkdir()
    (folder / "pictures" / "00.png").touch()
    opened = open_folder_label_table(FolderDatasetSpec.model_validate(keys), folder)
    assert opened.labels.shape == (len(opened.files), 2)


@target("packed-table", lambda: [TABLE.encode(), gzip.compress(TABLE.encode())])
def packed_table(data: bytes) -> None:
    """The file as it is, and as gzip makes it of the bytes."""
    for content in (data, gzip.compress(data, 1)):
        with folder_with({"labels.csv.gz": content}) as folder, contextlib.suppress(BadInput):
            columns = read_csv_table(folder / "labels.csv.gz", "data.labels")
            assert len({cells.shape for cells in columns.values()}) == 1


def npz_seeds() -> list[bytes]:
    arrays = {name: array[:3] for name, array in arrays_with({}).items()}
    return [saved(save, **arrays) for save in (np.savez, np.savez_compressed)]


@file_target("npz", "it.npz", npz_seeds)
def npz(folder: Path) -> None:
    spec = NpzDatasetSpec(kind="npz", path="it.npz", classes=("a", "b"), validation_fraction=0.0)
    splits = load_dataset(spec, folder)
    assert splits.train.labels.shape == (len(splits.train), 2)


def jpeg_npz_seeds() -> list[bytes]:
    """Arrays in either order, and pictures as JPEG bytes, with names of patients."""
    parts, packed = ("train", "test"), np.frombuffer(encoded("JPEG"), np.uint8)
    arrays = {f"{part}_labels": np.zeros(3, np.uint8) for part in parts}
    arrays |= {f"{part}_patient": np.array([f"{part}{row}" for row in range(3)]) for part in parts}
    pictures = {f"{part}_jpeg": np.tile(packed, 3) for part in parts}
    pictures |= {f"{part}_offsets": len(packed) * np.arange(4) for part in parts}
    images = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)
    ordered = saved(np.savez, train_images=np.asfortranarray(images), test_images=images, **arrays)
    return [saved(np.savez_compressed, **arrays, **pictures), ordered]


@file_target("limited-npz", "it.npz", jpeg_npz_seeds)
def limited_npz(folder: Path) -> None:
    """Some rows of a file, which are read without the others."""
    keys = {"classes": ("a", "b"), "patient_key": "patient", "train_limit": 2, "image_size": 8}
    splits = load_dataset(NpzDatasetSpec.model_validate({"kind": "npz", "path": "it.npz", **keys}), folder)
    assert splits.train.images.shape[1:3] == (8, 8)


EIGHT = DecodedImageFormat(8, color=False, resize="pad")


@file_target("unlabelled-npz", "it.npz", npz_seeds)
def unlabelled(folder: Path) -> None:
    pictures = read_unlabelled_pictures(folder / "it.npz", EIGHT)
    assert len(pictures.names) == len(pictures.images)


def volume_seeds() -> list[bytes]:
    with TemporaryDirectory() as name:
        return nifti_files(Path(name))


@target("volume", volume_seeds)
def volume(data: bytes) -> None:
    form = replace(EIGHT, rendering=PictureRenderingOptions("middle", "coronal"))
    for content in (data, gzip.compress(data, 1)):
        with folder_with({"it": content}) as folder:
            decoded = decode_pictures(["it"], lambda row, file=folder / "it": file, form)
            assert len(decoded.rows) + len(decoded.skipped) == 1


def picture_seeds() -> list[bytes]:
    small = io.BytesIO()
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(small, "PNG")
    return [small.getvalue(), encoded("JPEG"), dicom(np.arange(16, dtype=np.uint16).reshape(4, 4))]


@target("dicom", valid_files)
@target("picture", picture_seeds)
def picture(data: bytes) -> None:
    decoded = decode_pictures(["it"], lambda row: data, EIGHT)
    assert len(decoded.rows) + len(decoded.skipped) == 1
    assert all(skipped.reason for skipped in decoded.skipped)


@target("dicom-head", valid_files)
def head(data: bytes) -> None:
    with folder_with({"it": data}) as folder:
        assert isinstance(read_dicom_headers([folder / "it"])[0], DicomHeader)


def frame_seeds() -> list[bytes]:
    return [jpeg_2000(40, 30), jpeg_2000(40, 30, tile=8, levels=3, precincts=4), jpeg_ls((10, 10)), run_lengths(5, 5)]


@target("packed-frame", frame_seeds)
def frame(data: bytes) -> None:
    for read in (read_encoded_frame_shape, estimate_jpeg_2000_decoder_memory, compute_rle_plane_sizes):
        with contextlib.suppress(ValueError):
            read(data)


def weights_seeds() -> list[bytes]:
    """As torch writes them now, and as it did before 1.6."""
    files = (io.BytesIO(), io.BytesIO())
    for file, zipped in zip(files, (True, False), strict=True):
        torch.save({"a.weight": torch.ones(2, 3)}, file, _use_new_zipfile_serialization=zipped)
    return [file.getvalue() for file in files]


@file_target("weights", "it.pth", weights_seeds)
def weights(folder: Path) -> None:
    convert_checkpoint("tiny_cnn", folder / "it.pth", folder / "out")
