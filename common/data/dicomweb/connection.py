"""Requests to one DICOMweb server: each with a limit of size and of time, several at once, the secret to it alone.

A loop in a thread of its own waits for the answers, because only there a limit of time holds for all of a request: the
name, the handshake, and a server that sends one byte of a header now and then.
"""

import asyncio
import logging
import ssl
import threading
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import aclosing
from dataclasses import dataclass
from typing import Self, cast

import httpx

from common.data.dicomweb import refusals
from common.data.dicomweb.refusals import NotGiven, ServerFailed, Silent

SLOWEST = 100_000
"""Bytes a second: an answer that comes slower than this, after its beginning, is broken off."""
WAITS_S = (0.5, 1.0, 2.0)
"""Before another try."""
MOST_SILENT = 3
"""Requests without an answer, one after the other, after which the server is given up."""
for _name in ("httpx", "httpcore"):  # their lines hold addresses, in which identifiers of patients' studies stand
    logging.getLogger(_name).setLevel(logging.WARNING)


@dataclass(frozen=True)
class Server:
    """Where the service lies and how it is spoken to.

    Attributes:
        authorization: Value of the header, empty for none.
        context: By which its certificate is judged; None for plain HTTP.
    """

    url: str
    context: ssl.SSLContext | None
    authorization: str
    timeout_s: float
    connections: int

    def __repr__(self) -> str:
        """Show no secret."""
        return f"Server({self.url})"

    @property
    def name(self) -> str:
        """Host and port, for messages."""
        return httpx.URL(self.url).netloc.decode()


@dataclass(frozen=True)
class Answer:
    """A whole answer with status 200 or 204."""

    content: bytearray
    kind: str


class DicomwebConnection:
    """Open inside a ``with``; may be opened again. Methods may be called from several threads."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.failed: ServerFailed | None = None
        self._silent = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handing_over = threading.Lock()

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="dicomweb")
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        """Break off what is under way: threads that wait for it go on at once."""
        with self._handing_over:  # no request is handed to a loop that ends
            loop, self._loop = self._loop, None
        assert loop is not None
        asyncio.run_coroutine_threadsafe(self._close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        loop.close()

    def get(self, path: str, kind: str, most: int, parameters: Mapping[str, str] | None = None) -> Answer:
        """Ask for what lies at a path below the address.

        Args:
            kind: For the header ``Accept``.
            most: Bytes of the answer.

        Raises:
            ServerFailed: If no request makes sense any more.
            NotGiven: If this one has no usable answer.
        """
        if self.failed is not None:
            raise self.failed
        request = httpx.Request("GET", self.server.url + path, params=parameters, headers={"Accept": kind})
        try:
            answer = self._handed_over(request, most).result()
        except CancelledError:
            raise NotGiven("broken off") from None
        except ServerFailed as failed:
            self.failed = self.failed or failed
            raise
        except Silent:
            self._silent += 1
            if self._silent < MOST_SILENT:
                raise
            self.failed = self.failed or refusals.silent(self.server.name, self.server.timeout_s, MOST_SILENT)
            raise self.failed from None
        self._silent = 0
        return answer

    def _handed_over(self, request: httpx.Request, most: int) -> Future[Answer]:
        with self._handing_over:
            if self._loop is None:
                raise CancelledError
            return asyncio.run_coroutine_threadsafe(self._tried(request, most), self._loop)

    async def _open(self) -> None:
        """Proxies and passwords of the environment are not for the hospital's own PACS."""
        server = self.server
        headers = {"Accept-Encoding": "identity", "User-Agent": "polyclinic"}
        if server.authorization:
            headers["Authorization"] = server.authorization
        self._turns = asyncio.Semaphore(server.connections)
        self._client = httpx.AsyncClient(
            verify=server.context or False,
            headers=headers,
            follow_redirects=False,
            trust_env=False,
            timeout=server.timeout_s,
        )

    async def _close(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()
        await asyncio.get_running_loop().shutdown_asyncgens()  # httpx has some of its own

    async def _tried(self, request: httpx.Request, most: int) -> Answer:
        """One request, with other tries where these may help."""
        left = list(WAITS_S)
        while True:
            try:
                async with self._turns:
                    return await self._asked(request, most)
            except ServerFailed as failed:
                if not left or not failed.again:
                    raise
            except Silent:  # its limit of time has passed already
                if len(left) < len(WAITS_S):
                    raise
            await asyncio.sleep(left.pop(0))

    async def _asked(self, request: httpx.Request, most: int) -> Answer:
        name = self.server.name
        try:
            async with asyncio.timeout(self.server.timeout_s) as limit:
                own = self._client.build_request("GET", request.url, headers=request.headers)
                response = await self._client.send(own, stream=True)
                try:
                    self._judge(response, most)
                    return Answer(await self._content(response, most, limit), response.headers.get("content-type", ""))
                finally:
                    await response.aclose()
        except (TimeoutError, httpx.TimeoutException):
            raise Silent(f"no whole answer in time (data.timeout_s = {self.server.timeout_s:g})") from None
        except httpx.ConnectError as error:
            raise refusals.of_connection(error, name) or refusals.unreached(name, len(WAITS_S) + 1) from None
        except UnicodeError:  # the name has a part that no name has, and the resolver says so in its own way
            raise refusals.unknown_name(name) from None
        except httpx.TransportError as error:
            raise Silent(f"the answer breaks off or is no HTTP ({type(error).__name__})") from None

    def _judge(self, response: httpx.Response, most: int) -> None:
        """Refuse by status and headers what need not be read."""
        status = response.status_code
        failed = refusals.of_status(status, _host(response), self.server.name)
        if failed is not None:
            raise failed
        if status == 404:
            raise NotGiven("the server does not have it (404)")
        if status not in (200, 204):
            raise NotGiven(f"the server answers {status}")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise NotGiven("the answer is compressed, which was not asked for")
        length = response.headers.get("content-length", "")
        if length.isdecimal() and int(length) > most:
            raise _too_large(most)

    async def _content(self, response: httpx.Response, most: int, limit: asyncio.Timeout) -> bytearray:
        loop, content = asyncio.get_running_loop(), bytearray()
        begin = loop.time()
        chunks = cast("AsyncGenerator[bytes, None]", response.aiter_raw())
        async with aclosing(chunks):  # else it is closed some time later, or never
            async for chunk in chunks:
                content += chunk
                if len(content) > most:
                    raise _too_large(most)
                limit.reschedule(begin + self.server.timeout_s + len(content) / SLOWEST)
        return content


def _too_large(most: int) -> NotGiven:
    return NotGiven(f"the answer is larger than {most >> 20} MiB")


def _host(response: httpx.Response) -> str:
    """The host to which an answer redirects, where it names one."""
    try:
        return httpx.URL(response.headers.get("location", "")).netloc.decode("ascii", errors="replace")[:80]
    except httpx.InvalidURL:
        return ""
