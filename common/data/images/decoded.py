"""A data set that is decoded once and read by many processes: its arrays as files, the pictures mapped, not copied."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np

from common.data.base.image_set import ImageSet, Skipped, Splits

PARTS = ("train", "validation", "test")
_ARRAYS = ("labels", "patients", "sources")
_FACTS = "facts.json"


def write_decoded(splits: Splits, folder: Path) -> None:
    """Write a data set into a folder of its own, instead of what lies there.

    Raises:
        OSError: If there is no room; nothing is left then.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        facts = {part: _written(getattr(splits, part), folder / part) for part in PARTS}
        (folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def is_decoded(folder: Path) -> bool:
    """Whether a whole data set lies there."""
    return (folder / _FACTS).is_file()


def read_decoded(folder: Path) -> Splits:
    """The data set; processes that read the same share its pictures in memory."""
    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    return Splits(*(_read(folder / part, **facts[part]) for part in PARTS))


def _written(images: ImageSet, stem: Path) -> dict[str, object]:
    pictures = np.lib.format.open_memmap(
        _file(stem, "pictures"), mode="w+", dtype=np.uint8, shape=(len(images), *images.stored.shape[1:])
    )
    for row in range(len(images)):
        pictures[row] = images.stored[row if images.places is None else images.places[row]]
    pictures.flush()
    for name in _ARRAYS:
        np.save(_file(stem, name), getattr(images, name), allow_pickle=False)
    skipped = [asdict(skip) for skip in images.skipped]
    return {"class_names": images.class_names, "skipped": skipped, "missing": images.missing}


def _read(stem: Path, class_names: list[str], skipped: list[dict[str, str]], missing: int) -> ImageSet:
    # "c": torch wants arrays that may be written to; nobody does, and if, it would not reach the file.
    pictures = np.load(_file(stem, "pictures"), mmap_mode="c", allow_pickle=False)
    labels, patients, sources = (np.load(_file(stem, name), allow_pickle=False) for name in _ARRAYS)
    left_out = tuple(Skipped(**skip) for skip in skipped)
    return ImageSet(pictures, labels, tuple(class_names), patients, sources, left_out, missing)


def _file(stem: Path, name: str) -> Path:
    return stem.with_name(f"{stem.name}-{name}.npy")
