"""The coordinator's audit of a run: who takes part, what came of whom, what was added up, what was left out and why.

It lies in the run folder as ``audit.jsonl`` (:mod:`common.audit`); the receipt is made of it. Where the experiment
says ``run.keep_updates``, what the model was made of lies beside it in ``updates/``: the initial model, each site's
answer to the roll call, and each update that counted, in the very bytes whose SHA-256 the audits of both sides name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import RecordDict

from common.audit import Audit
from common.files import write_atomically
from common.models.state import Layout, state_sha256
from common.record_bytes import pieces, record_sha256
from common.records import TrainReply
from common.wire import encode, payload_bytes
from strategies.checkpoint import to_bytes
from strategies.records import Arrival, RoundRecord
from strategies.roll_call import Member
from strategies.state import FederationState

UPDATES = "updates"
INITIAL = "initial.safetensors"


class Ledger:
    """Writes one run's audit.

    Attributes:
        layout: Of the model.
        keep: Whether updates are kept.
        durable: Flush to disk.
    """

    def __init__(self, run_folder: Path, layout: Layout, *, keep: bool, durable: bool) -> None:
        self.layout, self.keep, self.durable = layout, keep, durable
        self.audit = Audit(run_folder, durable=durable)
        self._updates = run_folder / UPDATES

    def began(self, initial: FederationState, **facts: Any) -> None:
        """A new run, from this model."""
        sha256 = state_sha256(initial.model, self.layout)
        self.audit.append(event="run", initial_model_sha256=sha256, updates_kept=self.keep, **facts)
        if self.keep:
            write_atomically(self._updates / INITIAL, to_bytes(initial), durable=self.durable)

    def resumed(self, server_round: int, **facts: Any) -> None:
        """The run goes on from a checkpoint; what came after it is done again."""
        self.audit.append(event="resumed", round=server_round, **facts)

    def enrolled(self, server_round: int, site: str, member: Member) -> None:
        """A site takes part from this round on."""
        content = encode(member.answer)
        sha256 = record_sha256(content)
        self.audit.append(event="enrolled", round=server_round, site=site, sha256=sha256, bytes=payload_bytes(content))
        self._store("roll-call", site, content)

    def left_out(self, server_round: int | str, absent: Mapping[str, str]) -> None:
        """Sites that declined, could not be taken in, or missed an exchange."""
        for site, reason in absent.items():
            self.audit.append(event="left_out", round=server_round, site=site, reason=reason)

    def arrived(self, arrival: Arrival) -> None:
        """A reply came, good or not."""
        facts: dict[str, Any] = {"counts": not arrival.reason}
        if arrival.reason:
            facts["reason"] = arrival.reason
        if (content := arrival.content) is not None:
            facts |= {"bytes": payload_bytes(content), "sha256": record_sha256(content)}
        about = {"round": arrival.round, "site": arrival.site, "record": arrival.record}
        if content is not None and not arrival.reason and arrival.record == TrainReply.__name__ and arrival.round:
            self._store(round_folder(arrival.round), arrival.site, content)
        self.audit.append(event="received", **about, **facts)

    def aggregated(self, record: RoundRecord, state: FederationState, contract: str) -> None:
        """A round has counted."""
        self.audit.append(
            event="aggregated",
            round=record.round,
            sites=list(record.sites),
            left_out=dict(record.absent),
            contract_sha256=contract,
            model_sha256=state_sha256(state.model, self.layout),
        )

    def done(self, **facts: Any) -> None:
        """The model that the run ends with."""
        self.audit.append(event="result", **facts)

    def _store(self, folder: str, site: str, content: RecordDict) -> None:
        if self.keep:
            data = b"".join(pieces(content))
            write_atomically(self._updates / folder / record_file(site), data, durable=self.durable)


def round_folder(server_round: int) -> str:
    """Where a round's updates lie in ``updates/``."""
    return f"round-{server_round:06d}"


def record_file(site: str) -> str:
    """The file of a site's record."""
    return f"{site}.record"
