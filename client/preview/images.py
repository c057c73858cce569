"""``flwr-client preview-data``: a page of this hospital's images as the network sees them, for this hospital only."""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from client.check.pictures import PictureFacts, read_pictures
from client.check.source import Source, chosen_rows, open_source
from client.check.training import PlannedTraining, planned_training
from client.site.settings import data_faults_of, declaration_of
from client.site.site_file import Settings, read_file_only
from common.config import Experiment, Plan
from common.data.base.image_set import PARTS
from common.data.base.spec import AugmentationSpec
from common.data.images.augmentation import augment
from common.data.images.pixels import channels_first
from common.data.images.reading import encode_png
from common.errors import stop_on
from common.models.network import backbone_pixels
from common.system.files import write_atomically
from common.system.plain_text import page_environment

SIDE = 160
VIEWS = 2
"""Augmented ones of each image."""
OF_A_CLASS = 4
NOTHING = "none of these classes"


@dataclass(frozen=True)
class Tile:
    """One image: as it was decoded, as the network sees it, and as it may see it in training; PNG as base64."""

    name: str
    decoded: str
    seen: str
    augmented: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """The images of one class."""

    name: str
    count: int
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class LabelCountsRow:
    """A class in the label table: present, absent and unknown in each part."""

    name: str
    canonical: str
    counts: tuple[tuple[int, int, int], ...]


def write_preview(folder: Path, out: Path, experiment: Experiment | None, each: int = OF_A_CLASS) -> Path:
    """Write the page, readable by its owner only.

    Args:
        experiment: What will be run, where the coordinator has given it.
        each: Images of a class.

    Raises:
        BadInput: With every fault of site.toml and the data.
    """
    settings = read_file_only(folder)
    stop_on(data_faults_of(settings))
    source = open_source(settings)
    declaration_of(settings, source.class_names)
    work = planned_training(settings, experiment, source)
    groups = tuple(_groups(settings, source, work.plan, each))
    content = _rendered(settings, work, groups, _rows(settings, source), source)
    write_atomically(out, content.encode(), private=True)
    return out


def _names(settings: Settings, source: Source) -> tuple[str, ...]:
    return settings.labels or source.class_names


def _groups(settings: Settings, source: Source, plan: Plan, each: int) -> Iterator[Group]:
    """Choose training images of each class, and of no class, spread evenly over the table."""
    names = _names(settings, source)
    labels = source.labels[:, [source.class_names.index(name) for name in names]]
    training = source.parts == "train"
    members = {name: training & (labels[:, place] == 1) for place, name in enumerate(names)}
    members[NOTHING] = training & (labels == 0).all(axis=1)
    generator = torch.Generator().manual_seed(0)
    for name, chosen in members.items():
        rows = np.flatnonzero(chosen)
        if name == NOTHING and not len(rows):
            continue
        looks = read_pictures(source, rows[chosen_rows(len(rows), each)])
        tiles = tuple(_tile(source, look, plan, generator) for look in looks if look.pixels is not None)
        yield Group(name, len(rows), tiles)


def _tile(source: Source, look: PictureFacts, plan: Plan, generator: torch.Generator) -> Tile:
    assert look.pixels is not None
    pixels = channels_first(look.pixels[None]).float()
    views = [augment(pixels, plan.augmentation, generator) for _ in range(VIEWS if _augments(plan) else 0)]
    seen, *augmented = (_encoded(backbone_pixels(view, plan.model)) for view in (pixels, *views))
    return Tile(source.names[look.row], _base64(look.pixels), seen, tuple(augmented))


def _augments(plan: Plan) -> bool:
    return plan.augmentation != AugmentationSpec()


def _encoded(view: Tensor) -> str:
    """Augmented contrast may leave 0..255; a screen does not."""
    shown = view[0].clamp(0, 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    return _base64(shown[..., 0] if shown.shape[2] == 1 else shown)


def _base64(pixels: NDArray[np.uint8]) -> str:
    return base64.b64encode(encode_png(pixels, SIDE)).decode()


def _rows(settings: Settings, source: Source) -> tuple[LabelCountsRow, ...]:
    return tuple(
        LabelCountsRow(
            name,
            settings.synonyms.get(name, name),
            tuple(_three(source.labels[source.parts == part, source.class_names.index(name)]) for part in PARTS),
        )
        for name in _names(settings, source)
    )


def _three(column: NDArray[np.float32]) -> tuple[int, int, int]:
    return int((column == 1).sum()), int((column == 0).sum()), int(np.isnan(column).sum())


def _rendered(
    settings: Settings,
    work: PlannedTraining,
    groups: tuple[Group, ...],
    rows: tuple[LabelCountsRow, ...],
    source: Source,
) -> str:
    environment = page_environment(Path(__file__).parent)
    return environment.get_template("images.html.j2").render(
        site=settings.file.name,
        plan=work.plan,
        known_from=work.origin,
        changes=[_change(name, value) for name, value in work.plan.augmentation if value],
        groups=groups,
        rows=rows,
        parts=PARTS,
        totals=[int((source.parts == part).sum()) for part in PARTS],
    )


def _change(name: str, value: object) -> str:
    words = name.replace("_", " ")
    return words if value is True else f"{words} {value}"
