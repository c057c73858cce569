"""The coordinator's audit of a run: who takes part, what came of whom, what was added up, what was left out and why.

It lies in the run folder as ``audit.jsonl`` (:mod:`common.security.audit`); the receipt is made of it. Where the
experiment says ``run.keep_updates``, what the model was made of lies beside it in ``updates/``: the initial model, each
site's answer to the roll call, and each update that counted, in the very bytes whose SHA-256 the audits of both sides
name.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import RecordDict

from common.models.state import Layout, ModelState, state_sha256
from common.security.audit import FILE, Audit
from common.security.signatures import Signed, attached_signature
from common.system.files import write_atomically
from common.system.plain_text import MOST_WORDS, printable
from common.wire.canonical_bytes import canonical_pieces, record_sha256
from common.wire.codec import encode, payload_bytes
from common.wire.records import TrainReply
from strategies.engine.events import Arrival, RolledBack, RoundRecord, RunStopped
from strategies.engine.membership import Member
from strategies.engine.state import FederationState, to_bytes

UPDATES = "updates"
FIGURES = ("summary.json", "rounds.jsonl", "model.json")
"""The files of a run folder that hold its figures and describe its model, which not every method has."""
INITIAL = "initial.safetensors"
REASONS_TOGETHER, LEAST_WORDS = 8_000, 60
"""Characters of the reasons in one line of the audit, and of one of them at least."""


class RunAudit:
    """Writes one run's audit.

    Attributes:
        layout: Of the model.
        keep: Whether updates are kept.
        durable: Flush to disk.
        key_of: Looks up the public key that a site was admitted with, as an OpenSSH line; None in simulation.
    """

    def __init__(
        self,
        run_folder: Path,
        layout: Layout,
        *,
        keep: bool,
        durable: bool,
        key_of: Callable[[str], str] | None = None,
    ) -> None:
        self.layout, self.keep, self.durable, self._key_of = layout, keep, durable, key_of
        self.audit = Audit(run_folder, durable=durable)
        self._updates = run_folder / UPDATES

    def began(self, initial: FederationState, **facts: Any) -> None:
        """A new run, from this model."""
        sha256 = state_sha256(initial.model, self.layout)
        self.audit.append(event="run", initial_model_sha256=sha256, updates_kept=self.keep, **facts)
        if self.keep:
            write_atomically(self._updates / INITIAL, to_bytes(initial), durable=self.durable)

    def resumed(self, state: FederationState, **facts: Any) -> None:
        """The run goes on from a checkpoint; what came after it is done again.

        Raises:
            RunStopped: If the checkpoint holds another model than this audit has noted.
        """
        noted = self._models()
        kept = [(state.round, state.model), *([(state.best_round, state.best)] if state.best else [])]
        for number, model in kept:
            # In simulation a power failure may take an entry with it, and leave the checkpoint that came after it.
            lost = number not in noted and not self.durable and number <= state.round
            if not lost and noted.get(number) != self._sha256(model):
                problem = f"the checkpoint's model after round {number} is not the one that {FILE} has noted:"
                remedy = f"one of them was changed. Put copies of {FILE} and checkpoints/ back, or take a new --out."
                raise RunStopped(f"resume: {problem} {remedy}")
        self.audit.append(event="resumed", round=state.round, **facts)

    def _models(self) -> dict[int, Any]:
        """Round -> hash of the model after it, as noted last in this run; 0 is what it began with."""
        hashes: dict[int, Any] = {}
        for entry in self.audit.entries():
            if entry.get("event") == "run":
                hashes = {0: entry.get("initial_model_sha256")}
            elif entry.get("event") == "aggregated" and isinstance(number := entry.get("round"), int):
                hashes[number] = entry.get("model_sha256")
        return hashes

    def _sha256(self, model: ModelState) -> str:
        """The model's hash; empty where it is not of this layout."""
        try:
            return state_sha256(model, self.layout)
        except (AssertionError, ValueError):
            return ""

    def rolled_back(self, rolled_back: RolledBack) -> None:
        """A model collapsed; the run goes on from an earlier one, and what came after that is done again."""
        self.audit.append(event="rolled_back", round=rolled_back.to, because=rolled_back.because)

    def condemned(self, server_round: int, site: str, reason: str) -> None:
        """A site is left out for the rest of the run."""
        self.audit.append(event="condemned", round=server_round, site=site, reason=reason)

    def enrolled(self, server_round: int, site: str, member: Member) -> None:
        """A site takes part from this round on."""
        content = encode(member.answer)
        sha256 = record_sha256(content)
        facts: dict[str, Any] = {"release": member.answer.version, "sha256": sha256, "bytes": payload_bytes(content)}
        if self._key_of is not None:
            facts |= {"public_key": self._key_of(site), **self._authorship(member.signed)}
        self.audit.append(event="enrolled", round=server_round, site=site, **facts)
        self._store("roll-call", site, content)

    def left_out(self, server_round: int | str, absent: Mapping[str, str]) -> None:
        """Sites that declined, could not be taken in, or missed an exchange."""
        for site, reason in absent.items():
            self.audit.append(event="left_out", round=server_round, site=site, reason=printable(reason))

    def arrived(self, arrival: Arrival) -> None:
        """A reply came, good or not."""
        facts: dict[str, Any] = {"counts": not arrival.reason}
        if arrival.reason:
            facts["reason"] = arrival.reason
        if (content := arrival.content) is not None:
            facts |= {"bytes": payload_bytes(content), "sha256": record_sha256(content)}
            facts |= self._authorship(attached_signature(content))
        about = {"round": arrival.round, "site": arrival.site, "record": arrival.record}
        if content is not None and not arrival.reason and arrival.record == TrainReply.__name__ and arrival.round:
            self._store(round_folder(arrival.round), arrival.site, content)
        self.audit.append(event="received", **about, **facts)

    def arrived_before(self, arrival: Arrival) -> None:
        """Note a reply that came before the run was resumed, unless it was noted then."""
        signed = arrival.content and attached_signature(arrival.content)
        if signed and all(entry.get("signature") != signed.signature for entry in self.audit.entries()):
            self.arrived(arrival)

    def aggregated(self, record: RoundRecord, state: FederationState, contract: str) -> None:
        """A round has counted."""
        self.audit.append(
            event="aggregated",
            round=record.round,
            sites=list(record.sites),
            left_out=briefly(record.absent),
            contract_sha256=contract,
            model_sha256=state_sha256(state.model, self.layout),
        )

    def done(self, **facts: Any) -> None:
        """The model that the run ends with."""
        self.audit.append(event="result", **facts)

    def figures(self, folder: Path) -> None:
        """Note what the run folder says of the run, so that a figure that is changed later is found."""
        there = [name for name in FIGURES if (folder / name).is_file()]
        hashes = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in there}
        self.audit.append(event="figures", sha256=hashes)

    def _authorship(self, signed: Signed | None) -> dict[str, Any]:
        """What a hospital signed about its record; nothing of a simulated site."""
        return {} if self._key_of is None else {"of_a_hospital": True, **(signed.model_dump() if signed else {})}

    def _store(self, folder: str, site: str, content: RecordDict) -> None:
        if self.keep:
            data = b"".join(canonical_pieces(content))
            write_atomically(self._updates / folder / record_file(site), data, durable=self.durable)


def briefly(absent: Mapping[str, str]) -> dict[str, str]:
    """Reasons by site, cut so that all of them fit into one line of the audit; each whole one has its own line."""
    most = max(LEAST_WORDS, min(MOST_WORDS, REASONS_TOGETHER // max(len(absent), 1)))
    return {site: printable(reason, most) for site, reason in absent.items()}


def round_folder(server_round: int) -> str:
    """Where a round's updates lie in ``updates/``."""
    return f"round-{server_round:06d}"


def record_file(site: str) -> str:
    """The file of a site's record."""
    return f"{site}.record"
