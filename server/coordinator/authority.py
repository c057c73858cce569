"""The coordinator's own certificate authority: ``flwr-server init`` creates it, and kits hold its certificate.

The authority's certificate is valid for ten years. The server's certificate is valid for one year, and is renewed
without any change at the sites. Both are ECDSA on P-256, signed with SHA-256.
"""

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.security.identity import (
    REQUEST_SIGNING_PURPOSE,
    UNREADABLE_CERTIFICATE_ERRORS,
    write_secret_file,
)
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.plain_text import quote_for_shell
from polyclinic.common.system.preflight import find_certificate_date_faults
from polyclinic.server.coordinator.folder import CoordinatorFolder

AUTHORITY_CERTIFICATE_DAYS = 3650
SERVER_CERTIFICATE_DAYS = 397
RENEW_BEFORE_DAYS = 30
"""Days before expiry at which the signing certificate is renewed, and a warning about the server's is printed."""
_LOST_AUTHORITY_REMEDY = "Without it no certificate can be issued; put a copy back, or start a new folder and new kits."
CERTIFICATE_READ_ERRORS = (OSError, *UNREADABLE_CERTIFICATE_ERRORS)
"""Exceptions of reading a key or certificate. A key that is protected by a password raises TypeError."""
_LOCAL_HOSTS = ("localhost", "127.0.0.1")  # flwr-server reaches its SuperLink by these names
_UNUSED_KEY_USAGES = (
    "content_commitment",
    *("key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"),
)


def make_certificate_authority(coordinator: CoordinatorFolder) -> None:
    """Create the authority's key and certificate; never overwrite an existing key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = make_certificate_subject(f"{coordinator.file.name} (Polyclinic authority)")
    builder = make_certificate_builder(name, name, key.public_key(), AUTHORITY_CERTIFICATE_DAYS, is_authority=True)
    certificate = builder.sign(key, hashes.SHA256())
    write_secret_file(coordinator.authority_path / "ca.key", _encode_private_key_pem(key))
    write_atomically(coordinator.ca_certificate_path, certificate.public_bytes(serialization.Encoding.PEM))


def issue_server_certificate(coordinator: CoordinatorFolder, days: float = SERVER_CERTIFICATE_DAYS) -> None:
    """Issue the server's certificate for the hosts in ``coordinator.toml``, with a new key; replace earlier files.

    Args:
        days: Days for which the certificate is valid; a negative number makes an expired certificate, for tests.

    Raises:
        BadInput: If the authority's key or certificate cannot be read.
    """
    names = list[x509.GeneralName]()
    for host in dict.fromkeys((*coordinator.file.hosts, *_LOCAL_HOSTS)):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    authority_key, _ = _read_authority_key_and_certificate(coordinator)
    extensions = (
        (x509.SubjectAlternativeName(names), False),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), False),
    )
    _issue_certificate(coordinator, "server", coordinator.file.hosts[0], days, *extensions)


def ensure_valid_signing_key(coordinator: CoordinatorFolder) -> tuple[ec.EllipticCurvePrivateKey, bytes]:
    """Return the key that signs a run's requests, and its certificate (DER); issue new ones shortly before they expire.

    The key differs from that of the server's TLS certificate, so that a person who steals the TLS key cannot sign
    requests.

    Raises:
        BadInput: If a new certificate is needed and the authority's key or certificate cannot be read.
    """
    identity = _read_signing_key_and_certificate(coordinator)
    if identity is None:
        name, usage = f"{coordinator.file.name} (Polyclinic requests)", x509.ExtendedKeyUsage([REQUEST_SIGNING_PURPOSE])
        _issue_certificate(coordinator, "signing", name, SERVER_CERTIFICATE_DAYS, (usage, True))
        identity = _read_signing_key_and_certificate(coordinator)
    assert identity is not None, "it was issued just now"
    return identity


def _read_signing_key_and_certificate(
    coordinator: CoordinatorFolder,
) -> tuple[ec.EllipticCurvePrivateKey, bytes] | None:
    try:
        key = serialization.load_pem_private_key((coordinator.authority_path / "signing.key").read_bytes(), None)
        certificate = _load_certificate(coordinator.authority_path / "signing.crt")
        certificate.verify_directly_issued_by(_load_certificate(coordinator.ca_certificate_path))
    except (*CERTIFICATE_READ_ERRORS, InvalidSignature):
        return None
    time_left = certificate.not_valid_after_utc - dt.datetime.now(dt.UTC)
    if time_left.days < RENEW_BEFORE_DAYS or not isinstance(key, ec.EllipticCurvePrivateKey):
        return None
    if key.public_key() != certificate.public_key():
        return None
    return key, certificate.public_bytes(serialization.Encoding.DER)


def _issue_certificate(
    coordinator: CoordinatorFolder, stem: str, name: str, days: float, *extensions: tuple[x509.ExtensionType, bool]
) -> None:
    """Write a new key to ``STEM.key``, and its certificate, signed by the authority, to ``STEM.crt``.

    Args:
        name: Common name in the certificate.
        days: Days for which the certificate is valid.
        extensions: Further X.509 extensions, each with True if it is critical.
    """
    authority_key, authority = _read_authority_key_and_certificate(coordinator)
    key = ec.generate_private_key(ec.SECP256R1())
    builder = make_certificate_builder(make_certificate_subject(name), authority.subject, key.public_key(), days)
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    key_path = coordinator.authority_path / f"{stem}.key"
    key_path.unlink(missing_ok=True)
    write_secret_file(key_path, _encode_private_key_pem(key))
    certificate = builder.sign(authority_key, hashes.SHA256())
    write_atomically(coordinator.authority_path / f"{stem}.crt", certificate.public_bytes(serialization.Encoding.PEM))


def read_authority_certificate(coordinator: CoordinatorFolder) -> str:
    """Return the authority's certificate as PEM, for connection kits.

    Raises:
        BadInput: If the certificate cannot be read.
    """
    try:
        certificate = _load_certificate(coordinator.ca_certificate_path)
        certificate.public_key()  # raises if the key is damaged: the phrase is computed from it
    except CERTIFICATE_READ_ERRORS as error:
        problem = f"cannot be read: {_explain_certificate_read_error(error)}."
        raise BadInput([Fault(str(coordinator.ca_certificate_path), problem, _LOST_AUTHORITY_REMEDY)]) from None
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def count_certificate_days_left(coordinator: CoordinatorFolder) -> float:
    """Return the number of days until the server's certificate expires.

    Raises:
        BadInput: If the server's certificate is missing.
    """
    time_left = _read_server_certificate(coordinator).not_valid_after_utc - dt.datetime.now(dt.UTC)
    return time_left.total_seconds() / 86400


def find_server_certificate_faults(coordinator: CoordinatorFolder) -> list[Fault]:
    """Return a fault for each reason why the server cannot use its certificate, or hospitals would reject it."""
    remedy = f"Run: flwr-server init {quote_for_shell(coordinator.folder)} --renew"
    certificate = _read_server_certificate(coordinator)
    try:
        authority = _load_certificate(coordinator.ca_certificate_path)
        certificate.verify_directly_issued_by(authority)
    except (*CERTIFICATE_READ_ERRORS, InvalidSignature):
        problem = "was not issued by the authority of this folder, authority/ca.crt, or that one cannot be read."
        return [Fault("authority/server.crt", problem, remedy)]
    try:
        key = serialization.load_pem_private_key((coordinator.authority_path / "server.key").read_bytes(), None)
        is_matching_key = key.public_key() == certificate.public_key()
    except CERTIFICATE_READ_ERRORS as error:
        return [Fault("authority/server.key", f"cannot be read: {_explain_certificate_read_error(error)}.", remedy)]
    if not is_matching_key:
        return [Fault("authority/server.key", "is not the key of authority/server.crt.", remedy)]
    authority_remedy = "Without a valid authority no hospital connects: start a new folder, and send new kits."
    if dates := [
        *find_certificate_date_faults("authority/server.crt", certificate, remedy),
        *find_certificate_date_faults("authority/ca.crt", authority, authority_remedy),
    ]:
        return dates
    try:
        alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        certified_hosts = {str(name.value) for name in alternatives}
    except (x509.ExtensionNotFound, ValueError):
        certified_hosts = set()
    missing = [host for host in coordinator.file.hosts if host not in certified_hosts]
    return [Fault("authority/server.crt", f"is not for the host {host}.", remedy) for host in missing]


def make_certificate_builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float, *, is_authority: bool = False
) -> x509.CertificateBuilder:
    """Return the unsigned builder of a certificate with this subject, issuer and public key.

    Args:
        days: Days from now until the certificate expires; a negative number makes an expired one.
        is_authority: True for the authority's own certificate, which may sign other certificates.
    """
    now = dt.datetime.now(dt.UTC)
    begin = now - dt.timedelta(hours=1) + min(dt.timedelta(days=days), dt.timedelta())  # a clock may be a little behind
    usages = {"digital_signature": not is_authority, "key_cert_sign": is_authority, "crl_sign": is_authority}
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(x509.KeyUsage(**dict.fromkeys(_UNUSED_KEY_USAGES, False), **usages), critical=True)
    )


def make_certificate_subject(common_name: str) -> x509.Name:
    """Return the subject of a certificate, with the common name cut to 64 characters."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _encode_private_key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    encoding, container = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, container, serialization.NoEncryption())


def _read_authority_key_and_certificate(
    coordinator: CoordinatorFolder,
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    try:
        key = serialization.load_pem_private_key((coordinator.authority_path / "ca.key").read_bytes(), None)
        certificate = _load_certificate(coordinator.ca_certificate_path)
        certificate.subject, certificate.extensions  # noqa: B018 - parsed at access, which raises if they are damaged
        is_matching_key = isinstance(key, ec.EllipticCurvePrivateKey) and key.public_key() == certificate.public_key()
    except CERTIFICATE_READ_ERRORS as error:
        problem = f"the authority cannot be read: {_explain_certificate_read_error(error)}."
        raise BadInput([Fault(str(coordinator.authority_path), problem, _LOST_AUTHORITY_REMEDY)]) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not is_matching_key:
        problem = "ca.key is not the key of ca.crt."
        raise BadInput([Fault(str(coordinator.authority_path), problem, _LOST_AUTHORITY_REMEDY)])
    return key, certificate


def _explain_certificate_read_error(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{Path(error.filename).name}: {error.strerror}"
    return "it is damaged, cut off or, if a key, locked by a password"


def _load_certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def _read_server_certificate(coordinator: CoordinatorFolder) -> x509.Certificate:
    path: Path = coordinator.authority_path / "server.crt"
    try:
        return _load_certificate(path)
    except CERTIFICATE_READ_ERRORS as error:
        remedy = f"Run: flwr-server init {quote_for_shell(coordinator.folder)} --renew"
        raise BadInput(
            [Fault(str(path), f"cannot be read: {_explain_certificate_read_error(error)}.", remedy)]
        ) from None
