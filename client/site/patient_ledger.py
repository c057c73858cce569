"""The privacy ledger of patients: the costs of all noisy replies that were computed with a patient's images.

A privacy budget belongs to the patients, so the ledger is outside the folders of sites: one for each account of a
machine, or the folder in ``policy.ledger``. Folders that read the same patients share it, under any site's name, key
or federation. Each cost is charged to a group of patients, the training and validation patients of a folder at that
time. A patient's total is the sum over the groups that contain the patient (:mod:`polyclinic.client.site.patients`).

A cost is *reserved* in one locked transaction, together with the decision if the budget suffices, before the first
noise is drawn. It is *spent* before the reply leaves. If the process is killed in between, nothing has left. The same
request to the same folder then uses the reservation again, and any other request costs again.

The file is an SQLite database (mode 600, in a folder of mode 700). It contains the key of the fingerprints, so that a
copy always has both, and no patient's name. Each site's folder also stores the groups of its own costs
(:mod:`polyclinic.client.site.patient_groups`). A new ledger uses the key of these groups; a group with another ledger's
key is stored with that key.
"""

import contextlib
import errno
import os
import secrets
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyclinic.client.site.patient_groups import LEDGER_KEY_BYTES, ChargedGroup, ChargedGroupFiles
from polyclinic.client.site.patients import PatientFingerprinter, PatientFingerprints
from polyclinic.client.site.site_file import SiteSettings
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.patients.opt_out import SITE_FILE
from polyclinic.common.security.identity import read_connection_kit
from polyclinic.common.system.files import OWNER_ONLY_MODE, flush_folder, is_disk_full
from polyclinic.data.base.image_set import ImageSet
from polyclinic.strategies.privacy.mechanism import NoisySteps

LEDGER_FILE = "ledger.sqlite"
FORMAT_VERSION = 1
LOCK_TIMEOUT_S = 120.0
"""Maximum wait for another folder's process that has locked the ledger."""
RESERVED_STATE = "reserved"
SPENT_STATE = "spent"
_PAGE_BYTES = 4096
_TABLES = """
CREATE TABLE about (format INTEGER NOT NULL, key BLOB NOT NULL);
CREATE TABLE groups (
    name TEXT PRIMARY KEY, key BLOB NOT NULL, patients INTEGER NOT NULL, fingerprints BLOB NOT NULL
);
CREATE TABLE costs (
    id TEXT PRIMARY KEY, run TEXT NOT NULL, round INTEGER NOT NULL, request TEXT NOT NULL,
    noise_multiplier REAL NOT NULL, sample_rate REAL NOT NULL, count INTEGER NOT NULL,
    patients TEXT NOT NULL REFERENCES groups, federation TEXT NOT NULL, site TEXT NOT NULL, folder TEXT NOT NULL,
    state TEXT NOT NULL, time TEXT NOT NULL
);
"""


@dataclass(frozen=True)
class PrivacyCostEntry:
    """The privacy cost of one reply, which may have left the site.

    Attributes:
        request: SHA-256 of the request's content.
        count: Number of noisy steps.
        id: Random name of the reply; empty in files of releases that had no ledger of patients.
        patients: Name of the charged group of patients (:class:`ChargedGroup`); empty in files of these releases.
    """

    run: str
    round: int
    request: str
    noise_multiplier: float
    sample_rate: float
    count: int
    id: str = ""
    patients: str = ""

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
        federation: Name of the coordinator.
        site: The site's name in that federation.
        folder: Identity of the site's folder.
        state: ``reserved`` or ``spent``.
    """

    cost: PrivacyCostEntry
    federation: str
    site: str
    folder: str
    state: str

    @property
    def group(self) -> str:
        """Name of the charged group of patients."""
        return self.cost.patients


@dataclass(frozen=True)
class PatientCosts:
    """The privacy costs of the present patients of a folder.

    Attributes:
        charged: Each cost that was charged to at least one of the patients, in the order in which they were reserved.
        members: Group of patients -> mask ``(patients,)`` of the present patients in the group.
        by_name: Group of patients -> mask ``(patients,)`` of the members who were recognised by their name; the other
            members were recognised by a picture.
        patients: Number of the present patients.
    """

    charged: Sequence[ChargedCost]
    members: Mapping[str, NDArray[np.bool_]]
    by_name: Mapping[str, NDArray[np.bool_]]
    patients: int

    def list_costs_of_patients(self) -> list[list[ChargedCost]]:
        """Return the costs of single patients, without lists that are contained in another patient's list.

        Patients with equal costs share one list. A patient with the largest total always has a list. Without any costs
        the result is one empty list.
        """
        groups = sorted({charged.group for charged in self.charged})
        if not groups:
            return [[]]
        membership = np.stack([self.members[group] for group in groups], axis=1)  # (patients, groups)
        distinct = np.unique(membership, axis=0)  # (lists, groups)
        group_sets = [frozenset(np.array(groups)[row].tolist()) for row in distinct]
        largest_sets = [names for names in group_sets if not any(names < others for others in group_sets)]
        return [[charged for charged in self.charged if charged.group in names] for names in largest_sets]

    def select_costs(self, condition: Callable[[ChargedCost], bool]) -> "PatientCosts":
        """Return the costs that meet a condition, for the same patients."""
        return replace(self, charged=[charged for charged in self.charged if condition(charged)])

    def mark_charged_patients(self) -> NDArray[np.bool_]:
        """Return a mask ``(patients,)`` of the present patients to whom at least one of the costs was charged."""
        return self._mark_patients_in(self.members)

    def mark_patients_known_by_picture(self) -> NDArray[np.bool_]:
        """Return a mask ``(patients,)`` of charged patients who were recognised by a picture, not by their name."""
        return self.mark_charged_patients() & ~self._mark_patients_in(self.by_name)

    def _mark_patients_in(self, masks: Mapping[str, NDArray[np.bool_]]) -> NDArray[np.bool_]:
        marked = np.zeros(self.patients, np.bool_)
        for group in {charged.group for charged in self.charged}:
            marked |= masks[group]
        return marked


class PatientLedger:
    """The ledger of the patients of one site's folder.

    Args:
        folder: Folder of the ledger.
        state: The site's state folder; its identity on the disk marks the site's reservations.
        site: The site's name.
        federation: The coordinator's name, for people.
        shared: True if other folders of this account use the same ledger; False if it is in the site's own folder.
        named: True if ``policy.ledger`` names the folder.
    """

    def __init__(
        self, folder: Path, state: Path, *, site: str, federation: str, shared: bool = True, named: bool = False
    ) -> None:
        self.folder = folder
        self.shared = shared
        self.named = named
        self._state = state
        self._site = site
        self._federation = federation
        self._files = ChargedGroupFiles(state / "privacy" / "patients")
        self._parts: Sequence[ImageSet] = ()
        self._key = b""
        self._present = dict[bytes, PatientFingerprints]()  # key of a ledger -> the present patients' fingerprints
        self._group: ChargedGroup | None = None  # the present patients
        self._members = dict[str, NDArray[np.bool_]]()  # group -> mask of the present patients that are in it
        self._by_name = dict[str, NDArray[np.bool_]]()  # group -> mask of those whose name is in it, not only a picture

    @property
    def path(self) -> Path:
        return self.folder / LEDGER_FILE

    @property
    def is_writable(self) -> bool:
        """True if this account can write to the ledger's folder, or can make the folder."""
        return _can_write_below(self.folder)

    # ------------------------------------------------------------------ patients

    def identify_patients(self, *parts: ImageSet) -> None:
        """Compute the fingerprints of the folder's patients, once in a process, and make the ledger's file if needed.

        Args:
            parts: The parts of the data on which a reply depends.

        Raises:
            LedgerUnusable: If the ledger cannot be opened.
        """
        with self._open(identified=False) as database:
            (key,) = database.execute("SELECT key FROM about").fetchone()
            keys_of_groups = [group_key for (group_key,) in database.execute("SELECT DISTINCT key FROM groups")]
        if key != self._key:
            self._parts = parts
            self._key = key
            self._present = {}
            self._members = {}
            self._by_name = {}
            present = self._get_fingerprints(key)
            self._group = ChargedGroup(key, present.patients, np.unique(present.values).astype("<u8").tobytes())
        for group_key in keys_of_groups:
            # Computed now and cached, because it may take seconds, and the ledger is not locked here.
            self._get_fingerprints(group_key)

    def _get_fingerprints(self, key: bytes) -> PatientFingerprints:
        """Return the present patients' fingerprints with this ledger's key, or with the key of some group."""
        if key not in self._present:
            fingerprinter = PatientFingerprinter(key, self._state / "privacy" / "pictures.safetensors")
            if key != self._key:
                fingerprinter = replace(fingerprinter, cache=fingerprinter.cache_of_another_ledger)
            self._present[key] = fingerprinter.fingerprint_patients(*self._parts)
        return self._present[key]

    # ------------------------------------------------------------------ costs

    def reserve_cost(self, cost: PrivacyCostEntry, decide: Callable[[PatientCosts], None]) -> PrivacyCostEntry:
        """Reserve a cost for the present patients, unless ``decide`` raises an error.

        No other process can reserve or spend between the decision and the reservation.

        Args:
            decide: Called with the costs so far, without that of the new reply. It is called twice. The first call is
                without a lock, because computing an epsilon may take seconds. The second call is under the lock; the
                costs differ only if another folder reserved one in between. So ``decide`` should cache its results.

        Returns:
            The reserved cost; an earlier one if a killed process of this folder reserved it for the same request, the
            same patients and the same noise.
        """
        cost = replace(cost, patients=self._present_group.name)
        self._files.store_group(self._present_group)
        with self._open() as database:
            reserved = self._find_reservation(database, cost)
            costs = self._list_costs(database)
        if reserved is not None:
            return reserved
        decide(costs)
        with self._open(write=True) as database:
            reserved = self._find_reservation(database, cost)
            if reserved is not None:
                return reserved
            decide(self._list_costs(database))
            self._insert(database, cost, RESERVED_STATE, self._present_group)
        return cost

    def _find_reservation(self, database: sqlite3.Connection, cost: PrivacyCostEntry) -> PrivacyCostEntry | None:
        """Return the cost that a killed process of this folder reserved for the same request; None if there is none."""
        expected_values = {name: value for name, value in asdict(cost).items() if name not in ("run", "round", "id")}
        expected_values |= {"folder": self._holder, "state": RESERVED_STATE}
        conditions = " AND ".join(f"{name} = :{name}" for name in expected_values)
        row = database.execute(f"SELECT {_COST_COLUMNS} FROM costs WHERE {conditions}", expected_values).fetchone()
        return None if row is None else PrivacyCostEntry(*row)

    def release_cost(self, cost: PrivacyCostEntry) -> None:
        """Remove a reservation, because nothing that depends on the images has left or will leave."""
        with self._open(write=True) as database:
            database.execute("DELETE FROM costs WHERE id = ? AND state = ?", (cost.id, RESERVED_STATE))

    def spend_cost(self, cost: PrivacyCostEntry) -> None:
        """Mark one cost as spent, like :meth:`spend_costs`."""
        self.spend_costs([cost])

    def spend_costs(self, costs: Sequence[PrivacyCostEntry]) -> None:
        """Mark costs as spent, before the reply leaves; insert costs that the ledger lacks.

        The ledger lacks a cost of this folder if the cost was reserved in another ledger, or if the ledger was restored
        from an older copy. Such a cost is charged to the patients that the folder had when it replied. Old releases did
        not store these patients; then the present patients are charged.
        """
        with self._open() as database:
            spent = {name for (name,) in database.execute("SELECT id FROM costs WHERE state = ?", (SPENT_STATE,))}
        missing = [cost for cost in costs if cost.id not in spent]
        if not missing:
            return
        groups = {name: self._files.read_group(name) for name in {cost.patients for cost in missing}}
        with self._open(write=True) as database:
            for cost in missing:
                if not database.execute("UPDATE costs SET state = ? WHERE id = ?", (SPENT_STATE, cost.id)).rowcount:
                    self._insert(database, cost, SPENT_STATE, groups[cost.patients] or self._present_group)
        for group in filter(None, groups.values()):
            self._get_fingerprints(group.key)

    def list_costs(self, run: str = "", steps: NoisySteps | None = None) -> PatientCosts:
        """Return the costs of the present patients.

        Args:
            run: Leave out this folder's reservations for this run with the noisy steps ``steps``, because the repeated
                request uses them again. An empty text leaves out none.
            steps: Noisy steps of the repeated request.
        """
        with self._open() as database:
            costs = self._list_costs(database)
        reservation_of_request = (run, self._holder, RESERVED_STATE, self._present_group.name, steps)

        def is_used_again(charged: ChargedCost) -> bool:
            cost = charged.cost
            reservation = (cost.run, charged.folder, charged.state, charged.group, cost.noisy_steps)
            return reservation == reservation_of_request

        return costs.select_costs(lambda charged: not is_used_again(charged))

    @property
    def _present_group(self) -> ChargedGroup:
        assert self._group is not None, "the patients are identified before"
        return self._group

    @property
    def _holder(self) -> str:
        """Identity of the site's folder on this disk; a copy or a restored folder has another one."""
        status = self._state.stat()
        return f"{self._state.absolute().parent}\0{status.st_dev}:{status.st_ino}"

    def _insert(self, database: sqlite3.Connection, cost: PrivacyCostEntry, state: str, group: ChargedGroup) -> None:
        database.execute(
            "INSERT OR IGNORE INTO groups (name, key, patients, fingerprints) VALUES (?, ?, ?, ?)",
            (group.name, group.key, group.patients, group.fingerprints),
        )
        now = datetime.now(UTC).isoformat(timespec="seconds")
        row = {
            **asdict(cost),
            "patients": group.name,
            "federation": self._federation,
            "site": self._site,
            "folder": self._holder,
            "state": state,
            "time": now,
        }
        values = ", ".join(f":{name}" for name in row)
        database.execute(f"INSERT INTO costs ({', '.join(row)}) VALUES ({values})", row)

    def _list_costs(self, database: sqlite3.Connection) -> PatientCosts:
        for (group,) in database.execute("SELECT name FROM groups").fetchall():
            if group in self._members:
                continue
            query = "SELECT key, fingerprints FROM groups WHERE name = ?"
            key, content = database.execute(query, (group,)).fetchone()
            in_group, in_group_by_name = self._get_fingerprints(key).match_fingerprints(np.frombuffer(content, "<u8"))
            self._members[group] = in_group
            self._by_name[group] = in_group_by_name
        columns = f"{_COST_COLUMNS}, federation, site, folder, state"
        rows = database.execute(f"SELECT {columns} FROM costs ORDER BY rowid").fetchall()
        charged = [ChargedCost(PrivacyCostEntry(*row[:-4]), *row[-4:]) for row in rows]
        costs = PatientCosts(charged, dict(self._members), dict(self._by_name), self._present_group.patients)
        return costs.select_costs(lambda charged: bool(self._members[charged.group].any()))

    # ------------------------------------------------------------------ the file

    @contextlib.contextmanager
    def _open(self, *, write: bool = False, identified: bool = True) -> Iterator[sqlite3.Connection]:
        """Open the ledger for one transaction, which is undone if the ``with`` block raises an error.

        Args:
            write: Lock the ledger against other processes.
            identified: Check that the ledger still has the key with which the present patients were identified.

        Raises:
            LedgerUnusable: If the ledger cannot be opened, read or written.
            OSError: If the disk is full.
        """
        try:
            self._make_file()
            with contextlib.closing(sqlite3.connect(self.path, LOCK_TIMEOUT_S, isolation_level=None)) as database:
                database.execute("PRAGMA synchronous = FULL")
                database.execute("BEGIN IMMEDIATE" if write or not self._has_tables(database) else "BEGIN")
                try:
                    if not self._has_tables(database):
                        self._make_tables(database)
                    self._check_identity(database, identified=identified)
                    yield database
                except BaseException:
                    if database.in_transaction:  # a full disk has ended it
                        database.execute("ROLLBACK")
                    raise
                database.execute("COMMIT")
        except sqlite3.Error as error:
            self._raise_if_disk_full(error)
            raise LedgerUnusable(f"{self.path} cannot be used: {error}. {self._remedy}") from error

    def _raise_if_disk_full(self, error: sqlite3.Error) -> None:
        """Raise an ``OSError`` if SQLite failed because the disk is full.

        SQLite reports a used-up quota or a limit on the file's size as a disk error, so this writes a page as a test.
        """
        name = getattr(error, "sqlite_errorname", "")
        if name == "SQLITE_FULL":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path)) from None
        if not name.startswith("SQLITE_IOERR"):
            return
        try:
            with tempfile.TemporaryFile(dir=self.folder, buffering=0) as file:
                file.seek(self.path.stat().st_size)
                file.write(bytes(_PAGE_BYTES))
        except OSError as failed:
            if is_disk_full(failed):
                raise OSError(failed.errno, failed.strerror, str(self.path)) from None

    @property
    def _remedy(self) -> str:
        other = "change policy.ledger in site.toml" if self.named else 'set policy.ledger = "FOLDER" in site.toml'
        return (
            f"Let this account write to its folder, or {other} to another folder. If the file is damaged, put its "
            "backup back; each folder's own costs are added to it again."
        )

    def _make_file(self) -> None:
        """Make the folder and an empty file that only this account can read; existing ones are not changed."""
        try:
            self.folder.mkdir(OWNER_ONLY_MODE, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
                flush_folder(self.folder)
        except OSError as error:
            if is_disk_full(error):
                raise
            raise LedgerUnusable(f"{self.path} cannot be made: {error.strerror}. {self._remedy}") from error

    def _has_tables(self, database: sqlite3.Connection) -> bool:
        return database.execute("SELECT 1 FROM sqlite_master WHERE name = 'about'").fetchone() is not None

    def _make_tables(self, database: sqlite3.Connection) -> None:
        for statement in _TABLES.split(";"):
            database.execute(statement)
        # A lost ledger gets its key back with the costs of its folders.
        key = self._files.find_latest_key() or secrets.token_bytes(LEDGER_KEY_BYTES)
        database.execute("INSERT INTO about VALUES (?, ?)", (FORMAT_VERSION, key))

    def _check_identity(self, database: sqlite3.Connection, *, identified: bool) -> None:
        version, key = database.execute("SELECT format, key FROM about").fetchone()
        if version != FORMAT_VERSION:
            raise LedgerUnusable(
                f"{self.path} has format {version}; this release reads {FORMAT_VERSION}: install a newer one."
            )
        if identified and key != self._key:
            raise LedgerUnusable(f"{self.path} is another ledger than a moment ago: was it put back from a backup?")


class LedgerUnusable(Exception):
    """Raised if a ledger cannot be opened, read or written; the message is for the hospital's staff only."""


# ---------------------------------------------------------------------- the place of a site's ledger


def open_site_ledger(settings: SiteSettings) -> PatientLedger:
    """Return the ledger of a site's patients; its file is made at the first entry.

    Its folder is ``policy.ledger``; without that key, ``$XDG_STATE_HOME/polyclinic/ledger`` of this account (by default
    in ``~/.local/state``); if the account cannot write there, a folder in the site's state folder.

    Raises:
        BadInput: If ``policy.ledger`` begins with the home of an account that has none.
    """
    ledger_path = settings.file.policy.ledger
    if ledger_path:
        folder = settings.folder / _expand_home(ledger_path)
    else:
        folder = find_account_ledger_folder() or settings.state_folder / "privacy"
    federation = ""
    with contextlib.suppress(BadInput):
        federation = read_connection_kit(settings.kit_path).coordinator
    is_inside_site_folder = folder.resolve().is_relative_to(settings.folder.resolve())
    return PatientLedger(
        folder.resolve(),
        settings.state_folder,
        site=settings.file.name,
        federation=federation,
        shared=not is_inside_site_folder,
        named=bool(ledger_path),
    )


def _expand_home(ledger_path: str) -> Path:
    """Return the path in ``policy.ledger``, with the home folder in place of ``~``."""
    try:
        return Path(ledger_path).expanduser()
    except RuntimeError:
        problem = f'is "{ledger_path}", but this account has no home that ~ could stand for.'
        raise BadInput([Fault(f"{SITE_FILE}: policy.ledger", problem, "Write the whole path.")]) from None


def find_account_ledger_folder() -> Path | None:
    """Return the folder of this account's ledger, which need not exist; None if the account cannot write there."""
    home = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not home.is_absolute():  # the XDG specification ignores relative paths
        try:
            home = Path.home() / ".local" / "state"
        except RuntimeError:  # an account without a home
            return None
        if not home.is_absolute():  # an empty HOME
            return None
    folder = home / "polyclinic" / "ledger"
    return folder if _can_write_below(folder) else None


def _can_write_below(folder: Path) -> bool:
    """Return True if this account can write to a folder, or can make the folder."""
    # os.path, because Path.exists raises an error if this account may not look into a parent folder.
    existing_folder = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    return existing_folder.is_dir() and os.access(existing_folder, os.W_OK | os.X_OK)
