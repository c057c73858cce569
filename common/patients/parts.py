"""The part of each patient (training, validation, test), which a hospital's site stores between starts.

A test patient must never be trained on, because the results of later and resumed runs would be too good. A change of
the label table, of ``split_seed`` or of the release could move patients. So the site stores the part of every patient
in the file ``state/patient-parts``, and a patient stays in this part. The file contains keyed fingerprints of the
patients' names, but no name. A patient without a name is identified by the picture.
"""

import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.patients.fingerprints import fingerprint_patient_names
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.plain_text import format_count_with_noun
from polyclinic.data.base.image_set import PARTS, DatasetSplits, ImageSet
from polyclinic.data.base.splits import StringArray, divide_splits_again, name_unknown_patients

PATIENT_PARTS_FILE = "patient-parts"
TEST_PART_INDEX = PARTS.index("test")


@dataclass(frozen=True)
class PatientChanges:
    """Differences between the patients of a site and those of its last start.

    Attributes:
        new: Number of patients that the site never had before.
        gone: Number of patients that the site had before and does not have now.
        kept: Number of patients whom the data now puts into another part, and who stay in the stored part.
    """

    new: int = 0
    gone: int = 0
    kept: int = 0

    def describe(self) -> str:
        """Return a line for the hospital's staff; empty if nothing changed."""
        texts = []
        if self.new:
            texts.append(f"{format_count_with_noun(self.new, 'patient')} new")
        if self.gone:
            texts.append(f"{format_count_with_noun(self.gone, 'patient')} gone")
        if self.kept:
            texts.append(f"{format_count_with_noun(self.kept, 'patient')} kept in the part of earlier runs")
        return f"patients changed since the last start: {', '.join(texts)}" if texts else ""


@dataclass(frozen=True)
class _StoredParts:
    """The content of the file ``patient-parts``.

    Attributes:
        key: Secret key of the fingerprints, 32 bytes.
        fingerprints: uint64 ``(patients,)``, sorted.
        parts: uint8 ``(patients,)``, index into :data:`PARTS`.
        present: bool ``(patients,)``, False for a patient whom the site did not have at its last start.
    """

    key: bytes
    fingerprints: NDArray[np.uint64]
    parts: NDArray[np.uint8]
    present: NDArray[np.bool_]


@dataclass(frozen=True)
class PatientPartMemory:
    """Stores the part of each patient (training, validation, test) in the file ``patient-parts`` of a site.

    Attributes:
        state: The folder ``state`` of the site, which contains the file.
        durable: True to flush the file to disk.
    """

    state: Path
    durable: bool = True

    @property
    def path(self) -> Path:
        return self.state / PATIENT_PARTS_FILE

    def keep_known_parts(
        self, splits: DatasetSplits, *, given_by: str = "", store: bool = False
    ) -> tuple[DatasetSplits, PatientChanges]:
        """Return the data with each patient in the stored part, if there is one, and count the changes.

        Args:
            splits: The data.
            given_by: The key of the hospital's parts, such as ``data.split_column``; empty if the program draws the
                parts.
                In the hospital's parts a patient may move between training and validation, but not into the test part
                or
                out of it.
            store: True to store the parts; False for commands that only check.

        Raises:
            BadInput: If the hospital's parts move a patient into the test part or out of it, or the file is damaged.
        """
        stored = self._read_file()
        names_by_part = name_patients_of_splits(splits)
        names, drawn = _list_patients_with_parts(names_by_part)
        fingerprints = fingerprint_patient_names(names, stored.key)  # (patients,)
        index = np.searchsorted(stored.fingerprints, fingerprints)
        index[index == len(stored.fingerprints)] = 0
        is_known = (
            stored.fingerprints[index] == fingerprints
            if len(stored.fingerprints)
            else np.zeros(len(names), dtype=np.bool_)
        )
        kept_parts = drawn.copy()
        kept_parts[is_known] = stored.parts[index[is_known]]
        has_moved = kept_parts != drawn
        if given_by:
            self._refuse_moved_test_patients(given_by, kept_parts, drawn)
            kept_parts = drawn
            has_moved = np.zeros(len(names), dtype=np.bool_)
        is_present = np.zeros(len(stored.fingerprints), dtype=np.bool_)
        is_present[index[is_known]] = True
        changes = PatientChanges(
            new=int((~is_known).sum()) if len(stored.fingerprints) else 0,
            gone=int((stored.present & ~is_present).sum()),
            kept=int(has_moved.sum()),
        )
        if store:
            self._write_file(_merge_stored_parts(stored, fingerprints, kept_parts))
        if has_moved.any():
            part_of_patient = dict(zip(names, (PARTS[part] for part in kept_parts.tolist()), strict=True))
            parts = [
                np.array([part_of_patient[name] for name in part_names.tolist()], dtype=np.str_)
                for part_names in names_by_part
            ]
            splits = divide_splits_again(splits, parts)
        return splits, changes

    def _refuse_moved_test_patients(
        self, given_by: str, remembered: NDArray[np.uint8], given: NDArray[np.uint8]
    ) -> None:
        into_training = int(((remembered == TEST_PART_INDEX) & (given != TEST_PART_INDEX)).sum())
        into_test = int(((remembered != TEST_PART_INDEX) & (given == TEST_PART_INDEX)).sum())
        if not into_training and not into_test:
            return
        counts = []
        if into_training:
            counts.append(f"{format_count_with_noun(into_training, 'patient')} of the test part into training")
        if into_test:
            counts.append(
                f"{format_count_with_noun(into_test, 'patient')} that this site trained on into the test part"
            )
        problem = f"moves {' and '.join(counts)}: the figures of runs would be too good."
        remedy = (
            "Put them back. If no earlier run is resumed or compared, "
            f"remove {self.path}: the site then takes these parts."
        )
        raise BadInput([Fault(given_by, problem, remedy)])

    def _read_file(self) -> _StoredParts:
        """Return the stored parts; without a file, no patients and a new key."""
        if not self.path.exists():
            none = np.zeros(0, dtype=np.uint64)
            return _StoredParts(secrets.token_bytes(32), none, none.astype(np.uint8), none.astype(np.bool_))
        try:
            with safe_open(self.path, framework="numpy") as file:
                key = bytes.fromhex(file.metadata()["key"])
                arrays = [file.get_tensor(name) for name in ("fingerprints", "parts", "present")]
            fingerprints, parts, present = arrays
            if not len(key) == 32 or not fingerprints.shape == parts.shape == present.shape:
                raise ValueError("its arrays do not fit")
            return _StoredParts(key, fingerprints.astype(np.uint64), parts.astype(np.uint8), present.astype(np.bool_))
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            problem = f"cannot be read ({error})."
            remedy = (
                "Put its backup back. Without one, remove it: the parts then follow from the patients' names again."
            )
            raise BadInput([Fault(str(self.path), problem, remedy)]) from None

    def _write_file(self, stored: _StoredParts) -> None:
        arrays: dict[str, NDArray[Any]] = {
            "fingerprints": stored.fingerprints,
            "parts": stored.parts,
            "present": stored.present,
        }
        content = save(arrays, {"key": stored.key.hex()})
        with contextlib.suppress(FileNotFoundError):
            if self.path.read_bytes() == content:
                return
        write_atomically(self.path, content, durable=self.durable, private=True)


def name_patients_of_splits(splits: DatasetSplits) -> tuple[StringArray, ...]:
    """Return a name for the patient of each image, ``(n,)`` for each part; a digest of the picture if unknown."""
    return tuple(
        name_unknown_patients(images.patients, partial(_read_picture_names, images)) for images in splits.parts
    )


def _read_picture_names(images: ImageSet) -> StringArray:
    return images.picture_digests.astype(np.str_)


def _list_patients_with_parts(names_by_part: Sequence[StringArray]) -> tuple[list[str], NDArray[np.uint8]]:
    """Return the patients, once each, and the part of each as an index into :data:`PARTS`, ``(patients,)``."""
    parts = dict[str, int]()
    # The test part comes last and overrides the others, if two equal pictures have no patient.
    for part, names in enumerate(names_by_part):
        parts |= dict.fromkeys(names.tolist(), part)
    return list(parts), np.array(list(parts.values()), dtype=np.uint8)


def _merge_stored_parts(
    stored: _StoredParts, fingerprints: NDArray[np.uint64], parts: NDArray[np.uint8]
) -> _StoredParts:
    """Return the stored patients together with the present ones; the parts of present patients replace stored parts."""
    joined = dict(zip(stored.fingerprints.tolist(), stored.parts.tolist(), strict=True))
    joined |= dict(zip(fingerprints.tolist(), parts.tolist(), strict=True))
    ordered = np.array(sorted(joined), dtype=np.uint64)
    return _StoredParts(
        stored.key,
        ordered,
        np.array([joined[value] for value in ordered.tolist()], dtype=np.uint8),
        np.isin(ordered, fingerprints),
    )
