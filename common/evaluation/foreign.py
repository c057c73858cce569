"""The file ``MODEL.toml``, which describes a model that another program trained; read without torch.

Such a model is an ONNX file, a ``torch.export`` file (``.pt2``), or the tensors (``.safetensors``) of a network of
timm. The user states the facts that the model's file lacks: classes, input and outputs.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.models.zoo.spec import Sha256, Task, find_model_folder_faults
from polyclinic.common.system.files import make_missing_input_fault, open_input_file
from polyclinic.common.system.packages import find_missing_package_faults
from polyclinic.common.system.plain_text import quote_for_shell
from polyclinic.common.system.toml import TomlSection, read_toml, validate_tables
from polyclinic.common.vocabulary import VocabularyTable
from polyclinic.data.base.names import Name
from polyclinic.data.base.pixel_form import PixelForm, check_pixel_table

TIMM_PREFIX = "timm:"
Threshold = Annotated[float, Field(ge=0, le=1)]


class ModelFormat(StrEnum):
    """The file formats of foreign models; the value is the ending of the file's name."""

    onnx = ".onnx"
    torch_export = ".pt2"
    safetensors = ".safetensors"


FORMAT_SUFFIXES = ", ".join(ModelFormat)
TORCH_EXPORT_RISK = (
    "torch reads such a file in a way that can run any program that its author put in: with your rights, on this "
    "machine, beside the images"
)


class ForeignModel(TomlSection):
    """The content of ``MODEL.toml``.

    Attributes:
        file: The model's file, relative to ``MODEL.toml``.
        sha256: Hash of the model's file, so that no other file is scored under its name.
        classes: Class of each output, in order; an output with an empty name is ignored.
        outputs: ``logits``, to which sigmoid or softmax is applied; or ``probabilities``.
        task: ``multi_label``: each class is present or absent. ``multi_class``: exactly one class is present.
        mean, std: Values of each channel, for pixels from 0 to 1: the input is ``(pixel - mean) / std``.
        layout: Order of the input's dimensions after the batch dimension.
        output: Name of the output to read; empty if the model has only one.
        architecture: Name of the network, ``timm:NAME``; only for ``.safetensors``.
        pixels: The keys of ``[data]`` that decide how images become pixels; ``color`` and ``image_size`` are required.
        operating_points: Class -> threshold that was fixed before; an image with a higher score counts as positive.
        vocabulary: Class -> other words for it.
    """

    file: Annotated[str, Field(min_length=1)]
    sha256: Sha256 | None = None
    classes: Annotated[tuple[Name, ...], Field(min_length=1)]
    outputs: Literal["logits", "probabilities"]
    task: Task = "multi_label"
    mean: Annotated[tuple[float, ...], Field(min_length=1)]
    std: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]
    layout: Literal["channels_first", "channels_last"] = "channels_first"
    output: str = ""
    architecture: str = ""
    pixels: dict[str, Any]
    operating_points: dict[Name, Threshold] = Field(default_factory=dict)
    vocabulary: VocabularyTable | None = None

    @field_validator("file")
    @classmethod
    def _check_ending(cls, file: str) -> str:
        if Path(file).suffix not in list(ModelFormat):
            raise ValueError(
                f"expected a file that ends in {FORMAT_SUFFIXES}; a run's folder needs no such description"
            )
        return file

    @field_validator("classes")
    @classmethod
    def _check_classes(cls, classes: tuple[str, ...]) -> tuple[str, ...]:
        named = [name for name in classes if name]
        if len(set(named)) < len(named) or not named:
            raise ValueError("expected different names, one for each output")
        return classes

    @field_validator("pixels")
    @classmethod
    def _check_pixels(cls, pixels: dict[str, Any]) -> dict[str, Any]:
        if missing := [key for key in ("color", "image_size") if key not in pixels]:
            raise ValueError(f"{' and '.join(missing)} must be stated: the images would be read in another way")
        if not isinstance(pixels["image_size"], int):
            raise ValueError("image_size must be a number of pixels, the side of the model's square input")
        return check_pixel_table(pixels)

    @model_validator(mode="after")
    def _check_together(self) -> "ForeignModel":
        channels = 3 if self.pixels["color"] else 1
        for key, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != channels:
                raise ValueError(f"{key}: expected {channels} values, one for each channel, got {len(values)}")
        is_timm = self.format is ModelFormat.safetensors
        if is_timm != self.architecture.startswith(TIMM_PREFIX):
            raise ValueError(
                f'architecture: expected "{TIMM_PREFIX}NAME" for a .safetensors file, which holds no network'
                if is_timm
                else "architecture: leave it out, because the file holds its network"
            )
        if unknown := [name for name in self.operating_points if name not in self.classes]:
            raise ValueError(f'operating_points: "{unknown[0]}" is none of classes')
        return self

    @property
    def format(self) -> ModelFormat:
        """The format, by the ending of the file's name."""
        return ModelFormat(Path(self.file).suffix)

    @property
    def channels(self) -> int:
        """Number of channels of the input."""
        return 3 if self.pixels["color"] else 1

    @property
    def image_size(self) -> int:
        """Side of the input in pixels."""
        return int(self.pixels["image_size"])

    @property
    def form(self) -> PixelForm:
        """The pixel form in which images are read for the model."""
        side = self.image_size
        rendering: Mapping[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in self.pixels.items()
            if key not in ("color", "image_size", "resize") and value is not None
        }
        resize = self.pixels.get("resize", "pad")
        color = bool(self.pixels["color"])
        return PixelForm(color=color, height=side, width=side, resize=resize, rendering=rendering, decoded=True)


@dataclass(frozen=True)
class ModelFile:
    """A model that a user names, before it is loaded.

    Attributes:
        path: Path from the user: a run's folder, ``MODEL.toml``, or an ONNX file that ``flwr-sim export`` wrote.
        described: The content of ``MODEL.toml``; None for a run, and for an ONNX file that describes itself.
    """

    path: Path
    described: ForeignModel | None = None

    @property
    def file(self) -> Path:
        """The file of a foreign model; the folder of a run."""
        return self.path if self.described is None else self.path.parent / self.described.file

    @property
    def is_run(self) -> bool:
        """True for the folder of a run, or of a model that a site stores."""
        return self.path.is_dir()


def is_model_path(path: Path) -> bool:
    """Return True if a path names a model and not images: a folder, a model's file, or its description."""
    return path.is_dir() or is_foreign_model_path(path)


def is_foreign_model_path(path: Path) -> bool:
    """Return True if a path names a model's file or its description, not a run's folder.

    Raises:
        BadInput: If the path ends in ``.toml`` and is not valid TOML.
    """
    if path.suffix in list(ModelFormat):
        return True
    return path.suffix == ".toml" and path.is_file() and "file" in read_toml(path)


def find_model_file(path: Path, trusted: frozenset[Path]) -> ModelFile:
    """Check a model that a user names, without reading its tensors.

    Args:
        path: Path from the user.
        trusted: Files that may run programs while they are read, from ``--trust``.

    Raises:
        BadInput: With every fault.
    """
    if path.is_dir():
        raise_faults(find_model_folder_faults(path))
        return ModelFile(path)
    if not path.is_file():
        raise BadInput([make_missing_input_fault(path)])
    if path.suffix == ModelFormat.onnx:
        raise_faults(find_missing_package_faults(str(path), "onnxruntime"))
        return ModelFile(path)
    if path.suffix != ".toml":
        remedy = f"Name a run's folder, or describe the model in a file that ends in .toml:\n{make_template(path)}"
        raise BadInput(
            [Fault(str(path), "does not say which classes it has, nor how images become its input.", remedy)]
        )
    described = validate_tables(ForeignModel, read_toml(path), path.name)
    model = ModelFile(path, described)
    raise_faults(_find_file_faults(model, trusted))
    return model


def _find_file_faults(model: ModelFile, trusted: frozenset[Path]) -> list[Fault]:
    """Return the faults of a described model's file: missing, altered, not trusted, or its library is not installed."""
    described = model.described
    file = model.file
    assert described is not None, "called for a described model"
    try:
        with open_input_file(file) as content:
            actual = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        return [Fault(f"{model.path.name}: file", f"{file} cannot be read: {error.strerror}.")]
    faults = list[Fault]()
    where = f"{model.path.name}: sha256"
    if described.sha256 is None:
        remedy = f'Compare it with what the model\'s author states, and write: sha256 = "{actual}"'
        faults.append(Fault(where, f"is missing; that of {described.file} is {actual}.", remedy))
    elif described.sha256 != actual:
        problem = f"is {described.sha256}, and {described.file} has {actual}: it is another file, or was altered."
        faults.append(Fault(where, problem, "Get the file again."))
    if described.format is ModelFormat.onnx:
        faults += find_missing_package_faults(f"{model.path.name}: file", "onnxruntime")
    if described.format is ModelFormat.torch_export and file.resolve() not in trusted:
        remedy = f"If you trust its author as you trust a program: --trust {quote_for_shell(file)}\n"
        remedy += "Else ask for the model as .onnx or .safetensors, which hold no program."
        faults.append(
            Fault(f"{model.path.name}: file", f"{described.file} is not opened: {TORCH_EXPORT_RISK}.", remedy)
        )
    return faults


def make_template(file: Path) -> str:
    """Return the lines of a ``MODEL.toml`` for a model's file, for the user to fill in."""
    lines = [
        f'file = "{file.name}"',
        'sha256 = "..."                      # of the file, as its author states it',
        'classes = ["...", "..."]            # in the order of the outputs',
        'outputs = "logits"                  # or "probabilities"',
        "mean = [0.485, 0.456, 0.406]        # of pixels from 0 to 1, for each channel",
        "std = [0.229, 0.224, 0.225]",
    ]
    if file.suffix == ModelFormat.safetensors:
        lines.append(f'architecture = "{TIMM_PREFIX}..."')
    lines += ["[pixels]", "color = true", "image_size = 224", 'resize = "pad"                      # or "stretch"']
    return "\n".join(f"    {line}" for line in lines)
