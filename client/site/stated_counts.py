"""The numbers of training images that a site stated at the roll calls of its runs."""

from pathlib import Path

from polyclinic.client.site.run_entries import RunEntryFolder

STATED_COUNTS_FOLDER = "stated-images"
"""Folder in the site's state folder."""


class StatedImageCounts:
    """The number of training images that the site stated at the roll call of each run.

    The coordinator accepts only replies with the number of the roll call, so that a site cannot change its weight
    during a run. If a patient opts out during a run, the images leave training, and the stated number stays until the
    next roll call. That also hides from the coordinator how many images the patient had.

    Args:
        state: The folder ``state`` of the site.
        durable: Flush files to disk.
    """

    def __init__(self, state: Path, *, durable: bool = True) -> None:
        self._entries = RunEntryFolder(
            state / STATED_COUNTS_FOLDER, state / STATED_COUNTS_FOLDER / "earlier", durable=durable
        )

    def write_count(self, run: str, images: int) -> None:
        """Store the number of training images of a run's roll call."""
        self._entries.write_entry(run, {"images": images})

    def read_count(self, run: str, present: int) -> int:
        """Return the number that the site stated at a run's roll call; ``present`` if none is stored."""
        entry = self._entries.read_entry(run) or {}
        stated = entry.get("images")
        return stated if isinstance(stated, int) else present
