"""Requests that a coordinator with its true keys may sign: honest ones, of which something was changed by a seed."""

import json
import random
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from polyclinic.common.config import ExperimentFile, make_hospital_plan
from polyclinic.common.models.network import build_network
from polyclinic.common.models.state import read_model_state
from polyclinic.common.security.identity import compute_public_key_fingerprint
from polyclinic.common.security.signatures import sign_record
from polyclinic.common.wire.canonical_bytes import hash_record
from polyclinic.common.wire.codec import encode_record
from polyclinic.common.wire.records import EvaluateRequest, ModelGroups, Record, RollCall, TrainRequest
from polyclinic.common.wire.secure_aggregation import (
    STAGE_BY_REQUEST,
    KeysRequest,
    MaskedRequest,
    RevealRequest,
    SharesRequest,
)

MESSAGE_TYPES: Mapping[type, str] = {
    RollCall: "query.roll_call",
    TrainRequest: "train",
    EvaluateRequest: "evaluate",
    **{kind: f"query.{stage}" for kind, stage in STAGE_BY_REQUEST.items()},
}
LOOK_ALIKES = ("ｒｕｎ", "rυn", "run\u200b", "ru\u0301n", "\u202enur", "run\ufe0f", "run\U000e0100")
PATHS = ("..", ".", "../outside", "../../../bait", "a/b", "a\\b", "~", "~/bait", "-rf", "C:\\bait", "run/", "//")
TEXTS = (
    *("", " ", "\0", "run\0", "run\n", "\nrun", "run\r\n", "x" * 10_000, "x" * 65, "\U00020000" * 63, "None", "nan"),
    *("%s%n", "{run}", "{0.__class__}", "\x1b[2J", "null", "true", "0", "-1", "RUN", "con", ".run", "run.txt"),
)
NUMBERS = (0, -1, 1, 2**31 - 1, 2**31, 2**63 - 1, -(2**63), 10**9, 10**9 + 1)
FLOATS = (float("nan"), float("inf"), -float("inf"), 1e308, -0.0)
BYTES = (b"", b"\0", b"\xff" * 7, b"\xff" * 8, bytes(4096))
LISTS = ([], [""], ["0"] * 3, [0, -1, 2**62], [float("nan")], [b"", b"\xff"], ["../bait"] * 2, ["x" * 10_000], [2] * 70)


def hostile_names(targets: tuple[str, ...]) -> tuple[str, ...]:
    """Return names that no file may get.

    Args:
        targets: Absolute paths without their endings.
    """
    return (*targets, *PATHS, *LOOK_ALIKES, *TEXTS)


def honest_requests(file: ExperimentFile, class_names: tuple[str, ...], run: str) -> tuple[Record, ...]:
    """One request of each kind that a site may receive, for this run."""
    plan = make_hospital_plan(file.experiment)
    model = ModelGroups.from_model(read_model_state(build_network(plan.model, class_names, plan.run.seed)))
    common = (run, 1, plan.model_dump_json(), "contract", class_names, 0, -1, "", model)
    members = ("east", "north")
    return (
        RollCall(run, plan.model_dump_json()),
        TrainRequest(*common),
        EvaluateRequest(*common, False),
        KeysRequest(run, 1, members, 2),
        SharesRequest(run, 1, (b"{}",) * 2, (b"a",) * 2, ("key",) * 2),
        MaskedRequest(run, 1, ("east",), (b"letter",), 10),
        RevealRequest(run, 1, members),
    )


@dataclass(frozen=True)
class HostileRequest:
    """A request as it is sent.

    Attributes:
        kind: What was done to it, in a word.
        statement: Changes of the statement that is signed, after it was made to fit the content.
        signed: False for one that nobody has signed.
    """

    kind: str
    message_type: str
    content: RecordDict
    statement: Mapping[str, Any]
    signed: bool = True


Change = Callable[[random.Random, dict[str, Any]], None]


class RequestMutator:
    """Makes hostile requests of honest ones; the same seed gives the same requests.

    Args:
        requests: Honest requests.
        targets: Absolute paths, without an ending, that a site must not touch.
    """

    def __init__(self, requests: tuple[Record, ...], targets: tuple[str, ...], seed: int) -> None:
        self._requests, self._names, self._dice = requests, hostile_names(targets), random.Random(seed)

    def make_request(self) -> HostileRequest:
        """Return the next request."""
        record = self._dice.choice(self._requests)
        content, message_type = encode_record(record), MESSAGE_TYPES[type(record)]
        fields = dict(content["fields"])
        kinds = {
            "run": self._change_run,
            "field": self._change_field,
            "missing": self._remove_field,
            "unknown": self._add_field,
            "plan": self._change_plan,
            "record": self._change_record_kind,
            "array": self._change_array,
            "statement": lambda content, fields: None,
            "message type": lambda content, fields: None,
            "unsigned": lambda content, fields: None,
            "empty": self._remove_all,
        }
        weights = [6, 4, 1, 1, 3, 1, 2, 2, 1, 1, 1]
        (kind,) = self._dice.choices(list(kinds), weights)
        kinds[kind](content, fields)
        if kind != "empty":
            content["fields"] = ConfigRecord(fields)
        if kind == "message type":
            types = ("", "train", "evaluate", "query", "query.bogus", "train.x", "query.roll_call", "../x")
            message_type = self._dice.choice((*types, "a.b.c", "\0", "query.\x1b[2J", "x" * 500))
        statement = self._make_statement_change() if kind == "statement" else {}
        return HostileRequest(kind, message_type, content, statement, kind != "unsigned")

    # ------------------------------------------------------------------ changes

    def _value(self) -> Any:
        pools = (self._names, NUMBERS, FLOATS, BYTES, LISTS, (True, False))
        return self._dice.choice(self._dice.choice(pools))

    def _change_run(self, content: RecordDict, fields: dict[str, Any]) -> None:
        fields["run"] = self._dice.choice(self._names)

    def _change_field(self, content: RecordDict, fields: dict[str, Any]) -> None:
        for name in self._dice.sample(sorted(fields), k=min(len(fields), self._dice.randint(1, 3))):
            fields[name] = self._value()

    def _remove_field(self, content: RecordDict, fields: dict[str, Any]) -> None:
        del fields[self._dice.choice(sorted(fields))]

    def _add_field(self, content: RecordDict, fields: dict[str, Any]) -> None:
        name = self._dice.choice((*self._names, "run/shape", "plan/width", "model.norm/shape", "statistics/a/shape"))
        fields[name or "x"] = self._value()

    def _change_plan(self, content: RecordDict, fields: dict[str, Any]) -> None:
        text = fields.get("plan", "{}")
        if self._dice.random() < 0.4:
            plans = ("", "[]", "null", "{" * 5000, '{"run": NaN}', text[:-3], text * 2, "\0")
            fields["plan"] = self._dice.choice(plans)
            return
        tree = json.loads(text)
        table = self._dice.choice([tree, *(value for value in tree.values() if isinstance(value, dict))])
        key = self._dice.choice([*sorted(table), "../x", "weights"]) if table else "x"
        paths = (*self._names, "plugin:../bait", "timm:local-dir:/tmp", *self._names[:3])
        table[key] = self._dice.choice((*paths, None, -1, 0, [], {}, {"a": {}}, [[]], False))
        fields["plan"] = json.dumps(tree)

    def _change_record_kind(self, content: RecordDict, fields: dict[str, Any]) -> None:
        kinds = ("TrainReply", "RollCall", "TrainRequest", "Refusal", "KeysRequest", "RollCallAnswer", "../bait", "")
        fields["wire.record"] = self._dice.choice((*kinds, "x" * 40, "__class__"))
        if self._dice.random() < 0.3:
            fields["wire.version"] = self._dice.choice((0, -1, 15, 17, 2**62, "16", True))

    def _change_array(self, content: RecordDict, fields: dict[str, Any]) -> None:
        shapes: tuple[tuple[int, ...], ...] = ((), (0,), (-1,), (2**62,), (10**400,), (1, 1, 1), (3,) * 70, (True,))
        array = Array(
            dtype=self._dice.choice(("float32", "float16", "int8", "uint32", "object", "../bait", "")),
            shape=self._dice.choice(shapes),
            stype=self._dice.choice(("raw-little-endian", "numpy.ndarray", "pickle", "")),
            data=self._dice.choice(BYTES),
        )
        name = self._dice.choice(("model", "frozen", "initial", "vector", "bait", "statistics"))
        content[name] = record = ArrayRecord()
        record[self._dice.choice(("trunk", "vector", "../bait"))] = array

    def _remove_all(self, content: RecordDict, fields: dict[str, Any]) -> None:
        for name in list(content):
            del content[name]

    def _make_statement_change(self) -> dict[str, Any]:
        name = self._dice.choice(("site", "key", "run", "round", "record", "sha256", "nonce", "extra"))
        return {name: self._value()}


def sign_hostile_request(
    request: HostileRequest, site: str, public_key: str, key: ec.EllipticCurvePrivateKey, certificate: bytes
) -> RecordDict:
    """Sign a request as the coordinator does, without a look at what it says."""
    fields = dict(request.content["fields"]) if "fields" in request.content else {}
    number = fields.get("round", 0)
    statement = {
        "site": site,
        "key": compute_public_key_fingerprint(public_key),
        "run": str(fields.get("run")),
        "round": number if type(number) is int else -1,
        "record": str(fields.get("wire.record")),
        "sha256": hash_record(request.content),
        "nonce": secrets.token_hex(16),
        **{name: value for name, value in request.statement.items() if not isinstance(value, bytes | list)},
    }
    return sign_record(request.content, _AnyStatement(statement), key, certificate=certificate)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _AnyStatement:
    """A statement of any content; the product's own class refuses most of them."""

    content: Mapping[str, Any]

    def model_dump_json(self) -> str:
        return json.dumps(self.content)
