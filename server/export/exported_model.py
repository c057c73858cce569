"""``flwr-sim export``: write a trained model as ONNX or TorchScript, and check that its probabilities are the same."""

import io
import json
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from polyclinic.common import __version__
from polyclinic.common.config import Experiment
from polyclinic.common.errors import BadInput, Fault, ProgramCannotContinue, raise_faults
from polyclinic.common.models.network import SplitNetwork, logits_to_probabilities
from polyclinic.common.models.saved import SavedModelDescription, load_model, read_model_description
from polyclinic.common.models.sliding_window import describe_sliding_window, slide_over_images
from polyclinic.common.models.trained import merge_low_rank_factors
from polyclinic.common.models.zoo.spec import ModelSpec, is_segmentation
from polyclinic.common.prediction.pictures import read_unlabelled_pictures
from polyclinic.common.system.files import (
    find_output_file_faults,
    make_temporary_path,
    remove_outputs_on_failure,
    write_atomically,
)
from polyclinic.common.system.packages import find_missing_package_faults
from polyclinic.common.vocabulary import list_definitions
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.images.store import open_user_image_store
from polyclinic.data.load import load_dataset
from polyclinic.server.export.prediction import choose_model_image_format
from polyclinic.server.export.preflight import ExportFormat, choose_default_export_path, read_experiment_data_spec
from polyclinic.server.reporting.model_card import MODEL_CARD_FILE, render_model_card
from polyclinic.server.runs.reader import read_run

MAX_PROBABILITY_DIFFERENCE = 1e-4
"""Greatest accepted difference between probabilities of the saved and of the exported model."""
INPUT_NAME = "images"
OUTPUT_NAME = "probabilities"
WINDOW_OUTPUT_NAME = "logits"
"""Name of the output of an exported model of patches."""
METADATA_FILE = "polyclinic.json"
"""Name of the metadata file inside a TorchScript archive."""
Pixels = NDArray[np.uint8]
Scores = NDArray[np.float32]
MAX_COMPARED_IMAGES = 256
BATCH_SIZE = 64
SYNTHETIC_MARGINS = ((0, 0), (13, 40), (200, 170))
"""Pixels by which synthetic images exceed the model's height and width."""
LUMINANCE_WEIGHTS = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in a grey value (ITU-R BT.601)."""
REQUIRED_PACKAGES = {ExportFormat.onnx: ("onnx", "onnxruntime", "onnxscript"), ExportFormat.torchscript: ()}


class ExportedOutputsDiffer(ProgramCannotContinue):
    """Raised if the exported model gives other probabilities than the saved one; the exported file is then removed."""


@dataclass(frozen=True)
class ExportComparison:
    """The result of comparing an exported model with the saved model.

    Attributes:
        path: The exported file.
        images: Number of compared images.
        largest_difference: Largest difference between two probabilities.
    """

    path: Path
    images: int
    largest_difference: float


def has_fixed_input(spec: ModelSpec) -> bool:
    """Return True if an exported model takes only inputs of the model's size: volumes, or windows of larger images."""
    return spec.takes_volumes or spec.patch_size is not None


class PixelClassifier(nn.Module):
    """The exported module: raw pixels in, probabilities out (resize, normalisation, network, sigmoid or softmax)."""

    def __init__(self, network: SplitNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Return the probabilities of a batch of images.

        Images of any size are resized, because an exported graph has no branches; this does not change an image of the
        model's size. Volumes and windows are not resized and must have the model's size.

        Args:
            images: Pixels 0..255, ``(batch, channels, height, width)``; volumes
                ``(batch, channels, depth, height, width)``.

        Returns:
            Probabilities, ``(batch, classes)``; of a segmentation ``(batch, classes, size, size)`` in the model's size.
        """
        spec = self.network.spec
        pixels = images.float()
        if not has_fixed_input(spec):
            pixels = functional.interpolate(pixels, spec.sides, mode="bilinear", antialias=True)
        return logits_to_probabilities(self.network(pixels), spec.task)


class WindowLogits(nn.Module):
    """The exported module of a model of patches: raw pixels of a window in, logits out.

    The caller averages the logits of overlapping windows, and then applies sigmoid or softmax. The result differs from
    a mean of probabilities.
    """

    def __init__(self, network: SplitNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``(batch, classes, *sides)`` for pixels 0..255 ``(batch, channels, *sides)``."""
        logits: Tensor = self.network(images.float())
        return logits


def export_model(
    folder: Path, export_format: ExportFormat, destination: Path, pixels: Sequence[Pixels]
) -> ExportComparison:
    """Write a saved model to a new file, and check on images that the file gives the same probabilities.

    Args:
        destination: The new file; it must not exist.
        pixels: Images for the comparison, in batches ``(n, channels, height, width)`` with the model's channels, or of
            volumes ``(n, channels, depth, height, width)``.

    Raises:
        BadInput: If the folder holds no model, a library is missing, or the destination exists.
        ExportedOutputsDiffer: If a probability differs by more than :data:`MAX_PROBABILITY_DIFFERENCE`; the new file is
            removed.
    """
    faults = find_missing_package_faults(f"--to {export_format}", *REQUIRED_PACKAGES[export_format])
    saved = read_model_description(folder)
    raise_faults([*faults, *find_output_file_faults(destination)])
    network = load_model(folder)
    merge_low_rank_factors(network.backbone)
    model = PixelClassifier(network).eval().requires_grad_(False)
    part = make_temporary_path(destination)
    with remove_outputs_on_failure(destination, part):
        run_exported = _write_exported_model(
            _choose_exported_module(model), export_format, make_export_metadata(saved), part
        )
        if saved.model.patch_size is not None:
            run_exported = _slide_exported_model(run_exported, saved.model)
        differences = [compute_largest_probability_difference(model, run_exported, batch) for batch in pixels]
        largest = float(np.max(differences))
        # Also refuses NaN, which is not at most any number.
        if not largest <= MAX_PROBABILITY_DIFFERENCE:
            problem = f"the exported model's probabilities differ from ours by up to {largest:.2g}"
            raise ExportedOutputsDiffer(
                f"{problem}, more than {MAX_PROBABILITY_DIFFERENCE:g}; {destination} was not written"
            )
        part.replace(destination)
    return ExportComparison(destination, sum(map(len, pixels)), largest)


def make_export_metadata(saved: SavedModelDescription) -> dict[str, str]:
    """Return the metadata that is written into an exported file."""
    channels = "grey" if saved.model.channels == 1 else "RGB, in this order"
    defined = list_definitions(saved.class_names, saved.vocabulary)
    sides = " x ".join(map(str, saved.model.sides))
    shape = "height, width"
    size = "any size"
    steps = f"bilinear antialiased resize to {sides}, "
    if has_fixed_input(saved.model):
        kind = "volumes" if saved.model.takes_volumes else "pictures"
        unit = "voxels" if saved.model.takes_volumes else "pixels"
        shape = ", ".join(map(str, saved.model.sides))
        size = f"{kind} of {sides} {unit}"
        steps = ""
    output = OUTPUT_NAME
    classes = "in the order of class_names"
    if saved.model.patch_size is not None:
        size += f"; {describe_sliding_window(saved.model)}"
        output = WINDOW_OUTPUT_NAME
        activation = "softmax over the classes and a background of logit 0"
        if saved.model.task == "segmentation":
            activation = "sigmoid"
        classes += f"; average them over windows, then {activation}"
    pixels = "".join(f", {side}" for side in saved.model.sides) if is_segmentation(saved.model.task) else ""
    return {
        "class_names": json.dumps(saved.class_names, ensure_ascii=False),
        "task": saved.model.task,
        "input": f"{INPUT_NAME}: uint8 (batch, {saved.model.channels}, {shape}), pixels 0..255, {channels}; {size}",
        "output": f"{output}: float32 (batch, {len(saved.class_names)}{pixels}), {classes}",
        "preprocessing": f"all inside: {steps}(pixel / 255 - mean) / std with mean "
        f"{list(saved.model.normalisation.mean)}, std {list(saved.model.normalisation.std)}",
        **({} if saved.pixels is None else {"pixels": saved.pixels.to_json(), "pixels_from": saved.pixels.describe()}),
        **({"unlearned": json.dumps(saved.unlearned, ensure_ascii=False)} if saved.unlearned else {}),
        **({"definitions": json.dumps(defined, ensure_ascii=False)} if defined else {}),
        "label_contract_sha256": saved.label_contract_sha256,
        "model_sha256": saved.model_sha256,
        "producer": f"polyclinic {__version__}",
    }


def compute_largest_probability_difference(
    model: nn.Module, run_exported: Callable[[Pixels], Scores], batch: Pixels
) -> float:
    """Return the largest difference between the probabilities of the saved and of the exported model.

    The two are compared on the whole batch, and on its first image alone. The result is infinite if shapes differ, and
    may be NaN.

    Args:
        model: The saved model.
        run_exported: Computes probabilities with the exported model.
    """
    pairs = [(compute_torch_probabilities(model, images), run_exported(images)) for images in (batch[:1], batch)]
    if any(saved.shape != exported.shape for saved, exported in pairs):
        return float("inf")
    return float(np.max([np.abs(saved - exported).max() for saved, exported in pairs]))


def _choose_exported_module(model: PixelClassifier) -> nn.Module:
    network = model.network
    return model if network.spec.patch_size is None else WindowLogits(network).eval().requires_grad_(False)


def _slide_exported_model(run_window: Callable[[Pixels], Scores], spec: ModelSpec) -> Callable[[Pixels], Scores]:
    """Return a function that computes probabilities of whole images with an exported model of windows.

    Args:
        run_window: Computes the logits of windows with the exported model.
    """

    def compute_window_logits(windows: Tensor) -> Tensor:
        return torch.from_numpy(run_window(windows.to(torch.uint8).numpy()))

    def compute_probabilities(batch: Pixels) -> Scores:
        logits = slide_over_images(compute_window_logits, torch.from_numpy(batch).float(), spec)
        scores: Scores = logits_to_probabilities(logits, spec.task).numpy()
        return scores

    return compute_probabilities


def compute_torch_probabilities(model: nn.Module, batch: Pixels) -> Scores:
    """Return the probabilities that the model computes with torch in this process."""
    with torch.no_grad():
        scores: Scores = model(torch.from_numpy(batch)).numpy()
    return scores


def _write_exported_model(
    model: nn.Module, export_format: ExportFormat, metadata: dict[str, str], path: Path
) -> Callable[[Pixels], Scores]:
    """Write the model to a file; return a function that runs the model in that file on a batch of images."""
    spec = cast(SplitNetwork, model.network).spec
    output = OUTPUT_NAME if spec.patch_size is None else WINDOW_OUTPUT_NAME
    if has_fixed_input(spec):
        shape, dynamic_axes = spec.sides, {0: "batch"}
    else:
        # A size other than the model's, so that the export treats no dimension as constant.
        shape, dynamic_axes = (spec.sides[0] + 5, spec.sides[1] + 3), {0: "batch", 2: "height", 3: "width"}
    example = torch.zeros(2, spec.channels, *shape, dtype=torch.uint8)
    if export_format is ExportFormat.torchscript:
        with warnings.catch_warnings():
            # torch warns that TorchScript is deprecated, and that a trace takes sizes for constant. They are constant
            # here, because the first step resizes each image. The comparison uses other sizes than the trace.
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(model, (example,), check_trace=False)  # type: ignore[no-untyped-call]
            # Saved to memory first: if torch writes to a path on a full disk, it ends the process.
            archive = io.BytesIO()
            torch.jit.save(traced, archive, _extra_files={METADATA_FILE: json.dumps(metadata, ensure_ascii=False)})
            path.write_bytes(archive.getbuffer())
            loaded = torch.jit.load(str(path))  # type: ignore[no-untyped-call]
        return lambda batch: compute_torch_probabilities(loaded, batch)
    import onnxruntime

    program = torch.onnx.export(
        model,
        (example,),
        input_names=[INPUT_NAME],
        output_names=[output],
        dynamic_shapes={"images": dynamic_axes},
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props.update(metadata)
    program.save(str(path), external_data=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda batch: np.asarray(session.run([output], {INPUT_NAME: batch})[0])


def export_run_model(
    folder: Path, export_format: ExportFormat, out: Path | None, check: Path | None
) -> tuple[ExportComparison, str, Path | None]:
    """Export a run's model, and write its model card to the same folder.

    Args:
        out: The new file; by default ``model.onnx`` or ``model.pt`` in the folder.
        check: Images for the comparison: an npz file, a picture, a folder of pictures or an experiment. By default, the
            test images of the run's own experiment if they are available, else synthetic images.

    Returns:
        The comparison with the saved model; a description of the compared images; and the path of the model card, None
        if the folder is not a run folder.

    Raises:
        BadInput: If a file cannot be read or written, or another model's card is in the folder.
        ExportedOutputsDiffer: If the exported model gives other probabilities.
    """
    destination = out or choose_default_export_path(folder, export_format)
    spec = load_model(folder).spec
    card = None
    path = destination.parent / MODEL_CARD_FILE
    if (folder / "summary.json").is_file():
        card = render_model_card(folder)
        is_own = path.parent.resolve() == folder.resolve()
        if not is_own and path.is_file() and path.read_text(encoding="utf-8") != card:
            problem = "is another model's card, and nothing is written over."
            raise BadInput([Fault(str(path), problem, "Name an --out in another folder.")])
    batches, source = choose_comparison_images(folder, spec, check)
    comparison = export_model(folder, export_format, destination, batches)
    if card is None:
        return comparison, source, None
    write_atomically(path, card.encode())
    return comparison, source, path


def choose_comparison_images(folder: Path, spec: ModelSpec, check: Path | None) -> tuple[Sequence[Pixels], str]:
    """Return batches of images for the comparison of the exported with the saved model, and a description of them.

    Args:
        folder: The run's folder.
        check: Source of the images. If it is None, the images are test images of the run's experiment, or noise if
            these are not available.

    Returns:
        Batches ``(n, channels, height, width)``, of volumes ``(n, channels, depth, height, width)``; and a description.
    """
    if check is None:
        test = None
        with suppress(BadInput, ValueError):  # no run, or its files are on another machine
            experiment = Experiment.model_validate(read_run(folder).summary.experiment)
            data = experiment.data or experiment.server_data
            test = None if data is None else load_dataset(data, Path(), open_user_image_store()).test
        if test is not None and len(test):
            return _make_image_batches(test, spec), "test images of the run's own experiment"
        generator = np.random.default_rng(0)
        margins: Sequence[Sequence[int]] = [(0,) * len(spec.sides)] if has_fixed_input(spec) else SYNTHETIC_MARGINS
        if spec.patch_size is not None:
            margins = [[side // 2 for side in spec.sides]]
        sizes = [[side + extra for side, extra in zip(spec.sides, margin, strict=True)] for margin in margins]
        shapes = [(8, spec.channels, *size) for size in sizes]
        noise = [generator.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]
        return noise, "synthetic images, noise: for real ones name --check"
    if check.suffix == ".toml":
        test = load_dataset(*read_experiment_data_spec(check), open_user_image_store()).test
        return _make_image_batches(test, spec), f"images of {check}"
    pictures = read_unlabelled_pictures(check, choose_model_image_format(folder, load_model(folder)))
    if not len(pictures.images):
        raise BadInput([Fault(f"--check {check}", "holds no image that can be read.")])
    return _make_image_batches(pictures.images, spec), f"images of {check}"


def _make_image_batches(images: ImageSet | Pixels, spec: ModelSpec) -> list[Pixels]:
    """Return channels-first batches for the model of at most :data:`MAX_COMPARED_IMAGES` evenly spaced images."""
    rows = np.unique(np.linspace(0, len(images) - 1, min(MAX_COMPARED_IMAGES, len(images))).round().astype(np.intp))
    pixels = images.select_rows(rows).images if isinstance(images, ImageSet) else images[rows]
    if pixels.ndim == 4 and spec.channels == 1:
        pixels = (pixels @ np.array(LUMINANCE_WEIGHTS)).round().astype(np.uint8)
    channels_first = pixels[:, None] if pixels.ndim == 3 else np.moveaxis(pixels, -1, 1)
    repeats = spec.channels // channels_first.shape[1]
    inputs = np.ascontiguousarray(np.repeat(channels_first, repeats, axis=1))
    return [inputs[start : start + BATCH_SIZE] for start in range(0, len(inputs), BATCH_SIZE)]
