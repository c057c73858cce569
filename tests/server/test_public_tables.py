"""``flwr-sim init`` on the label tables of public data sets, with the headings and cells as they are shipped.

Each is read right, or one question is asked; the experiment that was written runs.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from polyclinic.common.config import read_experiment
from polyclinic.data.base.image_set import ImageSet, concatenate_image_sets
from polyclinic.data.load import load_dataset
from polyclinic.strategies.registry import find_method_faults
from polyclinic.studies.init.known import recognise_table
from tests.data.dicom_files import dicom
from tests.network.real import flwr_sim

CHEXPERT = "No Finding,Enlarged Cardiomediastinum,Cardiomegaly,Lung Opacity,Lung Lesion,Edema,Consolidation,Pneumonia"
CHEXPERT += ",Atelectasis,Pneumothorax,Pleural Effusion,Pleural Other,Fracture,Support Devices"
MIMIC = "Atelectasis,Cardiomegaly,Consolidation,Edema,Enlarged Cardiomediastinum,Fracture,Lung Lesion,Lung Opacity"
MIMIC += ",No Finding,Pleural Effusion,Pleural Other,Pneumonia,Pneumothorax,Support Devices"


def picture(path: Path, number: int) -> None:
    """Write a picture that differs from those with other numbers, as DICOM or PNG by its ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 255, (16, 16), dtype=np.uint8)
    if path.suffix in (".dcm", ".dicom"):
        path.write_bytes(dicom(pixels.astype(np.uint16), PatientID=""))
    else:
        Image.fromarray(pixels).save(path)


def write(path: Path, heading: str, rows: Sequence[Sequence[object]]) -> Path:
    """Write a table; an empty heading writes none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        if heading:
            file.write(f"{heading}\n")
        csv.writer(file, lineterminator="\n").writerows(rows)
    return path


def asked(table: Path, *options: str) -> list[str]:
    """Return the options of the questions that are asked about a table."""
    ended = flwr_sim("init", table, "--out", table.parent / "mine.toml", *options)
    assert ended.code == 2, ended.out
    assert not (table.parent / "mine.toml").exists()
    assert not (table.parent / "mine.csv").exists()
    return [line.split()[1].rstrip(":") for line in ended.err.splitlines() if line.startswith("error ")]


def made(table: Path, *options: str) -> tuple[Any, ImageSet, str]:
    """Make an experiment and run it for one round; return what it says of its data, all images, and the output."""
    out = table.parent / "mine.toml"
    ended = flwr_sim("init", table, "--out", out, *options)
    assert ended.code == 0, ended.err
    data = read_experiment(out, [], find_method_faults).experiment.data
    assert data is not None
    images = concatenate_image_sets(load_dataset(data, out.parent).parts)
    ran = flwr_sim("run", out, "--out", table.parent / "run", "--backend", "inline", "--set", "run.rounds=1")
    assert ran.code == 0, ran.err
    return data, images, " ".join(ended.out.split())


def positives(images: ImageSet) -> dict[str, int]:
    counts = (images.labels == 1).sum(axis=0).tolist()
    return {name: count for name, count in zip(images.class_names, counts, strict=True) if count}


@pytest.fixture(autouse=True)
def no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyclinic.server.federation.set_up.write_run_pages", lambda *arguments, **options: None)


NIH = "Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age,Patient Gender,View Position,"
NIH += "OriginalImage[Width,Height],OriginalImagePixelSpacing[x,y],"


@pytest.fixture
def nih(tmp_path: Path) -> Path:
    """NIH ChestX-ray14 as Kaggle ships it: pictures in twelve folders, and lists of the official split."""
    found = ("Effusion", "Mass", "Effusion|Mass", "No Finding")
    names = [f"{n // 2 + 1:08d}_{n % 2:03d}.png" for n in range(120)]
    rows = [
        (name, found[n // 2 % 4], n % 2, n // 2 + 1, 58, "M", "PA", 2682, 2749, 0.143, 0.143, "")
        for n, name in enumerate(names)
    ]
    for n, name in enumerate(names):
        picture(tmp_path / f"images_{n // 10 + 1:03d}" / "images" / name, n)
    (tmp_path / "train_val_list.txt").write_text("\n".join(names[:90]), encoding="utf-8")
    (tmp_path / "test_list.txt").write_text("\n".join(names[90:]), encoding="utf-8")
    return write(tmp_path / "Data_Entry_2017.csv", NIH, rows)


def test_nih_has_all_twelve_folders_and_the_official_split(nih: Path) -> None:
    data, images, said = made(nih)
    assert (data.kind, data.missing_files, data.test_list) == ("nih", "fault", "test_list.txt")
    assert (len(images), positives(images)) == (120, {"Mass": 60, "Pleural Effusion": 60})
    assert "an experiment on 120 images" in said
    assert len(load_dataset(data, nih.parent).test) == 30


def test_pictures_of_nih_that_are_not_there_are_a_question(nih: Path) -> None:
    (nih.parent / "images_012" / "images" / "00000060_001.png").unlink()
    assert asked(nih) == ["--ignore-missing-files"]
    data, images, said = made(nih, "--ignore-missing-files")
    assert (data.missing_files, len(images)) == ("ignore", 119)
    assert "1 line without a picture, left out" in said


def test_chexpert_has_its_patients_in_the_paths_and_frontal_images_only(tmp_path: Path) -> None:
    rows = []
    for n in range(60):
        view = ("view1_frontal", "Frontal", "AP") if n % 3 else ("view2_lateral", "Lateral", "")
        below = f"train/patient{n // 3 + 1:05d}/study1/{n}_{view[0]}.jpg"
        picture(tmp_path / "CheXpert-v1.0-small" / below, n)
        effusion = ("1.0", "0.0", "-1.0", "")[n // 3 % 4]
        rows.append(
            (
                f"CheXpert-v1.0-small/{below}",
                "Female",
                68,
                *view[1:],
                "",
                "",
                "1.0" if n % 2 else "",
                *[""] * 7,
                effusion,
            )
            + ("",) * 3
        )
    heading = f"Path,Sex,Age,Frontal/Lateral,AP/PA,{CHEXPERT}"
    data, images, _ = made(write(tmp_path / "CheXpert-v1.0-small" / "train.csv", heading, rows))
    assert (data.kind, len(images), len(set(images.patients))) == ("chexpert", 40, 20)
    assert positives(images) == {"Cardiomegaly": 20, "Pleural Effusion": 10}


def test_mimic_joins_its_tables_of_studies_views_and_the_split(tmp_path: Path) -> None:
    studies, metadata, split = [], [], []
    for n in range(60):
        subject, study = f"1{n // 2:07d}", f"5{n:07d}"
        labels = ["1.0" if n % 2 else "", "0.0" if n % 3 else "-1.0", *[""] * 12]
        studies.append((subject, study, *labels))
        for view in ("PA", "LATERAL"):
            name = f"{n:08x}-{view.lower()}"
            picture(tmp_path / "files" / f"p{subject[:2]}" / f"p{subject}" / f"s{study}" / f"{name}.jpg", n)
            metadata.append((name, subject, study, "CHEST (PA AND LAT)", view, 3056, 2544))
            split.append((name, study, subject, ("train", "train", "validate", "test")[n // 2 % 4]))
    heading = "dicom_id,subject_id,study_id,PerformedProcedureStepDescription,ViewPosition,Rows,Columns"
    write(tmp_path / "mimic-cxr-2.0.0-metadata.csv", heading, metadata)
    write(tmp_path / "mimic-cxr-2.0.0-split.csv", "dicom_id,study_id,subject_id,split", split)
    table = write(tmp_path / "mimic-cxr-2.0.0-chexpert.csv", f"subject_id,study_id,{MIMIC}", studies)
    data, images, _ = made(table)
    assert (data.labels, data.split_column, data.patient_column) == ("mine.csv", "split", "subject_id")
    assert (len(images), len(set(images.patients)), positives(images)) == (60, 30, {"Atelectasis": 30})
    assert not np.isnan(images.labels).any()
    assert len(load_dataset(data, tmp_path).test) == 14


PADCHEST = ",ImageID,ImageDir,StudyDate_DICOM,StudyID,PatientID,PatientBirth,PatientSex_DICOM,ViewPosition_DICOM"
PADCHEST += ",Projection,MethodProjection,Pediatric,Modality_DICOM,ReportID,Report,MethodLabel,Labels,Localizations"


def test_padchest_has_lists_of_labels_and_an_excluded_image_has_none(tmp_path: Path) -> None:
    cells = ("['cardiomegaly', ' pleural effusion ']", "['normal']", "['exclude']", "['cardiomegaly']")
    rows = []
    for n in range(60):
        name = f"{20536686640136348236148679891455886468 + n}_k6ga29.png"
        picture(tmp_path / str(n % 3) / name, n)
        rows.append((n, name, n % 3, 20140915, f"S{n}", f"839860488694292331637988235681{n // 2:03d}", 1930.0, "F"))
        rows[-1] += ("PA", "PA", "Manual review of DICOM fields", "No", "CR", n, "sin hallazgos . ", "Physician")  # type: ignore[assignment]
        rows[-1] += (cells[n % 4], "[]")  # type: ignore[assignment]
    data, images, said = made(write(tmp_path / "PADCHEST_chest_x_ray.csv", PADCHEST, rows))
    assert (data.finding_column, data.not_assessed) == ("Labels", ("exclude",))
    assert positives(images) == {"cardiomegaly": 30, "pleural effusion": 15}
    assert (int(np.isnan(images.labels).all(axis=1).sum()), len(set(images.patients))) == (15, 30)
    assert "15 images without any label" in said


VINDR = "image_id,class_name,class_id,rad_id,x_min,y_min,x_max,y_max"


def test_vindr_counts_the_votes_of_its_readers_who_are_no_hospitals(tmp_path: Path) -> None:
    # By image: how many of its three readers mark Cardiomegaly; one of them marks it twice.
    rows = []
    for n in range(60):
        name = f"{n:032x}"
        picture(tmp_path / "train" / f"{name}.dicom", n)
        for reader in range(3):
            if reader < n % 4:
                rows += [(name, "Cardiomegaly", 3, f"R{reader + n % 5}", 691.0, 1375.0, 1653.0, 1831.0)] * (
                    1 + (reader == 0)
                )
            else:
                rows.append((name, "No finding", 14, f"R{reader + n % 5}", "", "", "", ""))
        rows.append((name, "Aortic enlargement", 0, f"R{n % 5}", 1264.0, 743.0, 1611.0, 1019.0)) if n % 4 == 3 else None
    table = write(tmp_path / "train.csv", VINDR, rows)
    assert asked(table) == ["--patient-column"]
    data, images, said = made(table, "--patient-column", "")
    assert "more than half of its readers (rad_id) mark; a tie is unknown" in said
    assert (data.source_column, positives(images)) == (None, {"Cardiomegaly": 30})
    assert len(images) == 60


def test_ham10000_keeps_the_pictures_of_a_lesion_together(tmp_path: Path) -> None:
    rows = []
    for n in range(60):
        picture(tmp_path / f"HAM10000_images_part_{n % 2 + 1}" / f"ISIC_{n:07d}.jpg", n)
        rows.append(
            (f"HAM_{n // 2:07d}", f"ISIC_{n:07d}", ("nv", "mel", "bkl")[n // 2 % 3], "histo", "80.0", "male", "scalp")
        )
    table = write(tmp_path / "HAM10000_metadata.csv", "lesion_id,image_id,dx,dx_type,age,sex,localization", rows)
    data, images, said = made(table)
    assert (data.patient_column, positives(images)) == ("lesion_id", {"nv": 20, "mel": 20, "bkl": 20})
    assert len(set(images.patients)) == 30
    assert "HAM10000 names no patients" in said


def test_isic_2019_asks_for_patients_and_2020_for_one_of_its_columns_of_findings(tmp_path: Path) -> None:
    rows, later = [], []
    for n in range(60):
        picture(tmp_path / "ISIC_2019_Training_Input" / f"ISIC_{n:07d}.jpg", n)
        rows.append((f"ISIC_{n:07d}", *(f"{float(n % 8 == place)}" for place in range(8)), "0.0"))
        cells = ("male", 45.0, "torso", ("melanoma", "unknown", "nevus")[n % 3], ("malignant", "benign")[n % 3 > 0])
        later.append((f"ISIC_{n:07d}", f"IP_{n // 2:07d}", *cells, int(n % 3 == 0)))
    table = write(tmp_path / "ISIC_2019_Training_GroundTruth.csv", "image,MEL,NV,BCC,AK,BKL,DF,VASC,SCC,UNK", rows)
    assert asked(table) == ["--patient-column"]
    _, images, said = made(table, "--patient-column", "")
    assert positives(images)["MEL"] == 8
    assert "no image shows it: UNK" in said
    (tmp_path / "mine.toml").unlink()
    heading = "image_name,patient_id,sex,age_approx,anatom_site_general_challenge,diagnosis,benign_malignant,target"
    table = write(tmp_path / "later" / "train.csv", heading, later)
    folder = ("--images", str(tmp_path / "ISIC_2019_Training_Input"))
    assert asked(table, *folder) == ["--findings"]
    # These rows have three diagnoses, which could be words for present, absent and unknown.
    assert asked(table, *folder, "--findings", "diagnosis") == ["--present", "--absent"]
    data, images, _ = made(table, *folder, "--findings", "diagnosis", "--present", "")
    assert (data.classes, data.not_assessed, data.patient_column) == (("melanoma", "nevus"), ("unknown",), "patient_id")
    assert int(np.isnan(images.labels).all(axis=1).sum()) == 20


def test_rsna_has_several_boxes_a_patient_and_one_picture(tmp_path: Path) -> None:
    rows = []
    for n in range(60):
        name = f"{n:08x}-fda9-4c69-b4b3-b22bc189f81a"
        picture(tmp_path / "stage_2_train_images" / f"{name}.dcm", n)
        boxes = [(264.0, 152.0, 213.0, 379.0, 1), (562.0, 152.0, 256.0, 453.0, 1)] if n % 2 else [("", "", "", "", 0)]
        rows += [(name, *box) for box in boxes]
    data, images, said = made(write(tmp_path / "stage_2_train_labels.csv", "patientId,x,y,width,height,Target", rows))
    assert (data.image_column, data.patient_column, data.label_columns) == ("patientId", "patientId", ("Target",))
    assert (len(images), positives(images), len(set(images.patients))) == (60, {"Target": 30}, 60)
    assert "30 lines said the same as an earlier one" in said


def test_mura_has_no_headings_and_a_line_a_folder(tmp_path: Path) -> None:
    rows = []
    for n in range(40):
        sign = ("negative", "positive")[n % 2]
        study = f"MURA-v1.1/train/XR_{('WRIST', 'ELBOW')[n % 2]}/patient{n // 2:05d}/study1_{sign}/"
        for image in (1, 2):
            picture(tmp_path / study / f"image{image}.png", 2 * n + image)
        rows.append((study, n % 2))
    table = write(tmp_path / "MURA-v1.1" / "train_labeled_studies.csv", "", rows)
    data, images, said = made(table)
    assert "The first line names no columns: it is data." in said
    assert (data.patient_column, data.label_columns) == ("patient", ("column2",))
    assert (len(images), positives(images), len(set(images.patients))) == (80, {"column2": 40}, 20)


def test_odir_asks_which_eye_and_takes_its_own_keywords(tmp_path: Path) -> None:
    heading = "ID,Patient Age,Patient Sex,Left-Fundus,Right-Fundus,Left-Diagnostic Keywords,Right-Diagnostic Keywords"
    heading += ",N,D,G,C,A,H,M,O"
    rows = []
    for n in range(40):
        for side in ("left", "right"):
            picture(tmp_path / "Training Images" / f"{n}_{side}.jpg", 2 * n + (side == "left"))
        left = ("cataract", "normal fundus", "glaucoma\uff0ccataract", "glaucoma")[n % 4]
        rows.append((n, 69, "Female", f"{n}_left.jpg", f"{n}_right.jpg", left, "normal fundus", 0, 0, 0, 1, 0, 0, 0, 0))
    table = write(tmp_path / "full_df.csv", heading, rows)
    assert asked(table) == ["--image-column"]
    data, images, _ = made(table, "--image-column", "Left-Fundus")
    assert (data.patient_column, data.finding_column) == ("ID", "Left-Diagnostic Keywords")
    assert positives(images) == {"cataract": 20, "glaucoma": 20}
    assert int((images.labels == 0).all(axis=1).sum()) == 10


def test_a_table_is_recognised_by_all_of_its_headings_only() -> None:
    assert recognise_table(["lesion_id", "image_id", "dx"]) is None
    known = recognise_table(["image_id", "lesion_id", "dx_type", "dx", "mine"])
    assert known is not None
    assert known.name == "HAM10000"
