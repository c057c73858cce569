"""A site's signed statements about its replies, and its check of the coordinator's signed requests.

The statement of each reply contains the number of replies that the coordinator accepted before. A reply that the
coordinator accepted and then withheld therefore leaves a gap in the run's receipt. A nonce in each request keeps the
site from answering the same request again under another message.
"""

from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import RecordDict

from polyclinic.client.site.run_entries import RunEntryFolder
from polyclinic.common.security.identity import compute_public_key_fingerprint, format_public_key_line
from polyclinic.common.security.signatures import (
    NUMBERED_RECORDS,
    ReplyStatement,
    SignatureFault,
    check_statement_matches_record,
    read_run_round_class,
    read_unverified_signature,
    sign_record,
    verify_request_signature,
)
from polyclinic.common.system.files import open_own_file
from polyclinic.common.system.plain_names import HashName, RunName, join_plain_name
from polyclinic.common.wire.canonical_bytes import hash_record

REPLIES_FOLDER = "replies"
"""Folder in the state folder with the number of accepted replies of each run."""
REQUESTS_FOLDER = "requests"
"""Folder in the state folder with the nonces of each run's requests."""
STATEMENTS_FILE = "statements.json"
"""File in which an earlier release stored the content of the folder :data:`REPLIES_FOLDER`."""


class SiteNameMismatch(SignatureFault):
    """Raised if the coordinator has registered this site's key under another name."""


@dataclass(frozen=True)
class AcceptedReplyCount:
    """The number of replies of this site that the coordinator accepted in a run.

    Attributes:
        message: Id of the message that the last accepted reply answered; empty without an accepted reply.
    """

    count: int = 0
    message: str = ""


class SiteRecordSigner:
    """Signs a site's replies, and verifies the coordinator's signatures on requests.

    Args:
        state: The site's state folder.
        authority: The coordinator's certificate in the site's kit.
    """

    def __init__(self, state: Path, site: str, key: ec.EllipticCurvePrivateKey, authority: x509.Certificate) -> None:
        self._state = state
        self._site = site
        self._key = key
        self._authority = authority
        self._fingerprint = compute_public_key_fingerprint(format_public_key_line(key, ""))

    def sign_reply(self, content: RecordDict, message: str) -> RecordDict:
        """Return a reply's records with the site's signature, which names the answered message.

        Args:
            message: Id of the answered message.
        """
        run, server_round, record = read_run_round_class(content)
        last = read_accepted_reply_count(self._state, run) if record in NUMBERED_RECORDS else AcceptedReplyCount(-1)
        statement = ReplyStatement(
            site=self._site,
            run=run,
            round=server_round,
            record=record,
            message=message,
            sha256=hash_record(content),
            number=last.count + 1,
            before=last.message,
        )
        return sign_record(content, statement, self._key)

    def count_accepted_reply(self, content: RecordDict, message: str) -> None:
        """Count a reply that the coordinator accepted, once, if its class is numbered (:data:`NUMBERED_RECORDS`).

        Args:
            message: Id of the answered message.
        """
        run, _, record = read_run_round_class(content)
        last = read_accepted_reply_count(self._state, run)
        if record not in NUMBERED_RECORDS or last.message == message:
            return
        _open_accepted_counts(self._state).write_entry(run, vars(AcceptedReplyCount(last.count + 1, message)))

    def verify_request(self, content: RecordDict, message: str) -> None:
        """Verify the coordinator's signature on a request, and store the request's nonce to detect a repetition.

        Args:
            message: Id of the message that brought the request.

        Raises:
            SignatureFault: If the coordinator did not sign the request, signed it for another site, or sent it before
                in another message.
            SiteNameMismatch: If the coordinator signed it for this site's key under another name.
        """
        signed, certificate = read_unverified_signature(content)
        statement = verify_request_signature(signed, certificate, self._authority)
        if statement.key != self._fingerprint:
            raise SignatureFault(f"it is meant for {statement.site}")
        if statement.site != self._site:
            raise SiteNameMismatch(f'it calls itself "{self._site}", but its key is registered for "{statement.site}".')
        if (statement.run, statement.round, statement.record) != read_run_round_class(content):
            raise SignatureFault("its statement names another run, round or record")
        check_statement_matches_record(statement, content)
        try:
            identity = HashName(message)
        except ValueError:
            raise SignatureFault("its message is not named by a SHA-256") from None
        self._refuse_repeated_nonce(RunName(statement.run), statement.nonce, identity)

    def _refuse_repeated_nonce(self, run: RunName, nonce: str, message: HashName) -> None:
        """Store the nonce of a request.

        Raises:
            SignatureFault: If an earlier message had the same nonce.
        """
        folder = self._state / REQUESTS_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        path = join_plain_name(folder, run, ".txt")  # never removed, so that requests of old runs cannot be repeated
        content = path.read_text(encoding="ascii", errors="replace") if path.exists() else ""
        # A full disk or a power failure may have left a part of a line.
        pairs = [line.split() for line in content.splitlines()]
        first = dict(pair for pair in pairs if len(pair) == 2).get(nonce)
        if first not in (None, message):
            raise SignatureFault("it came before, by another message")
        if first is None:
            line_break = "\n" if content and not content.endswith("\n") else ""
            with open_own_file(path, "a") as file:
                file.write(f"{line_break}{nonce} {message}\n")


def read_accepted_reply_count(state: Path, run: str) -> AcceptedReplyCount:
    """Return the number of the site's replies in a run that the coordinator has accepted."""
    entry = _open_accepted_counts(state).read_entry(run)
    return AcceptedReplyCount(int(entry["count"]), str(entry["message"])) if entry else AcceptedReplyCount()


def has_accepted_replies(state: Path) -> bool:
    """Return True if the coordinator has accepted a reply of this site in any run."""
    return (state / STATEMENTS_FILE).exists() or any((state / REPLIES_FOLDER).glob("*.json"))


def _open_accepted_counts(state: Path) -> RunEntryFolder:
    return RunEntryFolder(state / REPLIES_FOLDER, state / STATEMENTS_FILE)
