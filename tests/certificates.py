"""Certificates that no library makes: what a hostile side may send."""

import ssl

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

VERSION_3, VERSION_10 = bytes.fromhex("a003020102"), bytes.fromhex("a003020109")


def of_version_10(certificate: x509.Certificate) -> bytes:
    """DER of the same certificate, stating a version that does not exist; its signature does not fit any more."""
    return certificate.public_bytes(Encoding.DER).replace(VERSION_3, VERSION_10, 1)


def pem_of(der: bytes) -> str:
    """PEM of any bytes."""
    return ssl.DER_cert_to_PEM_cert(der)
