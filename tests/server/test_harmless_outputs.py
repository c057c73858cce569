"""The second line of defence: text that was not made harmless where it came in acts on no terminal, page or file."""

import csv
import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console
from rich.table import Table

import server.runs.progress
from client.connection import status as site_status
from client.gate import audit_report
from client.gate.gate import LISTED_BYTES, list_audit_fields
from common.errors import BadInput, Fault
from common.metrics.auroc import summarise
from common.models.network import build
from common.models.saved import save_model
from common.models.zoo.spec import ModelSpec
from common.security.audit import Audit
from common.system.plain_text import json_text
from common.system.terminal import PlainConsole, event_printer, run_program
from common.wire.canonical_bytes import RecordField
from server.deployment import status
from server.export.prediction import predict_to_csv
from server.federation.recorder import RunTotals
from server.reporting import model_card
from server.reporting.live.files import RunSnapshot, SiteStatus, event_text
from server.reporting.live.page import render_changing_part, render_page
from server.runs.audit_log import shorten_reasons
from server.runs.folder import RunFolder
from server.runs.live_status import PresentRun
from server.runs.reader import RoundLine as RoundLine
from server.runs.reporter import RunReporter
from strategies.engine.events import FederationValidation, RoundRecord, WaitingStatus
from strategies.engine.state import FederationState
from tests.strategies.states import ONE
from tests.words import HOSTILE_TEXTS, raw_in

TEXTS = [text for text in HOSTILE_TEXTS.values() if len(text) < 1000]
ALL = "".join(TEXTS)
STATE = FederationState(1, ONE)


def record(reason: str) -> RoundRecord:
    return RoundRecord(
        1, ("east",), {"north": reason}, {}, FederationValidation(), {}, {}, {}, 1.0, 0.1, shortened={"east": reason}
    )


@pytest.fixture
def screen() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def console(screen: io.StringIO) -> Console:
    """Without colours, so that whatever control character is there came with a text."""
    return PlainConsole(file=screen, width=200, color_system=None)


@pytest.mark.parametrize("text", TEXTS)
def test_what_a_program_tells_holds_no_control_character_and_forges_no_line(
    text: str, console: Console, screen: io.StringIO
) -> None:
    event_printer(console)(f"round 1 went without north: {text}")
    assert raw_in(screen.getvalue()) == set()
    assert not any(line.startswith("12:00:00") for line in screen.getvalue().splitlines()[1:])


def test_at_a_terminal_only_our_own_styles_are_escape_sequences() -> None:
    screen = io.StringIO()
    coloured = PlainConsole(file=screen, force_terminal=True, color_system="truecolor", width=100)
    coloured.print(f"[bold red]error[/] {'x' + chr(27)}]0;PWNED{chr(7)}", highlight=False)
    assert "\x1b[1;31merror\x1b[0m" in screen.getvalue()
    assert "\x1b]" not in screen.getvalue()
    assert r"x\x1b]0;PWNED" in screen.getvalue()


def test_tables_pages_of_status_and_plain_lines_hold_none(console: Console, screen: io.StringIO) -> None:
    table = Table(ALL, title=ALL)
    table.add_row(ALL.replace("[", "("))
    run = PresentRun(
        "/run", ALL, left_out={"north": ALL}, shortened={"east": ALL}, last_error=ALL, last_error_time="now"
    )
    present = {**vars(run), "sites": ["north"]}
    found = {
        "name": ALL,
        "address": "a:1",
        "superlink": "up",
        "certificate_days": 3,
        "sites": {},
        "run": present,
        "release": ALL,
    }
    for shown in (table, ALL, status.status_tables({**found, "time": 0.0})):
        console.print(shown, markup=False)
    assert raw_in(screen.getvalue()) == set()


def test_a_program_that_ends_with_hostile_words_says_them_harmlessly(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise BadInput([Fault(ALL, ALL, ALL)])

    fails.info = type("Info", (), {"name": "flwr-server"})  # type: ignore[attr-defined]
    with pytest.raises(SystemExit):
        run_program(fails, ())  # type: ignore[arg-type]
    assert raw_in(capsys.readouterr().err) == set()


def test_the_progress_bar_holds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = PlainConsole(file=screen, force_terminal=True, color_system=None, width=120)
    with server.runs.progress.ProgressBar(console, "title \x1b]0;PWNED\x07\u202e") as bar:
        bar.began(["east"], 2)
        bar.round_done(record(ALL), STATE)
    assert "\x1b]" not in screen.getvalue()
    assert raw_in(screen.getvalue()) <= {"\x1b", "\r"}  # by which rich itself moves the bar


def test_what_a_run_says_and_writes_down_holds_none(tmp_path: Path, console: Console, screen: io.StringIO) -> None:
    reporter = RunReporter(PresentRun("/run", "run"), tmp_path, event_printer(console))
    with reporter:
        reporter.waiting(WaitingStatus("roll call", 0, (ALL,), (), 3.0))
        reporter.began([ALL], 2)
        reporter.joined(1, ALL)
        reporter.left_out("north", ALL)
        reporter.round_done(record(ALL), STATE)
    assert raw_in(screen.getvalue()) == set()
    assert raw_in((tmp_path / "present.json").read_text(encoding="utf-8"), "") == set()


def test_files_of_a_run_hold_none(tmp_path: Path) -> None:
    folder, audit = RunFolder(tmp_path), Audit(tmp_path, durable=False)
    books = RunTotals(folder, 1)
    books.note(record(ALL), STATE, {ALL: 1.0})
    books.finalize(FederationValidation(), STATE)
    folder.summary({"rounds": 1, "classes": [ALL], "test": asdict(summarise({}, (), (), ALL))})
    audit.append(reason=ALL)
    for name in ("events.jsonl", "rounds.jsonl", "summary.json", "audit.jsonl"):
        assert raw_in((tmp_path / name).read_text(encoding="utf-8")) == set(), name
    events = (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    words = [entry.get("reason") or entry["done"] for entry in map(json.loads, events)]
    assert words == [ALL] * len(words)
    assert len(words) == 2


def test_pages_hold_none() -> None:
    seen = RunSnapshot(
        ALL,
        ALL,
        replace(PresentRun("/run", ALL), last_error=ALL, sites=(ALL,), left_out={ALL: ALL}),
        (SiteStatus(ALL, ALL, ALL, missed=ALL),),
        (RoundLine(round=1, sites=(ALL,), absent={ALL: ALL}),),
        (event_text({"event": "absent", "round": 1, "site": ALL, "reason": ALL}), event_text({"event": ALL, ALL: ALL})),
    )
    assert raw_in(render_page(seen), "\n\t") == set()
    assert raw_in(render_changing_part(seen), "\n\t") == set()
    assert raw_in(model_card.escaped(ALL), "") == set()


def test_at_a_site_words_of_the_coordinator_hold_none() -> None:
    at = site_status.SiteStatus("north", coordinator=ALL, run=ALL, phase=ALL, state=ALL)
    at.record_error(ALL)
    assert raw_in(at.last_error) == set()
    assert raw_in(site_status.format_status({**asdict(at), "privacy": {}})) == set()
    entry = {"n": 1, "time": ALL, "direction": "in", "decision": "deny", "rule": ALL, "reason": ALL, "record": ALL}
    assert raw_in(audit_report.describe_entry(entry), "") == set()
    assert raw_in(json_text(entry), "") == set()


def test_a_record_of_any_length_makes_a_short_line_of_the_audit(tmp_path: Path) -> None:
    shape = (2,) * 100_000
    many = [RecordField(f"{ALL} {n}", shape, 8) for n in range(3_000)]
    fields = list_audit_fields(many)
    assert len(json_text(fields).encode()) < LISTED_BYTES + 500
    assert fields[-1] == [f"... {3_000 - len(fields) + 1:,} more", None, 8 * (3_000 - len(fields) + 1)]
    assert list_audit_fields(many[:1])[0][1] == [2] * 8
    assert list_audit_fields([RecordField("train_loss", None, 3)]) == [["train_loss", None, 3]]


def test_reasons_of_a_thousand_sites_fit_into_one_line_of_the_audit() -> None:
    cut = shorten_reasons({f"site-{n}": "x" * 500 for n in range(100)})
    assert len(json_text(cut)) < 2**14
    assert shorten_reasons({"north": "no reply within 20 s"}) == {"north": "no reply within 20 s"}


def test_a_csv_of_predictions_names_its_columns_and_files_harmlessly(tmp_path: Path) -> None:
    spec = ModelSpec.model_validate({"architecture": "tiny_cnn", "channels": 1, "image_size": 16})
    save_model(tmp_path / "model", build(spec, ["\x1b[2J", "gnp.\u202e"], seed=0), label_contract_sha256="")
    (tmp_path / "images").mkdir()
    Image.new("L", (16, 16)).save(tmp_path / "images" / "a\x1b[31m\u202e.png")
    predict_to_csv(tmp_path / "model", tmp_path / "images", tmp_path / "p.csv")
    text = (tmp_path / "p.csv").read_text(encoding="utf-8")
    assert raw_in(text) == set()
    assert next(csv.reader(text.splitlines())) == ["image", r"\x1b[2J", r"gnp.\u202e", "unreadable"]
