"""flwr-client audit: what left this site, and whether anybody changed what was written down of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from polyclinic.common.security.audit import AuditLog
from polyclinic.common.security.identity import create_private_key, format_public_key_line
from tests.network.real import flwr_client
from tests.receipts import RUN, message_of, signed_reply, the_receipt
from tests.server.commands import Ended

TOML = 'name = "north"\n[data]\nkind = "phantom"\nimages = 20\nimage_size = 16\n'
UPDATE, CALL = "a" * 64, "b" * 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A site that answered a roll call, sent an update, and declined a run."""
    (tmp_path / "site.toml").write_text(TOML, encoding="utf-8")
    audit = AuditLog(tmp_path / "state", durable=False)
    audit.append(event="start", version="0.1.0")
    where = {"run": "0123456789", "decision": "allow", "rule": "policy"}
    audit.append(**where, round=0, direction="out", record="RollCallAnswer", bytes=300, sha256=CALL)
    audit.append(**where, round=1, direction="out", record="TrainReply", bytes=203_000, sha256=UPDATE)
    denied = {"decision": "deny", "rule": "policy.methods", "reason": 'it does not have "fedmlp"'}
    audit.append(run="9876543210", round=0, direction="in", record="RollCall", bytes=900, sha256="c" * 64, **denied)
    return tmp_path


def audit(command: str, folder: Path, *arguments: object) -> Ended:
    ended = flwr_client("audit", command, folder, *arguments)
    return replace(ended, out=" ".join(ended.out.split()))


@pytest.fixture
def receipt(folder: Path) -> Path:
    """A receipt of a run of this site alone, whose replies it signed."""
    key = create_private_key(folder / "north.key")
    replies = [
        signed_reply(key, "north", "RollCallAnswer", 0, 1, CALL),
        signed_reply(key, "north", "TrainReply", 1, 2, UPDATE),
    ]
    content = the_receipt({"north": format_public_key_line(key, "")}, replies)
    (folder / "receipt.json").write_text(json.dumps(content), encoding="utf-8")
    return folder / "receipt.json"


@pytest.fixture
def two_replies(folder: Path) -> None:
    """The site's own count of the replies that the coordinator accepted."""
    accepted = {RUN: {"count": 2, "message": message_of("north", 2)}}
    (folder / "state" / "statements.json").write_text(json.dumps(accepted), encoding="utf-8")


def edit(receipt: Path, **changes: object) -> None:
    content = json.loads(receipt.read_text(encoding="utf-8"))
    receipt.write_text(json.dumps(content | changes), encoding="utf-8")


def test_show_says_what_came_and_left_and_what_was_declined(folder: Path) -> None:
    ended = flwr_client("audit", "show", folder)
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert "flwr-client 0.1.0 started" in lines[0]
    assert "left  TrainReply  run 01234567 round 1  203,000 bytes" in lines[2]
    assert 'came  RollCall  run 98765432 round 0  900 bytes  policy.methods: it does not have "fedmlp"' in lines[3]
    assert json.loads(flwr_client("audit", "show", folder, "--tail", 1, "--json").out)["n"] == 4


def test_verify_finds_a_changed_line_and_ends_with_1(folder: Path) -> None:
    ended = audit("verify", folder)
    assert ended.code == 0
    assert "4 entries, unbroken" in ended.out
    path = folder / "state" / "audit.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace("203000", "203"), encoding="utf-8")
    ended = audit("verify", folder)
    assert ended.code == 1
    assert "audit.jsonl line 3" in ended.out


def remove_audit(folder: Path) -> None:
    for path in (folder / "state").glob("audit*"):
        path.unlink()


def test_verify_against_a_receipt_finds_an_end_cut_off_and_a_head_made_to_fit(folder: Path, receipt: Path) -> None:
    assert audit("verify", folder, "--receipt", receipt).code == 0
    remove_audit(folder)
    AuditLog(folder / "state", durable=False).append(direction="out", record="RollCallAnswer", sha256=CALL)
    assert audit("verify", folder).code == 0
    ended = audit("verify", folder, "--receipt", receipt)
    assert ended.code == 1
    assert "(aaaaaaaaaaaa...)" in ended.out


@pytest.mark.usefixtures("two_replies")
def test_replies_that_a_receipt_withholds_or_that_did_not_count_are_named(folder: Path, receipt: Path) -> None:
    assert audit("verify", folder, "--receipt", receipt).code == 0
    first, second = json.loads(receipt.read_bytes())["replies"]
    edit(receipt, replies=[first, second | {"counts": False, "reason": "a liar"}], rounds=[])
    output = audit("verify", folder, "--receipt", receipt).out
    assert "TrainReply of round 1 of north was received and did not count: a liar" in output
    edit(receipt, replies=[])
    ended = audit("verify", folder, "--receipt", receipt)
    assert ended.code == 1
    assert "2 replies of north (number 1, 2 " in ended.out


@pytest.mark.usefixtures("two_replies")
def test_an_audit_that_is_gone_is_a_fault_where_the_site_has_replied(folder: Path) -> None:
    remove_audit(folder)
    assert audit("verify", folder).code == 1
    (folder / "state" / "statements.json").unlink()
    assert audit("verify", folder).code == 0


@pytest.mark.parametrize(
    "excuse", [{"resumed": 1}, {"absences": [{"site": "north", "where": "round 1", "reason": "no reply within 60 s"}]}]
)
@pytest.mark.usefixtures("two_replies")
def test_a_reply_that_is_explained_away_is_named(excuse: dict[str, object], folder: Path, receipt: Path) -> None:
    entry = {"run": RUN, "round": 1, "direction": "out", "record": "TrainReply", "decision": "allow"}
    AuditLog(folder / "state", durable=False).append(**entry, sha256=UPDATE)
    edit(receipt, replies=json.loads(receipt.read_bytes())["replies"][:1], rounds=[], **excuse)
    ended = audit("verify", folder, "--receipt", receipt)
    assert ended.code == 1
    assert "north" in ended.out
    assert "TrainReply of round 1" in ended.out
