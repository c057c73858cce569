"""The part of each patient (training, validation, test), as a hospital's site remembers it from start to start.

A test patient must never be trained on, or the figures of every later run and of a resumed one are too good. A change
of the label table, of ``split_seed`` or of the release could move patients. So the site stores the part of every
patient that it ever had, in the file ``state/patient-parts``, and a patient keeps that part. The file holds keyed
fingerprints of the patients' names, and no name. A patient without a name is known by the picture.
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
TEST = PARTS.index("test")


@dataclass(frozen=True)
class PatientChanges:
    """How the patients of a site differ from those of its last start.

    Attributes:
        new: Number of patients that the site never had.
        gone: Number of patients that it had before and does not have now.
        kept: Number of patients whom the data put into another part now, and who keep their own.
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
class _KnownParts:
    """The content of the file.

    Attributes:
        key: Secret of the fingerprints, 32 bytes.
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
        state: The folder ``state`` of the site, which holds the file.
        durable: Flush the file to disk.
    """

    state: Path
    durable: bool = True

    @property
    def path(self) -> Path:
        return self.state / PATIENT_PARTS_FILE

    def keep_known_parts(
        self, splits: DatasetSplits, *, given_by: str = "", store: bool = False
    ) -> tuple[DatasetSplits, PatientChanges]:
        """Return the data with every known patient in the part of earlier starts, and count what changed.

        Args:
            given_by: The key by which the hospital itself names the parts, such as ``data.split_column``; empty if the
                program draws them. Of the hospital's own parts, a patient may move from training to validation and
                back, but not into the test part or out of it.
            store: Remember the patients; False for commands that only look.

        Raises:
            BadInput: If the hospital's own parts move a patient into the test part or out of it, or if the file is
                damaged.
        """
        stored = self._read_file()
        names_by_part = name_patients_of_splits(splits)
        names, drawn = _list_patients_with_parts(names_by_part)
        fingerprints = fingerprint_patient_names(names, stored.key)  # (patients,)
        place = np.searchsorted(stored.fingerprints, fingerprints)
        place[place == len(stored.fingerprints)] = 0
        is_known = (
            stored.fingerprints[place] == fingerprints
            if len(stored.fingerprints)
            else np.zeros(len(names), dtype=np.bool_)
        )
        remembered = drawn.copy()
        remembered[is_known] = stored.parts[place[is_known]]
        has_moved = remembered != drawn
        if given_by:
            self._refuse_moved_test_patients(given_by, remembered, drawn)
            remembered, has_moved = drawn, np.zeros(len(names), dtype=np.bool_)
        is_present = np.zeros(len(stored.fingerprints), dtype=np.bool_)
        is_present[place[is_known]] = True
        changes = PatientChanges(
            new=int((~is_known).sum()) if len(stored.fingerprints) else 0,
            gone=int((stored.present & ~is_present).sum()),
            kept=int(has_moved.sum()),
        )
        if store:
            self._write_file(_merge_known_parts(stored, fingerprints, remembered))
        if has_moved.any():
            part_of_patient = dict(zip(names, (PARTS[part] for part in remembered.tolist()), strict=True))
            parts = [
                np.array([part_of_patient[name] for name in of_part.tolist()], dtype=np.str_)
                for of_part in names_by_part
            ]
            splits = divide_splits_again(splits, parts)
        return splits, changes

    def _refuse_moved_test_patients(
        self, given_by: str, remembered: NDArray[np.uint8], given: NDArray[np.uint8]
    ) -> None:
        into_training = int(((remembered == TEST) & (given != TEST)).sum())
        into_test = int(((remembered != TEST) & (given == TEST)).sum())
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

    def _read_file(self) -> _KnownParts:
        """Return what is stored, or nothing with a new key if there is no file."""
        if not self.path.exists():
            none = np.zeros(0, dtype=np.uint64)
            return _KnownParts(secrets.token_bytes(32), none, none.astype(np.uint8), none.astype(np.bool_))
        try:
            with safe_open(self.path, framework="numpy") as file:
                key = bytes.fromhex(file.metadata()["key"])
                arrays = [file.get_tensor(name) for name in ("fingerprints", "parts", "present")]
            fingerprints, parts, present = arrays
            if not len(key) == 32 or not fingerprints.shape == parts.shape == present.shape:
                raise ValueError("its arrays do not fit")
            return _KnownParts(key, fingerprints.astype(np.uint64), parts.astype(np.uint8), present.astype(np.bool_))
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            problem = f"cannot be read ({error})."
            remedy = (
                "Put its backup back. Without one, remove it: the parts then follow from the patients' names again."
            )
            raise BadInput([Fault(str(self.path), problem, remedy)]) from None

    def _write_file(self, known: _KnownParts) -> None:
        arrays: dict[str, NDArray[Any]] = {
            "fingerprints": known.fingerprints,
            "parts": known.parts,
            "present": known.present,
        }
        content = save(arrays, {"key": known.key.hex()})
        with contextlib.suppress(FileNotFoundError):
            if self.path.read_bytes() == content:
                return
        write_atomically(self.path, content, durable=self.durable, private=True)


def name_patients_of_splits(splits: DatasetSplits) -> tuple[StringArray, ...]:
    """Return a name for the patient of each image of each part, ``(n,)``; an unknown one is named by the picture."""
    return tuple(
        name_unknown_patients(images.patients, partial(_read_picture_names, images)) for images in splits.parts
    )


def _read_picture_names(images: ImageSet) -> StringArray:
    return images.picture_digests.astype(np.str_)


def _list_patients_with_parts(names_by_part: Sequence[StringArray]) -> tuple[list[str], NDArray[np.uint8]]:
    """Return each patient once with the part, ``(patients,)``, as an index into :data:`PARTS`."""
    parts = dict[str, int]()
    # The test part last: of two equal pictures without a patient, the one in the test part counts.
    for place, names in enumerate(names_by_part):
        parts |= dict.fromkeys(names.tolist(), place)
    return list(parts), np.array(list(parts.values()), dtype=np.uint8)


def _merge_known_parts(stored: _KnownParts, fingerprints: NDArray[np.uint64], parts: NDArray[np.uint8]) -> _KnownParts:
    """Return the known patients and those that the site has now, whose parts count."""
    joined = dict(zip(stored.fingerprints.tolist(), stored.parts.tolist(), strict=True))
    joined |= dict(zip(fingerprints.tolist(), parts.tolist(), strict=True))
    ordered = np.array(sorted(joined), dtype=np.uint64)
    return _KnownParts(
        stored.key,
        ordered,
        np.array([joined[value] for value in ordered.tolist()], dtype=np.uint8),
        np.isin(ordered, fingerprints),
    )
