"""A hospital's patients keep their parts, over every change of the table; who opted out is left out."""

import json
import shutil
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyclinic.client.gate.audit_report import describe_audit_entry
from polyclinic.client.site.settings import SiteData, load_site, load_site_data, read_site_settings
from polyclinic.client.site.site_file import make_site_folder
from polyclinic.common.errors import BadInput
from polyclinic.common.patients.opt_out import OptOutSource, OptOutsUnknown
from polyclinic.common.patients.parts import PATIENT_PARTS_FILE, PatientChanges
from polyclinic.common.security.audit import AuditLog
from polyclinic.data.base.image_set import PARTS, DatasetSplits
from polyclinic.data.base.splits import PatientSplit, split_patients

Parts = dict[str, str]
PATIENTS = 40


class Hospital:
    """A folder with one picture of each of forty patients."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.more = folder, ""
        make_site_folder(folder, "north")
        (folder / "images").mkdir()
        for index in range(PATIENTS + 5):
            Image.fromarray(np.full((6, 4), 5 * index + 1, np.uint8)).save(folder / "images" / f"{index}.png")
        self.write_table(range(PATIENTS))

    def write_table(
        self, patients: Collection[int], name: Callable[[int], str] = "P-{:03}".format, part: str = ""
    ) -> None:
        lines = [f"image,patient,Effusion{',part' if part else ''}"]
        for index in patients:
            lines.append(f"{index}.png,{name(index)},{index % 2}{f',{part}' if part else ''}")
        (self.folder / "labels.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def write_settings(self, more: str = "", policy: str = "") -> None:
        text = (
            'name = "north"\ndevice = "cpu"\n[data]\nkind = "folder"\nimages = "images"\nlabels = "labels.csv"\n'
            f'image_column = "image"\npatient_column = "patient"\nlabel_columns = ["Effusion"]\n{more}\n{policy}\n'
        )
        (self.folder / "site.toml").write_text(text, encoding="utf-8")

    def start(self, more: str = "") -> SiteData:
        self.write_settings(more)
        return load_site_data(read_site_settings(self.folder), remember=True)

    @property
    def memory(self) -> Path:
        return self.folder / "state" / PATIENT_PARTS_FILE


@pytest.fixture
def hospital(tmp_path: Path) -> Hospital:
    return Hospital(tmp_path / "north")


def parts_of(splits: DatasetSplits) -> Parts:
    named = zip(PARTS, splits.parts, strict=True)
    return {patient: part for part, images in named for patient in images.patients.tolist()}


def test_patients_keep_their_parts_when_others_come_and_go_and_the_changes_are_counted(hospital: Hospital) -> None:
    first = hospital.start()
    before = parts_of(first.splits)
    assert set(before.values()) == set(PARTS)
    assert first.changes == PatientChanges()
    assert hospital.start().changes == PatientChanges()
    hospital.write_table([*range(3, PATIENTS), 40, 41])
    second = hospital.start()
    assert second.changes == PatientChanges(new=2, gone=3)
    after = parts_of(second.splits)
    assert {patient: part for patient, part in after.items() if patient in before} == {
        patient: part for patient, part in before.items() if int(patient[2:]) >= 3
    }
    assert second.changes.describe() == "patients changed since the last start: 2 patients new, 3 patients gone"


@pytest.mark.parametrize("more", ["split_seed = 5", "split_seed = 77"])
def test_another_split_seed_moves_nobody(hospital: Hospital, more: str) -> None:
    before = parts_of(hospital.start().splits)
    again = hospital.start(more)
    assert parts_of(again.splits) == before
    assert again.changes.kept > 5
    hospital.memory.unlink()
    assert parts_of(hospital.start(more).splits) != before


def test_the_folder_of_a_second_study_has_each_common_patient_in_the_same_part(
    hospital: Hospital, tmp_path: Path
) -> None:
    first = parts_of(hospital.start().splits)
    second = Hospital(tmp_path / "second-study")
    second.write_table([*range(10, PATIENTS), 40, 41, 42, 43, 44])
    again = parts_of(second.start().splits)
    common = first.keys() & again.keys()
    assert len(common) == PATIENTS - 10
    assert {patient: again[patient] for patient in common} == {patient: first[patient] for patient in common}


@pytest.mark.parametrize("restored", ["the folder", "the table alone", "the memory alone"])
def test_after_a_restored_backup_no_test_patient_is_trained_on(
    hospital: Hospital, tmp_path: Path, restored: str
) -> None:
    """The backup is of the first start; since then patients came and went, and the seed of the split changed."""
    ever = parts_of(hospital.start().splits)
    backup = tmp_path / "backup"
    shutil.copytree(hospital.folder, backup)
    hospital.write_table([*range(5, PATIENTS), 40, 41, 42, 43, 44])
    ever |= parts_of(hospital.start().splits)
    if restored == "the folder":
        shutil.rmtree(hospital.folder)
        shutil.copytree(backup, hospital.folder)
    elif restored == "the table alone":
        shutil.copy(backup / "labels.csv", hospital.folder / "labels.csv")
    else:
        shutil.copy(backup / "state" / PATIENT_PARTS_FILE, hospital.memory)
    for patients in (range(PATIENTS), [*range(5, PATIENTS), 40, 41, 42, 43, 44]):
        hospital.write_table(patients)
        now = parts_of(hospital.start().splits)
        assert now == {patient: ever[patient] for patient in now}
    assert {patient for patient, part in ever.items() if part == "test"}


def test_a_patient_written_in_another_way_is_the_same_one(hospital: Hospital) -> None:
    before = parts_of(hospital.start().splits)
    hospital.write_table(range(PATIENTS), "p{}".format)
    again = hospital.start()
    assert again.changes == PatientChanges()
    assert {f"P-{int(patient[1:]):03}": part for patient, part in parts_of(again.splits).items()} == before


def test_a_patient_who_comes_back_is_where_he_was(hospital: Hospital) -> None:
    before = parts_of(hospital.start().splits)
    hospital.write_table(range(1, PATIENTS))
    hospital.start()
    hospital.write_table(range(PATIENTS))
    assert parts_of(hospital.start("split_seed = 5").splits) == before


def test_a_table_that_moves_test_patients_into_training_is_refused(hospital: Hospital) -> None:
    hospital.write_table(range(PATIENTS), part="test")
    with (hospital.folder / "labels.csv").open("a") as file:
        file.write("40.png,P-040,1,train\n41.png,P-041,0,train\n42.png,P-042,0,val\n")
    more = 'split_column = "part"'
    hospital.start(more)
    table = (hospital.folder / "labels.csv").read_text()
    (hospital.folder / "labels.csv").write_text(table.replace("P-040,1,train", "P-040,1,val"))
    hospital.start(more)  # between training and validation
    (hospital.folder / "labels.csv").write_text(table.replace("P-003,1,test", "P-003,1,train"))
    with pytest.raises(BadInput) as refused:
        hospital.start(more)
    (fault,) = refused.value.faults
    assert fault.where == "site.toml: data.split_column"
    assert "1 patient of the test part into training" in fault.problem
    # The remedy of the message: without the file, the table's parts count.
    assert str(hospital.memory) in fault.remedy
    hospital.memory.unlink()
    assert parts_of(hospital.start(more).splits)["P-003"] == "train"


def test_no_name_of_a_patient_is_in_the_file_and_nobody_else_may_read_it(hospital: Hospital) -> None:
    hospital.start()
    assert b"P-0" not in hospital.memory.read_bytes()
    assert hospital.memory.stat().st_mode & 0o077 == 0


def test_a_command_that_only_looks_stores_nothing(hospital: Hospital) -> None:
    hospital.write_settings()
    load_site(read_site_settings(hospital.folder))
    assert not hospital.memory.exists()


@pytest.mark.parametrize("content", [b"", b"torn", b"\x00" * 100])
def test_a_damaged_file_is_named_and_its_remedy_works(hospital: Hospital, content: bytes) -> None:
    before = parts_of(hospital.start().splits)
    hospital.memory.write_bytes(content)
    with pytest.raises(BadInput) as refused:
        hospital.start()
    assert refused.value.faults[0].where == str(hospital.memory)
    hospital.memory.unlink()
    assert parts_of(hospital.start().splits) == before


def test_a_site_with_runs_of_release_0_1_keeps_the_parts_that_release_drew(hospital: Hospital) -> None:
    state = hospital.folder / "state"
    (state / "memory" / "run").mkdir(parents=True)
    AuditLog(state).append(event="start", version="0.1.0", policy={})
    patients = np.array([f"P-{index:03}" for index in range(PATIENTS)])
    split: PatientSplit = split_patients(patients, np.arange(PATIENTS) % 2 == 1)
    assert set(split.test) == {patient for patient, part in parts_of(hospital.start().splits).items() if part == "test"}
    hospital.write_table(range(1, PATIENTS))
    kept = {patient for patient, part in parts_of(hospital.start().splits).items() if part == "test"}
    assert kept == set(split.test) - {"P-000"}


# ---------------------------------------------------------------------- opt-out


def test_each_of_the_patients_may_opt_out_and_nobody_else_moves(hospital: Hospital) -> None:
    data = hospital.start()
    before = parts_of(data.splits)
    for patient in before:
        hospital.write_settings(f'opt_out = ["{patient.lower().replace("-", "")}", "nobody"]')
        site, left_out = data.make_site(OptOutSource(hospital.folder).read_identifiers())
        parts = {
            name: part
            for part, images in zip(PARTS, (site.train, site.validation, site.test), strict=True)
            for name in images.patients.tolist()
        }
        assert left_out.count == 1
        assert left_out.unmatched == ("nobody",)
        assert parts == {name: part for name, part in before.items() if name != patient}


def test_a_command_says_who_opted_out_by_now(hospital: Hospital) -> None:
    (hospital.folder / "list.txt").write_text("P-001\n\n  p2 \n")
    data = hospital.start("opt_out = 'cat list.txt'")
    assert data.make_present_site()[1].count == 2
    (hospital.folder / "list.txt").write_text("P-001\nP-002\nP-003\n")
    assert data.make_present_site()[1].count == 3


def test_a_list_that_is_edited_counts_without_a_restart(hospital: Hospital) -> None:
    data = hospital.start()
    assert data.make_present_site()[1].count == 0
    hospital.write_settings('opt_out = ["P-001"]')
    assert data.make_present_site()[1].count == 1
    hospital.write_settings('opt_out = ["P-001", "P-002", "P-003"]')
    assert data.make_present_site()[1].count == 3
    hospital.write_settings()
    assert data.make_present_site()[1].count == 0


BROKEN_FILES = {
    "being written": 'name = "north"\n[data]\nopt_out = ["P-001",',
    "empty": "",
    "without data": 'name = "north"\n',
    "another type": "[data]\nopt_out = 7\n",
}


@pytest.mark.parametrize("content", BROKEN_FILES.values(), ids=BROKEN_FILES)
def test_while_the_file_is_broken_nobody_knows_who_opted_out_and_its_repair_counts(
    hospital: Hospital, content: str
) -> None:
    data = hospital.start('opt_out = ["P-001"]')
    assert data.make_present_site()[1].count == 1
    (hospital.folder / "site.toml").write_text(content)
    for _ in range(2):
        with pytest.raises(OptOutsUnknown):
            data.opt_out.read_identifiers()
    (hospital.folder / "site.toml").unlink()
    with pytest.raises(OptOutsUnknown):
        data.opt_out.read_identifiers()
    hospital.write_settings('opt_out = ["P-001", "P-002"]')
    assert data.make_present_site()[1].count == 2


def test_identifiers_that_fit_no_patient_are_named_to_the_hospital_as_it_wrote_them(hospital: Hospital) -> None:
    data = hospital.start('opt_out = ["P-001", "p1", "W-7777", "P-0O2"]')
    _, left_out, _ = data.make_present_site()
    assert left_out.count == 1
    assert left_out.unmatched == ("W-7777", "P-0O2")
    assert "W-7777" in left_out.warn_about_unmatched()
    hospital.write_settings('opt_out = ["P-001"]')
    assert data.make_present_site()[1].warn_about_unmatched() == ""


def test_numbers_are_identifiers_too(hospital: Hospital) -> None:
    hospital.write_table(range(PATIENTS), str)
    data = hospital.start("opt_out = [7, 8]")
    assert data.make_present_site()[1].count == 2


FAILING = {
    "no such program": "no-such-program-here",
    "unbalanced quote": "cat 'list",
    "another code": f"{sys.executable} -c \"import sys; sys.exit('patient P-007 unreachable')\"",
}


@pytest.mark.parametrize("command", FAILING.values(), ids=FAILING)
def test_nothing_is_trained_while_nobody_knows_who_opted_out(hospital: Hospital, command: str) -> None:
    hospital.write_settings(f"opt_out = {json.dumps(command)}")
    with pytest.raises(BadInput) as refused:
        load_site(read_site_settings(hospital.folder))
    assert "data.opt_out" in str(refused.value)
    with pytest.raises(OptOutsUnknown):
        OptOutSource(hospital.folder).read_identifiers()


def test_opt_out_of_another_type_is_refused(hospital: Hospital) -> None:
    hospital.write_settings("opt_out = 7")
    with pytest.raises(BadInput) as refused:
        read_site_settings(hospital.folder)
    assert [fault.where for fault in refused.value.faults] == ["site.toml: data.opt_out"]


def test_the_audit_has_the_counts(hospital: Hospital) -> None:
    AuditLog(hospital.folder).append(event="patients", new=2, gone=3, kept=0)
    (entry,) = AuditLog(hospital.folder).read_entries()
    assert describe_audit_entry(entry).endswith("patients: 2 new, 3 gone, 0 kept in the part of earlier runs")
