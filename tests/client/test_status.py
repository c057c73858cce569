"""What a site says of itself in its status file: to its own commands, and to nobody that it is not for."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from polyclinic.client.connection.service import lock_site_folder
from polyclinic.client.connection.status import (
    HANGING_AFTER_S,
    STATUS_FILE,
    UNHEALTHY_AFTER_S,
    ClientStatus,
    format_client_status,
    is_client_healthy,
    keep_status_file_current,
    read_client_status,
)
from polyclinic.common.contract import CONTRACT_RUN
from polyclinic.common.errors import BadInput
from polyclinic.common.wire.versions import WIRE_VERSION
from tests.network.real import eventually, flwr_client

ALL = {"starting", "connecting", "waiting", "working", "stopped"}
LONG_S = UNHEALTHY_AFTER_S + 60
NOBODY = "no flwr-client runs on this folder."
SILENT = "has not written status.json for 60 s."


@contextlib.contextmanager
def running(status: ClientStatus, folder: Path) -> Iterator[Path]:
    """The program of a site whose folder this is; its ``state``."""
    with lock_site_folder(folder / "state"), keep_status_file_current(status, folder / "state"):
        yield folder / "state"


def read_when(state: Path, holds: Callable[[Any], bool]) -> Any:
    """The status, as soon as it is this."""
    eventually(lambda: holds(read_client_status(state)), "the status is written")
    return read_client_status(state)


def test_after_a_request_for_the_contract_no_round_of_an_earlier_run_is_shown() -> None:
    status = asdict(ClientStatus("north", state="waiting", run=CONTRACT_RUN, round=3, rounds=3, seconds_left=0.0))
    text = format_client_status({**status, "authority_confirmed": ""})
    assert "round 3 of 3" not in text
    assert "before a run" in text


def refusal(folder: Path) -> str:
    with pytest.raises(BadInput) as refused:
        read_client_status(folder / "state")
    return str(refused.value)


def test_a_site_is_healthy_at_work_or_in_touch_with_the_coordinator() -> None:
    now = time.time()
    for age_s, healthy in ((0, ALL), (LONG_S, {"starting", "working"})):
        states = {
            state for state in ALL if is_client_healthy(asdict(ClientStatus("n", state, last_contact=now - age_s)), now)
        }
        assert states == healthy
    waiting = asdict(ClientStatus("north", state="waiting", last_contact=1000.0))
    assert (UNHEALTHY_AFTER_S, is_client_healthy(waiting, now=1240.0), is_client_healthy(waiting, now=1301.0)) == (
        300,
        True,
        False,
    )


def test_the_health_check_of_a_container_ends_with_the_code_for_it(tmp_path: Path) -> None:
    status = ClientStatus("north", state="connecting", last_contact=time.time())
    status.record_last_error("no route")
    (tmp_path / "site.toml").touch()
    with running(status, tmp_path) as state:
        well = flwr_client("health", tmp_path)
        status.last_contact -= LONG_S
        read_when(state, lambda present: not present["healthy"])
        lost = flwr_client("health", tmp_path)
    assert (well.code, well.out) == (0, "healthy\n")
    assert (lost.code, lost.out) == (1, "not healthy: no route\n")


@pytest.mark.parametrize(
    ("wire", "first"),
    [
        (WIRE_VERSION - 1, "the coordinator has to update: it runs release 9.9.9"),
        (WIRE_VERSION + 1, "update this site: the coordinator runs release 9.9.9"),
    ],
)
def test_status_says_who_has_to_update(wire: int, first: str) -> None:
    status = asdict(ClientStatus("north", coordinator_release="9.9.9", coordinator_wire=wire))
    assert first in format_client_status({**status, "authority_confirmed": ""})


@pytest.mark.parametrize("wire", [0, WIRE_VERSION])
def test_status_says_nothing_of_an_update_where_both_speak_one_version(wire: int) -> None:
    status = asdict(ClientStatus("north", coordinator_release="9.9.9", coordinator_wire=wire))
    assert "update" not in format_client_status({**status, "authority_confirmed": ""})


def test_the_file_has_the_present_and_the_last_error_and_only_its_owner_reads_it(
    tmp_path: Path, lax_umask: None
) -> None:
    status = ClientStatus("north", coordinator="trial")
    with running(status, tmp_path) as state:
        assert (read_client_status(state)["state"], read_client_status(state)["last_error"]) == ("starting", "")
        assert (state / STATUS_FILE).stat().st_mode & 0o777 == 0o600
        fields = "site state coordinator run round rounds phase finished rounds_done written seconds_left privacy"
        fields += " certificate_days last_contact last_error last_error_time coordinator_release authority_phrase"
        fields += " coordinator_wire wire"
        assert json.loads((state / STATUS_FILE).read_bytes()).keys() == set(fields.split())
        status.record_last_error("no route")
        status.state, status.run, status.round, status.rounds = "working", "abc", 3, 10
        present = read_when(state, lambda present: present["round"] == 3)
        assert (present["site"], present["coordinator"], present["state"]) == ("north", "trial", "working")
        assert (present["run"], present["rounds"], present["last_error"]) == ("abc", 10, "no route")
        assert present["last_error_time"].endswith("+00:00")
        status.record_last_error("train failed")
        read_when(state, lambda present: present["last_error"] == "train failed")


def test_a_person_reads_run_round_and_the_minutes_that_are_left() -> None:
    status = ClientStatus("north", "working", "trial", "abc", 3, 10, "train", seconds_left=90.0, certificate_days=20.6)
    words = format_client_status(asdict(status)).splitlines()
    assert words[:2] == ["site north: working (train)", "run abc: round 3 of 10; about 2 min left"]
    assert words[2:4] == ["coordinator trial: last answer 0 s ago", "its certificate is valid for 21 more days"]


def test_a_person_reads_nothing_of_what_is_not_known_yet() -> None:
    status = ClientStatus("north", "connecting", "trial", last_contact=time.time() - 100)
    status.record_last_error("no route")
    words = format_client_status(asdict(status))
    assert words.startswith("site north: connecting\ncoordinator trial: last answer 100 s ago\nlast error: no route (")
    status.run, status.rounds, status.round = "abc", 10, 1
    assert "run abc: round 1 of 10\n" in format_client_status(asdict(status))
    status.finished = "2026-11-22T04:00:00+00:00"
    assert "last run abc: done 2026-11-22T04:00:00+00:00\n" in format_client_status(asdict(status))


def test_after_the_program_has_ended_there_is_no_status(tmp_path: Path) -> None:
    assert refusal(tmp_path).startswith(f"{tmp_path}: {NOBODY}")  # nor before it
    with running(ClientStatus("north"), tmp_path) as state:
        content = (state / STATUS_FILE).read_bytes()
    assert NOBODY in refusal(tmp_path)
    with pytest.raises(ZeroDivisionError), running(ClientStatus("north"), tmp_path):
        raise ZeroDivisionError
    assert NOBODY in refusal(tmp_path)
    assert [path.name for path in state.iterdir()] == ["lock"]
    (state / STATUS_FILE).write_bytes(content)  # as a killed program leaves it
    assert NOBODY in refusal(tmp_path)


OLD = json.dumps(asdict(ClientStatus("north", state="working")) | {"written": time.time() - HANGING_AFTER_S - 1})
NO_STATUS = ("", "{", "[]", "{}", '{"written": "now"}', '{"written": 1e999, "site": "n", "x": 1}')


@pytest.mark.parametrize("content", [OLD, *NO_STATUS])
def test_a_program_that_writes_no_status_or_none_that_can_be_read_is_not_well(content: str, tmp_path: Path) -> None:
    state = tmp_path / "state"
    with lock_site_folder(state):
        (state / STATUS_FILE).write_text(content, encoding="utf-8")
        assert SILENT in refusal(tmp_path)
        (state / STATUS_FILE).unlink()
        assert SILENT in refusal(tmp_path)


def test_a_status_that_cannot_be_written_is_written_once_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptor(*arguments: object, **options: object) -> int:
        raise OSError(24, "Too many open files")

    status = ClientStatus("north")
    with running(status, tmp_path) as state:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", no_descriptor)
            status.round = 7
            time.sleep(2)
        assert read_when(state, lambda present: present["round"] == 7)["site"] == "north"
