"""The gate: between what a coordinator asks and the site's work, and between what the work made and the wire.

It lies around every handler of the ClientApp, over the network and in simulation alike. A request that the policy does
not allow is declined before anything is done; a reply is read back from the very records that would be sent, and one
that says more than the method declares and the policy allows is not sent. Either way the coordinator gets the reason,
and the site goes on. Each passage is a line of the site's audit, on its disk before the reply leaves.
"""

import hashlib
from collections.abc import Callable
from typing import Any

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict

from client.rules import Asked, Verdict, of_reply, of_request
from client.site import Site
from common import __version__
from common.audit import Audit, Torn
from common.config import Plan
from common.errors import BadInput
from common.masking_records import KeysAnswer, MaskedAnswer, MaskingAnswer, RevealAnswer, SharesAnswer
from common.record_bytes import parts, record_sha256
from common.records import EvaluateReply, RefusalNoted, RollCallAnswer, TrainReply
from common.wire import WIRE_VERSION, decode, payload_bytes
from common.wire_errors import WireError
from strategies.registry import method_of

DECLINED = 202
"""Our error code for a request or a reply that the site's policy does not allow."""

ANSWERS: dict[str, type[Any]] = {
    "RollCall": RollCallAnswer,
    "Refusal": RefusalNoted,
    "TrainRequest": TrainReply,
    "EvaluateRequest": EvaluateReply,
    "KeysRequest": KeysAnswer,
    "SharesRequest": SharesAnswer,
    "MaskedRequest": MaskedAnswer,
    "RevealRequest": RevealAnswer,
}

Handler = Callable[[Message, Context], Message]


def gate(site_of: Callable[[Context], Site]) -> Callable[[Message, Context, Handler], Message]:
    """What lies around the handlers of an app whose messages are for these sites."""

    def passage(message: Message, context: Context, answer: Handler) -> Message:
        site = site_of(context)
        return Passage(site, Audit(site.folder, durable=site.durable), message).reply(context, answer)

    return passage


def begin(site: Site) -> Torn | None:
    """Write down that the site's process has started, and by which policy; return the line that a kill tore, if any."""
    policy = site.policy.model_dump(mode="json")
    return Audit(site.folder, durable=site.durable).append(event="start", version=__version__, policy=policy)


class Passage:
    """One message and what becomes of it."""

    def __init__(self, site: Site, audit: Audit, message: Message) -> None:
        self._site, self._audit, self._message = site, audit, message
        self._fields = _fields(message.content)
        self._about = {"run": str(self._fields.get("run", "")), "round": self._fields.get("round", 0)}

    def reply(self, context: Context, answer: Handler) -> Message:
        """What is sent: the handler's reply, or the reason why there is none."""
        asked = _asked(self._fields)
        verdict = Verdict("no plan") if asked is None else of_request(self._site.policy, asked)
        self._note_record("in", self._message.content, verdict)
        if not verdict.allowed:
            return self._declined(f"declines: {verdict}")
        try:
            reply = answer(self._message, context)
        except Exception as error:
            self._note_error(type(error).__name__)
            raise
        verdict = self._verdict(asked, reply.content)
        self._note_record("out", reply.content, verdict)
        return reply if verdict.allowed else self._declined(f"does not send this: {verdict}")

    def _verdict(self, asked: Asked | None, content: RecordDict) -> Verdict:
        """Of the records as they would leave; what the wire does not know is in none of our records."""
        try:
            record = decode(content, ANSWERS[str(self._fields.get("wire.record"))])
        except (WireError, KeyError) as error:
            return Verdict("wire", str(error).removesuffix("."))
        if isinstance(record, MaskingAnswer):
            return Verdict("secure aggregation")  # of an update that the policy allowed when it was held back
        if asked is None:
            return Verdict("no plan", "" if isinstance(record, RefusalNoted) else "nothing may answer this")
        return of_reply(self._site.policy, asked, record)

    def _declined(self, reason: str) -> Message:
        self._note_error("declined", reason)
        return Message(Error(DECLINED, reason), reply_to=self._message)

    def _note_record(self, direction: str, content: RecordDict, verdict: Verdict) -> None:
        self._audit.append(
            **self._about,
            direction=direction,
            record=str(_fields(content).get("wire.record", "")),
            fields=[[part.name, part.shape, part.size] for part in parts(content)],
            bytes=payload_bytes(content),
            sha256=record_sha256(content),
            decision="allow" if verdict.allowed else "deny",
            rule=verdict.rule,
            **({} if verdict.allowed else {"reason": verdict.reason}),
        )

    def _note_error(self, kind: str, reason: str = "") -> None:
        """An error leaves as words: ours, or else only its kind."""
        said = reason.encode()
        facts = {"bytes": len(said), "sha256": hashlib.sha256(said).hexdigest()} if said else {}
        self._audit.append(**self._about, direction="out", record="Error", kind=kind, decision="allow", **facts)


def _asked(fields: dict[str, Any]) -> Asked | None:
    """What is asked; None where the record has no plan, or none of this release: its handler says what is wrong."""
    if "plan" not in fields or fields.get("wire.version") != WIRE_VERSION:
        return None
    try:
        plan = Plan.model_validate_json(fields["plan"])
        return Asked(plan, method_of(plan), int(fields.get("round", 0)), bool(fields.get("test", False)))
    except (ValueError, BadInput):
        return None


def _fields(content: RecordDict) -> dict[str, Any]:
    """The small fields of one of our records, unchecked."""
    record = content.get("fields")
    return dict(record) if isinstance(record, ConfigRecord) else {}
