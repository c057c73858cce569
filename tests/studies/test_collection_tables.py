"""Files of surgical aggregation's Tables I to IV, on stand-ins with the layouts of the three archives."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from polyclinic.common.config import read_experiment
from polyclinic.common.simulation import load_simulated_data
from polyclinic.data.load import load_external_test_images
from polyclinic.data.tables.class_names import CHEXPERT_CLASSES, MIMIC_CLASSES, NIH_CLASSES
from polyclinic.server.runs.reader import read_run
from polyclinic.server.simulation.simulate import simulate
from polyclinic.studies.study import list_study_trials
from polyclinic.studies.study_file import MeanOverClasses, read_study
from tests.studies.published_runs import ROOT

SURGICAL = ROOT / "experiments" / "surgical"
STUDY = SURGICAL / "chexpert"
SHARED = sorted(set(NIH_CLASSES) & set(CHEXPERT_CLASSES))
PATIENTS = 24
SMALL = (
    "run.rounds=1", "model.architecture=tiny_cnn", "model.image_size=16", "model.weights=none", "model.neck=none",
    "model.dropout=0", "method.trunk=fedavg", "method.warm_up_epochs=0", "data.image_size=16",
    "external_test.image_size=16", "simulation.backend=inline",
)  # fmt: skip


def write_picture(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (16, 16), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def has(class_number: int, patient: int) -> bool:
    """Every class at three of five patients, another set for each class."""
    return (patient + class_number) % 5 < 3


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Overrides that name stand-ins of ChestX-ray14, CheXpert and MIMIC-CXR-JPG with the labels of CXR-LT."""
    base = tmp_path_factory.mktemp("datasets")
    nih = ["Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age,Patient Gender,View Position"]
    chexpert = [",".join(["Path", "Sex", "Age", "Frontal/Lateral", "AP/PA", "No Finding", *CHEXPERT_CLASSES])]
    mimic = [",".join(["dicom_id", "subject_id", "study_id", "ViewPosition", *MIMIC_CLASSES])]
    own_names = {"Pleural Effusion": "Effusion", "Pleural Thickening": "Pleural_Thickening"}
    for patient in range(PATIENTS):
        found = [own_names.get(name, name) for number, name in enumerate(NIH_CLASSES) if has(number, patient)]
        nih.append(f"{patient:08}_000.png,{'|'.join(found) or 'No Finding'},0,{patient},50,F,PA")
        write_picture(base / "nih" / f"{patient:08}_000.png", patient)
        path = f"CheXpert-v1.0-small/train/patient{patient:05}/study1/view1_frontal.jpg"
        cells = ["1.0" if has(number, patient) else "" for number in range(len(CHEXPERT_CLASSES))]
        chexpert.append(",".join([path, "Female", "68", "Frontal", "AP", "", *cells]))
        write_picture(base / path, 100 + patient)
        subject, study, dicom = 10_000_032 + patient, 50_000_000 + patient, f"02aa804e-{patient:04}"
        write_picture(base / f"mimic/files/p10/p{subject}/s{study}/{dicom}.jpg", 200 + patient)
        cells = ["1" if has(number, patient) else "0" for number in range(len(MIMIC_CLASSES))]
        mimic.append(",".join([dicom, str(subject), str(study), "PA", *cells]))
    for name, lines in (("nih", nih), ("chexpert", chexpert), ("mimic", mimic)):
        (base / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return (
        f'data.collections.nih.images="{base}/nih"', f'data.collections.nih.labels="{base}/nih.csv"',
        f'data.collections.chexpert.images="{base}"', f'data.collections.chexpert.labels="{base}/chexpert.csv"',
        f'external_test.images="{base}/mimic"', f'external_test.labels="{base}/mimic.csv"',
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "of_nih", "of_chexpert"),
    [("nih_chexpert", sorted(NIH_CLASSES), sorted(CHEXPERT_CLASSES)), ("nih_chexpert_seven", SHARED, SHARED)],
)
def test_each_archive_is_a_hospital_with_its_findings_and_mimic_tests_them_all(
    name: str, of_nih: list[str], of_chexpert: list[str], archives: tuple[str, ...]
) -> None:
    file = read_experiment(SURGICAL / f"{name}.toml", (*SMALL, *archives))
    data = load_simulated_data(file.experiment, file.base_folder)
    assert {part.site: sorted(part.class_names) for part in data.parts} == {"nih": of_nih, "chexpert": of_chexpert}
    assert len(SHARED) == 7
    assert sum(len(part.train) for part in data.parts) < 2 * PATIENTS
    assert all(len(part.train) for part in data.parts)
    external = load_external_test_images(file.experiment.external_test, file.base_folder)
    assert external is not None
    assert set(of_nih) | set(of_chexpert) <= set(external.class_names)


def test_the_study_runs_every_method_of_each_table_on_files_that_are_there() -> None:
    study = read_study(STUDY, quick=False)
    grids = list_study_trials(study, STUDY, STUDY, (), range(1))
    trials = [[trial for row in grid for column in row for trial in column] for grid in grids]
    assert [len(of_table) for of_table in trials] == [len(table.methods) for table in study.tables] == [11, 11, 11]
    for trial in (each for of_table in trials for each in of_table):
        experiment = read_experiment(trial.experiment, trial.overrides).experiment
        assert experiment.run.rounds == 150
        assert experiment.external_test is not None


def test_a_finished_run_has_the_measures_of_the_tables(tmp_path: Path, archives: tuple[str, ...]) -> None:
    file = read_experiment(SURGICAL / "nih_chexpert.toml", (*SMALL, *archives))
    simulate(file, tmp_path / "run", Console(quiet=True))
    run = read_run(tmp_path / "run")
    for table in read_study(STUDY, quick=False).tables[1:]:
        for reader in table.measure_readers:
            value = reader(run)
            assert value is not None
            assert 0 <= value <= 1
    assert run.summary.external is not None
    ours = MeanOverClasses(title="", classes=("Edema", "Mass"), external=True).read_mean_auroc_from_run(run)
    results = [run.summary.external.per_class[name].auroc for name in ("Edema", "Mass")]
    assert ours == pytest.approx(np.mean([auroc for auroc in results if auroc is not None]))
