"""The way to the coordinator, step by step: the name, the port, TLS, the certificate, the clock, the release, the key.

The site does not sign on by it: a run that waits for sites does not take it for present.
"""

import datetime as dt
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from client.check.findings import AreaFindings, Finding, fault, note, refused, warning
from client.connection.exit_codes import ExitCode, Refused, Unreachable
from client.connection.fleet_client import Link
from client.connection.tls import EXEMPTIONS, PROXY_VARIABLES, any_certificate, days_valid, proxy_for
from common import __version__
from common.security.identity import UNREADABLE_CERTIFICATE, SiteKit, split_address
from common.system.timers import FIRST_RETRY_S, KEY_PATIENCE_S, TLS_TIMEOUT_S
from common.wire.fleet_protocol import WIRE_VERSION, Hello

EARLIEST_S, LATEST_S = -300.0, 5.0
"""How far this clock may be from the coordinator's: Flower takes no call signed earlier, or later."""
UNEASY_S = 2.0
RENEWAL_DAYS = 30
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def check_connection(
    kit: SiteKit, key: ec.EllipticCurvePrivateKey | None, environment: Mapping[str, str] = os.environ
) -> AreaFindings:
    """Go the way to the coordinator as far as it leads.

    Args:
        key: None where it cannot be read, which is another finding; then nothing is asked of the coordinator.
    """
    host, _ = split_address(kit.address)
    notes, passed = _unread_variables(environment), list[str]()
    address = {"address": kit.address}
    try:
        proxy = proxy_for(host, environment)
        way = f"through the proxy {proxy[0]}:{proxy[1]}" if proxy else "directly, no proxy"
        passed += _resolved(*(proxy or split_address(kit.address)))
        days = days_valid(kit.address, kit.ca_certificate, environment)
    except Refused as refusal:
        return AreaFindings("connection", tuple(passed), (_explained(refusal, kit, environment), *notes), address)
    except Unreachable as error:
        return AreaFindings("connection", tuple(passed), (_not_reached(error, kit, environment), *notes), address)
    passed.append(f"{kit.address} answers {way}; its certificate is the coordinator's, for {days:.0f} more days")
    if days < RENEWAL_DAYS:
        remedy = "The coordinator renews it with flwr-server init DIR --renew; nothing is to be done here."
        notes.append(note(f"the coordinator's certificate expires in {days:.0f} days.", remedy))
    facts: dict[str, object] = {**address, "certificate_days": round(days, 1)}
    if key is None:
        return AreaFindings("connection", tuple(passed), tuple(notes), facts)
    asked = _asked(kit, key)
    return AreaFindings("connection", (*passed, *asked.passed), (*asked.findings, *notes), {**facts, **asked.facts})


# ---------------------------------------------------------------------- the name, the port, TLS


def _resolved(host: str, port: int) -> list[str]:
    """Where a name leads, in a line; of an address there is nothing to say.

    Raises:
        Unreachable: Nowhere.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise _UnknownHost(f"the name {host} cannot be resolved") from None
    addresses = dict.fromkeys(str(entry[4][0]) for entry in found)
    return [] if host in addresses else [f"{host} is {', '.join(addresses)}"]


class _UnknownHost(Unreachable):
    """The first step failed already."""


def _not_reached(error: Unreachable, kit: SiteKit, environment: Mapping[str, str]) -> Finding:
    if isinstance(error, _UnknownHost):
        remedy = "Ask for a DNS entry, or for one in this container's hosts file; or the kit names a wrong host."
        return fault(ExitCode.HOST_UNKNOWN, f"{error}.", remedy)
    host, port = split_address(kit.address)
    through = "the proxy must let CONNECT through to it" if proxy_for(host, environment) else "no proxy is set here"
    remedy = (
        "Ask the coordinator whether flwr-server start runs. "
        f"If so, the firewall must allow outgoing TCP to {host}, port {port} ({through})."
    )
    return fault(ExitCode.NO_ANSWER, f"{error}.", remedy)


def _unread_variables(environment: Mapping[str, str]) -> list[Finding]:
    """Proxies that are set in capitals only: many programs read these, gRPC does not."""
    if any(name in environment for name in PROXY_VARIABLES):
        return []
    names = [
        name.upper()
        for name in (*PROXY_VARIABLES, *EXEMPTIONS)
        if environment.get(name.upper()) and name not in environment
    ]
    if not names:
        return []
    remedy = f"If the way leads through it, set {', '.join(name.lower() for name in names)} too."
    return [note(f"{', '.join(names)} is set, but gRPC reads the lower-case name only: it is not used.", remedy)]


def _explained(refusal: Refused, kit: SiteKit, environment: Mapping[str, str]) -> Finding:
    """A refusal, with what is shown instead of the coordinator's certificate."""
    if refusal.exit_code == ExitCode.NO_TLS:
        return _without_tls(refusal, kit, environment)
    try:
        shown = _Shown.of(any_certificate(kit.address, environment))
    except (Refused, Unreachable, ValueError):
        return refused(refusal)
    host, port = split_address(kit.address)
    if refusal.exit_code == ExitCode.OTHER_AUTHORITY:
        return _other_authority(shown, host, port)
    if refusal.exit_code == ExitCode.WRONG_HOST:
        return fault(refusal.exit_code, f"{refusal.problem} It is for {shown.hosts}.", refusal.remedy)
    now = f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC"
    dates = f"It is valid from {shown.begins} to {shown.ends}; this machine's clock says {now}."
    return fault(refusal.exit_code, f"{refusal.problem} {dates}", refusal.remedy)


@dataclass(frozen=True)
class _Shown:
    """What stands in a certificate that was not accepted."""

    issuer: str
    hosts: str
    begins: str
    ends: str

    @classmethod
    def of(cls, certificate: x509.Certificate) -> "_Shown":
        values = [part.value for part in certificate.issuer][::-1]
        names = [value if isinstance(value, str) else value.hex() for value in values]
        try:
            alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            hosts = ", ".join(str(name.value) for name in alternatives)
        except (*UNREADABLE_CERTIFICATE, x509.ExtensionNotFound):
            hosts = "no host name at all"
        begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        return cls(", ".join(names) or "nobody", hosts, f"{begins:%Y-%m-%d %H:%M}", f"{ends:%Y-%m-%d %H:%M} UTC")


def _other_authority(shown: _Shown, host: str, port: int) -> Finding:
    problem = f'{host} shows a certificate issued by "{shown.issuer}", not by the authority of this kit.'
    if "Polyclinic authority" in shown.issuer:
        remedy = "Another coordinator answers there, or the coordinator has made a new authority: ask it for a new kit."
        return fault(ExitCode.OTHER_AUTHORITY, problem, remedy)
    problem += " TLS is opened on the way: a firewall or proxy inspects it."
    remedy = (
        f"Have {host}, port {port}, exempted from TLS inspection. Trusting that authority on this machine does not"
        " help: flwr-client trusts the kit's alone."
    )
    return fault(ExitCode.OTHER_AUTHORITY, problem, remedy)


def _without_tls(refusal: Refused, kit: SiteKit, environment: Mapping[str, str]) -> Finding:
    host, port = split_address(kit.address)
    what = "" if proxy_for(host, environment) else _spoken(host, port)
    remedy = (
        "Ask the coordinator which port flwr-server listens on: this is another service's, or something between ends"
        " TLS before it (a reverse proxy must pass TCP through)."
    )
    return fault(refusal.exit_code, f"{refusal.problem}{what}", remedy)


def _spoken(host: str, port: int) -> str:
    """What a server without TLS speaks, by its answer to the first bytes of HTTP/2."""
    try:
        with socket.create_connection((host, port), timeout=TLS_TIMEOUT_S) as connection:
            connection.sendall(_PREFACE)
            answer = connection.recv(64)
    except OSError:
        return ""
    if answer.startswith(b"HTTP/1"):
        return " It speaks plain HTTP."
    if len(answer) >= 9 and answer[3] == 4 and answer[5:9] == bytes(4):  # a SETTINGS frame of the whole connection
        return " It speaks plain HTTP/2, as gRPC without TLS does."
    return ""


# ---------------------------------------------------------------------- what the coordinator says


def _asked(kit: SiteKit, key: ec.EllipticCurvePrivateKey) -> AreaFindings:
    try:
        with Link(kit.address, kit.ca_certificate.encode(), key) as link:
            _admitted_by_now(link)  # also pays for the connection, which the next call does not
            asked, began = time.time(), time.monotonic()
            hello = link.hello()
            seconds = time.monotonic() - began
    except Unreachable as error:
        remedy = "TLS stands, gRPC does not: a proxy on the way may not let HTTP/2 through."
        return AreaFindings("connection", (), (fault(ExitCode.NO_ANSWER, f"gRPC: {error}.", remedy),))
    if hello is None:
        remedy = "Install a release of the same wire version on both sides."
        problem = (
            "the coordinator's release is an older one, which tells neither its clock nor whether it knows this key."
        )
        return AreaFindings("connection", (), (fault(ExitCode.VERSION, problem, remedy),))
    return heard(hello, ahead_s=asked + seconds / 2 - hello.time, unsure_s=seconds / 2)


def _admitted_by_now(link: Link) -> None:
    """Wait for an admission that is on its way, as ``flwr-client start`` does."""
    patience_ends = time.monotonic() + KEY_PATIENCE_S
    while (hello := link.hello()) and hello.key == "unknown" and time.monotonic() < patience_ends:
        time.sleep(FIRST_RETRY_S)


def heard(hello: Hello, *, ahead_s: float, unsure_s: float) -> AreaFindings:
    """StopCriterion what the coordinator said of itself.

    Args:
        ahead_s: This clock before the coordinator's; negative behind it.
        unsure_s: Half of what the call took.
    """
    findings, passed = list[Finding](), list[str]()
    words = f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} the coordinator's (± {unsure_s:.2f} s)"
    if not EARLIEST_S < ahead_s < LATEST_S:
        findings.append(fault(ExitCode.CLOCK, f"this machine's clock is {words}.", _CLOCKS))
    elif ahead_s > UNEASY_S or ahead_s < EARLIEST_S / 2:
        findings.append(warning(ExitCode.CLOCK, f"this machine's clock is {words}; calls may be refused.", _CLOCKS))
    else:
        passed.append(f"this clock is {words}")
    if hello.wire != WIRE_VERSION:
        there, here = f"{hello.release} (wire {hello.wire})", f"{__version__} (wire {WIRE_VERSION})"
        problem = f"the coordinator runs release {there}, this site {here}."
        findings.append(
            fault(ExitCode.VERSION, problem, f"Install release {hello.release} here, or ask which is to be.")
        )
    elif hello.release != __version__:
        both = f"both speak wire version {hello.wire}"
        passed.append(f"the coordinator runs release {hello.release}, this site {__version__}; {both}")
    else:
        passed.append(f"both run release {hello.release} (wire {hello.wire})")
    if hello.key == "unknown":
        findings.append(refused(Refused.key("never admitted, or revoked")))
    else:
        passed.append("this site's key is admitted")
    facts = {"clock_ahead_s": round(ahead_s, 3), "clock_unsure_s": round(unsure_s, 3), "release": hello.release}
    return AreaFindings("connection", tuple(passed), tuple(findings), facts)


_CLOCKS = (
    "Set the clock by NTP, here or there. A site's calls are signed with the time: the coordinator takes none more than"
    " 5 minutes old, and none more than 5 seconds from the future."
)
