"""The page of ``flwr-client preview-data``: this hospital's images as the network receives them, for its staff only."""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from polyclinic.client.check.pictures import read_picture_facts
from polyclinic.client.check.source import SiteImageSource, choose_evenly_spaced_rows, open_site_image_source
from polyclinic.client.check.training import find_planned_training
from polyclinic.client.site.class_columns import make_label_declaration
from polyclinic.client.site.settings import find_hospital_data_faults
from polyclinic.client.site.site_file import read_site_toml_without_data
from polyclinic.common.class_columns import list_annotated_columns
from polyclinic.common.config import Experiment, HospitalPlan
from polyclinic.common.errors import raise_faults
from polyclinic.common.models.network import convert_pixels_for_backbone
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.plain_text import make_jinja_environment
from polyclinic.data.base.image_set import PARTS
from polyclinic.data.base.spec import AugmentationSpec
from polyclinic.data.images.augmentation import augment_images_weakly
from polyclinic.data.images.pixels import convert_to_channels_first
from polyclinic.data.images.reading import encode_png_thumbnail

THUMBNAIL_SIDE = 160
AUGMENTED_VIEWS = 2
"""Number of augmented views of each image on the page."""
IMAGES_PER_CLASS = 4
NO_CLASS_HEADING = "none of these classes"


@dataclass(frozen=True)
class ImageTile:
    """One image as decoded, as the network receives it, and as augmented in training; PNG files in base64."""

    name: str
    decoded: str
    network: str
    augmented: tuple[str, ...]


@dataclass(frozen=True)
class ClassImageTiles:
    """The images of one class on the page, and the number of its training images."""

    name: str
    count: int
    tiles: tuple[ImageTile, ...]


@dataclass(frozen=True)
class LabelCountsRow:
    """A class in the page's label table, with counts of present, absent and unknown labels in each part of the data."""

    name: str
    canonical: str
    counts: tuple[tuple[int, int, int], ...]


def write_class_samples_page(
    folder: Path, out: Path, experiment: Experiment | None, per_class: int = IMAGES_PER_CLASS
) -> Path:
    """Write the page with at most ``per_class`` images of each class; only its owner may read the file.

    Raises:
        BadInput: If site.toml or the data has faults; it lists all.
    """
    settings = read_site_toml_without_data(folder)
    raise_faults(find_hospital_data_faults(settings))
    source = open_site_image_source(settings)
    make_label_declaration(settings, source.class_names)
    planned = find_planned_training(settings, experiment, source)

    names = list_annotated_columns(source.class_names, settings.labels, settings.synonyms)
    labels = source.labels[:, [source.class_names.index(name) for name in names]]
    rows = []
    for column, name in enumerate(names):
        of_parts = [labels[source.parts == part, column] for part in PARTS]
        counts = tuple(
            (int((values == 1).sum()), int((values == 0).sum()), int(np.isnan(values).sum())) for values in of_parts
        )
        rows.append(LabelCountsRow(name, settings.synonyms.get(name, name), counts))

    text = (
        make_jinja_environment(Path(__file__).parent)
        .get_template("images.html.j2")
        .render(
            site=settings.file.name,
            plan=planned.plan,
            known_from=planned.origin,
            changes=[
                name.replace("_", " ") + ("" if value is True else f" {value}")
                for name, value in planned.plan.augmentation
                if value
            ],
            groups=tuple(_choose_images_by_class(source, names, labels, planned.plan, per_class)),
            rows=rows,
            parts=PARTS,
            totals=[int((source.parts == part).sum()) for part in PARTS],
        )
    )
    write_atomically(out, text.encode(), private=True)
    return out


def _choose_images_by_class(
    source: SiteImageSource, names: Sequence[str], labels: NDArray[np.float32], plan: HospitalPlan, per_class: int
) -> Iterator[ClassImageTiles]:
    """Yield at most ``per_class`` training images of each class, evenly spaced, and then images that show no class."""
    training = source.parts == "train"
    members = {name: training & (labels[:, column] == 1) for column, name in enumerate(names)}
    members[NO_CLASS_HEADING] = training & (labels == 0).all(axis=1)
    generator = torch.Generator().manual_seed(0)
    for name, chosen in members.items():
        rows = np.flatnonzero(chosen)
        if name == NO_CLASS_HEADING and not len(rows):
            continue
        tiles = []
        for facts in read_picture_facts(source, rows[choose_evenly_spaced_rows(len(rows), per_class)]):
            if facts.pixels is not None:
                pixels = convert_to_channels_first(facts.pixels[None]).float()
                count = AUGMENTED_VIEWS if plan.augmentation != AugmentationSpec() else 0
                views = [augment_images_weakly(pixels, plan.augmentation, generator) for _ in range(count)]
                shown = [_encode_pixels_as_png(facts.pixels)]
                for view in (pixels, *views):
                    # (1, channels, [depth,] height, width); its augmented contrast may leave 0..255
                    colours = convert_pixels_for_backbone(view, plan.model)[0].clamp(0, 255).round().to(torch.uint8)
                    image = colours.movedim(0, -1).numpy()
                    is_grey_picture = image.ndim == 3 and image.shape[2] == 1
                    shown.append(_encode_pixels_as_png(image[..., 0] if is_grey_picture else image))
                decoded, network, *augmented = shown
                tiles.append(ImageTile(source.names[facts.row], decoded, network, tuple(augmented)))
        yield ClassImageTiles(name, len(rows), tuple(tiles))


def _encode_pixels_as_png(pixels: NDArray[np.uint8]) -> str:
    return base64.b64encode(encode_png_thumbnail(pixels, THUMBNAIL_SIDE)).decode()
