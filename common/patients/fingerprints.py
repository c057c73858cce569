"""Keyed fingerprints of patients' names and pictures; without the key nobody can test who is meant."""

from collections.abc import Iterable

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from polyclinic.data.base.names import make_name_similarity_key

FINGERPRINT_BYTES = 8
"""Length of a fingerprint.

Among 200,000 patients, the probability that two have the same fingerprint is one in a billion; these would share a
privacy budget.
"""


def fingerprint_patient_names(names: Iterable[str], key: bytes) -> NDArray[np.uint64]:
    """Return a fingerprint of each patient's name, ``(n,)``; names that differ only in spelling have the same
    fingerprint.

    Args:
        names: The names.
        key: 32 secret bytes.
    """
    return compute_fingerprints("patient", (make_name_similarity_key(name).encode() for name in names), key)


def compute_fingerprints(kind: str, contents: Iterable[bytes], key: bytes) -> NDArray[np.uint64]:
    """Return a keyed fingerprint of each content, ``(n,)``.

    Args:
        kind: Kind of the contents, such as ``"patient"``; another kind gives another fingerprint.
        contents: The bytes to hash.
        key: 32 secret bytes.
    """
    prefix = f"{kind}\0".encode()
    hashed = b"".join(blake3(prefix + content, key=key).digest(FINGERPRINT_BYTES) for content in contents)
    return np.frombuffer(hashed, ">u8").astype(np.uint64)
