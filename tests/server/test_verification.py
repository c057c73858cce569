"""A receipt holds what a run was made of: one changed byte is found and named, and so is a site that declines."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from polyclinic.client import simulation
from polyclinic.client.gate.audit_report import make_audit_report
from polyclinic.client.site.policy import SitePolicy
from polyclinic.client.site.site import Site
from polyclinic.common.security.audit import AuditLog
from polyclinic.server.runs.verify import verify_run
from polyclinic.strategies.engine.events import TooFewSites
from tests.federations import GATED, federation
from tests.network.real import flwr_server, lines_of

Change = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that kept its updates."""
    folder = tmp_path_factory.mktemp("verified")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("polyclinic.client.simulation.SIMULATED_SITE_POLICY", GATED)
        federation(folder, "run.keep_updates=true", "training.batch_size=128")
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy, to be spoiled."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def content(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return tree


def faults(run: Path) -> list[str]:
    return [str(fault) for fault in verify_run(run / "receipt.json").faults]


def test_a_finished_run_is_what_its_receipt_says(finished: Path) -> None:
    report = verify_run(finished / "receipt.json")
    assert report.faults == []
    files = ["audit", "receipt.json", "summary.json, rounds.jsonl and model.json", "model.safetensors", "summary.json"]
    assert [line.split(":")[0] for line in report.verified] == [*files, "round 1", "round 2"]


def test_the_receipt_names_versions_sites_updates_and_models(finished: Path) -> None:
    receipt, summary = content(finished / "receipt.json"), content(finished / "summary.json")
    for key, name in (("versions",) * 2, ("contract_sha256", "contract_hash"), ("model_sha256",) * 2):
        assert receipt[key] == summary[name]
    assert [entry["round"] for entry in receipt["rounds"]] == [1, 2]
    assert set(receipt["rounds"][0]["sites"]) == set(receipt["sites"]) == {"site-1", "site-2", "site-3"}
    models = [receipt["initial_model_sha256"], *(entry["model_sha256"] for entry in receipt["rounds"])]
    assert len(set(models)) == 3
    assert receipt["model_sha256"] == models[receipt["result_round"]]


def test_both_sides_wrote_down_the_same_hashes(finished: Path) -> None:
    received = {
        (entry["site"], entry["sha256"])
        for entry in AuditLog(finished).read_entries()
        if entry.get("event") in ("received", "enrolled")
    }
    sent = {
        (folder.name, entry["sha256"])
        for folder in (finished / "sites").iterdir()
        for entry in AuditLog(folder).read_entries()
        if entry["direction"] == "out"
    }
    assert received == sent
    assert len(sent) == 3 * (1 + 2 + 1 + 1)  # answer, two updates, last validation, test
    assert make_audit_report(finished / "sites" / "site-2", "site-2", finished / "receipt.json")[1]


def middle(data: bytes) -> bytes:
    """Turn over one bit of the middle byte."""
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def beginning(data: bytes) -> bytes:
    """Turn over one bit of the first byte."""
    return bytes([data[0] ^ 1]) + data[1:]


def of_value(name: str) -> Change:
    """Change one hexadecimal digit of a named hash."""

    def change(data: bytes) -> bytes:
        at = data.index(f'"{name}"'.encode()) + len(name) + 12
        return data[:at] + (b"0" if data[at : at + 1] != b"0" else b"1") + data[at + 1 :]

    return change


def with_tensor(name: str) -> Change:
    """Add a tensor to a safetensors file."""
    return lambda data: save({**load(data), name: np.zeros(3, np.float32)})


CHANGES: list[tuple[str, Change, str]] = [
    ("updates/initial.safetensors", with_tensor("hidden"), "initial.safetensors: is no model of this run"),
    ("updates/initial.safetensors", with_tensor("moments/x"), "initial.safetensors: holds more than a model"),
    ("updates/round-000001/site-2.record", middle, "updates/round-000001/site-2.record: is no record that was kept"),
    ("updates/roll-call/site-1.record", beginning, "updates/roll-call/site-1.record: is no record that was kept"),
    ("updates/roll-call/site-1.record", middle, "updates/roll-call/site-1.record: "),
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
    (fault,) = verify_run(run / "receipt.json").faults
    assert (fault.where, fault.problem.endswith("removed.")) == (name, True)


def test_class_names_that_were_swapped_in_the_models_description_are_named(run: Path) -> None:
    description = content(run / "model.json")
    description["class_names"].reverse()
    (run / "model.json").write_text(json.dumps(description), encoding="utf-8")
    assert [fault.where for fault in verify_run(run / "receipt.json").faults] == ["model.json", "model.json"]


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
    """Somebody exchanges two rounds' updates everywhere but in the sums: receipt and audit would have to lie alike."""
    receipt = content(run / "receipt.json")
    first, second = (entry["sites"] for entry in receipt["rounds"])
    for site in first:
        first[site] = second[site]
        source = run / "updates" / "round-000002" / f"{site}.record"
        shutil.copy(source, run / "updates" / "round-000001" / f"{site}.record")
    (run / "receipt.json").write_text(json.dumps(receipt), encoding="utf-8")
    assert any("updates/round-000001: make the model " in fault for fault in faults(run))


def test_the_command_ends_with_1_where_anything_is_wrong(run: Path) -> None:
    assert flwr_server("verify", run / "receipt.json").code == 0
    (run / "audit.head").unlink()
    ended = flwr_server("verify", run / "receipt.json")
    assert (ended.code, "WRONG  audit.head: " in ended.out) == (1, True)


REASON = 'declines: policy.methods: it does not have "surgical".'


@pytest.fixture
def second_site_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy of the second site allows fedavg only."""
    site_of = simulation.SimulatedSiteProvider.__call__

    def limited(*arguments: Any) -> Site:
        site = site_of(*arguments)
        return replace(site, policy=SitePolicy(methods=("fedavg",))) if site.name == "site-2" else site

    monkeypatch.setattr(simulation.SimulatedSiteProvider, "__call__", limited)


@pytest.mark.usefixtures("second_site_declines")
def test_a_run_goes_on_without_a_site_that_declines_it_unless_it_needs_every_site(tmp_path: Path) -> None:
    with pytest.raises(TooFewSites, match=f"node 3: {re.escape(REASON)}"):
        federation(tmp_path, out="stopped")
    summary = federation(tmp_path, "participation.min_sites=2", "run.rounds=1", "training.batch_size=128")
    run = tmp_path / "run"
    assert set(summary["sites"]) == {"site-1", "site-3"}
    # In simulation a node's name is its number: nodes are numbered from 2, and this one never said its name.
    events = [event for event in lines_of(run / "events.jsonl") if event["event"] == "left_out"]
    assert [(event["site"], event["reason"]) for event in events] == [("node 3", REASON)]
    assert [e["reason"] for e in AuditLog(run).read_entries() if e["event"] == "left_out"] == [REASON]
    entries = AuditLog(run / "sites" / "site-2").read_entries()
    assert [(e["record"], e["decision"]) for e in entries] == [("RollCall", "deny"), ("Error", "allow")]
    report = verify_run(run / "receipt.json")
    # No site signs in simulation, and this run did not keep its updates.
    assert (report.faults, [line.split(":")[0] for line in report.unverified]) == ([], ["signatures", "sums"])
    assert not (run / "updates").exists()
