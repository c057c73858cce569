"""Keyed fingerprints of a site's patients, by which the privacy ledger recognises them in other folders and tables.

A patient is recognised by the name in the label table, and by each of the patient's pictures. So another folder, table,
split, or other file names do not make a new patient, nor does a table without patients. Names are compared in the form
of :func:`make_name_similarity_key`, so ``P-007`` and ``p7`` are one patient here. If that is wrong, two patients share
one budget; the opposite mistake would give one patient two budgets.

A patient is not recognised if name *and* pictures have changed, for instance by a new pseudonym and a new export. A
patient is also not recognised on another machine or account, which has another ledger with another key.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from polyclinic.common.patients.fingerprints import compute_fingerprints, fingerprint_patient_names
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.plain_names import HashName, join_plain_name
from polyclinic.data.base.image_set import (
    MIN_HASH_DIGEST,
    ImageSet,
    compute_picture_digest,
    find_placeholder_patients,
)
from polyclinic.data.images.pixel_cache import EncryptedPictures

PICTURES_PER_BLOCK = 256


@dataclass(frozen=True)
class PatientFingerprints:
    """Keyed fingerprints of the names and pictures of patients.

    Attributes:
        values: uint64 ``(n,)``; a patient has one for the name, if it is known, and one for each picture.
        owners: ``(n,)``, the index of each fingerprint's patient, from 0.
        patients: Number of patients; an image without a patient's name counts as one.
        names: Number of the fingerprints of names, which come before the fingerprints of pictures.
    """

    values: NDArray[np.uint64]
    owners: NDArray[np.intp]
    patients: int
    names: int

    def match_fingerprints(self, others: NDArray[np.uint64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return two masks ``(patients,)``: the patients with a fingerprint in ``others``, and those matched by name.

        For a patient without a name, both masks have the same value.
        """
        is_matched = np.isin(self.values, others)
        matched, by_name = np.zeros((2, self.patients), np.bool_)
        matched[self.owners[is_matched]] = True
        by_name[self.owners[: self.names][is_matched[: self.names]]] = True
        without_name = np.ones(self.patients, np.bool_)
        without_name[self.owners[: self.names]] = False
        return matched, by_name | matched & without_name


@dataclass(frozen=True)
class PatientFingerprinter:
    """Computes fingerprints with the secret key of one ledger.

    Attributes:
        key: 32 secret bytes.
        cache: File with the fingerprints of encrypted pictures, so that each picture is decrypted only once.
        durable: Flush the cache file to the disk.
    """

    key: bytes
    cache: Path
    durable: bool = True

    def fingerprint_patients(self, *parts: ImageSet) -> PatientFingerprints:
        """Return the fingerprints of all patients in these parts of one data set."""
        distinct, patient_of_image = np.unique(
            np.concatenate([images.patients for images in parts]), return_inverse=True
        )
        named_rows = np.flatnonzero(~find_placeholder_patients(distinct))
        name_fingerprints = fingerprint_patient_names((distinct[row] for row in named_rows), self.key)
        # A picture of one uniform grey identifies nobody, because any hospital may have it.
        is_identifying = np.concatenate([images.picture_digests for images in parts]) >= MIN_HASH_DIGEST
        picture_fingerprints = np.concatenate([self._fingerprint_pictures(images) for images in parts])
        return PatientFingerprints(
            values=np.concatenate([name_fingerprints, picture_fingerprints[is_identifying]]),
            owners=np.concatenate([named_rows, patient_of_image[is_identifying]]),
            patients=len(distinct),
            names=len(named_rows),
        )

    def _fingerprint_pictures(self, images: ImageSet) -> NDArray[np.uint64]:
        """Return the fingerprint of each picture, ``(n,)``, which depends only on its pixels and the ledger's key."""
        digests, first, inverse = np.unique(images.picture_digests, return_index=True, return_inverse=True)
        if not isinstance(images.stored, EncryptedPictures):
            contents = (digest.to_bytes(8) for digest in digests.tolist())
            return compute_fingerprints("picture", contents, self.key)[inverse]
        # Digests of encrypted pictures depend on the site's key, so the decrypted pictures are hashed instead.
        stored = images.stored
        rows = first if images.places is None else images.places[first]
        fingerprints_by_digest = self._read_cached_fingerprints()
        new = np.array(
            [index for index, digest in enumerate(digests.tolist()) if digest not in fingerprints_by_digest], np.intp
        )

        def decrypt_and_fingerprint(indices: NDArray[np.intp]) -> list[int]:
            picture_digests = (compute_picture_digest(picture) for picture in stored.read_pictures(rows[indices]))
            contents = (digest.to_bytes(8) for digest in picture_digests)
            fingerprints: list[int] = compute_fingerprints("picture", contents, self.key).tolist()
            return fingerprints

        blocks = np.array_split(new, range(PICTURES_PER_BLOCK, len(new), PICTURES_PER_BLOCK))
        with ThreadPoolExecutor() as pool:
            for indices, fingerprints in zip(blocks, pool.map(decrypt_and_fingerprint, blocks), strict=True):
                fingerprints_by_digest.update(zip(digests[indices].tolist(), fingerprints, strict=True))
        if len(new):
            self._write_cached_fingerprints(fingerprints_by_digest)
        return np.array([fingerprints_by_digest[digest] for digest in digests.tolist()], np.uint64)[inverse]

    def _read_cached_fingerprints(self) -> dict[int, int]:
        """Return the cached fingerprints by digest in the encrypted store; empty if the cache is another ledger's."""
        try:
            with safe_open(self.cache, framework="numpy") as file:
                if file.metadata() != {"ledger": self._ledger_name}:
                    return {}
                digests = file.get_tensor("digests")
                fingerprints = file.get_tensor("fingerprints")
        except (OSError, SafetensorError):  # no file yet, or a damaged one: the fingerprints are computed again
            return {}
        return dict(zip(digests.tolist(), fingerprints.tolist(), strict=True))

    def _write_cached_fingerprints(self, fingerprints: Mapping[int, int]) -> None:
        arrays = {
            "digests": np.array(list(fingerprints), np.uint64),
            "fingerprints": np.array(list(fingerprints.values()), np.uint64),
        }
        content = save(arrays, {"ledger": self._ledger_name})
        write_atomically(self.cache, content, durable=self.durable, private=True)

    @property
    def cache_of_another_ledger(self) -> Path:
        """Cache file for the key of an earlier ledger, in the same folder as the present ledger's cache."""
        return join_plain_name(self.cache.parent, HashName(self._ledger_name), self.cache.suffix)

    @property
    def _ledger_name(self) -> str:
        """Text that identifies the ledger's key without disclosing it."""
        return blake3(b"ledger", key=self.key).hexdigest()
