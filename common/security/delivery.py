"""The package in which a coordinator delivers a finished run to one hospital: ``NAME.delivery``, a signed zip file.

It contains the model, the model card, a report for this hospital and the run's receipt. The coordinator signs a
manifest with the SHA-256 of each file, with the key that signs requests. The hospital verifies it offline, against the
authority in its kit.

The zip file is not compressed, and its entries have a fixed order and no times, so equal files give equal bytes.
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
    MAX_CERTIFICATE_BYTES,
    SIGNATURE_ALGORITHM,
    SignatureFault,
    verify_signing_certificate,
)
from polyclinic.common.system.plain_names import RunName
from polyclinic.common.system.plain_text import format_bytes, make_printable_line
from polyclinic.common.wire.delivery import MAX_PACKAGE_BYTES

DELIVERY_SUFFIX = ".delivery"
DELIVERY_RUN = "delivery"
"""Prefix of the run name under which the coordinator sends a package, in the same way as questions."""
MODEL_FILE = "model.safetensors"
DESCRIPTION_FILE = "model.json"
MODEL_CARD_FILE = "MODEL_CARD.md"
REPORT_FILE = "report.html"
RECEIPT_FILE = "receipt.json"
THRESHOLDS_FILE = "summary.json"
PACKAGE_FILES = (MODEL_FILE, DESCRIPTION_FILE, MODEL_CARD_FILE, REPORT_FILE, RECEIPT_FILE, THRESHOLDS_FILE)
"""The files of a package, without the manifest and its signature."""
MANIFEST_FILE = "manifest.json"
SIGNATURE_FILE = "signature.json"
_SIGNED_PREFIX = b"polyclinic delivery\n"
"""Prefix of each signed text, so that the signature of a package is not valid for another kind of text."""
_EARLIEST_ZIP_TIME = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip file can contain."""
_DAMAGED_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError)
"""Exceptions of zipfile for damaged or truncated bytes."""


class DeliveryFault(ValueError):
    """Raised with a reason for a package that is altered, or is not by this site's coordinator."""


class OtherSiteDelivery(DeliveryFault):
    """Raised for an intact package that is for another site."""


class DeliveredFile(BaseModel):
    """Size and SHA-256 of a file in a package."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    bytes: int = Field(ge=0, le=MAX_PACKAGE_BYTES)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class DeliveryManifest(BaseModel):
    """The text that a coordinator signs for a package.

    Attributes:
        run: The run's identifier, as in its receipt.
        name: The run's title; empty if it has none.
        site: Name of the hospital that receives the package.
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
        if set(self.files) != set(PACKAGE_FILES):
            raise ValueError(f"the files must be {', '.join(PACKAGE_FILES)}")
        return self

    @property
    def title(self) -> str:
        """The run's title for people; without one, its identifier."""
        return make_printable_line(self.name or self.run)


class ManifestSignature(BaseModel):
    """The content of ``signature.json``: signature and certificate (DER) in hexadecimal digits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    signature: str = Field(pattern="^[0-9a-f]{0,300}$")
    certificate: str = Field(pattern="^[0-9a-f]*$", max_length=2 * MAX_CERTIFICATE_BYTES)


@dataclass(frozen=True)
class Delivery:
    """A signed package.

    Attributes:
        manifest: The manifest.
        contents: File -> its bytes, including the manifest and its signature.
    """

    manifest: DeliveryManifest
    contents: Mapping[str, bytes]


def describe_files(contents: Mapping[str, bytes]) -> dict[str, DeliveredFile]:
    """Return file -> its size and SHA-256, for a manifest."""
    return {
        name: DeliveredFile(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in sorted(contents.items())
    }


def sign_delivery(
    manifest: DeliveryManifest, contents: Mapping[str, bytes], key: ec.EllipticCurvePrivateKey, certificate: bytes
) -> Delivery:
    """Sign a package.

    Args:
        manifest: The manifest.
        contents: File -> its bytes, for all of :data:`PACKAGE_FILES`.
        key: The signing key.
        certificate: Certificate of the signing key, DER.
    """
    text = json.dumps(manifest.model_dump(mode="json"), indent=1, sort_keys=True).encode() + b"\n"
    signature = ManifestSignature(
        signature=key.sign(_SIGNED_PREFIX + text, SIGNATURE_ALGORITHM).hex(), certificate=certificate.hex()
    )
    signed = {MANIFEST_FILE: text, SIGNATURE_FILE: signature.model_dump_json().encode() + b"\n"}
    return Delivery(manifest, {**contents, **signed})


def verify_delivery(contents: Mapping[str, bytes], authority: x509.Certificate, site: str) -> Delivery:
    """Verify the files of a package.

    Args:
        contents: File -> its bytes.
        authority: Certificate of the coordinator's authority, from the site's kit.
        site: Name of the site that must be the receiver.

    Raises:
        DeliveryFault: If a byte was changed, another authority signed, or the package is another site's.
    """
    if set(contents) != {*PACKAGE_FILES, MANIFEST_FILE, SIGNATURE_FILE}:
        raise DeliveryFault(
            f"it does not hold exactly the files {', '.join((*PACKAGE_FILES, MANIFEST_FILE, SIGNATURE_FILE))}"
        )
    try:
        signature = ManifestSignature.model_validate_json(contents[SIGNATURE_FILE])
        key = verify_signing_certificate(bytes.fromhex(signature.certificate), authority)
        key.verify(bytes.fromhex(signature.signature), _SIGNED_PREFIX + contents[MANIFEST_FILE], SIGNATURE_ALGORITHM)
    except SignatureFault as error:
        raise DeliveryFault(f"another authority signed it than that of this site's kit: {error}") from None
    except (ValidationError, ValueError):
        raise DeliveryFault(f"{SIGNATURE_FILE} cannot be read: it was changed") from None
    except InvalidSignature:
        raise DeliveryFault(f"{MANIFEST_FILE} was changed after the coordinator signed it") from None
    try:
        manifest = DeliveryManifest.model_validate_json(contents[MANIFEST_FILE])
    except ValidationError as error:
        raise DeliveryFault(f"{MANIFEST_FILE} is not in the form of this release: {error.errors()[0]['msg']}") from None
    if manifest.site != site:
        name = make_printable_line(manifest.site)
        raise OtherSiteDelivery(f'it is for the site "{name}", and this site is "{site}"')
    actual = describe_files({name: contents[name] for name in PACKAGE_FILES})
    changed = [name for name in PACKAGE_FILES if actual[name] != manifest.files[name]]
    if changed:
        raise DeliveryFault(f"{changed[0]} was changed: it has SHA-256 {actual[changed[0]].sha256}")
    return Delivery(manifest, contents)


def pack_delivery(delivery: Delivery) -> bytes:
    """Return a package as the bytes of a zip file."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name in (MANIFEST_FILE, SIGNATURE_FILE, *PACKAGE_FILES):
            entry = zipfile.ZipInfo(name, _EARLIEST_ZIP_TIME)
            entry.external_attr = 0o600 << 16
            archive.writestr(entry, delivery.contents[name])
    return file.getvalue()


def unpack_delivery(content: bytes) -> dict[str, bytes]:
    """Return file -> its bytes from a package, without verifying them.

    Raises:
        DeliveryFault: If the content is not a zip file of exactly these files, or too large.
    """
    if len(content) > MAX_PACKAGE_BYTES:
        raise DeliveryFault(
            f"it has {format_bytes(len(content))}, and a package has {format_bytes(MAX_PACKAGE_BYTES)} at most"
        )
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            names = [entry.filename for entry in entries]
            if sorted(names) != sorted((*PACKAGE_FILES, MANIFEST_FILE, SIGNATURE_FILE)):
                raise DeliveryFault("it holds other files than a package of flwr-server deliver")
            # A compressed entry could unpack to far more than the size of the package.
            if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
                raise DeliveryFault("it is compressed or encrypted, which no package of flwr-server deliver is")
            return {name: archive.read(name) for name in names}
    except DeliveryFault:
        raise
    except _DAMAGED_ZIP_ERRORS as error:
        raise DeliveryFault(f"it is no whole zip file ({error}): it was changed, or cut off on its way") from None
