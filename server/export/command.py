"""``flwr-sim export`` as a person asks for it: which images to compare on, where the file and its card go."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.config import Experiment
from common.data.base.image_set import ImageSet
from common.data.load import load
from common.errors import BadInput, Fault
from common.models.saved import load_model
from common.models.zoo.spec import ModelSpec
from common.system.files import write_atomically
from server.export.before_torch import ExportFormat, file_of
from server.export.exported_model import ExportCheck, Pixels, export_model
from server.export.labelled import data_of_experiment
from server.export.pictures import read_pictures
from server.export.prediction import form_for
from server.reporting.model_card import CARD, model_card
from server.runs.reader import read_run

IMAGES, BATCH = 256, 64
"""Compared at most, spread evenly over what there is; at a time."""
SIZES = ((0, 0), (13, 40), (200, 170))
"""Of synthetic images: more pixels high and wide than the model's own size."""
LUMINANCE = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class ComparisonImages:
    """Images to compare on, ``(n, channels, height, width)`` each, and what they are, in words."""

    batches: tuple[Pixels, ...]
    source: str


def export(
    folder: Path, form: ExportFormat, out: Path | None, check: Path | None
) -> tuple[ExportCheck, str, Path | None]:
    """Export a run's model beside a model card; return the result, what it was compared on, and the card's path.

    Args:
        out: Of the file; ``model.onnx`` or ``model.pt`` in the folder by default.
        check: npz file, picture, folder of pictures or experiment; by default the test images of the run's own
            experiment where they are within reach, else synthetic ones.

    Raises:
        BadInput: If something cannot be read or written.
        OutputsDiffer: If the exported model does not say the same.
    """
    destination = out or file_of(folder, form)
    spec = load_model(folder).spec
    card = _card(folder, destination.parent)
    sample = sample_for(folder, spec, check)
    done = export_model(folder, form, destination, sample.batches)
    if card is not None:
        write_atomically(destination.parent / CARD, card.encode())
    return done, sample.source, None if card is None else destination.parent / CARD


def sample_for(folder: Path, spec: ModelSpec, check: Path | None) -> ComparisonImages:
    """Read the images to compare on."""
    if check is not None:
        return ComparisonImages(_batches(_given(folder, check), spec), f"images of {check}")
    if (own := _own_test_images(folder)) is not None and len(own):
        return ComparisonImages(_batches(own.images, spec), "test images of the run's own experiment")
    return ComparisonImages(tuple(_synthetic(spec)), "synthetic images, noise: for real ones name --check")


def _given(folder: Path, check: Path) -> Pixels:
    if check.suffix == ".toml":
        spec, base = data_of_experiment(check)
        return load(spec, base).test.images
    pictures = read_pictures(check, form_for(folder, load_model(folder)))
    if not len(pictures.images):
        raise BadInput([Fault(f"--check {check}", "holds no image that can be read.")])
    return pictures.images


def _own_test_images(folder: Path) -> ImageSet | None:
    """Load the test images of the experiment in ``summary.json``; data files of another machine are not looked for."""
    try:
        experiment = Experiment.model_validate(read_run(folder).summary.experiment)
        spec = experiment.data or experiment.server_data
        return None if spec is None else load(spec, Path()).test
    except (BadInput, ValueError):
        return None


def _batches(images: Pixels, spec: ModelSpec) -> tuple[Pixels, ...]:
    """Some of ``(n, height, width[, 3])``, in the model's channels, channels first."""
    rows = np.unique(np.linspace(0, len(images) - 1, min(IMAGES, len(images))).round().astype(np.int64))
    pixels = images[rows]
    if pixels.ndim == 4 and spec.channels == 1:
        pixels = (pixels @ np.array(LUMINANCE)).round().astype(np.uint8)
    first = pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
    whole = np.ascontiguousarray(np.repeat(first, spec.channels // first.shape[1], axis=1))
    return tuple(whole[start : start + BATCH] for start in range(0, len(whole), BATCH))


def _synthetic(spec: ModelSpec) -> Iterator[Pixels]:
    random = np.random.default_rng(0)
    for more_high, more_wide in SIZES:
        shape = (8, spec.channels, spec.image_size + more_high, spec.image_size + more_wide)
        yield random.integers(0, 256, shape, dtype=np.uint8)


def _card(folder: Path, beside: Path) -> str | None:
    """The model card, where the folder is a run's; refuses to take the place of another model's."""
    if not (folder / "summary.json").is_file():
        return None
    card, there = model_card(folder), beside / CARD
    if beside.resolve() != folder.resolve() and there.is_file() and there.read_text(encoding="utf-8") != card:
        problem = "is another model's card, and nothing is written over."
        raise BadInput([Fault(str(there), problem, "Name an --out in another folder.")])
    return card
