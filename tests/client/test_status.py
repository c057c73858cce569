"""What a site says of itself on loopback: to its own commands, and to nobody that it is not for."""

import contextlib
import gc
import http.client
import http.server
import json
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client.connection.status import ADDRESS_FILE, STALE_S, Status, asked, health_server, in_words
from common.errors import BadInput
from tests.network.real import flwr_client

ALL = {"starting", "connecting", "waiting", "working", "stopped"}
LONG_S = STALE_S + 60


@pytest.fixture(autouse=True)
def quickly_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of the standard library look every half second whether they shall end."""
    monkeypatch.setattr(socketserver.BaseServer.serve_forever, "__defaults__", (0.01,))


@contextlib.contextmanager
def served(status: Status, folder: Path) -> Iterator[tuple[str, int]]:
    """The status of a site whose folder this is; where it is served."""
    with health_server(status, "127.0.0.1:0", folder / "state"):
        host, port = (folder / "state" / ADDRESS_FILE).read_text(encoding="ascii").split(":")
        yield host, int(port)


def answer(address: tuple[str, int], path: str = "/health") -> tuple[int, Any]:
    """Code and JSON, as a container's health check gets them."""
    with contextlib.closing(http.client.HTTPConnection(*address, timeout=20)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        assert response.headers["Content-Type"] == "application/json"
        return response.status, json.loads(response.read())


def silent(folder: Path) -> str:
    with pytest.raises(BadInput) as refused:
        asked(folder / "state")
    said = str(refused.value)
    del refused
    gc.collect(1)  # a connection that was left open is an error, and is to be one here
    return said


NOBODY = "no flwr-client answers for this folder. Its log says whether it waits after a refusal"

# ---------------------------------------------------------------------- well or not


def test_a_site_is_well_at_work_or_in_touch_and_the_answer_has_the_code_for_it(tmp_path: Path) -> None:
    status = Status("north")
    with served(status, tmp_path) as address:
        for age_s, well in ((0, ALL), (LONG_S, {"starting", "working"})):
            for status.state in sorted(ALL):
                status.last_contact = time.time() - age_s
                code, found = answer(address)
                assert (code, found["healthy"]) == {True: (200, True), False: (503, False)}[status.state in well]


def test_a_site_is_in_touch_for_five_minutes_after_the_last_answer() -> None:
    assert STALE_S == 300
    assert Status("north", state="waiting", last_contact=time.time() - 240).healthy
    assert not Status("north", state="waiting", last_contact=time.time() - 301).healthy


def test_the_health_check_of_a_container_ends_with_the_code_for_it(tmp_path: Path) -> None:
    status = Status("north", state="connecting", last_contact=time.time())
    status.failed("no route")
    (tmp_path / "site.toml").touch()
    with served(status, tmp_path):
        well = flwr_client("health", tmp_path)
        status.last_contact -= LONG_S
        lost = flwr_client("health", tmp_path)
    assert (well.code, well.out) == (0, "healthy\n")
    assert (lost.code, lost.out) == (1, "not healthy: no route\n")


# ---------------------------------------------------------------------- what is said


def test_what_is_asked_is_the_present_and_not_what_was_when_the_program_began(tmp_path: Path) -> None:
    status = Status("north", coordinator="trial")
    with served(status, tmp_path):
        assert asked(tmp_path / "state")["state"] == "starting"
        status.state, status.run, status.round, status.rounds = "working", "abc", 3, 10
        found = asked(tmp_path / "state")
    assert (found["site"], found["coordinator"], found["state"]) == ("north", "trial", "working")
    assert (found["run"], found["round"], found["rounds"]) == ("abc", 3, 10)


def test_an_error_stays_visible_with_its_time_until_the_next_one(tmp_path: Path) -> None:
    status = Status("north")
    with served(status, tmp_path):
        assert asked(tmp_path / "state")["last_error"] == ""
        for reason in ("no route", "train failed"):
            status.failed(reason)
            status.state = "waiting"
            found = asked(tmp_path / "state")
            assert found["last_error"] == reason
            assert found["last_error_time"].endswith("+00:00")


def test_nothing_but_names_counts_and_times_is_served(tmp_path: Path) -> None:
    with served(Status("north"), tmp_path) as address:
        found = answer(address)[1]
        assert answer(address, "/") == (200, found)
        assert answer(address, "/state/node-id") == (404, {"error": "ask for /health"})
    assert found.keys() == {
        *("healthy", "site", "state", "coordinator", "run", "round", "rounds", "phase", "finished", "rounds_done"),
        *("seconds_left", "certificate_days", "last_contact", "last_error", "last_error_time", "privacy", "folder"),
        "coordinator_release",
    }


def test_a_person_reads_run_round_and_the_minutes_that_are_left() -> None:
    status = Status("north", "working", "trial", "abc", 3, 10, "train", seconds_left=90.0, certificate_days=20.6)
    words = in_words(status.as_json()).splitlines()
    assert words[:2] == ["site north: working (train)", "run abc: round 3 of 10; about 2 min left"]
    assert words[2:] == [
        "coordinator trial: last answer 0 s ago",
        "its certificate is valid for 21 more days",
        "no error",
    ]


def test_a_person_reads_nothing_of_what_is_not_known_yet() -> None:
    status = Status("north", "connecting", "trial", last_contact=time.time() - 100)
    status.failed("no route")
    words = in_words(status.as_json())
    assert words.startswith("site north: connecting\ncoordinator trial: last answer 100 s ago\nlast error: no route (")
    status.run, status.rounds, status.round = "abc", 10, 1
    assert "run abc: round 1 of 10\n" in in_words(status.as_json())
    status.finished = "2026-11-22T04:00:00+00:00"
    assert "last run abc: done 2026-11-22T04:00:00+00:00\n" in in_words(status.as_json())


# ---------------------------------------------------------------------- who answers


def test_a_caller_that_says_nothing_keeps_nobody_else_waiting(tmp_path: Path) -> None:
    with served(Status("north"), tmp_path) as address, socket.create_connection(address, timeout=20):
        assert answer(address)[0] == 200


def test_after_the_program_has_ended_nobody_answers_and_the_port_is_free(tmp_path: Path) -> None:
    with served(Status("north"), tmp_path) as address:
        asked(tmp_path / "state")
    assert NOBODY in silent(tmp_path)
    assert list((tmp_path / "state").iterdir()) == []
    socket.create_server(address).close()


def test_also_a_program_that_ends_with_an_error_gives_its_port_back(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), served(Status("north"), tmp_path) as address:
        raise ZeroDivisionError
    assert NOBODY in silent(tmp_path)
    socket.create_server(address).close()


def test_a_folder_in_which_nothing_runs_is_named_with_the_command_to_start_it(tmp_path: Path) -> None:
    assert silent(tmp_path).startswith(f"{tmp_path}: {NOBODY}")


@pytest.mark.parametrize("left", ["", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:PORT", "nonsense\0:9"])
def test_an_address_that_a_killed_program_left_is_not_taken_for_an_answer(left: str, tmp_path: Path) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        address = left.replace("PORT", str(free.getsockname()[1]))
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / ADDRESS_FILE).write_text(address, encoding="ascii")
    assert NOBODY in silent(tmp_path)


@contextlib.contextmanager
def another_program(body: bytes) -> Iterator[str]:
    """Answers every request with this."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n<html>",
        *(b"HTTP/1.0 200 OK\r\n\r\n" + other for other in (b"[]", b"{}", b'{"status": "UP"}')),
    ],
)
def test_another_program_that_got_the_port_is_not_taken_for_the_site(body: bytes, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with another_program(body) as address:
        (tmp_path / "state" / ADDRESS_FILE).write_text(address, encoding="ascii")
        assert NOBODY in silent(tmp_path)


def test_another_site_that_got_the_port_of_a_killed_one_does_not_answer_for_it(tmp_path: Path) -> None:
    with served(Status("south"), tmp_path / "south"):
        left = (tmp_path / "south" / "state" / ADDRESS_FILE).read_bytes()
        (tmp_path / "north" / "state").mkdir(parents=True)
        (tmp_path / "north" / "site.toml").write_text('name = "north"\n', encoding="utf-8")
        (tmp_path / "north" / "state" / ADDRESS_FILE).write_bytes(left)
        assert flwr_client("health", tmp_path / "north").code != 0


def test_a_site_that_wants_no_health_address_has_none(tmp_path: Path) -> None:
    with health_server(Status("north"), "", tmp_path / "state"):
        assert 'With health = "" in site.toml it answers nobody' in silent(tmp_path)
        assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("address", ["127.0.0.1:TAKEN", "192.0.2.7:0", "[::1]:0", "no host:0"])
def test_an_address_that_cannot_be_served_is_named_with_what_to_do(address: str, tmp_path: Path) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        address = address.replace("TAKEN", str(taken.getsockname()[1]))
        with (
            pytest.raises(BadInput, match="Name another port") as refused,
            health_server(Status("n"), address, tmp_path),
        ):
            pass
    assert str(refused.value).startswith(f"site.toml: health: {address}: ")
