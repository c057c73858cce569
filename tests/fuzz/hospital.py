"""A hospital's real message loop without a network: whole signed messages go through it, one after another."""

import atexit
import contextlib
import warnings
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cryptography import x509
from flwr.app import RecordDict

from polyclinic.client.connection.exit_codes import ConnectionNotAccepted
from polyclinic.client.connection.fleet_client import FleetClient
from polyclinic.client.connection.service import HospitalMessageLoop
from polyclinic.client.connection.status import ClientStatus
from polyclinic.client.site.settings import load_site, read_site_settings
from polyclinic.client.site.site_file import make_site_folder
from polyclinic.client.site.statements import SiteRecordSigner
from polyclinic.common.security.identity import SiteConnectionKit, read_admission_request, read_private_key
from polyclinic.common.wire import fleet_protocol as fleet
from polyclinic.common.wire.flower_messages import make_request, replace_metadata
from polyclinic.common.wire.message_objects import encode_message_objects, make_announcement
from polyclinic.server.coordinator.authority import (
    ensure_valid_signing_key,
    issue_server_certificate,
    make_certificate_authority,
)
from polyclinic.server.coordinator.folder import CoordinatorTomlContent, write_coordinator_toml
from polyclinic.server.deployment.superlink.fleet_service import APP_BUNDLE, APP_BUNDLE_SHA256
from tests.hostile_requests import HostileRequest, sign_hostile_request

SITE = """name = "north"
device = "cpu"
[data]
kind = "phantom"
images = 20
image_size = 16
[policy]
smallest_count = 0
maximum_epochs = 2
maximum_parameters = 1_000_000
maximum_image_size = 64
maximum_hours = 0.002
"""
"""A hospital that works for seconds at most, no matter what it is asked for."""


class LinkInMemory(FleetClient):
    """A connection whose calls are answered from memory: it has the objects of one message, and drops replies."""

    def __init__(self, kit: SiteConnectionKit, key: Any, statements: SiteRecordSigner) -> None:
        super().__init__(kit.address, kit.ca_certificate.encode(), key, statements)
        self.contents: Mapping[str, bytes] = {}
        self.node_id = 5

    def _make_signed_call(
        self, call: str, request: Any, timeout: float = 0.0, more_headers: tuple[tuple[str, str], ...] = ()
    ) -> Any:
        if call == "PullObject":
            content = self.contents.get(request.object_id)
            here = content is not None
            answer = fleet.PullObjectResponse(object_found=here, object_available=here)
            return answer.SerializeToString(), memoryview(content or b"")
        answer = getattr(fleet, f"{call}Response")()
        if call == "GetRun":
            answer.run.fab_hash = APP_BUNDLE_SHA256
        if call == "GetFab":
            answer.fab.content = APP_BUNDLE
        return answer


class HospitalInMemory:
    """A hospital's folder and its message loop, and the coordinator's keys."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.site_folder = folder, folder / "north"
        coordinator = write_coordinator_toml(
            folder / "trial", CoordinatorTomlContent(name="trial", hosts=("fl.example",), port=9092)
        )
        make_certificate_authority(coordinator)
        issue_server_certificate(coordinator)
        make_site_folder(self.site_folder, "north")
        (self.site_folder / "site.toml").write_text(SITE, encoding="utf-8")
        self.public_key = read_admission_request(self.site_folder / "north.request").public_key
        self.signing = ensure_valid_signing_key(coordinator)
        settings = read_site_settings(self.site_folder)
        authority = coordinator.ca_certificate_path.read_text(encoding="ascii")
        kit = SiteConnectionKit(
            coordinator="trial",
            address="127.0.0.1:9",
            site="north",
            public_key=self.public_key,
            ca_certificate=authority,
        )
        self.loop = HospitalMessageLoop(settings, kit, load_site(settings), lambda text: None, ClientStatus("north"))
        key = read_private_key(settings.key_path)
        certificate = x509.load_pem_x509_certificate(authority.encode())
        self.link = LinkInMemory(kit, key, SiteRecordSigner(settings.state_folder, "north", key, certificate))

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(self.loop.site.declaration.canonical_names)

    def sign(self, request: HostileRequest) -> RecordDict:
        """Sign as the coordinator does."""
        return sign_hostile_request(request, "north", self.public_key, *self.signing)

    def announce(self, content: RecordDict, message_type: str) -> bytes:
        """Put a message of this content at the coordinator; return its announcement."""
        request = make_request(content, 5, message_type, ttl=1e9)
        message = replace_metadata(request, run_id=7, src_node_id=1, created_at=0.0)
        tree, self.link.contents = encode_message_objects(message)
        announced = fleet.PullMessagesResponse(
            messages_list=[make_announcement(message, tree.object_id)], message_object_trees=[tree]
        )
        return bytes(announced.SerializeToString())

    def take(self, received: bytes) -> bool:
        """Let the hospital take a message; return True if its audit has an entry about it.

        Raises:
            AssertionError: If anything outside of the hospital's folder has changed.
        """
        audit, before = self.site_folder / "state" / "audit.jsonl", self._listing()
        size = audit.stat().st_size if audit.exists() else 0
        with warnings.catch_warnings(), contextlib.suppress(ConnectionNotAccepted):
            warnings.simplefilter("ignore")  # in a program they are no errors
            self.loop._answer_message(self.link, received)
        self.loop._refusal = None
        assert self._listing() == before
        return audit.exists() and audit.stat().st_size != size

    def _listing(self) -> list[str]:
        return sorted(
            str(path) for path in self.folder.rglob("*") if not path.is_relative_to(self.site_folder / "state")
        )


@lru_cache
def hospital() -> HospitalInMemory:
    """The one of this process, in a folder that is removed when the process ends."""
    folder = TemporaryDirectory()
    atexit.register(folder.cleanup)
    return HospitalInMemory(Path(folder.name) / "machine")
