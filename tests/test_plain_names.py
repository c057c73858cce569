"""No name of another machine becomes a path before it is a :class:`PlainName`."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.common.config import HospitalPlan, make_hospital_plan, read_experiment
from polyclinic.common.errors import WireError
from polyclinic.common.security.signatures import RequestStatement, SignatureFault
from polyclinic.common.system.plain_names import HashName, PlainName, RunName, join_plain_name
from polyclinic.common.system.plain_text import PLAIN_NAME
from polyclinic.common.wire.bounds import list_field_bounds
from polyclinic.common.wire.codec import decode_record, encode_record
from polyclinic.common.wire.secure_aggregation import KeysRequest
from polyclinic.server.runs.receipt import RunReceipt
from polyclinic.strategies.privacy.secure_aggregation.masked_rounds import MaskedRoundStore
from tests.federations import DIGITS
from tests.hostile_requests import hostile_names
from tests.path_joins import REVIEWED, find_path_joins

HOSTILE = ("/etc/passwd", "/tmp/bait", "..", ".", "../bait", "a/b", "", "\0", "a\0", "a\n", "\na", " a", ".a", "-a")
FITTING = ("north", "St. Mary (west)", "Charité", "東京", "site-1", "_x", "a..b", "R2", "x" * 100)


@pytest.mark.parametrize("name", HOSTILE)
def test_what_could_leave_a_folder_or_hide_is_no_name(name: str) -> None:
    for kind in (PlainName, RunName, HashName):
        with pytest.raises(ValueError, match="a name must be"):
            kind(name)


@pytest.mark.parametrize("name", [3, None, b"north", ["north"], 1.5])
def test_what_is_no_text_is_no_name(name: object) -> None:
    with pytest.raises(ValueError, match="a name must be"):
        PlainName(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FITTING)
def test_names_that_hospitals_have_stay_as_they_are(name: str) -> None:
    assert PlainName(name) == name


@given(name=st.text(max_size=120) | st.from_regex(PLAIN_NAME, fullmatch=True))
def test_every_accepted_name_is_a_file_directly_in_its_folder(name: str) -> None:
    folder = Path("/a/folder")
    try:
        path = join_plain_name(folder, PlainName(name), ".txt")
    except ValueError:
        return
    assert path.parent == folder
    assert path.name == f"{name}.txt"
    assert Path(str(path)).resolve() == path


def test_a_text_that_was_not_checked_cannot_be_joined() -> None:
    with pytest.raises(TypeError):
        join_plain_name(Path("/a"), "north")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        join_plain_name(Path("/a"), PlainName("north"), "/../x")


def test_each_place_where_a_path_is_made_of_a_name_is_reviewed() -> None:
    reviewed = {tuple(join.split(": ", 1)) for joins in REVIEWED.values() for join in joins}
    new = sorted(find_path_joins() - reviewed)
    assert not new, f"join names of the other side by join_plain_name; list others in tests/path_joins.py: {new}"
    assert not sorted(reviewed - find_path_joins()), "these are gone: remove them from tests/path_joins.py"


# ---------------------------------------------------------------------- where such names come in


def statement_of(run: str) -> str:
    fields = {"site": "north", "key": "k", "run": run, "round": 0, "record": "RollCall"}
    return RequestStatement.model_construct(**fields, sha256="a" * 64, nonce="b" * 32).model_dump_json()


@pytest.mark.parametrize("run", hostile_names(("/tmp/bait",)))
def test_no_statement_about_a_request_names_a_run_by_more_than_a_name(run: str) -> None:
    assert RequestStatement.parse_statement(statement_of("run-1")).run == "run-1"
    if RunName.pattern.fullmatch(run):
        return
    with pytest.raises(SignatureFault, match="statement cannot be read"):
        RequestStatement.parse_statement(statement_of(run))


@pytest.mark.parametrize("run", HOSTILE)
def test_a_masking_record_with_such_a_run_is_refused_and_no_file_is_made(run: str, tmp_path: Path) -> None:
    content = encode_record(KeysRequest("run", 1, ("north",), 1))
    content["fields"]["run"] = run
    with pytest.raises(WireError, match=r"KeysRequest\.run must be"):
        decode_record(content, KeysRequest)
    with pytest.raises(ValueError, match="a name must be"):
        MaskedRoundStore(tmp_path / "masked").read_masked_round(run, 1)
    assert not list(tmp_path.iterdir())


def test_every_record_has_the_rule_for_its_run() -> None:
    from polyclinic.common.wire.bounds import RunNameBound
    from polyclinic.common.wire.records import Record

    kinds = Record.__args__  # type: ignore[attr-defined]
    assert len(kinds) > 15
    assert [kind.__name__ for kind in kinds if not isinstance(list_field_bounds(kind)["run"], RunNameBound)] == []


def test_a_plan_names_no_file_of_the_hospital(tmp_path: Path) -> None:
    (tmp_path / "digits.toml").write_text(DIGITS, encoding="utf-8")
    plan = make_hospital_plan(read_experiment(tmp_path / "digits.toml").experiment).model_dump(mode="json")
    assert HospitalPlan.model_validate(plan)
    plan["model"]["weights"] = "/etc/hostname"
    with pytest.raises(ValueError, match="hash alone"):
        HospitalPlan.model_validate(plan)


def test_a_receipt_of_another_machine_names_no_path() -> None:
    site = {"answer_sha256": "a", "joined": 0}
    with pytest.raises(ValueError, match="a name must be"):
        RunReceipt.model_validate({"sites": {"../../secret": site}})
