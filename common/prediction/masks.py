"""Write the masks that a segmentation model predicts, one for each picture, on the pixel grid of the picture's file."""

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from polyclinic.common.prediction.dicom_segmentation import SegmentationWriter
from polyclinic.common.prediction.pictures import (
    UnlabelledPictures,
    locate_picture,
    make_unreadable_images_fault,
    read_unlabelled_pictures,
)
from polyclinic.common.system.files import find_output_folder_faults, make_private_folder, write_atomically
from polyclinic.common.system.plain_text import format_as_json_text
from polyclinic.common.vocabulary import Vocabulary, group_words_by_class
from polyclinic.data.images.masks import Grid, PictureGrid, read_grid, restore_mask_to_grid
from polyclinic.data.images.pixels import ImageTensors, convert_to_channels_first
from polyclinic.data.images.reading import DecodedImageFormat
from polyclinic.data.tables.files import drop_picture_extension

LEGEND_FILE = "classes.json"
PRESENT_VALUE = 255


def refuse_segmentation(network: SplitNetwork, purpose: str) -> None:
    """Refuse a segmentation model where a label for each image is needed.

    Args:
        network: The model.
        purpose: The command or metric that needs the label, as the beginning of a sentence.

    Raises:
        BadInput: If it is a segmentation model.
    """
    if is_segmentation(network.spec.task):
        problem = f"segments. {purpose} needs a label for each image, and this model gives one for each pixel."
        remedy = "predict writes its masks; the report of its run has Dice and Hausdorff distance."
        raise BadInput([Fault("the model", problem, remedy)])


@dataclass(frozen=True)
class MaskOptions:
    """Options for writing predicted masks.

    Attributes:
        values: Class -> its value in label maps, as in ``data.mask_values``; see :func:`number_classes`.
        segmentations: Writes a DICOM segmentation of each image, too; None for no segmentations.
        device: ``cpu`` or ``cuda``; empty for the GPU if there is one.
    """

    values: Mapping[str, int] = field(default_factory=dict)
    segmentations: SegmentationWriter | None = None
    device: str = ""


def number_classes(class_names: Sequence[str], values: Mapping[str, int]) -> dict[str, int]:
    """Return class -> its value in label maps: the value in ``values``, else the next number above all of these.

    So a number has the same meaning in the masks of a person and in those of a model.
    """
    highest = max(values.values(), default=0)
    others = [name for name in class_names if name not in values]
    numbers = {name: values[name] for name in class_names if name in values}
    numbers |= {name: highest + place for place, name in enumerate(others, start=1)}
    return {name: numbers[name] for name in class_names}


def map_values_to_classes(
    values: Mapping[str, int], vocabulary: Vocabulary, synonyms: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Return class of the study -> its value in a hospital's masks, without classes that several words mean.

    Args:
        values: Word -> value, as in ``data.mask_values``.
        vocabulary: The study's vocabulary.
        synonyms: Word of a hospital -> the class or synonym that it means.
    """
    site_word_by_word = {(synonyms or {}).get(site_word, site_word): site_word for site_word in values}
    groups = group_words_by_class([(synonyms or {}).get(site_word, site_word) for site_word in values], vocabulary)
    return {name: values[site_word_by_word[words[0]]] for name, words in groups.items() if len(words) == 1}


def predict_masks(
    network: SplitNetwork,
    class_names: Sequence[str],
    data: Path,
    form: DecodedImageFormat,
    out: Path,
    options: MaskOptions | None = None,
) -> UnlabelledPictures:
    """Write the masks of all pictures into a new folder; return the pictures.

    Exclusive classes are written as one label map per picture, NAME.png, with 0 for background and the values of
    ``classes.json``. Classes that may overlap are written as a file per class, NAME.CLASS.png, with 255 inside the
    class. Masks of volumes are NIfTI files, NAME.nii.gz, on the grid of the volume's file. For NAME see
    :func:`name_mask_files`.

    Args:
        network: The model.
        class_names: The classes to write, without those that the model has not learned.
        data: A picture or a folder of pictures.
        form: Format in which files are decoded.
        out: The new folder, which only this account can open.
        options: Options for writing; None for the defaults.

    Raises:
        BadInput: If the folder exists, or no picture can be read.
    """
    options = options or MaskOptions()
    raise_faults(find_output_folder_faults(out))
    if data.suffix == ".npz":
        problem = "is an npz file; masks are written beside picture files."
        raise BadInput([Fault(str(data), problem, "Name a picture, or a folder of pictures.")])
    pictures = read_unlabelled_pictures(data, form)
    grids = dict[str, Grid]()
    for name in pictures.names:
        try:
            grids[name] = read_grid(locate_picture(data, name), form)
        except ValueError as error:
            pictures = replace(pictures, unreadable={**pictures.unreadable, name: str(error)})
    if not grids:
        name, reason = next(iter(pictures.unreadable.items()), (data.name, "it holds no image"))
        raise BadInput([make_unreadable_images_fault(data, name, reason)])
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    pixels = ImageTensors(convert_to_channels_first(pictures.images), None, torch.device(device))
    columns = [network.class_names.index(name) for name in class_names]
    make_private_folder(out)
    values = number_classes(class_names, options.values)
    places = {name: out / file for name, file in name_mask_files(pictures.names).items()}
    write_atomically(out / LEGEND_FILE, f"{format_as_json_text(values, indent=1)}\n".encode(), private=True)
    for rows, logits in iterate_logits(move_network_to_device(network, device), pixels):
        areas = decide_class_areas(logits, network.spec.task)[:, columns].cpu().numpy()
        for row, picture_areas in zip(rows.tolist(), areas, strict=True):
            name = pictures.names[row]
            if name in grids:
                writing = MaskWriting(network.spec.task, values, form)
                on_grid = _write_masks(places[name], picture_areas, grids[name], writing)
                if options.segmentations is not None:
                    options.segmentations.write(places[name], name, locate_picture(data, name), on_grid, grids[name])
    if options.segmentations is not None:
        pictures = replace(pictures, without_segmentation=options.segmentations.refusals)
    return pictures


def name_mask_files(names: Sequence[str]) -> dict[str, str]:
    """Return picture -> the name of its masks without an extension: its own, ``a/b`` of ``a/b.nii.gz``.

    Where pictures differ in the extension alone, ``b.png`` and ``b.dcm``, each keeps it.
    """
    short = {name: drop_picture_extension(name) for name in names}
    counts = Counter([*short.values(), *names])
    return {name: stem if stem and counts[stem] == 1 else name for name, stem in short.items()}


def name_class_files(values: Mapping[str, int]) -> dict[str, str]:
    """Return class -> its part of a file name; of classes that differ in other signs alone, with their values."""
    safe = {name: "".join(sign if sign.isalnum() or sign in " -_." else "_" for sign in name) for name in values}
    counts = Counter(safe.values())
    return {name: part if counts[part] == 1 else f"{part}_{values[name]}" for name, part in safe.items()}


@dataclass(frozen=True)
class MaskWriting:
    """The settings that are the same for the masks of all pictures.

    Attributes:
        task: Task of the model.
        values: Class -> its value in label maps, in the order of areas.
        form: Format in which the files were decoded.
    """

    task: Task
    values: Mapping[str, int]
    form: DecodedImageFormat


def _write_masks(place: Path, areas: NDArray[np.bool_], grid: Grid, writing: MaskWriting) -> NDArray[np.bool_]:
    """Write the masks of one picture or volume; return them on the grid of its file, ``(classes, *spatial)``.

    Args:
        place: Path of the masks without their suffixes.
        areas: ``(classes, *spatial)``, on the grid of the network's input.
        grid: Grid of the file.
        writing: The common settings.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    on_grid = np.stack([_restore_to_grid(area, grid, writing.form) for area in areas])
    if writing.task == "exclusive_segmentation":
        kind = np.uint8 if max(writing.values.values()) <= PRESENT_VALUE else np.uint16
        label_map = np.zeros(on_grid.shape[1:], kind)
        for value, area in zip(writing.values.values(), on_grid, strict=True):
            label_map[area] = value
        _write_mask(place, label_map, grid)
        return on_grid
    for part, area in zip(name_class_files(writing.values).values(), on_grid, strict=True):
        _write_mask(place.with_name(f"{place.name}.{part}"), area.astype(np.uint8) * PRESENT_VALUE, grid)
    return on_grid


def _restore_to_grid(area: NDArray[np.bool_], grid: Grid, form: DecodedImageFormat) -> NDArray[np.bool_]:
    """Resample the area of one class from the grid of the network's input to the grid of the picture's file."""
    if isinstance(grid, PictureGrid):
        return restore_mask_to_grid(area, grid, form)
    from polyclinic.data.images.volume_masks import restore_volume_mask  # takes a second

    return restore_volume_mask(area, grid, form)


def _write_mask(place: Path, values: NDArray[Any], grid: Grid) -> None:
    """Write one mask file on the grid of its picture or volume."""
    if not isinstance(grid, PictureGrid):
        from polyclinic.data.images.volume_masks import write_nifti_mask  # takes a second

        file = place.with_name(f"{place.name}.nii.gz")
        content = write_nifti_mask(file, values, grid)
    else:
        file = place.with_name(f"{place.name}.png")
        png = io.BytesIO()
        Image.fromarray(values).save(png, format="PNG")
        content = png.getvalue()
    write_atomically(file, content, private=True)
