"""The second line of defence: no text acts on a terminal, a page or a file, and none is a formula in a table."""

import csv
import io
import os
import unicodedata
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console
from rich.table import Table

import polyclinic.server.runs.progress
from polyclinic.client.connection import status as site_status
from polyclinic.client.gate import audit_report
from polyclinic.client.gate.gate import MAX_AUDIT_FIELD_LIST_BYTES, list_fields_for_audit_line
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.metrics.auroc import ClassMetrics, summarise_test_results
from polyclinic.common.metrics.bootstrap import AurocIntervals
from polyclinic.common.metrics.calibration import DecisionCounts
from polyclinic.common.models.network import build_network
from polyclinic.common.models.saved import save_model
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.security.audit import AuditLog
from polyclinic.common.system.csv_text import format_rows_as_csv
from polyclinic.common.system.plain_text import format_as_json_text
from polyclinic.common.system.terminal import EscapingConsole, make_event_printer, run_command_line_program
from polyclinic.common.wire.canonical_bytes import RecordField
from polyclinic.data.tables.csv import read_csv_table
from polyclinic.server.deployment import status
from polyclinic.server.export.evaluation import SavedModelEvaluation, evaluation_as_csv
from polyclinic.server.export.prediction import predict_to_csv
from polyclinic.server.federation.recorder import RunTotals
from polyclinic.server.reporting import model_card
from polyclinic.server.reporting.live.files import RunSnapshot, SiteStatusRow, format_run_event
from polyclinic.server.reporting.live.page import render_changing_page_part, render_live_page
from polyclinic.server.runs.audit_log import shorten_absence_reasons
from polyclinic.server.runs.folder import RunFolder
from polyclinic.server.runs.live_status import CurrentRun
from polyclinic.server.runs.reporter import RunReporter
from polyclinic.server.runs.schema import RoundFileLine, RunSummary
from polyclinic.strategies.engine.events import FederationValidation, MissingReplyStatus, RoundRecord
from polyclinic.strategies.engine.state import FederationState
from tests.network.real import lines_of
from tests.strategies.states import TINY
from tests.words import HOSTILE_TEXTS, raw_in

TEXTS = [text for text in HOSTILE_TEXTS.values() if len(text) < 1000]
ALL = "".join(TEXTS)
STATE = FederationState(1, TINY)
RECORD = RoundRecord(
    1, ("east",), {"north": ALL}, {}, FederationValidation(), {}, {}, {}, 1.0, 0.1, shortened={"east": ALL}
)


@pytest.fixture
def screen() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def console(screen: io.StringIO) -> Console:
    """Without colours, so that whatever control character is there came with a text."""
    return EscapingConsole(file=screen, width=200, color_system=None)


def test_a_printed_line_holds_no_control_character_nor_another(console: Console, screen: io.StringIO) -> None:
    for text in TEXTS:
        make_event_printer(console)(f"round 1 went without north: {text}")
    assert raw_in(screen.getvalue()) == set()
    assert not any(line.startswith("12:00:00") for line in screen.getvalue().splitlines())


def test_at_a_terminal_only_our_own_styles_are_escape_sequences(screen: io.StringIO) -> None:
    coloured = EscapingConsole(file=screen, force_terminal=True, color_system="truecolor", width=100)
    coloured.print(f"[bold red]error[/] {'x' + chr(27)}]0;PWNED{chr(7)}", highlight=False)
    assert "\x1b[1;31merror\x1b[0m" in screen.getvalue()
    assert "\x1b]" not in screen.getvalue()
    assert r"x\x1b]0;PWNED" in screen.getvalue()


def test_tables_pages_of_status_and_plain_lines_hold_none(console: Console, screen: io.StringIO) -> None:
    table = Table(ALL, title=ALL)
    table.add_row(ALL.replace("[", "("))
    run = CurrentRun("/run", ALL, left_out={"north": ALL}, shortened={"east": ALL}, last_error=ALL)
    present = {**vars(run), "last_error_time": "now", "sites": ["north"]}
    facts = {"name": ALL, "address": "a:1", "superlink": "up", "certificate_days": 3, "release": ALL, "time": 0.0}
    for shown in (table, ALL, status.format_server_status({**facts, "sites": {}, "runs": [present]})):
        console.print(shown, markup=False)
    assert raw_in(screen.getvalue()) == set()


def test_a_program_that_ends_with_hostile_words_says_them_harmlessly(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise BadInput([Fault(ALL, ALL, ALL)])

    fails.info = type("Info", (), {"name": "flwr-server"})  # type: ignore[attr-defined]
    with pytest.raises(SystemExit):
        run_command_line_program(fails, ())  # type: ignore[arg-type]
    assert raw_in(capsys.readouterr().err) == set()


def test_the_progress_bar_holds_none(screen: io.StringIO) -> None:
    console = EscapingConsole(file=screen, force_terminal=True, color_system=None, width=120)
    with polyclinic.server.runs.progress.RunProgressBar(console, "title \x1b]0;PWNED\x07\u202e") as bar:
        bar.show_run_start(["east"], 2)
        bar.show_finished_round(RECORD, STATE)
    assert "\x1b]" not in screen.getvalue()
    assert raw_in(screen.getvalue()) <= {"\x1b", "\r"}  # by which rich itself moves the bar


def test_lines_and_present_state_of_a_run_hold_none(tmp_path: Path, console: Console, screen: io.StringIO) -> None:
    with RunReporter(CurrentRun("/run", "run"), tmp_path, make_event_printer(console)) as reporter:
        reporter.show_waiting_sites(MissingReplyStatus("roll call", 0, (ALL,), (), 3.0))
        reporter.show_run_start([ALL], 2)
        reporter.show_joined_site(1, ALL)
        reporter.show_left_out_site("north", ALL)
        reporter.show_finished_round(RECORD, STATE)
    assert raw_in(screen.getvalue()) == set()
    assert raw_in((tmp_path / "present.json").read_text(encoding="utf-8"), "") == set()


def test_files_of_a_run_hold_none(tmp_path: Path) -> None:
    folder, audit = RunFolder(tmp_path), AuditLog(tmp_path, durable=False)
    totals = RunTotals(folder, 1)
    totals.add_round_to_totals(RECORD, STATE, {ALL: 1.0})
    totals.write_pending_round_line(FederationValidation(), STATE)
    test = summarise_test_results({}, (), (), ALL)
    folder.write_summary(RunSummary(method="fedavg", rounds=1, seed=0, classes=(ALL,), sites={}, test=test))
    audit.append(reason=ALL)
    for name in ("events.jsonl", "rounds.jsonl", "summary.json", "audit.jsonl"):
        assert raw_in((tmp_path / name).read_text(encoding="utf-8")) == set(), name
    words = [event.get("reason") or event["done"] for event in lines_of(tmp_path / "events.jsonl")]
    assert words == [ALL, ALL]


def test_pages_hold_none() -> None:
    snapshot = RunSnapshot(
        ALL,
        ALL,
        replace(CurrentRun("/run", ALL), last_error=ALL, sites=(ALL,), left_out={ALL: ALL}),
        (SiteStatusRow(ALL, ALL, ALL, missed=ALL),),
        (RoundFileLine(round=1, sites=(ALL,), absent={ALL: ALL}),),
        (
            format_run_event({"event": "absent", "round": 1, "site": ALL, "reason": ALL}),
            format_run_event({"event": ALL, ALL: ALL}),
        ),
    )
    assert raw_in(render_live_page(snapshot), "\n\t") == set()
    assert raw_in(render_changing_page_part(snapshot), "\n\t") == set()
    assert raw_in(model_card.escape_markdown(ALL), "") == set()


def test_at_a_site_words_of_the_coordinator_hold_none() -> None:
    at = site_status.ClientStatus("north", coordinator=ALL, run=ALL, phase=ALL, state=ALL)
    at.record_last_error(ALL)
    assert raw_in(at.last_error) == set()
    assert raw_in(site_status.format_client_status({**asdict(at), "privacy": {}})) == set()
    entry = {"n": 1, "time": ALL, "direction": "in", "decision": "deny", "rule": ALL, "reason": ALL, "record": ALL}
    assert raw_in(audit_report.describe_audit_entry(entry), "") == set()
    assert raw_in(format_as_json_text(entry), "") == set()


def test_a_record_of_any_length_makes_a_short_line_of_the_audit(tmp_path: Path) -> None:
    shape = (2,) * 100_000
    many = [RecordField(f"{ALL} {n}", shape, 8) for n in range(3_000)]
    fields = list_fields_for_audit_line(many)
    assert len(format_as_json_text(fields).encode()) < MAX_AUDIT_FIELD_LIST_BYTES + 500
    assert fields[-1] == [f"... {3_000 - len(fields) + 1:,} more", None, 8 * (3_000 - len(fields) + 1)]
    assert list_fields_for_audit_line(many[:1])[0][1] == [2] * 8
    assert list_fields_for_audit_line([RecordField("train_loss", None, 3)]) == [["train_loss", None, 3]]


def test_reasons_of_a_thousand_sites_fit_into_one_line_of_the_audit() -> None:
    cut = shorten_absence_reasons({f"site-{n}": "x" * 500 for n in range(100)})
    assert len(format_as_json_text(cut)) < 2**14
    assert shorten_absence_reasons({"north": "no reply within 20 s"}) == {"north": "no reply within 20 s"}


def test_a_csv_of_predictions_names_its_columns_and_files_harmlessly(tmp_path: Path) -> None:
    spec = ModelSpec.model_validate({"architecture": "tiny_cnn", "channels": 1, "image_size": 16})
    save_model(tmp_path / "model", build_network(spec, ["\x1b[2J", "gnp.\u202e"], seed=0), label_contract_sha256="")
    (tmp_path / "images").mkdir()
    Image.new("L", (16, 16)).save(tmp_path / "images" / "a\x1b[31m\u202e.png")
    predict_to_csv(tmp_path / "model", tmp_path / "images", tmp_path / "p.csv")
    text = (tmp_path / "p.csv").read_text(encoding="utf-8")
    assert raw_in(text) == set()
    assert next(csv.reader(text.splitlines())) == ["image", r"\x1b[2J", r"gnp.\u202e", "unreadable"]


FORMULAS = (
    *("=1+1", "+1+1", "-1+1", "@SUM(1;1)", '=HYPERLINK("http:evil.example","Effusion")', "=cmd|' C'!A0"),
    *("\t=1+1", "\r=1+1", "\n=1+1", " =1+1", "\u00a0\u3000=1+1", '"=1+1', "'=1+1", '" "=1+1'),
    *("\uff1d1+1", "\uff0b1+1", "\uff0d1+1", "\uff20SUM(1)", "\ufe661+1", "\u22121+1"),
    *("scan;=1+1", "scan,=1+1", "scan\t=1+1", "scan| =1+1", 'scan","=1+1', 'scan";"=1+1', "scan\n=1+1"),
    *("\x00=1+1", "--1", "-1.2.3", "-1"),
)


def cells(text: str) -> list[str]:
    """Return every cell that any spreadsheet makes of a table, by any separator, with quotes and without."""
    by_quotes = [row for mark in ",;\t|" for row in csv.reader(io.StringIO(text, newline=""), delimiter=mark)]
    bare = [line.split(mark) for mark in ",;\t|" for line in text.splitlines()]
    return [cell for row in (*by_quotes, *bare) for cell in row]


def formulas(text: str) -> list[str]:
    """Return the cells that a spreadsheet would calculate or refuse to take as text."""
    bare = [unicodedata.normalize("NFKC", cell).lstrip(' \t\r\n"\x00') for cell in cells(text)]
    return [cell for cell in bare if cell.startswith(("=", "+", "-", "@", "\u2212")) and not is_number(cell)]


def is_number(cell: str) -> bool:
    try:
        float(cell.rstrip('"'))
    except ValueError:
        return False
    return True


def figures(names: list[str]) -> str:
    results = dict.fromkeys(names, ClassMetrics(0.25, 0.5, None, 3, 4))
    decisions = dict.fromkeys(names, DecisionCounts(1, 2, 3, 1))
    return evaluation_as_csv(
        SavedModelEvaluation(7, None, results, decisions, AurocIntervals(None, {}), (), "all")
    ).decode()


def test_the_name_of_a_class_is_no_formula_in_a_table_of_figures() -> None:
    assert {name: formulas(figures([name, "Effusion"])) for name in FORMULAS} == {name: [] for name in FORMULAS}


@settings(max_examples=settings().max_examples // 2)
@given(st.text(alphabet="=+-@\uff1d\"';,|\t\r\n a1", max_size=8))
def test_no_name_of_any_characters_is_a_formula(name: str) -> None:
    assert formulas(figures([name])) == []


def test_the_names_of_images_and_classes_are_no_formulas_in_a_table_of_predictions(tmp_path: Path) -> None:
    spec = ModelSpec.model_validate({"architecture": "tiny_cnn", "channels": 1, "image_size": 16})
    save_model(tmp_path / "model", build_network(spec, FORMULAS, seed=0), label_contract_sha256="")
    (tmp_path / "images").mkdir()
    for name in FORMULAS:
        file = tmp_path / "images" / f"{name}.png".replace("\0", "")  # the one character here that no file's name has
        file.write_bytes(b"no picture") if "SUM" in name else Image.new("L", (16, 16)).save(file)
    Image.new("L", (16, 16)).save(os.fsencode(tmp_path / "images") + b"/=\xff.png")
    predict_to_csv(tmp_path / "model", tmp_path / "images", tmp_path / "p.csv")
    assert formulas((tmp_path / "p.csv").read_text(encoding="utf-8")) == []


def test_numbers_stay_numbers_and_harmless_names_stay_as_they_are(tmp_path: Path) -> None:
    numbers = [-0.25, 1e-3, float("nan"), float("-inf"), 7, None]
    names = ["scan-2.png", "a = b", "Lung (left) + right", "\u00e4", "'", 'a "b"', "a;b,c", ""]
    (tmp_path / "t.csv").write_bytes(format_rows_as_csv([names, [*numbers, "", ""]]))
    with (tmp_path / "t.csv").open(encoding="utf-8", newline="") as file:
        header, row = csv.reader(file, quoting=csv.QUOTE_NONNUMERIC)  # which reads what is not quoted as a number
    assert header == names
    assert row[:5] == pytest.approx(numbers[:5], nan_ok=True)
    assert row[5:] == ["", "", ""]


def test_a_table_with_formulas_in_its_names_is_read_by_our_own_reader(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(format_rows_as_csv([["image", "=Effusion"], ["=1+1.png", 1], ['a,"b";-2.png', 0]]))
    columns = read_csv_table(tmp_path / "t.csv", "labels")
    assert {name: list(cells) for name, cells in columns.items()} == {
        "image": ["'=1+1.png", 'a,"b";\'-2.png'],
        "'=Effusion": ["1", "0"],
    }
