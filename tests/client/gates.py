"""What a site's gate makes of a request or of a reply."""

from typing import Any

from flwr.app import Context, Message, RecordDict

from client.app import client_app
from client.site.site import Site
from common.config import Plan
from common.security.audit import Audit
from common.wire.codec import encode
from tests.client.rounds import beginning, evaluation, request


def asked(at: Site, kind: str, content: RecordDict) -> Message:
    """The app's own answer to a message."""
    context = Context(1, 2, {}, RecordDict(), {})
    return client_app(lambda context: at)(Message(content, 2, kind), context)


def trained(at: Site, of: Plan) -> Message:
    return asked(at, "train", encode(request(of, beginning(of))))


def judged(at: Site, of: Plan) -> Message:
    return asked(at, "evaluate", encode(evaluation(of, beginning(of), 1, 0, -1)))


def log(at: Site) -> list[Any]:
    return list(Audit(at.folder).entries())
