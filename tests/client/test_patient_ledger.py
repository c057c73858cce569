"""A privacy budget belongs to the patients: one ledger for all folders that have them, and what may not start anew."""

import json
import multiprocessing
import os
import re
import resource
import shutil
import sqlite3
import stat
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyclinic.client.app import answer_roll_call
from polyclinic.client.connection.service import describe_error_for_coordinator
from polyclinic.client.site import patient_ledger
from polyclinic.client.site.budget import describe_ledger
from polyclinic.client.site.patient_ledger import (
    LedgerUnusable,
    PatientCosts,
    PatientLedger,
    PrivacyCostEntry,
    find_account_ledger_folder,
    make_cost_id,
    open_site_ledger,
)
from polyclinic.client.site.policy import SitePolicy
from polyclinic.client.site.site import Site
from polyclinic.client.site.site_file import make_site_folder, read_site_toml_without_data
from polyclinic.client.training.layers import train_with_privacy_layers
from polyclinic.client.training.privacy import (
    PrivacyBudgetLedger,
    compute_largest_patient_epsilon,
    make_privacy_status,
    make_privacy_status_at_start,
)
from polyclinic.common.config import HospitalPlan
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.wire.records import RollCall, TrainReply
from polyclinic.data.base.image_set import ImageSet, make_placeholder_patient_names
from polyclinic.data.base.names import make_name_similarity_key
from polyclinic.strategies.privacy.mechanism import NoisySteps, compute_epsilon
from tests.client.rounds import Killed, images, plan, private_plan, request, site
from tests.processes import ROOT


def noisy(**keys: Any) -> HospitalPlan:
    return private_plan(plan("fedavg"), level="patient", noise_multiplier=2.0, **keys)


def cost_of(rounds: int) -> float:
    """Five steps a round, of 40 patients in batches of 8."""
    return compute_epsilon([NoisySteps(2.0, 0.2, 5 * rounds)], 1e-5, "prv")


BUDGET = (cost_of(2) + cost_of(3)) / 2
"""Two rounds."""


def hospital(tmp_path: Path, folder: str, federation: str = "trial", train: ImageSet | None = None) -> Site:
    """A site's folder of this account; all have the same patients unless others are given."""
    at = site(tmp_path / folder)
    at.folder.mkdir(exist_ok=True)
    return replace(
        at,
        train=at.train if train is None else train,
        policy=SitePolicy(smallest_count=0, epsilon=BUDGET),
        ledger=PatientLedger(tmp_path / "ledger", at.folder, site="north", federation=federation),
    )


def train(at: Site, run: str = "run", server_round: int = 1) -> TrainReply:
    asked = request(noisy(), server_round=server_round, counted=server_round - 1)
    return train_with_privacy_layers(at, replace(asked, run=run))


def spent(at: Site) -> float:
    return float(make_privacy_status(at)["epsilon"])


def declines(at: Site, run: str = "last") -> None:
    with pytest.raises(BadInput, match="another round would cost its patients more than this site allows"):
        train(at, run)
    with pytest.raises(BadInput, match="another round would cost its patients more than this site allows"):
        answer_roll_call(at, RollCall(run, noisy().model_dump_json()))


def test_folders_of_two_federations_spend_from_one_budget_and_it_is_told_once(tmp_path: Path) -> None:
    first, second = hospital(tmp_path, "a"), hospital(tmp_path, "b", "other")
    train(first, "one")
    train(second, "two")
    assert [spent(at) for at in (first, second)] == [cost_of(2)] * 2
    rows = make_privacy_status(first)["federations"]
    assert [(row["federation"], row["runs"], row["patients"]) for row in rows] == [("trial", 1, 56), ("other", 1, 56)]
    assert [row["epsilon"] for row in rows] == [cost_of(1)] * 2
    declines(first)
    declines(second)


def test_a_folder_that_is_put_back_from_a_backup_spends_nothing_anew(tmp_path: Path) -> None:
    at = hospital(tmp_path, "a")
    train(at)
    shutil.copytree(at.folder, tmp_path / "backup")
    train(at, server_round=2)
    shutil.rmtree(at.folder)
    shutil.copytree(tmp_path / "backup", at.folder)
    declines(hospital(tmp_path, "a"))


def test_the_same_request_after_a_restore_is_answered_with_new_noise_and_costs_again(tmp_path: Path) -> None:
    """Its stored reply is gone: what left before the restore has left."""
    at = hospital(tmp_path, "a")
    shutil.copytree(at.folder, tmp_path / "backup")
    first = train(at)
    shutil.rmtree(at.folder)
    shutil.copytree(tmp_path / "backup", at.folder)
    again = train(hospital(tmp_path, "a"))
    assert not np.array_equal(first.update.trunk, again.update.trunk)
    assert spent(hospital(tmp_path, "a")) == cost_of(2)


def test_a_ledger_that_was_lost_or_put_back_gets_the_costs_of_each_folder_again(tmp_path: Path) -> None:
    first, second = hospital(tmp_path, "a"), hospital(tmp_path, "b", "other")
    train(first)
    shutil.copytree(tmp_path / "ledger", tmp_path / "backup")
    train(second)
    shutil.rmtree(tmp_path / "ledger")
    shutil.copytree(tmp_path / "backup", tmp_path / "ledger")
    assert spent(hospital(tmp_path, "b", "other")) == cost_of(2)
    shutil.rmtree(tmp_path / "ledger")
    for folder in ("a", "b"):
        spent(hospital(tmp_path, folder))
    declines(hospital(tmp_path, "c"))


def test_a_folder_of_an_earlier_release_brings_what_it_has_spent(tmp_path: Path) -> None:
    """Its entries have no names, and a copy of the folder has the same ones."""
    at = replace(hospital(tmp_path, "old"), ledger=None)
    for server_round in (1, 2):
        train(at, server_round=server_round)
    path = at.folder / "privacy" / "ledger.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    for entry in tree["entries"]:
        del entry["id"]
    path.write_text(json.dumps(tree), encoding="utf-8")
    shutil.copytree(at.folder, tmp_path / "copy")
    assert [spent(hospital(tmp_path, folder)) for folder in ("old", "copy", "new")] == [cost_of(2)] * 3


def some(rows: Sequence[int], of: ImageSet) -> ImageSet:
    """Rows of a part."""
    return of.select_rows(np.array(rows, np.intp))


def of_rows(tmp_path: Path, folder: str, *rows: int) -> Site:
    """A folder with some of 120 patients, and no validation images."""
    at = hospital(tmp_path, folder, train=some(rows, images(1, 120)))
    return replace(at, validation=some([], at.validation))


def test_of_patients_who_overlap_in_part_the_largest_sum_counts(tmp_path: Path) -> None:
    train(of_rows(tmp_path, "a", *range(40)))
    train(of_rows(tmp_path, "b", *range(40, 80)))
    # Patients of both folders: each has taken part once.
    assert spent(of_rows(tmp_path, "c", *range(20, 60))) == cost_of(1)
    train(of_rows(tmp_path, "c", *range(20, 60)))
    # One patient who took part twice, among strangers; and nobody who did.
    assert spent(of_rows(tmp_path, "d", 39, *range(81, 120))) == cost_of(2)
    assert spent(of_rows(tmp_path, "e", 0, *range(81, 120))) == cost_of(1)
    assert spent(of_rows(tmp_path, "f", *range(80, 120))) == 0
    declines(of_rows(tmp_path, "d", 39, *range(81, 120)))


def test_patients_are_found_again_by_name_or_picture(tmp_path: Path) -> None:
    at = hospital(tmp_path, "a")
    part = at.train
    train(at)
    train(at, server_round=2)
    others = np.uint8(255) - part.images
    renamed = {
        "pseudonyms": replace(part, patients=np.char.add("x", part.patients)),
        "no patient column": replace(part, patients=make_placeholder_patient_names(len(part))),
        "other pictures": replace(part, stored=others),
        "spelling": replace(part, stored=others, patients=np.char.add("P-", np.char.replace(part.patients, "-", "_"))),
        "other order": some(range(39, -1, -1), part),
        "other labels": replace(part, labels=1 - part.labels),
    }
    assert {name: spent(hospital(tmp_path, name, train=of)) for name, of in renamed.items()} == dict.fromkeys(
        renamed, cost_of(2)
    )
    strangers = replace(part, stored=others, patients=np.char.add("x", part.patients))
    nobody = hospital(tmp_path, "strangers", train=strangers)
    assert spent(replace(nobody, validation=some([], at.validation))) == 0


def test_pictures_without_content_identify_nobody(tmp_path: Path) -> None:
    def blank(folder: str, names: str) -> Site:
        at = hospital(tmp_path, folder)
        part = replace(at.train, stored=np.zeros_like(at.train.stored), patients=np.char.add(names, at.train.patients))
        return replace(at, train=part, validation=some([], part))

    train(blank("a", "x"))
    assert [spent(blank("b", "x")), spent(blank("c", "y"))] == [cost_of(1), 0]


def test_a_killed_training_counts_once_and_its_request_is_not_paid_for_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    at = hospital(tmp_path, "a")

    def killed(*arguments: Any, **layers: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("polyclinic.client.training.layers.answer_train_request", killed)
        patched.setattr(PatientLedger, "release_cost", killed)  # a killed process releases nothing
        for _ in range(3):
            with pytest.raises(Killed):
                train(at)
    assert spent(hospital(tmp_path, "b")) == cost_of(1)
    # The request may be resumed where the budget has room for one more round than the reserved one, and none.
    train(hospital(tmp_path, "b"), "two")
    resumed = replace(hospital(tmp_path, "a"), policy=replace_epsilon(at, (cost_of(1) + cost_of(2)) / 2))
    train(resumed)
    assert spent(hospital(tmp_path, "a")) == cost_of(2)


def killed_in_training(monkeypatch: pytest.MonkeyPatch, at: Site) -> None:
    """A power cut in the middle of a round: the cost is reserved, and nothing else is written."""

    def killed(*arguments: Any, **layers: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("polyclinic.client.training.layers.answer_train_request", killed)
        patched.setattr(PatientLedger, "release_cost", killed)
        with pytest.raises(Killed):
            train(at)


@pytest.mark.parametrize("rows", [range(40, 80), range(41)])
def test_a_reserved_round_is_not_used_for_other_patients(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: Sequence[int]
) -> None:
    """The table changed between the kill and the start: who is trained on decides and pays."""
    spenders = of_rows(tmp_path, "b", *range(40, 80))
    for server_round in (1, 2):
        train(spenders, "other", server_round)
    killed_in_training(monkeypatch, of_rows(tmp_path, "a", *range(40)))
    declines(of_rows(tmp_path, "a", *rows), "run")
    assert spent(of_rows(tmp_path, "c", *range(40))) == cost_of(1)


def test_a_changed_table_within_the_budget_is_trained_on_and_charged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    killed_in_training(monkeypatch, of_rows(tmp_path, "a", *range(40)))
    at = of_rows(tmp_path, "a", *range(40, 80))
    answer_roll_call(at, RollCall("run", noisy().model_dump_json()))
    train(at)
    assert [spent(of_rows(tmp_path, "c", *rows)) for rows in (range(40, 80), range(40))] == [cost_of(1)] * 2


def test_a_reply_that_was_stored_before_a_kill_is_paid_for_by_its_own_patients(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def killed(*arguments: Any, **layers: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(PrivacyBudgetLedger, "write_privacy_cost", killed)
        with pytest.raises(Killed):
            train(of_rows(tmp_path, "a", *range(40)))
    shutil.rmtree(tmp_path / "ledger")
    train(of_rows(tmp_path, "a", *range(40, 70)))  # the stored reply
    assert [spent(of_rows(tmp_path, "c", *rows)) for rows in (range(40), range(40, 80))] == [cost_of(1), 0]


@pytest.mark.parametrize("lost", ["lost", "older", "another", "another in use"])
def test_a_ledger_gets_the_costs_of_a_folder_for_the_patients_of_that_time(tmp_path: Path, lost: str) -> None:
    """The folder has other patients by then: the new ones are not charged, and the earlier ones do not begin at 0."""
    strangers = hospital(tmp_path, "x", train=images(9, 40))
    train(replace(strangers, validation=some([], strangers.validation)))
    shutil.copytree(tmp_path / "ledger", tmp_path / "backup")
    for server_round in (1, 2):
        train(of_rows(tmp_path, "a", *range(40)), "one", server_round)
    shutil.rmtree(tmp_path / "ledger")
    if lost == "older":
        shutil.copytree(tmp_path / "backup", tmp_path / "ledger")
    if lost == "another":  # made by a folder that knows no earlier ledger
        spent(of_rows(tmp_path, "d", *range(10)))
    if lost == "another in use":
        train(of_rows(tmp_path, "d", *range(40, 80)), "two")
    own = cost_of(1) if lost == "another in use" else 0
    assert spent(of_rows(tmp_path, "a", *range(40, 80))) == own
    train(of_rows(tmp_path, "a", *range(40, 80)), "three")
    declines(of_rows(tmp_path, "c", *range(40)))
    declines(of_rows(tmp_path, "c", 39, *range(50, 79)))
    assert spent(of_rows(tmp_path, "c", *range(40))) == cost_of(2)


def test_a_folder_keeps_the_patients_of_its_costs_for_this_account_alone(tmp_path: Path, lax_umask: None) -> None:
    at = hospital(tmp_path, "a")
    train(replace(at, train=replace(at.train, patients=np.char.add("Doe^Jane", at.train.patients))))
    (path,) = (at.folder / "privacy" / "patients").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"Doe" not in path.read_bytes()
    for damaged in (path.read_bytes()[:-8], b""):  # then as in a folder of an earlier release
        path.write_bytes(damaged)
        shutil.rmtree(tmp_path / "ledger")
        assert spent(hospital(tmp_path, "a")) == cost_of(1)


def replace_epsilon(at: Site, epsilon: float) -> SitePolicy:
    return at.policy.model_copy(update={"epsilon": epsilon})


def test_another_request_after_a_kill_and_another_folder_pay_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    at = hospital(tmp_path, "a")

    def killed(*arguments: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(PrivacyBudgetLedger, "write_reply_and_cost", killed)
        with pytest.raises(Killed):
            train(at)
    shutil.copytree(at.folder, tmp_path / "copy")
    train(hospital(tmp_path, "copy"))  # the same request: a copy of the folder is another one
    assert spent(at) == cost_of(2)
    declines(hospital(tmp_path, "a"), "another")


def test_a_stopped_training_and_a_request_at_fault_cost_nothing_and_a_failure_costs_a_reply(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    at = hospital(tmp_path, "a")

    def costs_after(error: BaseException) -> float:
        def fails(*arguments: Any, **layers: Any) -> None:
            raise error

        with monkeypatch.context() as patched:
            patched.setattr("polyclinic.client.training.layers.answer_train_request", fails)
            with pytest.raises(type(error)):
                train(at)
        return spent(at)

    assert [costs_after(error) for error in (KeyboardInterrupt(), BadInput([Fault("plan", "no.")]))] == [0, 0]
    assert [costs_after(RuntimeError("out of memory")) for _ in range(2)] == [cost_of(1), cost_of(2)]
    declines(at)


def reserve_when_told(ledger: PatientLedger, part: ImageSet, go: Any, done: Any) -> None:
    """Reserve a round at the same moment as others do; say if it was allowed."""

    def decide(costs: PatientCosts) -> None:
        if compute_largest_patient_epsilon(costs, 1e-5, [NoisySteps(2.0, 0.2, 5)]) > BUDGET:
            raise BadInput([Fault("policy.epsilon", "no.")])

    ledger.identify_patients(part)
    go.wait()
    try:
        ledger.reserve_cost(PrivacyCostEntry("run", 1, make_cost_id(), 2.0, 0.2, 5, make_cost_id()), decide)
    except BadInput:
        done.put(False)
    else:
        done.put(True)


def test_of_folders_that_ask_at_the_same_time_no_more_are_allowed_than_the_budget_has_room_for(tmp_path: Path) -> None:
    """Six processes, and room for two rounds."""
    context, part = multiprocessing.get_context("fork"), images(1, 40)
    go, done, processes = context.Barrier(6), context.Queue(), []
    for number in range(6):
        at = hospital(tmp_path, str(number))
        processes.append(context.Process(target=reserve_when_told, args=(at.ledger, part, go, done)))
    for process in processes:
        process.start()
    allowed = [done.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert sorted(allowed) == [False] * 4 + [True] * 2


def test_other_folders_use_the_ledger_while_a_cost_is_computed_and_the_decision_under_the_lock_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patient_ledger, "LOCK_TIMEOUT_S", 1.0)
    here, elsewhere = (hospital(tmp_path, name).ledger for name in ("here", "elsewhere"))
    assert here is not None
    assert elsewhere is not None
    for ledger in (here, elsewhere):
        ledger.identify_patients(images(1, 40))
    numbers_of_costs: list[int] = []

    def reserve_elsewhere_meanwhile(costs: PatientCosts) -> None:
        numbers_of_costs.append(len(costs.charged))
        if costs.charged:
            raise BadInput([Fault("policy.epsilon", "no.")])
        elsewhere.reserve_cost(replace(COST, id=make_cost_id()), lambda costs: None)

    with pytest.raises(BadInput):
        here.reserve_cost(replace(COST, id=make_cost_id()), reserve_elsewhere_meanwhile)
    assert numbers_of_costs == [0, 1]
    assert len(here.list_costs().charged) == 1


COST = PrivacyCostEntry("run", 1, "request", 2.0, 0.2, 5)


@pytest.mark.parametrize(
    ("budget", "is_allowed"),
    [
        (cost_of(3), True),
        (np.nextafter(cost_of(3), 0), False),
        (compute_epsilon([NoisySteps(2.0, 0.2, 15)], 1e-5, "rdp"), True),
        (compute_epsilon([NoisySteps(2.0, 0.2, 15)], 1e-5, "rdp") - 1e-9, True),
    ],
    ids=["the exact epsilon", "a digit less", "the quick bound", "less than the quick bound"],
)
def test_the_exact_epsilon_decides_also_where_the_quick_bound_is_tried_first(
    budget: float, is_allowed: bool, tmp_path: Path
) -> None:
    at = replace(hospital(tmp_path, "a"), policy=SitePolicy(smallest_count=0, epsilon=budget))
    for server_round in (1, 2):
        train(at, server_round=server_round)
    if is_allowed:
        train(at, server_round=3)
        assert spent(at) == cost_of(3)
    else:
        declines(at)


def test_the_ledger_names_nobody_and_no_other_account_may_read_it(tmp_path: Path, lax_umask: None) -> None:
    at = hospital(tmp_path, "a")
    train(replace(at, train=replace(at.train, patients=np.char.add("Doe^Jane", at.train.patients))))
    path = tmp_path / "ledger" / "ledger.sqlite"
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)] == [0o600, 0o700]
    assert b"Doe^Jane" not in path.read_bytes()
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_the_coordinator_reads_no_number_that_depends_on_which_patients_are_here(tmp_path: Path) -> None:
    lines: list[str] = []
    for server_round in (1, 2):
        train(hospital(tmp_path, "a"), server_round=server_round)
    at = replace(hospital(tmp_path, "b", "other"), tell=lines.append)
    with pytest.raises(BadInput) as refused:
        train(at)
    assert f"{cost_of(3):.2f}" not in str(refused.value)
    assert "trial" not in str(refused.value)
    assert f"to {cost_of(3):.2f}" in lines[-1]
    assert "trial, as north: epsilon" in lines[-1]


def test_a_damaged_ledger_stops_the_start_and_a_message_names_the_file(tmp_path: Path) -> None:
    at = hospital(tmp_path, "a")
    train(at)
    path = tmp_path / "ledger" / "ledger.sqlite"
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(BadInput, match=r"ledger\.sqlite cannot be used: file is not a database"):
        make_privacy_status_at_start(hospital(tmp_path, "a"))
    path.unlink()
    with sqlite3.connect(path) as newer:
        newer.execute("CREATE TABLE about (format INTEGER, key BLOB)")
        newer.execute("INSERT INTO about VALUES (2, x'00')")
    with pytest.raises(BadInput, match="has format 2; this release reads 1"):
        make_privacy_status_at_start(hospital(tmp_path, "a"))


def test_the_ledger_is_one_for_an_account_and_an_account_without_a_place_for_it_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert find_account_ledger_folder() == tmp_path / "state" / "polyclinic" / "ledger"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert find_account_ledger_folder() is None
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_account_ledger_folder() == tmp_path / ".local" / "state" / "polyclinic" / "ledger"


def test_a_full_disk_of_the_ledger_is_a_full_disk_and_costs_nothing(tmp_path: Path) -> None:
    at = hospital(tmp_path, "a")
    spent(at)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match=r"ledger\.sqlite") as full:
            train(at)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert describe_error_for_coordinator(full.value) == "no room on the site's disk; it has to free some"
    assert spent(at) == 0
    train(at)


def test_a_stop_on_request_stays_one_where_the_ledger_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines: list[str] = []
    at = replace(hospital(tmp_path, "a"), tell=lines.append)
    path = tmp_path / "ledger" / "ledger.sqlite"

    def stopped(*arguments: Any, **layers: Any) -> None:
        path.rename(path.with_suffix(".aside"))
        path.write_bytes(b"no database at all" * 100)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("polyclinic.client.training.layers.answer_train_request", stopped)
        with pytest.raises(KeyboardInterrupt):
            train(at)
    assert "stays counted for privacy" in lines[-1]
    path.with_suffix(".aside").rename(path)
    assert spent(at) == cost_of(1)


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "1", "{}", '{"entries": [1]}', '{"entries": [{"run": 1}]}', "\xff"),
        json.dumps({"entries": [{**asdict(PrivacyCostEntry("r", 1, "q", 1.0, 0.1, 5)), "count": "5"}]}),
    ],
)
def test_damaged_costs_of_a_folder_stop_the_start_and_a_message_names_the_file(tmp_path: Path, content: str) -> None:
    at = hospital(tmp_path, "a")
    train(at)
    path = at.folder / "privacy" / "ledger.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(BadInput, match=r"ledger\.json is damaged .* Put its backup back"):
        make_privacy_status_at_start(hospital(tmp_path, "a"))
    path.unlink()  # the remedy
    assert spent(hospital(tmp_path, "a")) == cost_of(1)


def test_a_ledger_named_in_the_home_lies_there_and_the_remedy_does_not_name_what_was_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "north"
    make_site_folder(folder, "north")
    text = (folder / "site.toml").read_text(encoding="utf-8")
    named = text.replace("\n[policy]", '\n[policy]\nledger = "~/x"', 1)
    (folder / "site.toml").write_text(named, encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    ledger = open_site_ledger(read_site_toml_without_data(folder))
    assert (ledger.folder, ledger.shared) == (tmp_path / "home" / "x", True)
    (tmp_path / "home").touch()
    with pytest.raises(LedgerUnusable, match=r"change policy\.ledger in site\.toml to another folder"):
        ledger.identify_patients(images(1, 40))


@pytest.mark.parametrize("home", ["relative", "/" + "a" * 300])
def test_an_account_without_a_usable_home_has_the_ledger_in_the_folder_and_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str
) -> None:
    monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    make_site_folder(tmp_path / "north", "north")
    ledger = open_site_ledger(read_site_toml_without_data(tmp_path / "north"))
    if home.startswith("/"):
        assert ledger.folder.is_relative_to(home) == os.access("/", os.W_OK)
        return
    assert ledger.folder == tmp_path / "north" / "state" / "privacy"
    assert "which is this folder's own" in describe_ledger(str(ledger.path), shared=ledger.shared)


def test_strangers_with_one_common_card_are_told_that_a_picture_matched(tmp_path: Path) -> None:
    card = np.random.default_rng(5).integers(0, 255, (16, 16)).astype(np.uint8)
    lines: list[str] = []

    def cohort(folder: str, part: ImageSet) -> Site:
        pixels = part.images.copy()
        pixels[3] = card
        at = replace(hospital(tmp_path, folder, train=replace(part, stored=pixels)), tell=lines.append)
        return replace(at, validation=some([], at.validation))

    first = cohort("a", images(1, 40))
    for server_round in (1, 2):
        train(first, server_round=server_round)
    declines(cohort("b", images(11, 40)))
    assert "with 1 of the 40 patients here (1 by a picture alone)" in lines[-2]
    assert "recognised by a picture alone, which a patient of another name had too: 11-3." in lines[-1]
    assert "take its file out of the table" in lines[-1]
    lines.clear()
    declines(first)
    unnamed = replace(first.train, patients=make_placeholder_patient_names(40))
    declines(replace(hospital(tmp_path, "c", train=unnamed), validation=first.validation, tell=lines.append))
    assert not any("by a picture alone" in line for line in lines)


ONE = [("7", "007", "7.0", "MRN:7", "P-7", "p7.dcm"), ("Doe^John", "Doe John", "doe^john^^")]
TWO = [("Doe^John", "John Doe"), ("943 476 5919", "9434765919"), ("north/P1", "P1"), ("Müller", "Mueller")]


def test_the_page_says_which_spellings_are_one_patient() -> None:
    keys = [{make_name_similarity_key(name) for name in names} for names in (*ONE, *TWO)]
    assert [len(each) for each in keys] == [1] * len(ONE) + [2] * len(TWO)
    page = " ".join((ROOT / "docs" / "privacy.md").read_text(encoding="utf-8").split())
    assert "7, 007, 7.0, MRN:7, `P-7` and `p7.dcm`" in page
    for first, second in TWO:
        assert re.search(rf"{re.escape(first)}`?\s+and `?{re.escape(second)}", page), (first, second)
