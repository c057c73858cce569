"""What a site's app answers to a message, and what its audit holds of it."""

from typing import Any

from flwr.app import Context, Message, RecordDict

from client.app import client_app
from client.site.site import Site
from common.config import Plan
from common.security.audit import Audit
from common.wire.codec import R, decode, encode
from common.wire.fleet_protocol import ROLL_CALL
from common.wire.records import Record, RollCall
from tests.client.rounds import beginning, evaluation, request


def send(at: Site, kind: str, content: RecordDict | Record) -> Message:
    """The app's own answer to a message."""
    content = content if isinstance(content, RecordDict) else encode(content)
    return client_app(lambda context: at)(Message(content, 2, kind), Context(1, 2, {}, RecordDict(), {}))


def record_of(message: Message, kind: type[R]) -> R:
    """The record that a site answered with."""
    assert not message.has_error(), message.error.reason
    return decode(message.content, kind)


def called(at: Site, of: Plan) -> Message:
    return send(at, ROLL_CALL, RollCall("run", of.model_dump_json()))


def trained(at: Site, of: Plan) -> Message:
    return send(at, "train", request(of))


def judged(at: Site, of: Plan) -> Message:
    return send(at, "evaluate", evaluation(of, beginning(of), 1, 0, -1))


def log(at: Site) -> list[Any]:
    return list(Audit(at.folder).entries())
