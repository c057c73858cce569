"""A run's requests signed for the site that each is for; replies held to the keys that the sites were admitted with.

The keys are those of the coordinator's own files, ``sites/NAME.toml``: what the SuperLink's database says of keys
counts for nothing here.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message, RecordDict

from common.security.identity import fingerprint
from common.security.signatures import (
    CHAINED,
    ReplyStatement,
    RequestStatement,
    SignatureFault,
    record_context,
    refuse_another_record,
    sign,
    signature_of,
    verified_reply,
)
from common.wire.canonical_bytes import record_sha256


@dataclass(frozen=True)
class Addressee:
    """A site that may take part: its name and its public key as an OpenSSH line."""

    name: str
    public_key: str


@dataclass(frozen=True)
class Sent:
    """A request on its way: for whom, and the run and round that it is about."""

    site: Addressee
    run: str
    round: int


class Signing:
    """Signs requests and verifies replies.

    Args:
        key, certificate: Of the coordinator, for requests.
        sites: Looks up the sites that may take part, by Flower's number of their node.
    """

    def __init__(
        self, key: ec.EllipticCurvePrivateKey, certificate: bytes, sites: Callable[[], Mapping[int, Addressee]]
    ) -> None:
        self._key, self._certificate, self._look = key, certificate, sites
        self._sites: Mapping[int, Addressee] = {}
        self._sent: dict[str, Sent] = {}  # by the name of the message

    def sites(self) -> Mapping[int, Addressee]:
        """The sites that may take part, looked up anew."""
        self._sites = self._look()
        return self._sites

    def sign(self, message: Message) -> None:
        """Sign a request for the site that it goes to; a site that was revoked meanwhile gets it unsigned."""
        site = self._site(message.metadata.dst_node_id)
        if site is None:
            return  # the SuperLink does not deliver it
        run, server_round, record = record_context(message.content)
        statement = RequestStatement(
            site=site.name,
            key=fingerprint(site.public_key),
            run=run,
            round=server_round,
            record=record,
            sha256=record_sha256(message.content),
            nonce=secrets.token_hex(16),
        )
        message.content = sign(message.content, statement, self._key, certificate=self._certificate)

    def note_sent(self, message: Message) -> None:
        """Remember a request that was sent, by the name that its message has now."""
        site = self._site(message.metadata.dst_node_id)
        if site is not None:
            run, server_round, _ = record_context(message.content)
            self._sent[message.metadata.message_id] = Sent(site, run, server_round)

    def fault(self, message_id: str, reply: Message) -> str:
        """Say why a reply is not the addressee's own answer to a request, or return an empty string.

        Args:
            message_id: The name of the message that carried the request.
        """
        sent = self._sent.pop(message_id, None)
        if sent is None:
            return "nothing was asked"
        try:
            _refuse_another_answer(message_id, sent, reply)
        except SignatureFault as fault:
            return f"its reply is not signed by {sent.site.name} as an answer to what it was asked: {fault}"
        return ""

    def statement_of(self, node_id: int, content: RecordDict) -> ReplyStatement:
        """Return what a site has signed about a reply to an earlier run.

        Raises:
            SignatureFault: If it is not the site of this node that has signed it, or about other records.
        """
        site = self._site(node_id)
        if site is None:
            raise SignatureFault("its site may no longer take part")
        statement: ReplyStatement = verified_reply(signature_of(content)[0], site.public_key)
        refuse_another_record(statement, content)
        if statement.site != site.name:
            raise SignatureFault("its statement names another site")
        return statement

    def _site(self, node_id: int) -> Addressee | None:
        return self._sites.get(node_id) or self.sites().get(node_id)


def _refuse_another_answer(message_id: str, sent: Sent, reply: Message) -> None:
    """Raise :class:`SignatureFault` unless a reply is what the site that was asked signed as its answer."""
    signed, _ = signature_of(reply.content)
    statement: ReplyStatement = verified_reply(signed, sent.site.public_key)
    refuse_another_record(statement, reply.content)
    stated = (statement.site, statement.run, statement.round, statement.message)
    if stated != (sent.site.name, sent.run, sent.round, message_id):
        raise SignatureFault("its statement names another site, run, round or message")
    if statement.record != record_context(reply.content)[2] or (statement.number > 0) != (statement.record in CHAINED):
        raise SignatureFault("its statement names another kind of record")
