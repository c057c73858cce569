"""What a replay of a run's times says, by cases worked by hand."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from common.config import ParticipationSection
from common.errors import BadInput
from server.planning import Past, WhatIf, past_of, replay, seconds_of, suggested_deadline_s, what_if_of
from server.planning_tables import plan_of
from server.run_files import RoundRecord
from tests.network.real import flwr_server

IMAGES = {"east": 100, "north": 50, "south": 10}


def past(
    *rounds: Mapping[str, float | str],
    beside_s: float = 0.0,
    passing: bool = False,
    section: ParticipationSection | None = None,
) -> Past:
    """Rounds of these sites: a number is what one took, a text is why it was absent."""
    section = section or ParticipationSection(roll_call_deadline_s=300, round_deadline_s=3600)
    records = []
    for number, sites in enumerate(rounds, start=1):
        seconds = {name: value for name, value in sites.items() if not isinstance(value, str)}
        absent = {name: value for name, value in sites.items() if isinstance(value, str)}
        took = (sum if passing else max)(seconds.values()) + beside_s
        records.append(
            RoundRecord(round=number, sites=tuple(seconds), absent=absent, site_seconds=seconds, seconds=took)
        )
    return Past(tuple(records), IMAGES, section, beside_s, passing)


THREE = {"east": 60.0, "north": 90.0, "south": 30.0}


def test_with_nothing_changed_the_replay_is_the_run() -> None:
    done = replay(past(THREE, THREE, beside_s=5), WhatIf(0, 3600))
    assert [each.seconds for each in done.rounds] == [95, 95]  # the slowest, and what a round takes beside training
    assert (done.stopped, done.hours_lost, done.images_lost) == ("", 0, 0)


def test_a_late_site_is_waited_for_where_all_are_needed_and_the_deadline_allows_it() -> None:
    done = replay(past(THREE), WhatIf(0, 3600, late={"south": 1800}))
    assert done.rounds[0].seconds == 1830
    assert done.rounds[0].counted == ("east", "north", "south")
    assert done.hours_lost == (1830 - 90) / 3600


def test_a_late_site_beyond_the_deadline_costs_the_deadline_and_its_own_images() -> None:
    done = replay(past(THREE, THREE), WhatIf(2, 600, late={"south": 7200}))
    assert [each.seconds for each in done.rounds] == [600, 600]
    assert done.rounds[0].left_out == {"south": "7230 s, 6630 s too late"}
    assert done.images_lost == 2 * 10
    assert done.images_share == 20 / 320


def test_with_all_sites_needed_a_late_one_stops_the_run_and_the_rest_is_lost() -> None:
    done = replay(past(THREE, THREE), WhatIf(0, 600, late={"north": 7200}))
    assert done.stopped == "it would have stopped in round 1: 2 of 3 in time"
    assert (len(done.rounds), done.seconds, done.images_lost) == (1, 600, 320)


def test_a_dropped_site_is_waited_for_once_at_the_roll_call_and_never_again() -> None:
    done = replay(past(THREE, THREE), WhatIf(2, 3600, dropped=frozenset({"north"})))
    assert done.seconds == 300 + 60 + 60
    assert [each.counted for each in done.rounds] == [("east", "south")] * 2
    assert done.images_lost == 2 * 50


def test_without_a_site_that_is_needed_the_run_does_not_begin() -> None:
    done = replay(past(THREE), WhatIf(0, 3600, dropped=frozenset({"north"})))
    assert done.stopped == "it would not have begun: 2 of 3 sites at the roll call"
    assert (done.rounds, done.seconds, done.images_lost) == ((), 300, 160)


def test_a_site_that_had_not_replied_is_waited_for_again_and_a_lost_one_is_not() -> None:
    silent = {"east": 60.0, "south": 30.0, "north": "no reply within 3600 s"}
    gone = {"east": 60.0, "south": 30.0, "north": "lost on the way"}
    done = replay(past(silent, gone), WhatIf(2, 120))
    assert [each.seconds for each in done.rounds] == [120, 60]
    assert done.rounds[0].left_out == {"north": "absent, as recorded: no reply within 3600 s"}
    assert done.images_lost == 0  # nor had the run learnt from them


def test_in_a_pass_times_add_up_and_each_hospital_has_the_deadline_for_itself() -> None:
    done = replay(past(THREE, beside_s=7, passing=True), WhatIf(2, 80))
    assert done.rounds[0].seconds == 60 + 80 + 30 + 7
    assert done.rounds[0].counted == ("east", "south")


def test_a_site_that_was_not_drawn_for_a_round_is_not_missed_in_it() -> None:
    drawn = {"east": 60.0, "south": 30.0}
    done = replay(past(drawn, THREE), WhatIf(0, 3600))
    assert [each.counts for each in done.rounds] == [True, True]


def test_the_suggested_deadline_is_by_those_who_are_neither_late_nor_dropped() -> None:
    """95 % of 60, 60, 30, 30 is 60; times 1.5 is 90, in whole minutes 120."""
    found = past(THREE, THREE)
    assert suggested_deadline_s(found, WhatIf(0, 3600, late={"north": 7200})) == 120
    assert suggested_deadline_s(past(THREE, beside_s=40), WhatIf(0, 3600, late={"north": 1})) == 180  # 100 s


def test_the_plan_sets_the_runs_own_settings_beside_those_tried_and_those_suggested() -> None:
    plan = plan_of(past(THREE), WhatIf(1, 45, late={"south": 60}))
    assert [(row.name, row.what_if.min_sites, row.what_if.deadline_s) for row in plan.rows] == [
        ("the run's own", 0, 3600),
        ("tried", 1, 45),
        ("suggested", 2, 180),  # 88.5 s times 1.5 is 132.75, in whole minutes 180
    ]
    assert plan.tried.replay.stopped == "it would have stopped in round 1: 0 of 1 in time"
    assert [row.name for row in plan_of(past(THREE), WhatIf(0, 3600)).rows] == ["the run's own", "suggested"]


@pytest.mark.parametrize(
    ("text", "seconds"), [("45", 45), ("45s", 45), ("90m", 5400), ("1.5 h", 5400), ("2min", 120), ("1d", 86400)]
)
def test_times_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert math.isclose(seconds_of(text), seconds)


def test_everything_that_is_wrong_with_a_question_is_told_at_once() -> None:
    with pytest.raises(BadInput) as error:
        what_if_of(past(THREE), ["nroth", "east"], ["east=2h", "south=soon", "2h"], 9, "late")
    assert [fault.where for fault in error.value.faults] == [
        "--drop nroth",
        "--late east=2h",
        "--late south=soon",
        "--late ",
        "--deadline",
        "--min-sites",
    ]
    assert 'Did you mean "north"?' in str(error.value)


def folder_of_a_run(folder: Path) -> Path:
    """What a finished run over the network leaves, as far as times go."""
    nothing = ("mean_auroc", "sd_auroc", "mean_average_precision", "mean_balanced_accuracy")
    test: dict[str, Any] = {"per_class": {}, **dict.fromkeys(nothing)}
    subset = {"classes": [], "mean_auroc": None, "sd_auroc": None}
    summary: dict[str, Any] = {
        "method": "surgical",
        "backend": "network",
        "rounds": 2,
        "seed": 0,
        "classes": ["0", "1"],
        "sites": {name: {"classes": ["0"], "train_samples": images} for name, images in IMAGES.items()},
        "test": {**test, "shared_classes": subset, "unique_classes": subset},
        "experiment": {
            "run": {"method": "surgical"},
            "model": {"architecture": "tiny_cnn", "channels": 1, "image_size": 16},
        },
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    lines = [{"round": n, "sites": list(THREE), "site_seconds": THREE, "seconds": 94.0 + n} for n in (1, 2, 3)]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_what_a_round_takes_beside_training_is_the_median_over_whole_rounds(tmp_path: Path) -> None:
    assert past_of(folder_of_a_run(tmp_path)).beside_s == 6  # of 5, 6 and 7


def test_the_command_says_it_to_a_person_and_to_a_machine(tmp_path: Path) -> None:
    folder = folder_of_a_run(tmp_path)
    asked = ("--drop", "south", "--late", "north=2h", "--min-sites", 1, "--deadline", "90m")
    words, machine = flwr_server("plan", folder, *asked), flwr_server("plan", folder, *asked, "--json")
    assert (words.code, machine.code) == (0, 0)
    ways = json.loads(machine.out)["ways"]
    assert ways["tried"]["rounds"][0]["counted"] == ["east"]
    assert ways["tried"]["seconds"] == 300 + 3 * 5400
    assert ways["the run's own"]["stopped"] == "it would not have begun: 2 of 3 sites at the roll call"
    assert "--set participation.min_sites=1" in words.out
    wrong = flwr_server("plan", folder, "--drop", "suoth")
    assert (wrong.code, 'Did you mean "south"?' in wrong.err) == (2, True)
