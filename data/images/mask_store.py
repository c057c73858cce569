"""Store the masks of a data set in the cache of decoded pictures, so that each mask file is decoded once.

A cache folder of masks has the format of :mod:`polyclinic.data.images.pixel_cache`. Each entry holds a mask instead of
a picture: the integers of the mask, then :data:`_FACTS`. The key of an entry depends on the content of the mask files
and on the grid of their picture.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyclinic.data.base.masks import LazyMasks, choose_mask_type
from polyclinic.data.images import store as picture_store
from polyclinic.data.images.pixel_cache import MIN_FILE_AGE_S, PixelCache, PixelCacheWriter, make_keyed_blake3_hash
from polyclinic.data.images.reading import DecodedImageFormat, explain_decoding_error
from polyclinic.data.images.store import (
    DecodedImageStore,
    DecodingProgress,
    FileIdentity,
    make_cache_room,
    open_pixel_cache,
    print_cache_location,
    warn_about_cache_errors,
)

Palette = Mapping[int, tuple[int, int, int]]
"""Index of a colour -> red, green and blue."""
MASK_RULES = 1
"""Version of the rules that convert mask files to integers."""
_COLORS = 256
_FACTS = np.dtype([("any_bits", "<i8"), ("spacing", "<f8", (3,)), ("colors", "<i8"), ("palette", "u1", (_COLORS, 3))])
"""Data type of the record after the integers of a mask: the bitwise OR of all its integers; the size of a voxel along
each axis in mm, NaN for pictures; the number of colours in its palette; the colours."""


@dataclass(frozen=True)
class PackedMask:
    """The masks of one image, on the grid of the data set.

    Attributes:
        values: Integers ``(*spatial)`` with a bit for each class.
        spacing: Size of a voxel along each axis in mm; None for a picture.
        palette: Index -> colour, if the label map has a palette; else empty.
    """

    values: NDArray[Any]
    spacing: tuple[float, ...] | None = None
    palette: Palette = field(default_factory=dict)


@dataclass(frozen=True)
class MaskSource:
    """The mask files of one image.

    Attributes:
        picture: The picture file, or the file or folder of the volume.
        files: The label map, or a file for each class; None for a class that is not annotated.
    """

    picture: Path
    files: tuple[Path | None, ...]

    def identify(self) -> FileIdentity | None:
        """Return an identity that changes when one of the files changes; None if a file is not on a local disk."""
        every = [FileIdentity.identify_file(file) for file in (self.picture, *self.files) if file is not None]
        identities = [identity for identity in every if identity is not None]
        if len(identities) != len(every):
            return None
        absent = "".join("-" if file is None else "+" for file in self.files)
        about = "\1".join([absent, *(identity.about for identity in identities)])
        return FileIdentity(about, changed=max(identity.changed for identity in identities))


@dataclass(frozen=True)
class MaskReading:
    """Settings and functions for reading the masks of a data set.

    Attributes:
        form: Image size and resizing of the data set.
        mask_values: The value of each class in a label map; empty if each class has its own file.
        classes: Number of classes.
        describe_grid: Returns a text that identifies the grid of an image, without reading its pixels.
        read: Returns the masks of one image.
    """

    form: DecodedImageFormat
    mask_values: tuple[int, ...]
    classes: int
    describe_grid: Callable[[MaskSource], str]
    read: Callable[[MaskSource], PackedMask]

    @property
    def sides(self) -> tuple[int, ...]:
        """Shape of one mask: height and width, or depth, height and width."""
        return self.form.size if isinstance(self.form.size, tuple) else self.form.shape[:2]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Integer type of the masks."""
        return np.dtype(choose_mask_type(self.classes))

    @property
    def mask_bytes(self) -> int:
        """Memory of one decoded mask, in bytes."""
        return math.prod(self.sides) * self.dtype.itemsize


@dataclass(frozen=True)
class StoredMasks:
    """The masks of a list of images.

    Attributes:
        stored: The masks, in memory or on the disk.
        places: ``(n,)``, the index of each image's mask in ``stored``.
        spacings: ``(n, 3)``, size of a voxel in mm along each axis; NaN for pictures and for images without a mask.
        palettes: A palette for each image, empty for a mask without one.
        reasons: Index of an image -> reason why its masks cannot be used.
    """

    stored: NDArray[Any] | LazyMasks
    places: NDArray[np.intp]
    spacings: NDArray[np.float64]
    palettes: Sequence[Palette]
    reasons: Mapping[int, str]


def read_masks(sources: Sequence[MaskSource | None], reading: MaskReading, store: DecodedImageStore) -> StoredMasks:
    """Read the masks of a list of images into the cache, or into memory if they are small or there is no cache.

    Args:
        sources: The mask files of each image; None for an image without masks.

    Raises:
        BadInput: If the disk of the cache is full.
    """
    is_large = len(sources) * reading.mask_bytes >= picture_store.CACHE_THRESHOLD_BYTES
    if store.folder is not None and sources and is_large:
        with warn_about_cache_errors(store):
            return _MaskListReader(sources, reading, store).read_into_cache(store.folder)
    return _read_into_memory(sources, reading, store)


def _read_into_memory(
    sources: Sequence[MaskSource | None], reading: MaskReading, store: DecodedImageStore
) -> StoredMasks:
    stored = np.zeros((len(sources), *reading.sides), reading.dtype)
    facts, reasons = np.stack([_make_facts(None)] * len(sources)) if sources else np.zeros(0, _FACTS), dict[int, str]()

    def read_row(row: int) -> None:
        if (source := sources[row]) is None:
            return
        try:
            mask = reading.read(source)
        except Exception as error:  # any error of a decoder on a damaged file
            reasons[row] = _explain(error)
            return
        stored[row], facts[row] = mask.values, _make_facts(mask)

    with ThreadPoolExecutor(store.workers) as pool:
        list(pool.map(read_row, range(len(sources))))
    return StoredMasks(stored, np.arange(len(sources)), facts["spacing"], list(map(_read_palette, facts)), reasons)


class _MaskListReader:
    """Reads one list of masks into a cache."""

    def __init__(self, sources: Sequence[MaskSource | None], reading: MaskReading, store: DecodedImageStore) -> None:
        self.sources, self.reading, self.store = sources, reading, store
        self.identities = [None if source is None else source.identify() for source in sources]
        self.places = np.full(len(sources), -1, np.intp)
        self.reasons = dict[int, str]()

    def read_into_cache(self, root: Path) -> StoredMasks:
        """Read the masks that the cache lacks, and return all of them from the cache."""
        form, reading = self.reading.form, self.reading
        about = {
            "masks": MASK_RULES,
            "size": form.size,
            "resize": form.resize,
            "spacing": form.rendering.spacing,
            "values": reading.mask_values,
            "classes": reading.classes,
        }
        row_shape = (reading.mask_bytes + _FACTS.itemsize,)
        open_cache = partial(open_pixel_cache, self.store, root, about, row_shape)
        cache = open_cache()
        if missing := self._match_cached_masks(cache, cache.load_rows_by_content_key()):
            cache = make_cache_room(cache, len(missing), len(self.sources), self.store, open_cache)
            waiting = "another program reads these masks: waiting for it"
            with cache.open_cache_writer(lambda: self.store.tell(waiting)) as out:
                missing = self._match_cached_masks(cache, out.places)
                out.reserve_picture_rows(len(missing))
                progress = DecodingProgress(len(missing), self.store.tell)

                def add_row(row: int) -> None:
                    self._add_mask(row, cache, out)
                    progress.count_decoded_picture()

                with ThreadPoolExecutor(self.store.workers) as pool:
                    list(pool.map(add_row, missing))
        print_cache_location(self.store, cache.folder.parent, len(self.sources), len(missing), "mask")
        return self._collect(cache)

    def _match_cached_masks(self, cache: PixelCache, rows: Mapping[bytes, int]) -> list[int]:
        """Set ``places`` for the masks that are in the cache; return the positions of the others in the list."""
        files, missing = cache.load_content_keys_by_file(), list[int]()
        for row, identity in enumerate(self.identities):
            key = files.get(cache.hash_file_identity(identity.about)) if identity else None
            if self.sources[row] is None:
                key = _hash_no_mask(cache)
            if key is not None and key in rows:
                self.places[row] = rows[key]
            else:
                missing.append(row)
        return missing

    def _add_mask(self, row: int, cache: PixelCache, out: PixelCacheWriter) -> None:
        source, began, content = self.sources[row], time.time(), None
        try:
            key = _hash_no_mask(cache) if source is None else self._hash_source(source, cache)
            if key not in out.places:
                content = self._make_row(None if source is None else self.reading.read(source))
        except Exception as error:  # any error of a disk, or of a decoder on a damaged file
            self.reasons[row] = _explain(error)
            return
        self.places[row] = out.places[key] if content is None else out.add_picture_to_cache(key, content)
        before = self.identities[row]
        if source is not None and before and before == source.identify() and began - before.changed > MIN_FILE_AGE_S:
            out.record_file_content_key(cache.hash_file_identity(before.about), key)

    def _make_row(self, mask: PackedMask | None) -> NDArray[np.uint8]:
        """Return the bytes of a cache entry: the integers of a mask, then a record of type :data:`_FACTS`."""
        count = self.reading.mask_bytes
        row = np.zeros(count + _FACTS.itemsize, np.uint8)
        if mask is not None:
            row[:count] = np.ascontiguousarray(mask.values, self.reading.dtype).reshape(-1).view(np.uint8)
        row[count:] = np.frombuffer(_make_facts(mask).tobytes(), np.uint8)
        return row

    def _hash_source(self, source: MaskSource, cache: PixelCache) -> bytes:
        """Return the cache key of an image's masks: a hash of the mask files and of the image's grid."""
        hasher = make_keyed_blake3_hash(cache.secret).update(self.reading.describe_grid(source).encode())
        for file in source.files:
            hasher.update(b"-" if file is None else b"+" + cache.hash_image_file(file))
        return hasher.digest()

    def _collect(self, cache: PixelCache) -> StoredMasks:
        pictures, count = cache.open_cached_pictures(), self.reading.mask_bytes
        facts = np.zeros(len(pictures), _FACTS)
        for place in np.unique(self.places[self.places >= 0]).tolist():
            facts[place] = np.frombuffer(pictures.view_picture(place)[count:].tobytes(), _FACTS)[0]
        stored = LazyMasks(pictures, self.reading.sides, self.reading.dtype, facts["any_bits"].astype(np.int64))
        of_images = facts[self.places] if len(facts) else np.zeros(0, _FACTS)
        palettes = list(map(_read_palette, of_images))
        return StoredMasks(stored, self.places, of_images["spacing"], palettes, self.reasons)


def _hash_no_mask(cache: PixelCache) -> bytes:
    return make_keyed_blake3_hash(cache.secret).update(b"no mask").digest()


def _make_facts(mask: PackedMask | None) -> NDArray[Any]:
    facts = np.zeros((), _FACTS)
    facts["spacing"] = np.nan
    if mask is None:
        return facts
    facts["any_bits"] = int(np.bitwise_or.reduce(mask.values, axis=None))
    if mask.spacing is not None:
        facts["spacing"] = mask.spacing
    facts["colors"] = len(mask.palette)
    for index, color in mask.palette.items():
        facts["palette"][index] = color
    return facts


def _read_palette(facts: Any) -> Palette:
    colors = facts["palette"][: int(facts["colors"])].tolist()
    return {index: (red, green, blue) for index, (red, green, blue) in enumerate(colors)}


def _explain(error: Exception) -> str:
    return str(error) if type(error) is ValueError else explain_decoding_error(error)
