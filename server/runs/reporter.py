"""Progress of the present run for a person, line by line, and as a file for who looks later."""

import datetime as dt
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from common import __version__
from common.system.files import write_atomically
from common.system.plain_text import counted, shortened
from server.runs.live_status import FILE, Present, stopped_at
from strategies.engine.events import RolledBack, RoundRecord, Waiting, exclusion_sentence
from strategies.engine.exchange import NOT_REGISTERED
from strategies.engine.state import FederationState


class Reporter:
    """Prints and writes the progress of a run. A :class:`server.federation.run.Watcher`.

    Args:
        signed_off: Site -> when it left, of those that said so.
        note: Told when the run begins and when it has ended, for a list of runs.
    """

    def __init__(
        self,
        present: Present,
        state: Path,
        tell: Callable[[str], None],
        signed_off: Callable[[], Mapping[str, str]] = dict,
        note: Callable[[Present], None] = lambda present: None,
    ) -> None:
        self._signed_off, self._note = signed_off, note
        self._present, self._path, self._tell = present, state / FILE, tell
        self._training_began, self._rounds_done = 0.0, 0
        self._lost: set[str] = set()  # told as lost, and in no round since
        self._absent: dict[str, str] = {}  # the reason last told

    def __enter__(self) -> "Reporter":
        self._present.pid, self._present.began = os.getpid(), time.time()
        self._write()
        self._note(self._present)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        present = self._present
        present.state = "done" if kind is None else "stopped" if issubclass(kind, Exception) else "interrupted"
        present.waiting_for = present.lost = ()
        if error is not None and kind is not SystemExit:
            self._note_error(str(error) or type(error).__name__)
        self._write()
        self._note(present)

    def waiting(self, waiting: Waiting) -> None:
        present = self._present
        if waiting.phase == "roll call" and waiting.sites:
            stopped = self._signed_off()
            names = ", ".join(
                f"{site} ({stopped_at(stopped[site])})" if site in stopped else site for site in waiting.sites
            )
            self._tell(f"waiting for {names} to connect and answer; at most {waiting.deadline_s:.0f} s")
        if new := sorted(set(waiting.lost) - self._lost):
            self._tell_who_went(new, waiting.round)
        present.phase, present.round = waiting.phase, waiting.round
        present.waiting_for, present.lost = self._waited_for(waiting), tuple(sorted(self._lost))
        present.deadline = time.time() + waiting.deadline_s
        self._write()

    def _waited_for(self, waiting: Waiting) -> tuple[str, ...]:
        """Leave out sites that are known to be stopped and have only just been asked."""
        away = set(self._signed_off()) & self._lost - set(waiting.lost)
        return tuple(site for site in waiting.sites if site not in away)

    def _tell_who_went(self, sites: Sequence[str], server_round: int) -> None:
        signed_off = self._signed_off()
        for site in sites:
            self._lost.add(site)
            if when := signed_off.get(site):
                self._present.stopped[site] = when
                what, until = f"{site} {stopped_at(when)}", "it is started"
            else:
                what, until = f"lost contact with {site}", "it is back"
            self._note_error(f"round {server_round}: {what}")
            self._tell(f"{what}; it gets its work again when {until}")

    def enrolled(self, releases: Mapping[str, str]) -> None:
        self._present.releases.update(releases)
        for site, release in releases.items():
            if release != __version__:
                self._tell(f"{site} runs release {release}, this coordinator {__version__}")

    def began(self, sites: Sequence[str], rounds: int) -> None:
        self._present.sites, self._present.rounds = tuple(sites), rounds
        self._training_began = time.monotonic()
        self._tell(f"{counted(len(sites), 'site')} taking part: {', '.join(sites)}")

    def joined(self, server_round: int, site: str) -> None:
        self._present.sites = tuple(sorted({*self._present.sites, site}))
        self._tell(f"{site} joins in round {server_round}")

    def left_out(self, site: str, reason: str) -> None:
        self._present.left_out[site] = f"roll call: {reason}"
        self._note_error(f"{site}: {reason}")
        self._tell(f"the run goes on without {site}: {reason}")

    def rolled_back(self, rolled_back: RolledBack) -> None:
        self._note_error(rolled_back.sentence)
        self._tell(rolled_back.sentence)

    def excluded(self, server_round: int, site: str, reason: str) -> None:
        sentence = exclusion_sentence(server_round, site, reason)
        self._present.left_out[site] = f"from round {server_round} on: {reason}"
        self._note_error(sentence)
        self._tell(sentence)

    def round_done(self, record: RoundRecord, state: FederationState) -> None:
        present = self._present
        present.waiting_for = ()
        self._rounds_done += 1
        pace = (time.monotonic() - self._training_began) / self._rounds_done  # a resumed run began later
        present.seconds_left = pace * (present.rounds - record.round)
        without = f", without {shortened(sorted(record.absent))}" if record.absent else ""
        facts = [f"{len(record.sites)} of {len(record.sites) + len(record.absent)} sites{without}"]
        if (trained := record.mean_train_loss) is not None:
            facts.append(f"loss {trained:.3f}")
        if (loss := record.validation.mean_loss) is not None:
            facts.append(f"round before: validation {loss:.3f}")
        facts.append(f"{record.seconds:.1f} s, about {_minutes(present.seconds_left)} left")
        self._tell(f"round {record.round} of {present.rounds}: {', '.join(facts)}")
        self._tell_who_came(record)
        for site, done in record.shortened.items():
            self._tell(f"round {record.round}: the update of {site} is too long: {done}")
            present.shortened[site] = f"round {record.round}: {done}"
        self._write()

    def _tell_who_came(self, record: RoundRecord) -> None:
        """Report absences, of a lost or revoked site once for each reason, and lost sites that took part again."""
        for site in sorted(self._lost & set(record.sites)):
            self._lost.remove(site)
            self._present.stopped.pop(site, None)
            self._tell(f"{site} is back: it took part in round {record.round}")
        revoked = {site for site, reason in record.absent.items() if reason == NOT_REGISTERED}
        self._lost -= revoked
        self._present.lost = tuple(sorted(self._lost))
        for site, reason in record.absent.items():
            self._present.left_out[site] = f"round {record.round}: {reason}"
            if site not in self._lost | revoked or self._absent.get(site) != reason:
                self._note_error(f"round {record.round}: {site}: {reason}")
                self._tell(f"round {record.round} went without {site}: {reason}")
        self._absent = dict(record.absent)

    def _note_error(self, text: str) -> None:
        self._present.last_error = text
        self._present.last_error_time = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")

    def _write(self) -> None:
        write_atomically(self._path, json.dumps(asdict(self._present)).encode(), durable=False)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
