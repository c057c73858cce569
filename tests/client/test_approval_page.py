"""The page of ``flwr-client plans serve``: a token and this machine's name before it, and decisions by passphrase."""

import http.client
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest

from polyclinic.client.approval.server import ApprovalServer
from polyclinic.client.site.approvals import SiteApprovals
from polyclinic.client.site.plans import PlanStore, RequestFacts, RequestText
from polyclinic.client.site.policy import SitePolicy
from polyclinic.client.site.site_file import read_site_toml_without_data
from tests.client.approvals import PASSPHRASE, WEBER, Approver, add_approver, write_approvers
from tests.client.rounds import changed_plan, plan
from tests.server.chromium import View, needs_browser, open_page

SITE_TOML = """name = "north"

[data]
kind = "folder"
images = "images"
labels = "labels.csv"
image_column = "image"
label_columns = ["Fluid", "Pneumonia"]

[policy]
approval = "required"
"""
TITLE = "Fluid <script>alert(1)</script> in the lung"
PLAN = changed_plan(
    plan(), run={"name": TITLE, "purpose": "How well does one model of three hospitals find fluid?", "rounds": 30}
)
TEXT = RequestText("training", PLAN.model_dump_json())
FACTS = RequestFacts(
    kind="training",
    time="2026-11-29T09:30:00+00:00",
    coordinator="trial",
    classes={"Fluid": "Pleural Effusion", "Pneumonia": "Pneumonia"},
    train=1840,
    validation=410,
    test=402,
    patients=903,
)


@dataclass(frozen=True)
class Page:
    """The served page of a hospital with one plan.

    Attributes:
        token: The token of its address.
    """

    folder: Path
    weber: Approver
    server: ApprovalServer
    token: str = "a-token"

    @property
    def verdict(self) -> str:
        """The rule against the plan; empty if it is approved."""
        approvals = SiteApprovals(self.folder, self.folder / "state", "north", SitePolicy(approval="required"))
        verdict = approvals.find_verdict("training", TEXT.sha256)
        return verdict.rule if verdict.reason else ""

    @property
    def plan_path(self) -> str:
        return f"/plan/{TEXT.sha256}?token={self.token}"

    def ask(
        self, method: str, path: str, form: Mapping[str, str] | None = None, **headers: str
    ) -> tuple[int, str, http.client.HTTPMessage]:
        """The answer to a request: status, page and headers."""
        line = http.client.HTTPConnection("127.0.0.1", self.server.server_address[1], timeout=30)
        kind = {"Content-Type": "application/x-www-form-urlencoded"} if form is not None else {}
        line.request(method, path, None if form is None else urlencode(form), {**kind, **headers})
        answer = line.getresponse()
        content = answer.read().decode()
        line.close()
        return answer.status, content, answer.headers

    def post(self, *, passphrase: str = PASSPHRASE, **fields: str) -> tuple[int, str, http.client.HTTPMessage]:
        form = {
            "decision": "approve",
            "approver": WEBER,
            "until": "2099-12-31",
            "purpose": "",
            "passphrase": passphrase,
        }
        return self.ask("POST", self.plan_path, form | fields)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    folder = tmp_path / "north"
    (folder / "state").mkdir(parents=True)
    (folder / "site.toml").write_text(SITE_TOML, encoding="utf-8")
    weber = add_approver(tmp_path)
    write_approvers(folder / "site.toml", weber)
    PlanStore(folder / "state").store_text(TEXT, FACTS)
    settings = read_site_toml_without_data(folder)
    with ApprovalServer(settings, {WEBER: weber.key}, Page.token) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield Page(folder, weber, server)
        server.shutdown()
        thread.join()


def test_the_page_listens_on_this_machine_alone_at_a_random_port(page: Page) -> None:
    assert page.server.server_address[0] == "127.0.0.1"
    assert page.server.server_address[1] > 1023
    assert page.server.address == f"http://127.0.0.1:{page.server.server_address[1]}/?token=a-token"


@pytest.mark.parametrize("query", ["", "?token=", "?token=another", "?token=a-token2", "?Token=a-token"])
def test_nothing_is_shown_or_taken_without_the_token(query: str, page: Page) -> None:
    for path in ("/", f"/plan/{TEXT.sha256}"):
        status, text, _ = page.ask("GET", path + query)
        assert status == 403
        assert "Fluid" not in text
    form = {
        "decision": "approve",
        "approver": WEBER,
        "until": "2099-12-31",
        "passphrase": PASSPHRASE,
        "token": "a-token",
    }
    assert page.ask("POST", f"/plan/{TEXT.sha256}{query}", form)[0] == 403
    assert page.verdict == "approval.missing"


def test_another_host_name_and_a_form_of_another_page_are_refused(page: Page) -> None:
    """A name that somebody points at 127.0.0.1, and a page elsewhere that sends a form here."""
    port = page.server.server_address[1]
    for host in (f"evil.example:{port}", f"localhost:{port}", "127.0.0.1"):
        assert page.ask("GET", f"/?token={page.token}", Host=host)[0] == 403
    form = {"decision": "approve", "approver": WEBER, "until": "2099-12-31", "passphrase": PASSPHRASE}
    for origin in ("https://evil.example", "null"):
        assert page.ask("POST", page.plan_path, form, Origin=origin)[0] == 403
    assert page.verdict == "approval.missing"
    assert page.ask("POST", page.plan_path, form, Origin=f"http://127.0.0.1:{port}")[0] == 303
    assert page.verdict == ""


def test_a_page_says_what_the_command_says_escapes_it_and_fetches_nothing(page: Page) -> None:
    status, text, headers = page.ask("GET", page.plan_path)
    assert status == 200
    for words in (
        "1,840 training images of 903 patients",
        "Fluid (in the study: Pleural Effusion)",
        "Leaves in each round",
    ):
        assert words in text
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert re.findall(r"(?:src|href|action)=\"(?!/)[^\"]*\"", text) == []
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert (headers["Cache-Control"], headers["Referrer-Policy"]) == ("no-store", "same-origin")


def test_a_plan_is_approved_and_denied_by_passphrase(page: Page) -> None:
    status, _, headers = page.post(purpose="Fluid, for the ward")
    assert (status, page.verdict) == (303, "")
    status, text, _ = page.ask("GET", headers["Location"])
    assert "The plan is approved." in text
    assert f"approved by {WEBER} until 2099-12-31" in text
    assert page.post(decision="deny", reason="not any more")[0] == 303
    assert page.verdict == "approval.denied"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"passphrase": "another one"}, "passphrase"),
        ({"until": "2020-01-01"}, "is over"),
        ({"until": ""}, "not a date"),
        ({"approver": "nobody"}, "[approvers]"),
        ({"decision": "deny"}, "<li>reason: is missing"),
    ],
)
def test_a_form_with_a_fault_decides_nothing_and_comes_back_without_the_passphrase(
    fields: dict[str, str], words: str, page: Page
) -> None:
    status, text, _ = page.post(**{"purpose": "kept words", "reason": "", **fields})
    assert status == 422
    assert words in text
    assert "kept words" in text
    assert PASSPHRASE not in text
    assert page.verdict == "approval.missing"


def test_a_form_that_is_too_large_and_a_connection_that_says_nothing_harm_nobody(page: Page) -> None:
    with socket.create_connection(("127.0.0.1", page.server.server_address[1])):
        assert page.post(purpose="x" * 30_000)[0] == 413
        assert page.ask("GET", "/elsewhere?token=a-token")[0] == 404
        assert page.ask("GET", "/plan/../../site.toml?token=a-token")[0] == 404
        assert page.ask("GET", f"/?token={page.token}")[0] == 200


@pytest.mark.long
@needs_browser
def test_a_person_approves_in_a_browser(page: Page) -> None:
    with open_page(page.server.address, View(width=390)) as tab:
        tab.value(f"document.querySelector('a[href^=\"/plan/{TEXT.sha256}\"]').click()")
        tab.until("document.querySelector('#approve-until') !== null")
        assert tab.value("document.documentElement.scrollWidth <= innerWidth")
        tab.value("document.querySelector('#approve-until').value = '2099-12-31'")
        tab.value(f"document.querySelector('#approve-passphrase').value = {PASSPHRASE!r}")
        tab.value("document.querySelector('button.go').click()")
        tab.until("document.body.innerText.includes('The plan is approved.')")
        assert urlsplit(tab.value("location.href")).path == "/"
    assert page.verdict == ""
