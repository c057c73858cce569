"""The pass from hospital to hospital, against sites that answer by hand; and whole runs on real digits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyclinic.common.config import ParticipationSection
from polyclinic.common.models.network import Head
from polyclinic.common.models.state import ModelState
from polyclinic.common.wire.records import (
    EvaluateReply,
    EvaluateRequest,
    ModelGroups,
    RollCall,
    RollCallAnswer,
    TrainReply,
    TrainRequest,
)
from polyclinic.server.simulation.backends.inline import run_with_inline_grid
from polyclinic.strategies.engine.coordinator import Coordinator
from polyclinic.strategies.engine.events import RoundRecord, RunStopped, TooFewSites
from polyclinic.strategies.engine.sequential import make_coordinator
from polyclinic.strategies.engine.state import make_model_array_record
from polyclinic.strategies.methods.unifed import SequentialTraining, UniFed
from tests.federations import Traffic, federation, json_lines, needs_of, read_vectors
from tests.strategies.leading import Noted, app_of, small_plan

VECTOR = read_vectors("unifed.json")
Requests = list[tuple[int, str, float]]
"""Round, site and the model's one value of every request to train."""


@dataclass(frozen=True)
class Hospital:
    """Adds its step to the model; tells these slopes, one a round from the ranking on.

    Attributes:
        fails_in: Rounds in which it sends an error.
        losses: Validation loss of the model after round 1, 2, ...
        requests: What was asked of all sites of a run; one list for all.
    """

    site: str
    step: float
    slopes: Sequence[float] = (0.0,) * 9
    fails_in: tuple[int, ...] = ()
    losses: Sequence[float] = (0.5,) * 9
    requests: Requests = field(default_factory=list)

    def called(self, call: RollCall) -> RollCallAnswer:
        return RollCallAnswer(call.run, self.site, (self.site,), (self.site,), 10, 5, 9, "layout", "1")

    def trained(self, request: TrainRequest) -> TrainReply:
        self.requests.append((request.round, self.site, float(request.model.trunk[0])))
        if request.round in self.fails_in:
            raise OSError("No space left on device")
        assert request.model.head is not None
        rows = request.model.head
        head = Head(rows.class_names, np.zeros_like(rows.weight), np.zeros_like(rows.bias))
        moved = ModelGroups(np.full_like(request.model.trunk, self.step), np.zeros(0, np.float32), head)
        slope = {"slope": np.array([self.slopes[request.round]], np.float32)}
        update = ModelGroups() if request.is_ranking_round else moved
        return TrainReply(request.run, request.round, self.site, 10, 0.5, None, None, 1.0, update, 2, slope)

    def judged(self, request: EvaluateRequest) -> EvaluateReply:
        loss = self.losses[request.round - 1]
        return EvaluateReply(request.run, request.round, self.site, loss, None, (), (), (), (), (), (), "hash")


@dataclass
class Passed:
    """A finished run, and what was asked of its sites."""

    coordinator: Coordinator
    records: list[RoundRecord]
    requests: Requests
    absences: list[tuple[str, Mapping[str, str]]]

    def hops(self, server_round: int) -> list[tuple[str, float]]:
        return [(site, value) for number, site, value in self.requests if number == server_round]


class HospitalsAlone(UniFed):
    """UniFed without the coordinator's own training."""

    server_training_settings = None


def passed(
    hospitals: Sequence[Hospital],
    begin: float = 0.0,
    rounds: int = 1,
    method: str = "unifed",
    requests: Requests | None = None,
    **participation: Any,
) -> Passed:
    """Pass a model of one value through the hospitals; the coordinator does not train."""
    section = ParticipationSection(roll_call_deadline_s=5.0, clip="off", **participation)  # every step is a constant
    kind, noted = {"unifed": HospitalsAlone, "fedseq": SequentialTraining}[method], Noted()
    coordinator = make_coordinator(kind(), small_plan(method), section, "run-1", callbacks=noted)
    requests = [] if requests is None else requests

    def main(grid: Any) -> None:
        names = coordinator.sites.call_roll(grid, len(hospitals)).class_names
        head = Head(names, np.zeros((len(names), 2), np.float32), np.zeros(len(names), np.float32))
        model = ModelState(np.array([begin], np.float32), np.zeros(0, np.float32), head)
        coordinator.start(grid, make_model_array_record(model), rounds)

    run_with_inline_grid(main, app_of([replace(hospital, requests=requests) for hospital in hospitals]), len(hospitals))
    return Passed(coordinator, noted.records, requests, noted.absences)


@pytest.mark.skipif(not VECTOR, reason="../shared/vectors/unifed.json is absent")
def test_who_starts_from_what_is_the_papers() -> None:
    vector = VECTOR["sequential_pass"]
    begin, after = vector["expected_paper"]["server_model_theta_t"], vector["expected_paper"]["weights_after"]
    rank = {site: float(place) for place, site in enumerate(vector["order"])}
    hospitals = [Hospital(f"{site}", step, (rank[site],) * 9) for site, step in enumerate(vector["client_update"])]
    ran = passed(hospitals, begin)
    begins = [begin, *(after[str(site)] for site in vector["order"][:-1])]
    assert ran.hops(1) == [(str(site), value) for site, value in zip(vector["order"], begins, strict=True)]
    assert float(ran.coordinator.state.model.trunk[0]) == vector["expected_paper"]["returned"]


HOSPITALS = (
    Hospital("east", 1.0, (-0.1, -0.5, 0.0)),
    Hospital("north", 10.0, (-0.3, -0.1, 0.0)),
    Hospital("south", 100.0, (-0.2, -0.3, 0.0)),
)
NAMES = {hospital.site for hospital in HOSPITALS}


def test_the_order_follows_the_slopes_that_each_site_last_told_and_what_it_did_is_counted() -> None:
    ran = passed(HOSPITALS, rounds=2)
    assert [site for site, _ in ran.hops(0)] == ["east", "north", "south"]
    assert {value for _, value in ran.hops(0)} == {0.0}
    assert ran.hops(1) == [("north", 0.0), ("south", 10.0), ("east", 110.0)]
    assert ran.hops(2) == [("east", 111.0), ("south", 112.0), ("north", 212.0)]
    assert [record.sites for record in ran.records] == [("north", "south", "east"), ("east", "south", "north")]
    for record in ran.records:
        assert all(set(sizes) == NAMES and min(sizes.values()) > 0 for sizes in (record.bytes_down, record.bytes_up))
        assert (record.epochs, record.site_seconds) == (dict.fromkeys(NAMES, 2), dict.fromkeys(NAMES, 1.0))


def test_fedseq_goes_round_by_name_and_ranks_nobody() -> None:
    silent = [Hospital(hospital.site, hospital.step) for hospital in HOSPITALS]
    with pytest.raises(TooFewSites, match="statistics are"):
        passed(silent, method="fedseq")


def test_a_lost_hospital_is_skipped_and_told_of_and_the_model_goes_on() -> None:
    broken = (*HOSPITALS[:2], replace(HOSPITALS[2], fails_in=(1,)))
    ran = passed(broken, rounds=2, min_sites=2)
    assert ran.hops(1) == [("north", 0.0), ("south", 10.0), ("east", 10.0)]
    assert "No space left" in ran.records[0].absent["south"]
    # its slope is that of the ranking
    assert ran.hops(2) == [("east", 11.0), ("south", 12.0), ("north", 112.0)]


def test_a_pass_that_can_no_longer_reach_enough_hospitals_asks_nobody_else() -> None:
    broken = (Hospital("east", 1.0, (-3.0,) * 9, fails_in=(1,)), *HOSPITALS[1:])
    with pytest.raises(TooFewSites, match=r"round 1: 0 of 3 sites replied\. east: .*No space left"):
        passed(broken, min_sites=3)
    requests = Requests()
    with pytest.raises(TooFewSites):
        passed(broken, requests=requests)
    assert [site for number, site, _ in requests if number == 1] == ["east"]


def test_who_was_absent_at_the_ranking_is_told_and_comes_last() -> None:
    broken = (Hospital("east", 1.0, (-3.0,) * 9, fails_in=(0,)), *HOSPITALS[1:])
    ran = passed(broken, min_sites=2)
    assert [(phase, list(absent)) for phase, absent in ran.absences] == [("ranking", ["east"])]
    assert [site for site, _ in ran.hops(1)] == ["north", "south", "east"]


def test_a_coordinator_whose_own_training_diverges_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    steep = ("training.optimizer=sgd", "training.lr=1e30", "training.momentum=0.9")
    with pytest.raises(RunStopped, match=r"round 1, the coordinator's own training: .*not all numbers are finite"):
        federation(tmp_path, "run.method=server_only", *needs_of("server_only"), *steep)
    assert json_lines(tmp_path / "run" / "events.jsonl")[-1]["event"] == "stopped"


def test_without_images_of_the_coordinators_own_the_sites_say_which_round_was_best() -> None:
    judging = [replace(hospital, losses=(0.5, 0.25, 0.75)) for hospital in HOSPITALS]
    assert passed(judging, rounds=2).coordinator.state.best_round == 2


def test_the_run_ends_where_the_coordinators_loss_has_not_fallen_for_long_enough(tmp_path: Path) -> None:
    needs = (*needs_of("server_only"), "method.global_patience=1", "training.lr=1e-9", "run.rounds=9")
    summary = federation(tmp_path, "run.method=server_only", *needs)
    assert summary["rounds"] < 9


def test_unifed_writes_epochs_order_and_slopes_into_every_line(tmp_path: Path, traffic: Traffic) -> None:
    summary = federation(tmp_path, "run.method=unifed", *needs_of("unifed"), "method.patience=1")
    lines = json_lines(tmp_path / "run" / "rounds.jsonl")
    assert [line["round"] for line in lines] == [1, 2]
    for line in lines:
        assert set(line["epochs"]) == set(line["sites"]) == {"site-1", "site-2", "site-3"}
        assert line["coordinator"]["epochs"] >= 1
        assert line["validation_loss"] > 0
    for site, facts in summary["sites"].items():
        assert facts["epochs"] == sum(line["epochs"][site] for line in lines)
        assert facts["seconds"] == pytest.approx(sum(line["site_seconds"][site] for line in lines))
    slopes = {
        number: {reply.site: float(reply.statistics["slope"][0]) for reply in traffic.replies if reply.round == number}
        for number in range(3)
    }
    assert lines[0]["sites"] == sorted(slopes[0], key=lambda site: slopes[0][site])
    assert [line["learned"] for line in lines] == [{"slopes": slopes[1]}, {"slopes": slopes[2]}]


def test_with_the_hospitals_weighing_nothing_unifed_ends_where_the_coordinator_alone_does(tmp_path: Path) -> None:
    alone = federation(tmp_path, "run.method=server_only", *needs_of("server_only"), out="alone")
    mixed = federation(tmp_path, "run.method=unifed", *needs_of("unifed"), "method.alpha=0.0", out="mixed")
    assert mixed["model_sha256"] == alone["model_sha256"]
