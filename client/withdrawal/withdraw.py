"""``flwr-client withdraw``: a hospital leaves its federation, with a signed statement for the coordinator."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyclinic.client.approval.record import RunRecord, read_hospital_record
from polyclinic.client.connection.preflight import make_already_running_fault
from polyclinic.client.site.site_file import SiteSettings, read_and_check_connection_kit
from polyclinic.client.site.withdrawn import WITHDRAWN_FILE, WithdrawnMark, read_withdrawn_mark
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.security.audit import AuditLog
from polyclinic.common.security.identity import read_private_key
from polyclinic.common.security.phrase import compute_certificate_key_hash
from polyclinic.common.security.withdrawal import (
    MAX_RUNS,
    WITHDRAWAL_SUFFIX,
    RunOfSite,
    WithdrawalStatement,
    sign_withdrawal,
)
from polyclinic.common.system.files import lock_file, open_own_file, write_atomically
from polyclinic.common.system.plain_names import PlainName, join_plain_name
from polyclinic.common.system.plain_text import (
    format_bytes,
    format_count_with_noun,
    format_utc_now,
    make_printable_line,
)
from polyclinic.data.images.store import remove_image_store

IMAGE_FOLDERS = ("images-encrypted", "images-plain")
DELETABLE_FOLDERS: Mapping[str, str] = {
    "images-encrypted": "decoded images, encrypted",
    "images-plain": "decoded images",
    "features": "features of images, encrypted",
    "memory": "parts of models between rounds",
}
"""Folder in ``state/`` that ``--delete`` removes -> description of its content.

All these files were computed from patients' images, and none is needed as evidence of the hospital's work.
"""
REMAINING_DATA = (
    ("state/audit*, state/plans/", "what came in, what left, who approved it", "as long as your record of processing"),
    ("state/privacy/, the ledger", "the privacy budget that was spent", "as long as the patients' data"),
    (
        "state/patient-parts, state/masked/, counts/",
        "parts, keys and the count sheet, so that a return repeats nothing",
        "until you are sure",
    ),
    ("state/model/, alone/, delivered/", "models at this hospital", "as you decide"),
    ("at the coordinator", "the models with your part in them, receipts, figures", "by your agreement"),
    ("at the coordinator", "updates/ and checkpoints/ of old runs", "until it deletes them: ask for it"),
)
"""Data that stays after a withdrawal: place, content, and time until which it stays."""


@dataclass(frozen=True)
class Withdrawal:
    """The runs that a site took part in, and what it may delete when it leaves.

    Attributes:
        runs: The runs in which an update left the site.
        deletable: Folder in ``state/`` -> size in bytes.
        audit: A sentence about the audit log's hash chain.
    """

    runs: tuple[RunRecord, ...]
    deletable: Mapping[str, int]
    audit: str


def examine_withdrawal(settings: SiteSettings) -> Withdrawal:
    """Return the runs in which the site took part, and the sizes of the folders that it may delete."""
    record = read_hospital_record(settings.state_folder)
    runs = tuple(run for run in record.runs if run.rounds)
    folders = {name: settings.state_folder / name for name in DELETABLE_FOLDERS}
    sizes = {name: _measure_folder(folder) for name, folder in folders.items() if folder.exists()}
    return Withdrawal(runs, sizes, record.check)


def withdraw_site(settings: SiteSettings, withdrawal: Withdrawal, reason: str, *, delete: bool) -> Path:
    """Mark the site as withdrawn, and write its signed statement; return the statement's path.

    Args:
        reason: The hospital's reason, for the coordinator.
        delete: Remove the folders of :data:`DELETABLE_FOLDERS`.

    Raises:
        BadInput: If the program runs on this folder, the site has left before, or key or kit cannot be read.
    """
    state = settings.state_folder
    kit = read_and_check_connection_kit(settings)
    key = read_private_key(settings.key_path)
    state.mkdir(parents=True, exist_ok=True)
    path = join_plain_name(settings.folder, PlainName(settings.file.name), WITHDRAWAL_SUFFIX)
    with open_own_file(state / "lock", "wb") as file:
        lock_file(file, make_already_running_fault(state))
        if read_withdrawn_mark(state) is not None:
            problem = "has left before. Its statement is not written again."
            raise BadInput([Fault(str(settings.folder), problem, "To take part again: flwr-client withdraw --undo.")])
        time = format_utc_now()
        statement = WithdrawalStatement(
            site=settings.file.name,
            coordinator=kit.coordinator,
            authority=compute_certificate_key_hash(kit.ca_certificate),
            time=time,
            reason=make_printable_line(reason, 500),
            runs=tuple(_describe_run_for_statement(run) for run in withdrawal.runs[-MAX_RUNS:]),
        )
        write_atomically(path, sign_withdrawal(statement, key))
        AuditLog(state).append(event="withdrawn", reason=statement.reason)
        write_atomically(
            state / WITHDRAWN_FILE, WithdrawnMark(time=time, reason=statement.reason).model_dump_json().encode()
        )
        if delete:
            _delete_folders(state)
    return path


def undo_withdrawal(settings: SiteSettings) -> None:
    """Let the site take part again; a coordinator that has removed the site must admit it again.

    Raises:
        BadInput: If the site has not left.
    """
    state = settings.state_folder
    if read_withdrawn_mark(state) is None:
        raise BadInput([Fault(str(settings.folder), "has not left its federation.", "Leave --undo out.")])
    AuditLog(state).append(event="withdrawal_undone")
    (state / WITHDRAWN_FILE).unlink()
    join_plain_name(settings.folder, PlainName(settings.file.name), WITHDRAWAL_SUFFIX).unlink(missing_ok=True)


def describe_withdrawal(withdrawal: Withdrawal) -> list[str]:
    """Return lines about a withdrawal for the person who decides: the site's runs, data that stays, deletable data."""
    lines = [withdrawal.audit, "This hospital trained in:"]
    for run in withdrawal.runs:
        title = make_printable_line(run.title or "a run without a title")
        rounds = format_count_with_noun(len(run.rounds), "round")
        lines.append(f"  {title} ({run.run[:8]}): {rounds}, {run.first[:10]} to {run.last[:10]}")
    if not withdrawal.runs:
        lines[-1] = "This hospital has trained in no run."
    else:
        lines.append("What it has contributed stays in these models. Nobody can take it out of them again.")
    lines.append("What stays:")
    lines += [f"  {place}: {content}; {until}" for place, content, until in REMAINING_DATA]
    return [*lines, *_describe_deletable(withdrawal.deletable)]


def _describe_deletable(sizes: Mapping[str, int]) -> Sequence[str]:
    if not sizes:
        return ["Nothing is left here that --delete would remove."]
    listed = [f"  state/{name}/: {DELETABLE_FOLDERS[name]}, {format_bytes(size)}" for name, size in sizes.items()]
    return ["What --delete removes:", *listed]


def _describe_run_for_statement(run: RunRecord) -> RunOfSite:
    title = make_printable_line(run.title, 500)
    return RunOfSite(run=run.run, title=title, rounds=len(run.rounds), first=run.first, last=run.last)


def _measure_folder(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _delete_folders(state: Path) -> None:
    for name in DELETABLE_FOLDERS:
        folder = state / name
        if name in IMAGE_FOLDERS:
            remove_image_store(folder)  # follows a link to another disk
        if folder.is_symlink():
            shutil.rmtree(folder.resolve(), ignore_errors=True)
            folder.unlink()
        elif folder.is_dir():
            shutil.rmtree(folder)
