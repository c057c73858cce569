"""Find the pictures that a table names, in a folder and all its subfolders.

If names are paths of files, relative to the folder, they are used directly. If no name is such a path, each is searched
in all subfolders: a name with folders, such as ``train/p1/001.png``, must be the end of the file's path. A name that
matches several files is ambiguous; for example, masks often have the same names as their pictures.
"""

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polyclinic.data.tables.files import (
    PictureFileFinder,
    drop_picture_extension,
    fold_name_case,
    make_extensionless_name_key,
)

_MAX_NAMES_EXAMINED = 200
"""Number of cells of a column that are searched, to decide if it names pictures."""


@dataclass(frozen=True)
class LocatedPictures:
    """The locations of the pictures that a table names.

    Attributes:
        folder: The folder to which ``paths`` are relative.
        paths: For each name, the path of its file; None if there is no file, or several files match.
        names_lead_there: True if the names in the table are paths of the files, relative to ``folder``. False if the
            pictures are in several folders, so that the table must be rewritten with ``paths``.
        ambiguous: Name that matches several files -> the paths of two of them.
    """

    folder: Path
    paths: Sequence[str | None]
    names_lead_there: bool = True
    ambiguous: dict[str, tuple[str, str]] = field(default_factory=dict)


class PictureSearch:
    """Searches pictures, and folders of pictures, by the names in a table, in a folder and all its subfolders."""

    def __init__(self, root: Path, finder: PictureFileFinder) -> None:
        self.root, self.finder = root, finder
        self._start = root.resolve()
        self._files: dict[str, list[str]] | None = None
        self._stems: dict[str, list[str]] = {}
        self._folders: dict[str, list[str]] = {}

    def share_of_pictures(self, names: Sequence[str]) -> tuple[float, bool]:
        """Return the fraction of the first names that match files; and True if most of these have the file's extension.

        Args:
            names: Distinct cells of a column that are not blank.
        """
        names = names[:_MAX_NAMES_EXAMINED]
        with_extension = 0
        matching = 0
        for name in names:
            last = split_path(name)[-1:] or [""]
            with_extension += fold_name_case(last[0]) in self._index_files()
            matching += self._list_candidates(name) != []
        return matching / max(len(names), 1), 2 * with_extension > matching

    def locate_pictures(self, names: Sequence[str]) -> LocatedPictures:
        """Find the file of each name in the root folder or its subfolders, by the rules in this module's docstring."""
        direct = self.finder.find_files_in_order(str(self.root), names)
        if any(path is not None for path in direct):
            return LocatedPictures(self.root, direct)
        paths = list[str | None]()
        ambiguous = dict[str, tuple[str, str]]()
        starts = set[str]()
        by_name = dict[str, str | None]()
        for name in names:
            if name not in by_name:
                candidates = self._list_candidates(name)
                if len(candidates) > 1:
                    ambiguous[name] = candidates[0], candidates[1]
                by_name[name] = path = candidates[0] if len(candidates) == 1 else None
                if path is not None:
                    starts.add(self._remove_own_path(path, name))
            paths.append(by_name[name])
        if len(starts) == 1:
            folder = Path(starts.pop())
            return LocatedPictures(folder, self.finder.find_files_in_order(str(folder), names), True, ambiguous)
        return LocatedPictures(self.root, paths, False, ambiguous)

    def list_pictures_of_folder(self, name: str) -> list[str]:
        """Return the pictures in the folder that a table cell names, and in its subfolders, relative to the root.

        The result is empty if no folder matches, or several do. Files with an extension that is not of pictures are
        left out.
        """
        self._index_files()
        parts = [fold_name_case(part) for part in split_path(name)]
        folders = self._folders.get(parts[-1], []) if parts else []
        folders = [folder for folder in folders if self._ends_with(folder, parts)]
        if len(folders) != 1:
            return []
        files = self.finder.list_files_recursively(self.root / folders[0])
        paths = [os.path.normpath(f"{folders[0]}/{subfolder}/{file}") for subfolder, file in files]
        return sorted(path for path in paths if drop_picture_extension(path) != path or "." not in Path(path).name)

    def find_folder_of_other_endings(self, names: Sequence[str]) -> Path | None:
        """Return the folder in which files have these names with other extensions; None if there is none."""
        stems = [drop_picture_extension(name) for name in names[:_MAX_NAMES_EXAMINED]]
        located = self.locate_pictures(stems)
        return located.folder if any(located.paths) and located.names_lead_there else None

    def _index_files(self) -> dict[str, list[str]]:
        if self._files is None:
            self._files = defaultdict(list)
            stems, folders = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
            indexed = set[str]()
            for below, name in self.finder.list_files_recursively(self.root):
                path = name if below == "." else f"{below}/{name}"
                self._files[fold_name_case(name)].append(path)
                stems[make_extensionless_name_key(name)].append(path)
                while below not in ("", ".") and below not in indexed:
                    indexed.add(below)
                    folders[fold_name_case(below.rpartition("/")[2])].append(below)
                    below = below.rpartition("/")[0]
            self._stems, self._folders = stems, folders
        return self._files

    def _list_candidates(self, name: str) -> list[str]:
        """Return the paths of the files that a name matches, relative to the root; links to a file are left out."""
        parts = [fold_name_case(part) for part in split_path(name)]
        if not parts:
            return []
        files = self._index_files().get(parts[-1]) or self._stems.get(parts[-1], [])
        fitting = [path for path in files if self._ends_with(path, parts)]
        if len(fitting) > 1:
            real = {os.path.realpath(self.root / path): path for path in reversed(fitting)}
            fitting = sorted(real.values())
        return fitting

    def _ends_with(self, path: str, parts: Sequence[str]) -> bool:
        """Return True if the folders of ``path``, including the folders above the root, end with the folders of a name.

        Args:
            parts: The folders and the file name of the name, in lower case.
        """
        folders = [fold_name_case(part) for part in (*self._start.parts, *path.split("/")[:-1])]
        return len(parts) == 1 or folders[-len(parts) + 1 :] == list(parts[:-1])

    def _remove_own_path(self, path: str, name: str) -> str:
        """Return the folder that, followed by ``name``, gives the path of the file."""
        parts = (self._start / path).parts
        return str(Path(*parts[: len(parts) - len(split_path(name))]))


def split_path(name: str) -> list[str]:
    """Split a path from a table, with slashes or backslashes, into its parts."""
    return [part for part in re.split(r"[/\\]+", name) if part not in ("", ".")]
