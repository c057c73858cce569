"""No request that a coordinator signs ends a hospital's program, or writes outside its folder."""

import json
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from polyclinic.common.config import read_experiment
from polyclinic.common.wire.versions import WIRE_VERSION
from polyclinic.strategies.engine.exchange import COORDINATOR_CODES, SITE_FAILED
from tests.hostile_requests import HostileRequest, RequestMutator, encode_record, honest_requests
from tests.network.blamer import BLAMED
from tests.network.excuse import REASON
from tests.network.fatal import RUN as FATAL_RUN
from tests.network.hostile import HostileLink, hostile_link, listing_of
from tests.network.real import PARTIAL, Coordinator, Machine, Site, exported, flwr_client, lines_of, machine, written

pytestmark = pytest.mark.slow
RUN = "hostile"
CLASSES = ("0", "1", "2", "3", "4")
FEW, MANY = 100, 2000
TWO_COLUMNS = "0123456789abcdef not-ours\n"


class Target:
    """A coordinator with one hospital, and files outside of the hospital's folder that it must not touch."""

    def __init__(self, here: Machine, outside: Path) -> None:
        self.outside, self.machine, self.coordinator = outside, here, Coordinator(here)
        self.experiment = written(PARTIAL, here.folder)
        data = exported(self.experiment, here.folder / "data")
        self.site: Site = self.coordinator.admit(self.coordinator.site(data[0]))
        self.site.edit(self.site.toml, ("[policy]", "[policy]\nmaximum_hours = 0.01"))
        for name in ("folder", "full"):
            (outside / name).mkdir(parents=True)
        (outside / "two-columns.txt").write_text(TWO_COLUMNS, encoding="ascii")
        (outside / "prose.txt").write_text("A text of another form.\n", encoding="ascii")
        (outside / "state.json").write_text("{}", encoding="ascii")
        (outside / "full" / "kept").write_text("kept", encoding="ascii")
        names = ("new", "absent/new", "two-columns", "prose", "state", "full", "folder/new")
        self.targets = tuple(str(outside / name) for name in names)
        self.coordinator.start()
        self.site.connect()
        self.coordinator.sees(self.site)

    def listing(self) -> dict[str, str]:
        """Everything on this machine's folder except what its programs write to themselves."""
        own = (self.site.folder, self.coordinator.folder, *self.machine.folder.glob("*.log"))
        return listing_of(self.machine.folder, own) | listing_of(self.outside)

    def entries(self) -> list[dict[str, Any]]:
        """The audit's lines about requests."""
        lines = lines_of(self.site.folder / "state" / "audit.jsonl")
        return [line for line in lines if line.get("direction") == "in"]

    def takes_part(self, out: Path) -> None:
        """An honest run trains with it."""
        options = ("run.rounds=1", "participation.min_sites=1")
        self.coordinator.run(self.experiment, out, *options, sites=1, once=True).succeeds()


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    # A statement names a run by at most 64 characters, so that a path has to be short to be an attack.
    with machine(tmp_path / "machine") as here, TemporaryDirectory(prefix="o") as outside:
        yield Target(here, Path(outside))


def roll_call(target: Target, run: str) -> HostileRequest:
    """A roll call that is honest but for its run's name."""
    call, *_ = honest_requests(read_experiment(target.experiment), CLASSES, RUN)
    content = encode_record(call)
    content["fields"]["run"] = run
    return HostileRequest("run", "query.roll_call", content, {})


def test_a_run_that_is_a_path_makes_and_changes_no_file_and_ends_nothing(target: Target, tmp_path: Path) -> None:
    before, program = target.listing(), target.site.program
    with hostile_link(target.coordinator, target.site) as link:
        for path in (*target.targets, "../../../bait", "\0", "a\nb", ""):
            reply = link.send(roll_call(target, path))
            assert target.listing() == before
            assert program.runs, program.output
            assert reply.has_error()
            assert target.entries()[-1]["decision"] == "deny"
    target.takes_part(tmp_path / "run")
    assert target.site.program is program
    assert program.runs


def test_a_message_at_which_two_processes_died_is_put_aside_and_the_program_starts(
    target: Target, tmp_path: Path
) -> None:
    """Also where they died before any work on it had begun."""
    site = target.site
    site.program.stop()
    site.start_by("-m", "tests.network.fatal", "start", site.folder).says("connected to ")
    target.coordinator.sees(site)
    with hostile_link(target.coordinator, site) as link:
        name = link.post(roll_call(target, FATAL_RUN))
        for _ in range(2):
            assert site.program.ends() == -signal.SIGKILL
            site.start_by("-m", "tests.network.fatal", "start", site.folder)
        assert "died 2 times" in link.receive(name).error.reason
        assert site.program.runs
        (aside,) = (site.folder / "state" / "set-aside").iterdir()
        assert "died 2 times" in json.loads(aside.read_bytes())["reason"]
        assert target.entries()[-1]["rule"] == "set aside"
    target.takes_part(tmp_path / "run")
    assert site.program.runs


def test_a_message_of_another_wire_or_for_another_name_is_refused_while_the_coordinator_says_otherwise(
    target: Target,
) -> None:
    other_wire = roll_call(target, "run-1")
    other_wire.content["fields"]["wire.version"] = WIRE_VERSION + 1
    other_name = replace(roll_call(target, "run-1"), statement={"site": "another"})
    with hostile_link(target.coordinator, target.site) as link:
        for request, reason in ((other_wire, "wire version"), (other_name, "its key is registered for")):
            assert reason in link.send(request).error.reason
        assert not link.send(roll_call(target, "run-1")).has_error()
    assert target.site.program.runs


def test_an_error_in_the_name_of_another_site_counts_for_its_sender(target: Target) -> None:
    target.site.program.stop()
    target.site.start_by("-m", "tests.network.blamer", "start", target.site.folder).says("connected to ")
    target.coordinator.sees(target.site)
    with hostile_link(target.coordinator, target.site) as link:
        reply = link.send(roll_call(target, "run-1"))
        assert reply.error.reason == "out of order"
        assert reply.metadata.src_node_id == link.node != BLAMED


def test_error_codes_of_the_coordinators_own_count_for_nothing_if_a_site_writes_them(target: Target) -> None:
    target.site.program.stop()
    target.site.start_by("-m", "tests.network.excuse", "start", target.site.folder).says("connected to ")
    target.coordinator.sees(target.site)
    with hostile_link(target.coordinator, target.site) as link:
        errors = {code: link.send(roll_call(target, str(code))).error for code in (*sorted(COORDINATOR_CODES), 999)}
    assert {error.reason for error in errors.values()} == {REASON}
    codes = {code: error.code for code, error in errors.items()}
    assert codes == dict.fromkeys(COORDINATOR_CODES, SITE_FAILED) | {999: 999}


def send_many(target: Target, link: HostileLink, times: int, seed: int) -> Counter[str]:
    """Send so many hostile requests; count what was done to them and what came of it."""
    requests = honest_requests(read_experiment(target.experiment), CLASSES, RUN)
    mutator, outcomes = RequestMutator(requests, target.targets, seed), Counter[str]()
    audit = target.site.folder / "state" / "audit.jsonl"
    for number in range(times):
        request, size = mutator.make_request(), audit.stat().st_size
        reply = link.send(request)
        assert target.site.program.runs, f"{number}: {request}\n{target.site.program.output[-3000:]}"
        with audit.open("rb") as file:
            file.seek(size)
            entries = [json.loads(line) for line in file]
        came = [entry for entry in entries if entry["direction"] == "in"]
        failed = [entry for entry in entries if entry["record"] == "Error" or entry.get("decision") == "deny"]
        assert came, f"{number}: no entry of the audit for {request}"
        assert bool(failed) == reply.has_error(), f"{number}: {entries} for {request}"
        outcomes[f"{request.kind}: {'refused' if reply.has_error() else 'answered'}"] += 1
    return outcomes


def check_many(target: Target, times: int, tmp_path: Path) -> Counter[str]:
    before = target.listing()
    with hostile_link(target.coordinator, target.site) as link:
        outcomes = send_many(target, link, times, seed=20)
    assert target.listing() == before
    assert sum(outcomes.values()) == times
    assert flwr_client("audit", "verify", target.site.folder).code == 0
    target.takes_part(tmp_path / "run")
    assert target.site.program.runs
    assert len(target.site._programs) == 1
    return outcomes


def test_a_hundred_mutated_requests_of_a_true_coordinator_end_nothing(target: Target, tmp_path: Path) -> None:
    outcomes = check_many(target, FEW, tmp_path)
    assert sum(count for name, count in outcomes.items() if name.endswith("refused")) > FEW / 2


@pytest.mark.long
def test_two_thousand_mutated_requests_of_a_true_coordinator_end_nothing(
    target: Target, tmp_path: Path, record_property: Any
) -> None:
    outcomes = check_many(target, MANY, tmp_path)
    for name, count in sorted(outcomes.items()):
        record_property(name, count)
        print(f"{count:6}  {name}")
