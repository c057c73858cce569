"""Files that programs of the release before stored are read by this one; ``tests/golden/stored-16`` holds small ones.

Larger ones, such as models, are read in ``tests/network/test_previous_release.py``, where that release writes them.
"""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from polyclinic.client.connection.fleet_client import read_stored_node_id
from polyclinic.client.connection.pending import PendingMessage
from polyclinic.client.gate.incoming_request import SiteRunRecords
from polyclinic.client.site.statements import AcceptedReplyCount, has_accepted_replies, read_accepted_reply_count
from polyclinic.client.training.privacy import PrivacyBudgetLedger
from polyclinic.common.models.saved import SavedModelDescription
from polyclinic.common.security.audit import AuditLog, check_audit_log
from polyclinic.common.wire.versions import OLDEST_WIRE_VERSION
from polyclinic.server.deployment.superlink.database import DATABASE_FILE, SuperLinkDatabase
from polyclinic.server.deployment.superlink.registrations import SiteConnectionState, SiteRegistry
from polyclinic.server.federation.checkpoints import CheckpointFolder
from polyclinic.server.runs.receipt import make_run_receipt, read_run_receipt
from polyclinic.strategies.privacy.secure_aggregation.masked_rounds import MaskedRoundStore

RUN = "d6c9f0885bd34e3d903f1fbe446ce3d3"
"""A run of a coordinator and hospitals of that release, over the network."""


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A copy of the files, because programs write to such folders."""
    folder = Path(__file__).parent / "golden" / f"stored-{OLDEST_WIRE_VERSION}"
    return Path(shutil.copytree(folder, tmp_path / "stored"))


def test_a_runs_checkpoint(stored: Path) -> None:
    checkpoint, broken = CheckpointFolder(stored / "run", durable=False).read_newest_undamaged_checkpoint()
    assert not broken
    assert checkpoint is not None
    state = checkpoint.state
    assert (checkpoint.run, state.round, state.best_round, state.criterion) == ("run-1", 4, 3, "loss")
    assert state.model.trunk.tolist() == [0.25, -7, np.float32(1 / 3)]
    assert state.best is not None
    assert state.best.norm.tolist() == [1, 0]
    assert state.model.head.weight.tolist() == [[1.5, -2], [0, 3]]
    assert dict(state.counted) == {"north": 4, "south": 3}
    assert dict(state.excluded) == {"east": "harms"}
    assert state.moments["trunk/first"].tolist() == [1, 2, 3]
    assert state.statistics["north"].tolist() == [1, 0.5]
    assert dict(state.uncounted) == {}  # that release wrote none


def test_a_runs_audit_and_receipt_which_say_the_same(stored: Path) -> None:
    findings = check_audit_log(stored / "run")
    assert not findings.faults
    receipt = read_run_receipt(stored / "run" / "receipt.json")
    rebuilt = make_run_receipt(AuditLog(stored / "run").read_entries())
    assert rebuilt.model_dump(exclude={"audit"}) == receipt.model_dump(exclude={"audit"})
    assert sorted(receipt.sites) == ["east", "north", "south"]
    assert len(receipt.rounds) == 2


def test_the_description_of_a_model(stored: Path) -> None:
    saved = SavedModelDescription.model_validate_json((stored / "run" / "model.json").read_bytes())
    assert saved.class_names == tuple("0123456789")


def test_the_database_of_a_superlink(stored: Path) -> None:
    path = stored / DATABASE_FILE
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((stored / "superlink.sql").read_text(encoding="utf-8"))
    database = SuperLinkDatabase(path)
    sites = SiteRegistry(database, clock=lambda: 0.0).list_registered_sites()
    assert {site.name: site.state for site in sites} == dict.fromkeys(
        ("east", "north", "south"), SiteConnectionState.CONNECTED
    )
    assert {site.stated for site in sites} == {None}  # that release wrote none
    database.close()


def test_a_sites_audit_which_is_continued(stored: Path) -> None:
    assert not check_audit_log(stored / "site").faults
    assert AuditLog(stored / "site").append(event="start", version="new", policy={}) is None
    findings = check_audit_log(stored / "site")
    assert not findings.faults


def test_the_runs_and_the_accepted_replies_that_a_site_remembers(stored: Path) -> None:
    record = SiteRunRecords(stored / "site").find_run_record(RUN)
    assert record is not None
    assert record.plan == json.loads((stored / "site" / "runs.json").read_bytes())[RUN]["plan"]
    message = "f0dd53430fd4529270c6e835f7da82152c02bde9d6acfdb9afb6068dd96f0961"
    assert has_accepted_replies(stored / "site")
    assert read_accepted_reply_count(stored / "site", RUN) == AcceptedReplyCount(5, message)


def test_the_work_in_hand_the_node_and_what_a_site_spent_and_masked(stored: Path) -> None:
    site = stored / "site"
    assert PendingMessage(site / "in-hand").read_message() == (1, b"announcement")
    assert read_stored_node_id(site / "node-id") == 15581071374641229566
    (cost,) = PrivacyBudgetLedger(site).entries
    assert (cost.run, cost.round, cost.noise_multiplier, cost.sample_rate, cost.count) == ("run-1", 2, 1.5, 0.25, 8)
    assert cost.id  # derived, because that release wrote none
    masked = MaskedRoundStore(site / "masked").read_masked_round("run-1", 4, "5" * 64)
    assert (masked.members, masked.opened) == (("north", "south", "west"), ("north", "south"))
