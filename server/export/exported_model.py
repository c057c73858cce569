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
from polyclinic.server.reporting.model_card import CARD, render_model_card
from polyclinic.server.runs.reader import read_run

TOLERANCE = 1e-4
INPUT, OUTPUT, WINDOW_OUTPUT = "images", "probabilities", "logits"
METADATA = "polyclinic.json"
"""File of the metadata inside a TorchScript file."""
Pixels = NDArray[np.uint8]
Scores = NDArray[np.float32]
MOST_COMPARED, BATCH_SIZE = 256, 64
"""Images compared at most, spread evenly over those that there are; images in a batch."""
SYNTHETIC_MARGINS = ((0, 0), (13, 40), (200, 170))
"""Pixels that synthetic images are higher and wider than the model's own size."""
LUMINANCE = (0.299, 0.587, 0.114)
REQUIRED_PACKAGES = {ExportFormat.onnx: ("onnx", "onnxruntime", "onnxscript"), ExportFormat.torchscript: ()}


class ExportedOutputsDiffer(ProgramCannotContinue):
    """Raised if the exported model gives other probabilities than the saved one; the exported file is then removed."""


@dataclass(frozen=True)
class ExportComparison:
    """The result of comparing an exported model with the saved model on ``images`` images."""

    path: Path
    images: int
    largest_difference: float


def has_fixed_input(spec: ModelSpec) -> bool:
    """Return True if an exported model takes images of its own size alone: volumes, or windows of a larger image."""
    return spec.takes_volumes or spec.patch_size is not None


class PixelClassifier(nn.Module):
    """The exported module: raw pixels in, probabilities out (resize, normalisation, network, sigmoid or softmax)."""

    def __init__(self, network: SplitNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Return probabilities ``(batch, classes)`` for pixels 0..255 ``(batch, channels, height, width)`` of any size.

        Of a segmentation they are ``(batch, classes, size, size)``, of the model's own size.
        Every image is resized, because an exported graph has no branches; an image of the model's size stays unchanged.
        Volumes ``(batch, channels, depth, height, width)`` must have the model's size, and so must the windows of a
        model of patches, which are not resized.
        """
        spec, pixels = self.network.spec, images.float()
        if not has_fixed_input(spec):
            pixels = functional.interpolate(pixels, spec.sides, mode="bilinear", antialias=True)
        return logits_to_probabilities(self.network(pixels), spec.task)


class WindowLogits(nn.Module):
    """The exported module of a model of patches: raw pixels of a window in, logits out.

    The caller averages overlapping windows, and applies sigmoid or softmax to the mean: the mean of the windows'
    probabilities would be another number.
    """

    def __init__(self, network: SplitNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``(batch, classes, *sides)`` for pixels 0..255 ``(batch, channels, *sides)``."""
        logits: Tensor = self.network(images.float())
        return logits


def export_model(folder: Path, form: ExportFormat, destination: Path, pixels: Sequence[Pixels]) -> ExportComparison:
    """Write a saved model to a new file, and check on images that the file gives the same probabilities.

    Args:
        destination: The new file; it must not exist.
        pixels: Images for the comparison, in batches ``(n, channels, height, width)`` with the model's channels; of
            volumes ``(n, channels, depth, height, width)``.

    Raises:
        BadInput: If the folder holds no model, a library is missing, or the destination exists.
        ExportedOutputsDiffer: If a probability differs by more than ``TOLERANCE``; the new file is removed.
    """
    faults = find_missing_package_faults(f"--to {form}", *REQUIRED_PACKAGES[form])
    saved = read_model_description(folder)
    raise_faults([*faults, *find_output_file_faults(destination)])
    network = load_model(folder)
    merge_low_rank_factors(network.backbone)
    model = PixelClassifier(network).eval().requires_grad_(False)
    part = make_temporary_path(destination)
    with remove_outputs_on_failure(destination, part):
        run = _write_exported_model(_choose_exported_module(model), form, make_export_metadata(saved), part)
        if saved.model.patch_size is not None:
            run = _slide_exported_model(run, saved.model)
        # NaN stays.
        largest = float(np.max([compute_largest_probability_difference(model, run, batch) for batch in pixels]))
        if not largest <= TOLERANCE:
            problem = f"the exported model's probabilities differ from ours by up to {largest:.2g}"
            raise ExportedOutputsDiffer(f"{problem}, more than {TOLERANCE:g}; {destination} was not written")
        part.replace(destination)
    return ExportComparison(destination, sum(map(len, pixels)), largest)


def make_export_metadata(saved: SavedModelDescription) -> dict[str, str]:
    """Return the metadata that is written into an exported file."""
    channels = "grey" if saved.model.channels == 1 else "RGB, in this order"
    defined = list_definitions(saved.class_names, saved.vocabulary)
    sides = " x ".join(map(str, saved.model.sides))
    shape, size, steps = "height, width", "any size", f"bilinear antialiased resize to {sides}, "
    if has_fixed_input(saved.model):
        kind = "volumes" if saved.model.takes_volumes else "pictures"
        unit = "voxels" if saved.model.takes_volumes else "pixels"
        shape, size, steps = ", ".join(map(str, saved.model.sides)), f"{kind} of {sides} {unit}", ""
    output, classes = OUTPUT, "in the order of class_names"
    if saved.model.patch_size is not None:
        size += f"; {describe_sliding_window(saved.model)}"
        output, last = WINDOW_OUTPUT, "softmax over the classes and a background of logit 0"
        last = "sigmoid" if saved.model.task == "segmentation" else last
        classes += f"; average them over windows, then {last}"
    pixels = "".join(f", {side}" for side in saved.model.sides) if is_segmentation(saved.model.task) else ""
    return {
        "class_names": json.dumps(saved.class_names, ensure_ascii=False),
        "task": saved.model.task,
        "input": f"{INPUT}: uint8 (batch, {saved.model.channels}, {shape}), pixels 0..255, {channels}; {size}",
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


def compute_largest_probability_difference(model: nn.Module, run: Callable[[Pixels], Scores], batch: Pixels) -> float:
    """Return the largest difference between the probabilities of the saved and of the exported model.

    The two are compared on the whole batch, and on its first image alone. The result is infinite if shapes differ, and
    may be NaN.

    Args:
        model: The saved model.
        run: Computes probabilities with the exported model.
    """
    pairs = [(compute_torch_probabilities(model, images), run(images)) for images in (batch[:1], batch)]
    if any(ours.shape != exported.shape for ours, exported in pairs):
        return float("inf")
    return float(np.max([np.abs(ours - exported).max() for ours, exported in pairs]))


def _choose_exported_module(model: PixelClassifier) -> nn.Module:
    network = model.network
    return model if network.spec.patch_size is None else WindowLogits(network).eval().requires_grad_(False)


def _slide_exported_model(run: Callable[[Pixels], Scores], spec: ModelSpec) -> Callable[[Pixels], Scores]:
    """Return a function from whole images to probabilities, by an exported model that gives the logits of a window."""

    def compute_window_logits(windows: Tensor) -> Tensor:
        return torch.from_numpy(run(windows.to(torch.uint8).numpy()))

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
    model: nn.Module, form: ExportFormat, metadata: dict[str, str], path: Path
) -> Callable[[Pixels], Scores]:
    """Write the model to a file; return a function that computes what the model in that file returns."""
    spec = cast(SplitNetwork, model.network).spec
    output = OUTPUT if spec.patch_size is None else WINDOW_OUTPUT
    if has_fixed_input(spec):
        shape, dynamic_axes = spec.sides, {0: "batch"}
    else:
        # A size other than the model's, so that the export treats no dimension as constant.
        shape, dynamic_axes = (spec.sides[0] + 5, spec.sides[1] + 3), {0: "batch", 2: "height", 3: "width"}
    example = torch.zeros(2, spec.channels, *shape, dtype=torch.uint8)
    if form is ExportFormat.torchscript:
        with warnings.catch_warnings():
            # torch calls TorchScript deprecated, and warns of sizes that a trace takes for constant, as they are here:
            # the first step brings every image to one size. The comparison is of other sizes than the trace.
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(model, (example,), check_trace=False)  # type: ignore[no-untyped-call]
            whole = io.BytesIO()  # on a full disk torch would end the process where it writes to a path
            torch.jit.save(traced, whole, _extra_files={METADATA: json.dumps(metadata, ensure_ascii=False)})
            path.write_bytes(whole.getbuffer())
            loaded = torch.jit.load(str(path))  # type: ignore[no-untyped-call]
        return lambda batch: compute_torch_probabilities(loaded, batch)
    import onnxruntime

    program = torch.onnx.export(
        model,
        (example,),
        input_names=[INPUT],
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
    return lambda batch: np.asarray(session.run([output], {INPUT: batch})[0])


def export_run_model(
    folder: Path, form: ExportFormat, out: Path | None, check: Path | None
) -> tuple[ExportComparison, str, Path | None]:
    """Export a run's model with a model card; return the comparison, the origin of its images, and the card's path.

    Args:
        out: The new file; by default ``model.onnx`` or ``model.pt`` in the folder.
        check: Images for the comparison: an npz file, a picture, a folder of pictures or an experiment. By default, the
            test images of the run's own experiment if they are available, else synthetic images.

    Raises:
        BadInput: If something cannot be read or written.
        ExportedOutputsDiffer: If the exported model gives other probabilities.
    """
    destination = out or choose_default_export_path(folder, form)
    spec = load_model(folder).spec
    card, path = None, destination.parent / CARD
    if (folder / "summary.json").is_file():
        card = render_model_card(folder)
        is_own = path.parent.resolve() == folder.resolve()
        if not is_own and path.is_file() and path.read_text(encoding="utf-8") != card:
            problem = "is another model's card, and nothing is written over."
            raise BadInput([Fault(str(path), problem, "Name an --out in another folder.")])
    batches, source = choose_comparison_images(folder, spec, check)
    done = export_model(folder, form, destination, batches)
    if card is None:
        return done, source, None
    write_atomically(path, card.encode())
    return done, source, path


def choose_comparison_images(folder: Path, spec: ModelSpec, check: Path | None) -> tuple[Sequence[Pixels], str]:
    """Return images for the comparison of the exported model with the original, and a description of the images.

    They are the images of ``check``; without it, test images of the run's experiment, and without these, noise.
    Each batch is ``(n, channels, height, width)``.
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
        sizes = [[side + more for side, more in zip(spec.sides, margin, strict=True)] for margin in margins]
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
    """Convert images, at most :data:`MOST_COMPARED` evenly spaced ones, to channels-first batches for the model."""
    rows = np.unique(np.linspace(0, len(images) - 1, min(MOST_COMPARED, len(images))).round().astype(np.intp))
    pixels = images.select_rows(rows).images if isinstance(images, ImageSet) else images[rows]
    if pixels.ndim == 4 and spec.channels == 1:
        pixels = (pixels @ np.array(LUMINANCE)).round().astype(np.uint8)
    first = pixels[:, None] if pixels.ndim == 3 else np.moveaxis(pixels, -1, 1)
    whole = np.ascontiguousarray(np.repeat(first, spec.channels // first.shape[1], axis=1))
    return [whole[start : start + BATCH_SIZE] for start in range(0, len(whole), BATCH_SIZE)]
