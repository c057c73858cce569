"""Checks of the connection to the coordinator: host name, port, TLS, certificate, clock, release and key.

The checks do not register the site as connected, so a run that waits for sites does not count it as present.
"""

import contextlib
import datetime as dt
import socket
import time
from collections.abc import Mapping

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from polyclinic.client.check.findings import CheckArea
from polyclinic.client.connection.authority import describe_authority, get_confirmation_time, refuse_other_authority
from polyclinic.client.connection.exit_codes import (
    ClientExitCode,
    ConnectionNotAccepted,
    CoordinatorUnreachable,
    describe_release_to_install,
)
from polyclinic.client.connection.fleet_client import FleetClient, UnacceptableAnswer
from polyclinic.client.connection.status import describe_other_wire_version
from polyclinic.client.connection.tls import (
    NO_PROXY_VARIABLES,
    PROXY_VARIABLES,
    check_coordinator_certificate,
    fetch_untrusted_certificate,
    find_proxy_address,
)
from polyclinic.client.site.site_file import SiteSettings, read_and_check_connection_kit
from polyclinic.common import __version__
from polyclinic.common.errors import BadInput
from polyclinic.common.security.identity import (
    UNREADABLE_CERTIFICATE_ERRORS,
    SiteConnectionKit,
    read_connection_kit,
    read_private_key,
    split_host_port,
)
from polyclinic.common.security.phrase import compute_certificate_phrase
from polyclinic.common.system.timers import FIRST_RETRY_S, REFUSED_KEY_RETRY_S, TLS_TIMEOUT_S
from polyclinic.common.wire.fleet_protocol import HelloAnswer
from polyclinic.common.wire.versions import WIRE_VERSION, is_spoken

MIN_CLOCK_DIFFERENCE_S = -300.0
"""Flower accepts a signed call if the site's time minus the coordinator's is above this and below the maximum."""
MAX_CLOCK_DIFFERENCE_S = 5.0
CLOCK_WARNING_S = 2.0
"""The check warns if the site's clock is ahead by more than this."""
CERTIFICATE_NOTE_DAYS = 30
"""The check prints a note if the coordinator's certificate expires within this time."""
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_CLOCK_REMEDY = (
    "Set the clock by NTP, here or there. A site's calls are signed with the time: the coordinator takes none more than"
    " 5 minutes old, and none more than 5 seconds from the future."
)


def check_connection(settings: SiteSettings, environment: Mapping[str, str], *, offline: bool) -> CheckArea:
    """Check the key, the kit (the coordinator's file for this site) and, unless ``offline``, the connection.

    Args:
        environment: The environment variables, which may name a proxy.
    """
    area = CheckArea("connection")
    awaits_kit = offline and not settings.kit_path.is_file()
    try:
        if awaits_kit:
            read_private_key(settings.key_path)
        else:
            _check_authority(area, settings, read_and_check_connection_kit(settings))
    except BadInput as bad:
        area.add_input_faults(bad)
    if offline:
        waiting = f"; {settings.kit_path.name} is still to come from the coordinator" if awaits_kit else ""
        area.add_note(f"not looked at (--offline){waiting}.")
        return area
    kit = key = None
    with contextlib.suppress(BadInput):
        kit = read_connection_kit(settings.kit_path)
    with contextlib.suppress(BadInput):
        key = read_private_key(settings.key_path)
    if kit is None:
        area.add_note("not looked at: without the kit the address is not known.")
    else:
        _check_connection_steps(area, kit, key, environment)
    return area


def _check_authority(area: CheckArea, settings: SiteSettings, kit: SiteConnectionKit) -> None:
    """Add to ``area`` the phrase of the kit's authority and its confirmation, or a fault for another authority."""
    confirmed = get_confirmation_time(settings, kit)
    area.facts["authority_phrase"] = compute_certificate_phrase(kit.ca_certificate)
    area.facts["authority_confirmed"] = confirmed
    try:
        refuse_other_authority(settings, kit)
    except ConnectionNotAccepted as refused:
        area.add_fault(refused.exit_code, refused.problem, refused.remedy)
        return
    problem, remedy = describe_authority(settings, kit)
    if confirmed:
        area.passed.append(problem)
    else:
        area.add_note(problem, remedy)


def _check_connection_steps(
    area: CheckArea, kit: SiteConnectionKit, key: ec.EllipticCurvePrivateKey | None, environment: Mapping[str, str]
) -> None:
    host, port = split_host_port(kit.address)
    area.facts["address"] = kit.address
    try:
        proxy = find_proxy_address(host, environment)
    except CoordinatorUnreachable as error:
        area.add_fault(ClientExitCode.NO_ANSWER, f"{error}.", "Correct that variable where this program is started.")
        return

    days = None
    try:
        if _check_host_name_resolves(area, *(proxy or (host, port))):
            days = check_coordinator_certificate(kit.address, kit.ca_certificate, environment)
    except ConnectionNotAccepted as refused:
        _add_tls_fault(area, refused, kit, environment)
    except CoordinatorUnreachable as error:
        proxy_remedy = "the proxy must let CONNECT through to it" if proxy else "no proxy is set here"
        remedy = (
            "Ask the coordinator whether flwr-server start runs. "
            f"If so, the firewall must allow outgoing TCP to {host}, port {port} ({proxy_remedy})."
        )
        area.add_fault(ClientExitCode.NO_ANSWER, f"{error}.", remedy)

    if days is not None:
        route = f"through the proxy {proxy[0]}:{proxy[1]}" if proxy else "directly, no proxy"
        answers = f"{kit.address} answers {route}"
        area.passed.append(f"{answers}; its certificate is of the authority in the kit, for {days:.0f} more days")
        area.facts["certificate_days"] = round(days, 1)
        if key is not None:
            _check_coordinator_answer(area, kit, key)

    capitals = [
        name.upper()
        for name in (*PROXY_VARIABLES, *NO_PROXY_VARIABLES)
        if environment.get(name.upper()) and name not in environment
    ]
    if capitals and not any(name in environment for name in PROXY_VARIABLES):
        problem = f"{', '.join(capitals)} is set, but gRPC reads the lower-case name only: it is not used."
        lower = ", ".join(name.lower() for name in capitals)
        area.add_note(problem, f"If the way leads through it, set {lower} too.")

    if days is not None and days < CERTIFICATE_NOTE_DAYS:
        remedy = "The coordinator renews it with flwr-server init DIR --renew; nothing is to be done here."
        area.add_note(f"the coordinator's certificate expires in {days:.0f} days.", remedy)


# ---------------------------------------------------------------------- host name, port, TLS


def _check_host_name_resolves(area: CheckArea, host: str, port: int) -> bool:
    """Look up a host name; return True if it has an address. Add the address, or a fault, to ``area``."""
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        remedy = "Ask for a DNS entry, or for one in this container's hosts file; or the kit names a wrong host."
        area.add_fault(ClientExitCode.HOST_UNKNOWN, f"the name {host} cannot be resolved.", remedy)
        return False
    addresses = dict.fromkeys(str(entry[4][0]) for entry in entries)
    if host not in addresses:
        area.passed.append(f"{host} is {', '.join(addresses)}")
    return True


def _add_tls_fault(
    area: CheckArea, refused: ConnectionNotAccepted, kit: SiteConnectionKit, environment: Mapping[str, str]
) -> None:
    """Add to ``area`` the reason why TLS fails, with facts about the certificate or protocol that the server shows.

    Args:
        refused: The exception with which the connection failed.
        environment: The environment variables, which may name a proxy.
    """
    host, port = split_host_port(kit.address)
    if refused.exit_code == ClientExitCode.NO_TLS:
        protocol = ""
        if not find_proxy_address(host, environment):  # the answer to an HTTP/2 preface without TLS shows the protocol
            with contextlib.suppress(OSError), socket.create_connection((host, port), TLS_TIMEOUT_S) as connection:
                connection.sendall(_HTTP2_PREFACE)
                answer = connection.recv(64)
                if answer.startswith(b"HTTP/1"):
                    protocol = " It speaks plain HTTP."
                elif len(answer) >= 9 and answer[3] == 4 and answer[5:9] == bytes(4):  # SETTINGS of the connection
                    protocol = " It speaks plain HTTP/2, as gRPC without TLS does."
        remedy = (
            "Ask the coordinator which port flwr-server listens on: this is another service's, or something between"
            " ends TLS before it (a reverse proxy must pass TCP through)."
        )
        area.add_fault(refused.exit_code, f"{refused.problem}{protocol}", remedy)
        return
    try:
        certificate = fetch_untrusted_certificate(kit.address, environment)
        problem, remedy = _explain_certificate_fault(refused, certificate, host, port)
    except (ConnectionNotAccepted, CoordinatorUnreachable, ValueError):
        problem = refused.problem
        remedy = refused.remedy
    area.add_fault(refused.exit_code, problem, remedy)


def _explain_certificate_fault(
    refused: ConnectionNotAccepted, certificate: x509.Certificate, host: str, port: int
) -> tuple[str, str]:
    """Return problem and remedy for a certificate that this site does not accept.

    Raises:
        ValueError: If the certificate cannot be read.
    """
    if refused.exit_code == ClientExitCode.OTHER_AUTHORITY:
        values = [part.value for part in certificate.issuer][::-1]
        issuer = ", ".join(value if isinstance(value, str) else value.hex() for value in values) or "nobody"
        problem = f'{host} shows a certificate issued by "{issuer}", not by the authority of this kit.'
        if "Polyclinic authority" in issuer:
            return problem, (
                "Another coordinator answers there, or the coordinator has made a new authority: ask it for a new kit."
            )
        return f"{problem} TLS is opened on the way: a firewall or proxy inspects it.", (
            f"Have {host}, port {port}, exempted from TLS inspection. Trusting that authority on this machine does not"
            " help: flwr-client trusts the kit's alone."
        )
    if refused.exit_code == ClientExitCode.WRONG_HOST:
        try:
            alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            hosts = ", ".join(str(name.value) for name in alternatives)
        except (*UNREADABLE_CERTIFICATE_ERRORS, x509.ExtensionNotFound):
            hosts = "no host name at all"
        return f"{refused.problem} It is for {hosts}.", refused.remedy
    time_format = "%Y-%m-%d %H:%M"
    dates = f"{certificate.not_valid_before_utc:{time_format}} to {certificate.not_valid_after_utc:{time_format}} UTC"
    now = f"{dt.datetime.now(dt.UTC):{time_format}} UTC"
    return f"{refused.problem} It is valid from {dates}; this machine's clock says {now}.", refused.remedy


# ---------------------------------------------------------------------- the coordinator's answer


def _check_coordinator_answer(area: CheckArea, kit: SiteConnectionKit, key: ec.EllipticCurvePrivateKey) -> None:
    try:
        with FleetClient(kit.address, kit.ca_certificate.encode(), key) as link:
            # An admission may be on its way, as at flwr-client start. The first call also opens the connection, so
            # that the next one is timed without it.
            patience_ends = time.monotonic() + REFUSED_KEY_RETRY_S
            while (hello := link.exchange_hello()) and hello.key == "unknown" and is_spoken(hello.wire):
                if time.monotonic() >= patience_ends:
                    break
                time.sleep(FIRST_RETRY_S)
            clock = time.time()
            began = time.monotonic()
            hello = link.exchange_hello()
            seconds = time.monotonic() - began
    except ConnectionNotAccepted as refused:
        area.add_fault(refused.exit_code, refused.problem, refused.remedy)
        return
    except UnacceptableAnswer as error:
        remedy = (
            "No release of Polyclinic answers so. Ask the coordinator which program listens at this address, and"
            " whether a proxy on the way refuses the call."
        )
        area.add_fault(ClientExitCode.NO_ANSWER, f"gRPC: {error}.", remedy)
        return
    except CoordinatorUnreachable as error:
        remedy = "TLS stands, gRPC does not: a proxy on the way may not let HTTP/2 through."
        area.add_fault(ClientExitCode.NO_ANSWER, f"gRPC: {error}.", remedy)
        return

    if hello is None:
        problem = (
            "the coordinator's release is an older one, which tells neither its clock nor whether it knows this key."
        )
        area.add_fault(ClientExitCode.VERSION, problem, "Install a release of the same wire version on both sides.")
        return
    check_hello_answer(area, hello, ahead_s=clock + seconds / 2 - hello.time, unsure_s=seconds / 2)


def check_hello_answer(area: CheckArea, hello: HelloAnswer, *, ahead_s: float, unsure_s: float) -> None:
    """Compare this site's clock, release and key with the coordinator's answer to the ``hello`` call.

    Args:
        ahead_s: This machine's time minus the coordinator's, in seconds.
        unsure_s: Uncertainty of ``ahead_s``: half of the duration of the call.
    """
    area.facts |= {"clock_ahead_s": round(ahead_s, 3), "clock_unsure_s": round(unsure_s, 3)}
    area.facts |= {"release": hello.release, "wire": hello.wire, "newest_wire": hello.newest_wire}

    clock = f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} the coordinator's (± {unsure_s:.2f} s)"
    if not MIN_CLOCK_DIFFERENCE_S < ahead_s < MAX_CLOCK_DIFFERENCE_S:
        area.add_fault(ClientExitCode.CLOCK, f"this machine's clock is {clock}.", _CLOCK_REMEDY)
    elif ahead_s > CLOCK_WARNING_S or ahead_s < MIN_CLOCK_DIFFERENCE_S / 2:
        area.add_warning(ClientExitCode.CLOCK, f"this machine's clock is {clock}; calls may be refused.", _CLOCK_REMEDY)
    else:
        area.passed.append(f"this clock is {clock}")

    if not is_spoken(hello.wire):
        refused = ConnectionNotAccepted.make_wire_version_error(hello)
        area.add_fault(refused.exit_code, refused.problem, refused.remedy)
    elif hello.newest_wire != WIRE_VERSION:
        newer_there = hello.newest_wire > WIRE_VERSION
        instruction = (
            f"Install {describe_release_to_install(hello.release)} here." if newer_there else "Tell the coordinator."
        )
        problem = f"{describe_other_wire_version(hello.release, hello.newest_wire)}."
        area.add_warning(
            ClientExitCode.VERSION, problem, f"{instruction} Until then both speak wire version {hello.wire}."
        )
    elif hello.release != __version__:
        common_version = f"both speak wire version {hello.wire}"
        area.passed.append(f"the coordinator runs release {hello.release}, this site {__version__}; {common_version}")
    else:
        area.passed.append(f"both run release {hello.release} (wire {hello.wire})")
    if not is_spoken(hello.wire):
        return  # another version may sign its calls otherwise, so that the key says nothing
    if hello.key == "unknown":
        refused = ConnectionNotAccepted.make_key_refusal_error("never admitted, or revoked")
        area.add_fault(refused.exit_code, refused.problem, refused.remedy)
    else:
        area.passed.append("this site's key is admitted")
