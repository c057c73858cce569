"""The privacy ledger of patients: the costs of all noisy replies that were computed with a patient's images.

A privacy budget belongs to the patients, so the ledger lies outside the folders of sites, one for each account of a
machine (or where ``policy.ledger`` says). Folders that read the same patients share it, under any site's name, key
or federation. Each cost is charged to a group of patients, the training and validation patients of a folder at that
time; a patient's total is the sum over the groups that the patient is in (:mod:`polyclinic.client.site.patients`).

A cost is *reserved* in one locked transaction, together with the decision if the budget suffices, before the first
noise is drawn. It is *spent* before the reply leaves. If the process is killed in between, nothing has left: the same
request of the same folder uses the reservation again, and any other request pays anew.

The file is SQLite's (mode 600, in a folder of mode 700). It holds the key of the fingerprints, so that no copy can have
the one without the other, and no patient's name.
"""

import contextlib
import errno
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from polyclinic.client.site.patients import PatientFingerprinter, PatientFingerprints
from polyclinic.client.site.site_file import SiteSettings
from polyclinic.common.data.base.image_set import ImageSet
from polyclinic.common.errors import BadInput
from polyclinic.common.security.identity import read_connection_kit
from polyclinic.common.system.files import PRIVATE, flush_folder, is_disk_full
from polyclinic.strategies.privacy.mechanism import NoisySteps

FILE = "ledger.sqlite"
FORMAT = 1
LOCK_PATIENCE_S = 120.0
"""Longest wait for another folder's process that decides about a cost."""
RESERVED, SPENT = "reserved", "spent"
_TABLES = """
CREATE TABLE about (format INTEGER NOT NULL, key BLOB NOT NULL);
CREATE TABLE groups (
    id INTEGER PRIMARY KEY, hash BLOB NOT NULL UNIQUE, patients INTEGER NOT NULL, fingerprints BLOB NOT NULL
);
CREATE TABLE costs (
    id TEXT PRIMARY KEY, run TEXT NOT NULL, round INTEGER NOT NULL, request TEXT NOT NULL,
    noise_multiplier REAL NOT NULL, sample_rate REAL NOT NULL, count INTEGER NOT NULL,
    patients INTEGER NOT NULL REFERENCES groups, federation TEXT NOT NULL, site TEXT NOT NULL, folder TEXT NOT NULL,
    state TEXT NOT NULL, time TEXT NOT NULL
);
"""


@dataclass(frozen=True)
class PrivacyCostEntry:
    """The privacy cost of one reply, which may have left the site.

    Attributes:
        request: SHA-256 of the request's content.
        count: Number of noisy steps.
        id: Random name of the reply; empty in the files of releases before the ledger of patients.
    """

    run: str
    round: int
    request: str
    noise_multiplier: float
    sample_rate: float
    count: int
    id: str = ""

    @property
    def noisy_steps(self) -> NoisySteps:
        """Return the reply's noisy steps, from which an accountant computes epsilon."""
        return NoisySteps(self.noise_multiplier, self.sample_rate, self.count)


_COST_COLUMNS = ", ".join(column.name for column in fields(PrivacyCostEntry))


def make_cost_id() -> str:
    """Return a new random name of a reply's cost."""
    return secrets.token_hex(16)


@dataclass(frozen=True)
class ChargedCost:
    """A cost in the ledger.

    Attributes:
        group: Number of the group of patients that it was charged to.
        federation, site, folder: The coordinator, the site's name there, and the folder, for people.
    """

    cost: PrivacyCostEntry
    group: int
    federation: str
    site: str
    folder: str
    state: str


@dataclass(frozen=True)
class PatientCosts:
    """The costs that concern some present patients.

    Attributes:
        charged: Each cost that was charged to at least one of the patients, in the order in which they were reserved.
        members: Group of patients -> mask ``(patients,)`` of the present patients that are in it.
        patients: Number of the present patients.
    """

    charged: Sequence[ChargedCost]
    members: Mapping[int, NDArray[np.bool_]]
    patients: int

    def list_costs_of_patients(self) -> list[list[ChargedCost]]:
        """Return the costs of single patients, without lists that are part of another patient's list.

        Patients with equal costs have one list. Of all patients one with the largest total is among them. Without any
        costs there is one empty list.
        """
        groups = sorted({charged.group for charged in self.charged})
        if not groups:
            return [[]]
        table = np.unique(np.stack([self.members[group] for group in groups], axis=1), axis=0)  # (lists, groups)
        sets = [frozenset(np.array(groups)[row].tolist()) for row in table]
        largest = [own for own in sets if not any(own < other for other in sets)]
        return [[charged for charged in self.charged if charged.group in own] for own in largest]

    def select_costs(self, condition: Callable[[ChargedCost], bool]) -> "PatientCosts":
        """Return the costs that meet a condition, for the same patients."""
        return replace(self, charged=[charged for charged in self.charged if condition(charged)])

    def count_charged_patients(self) -> int:
        """Return the number of present patients to whom at least one of the costs was charged."""
        masks = [self.members[group] for group in {charged.group for charged in self.charged}]
        return int(np.any(masks, axis=0).sum()) if masks else 0


class PatientLedger:
    """The ledger of the patients of one site's folder.

    Args:
        folder: Folder of the ledger.
        state: The site's state folder; its identity on the disk tells whose reservations are whose.
        site: The site's name.
        federation: The coordinator's name, for people.
        shared: True if other folders of this account use the same ledger; False if it lies in the site's own folder.
    """

    def __init__(self, folder: Path, state: Path, *, site: str, federation: str, shared: bool = True) -> None:
        self.folder, self.shared = folder, shared
        self._state, self._site, self._federation = state, site, federation
        self._key = b""
        self._present: PatientFingerprints | None = None
        self._content = b""  # the sorted fingerprints of the present patients, as the file has them
        self._members = dict[int, NDArray[np.bool_]]()  # group -> mask of the present patients in it

    @property
    def path(self) -> Path:
        """The ledger's file."""
        return self.folder / FILE

    @property
    def is_writable(self) -> bool:
        """True if this account can write to the ledger's folder, or make it."""
        return _can_write_below(self.folder)

    # ------------------------------------------------------------------ patients

    def identify_patients(self, *parts: ImageSet) -> None:
        """Compute the fingerprints of the folder's patients, once in a process; the ledger's file is made if needed.

        Args:
            parts: The parts of the data whose images a reply depends on.

        Raises:
            LedgerUnusable: If the ledger cannot be opened.
        """
        with self._open(identified=False) as database:
            (key,) = database.execute("SELECT key FROM about").fetchone()
        if key == self._key:
            return
        cache = self._state / "privacy" / "pictures.safetensors"
        self._present = PatientFingerprinter(key, cache).fingerprint_patients(*parts)
        self._content = np.unique(self._present.values).astype("<u8").tobytes()
        self._key, self._members = key, {}

    # ------------------------------------------------------------------ costs

    def reserve_cost(self, cost: PrivacyCostEntry, decide: Callable[[PatientCosts], None]) -> PrivacyCostEntry:
        """Reserve a cost for the present patients, unless ``decide`` raises an error.

        No other process can reserve or spend between the decision and the reservation.

        Args:
            decide: Called with the costs so far, without that of the new reply.

        Returns:
            The reserved cost; an earlier one if a killed process of this folder reserved it for the same request.
        """
        with self._open(write=True) as database:
            row = database.execute(
                f"SELECT {_COST_COLUMNS} FROM costs WHERE request = ? AND folder = ? AND state = ?",
                (cost.request, self._holder, RESERVED),
            ).fetchone()
            if row is not None:
                return PrivacyCostEntry(*row)
            decide(self._list_costs(database))
            self._insert(database, cost, RESERVED)
        return cost

    def release_cost(self, cost: PrivacyCostEntry) -> None:
        """Remove a reservation, because nothing that depends on the images has left or will leave."""
        with self._open(write=True) as database:
            database.execute("DELETE FROM costs WHERE id = ? AND state = ?", (cost.id, RESERVED))

    def spend_cost(self, cost: PrivacyCostEntry) -> None:
        """Mark one cost as spent; see :meth:`spend_costs`."""
        self.spend_costs([cost])

    def spend_costs(self, costs: Sequence[PrivacyCostEntry]) -> None:
        """Mark costs as spent, before the reply leaves; insert those that the ledger does not have.

        A ledger lacks costs of this folder if it was restored from an older copy, or if the folder is older than the
        ledger. They are charged to the present patients.
        """
        with self._open() as database:
            spent = {name for (name,) in database.execute("SELECT id FROM costs WHERE state = ?", (SPENT,))}
        missing = [cost for cost in costs if cost.id not in spent]
        if not missing:
            return
        with self._open(write=True) as database:
            for cost in missing:
                if not database.execute("UPDATE costs SET state = ? WHERE id = ?", (SPENT, cost.id)).rowcount:
                    self._insert(database, cost, SPENT)

    def list_costs(self, run: str = "") -> PatientCosts:
        """Return the costs of the present patients.

        Args:
            run: Leave out this folder's reservations for this run; an empty text leaves out none.
        """
        with self._open() as database:
            costs = self._list_costs(database)
        own = (run, self._holder, RESERVED)
        return costs.select_costs(lambda charged: (charged.cost.run, charged.folder, charged.state) != own)

    @property
    def _holder(self) -> str:
        """Identity of the site's folder, which a copy or a restored folder does not have."""
        status = self._state.stat()
        return f"{self._state.absolute().parent}\0{status.st_dev}:{status.st_ino}"

    def _insert(self, database: sqlite3.Connection, cost: PrivacyCostEntry, state: str) -> None:
        assert self._present is not None, "the transaction checks it"
        digest = blake3(self._content).digest()
        database.execute(
            "INSERT OR IGNORE INTO groups (hash, patients, fingerprints) VALUES (?, ?, ?)",
            (digest, self._present.patients, self._content),
        )
        (group,) = database.execute("SELECT id FROM groups WHERE hash = ?", (digest,)).fetchone()
        now = datetime.now(UTC).isoformat(timespec="seconds")
        row = {
            **asdict(cost),
            "patients": group,
            "federation": self._federation,
            "site": self._site,
            "folder": self._holder,
            "state": state,
            "time": now,
        }
        values = ", ".join(f":{name}" for name in row)
        database.execute(f"INSERT INTO costs ({', '.join(row)}) VALUES ({values})", row)

    def _list_costs(self, database: sqlite3.Connection) -> PatientCosts:
        assert self._present is not None, "the transaction checks it"
        for (group,) in database.execute("SELECT id FROM groups").fetchall():
            if group not in self._members:
                (content,) = database.execute("SELECT fingerprints FROM groups WHERE id = ?", (group,)).fetchone()
                matches = np.isin(self._present.values, np.frombuffer(content, "<u8"))
                members = np.zeros(self._present.patients, np.bool_)
                members[self._present.owners[matches]] = True
                self._members[group] = members
        columns = f"{_COST_COLUMNS}, patients, federation, site, folder, state"
        rows = database.execute(f"SELECT {columns} FROM costs ORDER BY rowid").fetchall()
        charged = [ChargedCost(PrivacyCostEntry(*row[:-5]), *row[-5:]) for row in rows]
        costs = PatientCosts(charged, dict(self._members), self._present.patients)
        return costs.select_costs(lambda charged: bool(self._members[charged.group].any()))

    # ------------------------------------------------------------------ the file

    @contextlib.contextmanager
    def _open(self, *, write: bool = False, identified: bool = True) -> Iterator[sqlite3.Connection]:
        """Open the ledger for one transaction, which is undone if the ``with`` block raises an error.

        Args:
            write: Lock the ledger against other processes.
            identified: Check that it is still the ledger by whose key the present patients were identified.

        Raises:
            LedgerUnusable: If the ledger cannot be opened, read or written.
            OSError: If the disk is full.
        """
        try:
            self._make_file()
            with contextlib.closing(sqlite3.connect(self.path, LOCK_PATIENCE_S, isolation_level=None)) as database:
                database.execute("PRAGMA synchronous = FULL")
                database.execute("BEGIN IMMEDIATE" if write or not self._has_tables(database) else "BEGIN")
                try:
                    if not self._has_tables(database):
                        self._make_tables(database)
                    self._check_identity(database, identified=identified)
                    yield database
                except BaseException:
                    database.execute("ROLLBACK")
                    raise
                database.execute("COMMIT")
        except sqlite3.Error as error:
            if error.sqlite_errorname == "SQLITE_FULL":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path)) from None
            raise LedgerUnusable(f"{self.path} cannot be used: {error}. {_REMEDY}") from error

    def _make_file(self) -> None:
        """Make the folder and an empty file, which no other account may read; both stay as they are if they exist."""
        try:
            self.folder.mkdir(PRIVATE, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
                flush_folder(self.folder)
        except OSError as error:
            if is_disk_full(error):
                raise
            raise LedgerUnusable(f"{self.path} cannot be made: {error.strerror}. {_REMEDY}") from error

    def _has_tables(self, database: sqlite3.Connection) -> bool:
        return database.execute("SELECT 1 FROM sqlite_master WHERE name = 'about'").fetchone() is not None

    def _make_tables(self, database: sqlite3.Connection) -> None:
        for statement in _TABLES.split(";"):
            database.execute(statement)
        database.execute("INSERT INTO about VALUES (?, ?)", (FORMAT, secrets.token_bytes(32)))

    def _check_identity(self, database: sqlite3.Connection, *, identified: bool) -> None:
        form, key = database.execute("SELECT format, key FROM about").fetchone()
        if form != FORMAT:
            raise LedgerUnusable(f"{self.path} has format {form}; this release reads {FORMAT}: install a newer one.")
        if identified and key != self._key:
            raise LedgerUnusable(f"{self.path} is another ledger than a moment ago: was it put back from a backup?")


class LedgerUnusable(Exception):
    """Raised if a ledger cannot be opened, read or written; the message is for the hospital's staff only."""


_REMEDY = (
    "Let this account write to its folder, or name another one: policy.ledger in site.toml. If the file is damaged, "
    "put its backup back; each folder's own costs are added to it again."
)


# ---------------------------------------------------------------------- where a site's ledger lies


def open_site_ledger(settings: SiteSettings) -> PatientLedger:
    """Return the ledger of a site's patients, which nothing is written to yet.

    It lies where ``policy.ledger`` says; else in ``$XDG_STATE_HOME/polyclinic/ledger`` of this account
    (``~/.local/state``); if this account has no such place to write, in the site's own state folder.
    """
    place = settings.file.policy.ledger
    own = settings.state_folder / "privacy"
    folder = settings.folder / place if place else find_account_ledger_folder() or own
    federation = ""
    with contextlib.suppress(BadInput):
        federation = read_connection_kit(settings.kit_path).coordinator
    inside = folder.resolve().is_relative_to(settings.folder.resolve())
    return PatientLedger(
        folder.resolve(), settings.state_folder, site=settings.file.name, federation=federation, shared=not inside
    )


def find_account_ledger_folder() -> Path | None:
    """Return the folder of this account's ledger, which need not exist; None if the account cannot write there."""
    home = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not home.is_absolute():  # as the XDG specification asks: it would be another ledger in each working folder
        try:
            home = Path.home() / ".local" / "state"
        except RuntimeError:  # an account without a home
            return None
    folder = home / "polyclinic" / "ledger"
    return folder if _can_write_below(folder) else None


def _can_write_below(folder: Path) -> bool:
    """Return True if this account can write to a folder, or make it."""
    present = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return present.is_dir() and os.access(present, os.W_OK | os.X_OK)
