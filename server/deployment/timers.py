"""``flwr-server deadlines``: every timer of a federation, its value, where it is set, what happens when it fires."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from common.config import Experiment, ParticipationSection
from common.errors import Fault
from common.system.timers import (
    ALONE_TIMES,
    CALL_TIMEOUT_S,
    CLOCKS_DIFFER_S,
    HEARTBEAT_INTERVAL_S,
    HEARTBEAT_PAUSE_S,
    JOIN_DEADLINE_S,
    KEY_PATIENCE_S,
    MAX_RETRY_S,
    REFUSAL_NOTED_S,
    TLS_TIMEOUT_S,
)
from server.deployment.superlink.control.client import ANSWER_S, LINK_PATIENCE_S
from server.deployment.superlink.local.process import START_TIMEOUT_S, STOP_GRACE_S
from server.deployment.superlink.run_client.network_grid import UPLOAD_STALL_S
from server.deployment.superlink.run_client.run import HEARTBEAT_EVERY_S
from server.deployment.superlink.storage.runs import SILENT_S


@dataclass(frozen=True)
class Timer:
    """One timer of the coordinator or of a run."""

    name: str
    seconds: float
    source: str
    effect: str


@dataclass(frozen=True)
class Inside:
    """A timer that has to fit inside another, by their names, and what goes wrong where it does not."""

    inner: str
    outer: str
    consequence: str


ORDER = (
    Inside("heartbeat of a site", "site taken for lost", "a site would be taken for lost between two heartbeats"),
    Inside("heartbeat of a site", "participation.roll_call_deadline_s", "a site that is there could be missed"),
    Inside("heartbeat of a site", "participation.round_deadline_s", "a site at work could be left out unheard"),
    Inside("TLS check of a site", "call of a site", "a call would end before it is checked who answers"),
    Inside("call of a site", "SuperLink away during a run", "a run would stop while its sites still try"),
    Inside("heartbeat of a run", "run taken for dead", "a run would be taken for dead between two heartbeats"),
    Inside("SuperLink's start", "SuperLink away during a run", "a run would stop while the SuperLink comes back"),
)


def order_faults(found: Sequence[Timer]) -> list[Fault]:
    """Say which timer is too short for what has to fit inside it; both are named."""
    by_name = {timer.name: timer for timer in found}
    faults = []
    for pair in ORDER:
        inner, outer = by_name[pair.inner], by_name[pair.outer]
        if inner.seconds >= outer.seconds:
            problem = (
                f"is {outer.seconds:g} s ({outer.source}), but {inner.name}, {inner.seconds:g} s ({inner.source}), "
                f"has to fit inside it: {pair.consequence}."
            )
            faults.append(Fault(outer.name, problem, f"Set it to more than {inner.seconds:g}."))
    return faults


def _source(experiment: Experiment | None, key: str) -> str:
    said = experiment is not None and key in experiment.participation.model_fields_set
    return "the experiment" if said else "the experiment (here: default)"


FIXED = (
    Timer("late joiner's roll call", JOIN_DEADLINE_S, "fixed", "the site is not asked again before it reconnects"),
    Timer("refused site says that it knows", REFUSAL_NOTED_S, "fixed", "the site is left without the reason"),
    Timer("heartbeat of a site", HEARTBEAT_PAUSE_S, "fixed", "the site sends the next one"),
    Timer(
        "site taken for lost",
        2 * HEARTBEAT_INTERVAL_S,
        "fixed (two heartbeats as told to the SuperLink)",
        "the round waits for it only if it is needed, and sends its work again when it is back",
    ),
    Timer("call of a site", CALL_TIMEOUT_S, "fixed", "the site reconnects and sends again"),
    Timer("clocks of site and coordinator", CLOCKS_DIFFER_S, "fixed", "flwr-client ends with exit code 15"),
    Timer("TLS check of a site", TLS_TIMEOUT_S, "fixed", "the site tries again"),
    Timer("a refused key is tried again for", KEY_PATIENCE_S, "fixed", "flwr-client ends with exit code 14"),
    Timer("longest pause between a site's tries", MAX_RETRY_S, "fixed", "the site tries again, for ever"),
    Timer(
        "a reply's upload stands still",
        UPLOAD_STALL_S,
        "fixed",
        "the site gets its work again",
    ),
    Timer("SuperLink away during a run", LINK_PATIENCE_S, "fixed", "the run stops"),
    Timer("SuperLink's start", START_TIMEOUT_S, "fixed", "flwr-server start ends with the end of its log"),
    Timer("SuperLink's stop", STOP_GRACE_S, "fixed", "it is killed; its database stands that"),
    Timer("call of a run to the SuperLink", ANSWER_S, "fixed", "the run makes the call again"),
    Timer("heartbeat of a run", HEARTBEAT_EVERY_S, "fixed", "the run sends the next one"),
    Timer("run taken for dead", SILENT_S, "fixed", "sites drop their work on it; if it still lives, it goes on anew"),
)
"""The timers that no experiment changes."""


def timers(experiment: Experiment | None) -> list[Timer]:
    """All timers; a run's own at their defaults where no experiment is given."""
    section = experiment.participation if experiment else ParticipationSection()
    return [
        Timer(
            "participation.roll_call_deadline_s",
            section.roll_call_deadline_s,
            _source(experiment, "roll_call_deadline_s"),
            "the run begins with min_sites sites, or stops and says who is missing",
        ),
        Timer(
            "participation.round_deadline_s",
            section.round_deadline_s,
            _source(experiment, "round_deadline_s"),
            "the round goes on without the missing sites if min_sites replied, or the run stops",
        ),
        *([_alone(section)] if experiment and experiment.evaluation.compare_local else []),
        *FIXED,
    ]


def _alone(section: ParticipationSection) -> Timer:
    longer = f"plus {ALONE_TIMES:g} times what all rounds took, where all sites take part in each"
    effect = "a site that has not answered has no sentence in the report; the run ends"
    name = "evaluation.compare_local, after the test"
    return Timer(name, section.round_deadline_s, f"the experiment; {longer}", effect)


def timers_table(found: Sequence[Timer]) -> Table:
    """For a person: two lines a timer."""
    table = Table("seconds", "timer, where it is set, what happens when it fires", box=None, padding=(0, 2, 0, 0))
    table.columns[0].justify = "right"
    for timer in found:
        table.add_row(f"{timer.seconds:g}", f"[bold]{timer.name}[/] ({timer.source}):\n{timer.effect}")
    return table
