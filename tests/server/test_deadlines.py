"""What ``flwr-server deadlines`` says is what holds."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from common.config import read_experiment
from common.system import timers as of_sites
from server.deployment.superlink import control_client as control
from server.deployment.superlink import network_grid, process
from server.deployment.superlink import registrations as runs
from server.deployment.superlink.registrations import PATIENCE
from server.deployment.timers import ORDER, TimerOrder, list_timers, timer_order_faults, timers_table
from server.federation.benefit import benefit_deadline_s
from strategies.engine import membership
from tests.federations import DIGITS
from tests.network.real import flwr_server, ready_to_lead

RUN = """
[participation]
roll_call_deadline_s = 41
round_deadline_s = 977
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(DIGITS + RUN, encoding="utf-8")
    return tmp_path / "run.toml"


def test_a_runs_own_deadlines_are_those_of_its_experiment(experiment: Path) -> None:
    listed = {
        timer.name: (timer.seconds, timer.source) for timer in list_timers(read_experiment(experiment).experiment)
    }
    assert listed["participation.roll_call_deadline_s"] == (41, "the experiment")
    assert listed["participation.round_deadline_s"] == (977, "the experiment")


def test_without_an_experiment_the_defaults_are_listed_and_called_so(experiment: Path) -> None:
    experiment.write_text(DIGITS, encoding="utf-8")
    section = read_experiment(experiment).experiment.participation
    listed = {timer.name: (timer.seconds, timer.source) for timer in list_timers(None)}
    default = "the experiment (here: default)"
    assert listed["participation.roll_call_deadline_s"] == (section.roll_call_deadline_s, default)
    assert listed["participation.round_deadline_s"] == (section.round_deadline_s, default)


INTERNAL = {
    "POLL_S",  # with LOOK_S: how often files are looked for; nothing else happens
    "LOOK_S",
    "FIRST_POLL_S",  # the shortest pause between two looks for replies; nothing else happens
    "FIRST_RETRY_S",  # the shortest pause between a site's tries; the longest is listed
    "HEARTBEAT_INTERVAL_S",  # listed as what follows from it
    "PAUSE_S",  # before a call to a SuperLink that is away is made again; how long for is listed
    "SHOWN_AFTER_S",  # who is waited for is said; nothing else happens
}


@pytest.mark.parametrize("module", [of_sites, membership, control, network_grid, process, runs])
def test_every_timer_that_a_module_has_is_listed(module: object) -> None:
    constants = {name: value for name, value in vars(module).items() if name.isupper() and name.endswith("_S")}
    listed = [timer.seconds for timer in list_timers(None)]
    assert constants
    assert [name for name, value in constants.items() if name not in INTERNAL and value not in listed] == []


def test_a_site_is_taken_for_lost_when_the_superlink_does_so() -> None:
    (lost,) = (timer.seconds for timer in list_timers(None) if timer.name == "site taken for lost")
    assert lost == PATIENCE * of_sites.HEARTBEAT_INTERVAL_S
    assert lost > 2 * of_sites.HEARTBEAT_PAUSE_S  # one sign of life may get lost


def test_the_timers_are_in_order_as_they_come() -> None:
    assert timer_order_faults(list_timers(None)) == []


@pytest.mark.parametrize("key", ["round_deadline_s", "roll_call_deadline_s"])
def test_a_deadline_too_short_for_what_has_to_fit_inside_it_is_refused_and_both_are_named(
    experiment: Path, key: str
) -> None:
    inner = of_sites.HEARTBEAT_PAUSE_S
    (fault,) = timer_order_faults(list_timers(read_experiment(experiment, [f"participation.{key}={inner}"]).experiment))
    assert fault.where == f"participation.{key}"
    assert f"is {inner:g} s (the experiment), but heartbeat of a site, {inner:g} s (fixed)" in fault.problem
    assert (
        timer_order_faults(list_timers(read_experiment(experiment, [f"participation.{key}={inner + 1}"]).experiment))
        == []
    )


@pytest.mark.parametrize("pair", ORDER, ids=lambda pair: f"{pair.inner} in {pair.outer}")
def test_every_timer_that_is_too_long_for_the_one_around_it_is_told(pair: TimerOrder) -> None:
    found = [replace(one, seconds=10_000) if one.name == pair.inner else one for one in list_timers(None)]
    assert pair.outer in [fault.where for fault in timer_order_faults(found)]


def test_training_alone_has_a_deadline_where_the_experiment_asks_for_it(experiment: Path) -> None:
    named = lambda *overrides: {t.name: t for t in list_timers(read_experiment(experiment, overrides).experiment)}  # noqa: E731
    assert "evaluation.compare_local, after the test" not in named()
    timer = named("evaluation.compare_local=true")["evaluation.compare_local, after the test"]
    assert timer.seconds == benefit_deadline_s(977, rounds_took_s=0.0, drawn=1.0)
    assert timer.seconds + 2 * 100 == benefit_deadline_s(977, rounds_took_s=100.0, drawn=1.0)
    assert "plus 2 times what all rounds took" in timer.source


def test_flwr_server_run_refuses_a_deadline_out_of_order_before_anybody_is_asked(
    experiment: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    override = "participation.round_deadline_s=2"
    with ready_to_lead(tmp_path) as folder:
        ended = flwr_server("run", folder, experiment, "--out", tmp_path / "run", "--set", override)
    assert ended.code == 2  # said by the process that leads the run, not by this one
    assert "run.toml: participation.round_deadline_s: is 2 s (the experiment)" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_no_two_timers_have_one_name() -> None:
    names = [timer.name for timer in list_timers(None)]
    assert len(set(names)) == len(names)


def test_a_person_sees_every_timer_with_its_seconds_its_source_and_its_effect() -> None:
    screen = io.StringIO()
    Console(file=screen, width=250).print(timers_table(list_timers(None)))
    lines = [line.strip() for line in screen.getvalue().splitlines()]
    for timer in list_timers(None):
        assert any(
            line.split(maxsplit=1) == [f"{timer.seconds:g}", f"{timer.name} ({timer.source}):"] for line in lines
        )
        assert timer.effect in lines


def test_the_command_lists_the_same_for_a_machine(experiment: Path, tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    assert flwr_server("init", folder, "--name", "trial", "--host", "fl.example").code == 0
    ended = flwr_server("deadlines", folder, experiment, "--json")
    found = [timer.__dict__ for timer in list_timers(read_experiment(experiment).experiment)]
    assert (ended.code, json.loads(ended.out)) == (0, found)
