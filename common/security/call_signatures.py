"""Signed gRPC headers of a site's calls to the coordinator, by the names that Flower's SuperNode uses.

Three headers contain the public key, the time, and that key's ECDSA signature (SHA-256) over the time and over the
coordinator that is called, named by the hash of its authority's key. Flower signs the time alone, as our releases up to
wire version 16 do: anyone who runs a federation could then repeat a hospital's headers at another federation that
admitted the same key.

Neither the method nor the request is signed. TLS protects both on the way, and the coordinator, where TLS ends, could
only repeat to itself what it may make up anyway.
"""

import datetime as dt
import re
from collections.abc import Sequence

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

PUBLIC_KEY, SIGNATURE, TIME = "flwr-public-key-bin", "flwr-signature-bin", "flwr-timestamp"
"""Names of the headers; gRPC sends bytes in those that end with ``-bin``."""
PROCESS, LONGEST_PROCESS = "polyclinic-process", 64
"""Header with the calling process, because two processes with one key must not both take part. It is not signed: TLS
protects it on the way. Flower's own programs do not send it."""
PROCESS_VARIABLE = "POLYCLINIC_SITE_PROCESS"
"""Environment variable: id under which a site's process calls, as the program that submitted it to a queue."""
WAIT, LONGEST_WAIT_S = "polyclinic-wait", 20.0
"""Header of a call for a message: the number of seconds that the caller would wait for one."""
ANOTHER_PROCESS = "another process has signed on with this site's key since"


def encode_public_key_pem(public_key: ec.EllipticCurvePublicKey) -> bytes:
    """Return a public key as PEM (SubjectPublicKeyInfo), the format of Flower's database and headers."""
    return public_key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def make_signed_headers(
    key: ec.EllipticCurvePrivateKey, public_key: bytes, authority: str, process: str
) -> Sequence[tuple[str, str | bytes]]:
    """Return the headers of one gRPC call, with a signature over the current time and over the coordinator.

    Args:
        key: The caller's private key.
        public_key: The public key by :func:`encode_public_key_pem`, computed once for many calls.
        authority: The coordinator's authority, by
            :func:`polyclinic.common.security.phrase.compute_certificate_key_hash`; empty to sign the time alone, for a
            coordinator of an earlier wire version.
        process: Identifier of the calling process, up to :data:`LONGEST_PROCESS` characters.
    """
    now = dt.datetime.now(dt.UTC).isoformat()
    signature = key.sign(_join_signed_text(now, authority), ec.ECDSA(hashes.SHA256()))
    return ((PUBLIC_KEY, public_key), (TIME, now), (SIGNATURE, signature), (PROCESS, process))


def is_call_signature_valid(public_key: bytes, time: str, authority: str, signature: bytes) -> bool:
    """Return True if the signature of a call to this coordinator is by this public key (PEM).

    Args:
        time: The call's header :data:`TIME`.
        authority: The coordinator's authority, as for :func:`make_signed_headers`. An empty text stands for a call
            that is signed for no coordinator, as Flower and earlier releases sign.
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
    # A time holds no space, so the text is the same for one pair of values only.
    return " ".join(filter(None, (time, authority))).encode("ascii")


def parse_wait_header_s(header: str) -> float | None:
    """Parse the header :data:`WAIT`: seconds that a call may wait, at most :data:`LONGEST_WAIT_S`; None if invalid."""
    return min(float(header), LONGEST_WAIT_S) if re.fullmatch(r"\d{1,3}(\.\d{1,3})?", header, re.ASCII) else None
