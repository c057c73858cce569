"""A site signs what it sends and refuses what the coordinator did not sign for it."""

import datetime as dt
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID
from flwr.app import RecordDict

from polyclinic.client.gate.audit_report import make_audit_report
from polyclinic.client.site.statements import SiteRecordSigner, read_accepted_reply_count
from polyclinic.common.security.audit import AuditLog
from polyclinic.common.security.identity import compute_public_key_fingerprint, format_public_key_line
from polyclinic.common.security.signatures import (
    SIGNATURE_ALGORITHM,
    ReplyStatement,
    RequestStatement,
    SignatureFault,
    check_statement_matches_record,
    read_unverified_signature,
    sign_record,
    verify_reply_signature,
)
from polyclinic.common.wire.canonical_bytes import hash_record
from polyclinic.common.wire.codec import count_payload_bytes, decode_record, encode_record
from polyclinic.common.wire.records import RefusalNoted, RollCall, RollCallAnswer
from polyclinic.server.coordinator.authority import (
    ensure_valid_signing_key,
    make_certificate_builder,
    make_certificate_subject,
)
from polyclinic.server.coordinator.folder import CoordinatorFolder
from tests.certificates import of_version_10
from tests.client.handshakes import coordinator_in

OTHER_RUNS = 70
"""More runs than the 64 that an earlier release remembered."""
RUN, MESSAGE, OTHER_MESSAGE = "0123456789abcdef", "a" * 64, "b" * 64
SITE_KEY, OTHER_KEY = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())


@dataclass
class Side:
    """A coordinator's key and certificate for requests."""

    coordinator: CoordinatorFolder

    @property
    def authority(self) -> x509.Certificate:
        return x509.load_pem_x509_certificate(self.coordinator.ca_certificate_path.read_bytes())

    def request(
        self, content: RecordDict | None = None, by: tuple[Any, bytes] | None = None, **changes: Any
    ) -> RecordDict:
        """Sign a request, whose statement has these changes."""
        content = content or encode_record(RollCall(RUN, "{}"))
        fields = {
            "site": "north",
            "key": compute_public_key_fingerprint(format_public_key_line(SITE_KEY, "")),
            "run": RUN,
            "round": 0,
        }
        fields |= {"record": "RollCall", "sha256": hash_record(content), "nonce": "c" * 32, **changes}
        signing, certificate = by or ensure_valid_signing_key(self.coordinator)
        return sign_record(content, RequestStatement(**fields), signing, certificate=certificate)


@pytest.fixture
def side(tmp_path: Path) -> Side:
    return Side(coordinator_in(tmp_path / "coordinator"))


@pytest.fixture
def statements(side: Side, tmp_path: Path) -> SiteRecordSigner:
    (tmp_path / "state").mkdir()
    return SiteRecordSigner(tmp_path / "state", "north", SITE_KEY, side.authority)


def answer(run: str = RUN) -> RecordDict:
    return encode_record(RollCallAnswer(run, "north", ("1",), ("one",), 100, 20, 50, "layout", "0.1.0", (40,), (60,)))


def statement_of(signed: RecordDict) -> ReplyStatement:
    return verify_reply_signature(read_unverified_signature(signed)[0], format_public_key_line(SITE_KEY, ""))


def test_what_a_site_signs_is_the_same_record_and_says_who_sends_it_and_what_it_answers(
    statements: SiteRecordSigner,
) -> None:
    plain, signed = answer(), statements.sign_reply(answer(), MESSAGE)
    for measure in (hash_record, count_payload_bytes, lambda record: decode_record(record, RollCallAnswer)):
        assert measure(signed) == measure(plain)
    statement = statement_of(signed)
    assert (statement.site, statement.run, statement.round) == ("north", RUN, 0)
    assert (statement.record, statement.message, statement.number) == ("RollCallAnswer", MESSAGE, 1)
    check_statement_matches_record(statement, signed)
    with pytest.raises(SignatureFault, match="about another record"):
        check_statement_matches_record(statement, answer("another"))
    with pytest.raises(SignatureFault, match="not by the key"):
        verify_reply_signature(read_unverified_signature(signed)[0], format_public_key_line(OTHER_KEY, ""))


def test_replies_are_counted_from_1_once_they_are_accepted_and_each_names_the_one_before(
    statements: SiteRecordSigner, tmp_path: Path
) -> None:
    pairs, counts = [], []
    for message in (MESSAGE, OTHER_MESSAGE, "d" * 64):
        signed = statements.sign_reply(answer(), message)
        pairs.append((statement_of(signed).number, statement_of(signed).before))
        counts.append(read_accepted_reply_count(tmp_path / "state", RUN).count)
        for _ in range(2):  # only once
            statements.count_accepted_reply(signed, message)
    assert pairs == [(1, ""), (2, MESSAGE), (3, OTHER_MESSAGE)]
    assert counts == [0, 1, 2]


def test_each_run_is_counted_by_itself_and_none_is_forgotten(statements: SiteRecordSigner, tmp_path: Path) -> None:
    for number in range(OTHER_RUNS):
        statements.count_accepted_reply(answer(f"run{number}"), MESSAGE)
    counts = [read_accepted_reply_count(tmp_path / "state", f"run{number}").count for number in range(OTHER_RUNS)]
    assert counts == [1] * OTHER_RUNS
    statement = statement_of(statements.sign_reply(answer("run0"), OTHER_MESSAGE))
    assert (statement.number, statement.before) == (2, MESSAGE)


def test_the_numbers_of_an_earlier_release_are_counted_on(statements: SiteRecordSigner, tmp_path: Path) -> None:
    """It kept the counts of all runs in one file."""
    earlier = {RUN: {"count": 7, "message": MESSAGE}, "another": {"count": 2, "message": MESSAGE}}
    (tmp_path / "state" / "statements.json").write_text(json.dumps(earlier), encoding="utf-8")
    statement = statement_of(statements.sign_reply(answer(), OTHER_MESSAGE))
    assert (statement.number, statement.before) == (8, MESSAGE)
    statements.count_accepted_reply(answer(), OTHER_MESSAGE)
    counts = [read_accepted_reply_count(tmp_path / "state", run).count for run in (RUN, "another", "new")]
    assert counts == [8, 2, 0]


def test_a_request_is_not_accepted_again_after_any_number_of_other_runs(
    side: Side, statements: SiteRecordSigner
) -> None:
    request = side.request()
    statements.verify_request(request, MESSAGE)
    for number in range(OTHER_RUNS):
        run = f"run{number}"
        statements.verify_request(side.request(encode_record(RollCall(run, "{}")), run=run), MESSAGE)
    with pytest.raises(SignatureFault, match="it came before"):
        statements.verify_request(request, OTHER_MESSAGE)


def test_records_of_no_round_are_signed_and_not_counted(statements: SiteRecordSigner, tmp_path: Path) -> None:
    signed = statements.sign_reply(encode_record(RefusalNoted(RUN, "north")), MESSAGE)
    assert statement_of(signed).number == 0
    statements.count_accepted_reply(signed, MESSAGE)
    assert read_accepted_reply_count(tmp_path / "state", RUN).count == 0


def test_a_request_is_accepted_again_by_its_message_alone(
    side: Side, statements: SiteRecordSigner, tmp_path: Path
) -> None:
    """After a kill a site takes the same message up again; a new process remembers it too."""
    request = side.request()
    for process in (statements, SiteRecordSigner(tmp_path / "state", "north", SITE_KEY, side.authority)):
        process.verify_request(request, MESSAGE)
        with pytest.raises(SignatureFault, match="it came before"):
            process.verify_request(request, OTHER_MESSAGE)


def other_authority(side: Side) -> RecordDict:
    folder = side.coordinator.folder.parent / "stranger"
    return side.request(by=ensure_valid_signing_key(coordinator_in(folder)))


def servers_key(side: Side) -> RecordDict:
    folder = side.coordinator.authority_path
    key = load_pem_private_key((folder / "server.key").read_bytes(), None)
    certificate = x509.load_pem_x509_certificate((folder / "server.crt").read_bytes())
    return side.request(by=(key, certificate.public_bytes(Encoding.DER)))


def own_certificate(side: Side) -> RecordDict:
    """A certificate with the right purpose that the forger issued to itself in the authority's name."""
    certificate = (
        make_certificate_builder(
            make_certificate_subject("trial (Polyclinic requests)"), side.authority.subject, OTHER_KEY.public_key(), 30
        )
        .add_extension(x509.ExtendedKeyUsage([x509.ObjectIdentifier("1.3.6.1.5.5.7.3.36")]), critical=True)
        .sign(OTHER_KEY, hashes.SHA256())
    )
    return side.request(by=(OTHER_KEY, certificate.public_bytes(Encoding.DER)))


def unknown_version(side: Side) -> RecordDict:
    right = x509.load_der_x509_certificate(ensure_valid_signing_key(side.coordinator)[1])
    return side.request(by=(OTHER_KEY, of_version_10(right)))


def other_content(side: Side) -> RecordDict:
    signed = side.request()
    signed["fields"]["plan"] = '{"another": "plan"}'
    return signed


def other_key(side: Side) -> RecordDict:
    return side.request(by=(OTHER_KEY, ensure_valid_signing_key(side.coordinator)[1]))


OTHER = compute_public_key_fingerprint(format_public_key_line(OTHER_KEY, ""))
FORGED: dict[str, tuple[Callable[[Side], RecordDict], str]] = {
    "no signature": (lambda side: encode_record(RollCall(RUN, "{}")), "it is not signed"),
    "another name": (lambda side: side.request(site="east"), 'its key is registered for "east"'),
    "another site": (lambda side: side.request(site="east", key=OTHER), "it is meant for east"),
    "another key": (lambda side: side.request(key=OTHER), "it is meant for north"),
    "another run": (lambda side: side.request(run="another"), "another run, round or record"),
    "another round": (lambda side: side.request(round=3), "another run, round or record"),
    "another record": (lambda side: side.request(record="TrainRequest"), "another run, round or record"),
    "another hash": (lambda side: side.request(sha256="d" * 64), "about another record"),
    "another content": (other_content, "about another record"),
    "another authority": (other_authority, "its certificate is not one of this coordinator"),
    "the server's key": (servers_key, "its certificate is for another purpose"),
    "the right certificate and a wrong key": (other_key, "the signature is not by the key"),
    "a certificate of its own": (own_certificate, "its certificate is not one of this coordinator"),
    "no certificate": (lambda side: side.request(by=(OTHER_KEY, b"none")), "its certificate is not one of this"),
    "a certificate of no version": (unknown_version, "its certificate is not one of this coordinator"),
}


@pytest.mark.parametrize(("forge", "reason"), FORGED.values(), ids=FORGED)
def test_a_request_that_the_coordinator_did_not_sign_for_this_site_is_refused(
    forge: Callable[[Side], RecordDict], reason: str, side: Side, statements: SiteRecordSigner
) -> None:
    with pytest.raises(SignatureFault, match=reason):
        statements.verify_request(forge(side), MESSAGE)


def test_the_coordinators_key_for_requests_stays_the_same_until_it_is_about_to_expire(side: Side) -> None:
    first = ensure_valid_signing_key(side.coordinator)[1]
    assert ensure_valid_signing_key(side.coordinator)[1] == first
    certificate = x509.load_der_x509_certificate(first)
    assert certificate.not_valid_after_utc - dt.datetime.now(dt.UTC) > dt.timedelta(days=390)
    assert (side.coordinator.authority_path / "signing.key").stat().st_mode & 0o777 == 0o600
    purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert ExtendedKeyUsageOID.SERVER_AUTH not in purposes
    (side.coordinator.authority_path / "signing.crt").write_text("damaged", encoding="ascii")
    assert ensure_valid_signing_key(side.coordinator)[1] != first


def noted(side: Side, state: Path, **changes: str) -> bool:
    """Return whether an audit with one request, in which something was changed, is without a fault."""
    request = side.request()
    signed, certificate = read_unverified_signature(request)
    entry = {**signed.model_dump(), "sha256": hash_record(request), "certificate": certificate.hex(), **changes}
    AuditLog(state, durable=False).append(run=RUN, round=0, direction="in", decision="allow", rule="", **entry)
    return make_audit_report(state, "north", None, {}, side.authority)[1]


def test_a_request_that_the_coordinator_did_not_sign_as_the_audit_has_it_is_a_fault(side: Side, tmp_path: Path) -> None:
    assert noted(side, tmp_path / "whole")
    assert not noted(side, tmp_path / "record", sha256="f" * 64)
    assert not noted(side, tmp_path / "signature", signature=SITE_KEY.sign(b"", SIGNATURE_ALGORITHM).hex())
    assert not noted(side, tmp_path / "text", certificate="no certificate")
    earlier, certificate = read_unverified_signature(Side(coordinator_in(tmp_path / "earlier")).request())
    assert noted(side, tmp_path / "earlier site", **earlier.model_dump(), certificate=certificate.hex())
