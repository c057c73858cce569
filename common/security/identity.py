"""A site's key pair, its request for admission to a coordinator, and the connection kit that answers the request.

A site creates its private key and never sends it. The request file contains the site's name and public key. The
coordinator answers with a kit: its address, and the certificate of its authority, with which the site authenticates it.
Neither file is secret. Keys are NIST P-256, because Flower signs every call, and P-384 takes seven times as long.
"""

import base64
import hashlib
import os
import re
import ssl
from dataclasses import replace
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import field_validator

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.system.files import (
    add_file_name_to_errors,
    is_exposed_to_others,
    is_file,
    make_exposed_file_remedy,
    write_atomically,
)
from polyclinic.common.system.plain_text import PLAIN_NAME
from polyclinic.common.system.toml import SectionModel, TomlSection, read_toml, to_toml_text, validate_tables

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(\d{1,5})")
_KEY_REMEDY = (
    "Put the one back that flwr-client init made; if it is lost, flwr-client init DIR --renew-key makes a new one, to "
    "be admitted anew."
)
_KEY_KIND = "ecdsa-sha2-nistp256"
MAX_NAME_CHARACTERS = 100
MAX_NAME_BYTES = 200
REQUEST_SIGNING_PURPOSE = x509.ObjectIdentifier("1.3.6.1.5.5.7.3.36")
"""Extended key usage of the coordinator's signing certificate: document signing (RFC 9336)."""
UNREADABLE_CERTIFICATE_ERRORS = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
"""Exceptions of ``cryptography`` for a malformed certificate; half of them have no common base class."""


def check_site_name(name: str) -> str:
    """Check that a site's name can be used in file names and messages; return it unchanged.

    Raises:
        ValueError: With the rule as text, if the name breaks one.
    """
    if len(name) > MAX_NAME_CHARACTERS:
        raise ValueError(f"use at most {MAX_NAME_CHARACTERS} characters")
    if not PLAIN_NAME.fullmatch(name):
        raise ValueError("use letters, digits, spaces, dots, dashes and underscores, beginning with a letter or digit")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"use at most {MAX_NAME_BYTES} bytes; files are named after it")
    return name


def check_public_key(line: str) -> str:
    """Check that a public key is one line ``ecdsa-sha2-nistp256 AAAA... comment``; return it unchanged.

    Raises:
        ValueError: If the line has another form.
    """
    try:
        key = form.load_ssh_public_key(line.encode())
    except Exception:  # cryptography raises many exception classes on invalid bytes
        raise ValueError(f"is no OpenSSH public key, one line that begins with {_KEY_KIND}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("is not a key on the curve NIST P-256")
    written = key.public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH).decode()
    if "\n" in line or "\r" in line or line.split()[:2] != written.split():
        # The same key in another spelling could be admitted as the key of another site.
        raise ValueError("is not one line as OpenSSH writes it")
    return line


class SiteAdmissionRequest(TomlSection):
    """A site's request for admission to a coordinator: the content of the file ``NAME.request``."""

    site: str
    public_key: str

    _name = field_validator("site")(check_site_name)
    _key = field_validator("public_key")(check_public_key)


class SiteConnectionKit(TomlSection):
    """The coordinator's answer to a site's admission request: the content of the file ``NAME.kit``.

    Attributes:
        coordinator: Name of the coordinator.
        address: ``host:port`` that the site connects to.
        site: The site's registered name.
        public_key: The site's registered public key.
        ca_certificate: Certificate of the coordinator's certificate authority, PEM. It is a single certificate without
            other text; people compare its phrase (:mod:`polyclinic.common.security.phrase`).
    """

    coordinator: str
    address: str
    site: str
    public_key: str
    ca_certificate: str

    _name = field_validator("site", "coordinator")(check_site_name)
    _key = field_validator("public_key")(check_public_key)

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        split_host_port(address)
        return address

    @field_validator("ca_certificate")
    @classmethod
    def _check_certificate(cls, text: str) -> str:
        try:
            # TLS trusts every certificate in a text, but people compare the phrase of the first one. So keep only the
            # first; otherwise an attacker's certificate after it would be trusted, too.
            certificate = x509.load_pem_x509_certificate(text.encode())
            certificate.public_key()  # raises an error for an unsupported kind of key
            only = certificate.public_bytes(form.Encoding.PEM).decode()
            ssl.create_default_context(cadata=only)  # the connection will do the same
        except (*UNREADABLE_CERTIFICATE_ERRORS, ssl.SSLError):
            raise ValueError("is no PEM certificate; the whole text from BEGIN to END CERTIFICATE is needed") from None
        return only


def split_host_port(address: str) -> tuple[str, int]:
    """Split ``host:port`` into host (an IPv6 address without brackets) and port.

    Raises:
        ValueError: If the address has another form.
    """
    parts = _ADDRESS.fullmatch(address)
    if not parts or not 0 < int(parts[2]) < 2**16:
        raise ValueError("expected host:port")
    return parts[1].strip("[]"), int(parts[2])


def read_admission_request(path: Path) -> SiteAdmissionRequest:
    """Read and validate a site's request file ``NAME.request``.

    Raises:
        BadInput: With all faults of the file.
    """
    return _read_received_file(
        SiteAdmissionRequest, path, "request", "Have the hospital send it again, as flwr-client init wrote it."
    )


def read_connection_kit(path: Path) -> SiteConnectionKit:
    """Read and validate a site's kit file ``NAME.kit``.

    Raises:
        BadInput: With all faults of the file.
    """
    return _read_received_file(
        SiteConnectionKit, path, "kit", "Have the coordinator send it again, as flwr-server admit wrote it."
    )


FILE_ENDINGS = ("request", "kit")
_PUBLIC_FILE_KINDS = {b"ssh-": "an ssh key", b"ecdsa-sha2-": "an ssh key", b"-----BEGIN CERTIFICATE": "a certificate"}
HEADING_BYTES = 200
"""Number of first bytes of a file that show the kind of a key."""


def _read_received_file(kind: type[SectionModel], path: Path, ending: str, remedy: str) -> SectionModel:
    """Read a request or kit; people never edit these files, so a fault means a damaged or wrong file.

    Args:
        kind: Pydantic model of the file's content.
        path: The file.
        ending: Ending of the file's name: ``request`` or ``kit``.
        remedy: Remedy in the faults of an existing file with wrong content.

    Raises:
        BadInput: With all faults of the file.
    """
    if path.is_dir():
        raise BadInput([Fault(str(path), "is a folder.", f"Name the file NAME.{ending}.")])
    exists = is_file(path)
    content = path.read_bytes() if exists else b""
    if b"PRIVATE KEY" in content[:HEADING_BYTES]:
        problem = "is a PRIVATE key. It must never leave the machine that made it: anyone who has seen it can use it."
        new_key = (
            "Delete every copy; its owner makes a new key (flwr-client init DIR --renew-key) and sends NAME.request."
        )
        raise BadInput([Fault(path.name, problem, new_key)])
    for first_bytes, name in _PUBLIC_FILE_KINDS.items():
        if content.startswith(first_bytes):
            problem = f"is {name}; a {ending} is wanted here."
            raise BadInput([Fault(path.name, problem, f"Its name is NAME.{ending}.")])
    for other in FILE_ENDINGS:
        if exists and other != ending and path.suffix == f".{other}":
            raise BadInput([Fault(path.name, f"is a {other}; a {ending} is wanted here.")])
    try:
        return validate_tables(kind, read_toml(path), path.name)
    except BadInput as bad:
        raise BadInput(replace(fault, remedy=remedy if exists else fault.remedy) for fault in bad.faults) from None


def write_commented_toml_file(path: Path, section: TomlSection, heading: str) -> None:
    """Write the fields of ``section``, all strings, as a TOML file with a comment of one or more lines at the top."""
    comment = [f"# {line}" for line in heading.splitlines() or [""]]
    lines = [*comment, *(f"{key} = {to_toml_text(value)}" for key, value in section.model_dump().items()), ""]
    write_atomically(path, "\n".join(lines).encode())


def create_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Create a key pair, write the private key to a new file that only the owner can read, and return the key."""
    key = ec.generate_private_key(ec.SECP256R1())
    text = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
    write_secret_file(path, text)
    return key


def write_secret_file(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read from the moment it exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with add_file_name_to_errors(path), os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)  # an incomplete file would prevent another attempt
        raise


def read_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a site's private key.

    Raises:
        BadInput: If the file is missing, is not a key of this kind, or can be read by other users.
    """
    try:
        text = path.read_bytes()
        status = path.stat()
    except OSError as error:
        remedy = "Make one with flwr-client init."
        raise BadInput([Fault(str(path), f"cannot be read: {error.strerror}.", remedy)]) from None
    if is_exposed_to_others(status):
        problem = f"may be read by others (mode {status.st_mode & 0o777:o})."
        raise BadInput([Fault(str(path), problem, make_exposed_file_remedy(path, status))])
    try:
        key = form.load_ssh_private_key(text, None)
    except Exception:  # cryptography raises many exception classes on damaged bytes
        problem = "is no OpenSSH private key that can be read: damaged, cut off, or locked by a password."
        raise BadInput([Fault(str(path), problem, _KEY_REMEDY)]) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        problem = "is a key of another kind; expected one on the curve NIST P-256."
        raise BadInput([Fault(str(path), problem, _KEY_REMEDY)])
    return key


def derive_storage_key(key: ec.EllipticCurvePrivateKey, purpose: str) -> bytes:
    """Derive an AES-256 key for one purpose, such as ``"images"``, from a site's private key (HKDF, RFC 5869)."""
    secret = key.private_bytes(form.Encoding.DER, form.PrivateFormat.PKCS8, form.NoEncryption())
    return HKDF(hashes.SHA256(), 32, salt=None, info=f"polyclinic {purpose}".encode()).derive(secret)


def format_public_key_line(key: ec.EllipticCurvePrivateKey, comment: str) -> str:
    """Return the public key of a private key as one OpenSSH line."""
    text = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    return f"{text.decode()} {'_'.join(comment.split())}"


def is_same_public_key(line: str, other: str) -> bool:
    """Return True if two OpenSSH lines contain the same public key; their comments may differ."""
    key = line.split()[1:2]  # empty if the line has no key
    return bool(key) and key == other.split()[1:2]


def compute_public_key_fingerprint(line: str) -> str:
    """Return a public key's fingerprint ``SHA256:...``, in the format of ``ssh-keygen -l``, for people to compare."""
    digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"
