"""The groups of patients that the costs of a site's folder were charged to, beside these costs in the folder.

A ledger that was lost, put back from an older copy, or named anew gets the costs of each folder again. They belong to
the patients of that time, whom the folder's table may no longer name. So each group is kept with the key by which its
fingerprints were computed. A file tells who has a name or a picture whether it was trained on, as the ledger does; it
lies beside the images' key and the stored states, is of mode 600, and holds no name.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from blake3 import blake3

from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.plain_names import HashName, join_plain_name

KEY_BYTES = 32
_COUNT_BYTES = 8


@dataclass(frozen=True)
class ChargedGroup:
    """The patients that one cost is charged to, as keyed fingerprints.

    Attributes:
        key: The secret of the ledger by which the fingerprints were computed.
        patients: Number of the patients.
        fingerprints: The sorted fingerprints, as ``<u8``.
    """

    key: bytes
    patients: int
    fingerprints: bytes

    @property
    def content(self) -> bytes:
        """The content of the group's file."""
        return self.key + self.patients.to_bytes(_COUNT_BYTES) + self.fingerprints

    @cached_property
    def name(self) -> str:
        """Hash of the content, by which costs name the group."""
        return blake3(self.content).hexdigest()


@dataclass(frozen=True)
class ChargedGroupFiles:
    """The files of a site's charged groups; each has the group's name.

    Attributes:
        folder: Their folder, which need not exist.
    """

    folder: Path

    def store_group(self, group: ChargedGroup) -> None:
        """Write a group to the disk, if it is not there."""
        if self.read_group(group.name) is None:
            write_atomically(join_plain_name(self.folder, HashName(group.name)), group.content, private=True)

    def read_group(self, name: str) -> ChargedGroup | None:
        """Return the group of this name; None if the folder lacks it, or its file is damaged."""
        try:
            content = join_plain_name(self.folder, HashName(name)).read_bytes()
        except (OSError, ValueError):
            return None
        counted = KEY_BYTES + _COUNT_BYTES
        patients = int.from_bytes(content[KEY_BYTES:counted])
        group = ChargedGroup(content[:KEY_BYTES], patients, content[counted:])
        return group if group.name == name else None

    def find_latest_key(self) -> bytes:
        """Return the key of the ledger that this folder's costs were charged in last; empty if there is none."""
        if not self.folder.is_dir():
            return b""
        for path in sorted(self.folder.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True):
            if group := self.read_group(path.name):
                return group.key
        return b""
