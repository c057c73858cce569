"""Over the network: a hospital at which a person approves each plan, and the others, which ask nobody."""

import datetime as dt
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyclinic.client.site.plans import PlanStore
from polyclinic.common.security.audit import AuditLog
from tests.client.approvals import WEBER, Approver, add_approver, write_approvers
from tests.network.federated import SLOW, Federation, admitted, events, hash_in, sites_by_round, undisturbed
from tests.network.organ_files import PATCHES
from tests.network.real import PARTIAL, Site, eventually, flwr_client, flwr_server, summary_of

pytestmark = pytest.mark.slow

NAMED = ('run.name="Digits of three hospitals"', 'run.purpose="Which digits does one model learn?"')
TWO = ("participation.min_sites=2", "participation.roll_call_deadline_s=6")


@pytest.fixture
def hospitals(tmp_path: Path) -> Iterator[tuple[Federation, Approver]]:
    """Three hospitals, of which south needs an approval, and its approver."""
    with admitted(tmp_path, PARTIAL) as federation:
        weber = add_approver(tmp_path)
        federation.south.edit(federation.south.toml, ("[policy]", '[policy]\napproval = "required"'))
        write_approvers(federation.south.toml, weber)
        federation.coordinator.start()
        federation.gather()
        yield federation, weber


def wait_for_plan(site: Site, count: int = 1) -> str:
    """The hash of the plan that waits at a site last."""
    store = PlanStore(site.folder / "state")
    eventually(lambda: len(list(store.list_texts())) == count, f"{count} plans at {site.name}")
    listed = json.loads(flwr_client("plans", "list", site.folder, "--json").out)
    return str(listed[-1]["sha256"])


def trained_rounds(site: Site) -> list[int]:
    entries = AuditLog(site.folder / "state").read_entries()
    return [int(entry["round"]) for entry in entries if entry.get("record") == "TrainReply"]


def test_a_run_waits_for_an_approval_and_gives_the_model_that_it_gives_without_one(
    hospitals: tuple[Federation, Approver], tmp_path: Path
) -> None:
    federation, weber = hospitals
    south = federation.south
    run = federation.run(*NAMED, "participation.roll_call_deadline_s=200", once=True)
    run.says("south waits for approval at the hospital")
    assert "south waits for approval at the hospital" in flwr_server("status", federation.coordinator.folder).out
    assert south.folder.joinpath("state", "runs").exists() is False
    sha256 = wait_for_plan(south)
    shown = flwr_client("plans", "show", south.folder, sha256[:12])
    for words in ("Digits of three hospitals", "Which digits does one model learn?", "trial", "Leaves in each round"):
        assert words in shown.out
    assert max(len(line) for line in shown.out.splitlines() if line.startswith("  ")) <= 80
    assert weber.approve(south.folder, sha256[:12]).code == 0
    run.succeeds()
    out = federation.out
    assert sites_by_round(out)[0] == ["east", "north", "south"]
    assert hash_in(out) == undisturbed(federation.experiment, tmp_path / "through", *NAMED)
    assert summary_of(out)["left_out"] == {}
    south.program.says("a plan was approved here")
    record = flwr_client("record", south.folder)
    assert record.code == 0, record.out
    table = [line for line in record.out.splitlines() if line[:1] in "┏┃┡│└├"]
    assert max(map(len, table)) <= 80
    (entry,) = json.loads(flwr_client("record", south.folder, "--json").out)["runs"]
    assert (entry["title"], entry["purpose"]) == ("Digits of three hospitals", "Which digits does one model learn?")
    assert entry["rounds"] == trained_rounds(south) != []
    assert [approval["approver"] for approval in entry["approvals"]] == [WEBER]
    assert entry["plan"] == sha256
    assert entry["images"]["train"] == summary_of(out)["sites"]["south"]["train_samples"]
    assert entry["refused"] == {"approval.missing": 1}
    text = flwr_client("record", south.folder, "--plan", sha256[:12]).out
    assert json.loads(text)["run"]["purpose"] == "Which digits does one model learn?"


PLANNED = (
    "model.architecture=monai:DynUNet",
    "model.patch_size=none",
    "training.batch_size=none",
    'planning={kind = "nnunet", memory_gb = 0.005}',
    "run.rounds=1",
    "participation.roll_call_deadline_s=400",
)


@pytest.mark.network
def test_a_planned_network_is_approved_twice_first_its_sums_and_then_the_network(tmp_path: Path) -> None:
    pytest.importorskip("monai", reason="the extra monai is not installed")
    with admitted(tmp_path, PATCHES) as federation:
        south, weber = federation.south, add_approver(tmp_path)
        south.edit(south.toml, ("[policy]", '[policy]\napproval = "required"'))
        write_approvers(south.toml, weber)
        federation.coordinator.start()
        federation.gather()
        run = federation.run(*PLANNED, once=True)
        run.says("south waits for approval at the hospital")
        sums = wait_for_plan(south)
        shown = flwr_client("plans", "show", south.folder, sums[:12]).out
        for words in ("Nothing is trained by this plan", "voxel sizes and lengths of the training volumes"):
            assert words.casefold() in " ".join(shown.split()).casefold()
        assert weber.approve(south.folder, sums[:12]).code == 0
        network = wait_for_plan(south, 2)
        assert network != sums
        shown = " ".join(flwr_client("plans", "show", south.folder, network[:12]).out.split())
        assert "Nothing is trained by this plan" not in shown
        assert "Dice and 95 % Hausdorff distance" in shown
        # The first approval is of the sums alone: south sends no update before the second.
        assert trained_rounds(south) == []
        assert weber.approve(south.folder, network[:12]).code == 0
        run.succeeds()
        assert sites_by_round(federation.out) == [["east", "north", "south"]]
        assert json.loads((federation.out / "planning.json").read_text())["sites"] == ["east", "north", "south"]
        assert hash_in(federation.out) == undisturbed(federation.experiment, tmp_path / "through", *PLANNED)


def test_a_site_joins_after_a_late_approval_and_leaves_after_a_denial(hospitals: tuple[Federation, Approver]) -> None:
    federation, weber = hospitals
    south, out = federation.south, federation.out
    run = federation.run(SLOW, *TWO, "run.rounds=60", once=True)
    run.says("the run goes on without south, which waits for approval at the hospital")
    (event,) = events(out, "awaits_approval")
    assert (event["site"], event["round"]) == ("south", "roll call")
    assert events(out, "left_out") == events(out, "absent") == []
    sha256 = wait_for_plan(south)
    assert weber.approve(south.folder, sha256).code == 0
    run.says("south joins in round")
    assert "south waits for approval" not in flwr_server("status", federation.coordinator.folder).out
    eventually(lambda: len(trained_rounds(south)) >= 2, "south trains two rounds")
    assert weber.deny(south.folder, sha256).code == 0
    run.says("the hospital has denied it")
    denied_at = len(trained_rounds(south))
    rounds = len(sites_by_round(out))
    eventually(lambda: len(sites_by_round(out)) >= rounds + 3, "three more rounds")
    assert len(trained_rounds(south)) <= denied_at + 1
    assert sites_by_round(out)[-1] == ["east", "north"]
    assert run.stop() != 0


def refusing_rules(site: Site) -> set[str]:
    entries = AuditLog(site.folder / "state").read_entries()
    return {str(entry["rule"]) for entry in entries if entry.get("decision") == "deny"}


def test_a_run_that_waits_for_an_approval_goes_on_at_once_after_a_denial(
    hospitals: tuple[Federation, Approver],
) -> None:
    """Without the site's new connection, the run would wait until the deadline of its roll call, 300 s."""
    federation, weber = hospitals
    south = federation.south
    run = federation.run(
        "participation.min_sites=2", "participation.roll_call_deadline_s=200", "run.rounds=1", once=True
    )
    run.says("south waits for approval at the hospital")
    assert weber.deny(south.folder, wait_for_plan(south)).code == 0
    south.program.says("a plan was denied here")
    run.says("the hospital has denied it")
    run.succeeds()
    assert sites_by_round(federation.out)[0] == ["east", "north"]
    assert south.program.output.count("a plan was denied here") == 1


def test_an_approval_that_expires_or_is_altered_in_mid_run_ends_the_part_of_its_site(
    hospitals: tuple[Federation, Approver],
) -> None:
    federation, weber = hospitals
    south, out = federation.south, federation.out
    run = federation.run(SLOW, *TWO, "run.rounds=200", once=True)
    sha256 = wait_for_plan(south)
    assert weber.approve(south.folder, sha256).code == 0
    eventually(lambda: trained_rounds(south), "south trains")
    soon = dt.datetime.now(dt.UTC).replace(microsecond=0) + dt.timedelta(seconds=5)
    weber.approve_until(south.folder, sha256, soon)
    eventually(lambda: "approval.expired" in refusing_rules(south), "south refuses after the last second")
    assert dt.datetime.now(dt.UTC) > soon
    after_expiry = len(trained_rounds(south))
    rounds = len(sites_by_round(out))
    eventually(lambda: len(sites_by_round(out)) >= rounds + 2, "two rounds without south")
    assert len(trained_rounds(south)) == after_expiry
    # Approved anew, it takes part again at once; then a byte of the approval is changed.
    path = weber.approve_until(south.folder, sha256, soon + dt.timedelta(days=1))
    eventually(lambda: len(trained_rounds(south)) > after_expiry, "south trains again")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"approved", b"Approved", 1))
    eventually(lambda: "approval.signature" in refusing_rules(south), "south refuses the altered approval")
    after_alteration, rounds = len(trained_rounds(south)), len(sites_by_round(out))
    eventually(lambda: len(sites_by_round(out)) >= rounds + 2, "two rounds without south")
    assert len(trained_rounds(south)) == after_alteration
    assert "waiting for approval at the hospital" in run.output
    assert run.stop() != 0


def test_an_unapproved_plan_never_runs_and_the_run_says_who_waits(hospitals: tuple[Federation, Approver]) -> None:
    federation, weber = hospitals
    south = federation.south
    run = federation.run("participation.roll_call_deadline_s=6", once=True)
    assert run.ends() != 0
    assert re.search(r"south: waiting for approval at the hospital", run.output)
    assert "participation.roll_call_deadline_s" in run.output
    sha256 = wait_for_plan(south)
    assert weber.approve(south.folder, sha256).code == 0
    # Another number of rounds is another plan.
    run = federation.run("run.rounds=3", *TWO, out="other", once=True)
    run.succeeds()
    assert sites_by_round(federation.folder / "other") == [["east", "north"]] * 3
    assert trained_rounds(south) == []
    caution = "At south nobody approved the plan: the model was trained without it."
    assert caution in summary_of(federation.folder / "other")["claims"]["cautions"]
