"""Models of every kind are one kind of thing: they score images, and say why they cannot."""

import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from polyclinic.common.errors import BadInput
from polyclinic.common.evaluation.foreign import find_model_file, is_model_path
from polyclinic.common.evaluation.models import ModelToScore, open_model, open_models
from polyclinic.common.models.saved import load_model
from polyclinic.common.models.scoring import compute_picture_probabilities
from polyclinic.data.base.image_set import ImageSet, make_placeholder_patient_names
from tests.common.evaluation.models import (
    SIDE,
    LinearModel,
    describe,
    make_timm_network,
    write_exported_program,
    write_onnx_model,
    write_run_model,
    write_timm_tensors,
)

CLASSES = ("Mass", "Effusion", "Nodule")
COUNT = 7


def make_images(count: int = COUNT, channels: int = 1) -> ImageSet:
    shape = (count, SIDE, SIDE) if channels == 1 else (count, SIDE, SIDE, 3)
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    labels = np.zeros((count, 1), np.float32)
    return ImageSet(pixels, labels, ("Mass",), make_placeholder_patient_names(count), np.full(count, ""))


IMAGES = make_images()
INPUTS = (torch.from_numpy(IMAGES.images)[:, None].float() / 255 - 0.5) / 0.25


def opened(path: Path, *trusted: Path) -> ModelToScore:
    return open_model(find_model_file(path, frozenset(file.resolve() for file in trusted)), "model")


def refused(path: Path, *trusted: Path) -> str:
    with pytest.raises(BadInput) as caught:
        opened(path, *trusted).compute_scores(IMAGES)
    return str(caught.value)


def logits_of_linear_model() -> torch.Tensor:
    with torch.no_grad():
        return LinearModel(3, 1)(INPUTS)


def test_the_model_of_a_run_scores_as_the_run_does_without_classes_that_it_has_not_learned(tmp_path: Path) -> None:
    folder = write_run_model(tmp_path / "run", CLASSES)
    model = opened(folder)
    assert (model.kind, model.class_names) == ("run", CLASSES)
    expected = compute_picture_probabilities(load_model(folder), IMAGES)
    assert np.array_equal(model.compute_scores(IMAGES), expected)
    text = (folder / "model.json").read_text(encoding="utf-8")
    stated = text.replace('"unlearned": null', '"unlearned": {"Effusion": "nobody shows it"}')
    assert stated != text
    (folder / "model.json").write_text(stated, encoding="utf-8")
    model = opened(folder)
    assert model.class_names == ("Mass", "Nodule")
    assert np.array_equal(model.compute_scores(IMAGES), expected[:, [0, 2]])


def test_thresholds_of_a_run_are_those_that_it_chose_on_validation_images(tmp_path: Path) -> None:
    folder = write_run_model(tmp_path / "run", CLASSES)
    point = '{"rule": "sensitivity", "target": 0.9, "threshold": 0.25, "chosen_on": [3, 4], "decisions": {}}'
    summary = f'{{"test": {{"operating_points": {{"Mass": [{point}]}}}}}}'
    (folder / "summary.json").write_text(summary, encoding="utf-8")
    model = opened(folder)
    (mass,), (nodule,) = model.list_thresholds("Mass"), model.list_thresholds("Nodule")
    assert (mass.threshold, mass.rule) == (0.25, "sensitivity ≥ 0.9 on validation")
    assert nodule.threshold == 0.5


@pytest.mark.parametrize("batch", [None, 3], ids=["any number of images", "three images at a time"])
def test_an_onnx_file_scores_as_the_network_that_it_was_made_of(tmp_path: Path, batch: int | None) -> None:
    file = write_onnx_model(tmp_path / "other.onnx", 3, batch=batch)
    model = opened(describe(tmp_path / "other.toml", file, ("Mass", "", "Nodule")))
    assert (model.kind, model.class_names) == ("onnx", ("Mass", "Nodule"))
    expected = logits_of_linear_model().sigmoid().numpy()[:, [0, 2]]
    assert model.compute_scores(IMAGES) == pytest.approx(expected, abs=1e-5)


def test_a_multi_class_models_logits_become_shares_of_one(tmp_path: Path) -> None:
    file = write_onnx_model(tmp_path / "other.onnx", 3)
    model = opened(describe(tmp_path / "other.toml", file, CLASSES, more='task = "multi_class"'))
    expected = logits_of_linear_model().softmax(1).numpy()
    assert model.compute_scores(IMAGES) == pytest.approx(expected, abs=1e-5)


def test_colour_images_are_scored_by_a_grey_model_as_their_luminance(tmp_path: Path) -> None:
    file = write_onnx_model(tmp_path / "other.onnx", 3)
    model = opened(describe(tmp_path / "other.toml", file, CLASSES))
    colored = make_images(channels=3)
    grey = torch.from_numpy(colored.images).float() @ torch.tensor([0.299, 0.587, 0.114])
    with torch.no_grad():
        expected = LinearModel(3, 1)((grey[:, None] / 255 - 0.5) / 0.25).sigmoid().numpy()
    assert model.compute_scores(colored) == pytest.approx(expected, abs=1e-4)


def test_tensors_of_timm_score_as_timm_does(tmp_path: Path) -> None:
    file = write_timm_tensors(tmp_path / "other.safetensors", 3)
    model = opened(describe(tmp_path / "other.toml", file, CLASSES, more='architecture = "timm:test_resnet"'))
    with torch.no_grad():
        expected = make_timm_network(3)(INPUTS).sigmoid().numpy()
    assert model.kind == "timm"
    assert model.compute_scores(IMAGES) == pytest.approx(expected, abs=1e-6)


def test_tensors_of_another_network_or_a_name_that_would_be_downloaded_are_refused(tmp_path: Path) -> None:
    file = write_timm_tensors(tmp_path / "other.safetensors", 3)
    path = tmp_path / "other.toml"
    assert "its tensors are not those of" in refused(
        describe(path, file, CLASSES[:2], more='architecture = "timm:test_resnet"')
    )
    assert "timm has no network" in refused(describe(path, file, CLASSES, more='architecture = "timm:hf-hub:a/b"'))
    assert 'expected "timm:NAME"' in refused(describe(path, file, CLASSES))


def test_a_torch_export_file_is_opened_only_by_the_users_own_word(tmp_path: Path) -> None:
    file = write_exported_program(tmp_path / "other.pt2", 3)
    path = describe(tmp_path / "other.toml", file, CLASSES)
    message = refused(path)
    assert "can run any program" in message
    assert f"--trust {file}" in message
    model = opened(path, file)
    assert model.kind == "torch.export"
    assert model.compute_scores(IMAGES) == pytest.approx(logits_of_linear_model().sigmoid().numpy(), abs=1e-6)


class _Touch:
    """Creates a file while it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


def test_torch_export_files_run_programs_of_their_author_which_is_why_they_need_that_word(tmp_path: Path) -> None:
    """If torch reads such files without pickle one day, this test fails, and ``--trust`` can go."""
    file, mark = write_exported_program(tmp_path / "other.pt2", 3), tmp_path / "a-program-ran"
    poisoned = tmp_path / "poisoned.pt2"
    content = io.BytesIO()
    pickle.dump(_Touch(mark), content)
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(poisoned, "w", zipfile.ZIP_STORED) as target:
        for name in source.namelist():
            is_input = "sample_inputs" in name
            target.writestr(name, content.getvalue() if is_input else source.read(name))
    path = describe(tmp_path / "other.toml", poisoned, CLASSES)
    refused(path)
    assert not mark.exists()
    refused(path, poisoned)
    assert mark.exists()


def test_another_file_than_the_described_one_is_refused(tmp_path: Path) -> None:
    file = write_onnx_model(tmp_path / "other.onnx", 3)
    path = describe(tmp_path / "other.toml", file, CLASSES, sha256="0" * 64)
    assert "it is another file, or was altered" in refused(path)
    text = path.read_text(encoding="utf-8").replace(f'sha256 = "{"0" * 64}"\n', "")
    path.write_text(text, encoding="utf-8")
    assert "is missing; that of other.onnx is" in refused(path)


def test_outputs_that_are_no_probabilities_or_of_other_classes_are_refused(tmp_path: Path) -> None:
    file, path = write_onnx_model(tmp_path / "other.onnx", 3), tmp_path / "other.toml"
    assert 'Write: outputs = "logits"' in refused(describe(path, file, CLASSES, more='outputs = "probabilities"'))
    assert "and 2 classes are stated" in refused(describe(path, file, CLASSES[:2]))
    assert "is no ONNX model that can be read" in refused(
        describe(path, damaged(tmp_path / "damaged.onnx", file), CLASSES)
    )


def damaged(path: Path, whole: Path) -> Path:
    path.write_bytes(whole.read_bytes()[:100])
    return path


def test_faults_of_a_description_are_reported_together(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text('file = "a.pickle"\nclasses = ["A", "A"]\noutputs = "scores"\nmean = [1]\nstd = [0]\n')
    message = refused(path)
    for part in ("other.toml: file", "other.toml: classes", "other.toml: outputs", "other.toml: std", "pixels"):
        assert part in message
    describe(path, write_onnx_model(tmp_path / "a.onnx", 1), ["A"], pixels="contrast = 3\n")
    assert "has no key contrast" in refused(path)


def test_a_file_without_a_description_is_refused_with_the_lines_to_write(tmp_path: Path) -> None:
    file = write_timm_tensors(tmp_path / "other.safetensors", 3)
    message = refused(file)
    assert 'architecture = "timm:..."' in message
    assert "image_size = 224" in message
    assert "[pixels]" in refused(write_onnx_model(tmp_path / "other.onnx", 3))


def test_models_are_named_by_their_files_and_by_paths_where_two_have_one_name(tmp_path: Path) -> None:
    first, second = (write_run_model(tmp_path / folder / "model", CLASSES) for folder in ("a", "b"))
    third = write_run_model(tmp_path / "c", CLASSES)
    files = [find_model_file(path, frozenset()) for path in (first, second, third)]
    assert [model.name for model in open_models(files[1:])] == ["model", "c"]
    assert [model.name for model in open_models(files)] == [str(first), str(second), str(third)]
    with pytest.raises(BadInput, match="is named twice"):
        open_models([files[0], files[0]])


def test_paths_of_models_are_told_from_those_of_images(tmp_path: Path) -> None:
    file = write_onnx_model(tmp_path / "other.onnx", 3)
    assert is_model_path(file)
    assert is_model_path(describe(tmp_path / "other.toml", file, CLASSES))
    assert is_model_path(tmp_path)
    assert "cannot be read" in refused(tmp_path)  # a folder without a model
    (tmp_path / "site.toml").write_text('name = "north"\n[data]\nkind = "digits"\n', encoding="utf-8")
    assert not is_model_path(tmp_path / "site.toml")
    assert not is_model_path(tmp_path / "labels.csv")
