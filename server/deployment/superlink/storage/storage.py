"""All that the SuperLink keeps, opened together."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from server.deployment.superlink.objects.files import ObjectFiles
from server.deployment.superlink.storage.database import Database
from server.deployment.superlink.storage.messages import Messages, StoredMessage
from server.deployment.superlink.storage.runs import LedRuns
from server.deployment.superlink.storage.sites import Sites


@dataclass(frozen=True)
class Storage:
    """Sites, runs and messages on one database.

    Attributes:
        files: Where the contents of messages lie.
    """

    database: Database
    sites: Sites
    runs: LedRuns
    messages: Messages
    files: ObjectFiles

    @classmethod
    def open(
        cls,
        path: Path,
        files: ObjectFiles,
        clock: Callable[[], float],
        steady: Callable[[], float] = time.monotonic,
    ) -> "Storage":
        """Open a database, or make a new one; remove files that no message needs or that a crash damaged.

        Args:
            clock: Unix time that setting the machine's clock does not move.
            steady: Seconds, for what lasts only as long as this process.
        """
        database = Database(path)
        sites, runs = Sites(database, clock), LedRuns(database, steady)
        return cls(database, sites, runs, Messages(database, sites, runs, files, clock), files)

    def close(self) -> None:
        """Close the database."""
        self.database.close()

    def begin_run(self) -> tuple[int, list[StoredMessage]]:
        """Begin a run; one that was left by a process that was killed is over with it.

        Returns:
            Its number, and the replies to earlier runs that nobody has let go of: they were taken, and no run has
            noted them.
        """
        with self.database.lock:
            for left in self.runs.open():
                self.messages.end(left)
            return self.runs.begin(), self.messages.not_noted()
