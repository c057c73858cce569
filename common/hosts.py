"""The hosts that this program may talk to, and the secrets that its user keeps for them.

Users pass experiment files, tables and run folders to one another. The author of such a file could name any address
and any secret, so a file never decides where a program connects, or which secret it sends. The user agrees to each
host and to the data that it receives (:class:`HostUse`). The user's secrets are in a separate file, ``secrets.toml``,
which binds each secret to one host::

    ["https://pacs.hospital.example"]
    authentication = "basic"
    secret = "NAME:PASSWORD"

Without an agreement, :func:`refuse_use_without_permission` raises an error, so a command that forgets to ask the user
sends nothing.
"""

import base64
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from polyclinic.common.errors import BadInput, Fault, quote_names, raise_faults
from polyclinic.common.system.files import is_exposed_to_others, is_file, make_exposed_file_remedy
from polyclinic.common.system.toml import TomlSection, read_toml, validate_tables

SECRETS_FILE = "secrets.toml"
RETIRED_KEYS = ("authentication", "secret_file", "secret_env")
"""Keys of a data set in older files; ``secrets.toml`` has their values now."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
_MAX_PORT = 65535
_HOST_PATTERN = re.compile(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+")
_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""Hosts to which a secret may be sent without TLS, because it does not leave the machine."""
_MAX_SECRET_BYTES = 16384
_SECRET_KEYS = ("secret", "secret_file", "secret_env")


# ---------------------------------------------------------------------- the user's agreement


@dataclass(frozen=True, order=True)
class HostUse:
    """A host and the data that a program sends to it; the user agrees to both together, not to the host alone.

    Attributes:
        host: The host in the form of :func:`normalize_host`, or the address of a Ray cluster.
        address: The URL that the program calls, because one host may serve several owners; empty for a cluster.
        table: Real path of the table whose values are sent; empty if none are.
        column: The column of that table.
    """

    host: str
    address: str = ""
    table: str = ""
    column: str = ""


@dataclass(frozen=True, eq=False)
class HostPermission:
    """The host uses to which the user agreed, and the file with the user's secrets for hosts."""

    uses: frozenset[HostUse]
    secrets_path: Path


_permissions = list[HostPermission]()
"""The agreements that are in force; all threads of this process share them, because several threads read data."""


@contextmanager
def permit_hosts(uses: Iterable[HostUse], secrets_path: Path) -> Iterator[None]:
    """Allow this process to talk to hosts inside the ``with`` block, and to send each host its secret.

    Args:
        uses: The hosts, and the data that each receives.
        secrets_path: The file with the secrets; it need not exist.
    """
    permission = HostPermission(frozenset(uses), secrets_path)
    _permissions.append(permission)
    try:
        yield
    finally:
        _permissions.remove(permission)


def list_permitted_uses() -> tuple[HostUse, ...]:
    """Return the host uses to which the user has agreed, to pass them to a process that this one starts."""
    return tuple(sorted(set[HostUse]().union(*(permission.uses for permission in _permissions))))


def refuse_use_without_permission(use: HostUse, where: str) -> HostPermission:
    """Return the user's permission for a use of a host; call this before anything is sent to the host.

    Args:
        use: The host, and the data that it will receive.
        where: The configuration key that names the host, for the message.

    Raises:
        BadInput: If the user has not agreed to this use.
    """
    permission = next((each for each in reversed(_permissions) if use in each.uses), None)
    if permission is not None:
        return permission
    if any(use.host == other.host for each in _permissions for other in each.uses):
        column = f'column "{use.column}" of {use.table}'
        problem = f"sends {column} to {use.address}, and what was agreed to is another use. Nothing was sent."
        remedy = "Run this experiment by itself: it then asks about what it sends."
        raise BadInput([Fault(where, problem, remedy)])
    problem = f"names {use.host}, and nobody has agreed that this program talks to it. Nothing was sent."
    remedy = f'Agree with --yes, or in Python with allow_hosts=["{use.host}"].'
    raise BadInput([Fault(where, problem, remedy)])


def normalize_host(address: str) -> str:
    """Return scheme, host and port of a URL in one form: ``https://pacs.example:443`` for ``HTTPS://PACS.example/x``.

    Raises:
        ValueError: If the text is no address of http or https, or has a name or password in it.
    """
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        raise ValueError("is no address") from None
    default = _DEFAULT_PORTS.get(parts.scheme)
    host = parts.netloc.removesuffix(f":{port}") if port is not None else parts.netloc
    if default is None or not _HOST_PATTERN.fullmatch(host) or not 0 < (default if port is None else port) <= _MAX_PORT:
        raise ValueError('is not "https://HOST" or "https://HOST:PORT"')
    if host.startswith("["):
        host = f"[{ip_address(host[1:-1])}]"
    return f"{parts.scheme}://{host.lower()}:{default if port is None else port}"


def is_sent_unencrypted(host: str) -> bool:
    """Return True if data for a host crosses a network without TLS."""
    return host.startswith("http:") and host.rpartition(":")[0].removeprefix("http://") not in _LOOPBACK_HOSTS


# ---------------------------------------------------------------------- the user's secrets


@dataclass(frozen=True)
class HostSecret:
    """The secret for one host.

    Attributes:
        authorization: Value of the ``Authorization`` header.
        authentication: ``bearer`` for a token, ``basic`` for a name and a password.
        ca_path: CA certificates (PEM) for checking the host before the secret is sent; None for the system's.
    """

    authorization: str = field(repr=False)
    authentication: str
    ca_path: Path | None


class HostSecretEntry(TomlSection):
    """One table of ``secrets.toml``; its name is the host.

    Attributes:
        authentication: ``bearer`` sends a token, ``basic`` a name and a password.
        secret: The token, or ``NAME:PASSWORD``.
        secret_file: File that contains the secret, instead of ``secret``; only its owner may read the file.
        secret_env: Environment variable that contains the secret, instead of ``secret``.
        ca_file: File of CA certificates (PEM) for checking the host; None uses the system's.
    """

    authentication: Literal["bearer", "basic"]
    secret: str | None = None
    secret_file: str | None = None
    secret_env: str | None = None
    ca_file: str | None = None


def find_user_secrets_path() -> Path:
    """Return the path of the user's ``secrets.toml``: in ``$XDG_CONFIG_HOME/polyclinic`` or ``~/.config/polyclinic``.

    For an account without a home folder, the path is one that does not exist.
    """
    folder = os.environ.get("XDG_CONFIG_HOME")
    try:
        config_folder = Path(folder) if folder else Path.home() / ".config"
    except RuntimeError:  # the account has no home folder, as in a container
        config_folder = Path("/nonexistent")
    return config_folder / "polyclinic" / SECRETS_FILE


def find_host_secret(host: str, path: Path) -> HostSecret | None:
    """Return the secret for one host from a ``secrets.toml``; None if the file or the host's entry does not exist.

    Args:
        host: The host, in the form of :func:`normalize_host`.
        path: Path of the file.

    Raises:
        BadInput: If others can read the file, the file has a fault, or the secret of this host is missing.
    """
    if not is_file(path):
        return None
    _read_private_file(path)
    entries = dict[str, Any]()
    for number, (name, table) in enumerate(read_toml(path).items(), 1):
        try:
            normalized = normalize_host(name)
        except ValueError as error:  # the message does not quote the name, which may contain a password
            problem = f"the name of table {number} {error}."
            raise BadInput([Fault(str(path), problem, 'A table begins with ["https://HOST"].')]) from None
        if urlsplit(name)[2:] not in (("", "", ""), ("/", "", "")) or normalized in entries:
            problem = (
                f"{normalized} has two tables." if normalized in entries else f"the table of {normalized} names a path."
            )
            raise BadInput([Fault(str(path), problem, "A secret is bound to scheme, name and port of one host.")])
        entries[normalized] = (name, table)
    if host not in entries:
        return None
    name, table = entries[host]
    entry = _validate_secret_entry(table, f'{path}: ["{name}"]')
    if is_sent_unencrypted(host):
        problem = "a secret is sent by https alone: anyone on the way could read it."
        raise BadInput([Fault(f'{path}: ["{name}"]', problem, "Use the server's https address, here and in the data.")])
    secret = _read_secret(entry, path, f'{path}: ["{name}"]')
    header = f"Bearer {secret}"
    if entry.authentication == "basic":
        header = f"Basic {base64.b64encode(secret.encode()).decode()}"
    return HostSecret(header, entry.authentication, path.parent / entry.ca_file if entry.ca_file else None)


def _validate_secret_entry(table: Any, where: str) -> HostSecretEntry:
    """Validate a table of ``secrets.toml``; no message repeats a value, because it may be a secret.

    Raises:
        BadInput: With the faults.
    """
    if not isinstance(table, dict):
        raise BadInput([Fault(where, 'must be a table with authentication = "bearer" or "basic", and secret.')])
    keys_without_text = [key for key in HostSecretEntry.model_fields if not isinstance(table.get(key, ""), str)]
    raise_faults([Fault(f"{where} {key}", "must be text in quotes.") for key in keys_without_text])
    if table.get("authentication") not in ("bearer", "basic"):
        raise BadInput([Fault(f"{where} authentication", 'must be "bearer" (a token) or "basic" (NAME:PASSWORD).')])
    entry = validate_tables(HostSecretEntry, table, where)
    if sum(getattr(entry, key) is not None for key in _SECRET_KEYS) != 1:
        raise BadInput([Fault(where, f"needs one of {quote_names(_SECRET_KEYS)}.")])
    return entry


def _read_secret(entry: HostSecretEntry, path: Path, where: str) -> str:
    """Return the secret of an entry, one line of ASCII.

    Raises:
        BadInput: If the secret is missing, others can read it, or it is not one line; the message does not quote it.
    """
    secret = entry.secret or ""
    if entry.secret_env is not None:
        secret = os.environ.get(entry.secret_env, "")
        if not secret.strip():
            problem = f"the environment variable {entry.secret_env} is not set, or is empty."
            raise BadInput([Fault(f"{where} secret_env", problem, "Set it where this program is started.")])
    elif entry.secret_file is not None:
        file = path.parent / entry.secret_file
        content = _read_private_file(file)
        if len(content) > _MAX_SECRET_BYTES:
            raise BadInput([Fault(f"{where} secret_file", f"{file} is too large for a secret.")])
        secret = content.decode("ascii", errors="replace")
    secret = secret.strip()
    if not re.fullmatch(r"[!-~](?:[ -~]*[!-~])?", secret):
        raise BadInput([Fault(where, "the secret must be one line of letters, digits and signs (ASCII).")])
    if entry.authentication == "basic" and ":" not in secret:
        raise BadInput([Fault(where, 'the secret must be NAME:PASSWORD, because authentication is "basic".')])
    return secret


def _read_private_file(path: Path) -> bytes:
    """Return the first bytes of a file with secrets, at most ``_MAX_SECRET_BYTES`` + 1.

    Raises:
        BadInput: If other accounts may read the file, or it cannot be read.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            content = b"" if is_exposed_to_others(status) else file.read(_MAX_SECRET_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no file can have this name"
        raise BadInput([Fault(str(path), f"cannot be read: {reason}.")]) from None
    if is_exposed_to_others(status):
        problem = f"holds a secret and may be read by others (mode {status.st_mode & 0o777:o})."
        raise BadInput([Fault(str(path), problem, make_exposed_file_remedy(path, status))])
    return content
