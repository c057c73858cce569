"""The hosts that this program may talk to, and the secrets that its user keeps for them.

Experiment files, tables and run folders go from hand to hand. So none of them decides where a program connects, or
which secret it sends there: the author of a file could name any address beside any secret. The user decides. He
agrees to each host and to what it is sent (:class:`HostUse`), and his secrets are in a file of his own,
``secrets.toml``, in which each is bound to one host::

    ["https://pacs.hospital.example"]
    authentication = "basic"
    secret = "NAME:PASSWORD"

A program that talks to a host without an agreement refuses (:func:`refuse_use_without_permission`), so a command
that forgets to ask sends nothing.
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
"""Keys of a data set in older files, which now stand in ``secrets.toml``."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
_LAST_PORT = 65535
_HOST = re.compile(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+")
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
"""Hosts to which a secret may be sent without TLS, because it does not leave the machine."""
_LONGEST_SECRET = 16384
_SOURCES = ("secret", "secret_file", "secret_env")


# ---------------------------------------------------------------------- the user's agreement


@dataclass(frozen=True, order=True)
class HostUse:
    """What a program does with a host: to this the user agrees, not to the host alone.

    Attributes:
        host: The host in the form of :func:`normalize_host`, or the address of a Ray cluster.
        address: The URL at which the program searches, because one host may serve several owners; empty for a cluster.
        table: Real path of the table whose values are sent; empty if none are.
        column: The column of that table.
    """

    host: str
    address: str = ""
    table: str = ""
    column: str = ""


@dataclass(frozen=True, eq=False)
class HostPermission:
    """Uses of hosts that the user agreed to, and the file with his secrets for hosts."""

    uses: frozenset[HostUse]
    secrets_path: Path


_permissions = list[HostPermission]()
"""The agreements in force in this process; all its threads share them, because data are read in several."""


@contextmanager
def permit_hosts(uses: Iterable[HostUse], secrets_path: Path) -> Iterator[None]:
    """Let this process talk to some hosts inside the ``with`` block, and send them the secrets bound to them.

    Args:
        uses: The hosts, and what each is sent.
        secrets_path: The file with the secrets; it need not exist.
    """
    permission = HostPermission(frozenset(uses), secrets_path)
    _permissions.append(permission)
    try:
        yield
    finally:
        _permissions.remove(permission)


def list_permitted_uses() -> tuple[HostUse, ...]:
    """Return the uses of hosts that the user has agreed to, for a process that this one starts."""
    return tuple(sorted(set[HostUse]().union(*(permission.uses for permission in _permissions))))


def refuse_use_without_permission(use: HostUse, where: str) -> HostPermission:
    """Return the user's permission for a use of a host; to be called before anything is sent to it.

    Args:
        use: The host, and what it will be sent.
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
    if default is None or not _HOST.fullmatch(host) or not 0 < (default if port is None else port) <= _LAST_PORT:
        raise ValueError('is not "https://HOST" or "https://HOST:PORT"')
    if host.startswith("["):
        host = f"[{ip_address(host[1:-1])}]"
    return f"{parts.scheme}://{host.lower()}:{default if port is None else port}"


def is_readable_on_the_way(host: str) -> bool:
    """Return True if what a host is sent goes over a network without TLS."""
    return host.startswith("http:") and host.rpartition(":")[0].removeprefix("http://") not in _LOOPBACK


# ---------------------------------------------------------------------- the user's secrets


@dataclass(frozen=True)
class HostSecret:
    """The secret for one host.

    Attributes:
        authorization: Value of the ``Authorization`` header.
        authentication: ``bearer`` for a token, ``basic`` for a name and a password.
        ca_path: Certificates (PEM) by which the host is checked before the secret is sent; None for the system's.
    """

    authorization: str = field(repr=False)
    authentication: str
    ca_path: Path | None


class HostSecretEntry(TomlSection):
    """One table of ``secrets.toml``; its name is the host.

    Attributes:
        authentication: ``bearer`` sends a token, ``basic`` a name and a password.
        secret: The token, or ``NAME:PASSWORD``.
        secret_file: File that holds it, instead of ``secret``; only its owner may read it.
        secret_env: Environment variable that holds it, instead of ``secret``.
        ca_file: File of CA certificates (PEM) by which the host is checked; None uses the system's.
    """

    authentication: Literal["bearer", "basic"]
    secret: str | None = None
    secret_file: str | None = None
    secret_env: str | None = None
    ca_file: str | None = None


def find_user_secrets_path() -> Path:
    """Return the path of the user's ``secrets.toml``: ``$XDG_CONFIG_HOME/polyclinic`` or ``~/.config/polyclinic``.

    An account without a home gets a path at which no file is.
    """
    folder = os.environ.get("XDG_CONFIG_HOME")
    try:
        place = Path(folder) if folder else Path.home() / ".config"
    except RuntimeError:  # an account without a home, as in a container: it has no secrets there
        place = Path("/nonexistent")
    return place / "polyclinic" / SECRETS_FILE


def find_host_secret(host: str, path: Path) -> HostSecret | None:
    """Return the secret that a ``secrets.toml`` holds for one host; None if it has none, or does not exist.

    Args:
        host: The host, in the form of :func:`normalize_host`.

    Raises:
        BadInput: If the file is readable by others or has a fault, or the secret of this host is not there.
    """
    if not is_file(path):
        return None
    _refuse_file_of_others(path)
    entries = dict[str, Any]()
    for number, (name, table) in enumerate(read_toml(path).items(), 1):
        try:
            own = normalize_host(name)
        except ValueError as error:  # not quoted: the name may hold a password
            problem = f"the name of table {number} {error}."
            raise BadInput([Fault(str(path), problem, 'A table begins with ["https://HOST"].')]) from None
        if urlsplit(name)[2:] not in (("", "", ""), ("/", "", "")) or own in entries:
            problem = f"{own} has two tables." if own in entries else f"the table of {own} names a path."
            raise BadInput([Fault(str(path), problem, "A secret is bound to scheme, name and port of one host.")])
        entries[own] = (name, table)
    if host not in entries:
        return None
    name, table = entries[host]
    entry = _validate_secret_entry(table, f'{path}: ["{name}"]')
    if is_readable_on_the_way(host):
        problem = "a secret is sent by https alone: anyone on the way could read it."
        raise BadInput([Fault(f'{path}: ["{name}"]', problem, "Use the server's https address, here and in the data.")])
    secret = _read_secret(entry, path, f'{path}: ["{name}"]')
    header = f"Bearer {secret}"
    if entry.authentication == "basic":
        header = f"Basic {base64.b64encode(secret.encode()).decode()}"
    return HostSecret(header, entry.authentication, path.parent / entry.ca_file if entry.ca_file else None)


def _validate_secret_entry(table: Any, where: str) -> HostSecretEntry:
    """Check a table of ``secrets.toml``; no message repeats a value, because it may be a secret.

    Raises:
        BadInput: With the faults.
    """
    if not isinstance(table, dict):
        raise BadInput([Fault(where, 'must be a table with authentication = "bearer" or "basic", and secret.')])
    texts = [key for key in HostSecretEntry.model_fields if not isinstance(table.get(key, ""), str)]
    raise_faults([Fault(f"{where} {key}", "must be text in quotes.") for key in texts])
    if table.get("authentication") not in ("bearer", "basic"):
        raise BadInput([Fault(f"{where} authentication", 'must be "bearer" (a token) or "basic" (NAME:PASSWORD).')])
    entry = validate_tables(HostSecretEntry, table, where)
    if sum(getattr(entry, key) is not None for key in _SOURCES) != 1:
        raise BadInput([Fault(where, f"needs one of {quote_names(_SOURCES)}.")])
    return entry


def _read_secret(entry: HostSecretEntry, path: Path, where: str) -> str:
    """Return the secret of an entry, one line of ASCII.

    Raises:
        BadInput: If it is not there, readable by others, or no such line; the message does not quote it.
    """
    secret = entry.secret or ""
    if entry.secret_env is not None:
        secret = os.environ.get(entry.secret_env, "")
        if not secret.strip():
            problem = f"the environment variable {entry.secret_env} is not set, or is empty."
            raise BadInput([Fault(f"{where} secret_env", problem, "Set it where this program is started.")])
    elif entry.secret_file is not None:
        file = path.parent / entry.secret_file
        content = _refuse_file_of_others(file)
        if len(content) > _LONGEST_SECRET:
            raise BadInput([Fault(f"{where} secret_file", f"{file} is too large for a secret.")])
        secret = content.decode("ascii", errors="replace")
    secret = secret.strip()
    if not re.fullmatch(r"[!-~](?:[ -~]*[!-~])?", secret):
        raise BadInput([Fault(where, "the secret must be one line of letters, digits and signs (ASCII).")])
    if entry.authentication == "basic" and ":" not in secret:
        raise BadInput([Fault(where, 'the secret must be NAME:PASSWORD, because authentication is "basic".')])
    return secret


def _refuse_file_of_others(path: Path) -> bytes:
    """Return the beginning of a file with secrets; refuse one that others may read.

    Raises:
        BadInput: If others may read it, or it cannot be read.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            content = b"" if is_exposed_to_others(status) else file.read(_LONGEST_SECRET + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no file can have this name"
        raise BadInput([Fault(str(path), f"cannot be read: {reason}.")]) from None
    if is_exposed_to_others(status):
        problem = f"holds a secret and may be read by others (mode {status.st_mode & 0o777:o})."
        raise BadInput([Fault(str(path), problem, make_exposed_file_remedy(path, status))])
    return content
