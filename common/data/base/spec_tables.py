"""What a config file says about pictures beside a table of labels: in a folder, or in an archive of the hospital's."""

import re
from ipaddress import ip_address
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from common.data.base.decoded_size import LARGEST_MB
from common.data.base.spec_base import (
    SPLIT_SEED,
    Axis,
    Fraction,
    Frame,
    LabelPolicy,
    LargestMb,
    LegacySeed,
    Rendering,
    Resize,
    Side,
    Spec,
    Window,
)


class ShownSpec(Spec):
    """What all pictures beside a table have in common.

    Attributes:
        labels: The table, ``.csv`` or ``.csv.gz``.
        image_size: Height and width in pixels after resizing.
        resize: ``"pad"`` keeps the aspect ratio on black; ``"stretch"`` does not.
        skip_budget: Part of the images that may be unreadable before the load stops.
        missing_files: Whether rows of the table without a file are a fault, or left out and counted.
        frame: Of DICOM files of several, and of NIfTI volumes: its number from 1, or ``"middle"``; without it such a
            file is unreadable.
        axis: Across which NIfTI volumes are sliced.
        window: Centre and width of the grey values of DICOM and NIfTI files, in the place of their own.
        largest_mb: MiB that one picture may take once it is decoded, and the table in any case.
    """

    labels: str
    image_size: Side = 224
    resize: Resize = "pad"
    color: bool = False
    skip_budget: Fraction = 0.05
    missing_files: Literal["ignore", "fault"] = "fault"
    frame: Frame | None = None
    axis: Axis = "axial"
    window: Window | None = None
    largest_mb: LargestMb = LARGEST_MB
    split_seed: LegacySeed = SPLIT_SEED

    @property
    def rendering(self) -> Rendering:
        return Rendering(self.frame, self.axis, self.window, self.largest_mb)


class PictureSpec(ShownSpec):
    """What all folders of picture files have in common; ``images`` is the folder."""

    images: str


class LabelColumnsSpec(ShownSpec):
    """Columns of a hospital's own table.

    Labels stand either in one column per class (``label_columns``: 1, 0, -1 uncertain, or blank), or as names in one
    column (``finding_column``, parted by ``separator``, of which ``classes`` are kept).

    Attributes:
        uncertain: What -1 means.
        blank: What an empty cell means.
        split_column: Values train, val or validation, test; without it patients are split 70/10/20 (see ``splits``).
        validation_fraction: Part of the training patients held out where ``split_column`` has no validation rows.
    """

    label_columns: tuple[str, ...] = ()
    finding_column: str | None = None
    separator: Annotated[str, Field(min_length=1)] = "|"
    classes: tuple[str, ...] = ()
    uncertain: LabelPolicy = "unknown"
    blank: Literal["unknown", "negative"] = "unknown"
    patient_column: str | None = None
    source_column: str | None = None
    split_column: str | None = None
    validation_fraction: Fraction = 0.1

    @model_validator(mode="after")
    def _labels_said_once(self) -> Self:
        if bool(self.label_columns) == (self.finding_column is not None):
            raise ValueError("give either label_columns, or finding_column with classes")
        if (self.finding_column is not None) != bool(self.classes):
            raise ValueError("finding_column and classes belong together: classes names the findings to keep")
        return self


class FolderSpec(LabelColumnsSpec, PictureSpec):
    """A table and a folder of PNG, JPEG, DICOM or NIfTI files (distinguished by content)."""

    kind: Literal["folder"]
    image_column: str


_URL = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?(/[A-Za-z0-9._~/-]*)?")
_LAST_PORT = 65535
_ALONE = ("127.0.0.1", "localhost", "[::1]")
"""Hosts to which a secret may go without TLS: it does not leave the machine."""


def _is_address(host: str) -> bool:
    """Whether what stands in brackets is an IPv6 address."""
    try:
        return not host.startswith("[") or bool(ip_address(host[1:-1]))
    except ValueError:
        return False


class DicomwebSpec(LabelColumnsSpec):
    """A table and a PACS that answers QIDO-RS and WADO-RS.

    Attributes:
        url: Where both services lie, ``https://HOST/dicom-web``.
        instance_column: SOPInstanceUID: a row is an image.
        study_column: StudyInstanceUID: a row is a study, and all its images have the row's labels; beside
            ``instance_column``, where each row's image lies.
        accession_column: AccessionNumber in the place of StudyInstanceUID.
        modalities: Keep only series of these, such as ``["DX", "CR"]``; all that hold pictures where empty.
        ca_file: Certificates (PEM) by which the server's is judged; the system's where None.
        authentication: ``"bearer"`` sends a token, ``"basic"`` a name and a password.
        secret_file: Holds the token, or ``NAME:PASSWORD``; only its owner may read it.
        secret_env: An environment variable in its place.
        cache: The folder in which answers are kept.
        cache_gb: What the files in it may take; the least recently used go first.
        largest_mb: MiB that one image may take as it is sent, and once it is decoded.
        timeout_s: For a connection, and for the beginning of an answer.
        connections: Open at a time.
    """

    kind: Literal["dicomweb"]
    url: str
    instance_column: str | None = None
    study_column: str | None = None
    accession_column: str | None = None
    modalities: tuple[Annotated[str, Field(pattern="^[A-Z0-9_ ]{1,16}$")], ...] = ()
    ca_file: str | None = None
    authentication: Literal["bearer", "basic"] | None = None
    secret_file: str | None = None
    secret_env: str | None = None
    cache: str = "dicomweb-cache"
    cache_gb: Annotated[float, Field(gt=0, le=100_000)] = 20
    largest_mb: Annotated[int, Field(ge=1, le=2048)] = LARGEST_MB
    timeout_s: Annotated[float, Field(ge=0.1, le=600)] = 30
    connections: Annotated[int, Field(ge=1, le=16)] = 4

    @field_validator("url")
    @classmethod
    def _an_address(cls, url: str) -> str:
        found = _URL.fullmatch(url)
        if not found or int((found[2] or ":1")[1:]) > _LAST_PORT or not _is_address(found[1]):
            # With quotes in it the message is not followed by the value, in which somebody may have put a password.
            raise ValueError('must be "https://HOST[:PORT]/PATH" without a name, a password, a ? or a #')
        return url.rstrip("/")

    @model_validator(mode="after")
    def _keys_fit(self) -> Self:
        if self.study_column is not None and self.accession_column is not None:
            raise ValueError("give study_column or accession_column, not both")
        if not (self.instance_column or self.study_column or self.accession_column):
            raise ValueError("give instance_column, study_column or accession_column: what names an image in the PACS")
        return self

    @model_validator(mode="after")
    def _secret_fits(self) -> Self:
        given = [key for key in ("secret_file", "secret_env") if getattr(self, key)]
        if len(given) != (self.authentication is not None):
            raise ValueError("authentication needs secret_file or secret_env, and these need authentication")
        if self.authentication and self.url.startswith("http:") and self.host not in _ALONE:
            raise ValueError("with authentication the address must begin with https: anyone could read the secret")
        return self

    @property
    def host(self) -> str:
        """The host that the address names."""
        found = _URL.fullmatch(self.url)
        assert found
        return found[1]
