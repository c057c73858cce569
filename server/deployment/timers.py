"""All timers of a federation, for ``flwr-server deadlines``: value, source, and effect when a timer fires."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table

from polyclinic.common.config import Experiment, ParticipationSection
from polyclinic.common.errors import Fault
from polyclinic.common.system.terminal import fold_long_words
from polyclinic.common.system.timers import (
    CALL_TIMEOUT_S,
    HEARTBEAT_INTERVAL_S,
    HEARTBEAT_PAUSE_S,
    JOIN_DEADLINE_S,
    LOCAL_COMPARISON_TIME_FACTOR,
    MAX_CLOCK_DIFFERENCE_S,
    MAX_RETRY_S,
    REFUSAL_CONFIRMATION_S,
    REFUSED_KEY_RETRY_S,
    RUN_HEARTBEAT_INTERVAL_S,
    TLS_TIMEOUT_S,
    UPLOAD_STALL_TIMEOUT_S,
)
from polyclinic.server.deployment.superlink.control_client import CONTROL_CALL_TIMEOUT_S, RUN_RETRY_TIMEOUT_S
from polyclinic.server.deployment.superlink.process import START_TIMEOUT_S, STOP_TIMEOUT_S
from polyclinic.server.deployment.superlink.registrations import MAX_MISSED_HEARTBEATS, RUN_HEARTBEAT_TIMEOUT_S


@dataclass(frozen=True)
class TimerSetting:
    """One timer of the coordinator or of a run.

    Attributes:
        source: Where the value is set, such as "the experiment".
        effect: What happens when the timer fires.
    """

    name: str
    seconds: float
    source: str = field(default="fixed", kw_only=True)
    effect: str


@dataclass(frozen=True)
class TimerOrderRule:
    """A rule that the timer ``inner`` must be shorter than the timer ``outer``.

    Attributes:
        consequence: What would happen if it were not.
    """

    inner: str
    outer: str
    consequence: str


TIMER_ORDER = (
    TimerOrderRule(
        "heartbeat of a site", "site taken for lost", "a site would be taken for lost between two heartbeats"
    ),
    TimerOrderRule("heartbeat of a site", "participation.roll_call_deadline_s", "a site that is there could be missed"),
    TimerOrderRule("heartbeat of a site", "participation.round_deadline_s", "a site at work could be left out unheard"),
    TimerOrderRule("TLS check of a site", "call of a site", "a call would end before it is checked who answers"),
    TimerOrderRule("call of a site", "SuperLink away during a run", "a run would stop while its sites still try"),
    TimerOrderRule("heartbeat of a run", "run taken for dead", "a run would be taken for dead between two heartbeats"),
    TimerOrderRule(
        "SuperLink's start", "SuperLink away during a run", "a run would stop while the SuperLink comes back"
    ),
)


def find_timer_order_faults(all_timers: Sequence[TimerSetting]) -> list[Fault]:
    """Return a fault for each rule in :data:`TIMER_ORDER` whose inner timer is not shorter than its outer timer."""
    by_name = {timer.name: timer for timer in all_timers}
    faults = []
    for rule in TIMER_ORDER:
        inner, outer = by_name[rule.inner], by_name[rule.outer]
        if inner.seconds >= outer.seconds:
            problem = (
                f"is {outer.seconds:g} s ({outer.source}), but {inner.name}, {inner.seconds:g} s ({inner.source}), "
                f"has to fit inside it: {rule.consequence}."
            )
            faults.append(Fault(outer.name, problem, f"Set it to more than {inner.seconds:g}."))
    return faults


FIXED_TIMERS = (
    TimerSetting("late joiner's roll call", JOIN_DEADLINE_S, "the site is not asked again before it reconnects"),
    TimerSetting("refused site says that it knows", REFUSAL_CONFIRMATION_S, "the site is left without the reason"),
    TimerSetting("heartbeat of a site", HEARTBEAT_PAUSE_S, "the site sends the next one"),
    TimerSetting(
        "site taken for lost",
        MAX_MISSED_HEARTBEATS * HEARTBEAT_INTERVAL_S,
        "the round waits for it only if it is needed, and sends its work again when it is back",
        source="fixed (two heartbeats as told to the SuperLink)",
    ),
    TimerSetting("call of a site", CALL_TIMEOUT_S, "the site reconnects and sends again"),
    TimerSetting("clocks of site and coordinator", MAX_CLOCK_DIFFERENCE_S, "flwr-client ends with exit code 15"),
    TimerSetting("TLS check of a site", TLS_TIMEOUT_S, "the site tries again"),
    TimerSetting("a refused key is tried again for", REFUSED_KEY_RETRY_S, "flwr-client ends with exit code 14"),
    TimerSetting("longest pause between a site's tries", MAX_RETRY_S, "the site tries again, for ever"),
    TimerSetting("a reply's upload stands still", UPLOAD_STALL_TIMEOUT_S, "the site gets its work again"),
    TimerSetting("SuperLink away during a run", RUN_RETRY_TIMEOUT_S, "the run stops"),
    TimerSetting("SuperLink's start", START_TIMEOUT_S, "flwr-server start ends with the end of its log"),
    TimerSetting("SuperLink's stop", STOP_TIMEOUT_S, "it is killed; its database stands that"),
    TimerSetting("call of a run to the SuperLink", CONTROL_CALL_TIMEOUT_S, "the run makes the call again"),
    TimerSetting("heartbeat of a run", RUN_HEARTBEAT_INTERVAL_S, "the run sends the next one"),
    TimerSetting(
        "run taken for dead",
        RUN_HEARTBEAT_TIMEOUT_S,
        "sites drop their work on it; if it still lives, it goes on anew",
    ),
)
"""Timers whose values do not depend on the experiment."""


def list_timer_settings(experiment: Experiment | None) -> list[TimerSetting]:
    """Return all timers; without an experiment, the timers of a run have their default values."""
    section = experiment.participation if experiment else ParticipationSection()
    effects = {
        "roll_call_deadline_s": "the run begins with min_sites sites, or stops and says who is missing",
        "round_deadline_s": "the round goes on without the missing sites if min_sites replied, or the run stops",
    }
    run_timers = []
    for key, effect in effects.items():
        source = "the experiment" if key in section.model_fields_set else "the experiment (here: default)"
        run_timers.append(TimerSetting(f"participation.{key}", getattr(section, key), effect, source=source))
    if experiment and experiment.evaluation.compare_local:
        longer = f"plus {LOCAL_COMPARISON_TIME_FACTOR:g} times what all rounds took, where all sites take part in each"
        effect = "a site that has not answered has no sentence in the report; the run ends"
        name = "evaluation.compare_local, after the test"
        run_timers.append(TimerSetting(name, section.round_deadline_s, effect, source=f"the experiment; {longer}"))
    return [*run_timers, *FIXED_TIMERS]


def make_timer_table(all_timers: Sequence[TimerSetting]) -> Table:
    """Format the timers as a table for the terminal, with two lines per timer."""
    headings = ("seconds", "timer, where it is set, what happens when it fires")
    table = fold_long_words(Table(*headings, box=None, padding=(0, 2, 0, 0)))
    table.columns[0].justify = "right"
    for timer in all_timers:
        table.add_row(f"{timer.seconds:g}", f"[bold]{timer.name}[/] ({timer.source}):\n{timer.effect}")
    return table
