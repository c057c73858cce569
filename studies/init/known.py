"""Public tables that are recognised by their exact headings, with what their headings do not say."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from polyclinic.studies.init.mimic import MIMIC_COLUMNS


@dataclass(frozen=True)
class KnownTable:
    """A public table whose own documentation says what its columns mean.

    Attributes:
        name: Name of the data set.
        headings: The headings by which the table is recognised; it may have others, too.
        image: The column of pictures, or of their folders; empty if ``images`` are a question.
        has_folders: Whether ``image`` stands for folders.
        images: Several columns of pictures, of which the user names one.
        patient: The column of patients.
        patient_rule: Why this column is the patient.
        findings: The column of findings for each column of pictures, or for ``""`` the same for all.
        no_finding: Words in ``findings`` that say that nothing was found.
        not_assessed: Words in ``findings`` that say that the image was not assessed.
        settings: Keys of ``[data]`` that say what -1 and a blank cell mean in its label columns.
    """

    name: str
    headings: frozenset[str]
    image: str = ""
    has_folders: bool = False
    images: tuple[str, ...] = ()
    patient: str = ""
    patient_rule: str = "the data set's own number of patients"
    findings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    no_finding: tuple[str, ...] = ()
    not_assessed: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)

    def list_findings(self, image: str) -> tuple[str, ...]:
        """Return the columns of findings of the pictures in column ``image``; empty if the rules are to find them."""
        return self.findings.get(image, self.findings.get("", ()))


_KNOWN = (
    KnownTable(
        name="HAM10000",
        headings=frozenset(("lesion_id", "image_id", "dx", "dx_type")),
        image="image_id",
        patient="lesion_id",
        patient_rule="HAM10000 names no patients, so all pictures of one lesion stay together",
        findings={"": ("dx",)},
    ),
    KnownTable(
        name="MIMIC-CXR-JPG",
        headings=MIMIC_COLUMNS,
        image="study_id",
        has_folders=True,
        patient="subject_id",
        # A blank says that the report does not mention the finding: as in kind = "mimic" and in kind = "chexpert".
        settings={"uncertain": "negative", "blank": "negative"},
    ),
    KnownTable(
        name="PadChest",
        headings=frozenset(("ImageID", "ImageDir", "StudyID", "PatientID", "Labels")),
        image="ImageID",
        patient="PatientID",
        findings={"": ("Labels",)},
        not_assessed=("exclude", "suboptimal study"),
    ),
    KnownTable(
        name="ODIR",
        headings=frozenset(
            ("ID", "Left-Fundus", "Right-Fundus", "Left-Diagnostic Keywords", "Right-Diagnostic Keywords")
        ),
        images=("Left-Fundus", "Right-Fundus"),
        patient="ID",
        # N, D, G and so on are of both eyes; the keywords are of one eye each.
        findings={
            "Left-Fundus": ("Left-Diagnostic Keywords",),
            "Right-Fundus": ("Right-Diagnostic Keywords",),
            "": ("Left-Diagnostic Keywords",),
        },
        no_finding=("normal fundus",),
    ),
)


def recognise_table(headings: Iterable[str]) -> KnownTable | None:
    """Return the public table with these headings; None for any other table."""
    names = set(headings)
    known = next((table for table in _KNOWN if table.headings <= names), None)
    # With dicom_id, a line of MIMIC-CXR is a picture and not a study.
    return None if known is not None and known.has_folders and "dicom_id" in names else known
