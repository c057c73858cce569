"""The command line of ``flwr-client``, the hospital's program."""

# isort: off
import polyclinic.common  # noqa: F401 - first: Ctrl-C may come at any moment
# isort: on

import os

# Before flwr is imported: this program sends no telemetry and installs nothing at run time.
os.environ.update(
    FLWR_TELEMETRY_ENABLED="0",
    FLWR_DISABLE_UPDATE_CHECK="1",
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION="1",
    PYDANTIC_DISABLE_PLUGINS="__all__",  # otherwise pydantic searches all installed packages at each start
)

import contextlib
import functools
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyclinic.client.cli_approval import approvers_app, plans_app, print_record
from polyclinic.client.cli_delivery import (
    predict_own_images,
    print_deliveries,
    recalibrate_model,
    receive_package,
    withdraw_from_federation,
)
from polyclinic.client.cli_service import service_app
from polyclinic.client.cli_slurm import slurm_app
from polyclinic.client.connection.exit_codes import ClientExitCode, ConnectionNotAccepted
from polyclinic.common.errors import ProgramCannotContinue
from polyclinic.common.system.files import write_for_owner_only
from polyclinic.common.system.plain_text import escape_for_terminal, format_as_json_text, quote_for_shell
from polyclinic.common.system.resources import exclude_imports_from_gc, reuse_large_buffers
from polyclinic.common.system.stopping import graceful_shutdown, stop_on_signals
from polyclinic.common.system.terminal import (
    EscapingConsole,
    LogFormat,
    LogOutputFormat,
    WaitOnRefusal,
    make_command_line_program,
    make_event_printer,
    run_command_line_program,
)

if TYPE_CHECKING:
    from polyclinic.client.site.site_file import SiteSettings
    from polyclinic.common.config import Experiment

app = make_command_line_program(
    "flwr-client",
    "Take part in a federation with this hospital's images, which stay here.",
    "0 done or stopped, 1 the answer is no, 2 a fault in what was given, others: see start --help and check --help",
)
audit_app = typer.Typer(help="What came in and what left this site, line by line.", no_args_is_help=True)
app.add_typer(audit_app, name="audit")
app.add_typer(service_app, name="service")
app.add_typer(plans_app, name="plans")
app.add_typer(approvers_app, name="approvers")
app.command("record")(print_record)
app.command("receive")(receive_package)
app.command("delivered")(print_deliveries)
app.command("predict")(predict_own_images)
app.command("recalibrate")(recalibrate_model)
app.command("withdraw")(withdraw_from_federation)
app.add_typer(slurm_app, name="slurm")
console = EscapingConsole()
_print_line = functools.partial(console.print, soft_wrap=True, highlight=False, markup=False)
_PRIVATE_FIGURES_NOTE = "figures of this hospital's patients, readable by you only. It was sent to nobody."
_PRIVATE_IMAGES_NOTE = "images of patients, readable by you only. Delete it when you have looked."
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The site's folder.")]
ExperimentFile = Annotated[
    Path | None, typer.Option("--experiment", help="What will be run, if the coordinator has sent it (TOML).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


INIT_COMMAND = "init"
"""Other commands write files about patients, readable by their owner only.

The command ``init`` writes files that a person edits or sends; it gives only the private key that file mode.
"""


@app.command(INIT_COMMAND)
def init_site_folder(
    folder: Folder,
    name: Annotated[str, typer.Option("--name", help="The site's name in the federation.")] = "",
    renew_key: Annotated[
        bool,
        typer.Option(
            "--renew-key",
            help="A new key pair for this folder, after a revoke; all else stays. Stop the program first.",
        ),
    ] = False,
    experiment: Annotated[
        Path | None,
        typer.Option("--experiment", help="The coordinator's experiment file, for site.toml's colour and image size."),
    ] = None,
) -> None:
    """Make this site's folder: a key pair, site.toml, and the request for the coordinator.

    Example: flwr-client init north --name north

    Example: flwr-client init north --renew-key
    """
    name = name.strip()  # a space at the end is no part of a name
    if renew_key:
        from polyclinic.client.site.key_renewal import renew_site_key

        lines = renew_site_key(folder, name)
    else:
        from polyclinic.client.site.site_file import make_site_folder

        if not name:
            raise typer.BadParameter("it is missing: --name north", param_hint="'--name'")
        has_site_file = (folder / "site.toml").exists()
        lines = make_site_folder(folder, name, _read_experiment_file(experiment))
        if has_site_file and experiment is not None:
            check = f"flwr-client check {quote_for_shell(folder)} --experiment {quote_for_shell(experiment)}"
            lines.append(f"The experiment changed nothing in site.toml. This compares the two: {check}")
    for line in lines:
        _print_line(line)


@app.command("preview")
def preview_outgoing_records(
    folder: Folder,
    experiment: Annotated[
        Path | None, typer.Option("--experiment", help="The coordinator's experiment file; a small one where left out.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="New folder for the exact bytes of each record; with --attack, the page."),
    ] = None,
    attack: Annotated[
        bool, typer.Option("--attack", help="Attack this site as a coordinator could; write a page of what was found.")
    ] = False,
    counts: Annotated[
        bool, typer.Option("--counts", help="Also show the answer to a question for all counts; it takes minutes.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the exact records that would leave in a first round. Trains one epoch here and connects to nobody.

    With --attack, test in some minutes what a malicious coordinator could find out; --json prints the figures.

    Example: flwr-client preview north --experiment experiment.toml --out seen

    Example: flwr-client preview north --attack
    """
    from polyclinic.client.site.site_file import read_site_with_faults
    from polyclinic.common.errors import raise_faults
    from polyclinic.common.system.files import find_output_file_faults, find_output_folder_faults

    read_site_with_faults(folder)  # before torch is imported
    find_output_faults = find_output_file_faults if attack else find_output_folder_faults
    raise_faults([] if out is None else find_output_faults(out))
    planned = _read_experiment_file(experiment)
    from polyclinic.client.preview.dry_run import (
        answer_question_for_all_counts,
        choose_preview_experiment,
        format_record_for_terminal,
        make_first_round_records,
        write_record_files,
    )
    from polyclinic.client.site.budget import describe_ledger
    from polyclinic.client.site.settings import load_site, read_site_settings
    from polyclinic.data.connections import list_dataset_connections

    settings = read_site_settings(folder)
    site = replace(load_site(settings, make_event_printer(EscapingConsole(stderr=True))), tell=lambda line: None)
    planned = choose_preview_experiment(planned, site)
    if attack:  # on copies of the site
        from polyclinic.client.preview.attack.suite import attack_results_as_json as figures
        from polyclinic.client.preview.attack.suite import run_attacks, write_attack_page
        from polyclinic.common.config import make_hospital_plan

        plan = make_hospital_plan(planned)
        results = []
        for attempt in run_attacks(site, plan):
            results.append(attempt)
            if not as_json:
                _print_line(f"{attempt.title}: {attempt.sentence}")
        page = write_attack_page(site, plan, results, out or folder / "attack.html")
        if as_json:
            print(format_as_json_text(figures(site, plan, results), indent=1))
        else:
            _print_line(f"{page}: {_PRIVATE_IMAGES_NOTE}")
        return
    records, reasons = make_first_round_records(site, planned)
    if counts:
        more, more_reasons = answer_question_for_all_counts(site)
        records = [*records, *more]
        reasons = [*reasons, *more_reasons]
    for content in records:
        console.print(format_record_for_terminal(content))
    for reason in reasons:
        _print_line(f"This site {reason}")
    for connection in list_dataset_connections(settings.file.data, folder, settings.secrets_path):
        _print_line("Not to the coordinator, to read this site's images:")
        for line in connection.describe():
            _print_line(f"    {line}")
    if (ledger := site.ledger) is not None and site.policy.epsilon is not None:
        _print_line(
            f"This preview spends nothing. Epsilon is {describe_ledger(str(ledger.path), shared=ledger.shared)}"
        )
    for path in write_record_files(records, out) if out else ():
        _print_line(str(path))


def _read_experiment_file(path: Path | None) -> "Experiment | None":
    """Read and check the coordinator's experiment file without importing torch; return None if ``path`` is None."""
    from polyclinic.strategies.method_list import read_experiment_without_data

    return read_experiment_without_data(path).experiment if path else None


@app.command("start")
def start_client(
    folder: Folder,
    log_format: LogFormat = LogOutputFormat.text,
    restarted: WaitOnRefusal = False,
    until_idle: Annotated[
        float | None,
        typer.Option("--until-idle", min=0, help="End after so many minutes without a request, as jobs of a queue do."),
    ] = None,
) -> None:
    """Connect to the coordinator and train when asked. Reconnects after a lost connection; runs until it is stopped.

    Example: flwr-client start north

    Exit codes: 0 stopped on request, 2 a fault in site.toml or the data, 10 no TLS, 11 certificate of another
    authority, 12 of another host, 13 expired, 14 key not admitted or revoked, 15 clocks differ, 16 another site's name,
    17 no common wire version.
    """
    from polyclinic.client.connection.preflight import check_client_before_start
    from polyclinic.common.errors import BadInput
    from polyclinic.common.system.preflight import delay_failure_until_change

    tell = make_event_printer(console)
    try:
        with delay_failure_until_change(folder, tell, (BadInput, ConnectionNotAccepted), held=restarted):
            check_client_before_start(folder)  # before torch is imported
            _load_site_and_run_message_loop(folder, tell, until_idle)
    except SystemExit:
        tell("stopped on request; unfinished work resumes at the next start")
        raise


def _load_site_and_run_message_loop(folder: Path, tell: Callable[[str], None], until_idle: float | None) -> None:
    with exclude_imports_from_gc():
        from polyclinic.client.connection.authority import describe_authority, refuse_other_authority
        from polyclinic.client.connection.service import (
            INTERRUPT_SIGNAL,
            HospitalMessageLoop,
            IdleLimitReached,
            lock_site_folder,
        )
        from polyclinic.client.connection.status import ClientStatus, keep_status_file_current
        from polyclinic.client.gate.gate import record_patients, record_process_start
        from polyclinic.client.site.budget import describe_privacy_status
        from polyclinic.client.site.settings import load_site_data, read_site_settings
        from polyclinic.client.site.site_file import read_and_check_connection_kit
        from polyclinic.client.training.privacy import make_privacy_status_at_start
        from polyclinic.common.security.phrase import compute_certificate_phrase

    reuse_large_buffers()
    settings = read_site_settings(folder)
    kit = read_and_check_connection_kit(settings)
    refuse_other_authority(settings, kit)  # again: the kit may be another file than a moment ago
    phrase = compute_certificate_phrase(kit.ca_certificate)
    status = ClientStatus(site=settings.file.name, coordinator=kit.coordinator, authority_phrase=phrase)
    for line in filter(None, describe_authority(settings, kit)):
        tell(line)

    with lock_site_folder(settings.state_folder), keep_status_file_current(status, settings.state_folder):
        data = load_site_data(settings, tell, remember=True)
        site, left_out, opted_out = data.make_present_site()
        status.privacy = make_privacy_status_at_start(site)
        counts = f"{len(site.train)} training, {len(site.validation)} validation, {len(site.test)} test images"
        tell(f"site {site.name}: {counts} on {site.device}; annotates {', '.join(site.declaration.canonical_names)}")
        for line in describe_privacy_status(status.privacy) if status.privacy else ():
            tell(line.strip())
        if site.approvals is not None:
            tell(site.approvals.describe_start())
        for note in site.train.notes:
            tell(note)
        for part in (site.train, site.validation, site.test):
            for skipped in part.skipped:
                tell(f"left out {skipped.name}: {skipped.reason}")

        if torn := record_process_start(site):
            lost = f"the audit's last line was torn by {torn.cause} ({torn.bytes} bytes)"
            tell(f"{lost}; that is written down, and it goes on")
        if text := data.changes.describe():
            tell(text)
            record_patients(site, **asdict(data.changes))

        try:
            service = HospitalMessageLoop(settings, kit, site, tell, status, data=data, opted_out=opted_out)
            if opted_out:
                service.report_left_out_patients(left_out)
            service.idle_limit_s = None if until_idle is None else until_idle * 60
            signal.signal(INTERRUPT_SIGNAL, service.interrupt_ended_work)
            service.run_message_loop()
        except IdleLimitReached:
            tell(f"ends, because no request came for {until_idle:g} min")
        except ConnectionNotAccepted as refusal:
            status.record_last_error(str(refusal))
            raise


@app.command("confirm")
def confirm_coordinator_phrase(
    folder: Folder,
    phrase: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PHRASE]", help="The coordinator's words as you heard them by telephone."),
    ] = None,
) -> None:
    """Confirm that the kit is the coordinator's, by the phrase that the coordinator reads out to you by telephone.

    Without PHRASE, print this site's phrase, which you read out, and the kit's, which you should hear.

    Example: flwr-client confirm north garden copper winter salmon ticket oval

    A new kit of a coordinator that was set up again has a new phrase; start refuses it until it is confirmed.

    Exit codes: 0 the phrase is the kit's, 1 it is another one, 2 a fault in key or kit.
    """
    from polyclinic.client.connection.authority import confirm_authority, describe_authority
    from polyclinic.client.site.site_file import read_and_check_connection_kit, read_site_with_faults
    from polyclinic.common.security.phrase import compute_public_key_phrase, find_phrase_difference

    settings, _ = read_site_with_faults(folder)
    kit = read_and_check_connection_kit(settings)
    if not phrase:
        _print_line(f"this site's phrase, for you to read out: {compute_public_key_phrase(kit.public_key)}")
        for line in filter(None, describe_authority(settings, kit)):
            _print_line(line)
        return
    if difference := confirm_authority(settings, kit, " ".join(phrase)):
        # The two phrases of one call are easily mixed up; this one says nothing about the kit.
        if not find_phrase_difference(" ".join(phrase), compute_public_key_phrase(kit.public_key)):
            _print_line("NOT the phrase to type: it is this site's own, which you read out.")
            _print_line("Type the phrase that the coordinator reads out to you.")
            raise SystemExit(1)
        _print_line(f"NOT the phrase of {settings.kit_path.name}: {difference}.")
        _print_line("Have it read out again. If it stays another one, the kit is not the coordinator's: do not use it.")
        raise SystemExit(1)
    quoted_folder = quote_for_shell(folder)
    _print_line(f"The same: {settings.kit_path.name} is the coordinator's.")
    _print_line(
        f"Next: flwr-client check {quoted_folder}, and where it finds no fault: flwr-client start {quoted_folder}"
    )


@app.command("check")
def check_site(
    folder: Folder,
    images: Annotated[int, typer.Option("--images", min=1, help="How many images to decode.")] = 200,
    all_images: Annotated[bool, typer.Option("--all", help="Decode all of them.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Leave the connection out.")] = False,
    experiment: ExperimentFile = None,
    as_json: AsJson = False,
) -> None:
    """Find problems before the first run: connection, machine, data, one training step. Nothing of the data leaves.

    The exit code is that of the most severe finding, or 0 without findings; docs/troubleshooting.md lists all codes.

    Example: flwr-client check north
    """
    from polyclinic.client.site.site_file import read_site_with_faults

    planned = _read_experiment_file(experiment)
    if not as_json:  # its findings hold the faults of the file too
        read_site_with_faults(folder)  # before torch is imported
    from polyclinic.client.check.findings import make_narrow_console, print_check_result
    from polyclinic.client.check.run import run_site_check

    result, classes = run_site_check(folder, images=None if all_images else images, offline=offline, experiment=planned)
    if as_json:
        print(format_as_json_text(result.as_json(), indent=2, allow_nan=True))
    else:
        print_check_result(result, classes, make_narrow_console())
    raise SystemExit(int(result.exit_code))


@app.command("preview-data")
def preview_images(
    folder: Folder,
    out: Annotated[Path | None, typer.Option("--out", help="The page; DIR/preview.html where left out.")] = None,
    experiment: ExperimentFile = None,
    each: Annotated[int, typer.Option("--per-class", min=1, help="Images of each class.")] = 4,
) -> None:
    """Write a page with images of each class as the network will receive them. It is for this hospital only.

    Example: flwr-client preview-data north
    """
    from polyclinic.client.site.site_file import read_site_with_faults
    from polyclinic.common.errors import raise_faults
    from polyclinic.common.system.files import find_output_file_faults

    read_site_with_faults(folder)  # before torch is imported
    raise_faults([] if out is None else find_output_file_faults(out))
    planned = _read_experiment_file(experiment)
    from polyclinic.client.preview.images import write_class_samples_page

    page = write_class_samples_page(folder, out or folder / "preview.html", planned, each)
    _print_line(f"{page}: {_PRIVATE_IMAGES_NOTE}")


@app.command("evaluate")
def evaluate_models_at_site(
    folder: Folder,
    models: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL...",
            help="A run of flwr-client delivered, folder or ONNX file of a run, or MODEL.toml of another model.",
        ),
    ],
    by: Annotated[
        list[str] | None,
        typer.Option("--by", metavar="COLUMN", help="Subgroups by a column, e.g. sex or age:0,40,65. Repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="New folder for the page; DIR/evaluation otherwise.")
    ] = None,
    all_images: Annotated[
        bool, typer.Option("--all", help="All images, also those that runs of this site train on.")
    ] = False,
    trust: Annotated[
        list[Path] | None,
        typer.Option("--trust", metavar="FILE", help="A .pt2 file that may run programs of its author. Repeatable."),
    ] = None,
    failures: Annotated[
        int, typer.Option("--failures", min=0, help="Also a page of so many worst images of each class and kind.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Score models on this hospital's own test images, class by class. Nothing leaves, and nothing is trained.

    Example: flwr-client evaluate north runs/nih chexnet.toml --by sex

    Example: flwr-client evaluate north 3f9a1c22 --failures 8
    """
    from polyclinic.client.site.site_file import read_site_with_faults
    from polyclinic.common.errors import raise_faults
    from polyclinic.common.evaluation.foreign import find_model_file
    from polyclinic.common.evaluation.groups import parse_grouping
    from polyclinic.common.system.files import find_output_folder_faults

    settings, _ = read_site_with_faults(folder)  # before torch is imported
    raise_faults([] if out is None else find_output_folder_faults(out))
    groupings = [parse_grouping(text) for text in by or ()]
    trusted = frozenset(path.resolve() for path in trust or ())
    paths = [_find_model_path(settings, path) for path in models]
    if any(map(_may_segment, paths)) and _evaluate_segmentation(
        folder, paths, by or (), out or folder / "evaluation", all_images=all_images, worst=failures, as_json=as_json
    ):
        return
    files = [find_model_file(path, trusted) for path in paths]
    from polyclinic.client.evaluation.failures import FAILURES_PAGE, write_failures_page
    from polyclinic.client.evaluation.site import evaluate_at_site
    from polyclinic.common.evaluation.page import write_evaluation_folder
    from polyclinic.common.evaluation.results import format_for_terminal, make_json

    tell = make_event_printer(EscapingConsole(stderr=True))
    at_site = evaluate_at_site(folder, files, groupings, all_images=all_images, tell=tell)
    evaluation = at_site.evaluation
    destination = out or folder / "evaluation"
    title = f"Models on images of {evaluation.data[0].name}"
    page = write_evaluation_folder(evaluation, destination, title, private=True)
    failures_page = destination / FAILURES_PAGE
    if failures:
        write_failures_page(failures_page, at_site.data, evaluation.scored[0], at_site.spec, failures)
    else:
        failures_page.unlink(missing_ok=True)  # of an earlier evaluation
    if as_json:
        print(format_as_json_text(make_json(evaluation), indent=2))
        return
    console.print(format_for_terminal(evaluation))
    _print_line(f"{page}: {_PRIVATE_FIGURES_NOTE}")
    if failures:
        _print_line(f"{failures_page}: {_PRIVATE_IMAGES_NOTE}")


def _may_segment(path: Path) -> bool:
    """Return True if model.json contains the word "segmentation"; torch is not imported."""
    from polyclinic.common.models.zoo.spec import DESCRIPTION_FILE

    description = path / DESCRIPTION_FILE
    return description.is_file() and b"segmentation" in description.read_bytes()


def _evaluate_segmentation(
    folder: Path, paths: list[Path], by: Sequence[str], out: Path, *, all_images: bool, worst: int, as_json: bool
) -> bool:
    """Compare a segmentation model with this hospital's outlines; return False if no model is for segmentation."""
    from polyclinic.client.evaluation.outlines import (
        evaluate_segmentation_at_site,
        is_segmentation_model,
        refuse_unfit_options,
    )
    from polyclinic.common.system.plain_text import format_number

    if not any(map(is_segmentation_model, paths)):
        return False
    refuse_unfit_options(paths, by)
    tell = make_event_printer(EscapingConsole(stderr=True))
    at_site = evaluate_segmentation_at_site(folder, paths[0], out, all_images=all_images, worst=worst, tell=tell)
    if as_json:
        print(format_as_json_text(at_site.make_json(), indent=2))
        return True
    _print_line(f"{at_site.images:,} images. {at_site.about}")
    for name, each in at_site.figures.per_class.items():
        _print_line(f"{name}: Dice {format_number(each.dice)} over {each.patients:,} with it")
    _print_line(f"{at_site.page}: {_PRIVATE_IMAGES_NOTE if worst else _PRIVATE_FIGURES_NOTE}")
    return True


def _find_model_path(settings: "SiteSettings", path: Path) -> Path:
    """Return the folder of a delivered run if ``path`` is the beginning of its name; else return ``path``.

    Raises:
        BadInput: If several runs begin with these digits, or the package was changed.
    """
    if path.exists() or path.name != str(path):
        return path
    delivered = settings.state_folder / "delivered"
    runs = [run_folder.name for run_folder in delivered.iterdir()] if delivered.is_dir() else []
    if not any(run.startswith(path.name) for run in runs):
        return path
    # Imported late: the answer to a typing error need not wait for torch.
    from polyclinic.client.prediction.received import find_delivery

    stored = find_delivery(settings, path.name)
    return path if stored is None else stored.folder


@app.command("status")
def print_status_of_client(folder: Folder, as_json: AsJson = False) -> None:
    """Print the status of the flwr-client that runs on this folder.

    Example: flwr-client status north
    """
    from polyclinic.client.connection.status import format_client_status, read_client_status
    from polyclinic.client.site.site_file import refuse_missing_site_file

    status = read_client_status(refuse_missing_site_file(folder) / "state")
    if as_json:
        print(format_as_json_text(status, allow_nan=True))
    else:
        _print_line(format_client_status(status))


@app.command("health")
def exit_with_health_code(folder: Folder) -> None:
    """Exit with 0 if the flwr-client that runs on this folder is healthy, else with 1. For health checks of containers.

    Example: flwr-client health north
    """
    from polyclinic.client.connection.status import read_client_status
    from polyclinic.client.site.site_file import refuse_missing_site_file

    status = read_client_status(refuse_missing_site_file(folder) / "state")
    print("healthy" if status["healthy"] else escape_for_terminal(f"not healthy: {status['last_error']}"))
    raise SystemExit(0 if status["healthy"] else 1)


@audit_app.command("verify")
def verify_audit_log(
    folder: Folder,
    receipt: Annotated[
        Path | None, typer.Option("--receipt", help="The coordinator's receipt.json: is all that it received in here?")
    ] = None,
) -> None:
    """Check that no line of this site's audit log was changed, removed, inserted or moved; exit with 1 otherwise.

    With --receipt, also check that this site signed all replies that the coordinator's receipt lists for it, and that
    the receipt lists all replies that this site sent.

    Example: flwr-client audit verify north --receipt receipt.json
    """
    from polyclinic.client.site.site_file import read_site_toml_without_data
    from polyclinic.common.errors import raise_faults
    from polyclinic.common.system.files import is_file, make_missing_input_fault

    settings = read_site_toml_without_data(folder)  # the images may have been deleted long ago
    raise_faults([make_missing_input_fault(receipt)] if receipt and not is_file(receipt) else [])
    from cryptography import x509

    from polyclinic.client.gate.audit_report import make_audit_report
    from polyclinic.client.site.key_renewal import read_own_public_keys
    from polyclinic.common.security.identity import read_connection_kit

    keys: dict[str, tuple[str, ...]] = {peer: (line,) for peer, line in settings.file.policy.peers.items()}
    if receipt:
        keys[settings.file.name] = read_own_public_keys(settings)
    kit = read_connection_kit(settings.kit_path) if settings.kit_path.is_file() else None
    authority = x509.load_pem_x509_certificate(kit.ca_certificate.encode()) if kit else None
    lines, right = make_audit_report(settings.state_folder, settings.file.name, receipt, keys, authority)
    for line in lines:
        _print_line(line)
    raise SystemExit(0 if right else 1)


@audit_app.command("show")
def show_audit_log(
    folder: Folder,
    last: Annotated[int, typer.Option("--tail", min=0, help="How many entries; 0 for all.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Print the audit log: the requests that came in and the replies that left, oldest first.

    Example: flwr-client audit show north --tail 0
    """
    from polyclinic.client.site.site_file import read_site_toml_without_data
    from polyclinic.common.security.audit import AuditLog

    settings = read_site_toml_without_data(folder)  # before torch is imported
    from polyclinic.client.gate.audit_report import describe_audit_entry

    entries = list(AuditLog(settings.state_folder).read_entries())
    for entry in entries[-last:]:
        print(format_as_json_text(entry) if as_json else describe_audit_entry(entry))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line of ``flwr-client`` and exit with its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    stays_up = words[:1] == ["start"] or words[:2] == ["slurm", "watch"]
    with contextlib.ExitStack() as stack:
        if words[:1] != [INIT_COMMAND]:
            stack.enter_context(write_for_owner_only())
        if stays_up:
            stack.enter_context(graceful_shutdown(int(ClientExitCode.STOPPED)))
        stack.enter_context(stop_on_signals())
        run_command_line_program(
            app, arguments, (ConnectionNotAccepted, ProgramCannotContinue), prints_result=not stays_up
        )


if __name__ == "__main__":
    main()
