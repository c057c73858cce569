"""Signatures of the calls of the hospital link: three gRPC headers, the same that Flower's SuperNode sends.

The headers hold the public key, the time, and an ECDSA signature (SHA-256) over the time by that key. The format is
Flower's, so that Flower's own programs understand it; the code is ours, because Flower moves its own between releases.
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
WAIT, LONGEST_WAIT_S = "polyclinic-wait", 20.0
"""Header of a call for a message: the number of seconds that the caller would wait for one."""
ANOTHER_PROCESS = "another process has signed on with this site's key since"


def public_key_as_pem(public_key: ec.EllipticCurvePublicKey) -> bytes:
    """Return a public key in the form of Flower's database and header: PEM, SubjectPublicKeyInfo."""
    return public_key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def signed_headers(
    key: ec.EllipticCurvePrivateKey, public_key: bytes, process: str
) -> Sequence[tuple[str, str | bytes]]:
    """Return the signed headers of one gRPC call; the signature covers the present time.

    Args:
        public_key: :func:`public_key_as_pem` of ``key``, computed once for many calls.
        process: Identifier of the process that calls, up to :data:`LONGEST_PROCESS` characters.
    """
    now = dt.datetime.now(dt.UTC).isoformat()
    signature = key.sign(now.encode("ascii"), ec.ECDSA(hashes.SHA256()))
    return ((PUBLIC_KEY, public_key), (TIME, now), (SIGNATURE, signature), (PROCESS, process))


def is_signed_by(public_key: bytes, time: str, signature: bytes) -> bool:
    """Return True if this key, as :func:`public_key_as_pem`, signed this time; False for bytes that are no key."""
    try:
        key = serialization.load_pem_public_key(public_key)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return False
        key.verify(signature, time.encode("ascii"), ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError, TypeError, UnsupportedAlgorithm):
        return False
    return True


def requested_wait_s(header: str) -> float | None:
    """Return the seconds in the header :data:`WAIT`, at most :data:`LONGEST_WAIT_S`; None without a number."""
    return min(float(header), LONGEST_WAIT_S) if re.fullmatch(r"\d{1,3}(\.\d{1,3})?", header, re.ASCII) else None
