"""The web server of ``flwr-client plans serve``, for browsers of this machine only, with a secret token in its address.

The address is printed once and not logged. Every request needs the token. A web page of another host that makes the
browser call this server does not know the token. Its requests are also refused by their ``Host`` header (a name that
somebody points at 127.0.0.1), and its forms by their ``Origin`` header. The pages load nothing from other hosts and
contain no script.
"""

import html
import secrets
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

from polyclinic.client.approval.decide import (
    TypedDecision,
    decide_on_text,
    find_decision_faults,
    find_key_file,
)
from polyclinic.client.approval.page import make_content_security_policy, render_list_page, render_plan_page
from polyclinic.client.site.plans import PlanStore
from polyclinic.client.site.site_file import SiteSettings, read_site_toml_without_data
from polyclinic.common.errors import BadInput, raise_faults
from polyclinic.common.security.plan_decisions import read_sealed_approver_key
from polyclinic.common.system.stopping import graceful_shutdown

LOOPBACK = "127.0.0.1"
REQUEST_TIMEOUT_S = 10.0
"""Time in which a connection must send its request."""
MAX_FORM_BYTES = 20_000
TOKEN_BYTES = 24
PLAN_PATH = "/plan/"

PageAnswer = tuple[HTTPStatus, str, Mapping[str, str]]
"""HTTP status, page and further headers of an answer."""


class ApprovalServer(ThreadingHTTPServer):
    """A web server that shows the plans of one site, and stores decisions about them.

    Args:
        settings: The site's settings; ``site.toml`` is read again for each page.
        keys: Approver -> file of the private key. The key of an approver who is not listed is looked for in the folders
            that ``plans approve`` uses.
        token: The secret of the address.
    """

    daemon_threads = True
    allow_reuse_address = False

    def __init__(self, settings: SiteSettings, keys: Mapping[str, Path], token: str) -> None:
        super().__init__((LOOPBACK, 0), _ApprovalRequestHandler)
        self._folder = settings.folder
        self._keys = keys
        self._token = token

    @property
    def address(self) -> str:
        return f"http://{self.host}/?token={self._token}"

    @property
    def host(self) -> str:
        """Host and port of the address, as a browser states them in its ``Host`` header."""
        return f"{LOOPBACK}:{self.server_address[1]}"

    def has_token(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(errors="replace"), self._token.encode())

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a connection that broke off."""

    # ------------------------------------------------------------------ pages

    def show_page(self, path: str, *, done: str = "") -> PageAnswer:
        """Return the HTTP answer for the path of a page.

        Args:
            done: The decision just made, ``approved`` or ``denied``; empty without one.
        """
        settings = read_site_toml_without_data(self._folder)
        if path == "/":
            return HTTPStatus.OK, render_list_page(settings, self._token, done), {}
        stored = PlanStore(settings.state_folder).read_text(path.removeprefix(PLAN_PATH))
        if not path.startswith(PLAN_PATH) or stored is None:
            return HTTPStatus.NOT_FOUND, "There is no such page.", {}
        return HTTPStatus.OK, render_plan_page(settings, stored, self._token, {}, []), {}

    def store_decision(self, path: str, form: Mapping[str, str]) -> PageAnswer:
        """Sign and store the decision of a form.

        Returns:
            A redirect to the list of plans, or the form with its faults.
        """
        settings = read_site_toml_without_data(self._folder)
        stored = PlanStore(settings.state_folder).read_text(path.removeprefix(PLAN_PATH))
        if not path.startswith(PLAN_PATH) or stored is None:
            return HTTPStatus.NOT_FOUND, "There is no such page.", {}
        approves = form.get("decision") == "approve"
        approver = form.get("approver", "")
        typed = TypedDecision(approver, reason=form.get("reason", ""))
        if approves:
            # A text that is no date is reported as one; an empty one would be a denial.
            typed = TypedDecision(approver, form.get("until") or "nothing", form.get("purpose", ""))
        try:
            raise_faults(find_decision_faults(settings, typed, approves=approves))
            key = find_key_file(settings, approver, self._keys.get(approver))
            decide_on_text(settings, stored, typed, key, form.get("passphrase", ""))
        except BadInput as bad:
            form_texts = {name: text for name, text in form.items() if name != "passphrase"}
            # The page has no options: "--until is missing" becomes "until is missing".
            faults = [str(fault).removeprefix("--") for fault in bad.faults]
            page = render_plan_page(settings, stored, self._token, form_texts, faults)
            return HTTPStatus.UNPROCESSABLE_ENTITY, page, {}
        done = "approved" if approves else "denied"
        return HTTPStatus.SEE_OTHER, "", {"Location": f"/?token={self._token}&done={done}"}


class _ApprovalRequestHandler(BaseHTTPRequestHandler):
    server: ApprovalServer
    timeout = REQUEST_TIMEOUT_S
    server_version = "polyclinic"
    sys_version = ""
    HEADERS: ClassVar[Mapping[str, str]] = {
        "Content-Security-Policy": make_content_security_policy(),
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "same-origin",  # with "no-referrer" a browser sends our own forms with "Origin: null"
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-store",
    }

    def do_GET(self) -> None:
        """Send the page of the requested path."""
        if self._refuse_stranger():
            return
        url = urlsplit(self.path)
        done = parse_qs(url.query).get("done", [""])[0]
        self._answer(lambda: self.server.show_page(url.path, done=done))

    def do_POST(self) -> None:
        """Store the decision of a form."""
        if self._refuse_stranger():
            return
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{self.server.host}":
            self._send(HTTPStatus.FORBIDDEN, "The form is of another page.")
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_FORM_BYTES:
            self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "The form is too large.")
            return
        content = self.rfile.read(int(length)).decode(errors="replace")
        form = {name: values[0] for name, values in parse_qs(content, max_num_fields=20).items()}
        path = urlsplit(self.path).path
        self._answer(lambda: self.server.store_decision(path, form))

    def _refuse_stranger(self) -> bool:
        """Refuse a request without the token, or with another host name; return True if it was refused."""
        token = parse_qs(urlsplit(self.path).query, encoding="latin-1").get("token", [""])[0]
        if self.headers.get("Host") != self.server.host:
            self._send(HTTPStatus.FORBIDDEN, "This page has another address.")
        elif not self.server.has_token(token):
            self._send(HTTPStatus.FORBIDDEN, "The address lacks its token: take it whole from the terminal.")
        else:
            return False
        return True

    def _answer(self, make: Callable[[], PageAnswer]) -> None:
        try:
            status, page, headers = make()
        except BadInput as bad:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, str(bad))
            return
        self._send(status, page, headers)

    def _send(self, status: HTTPStatus, text: str, headers: Mapping[str, str] | None = None) -> None:
        page = text if text.startswith("<!doctype html>") or not text else f"<!doctype html>{html.escape(text)}"
        content = page.encode()
        self.send_response(status)
        for name, value in {**self.HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)
        self.close_connection = True

    def log_message(self, format: str, *arguments: object) -> None:
        """Write no log, because a line could contain the token."""


def serve_approval_page(settings: SiteSettings, keys: Sequence[Path], tell: Callable[[str], None]) -> None:
    """Serve the page until this process is stopped.

    Raises:
        BadInput: If a file is no key of an approver.
    """
    key_files = {read_sealed_approver_key(path).approver: path.resolve() for path in keys}
    server = ApprovalServer(settings, key_files, secrets.token_urlsafe(TOKEN_BYTES))
    with server, graceful_shutdown(0):
        tell(f"plans: {server.address}")
        tell("Open it in a browser of this machine. Anyone who has this address can read the plans. Stop with Ctrl-C.")
        server.serve_forever()
