"""The progress of a run over the network: text lines for a person, and a status file for other programs."""

import datetime as dt
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Self

from polyclinic.common import __version__
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.plain_text import format_count_with_noun, join_first_and_count
from polyclinic.common.wire.versions import WIRE_VERSION, StatedRelease, describe_needed_update
from polyclinic.server.runs.live_status import (
    APPROVAL_PENDING,
    CurrentRun,
    describe_site_sign_off,
    remove_states_of_ended_runs,
)
from polyclinic.server.runs.progress import SilentRunProgress, format_round_facts
from polyclinic.strategies.engine.events import MissingReplyStatus, RoundRecord
from polyclinic.strategies.engine.exchange import REVOKED_ERROR_MESSAGE
from polyclinic.strategies.engine.state import FederationState


class RunReporter(SilentRunProgress):
    """Prints the progress of a run and writes it to ``present.json``.

    The file is written before the line is printed, so that ``flwr-server status`` never contradicts the terminal.

    Args:
        current_run: The run's state, which is updated in place.
        state: Folder of ``present.json``.
        tell: Prints one line.
        signed_off: Returns site -> time of its sign-off.
        add_to_history: Called at start and end of the run, to update the history of runs.
    """

    def __init__(
        self,
        current_run: CurrentRun,
        state: Path,
        tell: Callable[[str], None],
        signed_off: Callable[[], Mapping[str, str]] = dict,
        add_to_history: Callable[[CurrentRun], None] = lambda run: None,
    ) -> None:
        super().__init__()
        self._signed_off = signed_off
        self._add_to_history = add_to_history
        self._run = current_run
        self._path = current_run.find_status_path(state)
        self._tell = tell
        self._lost: set[str] = set()  # sites that were reported as lost and took part in no round since then
        self._absent: dict[str, str] = {}  # site -> reason for its absence in the last round

    def __enter__(self) -> Self:
        remove_states_of_ended_runs(self._path.parent)
        self._run.pid = os.getpid()
        self._run.began = time.time()
        self._write_current_run()
        self._add_to_history(self._run)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Write the run's last state: done, stopped by an error, or interrupted."""
        run = self._run
        run.state = "interrupted"
        if kind is None:
            run.state = "done"
        elif issubclass(kind, Exception):
            run.state = "stopped"
        run.waiting_for = ()
        run.lost = ()
        if error is not None and kind is not SystemExit:
            self._store_last_error(str(error) or type(error).__name__)
        self._write_current_run()
        self._add_to_history(run)

    def show_waiting_sites(self, waiting: MissingReplyStatus) -> None:
        """Print newly lost sites and, at the roll call, the sites that the run waits for."""
        run = self._run
        stopped = self._signed_off()
        lines = list[str]()
        if waiting.phase == "roll call" and waiting.sites:
            notes = {site: f" ({describe_site_sign_off(when)})" for site, when in stopped.items()}
            names = ", ".join(f"{site}{notes.get(site, '')}" for site in waiting.sites)
            lines.append(f"waiting for {names} to connect and answer; at most {waiting.deadline_s:.0f} s")
        if waiting.phase == "roll call":
            for site in waiting.awaiting_approval:
                if site not in run.awaiting_approval:
                    lines.append(f"{site} {APPROVAL_PENDING}; at most {waiting.deadline_s:.0f} s")
            run.awaiting_approval = waiting.awaiting_approval
        for site in sorted(set(waiting.lost) - self._lost):
            self._lost.add(site)
            if when := stopped.get(site):
                run.stopped[site] = when
                message = f"{site} {describe_site_sign_off(when)}"
                return_event = "it is started"
            else:
                message = f"lost contact with {site}"
                return_event = "it is back"
            self._store_last_error(f"round {waiting.round}: {message}")
            lines.append(f"{message}; it gets its work again when {return_event}")
        run.phase = waiting.phase
        run.round = waiting.round
        # Sites that had stopped before this request was sent to them.
        stopped_before = stopped.keys() & self._lost - set(waiting.lost)
        run.waiting_for = tuple(site for site in waiting.sites if site not in stopped_before)
        run.lost = tuple(sorted(self._lost))
        run.deadline = time.time() + waiting.deadline_s
        self._write_current_run()
        for line in lines:
            self._tell(line)

    def show_enrolled_sites(self, releases: Mapping[str, StatedRelease]) -> None:
        for site, stated in releases.items():
            self._run.releases[site] = stated.release
            if stated.wire != WIRE_VERSION:
                self._announce(f"{site} {describe_needed_update(stated)}")
            elif stated.release != __version__:
                self._announce(f"{site} runs release {stated.release}, this coordinator {__version__}")

    def show_run_start(self, sites: Sequence[str], rounds: int, figure: str = "AUROC") -> None:
        super().show_run_start(sites, rounds, figure)
        self._run.sites = tuple(sites)
        self._run.rounds = rounds
        for site in sites:
            self._forget_awaited_approval(site)
        self._announce(f"{format_count_with_noun(len(sites), 'site')} taking part: {', '.join(sites)}")

    def show_joined_site(self, server_round: int, site: str) -> None:
        self._run.sites = tuple(sorted({*self._run.sites, site}))
        self._run.left_out.pop(site, None)
        self._forget_awaited_approval(site)
        self._announce(f"{site} joins in round {server_round}")

    def show_left_out_site(self, site: str, reason: str) -> None:
        self._run.left_out[site] = f"roll call: {reason}"
        self._store_last_error(f"{site}: {reason}")
        self._announce(f"the run goes on without {site}: {reason}")

    def show_site_awaiting_approval(self, site: str) -> None:
        self._run.awaiting_approval = tuple(sorted({*self._run.awaiting_approval, site}))
        self._announce(f"the run goes on without {site}, which {APPROVAL_PENDING}; it joins when it is approved")

    def _forget_awaited_approval(self, site: str) -> None:
        self._run.awaiting_approval = tuple(name for name in self._run.awaiting_approval if name != site)

    def show_absent_sites(self, sites: Sequence[str]) -> None:
        for site in sites:
            self._run.left_out[site] = "roll call: it has not answered"
        verbs = "is admitted and has" if len(sites) == 1 else "are admitted and have"
        names = join_first_and_count(list(sites))
        self._announce(f"the run begins without {names}, which {verbs} not answered the roll call")

    def show_excluded_site(self, server_round: int, site: str, reason: str) -> None:
        self._run.left_out[site] = f"from round {server_round} on: {reason}"
        super().show_excluded_site(server_round, site, reason)

    def show_warm_start(self, sentence: str) -> None:
        self._announce(sentence)  # unlike a note, it is not stored as the last error

    def show_note(self, sentence: str) -> None:
        self._store_last_error(sentence)
        self._announce(sentence)

    def show_finished_round(self, record: RoundRecord, state: FederationState) -> None:
        super().show_finished_round(record, state)
        assert self.seconds_left is not None
        run = self._run
        run.waiting_for = ()
        run.seconds_left = self.seconds_left
        sites, *facts = format_round_facts(record, self.figure)
        if record.absent:
            sites += f", without {join_first_and_count(sorted(record.absent))}"
        time_left = f"{self.seconds_left:.0f} s" if self.seconds_left < 90 else f"{self.seconds_left / 60:.0f} min"
        facts = [sites, *facts, f"{record.seconds:.1f} s, about {time_left} left"]
        lines = [f"round {record.round} of {run.rounds}: {', '.join(facts)}"]
        for site in sorted(self._lost & set(record.sites)):
            self._lost.remove(site)
            run.stopped.pop(site, None)
            lines.append(f"{site} is back: it took part in round {record.round}")
        revoked = {site for site, reason in record.absent.items() if reason == REVOKED_ERROR_MESSAGE}
        self._lost -= revoked
        run.lost = tuple(sorted(self._lost))
        for site, reason in record.absent.items():
            run.left_out[site] = f"round {record.round}: {reason}"
            # Of lost and revoked sites, a reason is printed once; of other sites, in every round.
            if site not in self._lost | revoked or self._absent.get(site) != reason:
                self._store_last_error(f"round {record.round}: {site}: {reason}")
                lines.append(f"round {record.round} went without {site}: {reason}")
        self._absent = dict(record.absent)
        for site, done in record.shortened.items():
            lines.append(f"round {record.round}: the update of {site} is too long: {done}")
            run.shortened[site] = f"round {record.round}: {done}"
        self._write_current_run()
        for line in lines:
            self._tell(line)

    def _announce(self, line: str) -> None:
        """Write the state file, then print a line."""
        self._write_current_run()
        self._tell(line)

    def _store_last_error(self, text: str) -> None:
        self._run.last_error = text
        self._run.last_error_time = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")

    def _write_current_run(self) -> None:
        write_atomically(self._path, json.dumps(asdict(self._run)).encode(), durable=False)
