"""The table of ``flwr-client check --experiment``: what is agreed with the run and what differs."""

import io

import pytest

from polyclinic.client.check.findings import CheckResult, make_narrow_console, print_check_result
from polyclinic.client.connection.exit_codes import ClientExitCode
from polyclinic.client.site.site_file import make_site_toml
from polyclinic.common.config import Experiment
from polyclinic.common.contract_points import POINT_NAMES, TABLE_WIDTH
from tests.client.check.sites import CLASSES, Hospital

FIRST, SECOND = CLASSES


def experiment(**tables: object) -> Experiment:
    usual = {"run": {"method": "surgical"}, "model": {"architecture": "tiny_cnn", "channels": 1, "image_size": 16}}
    return Experiment.model_validate(usual | tables)


def checked(hospital: Hospital, **tables: object) -> CheckResult:
    return hospital.checked(offline=True, experiment=experiment(**tables))


def printed(result: CheckResult) -> list[str]:
    file = io.StringIO()
    print_check_result(result, (), make_narrow_console(file))
    return file.getvalue().splitlines()


def test_a_hospital_that_agrees_sees_its_values_beside_the_runs(hospital: Hospital) -> None:
    result = checked(hospital, vocabulary={FIRST: {"synonyms": ["x"]}, SECOND: {}})
    assert [point.name for point in result.contract] == list(POINT_NAMES)
    assert not any(point.faults for point in result.contract)
    points = {point.name: point for point in result.contract}
    assert (points["words"].here, points["words"].run) == (f"{FIRST}, {SECOND}", f"{FIRST}, {SECOND}")
    assert (points["level"].here, points["level"].run) == ("trusted", "neither masks nor noise")
    assert all(len(line) <= TABLE_WIDTH for line in printed(result) if line[:1] in "┏┃┡│└")


def test_a_synonym_is_taken_and_its_definition_is_shown(hospital: Hospital) -> None:
    entries = {"Study": {"synonyms": [FIRST], "definition": "what the study means"}, SECOND: {}}
    result = checked(hospital, vocabulary=entries)
    (data,) = [area for area in result.areas if area.name == "data"]
    assert data.facts["words"] == {FIRST: "Study", SECOND: SECOND}
    assert any("what the study means" in finding.problem for finding in data.findings)
    assert not result.contract[0].faults


def test_a_word_outside_the_vocabulary_is_a_fault_with_the_line_to_write(hospital: Hospital) -> None:
    result = checked(hospital, vocabulary={f"{FIRST}s": {}, SECOND: {}})
    words = result.contract[0]
    assert result.exit_code == ClientExitCode.WORDS
    assert words.lines_to_write == (f'"{FIRST}" = "{FIRST}s"',)


@pytest.mark.parametrize(
    ("tables", "policy", "differs", "code"),
    [
        ({"pixels": {"image_size": 24}}, "", {"sizes"}, ClientExitCode.PIXELS),
        ({"pixels": {"color": True}}, "color = true", set(), None),
        ({}, '[policy]\nlevel = "masked"', {"level"}, ClientExitCode.POLICY),
        ({}, "[policy]\nsmallest_count = 1000", {"counts"}, ClientExitCode.POLICY),
    ],
    ids=["size", "colour that is stated", "level", "counts"],
)
def test_each_point_that_differs_is_marked(
    tables: dict[str, object], policy: str, differs: set[str], code: ClientExitCode | None, hospital: Hospital
) -> None:
    with (hospital.folder / "site.toml").open("a", encoding="utf-8") as file:
        file.write(f"\n{policy}\n")
    result = checked(hospital, **tables)
    assert {point.name for point in result.contract if point.faults} == differs
    assert code is None or result.exit_code == code


def test_without_an_experiment_there_is_no_table(hospital: Hospital) -> None:
    assert hospital.checked(offline=True, experiment=None).contract == ()


def test_a_new_sites_file_lists_the_studys_classes_with_definitions_and_synonyms() -> None:
    text = make_site_toml("north", experiment(vocabulary={"Mass": {"synonyms": ["Masse"], "definition": "3 cm"}}))
    assert '# The study\'s classes:\n#   "Mass": 3 cm; synonyms: Masse\n' in text
    assert "The study's classes" not in make_site_toml("north", experiment())
