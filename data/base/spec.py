"""Settings of a data set in a configuration file, as immutable pydantic models.

Relative paths start from the folder of the configuration file. This module reads no data:
:mod:`polyclinic.data.load` does.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from polyclinic.common.errors import quote_names
from polyclinic.common.hosts import RETIRED_KEYS, SECRETS_FILE, HostUse, find_user_secrets_path, normalize_host
from polyclinic.common.plugins import NAME_PATTERN, PluginName
from polyclinic.common.system.plain_text import PLAIN_NAME
from polyclinic.data.base.attributes import Sex
from polyclinic.data.base.decoded_size import DEFAULT_LARGEST_MB
from polyclinic.data.base.names import Name

Resize = Literal["pad", "stretch"]
Frame = Annotated[int, Field(ge=1)] | Literal["middle"]
Axis = Literal["axial", "coronal", "sagittal"]
Window = tuple[float, Annotated[float, Field(ge=1)]]
"""Centre and width of a window, in rescaled values (Hounsfield units in CT)."""


def _check_value_range(limits: tuple[float, float]) -> tuple[float, float]:
    if not limits[0] < limits[1]:
        raise ValueError(f"goes from {limits[0]:g} to {limits[1]:g}: name the value of black first")
    return limits


ValueRange = Annotated[tuple[float, float], AfterValidator(_check_value_range)]
"""The stored values that are shown as black and as white; values outside are clipped."""
BitDepth = Annotated[int, Field(ge=8, le=16)]
LabelPolicy = Literal["unknown", "negative", "positive"]
LabelWord = Literal["present", "absent", "not assessed"]
"""The meaning that a user can give to a word in a label column."""
Duplicates = Literal["fault", "drop_from_training"]
"""How to handle pictures that are in two parts (:mod:`polyclinic.data.base.shared_pictures`)."""
Fraction = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(gt=0)]
MAX_MASK_CLASSES = 63
"""Maximum number of classes in masks: the positive bits of int64, torch's widest integer type."""
Side = Annotated[int, Field(gt=0, le=4096)]
"""Height or width of an image, in pixels."""
Millimetres = Annotated[float, Field(gt=0, le=100)]
VolumeSize = tuple[Side, Side, Side]
"""Depth, height and width of a volume, in voxels."""
_SIDE_ADAPTER = TypeAdapter[int](Side)
_VOLUME_ADAPTER = TypeAdapter[VolumeSize](VolumeSize)


def _check_image_size(value: Any, _: ValidatorFunctionWrapHandler) -> Any:
    """Check an image size; a list is checked as the three sides of volumes, all else as the side of square pictures."""
    if not isinstance(value, list | tuple):
        return _SIDE_ADAPTER.validate_python(value)
    if len(value) != 3:
        raise ValueError("a number of pixels for pictures, [depth, height, width] in voxels for volumes")
    return _VOLUME_ADAPTER.validate_python(tuple(value))


ImageSize = Annotated[int | VolumeSize, WrapValidator(_check_image_size)]
"""The side of square pictures in pixels, or the three sides of volumes in voxels."""


def describe_sides(sides: Sequence[int], times: str = "×") -> str:
    """Return the size of an image in words: ``64 × 48 pixels``, or ``48 × 64 × 64 voxels``.

    Args:
        sides: Height and width of a picture; depth, height and width of a volume.
        times: The multiplication sign between two sides.
    """
    product = f" {times} ".join(map(str, sides))
    unit = "voxels" if len(sides) == 3 else "pixels"
    return f"{product} {unit}"


def format_image_size(size: int | VolumeSize | list[int]) -> str:
    """Return an image size as it is written in a configuration file: ``64``, or ``[48, 64, 64]``."""
    return str(size if isinstance(size, int) else list(size))


Spacing = tuple[Millimetres, Millimetres, Millimetres]
"""Distance between neighbouring voxels in mm, along depth, height and width."""
LargestMb = Annotated[int, Field(ge=1, le=2**20)]
"""Limit in MiB for a decoded file (:mod:`polyclinic.data.base.decoded_size`)."""
LegacySeed = Annotated[int, Field(ge=0, lt=2**32)]
"""A seed in the range of numpy's legacy generator."""


ClassNames = Annotated[tuple[Name, ...], Field(min_length=1)]
NO_FINDING = ("No Finding", "No Findings", "Normal")
"""Default names of a finding that say that all classes are absent; case is ignored."""
DEFAULT_SEPARATOR = "|"
"""Separator of the findings in a cell if the key ``separator`` is not set."""
MISSING_CLASSES_MESSAGE_START = "finding_column and classes belong together"
"""Beginning of the error message for a finding column without a list of classes."""

SPLIT_SEED = 1337
"""Default seed of the split into training, validation and test part."""


class BaseDatasetSpec(BaseModel):
    """Base class of all data settings: immutable models that refuse unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@dataclass(frozen=True)
class PictureRenderingOptions:
    """Options for rendering an image file as one 8-bit picture: which frame or slice, and which grey values.

    Attributes:
        frame: Number of the frame in a multi-frame DICOM file, or of the slice in a NIfTI volume, from 1, or
            ``"middle"``; without it such files are unreadable.
        axis: The axis at right angles to the slices of a NIfTI volume.
        window: Window centre and width that replace those of the file; None uses the file's own window, or else the
            image's range of values.
        largest_mb: MiB that one decoded picture may take.
        bit_depth: Number of significant bits in 16-bit PNG samples, which a file does not state; None refuses them.
        jpeg_draft: Decode JPEG files at a half, a quarter or an eighth of their size, but not below ``image_size``: two
            to three times as fast, with slightly different pixels.
        value_range: Stored values of PNG and JPEG files that are black and white; None takes 0 and 255, or the range of
            ``bit_depth``.
        spacing: Distance of neighbouring voxels in mm to which volumes are resampled; None resizes each whole volume.
    """

    frame: Frame | None = None
    axis: Axis = "axial"
    window: Window | None = None
    largest_mb: int = DEFAULT_LARGEST_MB
    bit_depth: int | None = None
    jpeg_draft: bool = False
    value_range: tuple[float, float] | None = None
    spacing: Spacing | None = None


DEFAULT_RENDERING = PictureRenderingOptions()
ONLY_FOR_PICTURES = ("frame", "axis", "bit_depth", "jpeg_draft", "value_range")
"""Keys of ``[data]`` that have no meaning for volumes, which are read whole."""
ONLY_FOR_VOLUMES = ("spacing",)
"""Keys of ``[data]`` that have a meaning for volumes alone."""


class PictureTableSpec(BaseDatasetSpec):
    """Common settings of all data sets that consist of a label table and pictures.

    Attributes:
        labels: The table, ``.csv`` or ``.csv.gz``.
        color: Read pictures in colour; otherwise in grey.
        split_seed: Seed of the split into training, validation and test part.
        image_size: Height and width in pixels after resizing; three numbers make volumes of that depth, height and
            width in voxels.
        resize: ``"pad"`` keeps the aspect ratio and pads with black; ``"stretch"`` does not keep it. It has no meaning
            for volumes with a ``spacing``, which are cropped or padded.
        skip_budget: Fraction of unreadable images above which the data set is refused.
        missing_files: ``"fault"`` refuses a table with rows whose image file is missing; ``"ignore"`` leaves these rows
            out and counts them.
        largest_mb: Limit in MiB for one decoded picture. The limit for the decoded label table is at least as high, and
            grows with the size of its file.
        frame, axis, window, bit_depth, jpeg_draft, value_range, spacing: See :class:`PictureRenderingOptions`.
        duplicates: ``"fault"`` refuses parts that share pictures; ``"drop_from_training"`` drops the copies: those of
            test pictures from training and validation, those of validation pictures from training.
    """

    labels: str
    image_size: ImageSize = 224
    resize: Resize = "pad"
    color: bool = False
    skip_budget: Fraction = 0.05
    missing_files: Literal["ignore", "fault"] = "fault"
    frame: Frame | None = None
    axis: Axis = "axial"
    window: Window | None = None
    largest_mb: LargestMb = DEFAULT_LARGEST_MB
    bit_depth: BitDepth | None = None
    jpeg_draft: bool = False
    value_range: ValueRange | None = None
    spacing: Spacing | None = None
    duplicates: Duplicates = "fault"
    split_seed: LegacySeed = SPLIT_SEED

    @model_validator(mode="after")
    def _check_one_range(self) -> Self:
        if self.bit_depth is not None and self.value_range is not None:
            raise ValueError("give bit_depth or value_range, not both: each says which value is white")
        return self

    @model_validator(mode="after")
    def _check_keys_of_volumes(self) -> Self:
        if isinstance(self.image_size, int):
            if self.spacing is not None:
                raise ValueError("spacing is for volumes, whose image_size is [depth, height, width] in voxels")
            return self
        keys = ("color", *ONLY_FOR_PICTURES)
        if useless := [key for key in keys if getattr(self, key) != type(self).model_fields[key].default]:
            problem = f"{', '.join(useless)}: only for pictures, and image_size names three sides, of volumes"
            raise ValueError(f"{problem}. Black and white of a volume: window = [centre, width]")
        return self

    @property
    def rendering_options(self) -> PictureRenderingOptions:
        """The settings that decide how one file is rendered as a picture."""
        return PictureRenderingOptions(
            frame=self.frame,
            axis=self.axis,
            window=self.window,
            largest_mb=self.largest_mb,
            bit_depth=self.bit_depth,
            jpeg_draft=self.jpeg_draft,
            value_range=self.value_range,
            spacing=self.spacing,
        )


class PictureFolderSpec(PictureTableSpec):
    """Common settings of all data sets whose pictures are files in a folder.

    Attributes:
        images: The folder.
    """

    images: str


def make_label_words(
    present: Iterable[str], absent: Iterable[str], not_assessed: Iterable[str] = ()
) -> dict[str, LabelWord]:
    """Return case-folded word -> its meaning, for the words that a user defines for label columns."""
    meanings: dict[str, LabelWord] = {}
    meanings |= dict.fromkeys(map(str.casefold, present), "present")
    meanings |= dict.fromkeys(map(str.casefold, absent), "absent")
    meanings |= dict.fromkeys(map(str.casefold, not_assessed), "not assessed")
    return meanings


class LabelColumnsSpec(PictureTableSpec):
    """Settings that name the columns of a hospital's label table.

    The table has either one column per class (``label_columns``, with cells 1, 0, -1 for uncertain, or blank), or one
    column with names of findings (``finding_column``, with ``separator`` between the names). Each finding must be in
    ``classes``, ``other_findings`` or ``no_finding``.

    Attributes:
        label_columns: One column for each class.
        finding_column: The column with names of findings.
        separator: Text between the names in a cell of ``finding_column``; a line end is ``"\\n"``, a tab ``"\\t"``.
        classes: The findings in ``finding_column`` that are classes.
        patient_column: Column of the patients; all images of a patient are in one part.
        source_column: Column of the hospitals, for ``images = "source"`` in ``[partition]``.
        other_findings: Findings in ``finding_column`` that are no class of the model; ``"*"`` allows all findings that
            do not resemble a class.
        no_finding: Names in ``finding_column`` that say that no class is present.
        present: Words in ``label_columns`` that count as 1, such as ``ja``.
        absent: Words in ``label_columns`` that count as 0, such as ``nein``.
        not_assessed: Words that say that nobody could assess the image, such as ``ungradable`` or ``99``. In
            ``label_columns`` the class is unknown, in ``finding_column`` all classes that the cell does not name.
        synonyms: Maps a label column, or a name in ``finding_column``, to the class that it means.
        uncertain: The meaning of -1 in ``label_columns``.
        blank: The meaning of an empty cell: for one class in ``label_columns``, for all classes in ``finding_column``.
        similar_patients: Names of patients that differ only in case, punctuation, spaces or zeros are refused
            (``"fault"``), or count as one patient in the split (``"join"``).
        split_column: Column with the values train, val or validation, and test; without it patients are split 70/10/20.
        validation_fraction: Fraction of the training patients held out for validation if ``split_column`` names none.
        sex_column: Column of the patient's sex; only counts use this and the next three keys
            (:mod:`polyclinic.data.base.attributes`).
        age_column: Column of the patient's age, or year of birth.
        date_column: Column of the image's date, or year.
        device_column: Column of the device.
        sex_words: The user's own words in ``sex_column`` -> ``female`` or ``male``.
    """

    label_columns: tuple[Name, ...] = ()
    finding_column: Name | None = None
    separator: Annotated[str, Field(min_length=1)] = DEFAULT_SEPARATOR
    classes: tuple[Name, ...] = ()
    other_findings: tuple[Name, ...] = ()
    no_finding: tuple[Name, ...] = NO_FINDING
    not_assessed: tuple[Name, ...] = ()
    present: tuple[Name, ...] = ()
    absent: tuple[Name, ...] = ()
    synonyms: Mapping[Name, Name] = Field(default_factory=dict)
    uncertain: LabelPolicy = "unknown"
    blank: Literal["unknown", "negative"] = "unknown"
    patient_column: Name | None = None
    similar_patients: Literal["fault", "join"] = "fault"
    source_column: Name | None = None
    split_column: Name | None = None
    validation_fraction: Fraction = 0.1
    sex_column: Name | None = None
    age_column: Name | None = None
    date_column: Name | None = None
    device_column: Name | None = None
    sex_words: Mapping[Name, Sex] = Field(default_factory=dict)

    @property
    def mask_classes(self) -> tuple[str, ...]:
        """The classes that have mask files; empty if the labels are in cells of the table."""
        return ()

    @property
    def class_names_in_table(self) -> tuple[str, ...]:
        """The class names and synonyms as written in the table."""
        return self.mask_classes or self.label_columns or tuple(dict.fromkeys((*self.classes, *self.synonyms)))

    @property
    def class_names(self) -> tuple[str, ...]:
        """The distinct class names, after each synonym is replaced by its class."""
        return tuple(dict.fromkeys(self.synonyms.get(name, name) for name in self.class_names_in_table))

    @property
    def label_words(self) -> Mapping[str, LabelWord]:
        """Case-folded word -> its meaning, for the words that the user defines for ``label_columns``."""
        return make_label_words(self.present, self.absent, self.not_assessed)

    @field_validator("separator")
    @classmethod
    def _normalize_separator(cls, separator: str) -> str:
        """Replace each run of white space by one space; a separator that is a single line end or tab stays."""
        alone = {"\r\n": "\n", "\r": "\n", "\n": "\n", "\t": "\t"}
        return alone.get(separator) or re.sub(r"\s+", " ", separator)

    @model_validator(mode="after")
    def _check_synonyms(self) -> Self:
        if chained := sorted(set(self.synonyms) & set(self.synonyms.values())):
            raise ValueError(f"synonyms: a class cannot be a synonym itself: {', '.join(chained)}")
        if self.label_columns and (foreign := sorted(set(self.synonyms) - set(self.label_columns))):
            raise ValueError(f"synonyms: on the left of each = stands one of label_columns, not {', '.join(foreign)}")
        return self

    @model_validator(mode="after")
    def _check_label_words(self) -> Self:
        lists = {"present": self.present, "absent": self.absent, "not_assessed": self.not_assessed}
        first = dict[str, str]()
        for key, words in lists.items():
            for word in words:
                other = first.setdefault(word.casefold(), key)
                if other != key:
                    raise ValueError(f'"{word}" is in {other} and in {key}: remove it from one of them')
        return self

    @model_validator(mode="after")
    def _check_label_columns(self) -> Self:
        if self.mask_classes:
            return self
        if bool(self.label_columns) == (self.finding_column is not None):
            raise ValueError("give either label_columns, or finding_column with classes")
        if (self.finding_column is not None) != bool(self.classes):
            raise ValueError(f"{MISSING_CLASSES_MESSAGE_START}: classes names the findings to keep")
        for names in (self.label_columns, self.classes):
            if repeated := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"each class is named once; named again: {', '.join(repeated)}")
        folded = {name.casefold() for name in (*self.classes, *self.synonyms)}
        for key in ("other_findings", "not_assessed"):
            if both := [name for name in getattr(self, key) if self.classes and name.casefold() in folded]:
                raise ValueError(f"a class or synonym, and in {key} too: {', '.join(both)}. Remove it from one of them")
        if divided := [name for name in self.classes if self.separator in name]:
            raise ValueError(f"names of classes may not contain the separator: {', '.join(divided)}")
        owner, useless = "label_columns", ["uncertain", "present", "absent"]
        if self.label_columns:
            owner, useless = "finding_column", ["separator", "other_findings", "no_finding"]
        for key in useless:
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} has a meaning for {owner} only; leave it out")
        return self


def inherit_label_settings(table: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a label table; settings about names in cells that it lacks come from another table.

    A table with a ``finding_column`` inherits the classes, the synonyms and the lists of other names. A table with
    ``label_columns`` inherits the synonyms of these columns, and the words for present and absent.

    Args:
        table: The settings of the table, as parsed from a file.
        other: The settings of the other table.
    """
    types = {"other_findings": list, "no_finding": list, "not_assessed": list, "classes": list, "synonyms": dict}
    inherited = dict[str, Any]()
    for settings in (other, table):
        inherited |= {key: settings[key] for key, kind in types.items() if isinstance(settings.get(key), kind)}

    if "finding_column" in table:
        inherited.setdefault("classes", other.get("label_columns", []))
        classes = {str(name).casefold() for name in (*inherited["classes"], *inherited.get("synonyms", ()))}
        for key in {"other_findings", "not_assessed"}.difference(table) & inherited.keys():
            inherited[key] = [name for name in inherited[key] if str(name).casefold() not in classes]
    elif isinstance(columns := table.get("label_columns"), list):
        words = {key: other[key] for key in ("present", "absent") if isinstance(other.get(key), list)}
        if table.keys() & {"present", "absent"}:
            words = {}
        synonyms = {name: label for name, label in inherited.get("synonyms", {}).items() if name in columns}
        inherited = {"synonyms": synonyms, **words}
    else:
        inherited = {}
    return {**inherited, **table}


class FolderDatasetSpec(LabelColumnsSpec, PictureFolderSpec):
    """A hospital's label table and a folder of PNG, JPEG, DICOM or NIfTI files, recognised by their content.

    For segmentation the table names mask files in place of labels: one label map for each image, or one file for each
    class. A blank cell says that nobody outlined the class in the image.

    Attributes:
        image_column: Column with the names of the files.
        masks: Folder of the masks; None for that of the images.
        mask_column: Column of label maps, in which 0 is background.
        mask_values: Class -> its value in label maps. Every value that a map has must be named.
        mask_columns: Class -> the column of its own masks, in which all that is not 0 is the class.
    """

    kind: Literal["folder"]
    image_column: Name
    masks: str | None = None
    mask_column: Name | None = None
    mask_values: Mapping[Name, Annotated[int, Field(ge=1, le=65535)]] = Field(default_factory=dict)
    mask_columns: Mapping[Name, Name] = Field(default_factory=dict)

    @property
    def mask_classes(self) -> tuple[str, ...]:
        return tuple(self.mask_values or self.mask_columns)

    @model_validator(mode="after")
    def _check_masks(self) -> Self:
        if (self.mask_column is not None) != bool(self.mask_values):
            raise ValueError("mask_column and mask_values belong together: mask_values names the values of its files")
        if self.mask_values and self.mask_columns:
            raise ValueError("give mask_column with mask_values, or mask_columns, not both")
        if self.masks is not None and not self.mask_classes:
            raise ValueError("masks is the folder of mask files: name their column in mask_column or mask_columns")
        if len(set(self.mask_values.values())) < len(self.mask_values):
            raise ValueError("mask_values: two classes have one value")
        if len(self.mask_classes) > MAX_MASK_CLASSES:
            raise ValueError(f"masks hold at most {MAX_MASK_CLASSES} classes, got {len(self.mask_classes)}")
        given = [key for key in ("label_columns", "finding_column", "classes", "synonyms") if getattr(self, key)]
        if self.mask_classes and given:
            raise ValueError(f"{', '.join(given)}: labels come from the masks; leave it out")
        return self


_URL = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?(/[A-Za-z0-9._~/-]*)?")


def _describe_move_of_secret(url: Any, given: Mapping[str, Any]) -> str:
    """Return the error message for a ``[data]`` table with a secret, with the line for the user's file of secrets.

    Args:
        url: The unchecked address from the same table.
        given: The refused keys with their values.
    """
    try:
        host = normalize_host(url if isinstance(url, str) else "")
    except ValueError:
        host = "https://HOST"
    entry = {"authentication": "basic", **given}
    if len(entry) == 1:
        entry["secret"] = "NAME:PASSWORD" if entry["authentication"] == "basic" else "TOKEN"
    line = ", ".join(f"{key} = {json.dumps(value, default=str)}" for key, value in entry.items())
    return (
        f"{quote_names(given)}: a secret is the user's own and no part of this file, whose author could name any "
        f"secret beside any address. Take out the lines. If {host} is to have this secret, write into "
        f"{find_user_secrets_path()} (a hospital: into {SECRETS_FILE} beside site.toml), with mode 600: "
        f'"{host}" = {{ {line} }}'
    )


class DicomwebDatasetSpec(LabelColumnsSpec):
    """A hospital's label table, and a PACS from which the images are read over DICOMweb (QIDO-RS and WADO-RS).

    A secret for the PACS is in a file of the user's own (:mod:`polyclinic.common.hosts`).

    Attributes:
        url: The address of both services, ``https://HOST/dicom-web``.
        instance_column: Column of SOPInstanceUIDs: each row is an image.
        study_column: Column of StudyInstanceUIDs: each row is a study, and all images of the study get the row's
            labels. Together with ``instance_column`` it names the study that holds the row's image.
        accession_column: Column of AccessionNumbers, instead of ``study_column``.
        modalities: Modalities to keep, such as ``["DX", "CR"]``; if empty, all that hold pictures.
        ca_file: File of CA certificates (PEM) for checking the server; None uses the system's. Not for a server that is
            sent a secret: who receives it is decided where the secret is.
        cache: Folder for downloaded images and search results.
        cache_gb: Maximum size of the cache in GB; the least recently used images are removed first.
        largest_mb: MiB that one image may take, both as downloaded and once decoded.
        timeout_s: Seconds to wait for a connection, and for the beginning of a response.
        connections: Maximum number of simultaneous connections.
    """

    kind: Literal["dicomweb"]
    url: str
    instance_column: Name | None = None
    study_column: Name | None = None
    accession_column: Name | None = None
    modalities: tuple[Annotated[str, Field(pattern="^[A-Z0-9_ ]{1,16}$")], ...] = ()
    ca_file: str | None = None
    cache: str = "dicomweb-cache"
    cache_gb: Annotated[float, Field(gt=0, le=100_000)] = 20
    largest_mb: Annotated[int, Field(ge=1, le=2048)] = DEFAULT_LARGEST_MB
    timeout_s: Annotated[float, Field(ge=0.1, le=600)] = 30
    connections: Annotated[int, Field(ge=1, le=16)] = 4

    @model_validator(mode="before")
    @classmethod
    def _refuse_secret_keys(cls, table: Any) -> Any:
        """Refuse the keys of older releases that named a secret; the message says what to write, and into which file.

        Run folders of older releases hold the keys without a value, which is accepted.
        """
        if not isinstance(table, Mapping):
            return table
        if given := {key: table[key] for key in RETIRED_KEYS if table.get(key) is not None}:
            raise ValueError(_describe_move_of_secret(table.get("url"), given))
        return {key: value for key, value in table.items() if key not in RETIRED_KEYS}

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        try:
            normalize_host(url)
            valid = _URL.fullmatch(url) is not None
        except ValueError:
            valid = False
        if not valid:
            # The quotes suppress the value in pydantic's message, because it may contain a password.
            raise ValueError('must be "https://HOST[:PORT]/PATH" without a name, a password, a ? or a #')
        return url.rstrip("/")

    @model_validator(mode="after")
    def _check_image_key_columns(self) -> Self:
        if self.study_column is not None and self.accession_column is not None:
            raise ValueError("give study_column or accession_column, not both")
        if not (self.instance_column or self.study_column or self.accession_column):
            raise ValueError("give instance_column, study_column or accession_column: what names an image in the PACS")
        return self

    @property
    def search_column(self) -> str:
        """Return the column whose values are sent to the PACS."""
        return self.study_column or self.accession_column or self.instance_column or ""


TaskName = Annotated[str, Field(pattern=f"^{PLAIN_NAME.pattern}$")]


class NpzDatasetSpec(BaseDatasetSpec):
    """One npz file in MedMNIST's layout, with arrays ``{train,val,test}_{images,labels}``.

    For segmentation it also holds ``_masks``, bool ``(n, height, width, classes)``: the area of each class. Labels are
    then ``(n, classes)``, and NaN says that a class is not annotated in an image.

    Instead of ``_images`` the file may hold JPEG files: their concatenated bytes in ``{train,test}_jpeg``, and the
    position of each file's first byte in ``_offsets`` ``(n + 1,)``.

    Attributes:
        path: The file.
        classes: Class names in label order; may be empty for the files of MedMNIST, MNIST and CIFAR-10.
        keep: The classes to use, in this order; all if empty. In single-label data, images of other classes are left
            out; in multi-label data all images stay.
        patient_key: Suffix of the arrays of patients: ``"patient"`` means ``train_patient``, ``val_patient`` and
            ``test_patient``.
        source_key: Suffix of the arrays that name the centre of each image.
        train_limit: Maximum number of training images, sampled in proportion to each combination of labels.
        test_limit: Maximum number of test images, sampled in the same way.
        validation_fraction: Fraction of the training patients held out if the file has no ``val`` arrays; may be 0.
        image_size: Height and width in pixels; None keeps those of the file. Volumes, arrays ``(n, depth, height,
            width)`` as in MedMNIST3D, stay as they are.
        resize, skip_budget, split_seed: As in :class:`PictureTableSpec`.
        largest_mb: MiB that the arrays may always take (:mod:`polyclinic.data.base.decoded_size`).
        value_range: Values of black and white, for arrays of any type; None takes 0 and 255, of uint8 only.
        duplicates: As in :class:`PictureTableSpec`.
    """

    kind: Literal["npz"]
    path: str
    classes: tuple[Name, ...] = ()
    keep: tuple[Name, ...] = ()
    patient_key: str | None = None
    source_key: str | None = None
    train_limit: Count | None = None
    test_limit: Count | None = None
    validation_fraction: Fraction = 0.1
    image_size: Side | None = None
    resize: Resize = "pad"
    skip_budget: Fraction = 0.05
    largest_mb: LargestMb = DEFAULT_LARGEST_MB
    value_range: ValueRange | None = None
    duplicates: Duplicates = "fault"
    split_seed: LegacySeed = SPLIT_SEED


class NihDatasetSpec(PictureFolderSpec):
    """NIH ChestX-ray14: ``labels`` is ``Data_Entry_2017*.csv``; images may be in subfolders (``images_001/images``).

    Attributes:
        view: Keep only this view position; None keeps all.
        train_val_list: NIH's ``train_val_list.txt``, given with ``test_list``; without both files patients are split
            70/10/20, as in the surgical aggregation paper.
        test_list: NIH's ``test_list.txt``.
        validation_fraction: Fraction of the patients in ``train_val_list`` that are held out for validation.
    """

    kind: Literal["nih"]
    view: Literal["PA", "AP"] | None = None
    train_val_list: str | None = None
    test_list: str | None = None
    validation_fraction: Fraction = 0.125
    missing_files: Literal["ignore", "fault"] = "ignore"

    @model_validator(mode="after")
    def _check_nih_split_lists(self) -> Self:
        if (self.train_val_list is None) != (self.test_list is None):
            raise ValueError("train_val_list and test_list belong together: give both or neither")
        return self


class ChexpertDatasetSpec(PictureFolderSpec):
    """CheXpert's official ``train.csv``: frontal images only, 13 classes, split 70/10/20 by patient.

    ``images`` is the folder to which the paths in column ``Path`` are relative, or the ``CheXpert-v1.0*`` folder
    itself.

    Attributes:
        uncertain: The meaning of -1; ``"negative"`` is U-Zeros, as in the surgical aggregation paper.
        blank: The meaning of an empty cell; ``"negative"`` in that paper.
    """

    kind: Literal["chexpert"]
    uncertain: LabelPolicy = "negative"
    blank: Literal["unknown", "negative"] = "negative"


class MimicDatasetSpec(PictureFolderSpec):
    """MIMIC-CXR-JPG with the CXR-LT label table; ``images`` is the folder that holds ``files/p10/...``.

    Attributes:
        classes: Label columns to keep; if empty, the 20 classes of NIH and CheXpert together.
        views: View positions to keep.
        uncertain: The meaning of -1.
        blank: The meaning of an empty cell.
        split: ``"test"`` puts all images into the test part, for external tests; ``"patients"`` splits 70/10/20.
    """

    kind: Literal["mimic"]
    classes: tuple[Name, ...] = ()
    views: ClassNames = ("AP", "PA")
    uncertain: LabelPolicy = "negative"
    blank: Literal["unknown", "negative"] = "negative"
    split: Literal["test", "patients"] = "test"


class DigitsDatasetSpec(BaseDatasetSpec):
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels, which need no download.

    Attributes:
        image_size: Height and width in pixels; None keeps 8.
        split_seed: As in :class:`PictureTableSpec`.
    """

    kind: Literal["digits"]
    image_size: Side | None = None
    split_seed: LegacySeed = SPLIT_SEED


class PhantomDatasetSpec(BaseDatasetSpec):
    """Synthetic chest radiographs drawn by a program: thorax, lungs, heart and nine visible findings.

    Attributes:
        images: Total number of images in the three parts; each patient has 1 to 3.
        image_size: Height and width in pixels.
        seed: Seed of the images.
        split_seed: As in :class:`PictureTableSpec`.
    """

    kind: Literal["phantom"]
    images: Annotated[int, Field(ge=20, le=10**7)] = 3000
    image_size: Annotated[int, Field(ge=16, le=4096)] = 64
    seed: Annotated[int, Field(ge=0)] = 0
    split_seed: LegacySeed = SPLIT_SEED


class DrawnOrgansDatasetSpec(BaseDatasetSpec):
    """Synthetic slices or volumes of a trunk with four organs and their outlines, drawn by a program.

    Attributes:
        images: Total number of images in the three parts; each patient has 1 to 3.
        image_size: Height and width in pixels.
        depth: Number of slices of a volume; None draws slices alone.
        seed: Seed of the images.
        split_seed: As in :class:`PictureTableSpec`.
    """

    kind: Literal["organs"]
    images: Annotated[int, Field(ge=20, le=10**6)] = 600
    image_size: Annotated[int, Field(ge=16, le=1024)] = 64
    depth: Annotated[int, Field(ge=4, le=1024)] | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    split_seed: LegacySeed = SPLIT_SEED


class CompositesDatasetSpec(BaseDatasetSpec):
    """Multi-label images, each composed of up to four pictures of a single-label npz file such as MNIST.

    Attributes:
        path: The npz file.
        classes: As in :class:`NpzDatasetSpec`; earlier classes are more frequent.
        train: Number of composed training images.
        validation: Number of composed validation images.
        test: Number of composed test images.
        image_size: Height and width of a composed image in pixels.
        falling: Frequency of each class divided by that of the class before it.
        seed: Seed of the composed images.
        largest_mb: As in :class:`NpzDatasetSpec`.
        split_seed: As in :class:`PictureTableSpec`.
    """

    kind: Literal["composites"]
    path: str
    classes: tuple[Name, ...] = ()
    train: Count = 3000
    validation: Count = 600
    test: Count = 1500
    image_size: Side = 28
    falling: Annotated[float, Field(gt=0, le=1)] = 0.8
    seed: Annotated[int, Field(ge=0)] = 0
    largest_mb: LargestMb = DEFAULT_LARGEST_MB
    split_seed: LegacySeed = SPLIT_SEED


class PluginDatasetSpec(BaseDatasetSpec):
    """A data set that a user's installed package reads.

    Attributes:
        name: Name of the entry point in the group ``polyclinic.datasets``.
        options: Passed to the plug-in unchanged.
        image_size: Height and width in pixels; None keeps those of the plug-in's images.
        resize, duplicates, split_seed: As in :class:`PictureTableSpec`.
    """

    kind: Literal["plugin"]
    name: Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]
    options: Mapping[str, Any] = Field(default_factory=dict)
    image_size: Side | None = None
    resize: Resize = "pad"
    duplicates: Duplicates = "fault"
    split_seed: LegacySeed = SPLIT_SEED


class MixtureDatasetSpec(BaseDatasetSpec):
    """Several data sets, called tasks, combined into one with images of one size and the classes of all tasks.

    Class ``normal`` of task ``busi`` is named ``busi normal``. The source of each image is the name of its task.
    Classes of other tasks are unknown in an image, not absent.

    Attributes:
        tasks: The data set of each task, by the task's name.
        image_size: Height and width in pixels, for all tasks.
        color: As in :class:`PictureTableSpec`.
    """

    kind: Literal["mixture"]
    tasks: Annotated[Mapping[TaskName, NpzDatasetSpec], Field(min_length=1)]
    image_size: Side
    color: bool = False

    @model_validator(mode="after")
    def _check_task_image_sizes(self) -> Self:
        if sized := [task for task, spec in self.tasks.items() if spec.image_size not in (None, self.image_size)]:
            raise ValueError(f"image_size is the mixture's; take it out of {', '.join(sized)}")
        return self


CollectionSpec = Annotated[
    NpzDatasetSpec | FolderDatasetSpec | NihDatasetSpec | ChexpertDatasetSpec | MimicDatasetSpec,
    Field(discriminator="kind"),
]
"""A data set that can be one of several joined collections."""


class CollectionsDatasetSpec(BaseDatasetSpec):
    """Several collections that share classes, joined into one data set with images of one size.

    The source of each image is the name of its collection. A class that a collection lacks is unknown in its images,
    not absent.

    Attributes:
        collections: Each collection, by its name.
        names: Collection -> its own name of a label -> the class that it means. Several labels of one class are one:
            present if one of them is, unknown if none is present and one is unknown. Labels that are not named keep
            their own name.
        classes: The classes to learn; those of the collections are left out if they are not listed. Empty for all.
        image_size, color, spacing, window: As in :class:`PictureTableSpec`, for all collections.
    """

    kind: Literal["collections"]
    collections: Annotated[Mapping[TaskName, CollectionSpec], Field(min_length=1)]
    names: Mapping[TaskName, Mapping[Name, Name]] = Field(default_factory=dict)
    classes: tuple[Name, ...] = ()
    image_size: ImageSize
    color: bool = False
    spacing: Spacing | None = None
    window: Window | None = None

    @model_validator(mode="after")
    def _check_keys_of_volumes(self) -> Self:
        if isinstance(self.image_size, int):
            if self.spacing is not None or self.window is not None:
                raise ValueError("spacing and window are for volumes here; pictures have a window in each collection")
            return self
        if self.color:
            raise ValueError("color is for pictures, and image_size names three sides, of volumes")
        if others := sorted(name for name, own in self.collections.items() if own.kind != "folder"):
            raise ValueError(f'collections of volumes are of kind "folder", and these are not: {", ".join(others)}')
        for name, own in self.collections.items():
            unlike = [key for key in ("image_size", "spacing", "window") if self._differs_in(own, key)]
            if unlike:
                raise ValueError(f"{name}: {', '.join(unlike)} stands once, beside collections, for all of them")
        return self

    def _differs_in(self, own: BaseDatasetSpec, key: str) -> bool:
        """Return True if a collection sets a key to another value than the joined data set."""
        value = getattr(own, key)
        return value not in (type(own).model_fields[key].default, getattr(self, key))

    @model_validator(mode="after")
    def _check_collection_names(self) -> Self:
        if unknown := sorted(self.names.keys() - self.collections.keys()):
            raise ValueError(f"names: there is no collection {', '.join(unknown)}")
        return self


DataSpec = Annotated[
    NpzDatasetSpec
    | FolderDatasetSpec
    | DicomwebDatasetSpec
    | NihDatasetSpec
    | ChexpertDatasetSpec
    | MimicDatasetSpec
    | DigitsDatasetSpec
    | PhantomDatasetSpec
    | DrawnOrgansDatasetSpec
    | CompositesDatasetSpec
    | MixtureDatasetSpec
    | CollectionsDatasetSpec
    | PluginDatasetSpec,
    Field(discriminator="kind"),
]


def list_dataset_uses(spec: DataSpec | None, base: Path) -> tuple[HostUse, ...]:
    """Return the hosts to which a data set connects when it is loaded, each with the column that is sent to it.

    Args:
        base: The folder to which paths in ``spec`` are relative.
    """
    return (make_search_use(spec, base),) if isinstance(spec, DicomwebDatasetSpec) else ()


def make_search_use(spec: DicomwebDatasetSpec, base: Path) -> HostUse:
    """Return the use of the PACS: its address, and the column of the table whose values are sent to it."""
    table = os.path.realpath(base / spec.labels)
    return HostUse(normalize_host(spec.url), spec.url, table, spec.search_column)


class AugmentationSpec(BaseDatasetSpec):
    """Random changes to training images, from the section ``[augmentation]`` of an experiment; all off by default.

    Attributes:
        rotation: Largest angle in either direction, as a fraction of a full turn: 0.2 is +-72 degrees.
        horizontal_flip: True mirrors each image with probability 0.5.
        zoom: Height and width are scaled independently: with 0.5 the result shows 0.5 to 1.5 times the original extent.
        contrast: 0.75 multiplies the distance from the image's mean by 0.25 to 1.75. Not clipped to 0..255.
        translate: Largest shift in either direction, as a fraction of the height and of the width.
        transform: ``plugin:NAME``, a user's transform that is applied last.
    """

    rotation: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    horizontal_flip: bool = False
    zoom: Annotated[float, Field(ge=0, lt=1)] = 0.0
    contrast: Annotated[float, Field(ge=0, le=1)] = 0.0
    translate: Annotated[float, Field(ge=0, le=1)] = 0.0
    transform: PluginName | None = None
