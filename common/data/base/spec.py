"""What a config file says about a data set; checked by pydantic, frozen after.

Paths are relative to the folder of the file that names them. Nothing is read here: :mod:`common.data.load` does that.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from common.data.base.decoded_size import LARGEST_MB
from common.data.base.spec_base import (
    SPLIT_SEED,
    ClassNames,
    Count,
    Fraction,
    LabelPolicy,
    LargestMb,
    LegacySeed,
    Resize,
    Side,
    Spec,
)
from common.data.base.spec_tables import DicomwebSpec, FolderSpec, PictureSpec
from common.plugins import NAME_PATTERN
from common.system.plain_text import PLAIN_NAME

TaskName = Annotated[str, Field(pattern=f"^{PLAIN_NAME.pattern}$")]


class NpzSpec(Spec):
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
    classes: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
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
    def _both_lists(self) -> Self:
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
    classes: tuple[str, ...] = ()
    views: ClassNames = ("AP", "PA")
    uncertain: LabelPolicy = "negative"
    blank: Literal["unknown", "negative"] = "negative"
    split: Literal["test", "patients"] = "test"


class DigitsSpec(Spec):
    """scikit-learn's 1,797 handwritten digits, 8x8: always at hand, nothing to download."""

    kind: Literal["digits"]
    image_size: Side | None = None
    split_seed: LegacySeed = SPLIT_SEED


class PhantomSpec(Spec):
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


class CompositesSpec(Spec):
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
    classes: tuple[str, ...] = ()
    train: Count = 3000
    validation: Count = 600
    test: Count = 1500
    image_size: Side = 28
    falling: Annotated[float, Field(gt=0, le=1)] = 0.8
    seed: Annotated[int, Field(ge=0)] = 0
    largest_mb: LargestMb = LARGEST_MB
    split_seed: LegacySeed = SPLIT_SEED


class PluginSpec(Spec):
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


class MixtureSpec(Spec):
    """Several data sets as tasks of one: images of one size and colour, the classes of all tasks side by side.

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
    def _one_size(self) -> Self:
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
