"""Certificates that no library makes: what a hostile side may send; and a server's own one, for tests of TLS."""

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

VERSION_3, VERSION_10 = bytes.fromhex("a003020102"), bytes.fromhex("a003020109")


def of_version_10(certificate: x509.Certificate) -> bytes:
    """DER of the same certificate, stating a version that does not exist; its signature does not fit any more."""
    return certificate.public_bytes(Encoding.DER).replace(VERSION_3, VERSION_10, 1)


def pem_of(der: bytes) -> str:
    """PEM of any bytes."""
    return ssl.DER_cert_to_PEM_cert(der)


def self_signed(folder: Path, address: str = "127.0.0.1", days: int = 1, issuer: str = "a PACS") -> tuple[Path, Path]:
    """Write a certificate for an address, and its key with it in one file; negative days are past."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=abs(days) + 1))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    public = certificate.public_bytes(Encoding.PEM)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "pacs.pem").write_bytes(public)
    (folder / "pacs-with-key.pem").write_bytes(public + private)
    return folder / "pacs.pem", folder / "pacs-with-key.pem"
