"""The coordinator's audit log of a run, ``audit.jsonl``: sites, aggregations, and all replies, also rejected ones.

The receipt of the run is made from the audit log (format: :mod:`polyclinic.common.security.audit`). With
``run.keep_updates``, the folder ``updates/`` also holds the initial model, each site's answer to the roll call and each
aggregated update. Their bytes have the hashes in the audit logs of coordinator and site.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import RecordDict

from polyclinic.common.models.state import ModelStateLayout, hash_model_state
from polyclinic.common.security.audit import AUDIT_FILE, AuditLog
from polyclinic.common.security.signatures import SignedStatement, read_signature_or_none
from polyclinic.common.system.files import make_private_folder, write_atomically
from polyclinic.common.system.plain_names import PlainName, join_plain_name
from polyclinic.common.system.plain_text import MAX_REASON_CHARACTERS, make_printable_line
from polyclinic.common.wire.canonical_bytes import hash_record, iterate_canonical_bytes
from polyclinic.common.wire.codec import count_payload_bytes, encode_record
from polyclinic.common.wire.records import TrainReply
from polyclinic.common.wire.versions import write_in_version
from polyclinic.server.runs.folder import UPDATES_FOLDER
from polyclinic.strategies.engine.events import ReplyArrival, RoundRecord, RunStopped
from polyclinic.strategies.engine.run_member import RunMember
from polyclinic.strategies.engine.state import FederationState, serialize_federation_state

SITE_FILE_ENDING = ".record"
RESULT_FILES = ("summary.json", "rounds.jsonl", "model.json")
"""Files with a run's metrics and the description of its model; a method without a global model has no model.json."""
INITIAL_STATE_FILE = "initial.safetensors"
MAX_REASONS_CHARACTERS = 8_000
"""Greatest number of characters of all reasons together in one line of the audit log."""
MIN_REASON_CHARACTERS = 60
"""Number of characters to which a reason is never shortened, even if there are many reasons."""


class RunAuditWriter:
    """Writes the audit log of one run.

    Attributes:
        layout: Names and shapes of the model's tensors.
        keep: True to keep updates in ``updates/``.
        durable: True to flush each entry to disk.
        get_site_key: Returns the public key of an admitted site, as an OpenSSH line; None in simulation.
    """

    def __init__(
        self,
        run_folder: Path,
        layout: ModelStateLayout,
        *,
        keep: bool,
        durable: bool,
        get_site_key: Callable[[str], str] | None = None,
    ) -> None:
        self.layout = layout
        self.keep = keep
        self.durable = durable
        self._get_site_key = get_site_key
        self.audit = AuditLog(run_folder, durable=durable)
        self._updates = run_folder / UPDATES_FOLDER

    def record_run_start(self, initial: FederationState, **facts: Any) -> None:
        """Record the start of a run with its initial model.

        Args:
            facts: More fields of the audit entry.
        """
        sha256 = hash_model_state(initial.model, self.layout)
        self.audit.append(event="run", initial_model_sha256=sha256, updates_kept=self.keep, **facts)
        if self.keep:
            make_private_folder(self._updates)  # images can be reconstructed from an update
            content = serialize_federation_state(initial)
            write_atomically(self._updates / INITIAL_STATE_FILE, content, durable=self.durable)

    def verify_and_record_resumption(
        self, state: FederationState, plugins: Sequence[Mapping[str, Any]], **facts: Any
    ) -> None:
        """Compare models and installed plug-ins with the audit log, then record that the run is resumed.

        Args:
            state: State of the checkpoint.
            plugins: Identity (name, version, hash) of each plug-in that the experiment uses, as it is installed now.
            facts: More fields of the audit entry.

        Raises:
            RunStopped: If a model of the checkpoint differs from the hash in the audit, or a plug-in has changed.
        """
        plugins_before: Any = None
        hashes: dict[int, Any] = {}  # round -> hash of the model after it; round 0 is the initial model
        for entry in self.audit.read_entries():
            if entry.get("event") == "run":
                hashes = {0: entry.get("initial_model_sha256")}
                plugins_before = entry.get("plugins")
            elif entry.get("event") == "aggregated" and isinstance(number := entry.get("round"), int):
                hashes[number] = entry.get("model_sha256")
        models = [(state.round, state.model), *([(state.best_round, state.best)] if state.best else [])]
        for number, model in models:
            # In simulation, a power failure may remove an entry but not the checkpoint that was written after it.
            is_entry_lost = number not in hashes and not self.durable and number <= state.round
            try:
                sha256 = hash_model_state(model, self.layout)
            except (AssertionError, ValueError):  # the model has another layout
                sha256 = ""
            if not is_entry_lost and hashes.get(number) != sha256:
                problem = f"the checkpoint's model after round {number} is not the one that {AUDIT_FILE} has noted:"
                remedy = (
                    f"one of them was changed. Put copies of {AUDIT_FILE} and checkpoints/ back, or take a new --out."
                )
                raise RunStopped(f"resume: {problem} {remedy}")
        changed = list[Mapping[str, Any]]()
        if isinstance(plugins_before, list):
            changed = [plugin for plugin in plugins if plugin not in plugins_before]
        if changed:
            names = ", ".join(f'{plugin["group"]} "{plugin["name"]}"' for plugin in changed)
            problem = f"the code or version of {names} is not the one that the run began with."
            raise RunStopped(f"resume: {problem} Install that again, or begin a new run: --out NEW.")
        self.audit.append(event="resumed", round=state.round, **facts)

    def record_enrolment(self, server_round: int, site: str, member: RunMember) -> None:
        """Record that a site joins the run at this round, with its answer to the roll call."""
        content = write_in_version(encode_record(member.answer), member.wire)  # as the site signed it
        sha256 = hash_record(content)
        facts: dict[str, Any] = {
            "release": member.answer.release,
            "wire": member.wire,
            "sha256": sha256,
            "bytes": count_payload_bytes(content),
        }
        if self._get_site_key is not None:
            facts |= {"public_key": self._get_site_key(site), **_make_signature_fields(member.signed)}
        self.audit.append(event="enrolled", round=server_round, site=site, **facts)
        if self.keep:
            self._store_update_file("roll-call", site, content)

    def record_left_out_sites(self, server_round: int | str, absent: Mapping[str, str]) -> None:
        """Record the sites that declined, were not admitted to the run, or missed an exchange.

        Args:
            server_round: Number of the round, or name of the exchange.
            absent: Site -> reason.
        """
        for site, reason in absent.items():
            self.audit.append(event="left_out", round=server_round, site=site, reason=make_printable_line(reason))

    def record_reply(self, arrival: ReplyArrival) -> None:
        """Record the arrival of a reply, even if the reply is rejected."""
        facts: dict[str, Any] = {"counts": not arrival.reason}
        if arrival.reason:
            facts["reason"] = arrival.reason
        if (content := arrival.content) is not None:
            facts |= {"bytes": count_payload_bytes(content), "sha256": hash_record(content)}
            if self._get_site_key is not None:
                facts |= _make_signature_fields(read_signature_or_none(content))
        is_kept = self.keep and not arrival.reason and arrival.round > 0
        if is_kept and content is not None and arrival.record == TrainReply.__name__:
            self._store_update_file(name_round_updates_folder(arrival.round), arrival.site, content)
        self.audit.append(event="received", round=arrival.round, site=arrival.site, record=arrival.record, **facts)

    def record_reply_before_resume(self, arrival: ReplyArrival) -> None:
        """Record a reply that arrived while the run was interrupted, unless the audit log contains the reply."""
        signed = arrival.content and read_signature_or_none(arrival.content)
        if signed and all(entry.get("signature") != signed.signature for entry in self.audit.read_entries()):
            self.record_reply(arrival)

    def record_aggregation(self, record: RoundRecord, state: FederationState, contract: str) -> None:
        """Record a completed round with its aggregated replies and the resulting model.

        Args:
            contract: Hash of the label contract (which site annotates which classes).
        """
        self.audit.append(
            event="aggregated",
            round=record.round,
            sites=list(record.sites),
            left_out=shorten_absence_reasons(record.absent) if record.absent else {},
            contract_sha256=contract,
            model_sha256=hash_model_state(state.model, self.layout),
            **({"images": dict(record.images)} if record.images else {}),
            **({"uncounted": list(record.uncounted)} if record.uncounted else {}),
        )

    def record_result_file_hashes(self, folder: Path) -> None:
        """Record the hashes of the files with the run's metrics, so that later changes are detected."""
        names = [name for name in RESULT_FILES if (folder / name).is_file()]
        hashes = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
        self.audit.append(event="figures", sha256=hashes)

    def _store_update_file(self, folder: str, site: str, content: RecordDict) -> None:
        data = b"".join(iterate_canonical_bytes(content))
        path = join_plain_name(self._updates / folder, PlainName(site), SITE_FILE_ENDING)
        write_atomically(path, data, durable=self.durable, private=True)


def _make_signature_fields(signed: SignedStatement | None) -> dict[str, Any]:
    """Return the fields of an audit entry for the site's signature."""
    return {"of_a_hospital": True, **(signed.model_dump() if signed else {})}


def shorten_absence_reasons(absent: Mapping[str, str]) -> dict[str, str]:
    """Shorten the reasons of all sites so that they fit into one audit entry; other entries have the whole reasons."""
    share = MAX_REASONS_CHARACTERS // max(len(absent), 1)
    limit = max(MIN_REASON_CHARACTERS, min(MAX_REASON_CHARACTERS, share))
    return {site: make_printable_line(reason, limit) for site, reason in absent.items()}


def name_round_updates_folder(server_round: int) -> str:
    """Return the name of a round's folder inside ``updates/``."""
    return f"round-{server_round:06d}"
