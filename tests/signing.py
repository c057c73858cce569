"""Signed calls of the hospital link, written apart from the product's code.

The headers are those of Flower's SuperNode 1.39; the signature is over the time and over the coordinator.
"""

import datetime as dt
import hashlib
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

PUBLIC_KEY, TIMESTAMP, SIGNATURE = "flwr-public-key-bin", "flwr-timestamp", "flwr-signature-bin"
"""Names of the three headers of a signed call."""


def pem(public: ec.EllipticCurvePublicKey) -> bytes:
    """A public key in Flower's form."""
    return public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def authority_of(certificate: bytes) -> str:
    """How a signature names a coordinator: by the SHA-256 of its authority's public key."""
    key = x509.load_pem_x509_certificate(certificate).public_key()
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def signature_over(key: ec.EllipticCurvePrivateKey, message: bytes) -> bytes:
    """ECDSA with SHA-256."""
    return key.sign(message, ec.ECDSA(hashes.SHA256()))


class SignsCalls(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    """Adds the three headers to each call.

    Args:
        key: Signs.
        named: The public key in the header; another one than the key's where the caller lies.
        authority: Certificate (PEM) of the authority of the coordinator that is called.
    """

    def __init__(self, key: ec.EllipticCurvePrivateKey, named: ec.EllipticCurvePublicKey, authority: bytes) -> None:
        self._key, self._named, self._authority = key, pem(named), authority_of(authority)

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        now = dt.datetime.now(dt.UTC).isoformat()
        signed = [
            (PUBLIC_KEY, self._named),
            (TIMESTAMP, now),
            (SIGNATURE, signature_over(self._key, f"{now} {self._authority}".encode("ascii"))),
        ]
        return continuation(details._replace(metadata=[*(details.metadata or ()), *signed]), request)
