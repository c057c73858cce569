"""A receipt holds what a run was made of; one changed byte in it, in the audit or in an update is found and named."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from client.gate.audit_report import audit_report as site_verified
from common.security.audit import Audit
from server.cli import main
from server.runs.verify import verify
from tests.federations import GATED, federation

Change = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that kept its updates."""
    folder = tmp_path_factory.mktemp("verified")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("client.simulation.POLICY", GATED)
        federation(folder, "run.keep_updates=true", "training.batch_size=128")
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy, to be spoiled."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def faults(run: Path) -> list[str]:
    return [str(fault) for fault in verify(run / "receipt.json").faults]


def test_a_finished_run_is_what_its_receipt_says(finished: Path) -> None:
    report = verify(finished / "receipt.json")
    assert report.faults == []
    assert [line.split(":")[0] for line in report.right] == [
        "audit",
        "receipt.json",
        "summary.json, rounds.jsonl and model.json",
        "model.safetensors",
        "summary.json",
        "round 1",
        "round 2",
    ]


def test_the_receipt_names_versions_sites_updates_and_models(finished: Path) -> None:
    receipt = json.loads((finished / "receipt.json").read_text(encoding="utf-8"))
    summary = json.loads((finished / "summary.json").read_text(encoding="utf-8"))
    assert receipt["versions"] == summary["versions"]
    assert receipt["contract_sha256"] == summary["contract_hash"]
    assert receipt["model_sha256"] == summary["model_sha256"]
    assert [one["round"] for one in receipt["rounds"]] == [1, 2]
    assert set(receipt["rounds"][0]["sites"]) == set(receipt["sites"]) == {"site-1", "site-2", "site-3"}
    models = [receipt["initial_model_sha256"], *(one["model_sha256"] for one in receipt["rounds"])]
    assert len(set(models)) == 3
    assert receipt["model_sha256"] == models[receipt["result_round"]]


def test_both_sides_wrote_down_the_same_hashes(finished: Path) -> None:
    came = {
        (entry["site"], entry["sha256"])
        for entry in Audit(finished).entries()
        if entry.get("event") in ("received", "enrolled")
    }
    left = {
        (folder.name, entry["sha256"])
        for folder in (finished / "sites").iterdir()
        for entry in Audit(folder).entries()
        if entry["direction"] == "out"
    }
    assert came == left
    assert len(left) == 3 * (1 + 2 + 1 + 1)  # answer, two updates, last validation, test
    assert site_verified(finished / "sites" / "site-2", "site-2", finished / "receipt.json")[1]


def middle(data: bytes) -> bytes:
    """One bit of the middle byte turned over."""
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def of_value(name: str) -> Change:
    """One hexadecimal digit of a named hash turned into another."""

    def change(data: bytes) -> bytes:
        at = data.index(f'"{name}"'.encode()) + len(name) + 12
        return data[:at] + (b"0" if data[at : at + 1] != b"0" else b"1") + data[at + 1 :]

    return change


def with_tensor(name: str) -> Change:
    """One more tensor in a safetensors file."""
    return lambda data: save({**load(data), name: np.zeros(3, np.float32)})


CHANGES: list[tuple[str, Change, str]] = [
    ("updates/initial.safetensors", with_tensor("hidden"), "initial.safetensors: is no model of this run"),
    ("updates/initial.safetensors", with_tensor("moments/x"), "initial.safetensors: holds more than a model"),
    ("updates/round-000001/site-2.record", middle, "updates/round-000001/site-2.record: is no record that was kept"),
    ("updates/roll-call/site-1.record", middle, "updates/roll-call/site-1.record: is no record that was kept"),
    *(
        ("updates/roll-call/site-1.record", lambda data, line=line: line + b"\n", "is no record that was kept")
        for line in (b'{"a":[]}', b'{"a":null}', b"3", b"[" * 100_000)
    ),
    ("updates/initial.safetensors", middle, "updates/initial.safetensors: "),
    ("model.safetensors", middle, "model.safetensors: has SHA-256 "),
    ("audit.jsonl", middle, "audit.jsonl line "),
    ("audit.head", middle, "audit.head"),
    (
        "receipt.json",
        lambda data: re.sub(rb'"result_round": \d+', b'"result_round": 77', data),
        "receipt.json: result_round: is 77, and the receipt has no such round",
    ),
    ("receipt.json", of_value("initial_model_sha256"), "receipt.json: initial_model_sha256: is "),
    ("receipt.json", of_value("site-3"), "receipt.json: "),
    ("receipt.json", of_value("contract_sha256"), "receipt.json: contract_sha256: is "),
    ("receipt.json", lambda data: data + b" ", "receipt.json: is not the file that entry "),
    ("receipt.json", lambda data: data.replace(b'"flwr": "1', b'"flwr": "2'), "receipt.json: versions.flwr: is "),
    ("receipt.json", lambda data: data[:-20], "receipt.json: the whole file: "),
    ("summary.json", middle, "summary.json: is not the file that the run wrote: changed."),
    ("rounds.jsonl", middle, "rounds.jsonl: is not the file that the run wrote: changed."),
    ("summary.json", lambda data: data.replace(b'"seed": 3', b'"seed": 4'), "summary.json: experiment: is not the one"),
]


@pytest.mark.parametrize(("name", "change", "fault"), CHANGES, ids=[f"{row[0]}-{n}" for n, row in enumerate(CHANGES)])
def test_one_changed_byte_is_found_and_named(name: str, change: Change, fault: str, run: Path) -> None:
    path = run / name
    before = path.read_bytes()
    path.write_bytes(change(before))
    assert path.read_bytes() != before
    assert any(fault in text for text in faults(run)), faults(run)


@pytest.mark.parametrize("name", ["updates/round-000002/site-1.record", "rounds.jsonl"])
def test_a_file_that_is_missing_is_named(name: str, run: Path) -> None:
    (run / name).unlink()
    (fault,) = verify(run / "receipt.json").faults
    assert (fault.where, fault.problem.endswith("removed.")) == (name, True)


def test_class_names_that_were_swapped_in_the_models_description_are_named(run: Path) -> None:
    path = run / "model.json"
    description = json.loads(path.read_text(encoding="utf-8"))
    description["class_names"].reverse()
    path.write_text(json.dumps(description), encoding="utf-8")
    assert [fault.where for fault in verify(run / "receipt.json").faults] == ["model.json", "model.json"]


def test_an_audit_whose_end_with_the_figures_was_cut_off_is_found(run: Path) -> None:
    """Whoever changes a figure would cut off the entry that names it, and make the head fit."""
    lines = (run / "audit.jsonl").read_bytes().splitlines(keepends=True)
    assert json.loads(lines[-1])["event"] == "figures"
    (run / "audit.jsonl").write_bytes(b"".join(lines[:-1]))
    head = {"entries": len(lines) - 1, "sha256": json.loads(lines[-1])["before"]}
    (run / "audit.head").write_text(json.dumps(head), encoding="utf-8")
    with (run / "summary.json").open("a", encoding="utf-8") as file:
        file.write("\n")
    assert [fault.split(":")[0] for fault in faults(run)] == ["audit.jsonl"]


def test_updates_and_hashes_that_fit_and_do_not_make_the_model_are_found(run: Path) -> None:
    """Somebody exchanges two sites' updates everywhere but in the sums: receipt and audit would have to lie alike."""
    receipt = json.loads((run / "receipt.json").read_text(encoding="utf-8"))
    first = receipt["rounds"][0]["sites"]
    for one in first:
        first[one] = receipt["rounds"][1]["sites"][one]
        source = run / "updates" / "round-000002" / f"{one}.record"
        shutil.copy(source, run / "updates" / "round-000001" / f"{one}.record")
    (run / "receipt.json").write_text(json.dumps(receipt), encoding="utf-8")
    assert any("updates/round-000001: make the model " in fault for fault in faults(run))


def test_the_command_ends_with_1_where_anything_is_wrong(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["verify", str(run / "receipt.json")])
    (run / "audit.head").unlink()
    with pytest.raises(SystemExit, match="1"):
        main(["verify", str(run / "receipt.json")])
    assert "WRONG  audit.head: is missing" in capsys.readouterr().out
