"""What the SuperLink has registered follows the coordinator's folder, whatever was done to it meanwhile."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest

from common.security.identity import SiteRequest, create_key, public_key_line
from server.coordinator.admission import admit, revoke
from server.coordinator.folder import Coordinator, read_coordinator
from server.deployment.serve import synchronize_registrations
from server.deployment.superlink.control_client import ControlClient, RegisteredNode, openssh_key_to_pem
from server.deployment.superlink.registrations import Presence
from tests.network.real import flwr_server


@dataclass
class Registrations:
    """The SuperLink's list of nodes; like the real one it lets no key be registered again."""

    there: list[RegisteredNode] = field(default_factory=list)
    ever: set[bytes] = field(default_factory=set)

    def nodes(self) -> list[RegisteredNode]:
        return list(self.there)

    def register(self, name: str, public_key: str) -> None:
        key = openssh_key_to_pem(public_key)
        assert key not in self.ever
        self.ever.add(key)
        self.there.append(RegisteredNode(len(self.ever), name, Presence.NEVER, key))

    def unregister(self, node: RegisteredNode) -> None:
        self.there.remove(node)


@dataclass
class Link:
    coordinator: Coordinator
    registrations: Registrations
    keys: list[str]

    def settled(self) -> dict[str, bytes]:
        """Name -> key, after a look."""
        nodes = synchronize_registrations(self.coordinator, cast(ControlClient, self.registrations))
        return {node.name: node.public_key for node in nodes}

    def admit(self, name: str, key: int) -> None:
        admit(self.coordinator, SiteRequest(site=name, public_key=self.keys[key]))


@pytest.fixture
def link(tmp_path: Path) -> Link:
    assert flwr_server("init", tmp_path / "trial", "--name", "trial", "--host", "fl.example").code == 0
    keys = [public_key_line(create_key(tmp_path / f"{number}.key"), "comment") for number in range(2)]
    return Link(read_coordinator(tmp_path / "trial"), Registrations(), keys)


def test_whoever_is_admitted_is_registered_once(link: Link) -> None:
    link.admit("north", 0)
    link.admit("south", 1)
    assert (
        link.settled()
        == link.settled()
        == {"north": openssh_key_to_pem(link.keys[0]), "south": openssh_key_to_pem(link.keys[1])}
    )


def test_whoever_is_revoked_is_turned_out(link: Link) -> None:
    link.admit("north", 0)
    link.settled()
    revoke(link.coordinator, "north")
    assert link.settled() == link.settled() == {}


def test_a_key_that_was_revoked_and_replaced_between_two_looks_is_turned_out(link: Link) -> None:
    link.admit("north", 0)
    link.settled()
    revoke(link.coordinator, "north")
    link.admit("north", 1)
    assert link.settled() == {"north": openssh_key_to_pem(link.keys[1])}


def test_a_site_whose_file_was_removed_is_turned_out(link: Link) -> None:
    link.admit("north", 0)
    link.settled()
    (link.coordinator.sites / "north.toml").unlink()
    assert link.settled() == {}


def test_a_connection_is_told_of_as_the_superlink_sees_it(link: Link) -> None:
    link.admit("north", 0)
    link.settled()
    link.registrations.there = [replace(node, state=Presence.CONNECTED) for node in link.registrations.there]
    (node,) = synchronize_registrations(link.coordinator, cast(ControlClient, link.registrations))
    assert node.online
