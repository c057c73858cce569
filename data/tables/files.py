"""Find the picture files that a table names; each folder is listed only once.

A file with exactly the given name is preferred. Otherwise names are compared after normalisation, then also ignoring
case, then also ignoring the extension of the file, which the table may leave out. The first comparison with exactly one
matching file counts. A folder that cannot be listed is reported, and its files are not reported as missing. Two files
whose names are equal after normalisation are reported, because the cells of a table are normalised.
"""

import errno
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import Fault, raise_faults
from polyclinic.common.system.plain_text import format_count_with_noun, list_first_and_count_rest
from polyclinic.data.base.names import normalize_name
from polyclinic.data.images.file_kinds import PICTURE_SUFFIXES, UNSUPPORTED_SUFFIXES

_MISSING_FOLDER_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EINVAL)


@dataclass(frozen=True)
class LazyPicturePaths(Sequence[Path]):
    """A sequence of picture files that creates ``Path`` objects on access, because a million of them would take 400 MB.

    Attributes:
        folder: The folder to which the names are relative.
        names: ``(n,)`` relative file names, as an object array.
    """

    folder: Path
    names: NDArray[np.object_]

    @classmethod
    def from_folder_and_names(cls, folder: Path, names: Sequence[str]) -> "LazyPicturePaths":
        """Create the sequence from a folder and a list of names."""
        array = np.empty(len(names), dtype=object)
        array[:] = names
        return cls(folder, array)

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, row: int) -> Path: ...
    @overload
    def __getitem__(self, row: slice) -> "LazyPicturePaths": ...
    def __getitem__(self, row: int | slice) -> "Path | LazyPicturePaths":
        if isinstance(row, slice):
            return LazyPicturePaths(self.folder, self.names[row])
        return Path(self.folder, self.names[row])


def describe_outside_pictures(files: LazyPicturePaths) -> str:
    """Return a sentence about files outside the image folder that a table names; empty if there are none.

    A table from another author may name pictures that must not be used, such as pictures of patients who did not agree.
    Such names are not refused, because many tables have absolute paths. Links inside the folder are not reported,
    because the owner of the disk has created them.
    """
    inside, outside = dict[str, bool](), list[str]()
    folder = os.path.realpath(files.folder)
    for name in files.names.tolist():
        if not (name.startswith("/") or ".." in name):
            continue
        parent = os.path.dirname(os.path.join(folder, name))
        if parent not in inside:
            real = os.path.realpath(parent)
            inside[parent] = os.path.commonpath([real, folder]) == folder
        if not inside[parent]:
            outside.append(name)
    if not outside:
        return ""
    names = list_first_and_count_rest([f'"{name}"' for name in outside], 3)
    count = format_count_with_noun(len(outside), "image")
    return f"The table names {count} outside of the folder of images, which are used like all others: {names}."


class PictureFileFinder:
    """Finds files by the names in a table, and lists each folder only once.

    Attributes:
        failures: Folder that cannot be listed -> the reason.
        ambiguous: Paths of files that are not used, because another file has the same name after
            :func:`normalize_name`.

    Args:
        takes_folders: If no file has a name, find a folder with this name, which holds the slices of a volume.
    """

    def __init__(self, *, takes_folders: bool = False) -> None:
        self.takes_folders = takes_folders
        self.failures, self.ambiguous = dict[str, str](), set[str]()
        self._files, self._folders = dict[str, frozenset[str]](), dict[str, frozenset[str]]()
        self._alike: dict[tuple[str, Callable[[str], str]], dict[str, str | None]] = {}
        self._real = dict[tuple[str, str], str]()
        self._recursive_lists: dict[Path, list[tuple[str, str]]] = {}  # folder -> all its files at any depth
        self._equal: dict[str, dict[str, set[str]]] = {}  # folder -> normalised name -> files that share it

    def find_folder_ignoring_spelling(self, base: Path, name: str) -> Path:
        """Return the path of the folder with this name, as spelled on the disk; ``base / name`` if there is none."""
        return Path(self._resolve_folder_spelling(str(base), name))

    def find_files_in_order(self, folder: str, names: Iterable[str]) -> list[str | None]:
        """Call :meth:`find_file` for each name, and return the results in order."""
        listed = dict[str, frozenset[str]]()  # the files of each folder, by the folder's name in the table
        on_disk: list[str | None] = []
        for name in names:
            parent, slash, last = name.rpartition("/")
            start = parent + slash
            on_disk.append(name if last in listed.get(start, ()) else self.find_file(folder, name))
            if start not in listed:
                path = os.path.join(folder, parent or slash) if slash else folder
                listed[start] = self._files.get(path, frozenset())
        return on_disk

    def find_file(self, folder: str, name: str) -> str | None:
        """Return the path of a file relative to ``folder``, as spelled on the disk; None if it does not exist."""
        name = name.rstrip("/") if self.takes_folders else name
        parent, slash, last = name.rpartition("/")
        path = self._resolve_folder_spelling(folder, parent or slash) if slash else folder
        file = self._find_folder_entry(path, last, folders=False)
        if file is None and self.takes_folders and last:
            file = self._find_folder_entry(path, last, folders=True)
        if file is None:  # a table written on Windows
            return self.find_file(folder, name.replace("\\", "/")) if "\\" in name else None
        if path == folder:
            return file
        if file == last and path == os.path.join(folder, parent or slash):
            return name
        return os.path.join(os.path.relpath(path, folder), file)

    def _resolve_folder_spelling(self, root: str, path: str) -> str:
        """Return the folder at ``path`` below ``root``, as spelled on the disk."""
        if (root, path) not in self._real:
            place = os.path.join(root, path)
            if not os.path.isdir(place):
                place = root
                for part in path.split("/"):
                    entry = part if part in ("", ".", "..") else self._find_folder_entry(place, part, folders=True)
                    place = os.path.join(place, part if entry is None else entry)
            self._real[root, path] = place
        return self._real[root, path]

    def _find_folder_entry(self, place: str, name: str, *, folders: bool) -> str | None:
        if place not in self._files:
            self._list_folder_entries(place)
        entries = (self._folders if folders else self._files)[place]
        if name in entries:
            return name
        normal = normalize_name(name)
        if not folders and (equal := self._equal[place].get(normal)):
            self.ambiguous |= {os.path.join(place, entry) for entry in equal}
            return None
        folded = fold_name_case(name)
        wanted = ((normalize_name, normal), (fold_name_case, folded), (make_extensionless_name_key, folded))
        for fold, alias in wanted[:2] if folders else wanted:
            key = (place, fold)
            if key not in self._alike:
                alike = dict[str, str | None]()
                for entry in entries:
                    alike[fold(entry)] = None if fold(entry) in alike else entry  # None if several entries match
                self._alike[key] = alike
            if match := self._alike[key].get(alias):
                return match
        return None

    def _list_folder_entries(self, place: str) -> None:
        files, folders = list[str](), list[str]()
        try:
            with os.scandir(place or os.curdir) as entries:
                for entry in entries:
                    try:
                        if entry.is_dir():
                            folders.append(entry.name)
                        elif entry.is_file():
                            files.append(entry.name)
                    except OSError:  # circular link or no permission: reading the file reports the reason
                        files.append(entry.name)
        except (OSError, ValueError) as error:
            is_refusal = isinstance(error, OSError) and (
                error.errno not in _MISSING_FOLDER_ERRORS or os.path.islink(place)
            )
            if is_refusal and os.path.dirname(place) not in self.failures:
                reason = getattr(error, "strerror", None) or str(error)
                self.failures[place] = "the link leads nowhere" if os.path.islink(place) else reason
        same_name = defaultdict[str, set[str]](set)
        for file in files:
            if (normal := normalize_name(file)) != file:
                same_name[normal].add(file)
        for normal in same_name.keys() & set(files):
            same_name[normal].add(normal)
        self._equal[place] = {normal: equal for normal, equal in same_name.items() if len(equal) > 1}
        self._files[place] = frozenset(files).difference(*self._equal[place].values())
        self._folders[place] = frozenset(folders)

    def list_files_recursively(self, folder: Path) -> Sequence[tuple[str, str]]:
        """Return the relative path of the subfolder, and the name, of all files in a folder and its subfolders.

        Links to folders are followed; each folder is visited once.
        """
        if folder in self._recursive_lists:
            return self._recursive_lists[folder]

        def record_listing_failure(error: OSError) -> None:
            self.failures[str(error.filename)] = error.strerror or str(error)

        files = self._recursive_lists[folder] = []
        visited = {os.path.realpath(folder)}
        for parent, folders, names in os.walk(folder, onerror=record_listing_failure, followlinks=True):
            below = os.path.relpath(parent, folder)
            files += ((below, name) for name in names)
            new = {name: os.path.realpath(os.path.join(parent, name)) for name in folders}
            # A link may lead to a folder above it, and the walk would never end.
            folders[:] = [name for name in sorted(folders) if new[name] not in visited]
            visited |= set(new.values())
        return files

    def find_unlistable_folder_faults(self, where: str = "data.images") -> list[Fault]:
        """Return faults for folders that could not be listed, and for files whose normalised names are equal.

        Args:
            where: The configuration key that the faults name.
        """
        faults = []
        if self.ambiguous:
            names = list_first_and_count_rest([repr(name) for name in sorted(self.ambiguous)], 6)
            problem = f"{len(self.ambiguous)} files differ only in spaces, accents' form or invisible signs: {names}."
            faults.append(Fault(where, problem, "Rename them so that the table names one; a cell cannot say which."))
        if not self.failures:
            return faults
        reasons = defaultdict[str, list[str]](list)
        for folder, reason in self.failures.items():
            reasons[reason].append(f'"{folder}"')
        which = "; ".join(f"{list_first_and_count_rest(names, 5)} ({reason})" for reason, names in reasons.items())
        problem = f"{format_count_with_noun(len(self.failures), 'folder')} cannot be listed: {which}."
        remedy = "Give the account that runs this program the right to read and enter them, and mount their disks."
        return [*faults, Fault(where, problem, remedy)]


def list_paths_below(folder: Path) -> list[Path]:
    """Return all folders and files below a folder, sorted; links to folders are followed, each folder once.

    Raises:
        BadInput: If a folder cannot be listed.
    """
    finder = PictureFileFinder()
    files = [Path(os.path.normpath(folder / below / name)) for below, name in finder.list_files_recursively(folder)]
    raise_faults(finder.find_unlistable_folder_faults(str(folder)))
    folders = {
        parent for file in files for parent in file.parents if parent.is_relative_to(folder) and parent != folder
    }
    return sorted({*files, *folders})


def fold_name_case(name: str) -> str:
    """Return a normalised name in lower case for comparison; ß and ss stay different, unlike with ``str.casefold``."""
    return normalize_name(name).lower()


def make_extensionless_name_key(name: str) -> str:
    """Return a comparison key: the normalised, lower-case file name without its picture extension.

    A name without a picture extension has the key ``/``, which is not equal to any file name.
    """
    stem = drop_picture_extension(folded := fold_name_case(name))
    return "/" if stem == folded else stem


def drop_picture_extension(name: str) -> str:
    """Return a file name without its picture extension, if it has one."""
    lower, suffixes = name.lower(), PICTURE_SUFFIXES + UNSUPPORTED_SUFFIXES
    suffix = max((suffix for suffix in suffixes if lower.endswith(suffix)), key=len, default="")
    return name[: len(name) - len(suffix)]


def describe_other_file_extensions(folder: str, names: Iterable[str], finder: PictureFileFinder) -> str:
    """Return advice if missing files exist with another extension, such as ``a.jpg`` for ``a.jpeg``; else empty.

    Args:
        names: Names of files that are missing in ``folder``.
        finder: Looks for the files on the disk.
    """
    stems = {name: stem for name in names if (stem := drop_picture_extension(name)) != name}
    files = {name: file for name, stem in stems.items() if (file := finder.find_file(folder, stem))}
    if not files:
        return ""
    name, file = next(iter(files.items()))
    count = format_count_with_noun(len(files), "name ends", "names end")
    remedy = "Write them as on the disk, or without an ending."
    return f'"{file}" is there, and no "{name}": {count} otherwise than the file. {remedy}'
