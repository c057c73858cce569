"""Requests, kits, keys and certificates: through ``flwr-server admit`` and ``start``, and ``flwr-client start``."""

import base64
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from polyclinic.server.coordinator.authority import issue_server_certificate
from polyclinic.server.coordinator.folder import read_coordinator_folder
from tests.bad_input.catalogue import Case, Ended, client, server
from tests.bad_input.site_files import DATA, HEAD, KEY, LINE, OTHER_LINE, kit_text, request_text
from tests.client.handshakes import coordinator_in, listening, shows, speaks_http


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda trial: (trial / name).write_bytes(content)


def admit(folder: Path, text: str | bytes, name: str = "north") -> Ended:
    (folder / f"{name}.request").write_bytes(text.encode() if isinstance(text, str) else text)
    return server("admit", folder / "trial", folder / f"{name}.request", "--yes")


def admitting(text: str | bytes) -> Callable[[Path], Ended]:
    def done(folder: Path) -> Ended:
        coordinator_in(folder / "trial")
        ended = admit(folder, text)
        assert not (folder / "trial" / "sites").exists()
        return ended

    return done


def admitted_before(then: Callable[[Path], object], text: str) -> Callable[[Path], Ended]:
    """A request after another one was granted."""

    def done(folder: Path) -> Ended:
        coordinator_in(folder / "trial")
        assert admit(folder, request_text(), "first").code == 0
        then(folder / "trial")
        return admit(folder, text, "second")

    return done


def with_files(change: Callable[[Path], object], *command: str) -> Callable[[Path], Ended]:
    """A command on a coordinator's folder in which something was changed."""

    def done(folder: Path) -> Ended:
        trial = folder / "trial"
        coordinator_in(trial)
        (folder / "north.request").write_text(request_text(), encoding="utf-8")
        change(trial)
        named = [word.replace("TRIAL", str(trial)).replace("FOLDER", str(folder)) for word in command]
        return server(*named)

    return done


def key_on_an_unknown_curve() -> bytes:
    """Return a key whose curve has another number than any that exists."""
    standard, unknown = bytes.fromhex("2a8648ce3d030107"), bytes.fromhex("2a8648ce3d03017f")
    body = "".join(key_of("ec").decode().splitlines()[1:-1])
    changed = base64.b64encode(base64.b64decode(body).replace(standard, unknown))
    return b"-----BEGIN PRIVATE KEY-----\n" + changed + b"\n-----END PRIVATE KEY-----\n"


def key_of(kind: str, password: bytes = b"") -> bytes:
    private = rsa.generate_private_key(65537, 2048) if kind == "rsa" else ec.generate_private_key(ec.SECP256R1())
    encryption = form.BestAvailableEncryption(password) if password else form.NoEncryption()
    return private.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, encryption)


def of_another_authority(trial: Path) -> None:
    other = coordinator_in(trial.parent / "other")
    shutil.copy(other.ca_certificate_path, trial / "authority" / "ca.crt")


def edited_entry(trial: Path) -> None:
    (trial / "sites").mkdir()
    (trial / "sites/west.toml").write_text('site = "west"\npublic_key = "x"', encoding="utf-8")


def expired(trial: Path) -> None:
    issue_server_certificate(read_coordinator_folder(trial), days=-3)


def moved(trial: Path) -> None:
    text = (trial / "coordinator.toml").read_text(encoding="utf-8")
    (trial / "coordinator.toml").write_text(text.replace("fl.example", "new.example"), encoding="utf-8")


ADMIT = ("admit", "TRIAL", "FOLDER/north.request", "--yes")
START = ("start", "TRIAL")
TRUNCATED = request_text()[:70]
RENEW = ("init", "TRIAL", "--renew")
KEY_FILE, AUTHORITY, AUTHORITY_KEY = "authority/server.key", "authority/ca.crt", "authority/ca.key"
COORDINATOR = (
    Case("request: there is none", with_files(lambda trial: None, "admit", "TRIAL", "FOLDER/north.reqest")),
    Case("request: cut off", admitting(TRUNCATED)),
    Case("request: a line is lost", admitting(request_text().partition("\n")[0] + "\n")),
    Case("request: something else", admitting(b"\x89PNG\r\n\x1a\n\xff\xff")),
    Case("request: a damaged key", admitting(request_text(public_key=LINE.replace("AAAA", "AAAB")))),
    Case("request: a key of another kind", admitting(request_text(public_key="ssh-rsa AAAAB3NzaC1yc2E north"))),
    Case("request: a name that leads elsewhere", admitting(request_text(site="../north"))),
    Case("request: a private key", admitting(KEY)),
    Case("request: a name that is taken", admitted_before(lambda trial: None, request_text(public_key=OTHER_LINE))),
    Case("request: a key that is another's", admitted_before(lambda trial: None, request_text(site="south"))),
    Case(
        "request: a key that was revoked",
        admitted_before(lambda trial: server("revoke", trial, "north", "--yes"), request_text()),
    ),
    Case("revoke: a site that is none", with_files(lambda trial: None, "revoke", "TRIAL", "nroth", "--yes")),
    Case("register: an entry that was edited", with_files(edited_entry, *ADMIT)),
    Case("authority: its certificate is lost", with_files(lambda trial: (trial / AUTHORITY).unlink(), *ADMIT)),
    Case("authority: its certificate is no PEM", with_files(write(AUTHORITY, b"\0\1"), *ADMIT)),
    Case("authority: its key is lost", with_files(lambda trial: (trial / AUTHORITY_KEY).unlink(), *RENEW)),
    Case("authority: its key is another", with_files(write(AUTHORITY_KEY, key_of("ec")), *RENEW)),
    Case("authority: its key is of another kind", with_files(write(AUTHORITY_KEY, key_of("rsa")), *RENEW)),
    Case("certificate: lost", with_files(lambda trial: (trial / "authority/server.crt").unlink(), *START)),
    Case("certificate: cut off", with_files(lambda trial: os.truncate(trial / "authority/server.crt", 200), *START)),
    Case("certificate: of another authority", with_files(of_another_authority, *START)),
    Case("certificate: its key is another", with_files(write(KEY_FILE, key_of("ec")), *START)),
    Case("certificate: its key is on an unknown curve", with_files(write(KEY_FILE, key_on_an_unknown_curve()), *START)),
    Case("certificate: its key is lost", with_files(lambda trial: (trial / KEY_FILE).unlink(), *START)),
    Case("certificate: expired", with_files(expired, *START)),
    Case("certificate: not for the host", with_files(moved, *START)),
)


def site(folder: Path, kit: str | bytes | None, key: str | bytes | None = KEY, mode: int = 0o600) -> Ended:
    (folder / "site.toml").write_text(HEAD + DATA, encoding="utf-8")
    for name, content in (("north.kit", kit), ("north.key", key)):
        if content is not None:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    if key is not None:
        (folder / "north.key").chmod(mode)
    return client("start", folder)


def with_kit(kit: str | bytes | None) -> Callable[[Path], Ended]:
    return lambda folder: site(folder, kit)


def with_key(key: str | bytes | None, mode: int = 0o600) -> Callable[[Path], Ended]:
    return lambda folder: site(folder, kit_text(), key, mode)


def meeting(name: str, host: str = "127.0.0.1", days: float | None = None) -> Callable[[Path], Ended]:
    """A site with a kit of the coordinator "trial" meets a server that shows the certificate of one of this name."""

    def done(folder: Path) -> Ended:
        shown = coordinator_in(folder / name, "127.0.0.1", name)
        trusted = shown if name == "trial" else coordinator_in(folder / "trial", "127.0.0.1")
        issue_server_certificate(shown, **{} if days is None else {"days": days})
        with listening(shows(shown), host) as port:
            text = kit_text(address=f"{host}:{port}", ca_certificate=trusted.ca_certificate_path.read_text("ascii"))
            return site(folder, text)

    return done


def in_clear_text(folder: Path) -> Ended:
    with listening(speaks_http) as port:
        return site(folder, kit_text(address=f"127.0.0.1:{port}"))


SITE = (
    Case("kit: there is none", with_kit(None)),
    Case("kit: cut off", with_kit(kit_text()[:300])),
    Case("kit: its certificate is cut off", with_kit(kit_text(ca_certificate="-----BEGIN CERTIFICATE-----\nMIIB"))),
    Case("kit: its certificate is no PEM", with_kit(kit_text(ca_certificate="ask IT"))),
    Case("kit: an address without a port", with_kit(kit_text(address="fl.example"))),
    Case("kit: of another site", with_kit(kit_text(site="south", public_key=OTHER_LINE))),
    Case("kit: for an earlier key", with_kit(kit_text(public_key=OTHER_LINE))),
    Case("kit: a Word document", with_kit(b"PK\x03\x04\x14\xff\xfe")),
    Case("key: there is none", with_key(None)),
    Case("key: others may read it", with_key(KEY, 0o644)),
    Case("key: cut off", with_key(KEY[:-60])),
    Case("key: the public half", with_key(LINE)),
    Case("key: locked by a password", with_key(key_of("ec", b"secret"))),
    Case("key: of another kind", with_key(key_of("rsa"))),
    Case("neither kit nor key", lambda folder: site(folder, None, None)),
    Case("coordinator: of another authority", meeting("other"), code=11),
    Case("coordinator: a certificate for another host", meeting("trial", "127.0.0.2"), code=12),
    Case("coordinator: an expired certificate", meeting("trial", days=-3), code=13),
    Case("coordinator: no TLS", in_clear_text, code=10),
)
CASES = (*COORDINATOR, *SITE)
