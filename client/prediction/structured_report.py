"""Write a model's probabilities as DICOM structured reports: one Comprehensive SR for each DICOM image.

The report follows template TID 1500 (Measurement Report) of DICOM part 16, with one group of measurements: the
probability of each class, with the algorithm, and a reference to the image. It is neither verified nor final, because
no person has read it. highdicom writes it (Bridge et al., Journal of Digital Imaging 2022).
"""

import hashlib
from pathlib import Path
from typing import Any

import pydicom
from pydicom.errors import InvalidDicomError

from polyclinic.client.prediction.predict import SitePredictions
from polyclinic.common import __version__
from polyclinic.common.prediction.dicom_text import (
    MANUFACTURER,
    PRIVATE_CODING_SCHEME,
    UTF_8_CHARACTER_SET,
    make_model_uid,
    shorten_to_dicom_text,
)
from polyclinic.common.system.files import make_private_folder, write_atomically
from polyclinic.common.system.packages import refuse_missing_packages
from polyclinic.common.system.plain_names import PlainName, join_plain_name

REPORTS_FOLDER = "sr"
SERIES_NUMBER = 9900


def refuse_missing_highdicom() -> None:
    """Check that highdicom is installed.

    Raises:
        BadInput: If it is missing; the text has the command that installs it.
    """
    refuse_missing_packages("--dicom-sr", "highdicom", otherwise="Leave --dicom-sr out")


def write_structured_reports(predictions: SitePredictions, out: Path) -> tuple[list[Path], dict[str, str]]:
    """Write a report for each DICOM image to ``out/sr``.

    Returns:
        The written files, and a dictionary: image -> reason why it has no report.
    """
    from io import BytesIO

    written = list[Path]()
    without = dict[str, str]()
    folder = out / REPORTS_FOLDER
    make_private_folder(folder)
    for row, name in enumerate(predictions.names):
        if predictions.find_file(name).is_dir():
            without[name] = "it is a DICOM series, and a report refers to one image"
            continue
        try:
            image = pydicom.dcmread(predictions.find_file(name), stop_before_pixels=True)
        except (InvalidDicomError, OSError):
            without[name] = "it is no DICOM file"
            continue
        try:
            report = make_structured_report(predictions, row, image)
        except (AttributeError, ValueError, TypeError) as error:
            without[name] = f"its DICOM header lacks what a report needs: {error}"
            continue
        file = BytesIO()
        report.save_as(file)
        path = join_plain_name(folder, PlainName(f"{row + 1:06d}"), ".dcm")
        write_atomically(path, file.getvalue(), private=True)
        written.append(path)
    return written, without


def make_structured_report(predictions: SitePredictions, row: int, image: pydicom.Dataset) -> Any:
    """Return the DICOM structured report of one image, a highdicom ``ComprehensiveSR``.

    Args:
        row: Row of the image in ``predictions``.
        image: The image's DICOM header.
    """
    import highdicom
    from highdicom import sr
    from pydicom.sr.codedict import codes

    model = predictions.model
    device = sr.ObserverContext(
        observer_type=codes.DCM.Device,
        observer_identifying_attributes=sr.DeviceObserverIdentifyingAttributes(
            uid=make_model_uid(model.description.model_sha256),
            name=MANUFACTURER,
            manufacturer_name=MANUFACTURER,
            model_name=shorten_to_dicom_text(model.title),
        ),
    )

    parameters = [f"model SHA-256 {model.description.model_sha256}"]
    if predictions.calibrated:
        parameters.append(f"recalibrated at this hospital: {', '.join(predictions.calibrated)}")
    algorithm = sr.AlgorithmIdentification(
        name=shorten_to_dicom_text(model.title), version=__version__, parameters=parameters
    )

    measurements = [
        sr.Measurement(name=make_class_code(name), value=round(float(value), 6), unit=codes.UCUM.NoUnits)
        for name, value in zip(predictions.class_names, predictions.probabilities[row], strict=True)
    ]
    group = sr.MeasurementsAndQualitativeEvaluations(
        tracking_identifier=sr.TrackingIdentifier(uid=highdicom.UID(), identifier="probabilities"),
        algorithm_id=algorithm,
        measurements=measurements,
        source_images=[sr.SourceImageForMeasurementGroup(image.SOPClassUID, image.SOPInstanceUID)],
    )

    content = sr.MeasurementReport(
        observation_context=sr.ObservationContext(observer_device_context=device),
        procedure_reported=sr.CodedConcept("363679005", "SCT", "Imaging"),
        imaging_measurements=[group],
        title=codes.DCM.ImagingMeasurementReport,
    )

    report = sr.ComprehensiveSR(
        evidence=[image],
        content=content[0],
        series_instance_uid=highdicom.UID(),
        series_number=SERIES_NUMBER,
        sop_instance_uid=highdicom.UID(),
        instance_number=row + 1,
        manufacturer=MANUFACTURER,
        is_complete=True,
        is_final=False,
        is_verified=False,
    )
    report.SeriesDescription = shorten_to_dicom_text(f"Probabilities by {model.title}")
    # Names of classes and patients may have any letters; the default is ASCII.
    report.SpecificCharacterSet = UTF_8_CHARACTER_SET
    return report


def make_class_code(name: str) -> Any:
    """Return the DICOM code for the probability of a class, which is the same in every report."""
    from highdicom import sr

    value = f"P{hashlib.sha256(name.encode()).hexdigest()[:12].upper()}"
    return sr.CodedConcept(value, PRIVATE_CODING_SCHEME, shorten_to_dicom_text(f"Probability of {name}"))
