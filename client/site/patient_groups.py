"""Files with the groups of patients to which the privacy costs of a site's folder were charged.

If the patients' ledger is lost, restored from an older copy or moved, it receives the costs of each folder again. They
belong to the patients of that time, whom the folder's table may no longer contain. So the folder stores each group of
patients, with the key of its fingerprints. A reader of such a file who has a patient's name or picture can find out if
the patient was trained on. The file therefore has mode 600, like the images' key and the stored states; it contains no
name.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from blake3 import blake3

from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.plain_names import HashName, join_plain_name

LEDGER_KEY_BYTES = 32
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
        """Hash of the content, which identifies the group in the list of costs."""
        return blake3(self.content).hexdigest()


@dataclass(frozen=True)
class ChargedGroupFiles:
    """The folder with a file for each charged group of a site; the file's name is the group's name.

    Attributes:
        folder: The folder, which need not exist.
    """

    folder: Path

    def store_group(self, group: ChargedGroup) -> None:
        """Write a group to disk, unless it is stored already."""
        if self.read_group(group.name) is None:
            write_atomically(join_plain_name(self.folder, HashName(group.name)), group.content, private=True)

    def read_group(self, name: str) -> ChargedGroup | None:
        """Return the group of this name; None if the folder lacks it, or its file is damaged."""
        try:
            content = join_plain_name(self.folder, HashName(name)).read_bytes()
        except (OSError, ValueError):
            return None
        counted = LEDGER_KEY_BYTES + _COUNT_BYTES
        patients = int.from_bytes(content[LEDGER_KEY_BYTES:counted])
        group = ChargedGroup(content[:LEDGER_KEY_BYTES], patients, content[counted:])
        return group if group.name == name else None

    def find_latest_key(self) -> bytes:
        """Return the key of the ledger that charged this folder's last cost; empty if there is none."""
        if not self.folder.is_dir():
            return b""
        for path in sorted(self.folder.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True):
            if group := self.read_group(path.name):
                return group.key
        return b""
