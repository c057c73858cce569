"""A key pair, a request, a kit and an authority, made once; nothing here guards anything."""

from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec

from common.security.identity import public_line
from common.system.toml import toml_text
from server.coordinator.authority import make_authority
from server.coordinator.folder import Coordinator, CoordinatorFile

_PRIVATE = ec.derive_private_key(7, ec.SECP256R1())
KEY = _PRIVATE.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()).decode()
LINE = public_line(_PRIVATE, "north")
OTHER_LINE = public_line(ec.derive_private_key(8, ec.SECP256R1()), "south")


@lru_cache
def authority() -> str:
    """PEM of an authority's certificate."""
    with TemporaryDirectory() as folder:
        made = Coordinator(Path(folder), CoordinatorFile(name="trial", hosts=("fl.example",), port=1))
        make_authority(made)
        return made.ca_certificate.read_text(encoding="ascii")


def request_text(**other: str) -> str:
    return _text({"site": "north", "public_key": LINE} | other)


def kit_text(**other: str) -> str:
    kit = {"coordinator": "trial", "address": "fl.example:9092", "site": "north", "public_key": LINE}
    return _text(kit | {"ca_certificate": authority()} | other)


def _text(fields: dict[str, str]) -> str:
    return "".join(f"{key} = {toml_text(value)}\n" for key, value in fields.items())
