"""Keyed fingerprints of a site's patients, by which the privacy ledger finds them again under other circumstances.

A patient is found again by the patient's name in the label table, and by each of the patient's pictures. So another
folder, another table, another split, other file names, or a table without patients do not make another patient. A name
counts in the form of :func:`make_name_similarity_key`: ``P-007`` and ``p7`` are one patient here. Where that is wrong,
two patients share a budget; the opposite mistake would give one patient two.

Not found again is a patient whose name *and* pictures are others: a table that was pseudonymised anew and images that
were exported, scaled or cropped anew; another machine or account, which has a ledger and a key of its own.
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

DECRYPTED_AT_A_TIME = 256


@dataclass(frozen=True)
class PatientFingerprints:
    """Keyed fingerprints of the names and pictures of patients.

    Attributes:
        values: uint64 ``(n,)``; a patient has one for the name, if it is known, and one for each picture.
        owners: ``(n,)``, the number of each fingerprint's patient, from 0.
        patients: Number of patients; an image without a patient's name counts as one.
        names: Number of the fingerprints of names, which come before those of pictures.
    """

    values: NDArray[np.uint64]
    owners: NDArray[np.intp]
    patients: int
    names: int

    def match_fingerprints(self, others: NDArray[np.uint64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return masks ``(patients,)`` of the patients of whom ``others`` has a fingerprint, and that of the name.

        A patient without a name is in both masks, or in none.
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
        cache: File with the fingerprints of encrypted pictures, so that each is decrypted once and not at every start.
        durable: Flush that file to the disk.
    """

    key: bytes
    cache: Path
    durable: bool = True

    def fingerprint_patients(self, *parts: ImageSet) -> PatientFingerprints:
        """Return the fingerprints of the patients in these parts of one data set."""
        distinct, patient_of_image = np.unique(
            np.concatenate([images.patients for images in parts]), return_inverse=True
        )
        named_rows = np.flatnonzero(~find_placeholder_patients(distinct))
        of_names = fingerprint_patient_names((distinct[row] for row in named_rows), self.key)
        # Any hospital may have a picture that is one grey all over, so such a picture identifies nobody.
        telling = np.concatenate([images.picture_digests for images in parts]) >= MIN_HASH_DIGEST
        of_pictures = np.concatenate([self._fingerprint_pictures(images) for images in parts])
        return PatientFingerprints(
            values=np.concatenate([of_names, of_pictures[telling]]),
            owners=np.concatenate([named_rows, patient_of_image[telling]]),
            patients=len(distinct),
            names=len(named_rows),
        )

    def _fingerprint_pictures(self, images: ImageSet) -> NDArray[np.uint64]:
        """Return the fingerprint of each picture, ``(n,)``, which depends on its pixels and the ledger's key alone."""
        digests, first, inverse = np.unique(images.picture_digests, return_index=True, return_inverse=True)
        if not isinstance(images.stored, EncryptedPictures):
            contents = (digest.to_bytes(8) for digest in digests.tolist())
            return compute_fingerprints("picture", contents, self.key)[inverse]
        # These digests are keyed by the site's own key, and so differ between folders: hash the decrypted pictures.
        stored, rows = images.stored, first if images.places is None else images.places[first]
        fingerprints_by_digest = self._read_cached_fingerprints()
        new = np.array(
            [place for place, digest in enumerate(digests.tolist()) if digest not in fingerprints_by_digest], np.intp
        )

        def decrypt_and_fingerprint(places: NDArray[np.intp]) -> list[int]:
            plain = (compute_picture_digest(picture) for picture in stored.read_pictures(rows[places]))
            contents = (digest.to_bytes(8) for digest in plain)
            fingerprints: list[int] = compute_fingerprints("picture", contents, self.key).tolist()
            return fingerprints

        blocks = np.array_split(new, range(DECRYPTED_AT_A_TIME, len(new), DECRYPTED_AT_A_TIME))
        with ThreadPoolExecutor() as pool:
            for places, fingerprints in zip(blocks, pool.map(decrypt_and_fingerprint, blocks), strict=True):
                fingerprints_by_digest.update(zip(digests[places].tolist(), fingerprints, strict=True))
        if len(new):
            self._write_cached_fingerprints(fingerprints_by_digest)
        return np.array([fingerprints_by_digest[digest] for digest in digests.tolist()], np.uint64)[inverse]

    def _read_cached_fingerprints(self) -> dict[int, int]:
        """Return the fingerprints of pictures by their digests in the encrypted store; empty for another ledger's."""
        try:
            with safe_open(self.cache, framework="numpy") as file:
                if file.metadata() != {"ledger": self._ledger_name}:
                    return {}
                digests, fingerprints = file.get_tensor("digests"), file.get_tensor("fingerprints")
        except (OSError, SafetensorError):  # none yet, or damaged: computed again
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
        """File of the cache beside that of the site's present ledger, for the key of an earlier one."""
        return join_plain_name(self.cache.parent, HashName(self._ledger_name), self.cache.suffix)

    @property
    def _ledger_name(self) -> str:
        """Text that identifies the ledger's key without disclosing it."""
        return blake3(b"ledger", key=self.key).hexdigest()
