"""Masks beside pictures: label maps, a file for each class, blank cells, and masks that cannot be right."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from polyclinic.common.errors import BadInput
from polyclinic.data.base.image_set import ImageSet, concatenate_image_sets
from polyclinic.data.base.masks import MaskSet, make_class_bits, pack_class_areas, pack_label_map
from polyclinic.data.base.spec import FolderDatasetSpec, NpzDatasetSpec
from polyclinic.data.load import load_dataset

VALUES = {"Liver": 1, "Spleen": 7}
ROWS = 12


def label_map(row: int, width: int = 20, height: int = 10) -> np.ndarray:
    """A map of unequal sides: a liver of row + 1 pixels, and a spleen in every second image."""
    values = np.zeros((height, width), np.uint8)
    values[2, 3 : 4 + row] = 1
    values[7, 5:9] = 7 * (row % 2)
    return values


def deep_map(row: int) -> np.ndarray:
    """The same map in 16 bits, with 700 for the spleen."""
    values = label_map(row).astype(np.uint16)
    values[values == 7] = 700
    return values


def folder_of(root: Path, masks: Callable[[int], Image.Image | None], cell: Callable[[int], str] | None = None) -> None:
    """Write pictures, masks and the table ``labels.csv``."""
    lines = ["image,patient,part,mask"]
    for row in range(ROWS):
        picture = np.random.default_rng(row).integers(0, 255, (10, 20), dtype=np.uint8)
        Image.fromarray(picture).save(root / f"p{row}.png")
        mask = masks(row)
        if mask is not None:
            mask.save(root / f"m{row}.png")
        name = f"m{row}.png" if cell is None else cell(row)
        lines.append(f"p{row}.png,patient {chr(65 + row)},{('train', 'val', 'test')[row % 3]},{name}")
    (root / "labels.csv").write_text("\n".join(lines) + "\n")


def read(root: Path, **more: Any) -> ImageSet:
    settings = {
        "kind": "folder",
        "labels": "labels.csv",
        "images": ".",
        "image_column": "image",
        "patient_column": "patient",
        "split_column": "part",
        "image_size": 20,
        **({"mask_column": "mask", "mask_values": VALUES} if "mask_columns" not in more else {}),
        **more,
    }
    images = concatenate_image_sets(load_dataset(FolderDatasetSpec.model_validate(settings), root).parts)
    order = np.argsort(images.lines)
    return images.select_rows(order)


def area(images: ImageSet, row: int, name: str) -> np.ndarray:
    assert images.masks is not None
    return images.masks.read_class_areas(np.array([row]), (name,))[0, 0]


def test_a_label_map_gives_the_area_of_each_class_on_the_grid_of_its_picture(tmp_path: Path) -> None:
    folder_of(tmp_path, lambda row: Image.fromarray(label_map(row)))
    images = read(tmp_path)
    assert images.class_names == ("Liver", "Spleen")
    # A picture of 20 x 10 fills the middle half of 20 x 20; padding shows nothing.
    expected = np.zeros((20, 20), bool)
    expected[5:15] = label_map(4) == 1
    assert np.array_equal(area(images, 4, "Liver"), expected)
    assert images.labels[:, 0].tolist() == [1.0] * ROWS
    assert images.labels[:, 1].tolist() == [0.0, 1.0] * (ROWS // 2)


def test_a_smaller_data_set_takes_the_nearest_pixel(tmp_path: Path) -> None:
    folder_of(tmp_path, lambda row: Image.fromarray(label_map(row)))
    shrunk = area(read(tmp_path, image_size=10, resize="stretch"), 5, "Liver")
    # Ten columns of twenty: the middle of new column c is nearest to old column 2c + 1; rows stay.
    assert np.array_equal(shrunk, (label_map(5) == 1)[:, 1::2])


def test_a_blank_cell_is_not_annotated_and_an_empty_mask_is_absent(tmp_path: Path) -> None:
    folder_of(
        tmp_path,
        lambda row: Image.fromarray(label_map(row) * (row != 3)),
        lambda row: "" if row == 2 else f"m{row}.png",
    )
    images = read(tmp_path)
    assert np.isnan(images.labels[2]).all()
    assert images.labels[3].tolist() == [0.0, 0.0]
    assert any("1 image has an empty mask" in note for note in images.notes)


def test_a_file_for_each_class_may_overlap_and_single_cells_may_be_blank(tmp_path: Path) -> None:
    folder_of(tmp_path, lambda row: Image.fromarray(np.uint8(label_map(row) == 1) * 255))
    for row in range(ROWS):
        Image.fromarray(label_map(row) > 0).save(tmp_path / f"s{row}.png")
    text = (tmp_path / "labels.csv").read_text().splitlines()
    cells = ["spleen", *("" if row == 0 else f"s{row}.png" for row in range(ROWS))]
    (tmp_path / "labels.csv").write_text("\n".join(",".join(pair) for pair in zip(text, cells, strict=True)))
    images = read(tmp_path, mask_columns={"Liver": "mask", "Spleen": "spleen"}, resize="stretch")
    assert np.isnan(images.labels[0, 1])
    assert images.labels[0, 0] == 1
    both = area(images, 3, "Liver") & area(images, 3, "Spleen")
    assert np.array_equal(both, area(images, 3, "Liver"))


def test_a_palette_means_its_indices(tmp_path: Path) -> None:
    def with_palette(row: int) -> Image.Image:
        image = Image.fromarray(label_map(row)).convert("P")
        image.putpalette([0, 0, 0, 255, 0, 0, *([9] * 15), 0, 255, 0])
        return image

    folder_of(tmp_path, with_palette)
    assert area(read(tmp_path), 1, "Spleen").sum() > 0


def test_masks_whose_palettes_number_the_colours_anew_are_refused(tmp_path: Path) -> None:
    def by_its_own_palette(row: int) -> Image.Image:
        values = np.where(label_map(row) == 1, 1, 0).astype(np.uint8)
        image = Image.fromarray(values).convert("P")
        image.putpalette([0, 0, 0, 255, 0, 0] if row % 2 else [0, 0, 0, 0, 255, 0])
        return image

    folder_of(tmp_path, by_its_own_palette)
    message = r'"m0.png" shows 1 in the colour \(0, 255, 0\), and "m1.png" in \(255, 0, 0\)'
    with pytest.raises(BadInput, match=message):
        read(tmp_path)


def test_palettes_may_differ_in_colours_that_no_mask_uses(tmp_path: Path) -> None:
    def with_palette(row: int) -> Image.Image:
        image = Image.fromarray(label_map(row)).convert("P")
        image.putpalette([0, 0, 0, 255, 0, 0, *([row] * 15), 0, 255 * (row % 2), 0])  # 7 is in odd rows alone
        return image

    folder_of(tmp_path, with_palette)
    assert area(read(tmp_path), 1, "Spleen").sum() > 0


def test_a_mask_that_is_shown_turned_is_refused(tmp_path: Path) -> None:
    folder_of(tmp_path, lambda row: Image.fromarray(label_map(row)))
    exif = Image.Exif()
    exif[0x0112] = 3
    Image.fromarray(label_map(2)).save(tmp_path / "m2.png", exif=exif)
    with pytest.raises(BadInput, match=r"m2\.png has an EXIF orientation, by which it is turned"):
        read(tmp_path)


def test_sixteen_bits_and_grey_in_three_channels_are_read(tmp_path: Path) -> None:
    deep = {"mask_values": {"Liver": 1, "Spleen": 700}}
    folder_of(tmp_path, lambda row: Image.fromarray(deep_map(row)))
    assert area(read(tmp_path, **deep), 1, "Spleen").sum() == 4
    folder_of(tmp_path, lambda row: Image.fromarray(label_map(row)).convert("RGB"))
    assert area(read(tmp_path), 1, "Spleen").sum() == 4


def as_jpeg(root: Path) -> None:
    Image.fromarray(label_map(4)).save(root / "m4.png", format="JPEG")


def as_float(root: Path) -> None:
    Image.fromarray(label_map(4).astype(np.float32)).save(root / "m4.png", format="TIFF")


def with_value(root: Path) -> None:
    values = label_map(4)
    values[0, 0] = 3
    Image.fromarray(values).save(root / "m4.png")


def of_other_size(root: Path) -> None:
    Image.fromarray(label_map(4, width=10, height=20)).save(root / "m4.png")


def in_colour(root: Path) -> None:
    colours = np.zeros((10, 20, 3), np.uint8)
    colours[2, 3, 1] = 255
    Image.fromarray(colours).save(root / "m4.png")


def cut_off(root: Path) -> None:
    content = (root / "m4.png").read_bytes()
    (root / "m4.png").write_bytes(content[: len(content) // 2])


def turned_picture(root: Path) -> None:
    image = Image.open(root / "p4.png")
    exif = image.getexif()
    exif[0x0112] = 3
    image.save(root / "p4.png", exif=exif)


MESSES = {
    as_jpeg: "JPEG",
    as_float: "TIFF",
    with_value: '"3"',
    of_other_size: "10 x 20 pixels, and its picture 20 x 10",
    in_colour: "in colour",
    cut_off: "",
    turned_picture: "EXIF",
}


@pytest.mark.parametrize("spoil", MESSES, ids=lambda spoil: spoil.__name__)
def test_a_mask_that_cannot_be_right_is_refused_by_name(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    folder_of(tmp_path, lambda row: Image.fromarray(label_map(row)))
    spoil(tmp_path)
    with pytest.raises(BadInput) as refused:
        read(tmp_path)
    (fault,) = refused.value.faults
    assert fault.where == "data.mask_column"
    assert "1 mask of 12" in fault.problem
    assert '"p4.png"' in fault.problem
    assert MESSES[spoil] in fault.problem


def test_a_mask_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    folder_of(tmp_path, lambda row: None if row in (4, 6) else Image.fromarray(label_map(row)))
    with pytest.raises(BadInput) as refused:
        read(tmp_path)
    (fault,) = refused.value.faults
    assert fault.where == "data.mask_column"
    assert "2 masks" in fault.problem
    assert '"m4.png"' in fault.problem


def test_a_mask_of_one_class_with_soft_edges_is_refused(tmp_path: Path) -> None:
    folder_of(tmp_path, lambda row: Image.fromarray(label_map(row) * 30))
    with pytest.raises(BadInput) as refused:
        read(tmp_path, mask_columns={"Liver": "mask"})
    assert "2 values beside 0" in refused.value.faults[0].problem


def test_two_masks_of_one_picture_contradict_one_another(tmp_path: Path) -> None:
    folder_of(tmp_path, lambda row: Image.fromarray(label_map(row)))
    with (tmp_path / "labels.csv").open("a") as table:
        table.write("p4.png,patient E,val,m5.png\n")
    with pytest.raises(BadInput) as refused:
        read(tmp_path)
    assert "mask" in refused.value.faults[0].problem


KEYS: dict[str, dict[str, Any]] = {
    "mask_values without a column": {"mask_column": None},
    "a column without mask_values": {"mask_values": {}},
    "both forms": {"mask_columns": {"Liver": "mask"}, "mask_column": "mask", "mask_values": VALUES},
    "labels beside masks": {"label_columns": ["Liver"]},
    "one value twice": {"mask_values": {"Liver": 1, "Spleen": 1}},
    "the background as a class": {"mask_values": {"Background": 0, "Liver": 1}},
}


@pytest.mark.parametrize("more", KEYS.values(), ids=KEYS)
def test_settings_that_contradict_one_another_are_refused(tmp_path: Path, more: dict[str, Any]) -> None:
    folder_of(tmp_path, lambda row: Image.fromarray(label_map(row)))
    with pytest.raises(ValueError, match="mask"):
        read(tmp_path, **more)


def test_a_column_that_is_not_in_the_table_is_named(tmp_path: Path) -> None:
    folder_of(tmp_path, lambda row: Image.fromarray(label_map(row)))
    with pytest.raises(BadInput) as refused:
        read(tmp_path, mask_column="masks")
    assert refused.value.faults[0].where == "data.mask_column"


def test_more_than_eight_classes_take_wider_numbers() -> None:
    areas = np.zeros((20, 2, 3), bool)
    areas[19, 1, 2] = areas[0, 1, 2] = True
    packed = pack_class_areas(areas)
    assert packed.dtype == np.int32
    assert packed[1, 2] == 1 + 2**19
    names = [f"c{number}" for number in range(20)]
    masks = MaskSet(packed[None], np.zeros(1, np.intp), make_class_bits(names))
    assert np.array_equal(masks.read_class_areas(np.array([0]), names)[0], areas)


def test_whole_floats_are_label_values_and_broken_ones_are_not() -> None:
    assert pack_label_map(np.array([[0.0, 7.0, 1.0]]), (1, 7)).tolist() == [[0, 2, 1]]
    for broken in (0.5, np.nan):
        with pytest.raises(ValueError, match="whole numbers"):
            pack_label_map(np.array([[0.0, broken]]), (1, 7))


def npz_of(root: Path, masks: np.ndarray | None = None, **more: Any) -> NpzDatasetSpec:
    """Write an npz file of four images a part, in which the second class is not annotated in image 1."""
    images = np.random.default_rng(0).integers(0, 255, (12, 6, 8), dtype=np.uint8)
    areas = np.zeros((4, 6, 8, 2), bool) if masks is None else masks
    areas[0, 1, 2, 0] = areas[1, 4, 5, 1] = True
    labels = np.array([[1, 0], [0, np.nan], [0, 0], [0, 0]])
    arrays = {}
    for number, part in enumerate(("train", "val", "test")):
        arrays |= {f"{part}_images": images[4 * number : 4 * number + 4], f"{part}_labels": labels}
        arrays |= {f"{part}_masks": areas, f"{part}_patient": [f"{part} {row}" for row in "abcd"]}
    np.savez(root / "masks.npz", **arrays)
    settings = {"kind": "npz", "path": "masks.npz", "classes": ["A", "B"], "patient_key": "patient", **more}
    return NpzDatasetSpec.model_validate(settings)


def test_an_npz_file_holds_an_area_for_each_class(tmp_path: Path) -> None:
    train = load_dataset(npz_of(tmp_path), tmp_path).train
    assert np.array_equal(train.labels, [[1, 0], [0, np.nan], [0, 0], [0, 0]], equal_nan=True)
    assert area(train, 0, "A")[1, 2]
    assert area(train, 0, "A").sum() == 1


def test_masks_of_an_npz_file_follow_kept_classes_and_the_size(tmp_path: Path) -> None:
    train = load_dataset(npz_of(tmp_path, keep=["B"], image_size=16, resize="stretch"), tmp_path).train
    assert train.class_names == ("B",)
    assert area(train, 1, "B").shape == (16, 16)
    assert area(train, 1, "B")[12, 11]


def test_masks_of_an_npz_file_with_another_size_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        load_dataset(npz_of(tmp_path, np.zeros((4, 8, 6, 2), bool)), tmp_path)
    assert "train_masks" in refused.value.faults[0].problem
