"""Who may call Flower's Control and Runtime APIs on 127.0.0.1: only who can read the coordinator's ``state`` folder.

Flower asks for no login there (seen in 1.39): any account on the machine could list and remove sites, and start runs.
From 1.40 on its Fleet API is served there too. Our programs send a secret with every call, in a header inside TLS; the
SuperLink compares it before it reads a body. Both ends use Flower's own places for that: its clients' interceptors, and
its hook for middleware of extensions.
"""

import hashlib
import hmac
from pathlib import Path
from typing import Any

import httpx
from flwr.superlink import extensions
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from server.coordinator.folder import Coordinator

SECRET = "executor.secret"
"""In the coordinator's ``state``."""
HEADER = "polyclinic-secret"
_PURPOSE = b"polyclinic: calls on loopback"
_REFUSED = b"this API answers only who can read the coordinator's folder\n"


def secret_file(coordinator: Coordinator) -> Path:
    """Return the file of the secret that a caller on loopback must have."""
    return coordinator.state / SECRET


def secret_of(path: Path) -> str:
    """What calls carry: made from the secret for one purpose, so that the secret itself is sent nowhere.

    Raises:
        OSError: If this account cannot read the file.
    """
    return hmac.new(path.read_bytes(), _PURPOSE, hashlib.sha256).hexdigest()


class SecretInterceptor:
    """Adds the secret to every call of a Flower client."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._path = secret_file(coordinator)

    def intercept(self, context: Any, call_next: Any) -> httpx.Response:
        """Read the secret anew: a coordinator's folder that was put back from a copy may have another."""
        context.request.headers[HEADER] = secret_of(self._path)
        response: httpx.Response = call_next(context)
        return response


class AsksForSecret:
    """Middleware around Flower's APIs: answers 401 to a call without the secret, and reads nothing more of it."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self._app, self._secret = app, secret.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand on what may pass."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self._known(scope)):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": httpx.codes.UNAUTHORIZED, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSED})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _known(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == HEADER.encode()]
        return len(given) == 1 and hmac.compare_digest(given[0], self._secret)


def ask_for_secret(state: Path) -> None:
    """Put the middleware in front of everything that this process serves over HTTP."""
    asks = Middleware(AsksForSecret, secret=secret_of(state / SECRET))
    vars(extensions)["get_middleware"] = lambda: (asks,)
