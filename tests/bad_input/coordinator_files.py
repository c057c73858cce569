"""coordinator.toml and what ``flwr-server init`` is told."""

from collections.abc import Callable
from pathlib import Path

from tests.bad_input.catalogue import Case, Ended, changed, server

GOOD = """name = "trial"
hosts = ["fl.example"]
listen = "0.0.0.0"
port = 9092
"""


def edited(*changes: tuple[str, str]) -> Callable[[Path], Ended]:
    def done(folder: Path) -> Ended:
        (folder / "coordinator.toml").write_text(changed(GOOD, *changes), encoding="utf-8")
        return server("deadlines", folder)

    return done


def init(*arguments: str) -> Callable[[Path], Ended]:
    def done(folder: Path) -> Ended:
        ended = server("init", folder / "trial", *arguments)
        assert not (folder / "trial").exists()
        return ended

    return done


def again(folder: Path) -> Ended:
    (folder / "coordinator.toml").write_text(GOOD, encoding="utf-8")
    return server("init", folder, "--name", "trial", "--host", "fl.example")


CASES = (
    Case("no coordinator's folder", lambda folder: server("status", folder)),
    Case("a bracket is missing", edited(('"fl.example"]', '"fl.example"'))),
    Case("an unknown key", edited(("listen", "listn"))),
    Case("no name", edited(('name = "trial"\n', ""))),
    Case("a name that leads elsewhere", edited(('"trial"', '"../trial"'))),
    Case("no hosts", edited(('["fl.example"]', "[]"))),
    Case("hosts that are no list", edited(('["fl.example"]', '"fl.example"'))),
    Case("a host with https", edited(("fl.example", "https://fl.example"))),
    Case("a host with its port", edited(("fl.example", "fl.example:9092"))),
    Case("a port that is none", edited(("port = 9092", "port = 0"))),
    Case("a port above all", edited(("port = 9092", "port = 65536"))),
    Case("a port that is a word", edited(("port = 9092", 'port = "https"'))),
    Case("a name where an address belongs", edited(('"0.0.0.0"', '"fl.example"'))),
    Case("several faults at once", edited(('"trial"', '""'), ("= 9092", "= -1"), ('["fl.example"]', "[]"))),
    Case("init without a name and a host", init()),
    Case("init for a host that is none", init("--name", "trial", "--host", "https://fl.example:9092")),
    Case("init with a name that leads elsewhere", init("--name", "../x", "--host", "fl.example")),
    Case("init over a folder that is there", again),
)
