"""What a coordinator's commands can say of its runs and its timers."""

import io
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from polyclinic.common.config import read_experiment
from polyclinic.common.models.network import Head
from polyclinic.common.models.state import ModelState
from polyclinic.common.system import timers as of_sites
from polyclinic.common.wire.versions import WIRE_VERSION
from polyclinic.server.cli import app
from polyclinic.server.coordinator.folder import CoordinatorFolder
from polyclinic.server.deployment.status import format_runs_table, format_server_status
from polyclinic.server.deployment.superlink import control_client as control
from polyclinic.server.deployment.superlink import network_grid, process
from polyclinic.server.deployment.superlink import registrations as runs
from polyclinic.server.deployment.superlink.registrations import MAX_MISSED_HEARTBEATS
from polyclinic.server.deployment.timers import (
    TIMER_ORDER,
    TimerSetting,
    find_timer_order_faults,
    list_timer_settings,
    make_timer_table,
)
from polyclinic.server.federation.benefit import compute_comparison_deadline_s
from polyclinic.server.runs.folder import RunFolder
from polyclinic.server.runs.live_status import (
    HISTORY_FILE,
    CurrentRun,
    add_to_run_history,
    describe_site_activity,
    read_last_run_state,
    read_run_history,
)
from polyclinic.server.runs.reporter import RunReporter
from polyclinic.strategies.engine import membership
from polyclinic.strategies.engine.events import FederationValidation, MissingReplyStatus, RoundRecord
from polyclinic.strategies.engine.state import FederationState
from tests.federations import DIGITS
from tests.network.real import flwr_server, lines_of, ready_to_lead

MODEL = ModelState(
    np.zeros(1, np.float32), np.zeros(1, np.float32), Head((), np.zeros((0, 1), np.float32), np.zeros(0, np.float32))
)


STATUS: dict[str, Any] = {
    "name": "trial",
    "address": "",
    "superlink": "up",
    "certificate_days": 9.0,
    "sites": {},
    "time": 40.0,
    "release": "0",
}


def status_lines(present: CurrentRun, **facts: Any) -> list[str]:
    """Return the last part of ``flwr-server status``, about the run."""
    words = format_server_status({**STATUS, **facts, "runs": [vars(present)]}).renderables[-1]  # type: ignore[attr-defined]
    return str(words).splitlines()


def present_in(folder: Path) -> CurrentRun:
    present = read_last_run_state(folder)
    assert present is not None
    return present


def finish(reporter: RunReporter, number: int, *, sites: Sequence[str] = ("east",), **facts: Any) -> None:
    """Report the end of a round."""
    empty: dict[str, Any] = {"absent": {}, "site_seconds": {}, "bytes_down": {}, "bytes_up": {}}
    result = {"train_loss": {"east": 0.5}, "validation": FederationValidation(), "seconds": 1.0}
    record = RoundRecord(number, tuple(sites), aggregate_seconds=0.1, **{**empty, **result, **facts})
    reporter.show_finished_round(record, FederationState(number, MODEL))


Lines = list[str]


@pytest.fixture
def lines() -> Lines:
    """The lines that the reporter prints."""
    return []


def test_status_has_every_sites_last_exclusion_and_update_that_was_too_long(tmp_path: Path, lines: Lines) -> None:
    with RunReporter(CurrentRun("run", "trial"), tmp_path, lines.append) as reporter:
        reporter.show_run_start(["east", "north", "south"], 3)
        finish(reporter, 1, absent={"north": "trunk was expected", "south": "disk full"})
        finish(reporter, 2, absent={"north": "NaN"}, shortened={"south": "its trunk was 9 times"})
    present = present_in(tmp_path)
    assert present.left_out == {"north": "round 2: NaN", "south": "round 1: disk full"}
    assert present.shortened == {"south": "round 2: its trunk was 9 times"}
    assert "round 2: the update of south is too long: its trunk was 9 times" in lines
    assert {
        "north was left out of round 2: NaN",
        "south was left out of round 1: disk full",
        "south sent too long an update in round 2: its trunk was 9 times",
    } <= set(status_lines(present))


AT = "2026-11-24 06:52:27+00:00"


def test_a_sign_off_is_reported_once_and_of_a_lost_site_that_contact_was_lost(tmp_path: Path, lines: Lines) -> None:
    signed_off = {"south": AT}
    with RunReporter(CurrentRun("run", "trial"), tmp_path, lines.append, lambda: signed_off) as reporter:
        reporter.show_run_start(["east", "north", "south"], 3)
        for number in (1, 2):
            reporter.show_waiting_sites(
                MissingReplyStatus("train", number, ("north", "south"), ("north", "south"), 600.0)
            )
            finish(reporter, number, absent={"north": "it is not connected", "south": f"signed off at {AT}"})
        now = present_in(tmp_path)
        assert now.stopped == {"south": AT}
        parts = [describe_site_activity(now, site) for site in ("north", "south")]
        assert parts == ["lost, may come back", f"signed off at {AT}"]
        signed_off.clear()
        finish(reporter, 3, sites=("east", "north", "south"))
        now = present_in(tmp_path)
        assert (list(now.lost), now.stopped) == ([], {})
    (lost,) = (line for line in lines if "lost contact" in line)
    assert lost.startswith("lost contact with north")
    assert sum(line.startswith(f"south signed off at {AT}") for line in lines) == 1


def test_a_site_that_was_stopped_and_is_waited_for_all_the_same_is_said_to_be_stopped() -> None:
    present = CurrentRun("run", "trial", rounds=3, waiting_for=("north", "south"), lost=("south",), deadline=100.0)
    same: dict[str, Any] = {"fingerprint": "", "classes": [], "max_images": 0}
    sites = {"north": {"state": "connected", **same}, "south": {"state": "stopped", "stopped": AT, **same}}
    line = f"waiting for north, south (signed off at {AT}), at most 60 s more"
    assert any(line in text for text in status_lines(present, sites=sites))


def test_events_have_a_stopped_site_once_and_again_when_it_is_stopped_again(tmp_path: Path) -> None:
    folder, at = RunFolder(tmp_path), "signed off at 06:52"
    folder.append_absence_events(1, {"south": at, "north": "NaN"}, ["east"])
    folder.append_absence_events("evaluate", {"south": at})
    folder.append_absence_events(2, {"south": at, "north": "NaN"}, ["east"])
    folder.append_absence_events(3, {}, ["east", "north", "south"])
    folder.append_absence_events(4, {"south": at}, ["east", "north"])
    events = lines_of(tmp_path / "events.jsonl")
    assert [(e["round"], e["site"]) for e in events] == [(1, "south"), (1, "north"), (2, "north"), (4, "south")]


def test_a_lost_site_is_lost_until_it_took_part_again_and_each_is_said_once(tmp_path: Path, lines: Lines) -> None:
    reason = "it is not connected: stopped, or cut off"
    with RunReporter(CurrentRun("run", "trial"), tmp_path, lines.append) as reporter:
        reporter.show_run_start(["east", "south"], 4)
        for number in (1, 2, 3):
            # It is asked, as it may be back.
            reporter.show_waiting_sites(MissingReplyStatus("train", number, ("east", "south"), (), 600.0))
            reporter.show_waiting_sites(MissingReplyStatus("train", number, ("south",), ("south",), 600.0))
            finish(reporter, number, absent={"south": reason})
            assert list(present_in(tmp_path).lost) == ["south"]
        reporter.show_waiting_sites(MissingReplyStatus("train", 4, ("east", "south"), (), 600.0))
        assert not any("south is back" in line for line in lines)
        finish(reporter, 4, sites=("east", "south"))
        assert list(present_in(tmp_path).lost) == []
    assert sum(line.startswith("lost contact with south") for line in lines) == 1
    assert [line for line in lines if "went without" in line] == [f"round 1 went without south: {reason}"]
    assert [line for line in lines if "south is back" in line] == ["south is back: it took part in round 4"]
    assert sum("1 of 2 sites, without south" in line for line in lines) == 3


def led(state: Path, folder: Path, name: str, error: BaseException | None = None, *, resumed: bool = False) -> None:
    """Lead a run of two rounds that ends by itself, or by an error after the first."""
    folder.mkdir(exist_ok=True)
    (folder / "events.jsonl").touch()
    present = CurrentRun(str(folder), name, resumed=resumed)
    try:
        with RunReporter(
            present, state, lambda line: None, add_to_history=partial(add_to_run_history, state)
        ) as reporter:
            reporter.show_run_start(["east", "west"], 2)
            present.round = 1
            if error:
                raise error
            present.round = 2
    except (RuntimeError, SystemExit):
        pass


def test_each_run_is_listed_once_with_its_end(tmp_path: Path) -> None:
    led(tmp_path, tmp_path / "one", "whole")
    led(tmp_path, tmp_path / "two", "too few", RuntimeError("1 of 2 sites answered"))
    led(tmp_path, tmp_path / "two", "resumed", SystemExit(130))
    whole, failed, stopped = read_run_history(tmp_path)
    assert [run["state"] for run in (whole, failed, stopped)] == ["done", "stopped", "interrupted"]
    assert [(run["round"], run["rounds"]) for run in (whole, failed)] == [(2, 2), (1, 2)]
    assert failed["last_error"] == "1 of 2 sites answered"
    assert whole["ended"] >= whole["began"]


def test_a_run_that_is_resumed_is_listed_once_and_another_one_in_its_folder_is_another(tmp_path: Path) -> None:
    led(tmp_path, tmp_path / "one", "first", SystemExit(130))
    led(tmp_path, tmp_path / "one", "first", RuntimeError("1 of 2 sites answered"), resumed=True)
    (stopped,) = read_run_history(tmp_path)
    led(tmp_path, tmp_path / "one", "first", resumed=True)
    led(tmp_path, tmp_path / "other", "other")
    led(tmp_path, tmp_path / "one", "second")
    first, other, second = read_run_history(tmp_path)
    assert [run["state"] for run in (stopped, first, other, second)] == ["stopped", "done", "done", "done"]
    assert first["began"] == stopped["began"] < other["began"] < second["began"]


def test_a_run_whose_process_was_killed_is_interrupted_and_one_at_work_is_running(tmp_path: Path) -> None:
    for name, pid in (("killed", 2**22 + 1), ("at work", os.getpid())):
        line = {**vars(CurrentRun(name, name)), "pid": pid, "began": 1.0, "noted": 1.0}
        with (tmp_path / HISTORY_FILE).open("a") as file:
            file.write(json.dumps(line) + "\n")
    with (tmp_path / HISTORY_FILE).open("a") as file:
        file.write('{"cut off by a ki')
    assert [(run["name"], run["state"], run["ended"]) for run in read_run_history(tmp_path)] == [
        ("killed", "interrupted", None),
        ("at work", "running", None),
    ]


def test_a_folder_that_is_gone_is_named_so(tmp_path: Path) -> None:
    led(tmp_path, tmp_path / "there", "there")
    led(tmp_path, tmp_path / "archived", "archived")
    (tmp_path / "archived").rename(tmp_path / "elsewhere")
    console = Console(width=400, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(format_runs_table(read_run_history(tmp_path)))
    lines = [line for line in console.export_text().splitlines() if "done" in line]
    assert ["(moved or removed)" in line for line in lines] == [False, True]


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_lists_them(coordinator: CoordinatorFolder, tmp_path: Path, as_json: bool) -> None:
    arguments = ["runs", str(coordinator.folder), *(["--json"] if as_json else [])]
    before = CliRunner().invoke(app, arguments)
    assert (before.exit_code, before.stdout.strip()) == (0, "[]" if as_json else "no run yet")
    led(coordinator.state_path, tmp_path / "one", "whole")
    after = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert after.exit_code == 0
    assert "whole" in after.stdout
    assert not as_json or json.loads(after.stdout)[0]["state"] == "done"


RUN = """
[participation]
roll_call_deadline_s = 41
round_deadline_s = 977
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(DIGITS + RUN, encoding="utf-8")
    return tmp_path / "run.toml"


def timers_of(path: Path, *overrides: str) -> list[TimerSetting]:
    return list_timer_settings(read_experiment(path, overrides).experiment)


def by_name(timers: list[TimerSetting]) -> dict[str, tuple[float, str]]:
    return {timer.name: (timer.seconds, timer.source) for timer in timers}


def test_a_runs_deadlines_are_those_of_its_experiment_and_else_the_defaults(experiment: Path) -> None:
    own, default = by_name(timers_of(experiment)), by_name(list_timer_settings(None))
    experiment.write_text(DIGITS, encoding="utf-8")
    section = read_experiment(experiment).experiment.participation
    for name, seconds in (("roll_call_deadline_s", 41), ("round_deadline_s", 977)):
        assert own[f"participation.{name}"] == (seconds, "the experiment")
        assert default[f"participation.{name}"] == (getattr(section, name), "the experiment (here: default)")


INTERNAL = {
    "FILE_TIMEOUT_S",  # with FILE_POLL_INTERVAL_S: how often files are looked for; nothing else happens
    "FILE_POLL_INTERVAL_S",
    "POLL_S",  # the same of a site's messages
    "FIRST_POLL_S",  # the shortest pause between two looks for replies; nothing else happens
    "FIRST_RETRY_S",  # the shortest pause between a site's tries; the longest is listed
    "HEARTBEAT_INTERVAL_S",  # listed as what follows from it
    "RETRY_DELAY_S",  # before a call to a SuperLink that is away is made again; how long for is listed
    "REPORT_INTERVAL_S",  # how often a long list of who is waited for is said; nothing else happens
    "REPORT_DELAY_S",  # who is waited for is said; nothing else happens
}


def test_every_timer_is_listed_under_a_name_of_its_own_and_in_order() -> None:
    timers = list_timer_settings(None)
    listed = [timer.seconds for timer in timers]
    for module in (of_sites, membership, control, network_grid, process, runs):
        constants = {name: value for name, value in vars(module).items() if name.isupper() and name.endswith("_S")}
        assert constants, module
        assert [name for name, value in constants.items() if name not in INTERNAL and value not in listed] == []
    assert (find_timer_order_faults(timers), len(by_name(timers))) == ([], len(timers))


def test_a_site_is_taken_for_lost_when_the_superlink_does_so() -> None:
    lost, _ = by_name(list_timer_settings(None))["site taken for lost"]
    assert lost == MAX_MISSED_HEARTBEATS * of_sites.HEARTBEAT_INTERVAL_S
    assert lost > 2 * of_sites.HEARTBEAT_PAUSE_S  # one sign of life may get lost


def test_a_deadline_too_short_for_its_inner_timer_is_refused_and_both_are_named(experiment: Path) -> None:
    inner = of_sites.HEARTBEAT_PAUSE_S
    for key in ("participation.round_deadline_s", "participation.roll_call_deadline_s"):
        (fault,) = find_timer_order_faults(timers_of(experiment, f"{key}={inner}"))
        assert (fault.where, f"heartbeat of a site, {inner:g} s (fixed)" in fault.problem) == (key, True)
        assert find_timer_order_faults(timers_of(experiment, f"{key}={inner + 1}")) == []


def test_every_timer_that_is_too_long_for_its_outer_one_is_a_fault() -> None:
    for pair in TIMER_ORDER:
        timers = [
            replace(timer, seconds=10_000) if timer.name == pair.inner else timer for timer in list_timer_settings(None)
        ]
        assert pair.outer in [fault.where for fault in find_timer_order_faults(timers)], pair


def test_training_alone_has_a_deadline_where_the_experiment_asks_for_it(experiment: Path) -> None:
    name = "evaluation.compare_local, after the test"
    assert name not in by_name(timers_of(experiment))
    seconds, source = by_name(timers_of(experiment, "evaluation.compare_local=true"))[name]
    assert seconds == compute_comparison_deadline_s(977, all_rounds_s=0.0, drawn_share=1.0)
    assert seconds + 2 * 100 == compute_comparison_deadline_s(977, all_rounds_s=100.0, drawn_share=1.0)
    assert "plus 2 times what all rounds took" in source


def test_flwr_server_run_refuses_a_deadline_out_of_order_before_anybody_is_asked(
    experiment: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    override = "participation.round_deadline_s=2"
    with ready_to_lead(tmp_path) as folder:
        ended = flwr_server("run", folder, experiment, "--out", tmp_path / "run", "--set", override)
    assert ended.code == 2  # said by the process that leads the run, not by this one
    assert "run.toml: participation.round_deadline_s: is 2 s (the experiment)" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_person_sees_every_timer_with_its_seconds_its_source_and_its_effect() -> None:
    screen = io.StringIO()
    Console(file=screen, width=250).print(make_timer_table(list_timer_settings(None)))
    lines = [line.strip().split(maxsplit=1) for line in screen.getvalue().splitlines()]
    for timer in list_timer_settings(None):
        assert [f"{timer.seconds:g}", f"{timer.name} ({timer.source}):"] in lines
        assert timer.effect.split(maxsplit=1) in lines


def test_the_command_lists_the_same_for_a_machine(experiment: Path, coordinator: CoordinatorFolder) -> None:
    ended = flwr_server("deadlines", coordinator.folder, experiment, "--json")
    assert (ended.code, json.loads(ended.out)) == (0, [vars(timer) for timer in timers_of(experiment)])


@pytest.mark.parametrize(
    ("wire", "words"),
    [
        (None, ""),
        (WIRE_VERSION, ""),
        (WIRE_VERSION - 1, "north has to update: its release 9.9.9 speaks wire version"),
        (WIRE_VERSION + 1, "north is ahead: its release 9.9.9 speaks wire version"),
    ],
)
def test_status_names_the_sites_that_have_to_update(wire: int | None, words: str) -> None:
    site = {"state": "connected", "classes": [], "max_images": None, "fingerprint": "f", "release": "9.9.9"}
    group = format_server_status({**STATUS, "sites": {"north": {**site, "wire": wire}}, "runs": []})
    said = [str(part) for part in group.renderables if "wire version" in str(part)]  # type: ignore[attr-defined]
    assert [line[: len(words)] for line in said] == ([words] if words else [])
