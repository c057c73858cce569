"""A hospital's count sheet: all counts that may leave. It is made once and stored, and answers every question.

So the same question gets the same answer, and a combination of questions discloses nothing that the sheet hides. A new
sheet is made only if at least ``smallest_count`` patients have changed.
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from polyclinic.client.counts.noise import NoisySheetPrice, add_noise_to_counts
from polyclinic.client.counts.protection import choose_disclosed_columns
from polyclinic.client.counts.units import CellKey, CountedData, count_cells, count_data_of_images
from polyclinic.client.site.site import Site
from polyclinic.common.counts import COUNT_TABLES
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.system.files import write_atomically
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.images.picture_header import PictureHeader, read_picture_headers

COUNTS_FOLDER = "counts"
SHEET_FILE = "sheet.json"
SHEET_FORMAT = 1
HEADER_TABLES = frozenset({"size", "device", "class_by_device"})
"""Tables that need the headers of image files."""
FINGERPRINT_KEY_BYTES = 32
FINGERPRINT_CHARACTERS = 24


@dataclass(frozen=True)
class CountSheet:
    """The counts of a hospital that its policy discloses, made once and stored.

    Attributes:
        made: The day, such as ``2026-11-30``.
        settings: Settings on which the sheet depends; with other settings, a new sheet is made.
        key: Hexadecimal key of the fingerprints.
        patients: Keyed fingerprints of the patients, by which changed patients are counted.
        cells: Disclosed count -> numbers of patients and of images; with noise, images are -1.
        missing: Tables that need a column which the hospital's label table lacks.
        noise: Standard deviation of the noise on numbers of patients.
    """

    made: str
    settings: Mapping[str, Any]
    key: str
    patients: frozenset[str]
    cells: Mapping[CellKey, tuple[int, int]]
    missing: tuple[str, ...]
    noise: float = 0.0

    @property
    def identity(self) -> str:
        """Return a hash of the sheet's content."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        cells = [[*key, *numbers] for key, numbers in sorted(self.cells.items())]
        facts = {"format": SHEET_FORMAT, "made": self.made, "settings": dict(self.settings), "key": self.key}
        facts |= {"patients": sorted(self.patients), "cells": cells, "missing": list(self.missing)}
        return json.dumps({**facts, "noise": self.noise}, sort_keys=True)


def parse_sheet(text: str) -> CountSheet | None:
    """Return a stored sheet from its JSON text; None for another format or a damaged text."""
    try:
        facts = json.loads(text)
        if facts["format"] != SHEET_FORMAT:
            return None
        cells = {tuple(cell[:4]): (int(cell[4]), int(cell[5])) for cell in facts["cells"]}
        patients = frozenset(facts["patients"])
        missing = tuple(facts["missing"])
        return CountSheet(
            facts["made"], facts["settings"], facts["key"], patients, cells, missing, float(facts["noise"])
        )
    except (ValueError, KeyError, TypeError, IndexError):
        return None


def get_count_sheet(site: Site, run: str) -> CountSheet:
    """Return a site's sheet: the stored one, or a new one if none is stored or enough patients have changed.

    Args:
        run: Run for which a new noisy sheet is charged.

    Raises:
        BadInput: If there are too few patients, or the privacy budget does not suffice.
    """
    path = site.folder / COUNTS_FOLDER / SHEET_FILE
    data = _get_counted_data(site)
    smallest = site.policy.smallest_count
    if len(data.patients) < smallest:
        problem = f"there are images of fewer than {smallest} patients, and the policy tells nothing of so few."
        raise BadInput([Fault("site.toml: policy.smallest_count", problem)])
    price = NoisySheetPrice.of_policy(site.policy, data)
    settings = _list_settings(site, data, price)
    stored = parse_sheet(path.read_text(encoding="utf-8")) if path.is_file() else None
    if stored is not None and stored.settings == settings:
        present = _fingerprint_patients(data, stored.key)
        changed = max(len(present - stored.patients), len(stored.patients - present))
        if changed < max(smallest, 1):
            return stored
    site.tell("counts: making the count sheet of this hospital; it takes some minutes, and then answers all questions")
    if price is None:
        sheet = _make_exact_sheet(data, settings, smallest)
        _store_sheet(path, sheet, durable=site.durable)
        return sheet
    with price.charge(site, run):
        # The sheet is on the disk before its cost is final: a program that is killed in between pays for one sheet.
        sheet = _make_noisy_sheet(data, settings, price)
        _store_sheet(path, sheet, durable=site.durable)
    return sheet


def _get_counted_data(site: Site) -> CountedData:
    """Return the patients and images to count, cached in the process because this may read all pictures."""
    is_noisy = site.policy.epsilon is not None
    cache = site.computed_results_cache
    if "counts" not in cache:
        # The ledger charges the patients of these two parts.
        parts = [site.train, site.validation] if is_noisy else [site.train, site.validation, site.test]
        headers = _read_headers(site, parts) if HEADER_TABLES.intersection(site.policy.counts) else []
        with_intensity = "intensity" in site.policy.counts
        cache["counts"] = count_data_of_images(parts, with_intensity=with_intensity, headers=headers)
    data: CountedData = cache["counts"]
    return data


def _read_headers(site: Site, parts: Sequence[ImageSet]) -> list[PictureHeader]:
    """Return the header of each image's file; an empty list if the pictures are not files."""
    if site.find_picture_files is None or any(part.lines is None for part in parts):
        return []
    files = site.find_picture_files()
    lines = [int(line) for part in parts if part.lines is not None for line in part.lines]
    return read_picture_headers([files.get(line) for line in lines])


def _list_settings(site: Site, data: CountedData, price: NoisySheetPrice | None) -> dict[str, Any]:
    policy = site.policy
    settings: dict[str, Any] = {
        "menu": list(COUNT_TABLES),
        "classes": list(data.class_names),
        "attributes": sorted(data.values),
        "smallest_count": policy.smallest_count,
    }
    if price is not None:
        settings |= {"epsilon": price.epsilon, "delta": price.delta, "tables": list(price.tables)}
    return settings


def _fingerprint_patients(data: CountedData, key: str) -> frozenset[str]:
    secret = bytes.fromhex(key)
    digests = (hmac.digest(secret, row, hashlib.sha256).hex() for row in data.patient_rows)
    return frozenset(digest[:FINGERPRINT_CHARACTERS] for digest in digests)


def _store_sheet(path: Path, sheet: CountSheet, *, durable: bool) -> None:
    write_atomically(path, sheet.to_json().encode(), durable=durable, private=True)


def _make_exact_sheet(data: CountedData, settings: Mapping[str, Any], smallest: int) -> CountSheet:
    disclosed = choose_disclosed_columns(data, smallest)
    patients, images = (count_cells(units, data, disclosed.combined) for units in (data.patients, data.images))
    cells = {
        (table, name, state, value): (patients.get((table, name, state, value), 0), number)
        for (table, name, state, value), number in images.items()
        if (table, name, value) in disclosed.columns
    }
    key = secrets.token_hex(FINGERPRINT_KEY_BYTES)
    return CountSheet(_today(), settings, key, _fingerprint_patients(data, key), cells, data.missing_tables)


def _make_noisy_sheet(data: CountedData, settings: Mapping[str, Any], price: NoisySheetPrice) -> CountSheet:
    counts = {key: number for key, number in count_cells(data.patients, data, ()).items() if key[0] in price.tables}
    keys = sorted(counts)
    noisy, deviation = add_noise_to_counts(np.array([counts[key] for key in keys], np.int64), price.deviation)
    cells = {key: (number, -1) for key, number in zip(keys, noisy.tolist(), strict=True)}
    key = secrets.token_hex(FINGERPRINT_KEY_BYTES)
    patients = _fingerprint_patients(data, key)
    return CountSheet(_today(), settings, key, patients, cells, data.missing_tables, deviation)


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
