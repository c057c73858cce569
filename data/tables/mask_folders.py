"""Write a table of images and masks in folders, such as those of nnU-Net or the Medical Segmentation Decathlon.

A file is a mask if its name, or the name of a folder above it, contains one of :data:`MASK_WORDS`. It belongs to the
image whose path is the same after these words and :data:`IMAGE_WORDS` are removed. For example,
``labelsTr/liver_1.nii.gz`` belongs to ``imagesTr/liver_1_0000.nii.gz``, and ``case_0/segmentation.nii.gz`` to
``case_0/imaging.nii.gz``. If a folder has one image and several masks, each mask is the file of one class, whose name
is in the file name.
"""

import csv
import io
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.system.files import find_existing_output_faults, write_atomically
from polyclinic.common.system.plain_text import format_count_with_noun, list_first_and_count_rest
from polyclinic.data.base.vocabulary import PART_WORDS
from polyclinic.data.images.file_kinds import PICTURE_SUFFIXES, UNSUPPORTED_SUFFIXES
from polyclinic.data.tables.files import drop_picture_extension, list_paths_below
from polyclinic.data.tables.hospital_folders import HOSPITAL_COLUMN, HospitalFolders, find_hospital_folders

IMAGE_COLUMN = "image"
MASK_COLUMN = "mask"
PATIENT_COLUMN = "patient"
SPLIT_COLUMN = "split"
DESCRIPTION_FILE = "dataset.json"
"""File with which nnU-Net and the Medical Segmentation Decathlon define the value of each class."""
MASK_WORDS = frozenset(
    ("mask", "masks", "label", "labels", "seg", "segs", "segmentation", "segmentations", "annotation", "annotations")
)
MASK_WORDS |= {"contour", "contours", "outline", "outlines", "gt", "groundtruth", "roi", "rois"}
IMAGE_WORDS = frozenset(
    ("image", "images", "img", "imgs", "imaging", "volume", "volumes", "scan", "scans", "ct", "mr", "mri")
)
IMAGE_WORDS |= {"picture", "pictures", "photo", "photos", "raw", "orig", "original", "originals"}
_FILE_WORDS = ("file", "files", "path", "name", "filename", "nii", "png")
_PART_WORDS = {"tr": "train", "va": "val", "ts": "test", **PART_WORDS}
"""Lower-case word in the name of a folder -> part of the data set."""
_TOKEN = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+|[^\W\d_A-Za-z]+")
"""A word or number in a path; ``labelsTr`` consists of two words. Letters of other alphabets are words of their own."""
_CHANNEL_NUMBER = re.compile(r"\d{4}")
_MAX_LISTED = 3
PathKey = tuple[tuple[str, ...], ...]
"""The words and numbers of each folder and of the file name of a path, without the words for masks and images."""


@dataclass(frozen=True)
class MaskFolders:
    """The images of a folder with their masks.

    Attributes:
        images: Image -> class -> mask of the class; for a label map, the class is an empty text. All paths are relative
            to the folder.
        patients: Image -> its patient; empty if the folders do not name patients.
        parts: Image -> ``train``, ``val`` or ``test``; empty if the folders do not give the part of every image.
        values: Value in label maps -> class, from :data:`DESCRIPTION_FILE`; empty if there is no such file.
        unmasked: Images without a mask, which are left out.
        sources: The hospitals of the images, if folders name them.
    """

    images: Mapping[str, Mapping[str, str]]
    patients: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[int, str] = field(default_factory=dict)
    unmasked: Sequence[str] = ()
    sources: HospitalFolders | None = None

    @property
    def mask_columns(self) -> tuple[str, ...]:
        """The columns of masks in the table: one of label maps, or one for each class."""
        classes = sorted({name for masks in self.images.values() for name in masks})
        return (MASK_COLUMN,) if classes == [""] else tuple(classes)

    def write_table(self, table: Path) -> str:
        """Write a table with a line for each image; return a message for the user.

        Raises:
            BadInput: If the table exists.
        """
        columns = self.mask_columns
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        hospitals = self.sources.hospitals if self.sources is not None else {}
        other_columns = [(PATIENT_COLUMN, self.patients), (HOSPITAL_COLUMN, hospitals), (SPLIT_COLUMN, self.parts)]
        other_columns = [(heading, cells) for heading, cells in other_columns if cells]
        writer.writerow((IMAGE_COLUMN, *columns, *(heading for heading, _ in other_columns)))
        for image, masks in self.images.items():
            mask_cells = [masks.get("" if columns == (MASK_COLUMN,) else name, "") for name in columns]
            writer.writerow((image, *mask_cells, *(cells[image] for _, cells in other_columns)))
        content = text.getvalue().encode()
        # An earlier call that ended with a question for the user may have written the same table.
        if not (table.is_file() and table.read_bytes() == content):
            raise_faults(find_existing_output_faults(table))
            write_atomically(table, content)
        kinds = "a mask each" if columns == (MASK_COLUMN,) else f"masks of {list_first_and_count_rest(columns, 5)}"
        line = f"{table}: a table of {format_count_with_noun(len(self.images), 'image')} with {kinds}."
        if self.sources is not None:
            line += f" {self.sources.describe()}"
        if self.unmasked:
            without = format_count_with_noun(len(self.unmasked), "image without a mask is", "images without a mask are")
            line += f" {without} left out: {list_first_and_count_rest(self.unmasked, _MAX_LISTED)}."
        return line


def find_mask_folders(folder: Path, statement: str | None = None) -> MaskFolders | None:
    """Return the images of a folder with their masks; None if there are no masks, or no mask belongs to an image.

    Args:
        statement: The user's word on hospitals: see :func:`find_hospital_folders`.

    Raises:
        BadInput: If a mask belongs to no image or to several, :data:`DESCRIPTION_FILE` does not give each class one
            value, or the user names folders that not all images have.
    """
    images, masks = _list_images_and_masks(folder)
    if not masks:
        return None
    by_key = defaultdict[PathKey, list[str]](list)
    for image in images:
        for key in {_make_key(image), _make_key(image, drop_channel=True)}:
            by_key[key].append(image)
    matched: dict[str, dict[str, str]] = defaultdict(dict)
    open_masks, rivals = list[str](), dict[str, str]()
    several = dict[str, list[str]]()
    for mask in masks:
        fitting = by_key.get(_make_key(mask), [])
        named = [image for image in fitting if Path(image).name == Path(mask).name]
        fitting = named if len(named) == 1 else fitting  # names that differ in signs alone
        if len(fitting) > 1:
            several[mask] = fitting
        elif fitting and "" not in matched[fitting[0]]:
            matched[fitting[0]][""] = mask
        else:
            open_masks.append(mask)
            if fitting:
                rivals[mask] = f'"{fitting[0]}" has another mask, "{matched[fitting[0]][""]}"'
    lost = {mask: rivals.get(mask, why) for mask, why in _match_by_folder(open_masks, images, matched).items()}
    matched = {image: masks_of_image for image, masks_of_image in matched.items() if masks_of_image}
    # Folders of classes may be called mask, too; those that are called images and masks, and nothing else, are none.
    if not matched and not several and any(_make_folder_key(Path(path).parent) for path in (*images, *masks)):
        return None
    raise_faults(_find_match_faults(folder, matched, lost, several))
    masked_images = {image: matched[image] for image in images if image in matched}
    sources = find_hospital_folders(list(masked_images), statement, MASK_WORDS | IMAGE_WORDS)
    return MaskFolders(
        images=masked_images,
        patients=_name_patients(masked_images, sources),
        parts=_name_parts(masked_images),
        values=_read_all_described_values(folder, sources),
        unmasked=[image for image in images if image not in masked_images],
        sources=sources,
    )


def _read_all_described_values(folder: Path, sources: HospitalFolders | None) -> dict[int, str]:
    """Return value -> class by the description of the folder, or by those in the hospitals' folders.

    Raises:
        BadInput: If two descriptions contradict one another.
    """
    values = read_described_values(folder / DESCRIPTION_FILE)
    if values or sources is None or sources.level != 1:
        return values
    origins = dict[tuple[int, str], str]()
    for hospital in sorted(set(sources.hospitals.values())):
        for value, name in read_described_values(folder / hospital / DESCRIPTION_FILE).items():
            origins.setdefault((value, name), hospital)
    pairs = sorted(origins)
    clashes = [
        f"{one} = {name} at {origins[one, name]} and {other} = {rival} at {origins[other, rival]}"
        for place, (one, name) in enumerate(pairs)
        for other, rival in pairs[place + 1 :]
        if (one == other) != (name == rival)
    ]
    if clashes:
        problem = (
            f"the descriptions of hospitals contradict one another: {list_first_and_count_rest(clashes, _MAX_LISTED)}."
        )
        remedy = f"A value has one meaning in all masks: save them anew, and {DESCRIPTION_FILE} with them."
        raise BadInput([Fault(str(folder), problem, remedy)])
    return dict(pairs)


def _list_images_and_masks(folder: Path) -> tuple[list[str], list[str]]:
    """Return the paths of images and of masks, relative to the folder; the slices of one DICOM series are one image.

    Raises:
        BadInput: If masks are files of a kind that cannot be read.
    """
    from polyclinic.data.images.dicom_series import is_series_folder  # takes a second

    images, masks, unread = list[str](), list[str](), list[str]()
    series = set[Path]()
    for path in list_paths_below(folder):
        relative = path.relative_to(folder)
        if any(part.startswith(".") for part in relative.parts):
            continue
        if path.is_dir():
            if is_series_folder(path):
                series.add(path)
                images.append(relative.as_posix())
            continue
        if path.parent in series or not path.name.lower().endswith(PICTURE_SUFFIXES + UNSUPPORTED_SUFFIXES):
            continue
        is_mask = any(token in MASK_WORDS for part in _split_into_tokens(relative.as_posix()) for token in part)
        if path.name.lower().endswith(UNSUPPORTED_SUFFIXES):
            unread += [relative.as_posix()] * is_mask
        else:
            (masks if is_mask else images).append(relative.as_posix())
    if unread:
        problem = f"{format_count_with_noun(len(unread), 'mask')} cannot be read: "
        problem += f"{list_first_and_count_rest(unread, _MAX_LISTED)}."
        raise BadInput([Fault(str(folder), problem, "Save masks of volumes as NIfTI, and those of pictures as PNG.")])
    return images, masks


def _split_into_tokens(path: str) -> list[list[str]]:
    """Return the words and numbers of each folder and of the file name of a path, in lower case, without extension."""
    return [[token.lower() for token in _TOKEN.findall(part)] for part in drop_picture_extension(path).split("/")]


def _make_key(path: str, *, drop_channel: bool = False) -> PathKey:
    """Return the key of a path.

    Args:
        drop_channel: Leave out a number of four digits at the end of the name, which is nnU-Net's channel number.
    """
    parts = _split_into_tokens(path)
    if drop_channel and parts[-1] and _CHANNEL_NUMBER.fullmatch(parts[-1][-1]):
        parts[-1] = parts[-1][:-1]
    remaining = (tuple(token for token in part if token not in MASK_WORDS | IMAGE_WORDS) for part in parts)
    return tuple(part for part in remaining if part)


def _make_folder_key(folder: Path) -> PathKey:
    """Return the key of a folder: the key of a file in it, without the part of the file name."""
    return _make_key(f"{folder.as_posix()}/x")[:-1]


def _match_by_folder(masks: Sequence[str], images: Sequence[str], matched: dict[str, dict[str, str]]) -> dict[str, str]:
    """Add each mask to ``matched`` as a class mask of the only image in its folder; its name is the name of the class.

    Folders count as equal if they differ only in words for masks and images.

    Returns:
        Mask that belongs to no image -> the reason.
    """
    by_folder = defaultdict[PathKey, list[str]](list)
    for image in images:
        by_folder[_make_folder_key(Path(image).parent)].append(image)
    lost = dict[str, str]()
    for mask in masks:
        fitting = by_folder.get(_make_folder_key(Path(mask).parent), [])
        name = remove_mask_words(drop_picture_extension(Path(mask).name))
        if len(fitting) != 1:
            lost[mask] = f"{format_count_with_noun(len(fitting), 'image')} may be its own" if fitting else "no image"
        elif not name or name in matched[fitting[0]]:
            lost[mask] = f'"{fitting[0]}" has another mask'
        else:
            matched[fitting[0]][name] = mask
    return lost


def remove_mask_words(name: str) -> str:
    """Return the words of a heading or file name without words for masks and files, such as ``kidney left``."""
    words = re.split(r"[^A-Za-z0-9]+", name)
    return " ".join(word for word in words if word and word.lower() not in (*MASK_WORDS, *_FILE_WORDS))


def _find_match_faults(
    folder: Path,
    matched: Mapping[str, Mapping[str, str]],
    lost: Mapping[str, str],
    several: Mapping[str, Sequence[str]],
) -> list[Fault]:
    remedy = "Name them alike, such as imagesTr/case_1.nii.gz and labelsTr/case_1.nii.gz, or write a table with a "
    remedy += "column of images and one of masks, and name that."
    faults = list[Fault]()
    if several:
        mask, images = next(iter(several.items()))
        problem = f"{format_count_with_noun(len(several), 'mask')} may belong to several images, such as "
        problem += f'"{mask}" to {list_first_and_count_rest(images, _MAX_LISTED)}: a volume has one channel here.'
        only = "Keep the images of one channel, such as those that end in _0000, in a folder of their own beside the "
        faults.append(Fault(str(folder), problem, f"{only}masks. {remedy}"))
    if lost:
        listed = list_first_and_count_rest([f'"{mask}" ({why})' for mask, why in lost.items()], _MAX_LISTED)
        problem = f"{format_count_with_noun(len(lost), 'mask belongs', 'masks belong')} to no image: {listed}."
        faults.append(Fault(str(folder), problem, remedy))
    kinds = {"" in masks for masks in matched.values()}
    if not faults and (len(kinds) > 1 or any("" in masks and len(masks) > 1 for masks in matched.values())):
        problem = "has label maps for some images, and files of one class for others."
        faults.append(Fault(str(folder), problem, remedy))
    return faults


def _name_patients(images: Mapping[str, Mapping[str, str]], sources: HospitalFolders | None) -> dict[str, str]:
    """Return image -> name of its folder as the patient; empty if two images are in one folder.

    Behind that of a hospital, because hospitals number their patients alike.
    """
    folders = {image: _make_folder_key(Path(image).parent) for image in images}
    if len(set(folders.values())) < len(images) or () in folders.values():
        return {}
    names = dict[str, str]()
    for image in images:
        name = [part for part in Path(image).parent.parts if _make_folder_key(Path(part))][-1]
        names[image] = name if sources is None else f"{sources.hospitals[image]} {name}"
    return names if len(set(names.values())) == len(names) else {}


def _name_parts(images: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return image -> part that a folder above it names; empty if an image has none, or training or test is empty."""
    parts = dict[str, str]()
    for image in images:
        words = [word for part in _split_into_tokens(image)[:-1] for word in part]
        named = [_PART_WORDS[word] for word in words if word in _PART_WORDS]
        if len(set(named)) != 1:
            return {}
        parts[image] = named[0]
    return parts if {"train", "test"} <= set(parts.values()) else {}


def read_described_values(file: Path) -> dict[int, str]:
    """Return value -> class from a file ``dataset.json``; empty if there is no such file.

    Raises:
        BadInput: If the file is damaged, or a class has several values, like the regions of nnU-Net.
    """
    if not file.is_file():
        return {}
    try:
        labels = json.loads(file.read_bytes()).get("labels", {})
        # The Decathlon writes "1": "liver", nnU-Net "liver": 1.
        pairs = [(right, left) if left.isdecimal() else (left, right) for left, right in labels.items()]
    except (ValueError, AttributeError) as error:
        raise BadInput([Fault(str(file), f"is no description of a data set: {error}.")]) from None
    values, regions = dict[int, str](), list[str]()
    for name, value in pairs:
        if not isinstance(value, int | str) or not str(value).isdecimal() or str(name).casefold() == "ignore":
            regions.append(str(name))
        elif int(value):  # 0 is the background
            values[int(value)] = str(name)
    if regions:
        problem = f"names labels that are no class with one value: {list_first_and_count_rest(regions, _MAX_LISTED)}."
        remedy = "Regions of several values and pixels to ignore are not read: save label maps with a value a class."
        raise BadInput([Fault(str(file), problem, remedy)])
    return values
