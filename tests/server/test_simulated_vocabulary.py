"""A simulation with the study's vocabulary: columns, partition and external test are named by the study's classes."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tests.network.federated import hash_in
from tests.network.real import flwr_sim, summary_of

pytestmark = pytest.mark.slow
EXPERIMENT = """
[run]
method = "surgical"
rounds = 1
[model]
architecture = "tiny_cnn"
channels = 1
image_size = 16
[training]
lr = 0.01
[data]
kind = "folder"
images = "images"
labels = "{table}"
image_column = "image"
label_columns = {columns}
image_size = 16
[external_test]
kind = "folder"
images = "images"
labels = "{table}"
image_column = "image"
label_columns = {columns}
image_size = 16
[partition]
kind = "class_lists"
[partition.lists]
east = ["{first}"]
north = ["{first}", "{second}"]
"""
VOCABULARY = """
[vocabulary.Lymphocyte]
synonyms = ["Lymphozyt"]
definition = "small, round nucleus"
[vocabulary.Monocyte]
synonyms = ["Monozyt"]
"""


def write_experiment(folder: Path, first: str, second: str, vocabulary: str) -> Path:
    """An experiment on 150 digits, whose table has these words for two findings."""
    digits, images = load_digits(), folder / "images"
    images.mkdir(exist_ok=True)
    lines = [f"image,{first},{second}"]
    for index in range(150):
        pixels = (255 * np.kron(digits.images[index] / 16, np.ones((2, 2)))).astype(np.uint8)
        Image.fromarray(pixels).save(images / f"{index}.png")
        lines.append(f"{index}.png,{int(digits.target[index] > 4)},{digits.target[index] % 2}")
    table = folder / f"{first}.csv"
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    columns = f'["{first}", "{second}"]'
    text = EXPERIMENT.format(table=table.name, columns=columns, first=first, second=second) + vocabulary
    path = folder / f"{first}.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_table_with_synonyms_gives_the_model_and_the_figures_of_one_with_the_studys_words(tmp_path: Path) -> None:
    tables = {"Lymphocyte": ("Monocyte", ""), "Lymphozyt": ("Monozyt", VOCABULARY)}
    for first, (second, vocabulary) in tables.items():
        experiment = write_experiment(tmp_path, first, second, vocabulary)
        ended = flwr_sim("run", experiment, "--backend", "inline", "--out", tmp_path / f"run-{first}")
        assert ended.code == 0, ended.err
    plain, named = (tmp_path / f"run-{first}" for first in tables)
    assert hash_in(named) == hash_in(plain)
    for key in ("classes", "per_site", "test", "external"):
        assert summary_of(named)[key] == summary_of(plain)[key]
    assert summary_of(named)["classes_of_one_site"] == {}
    assert "small, round nucleus" in (named / "MODEL_CARD.md").read_text(encoding="utf-8")


def test_a_column_outside_the_vocabulary_is_refused_before_training(tmp_path: Path) -> None:
    experiment = write_experiment(tmp_path, "Lymphozyten", "Monozyt", VOCABULARY)
    ended = flwr_sim("run", experiment, "--backend", "inline", "--out", tmp_path / "run")
    assert ended.code == 2
    said = " ".join(ended.err.split())
    assert '"Lymphozyten" is no class of [vocabulary]' in said
    assert 'If it means "Lymphocyte", add it to synonyms under [vocabulary."Lymphocyte"]' in said
    assert not (tmp_path / "run").exists()


def test_two_columns_of_one_class_give_the_model_of_one_column_with_both(tmp_path: Path) -> None:
    vocabulary = VOCABULARY.replace('["Lymphozyt"]', '["Lymphozyt", "lympho"]')
    experiment = write_experiment(tmp_path, "Lymphozyt", "Monozyt", vocabulary)
    flwr_sim("run", experiment, "--backend", "inline", "--out", tmp_path / "run-one")
    table = tmp_path / "Lymphozyt.csv"
    head, *lines = table.read_text(encoding="utf-8").splitlines()
    rows = [line.split(",") for line in lines]
    divided = [
        ",".join((name, first, "0", second) if place % 2 else (name, "0", first, second))
        for place, (name, first, second) in enumerate(rows)
    ]
    table.write_text("\n".join((head.replace("Lymphozyt", "Lymphozyt,lympho"), *divided)), encoding="utf-8")
    text = experiment.read_text(encoding="utf-8")
    both = text.replace('label_columns = ["Lymphozyt"', 'label_columns = ["Lymphozyt", "lympho"')
    experiment.write_text(both, encoding="utf-8")
    ended = flwr_sim("run", experiment, "--backend", "inline", "--out", tmp_path / "run-two")
    assert ended.code == 0, ended.err
    assert hash_in(tmp_path / "run-two") == hash_in(tmp_path / "run-one")
    for key in ("classes", "per_site", "test", "external"):
        assert summary_of(tmp_path / "run-two")[key] == summary_of(tmp_path / "run-one")[key]
