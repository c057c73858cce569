"""A site signs what it sends and refuses what the coordinator did not sign for it."""

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID
from flwr.app import RecordDict

from client.gate.audit_report import audit_report
from client.site.statements import RUNS_KEPT, SignedStatements, read_accepted_replies
from common.security.audit import Audit
from common.security.identity import fingerprint, public_key_line
from common.security.signatures import (
    SIGNED_WITH,
    RequestStatement,
    SignatureFault,
    refuse_another_record,
    sign,
    signature_of,
    verified_reply,
)
from common.wire.canonical_bytes import record_sha256
from common.wire.codec import decode, encode, payload_bytes
from common.wire.records import RefusalNoted, RollCall, RollCallAnswer
from server.coordinator.authority import certificate_builder, signing_key_and_certificate, subject_name
from server.coordinator.folder import Coordinator
from tests.certificates import of_version_10
from tests.client.handshakes import coordinator_in

RUN, MESSAGE, OTHER_MESSAGE = "0123456789abcdef", "a" * 64, "b" * 64
SITE_KEY, OTHER_KEY = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
NONCE = "c" * 32


@dataclass
class Side:
    """A coordinator's key and certificate for requests."""

    coordinator: Coordinator

    def request(
        self,
        content: RecordDict,
        site: str = "north",
        key: str = "",
        nonce: str = NONCE,
        sha256: str = "",
        run: str = RUN,
        server_round: int = 0,
        record: str = "RollCall",
        by: tuple[ec.EllipticCurvePrivateKey, bytes] | None = None,
    ) -> RecordDict:
        statement = RequestStatement(
            site=site,
            key=key or fingerprint(public_key_line(SITE_KEY, "")),
            run=run,
            round=server_round,
            record=record,
            sha256=sha256 or record_sha256(content),
            nonce=nonce,
        )
        signing, certificate = by or signing_key_and_certificate(self.coordinator)
        return sign(content, statement, signing, certificate=certificate)


@pytest.fixture
def side(tmp_path: Path) -> Side:
    return Side(coordinator_in(tmp_path / "coordinator"))


@pytest.fixture
def statements(side: Side, tmp_path: Path) -> SignedStatements:
    (tmp_path / "state").mkdir()
    authority = x509.load_pem_x509_certificate(side.coordinator.ca_certificate.read_bytes())
    return SignedStatements(tmp_path / "state", "north", SITE_KEY, authority)


def call(run: str = RUN) -> RecordDict:
    return encode(RollCall(run, "{}"))


def answer(run: str = RUN) -> RecordDict:
    return encode(
        RollCallAnswer(run, "north", ("1",), ("one",), 100, 20, 50, "layout", "0.1.0", (40,), (60,))
    )  # fmt: skip


# ---------------------------------------------------------------------- what the site sends


def test_a_signed_record_is_the_same_record_with_the_same_hash_and_size(statements: SignedStatements) -> None:
    plain = answer()
    signed = statements.sign_records(plain, MESSAGE)
    assert decode(signed, RollCallAnswer) == decode(plain, RollCallAnswer)
    assert record_sha256(signed) == record_sha256(plain)
    assert payload_bytes(signed) == payload_bytes(plain)


def test_what_a_site_signs_says_who_sends_it_and_what_it_answers(statements: SignedStatements) -> None:
    signed = statements.sign_records(answer(), MESSAGE)
    statement = verified_reply(signature_of(signed)[0], public_key_line(SITE_KEY, ""))
    assert (statement.site, statement.run, statement.round) == ("north", RUN, 0)
    assert (statement.record, statement.message, statement.number) == ("RollCallAnswer", MESSAGE, 1)
    refuse_another_record(statement, signed)
    with pytest.raises(SignatureFault, match="about another record"):
        refuse_another_record(statement, answer("another"))
    with pytest.raises(SignatureFault, match="not by the key"):
        verified_reply(signature_of(signed)[0], public_key_line(OTHER_KEY, ""))


def numbers(statements: SignedStatements, *messages: str) -> list[tuple[int, str]]:
    """Number and message before of the statements with which these messages would be answered, one after the other."""
    pairs = []
    for message in messages:
        signed = statements.sign_records(answer(), message)
        statement = verified_reply(signature_of(signed)[0], public_key_line(SITE_KEY, ""))
        pairs.append((statement.number, statement.before))
        statements.count_accepted(signed, message)
    return pairs


def test_replies_that_were_taken_are_counted_from_1_and_each_names_the_one_before(statements: SignedStatements) -> None:
    assert numbers(statements, MESSAGE, OTHER_MESSAGE, "d" * 64) == [(1, ""), (2, MESSAGE), (3, OTHER_MESSAGE)]


def test_a_reply_that_was_not_taken_is_not_counted_and_one_that_is_told_twice_counts_once(
    statements: SignedStatements, tmp_path: Path
) -> None:
    statements.sign_records(answer(), MESSAGE)
    assert read_accepted_replies(tmp_path / "state", RUN).count == 0
    signed = statements.sign_records(answer(), MESSAGE)
    statements.count_accepted(signed, MESSAGE)
    statements.count_accepted(signed, MESSAGE)
    assert read_accepted_replies(tmp_path / "state", RUN).count == 1


def test_each_run_is_counted_by_itself_and_the_newest_runs_are_kept(
    statements: SignedStatements, tmp_path: Path
) -> None:
    for number in range(RUNS_KEPT + 3):
        statements.count_accepted(answer(f"run{number}"), MESSAGE)
    counts = [read_accepted_replies(tmp_path / "state", f"run{number}").count for number in range(RUNS_KEPT + 3)]
    assert counts == [0, 0, 0] + [1] * RUNS_KEPT


def test_records_that_are_no_part_of_a_round_are_signed_and_not_counted(
    statements: SignedStatements, tmp_path: Path
) -> None:
    signed = statements.sign_records(encode(RefusalNoted(RUN, "north")), MESSAGE)
    assert verified_reply(signature_of(signed)[0], public_key_line(SITE_KEY, "")).number == 0
    statements.count_accepted(signed, MESSAGE)
    assert read_accepted_replies(tmp_path / "state", RUN).count == 0


# ---------------------------------------------------------------------- what the site takes


def test_a_request_of_the_coordinator_is_taken_and_taken_up_again_after_a_kill(
    side: Side, statements: SignedStatements
) -> None:
    request = side.request(call())
    statements.accept_request(request, MESSAGE)
    statements.accept_request(request, MESSAGE)


def other_authority(side: Side) -> RecordDict:
    folder = side.coordinator.folder.parent / "stranger"
    return side.request(call(), by=signing_key_and_certificate(coordinator_in(folder)))


def servers_key(side: Side) -> RecordDict:
    folder = side.coordinator.authority
    key = load_pem_private_key((folder / "server.key").read_bytes(), None)
    certificate = x509.load_pem_x509_certificate((folder / "server.crt").read_bytes())
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return side.request(call(), by=(key, certificate.public_bytes(Encoding.DER)))


def right_certificate_wrong_key(side: Side) -> RecordDict:
    return side.request(call(), by=(OTHER_KEY, signing_key_and_certificate(side.coordinator)[1]))


def own_certificate(side: Side) -> RecordDict:
    """A certificate with the right purpose that the forger issued to itself in the authority's name."""
    name = x509.load_pem_x509_certificate(side.coordinator.ca_certificate.read_bytes()).subject
    made = (
        certificate_builder(subject_name("trial (Polyclinic requests)"), name, OTHER_KEY.public_key(), 30)
        .add_extension(x509.ExtendedKeyUsage([x509.ObjectIdentifier("1.3.6.1.5.5.7.3.36")]), critical=True)
        .sign(OTHER_KEY, hashes.SHA256())
    )
    return side.request(call(), by=(OTHER_KEY, made.public_bytes(Encoding.DER)))


def unknown_version(side: Side) -> RecordDict:
    known = x509.load_der_x509_certificate(signing_key_and_certificate(side.coordinator)[1])
    return side.request(call(), by=(OTHER_KEY, of_version_10(known)))


def other_content(side: Side) -> RecordDict:
    signed = side.request(call())
    signed["fields"]["plan"] = '{"another": "plan"}'
    return signed


def no_signature(side: Side) -> RecordDict:
    return call()


FORGED: list[tuple[Callable[[Side], RecordDict], str]] = [
    (no_signature, "it is not signed"),
    (lambda side: side.request(call(), site="east"), 'it calls itself "north", but its key is registered for "east"'),
    (lambda side: side.request(call(), "east", fingerprint(public_key_line(OTHER_KEY, ""))), "it is meant for east"),
    (lambda side: side.request(call(), key=fingerprint(public_key_line(OTHER_KEY, ""))), "it is meant for north"),
    (lambda side: side.request(call(), run="another"), "another run, round or record"),
    (lambda side: side.request(call(), server_round=3), "another run, round or record"),
    (lambda side: side.request(call(), record="TrainRequest"), "another run, round or record"),
    (lambda side: side.request(call(), sha256="d" * 64), "about another record"),
    (other_content, "about another record"),
    (other_authority, "its certificate is not one of this coordinator"),
    (servers_key, "its certificate is for another purpose"),
    (right_certificate_wrong_key, "the signature is not by the key"),
    (own_certificate, "its certificate is not one of this coordinator"),
    (lambda side: side.request(call(), by=(OTHER_KEY, b"no certificate")), "its certificate is not one of this"),
    (unknown_version, "its certificate is not one of this coordinator"),
]


@pytest.mark.parametrize(("forge", "reason"), FORGED, ids=[f"{reason}{n}" for n, (_, reason) in enumerate(FORGED)])
def test_a_request_that_the_coordinator_did_not_sign_for_this_site_is_refused(
    forge: Callable[[Side], RecordDict], reason: str, side: Side, statements: SignedStatements
) -> None:
    with pytest.raises(SignatureFault, match=reason):
        statements.accept_request(forge(side), MESSAGE)


def test_a_request_that_comes_again_by_another_message_is_refused_also_by_a_new_process(
    side: Side, statements: SignedStatements, tmp_path: Path
) -> None:
    request = side.request(call())
    statements.accept_request(request, MESSAGE)
    authority = x509.load_pem_x509_certificate(side.coordinator.ca_certificate.read_bytes())
    for process in (statements, SignedStatements(tmp_path / "state", "north", SITE_KEY, authority)):
        with pytest.raises(SignatureFault, match="it came before, by another message"):
            process.accept_request(request, OTHER_MESSAGE)


def test_the_coordinators_key_for_requests_stays_the_same_until_it_is_about_to_expire(side: Side) -> None:
    first = signing_key_and_certificate(side.coordinator)[1]
    assert signing_key_and_certificate(side.coordinator)[1] == first
    certificate = x509.load_der_x509_certificate(first)
    assert certificate.not_valid_after_utc - dt.datetime.now(dt.UTC) > dt.timedelta(days=390)
    assert (side.coordinator.authority / "signing.key").stat().st_mode & 0o777 == 0o600
    purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert ExtendedKeyUsageOID.SERVER_AUTH not in purposes
    (side.coordinator.authority / "signing.crt").write_text("damaged", encoding="ascii")
    assert signing_key_and_certificate(side.coordinator)[1] != first


# ---------------------------------------------------------------------- what the site's audit holds of them


def noted(side: Side, state: Path, **changes: str) -> bool:
    """Whether an audit with one request of the coordinator's, in which something was changed, is called right."""
    signed, certificate = signature_of(side.request(call()))
    entry = {**signed.model_dump(), "sha256": record_sha256(call()), "certificate": certificate.hex(), **changes}
    Audit(state, durable=False).append(run=RUN, round=0, direction="in", decision="allow", rule="", **entry)
    authority = x509.load_pem_x509_certificate(side.coordinator.ca_certificate.read_bytes())
    return audit_report(state, "north", None, {}, authority)[1]


def test_a_request_that_the_coordinator_did_not_sign_as_the_audit_has_it_is_a_fault(side: Side, tmp_path: Path) -> None:
    assert noted(side, tmp_path / "whole")
    assert not noted(side, tmp_path / "record", sha256="f" * 64)
    assert not noted(side, tmp_path / "signature", signature=SITE_KEY.sign(b"", SIGNED_WITH).hex())
    assert not noted(side, tmp_path / "text", certificate="no certificate")


def test_a_request_of_an_earlier_coordinator_is_none(side: Side, tmp_path: Path) -> None:
    earlier = Side(coordinator_in(tmp_path / "earlier"))
    signed, certificate = signature_of(earlier.request(call()))
    assert noted(side, tmp_path / "state", **signed.model_dump(), certificate=certificate.hex())
