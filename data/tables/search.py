"""Find the pictures that a table names in a folder and in all folders below it.

Names that lead to files from the folder itself are taken as they are. If no name does, each is searched in all folders
below: a name with a path, such as ``train/p1/001.png``, by the end of the file's path. A name that fits several files
is ambiguous, because a table may name pictures, and their masks have the same names.
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

_FEW_NAMES = 200
"""Number of names by which a column is recognised as one of pictures."""


@dataclass(frozen=True)
class LocatedPictures:
    """Where the pictures of a table are.

    Attributes:
        folder: The folder from which ``paths`` start.
        paths: For each name, the path of its file from ``folder``; None if there is none, or there are several.
        names_lead_there: True if the names themselves lead from ``folder`` to the files; False if pictures lie in
            several folders, so that a table needs ``paths`` in place of its names.
        ambiguous: Names that fit several files, with the paths of two of them.
    """

    folder: Path
    paths: Sequence[str | None]
    names_lead_there: bool = True
    ambiguous: dict[str, tuple[str, str]] = field(default_factory=dict)


class PictureSearch:
    """Searches pictures, and folders of pictures, by the names in a table, below one folder."""

    def __init__(self, root: Path, finder: PictureFileFinder) -> None:
        self.root, self.finder = root, finder
        self._start = root.resolve()
        self._files: dict[str, list[str]] | None = None
        self._stems: dict[str, list[str]] = {}
        self._folders: dict[str, list[str]] = {}

    def share_of_pictures(self, names: Sequence[str]) -> tuple[float, bool]:
        """Return the fraction of the first names that are files, and whether they are whole names with their endings.

        Args:
            names: Distinct cells of a column that are not blank.
        """
        names = names[:_FEW_NAMES]
        exact = near = 0
        for name in names:
            last = split_path(name)[-1:] or [""]
            exact += fold_name_case(last[0]) in self._index_files()
            near += self._list_candidates(name) != []
        return near / max(len(names), 1), 2 * exact > near

    def locate_pictures(self, names: Sequence[str]) -> LocatedPictures:
        """Find the file of each name below the root, by the rules at the top of this module."""
        direct = self.finder.find_files_in_order(str(self.root), names)
        if any(path is not None for path in direct):
            return LocatedPictures(self.root, direct)
        found, ambiguous = list[str | None](), dict[str, tuple[str, str]]()
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
            found.append(by_name[name])
        if len(starts) == 1:
            folder = Path(starts.pop())
            return LocatedPictures(folder, self.finder.find_files_in_order(str(folder), names), True, ambiguous)
        return LocatedPictures(self.root, found, False, ambiguous)

    def list_pictures_of_folder(self, name: str) -> list[str]:
        """Return the pictures in and below the folder that a table's cell names, as paths relative to the root.

        The result is empty if no folder fits, or several do. Files with another ending than a picture's are left out.
        """
        self._index_files()
        parts = [fold_name_case(part) for part in split_path(name)]
        places = self._folders.get(parts[-1], []) if parts else []
        places = [place for place in places if self._ends_with(place, parts)]
        if len(places) != 1:
            return []
        paths = [f"{below}/{file}" for below, file in self.finder.list_files_recursively(self.root / places[0])]
        paths = [os.path.normpath(f"{places[0]}/{path}") for path in paths]
        return sorted(path for path in paths if drop_picture_extension(path) != path or "." not in Path(path).name)

    def find_folder_of_other_endings(self, names: Sequence[str]) -> Path | None:
        """Return the folder in which files have these names with other endings; None if there is none."""
        stems = [drop_picture_extension(name) for name in names[:_FEW_NAMES]]
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
        """Return the files that a name fits, as paths from the root, without links to one another."""
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
        """Return True if the folders of a path, with those above the root, end with those of a name."""
        folders = [fold_name_case(part) for part in (*self._start.parts, *path.split("/")[:-1])]
        return len(parts) == 1 or folders[-len(parts) + 1 :] == list(parts[:-1])

    def _remove_own_path(self, path: str, name: str) -> str:
        """Return the folder from which a name leads to the file at ``path``."""
        whole = (self._start / path).parts
        return str(Path(*whole[: len(whole) - len(split_path(name))]))


def split_path(name: str) -> list[str]:
    """Return the parts of a path in a table, which may come from Windows."""
    return [part for part in re.split(r"[/\\]+", name) if part not in ("", ".")]
