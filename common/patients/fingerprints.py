"""Keyed fingerprints of patients' names and pictures: without the key nobody can test who is meant."""

from collections.abc import Iterable

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from polyclinic.data.base.names import make_name_similarity_key

FINGERPRINT_BYTES = 8
"""Of 200,000 patients two have the same fingerprint with a probability of one in a billion, and then share a budget."""


def fingerprint_patient_names(names: Iterable[str], key: bytes) -> NDArray[np.uint64]:
    """Return a fingerprint of each patient's name, ``(n,)``; names that are alike have the same one.

    Args:
        key: 32 secret bytes.
    """
    return compute_fingerprints("patient", (make_name_similarity_key(name).encode() for name in names), key)


def compute_fingerprints(kind: str, contents: Iterable[bytes], key: bytes) -> NDArray[np.uint64]:
    """Return a keyed fingerprint of each content, ``(n,)``.

    Args:
        kind: What the contents are, such as ``"patient"``; another kind gives another fingerprint.
        key: 32 secret bytes.
    """
    prefix = f"{kind}\0".encode()
    hashed = b"".join(blake3(prefix + content, key=key).digest(FINGERPRINT_BYTES) for content in contents)
    return np.frombuffer(hashed, ">u8").astype(np.uint64)
