"""A stranger writes a kit from a hospital's public request, and is found; calls that another coordinator repeats."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from polyclinic.client.connection.exit_codes import ClientExitCode
from polyclinic.common.wire import fleet_protocol as fleet
from tests.client.handshakes import grpc_server
from tests.fleet_stub import FleetStub
from tests.network.conftest import Hospital, Trial
from tests.network.real import Coordinator, Machine, Program, Site, eventually, flwr_client, flwr_server, machine

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_proxy")]
PHRASE = re.compile(r"\b[a-z]{4,8}(?: [a-z]{4,8}){2}, [a-z]{4,8}(?: [a-z]{4,8}){2}\b")
NAME = "trial"


@dataclass
class Stranger:
    """A coordinator that has the federation's name, and a hospital's request out of somebody's mail."""

    here: Machine
    coordinator: Coordinator

    def false_kit(self, site: Site) -> str:
        """The text of a kit that the stranger makes for this site."""
        request = site.folder / f"{site.name}.request"
        assert flwr_server("admit", self.coordinator.folder, request, "--yes").code == 0
        return (self.coordinator.folder / "kits" / site.kit.name).read_text(encoding="utf-8")

    def connections(self) -> list[str]:
        """The sites that have connected to the stranger."""
        sites: dict[str, Any] = self.coordinator.now["sites"]
        return [name for name, site in sites.items() if site["state"] != "not connected"]


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stranger]:
    with machine(tmp_path_factory.mktemp("stranger") / "machine") as here:
        coordinator = Coordinator(here, NAME)
        coordinator.start()
        yield Stranger(here, coordinator)


def phrase_of(text: str) -> str:
    """The only phrase in this text."""
    phrases = set(PHRASE.findall(text))
    assert len(phrases) == 1, f"one phrase, not {sorted(phrases)}: {text}"
    return phrases.pop()


def phrase_that_is_read_out(coordinator: Coordinator) -> str:
    return phrase_of(flwr_server("status", coordinator.folder).out)


def checked(site: Site) -> tuple[int, dict[str, Any], str]:
    """Exit code and the connection of ``flwr-client check``, and all words in it."""
    ended = flwr_client("check", site.folder, "--json", "--images", 20)
    connection = json.loads(ended.out)["areas"]["connection"]
    findings = [f"{finding['problem']} {finding['remedy']}" for finding in connection["findings"]]
    return ended.code, connection, "\n".join([*connection["passed"], *findings])


def connects_or_ends(program: Program) -> bool:
    """Wait until a site is connected, or has ended; return whether it is connected."""
    eventually(lambda: "connected to" in program.output or not program.runs, "it connects or ends")
    return "connected to" in program.output


def test_a_strangers_kit_shows_another_phrase_than_the_coordinator_reads_out(
    trial: Trial, hospital: Hospital, stranger: Stranger
) -> None:
    site = hospital("first")
    site.kit.write_text(stranger.false_kit(site), encoding="utf-8")
    code, connection, words = checked(site)
    assert (code, connection["facts"]["address"]) == (0, f"127.0.0.1:{stranger.coordinator.port}")
    assert "its certificate is the coordinator's" not in words
    assert "cannot know" in words
    read_out, shown = phrase_that_is_read_out(trial.coordinator), phrase_of(words)
    assert shown == phrase_that_is_read_out(stranger.coordinator) == connection["facts"]["authority_phrase"] != read_out
    heard = flwr_client("confirm", site.folder, *read_out.split())
    assert (heard.code, "NOT the phrase" in heard.out) == (1, True)
    # The site's own phrase, of the same call, says nothing about the kit.
    own = phrase_of(flwr_client("init", site.folder, "--name", site.name).out)
    assert own not in (read_out, shown)
    mixed_up = flwr_client("confirm", site.folder, *own.split())
    assert (mixed_up.code, "it is this site's own" in mixed_up.out) == (1, True)
    before_it_connects, _, _ = _output_of(site).partition("connected to")
    assert (shown in before_it_connects, "cannot know" in before_it_connects) == (True, True)


def _output_of(site: Site) -> str:
    site.connect()
    site.program.stop()
    return site.program.output


def test_a_phrase_in_the_text_of_a_kit_fools_nobody(trial: Trial, hospital: Hospital, stranger: Stranger) -> None:
    """The stranger writes the phrase of the true coordinator into a kit of his own."""
    site = hospital("texts")
    true, false = phrase_of(site.kit.read_text(encoding="utf-8")), stranger.false_kit(site)
    assert true == phrase_that_is_read_out(trial.coordinator)
    site.kit.write_text(false.replace(phrase_of(false), true), encoding="utf-8")
    shown = phrase_that_is_read_out(stranger.coordinator)
    for words in (checked(site)[2], flwr_client("confirm", site.folder).out):
        assert set(PHRASE.findall(words)) >= {shown}
        assert true not in words


def test_a_kit_of_another_authority_is_refused_once_the_site_has_connected_until_a_person_confirms_it(
    trial: Trial, hospital: Hospital, stranger: Stranger
) -> None:
    site = hospital("swapped")
    assert connects_or_ends(site.start())
    site.end()
    true = site.kit.read_text(encoding="utf-8")
    site.kit.write_text(stranger.false_kit(site), encoding="utf-8")
    assert not connects_or_ends(site.start())
    before, after = (phrase_that_is_read_out(side) for side in (trial.coordinator, stranger.coordinator))
    assert (site.program.ends(), "swapped" in stranger.connections()) == (ClientExitCode.OTHER_AUTHORITY, False)
    code, _, words = checked(site)
    for text in (site.program.output, words):
        assert re.search(f"phrase before: {before}", text)
        assert re.search(f"phrase now: +{after}", text)
        assert f"flwr-client confirm {site.folder}" in text
    assert code == ClientExitCode.OTHER_AUTHORITY
    # A way back, and a way on: a coordinator that was set up again has a new phrase.
    site.kit.write_text(true, encoding="utf-8")
    assert connects_or_ends(site.start())
    site.end()
    site.kit.write_text(stranger.false_kit(site), encoding="utf-8")
    assert flwr_client("confirm", site.folder, *after.upper().split()).code == 0
    assert connects_or_ends(site.start())
    words = flwr_client("status", site.folder).out
    assert f"its phrase: {after} (confirmed on " in words
    site.end()
    assert checked(site)[0] == 0


def test_a_start_that_waits_after_the_refusal_tries_again_once_the_phrase_is_confirmed(
    trial: Trial, stranger: Stranger
) -> None:
    """As the container does it; nothing has connected before, and the first kit was confirmed by telephone."""
    site = trial.coordinator.admit(trial.coordinator.site(trial.sites[0], "waiting"))
    read_out = [phrase_that_is_read_out(side).split() for side in (trial.coordinator, stranger.coordinator)]
    assert flwr_client("confirm", site.folder, *read_out[0]).code == 0
    site.kit.write_text(stranger.false_kit(site), encoding="utf-8")
    waiting = site.start_by("-m", "polyclinic.client.cli", "start", site.folder, "--wait-on-refusal")
    waiting.says("phrase before: ")
    waiting.says("starts again when a file in ")
    assert flwr_client("confirm", site.folder, *read_out[1]).code == 0
    waiting.says("connected to ")  # the same process, whose container goes on


def test_a_kit_with_two_certificates_trusts_none_but_the_one_whose_phrase_is_shown(
    trial: Trial, hospital: Hospital, stranger: Stranger
) -> None:
    """The coordinator's own certificate comes first, so the phrase is right; the stranger's comes behind it."""
    site = hospital("double")
    true, false = site.kit.read_text(encoding="utf-8"), stranger.false_kit(site)
    (own,), (foreign,) = (re.findall(r'^ca_certificate = "(.*)"$', kit, re.MULTILINE) for kit in (true, false))
    site.kit.write_text(false.replace(foreign, own + foreign), encoding="utf-8")
    assert not connects_or_ends(site.start())
    assert (site.program.ends(), "double" in stranger.connections()) == (ClientExitCode.OTHER_AUTHORITY, False)


def test_one_call_compares_both_keys(trial: Trial) -> None:
    """Each side prints its own phrase at init, and ``admit`` prints both; the coordinator's stays at a renewal."""
    site, folder = trial.coordinator.site(trial.sites[0], "called"), trial.coordinator.folder
    own = phrase_of(flwr_client("init", site.folder, "--name", "called").out)
    admitted = flwr_server("admit", folder, site.folder / "called.request", "--yes").out
    shutil.copy(folder / "kits" / site.kit.name, site.kit)
    theirs = phrase_that_is_read_out(trial.coordinator)
    assert set(PHRASE.findall(admitted)) == {own, theirs}
    assert set(PHRASE.findall(flwr_client("confirm", site.folder).out)) == {own, theirs}
    assert json.loads(flwr_server("status", folder, "--json").out)["phrase"] == theirs


class RecordedCalls(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Keeps the headers of every call, and serves none."""

    def __init__(self) -> None:
        self.headers = dict[str, list[tuple[str, str | bytes]]]()

    def service(self, details: Any) -> None:
        call = details.method.rpartition("/")[2]
        self.headers[call] = [pair for pair in details.invocation_metadata if pair[0] != "user-agent"]


def test_a_call_that_was_signed_for_one_coordinator_is_refused_by_another_that_admitted_the_same_key(
    trial: Trial, hospital: Hospital, stranger: Stranger, tmp_path: Path
) -> None:
    """A hospital takes part in two federations with one key; the second one's coordinator repeats its headers."""
    site = hospital("twice")
    shutil.copytree(site.folder, tmp_path / "twice")
    second, recorded = Site(stranger.here, tmp_path / "twice"), RecordedCalls()
    chain, key = (stranger.coordinator.folder / "authority" / name for name in ("server.crt", "server.key"))
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), chain.read_bytes())])
    with grpc_server(recorded, credentials) as port:
        kit = stranger.false_kit(site).replace(f":{stranger.coordinator.port}", f":{port}")
        second.kit.write_text(kit, encoding="utf-8")
        second.start()
        eventually(lambda: "ActivateNode" in recorded.headers, "the hospital calls")
        second.end()
    authority = (trial.coordinator.folder / "authority" / "ca.crt").read_bytes()
    credentials = grpc.ssl_channel_credentials(authority)
    address, headers = f"127.0.0.1:{trial.coordinator.port}", recorded.headers["ActivateNode"]
    request = fleet.ActivateNodeRequest(public_key=dict(headers)["flwr-public-key-bin"], heartbeat_interval=30.0)
    with grpc.secure_channel(address, credentials) as channel, pytest.raises(grpc.RpcError) as refused:
        FleetStub(channel).ActivateNode(request, metadata=headers, timeout=20)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert trial.coordinator.now["sites"]["twice"]["state"] == "not connected"
