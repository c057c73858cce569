"""Open models of any supported kind for scoring: runs, ONNX files, ``torch.export`` files, and networks of timm."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput, Fault, quote_names
from polyclinic.common.evaluation.foreign import ForeignModel, ModelFile, ModelFormat, make_template
from polyclinic.common.evaluation.runtimes import (
    Runtime,
    open_onnx,
    open_timm_network,
    open_torch_export,
    read_onnx_metadata,
)
from polyclinic.common.evaluation.thresholds import DEFAULT_THRESHOLD, FixedThreshold, read_points_of_run
from polyclinic.common.models.network import convert_channels, convert_pixels, logits_to_probabilities
from polyclinic.common.models.saved import load_model, read_model_description
from polyclinic.common.models.scoring import compute_picture_probabilities
from polyclinic.common.models.zoo.spec import Task
from polyclinic.common.prediction.masks import refuse_segmentation
from polyclinic.common.security.delivery import MANIFEST_FILE
from polyclinic.common.system.plain_text import make_printable_line
from polyclinic.common.vocabulary import Vocabulary
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.base.pixel_form import PixelForm
from polyclinic.data.images.pixels import load_pixels_on_device

BATCH_SIZE = 64
PROBABILITY_TOLERANCE = 1e-5
"""Largest distance of a probability from the range 0 to 1 that counts as a rounding error."""

Scores = NDArray[np.float32]
Kind = Literal["run", "onnx of a run", "onnx", "torch.export", "timm"]


@dataclass(frozen=True)
class ModelToScore:
    """A model that is ready to score images.

    Attributes:
        name: Name in tables.
        kind: Kind of the model's file.
        sha256: Hash of a run's tensors, or of another model's file.
        class_names: The class of each column of the scores, without classes that a run has not learned.
        compute_scores: Returns the probabilities ``(n, classes)`` of images that were read in ``form``.
        form: Pixel form of the training images; None if unknown.
        vocabulary: Class -> other words for it.
        unlearned: Class that the model has not learned -> reason.
        points: Class -> thresholds that were fixed beforehand.
    """

    name: str
    kind: Kind
    sha256: str
    class_names: tuple[str, ...]
    compute_scores: Callable[[ImageSet], Scores]
    form: PixelForm | None = None
    vocabulary: Vocabulary = field(default_factory=dict)
    unlearned: Mapping[str, str] = field(default_factory=dict)
    points: Mapping[str, tuple[FixedThreshold, ...]] = field(default_factory=dict)

    @property
    def is_of_run(self) -> bool:
        """True if a federated run trained the model, which then has seen only training parts of hospitals."""
        return self.kind in ("run", "onnx of a run")

    def list_thresholds(self, name: str) -> tuple[FixedThreshold, ...]:
        """Return the thresholds of a class; 0.5 if none was fixed."""
        return self.points.get(name) or (DEFAULT_THRESHOLD,)


def open_models(files: Sequence[ModelFile], device: str = "") -> list[ModelToScore]:
    """Load several models; if two have the same name, each is named by the path that the user wrote.

    Args:
        files: The models.
        device: ``cpu`` or ``cuda``; empty for the GPU if there is one.

    Raises:
        BadInput: If a model cannot be loaded.
    """
    names = [file.path.resolve().stem if not file.is_run else _name_run(file.path.resolve()) for file in files]
    if len(set(names)) < len(names):
        names = [str(file.path) for file in files]
    if len(set(names)) < len(names):
        raise BadInput([Fault(name, "is named twice.") for name in {name for name in names if names.count(name) > 1}])
    return [open_model(file, name, device) for file, name in zip(files, names, strict=True)]


def _name_run(folder: Path) -> str:
    """Return the name of a run's folder; for a delivered package, whose folder is named by a hash, the name of
    its run.
    """
    try:
        name = str(json.loads((folder / MANIFEST_FILE).read_bytes())["name"])
    except (OSError, ValueError, LookupError, TypeError):
        return folder.name
    return f"{make_printable_line(name)} ({folder.name[:8]})"


def open_model(file: ModelFile, name: str, device: str = "") -> ModelToScore:
    """Load one model.

    Raises:
        BadInput: If it cannot be loaded.
    """
    if file.is_run:
        return _open_run_model(file.path, name, device)
    if file.described is None:
        return _open_exported_run_model(file.path, name)
    return _open_described_model(file, file.described, name)


# ---------------------------------------------------------------------- models of runs


def _open_run_model(folder: Path, name: str, device: str) -> ModelToScore:
    saved = read_model_description(folder)
    network = load_model(folder)
    refuse_segmentation(network, "evaluate")
    unlearned = dict(saved.unlearned or {})
    learned_columns = [column for column, class_name in enumerate(saved.class_names) if class_name not in unlearned]

    def compute_scores(images: ImageSet) -> Scores:
        return compute_picture_probabilities(network, images, device)[:, learned_columns]

    return ModelToScore(
        name,
        "run",
        saved.model_sha256,
        tuple(saved.class_names[column] for column in learned_columns),
        compute_scores,
        saved.pixels,
        saved.vocabulary or {},
        unlearned,
        read_points_of_run(folder),
    )


def _open_exported_run_model(path: Path, name: str) -> ModelToScore:
    """Open an ONNX file of ``flwr-sim export``, which contains its own description and takes pixels of any size.

    Raises:
        BadInput: If the file contains no description.
    """
    metadata = read_onnx_metadata(path)
    try:
        class_names = tuple(map(str, json.loads(metadata["class_names"])))
        unlearned = tuple(json.loads(metadata.get("unlearned", "[]")))
        form = PixelForm.model_validate_json(metadata["pixels"]) if "pixels" in metadata else None
        channels = 1 if " 1, height" in metadata["input"] else 3
    except (KeyError, ValueError, TypeError):
        problem = "does not say which classes it has, nor how images become its input."
        remedy = f"Describe it in a file that ends in .toml, and name that one:\n{make_template(path)}"
        raise BadInput([Fault(str(path), problem, remedy)]) from None
    runtime = open_onnx(path, "")
    learned_columns = [column for column, class_name in enumerate(class_names) if class_name not in unlearned]

    def compute_scores(images: ImageSet) -> Scores:
        batches = []
        for batch in load_pixels_on_device(images, "cpu").iterate_batches(BATCH_SIZE):
            pixels = convert_channels(batch.float(), channels)
            batches.append(runtime(pixels.round().to(torch.uint8).numpy()))
        scores = np.concatenate(batches)
        check_outputs(scores, len(class_names), "probabilities", str(path))
        return scores[:, learned_columns]

    return ModelToScore(
        name,
        "onnx of a run",
        hash_model_file(path),
        tuple(class_names[column] for column in learned_columns),
        compute_scores,
        form,
        unlearned=dict.fromkeys(unlearned, "as the file states"),
    )


# ---------------------------------------------------------------------- models of other programs


def _open_described_model(file: ModelFile, described: ForeignModel, name: str) -> ModelToScore:
    runtime, kind = _open_runtime(file, described)
    named_columns = [column for column, class_name in enumerate(described.classes) if class_name]
    mean, std = (torch.tensor(values).reshape(1, -1, 1, 1) for values in (described.mean, described.std))

    def compute_scores(images: ImageSet) -> Scores:
        batches = []
        for batch in load_pixels_on_device(images, "cpu").iterate_batches(BATCH_SIZE):
            pixels = convert_pixels(batch.float(), described.channels, (described.image_size,) * 2)
            inputs = (pixels / 255 - mean) / std
            if described.layout == "channels_last":
                inputs = inputs.permute(0, 2, 3, 1)
            batches.append(runtime(np.ascontiguousarray(inputs.numpy(), np.float32)))
        outputs = np.concatenate(batches)
        check_outputs(outputs, len(described.classes), described.outputs, file.path.name)
        return convert_outputs_to_probabilities(outputs, described.outputs, described.task)[:, named_columns]

    return ModelToScore(
        name,
        kind,
        described.sha256 or "",
        tuple(described.classes[column] for column in named_columns),
        compute_scores,
        described.form,
        described.vocabulary or {},
        points={key: (FixedThreshold("stated", value),) for key, value in described.operating_points.items()},
    )


def _open_runtime(file: ModelFile, described: ForeignModel) -> tuple[Runtime, Kind]:
    match described.format:
        case ModelFormat.onnx:
            return open_onnx(file.file, described.output), "onnx"
        case ModelFormat.torch_export:
            return open_torch_export(file.file), "torch.export"
        case ModelFormat.safetensors:
            return open_timm_network(file.file, described), "timm"


def check_outputs(outputs: NDArray[np.floating], classes: int, kind: str, where: str) -> None:
    """Check that a model's outputs match its description.

    Args:
        outputs: Outputs of the model; expected shape ``(n, classes)``.
        classes: Number of classes in the description.
        kind: ``logits`` or ``probabilities``.
        where: The description, for the fault.

    Raises:
        BadInput: If the shape or a value does not match.
    """
    if outputs.ndim != 2 or outputs.shape[1] != classes:
        problem = f"the model returns {outputs.shape[1:]} numbers an image, and {classes} classes are stated."
        raise BadInput([Fault(where, problem, "State one class for each output, in their order.")])
    if not np.isfinite(outputs).all():
        raise BadInput([Fault(where, "the model returns numbers that are infinite or NaN.", "Are mean and std right?")])
    if kind == "probabilities" and (
        outputs.min() < -PROBABILITY_TOLERANCE or outputs.max() > 1 + PROBABILITY_TOLERANCE
    ):
        problem = f"outputs are stated to be probabilities, and reach from {outputs.min():.3g} to {outputs.max():.3g}."
        raise BadInput([Fault(where, problem, 'Write: outputs = "logits"')])


def convert_outputs_to_probabilities(outputs: NDArray[np.floating], kind: str, task: Task) -> Scores:
    """Convert a model's outputs to probabilities ``(n, classes)``.

    Args:
        outputs: Logits or probabilities, ``(n, classes)``.
        kind: ``logits`` or ``probabilities``.
        task: Decides whether logits go through sigmoid or softmax.
    """
    if kind == "probabilities":
        clipped: Scores = np.clip(outputs, 0, 1).astype(np.float32)
        return clipped
    scores: Scores = logits_to_probabilities(torch.from_numpy(outputs.astype(np.float32)), task).numpy()
    return scores


def hash_model_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal; the file is not read into memory at once."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def find_missing_classes_fault(model: ModelToScore, class_names: Sequence[str], where: str) -> Fault:
    """Return the fault of a model whose classes are not among those of any data set."""
    problem = f"scores {quote_names(model.class_names)}, and the images are labelled {quote_names(class_names)}."
    remedy = "If they are other words for the same, state them: [vocabulary.CLASS] synonyms = [...] in MODEL.toml, or "
    remedy += "[data.synonyms] of the data."
    return Fault(where, problem, remedy)
