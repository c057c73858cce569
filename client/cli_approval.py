"""The commands ``flwr-client approvers``, ``plans`` and ``record``: approval of plans, and the record of runs."""

import functools
import getpass
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyclinic.common.system.plain_text import format_as_json_text, make_printable_line, quote_for_shell
from polyclinic.common.system.terminal import EscapingConsole

if TYPE_CHECKING:
    from polyclinic.client.approval.decide import TypedDecision
    from polyclinic.client.site.plans import StoredText
    from polyclinic.client.site.site_file import SiteSettings

approvers_app = typer.Typer(
    help="The people who approve plans here, each with a key of their own.", no_args_is_help=True
)
plans_app = typer.Typer(help="The plans that a coordinator sent: read, approve and deny them.", no_args_is_help=True)
console = EscapingConsole()
_print_line = functools.partial(console.print, soft_wrap=True, highlight=False, markup=False)
OUTPUT_WIDTH = 78
MAX_WAITING_PLANS = 3
"""Maximum number of waiting plans that are printed after an approval, the newest ones."""
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The site's folder.")]
PlanHash = Annotated[str, typer.Argument(metavar="HASH", help="The plan's hash, or its first 6 digits or more.")]
ApproverName = Annotated[str, typer.Option("--as", help="Your name, as site.toml has it among the approvers.")]
ApproverKeyFile = Annotated[
    Path | None, typer.Option("--key", help="The file of your key; NAME.approver where left out.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@approvers_app.command("add")
def add_approver(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The person's name.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="The new file of the private key; NAME.approver where left out.")
    ] = None,
) -> None:
    """Make the personal key of an approver, and print the line for site.toml.

    The passphrase is typed, or is the first line of standard input. The file of the private key stays with the person.

    Example: flwr-client approvers add "Dr. A. Weber"
    """
    from polyclinic.client.approval.decide import APPROVER_KEY_SUFFIX
    from polyclinic.common.errors import BadInput, Fault
    from polyclinic.common.security.plan_decisions import create_approver_key
    from polyclinic.common.system.plain_names import PlainName, join_plain_name
    from polyclinic.common.system.toml import to_toml_text

    name = name.strip()
    try:
        path = out or join_plain_name(Path(), PlainName(name), APPROVER_KEY_SUFFIX)
    except ValueError as error:
        raise BadInput([Fault("NAME", f"{error}.")]) from None
    if path.exists():  # before a passphrase is typed
        raise BadInput([Fault(str(path), "is there already.", "Name another file with --out.")])
    line = create_approver_key(path, name, _read_passphrase("A passphrase for the new key: ", repeat=True))
    _print_line(
        f"{path}: the private key of {name}, locked with the passphrase. Keep it: plans approve needs it (--key)."
    )
    _print_line("Lines for site.toml, to be written by the person who is responsible for that file:")
    _print_line(f"\n[approvers]\n{to_toml_text(name)} = {to_toml_text(line)}\n")
    _print_line('and under [policy]: approval = "required". Then stop flwr-client and start it again.')


@plans_app.command("list")
def list_plans(folder: Folder, as_json: AsJson = False) -> None:
    """List the plans that came, oldest first, each with its state.

    Example: flwr-client plans list north
    """
    from rich.table import Table
    from rich.text import Text

    from polyclinic.client.approval.overview import list_plan_states
    from polyclinic.common.system.terminal import fold_long_words

    settings = _read_settings(folder)
    plans = list_plan_states(settings)
    if as_json:
        print(format_as_json_text([plan.as_json() for plan in plans], indent=1))
        return
    if not plans:
        _print_line("No plan has come yet.")
        return
    table = fold_long_words(Table("hash", "came (UTC)", "study", "state", width=80))
    for plan in plans:
        table.add_row(plan.sha256[:12], plan.time[:16].replace("T", " "), Text(plan.title), Text(plan.state))
    console.print(table)
    if settings.file.policy.approval != "required":
        _print_line('Nobody needs to approve them: policy.approval is not "required".')
        return
    _print_line(f"Read one: flwr-client plans show {quote_for_shell(folder)} HASH")


@plans_app.command("show")
def show_plan(folder: Folder, digits: PlanHash, as_json: AsJson = False) -> None:
    """Describe a plan in plain words: who asks, what is trained on what, what leaves, and what was decided.

    Example: flwr-client plans show north 3f9a1c22d0b1
    """
    settings, stored = _find_text(folder, digits)
    from polyclinic.client.approval.decide import describe_state
    from polyclinic.client.approval.describe import describe_text
    from polyclinic.client.site.approvals import SiteApprovals

    sections = describe_text(stored, settings)
    verdict = SiteApprovals.from_settings(settings).find_verdict(stored.facts.kind, stored.sha256)
    state = describe_state(verdict)
    if as_json:
        content = {section.heading: list(section.lines) for section in sections}
        print(format_as_json_text({"sha256": stored.sha256, "state": state, "sections": content}, indent=1))
        return
    _print_line(f"Plan {stored.sha256}")
    _print_line(f"came {stored.facts.time[:16]} UTC; state: {state}")
    for section in sections:
        _print_line(f"\n{section.heading}")
        for line in section.lines:
            _print_wrapped(line)
    if settings.file.policy.approval == "required" and verdict.reason:
        command = f"flwr-client plans approve {quote_for_shell(folder)} {stored.sha256[:12]}"
        _print_line(f"\nTo approve it: {command} --as NAME --until YYYY-MM-DD")
        _print_line(f"To deny it: {command.replace(' approve ', ' deny ')} --as NAME --reason TEXT")


@plans_app.command("approve")
def approve_plan(
    folder: Folder,
    digits: PlanHash,
    approver: ApproverName,
    until: Annotated[str, typer.Option("--until", help="Last day of the approval: YYYY-MM-DD.")],
    purpose: Annotated[str, typer.Option("--purpose", help="The purpose; that of the plan where left out.")] = "",
    key: ApproverKeyFile = None,
) -> None:
    """Approve a plan until a day, signed with your key. The passphrase is typed, or the first line of standard input.

    Example: flwr-client plans approve north 3f9a1c22d0b1 --as "Dr. A. Weber" --until 2027-06-30
    """
    from polyclinic.client.approval.decide import TypedDecision, format_last_day, is_longer_than_a_year

    decision = TypedDecision(approver, until=until, purpose=purpose)
    settings, stored = _find_text(folder, digits)
    until_utc = _decide(settings, stored, decision, key, approves=True)
    _print_line(f"Approved until {format_last_day(until_utc)}: plan {stored.sha256[:12]}.")
    _print_waiting_plans(settings)
    if is_longer_than_a_year(until):
        _print_line("That is more than a year, in which nobody has to look at it again.")
    if settings.file.policy.approval != "required":
        _print_line('This changes nothing yet: set approval = "required" under [policy] of site.toml.')


@plans_app.command("deny")
def deny_plan(
    folder: Folder,
    digits: PlanHash,
    approver: ApproverName,
    reason: Annotated[str, typer.Option("--reason", help="Why, for those who read the record later.")],
    key: ApproverKeyFile = None,
) -> None:
    """Deny a plan, signed with your key; a run by it that is going on is left at its next request.

    Example: flwr-client plans deny north 3f9a1c22d0b1 --as "Dr. A. Weber" --reason "no legal basis"
    """
    from polyclinic.client.approval.decide import TypedDecision

    settings, stored = _find_text(folder, digits)
    _decide(settings, stored, TypedDecision(approver, reason=reason), key, approves=False)
    _print_line(f"Denied: plan {stored.sha256[:12]}. The coordinator learns that, and not the reason.")


@plans_app.command("serve")
def serve_plans(
    folder: Folder,
    key: Annotated[list[Path], typer.Option("--key", help="The file of an approver's key. Repeatable.")] = [],  # noqa: B006 - typer copies it
) -> None:
    """Show the plans on a page of this machine alone, where a person approves or denies them with their passphrase.

    Anyone who has the printed address can read the plans. Stop it with Ctrl-C.

    Example: flwr-client plans serve north --key "Dr. A. Weber.approver"
    """
    settings = _read_settings(folder)
    from polyclinic.client.approval.server import serve_approval_page

    serve_approval_page(settings, key, _print_line)


def print_record(
    folder: Folder,
    study: Annotated[str, typer.Option("--study", help="Only runs whose title contains this text.")] = "",
    plan: Annotated[str, typer.Option("--plan", help="Print the text of the plan with this hash instead.")] = "",
    as_json: AsJson = False,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write a csv file, one line for each run.")] = None,
) -> None:
    """Print what this hospital ever did: each run with its study, images, what left, and who approved it.

    The audit log's chain is checked first; if it is broken, the exit code is 1.

    Example: flwr-client record north --study lung
    """
    from polyclinic.common.errors import raise_faults
    from polyclinic.common.system.files import find_output_file_faults, write_atomically

    settings = _read_settings(folder)
    raise_faults([] if csv is None else find_output_file_faults(csv))
    from polyclinic.client.site.plans import PlanStore

    if plan:
        print(make_printable_line(PlanStore(settings.state_folder).find_text(plan).text, 1_000_000))
        return
    from polyclinic.client.approval.record import (
        describe_departures_and_models,
        describe_run,
        format_record_csv,
        format_record_table,
        read_hospital_record,
    )

    record = read_hospital_record(settings.state_folder, study)
    if csv is not None:
        write_atomically(csv, format_record_csv(record).encode(), private=True)
    if as_json:
        print(format_as_json_text(record.as_json(), indent=1))
    else:
        _print_line(record.check)
        for fault in record.faults:
            _print_line(fault)
        if record.runs:
            console.print(format_record_table(record))
        else:
            _print_line("No run yet.")
        for run in record.runs:
            _print_line("")
            for line in describe_run(run):
                _print_line(line)
        if further := describe_departures_and_models(record):
            _print_line("")
            for line in further:
                _print_line(line)
    raise SystemExit(1 if record.faults else 0)


# ---------------------------------------------------------------------- shared by these commands


def _read_settings(folder: Path) -> "SiteSettings":
    from polyclinic.client.site.site_file import read_site_toml_without_data

    return read_site_toml_without_data(folder)


def _find_text(folder: Path, digits: str) -> "tuple[SiteSettings, StoredText]":
    from polyclinic.client.site.plans import PlanStore

    settings = _read_settings(folder)
    return settings, PlanStore(settings.state_folder).find_text(digits)


def _print_waiting_plans(settings: "SiteSettings") -> None:
    """Print the hashes of the newest waiting plans; after a change, an experiment is a new plan with the same title."""
    from polyclinic.client.approval.overview import list_plan_states

    waiting = [plan for plan in list_plan_states(settings) if plan.is_waiting]
    if waiting:
        hashes = ", ".join(plan.sha256[:12] for plan in waiting[-MAX_WAITING_PLANS:])
        _print_line(
            f"Other plans wait for approval, the newest last: {hashes}. flwr-client status names the one asked for."
        )


def _decide(
    settings: "SiteSettings", stored: "StoredText", typed: "TypedDecision", key: Path | None, *, approves: bool
) -> str:
    """Check the decision, ask for the passphrase, sign and store it; return the end of an approval (ISO 8601)."""
    from polyclinic.client.approval.decide import decide_on_text, find_decision_faults, find_key_file
    from polyclinic.common.errors import raise_faults

    raise_faults(find_decision_faults(settings, typed, approves=approves))
    path = find_key_file(settings, typed.approver, key)
    return decide_on_text(settings, stored, typed, path, _read_passphrase("Your passphrase: ")).until


def _read_passphrase(prompt: str, *, repeat: bool = False) -> str:
    """Ask for a passphrase without showing it; without a terminal, return the first line of standard input.

    Args:
        repeat: Ask twice, for a new passphrase.

    Raises:
        BadInput: If the second passphrase differs from the first.
    """
    from polyclinic.common.errors import BadInput, Fault

    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\r\n")
    passphrase = getpass.getpass(prompt)
    if repeat and getpass.getpass("The same again: ") != passphrase:
        raise BadInput([Fault("passphrase", "differs from the first one.", "Give the command again.")])
    return passphrase


def _print_wrapped(line: str) -> None:
    import textwrap

    for part in textwrap.wrap(
        line, OUTPUT_WIDTH, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False
    ):
        _print_line(part)
