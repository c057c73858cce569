"""npz files and tables beside pictures, through ``flwr-sim run``."""

import gzip
import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.bad_input.catalogue import Case, Ended, changed
from tests.bad_input.experiment_files import DATA, PARTITION, run
from tests.data.bombs import NPZ as NPZ_BOMBS
from tests.data.bombs import wide_cell
from tests.federations import DIGITS

ROWS = 12
PIXELS = np.arange(ROWS * 16 * 16, dtype=np.uint32).reshape(ROWS, 16, 16).astype(np.uint8)
SINGLE = (np.arange(ROWS) % 2)[:, None].astype(np.uint8)
TWO_SITES = (PARTITION, 'kind = "class_subsets"\nsites = 2\nshared = 1')


def run_on(folder: Path, data: str) -> Ended:
    return run(folder, changed(DIGITS, (DATA, data), TWO_SITES))


# ---------------------------------------------------------------------- npz


def npz(more: str = "", **changes: Any) -> Callable[[Path], Ended]:
    """A good file but for the arrays that are given; None takes one away."""

    def done(folder: Path) -> Ended:
        np.savez(folder / "data.npz", **arrays_with(changes))
        return run_npz(folder, more)

    return done


def arrays_with(changes: Mapping[str, Any]) -> dict[str, Any]:
    arrays: dict[str, Any] = {f"{part}_images": PIXELS for part in ("train", "val", "test")}
    arrays |= {f"{part}_labels": SINGLE for part in ("train", "val", "test")}
    return {name: array for name, array in (arrays | changes).items() if array is not None}


def run_npz(folder: Path, more: str = "") -> Ended:
    named = more if "classes" in more else f'classes = ["a", "b"]\n{more}'
    return run_on(folder, f'kind = "npz"\npath = "data.npz"\n{named}')


def of_bytes(change: Callable[[bytes], bytes], save: Callable[..., None] = np.savez) -> Callable[[Path], Ended]:
    """A good file whose bytes were changed."""

    def done(folder: Path) -> Ended:
        content = io.BytesIO()
        save(content, **arrays_with({}))
        (folder / "data.npz").write_bytes(change(content.getvalue()))
        return run_npz(folder)

    return done


def flipped(content: bytes) -> bytes:
    """A byte within the pixels of the training part is another."""
    place = content.index(b"train_images") + 400
    return content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :]


def announcing_too_much(folder: Path) -> Ended:
    """Of a few bytes, an array of a terabyte."""
    header = io.BytesIO()
    shape = (10**12, 28, 28)
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(folder / "data.npz", "w") as archive:
        for part in ("train", "test"):
            for kind in ("images", "labels"):
                archive.writestr(f"{part}_{kind}.npy", header.getvalue() + b"few")
    return run_npz(folder)


def written(folder: Path, content: bytes) -> Ended:
    (folder / "data.npz").write_bytes(content)
    return run_npz(folder)


JPEGS = {f"{part}_images": None for part in ("train", "val", "test")}


def jpegs(first: bytes, **changes: Any) -> Callable[[Path], Ended]:
    """Pictures as JPEG bytes, the first of them this one."""
    good = io.BytesIO()
    Image.fromarray(PIXELS[0]).save(good, "JPEG")
    pictures = [first, *[good.getvalue()] * (ROWS - 1)]
    packed = np.frombuffer(b"".join(pictures), np.uint8)
    offsets = np.cumsum([0, *map(len, pictures)])
    arrays = {
        f"{part}_{kind}": array
        for part in ("train", "val", "test")
        for kind, array in (("jpeg", packed), ("offsets", offsets))
    }
    return npz(**JPEGS, **(arrays | changes))


LISTED = [f"p{row}" for row in range(ROWS)]
PATIENTS = {f"{part}_patient": np.array([f"{part}-{name}" for name in LISTED]) for part in ("train", "val", "test")}
SHARED = np.array(["train-p3", *PATIENTS["test_patient"][1:]])
MANY = (np.arange(ROWS * 2) % 2).reshape(ROWS, 2).astype(np.uint8)
BY_PATIENT = 'patient_key = "patient"'

NPZ = (
    Case("npz: there is none", lambda folder: run_npz(folder)),
    Case("npz: other arrays", lambda folder: (np.savez(folder / "data.npz", pictures=PIXELS), run_npz(folder))[1]),
    Case("npz: no test labels", npz(test_labels=None)),
    Case("npz: Python objects", npz(train_labels=np.array([{}] * ROWS))),
    Case("npz: images as float", npz(train_images=PIXELS.astype(np.float32))),
    Case("npz: images of four channels", npz(test_images=np.zeros((ROWS, 16, 16, 4), np.uint8))),
    Case("npz: images without height", npz(test_images=np.zeros((ROWS, 0, 16), np.uint8))),
    Case("npz: fewer labels than images", npz(train_labels=SINGLE[:-1])),
    Case("npz: labels as text", npz(**{f"{part}_labels": np.array(["a"] * ROWS) for part in ("train", "val", "test")})),
    Case("npz: labels of three dimensions", npz(train_labels=np.zeros((ROWS, 2, 2), np.uint8))),
    Case("npz: a label below 0", npz(train_labels=SINGLE.astype(np.int8) - 1)),
    Case("npz: a label above all classes", npz(test_labels=SINGLE + 1)),
    Case(
        "npz: a label of 2 where 0 and 1 are meant",
        npz(**{f"{part}_labels": MANY * 2 for part in ("train", "val", "test")}),
    ),
    Case("npz: numbers in one part and columns in another", npz(train_labels=MANY)),
    Case("npz: no names for its classes", npz("classes = []")),
    Case("npz: a class that it does not have", npz('keep = ["c"]')),
    Case("npz: a patient key that is none", npz('patient_key = "patients"', **PATIENTS)),
    Case("npz: a patient in two parts", npz(BY_PATIENT, **(PATIENTS | {"test_patient": SHARED}))),
    Case("npz: two patients an image", npz(BY_PATIENT, **(PATIENTS | {"test_patient": np.array([LISTED, LISTED]).T}))),
    Case("npz: cut off", of_bytes(lambda content: content[:-200])),
    Case("npz: zero bytes", of_bytes(lambda content: b"")),
    Case("npz: not a zip file", of_bytes(lambda content: b"image,label\n1.png,0\n")),
    Case("npz: a byte is another", of_bytes(flipped)),
    Case("npz: packed, and a byte is another", of_bytes(flipped, np.savez_compressed)),
    Case("npz: more than it holds", announcing_too_much),
    Case("npz: gigabytes in 3 MB", lambda folder: written(folder, NPZ_BOMBS["images of zeros"]())),
    Case("npz: one JPEG many times", lambda folder: written(folder, NPZ_BOMBS["one JPEG many times"]())),
    Case("npz: a first JPEG picture that is none", jpegs(b"no picture")),
    Case("npz: JPEG offsets that are a number", jpegs(b"", train_offsets=np.array(3))),
    Case("npz: JPEG bytes as float", jpegs(b"", train_jpeg=np.zeros(40))),
)

# ---------------------------------------------------------------------- tables

TABLE = "image,patient,part,Nodule,Mass\n" + "".join(
    f"{row:02d}.png,p{row},{'train' if row < 8 else 'test'},{row % 2},{row % 3 % 2}\n" for row in range(ROWS)
)
FOLDER = """kind = "folder"
images = "pictures"
labels = "labels.csv"
image_column = "image"
patient_column = "patient"
split_column = "part"
label_columns = ["Nodule", "Mass"]
image_size = 16
"""


def table(content: str | bytes, *changes: tuple[str, str], pictures: int = ROWS) -> Callable[[Path], Ended]:
    """A table beside pictures, and what the experiment says of it."""

    def done(folder: Path) -> Ended:
        (folder / "pictures").mkdir()
        for row in range(pictures):
            Image.fromarray(PIXELS[row]).save(folder / "pictures" / f"{row:02d}.png")
        name = "labels.csv.gz" if any("csv.gz" in after for _, after in changes) else "labels.csv"
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return run_on(folder, changed(FOLDER, *changes))

    return done


def edited(*changes: tuple[str, str]) -> Callable[[Path], Ended]:
    """The table with these changes."""
    return table(changed(TABLE, *changes))


SPLIT = ('split_column = "part"\n', "")
PACKED = ('"labels.csv"', '"labels.csv.gz"')
FINDINGS = 'finding_column = "part"\nclasses = ["tarin"]'
SEVERAL = 'finding_column = "part"\nclasses = ["Nodule", "Mass"]'
LABELS = 'label_columns = ["Nodule", "Mass"]'
TABLES = (
    Case("table: there is none, nor pictures", lambda folder: run_on(folder, FOLDER)),
    Case("table: a folder without pictures", table(TABLE, pictures=0)),
    Case("table: two pictures missing", table(TABLE, pictures=ROWS - 2)),
    Case("table: empty", table("")),
    Case("table: a header and nothing else", table(TABLE.splitlines()[0])),
    Case("table: no header", table(TABLE.partition("\n")[2])),
    Case("table: a column that it does not have", table(TABLE, ('"Mass"]', '"Masses"]'))),
    Case("table: several columns that it does not have", table(TABLE, ('"image"', '"file"'), ('"patient"', '"id"'))),
    Case("table: a column twice", edited(("Nodule,Mass", "Mass,Mass"))),
    Case("table: UTF-16 without its mark", table(TABLE.encode("utf-16-le"))),
    Case("table: bytes that are no text", table(TABLE.replace("p3", "p\x81").encode("latin-1"))),
    Case("table: a quote that does not end", edited(("04.png", '"04.png'))),
    Case("table: two quotes that hold rows", edited(("p4,", '"p4,'), ("p6,", 'p6",'))),
    Case("table: a spreadsheet", table(b"PK\x03\x04\x14\x00\x06\x00\x08\x00\xff\xfe\xff")),
    Case("table: a line that is too short", edited(("03.png,p3,train,1,0", "03.png,p3"))),
    Case("table: an image twice", edited(("04.png", "03.png"))),
    Case("table: a line without an image", edited(("04.png,", ","))),
    Case("table: a line without a patient", edited((",p4,", ",,"))),
    Case("table: a patient in two parts", edited((",p11,", ",p3,"))),
    Case("table: a label that is no number", edited(("p5,train,1,", "p5,train,ja,"))),
    Case("table: labels that are no numbers, in two columns", edited(("p5,train,1,0", "p5,train,ja,2"))),
    Case("table: a line about a picture of an earlier line", edited(("04.png,p4,", "03.png,p3,"))),
    Case("table: patients who may be one", edited((",p4,", ",P3,"), (",p9,", ",p-8,"))),
    Case("table: a patient as a spreadsheet shortens numbers", edited((",p4,", ",1.23457E+11,"))),
    Case("table: a part that is none", edited(("p8,test", "p8,external"))),
    Case("table: a finding under another spelling", table(TABLE, (LABELS, FINDINGS), SPLIT)),
    Case("table: findings between other signs", table(TABLE.replace("train", "Mass;Nodule"), (LABELS, SEVERAL), SPLIT)),
    Case(
        "table: findings that are no class, and none beside one",
        table(changed(TABLE, ("p2,train", "p2,Mass|Normal"), ("p3,train", "p3,")), (LABELS, SEVERAL), SPLIT),
    ),
    Case("table: a class with the separator in its name", table(TABLE, (LABELS, SEVERAL.replace("Nodule", "a|b")))),
    Case("table: a key for findings beside columns of labels", table(TABLE, (LABELS, f"{LABELS}\nno_finding = []"))),
    Case("table: labels said twice", table(TABLE, ("label_columns", 'finding_column = "part"\nlabel_columns'))),
    Case("table: packed, and cut off", table(gzip.compress(TABLE.encode())[:-20], PACKED)),
    Case("table: packed, and damaged", table(gzip.compress(TABLE.encode())[:30] + b"\xff" * 60, PACKED)),
    Case("table: gigabytes in some kilobytes", table(wide_cell())),
    Case("table: called packed, and is not", table(TABLE, PACKED)),
    Case("table: a name that no file can have", edited(("04.png", "x" * 300))),
)
CASES = (*NPZ, *TABLES)
