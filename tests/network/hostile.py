"""A coordinator that signs hostile requests with its true keys and sends them over its true port."""

import contextlib
import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flwr.app import Message, RecordDict

from polyclinic.common.wire.fleet_protocol import COORDINATOR_NODE_ID
from polyclinic.common.wire.flower_messages import make_message, make_request, read_metadata, replace_metadata
from polyclinic.common.wire.message_objects import encode_message_objects, make_announcement
from polyclinic.server.coordinator.admission import read_unrevoked_site
from polyclinic.server.coordinator.authority import ensure_valid_signing_key
from polyclinic.server.coordinator.folder import read_coordinator_folder
from polyclinic.server.deployment.superlink.network_grid import NetworkGrid, _AwaitedRequest, open_network_grid
from polyclinic.server.deployment.superlink.object_store import ReplySizeBound
from tests.hostile_requests import HostileRequest, sign_hostile_request
from tests.network.real import Coordinator, Site, eventually

TTL_S, ROOM = 600.0, 2**24
ANSWERED_WITHIN_S = 300.0


class HostileLink:
    """Sends requests to one site, one after another."""

    def __init__(self, grid: NetworkGrid, coordinator: Coordinator, site: Site) -> None:
        folder = read_coordinator_folder(coordinator.folder)
        self._grid, self._site = grid, read_unrevoked_site(folder, site.name)
        self._hospital = site
        self._key, self._certificate = ensure_valid_signing_key(folder)

    @property
    def node(self) -> int:
        """Number of the site's node."""
        (node,) = [node for node, name in self._grid.list_registered_sites().items() if name == self._site.site]
        return node

    def send(self, request: HostileRequest) -> Message:
        """Send a request and return the site's answer, also one that honest programs would not accept."""
        return self.receive(self.post(request))

    def post(self, request: HostileRequest) -> str:
        """Send a request; return the id of its message."""
        signed = (self._site.site, self._site.public_key, self._key, self._certificate)
        content = sign_hostile_request(request, *signed) if request.signed else request.content
        message = make_request(content, self.node, "train", group_id="", ttl=TTL_S)
        message.metadata.created_at = self._grid._clock()
        (name,) = self._push(message, request.message_type)
        return name

    def receive(self, name: str) -> Message:
        """Wait for the answer to a message."""
        deadline = time.monotonic() + ANSWERED_WITHIN_S
        while time.monotonic() < deadline:
            if replies := self._grid.pull_messages([name]):
                return replies[0]
        hospital = self._hospital
        raise AssertionError(f"no answer to {name}; {hospital.now}; {hospital.program.output[-2000:]}")

    def _push(self, message: Message, message_type: str) -> list[str]:
        """Announce a message as it is; the product's own grid would not build some of them."""
        grid = self._grid
        sent = replace_metadata(message, run_id=grid._run, src_node_id=COORDINATOR_NODE_ID)
        vars(sent.metadata)["_message_type"] = message_type  # any text, unlike Flower's own setter
        tree, parts = encode_message_objects(sent)
        message = replace_metadata(message, message_id=tree.object_id)
        for name, content in parts.items():
            grid._files.write_object(name, content)
        bound = ReplySizeBound.compute_bound_for_request([*map(len, parts.values())], ROOM, 0)
        awaited = make_message(RecordDict(), read_metadata(message))
        grid._requests[tree.object_id] = _AwaitedRequest(awaited, bound)
        grid._signer.remember_sent_request(message)
        announced = [(make_announcement(sent, tree.object_id), tree)]
        accepted, missing = grid._control.announce_requests_to_superlink(grid._run, announced)
        while missing:  # an earlier message has released them meanwhile
            for name in missing:
                grid._files.write_object(name, parts[name])
            accepted, missing = grid._control.announce_requests_to_superlink(grid._run, announced)
        return accepted


@contextmanager
def hostile_link(coordinator: Coordinator, site: Site) -> Iterator[HostileLink]:
    """A run of this process, in which anything may be sent to a site."""
    with open_network_grid(read_coordinator_folder(coordinator.folder)) as grid:
        eventually(lambda: site.name in grid.list_registered_sites().values(), f"{site.name} is registered")
        yield HostileLink(grid, coordinator, site)


def listing_of(folder: Path, without: tuple[Path, ...] = ()) -> dict[str, str]:
    """Path -> type and hash of everything below a folder, except below some others."""
    entries = {}
    for path in sorted(folder.rglob("*")):
        if any(path.is_relative_to(other) for other in without):
            continue
        with contextlib.suppress(OSError):
            entries[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
    return entries
