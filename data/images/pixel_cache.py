"""Cache of decoded pictures on the disk, which all programs of a user share: each picture is decoded only once.

Each folder holds the pictures of one size, colour and rendering (:class:`PixelCache`). Its files:

========== ============================================================================================================
pixels     the pictures, in rows of equal length; an encrypted row is a nonce, the pixels and a tag (AES-256-GCM)
rows       for each row of ``pixels``: the content key of the picture's file, and a digest of the pixels
blank      the content keys of pictures that are one uniform grey, because the window misses all their values
colored    the content keys of pictures that are kept in grey, and have colour in their files
files      for each image file: a hash of its path, place on the disk, size and times; and its content key
lock       locked by the program that adds pictures
in_use     locked by each program that uses the pictures; a folder in use is not removed
form.json  size, colour, rendering and decoder versions of the pictures
========== ============================================================================================================

``CACHEDIR.TAG`` marks a cache folder. Only these files are ever removed, and a folder only if nothing else is in it.

A content key is the BLAKE3 hash of an image file, so that a copied or renamed file is not decoded again. With
encryption the hash is keyed, so that it reveals nothing about the file.

Pixels are flushed to the disk before their record in ``rows`` is written. A program that is killed loses the pictures
of a few seconds, and the next program overwrites them. Digests are verified when a program first reads a picture,
and encrypted pictures are authenticated at each reading. This detects disk errors, not every deliberate change by
somebody who can write into the folder.
"""

import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.system.files import open_own_descriptor, open_own_file
from polyclinic.data.base.image_set import LazyPictures, compute_picture_digest

PIXELS_FILE = "pixels"
ROWS_FILE = "rows"
BLANK_FILE = "blank"
COLORED_FILE = "colored"
FILES_FILE = "files"
LOCK_FILE = "lock"
IN_USE_FILE = "in_use"
FORM_FILE = "form.json"
_CACHE_FILES = (PIXELS_FILE, ROWS_FILE, BLANK_FILE, COLORED_FILE, FILES_FILE, LOCK_FILE, IN_USE_FILE, FORM_FILE)
"""All files of a cache folder, except its mark."""
_KEY_BYTES = 32
"""Length of a content key."""
_DIGEST_BYTES = 8
"""Length of a picture's digest."""
_IDENTITY_BYTES = 16
"""Length of the hash of a file's path, size and times."""
_NONCE_BYTES = 12
_TAG_BYTES = 16
FLUSH_INTERVAL_S = 2.0
"""Seconds between two flushes of new rows to the disk."""
CACHE_MARK_FILE = "CACHEDIR.TAG"
"""Name of the file that marks a folder as a cache; back-up programs know it too (bford.info/cachedir)."""
CACHE_MARK_TEXT = "Signature: 8a477f597d28d172789f06886806bc55\n# Images, kept by Polyclinic. May be removed.\n"
LAYOUT_VERSION = 4
"""Version of the file layout; the hash that names a cache's folder depends on it."""
MIN_FILE_AGE_S = 2.0
"""Seconds. A file that changed more recently before it was read may change again without a new time stamp."""


class CacheFolderLock:
    """Creates a cache folder if necessary, and prevents other programs from removing it until it is closed."""

    def __init__(self, folder: Path) -> None:
        self._descriptor = -1
        while True:
            if not make_marked_cache_folder(folder):
                raise FileExistsError(errno.EEXIST, f"it has no {CACHE_MARK_FILE} of ours", str(folder))
            with suppress(FileNotFoundError):
                self._descriptor = open_own_descriptor(folder / IN_USE_FILE, os.O_WRONLY | os.O_CREAT, 0o600)
                fcntl.flock(self._descriptor, fcntl.LOCK_SH)
                os.utime(self._descriptor)
                if os.fstat(self._descriptor).st_nlink:
                    return
                self.close()  # another program has removed the folder meanwhile

    def close(self) -> None:
        """Release the lock, so that other programs may remove the folder."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()


class _CachedPictures(LazyPictures):
    """Base class of pictures in a cache file; the digests of the pictures are in the file ``rows`` of its folder."""

    def __init__(self, path: Path, count: int, shape: tuple[int, ...], in_use: CacheFolderLock | None = None) -> None:
        self.path, self.shape, self._in_use = path, (count, *shape), in_use
        self._records = _read_fixed_size_records(path.parent / ROWS_FILE, _KEY_BYTES + _DIGEST_BYTES)

    def read_picture_digests(self, rows: NDArray[np.intp]) -> NDArray[np.uint64]:
        digests = b"".join(self._records[row][_KEY_BYTES:] for row in rows.tolist())
        return np.frombuffer(digests, ">u8").astype(np.uint64)


class MemoryMappedPictures(_CachedPictures):
    """Pictures in an unencrypted cache file, mapped into memory that all processes share.

    Each picture is compared with its digest on first access.
    """

    def __init__(self, path: Path, count: int, shape: tuple[int, ...], in_use: CacheFolderLock | None = None) -> None:
        super().__init__(path, count, shape, in_use)
        self.array = _memory_map_pixel_rows(path, count, int(np.prod(shape))).reshape(self.shape)
        self._checked = np.zeros(count, np.bool_)

    def read_pictures(self, rows: NDArray[np.intp], seed: int = 0) -> NDArray[np.uint8]:
        self._verify_picture_digests(rows)
        return self.array[rows]

    def view_picture(self, row: int) -> NDArray[np.uint8]:
        self._verify_picture_digests(np.array([row], np.intp))
        picture: NDArray[np.uint8] = self.array[row]
        return picture

    def verify_all_picture_digests(self) -> None:
        """Verify the digests of all pictures, which a caller must do before it accesses ``array`` directly.

        Raises:
            BadInput: If a picture was changed on the disk.
        """
        with ThreadPoolExecutor() as pool:
            list(pool.map(self._verify_picture_digests, np.array_split(np.arange(len(self)), 64)))

    def _verify_picture_digests(self, rows: NDArray[np.intp]) -> None:
        for row in rows[~self._checked[rows]].tolist():
            if compute_picture_digest(self.array[row]).to_bytes(_DIGEST_BYTES) != self._records[row][_KEY_BYTES:]:
                raise _make_damaged_cache_error(self.path.parent)
            self._checked[row] = True

    def describe_for_other_process(self) -> dict[str, Any]:
        """Return JSON with which :meth:`open_from_description` opens the pictures in another process."""
        return {"path": str(self.path), "file": self.path.stat().st_ino, "shape": list(self.shape)}

    @classmethod
    def open_from_description(cls, description: Mapping[str, Any]) -> "MemoryMappedPictures":
        """Open the pictures that another process described by :meth:`describe_for_other_process`.

        Raises:
            BadInput: If the file has been replaced since.
        """
        path = Path(description["path"])
        count, *shape = description["shape"]
        in_use = CacheFolderLock(path.parent)
        if not path.exists() or path.stat().st_ino != description["file"]:
            problem = "holds other decoded images than at the start of the run."
            raise BadInput([Fault(str(path.parent), problem, "Start the run again.")])
        return cls(path, count, tuple(shape), in_use)


class EncryptedPictures(_CachedPictures):
    """Pictures in an encrypted cache file; each is decrypted and authenticated whenever it is read."""

    def __init__(self, path: Path, count: int, shape: tuple[int, ...], secret: bytes, in_use: CacheFolderLock) -> None:
        super().__init__(path, count, shape, in_use)
        self._encrypted = _memory_map_pixel_rows(path, count, int(np.prod(shape)) + _NONCE_BYTES + _TAG_BYTES)
        self._cipher = AESGCM(secret)

    def read_pictures(self, rows: NDArray[np.intp], seed: int = 0) -> NDArray[np.uint8]:
        pictures = np.empty((len(rows), *self.shape[1:]), np.uint8)
        for picture, row in zip(pictures, rows.tolist(), strict=True):
            encrypted = self._encrypted[row]
            bound_data = _make_aes_gcm_associated_data(self.path, row, self._records[row][:_KEY_BYTES])
            try:
                content = self._cipher.decrypt(encrypted[:_NONCE_BYTES].data, encrypted[_NONCE_BYTES:].data, bound_data)
            except InvalidTag:
                raise _make_damaged_cache_error(self.path.parent) from None
            picture[...] = np.frombuffer(content, np.uint8).reshape(picture.shape)
        return pictures


class PixelCache:
    """A folder with decoded pictures of one size, colour and rendering; it is not removed while this object exists.

    Attributes:
        row_bytes: Bytes per picture in the file ``pixels``.

    Args:
        folder: The folder, which is created if it does not exist.
        shape: Shape of each picture, ``(height, width[, 3])``.
        secret: AES-256 key (32 bytes) that encrypts the pictures; None stores them unencrypted.

    Raises:
        OSError: If the folder cannot be created or locked.
    """

    def __init__(self, folder: Path, shape: tuple[int, ...], secret: bytes | None = None) -> None:
        self.folder, self.shape, self.secret = folder, shape, secret
        self.row_bytes = int(np.prod(shape)) + (0 if secret is None else _NONCE_BYTES + _TAG_BYTES)
        self._in_use = CacheFolderLock(folder)

    def close(self) -> None:
        """Release the folder, so that other programs may remove it."""
        self._in_use.close()

    def list_source_file_hashes(self) -> list[bytes]:
        """Return the content key (hash of the source file) of each cached picture, in row order."""
        records = _read_fixed_size_records(self.folder / ROWS_FILE, _KEY_BYTES + _DIGEST_BYTES)
        path = self.folder / PIXELS_FILE
        whole = path.stat().st_size // self.row_bytes if path.exists() else 0
        return [record[:_KEY_BYTES] for record in records[:whole]]

    def load_rows_by_content_key(self) -> dict[bytes, int]:
        """Return the row of each cached picture by its content key (hash of the source file)."""
        return {key: row for row, key in enumerate(self.list_source_file_hashes())}

    def load_blank_picture_keys(self) -> set[bytes]:
        """Return the content keys (hashes of the source files) of uniformly grey pictures.

        They are uniformly grey because the window misses all their values.
        """
        return set(_read_fixed_size_records(self.folder / BLANK_FILE, _KEY_BYTES))

    def load_colored_picture_keys(self) -> set[bytes]:
        """Return the content keys (hashes of the source files) of pictures that have colour, but are stored in grey."""
        return set(_read_fixed_size_records(self.folder / COLORED_FILE, _KEY_BYTES))

    def load_content_keys_by_file(self) -> dict[bytes, bytes]:
        """Return a dictionary from :meth:`hash_file_identity` to content key (hash of the bytes) of recorded files."""
        records = _read_fixed_size_records(self.folder / FILES_FILE, _IDENTITY_BYTES + _KEY_BYTES)
        return {record[:_IDENTITY_BYTES]: record[_IDENTITY_BYTES:] for record in records}

    def hash_file_identity(self, about: str) -> bytes:
        """Hash a description of a file (path, size, times) that changes whenever its content may have changed."""
        return make_keyed_blake3_hash(self.secret).update(about.encode()).digest(_IDENTITY_BYTES)

    def hash_image_file(self, content: bytes | Path) -> bytes:
        """Return the content key of an image file: a hash of its bytes, keyed if the cache is encrypted."""
        return hash_image_file(content, self.secret)

    def open_cached_pictures(self) -> LazyPictures:
        """Return all cached pictures, indexed by row."""
        path, count = self.folder / PIXELS_FILE, len(self.list_source_file_hashes())
        if self.secret is None:
            return MemoryMappedPictures(path, count, self.shape, self._in_use)
        return EncryptedPictures(path, count, self.shape, self.secret, self._in_use)

    @contextmanager
    def open_cache_writer(self, waits: Callable[[], object] = lambda: None) -> Iterator["PixelCacheWriter"]:
        """Return a context manager with a :class:`PixelCacheWriter`; only one program can write at a time.

        Args:
            waits: Called once if another program is writing, before this one waits for it.
        """
        with open_own_file(self.folder / LOCK_FILE, "ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waits()
                fcntl.flock(lock, fcntl.LOCK_EX)
            writer = PixelCacheWriter(self)
            try:
                yield writer
            finally:
                writer.close()


class PixelCacheWriter:
    """Adds pictures to a cache; thread-safe.

    Attributes:
        places: Content key (hash of the source file) of each cached picture -> its row.
    """

    def __init__(self, cache: PixelCache) -> None:
        keys = cache.list_source_file_hashes()
        self._cache = cache
        self.places = {key: row for row, key in enumerate(keys)}
        self._next_row = len(keys)
        self._flushed_rows = len(keys)
        self._rows = open_own_file(cache.folder / ROWS_FILE, "ab", buffering=0)
        self._files = open_own_file(cache.folder / FILES_FILE, "ab", buffering=0)
        self._blank = open_own_file(cache.folder / BLANK_FILE, "ab", buffering=0)
        self._colored = open_own_file(cache.folder / COLORED_FILE, "ab", buffering=0)
        self._pixels = open_own_descriptor(cache.folder / PIXELS_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        self._rows.truncate(self._next_row * (_KEY_BYTES + _DIGEST_BYTES))
        for file, length in (
            (self._files, _IDENTITY_BYTES + _KEY_BYTES),
            (self._blank, _KEY_BYTES),
            (self._colored, _KEY_BYTES),
        ):
            file.truncate(file.tell() // length * length)
        self._written: dict[int, bytes] = {}
        self._new_files: list[bytes] = []
        self._lock = threading.Lock()
        self._flush_lock = threading.Lock()
        self._flush_time = time.monotonic()

    def reserve_picture_rows(self, count: int) -> None:
        """Extend the pixel file for ``count`` further pictures; disk blocks are allocated only on writing."""
        os.truncate(self._pixels, (self._next_row + count) * self._cache.row_bytes)

    def add_picture_to_cache(self, key: bytes, picture: NDArray[np.uint8]) -> int:
        """Write a picture, and return its row.

        Args:
            key: Content key of the picture (hash of the source file).

        Raises:
            OSError: If the disk is full.
        """
        with self._lock:
            row = self._next_row
            self._next_row += 1
        content: Any = np.ascontiguousarray(picture).data.cast("B")
        record = key + compute_picture_digest(picture, self._cache.secret).to_bytes(_DIGEST_BYTES)
        if self._cache.secret is not None:
            nonce = os.urandom(_NONCE_BYTES)
            bound_data = _make_aes_gcm_associated_data(self._cache.folder / PIXELS_FILE, row, key)
            content = memoryview(nonce + AESGCM(self._cache.secret).encrypt(nonce, content, bound_data))
        offset = row * self._cache.row_bytes
        while len(content):
            count = os.pwrite(self._pixels, content, offset)
            content = content[count:]
            offset += count
        with self._lock:
            self._written[row] = record
            self.places[key] = row
        if time.monotonic() - self._flush_time > FLUSH_INTERVAL_S and self._flush_lock.acquire(blocking=False):
            try:
                self._flush_rows_to_disk()
            finally:
                self._flush_lock.release()
        return row

    def record_file_content_key(self, identity: bytes, key: bytes) -> None:
        """Record the content key of an image file, so that the next run finds its picture without reading the file.

        Args:
            identity: Hash of the file's path, size and times, from :meth:`PixelCache.hash_file_identity`.
            key: Hash of the file's bytes, from :meth:`PixelCache.hash_image_file`.
        """
        with self._lock:
            self._new_files.append(identity + key)

    def record_blank_picture(self, key: bytes) -> None:
        """Record that the picture with this content key is uniformly grey. Call this before adding the picture."""
        self._blank.write(key)

    def record_colored_picture(self, key: bytes) -> None:
        """Record that the picture with this content key is stored in grey, but has colour in its file.

        Call this before adding the picture.
        """
        self._colored.write(key)

    def _flush_rows_to_disk(self) -> None:
        """Flush the pixels to the disk, then write the records of all rows without a gap before them."""
        with self._lock:
            rows = list[bytes]()
            files = self._new_files
            while self._flushed_rows in self._written:
                rows.append(self._written.pop(self._flushed_rows))
                self._flushed_rows += 1
            self._new_files = []
        os.fdatasync(self._pixels)
        self._rows.write(b"".join(rows))
        self._files.write(b"".join(files))
        self._flush_time = time.monotonic()

    def close(self) -> None:
        """Flush all pictures to the disk, and release reserved space that was not used."""
        try:
            self._flush_rows_to_disk()
            os.truncate(self._pixels, self._flushed_rows * self._cache.row_bytes)
        finally:
            os.close(self._pixels)
            self._rows.close()
            self._files.close()
            self._blank.close()
            self._colored.close()


def make_marked_cache_folder(folder: Path) -> bool:
    """Create a private folder, or use an empty one, and mark it as a Polyclinic cache by a file ``CACHEDIR.TAG``.

    Returns:
        False if the folder holds other files; it is then not marked and not changed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(0o700)
    if not any(
        path.name != CACHE_MARK_FILE or path.stat().st_size for path in folder.iterdir()
    ):  # another program may write it
        with open_own_file(folder / CACHE_MARK_FILE, "w") as mark:
            mark.write(CACHE_MARK_TEXT)
    return _is_cache_folder(folder)


def _is_cache_folder(folder: Path) -> bool:
    try:
        return (folder / CACHE_MARK_FILE).read_text(encoding="ascii") == CACHE_MARK_TEXT
    except (OSError, ValueError):
        return False


def _list_cache_folders(root: Path) -> list[Path]:
    """Return the cache folders in ``root``, one per image format, the least recently used first.

    A marked folder without a file ``in_use`` is left out, because it may be the root folder of other caches.
    """
    marked = [folder for folder in root.iterdir() if _is_cache_folder(folder) and (folder / IN_USE_FILE).exists()]
    return sorted(marked, key=lambda folder: (folder / IN_USE_FILE).stat().st_mtime)


def _measure_pixel_file_bytes(folder: Path) -> int:
    with suppress(FileNotFoundError):
        return (folder / PIXELS_FILE).stat().st_size
    return 0


def measure_cached_pixel_bytes(root: Path) -> int:
    """Return the total size in bytes of the pixel files in all caches in ``root``, including reserved space."""
    return sum(map(_measure_pixel_file_bytes, _list_cache_folders(root)))


def remove_least_recent_unused_caches(root: Path, needed: int, spare: Path | None = None) -> int:
    """Remove caches that no program uses, the least recently used first, until ``needed`` bytes are freed.

    Args:
        root: The folder that holds the cache folders.
        needed: Number of bytes to free.
        spare: A cache folder that is not removed.

    Returns:
        The bytes that were freed. If all unused caches together are too small, nothing is removed and the result is 0.
    """
    freed = 0
    unused = list[Path]()
    with ExitStack() as locks:
        for folder in _list_cache_folders(root):
            if freed >= needed or folder == spare:
                continue
            with suppress(OSError):
                fcntl.flock(
                    locks.enter_context(open_own_file(folder / IN_USE_FILE, "ab")), fcntl.LOCK_EX | fcntl.LOCK_NB
                )
                unused.append(folder)
                freed += _measure_pixel_file_bytes(folder)
        if freed < needed:
            return 0
        for folder in unused:
            _remove_cache_folder(folder)
    return freed


def _remove_cache_folder(folder: Path) -> None:
    """Remove the files of a cache, and the folder if nothing else is in it."""
    moved = folder.rename(folder.with_name(f".{folder.name}.{os.getpid()}"))  # no other program opens it meanwhile
    for name in _CACHE_FILES:
        (moved / name).unlink(missing_ok=True)
    if not _remove_folder_holding_only_mark(moved):
        with suppress(OSError):  # another program has made a new one meanwhile
            moved.rename(folder)


def _remove_folder_holding_only_mark(folder: Path) -> bool:
    """Remove a cache folder if nothing but the file ``CACHEDIR.TAG`` is in it; return True if it was removed."""
    with suppress(OSError):
        if [path.name for path in folder.iterdir()] == [CACHE_MARK_FILE]:
            (folder / CACHE_MARK_FILE).unlink()
            folder.rmdir()
            return True
    return False


def remove_all_pixel_caches(root: Path) -> bool:
    """Remove all caches in ``root``, even caches in use, and ``root`` itself if it was created for caches.

    Returns:
        True if anything was removed.

    Raises:
        OSError: If a file cannot be removed.
    """
    forms = _list_cache_folders(root) if root.is_dir() else []
    for folder in forms:
        _remove_cache_folder(folder)
    return _remove_folder_holding_only_mark(root) or bool(forms)


def make_keyed_blake3_hash(secret: bytes | None) -> blake3:
    """Return a new BLAKE3 hash object, keyed by ``secret`` unless it is None.

    Without the key, nobody can test if an image that they have is in the cache.
    """
    return blake3() if secret is None else blake3(key=secret)


def hash_image_file(content: bytes | Path, secret: bytes | None = None) -> bytes:
    """Return the BLAKE3 hash of an image file, given its bytes or its path; with a secret the hash is keyed.

    The hash of a folder with slices depends on the contents of its files, not on their names.
    """
    hasher = make_keyed_blake3_hash(secret)
    if isinstance(content, Path) and content.is_dir():
        files = sorted(hash_image_file(file, secret) for file in content.iterdir() if not file.is_dir())
        return hasher.update(b"".join(files)).digest()
    return (hasher.update_mmap(content) if isinstance(content, Path) else hasher.update(content)).digest()


def _read_fixed_size_records(path: Path, size: int) -> list[bytes]:
    """Return the records of ``size`` bytes in a file, without an incomplete last record; empty if there is no file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    return [content[start : start + size] for start in range(0, len(content) - size + 1, size)]


def _memory_map_pixel_rows(path: Path, count: int, row_bytes: int) -> NDArray[np.uint8]:
    """Map the first ``count`` rows of a file into memory as a read-only array ``(count, row_bytes)``."""
    if not count:
        return np.zeros((0, row_bytes), np.uint8)
    with path.open("rb") as file:
        return np.frombuffer(
            mmap.mmap(file.fileno(), count * row_bytes, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED), np.uint8
        ).reshape(count, row_bytes)


def _make_aes_gcm_associated_data(path: Path, row: int, key: bytes) -> bytes:
    """Return associated data for AES-GCM, which bind encrypted pixels to their cache folder, row and content key.

    Therefore decryption fails if two rows were exchanged.
    """
    return f"{path.parent.name}/{row}/".encode() + key


def _make_damaged_cache_error(folder: Path) -> BadInput:
    problem = "holds decoded images that are not what was written: the disk, or somebody, changed them."
    return BadInput([Fault(str(folder), problem, "Remove this folder; the images are then decoded again.")])
