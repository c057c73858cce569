"""HTTP client for a hospital's PACS, with limits on the time and the size of each response.

The limits protect against servers that hang, break off or respond without end. Requests run in an event loop in a
separate thread: there a time limit covers a whole request (name lookup, TLS handshake, slow headers), and Ctrl-C can
cancel it. Redirects are not followed, so that the secret is sent to no other server.
"""

import logging
import re
import socket
import ssl
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

import anyio
import httpx
from anyio.from_thread import BlockingPortal, start_blocking_portal

from polyclinic.common.errors import Fault
from polyclinic.common.hosts import normalize_host

MIN_BYTES_PER_SECOND = 100_000
"""Minimum speed of a response body; slower responses are cancelled."""
RETRY_DELAYS_S = (0.5, 1.0, 2.0)
"""Seconds to wait before the second, third and fourth attempt."""
MAX_UNANSWERED_REQUESTS = 3
"""Number of consecutive requests without a complete response after which no more requests are sent."""
for _name in ("httpx", "httpcore"):  # they log URLs, which contain UIDs of patients' studies
    logging.getLogger(_name).setLevel(logging.WARNING)


class PacsServerFailure(Exception):
    """Raised when all further requests to the server would fail too; ``fault`` has the reason and a remedy.

    Attributes:
        retry: True if the same request may succeed a little later.
    """

    def __init__(self, problem: str, remedy: str, *, retry: bool = False) -> None:
        self.fault, self.retry = Fault("data.url", problem, remedy), retry
        super().__init__(str(self.fault))


class UnusablePacsResponse(ValueError):
    """Raised when one response cannot be used; its text becomes the reason in the list of skipped images."""


class PacsObjectNotFound(UnusablePacsResponse):
    """Raised when the server does not have the requested object (status 404)."""


class NoPacsResponse(UnusablePacsResponse):
    """Raised when the server did not respond completely in time, or closed the connection."""


@dataclass(frozen=True)
class PacsConnectionSettings:
    """The address of a hospital's PACS and the settings for connections to it.

    Attributes:
        authorization: Value of the ``Authorization`` header; empty for none.
        secrets_path: The user's file of secrets, for messages.
        context: TLS context that checks the server's certificate; None for plain HTTP.
    """

    url: str
    context: ssl.SSLContext | None
    authorization: str
    secrets_path: Path
    timeout_s: float
    connections: int

    def __repr__(self) -> str:
        """Show the server's address without the secret."""
        return f"Server({self.url})"

    @property
    def host_and_port(self) -> str:
        """The server's host and port, for messages."""
        return httpx.URL(self.url).netloc.decode()

    @property
    def secret_remedy(self) -> str:
        """Advice for an error message if the server refuses the secret, or requires one."""
        if self.authorization:
            return f"The secret is that of {self.secrets_path}; ask the PACS's administrator which rights it has."
        return f"No secret was sent, because {self.secrets_path} has none for {normalize_host(self.url)}."


@dataclass(frozen=True)
class PacsResponse:
    """The body and the media type of a complete response with status 200 or 204."""

    content: bytearray
    media_type: str


class DicomwebClient:
    """Sends requests to a PACS, inside a ``with`` block that may be entered several times; thread-safe.

    Attributes:
        failed: The error after which no more requests are sent; None while the server works.
    """

    def __init__(self, server: PacsConnectionSettings) -> None:
        self.server = server
        self.failed: PacsServerFailure | None = None
        self._unanswered = 0
        self._pending = set[Future[PacsResponse]]()
        self._loop: AbstractContextManager[BlockingPortal]
        self._portal: BlockingPortal

    def __enter__(self) -> Self:
        self._loop = start_blocking_portal(name="dicomweb")
        self._portal = self._loop.__enter__()
        self._turns = self._portal.call(anyio.Semaphore, self.server.connections)
        headers = {"Accept-Encoding": "identity", "User-Agent": "polyclinic"}
        if self.server.authorization:
            headers["Authorization"] = self.server.authorization
        # Ignore proxies and passwords in the environment: the PACS is inside the hospital.
        self._http = httpx.AsyncClient(
            verify=self.server.context or False,
            headers=headers,
            follow_redirects=False,
            trust_env=False,
            timeout=self.server.timeout_s,
        )
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel all pending requests, so that threads that wait for a response continue at once."""
        for future in list(self._pending):
            future.cancel()
        self._portal.call(self._http.aclose)
        self._portal.call(self._portal.stop, True)
        self._loop.__exit__(None, None, None)

    def get(self, path: str, accept: str, largest: int, parameters: Mapping[str, str] | None = None) -> PacsResponse:
        """Send a GET request for a path below the server's address, and return the response.

        Args:
            accept: Value of the ``Accept`` header.
            largest: Maximum size of the response in bytes.

        Raises:
            PacsServerFailure: If this and all further requests fail.
            UnusablePacsResponse: If this request has no usable response.
        """
        if self.failed is not None:
            raise self.failed
        request = httpx.Request("GET", self.server.url + path, params=parameters, headers={"Accept": accept})
        try:
            future = self._portal.start_task_soon(self._send_with_retries, request, largest)
        except RuntimeError:  # the loop has ended
            raise UnusablePacsResponse("broken off") from None
        try:
            self._pending.add(future)
            response = future.result()
        except CancelledError:
            raise UnusablePacsResponse("broken off") from None
        except PacsServerFailure as failed:
            self.failed = self.failed or failed
            raise
        except NoPacsResponse:
            self._unanswered += 1
            if self._unanswered < MAX_UNANSWERED_REQUESTS:
                raise
            in_time = f"without a whole answer in time ({self.server.timeout_s:g} s)"
            self.failed = self.failed or PacsServerFailure(
                f"{self.server.host_and_port} left {MAX_UNANSWERED_REQUESTS} requests one after the other {in_time}.",
                "Raise data.timeout_s where it reads from slow storage; what has arrived is kept.",
            )
            raise self.failed from None
        finally:
            self._pending.discard(future)
        self._unanswered = 0
        return response

    async def _send_with_retries(self, request: httpx.Request, largest: int) -> PacsResponse:
        """Send a request, and repeat it after failures that may be temporary."""
        pauses = list(RETRY_DELAYS_S)
        while True:
            try:
                async with self._turns:
                    return await self._send_request_once(request, largest)
            except PacsServerFailure as failed:
                if not pauses or not failed.retry:
                    raise
            except NoPacsResponse:  # it took the whole time limit: only one more try
                if len(pauses) < len(RETRY_DELAYS_S):
                    raise
            await anyio.sleep(pauses.pop(0))

    async def _send_request_once(self, request: httpx.Request, largest: int) -> PacsResponse:
        """Send a request once, and read the response within the limits on time and size."""
        timeout_s, content = self.server.timeout_s, bytearray()
        try:
            with anyio.fail_after(timeout_s) as limit:
                request = self._http.build_request("GET", request.url, headers=request.headers)
                response = await self._http.send(request, stream=True)
                async with aclosing(response):
                    _refuse_unusable_response(response, self.server, largest)
                    begin = anyio.current_time()
                    chunks = cast("AsyncGenerator[bytes, None]", response.aiter_raw())
                    async with aclosing(chunks):  # otherwise it would be closed later, or never
                        async for chunk in chunks:
                            content += chunk
                            _refuse_oversized_response(len(content), largest)
                            limit.deadline = begin + timeout_s + len(content) / MIN_BYTES_PER_SECOND
            return PacsResponse(content, response.headers.get("content-type", ""))
        except (TimeoutError, httpx.TimeoutException):
            raise NoPacsResponse(f"no whole answer in time (data.timeout_s = {timeout_s:g})") from None
        except (httpx.ConnectError, UnicodeError) as error:  # UnicodeError for an invalid host name
            raise _explain_connection_failure(error, self.server.host_and_port) from None
        except httpx.TransportError as error:
            raise NoPacsResponse(f"the answer breaks off or is no HTTP ({type(error).__name__})") from None


def _refuse_unusable_response(response: httpx.Response, settings: PacsConnectionSettings, largest: int) -> None:
    """Raise an error if the status or the headers make a response unusable, before its body is read.

    Args:
        settings: The server, for the message.
        largest: Maximum size of the body in bytes.
    """
    status, server = response.status_code, settings.host_and_port
    if status == 401:
        raise PacsServerFailure(f"{server} does not accept the authentication (401).", settings.secret_remedy)
    if status == 403:
        raise PacsServerFailure(f"{server} refuses access (403).", settings.secret_remedy)
    if status == 407 or 300 <= status < 400:
        target = re.match(r"https?://([^/?#]{1,80})", response.headers.get("location", ""))
        address = target[1] if target else "another address"
        remedy = "Give the address of the DICOMweb service itself in data.url, after all redirections."
        raise PacsServerFailure(f"{server} sends on to {address} ({status}), where nothing is sent.", remedy)
    if status in (429, 502, 503, 504):
        problem = f"{server} says that it is overloaded or not running ({status}), at each of several tries."
        remedy = "Try again later, or with fewer data.connections; what has arrived is kept."
        raise PacsServerFailure(problem, remedy, retry=True)
    if status == 404:
        raise PacsObjectNotFound("the server does not have it (404)")
    if status not in (200, 204):
        raise UnusablePacsResponse(f"the server answers {status}")
    if response.headers.get("content-encoding", "identity") != "identity":
        raise UnusablePacsResponse("the answer is compressed, which was not asked for")
    length = response.headers.get("content-length", "")
    _refuse_oversized_response(int(length) if length.isdecimal() else 0, largest)


def _refuse_oversized_response(size: int, largest: int) -> None:
    if size > largest:
        raise UnusablePacsResponse(f"the answer is larger than {largest >> 20} MiB")


def _explain_connection_failure(error: Exception, server: str) -> PacsServerFailure:
    """Return a :class:`PacsServerFailure` with the reason for a failed connection, from the causes of ``error``.

    Args:
        server: Host and port of the server, for the message.
    """
    cause: BaseException | None = error
    for _ in range(10):  # the chain of causes may be circular
        if cause is None:
            break
        if isinstance(cause, ssl.SSLCertVerificationError):
            problem = f"the certificate of {server} is not accepted: {cause.verify_message}."
            remedy = "If the hospital has a CA of its own, name its certificate (PEM) in data.ca_file."
            return PacsServerFailure(problem, remedy)
        if isinstance(cause, ssl.SSLError):
            reason = (cause.reason or "no reason given").replace("_", " ").lower()[:80]
            remedy = "Is data.url right: https, and the port of the DICOMweb service?"
            return PacsServerFailure(f"{server} does not speak TLS as expected ({reason}).", remedy)
        if isinstance(cause, socket.gaierror | UnicodeError):
            problem = f"the name of {server} is not known to this machine."
            return PacsServerFailure(problem, "Look into data.url, and the DNS.")
        cause = cause.__cause__ or cause.__context__
    problem = f"{server} cannot be reached: no connection at {len(RETRY_DELAYS_S) + 1} tries."
    remedy = "Is it running, is data.url right, and does the firewall let this machine through?"
    return PacsServerFailure(problem, remedy, retry=True)
