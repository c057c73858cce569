"""The live view's service: two addresses, GET only, behind a token that stands in the URL and nowhere else."""

import asyncio
import secrets
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from urllib.parse import parse_qs

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.reporting.live.connections import Connections
from server.reporting.live.page import content_security_policy, page, part
from server.reporting.live.snapshot import Eye, Seen, Where

LOOK_S, ALIVE_S = 1.0, 10.0
"""Between two looks at the files; the longest time without a word to anyone who watches."""
MOST_VIEWERS = 16
"""Streams at a time."""
CLOSING_S = 1
"""How long open streams may take to tell the last state when the view ends."""

_HEADERS = {
    "Content-Security-Policy": content_security_policy(),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",  # the time for a request is counted from the start of its connection
}


@dataclass
class Watch:
    """One look a second at the files, however many look on.

    Attributes:
        over: Set when the view is to end: streams tell the last state and close.
        viewers: Open streams.
    """

    where: Where
    over: bool = False
    viewers: int = 0
    _eye: Eye = field(init=False)
    _lock: Lock = field(default_factory=Lock)
    _seen: Seen | None = None
    _looked: float = 0.0

    def __post_init__(self) -> None:
        self._eye = Eye(self.where)

    def seen(self, *, fresh: bool = False) -> Seen:
        """What there is; half a look old at most."""
        with self._lock:
            if fresh or self._seen is None or time.monotonic() - self._looked > LOOK_S / 2:
                self._seen, self._looked = self._eye.look(), time.monotonic()
            return self._seen


class Guarded:
    """Refuses everything that comes without the token, and gives every answer the headers that keep it to itself."""

    def __init__(self, app: ASGIApp, token: str, connections: Connections) -> None:
        self._app, self._token, self._connections = app, token.encode(), connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        refusal = PlainTextResponse("The address lacks its token: take it whole from the terminal.\n", 403)
        if not self._has_token(scope):
            await refusal(scope, receive, with_headers)
            return
        self._connections.note_token(scope["client"])
        await self._app(scope, receive, with_headers)

    def _has_token(self, scope: Scope) -> bool:
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])
        return secrets.compare_digest(given[0].encode(), self._token)


def view_app(watch: Watch, token: str, connections: Connections) -> Guarded:
    """``/`` is the page, ``/events`` its changes; nothing else is there, and nothing can be changed."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    @app.get("/")
    def whole() -> HTMLResponse:
        return HTMLResponse(page(watch.seen()))

    @app.get("/events")
    async def changes(request: Request) -> Response:
        if watch.viewers >= MOST_VIEWERS:
            return PlainTextResponse("Too many look on already.\n", 503)
        return StreamingResponse(_stream(watch, request), media_type="text/event-stream")

    return Guarded(app, token, connections)


async def _stream(watch: Watch, request: Request) -> AsyncIterator[str]:
    """The part that changes, whenever it did; a sign of life in between."""
    watch.viewers += 1
    try:
        before, told = "", time.monotonic()
        while not await request.is_disconnected():
            over = watch.over
            now = await run_in_threadpool(_part, watch, over)
            if now != before:
                yield _event("view", now)
                before, told = now, time.monotonic()
            elif time.monotonic() - told >= ALIVE_S:
                yield _event("alive", "")
                told = time.monotonic()
            if over:
                return
            await _pause(watch)
    finally:
        watch.viewers -= 1


def _part(watch: Watch, fresh: bool) -> str:
    return part(watch.seen(fresh=fresh))


async def _pause(watch: Watch) -> None:
    ends = time.monotonic() + LOOK_S
    while time.monotonic() < ends and not watch.over:
        await asyncio.sleep(LOOK_S / 10)


def _event(name: str, data: str) -> str:
    lines = "\n".join(f"data: {line}" for line in data.splitlines() or [""])
    return f"event: {name}\n{lines}\n\n"


@dataclass(frozen=True)
class Certificate:
    """Files of a certificate and its key."""

    certificate: Path
    key: Path


class ViewServer(uvicorn.Server):
    """Serves the view over one socket; writes no log line, for it could hold the token."""

    def __init__(self, watch: Watch, token: str, certificate: Certificate | None = None) -> None:
        self._watch, self._connections = watch, Connections()
        super().__init__(
            uvicorn.Config(
                view_app(watch, token, self._connections),
                log_level="critical",
                access_log=False,
                server_header=False,
                proxy_headers=False,  # connections are known by their own addresses
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=CLOSING_S,
                ssl_certfile=certificate.certificate if certificate else None,
                ssl_keyfile=certificate.key if certificate else None,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections by :class:`Connections` and not by asyncio, which accepts any number."""

        def protocol() -> asyncio.Protocol:
            made = self.config.http_protocol_class
            return made(config=self.config, server_state=self.server_state, app_state={})  # type: ignore[call-arg]

        self.servers = []
        tls = self.config.ssl
        self._accepting = [asyncio.create_task(self._connections.accept(at, protocol, tls)) for at in sockets or ()]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End; streams tell the last state first, and anyone who does not read it is cut off."""
        self._watch.over = True
        for accepting in self._accepting:
            accepting.cancel()
        open_ones = list(self.server_state.connections)
        await super().shutdown(sockets)
        for connection in open_ones:
            if (transport := getattr(connection, "transport", None)) is not None:
                transport.abort()
        await asyncio.sleep(0)

    def until_told(self, at: socket.socket) -> None:
        """Serve until ``should_exit`` is set or a signal comes."""
        asyncio.run(self.serve([at]))

    def stop(self) -> None:
        """Have :meth:`until_told` end; for another thread."""
        self.should_exit = True
