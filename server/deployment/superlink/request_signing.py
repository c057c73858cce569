"""Signing of a run's requests to sites, and verification of the signatures on their replies.

The sites' public keys are read from the coordinator's files ``sites/NAME.toml``, not from the SuperLink's database.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message, RecordDict

from polyclinic.common.security.identity import compute_public_key_fingerprint
from polyclinic.common.security.signatures import (
    NUMBERED_RECORDS,
    ReplyStatement,
    RequestStatement,
    SignatureFault,
    check_statement_matches_record,
    read_run_round_class,
    read_unverified_signature,
    sign_record,
    verify_reply_signature,
)
from polyclinic.common.wire.canonical_bytes import hash_record


@dataclass(frozen=True)
class RequestRecipient:
    """A site that may receive requests: its name, and its public key as an OpenSSH line."""

    name: str
    public_key: str


class RequestSigner:
    """Signs requests to sites, and verifies the signatures on replies.

    Args:
        key, certificate: The coordinator's signing key and its certificate.
        sites: Returns node id -> site, for the sites that may take part.
    """

    def __init__(
        self, key: ec.EllipticCurvePrivateKey, certificate: bytes, sites: Callable[[], Mapping[int, RequestRecipient]]
    ) -> None:
        self._key = key
        self._certificate = certificate
        self._read_sites = sites
        self._sites: Mapping[int, RequestRecipient] = {}
        self._sent: dict[str, tuple[RequestRecipient, str, int]] = {}  # message id -> its site, run and round

    def reload_recipients(self) -> Mapping[int, RequestRecipient]:
        """Read the sites that may take part again; return node id -> site."""
        self._sites = self._read_sites()
        return self._sites

    def sign_request(self, message: Message) -> None:
        """Sign a request for its site; leave a request to a revoked site unsigned."""
        site = self._find_recipient(message.metadata.dst_node_id)
        if site is None:
            return  # the SuperLink does not deliver a request to a revoked site
        run, server_round, record = read_run_round_class(message.content)
        statement = RequestStatement(
            site=site.name,
            key=compute_public_key_fingerprint(site.public_key),
            run=run,
            round=server_round,
            record=record,
            sha256=hash_record(message.content),
            nonce=secrets.token_hex(16),
        )
        message.content = sign_record(message.content, statement, self._key, certificate=self._certificate)

    def remember_sent_request(self, message: Message) -> None:
        """Store a sent request under its message id, so that its reply can be checked later."""
        site = self._find_recipient(message.metadata.dst_node_id)
        if site is not None:
            run, server_round, _ = read_run_round_class(message.content)
            self._sent[message.metadata.message_id] = site, run, server_round

    def find_reply_signature_fault(self, message_id: str, reply: Message) -> str:
        """Return the fault of a reply that is not the recipient's signed answer to a request; empty if it is.

        Args:
            message_id: Message id of the request.
        """
        sent = self._sent.pop(message_id, None)
        if sent is None:
            return "nothing was asked"
        site, run, server_round = sent
        try:
            statement = _verify_reply_statement(reply.content, site.public_key)
            stated = (statement.site, statement.run, statement.round, statement.message)
            if stated != (site.name, run, server_round, message_id):
                raise SignatureFault("its statement names another site, run, round or message")
            record = read_run_round_class(reply.content)[2]
            if statement.record != record or (statement.number > 0) != (record in NUMBERED_RECORDS):
                raise SignatureFault("its statement names another kind of record")
        except SignatureFault as fault:
            return f"its reply is not signed by {site.name} as an answer to what it was asked: {fault}"
        return ""

    def verify_earlier_run_reply(self, node_id: int, content: RecordDict) -> ReplyStatement:
        """Verify the signature on a reply to an earlier run; return the statement, the text that the site signed.

        Raises:
            SignatureFault: If the site may no longer take part, the signature is wrong, or the statement does not
                match the site or the reply's records.
        """
        site = self._find_recipient(node_id)
        if site is None:
            raise SignatureFault("its site may no longer take part")
        statement = _verify_reply_statement(content, site.public_key)
        if statement.site != site.name:
            raise SignatureFault("its statement names another site")
        return statement

    def _find_recipient(self, node_id: int) -> RequestRecipient | None:
        return self._sites.get(node_id) or self.reload_recipients().get(node_id)


def _verify_reply_statement(content: RecordDict, public_key: str) -> ReplyStatement:
    """Return the signed statement about a reply's records.

    Raises:
        SignatureFault: If the signature is wrong, or the statement does not match the records.
    """
    statement: ReplyStatement = verify_reply_signature(read_unverified_signature(content)[0], public_key)
    check_statement_matches_record(statement, content)
    return statement
