"""flwr-sim predict and evaluate: a saved model and images, with nothing else at hand."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from common.config import read_experiment
from common.data.base.image_set import ImageSet, joined
from common.data.base.spec import FolderSpec, NpzSpec
from common.data.images.pixels import channels_first
from common.data.images.reading import PICTURES, ImageForm, decode_all
from common.data.load import load
from common.data.sources.npz_checks import opened_npz, read_headers
from common.data.tables.csv import read_columns
from common.errors import BadInput, Fault, did_you_mean, quoted
from common.metrics.multi_label import ClassMetrics, mean_and_sd, per_class
from common.models.inference import label_matrix, scores_of
from common.models.network import SplitNetwork
from common.models.saved import load_model
from common.system.plain_text import escaped

NPZ_PARTS = ("test", "val", "train")


@dataclass(frozen=True)
class Pictures:
    """Images without labels: names, uint8 ``(n, height, width[, 3])``, and those that could not be read."""

    names: tuple[str, ...]
    images: NDArray[np.uint8]
    unreadable: Mapping[str, str]


def predict_to_csv(folder: Path, data: Path, destination: Path) -> tuple[int, int]:
    """Write one row an image and one column a class, probabilities; return how many could be read, and how many not.

    An image that cannot be read has a row with empty cells and the reason in the last column.

    Raises:
        BadInput: If the model or the data cannot be read, or the destination exists.
    """
    if destination.exists():
        raise BadInput([Fault(f"--out {destination}", "exists, and nothing is written over.", "Name another file.")])
    if not destination.parent.is_dir():
        raise BadInput([Fault(f"--out {destination}", "its folder does not exist.", "Make it first.")])
    network = load_model(folder)
    pictures = read_pictures(data, network)
    probabilities = picture_scores(network, pictures.images)
    with destination.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["image", *map(escaped, network.class_names), "unreadable"])
        writer.writerows(
            [escaped(name), *(f"{p:.6f}" for p in row), ""]
            for name, row in zip(pictures.names, probabilities, strict=True)
        )
        writer.writerows(
            [escaped(name), *[""] * len(network.class_names), escaped(reason)]
            for name, reason in pictures.unreadable.items()
        )
    return len(pictures.names), len(pictures.unreadable)


def picture_scores(network: SplitNetwork, images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Probabilities ``(n, classes)`` of uint8 images; on the GPU where there is one."""
    if not len(images):
        return np.zeros((0, len(network.class_names)), np.float32)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return scores_of(network.to(device), channels_first(images).to(device))


def read_pictures(data: Path, network: SplitNetwork) -> Pictures:
    """Read an npz file's images, a folder of pictures, or one picture.

    Raises:
        BadInput: If there is nothing of that kind.
    """
    if data.suffix == ".npz" and data.is_file():
        return _npz_pictures(data)
    files = (
        sorted(p for p in data.rglob("*") if p.suffix.lower() in (*PICTURES, "") and p.is_file())
        if data.is_dir()
        else [data]
    )
    if not files or not files[0].is_file():
        raise BadInput([Fault(str(data), "is no npz file, no picture and no folder of pictures (PNG, JPEG, DICOM).")])
    form = ImageForm(network.spec.image_size, network.spec.channels == 3, "pad")
    names = [str(file.relative_to(data)) if data.is_dir() else file.name for file in files]
    decoded = decode_all(names, lambda row: files[row].read_bytes(), form)
    unreadable = {skip.name: skip.reason for skip in decoded.skipped}
    return Pictures(tuple(names[row] for row in decoded.kept), decoded.images, unreadable)


def _npz_pictures(data: Path) -> Pictures:
    """The test part, or the one there is, named by row; or an array called ``images``."""
    headers = read_headers(data, str(data))
    keys = ["images", *(f"{part}_images" for part in NPZ_PARTS)]
    key = next((key for key in keys if key in headers), None)
    if key is None:
        problem = f"has no images. Keys: {quoted(headers)}."
        raise BadInput([Fault(str(data), problem, f"Expected one of {quoted(keys)}.")])
    with opened_npz(data, str(data)) as arrays:
        images = arrays[key]
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or images.shape[3:] not in ((), (3,)):
        expected = "expected uint8 (n, height, width) or (n, height, width, 3)"
        problem = f"{key} is {images.dtype} of shape {images.shape}, {expected}."
        raise BadInput([Fault(str(data), problem)])
    return Pictures(tuple(f"{key}[{row}]" for row in range(len(images))), images, {})


def evaluate_on(folder: Path, data: Path, class_names: Sequence[str], pictures: Path | None) -> dict[str, ClassMetrics]:
    """Score a saved model on the classes that the labelled data and the model share.

    Args:
        folder: With ``model.safetensors`` and ``model.json``.
        data: An experiment file (its [data] table, test part), an npz file (test part), or a csv with a column a class.
        class_names: Names of the npz file's label columns.
        pictures: Folder of the csv's pictures.

    Raises:
        BadInput: If something cannot be read, or model and data share no class.
    """
    network = load_model(folder)
    test = _labelled(network, data, class_names, pictures)
    shared = tuple(name for name in network.class_names if name in test.class_names)
    if not shared:
        near = [hint for name in test.class_names if (hint := did_you_mean(name, network.class_names))]
        problem = (
            f"labels {quoted(test.class_names)}, the model knows {quoted(network.class_names)}: no class in common."
        )
        raise BadInput([Fault(str(data), problem, " ".join(near))])
    columns = [network.class_names.index(name) for name in shared]
    return per_class(picture_scores(network, test.images)[:, columns], label_matrix(test, shared).numpy(), shared)


def _labelled(network: SplitNetwork, data: Path, class_names: Sequence[str], pictures: Path | None) -> ImageSet:
    if data.suffix == ".toml":
        file = read_experiment(data)
        if file.experiment.data is None:
            raise BadInput([Fault(f"{data.name}: [data]", "is missing, so there is nothing to evaluate on.")])
        return load(file.experiment.data, file.base).test
    if data.suffix == ".npz":
        return load(NpzSpec(kind="npz", path=str(data.resolve()), classes=tuple(class_names)), Path()).test
    splits = load(_folder_spec(network, data, pictures), Path())
    # All of it is test data, no matter how the loader split it.
    return joined([splits.train, splits.validation, splits.test])


def _folder_spec(network: SplitNetwork, data: Path, pictures: Path | None) -> FolderSpec:
    """A csv with a column ``image`` and one column a class that the model knows."""
    if not data.is_file():
        raise BadInput([Fault(str(data), "there is no such file.")])
    header = read_columns(data, str(data))
    columns = tuple(name for name in header if name in network.class_names)
    if "image" not in header or not columns:
        problem = f'has columns {quoted(header)}; expected "image" and at least one of {quoted(network.class_names)}.'
        raise BadInput([Fault(str(data), problem)])
    return FolderSpec(
        kind="folder",
        images=str((pictures or data.parent).resolve()),
        labels=str(data.resolve()),
        image_column="image",
        label_columns=columns,
        image_size=network.spec.image_size,
        color=network.spec.channels == 3,
    )


def metrics_table(results: Mapping[str, ClassMetrics]) -> Table:
    """AUROC and average precision by class; "n/a" where a class has no positives or no negatives."""
    table = Table("class", "AUROC", "average precision", "positives", "negatives")
    for name, one in results.items():
        table.add_row(
            Text(name), _shown(one.auroc), _shown(one.average_precision), str(one.positives), str(one.negatives)
        )
    mean, sd = mean_and_sd(one.auroc for one in results.values())
    table.add_section()
    table.add_row("mean (SD over classes)", f"{_shown(mean)} ({_shown(sd)})", "", "", "")
    return table


def _shown(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"
