"""Define the command line of ``flwr-server``, the coordinator's program."""

# isort: off
import polyclinic.common  # noqa: F401 - first: Ctrl-C may come at any moment
# isort: on

import os

# Before flwr is imported: nothing of ours calls home, nothing is installed at run time.
os.environ.update(
    FLWR_TELEMETRY_ENABLED="0",
    FLWR_DISABLE_UPDATE_CHECK="1",
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION="1",
    PYDANTIC_DISABLE_PLUGINS="__all__",  # it would look for some in every installed package at each start
)

import contextlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyclinic.common.errors import BadInput, Fault, ProgramCannotContinue, raise_faults
from polyclinic.common.system.plain_text import format_as_json_text
from polyclinic.common.system.resources import exclude_imports_from_gc, reuse_large_buffers
from polyclinic.common.system.stopping import (
    end_with_parent_if_requested,
    graceful_shutdown,
    set_resume_hint,
    stop_on_signals,
)
from polyclinic.common.system.terminal import (
    EscapingConsole,
    LogFormat,
    LogOutputFormat,
    WaitOnRefusal,
    make_command_line_program,
    make_event_printer,
    make_name_override,
    run_command_line_program,
)
from polyclinic.server.cli_service import service_app
from polyclinic.server.runs.tracking import TrackingService

if TYPE_CHECKING:
    from polyclinic.server.coordinator.folder import CoordinatorFolder

app = make_command_line_program(
    "flwr-server",
    "Coordinate a federation of hospitals: admit them, keep the connection up, lead runs.",
    "0 done, 1 the run stopped or the answer is no, 2 a fault in what was given, 3 a run was stopped on request, "
    "70 it died again and again",
)
app.add_typer(service_app, name="service")
console = EscapingConsole()
WEB_PORT = 9443
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The coordinator's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@app.command("init")
def init_coordinator(
    folder: Folder,
    name: Annotated[str, typer.Option("--name", help="The federation's name.")] = "",
    hosts: Annotated[
        list[str],
        typer.Option("--host", help="Name or address by which hospitals reach this machine; the first is in kits."),
    ] = [],  # noqa: B006 - typer copies it
    port: Annotated[
        int | None, typer.Option("--port", help="The one port that hospitals reach.", show_default="9092")
    ] = None,
    listen: Annotated[
        str | None, typer.Option("--listen", help="Address that the port is bound to.", show_default="0.0.0.0")
    ] = None,
    renew: Annotated[
        bool,
        typer.Option(
            "--renew", help="Only a new certificate, of the same authority; with --host, --port, --listen: these too."
        ),
    ] = False,
) -> None:
    """Create a coordinator's folder: settings, certificate authority, server certificate.

    Example: flwr-server init trial --name trial --host fl.hospital.example

    Example: flwr-server init trial --renew --port 9443
    """
    from polyclinic.server.coordinator.init import Endpoint, make_coordinator_folder, renew_server_certificate

    if renew:
        lines = renew_server_certificate(folder, Endpoint(tuple(hosts), listen, port), name)
    else:
        listen = "0.0.0.0" if listen is None else listen
        port = 9092 if port is None else port
        lines = make_coordinator_folder(folder, name, hosts, listen=listen, port=port)
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


@app.command("admit")
def admit_hospital(
    folder: Folder,
    request: Annotated[Path, typer.Argument(metavar="NAME.request", help="What the hospital sent.")],
    yes: Yes = False,
    classes: Annotated[
        str | None,
        typer.Option(
            "--classes", metavar="A,B,C", help='Classes that it may claim; as before where left out, "" for any.'
        ),
    ] = None,
    max_images: Annotated[
        int | None, typer.Option("--max-images", min=0, help="Most training images that it may claim; 0 for any.")
    ] = None,
) -> None:
    """Admit a hospital: show its phrase and this coordinator's, ask for confirmation, and write its connection kit.

    Example: flwr-server admit trial north.request --classes "Effusion,Pneumonia"

    To change the classes or images that a site may claim, admit the site again or edit sites/NAME.toml. The change
    counts from the next roll call, such as the start of a run.
    """
    from polyclinic.common.security.identity import read_admission_request
    from polyclinic.server.coordinator import admission
    from polyclinic.server.coordinator.folder import read_coordinator_folder

    coordinator = read_coordinator_folder(folder)
    site = read_admission_request(request)
    raise_faults(admission.find_admission_faults(coordinator, site))
    for line in admission.describe_telephone_call(coordinator, site):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if not yes:
        _ask_for_confirmation("Is the hospital's phrase the same, and is this site to be admitted?")
    kit = admission.admit_site(coordinator, site, classes=classes, max_images=max_images)
    console.print(f"Admitted. Send {kit} to {site.site}; it holds no secret.", soft_wrap=True, highlight=False)


@app.command("start")
def run_superlink_until_stopped(
    folder: Folder, log_format: LogFormat = LogOutputFormat.text, restarted: WaitOnRefusal = False
) -> None:
    """Start the server that hospitals connect to, and keep it running.

    Example: flwr-server start trial
    """
    from polyclinic.common.system.preflight import delay_failure_until_change
    from polyclinic.server.coordinator.folder import read_coordinator_folder
    from polyclinic.server.coordinator.preflight import find_superlink_start_faults

    tell = make_event_printer(console)
    try:
        with delay_failure_until_change(folder, tell, (BadInput,), held=restarted):
            coordinator = read_coordinator_folder(folder)
            raise_faults(find_superlink_start_faults(coordinator))  # before flwr is imported
            os.umask(0o077)  # what this process and the SuperLink write is for this account only
            from polyclinic.server.deployment.serve import serve_superlink

            serve_superlink(coordinator, tell)
    except (SystemExit, KeyboardInterrupt):
        tell("stopped on request; sites wait for the next start")
        raise SystemExit(0) from None


@app.command("run")
def run_on_hospitals(
    folder: Folder,
    experiment: Annotated[Path, typer.Argument(help="Experiment file (TOML); its data and partition are not used.")],
    out: Annotated[Path, typer.Option("--out", help="New folder for the run.")],
    sites: Annotated[int, typer.Option("--sites", min=0, help="Sites to wait for; 0 for all admitted.")] = 0,
    overrides: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file, e.g. run.rounds=3. Repeatable."),
    ] = [],  # noqa: B006
    name: Annotated[str, typer.Option("--name", help="The run's title; the experiment file's name by default.")] = "",
    track: Annotated[
        TrackingService | None, typer.Option("--track", help="Log the figures of every round to MLflow too.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out where it broke off; begin it if it has not.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="If the process that leads dies, leave it to others to begin it again.")
    ] = False,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Talk to the hosts that the experiment's own data name, without a question."),
    ] = False,
    log_format: LogFormat = LogOutputFormat.text,
) -> None:
    """Train one experiment on the connected hospitals.

    Example: flwr-server run trial experiment.toml --out runs/first

    After a crash of the machine, repeat the command with --resume: the run ends in the same model. A process that dies
    is restarted automatically.

    Exit codes: 0 done, 1 stopped because it cannot go on, 2 a fault in the input, 3 stopped on request, 70 the process
    died repeatedly.
    """
    overrides = [*overrides, *make_name_override(name)]
    arguments = [
        *("run", str(folder), str(experiment), "--out", str(out)),
        *(("--sites", str(sites)) if sites else ()),
        *(("--log-format", log_format.value) if log_format is not LogOutputFormat.text else ()),
        *(part for override in overrides for part in ("--set", override)),
        *(("--track", track.value) if track else ()),
    ]
    from polyclinic.server.coordinator.folder import read_coordinator_folder
    from polyclinic.server.coordinator.preflight import count_expected_sites, find_network_run_faults
    from polyclinic.server.runs.folder import find_new_run_folder_faults, find_resumed_run_folder_faults
    from polyclinic.strategies.method_list import read_experiment_without_torch

    # Before torch is imported.
    file = read_experiment_without_torch(experiment, overrides)
    coordinator = read_coordinator_folder(folder)
    expected_sites = count_expected_sites(coordinator, file, sites, resume=resume)
    folder_faults = find_resumed_run_folder_faults(out) if resume else find_new_run_folder_faults(out)
    raise_faults([*find_network_run_faults(coordinator, out, resume=resume), *folder_faults])
    from polyclinic.server.outbound_hosts import ask_and_permit_hosts, list_coordinator_connections

    connections = list_coordinator_connections(file, track)
    if any(connection.asks for connection in connections):
        arguments.append("--yes")  # this process asks; the process that it starts must not ask again
    if not once:
        from polyclinic.server.deployment.supervisor import supervise_run

        with ask_and_permit_hosts(connections, yes=yes):
            raise SystemExit(supervise_run(arguments, out, make_event_printer(console), resume=resume))
    with exclude_imports_from_gc():
        from polyclinic.server.deployment.network import NetworkBackend, execute_run_or_exit
        from polyclinic.server.deployment.supervisor import RunExitCode
        from polyclinic.server.federation.set_up import execute_run, read_begun_experiment
        from polyclinic.server.reporting.tables import format_run_result
        from polyclinic.server.runs.reader import read_run

    reuse_large_buffers()
    os.umask(0o077)  # the run folder is for this account only
    tell = make_event_printer(console)
    backend = NetworkBackend(coordinator, file, expected_sites, tell, read_begun_experiment(out) if resume else None)
    with ask_and_permit_hosts(connections, yes=yes), graceful_shutdown(int(RunExitCode.ON_REQUEST)):
        execute_run_or_exit(
            lambda: execute_run(backend, backend.file, out, track=track, resume=resume),
            out,
            ["flwr-server", *arguments, "--resume"],
            tell,
        )
    if log_format is LogOutputFormat.json:
        tell(f"done; report: {out / 'report.html'}")
        return
    console.print(format_run_result(read_run(out)))
    console.print(f"Report: {out / 'report.html'}", soft_wrap=True)


def _ask_for_confirmation(question: str) -> None:
    """Ask a person to confirm; end the program if the person declines.

    Raises:
        BadInput: If standard input is closed, as it is for services.
        typer.Abort: If the person declines.
    """
    if sys.stdin is None or sys.stdin.closed:
        raise BadInput([Fault("standard input", "is closed, so nobody can be asked.", "Agree with --yes.")])
    typer.confirm(question, abort=True)


@app.command("verify")
def verify_finished_run(
    receipt: Annotated[Path, typer.Argument(metavar="RECEIPT", help="receipt.json of a run, or its folder.")],
    requests: Annotated[
        list[Path] | None,
        typer.Option(
            "--request",
            help="NAME.request of a site, as the hospital sent it: is this the receipt's key? After a renewal, both.",
        ),
    ] = None,
) -> None:
    """Check a finished run's audit, receipt, model and signatures; also repeat its aggregation if updates were kept.

    Example: flwr-server verify runs/first/receipt.json
    """
    from polyclinic.common.security.identity import read_admission_request
    from polyclinic.server.runs.folder import find_receipt_path_faults

    raise_faults(find_receipt_path_faults(receipt))  # before torch is imported
    keys = dict[str, tuple[str, ...]]()  # site -> public keys of its requests
    for request in map(read_admission_request, requests or ()):
        keys[request.site] = (*keys.get(request.site, ()), request.public_key)
    from polyclinic.server.runs import verify as verification

    result = verification.verify_run(receipt, keys)
    for line in [*result.verified, *result.unverified]:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    for fault in result.faults:
        console.print(f"WRONG  {fault}", soft_wrap=True, highlight=False, markup=False)
    raise SystemExit(1 if result.faults else 0)


@app.command("status")
def print_server_status(
    folder: Folder,
    as_json: AsJson = False,
    web: Annotated[bool, typer.Option("--web", help="Serve a page that shows it as it goes; see --port.")] = False,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port of the page; 0 chooses a free one.")
    ] = WEB_PORT,
    listen: Annotated[str, typer.Option("--listen", help="Address that the page's port is bound to.")] = "127.0.0.1",
    contract: Annotated[
        Path | None,
        typer.Option("--contract", metavar="EXPERIMENT", help="Ask the hospitals what differs, before a run of it."),
    ] = None,
) -> None:
    """Print which sites are connected, and the progress of the current run.

    Example: flwr-server status trial

    Example: flwr-server status trial --contract experiment.toml

    With --contract: ask the connected hospitals for words, pixels, sizes, counts, level and release, and print what
    differs, with the line to write. No round begins. Exit code 0 if all agree, 1 if not.

    With --web: serve a web page that follows the run, over TLS with the coordinator's own certificate. Anyone who has
    the printed address can open the page. The page only reads files.
    """
    from polyclinic.server.coordinator.folder import read_coordinator_folder

    coordinator = read_coordinator_folder(folder)  # before flwr is imported
    if contract is not None:
        raise_faults([Fault("--web", "and --contract exclude one another.", "Leave one out.")] if web else [])
        _print_contract(coordinator, contract, as_json=as_json)
        return
    if web:
        from polyclinic.common.system.preflight import find_port_faults

        raise_faults([Fault("--json", "and --web exclude one another.", "Leave one out.")] if as_json else [])
        raise_faults(find_port_faults("--port", listen, port, "Name another with --port."))
        from polyclinic.server.reporting.live.server import serve_live_view

        tell = make_event_printer(console)
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            serve_live_view(coordinator, listen, port, tell)
        tell("the live view is closed; no run notices")
        return
    from polyclinic.server.deployment.status import collect_server_status, format_server_status

    current = collect_server_status(coordinator)
    if as_json:
        print(format_as_json_text(current, allow_nan=True))
    else:
        console.print(format_server_status(current), highlight=False)


def _print_contract(coordinator: "CoordinatorFolder", experiment: Path, *, as_json: bool) -> None:
    """Print the label contract of an experiment with the connected hospitals; exit with 0 if all agree, else with 1."""
    from polyclinic.strategies.method_list import read_experiment_without_torch

    file = read_experiment_without_torch(experiment)
    from polyclinic.server.deployment.contract import ask_for_contract, format_contract

    contract = ask_for_contract(coordinator, file)
    if as_json:
        print(format_as_json_text(contract.as_json()))
    else:
        console.print(format_contract(contract), highlight=False)
    raise SystemExit(0 if contract.is_agreed else 1)


@app.command("count")
def count_at_hospitals(
    folder: Folder,
    question: Annotated[Path, typer.Argument(metavar="QUESTION.toml", help="What to count: docs/count.md.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="New folder for counts.html, counts.csv and counts.json.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Count patients and images at the connected hospitals, as far as each allows it. No round begins.

    Example: flwr-server count trial question.toml --out counts

    Exit code 0 if all hospitals answered, 1 if not.
    """
    from polyclinic.common.counts import read_count_question
    from polyclinic.common.system.files import find_output_folder_faults
    from polyclinic.server.coordinator.folder import read_coordinator_folder

    # Before flwr is imported: a fault shows at once.
    coordinator = read_coordinator_folder(folder)
    count_question = read_count_question(question)
    raise_faults(find_output_folder_faults(out) if out is not None else [])
    from polyclinic.server.counts.ask import ask_for_counts
    from polyclinic.server.deployment.questions import open_network_questions
    from polyclinic.server.reporting.counts import show_count_result

    os.umask(0o077)  # the files are for this account only
    with open_network_questions(coordinator, count_question.sites, count_question.deadline_s) as exchange:
        result = ask_for_counts(exchange, count_question.sent_part)
    show_count_result(result, console, out, as_json=as_json)
    raise SystemExit(1 if result.silent else 0)


@app.command("evaluate")
def evaluate_at_hospitals(
    folder: Folder,
    models: Annotated[
        list[Path],
        typer.Argument(metavar="MODEL...", help="Run folders, ONNX files of runs, MODEL.toml of others."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="New folder for evaluation.html, evaluation.json and csv files.")
    ] = None,
    site: Annotated[
        list[str] | None, typer.Option("--site", help="Hospital to ask; all that are admitted by default. Repeatable.")
    ] = None,
    by: Annotated[list[str] | None, typer.Option("--by", help="Subgroups: sex or age. Repeatable.")] = None,
    title: Annotated[str, typer.Option("--title", help="For the people at the hospitals.")] = "",
    deadline_s: Annotated[float, typer.Option("--deadline", min=1, help="Seconds for the hospitals to answer.")] = 3600,
    as_json: AsJson = False,
) -> None:
    """Score models at the connected hospitals, on their test images, as far as each allows it. No round begins.

    Example: flwr-server evaluate trial runs/first chexnet.toml --out evaluated

    Exit code 0 if all hospitals answered, 1 if not.
    """
    from polyclinic.common.system.files import find_output_folder_faults
    from polyclinic.server.coordinator.folder import read_coordinator_folder
    from polyclinic.server.evaluation.models import find_models_to_send, parse_group_columns

    coordinator = read_coordinator_folder(folder)
    groups = parse_group_columns(by or ())
    raise_faults(find_output_folder_faults(out) if out is not None else [])
    files = find_models_to_send(models)  # before torch is imported
    from polyclinic.common.evaluation.page import write_evaluation_folder
    from polyclinic.common.evaluation.results import format_for_terminal, make_json
    from polyclinic.server.deployment.questions import open_network_questions
    from polyclinic.server.evaluation.ask import ask_for_figures
    from polyclinic.server.evaluation.collect import make_question

    question = make_question(files, groups, title)
    os.umask(0o077)  # the files are for this account only
    with open_network_questions(coordinator, site or (), deadline_s) as exchange:
        result = ask_for_figures(exchange, question)
    evaluation = result.evaluation
    page = None
    if out is not None and evaluation.data:
        page = write_evaluation_folder(evaluation, out, title or "Models at the hospitals", private=True)
    if as_json:
        print(format_as_json_text({**make_json(evaluation), "silent": dict(result.silent)}))
    else:
        console.print(format_for_terminal(evaluation))
        if page is not None:
            console.print(f"Page: {page}", soft_wrap=True, highlight=False, markup=False)
    raise SystemExit(1 if result.silent or not evaluation.data else 0)


@app.command("deliver")
def deliver_run_to_hospitals(
    folder: Folder,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="New folder for NAME.delivery of each hospital, to send by hand.")
    ] = None,
    send: Annotated[bool, typer.Option("--send", help="Send each connected hospital its package.")] = False,
    deadline_s: Annotated[float, typer.Option("--deadline", min=1, help="Seconds for the hospitals to answer.")] = 600,
) -> None:
    """Hand a finished run out: for each hospital that took part, a signed package of model, card and its own report.

    Example: flwr-server deliver trial runs/first --out packages

    Example: flwr-server deliver trial runs/first --send

    The hospital opens NAME.delivery with flwr-client receive. Exit code 0 if each hospital of the run has a package, 1
    if not.
    """
    from polyclinic.common.system.files import find_output_folder_faults
    from polyclinic.server.coordinator.folder import read_coordinator_folder

    coordinator = read_coordinator_folder(folder)
    faults = find_output_folder_faults(out) if out is not None else []
    if out is None and not send:
        faults.append(Fault("--out", "is missing.", "Name a new folder for the packages: --out FOLDER. Or --send."))
    raise_faults(faults)
    from polyclinic.server.delivery.packages import make_run_packages, write_run_packages

    packages = make_run_packages(coordinator, run)
    failed = dict(packages.left_out)
    for path in write_run_packages(packages, out) if out is not None else ():
        console.print(str(path), soft_wrap=True, highlight=False, markup=False)
    if send:
        from polyclinic.server.delivery.send import send_packages
        from polyclinic.server.deployment.questions import open_network_questions

        with open_network_questions(coordinator, list(packages.deliveries), deadline_s) as exchange:
            outcome = send_packages(exchange, packages.deliveries)
        failed |= {site: reason for site, reason in outcome.items() if reason}
        for site in sorted(outcome.keys() - failed.keys()):
            console.print(f"{site} has stored its package.", soft_wrap=True, highlight=False, markup=False)
    for site, reason in sorted(failed.items()):
        console.print(f"{site} has no package: {reason}", soft_wrap=True, highlight=False, markup=False)
    raise SystemExit(1 if failed else 0)


@app.command("runs")
def print_run_history(folder: Folder, as_json: AsJson = False) -> None:
    """List the runs of this coordinator: start, completed rounds, how each ended, and its folder.

    Example: flwr-server runs trial
    """
    from polyclinic.server.coordinator.folder import read_coordinator_folder
    from polyclinic.server.deployment.status import format_runs_table
    from polyclinic.server.runs.live_status import read_run_history

    history = read_run_history(read_coordinator_folder(folder).state_path)
    if as_json:
        print(format_as_json_text(history, allow_nan=True))
    else:
        console.print(format_runs_table(history), highlight=False)


@app.command("health")
def check_superlink_health(folder: Folder) -> None:
    """Exit with 0 if the SuperLink answers, else with 1; for container health checks.

    Example: flwr-server health trial
    """
    from polyclinic.server.coordinator.folder import read_coordinator_folder

    coordinator = read_coordinator_folder(folder)
    from polyclinic.server.deployment.superlink.control_client import is_superlink_answering

    is_healthy = is_superlink_answering(coordinator)
    print("healthy" if is_healthy else "not healthy: the SuperLink does not answer")
    raise SystemExit(0 if is_healthy else 1)


@app.command("revoke")
def revoke_hospital(
    folder: Folder, site: Annotated[str, typer.Argument(metavar="SITE", help="Its name.")], yes: Yes = False
) -> None:
    """Revoke a hospital's admission: its key is refused from now on, also in a run in progress.

    Example: flwr-server revoke trial north
    """
    from polyclinic.server.coordinator.folder import read_coordinator_folder

    coordinator = read_coordinator_folder(folder)
    from polyclinic.server.coordinator import admission

    admission.read_unrevoked_site(coordinator, site)
    if not yes:
        _ask_for_confirmation(f"{site} is to take part no more?")
    admission.revoke_site(coordinator, site)
    message = f"{site} is revoked: refused within 3 s where flwr-server start runs. "
    message += "To come back it makes a new key: flwr-client init DIR --renew-key."
    console.print(message, soft_wrap=True)


@app.command("remove")
def remove_hospital(
    folder: Folder,
    site: Annotated[str, typer.Argument(metavar="SITE", help="Its name.")],
    reason: Annotated[str, typer.Option("--reason", help="Why it leaves, for your own records.")] = "",
    runs: Annotated[
        list[Path] | None,
        typer.Option("--run", metavar="RUN", help="Folder of a run that was moved, or that is not in the history."),
    ] = None,
    withdrawal: Annotated[
        Path | None,
        typer.Option("--withdrawal", metavar="FILE", help="NAME.withdrawal, the hospital's own signed statement."),
    ] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Let a hospital leave: revoke its admission, and list the runs and models that hold something of it.

    Example: flwr-server remove trial north --reason "contract ended"

    The list comes from the runs' receipts. A model that began with an affected model is affected too. The list stays in
    removed/NAME.json of the coordinator's folder. A revoked site can be removed too; no model is deleted.
    """
    from polyclinic.server.coordinator.folder import read_coordinator_folder

    coordinator = read_coordinator_folder(folder)
    from polyclinic.server.coordinator import admission

    admitted = admission.read_admitted_site(coordinator, site)
    signed_withdrawal = None
    if withdrawal is not None:
        from polyclinic.server.coordinator.withdrawals import read_withdrawal

        signed_withdrawal = read_withdrawal(coordinator, admitted, withdrawal)
        reason = reason or signed_withdrawal.statement.reason
    if not admitted.revoked:
        if not yes:
            _ask_for_confirmation(f"{site} is to leave for ever? Its key is refused from now on.")
        admitted = admission.revoke_site(coordinator, site)
    from polyclinic.server.deployment.removal import format_traces, list_traces_of_site

    traces = list_traces_of_site(coordinator, admitted, reason, runs or [])
    if signed_withdrawal is not None:
        from polyclinic.server.coordinator.withdrawals import store_withdrawal

        stored_path = store_withdrawal(coordinator, site, signed_withdrawal)
        if not as_json:
            signing_date = signed_withdrawal.statement.time[:10]
            message = f"{site} signed on {signing_date} that it leaves; the statement stays in {stored_path}."
            console.print(message, soft_wrap=True, highlight=False, markup=False)
    if as_json:
        print(format_as_json_text(asdict(traces)))
    else:
        console.print(format_traces(coordinator, site, traces), highlight=False)


@app.command("deadlines")
def print_timer_table(
    folder: Folder,
    experiment: Annotated[Path | None, typer.Argument(help="Experiment file, for a run's own deadlines.")] = None,
    as_json: AsJson = False,
) -> None:
    """List every timer: its value, where the value comes from, and what happens when the timer fires.

    Example: flwr-server deadlines trial experiment.toml

    The commands start and run report an error if a timer would fire before another timer that must end first.
    """
    from polyclinic.server.coordinator.folder import read_coordinator_folder

    read_coordinator_folder(folder)
    from polyclinic.strategies.method_list import read_experiment_without_data

    planned = read_experiment_without_data(experiment).experiment if experiment else None
    # Imported only once the call has no fault, because the import is slow.
    from polyclinic.server.deployment.timers import list_timer_settings, make_timer_table

    all_timers = list_timer_settings(planned)
    if as_json:
        print(format_as_json_text([timer.__dict__ for timer in all_timers], allow_nan=True))
    else:
        console.print(make_timer_table(all_timers))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``flwr-server`` with these arguments, by default ``sys.argv[1:]``."""
    end_with_parent_if_requested()
    words = list(sys.argv[1:] if arguments is None else arguments)
    stays_up = words[:1] == ["start"] or (words[:1] == ["status"] and "--web" in words)
    with graceful_shutdown(0) if stays_up else contextlib.nullcontext(), stop_on_signals():
        if words[:1] == ["run"]:
            set_resume_hint(lambda: shlex.join(["flwr-server", *words, *([] if "--resume" in words else ["--resume"])]))
        run_command_line_program(app, arguments, (ProgramCannotContinue,), prints_result=not stays_up)


if __name__ == "__main__":
    main()
