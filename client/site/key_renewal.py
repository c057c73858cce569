"""``flwr-client init --renew-key``: a new key pair for a site's folder, for instance after its old key was revoked.

The folder, settings, audit log, state and privacy ledger stay. A new folder would lack the record of the masked rounds,
by which the site refuses to unmask two sums that differ by a few sites.
"""

import contextlib
import shutil
from pathlib import Path

from polyclinic.client.site.site_file import (
    OLD_KEYS_FILE,
    SiteSettings,
    read_old_public_keys,
    read_site_toml_without_data,
)
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.security.audit import AuditLog
from polyclinic.common.security.identity import (
    SiteAdmissionRequest,
    compute_public_key_fingerprint,
    create_private_key,
    format_public_key_line,
    read_connection_kit,
    read_private_key,
    write_commented_toml_file,
)
from polyclinic.common.security.phrase import compute_public_key_phrase
from polyclinic.common.system.files import flush_folder, lock_file, open_own_file, write_atomically
from polyclinic.common.system.plain_names import PlainName, join_plain_name
from polyclinic.common.system.plain_text import quote_for_shell
from polyclinic.data.images.store import remove_image_store

OLD_NODE_FILES = ("node-id", "in-hand")
"""Files in the state folder that belong to the old key's connection."""


def renew_site_key(folder: Path, name: str = "") -> list[str]:
    """Replace the key pair of a site's folder, and write a new request for the coordinator.

    The old private key is deleted, because it is or will be revoked. Its public key is kept.

    Args:
        name: The site's name, which must be that of the folder; empty if the person gave none.

    Returns:
        Lines for the person who ran the command.

    Raises:
        BadInput: If the folder belongs to no site or to another one, or if its ``flwr-client`` runs.
    """
    settings = read_site_toml_without_data(folder)
    site = settings.file.name
    state = settings.state_folder
    if name not in ("", site):
        raise BadInput([Fault("--name", f'is "{name}", but {folder} is the folder of "{site}".', "Leave it out.")])

    state.mkdir(mode=0o700, exist_ok=True)
    with open_own_file(state / "lock", "wb") as lock:
        problem = "flwr-client runs on this folder, with the old key."
        lock_file(lock, Fault(str(folder), problem, "Stop it first, then renew the key."))
        old = _read_present_public_key(settings)
        new_path = settings.key_path.with_name(f".{settings.key_path.name}.new")
        new_path.unlink(missing_ok=True)  # of a renewal that was killed
        line = format_public_key_line(create_private_key(new_path), site)
        fingerprints = {"new": compute_public_key_fingerprint(line)}
        if old:
            _store_old_public_key(state, old)
            fingerprints["old"] = compute_public_key_fingerprint(old)
        AuditLog(state).append(event="key", **fingerprints)
        new_path.replace(settings.key_path)
        flush_folder(settings.key_path.parent)
        removed = _remove_files_of_old_key(state)

    request = join_plain_name(folder, PlainName(site), ".request")
    write_commented_toml_file(
        request, SiteAdmissionRequest(site=site, public_key=line), "For the coordinator. Holds no secret."
    )
    start = f"flwr-client start {quote_for_shell(folder)}"
    return [
        f"{settings.key_path}: this site's new private key. The old one is deleted.",
        "site.toml, state/, its audit and the privacy ledger stay: what was spent of a privacy budget stays spent.",
        *(["Decoded images were encrypted with the old key, and are decoded again at the next start."] * removed),
        f"{request}: send this file to the coordinator, who revokes the old key, calls you and asks for this phrase:",
        f"    {compute_public_key_phrase(line)}",
        "    or for the fingerprint, which says the same of the same key:",
        f"    {fingerprints['new']}",
        f"Hospitals that list this site in policy.peers need its new line: {line}",
        f"The coordinator sends {site}.kit back; put it into {folder} and run: {start}",
    ]


def read_own_public_keys(settings: SiteSettings) -> tuple[str, ...]:
    """Return the site's public keys as OpenSSH lines: the present one first, then earlier ones.

    Receipts of runs before a renewal, or during it, have signatures of earlier keys.

    Raises:
        BadInput: If the present key cannot be read.
    """
    present = format_public_key_line(read_private_key(settings.key_path), "")
    return (present, *read_old_public_keys(settings.state_folder))


def _read_present_public_key(settings: SiteSettings) -> str:
    """Return the present public key; from the kit if the key's file is lost or damaged; empty without a kit."""
    with contextlib.suppress(BadInput):
        return format_public_key_line(read_private_key(settings.key_path), settings.file.name)
    with contextlib.suppress(BadInput):
        return read_connection_kit(settings.kit_path).public_key
    return ""


def _store_old_public_key(state: Path, line: str) -> None:
    lines = dict.fromkeys([*read_old_public_keys(state), line])
    write_atomically(state / OLD_KEYS_FILE, "".join(f"{each}\n" for each in lines).encode())


def _remove_files_of_old_key(state: Path) -> bool:
    """Remove the files that only the old key can decrypt, and the files of its connection.

    Returns:
        True if decoded images were removed.
    """
    for name in OLD_NODE_FILES:
        (state / name).unlink(missing_ok=True)
    shutil.rmtree(state / "features", ignore_errors=True)
    try:
        return remove_image_store(state / "images-encrypted")
    except OSError:  # without the old key, nobody can decrypt these files, so they may stay
        return False
