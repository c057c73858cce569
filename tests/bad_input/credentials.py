"""Requests, kits, keys and certificates: through ``flwr-server admit`` and ``start``, and ``flwr-client start``."""

import base64
import shutil
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from server.coordinator.authority import issue_server_certificate, make_authority
from server.coordinator.folder import Coordinator, CoordinatorFile, write_coordinator
from tests.bad_input.catalogue import Case, Ended, client, server
from tests.bad_input.site_files import DATA, HEAD, KEY, LINE, OTHER_LINE, kit_text, request_text
from tests.client.handshakes import answers, listening, shows

# ---------------------------------------------------------------------- at the coordinator


def coordinator_in(folder: Path, hosts: tuple[str, ...] = ("fl.example",)) -> Coordinator:
    made = write_coordinator(folder, CoordinatorFile(name="trial", hosts=hosts, port=9092))
    make_authority(made)
    issue_server_certificate(made)
    return made


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


def written(name: str, content: bytes) -> Callable[[Path], object]:
    def change(trial: Path) -> None:
        (trial / name).parent.mkdir(exist_ok=True)
        (trial / name).write_bytes(content)

    return change


def key_on_an_unknown_curve() -> bytes:
    """A key whose curve has another number than any that is known."""
    standard, unknown = bytes.fromhex("2a8648ce3d030107"), bytes.fromhex("2a8648ce3d03017f")
    body = "".join(key_of("ec").decode().splitlines()[1:-1])
    changed = base64.b64encode(base64.b64decode(body).replace(standard, unknown))
    return b"-----BEGIN PRIVATE KEY-----\n" + changed + b"\n-----END PRIVATE KEY-----\n"


def key_of(kind: str) -> bytes:
    private = rsa.generate_private_key(65537, 2048) if kind == "rsa" else ec.generate_private_key(ec.SECP256R1())
    return private.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())


def of_another_authority(trial: Path) -> None:
    other = coordinator_in(trial.parent / "other")
    shutil.copy(other.ca_certificate, trial / "authority" / "ca.crt")


def expired(trial: Path) -> None:
    issue_server_certificate(Coordinator(trial, CoordinatorFile(name="trial", hosts=("fl.example",), port=1)), days=-3)


def moved(trial: Path) -> None:
    text = (trial / "coordinator.toml").read_text(encoding="utf-8")
    (trial / "coordinator.toml").write_text(text.replace("fl.example", "new.example"), encoding="utf-8")


ADMIT = ("admit", "TRIAL", "FOLDER/north.request", "--yes")
START = ("start", "TRIAL")
TRUNCATED = request_text()[:70]
COORDINATOR = (
    Case(
        "request: there is none",
        lambda folder: (coordinator_in(folder / "trial"), server("admit", folder / "trial", folder / "north.reqest"))[
            1
        ],
    ),
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
    Case(
        "register: an entry that was edited",
        with_files(written("sites/west.toml", b'site = "west"\npublic_key = "x"'), *ADMIT),
    ),
    Case("authority: its certificate is lost", with_files(lambda trial: (trial / "authority/ca.crt").unlink(), *ADMIT)),
    Case("authority: its certificate is no PEM", with_files(written("authority/ca.crt", b"\0\1"), *ADMIT)),
    Case(
        "authority: its key is lost",
        with_files(lambda trial: (trial / "authority/ca.key").unlink(), "init", "TRIAL", "--renew"),
    ),
    Case(
        "authority: its key is another",
        with_files(written("authority/ca.key", key_of("ec")), "init", "TRIAL", "--renew"),
    ),
    Case(
        "authority: its key is of another kind",
        with_files(written("authority/ca.key", key_of("rsa")), "init", "TRIAL", "--renew"),
    ),
    Case("certificate: lost", with_files(lambda trial: (trial / "authority/server.crt").unlink(), *START)),
    Case(
        "certificate: cut off",
        with_files(
            lambda trial: written("authority/server.crt", (trial / "authority/server.crt").read_bytes()[:200])(trial),
            *START,
        ),
    ),
    Case("certificate: of another authority", with_files(of_another_authority, *START)),
    Case("certificate: its key is another", with_files(written("authority/server.key", key_of("ec")), *START)),
    Case(
        "certificate: its key is on an unknown curve",
        with_files(written("authority/server.key", key_on_an_unknown_curve()), *START),
    ),
    Case("certificate: its key is lost", with_files(lambda trial: (trial / "authority/server.key").unlink(), *START)),
    Case("certificate: expired", with_files(expired, *START)),
    Case("certificate: not for the host", with_files(moved, *START)),
)

# ---------------------------------------------------------------------- at a site


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


def locked_key() -> bytes:
    private = ec.generate_private_key(ec.SECP256R1())
    locked = form.BestAvailableEncryption(b"secret")
    return private.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, locked)


def meeting(show: Callable[[Path], Coordinator], address: str = "127.0.0.1") -> Callable[[Path], Ended]:
    """A site with a kit of one authority meets a server that shows a certificate."""

    def done(folder: Path) -> Ended:
        shown = show(folder / "trial")
        trusted = coordinator_in(folder / "ours", ("127.0.0.1",)) if shown.file.name == "other" else shown
        with listening(shows(shown), address) as port:
            text = kit_text(address=f"{address}:{port}", ca_certificate=trusted.ca_certificate.read_text("ascii"))
            return site(folder, text)

    return done


def good(folder: Path) -> Coordinator:
    return coordinator_in(folder, ("127.0.0.1",))


def other(folder: Path) -> Coordinator:
    made = write_coordinator(folder, CoordinatorFile(name="other", hosts=("127.0.0.1",), port=1))
    make_authority(made)
    issue_server_certificate(made)
    return made


def out_of_date(folder: Path) -> Coordinator:
    made = good(folder)
    issue_server_certificate(made, days=-3)
    return made


def in_clear_text(folder: Path) -> Ended:
    with listening(answers(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as port:
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
    Case("key: locked by a password", with_key(locked_key())),
    Case("key: of another kind", with_key(key_of("rsa"))),
    Case("neither kit nor key", lambda folder: site(folder, None, None)),
    Case("coordinator: of another authority", meeting(other), code=11),
    Case("coordinator: a certificate for another host", meeting(good, "127.0.0.2"), code=12),
    Case("coordinator: an expired certificate", meeting(out_of_date), code=13),
    Case("coordinator: no TLS", in_clear_text, code=10),
)
CASES = (*COORDINATOR, *SITE)
