"""Sentences about the task, and messages whose lines of Python are run as they are."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import polyclinic as pc
from tests.polyclinic.pictures import SMALL, pictures

BOTH: dict[str, Any] = {"kind": "class_lists", "lists": {name: ["lines", "bars"] for name in ("east", "north")}}
EXCLUSIVE = replace(pictures(), labels=np.arange(120) % 2)


def notes_on_task(out: Path, data: pc.LabelledImages, settings: dict[str, Any]) -> list[str]:
    done = pc.simulate(SMALL | {"partition": BOTH}, dataset=data, settings=settings, out=out)
    return [note for note in done.notes if "exactly one class" in note and note in str(done)]


def test_labels_that_exclude_one_another_are_named_where_nobody_chose_the_task(tmp_path: Path) -> None:
    (note,) = notes_on_task(tmp_path / "default", EXCLUSIVE, {})
    settings = eval(re.search(r"settings=(\{.*?\})", note)[1])  # type: ignore[index]
    assert notes_on_task(tmp_path / "multi class", EXCLUSIVE, settings) == []
    assert notes_on_task(tmp_path / "chosen", EXCLUSIVE, {"model.task": "multi_label"}) == []
    assert notes_on_task(tmp_path / "several", pictures(), {}) == []


def message_of(out: Path, experiment: dict[str, Any], data: Any) -> str:
    with pytest.raises(pc.BadInput) as refused:
        pc.simulate(experiment, dataset=data, out=out)
    return str(refused.value)


def test_a_class_that_no_site_annotates_is_left_out_by_the_line_of_the_message(tmp_path: Path) -> None:
    images, labels = pictures().images, np.eye(3)[np.arange(120) % 3]
    named: Any = {"class_names": ["lines", "other", "bars"]}
    forms = {
        r"pc\.LabelledImages\(dataset, class_names=\[.*?\], item=lambda x: \(.*?\]\]\)\)": [
            *zip(images, labels, strict=True)
        ],  # type: ignore[call-overload]
        r'item=lambda x: \{\*\*x, "label": x\["label"\]\[\[0, 2\]\]\}': [
            {"image": image, "label": label}
            for image, label in zip(images, labels, strict=True)  # type: ignore[call-overload]
        ],
    }
    for number, (pattern, dataset) in enumerate(forms.items()):
        text = message_of(tmp_path / "refused", SMALL, pc.LabelledImages(dataset, **named))
        line = re.search(pattern, text)[0]  # type: ignore[index]
        if line.startswith("item="):
            line = f"pc.LabelledImages(dataset, class_names=['lines', 'bars'], {line})"
        done = pc.simulate(SMALL, dataset=eval(line, {"pc": pc, "dataset": dataset}), out=tmp_path / str(number))
        assert list(done.classes.index) == ["bars", "lines"]


def test_numbers_get_names_by_the_lines_of_the_message(tmp_path: Path) -> None:
    items = [*zip(pictures().images, (np.arange(120) % 2).tolist(), strict=True)]  # type: ignore[call-overload]
    parts = {"train": items[:80], "test": items[80:]}
    text = message_of(tmp_path / "refused", SMALL | {"partition": BOTH}, parts)
    line = re.search(r"of parts dataset=(\{.*?\.items\(\)\})", text)[1]  # type: ignore[index]
    named = eval(line, {"pc": pc, "parts": parts, "NAMES": ["lines", "bars"]})
    done = pc.simulate(SMALL | {"partition": BOTH}, dataset=named, out=tmp_path / "named")
    assert sorted(done.classes.index) == ["bars", "lines"]


def test_a_loader_has_the_hint_of_its_data_set(tmp_path: Path) -> None:
    done = pc.simulate(SMALL, dataset=pictures(), out=tmp_path / "run")
    with pytest.raises(pc.BadInput, match=r"run\.predict\(loader\.dataset\)"):
        done.predict(DataLoader(pictures().images))  # type: ignore[arg-type]


def test_missing_tables_are_added_by_the_lines_of_the_message(tmp_path: Path) -> None:
    tables: dict[str, Any] = {key: value for key, value in SMALL.items() if key != "partition"}
    with pytest.raises(pc.BadInput, match=r"run\.method: is missing") as refused:
        pc.simulate(tables | {"run": {"rounds": 1}})
    method = eval(re.search(r'in Python (\{"run\.method": .*?\})', str(refused.value))[1])  # type: ignore[index]
    with pytest.raises(pc.BadInput, match=r"\[data\]: is missing") as refused:
        pc.simulate(tables | {"run": {"rounds": 1}}, settings=method)
    added = [eval(text) for text in re.findall(r"settings=(\{.*\})\.", str(refused.value))]
    settings = {key: value for each in (method, *added) for key, value in each.items()}
    done = pc.simulate(
        {"run": {"rounds": 1}, "training": SMALL["training"]},
        settings={**settings, "model.architecture": "tiny_cnn", "model.channels": 1, "simulation.backend": "inline"}
        | {"model.image_size": 16},
        out=tmp_path / "run",
    )
    assert len(done.sites) == 2
