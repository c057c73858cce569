"""DICOM structured reports of a model's probabilities, read back by pydicom."""

from pathlib import Path

import numpy as np
import pydicom
import pytest
from pydicom.uid import generate_uid

from polyclinic.client.prediction.model import UsableModel
from polyclinic.client.prediction.predict import SitePredictions
from polyclinic.client.prediction.structured_report import (
    make_class_code,
    refuse_missing_highdicom,
    write_structured_reports,
)
from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import build_network
from polyclinic.common.models.saved import save_model
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.prediction.dicom_text import make_model_uid
from tests.data.dicom_files import dicom
from tests.missing_packages import hide_packages

CLASSES = ("Effusion", "結節 \\ more than sixty-four characters of a name that goes on and on", "Mass")
PROBABILITIES = np.array([[0.25, 0.5, 0.875], [0.125, 1.0, 0.0]])
COMPREHENSIVE_SR = "1.2.840.10008.5.1.4.1.1.88.33"


@pytest.fixture(params=[("ISO_IR 100", "Müller^Ä"), ("ISO_IR 192", "山田^太郎")])
def predictions(tmp_path: Path, request: pytest.FixtureRequest) -> SitePredictions:
    """Predictions of two files: a DICOM image and a picture that is none."""
    model = tmp_path / "model"
    spec = ModelSpec(architecture="tiny_cnn", image_size=16, channels=1)
    description = save_model(model, build_network(spec, CLASSES, seed=0), label_contract_sha256="")
    images = tmp_path / "images"
    images.mkdir()
    charset, patient = request.param
    facts = {
        "SpecificCharacterSet": charset,
        "PatientName": patient,
        "PatientID": "P-0007",
        "StudyInstanceUID": generate_uid(),
    }
    facts |= {"SeriesInstanceUID": generate_uid(), "StudyDate": "20260101", "StudyTime": "120000", "StudyID": "1"}
    facts |= {"AccessionNumber": "A1", "PatientBirthDate": "19600101", "PatientSex": "F"}
    (images / "a.dcm").write_bytes(dicom(np.zeros((16, 16), np.uint8), **facts))
    (images / "b.png").write_bytes(b"no DICOM")
    usable = UsableModel(model, description, "first study", "run-1")
    return SitePredictions(usable, images, CLASSES, ("a.dcm", "b.png"), PROBABILITIES, {}, ())


def list_measurements(report: pydicom.Dataset) -> dict[str, float]:
    """Meaning of each numeric content item -> its value."""
    values = dict[str, float]()

    def walk(item: pydicom.Dataset) -> None:
        if item.get("ValueType") == "NUM":
            value = item.MeasuredValueSequence[0]
            assert value.MeasurementUnitsCodeSequence[0].CodeValue == "1"
            values[item.ConceptNameCodeSequence[0].CodeValue] = float(value.NumericValue)
        for inner in item.get("ContentSequence", ()):
            walk(inner)

    walk(report)
    return values


def test_a_report_has_each_classs_probability_and_refers_to_its_image(
    predictions: SitePredictions, tmp_path: Path
) -> None:
    (path,), without = write_structured_reports(predictions, tmp_path)
    assert without == {"b.png": "it is no DICOM file"}
    report, image = pydicom.dcmread(path), pydicom.dcmread(tmp_path / "images" / "a.dcm")
    assert (report.SOPClassUID, report.Modality) == (COMPREHENSIVE_SR, "SR")
    assert report.ContentTemplateSequence[0].TemplateIdentifier == "1500"
    expected = dict(zip(map(code_of, CLASSES), [0.25, 0.5, 0.875], strict=True))
    assert list_measurements(report) == expected
    for name in ("PatientID", "PatientName", "StudyInstanceUID"):
        assert report[name].value == image[name].value
    assert report.SeriesInstanceUID != image.SeriesInstanceUID
    assert image.SOPInstanceUID in str(report.CurrentRequestedProcedureEvidenceSequence)
    assert (report.VerificationFlag, report.PreliminaryFlag) == ("UNVERIFIED", "PRELIMINARY")
    assert make_model_uid(predictions.model.description.model_sha256) in str(report)
    assert path.stat().st_mode & 0o077 == 0


def code_of(name: str) -> str:
    return str(make_class_code(name).value)


def test_the_code_of_a_class_is_the_same_everywhere_and_of_no_other_class() -> None:
    assert code_of("Effusion") == "P493D1459011E"
    assert len({code_of(name) for name in CLASSES}) == len(CLASSES)
    assert all(len(code_of(name)) <= 16 for name in CLASSES)


def test_without_highdicom_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_packages(monkeypatch, "highdicom")
    with pytest.raises(BadInput) as refused:
        refuse_missing_highdicom()
    assert "install 'polyclinic[sr]'" in str(refused.value)
