"""Tables that a person opens in a spreadsheet: no name of an image, a class or a fault starts a formula there."""

import csv
import io
import os
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from common.data.tables.csv import read_columns
from common.metrics.auroc import ClassMetrics
from common.metrics.bootstrap import Intervals
from common.metrics.calibration import Decisions
from common.models.network import build
from common.models.saved import save_model
from common.models.zoo.spec import ModelSpec
from server.export.evaluation import Evaluation, as_csv
from server.export.prediction import predict_to_csv, rows_to_csv

FORMULAS = (
    "=1+1",
    "+1+1",
    "-1+1",
    "@SUM(1;1)",
    '=HYPERLINK("http:evil.example","Effusion")',
    "=cmd|' C'!A0",
    "\t=1+1",
    "\r=1+1",
    "\n=1+1",
    " =1+1",
    "\u00a0\u3000=1+1",
    '"=1+1',
    "'=1+1",
    '" "=1+1',
    "\uff1d1+1",
    "\uff0b1+1",
    "\uff0d1+1",
    "\uff20SUM(1)",
    "\ufe661+1",
    "\u22121+1",
    "scan;=1+1",
    "scan,=1+1",
    "scan\t=1+1",
    "scan| =1+1",
    'scan","=1+1',
    'scan";"=1+1',
    "scan\n=1+1",
    "\x00=1+1",
    "--1",
    "-1.2.3",
    "-1",
)


def cells(text: str) -> list[str]:
    """Every cell that any spreadsheet makes of a table, whatever its separator and whether it goes by quotes."""
    by_quotes = [row for mark in ",;\t|" for row in csv.reader(io.StringIO(text, newline=""), delimiter=mark)]
    bare = [line.split(mark) for mark in ",;\t|" for line in text.splitlines()]
    return [cell for row in (*by_quotes, *bare) for cell in row]


def formulas(text: str) -> list[str]:
    """The cells that a spreadsheet would calculate or refuse to take as text."""
    bare = [unicodedata.normalize("NFKC", cell).lstrip(' \t\r\n"\x00') for cell in cells(text)]
    return [cell for cell in bare if cell.startswith(("=", "+", "-", "@", "\u2212")) and not is_number(cell)]


def is_number(cell: str) -> bool:
    try:
        float(cell.rstrip('"'))
    except ValueError:
        return False
    return True


def figures(names: list[str]) -> str:
    results = dict.fromkeys(names, ClassMetrics(0.25, 0.5, None, 3, 4))
    return as_csv(
        Evaluation(7, None, results, dict.fromkeys(names, Decisions(1, 2, 3, 1)), Intervals(None, {}), (), "all")
    ).decode()


@pytest.mark.parametrize("name", FORMULAS)
def test_the_name_of_a_class_is_no_formula_in_a_table_of_figures(name: str) -> None:
    assert formulas(figures([name, "Effusion"])) == []


@given(st.text(alphabet="=+-@\uff1d\"';,|\t\r\n a1", max_size=8))
def test_no_name_of_any_characters_is_a_formula(name: str) -> None:
    assert formulas(figures([name])) == []


def test_the_names_of_images_and_classes_are_no_formulas_in_a_table_of_predictions(tmp_path: Path) -> None:
    spec = ModelSpec.model_validate({"architecture": "tiny_cnn", "channels": 1, "image_size": 16})
    save_model(tmp_path / "model", build(spec, FORMULAS, seed=0), label_contract_sha256="")
    (tmp_path / "images").mkdir()
    for name in FORMULAS:
        file = tmp_path / "images" / f"{name}.png".replace("\0", "")  # the one character here that no file's name has
        file.write_bytes(b"no picture") if "SUM" in name else Image.new("L", (16, 16)).save(file)
    Image.new("L", (16, 16)).save(os.fsencode(tmp_path / "images") + b"/=\xff.png")
    predict_to_csv(tmp_path / "model", tmp_path / "images", tmp_path / "p.csv")
    assert formulas((tmp_path / "p.csv").read_text(encoding="utf-8")) == []


def test_numbers_stay_numbers_and_harmless_names_stay_as_they_are(tmp_path: Path) -> None:
    numbers = [-0.25, 1e-3, float("nan"), float("-inf"), 7, None]
    names = ["scan-2.png", "a = b", "Lung (left) + right", "\u00e4", "'", 'a "b"', "a;b,c", ""]
    (tmp_path / "t.csv").write_bytes(rows_to_csv([names, [*numbers, "", ""]]))
    with (tmp_path / "t.csv").open(encoding="utf-8", newline="") as file:
        header, row = csv.reader(file, quoting=csv.QUOTE_NONNUMERIC)  # which reads what is not quoted as a number
    assert header == names
    assert row[:5] == pytest.approx(numbers[:5], nan_ok=True)
    assert row[5:] == ["", "", ""]


def test_a_table_with_formulas_in_its_names_is_read_by_our_own_reader(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(rows_to_csv([["image", "=Effusion"], ["=1+1.png", 1], ['a,"b";-2.png', 0]]))
    columns = read_columns(tmp_path / "t.csv", "labels")
    assert {name: list(cells) for name, cells in columns.items()} == {
        "image": ["'=1+1.png", 'a,"b";\'-2.png'],
        "'=Effusion": ["1", "0"],
    }
