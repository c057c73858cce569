"""Why a PACS gives nothing: the whole server, for which work ends, or one answer of it."""

import socket
import ssl
from collections.abc import Iterator

import httpx

from common.errors import Fault


class ServerFailed(Exception):
    """No further request makes sense; the fault says why and what to do.

    Attributes:
        again: Whether another try, a little later, may succeed.
    """

    def __init__(self, fault: Fault, *, again: bool = False) -> None:
        super().__init__(str(fault))
        self.fault, self.again = fault, again


class NotGiven(ValueError):
    """One answer is missing or unusable; its text is the reason, for the list of images that are left out."""


class Silent(NotGiven):
    """The server did not answer in time, or broke off."""


_SECRET = "Look into data.authentication and the secret; ask the PACS's administrator which rights it has."


def of_status(status: int, location: str, server: str) -> ServerFailed | None:
    """What a status says about the whole server; None where it is about one answer.

    Args:
        location: Host of the address to which it redirects.
    """
    if status == 401:
        return _failed(f"{server} does not accept the authentication (401).", _SECRET)
    if status == 403:
        return _failed(f"{server} refuses access (403).", _SECRET)
    if status == 407 or 300 <= status < 400:
        problem = f"{server} sends on to {location or 'another address'} ({status}), where nothing is sent."
        return _failed(problem, "Give the address of the DICOMweb service itself in data.url, after all redirections.")
    if status in (429, 502, 503, 504):
        problem = f"{server} says that it is overloaded or not running ({status}), at each of several tries."
        remedy = "Try again later, or with fewer data.connections; what has arrived is kept."
        return _failed(problem, remedy, again=True)
    return None


def of_connection(error: httpx.TransportError, server: str) -> ServerFailed | None:
    """What a failed connection says; None where another try may succeed."""
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            problem = f"the certificate of {server} is not accepted: {cause.verify_message}."
            return _failed(problem, "If the hospital has a CA of its own, name its certificate (PEM) in data.ca_file.")
        if isinstance(cause, ssl.SSLError):
            problem = f"{server} does not speak TLS as expected ({_plain(cause.reason)})."
            return _failed(problem, "Is data.url right: https, and the port of the DICOMweb service?")
        if isinstance(cause, socket.gaierror):
            return unknown_name(server)
    return None


def unknown_name(server: str) -> ServerFailed:
    """The host has no address that this machine can find out."""
    return _failed(f"the name of {server} is not known to this machine.", "Look into data.url, and the DNS.")


def unreached(server: str, tries: int) -> ServerFailed:
    """No connection came about."""
    problem = f"{server} cannot be reached: no connection at {tries} tries."
    remedy = "Is it running, is data.url right, and does the firewall let this machine through?"
    return _failed(problem, remedy, again=True)


def silent(server: str, timeout_s: float, count: int) -> ServerFailed:
    """One request after the other had no answer."""
    problem = f"{server} left {count} requests one after the other without a whole answer in time ({timeout_s:g} s)."
    return _failed(problem, "Raise data.timeout_s where it reads from slow storage; what has arrived is kept.")


def _failed(problem: str, remedy: str, *, again: bool = False) -> ServerFailed:
    return ServerFailed(Fault("data.url", problem, remedy), again=again)


def _plain(reason: str | None) -> str:
    return (reason or "no reason given").replace("_", " ").lower()[:80]


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    for _ in range(10):
        if seen is None:
            return
        yield seen
        seen = seen.__cause__ or seen.__context__
