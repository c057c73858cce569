"""Settings of a data set in a config file: checked by pydantic, unchanging afterwards.

Paths are relative to the folder of the file that names them. Nothing is read here: :mod:`common.data.load` does that.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from common.data.base.decoded_size import LARGEST_MB
from common.data.base.names import Name
from common.plugins import NAME_PATTERN, PluginName
from common.system.plain_text import PLAIN_NAME

Resize = Literal["pad", "stretch"]
Frame = Annotated[int, Field(ge=1)] | Literal["middle"]
Axis = Literal["axial", "coronal", "sagittal"]
Window = tuple[float, Annotated[float, Field(ge=1)]]
"""Centre and width, in the units of the rescaled values: of a CT, Hounsfield units."""
BitDepth = Annotated[int, Field(ge=8, le=16)]
LabelPolicy = Literal["unknown", "negative", "positive"]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(gt=0)]
Side = Annotated[int, Field(gt=0, le=4096)]
"""Height or width of an image, in pixels."""
LargestMb = Annotated[int, Field(ge=1, le=2**20)]
"""MiB that one picture may take, and that any file may take: see :mod:`common.data.base.decoded_size`."""
LegacySeed = Annotated[int, Field(ge=0, lt=2**32)]
"""A seed in the range of numpy's legacy generator."""


def _normalize_separator(separator: str) -> str:
    """Return a separator with a single space for white space; one line end or tab alone stays what it is."""
    alone = {"\r\n": "\n", "\r": "\n", "\n": "\n", "\t": "\t"}
    return alone.get(separator) or re.sub(r"\s+", " ", separator)


ClassNames = Annotated[tuple[Name, ...], Field(min_length=1)]
NO_FINDING = ("No Finding", "No Findings", "Normal")
"""Names in a column of findings that say that all classes are absent, in any case."""

SPLIT_SEED = 1337


class BaseDataSpec(BaseModel):
    """Base of all settings of data: unknown keys are refused, and values cannot change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@dataclass(frozen=True)
class PictureRendering:
    """The choice of one picture in a file, and of the window of its grey values.

    Attributes:
        frame: Number of a DICOM file's frame or a NIfTI file's slice, from 1, or ``"middle"``; None for the only one.
        axis: The axis at right angles to the slices of a NIfTI volume.
        window: Replaces the window of the file; where None, the file's own is used, or the range of the values.
        largest_mb: MiB that one decoded picture may take.
        bit_depth: Bits that are used of the 16 of a PNG file's samples; None refuses such files.
        jpeg_draft: True decodes a JPEG file at a fraction of its size where it is shrunk anyway.
    """

    frame: Frame | None = None
    axis: Axis = "axial"
    window: Window | None = None
    largest_mb: int = LARGEST_MB
    bit_depth: int | None = None
    jpeg_draft: bool = False


AS_IN_FILE = PictureRendering()


class PictureTableSpec(BaseDataSpec):
    """Settings of every data set that is a table of labels with pictures.

    Attributes:
        labels: The table, ``.csv`` or ``.csv.gz``.
        image_size: Height and width in pixels after resizing.
        resize: ``"pad"`` keeps the aspect ratio on black; ``"stretch"`` does not.
        skip_budget: Part of the images that may be unreadable before the load stops.
        missing_files: Rows of the table without a file are a "fault", or are left out and counted ("ignore").
        frame: Of DICOM files of several, and of NIfTI volumes: its number from 1, or ``"middle"``; without it such a
            file is unreadable.
        axis: The axis at right angles to the slices of NIfTI volumes.
        window: Centre and width of the grey values of DICOM and NIfTI files, in the place of their own.
        largest_mb: MiB that one picture may take once it is decoded, and the table in any case.
        bit_depth: Bits that are used of the 16 of a PNG file's samples, the same for all pictures: a file does not say
            it. Without it such files are unreadable.
        jpeg_draft: Decode JPEG files at a half, a quarter or an eighth of their size where that is not less than
            ``image_size``: two to three times as fast, with slightly other pixels.
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
    bit_depth: BitDepth | None = None
    jpeg_draft: bool = False
    split_seed: LegacySeed = SPLIT_SEED

    @property
    def rendering(self) -> PictureRendering:
        return PictureRendering(self.frame, self.axis, self.window, self.largest_mb, self.bit_depth, self.jpeg_draft)


class PictureSpec(PictureTableSpec):
    """Settings that all folders of picture files have in common; ``images`` is the folder."""

    images: str


class LabelColumnsSpec(PictureTableSpec):
    """Settings that name the columns of a hospital's own table.

    Labels stand either in one column per class (``label_columns``: 1, 0, -1 uncertain, or blank), or as names in one
    column (``finding_column``, with ``separator`` between them), each of which is one of ``classes``, of
    ``other_findings`` or of ``no_finding``.

    Attributes:
        other_findings: Findings in that column that are no class here; ``"*"`` stands for all that are unlike a class.
        no_finding: Names that say that no class is present.
        synonyms: A label column, or a name in ``finding_column`` -> the class that it means, where hospitals name one
            class in several ways.
        uncertain: The meaning of -1 in ``label_columns``.
        blank: The meaning of an empty cell: of one class in ``label_columns``, of all classes in ``finding_column``.
        similar_patients: Patients whose names differ only in case, punctuation, spaces or zeros are refused with their
            lines ("fault"), or count as one patient and stand on one side of the split ("join").
        split_column: Values train, val or validation, test; without it patients are split 70/10/20 (see ``splits``).
        validation_fraction: Part of the training patients held out where ``split_column`` has no validation rows.
    """

    label_columns: tuple[Name, ...] = ()
    finding_column: Name | None = None
    separator: Annotated[str, Field(min_length=1), AfterValidator(_normalize_separator)] = "|"
    classes: tuple[Name, ...] = ()
    other_findings: tuple[Name, ...] = ()
    no_finding: tuple[Name, ...] = NO_FINDING
    synonyms: Mapping[Name, Name] = Field(default_factory=dict)
    uncertain: LabelPolicy = "unknown"
    blank: Literal["unknown", "negative"] = "unknown"
    patient_column: Name | None = None
    similar_patients: Literal["fault", "join"] = "fault"
    source_column: Name | None = None
    split_column: Name | None = None
    validation_fraction: Fraction = 0.1

    @property
    def names_in_table(self) -> tuple[str, ...]:
        """The names by which the table itself calls the classes."""
        return self.label_columns or tuple(dict.fromkeys((*self.classes, *self.synonyms)))

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes that the names of the table mean, each once."""
        return tuple(dict.fromkeys(self.synonyms.get(name, name) for name in self.names_in_table))

    @model_validator(mode="after")
    def _check_synonyms(self) -> Self:
        if chained := sorted(set(self.synonyms) & set(self.synonyms.values())):
            raise ValueError(f"synonyms: a class cannot be a synonym itself: {', '.join(chained)}")
        if self.label_columns and (foreign := sorted(set(self.synonyms) - set(self.label_columns))):
            raise ValueError(f"synonyms: on the left of each = stands one of label_columns, not {', '.join(foreign)}")
        return self

    @model_validator(mode="after")
    def _check_label_columns(self) -> Self:
        if bool(self.label_columns) == (self.finding_column is not None):
            raise ValueError("give either label_columns, or finding_column with classes")
        if (self.finding_column is not None) != bool(self.classes):
            raise ValueError("finding_column and classes belong together: classes names the findings to keep")
        for names in (self.label_columns, self.classes):
            if repeated := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"each class is named once; named again: {', '.join(repeated)}")
        if divided := [name for name in self.classes if self.separator in name]:
            raise ValueError(f"names of classes may not contain the separator: {', '.join(divided)}")
        useless = ("separator", "other_findings", "no_finding") if self.label_columns else ("uncertain",)
        for key in useless:
            if getattr(self, key) != type(self).model_fields[key].default:
                owner = "finding_column" if self.label_columns else "label_columns"
                raise ValueError(f"{key} has a meaning for {owner} only; leave it out")
        return self


class FolderSpec(LabelColumnsSpec, PictureSpec):
    """A table and a folder of PNG, JPEG, DICOM or NIfTI files (distinguished by content)."""

    kind: Literal["folder"]
    image_column: Name


_URL = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?(/[A-Za-z0-9._~/-]*)?")
_LAST_PORT = 65535
_ALONE = ("127.0.0.1", "localhost", "[::1]")
"""Hosts to which a secret may go without TLS: it does not leave the machine."""


class DicomwebSpec(LabelColumnsSpec):
    """A table and a PACS that is read over DICOMweb (QIDO-RS and WADO-RS).

    Attributes:
        url: The address of both services, ``https://HOST/dicom-web``.
        instance_column: Column of SOPInstanceUIDs: each row is an image.
        study_column: Column of StudyInstanceUIDs: each row is a study, and all its images have the row's labels. Beside
            ``instance_column`` it says which study holds each row's image.
        accession_column: Column of AccessionNumbers, in the place of StudyInstanceUIDs.
        modalities: Keep only series of these, such as ``["DX", "CR"]``; all that hold pictures where empty.
        ca_file: Certificates (PEM) that the server's is checked against; the system's where None.
        authentication: ``"bearer"`` sends a token, ``"basic"`` a name and a password.
        secret_file: Holds the token, or ``NAME:PASSWORD``; only its owner may read it.
        secret_env: An environment variable that holds the secret instead of a file.
        cache: The folder in which answers are stored.
        cache_gb: Size that the folder may have; the least recently used files are removed first.
        largest_mb: MiB that one image may take as it is sent, and once it is decoded.
        timeout_s: Seconds to wait for a connection, and for the beginning of an answer.
        connections: Number of connections that are open at a time.
    """

    kind: Literal["dicomweb"]
    url: str
    instance_column: Name | None = None
    study_column: Name | None = None
    accession_column: Name | None = None
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
    def _check_url(cls, url: str) -> str:
        parts = _URL.fullmatch(url)
        valid = parts is not None and int((parts[2] or ":1")[1:]) <= _LAST_PORT
        if parts and parts[1].startswith("["):
            try:
                ip_address(parts[1][1:-1])
            except ValueError:
                valid = False
        if not valid:
            # With quotes in it the message is not followed by the value, in which somebody may have put a password.
            raise ValueError('must be "https://HOST[:PORT]/PATH" without a name, a password, a ? or a #')
        return url.rstrip("/")

    @model_validator(mode="after")
    def _check_key_columns(self) -> Self:
        if self.study_column is not None and self.accession_column is not None:
            raise ValueError("give study_column or accession_column, not both")
        if not (self.instance_column or self.study_column or self.accession_column):
            raise ValueError("give instance_column, study_column or accession_column: what names an image in the PACS")
        return self

    @model_validator(mode="after")
    def _check_secret(self) -> Self:
        sources = [key for key in ("secret_file", "secret_env") if getattr(self, key)]
        if len(sources) != (self.authentication is not None):
            raise ValueError("authentication needs secret_file or secret_env, and these need authentication")
        if self.authentication and self.url.startswith("http:") and self.host not in _ALONE:
            raise ValueError("with authentication the address must begin with https: anyone could read the secret")
        return self

    @property
    def host(self) -> str:
        """The host that the address names."""
        parts = _URL.fullmatch(self.url)
        assert parts
        return parts[1]


TaskName = Annotated[str, Field(pattern=f"^{PLAIN_NAME.pattern}$")]


class NpzSpec(BaseDataSpec):
    """One npz file in MedMNIST's layout, ``{train,val,test}_{images,labels}``.

    Images may also be JPEG bytes: ``{train,test}_jpeg`` (one after another), ``_offsets`` ``(n + 1,)``, ``_labels``.

    Attributes:
        classes: Names of the classes in label order; may be empty for MedMNIST's own files, MNIST and CIFAR-10.
        keep: The classes to use, in this order; all where empty. Of a multi-label file all images stay; where an image
            has one class, those of other classes are left out.
        patient_key: ``"patient"`` means the arrays ``train_patient``, ``val_patient``, ``test_patient``.
        source_key: The same for the centre an image came from.
        train_limit: Keep at most so many training images, each combination of labels in proportion.
        test_limit: The same for test images.
        validation_fraction: Part of the training patients held out where the file has no ``val`` arrays; may be 0.
        image_size: Height and width in pixels; the file's own where None.
        largest_mb: MiB that the file may take in memory in any case, see :mod:`common.data.base.decoded_size`.
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
    largest_mb: LargestMb = LARGEST_MB
    split_seed: LegacySeed = SPLIT_SEED


class NihSpec(PictureSpec):
    """NIH ChestX-ray14: ``labels`` is ``Data_Entry_2017*.csv``; images may lie in folders ``images_001/images``...

    Attributes:
        view: Keep one view position only.
        train_val_list: NIH's ``train_val_list.txt``, with ``test_list``; without both the paper's 70/10/20 split.
        validation_fraction: Part of the patients of ``train_val_list`` held out.
    """

    kind: Literal["nih"]
    view: Literal["PA", "AP"] | None = None
    train_val_list: str | None = None
    test_list: str | None = None
    validation_fraction: Fraction = 0.125
    missing_files: Literal["ignore", "fault"] = "ignore"

    @model_validator(mode="after")
    def _check_both_lists(self) -> Self:
        if (self.train_val_list is None) != (self.test_list is None):
            raise ValueError("train_val_list and test_list belong together: give both or neither")
        return self


class ChexpertSpec(PictureSpec):
    """CheXpert's official ``train.csv``; frontal images only, 13 classes, split by patient 70/10/20.

    ``images`` is the folder that ``Path`` starts from, or the ``CheXpert-v1.0*`` folder itself.

    Attributes:
        uncertain: What -1 means; "negative" is U-Zeros, as in the surgical aggregation paper.
        blank: What an empty cell means; the paper takes it as negative.
    """

    kind: Literal["chexpert"]
    uncertain: LabelPolicy = "negative"
    blank: Literal["unknown", "negative"] = "negative"


class MimicSpec(PictureSpec):
    """MIMIC-CXR-JPG with the CXR-LT label table; ``images`` is the folder that holds ``files/p10/...``.

    Attributes:
        classes: Label columns to keep; the 20 of NIH and CheXpert together by default.
        views: View positions to keep.
        split: ``"test"`` puts everything into the test part (external test); ``"patients"`` splits 70/10/20.
    """

    kind: Literal["mimic"]
    classes: tuple[Name, ...] = ()
    views: ClassNames = ("AP", "PA")
    uncertain: LabelPolicy = "negative"
    blank: Literal["unknown", "negative"] = "negative"
    split: Literal["test", "patients"] = "test"


class DigitsSpec(BaseDataSpec):
    """scikit-learn's 1,797 handwritten digits, 8x8: always at hand, nothing to download."""

    kind: Literal["digits"]
    image_size: Side | None = None
    split_seed: LegacySeed = SPLIT_SEED


class PhantomSpec(BaseDataSpec):
    """Procedural radiograph phantoms, synthetic: thorax, lungs, heart and nine findings that can be seen.

    Attributes:
        images: Number of images in all three parts together; patients have 1 to 3.
        image_size: Height and width in pixels.
        seed: Same seed, same images.
    """

    kind: Literal["phantom"]
    images: Annotated[int, Field(ge=20, le=10**7)] = 3000
    image_size: Annotated[int, Field(ge=16, le=4096)] = 64
    seed: Annotated[int, Field(ge=0)] = 0
    split_seed: LegacySeed = SPLIT_SEED


class CompositesSpec(BaseDataSpec):
    """Up to four pictures of an npz file with one class a picture, such as MNIST, side by side in one image.

    Attributes:
        classes: As of the file; the earlier ones are the more frequent ones.
        train, validation, test: Numbers of composites.
        image_size: Height and width of a composite in pixels.
        falling: Each class is so many times as frequent as the one before it.
        seed: Same seed, same composites.
        largest_mb: As of the file.
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
    largest_mb: LargestMb = LARGEST_MB
    split_seed: LegacySeed = SPLIT_SEED


class PluginSpec(BaseDataSpec):
    """A data set that an installed package of the user's own reads.

    Attributes:
        name: Of the entry point in the group ``polyclinic.datasets``.
        options: Handed to the plug-in as they are.
        image_size: Height and width in pixels; the plug-in's own where None.
    """

    kind: Literal["plugin"]
    name: Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]
    options: Mapping[str, Any] = Field(default_factory=dict)
    image_size: Side | None = None
    resize: Resize = "pad"
    split_seed: LegacySeed = SPLIT_SEED


class MixtureSpec(BaseDataSpec):
    """Several data sets as tasks of one data set: images of one size and colour, the classes of all tasks side by side.

    Class ``normal`` of task ``busi`` is called ``busi normal``; each image's source is its task's name, and the
    classes of other tasks are unknown to it, not absent.

    Attributes:
        tasks: A data set for each task's name.
        image_size: Height and width in pixels, for all tasks.
    """

    kind: Literal["mixture"]
    tasks: Annotated[Mapping[TaskName, NpzSpec], Field(min_length=1)]
    image_size: Side
    color: bool = False

    @model_validator(mode="after")
    def _check_image_sizes(self) -> Self:
        if sized := [task for task, spec in self.tasks.items() if spec.image_size not in (None, self.image_size)]:
            raise ValueError(f"image_size is the mixture's; take it out of {', '.join(sized)}")
        return self


DataSpec = Annotated[
    NpzSpec
    | FolderSpec
    | DicomwebSpec
    | NihSpec
    | ChexpertSpec
    | MimicSpec
    | DigitsSpec
    | PhantomSpec
    | CompositesSpec
    | MixtureSpec
    | PluginSpec,
    Field(discriminator="kind"),
]


class AugmentationSpec(BaseDataSpec):
    """The ``[augmentation]`` part of an experiment; all off by default.

    Attributes:
        rotation: Largest angle either way, as a fraction of a full turn: 0.2 is +-72 degrees.
        horizontal_flip: Mirror every other image on average.
        zoom: Height and width are scaled independently; 0.5 shows 0.5 to 1.5 times the original's extent.
        contrast: 0.75 multiplies the distance from the image's mean by 0.25 to 1.75. Not clipped to 0..255.
        translate: Largest shift either way, as a fraction of height and of width.
        transform: ``plugin:NAME``, which changes the images after all that.
    """

    rotation: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    horizontal_flip: bool = False
    zoom: Annotated[float, Field(ge=0, lt=1)] = 0.0
    contrast: Annotated[float, Field(ge=0, le=1)] = 0.0
    translate: Annotated[float, Field(ge=0, le=1)] = 0.0
    transform: PluginName | None = None
