"""Signed gRPC headers of a site's calls to the coordinator, with the names that Flower's SuperNode uses.

Three headers contain the public key, the time, and a signature of this key (ECDSA, SHA-256). It covers the time and the
called coordinator, which is identified by the hash of its authority's key. Flower signs only the time, and so do our
releases up to wire version 16. The operator of a federation could then repeat a hospital's headers at another
federation that admitted the same key.

Neither method nor request is signed. TLS protects both in transit. It ends at the coordinator, which could only repeat
requests to itself.
"""

import datetime as dt
import re
from collections.abc import Sequence

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

PUBLIC_KEY_HEADER = "flwr-public-key-bin"
"""Name of the header with the public key; gRPC sends bytes in headers that end with ``-bin``."""
SIGNATURE_HEADER = "flwr-signature-bin"
"""Name of the header with the signature."""
TIME_HEADER = "flwr-timestamp"
"""Name of the header with the time."""
PROCESS_HEADER = "polyclinic-process"
"""Name of the header that identifies the calling process, because two processes with one key must not both take part.

It is not signed, because TLS protects it in transit. Flower's programs do not send it."""
MAX_PROCESS_CHARACTERS = 64
PROCESS_VARIABLE = "POLYCLINIC_SITE_PROCESS"
"""Environment variable with the process id for a site's calls, set by the program that submits the process to
a queue.
"""
WAIT_HEADER = "polyclinic-wait"
"""Name of the header, in a call for a message, with the seconds that the caller would wait for one."""
MAX_WAIT_S = 20.0
ANOTHER_PROCESS_MESSAGE = "another process has signed on with this site's key since"


def encode_public_key_pem(public_key: ec.EllipticCurvePublicKey) -> bytes:
    """Return a public key as PEM (SubjectPublicKeyInfo), the format of Flower's database and headers."""
    return public_key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def make_signed_headers(
    key: ec.EllipticCurvePrivateKey, public_key: bytes, authority: str, process: str
) -> Sequence[tuple[str, str | bytes]]:
    """Return the headers of one gRPC call, with a signature over the current time and the coordinator.

    Args:
        key: The caller's private key.
        public_key: The public key by :func:`encode_public_key_pem`, computed once for many calls.
        authority: The coordinator's authority, by
            :func:`polyclinic.common.security.phrase.compute_certificate_key_hash`; empty to sign only the time, for a
            coordinator of an earlier wire version.
        process: Identifier of the calling process, at most :data:`MAX_PROCESS_CHARACTERS` characters.
    """
    now = dt.datetime.now(dt.UTC).isoformat()
    signature = key.sign(_join_signed_text(now, authority), ec.ECDSA(hashes.SHA256()))
    return (
        (PUBLIC_KEY_HEADER, public_key),
        (TIME_HEADER, now),
        (SIGNATURE_HEADER, signature),
        (PROCESS_HEADER, process),
    )


def is_call_signature_valid(public_key: bytes, time: str, authority: str, signature: bytes) -> bool:
    """Return True if this public key (PEM) signed a call to this coordinator.

    Args:
        public_key: The public key, PEM.
        time: The call's header :data:`TIME_HEADER`.
        authority: The coordinator's authority, as for :func:`make_signed_headers`; empty for a signature over the time
            only, as Flower and earlier releases make.
        signature: The call's header :data:`SIGNATURE_HEADER`.
    """
    try:
        key = serialization.load_pem_public_key(public_key)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return False
        key.verify(signature, _join_signed_text(time, authority), ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError, TypeError, UnsupportedAlgorithm):
        return False
    return True


def _join_signed_text(time: str, authority: str) -> bytes:
    # A time contains no space, so two different pairs never have the same text.
    return " ".join(filter(None, (time, authority))).encode("ascii")


def parse_wait_header_s(header: str) -> float | None:
    """Parse the header :data:`WAIT_HEADER`: seconds to wait, at most :data:`MAX_WAIT_S`; None if it is invalid."""
    return min(float(header), MAX_WAIT_S) if re.fullmatch(r"\d{1,3}(\.\d{1,3})?", header, re.ASCII) else None
