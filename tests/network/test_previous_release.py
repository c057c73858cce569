"""Coordinator and hospitals one release apart, over real processes of a real wheel of the previous release.

Each run ends in the model that all-new programs train, or with a reason that names what the older release lacks.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from polyclinic.client.connection.exit_codes import ClientExitCode
from polyclinic.common import __version__
from polyclinic.common.wire.versions import WIRE_VERSION
from tests.network.federated import EVERYBODY, REMEMBERING, SLOW, Federation, events, sites_by_round, undisturbed
from tests.network.job_queue import install_queue, submitted_jobs
from tests.network.previous_release import RELEASE, client_of_wire, install
from tests.network.real import (
    FULL,
    PARTIAL,
    Coordinator,
    InstalledRelease,
    Site,
    exported,
    flwr_client,
    flwr_server,
    machine,
    summary_of,
    written,
)

pytestmark = [pytest.mark.slow, pytest.mark.network]
NEW = None
"""This tree."""
BEFORE = WIRE_VERSION - 1
FOUR_ROUNDS = (SLOW, REMEMBERING, "run.rounds=4")
MASKED = ("privacy.secure_aggregation=true", "participation.min_sites=2")


@pytest.fixture(scope="session")
def old(tmp_path_factory: pytest.TempPathFactory) -> InstalledRelease:
    return install(tmp_path_factory.mktemp("previous"))


@contextmanager
def federation_of(
    folder: Path, coordinator: InstalledRelease | None, *sites: InstalledRelease | None, experiment: str = PARTIAL
) -> Iterator[Federation]:
    """A coordinator and three sites of these releases, all connected; each program made its folder itself."""
    file = written(experiment, folder)
    with machine(folder / "machine") as here:
        leads = Coordinator(here, release=coordinator)
        folders = exported(file, folder / "data")
        made = [leads.admit(leads.site(path, release=site)) for path, site in zip(folders, sites, strict=True)]
        federation = Federation(folder, here, leads, file, *made)
        leads.start()
        federation.gather()
        yield federation


def upgrade(site: Site) -> None:
    """Stop a site's old program, and start the new one on the same folder."""
    assert site.program.stop() == 0
    site.release = NEW
    site.connect()


# ---------------------------------------------------------------------- one release apart


@pytest.mark.parametrize(
    ("method", "experiment"), [("surgical", PARTIAL), ("fedavg", FULL)], ids=["surgical", "fedavg"]
)
def test_a_new_coordinator_and_hospitals_of_both_releases_train_the_model_of_all_new_ones(
    old: InstalledRelease, tmp_path: Path, method: str, experiment: str
) -> None:
    with federation_of(tmp_path, NEW, old, old, NEW, experiment=experiment) as federation:
        federation.ends_unharmed(federation.run(f"run.method={method}"), 2, f"run.method={method}")
        assert "no run will take it" not in federation.east.program.output
        assert flwr_server("verify", federation.out).code == 0
        for site, client in ((federation.east, old.typed), (federation.south, None)):
            command = ("audit", "verify", site.folder, "--receipt", federation.out / "receipt.json")
            checked = flwr_client(*command) if client is None else client("client", *command)
            assert checked.code == 0, checked.out + checked.err
        others = {event["site"]: event["wire"] for event in events(federation.out, "other_wire")}
        assert others == {"east": BEFORE, "north": BEFORE}
        assert [event["site"] for event in events(federation.out, "pixels_unknown")] == ["east", "north"]
        pixels = summary_of(federation.out)["pixels"]
        assert (pixels["unknown"], pixels["form"]["color"]) == (["east", "north"], False)
        sites = summary_of(federation.out)["sites"]
        assert {name: site["wire"] for name, site in sites.items()} == {
            "east": BEFORE,
            "north": BEFORE,
            "south": WIRE_VERSION,
        }
        status = flwr_server("status", federation.coordinator.folder).out
        assert status.count(f"has to update: its release {RELEASE} speaks wire version {BEFORE}") == 2


def test_an_old_coordinator_and_hospitals_of_both_releases_train_the_model_of_all_new_ones(
    old: InstalledRelease, tmp_path: Path
) -> None:
    with federation_of(tmp_path, old, NEW, old, NEW) as federation:
        federation.ends_unharmed(federation.run(), 2)
        status = flwr_client("status", federation.east.folder).out
        assert f"the coordinator has to update: it runs release {RELEASE} (wire version {BEFORE})" in status
        checked = flwr_client("check", federation.east.folder)
        assert "the coordinator has to update" in checked.out
        assert "this site's key is admitted" in checked.out


def test_a_run_that_states_its_pixels_takes_an_old_hospital_too_which_is_sent_no_such_table(
    old: InstalledRelease, tmp_path: Path
) -> None:
    with federation_of(tmp_path, NEW, old, NEW, NEW) as federation:
        federation.run("pixels={color = false}").succeeds()
        assert sites_by_round(federation.out) == [EVERYBODY] * 2
        assert summary_of(federation.out)["pixels"]["unknown"] == ["east"]
        refused = federation.run("pixels={image_size = 20}", out="larger")
        assert refused.ends() != 0


def test_a_run_with_a_vocabulary_takes_an_old_hospital_by_the_studys_words_and_refuses_its_synonym_with_the_line(
    old: InstalledRelease, tmp_path: Path
) -> None:
    with federation_of(tmp_path, NEW, old, NEW, NEW) as federation:
        names = list("0123456789")
        entries = ", ".join(f'"{name}" = {{}}' for name in names)
        federation.ends_unharmed(federation.run(f"vocabulary={{{entries}}}"), 2)
        synonyms = ", ".join(f'"class {name}" = {{synonyms = ["{name}"]}}' for name in names)
        federation.run(f"vocabulary={{{synonyms}}}", "participation.min_sites=2", out="synonyms").succeeds()
        assert sites_by_round(federation.folder / "synonyms") == [["north", "south"]] * 2
        (left_out,) = events(federation.folder / "synonyms", "left_out")
        assert left_out["site"] == "east"
        own = next(name for name in names if f'"{name}" = "class {name}"' in left_out["reason"])
        federation.east.program.says(f'"{own}" = "class {own}"')
        federation.gather()  # that release ends its program when it is refused
        command = ("status", federation.coordinator.folder, "--contract", federation.experiment, "--json")
        contract = json.loads(federation.coordinator.typed(*command).out)
        assert contract["silent"] == {}
        stated = {site: points["level"]["here"] for site, points in contract["sites"].items()}
        assert stated == {"east": "not stated", "north": "trusted", "south": "trusted"}
        assert contract["sites"]["east"]["release"]["here"] == f"{RELEASE} (wire {BEFORE})"


def test_a_masked_run_of_a_new_coordinator_goes_on_without_the_old_hospital_and_names_it(
    old: InstalledRelease, tmp_path: Path
) -> None:
    with federation_of(tmp_path, NEW, old, NEW, NEW) as federation:
        federation.run(*MASKED).succeeds()
        assert sites_by_round(federation.out) == [["north", "south"]] * 2
        (left_out,) = events(federation.out, "left_out")
        assert left_out["site"] == "east"
        assert f"secure aggregation needs wire version {WIRE_VERSION}" in left_out["reason"]
        assert f"secure aggregation needs wire version {WIRE_VERSION}" in federation.east.program.output


def test_a_masked_run_of_an_old_coordinator_goes_on_without_the_new_hospital_which_says_why(
    old: InstalledRelease, tmp_path: Path
) -> None:
    with federation_of(tmp_path, old, NEW, old, old) as federation:
        federation.run(*MASKED).succeeds()
        assert sites_by_round(federation.out) == [["north", "south"]] * 2
        (left_out,) = events(federation.out, "left_out")
        assert left_out["site"] == "east"
        assert f"declines: wire version: secure aggregation needs wire version {WIRE_VERSION}" in left_out["reason"]
        assert federation.east.program.runs


def test_a_new_hospital_that_trains_in_jobs_of_a_queue_takes_part_in_the_run_of_an_old_coordinator(
    old: InstalledRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = install_queue(tmp_path, monkeypatch)
    with federation_of(tmp_path, old, NEW, NEW, old) as federation:
        site = federation.north
        federation.stop(site)
        script = tmp_path / "north.sbatch"
        assert flwr_client("slurm", "script", site.folder, "--out", script, "--until-idle", "0.1").code == 0
        watching = site.start_by("-m", "polyclinic.client.cli", "slurm", "watch", site.folder, "--script", script)
        watching.says("connected to ")
        assert f"the coordinator has to update: it runs release 0.1.0 (wire version {BEFORE})" in watching.output
        federation.coordinator.sees(site)
        federation.ends_unharmed(federation.run(), 2)
        assert submitted_jobs(queue) != []
        watching.says("is over")
        assert watching.stop() == 0


# ---------------------------------------------------------------------- an upgrade in mid run


@pytest.mark.parametrize("leads", ["new", "old"])
def test_a_hospital_that_upgrades_in_mid_run_goes_on_from_its_own_folder(
    old: InstalledRelease, tmp_path: Path, leads: str
) -> None:
    coordinator = {"new": NEW, "old": old}[leads]
    with federation_of(tmp_path, coordinator, old, old, old) as federation:
        run = federation.run(*FOUR_ROUNDS)
        federation.north.works_on("train", 2)
        federation.north.program.kill()
        federation.north.release = NEW
        federation.north.start().says("taking up again the work that was interrupted")
        federation.ends_unharmed(run, 4, *FOUR_ROUNDS)


def test_a_coordinator_that_upgrades_in_mid_run_resumes_the_run_of_the_old_one(
    old: InstalledRelease, tmp_path: Path
) -> None:
    with federation_of(tmp_path, old, old, old, NEW) as federation:
        coordinator = federation.coordinator
        run = federation.run(*FOUR_ROUNDS)
        run.says("round 2 of 4")
        run.stop()
        coordinator.program.stop()
        coordinator.release = NEW
        coordinator.start()
        federation.gather()
        resumed = federation.run(*FOUR_ROUNDS, options=("--resume",))
        federation.ends_unharmed(resumed, 4, *FOUR_ROUNDS)


def test_a_whole_federation_upgrades_between_two_runs_and_both_runs_stay_readable(
    old: InstalledRelease, tmp_path: Path
) -> None:
    with federation_of(tmp_path, old, old, old, old) as federation:
        federation.run(out="before").succeeds()
        for site in federation.sites:
            assert site.program.stop() == 0
            site.release = NEW
        federation.coordinator.program.stop()
        federation.coordinator.release = NEW
        federation.coordinator.start()
        federation.gather()
        federation.run(out="after").succeeds()
        models = {summary_of(tmp_path / name)["model_sha256"] for name in ("before", "after")}
        assert models == {undisturbed(federation.experiment, tmp_path / "through")}
        for name in ("before", "after"):
            assert flwr_server("verify", tmp_path / name).code == 0
            receipt = tmp_path / name / "receipt.json"
            audited = flwr_client("audit", "verify", federation.east.folder, "--receipt", receipt)
            assert audited.code == 0, audited.out + audited.err


# ---------------------------------------------------------------------- two releases apart


@pytest.mark.parametrize(
    ("wire", "remedy"),
    [
        (WIRE_VERSION + 2, f"Ask the coordinator to install release 9.8.7, or install release {__version__} here."),
        (WIRE_VERSION - 2, f"Install release {__version__} here."),
    ],
)
def test_a_hospital_two_versions_apart_is_refused_at_the_connection_with_the_release_to_install(
    tmp_path: Path, wire: int, remedy: str
) -> None:
    with federation_of(tmp_path, NEW, NEW, NEW, NEW) as federation:
        site = federation.east
        federation.stop(site)
        program = site.start_by("-c", client_of_wire(wire), "start", site.folder)
        assert program.ends() == ClientExitCode.VERSION == 17
        assert f"wire version {WIRE_VERSION}, this site's release 9.8.7 speaks {wire} and {wire - 1}." in program.output
        assert remedy in program.output
        assert "connected to" not in program.output
        now = federation.coordinator.now["sites"]["east"]
        assert (now["state"], now["release"], now["wire"]) == ("stopped", __version__, WIRE_VERSION)


def test_a_watching_program_two_versions_apart_is_refused_at_the_connection_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_queue(tmp_path, monkeypatch)
    with federation_of(tmp_path, NEW, NEW, NEW, NEW) as federation:
        site = federation.east
        federation.stop(site)
        script = tmp_path / "east.sbatch"
        script.write_text("#!/bin/bash\n", encoding="utf-8")
        code = client_of_wire(WIRE_VERSION + 2)
        program = site.start_by("-c", code, "slurm", "watch", site.folder, "--script", script)
        assert program.ends() == ClientExitCode.VERSION == 17
        assert "connected to" not in program.output


@pytest.mark.parametrize("wire", [WIRE_VERSION + 1])
def test_a_hospital_that_is_newer_by_one_version_speaks_that_of_the_coordinator(tmp_path: Path, wire: int) -> None:
    with federation_of(tmp_path, NEW, NEW, NEW, NEW) as federation:
        site = federation.east
        federation.stop(site)
        site.start_by("-c", client_of_wire(wire), "start", site.folder).says("connected to")
        federation.coordinator.sees(site)
        federation.ends_unharmed(federation.run(), 2)
        assert summary_of(federation.out)["sites"]["east"]["wire"] == WIRE_VERSION
        assert sites_by_round(federation.out) == [EVERYBODY] * 2
