"""Write what a segmentation model predicts: a mask for each picture, on the picture's own grid."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.models.gpu import move_network_to_device
from polyclinic.common.models.network import SplitNetwork, decide_class_areas
from polyclinic.common.models.segmenting import iterate_logits
from polyclinic.common.models.zoo.spec import Task, is_segmentation
from polyclinic.common.prediction.pictures import (
    UnlabelledPictures,
    make_unreadable_images_fault,
    read_unlabelled_pictures,
)
from polyclinic.common.system.files import find_output_folder_faults, make_private_folder, write_atomically
from polyclinic.common.system.plain_text import format_as_json_text
from polyclinic.data.images.masks import Grid, PictureGrid, read_grid, restore_mask_to_grid
from polyclinic.data.images.pixels import ImageTensors, convert_to_channels_first
from polyclinic.data.images.reading import DecodedImageFormat

LEGEND = "classes.json"
SHOWN = 255


def refuse_segmentation(network: SplitNetwork, purpose: str) -> None:
    """Refuse a model with a label for each pixel where one for each image is needed.

    Args:
        purpose: The command or figure that needs it, as the beginning of a sentence.

    Raises:
        BadInput: If the model segments.
    """
    if is_segmentation(network.spec.task):
        problem = f"segments. {purpose} needs a label for each image, and this model gives one for each pixel."
        remedy = "predict writes its masks; the report of its run has Dice and Hausdorff distance."
        raise BadInput([Fault("the model", problem, remedy)])


def predict_masks(
    network: SplitNetwork, class_names: Sequence[str], data: Path, form: DecodedImageFormat, out: Path, device: str = ""
) -> UnlabelledPictures:
    """Write the masks of all pictures into a new folder; return the pictures.

    Classes that exclude one another are one label map for each picture, NAME.png, with 0 for background and the values
    of ``classes.json``. Classes that may overlap are a file for each class, NAME.CLASS.png, with 255 where it is. Masks
    of volumes are NIfTI files, NAME.nii.gz, on the volume's own grid.

    Args:
        class_names: The classes that the model has learned; others are not written.
        data: A picture or a folder of pictures.
        out: The new folder, which only this account can open.
        device: ``cpu`` or ``cuda``; empty for the GPU if there is one.

    Raises:
        BadInput: If the folder exists, or no picture can be read.
    """
    raise_faults(find_output_folder_faults(out))
    if data.suffix == ".npz":
        problem = "is an npz file; masks are written beside picture files."
        raise BadInput([Fault(str(data), problem, "Name a picture, or a folder of pictures.")])
    pictures = read_unlabelled_pictures(data, form)
    grids = dict[str, Grid]()
    for name in pictures.names:
        try:
            grids[name] = read_grid(data / name if data.is_dir() else data, form)
        except ValueError as error:
            pictures = replace(pictures, unreadable={**pictures.unreadable, name: str(error)})
    if not grids:
        name, reason = next(iter(pictures.unreadable.items()), (data.name, "it holds no image"))
        raise BadInput([make_unreadable_images_fault(data, name, reason)])
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    pixels = ImageTensors(convert_to_channels_first(pictures.images), None, torch.device(device))
    columns = [network.class_names.index(name) for name in class_names]
    make_private_folder(out)
    values = {name: number for number, name in enumerate(class_names, start=1)}
    write_atomically(out / LEGEND, f"{format_as_json_text(values, indent=1)}\n".encode(), private=True)
    for rows, logits in iterate_logits(move_network_to_device(network, device), pixels):
        areas = decide_class_areas(logits, network.spec.task)[:, columns].cpu().numpy()
        for row, of_picture in zip(rows.tolist(), areas, strict=True):
            name = pictures.names[row]
            if name in grids:
                _write_masks(out / name, of_picture, grids[name], MaskWriting(network.spec.task, class_names, form))
    return pictures


@dataclass(frozen=True)
class MaskWriting:
    """What the masks of all pictures have in common.

    Attributes:
        class_names: The classes, in the order of areas.
    """

    task: Task
    class_names: Sequence[str]
    form: DecodedImageFormat


def _write_masks(place: Path, areas: NDArray[np.bool_], grid: Grid, writing: MaskWriting) -> None:
    """Write the masks of one picture or volume, whose name ``place`` ends in.

    Args:
        areas: ``(classes, *spatial)``, on the grid of the data set.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    if writing.task == "exclusive_segmentation":
        numbers = np.arange(1, len(areas) + 1, dtype=np.uint8 if len(areas) < SHOWN else np.uint16)
        label_map = (areas * numbers.reshape(-1, *[1] * (areas.ndim - 1))).max(0)
        _write_mask(place, label_map, grid, writing.form)
        return
    for name, area in zip(writing.class_names, areas, strict=True):
        safe = "".join(sign if sign.isalnum() or sign in " -_." else "_" for sign in name)
        _write_mask(place.with_name(f"{place.name}.{safe}"), area.astype(np.uint8) * SHOWN, grid, writing.form)


def _write_mask(place: Path, values: NDArray[Any], grid: Grid, form: DecodedImageFormat) -> None:
    if not isinstance(grid, PictureGrid):
        from polyclinic.data.images.volume_masks import restore_volume_mask, write_nifti_mask  # takes a second

        file = place.with_name(f"{place.name}.nii.gz")
        content = write_nifti_mask(file, restore_volume_mask(values, grid, form), grid)
    else:
        file, png = place.with_name(f"{place.name}.png"), io.BytesIO()
        Image.fromarray(restore_mask_to_grid(values, grid, form)).save(png, format="PNG")
        content = png.getvalue()
    write_atomically(file, content, private=True)
