"""Signed statements in which hospitals withdraw from the federation: ``removed/NAME.withdrawal``."""

from dataclasses import dataclass
from pathlib import Path

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.security.phrase import compute_certificate_key_hash
from polyclinic.common.security.withdrawal import (
    MAX_WITHDRAWAL_BYTES,
    WITHDRAWAL_SUFFIX,
    WithdrawalFault,
    WithdrawalStatement,
    verify_withdrawal,
)
from polyclinic.common.system.files import (
    make_missing_input_fault,
    make_private_folder,
    open_input_file,
    write_atomically,
)
from polyclinic.common.system.plain_names import PlainName, join_plain_name
from polyclinic.server.coordinator.admission import AdmittedSite
from polyclinic.server.coordinator.authority import read_authority_certificate
from polyclinic.server.coordinator.folder import CoordinatorFolder


@dataclass(frozen=True)
class SignedWithdrawal:
    """A withdrawal statement whose signature was verified, and the bytes of its file."""

    statement: WithdrawalStatement
    content: bytes


def read_withdrawal(coordinator: CoordinatorFolder, site: AdmittedSite, path: Path) -> SignedWithdrawal:
    """Read a hospital's withdrawal statement, and verify its signature by the hospital's admitted keys.

    Raises:
        BadInput: If the file cannot be read, was changed, or is not of this hospital or for this coordinator.
    """
    authority = compute_certificate_key_hash(read_authority_certificate(coordinator))
    try:
        with open_input_file(path) as file:
            content = file.read(MAX_WITHDRAWAL_BYTES + 1)
    except OSError:
        raise BadInput([make_missing_input_fault(path)]) from None
    keys = (site.public_key, *site.old_keys)
    try:
        return SignedWithdrawal(verify_withdrawal(content, site.site, keys, authority), content)
    except WithdrawalFault as fault:
        remedy = f"Nothing was removed. Have {site.site} send it again, as flwr-client withdraw wrote it."
        raise BadInput([Fault(str(path), f"is no statement of {site.site}: {fault}.", remedy)]) from None


def store_withdrawal(coordinator: CoordinatorFolder, site: str, withdrawal: SignedWithdrawal) -> Path:
    """Write the bytes of a verified statement to ``removed/NAME.withdrawal``; return the path."""
    make_private_folder(coordinator.removed_path)
    path = join_plain_name(coordinator.removed_path, PlainName(site), WITHDRAWAL_SUFFIX)
    write_atomically(path, withdrawal.content, private=True)
    return path
