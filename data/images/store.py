"""Decode the pictures of a data set into memory, or into a cache on the disk for later runs.

Both give the same pixels. The key of a cache entry depends on the content of the image file and on everything else that
determines the pixels: size, colour, rendering, and the versions of the decoders.
"""

import math
import os
import shutil
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.system.files import (
    is_disk_full,
    open_own_file,
)
from polyclinic.common.system.plain_text import (
    format_as_json_text,
    format_bytes,
    format_count_with_noun,
    format_duration,
)
from polyclinic.common.system.resources import READING_THREADS
from polyclinic.data.base.decoded_size import MAX_MEMORY_SHARE, measure_process_memory_limit
from polyclinic.data.base.image_set import LazyPictures, SkippedImage
from polyclinic.data.images.file_kinds import is_nifti_file, read_first_bytes
from polyclinic.data.images.pixel_cache import (
    FORM_FILE,
    LAYOUT_VERSION,
    MIN_FILE_AGE_S,
    PixelCache,
    PixelCacheWriter,
    hash_image_file,
    make_keyed_blake3_hash,
    make_marked_cache_folder,
    measure_cached_pixel_bytes,
    remove_all_pixel_caches,
    remove_least_recent_unused_caches,
)
from polyclinic.data.images.reading import (
    BLANK_KEY,
    DecodedImageFormat,
    decode_picture,
    explain_decoding_error,
    fit_picture_to_format,
    has_color,
)

CACHE_THRESHOLD_BYTES = 16 << 20
"""If the files are smaller than this in total, they are decoded into memory, which takes about a second, and not into
the cache."""
PROGRESS_INTERVAL_S = 5.0
RESERVED_DISK_BYTES = 1 << 30
"""Disk space that the cache never uses."""
_CACHE_SUBFOLDER = "polyclinic-images"
"""Name of the subfolder for the cache if its folder holds other files."""
_PICTURES_PER_BATCH = 4096
_DECODER_PACKAGES = (
    *("pillow", "pydicom", "nibabel", "numpy", "pylibjpeg-libjpeg", "pylibjpeg-openjpeg", "pylibjpeg-rle"),
    *("pyjpegls", "python-gdcm", "imagecodecs"),
)


@dataclass(frozen=True)
class DecodedImageStore:
    """Settings for storing decoded pictures, in memory or in a cache folder.

    Attributes:
        folder: The cache folder; None keeps pictures in memory and decodes them at each program start.
        limit_bytes: Maximum size of the cache.
        limit_key: The configuration key for that size, for messages.
        off: The line of a configuration file that turns the cache off, for messages.
        secret: AES-256 key (32 bytes) that encrypts the pictures; None stores them unencrypted.
        workers: Number of decoding threads.
        tell: Function that prints a progress line for the user.
    """

    folder: Path | None = None
    limit_bytes: int = 100 * 10**9
    limit_key: str = "simulation.image_cache_gb"
    off: str = "simulation.image_cache_gb = 0"
    secret: bytes | None = field(default=None, repr=False)
    workers: int = READING_THREADS
    tell: Callable[[str], object] = field(default=lambda line: None, compare=False)


MEMORY_STORE = DecodedImageStore()
"""Stores decoded pictures in memory."""


def open_user_image_store(
    tell: Callable[[str], object] = lambda line: None, folder: str = "", limit_gb: float = 100.0
) -> DecodedImageStore:
    """Return the image cache that all runs of this operating-system user share.

    Args:
        tell: Function that prints a progress line for the user.
        folder: The cache folder; empty for ``$XDG_CACHE_HOME/polyclinic/images`` or ``~/.cache/polyclinic/images``.
        limit_gb: Maximum size in GB; 0 stores images in memory.
    """
    path = Path(folder) if folder else None
    if path is None:
        with suppress(RuntimeError):  # the account has no home folder
            path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polyclinic" / "images"
    return DecodedImageStore(path if limit_gb else None, int(limit_gb * 1e9), tell=tell)


@dataclass(frozen=True)
class FileIdentity:
    """Identifies the content of a file on the disk or in a PACS without reading it.

    Attributes:
        about: Text with path, size and times, or a UID; it differs if the content may have changed.
        size: Size of the file in bytes; None if unknown.
        changed: Time of the last change, in seconds since 1970.
    """

    about: str
    size: int | None = None
    changed: float = 0.0

    @classmethod
    def identify_file(cls, path: Path) -> "FileIdentity | None":
        """Return the identity of a file on this machine's disk; None if it does not exist."""
        try:
            status = path.stat()
            if stat.S_ISDIR(status.st_mode):
                return cls._identify_folder(path)
        except (OSError, ValueError):
            return None
        name = str(path) if path.is_absolute() else os.path.abspath(path)
        location = f"{name}\0{status.st_dev}\0{status.st_ino}"
        about = f"{location}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ctime_ns}"
        return cls(about, status.st_size, status.st_ctime)

    @classmethod
    def _identify_folder(cls, folder: Path) -> "FileIdentity":
        """Return the identity of a folder with slices, which changes when one of the files changes."""
        files = [cls.identify_file(file) for file in sorted(folder.iterdir()) if not file.is_dir()]
        identities = [identity for identity in files if identity is not None]
        about = blake3("\1".join(identity.about for identity in identities).encode()).hexdigest()
        size = sum(identity.size or 0 for identity in identities)
        return cls(f"{folder}\0{about}", size, max((identity.changed for identity in identities), default=0.0))


@dataclass(frozen=True)
class DecodedPictures:
    """The result of decoding a list of pictures.

    Attributes:
        stored: The decoded pictures, and possibly other pictures of the cache.
        places: ``(n,)``, the index in ``stored`` of each readable picture; identical files have the same index.
        rows: ``(n,)``, the index of each readable picture in the requested list.
        skipped: The unreadable pictures.
        blank: Names of files whose pictures are uniformly grey, because the window misses all their values.
        drops_color: True if pictures are stored in grey although a file has colour.
    """

    stored: NDArray[np.uint8] | LazyPictures
    places: NDArray[np.intp]
    rows: NDArray[np.intp]
    skipped: tuple[SkippedImage, ...]
    blank: tuple[str, ...] = ()
    drops_color: bool = False

    @property
    def images(self) -> NDArray[np.uint8]:
        """The readable pictures in memory; ``images[i]`` is number ``rows[i]`` of the requested list."""
        if isinstance(self.stored, np.ndarray) and np.array_equal(self.places, np.arange(len(self.stored))):
            return self.stored[:]  # a view, without a copy
        return self.stored[self.places]


ReadPicture = Callable[[int], bytes | Path]
"""Function of the index of a picture that returns the bytes of its file, or the path of its file."""


def decode_pictures(
    names: Sequence[str],
    read: ReadPicture,
    form: DecodedImageFormat,
    store: DecodedImageStore = MEMORY_STORE,
    connection: AbstractContextManager[object] | None = None,
    identify: Callable[[int], FileIdentity | None] = lambda row: None,
) -> DecodedPictures:
    """Decode a list of pictures into memory or into the cache; pictures that the cache already has are not read.

    If the files are smaller than :data:`CACHE_THRESHOLD_BYTES` in total, they are decoded into memory even if there is
    a cache.

    Args:
        names: The name of each picture, for the list of skipped pictures.
        read: Called with i, returns the bytes of picture i, or the path of its file.
        connection: Context manager that is entered while pictures are read. After an error it is exited at once, so
            that its exit can interrupt decoding threads that wait for data.
        identify: Called with i, returns the identity of picture i, or None if it must be identified by its content.

    Raises:
        BadInput: If the pictures fit neither into memory nor on the disk.
    """
    work = _PictureListDecoder(names, read, form, store, connection or nullcontext(), identify)
    sizes = [identity.size for identity in work.identities if identity]
    small = None not in sizes and len(sizes) == len(names) and sum(filter(None, sizes)) < CACHE_THRESHOLD_BYTES
    if store.folder is not None and names and not small:
        with warn_about_cache_errors(store):
            return work.decode_pictures_into_cache(store.folder)
    return work.decode_pictures_into_memory()


@dataclass
class _PictureListDecoder:
    """Decodes one list of pictures, either into memory or into a cache; the fields are those of `decode_pictures`."""

    names: Sequence[str]
    read: ReadPicture
    form: DecodedImageFormat
    store: DecodedImageStore
    connection: AbstractContextManager[object]
    identify: Callable[[int], FileIdentity | None]

    def __post_init__(self) -> None:
        self.identities = [self.identify(row) for row in range(len(self.names))]
        self.places = np.full(len(self.names), -1, np.intp)
        self.reasons = dict[int, str]()
        self.blank = set[int]()
        self.colored = set[int]()

    def decode_pictures_into_memory(self) -> DecodedPictures:
        """Decode all pictures into one array.

        Raises:
            BadInput: If the array exceeds the memory limit of this process.
        """
        images = allocate_picture_array(len(self.names), self.form.shape, self.store)
        # Discard the results of a cache that failed.
        self.places[:] = -1
        self.reasons.clear()
        self.blank.clear()
        self.colored.clear()
        keys = dict[int, bytes]()  # row -> hash of the file
        volumes = dict[int, Path]()

        def decode_row(row: int) -> None:
            try:
                content = self.read_picture_content(row)
                images[row], is_blank, loses_color = self.decode_to_dataset_format(content)
                self.places[row] = row
                if isinstance(content, bytes):
                    keys[row] = hash_image_file(content)
                else:
                    volumes[row] = content
                if is_blank:
                    self.blank.add(row)
                if loses_color:
                    self.colored.add(row)
            except Exception as error:  # any error of a decoder on a damaged file: continue with the others
                self.reasons[row] = explain_decoding_error(error)

        self._decode_in_threads(range(len(self.names)), decode_row)
        # Only a slice of each volume was read, or it was resampled: compare whole files where the results are equal.
        result_hashes = {row: hash_image_file(images[row].tobytes()) for row in volumes}
        counts = Counter(result_hashes.values())
        keys |= {row: hash_image_file(volumes[row]) for row, result in result_hashes.items() if counts[result] > 1}
        first_row = dict[bytes, int]()
        for row, key in sorted(keys.items()):
            self.places[row] = first_row.setdefault(key, row)
        return self._collect_decoded_pictures(images)

    def decode_pictures_into_cache(self, root: Path) -> DecodedPictures:
        """Decode the pictures that are not in the cache, and return all pictures from the cache.

        Raises:
            BadInput: If the pictures do not fit into the cache.
            OSError: If the folder cannot be used.
        """
        open_cache = partial(open_pixel_cache, self.store, root, asdict(self.form), self.form.shape)
        cache = open_cache()
        if missing := self._match_cached_pictures(cache, cache.load_rows_by_content_key()):
            cache = make_cache_room(cache, len(missing), len(self.names), self.store, open_cache)
            waiting = "another program decodes these images: waiting for it"
            with cache.open_cache_writer(lambda: self.store.tell(waiting)) as out:
                missing = self._match_cached_pictures(cache, out.places)
                out.reserve_picture_rows(len(missing))
                decoder = _CachingPictureDecoder(self, cache, out)
                self._decode_in_threads(missing, decoder.decode_unless_cached)
        print_cache_location(self.store, cache.folder.parent, len(self.names), len(missing))
        return self._collect_decoded_pictures(cache.open_cached_pictures())

    def read_picture_content(self, number: int) -> bytes | Path:
        """Return the bytes of a picture file, or the path of a volume or of a NIfTI file."""
        content = self.read(number)
        if isinstance(content, Path) and not self.form.is_volume and not is_nifti_file(read_first_bytes(content)):
            return content.read_bytes()
        return content

    def decode_to_dataset_format(self, content: bytes | Path) -> tuple[NDArray[np.uint8], bool, bool]:
        """Decode a picture to the format of the data set.

        Returns:
            The pixels; True if the picture is uniformly grey; True if it loses its colour.
        """
        if isinstance(self.form.size, tuple):
            from polyclinic.data.images.volume_pixels import render_volume  # takes a second, like DICOM

            volume = render_volume(content, self.form.size, self.form.resize, self.form.rendering)
            return volume.voxels, volume.is_blank, False
        image = decode_picture(content, self.form.rendering, self.form.side)
        loses_color = not self.form.color and has_color(image)
        return fit_picture_to_format(image, self.form), image.info.get(BLANK_KEY, False), loses_color

    def _match_cached_pictures(self, cache: PixelCache, rows: dict[bytes, int]) -> list[int]:
        """Set ``places`` for the pictures that are in the cache; return the indices of the missing pictures.

        Args:
            rows: Content key (hash of the source file) of each cached picture -> its row.
        """
        files = cache.load_content_keys_by_file()
        blank = cache.load_blank_picture_keys()
        colored = cache.load_colored_picture_keys()
        missing = list[int]()
        self.places[:] = -1
        self.blank.clear()
        self.colored.clear()
        for number, identity in enumerate(self.identities):
            key = files.get(cache.hash_file_identity(identity.about)) if identity else None
            if key in rows:
                self.places[number] = rows[key]
                if key in blank:
                    self.blank.add(number)
                if key in colored:
                    self.colored.add(number)
            else:
                missing.append(number)
        return missing

    def _decode_in_threads(self, numbers: Sequence[int], decode: Callable[[int], None]) -> None:
        progress = DecodingProgress(len(numbers), self.store.tell)

        def decode_and_count(number: int) -> None:
            decode(number)
            progress.count_decoded_picture()

        with ThreadPoolExecutor(self.store.workers) as pool, self.connection:
            try:
                for start in range(0, len(numbers), _PICTURES_PER_BATCH):
                    for _ in pool.map(decode_and_count, numbers[start : start + _PICTURES_PER_BATCH]):
                        pass
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _collect_decoded_pictures(self, stored: NDArray[np.uint8] | LazyPictures) -> DecodedPictures:
        skipped = (SkippedImage(self.names[row], self.reasons[row]) for row in sorted(self.reasons))
        rows = np.flatnonzero(self.places >= 0)
        blank = tuple(self.names[row] for row in sorted(self.blank))
        return DecodedPictures(stored, self.places[rows], rows, tuple(skipped), blank, bool(self.colored))


class _CachingPictureDecoder:
    """Decodes pictures into a cache; of several identical files only one is decoded."""

    def __init__(self, work: _PictureListDecoder, cache: PixelCache, out: PixelCacheWriter) -> None:
        self.work = work
        self.cache = cache
        self.out = out
        self.blank = cache.load_blank_picture_keys()
        self.colored = cache.load_colored_picture_keys()
        self._keys_in_work = set[bytes]()
        self._keys_changed = threading.Condition()

    def decode_unless_cached(self, number: int) -> None:
        """Decode picture ``number``, unless the cache has a picture from an identical file."""
        work = self.work
        began = time.time()
        try:
            content = work.read_picture_content(number)
            key = self.cache.hash_image_file(content)
        except Exception as error:  # any error of a disk or PACS: continue with the other pictures
            work.reasons[number] = explain_decoding_error(error)
            return
        with self._lock_file_content(key):
            if key not in self.out.places:
                try:
                    picture, is_blank, loses_color = work.decode_to_dataset_format(content)
                except Exception as error:  # any error of a decoder on a damaged file
                    work.reasons[number] = explain_decoding_error(error)
                    return
                if is_blank:
                    self.out.record_blank_picture(key)
                    self.blank.add(key)
                if loses_color:
                    self.out.record_colored_picture(key)
                    self.colored.add(key)
                self.out.add_picture_to_cache(key, picture)
        work.places[number] = self.out.places[key]
        if key in self.blank:
            work.blank.add(number)
        if key in self.colored:
            work.colored.add(number)
        before = work.identities[number]
        if before and before == work.identify(number) and began - before.changed > MIN_FILE_AGE_S:
            self.out.record_file_content_key(self.cache.hash_file_identity(before.about), key)

    @contextmanager
    def _lock_file_content(self, key: bytes) -> Iterator[None]:
        """Run the ``with`` block in only one thread at a time for files with the same content key; others wait.

        Args:
            key: Content key of the file (hash of its bytes).
        """
        with self._keys_changed:
            self._keys_changed.wait_for(lambda: key not in self._keys_in_work)
            self._keys_in_work.add(key)
        try:
            yield
        finally:
            with self._keys_changed:
                self._keys_in_work.discard(key)
                self._keys_changed.notify_all()


class DecodingProgress:
    """Prints the decoding progress every few seconds: the number of pictures, the speed and the remaining time."""

    def __init__(self, total: int, tell: Callable[[str], object]) -> None:
        self._total = total
        self._tell = tell
        self._done = 0
        self._began = time.monotonic()
        self._last_print = self._began
        self._lock = threading.Lock()

    def count_decoded_picture(self) -> None:
        """Count one more decoded picture, and print the progress every :data:`PROGRESS_INTERVAL_S` seconds."""
        with self._lock:
            self._done += 1
            now = time.monotonic()
            if now - self._last_print < PROGRESS_INTERVAL_S or self._done == self._total:
                return
            self._last_print = now
            rate = self._done / (now - self._began)
        rest = format_duration((self._total - self._done) / rate)
        self._tell(f"decoding images: {self._done:,} of {self._total:,}, {rate:,.0f} a second, {rest} left")


def allocate_picture_array(count: int, shape: tuple[int, ...], store: DecodedImageStore) -> NDArray[np.uint8]:
    """Allocate an array ``(count, *shape)``; raise :class:`BadInput` if it exceeds this process's memory limit."""
    needed = count * math.prod(shape)
    limit = int(MAX_MEMORY_SHARE * measure_process_memory_limit())
    if needed > limit:
        problem = f"{format_count_with_noun(count, 'image')} take {format_bytes(needed)} once decoded, and only "
        problem += f"{format_bytes(limit)} of memory may be used for them: images are held in memory because no folder "
        problem += "keeps them."
        raise BadInput([Fault("data", problem, f"Let decoded images be kept on the disk: {store.limit_key}.")])
    return np.zeros((count, *shape), np.uint8)


def cache_large_file_pictures(
    store: DecodedImageStore,
    file: Path,
    form: Mapping[str, Any],
    names: Sequence[str],
    read: Callable[[NDArray[np.intp]], Iterable[NDArray[np.uint8]]],
) -> tuple[LazyPictures, NDArray[np.intp]] | None:
    """Store the pictures of one large file (such as npz) in the cache.

    Args:
        form: All settings, beside the file, that determine the pixels; ``form["shape"]`` is the shape of a picture.
        names: A name for each picture within the file.
        read: Given ascending indices of pictures, yields these pictures in blocks.

    Returns:
        The cached pictures and the index of each picture in them; None if no cache can be used.

    Raises:
        BadInput: If the pictures do not fit into the cache.
    """
    if store.folder is None or (identity := FileIdentity.identify_file(file)) is None:
        return None
    with warn_about_cache_errors(store):
        open_cache = partial(open_pixel_cache, store, store.folder, form, tuple(form["shape"]))
        cache = open_cache()
        began = time.time()
        recorded_key = cache.load_content_keys_by_file().get(cache.hash_file_identity(identity.about))
        file_key = recorded_key or cache.hash_image_file(file)
        keys = [blake3(file_key + name.encode()).digest() for name in names]
        places = cache.load_rows_by_content_key()
        written = list[int]()
        if recorded_key is None or not set(keys) <= places.keys():
            missing = len(set(keys) - places.keys())
            cache = make_cache_room(cache, missing, len(set(keys)), store, open_cache)
            waiting = "another program reads these images: waiting for it"
            with cache.open_cache_writer(lambda: store.tell(waiting)) as out:
                written = [number for number, key in enumerate(keys) if key not in out.places]
                out.reserve_picture_rows(len(written))
                progress = DecodingProgress(len(written), store.tell)
                pictures = chain.from_iterable(read(np.array(written, np.intp)) if written else ())
                for number, picture in zip(written, pictures, strict=False):
                    out.add_picture_to_cache(keys[number], picture)
                    progress.count_decoded_picture()
                if began - identity.changed > MIN_FILE_AGE_S and identity == FileIdentity.identify_file(file):
                    out.record_file_content_key(cache.hash_file_identity(identity.about), file_key)
                places = out.places
        print_cache_location(store, cache.folder.parent, len(keys), len(written))
        return cache.open_cached_pictures(), np.array([places[key] for key in keys], np.intp)
    return None


@contextmanager
def warn_about_cache_errors(store: DecodedImageStore) -> Iterator[None]:
    """Catch errors of the cache folder inside the ``with`` block and print a warning; the caller then uses memory.

    Raises:
        BadInput: If the disk is full.
    """
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            remedy = f"Make room, or decode images into memory: {store.off}."
            raise BadInput([Fault(str(store.folder), "the disk is full.", remedy)]) from None
        store.tell(f"{store.folder} cannot be used ({error.strerror or error}): images are decoded at each start")


def open_pixel_cache(
    store: DecodedImageStore, root: Path, form: Mapping[str, Any], shape: tuple[int, ...]
) -> PixelCache:
    """Open the cache for one image format; a hash of format and decoder versions names its folder.

    Args:
        root: The folder of all caches.
        form: All settings, beside the files, that determine the pixels.
        shape: Shape of each picture, ``(height, width[, 3])``.
    """
    about = {"form": dict(form), "decoders": _list_decoder_versions(), "encrypted": store.secret is not None}
    text = format_as_json_text(about | {"layout": LAYOUT_VERSION}, indent=1)
    if not make_marked_cache_folder(root):
        root = root / _CACHE_SUBFOLDER
        make_marked_cache_folder(root)
    folder = root / make_keyed_blake3_hash(store.secret).update(text.encode()).hexdigest(16)
    cache = PixelCache(folder, shape, store.secret)
    if not (folder / FORM_FILE).exists():
        with open_own_file(folder / FORM_FILE, "w") as file:
            file.write(text)
    return cache


def print_cache_location(store: DecodedImageStore, root: Path, count: int, decoded: int, noun: str = "image") -> None:
    """Print the number of pictures in a data set, and the size and the limit of the cache.

    Args:
        root: The folder of all caches.
        count: Number of pictures in the data set.
        decoded: Number of pictures that were decoded now.
        noun: Noun for a picture in the message.
    """
    usage = f"{root} keeps {format_bytes(measure_cached_pixel_bytes(root))} of decoded images"
    limit = f"at most {format_bytes(store.limit_bytes)} ({store.limit_key})"
    store.tell(f"{format_count_with_noun(count, noun)}, {decoded:,} of them read now; {usage}, {limit}")


def make_cache_room(
    cache: PixelCache, missing: int, count: int, store: DecodedImageStore, open_cache: Callable[[], PixelCache]
) -> PixelCache:
    """Free enough disk space for the pictures of a data set in the cache of its image format.

    If the missing pictures fit, nothing is removed. Otherwise whole caches of other image formats are removed, the
    least recently used first. If that cannot free enough, the cache of this format is removed as well, with all its
    pictures. The new cache must then hold every picture of the data set.

    A cache that another program uses is never removed.

    Args:
        cache: The cache of the data set's image format.
        missing: Number of pictures of the data set that are not in ``cache`` yet.
        count: Number of all pictures of the data set.
        store: Settings with the size limit for all caches.
        open_cache: Opens a new cache of this format after the old one was removed.

    Returns:
        ``cache``, or the new, empty cache.

    Raises:
        BadInput: If removing all unused caches would not free enough; in this case nothing is removed.
    """
    root = cache.folder.parent
    needed = missing * cache.row_bytes
    free = min(store.limit_bytes - measure_cached_pixel_bytes(root), shutil.disk_usage(root).free - RESERVED_DISK_BYTES)
    if needed <= free or remove_least_recent_unused_caches(root, needed - free, spare=cache.folder):
        return cache
    cache.close()
    if remove_least_recent_unused_caches(root, count * cache.row_bytes - free):
        return open_cache()
    problem = f"has room for {format_bytes(max(0, free))}, and {format_count_with_noun(missing, 'image')} take "
    problem += f"{format_bytes(needed)} once decoded."
    limit = f"All decoded images may take {format_bytes(store.limit_bytes)} ({store.limit_key}). "
    limit += f"{format_bytes(shutil.disk_usage(root).free)} of the disk are free, of which "
    limit += f"{format_bytes(RESERVED_DISK_BYTES)} stay free. "
    remedy = f"Raise the limit, make room, or decode images into memory at each start: {store.off}."
    raise BadInput([Fault(str(root), problem, limit + remedy)])


def remove_image_store(folder: Path) -> bool:
    """Remove the decoded pictures in a cache folder, and the folder itself if nothing else is in it.

    If ``folder`` is a symbolic link, the link is removed too.

    Returns:
        True if there were decoded pictures.

    Raises:
        OSError: If a file cannot be removed.
    """
    resolved = folder.resolve()
    removed = [remove_all_pixel_caches(root) for root in (resolved / _CACHE_SUBFOLDER, resolved)]
    if folder.is_symlink():
        folder.unlink()
    return any(removed)


@lru_cache(maxsize=1)
def _list_decoder_versions() -> dict[str, str]:
    """Return the versions of our decoding code and of the decoding libraries, which determine the pixels."""
    others = ("pixel_cache.py", "store.py", "mask_store.py", "pixels.py", "patches.py", "augmentation.py")
    sources = [file for file in sorted(Path(__file__).parent.glob("*.py")) if file.name not in others]
    versions = {"polyclinic": blake3(b"".join(file.read_bytes() for file in sources)).hexdigest()}
    for name in _DECODER_PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
