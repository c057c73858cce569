"""Calls of the hospital link signed as Flower's SuperNode 1.39 signs them, written apart from the product's code."""

import datetime as dt
from typing import Any

import grpc
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def pem(public: ec.EllipticCurvePublicKey) -> bytes:
    """A public key in Flower's form."""
    return public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def signature_over(key: ec.EllipticCurvePrivateKey, message: bytes) -> bytes:
    """ECDSA with SHA-256."""
    return key.sign(message, ec.ECDSA(hashes.SHA256()))


class SignsCalls(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    """Adds the three headers to each call.

    Args:
        key: Signs.
        named: The public key in the header; another one than the key's where the caller lies.
    """

    def __init__(self, key: ec.EllipticCurvePrivateKey, named: ec.EllipticCurvePublicKey) -> None:
        self._key, self._named = key, pem(named)

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        now = dt.datetime.now(dt.UTC).isoformat()
        signed = [
            ("flwr-public-key-bin", self._named),
            ("flwr-timestamp", now),
            ("flwr-signature-bin", signature_over(self._key, now.encode("ascii"))),
        ]
        return continuation(details._replace(metadata=[*(details.metadata or ()), *signed]), request)
