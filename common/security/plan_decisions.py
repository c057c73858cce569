"""A person's signed decision on a plan: the keys of approvers, and the statement that a hospital's gate verifies.

An approver is a person at a hospital, such as its data protection officer, who decides what runs there. Each approver
has an Ed25519 key. The private key is in a file that the approver keeps, encrypted with a passphrase (scrypt, AES-GCM);
no program that trains needs it. The hospital's ``site.toml`` contains the public key.

A decision is one line of canonical JSON with its signature. Any other byte in the file makes it invalid.
"""

import base64
import datetime as dt
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.security.identity import compute_public_key_fingerprint, write_secret_file
from polyclinic.common.system.plain_text import is_plain_text

KEY_KIND = "ssh-ed25519"
MAX_APPROVER_NAME_CHARACTERS = 100
MIN_PASSPHRASE_CHARACTERS = 8
"""Minimum length of a passphrase; a person who finds the file could guess a shorter one and approve in the owner's
name.
"""
_SIGNED_PREFIX = b"polyclinic plan decision\n"
"""Prefix of each signed text, so that the signature of a decision is not valid for another kind of text."""
_SCRYPT_COST, _SCRYPT_BLOCK, _SCRYPT_LANES = 2**16, 8, 1
"""Parameters n, r and p of RFC 7914: each guess of a passphrase takes 64 MB and a fifth of a second."""
_SALT_BYTES, _NONCE_BYTES = 16, 12
_HEX_PATTERN = "^[0-9a-f]*$"
MAX_DECISION_BYTES = 20_000


class DecisionFault(ValueError):
    """Raised with a reason for a decision that is altered or not signed by its approver."""


# ---------------------------------------------------------------------- keys of approvers


class SealedApproverKey(BaseModel):
    """The file of an approver's private key, encrypted with a passphrase.

    Attributes:
        approver: Name of the person.
        public_key: The public key as one OpenSSH line.
        salt: Salt of scrypt, in hexadecimal digits.
        nonce: Nonce of AES-GCM, in hexadecimal digits.
        sealed: The encrypted private key (32 bytes) with its tag, which also authenticates name and public key.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    approver: str = Field(max_length=200)
    public_key: str = Field(max_length=400)
    salt: str = Field(pattern=_HEX_PATTERN)
    nonce: str = Field(pattern=_HEX_PATTERN)
    sealed: str = Field(pattern=_HEX_PATTERN, max_length=400)

    def open_with(self, passphrase: str) -> Ed25519PrivateKey:
        """Decrypt the private key.

        Raises:
            DecisionFault: If the passphrase is wrong, or the file was changed.
        """
        cipher = AESGCM(_derive_sealing_key(passphrase, bytes.fromhex(self.salt)))
        content = bytes.fromhex(self.sealed)
        try:
            secret = cipher.decrypt(bytes.fromhex(self.nonce), content, self._authenticated_text)
        except (InvalidTag, ValueError):
            raise DecisionFault("the passphrase is not that of the key, or the key's file was changed") from None
        return Ed25519PrivateKey.from_private_bytes(secret)

    @property
    def _authenticated_text(self) -> bytes:
        return f"{self.approver}\n{self.public_key}".encode()


def create_approver_key(path: Path, approver: str, passphrase: str) -> str:
    """Create a key pair, write the encrypted private key to a new file, and return the public key's OpenSSH line.

    Raises:
        BadInput: If the passphrase is too short, or the file exists.
    """
    faults = []
    if len(passphrase) < MIN_PASSPHRASE_CHARACTERS:
        problem = f"has {len(passphrase)} characters. Anyone who finds the key's file could guess it."
        faults.append(Fault("passphrase", problem, f"Take {MIN_PASSPHRASE_CHARACTERS} characters or more."))
    if path.exists():
        faults.append(Fault(str(path), "is there already.", "Name another file with --out."))
    if faults:
        raise BadInput(faults)
    key = Ed25519PrivateKey.generate()
    line = format_approver_public_key(key.public_key(), approver)
    salt = os.urandom(_SALT_BYTES)
    nonce = os.urandom(_NONCE_BYTES)
    empty = SealedApproverKey(approver=approver, public_key=line, salt=salt.hex(), nonce=nonce.hex(), sealed="")
    secret = key.private_bytes(form.Encoding.Raw, form.PrivateFormat.Raw, form.NoEncryption())
    sealed = AESGCM(_derive_sealing_key(passphrase, salt)).encrypt(nonce, secret, empty._authenticated_text)
    content = empty.model_copy(update={"sealed": sealed.hex()})
    write_secret_file(path, content.model_dump_json(indent=1).encode() + b"\n")
    return line


def read_sealed_approver_key(path: Path) -> SealedApproverKey:
    """Read the file of an approver's private key, without decrypting it.

    Raises:
        BadInput: If the file is missing or is not such a key.
    """
    try:
        return SealedApproverKey.model_validate_json(path.read_bytes())
    except OSError as error:
        problem = f"cannot be read: {error.strerror}."
        remedy = "Name the file that flwr-client approvers add wrote: --key FILE."
        raise BadInput([Fault(str(path), problem, remedy)]) from None
    except ValidationError:
        remedy = "Name the file that flwr-client approvers add wrote: --key FILE."
        raise BadInput([Fault(str(path), "is no key of an approver.", remedy)]) from None


def format_approver_public_key(key: Ed25519PublicKey, comment: str) -> str:
    """Return an approver's public key as one OpenSSH line."""
    text = key.public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH).decode()
    return f"{text} {'_'.join(comment.split())}".strip()


def check_approvers(table: Mapping[str, str]) -> None:
    """Check the table ``[approvers]`` of ``site.toml``.

    Raises:
        ValueError: If a name or a key has another form.
    """
    for name, line in table.items():
        if not name.strip() or len(name) > MAX_APPROVER_NAME_CHARACTERS or not is_plain_text(name):
            raise ValueError(
                f"the name of a person is one line of 1 to {MAX_APPROVER_NAME_CHARACTERS} characters, not {name[:80]!r}"
            )
        try:
            check_approver_public_key(line)
        except ValueError as error:
            raise ValueError(f"the key of {name} {error}") from None


def check_approver_public_key(line: str) -> str:
    """Check that a public key is one line ``ssh-ed25519 AAAA... comment``; return it unchanged.

    Raises:
        ValueError: If the line has another form.
    """
    try:
        key = form.load_ssh_public_key(line.encode())
    except Exception:  # cryptography raises many exception classes on invalid bytes
        raise ValueError(f"is no OpenSSH public key, one line that begins with {KEY_KIND}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError(f"is a key of another kind than {KEY_KIND}; flwr-client approvers add makes one")
    if "\n" in line or line.split()[:2] != format_approver_public_key(key, "").split()[:2]:
        raise ValueError("is not one line as OpenSSH writes it")
    return line


def _derive_sealing_key(passphrase: str, salt: bytes) -> bytes:
    derived = Scrypt(salt, 32, n=_SCRYPT_COST, r=_SCRYPT_BLOCK, p=_SCRYPT_LANES)
    return derived.derive(passphrase.encode())


# ---------------------------------------------------------------------- decisions


class PlanDecision(BaseModel):
    """A person's decision on a plan.

    Attributes:
        kind: Kind of the request whose text the person read: ``training``.
        sha256: SHA-256 of the text, exactly as the coordinator sent it.
        site: Name of the site where the decision is valid.
        coordinator: Name of the coordinator, from the site's kit.
        authority: SHA-256 of the public key of the coordinator's authority; empty if the site did not know it.
        title, purpose: Title of the run, and its purpose according to the plan or the approver.
        approver, key: Name of the person, and fingerprint of their public key.
        time: UTC time of the decision (ISO 8601).
        until: UTC time at which an approval ends; empty for a denial.
        reason: Reason of a denial; empty for an approval.
        policy: The keys of the site's policy that decide what leaves the hospital, with their values at that time.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    decision: Literal["approved", "denied"]
    kind: str = Field(max_length=40)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    site: str = Field(max_length=200)
    coordinator: str = Field(max_length=200)
    authority: str = Field(pattern="^([0-9a-f]{64})?$")
    title: str = Field(max_length=500)
    purpose: str = Field(max_length=500)
    approver: str = Field(max_length=200)
    key: str = Field(max_length=100)
    time: str
    until: str = ""
    reason: str = Field("", max_length=500)
    policy: dict[str, Any] = Field(default_factory=dict)

    @field_validator("time", "until")
    @classmethod
    def _check_time(cls, text: str) -> str:
        if text and dt.datetime.fromisoformat(text).utcoffset() != dt.timedelta(0):
            raise ValueError("expected a UTC time")
        return text

    @property
    def is_approval(self) -> bool:
        return self.decision == "approved"

    @property
    def end(self) -> dt.datetime:
        """The time at which an approval ends."""
        return dt.datetime.fromisoformat(self.until)

    def to_canonical_text(self) -> str:
        """Return the text of this decision that is signed: JSON with sorted keys and without spaces."""
        return _to_canonical_json(self.model_dump(mode="json"))


def sign_decision(decision: PlanDecision, key: Ed25519PrivateKey) -> bytes:
    """Return the content of a decision's file: its canonical text and the signature."""
    text = decision.to_canonical_text()
    signature = base64.b64encode(key.sign(_SIGNED_PREFIX + text.encode())).decode()
    return _to_canonical_json({"decision": text, "signature": signature}).encode() + b"\n"


def verify_decision(content: bytes, approvers: Mapping[str, str]) -> PlanDecision:
    """Verify the file of a decision; return the decision.

    Args:
        content: The file's bytes.
        approvers: Name -> public key, from the present ``site.toml``.

    Raises:
        DecisionFault: If a byte of the file was changed, or none of ``approvers`` signed it.
    """
    decision, signature = parse_decision(content)
    if decision.approver not in approvers:
        raise DecisionFault(f"{decision.approver} is not in [approvers] of site.toml")
    line = approvers[decision.approver]
    if compute_public_key_fingerprint(line) != decision.key:
        raise DecisionFault(f"it is signed with another key of {decision.approver} than [approvers] has")
    key = form.load_ssh_public_key(line.encode())
    assert isinstance(key, Ed25519PublicKey), "site.toml is checked"
    try:
        key.verify(signature, _SIGNED_PREFIX + decision.to_canonical_text().encode())
    except InvalidSignature:
        raise DecisionFault(f"its signature is not that of {decision.approver}: the file was changed") from None
    return decision


def parse_decision(content: bytes) -> tuple[PlanDecision, bytes]:
    """Return a decision and its signature, which this function does not verify.

    Raises:
        DecisionFault: If the file is not exactly in the format of :func:`sign_decision`.
    """
    try:
        if len(content) > MAX_DECISION_BYTES:
            raise ValueError("it is too large")
        file = json.loads(content)
        decision = PlanDecision.model_validate_json(file["decision"])
        signature = base64.b64decode(file["signature"], validate=True)
        parts = {"decision": decision.to_canonical_text(), "signature": base64.b64encode(signature).decode()}
        if _to_canonical_json(parts).encode() + b"\n" != content:
            raise ValueError("it has other bytes")
    except (ValueError, TypeError, KeyError, RecursionError):
        raise DecisionFault("the file was changed: it is not what flwr-client plans wrote") from None
    return decision, signature


def compute_decision_hash(content: bytes) -> str:
    """Return the SHA-256 of a decision's file, with which the audit log identifies it."""
    return hashlib.sha256(content).hexdigest()


def _to_canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
