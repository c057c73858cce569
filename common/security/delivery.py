"""The package by which a coordinator hands a finished run out to one hospital: ``NAME.delivery``, a signed zip file.

It holds the model, its card, the hospital's own report and the run's receipt. The coordinator signs a manifest with the
SHA-256 of each file, by the key with which it signs requests. A hospital verifies it offline, against the authority of
its kit.

The zip file is not compressed, its entries are in a fixed order and have no times: the same files are the same bytes.
"""

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from polyclinic.common.security.signatures import (
    LONGEST_CERTIFICATE,
    SIGNED_WITH,
    SignatureFault,
    verify_signing_certificate,
)
from polyclinic.common.system.plain_names import RunName
from polyclinic.common.system.plain_text import format_bytes, make_printable_line
from polyclinic.common.wire.delivery import MOST_PACKAGE_BYTES

ENDING = ".delivery"
DELIVERY_RUN = "delivery"
"""Beginning of the name under which the coordinator sends a package, as it sends questions."""
MODEL = "model.safetensors"
DESCRIPTION = "model.json"
CARD = "MODEL_CARD.md"
REPORT = "report.html"
RECEIPT = "receipt.json"
THRESHOLDS = "summary.json"
FILES = (MODEL, DESCRIPTION, CARD, REPORT, RECEIPT, THRESHOLDS)
"""The files of a package, without the manifest and its signature."""
MANIFEST = "manifest.json"
SIGNATURE = "signature.json"
_PREFIX = b"polyclinic delivery\n"
"""Keeps a signature of a package from being shown as a signature of something else."""
_FIRST_DAY = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip file can state."""
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError)
"""Exceptions of zipfile for bytes that are damaged or cut off."""


class DeliveryFault(ValueError):
    """Raised for a package that is altered, or not by the coordinator of this site, with the reason as text."""


class OtherSiteDelivery(DeliveryFault):
    """Raised for a whole package that is for another site."""


class DeliveredFile(BaseModel):
    """Size and SHA-256 of a file in a package."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    bytes: int = Field(ge=0, le=MOST_PACKAGE_BYTES)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class DeliveryManifest(BaseModel):
    """What a coordinator signs for a package.

    Attributes:
        run: The run's identifier, as in its receipt.
        name: The run's title; empty if it has none.
        site: Name of the hospital that the package is for.
        coordinator: Name of the coordinator.
        time: UTC time of the signature (ISO 8601).
        model_sha256: Hash of the model's numbers, as in the receipt.
        files: File -> its size and hash.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: Literal[1] = 1
    run: Annotated[str, AfterValidator(RunName)]
    name: str = Field(max_length=500)
    site: str = Field(max_length=200)
    coordinator: str = Field(max_length=200)
    time: str = Field(max_length=40)
    model_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    files: dict[str, DeliveredFile]

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        if set(self.files) != set(FILES):
            raise ValueError(f"the files must be {', '.join(FILES)}")
        return self

    @property
    def title(self) -> str:
        """The run's title for people, or its identifier."""
        return make_printable_line(self.name or self.run)


class ManifestSignature(BaseModel):
    """The content of ``signature.json``: signature and certificate (DER) in hexadecimal digits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    signature: str = Field(pattern="^[0-9a-f]{0,300}$")
    certificate: str = Field(pattern="^[0-9a-f]*$", max_length=2 * LONGEST_CERTIFICATE)


@dataclass(frozen=True)
class Delivery:
    """A package.

    Attributes:
        contents: File -> its bytes, with the manifest and its signature.
    """

    manifest: DeliveryManifest
    contents: Mapping[str, bytes]


def describe_files(contents: Mapping[str, bytes]) -> dict[str, DeliveredFile]:
    """Return file -> its size and SHA-256, as a manifest lists them."""
    return {
        name: DeliveredFile(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in sorted(contents.items())
    }


def sign_delivery(
    manifest: DeliveryManifest, contents: Mapping[str, bytes], key: ec.EllipticCurvePrivateKey, certificate: bytes
) -> Delivery:
    """Sign a package.

    Args:
        contents: File -> its bytes; each of :data:`FILES`.
        certificate: Certificate of the signing key, DER.
    """
    text = json.dumps(manifest.model_dump(mode="json"), indent=1, sort_keys=True).encode() + b"\n"
    signature = ManifestSignature(signature=key.sign(_PREFIX + text, SIGNED_WITH).hex(), certificate=certificate.hex())
    signed = {MANIFEST: text, SIGNATURE: signature.model_dump_json().encode() + b"\n"}
    return Delivery(manifest, {**contents, **signed})


def verify_delivery(contents: Mapping[str, bytes], authority: x509.Certificate, site: str) -> Delivery:
    """Verify the files of a package.

    Args:
        contents: File -> its bytes.
        authority: Certificate of the coordinator's authority, from the site's kit.
        site: Name of the site, which the package must be for.

    Raises:
        DeliveryFault: If a byte was changed, another authority signed, or the package is another site's.
    """
    if set(contents) != {*FILES, MANIFEST, SIGNATURE}:
        raise DeliveryFault(f"it does not hold exactly the files {', '.join((*FILES, MANIFEST, SIGNATURE))}")
    try:
        signature = ManifestSignature.model_validate_json(contents[SIGNATURE])
        key = verify_signing_certificate(bytes.fromhex(signature.certificate), authority)
        key.verify(bytes.fromhex(signature.signature), _PREFIX + contents[MANIFEST], SIGNED_WITH)
    except SignatureFault as error:
        raise DeliveryFault(f"another authority signed it than that of this site's kit: {error}") from None
    except (ValidationError, ValueError):
        raise DeliveryFault(f"{SIGNATURE} cannot be read: it was changed") from None
    except InvalidSignature:
        raise DeliveryFault(f"{MANIFEST} was changed after the coordinator signed it") from None
    try:
        manifest = DeliveryManifest.model_validate_json(contents[MANIFEST])
    except ValidationError as error:
        raise DeliveryFault(f"{MANIFEST} is not in the form of this release: {error.errors()[0]['msg']}") from None
    if manifest.site != site:
        name = make_printable_line(manifest.site)
        raise OtherSiteDelivery(f'it is for the site "{name}", and this site is "{site}"')
    actual = describe_files({name: contents[name] for name in FILES})
    changed = [name for name in FILES if actual[name] != manifest.files[name]]
    if changed:
        raise DeliveryFault(f"{changed[0]} was changed: it has SHA-256 {actual[changed[0]].sha256}")
    return Delivery(manifest, contents)


def pack_delivery(delivery: Delivery) -> bytes:
    """Return a package as the bytes of a zip file."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name in (MANIFEST, SIGNATURE, *FILES):
            entry = zipfile.ZipInfo(name, _FIRST_DAY)
            entry.external_attr = 0o600 << 16
            archive.writestr(entry, delivery.contents[name])
    return file.getvalue()


def unpack_delivery(content: bytes) -> dict[str, bytes]:
    """Return file -> its bytes of a package, before it is verified.

    Raises:
        DeliveryFault: If the content is no zip file of exactly these files, or too large.
    """
    if len(content) > MOST_PACKAGE_BYTES:
        raise DeliveryFault(
            f"it has {format_bytes(len(content))}, and a package has {format_bytes(MOST_PACKAGE_BYTES)} at most"
        )
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            names = [entry.filename for entry in entries]
            if sorted(names) != sorted((*FILES, MANIFEST, SIGNATURE)):
                raise DeliveryFault("it holds other files than a package of flwr-server deliver")
            # A compressed entry could unpack to far more than the file that came.
            if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
                raise DeliveryFault("it is compressed or encrypted, which no package of flwr-server deliver is")
            return {name: archive.read(name) for name in names}
    except DeliveryFault:
        raise
    except _DAMAGED as error:
        raise DeliveryFault(f"it is no whole zip file ({error}): it was changed, or cut off on its way") from None
