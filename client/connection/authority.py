"""The certificate authority of a site's kit: its phrase, its confirmation by telephone, and refusal of another one.

Anyone who has a site's request can make a kit for it, under the name of any federation. No program can notice a false
kit at the first connection. A person therefore compares the phrase of the kit's authority with the phrase that the
coordinator reads out by telephone. The file ``state/authority.json`` then records the authority, and a later kit of
another authority is refused.
"""

import contextlib
from pathlib import Path

from polyclinic.client.connection.exit_codes import ClientExitCode, ConnectionNotAccepted
from polyclinic.client.site.authority_record import AUTHORITY_FILE, AuthorityRecord, read_authority_record
from polyclinic.client.site.site_file import SiteSettings
from polyclinic.common.security.identity import SiteConnectionKit
from polyclinic.common.security.phrase import (
    compute_certificate_key_hash,
    compute_certificate_phrase,
    find_phrase_difference,
)
from polyclinic.common.system.files import is_disk_full, write_atomically
from polyclinic.common.system.plain_text import format_utc_now, quote_for_shell


def record_first_connection(state: Path, kit: SiteConnectionKit) -> None:
    """Record the kit's authority after a connection to its coordinator, unless an authority is recorded already."""
    if read_authority_record(state) is not None:
        return
    try:
        _write_authority_record(state, _make_authority_record(kit))
    except OSError as error:
        if not is_disk_full(error):
            raise


def confirm_authority(settings: SiteSettings, kit: SiteConnectionKit, typed: str) -> str:
    """Record that a person has heard the phrase of the kit's authority from the coordinator.

    Args:
        typed: The phrase as the person typed it.

    Returns:
        The difference between the typed phrase and the kit's; then nothing is recorded. Empty if they are equal.
    """
    record = _make_authority_record(kit)
    if difference := find_phrase_difference(typed, record.phrase):
        return difference
    state = settings.state_folder
    before = read_authority_record(state)
    if before is not None and before.key_hash == record.key_hash:
        record = before
    state.mkdir(parents=True, exist_ok=True)
    state.chmod(0o700)
    _write_authority_record(state, record.model_copy(update={"confirmed": format_utc_now()}))
    with contextlib.suppress(OSError):
        settings.kit_path.touch()  # flwr-client start that waits after the refusal of this kit tries again
    return ""


def refuse_other_authority(settings: SiteSettings, kit: SiteConnectionKit) -> None:
    """Refuse a kit whose authority is not the recorded one.

    Without this check, anyone who can send mail to a hospital could get its next update by sending a new kit.

    Raises:
        ConnectionNotAccepted: If the kit's authority is not the recorded one; the text has both phrases and a remedy.
    """
    before = read_authority_record(settings.state_folder)
    if before is None or before.key_hash == compute_certificate_key_hash(kit.ca_certificate):
        return
    unconfirmed = "" if before.confirmed else " (nobody confirmed it)"
    problem = (
        f"{settings.kit_path.name} is of another authority than the one that this site knows since"
        f" {before.since[:10]}.\n"
        f"    phrase before: {before.phrase}{unconfirmed}\n"
        f"    phrase now:    {compute_certificate_phrase(kit.ca_certificate)}\n"
        "The one who made this kit would receive what this site sends."
    )
    remedy = (
        "Call the coordinator, at a number that does not come from the mail with the kit, and have the phrase read out"
        " to you. Is it the new one (a coordinator that was set up again has a new phrase):"
        f" flwr-client confirm {quote_for_shell(settings.folder)} and the words that you heard. Is it the one before:"
        " put the earlier kit back, and tell the coordinator that somebody sends false kits."
    )
    raise ConnectionNotAccepted(ClientExitCode.OTHER_AUTHORITY, problem, remedy)


def describe_authority(settings: SiteSettings, kit: SiteConnectionKit) -> tuple[str, str]:
    """Return a sentence about the kit's authority, and an instruction; the instruction is empty after confirmation."""
    phrase = compute_certificate_phrase(kit.ca_certificate)
    confirmed = get_confirmation_time(settings, kit)
    if confirmed:
        return f"the coordinator's phrase: {phrase} (confirmed on {confirmed[:10]})", ""
    unknown = (
        f"the kit's phrase: {phrase}. This program cannot know whether the kit is from your coordinator: anyone who has"
        " this site's request can make such a kit, with a certificate of his own."
    )
    remedy = (
        "Have the coordinator read its phrase out to you by telephone, at a number that does not come from the mail"
        f" with the kit, and type it: flwr-client confirm {quote_for_shell(settings.folder)} PHRASE. If it is another"
        " one, the kit is not the coordinator's: do not use it."
    )
    return unknown, remedy


def get_confirmation_time(settings: SiteSettings, kit: SiteConnectionKit) -> str:
    """Return the UTC time at which a person confirmed the phrase of the kit's authority; empty if nobody has."""
    record = read_authority_record(settings.state_folder)
    is_same = record is not None and record.key_hash == compute_certificate_key_hash(kit.ca_certificate)
    return record.confirmed if record is not None and is_same else ""


def _make_authority_record(kit: SiteConnectionKit) -> AuthorityRecord:
    return AuthorityRecord(
        key_hash=compute_certificate_key_hash(kit.ca_certificate),
        phrase=compute_certificate_phrase(kit.ca_certificate),
        coordinator=kit.coordinator,
        since=format_utc_now(),
    )


def _write_authority_record(state: Path, record: AuthorityRecord) -> None:
    write_atomically(state / AUTHORITY_FILE, record.model_dump_json().encode())
