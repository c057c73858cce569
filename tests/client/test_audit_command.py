"""flwr-client audit: what left this site, and whether anybody changed what was written down of it."""

import json
from pathlib import Path

import pytest

from client.cli import main
from common.security.audit import Audit
from common.security.identity import create_key, public_key_line, read_key
from tests.receipts import RUN, message_of, signed_reply, the_receipt

Capture = pytest.CaptureFixture[str]
TOML = 'name = "north"\n[data]\nkind = "phantom"\nimages = 20\nimage_size = 16\n'
UPDATE, CALL = "a" * 64, "b" * 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A site that answered a roll call, sent an update, and declined a run."""
    (tmp_path / "site.toml").write_text(TOML, encoding="utf-8")
    audit = Audit(tmp_path / "state", durable=False)
    audit.append(event="start", version="0.1.0")
    where = {"run": "0123456789", "decision": "allow", "rule": "policy"}
    audit.append(**where, round=0, direction="out", record="RollCallAnswer", bytes=300, sha256=CALL)
    audit.append(**where, round=1, direction="out", record="TrainReply", bytes=203_000, sha256=UPDATE)
    denied = {"decision": "deny", "rule": "policy.methods", "reason": 'it does not have "fedmlp"'}
    audit.append(run="9876543210", round=0, direction="in", record="RollCall", bytes=900, sha256="c" * 64, **denied)
    return tmp_path


def flwr_client(capsys: Capture, *arguments: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    return int(stopped.value.code or 0), capsys.readouterr().out


def receipt(folder: Path, update: str) -> Path:
    """A receipt of a run of this site alone, whose replies it signed."""
    key_path = folder / "north.key"
    key = read_key(key_path) if key_path.exists() else create_key(key_path)
    replies = [
        signed_reply(key, "north", "RollCallAnswer", 0, 1, CALL),
        signed_reply(key, "north", "TrainReply", 1, 2, update),
    ]
    content = the_receipt({"north": public_key_line(key, "")}, replies)
    return written(folder / "receipt.json", content)


def written(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def count_two_replies(folder: Path) -> None:
    accepted = {RUN: {"count": 2, "message": message_of("north", 2)}}
    written(folder / "state" / "statements.json", accepted)


def test_show_says_what_came_and_left_and_what_was_declined(folder: Path, capsys: Capture) -> None:
    code, out = flwr_client(capsys, "audit", "show", folder)
    assert code == 0
    lines = out.splitlines()
    assert "flwr-client 0.1.0 started" in lines[0]
    assert "left  TrainReply  run 01234567 round 1  203,000 bytes" in lines[2]
    assert 'came  RollCall  run 98765432 round 0  900 bytes  policy.methods: it does not have "fedmlp"' in lines[3]
    _, out = flwr_client(capsys, "audit", "show", folder, "--tail", 1, "--json")
    assert json.loads(out)["n"] == 4


def test_verify_of_an_audit_that_nobody_touched_says_how_it_ends(folder: Path, capsys: Capture) -> None:
    code, out = flwr_client(capsys, "audit", "verify", folder)
    assert code == 0
    assert "4 entries, unbroken" in out


def test_verify_finds_a_changed_line_and_ends_with_1(folder: Path, capsys: Capture) -> None:
    path = folder / "state" / "audit.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace("203000", "203"), encoding="utf-8")
    code, out = flwr_client(capsys, "audit", "verify", folder)
    assert code == 1
    assert "audit.jsonl line 3" in out


def test_verify_against_a_receipt_finds_an_end_that_was_cut_off_and_a_head_that_was_made_to_fit(
    folder: Path, capsys: Capture, tmp_path: Path
) -> None:
    assert flwr_client(capsys, "audit", "verify", folder, "--receipt", receipt(folder, UPDATE))[0] == 0
    for path in (folder / "state").glob("audit*"):
        path.unlink()
    audit = Audit(folder / "state", durable=False)
    audit.append(direction="out", record="RollCallAnswer", sha256=CALL)
    assert flwr_client(capsys, "audit", "verify", folder)[0] == 0
    code, out = flwr_client(capsys, "audit", "verify", folder, "--receipt", receipt(folder, UPDATE))
    assert code == 1
    assert "(aaaaaaaaaaaa...)" in " ".join(out.split())


def test_a_receipt_that_is_none_is_a_fault_of_the_command(folder: Path, capsys: Capture) -> None:
    (folder / "receipt.json").write_text("{}", encoding="utf-8")
    assert flwr_client(capsys, "audit", "verify", folder, "--receipt", folder / "receipt.json")[0] == 2


def test_replies_that_were_taken_and_are_all_withheld_are_found_by_the_site_itself(
    folder: Path, capsys: Capture
) -> None:
    path = receipt(folder, UPDATE)
    count_two_replies(folder)
    assert flwr_client(capsys, "audit", "verify", folder, "--receipt", path)[0] == 0
    written(path, json.loads(path.read_text(encoding="utf-8")) | {"replies": [], "rounds": []})
    code, out = flwr_client(capsys, "audit", "verify", folder, "--receipt", path)
    assert code == 1
    assert "2 replies of north (number 1, 2 " in " ".join(out.split())


def test_an_audit_that_is_gone_is_a_fault_where_the_site_has_replied(folder: Path, capsys: Capture) -> None:
    for path in (folder / "state").glob("audit*"):
        path.unlink()
    assert flwr_client(capsys, "audit", "verify", folder)[0] == 0
    count_two_replies(folder)
    assert flwr_client(capsys, "audit", "verify", folder)[0] == 1


@pytest.mark.parametrize(
    "excuse",
    [{"resumed": 1}, {"absences": [{"site": "north", "where": "round 1", "reason": "no reply within 60 s"}]}],
)
def test_a_reply_that_the_coordinator_explains_away_is_a_fault_and_named(
    excuse: dict[str, object], folder: Path, capsys: Capture
) -> None:
    path = receipt(folder, UPDATE)
    count_two_replies(folder)
    Audit(folder / "state", durable=False).append(
        run=RUN, round=1, direction="out", record="TrainReply", sha256=UPDATE, decision="allow"
    )
    content = json.loads(path.read_text(encoding="utf-8"))
    written(path, content | {"replies": content["replies"][:1], "rounds": []} | excuse)
    code, out = flwr_client(capsys, "audit", "verify", folder, "--receipt", path)
    assert code == 1
    assert "north" in out
    assert "TrainReply of round 1" in " ".join(out.split())


def test_a_site_reads_which_of_its_replies_did_not_count(folder: Path, capsys: Capture) -> None:
    path = receipt(folder, UPDATE)
    content = json.loads(path.read_text(encoding="utf-8"))
    content["replies"][1] |= {"counts": False, "reason": "a liar"}
    written(path, content | {"rounds": []})
    _, out = flwr_client(capsys, "audit", "verify", folder, "--receipt", path)
    assert "TrainReply of round 1 of north was received and did not count: a liar" in " ".join(out.split())
