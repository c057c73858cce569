"""What a site keeps of the runs that it takes part in: the plan that each was announced with, and its work for each.

A run's plan is settled by the first request that the site's policy allows. After that the site refuses another plan
under the same run: what was declined at the roll call cannot come in later.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from common.system.files import write_atomically

FILE = "runs.json"
KEPT = 200
"""Runs; of more, those that the site heard of last. One that is forgotten begins anew, and its plan is settled anew."""


@dataclass(frozen=True)
class KnownRun:
    """A run that the site takes part in.

    Attributes:
        plan: SHA-256 of its plan.
        seconds: The site's work for it so far.
    """

    plan: str
    seconds: float = 0.0


class Runs:
    """``runs.json`` in a site's state folder."""

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        self._path, self._durable = folder / FILE, durable

    def known(self, run: str) -> KnownRun | None:
        """The run, if the site has heard of it."""
        return self._all().get(run)

    def settle(self, run: str, plan: str) -> KnownRun:
        """Note a run with its plan, if it is not known yet."""
        return self.known(run) or self._note(run, KnownRun(digest(plan)), durable=self._durable)

    def worked(self, run: str, seconds: float) -> KnownRun | None:
        """Add to the time that the site has worked for a known run."""
        if (known := self.known(run)) is None:
            return None
        return self._note(run, KnownRun(known.plan, known.seconds + seconds), durable=False)

    def _note(self, run: str, known: KnownRun, *, durable: bool) -> KnownRun:
        runs = self._all()
        runs.pop(run, None)  # it goes to the end: heard of last
        runs[run] = known
        kept = dict(list(runs.items())[-KEPT:])
        content = json.dumps({name: asdict(one) for name, one in kept.items()})
        write_atomically(self._path, content.encode(), durable=durable)
        return known

    def _all(self) -> dict[str, KnownRun]:
        """Read all runs; none where the file is damaged: the next plan is then settled anew."""
        try:
            tree = json.loads(self._path.read_bytes())
            return {str(name): KnownRun(str(one["plan"]), float(one["seconds"])) for name, one in tree.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}


def digest(plan: str) -> str:
    """Hash a plan without what may change when its run is resumed: its name, and rounds unless noise is for them."""
    try:
        tree = json.loads(plan)
        private = tree.get("privacy", {}).get("level", "none") != "none"
        for key in ("name",) if private else ("rounds", "name"):
            tree["run"].pop(key, None)
        plan = json.dumps(tree, sort_keys=True)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # it is no plan of ours: every letter counts
    return hashlib.sha256(plan.encode(errors="replace")).hexdigest()
