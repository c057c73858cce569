"""The policy gate: a Flower mod that checks each request before the site works on it, and each reply before it leaves.

The gate wraps every handler of a hospital's ClientApp, and of a simulated site with limits. It declines a request that
the policy does not allow, before any work begins. It decodes each reply from the record as it would be sent. It
withholds a reply that has more than the method declares and the policy allows. In both cases the coordinator receives
the reason, and the site continues. Each request and reply is a line of the site's audit log, which is on disk before
the reply leaves.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from flwr.app import Context, Error, Message, RecordDict

from polyclinic.client.gate.incoming_request import IncomingRequest, RequestTimeExceeded
from polyclinic.client.gate.policy_rules import PolicyVerdict, RequestedWork, decide_if_reply_may_leave
from polyclinic.client.gate.question_rules import QUESTIONS, decide_if_answer_may_leave, decide_on_question
from polyclinic.client.site.plans import TRAINING_KIND, read_request_text
from polyclinic.client.site.site import Site
from polyclinic.common import __version__
from polyclinic.common.errors import WireError
from polyclinic.common.security.audit import AuditLog, TornAuditLine
from polyclinic.common.security.signatures import SignatureFault, read_run_round_class, read_unverified_signature
from polyclinic.common.system.plain_text import format_as_json_text, make_printable_line
from polyclinic.common.wire.canonical_bytes import RecordField, hash_record, list_record_fields, read_small_fields
from polyclinic.common.wire.codec import count_payload_bytes, decode_record
from polyclinic.common.wire.flower_messages import APPROVAL_ERROR_CODE, APPROVAL_ERROR_MESSAGE
from polyclinic.common.wire.records import (
    BenefitReply,
    EvaluateReply,
    RefusalNoted,
    RollCall,
    RollCallAnswer,
    TrainReply,
)
from polyclinic.common.wire.secure_aggregation import (
    KeysAnswer,
    MaskedAnswer,
    MaskingAnswer,
    RevealAnswer,
    SharesAnswer,
)
from polyclinic.data.base.image_set import PARTS

DECLINED_ERROR_CODE = 202
"""Polyclinic's error code for a request or a reply that the site's policy does not allow."""

# Class name of a request -> class of its reply.
REPLY_CLASSES: dict[str, type[Any]] = {
    "RollCall": RollCallAnswer,
    "Refusal": RefusalNoted,
    "Question": RefusalNoted,
    "TrainRequest": TrainReply,
    "EvaluateRequest": EvaluateReply,
    "BenefitRequest": BenefitReply,
    "KeysRequest": KeysAnswer,
    "SharesRequest": SharesAnswer,
    "MaskedRequest": MaskedAnswer,
    "RevealRequest": RevealAnswer,
    **{name: kind.answer for name, kind in QUESTIONS.items()},
}

# Rules of polyclinic.client.site.approvals, which is not imported if nobody approves requests.
APPROVAL_RULE_PREFIX = "approval."
DENIED_RULE = "approval.denied"

# Limits of one line of the audit log.
MAX_AUDIT_NAME_CHARACTERS = 80
MAX_AUDIT_FIELD_LIST_BYTES = 8_000
MAX_AUDIT_DIMENSIONS = 8

Handler = Callable[[Message, Context], Message]
"""Function of a ClientApp that answers a message."""
Mod = Callable[[Message, Context, Handler], Message]
"""A Flower mod: a function around the handlers of a ClientApp."""


def make_policy_gate(site_of: Callable[[Context], Site]) -> Mod:
    """Make the Flower mod that checks each request and reply by the policy of the site that ``site_of`` returns."""

    def check_message_by_policy(message: Message, context: Context, answer: Handler) -> Message:
        site = site_of(context)
        return GatedMessage(site, AuditLog(site.folder, durable=site.durable), message).make_checked_reply(
            context, answer
        )

    return check_message_by_policy


def record_process_start(site: Site) -> TornAuditLine | None:
    """Write the start of the process and the policy to the audit log.

    Returns:
        Size and hash of the log's last line if a killed process left it incomplete, else None.
    """
    policy = site.policy.model_dump(mode="json")
    return AuditLog(site.folder, durable=site.durable).append(event="start", version=__version__, policy=policy)


def record_patients(site: Site, **counts: int) -> None:
    """Write to the audit log that the site's patients changed.

    Args:
        counts: Numbers of patients: ``new``, ``gone`` or ``kept`` since the last start, or ``opted_out`` until now; see
            :class:`PatientChanges` of :mod:`polyclinic.common.patients.parts`. ``opted_out_unmatched`` counts the
            identifiers that fit no patient.
    """
    AuditLog(site.folder, durable=site.durable).append(event="patients", **counts)


UNREADABLE_RULE = "no message"
"""Rule in the audit log for a message that cannot be decoded."""


class AuditMark:
    """The state of a site's audit log at one time, to notice entries that were added later."""

    def __init__(self, site: Site) -> None:
        self._audit = AuditLog(site.folder)
        self._state = self._audit.read_file_state()

    def has_new_entry(self) -> bool:
        """Return True if any entry was added since this object was made."""
        return self._audit.read_file_state() != self._state


def record_unread_message(site: Site, received: bytes, rule: str, reason: str) -> None:
    """Write a refused message to the audit log, without having read its content.

    Args:
        received: The announcement of the message, whose size and SHA-256 are written.
        rule: Name of the broken rule.
    """
    AuditLog(site.folder, durable=site.durable).append(
        run="",
        round=0,
        direction="in",
        record="",
        bytes=len(received),
        sha256=hashlib.sha256(received).hexdigest(),
        decision="deny",
        rule=rule,
        reason=make_printable_line(reason),
    )


def record_refused_request(site: Site, message: Message, reason: str, rule: str) -> None:
    """Write to the audit log a request that was refused before the gate, because of its signature or size.

    Args:
        rule: Name of the broken rule: ``signature`` (also for the Flower App Bundle), or a rule about size.
    """
    run, server_round, record = read_run_round_class(message.content)
    AuditLog(site.folder, durable=site.durable).append(
        run=make_printable_line(run, MAX_AUDIT_NAME_CHARACTERS),
        round=server_round,
        direction="in",
        record=make_printable_line(record, MAX_AUDIT_NAME_CHARACTERS),
        bytes=count_payload_bytes(message.content),
        sha256=hash_record(message.content),
        decision="deny",
        rule=rule,
        reason=make_printable_line(reason),
        **read_request_signature(message.content),
    )


def read_request_signature(content: RecordDict) -> dict[str, str]:
    """Return the coordinator's signed statement about a request, with signature and certificate; empty for none.

    With the statement, the site can prove to others what the coordinator requested.
    """
    try:
        signed, certificate = read_unverified_signature(content)
    except SignatureFault:
        return {}
    return {"statement": signed.statement, "signature": signed.signature, "certificate": certificate.hex()}


class GatedMessage:
    """One request at the policy gate: checks the request and the site's reply, and writes both to the audit log."""

    def __init__(self, site: Site, audit: AuditLog, message: Message) -> None:
        self._site = site
        self._audit = audit
        self._message = message
        self._fields = read_small_fields(message.content)
        self._record_name = str(self._fields.get("wire.record"))
        server_round = self._fields.get("round", 0)
        self._about = {
            "run": make_printable_line(str(self._fields.get("run", "")), MAX_AUDIT_NAME_CHARACTERS),
            "round": server_round if type(server_round) is int else 0,
        }

    def make_checked_reply(self, context: Context, answer: Handler) -> Message:
        """Check the request, let the handler ``answer`` work on it, and return its reply if the policy allows it.

        If the policy does not allow the request or the reply, return an error with the reason.
        """
        try:
            incoming = IncomingRequest(self._site, self._message.content)
            work, verdict = self._decide_on_request(incoming)
        except Exception as error:
            kind = type(error).__name__
            self._write_record_to_audit("in", self._message.content, PolicyVerdict("message", f"{kind} at its check"))
            self._write_error_to_audit(kind)
            raise

        facts = self._collect_audit_facts(work, verdict)
        if incoming.approval is not None and incoming.approval.facts:
            facts["approval"] = dict(incoming.approval.facts)
        self._write_record_to_audit("in", self._message.content, verdict, facts)
        if not verdict.is_allowed:
            if verdict.rule.startswith(APPROVAL_RULE_PREFIX) and verdict.rule != DENIED_RULE:
                return self._await_approval(verdict)
            # The person and reason of a denial stay in the hospital's audit log.
            if verdict.rule == DENIED_RULE:
                verdict = PolicyVerdict(DENIED_RULE, "the hospital has denied it")
            return self._decline_and_record(f"declines: {verdict}")

        try:
            with incoming.limit_working_time():
                reply = answer(self._message, context)
        except RequestTimeExceeded:
            verdict = incoming.make_time_limit_verdict()
            self._write_record_to_audit("in", self._message.content, verdict)
            return self._decline_and_record(f"stopped its work: {verdict}")
        except Exception as error:
            self._write_error_to_audit(type(error).__name__)
            raise

        verdict = self._decide_on_reply(work, reply)
        self._write_record_to_audit("out", reply.content, verdict)
        if not verdict.is_allowed:
            return self._decline_and_record(f"does not send this: {verdict}")
        return reply

    def _decide_on_request(self, incoming: IncomingRequest) -> tuple[RequestedWork | None, PolicyVerdict]:
        """Return the requested work and the policy's verdict; a question that the policy declines needs no approval."""
        if self._record_name in QUESTIONS:
            verdict = decide_on_question(self._site.policy, self._record_name, self._message.content)
            if not verdict.is_allowed:
                return None, verdict
        return incoming.decide_and_record_plan()

    def _decide_on_reply(self, work: RequestedWork | None, reply: Message) -> PolicyVerdict:
        """Return the policy's verdict on a reply as it would be sent; refuse a reply that cannot be decoded."""
        try:
            record = decode_record(reply.content, REPLY_CLASSES[self._record_name])
        except (WireError, KeyError) as error:
            return PolicyVerdict("wire", str(error).removesuffix("."))
        if isinstance(record, MaskingAnswer):
            return PolicyVerdict("secure aggregation")  # the update was checked before it was stored for masking
        if self._record_name in QUESTIONS:
            return decide_if_answer_may_leave(self._site.policy, self._record_name, self._message.content, record)
        if work is None:
            return PolicyVerdict("no plan", "" if isinstance(record, RefusalNoted) else "nothing may answer this")
        return decide_if_reply_may_leave(self._site.policy, work, record)

    def _collect_audit_facts(self, work: RequestedWork | None, verdict: PolicyVerdict) -> dict[str, Any]:
        """Return further facts for the audit line: the run's title, the hash of its plan, and numbers of images.

        Only the roll call of a run, or a question, has these facts; later requests of the run contain the same plan.
        """
        request = read_request_text(self._fields)
        if request is None or (request.kind == TRAINING_KIND and self._fields.get("wire.record") != RollCall.__name__):
            return {}
        facts: dict[str, Any] = {}
        if work is not None and (name := work.plan.run.name):
            facts["name"] = make_printable_line(name, MAX_AUDIT_NAME_CHARACTERS)
        if not self._site.durable:
            return facts
        facts["plan"] = request.sha256
        if verdict.is_allowed:
            parts = (self._site.train, self._site.validation, self._site.test)
            counts = dict(zip(PARTS, map(len, parts), strict=True))
            facts["images"] = counts | {"unreadable": sum(len(part.skipped) for part in parts)}
        return facts

    def _await_approval(self, verdict: PolicyVerdict) -> Message:
        """Answer that the site waits for the approval of a person, without the reason."""
        self._site.tell(f"run {str(self._about['run'])[:8]} waits for approval here: {verdict}")
        self._write_error_to_audit("approval", APPROVAL_ERROR_MESSAGE)
        return Message(Error(APPROVAL_ERROR_CODE, APPROVAL_ERROR_MESSAGE), reply_to=self._message)

    def _decline_and_record(self, reason: str) -> Message:
        self._write_error_to_audit("declined", reason)
        return Message(Error(DECLINED_ERROR_CODE, reason), reply_to=self._message)

    def _write_record_to_audit(
        self,
        direction: str,
        content: RecordDict,
        verdict: PolicyVerdict,
        facts: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Write a record to the audit log.

        Args:
            facts: Further fields of the line.
        """
        self._audit.append(
            **self._about,
            **facts,
            direction=direction,
            record=make_printable_line(
                str(read_small_fields(content).get("wire.record", "")), MAX_AUDIT_NAME_CHARACTERS
            ),
            fields=list_fields_for_audit_line(list_record_fields(content)),
            bytes=count_payload_bytes(content),
            sha256=hash_record(content),
            decision="allow" if verdict.is_allowed else "deny",
            rule=verdict.rule,
            **({} if verdict.is_allowed else {"reason": make_printable_line(verdict.reason)}),
            **(read_request_signature(content) if direction == "in" else _read_spent_epsilon(content)),
        )

    def _write_error_to_audit(self, kind: str, reason: str = "") -> None:
        """Write an error to the audit log: its kind, and the size and SHA-256 of a reason that is sent."""
        text = reason.encode()
        facts = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()} if text else {}
        self._audit.append(**self._about, direction="out", record="Error", kind=kind, decision="allow", **facts)


def _read_spent_epsilon(content: RecordDict) -> dict[str, float]:
    """Return the privacy budget used by a run at this site, if the reply states it; otherwise an empty dict."""
    epsilon = read_small_fields(content).get("epsilon")
    return {"epsilon": epsilon} if isinstance(epsilon, float) else {}


def list_fields_for_audit_line(fields: Sequence[RecordField]) -> list[Any]:
    """List name, shape and bytes of a record's fields, within the limit of an audit line.

    An ordinary record has some thirty fields. Further fields of a longer list are only counted, because the sender of a
    record must not decide how long an audit line is.
    """
    lines: list[Any] = []
    size = 0
    for index, part in enumerate(fields):
        shape = None if part.shape is None else [*part.shape[:MAX_AUDIT_DIMENSIONS]]
        lines.append([make_printable_line(part.name, MAX_AUDIT_NAME_CHARACTERS), shape, part.size])
        size += len(format_as_json_text(lines[-1]).encode())
        if size > MAX_AUDIT_FIELD_LIST_BYTES:
            rest = fields[index:]
            return [*lines[:-1], [f"... {len(rest):,} more", None, sum(field.size for field in rest)]]
    return lines
