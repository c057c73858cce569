"""The commands of ``flwr-client`` for the time after a run: receive, delivered, predict, recalibrate, withdraw."""

import functools
from pathlib import Path
from typing import Annotated

import typer

from polyclinic.common.prediction.segmentation_options import DicomSegmentations, SegmentCodes
from polyclinic.common.system.plain_text import format_as_json_text, quote_for_shell
from polyclinic.common.system.terminal import EscapingConsole

console = EscapingConsole()
_print_line = functools.partial(console.print, soft_wrap=True, highlight=False, markup=False)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The site's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def receive_package(
    folder: Folder,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="NAME.delivery, as the coordinator sent it.")],
) -> None:
    """Verify the package of a finished run, say from whom it is, and store it. Works offline.

    Example: flwr-client receive north north.delivery

    A package that was changed, is another hospital's, or was signed by another coordinator is refused with exit code 2.
    """
    from polyclinic.client.prediction.received import describe_delivery, receive_delivery_file
    from polyclinic.client.site.site_file import read_site_with_faults

    settings, _ = read_site_with_faults(folder)
    stored = receive_delivery_file(settings, file)
    for line in describe_delivery(stored):
        _print_line(line)
    _print_line(
        f"To use the model: flwr-client predict {quote_for_shell(folder)} {stored.folder.name} IMAGES --out FOLDER"
    )


def print_deliveries(folder: Folder, as_json: AsJson = False) -> None:
    """List the packages that this hospital has received; each is verified again.

    Example: flwr-client delivered north

    Exit code 0 if all are as the coordinator signed them, 1 if not.
    """
    from polyclinic.client.prediction.received import format_deliveries, list_deliveries, make_deliveries_json
    from polyclinic.client.site.site_file import read_site_with_faults

    settings, _ = read_site_with_faults(folder)
    deliveries = list_deliveries(settings)
    if as_json:
        print(format_as_json_text(make_deliveries_json(deliveries)))
    elif deliveries:
        console.print(format_deliveries(deliveries), highlight=False)
    else:
        _print_line("No package has been received.")
    raise SystemExit(1 if any(stored.fault for stored in deliveries) else 0)


def predict_own_images(
    folder: Folder,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A run of flwr-client delivered, or a folder with model.json.")
    ],
    images: Annotated[Path, typer.Argument(metavar="IMAGES", help="A picture, a DICOM file, or a folder of them.")],
    out: Annotated[Path, typer.Option("--out", help="New folder for predictions.csv and predictions.json.")],
    dicom_sr: Annotated[
        bool, typer.Option("--dicom-sr", help="Also a DICOM structured report for each DICOM image.")
    ] = False,
    calibrated: Annotated[
        bool, typer.Option("--calibrated", help="Probabilities as flwr-client recalibrate fitted them here.")
    ] = False,
    dicom_seg: DicomSegmentations = False,
    code: SegmentCodes = None,
) -> None:
    """Write a model's probabilities for this hospital's own images. Works offline; nothing leaves.

    Example: flwr-client predict north 3f9a1c22 images --out predictions

    Of a segmentation it writes masks, whose label maps have the values of site.toml's mask_values. Images are read as
    those of the training were. A class that the model has not learned is left out. Exit code 1 if a
    file could not be used.
    """
    from polyclinic.client.site.site_file import read_site_with_faults
    from polyclinic.common.errors import Fault, raise_faults
    from polyclinic.common.prediction.pictures import refuse_data_without_pictures
    from polyclinic.common.system.files import find_output_folder_faults

    settings, _ = read_site_with_faults(folder)
    raise_faults(find_output_folder_faults(out))  # before torch is imported
    if dicom_sr:
        from polyclinic.client.prediction.structured_report import refuse_missing_highdicom

        refuse_missing_highdicom()
    refuse_data_without_pictures(images)
    from polyclinic.client.prediction.model import find_model
    from polyclinic.client.prediction.predict import make_mask_options, predict_at_site
    from polyclinic.client.site.settings import choose_training_device
    from polyclinic.common.models.zoo.spec import is_segmentation

    usable = find_model(settings, model)
    segments = is_segmentation(usable.description.model.task)
    if segments and (dicom_sr or calibrated):
        option = "--dicom-sr" if dicom_sr else "--calibrated"
        raise_faults([Fault(option, "is about the probability of each image, and this model gives masks.")])
    if (dicom_seg or code) and not segments:
        problem = "is about masks, and this model gives a probability for each image."
        raise_faults([Fault("--dicom-seg" if dicom_seg else "--code", problem, "--dicom-sr writes reports of these.")])
    masks = make_mask_options(settings, usable, code or (), segments=dicom_seg) if segments else None
    device = choose_training_device(settings)
    predictions = predict_at_site(usable, images, out, calibrated=calibrated, device=device, masks=masks)
    refused = dict(predictions.unreadable)
    output_noun = "masks" if segments else "probabilities"
    _print_line(f"{out}: the {output_noun} of {len(predictions.names):,} images, by {usable.title}.")
    for name, reason in usable.unlearned.items():
        _print_line(f"{name} is left out, because the model has not learned it: {reason}.")
    for name in usable.description.maybe_unlearned:
        _print_line(f"{name}: nobody knows if the model has learned it; its probabilities may mean nothing.")
    if dicom_sr:
        from polyclinic.client.prediction.structured_report import write_structured_reports

        reports, without = write_structured_reports(predictions, out)
        _print_line(f"{len(reports):,} DICOM structured reports in {out / 'sr'}. No person has verified them.")
        refused |= {name: f"no structured report: {reason}" for name, reason in without.items()}
    for name, reason in refused.items():
        _print_line(f"{name}: {reason}")
    for name in predictions.others:
        _print_line(f"{name}: no picture")
    raise SystemExit(1 if refused else 0)


def recalibrate_model(
    folder: Folder,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A run of flwr-client delivered, or a folder with model.json.")
    ],
    method: Annotated[
        str, typer.Option("--method", help="platt: slope and offset for each class; temperature: a slope alone.")
    ] = "platt",
    as_json: AsJson = False,
) -> None:
    """Fit a model's probabilities to this hospital, on its validation images. Nothing leaves; the model stays as it is.

    Example: flwr-client recalibrate north 3f9a1c22

    The fit lies beside the model as calibration.json, with the calibration error on the test images before and after
    it. predict uses it with --calibrated.
    """
    if method not in ("platt", "temperature"):
        raise typer.BadParameter(f"{method} is neither platt nor temperature.", param_hint="'--method'")
    from polyclinic.client.prediction.model import find_model
    from polyclinic.client.prediction.recalibrate import format_calibration, recalibrate_at_site
    from polyclinic.client.site.settings import read_site_settings
    from polyclinic.common.system.terminal import make_event_printer

    settings = read_site_settings(folder)
    usable = find_model(settings, model)
    tell = make_event_printer(EscapingConsole(stderr=True))
    calibration = recalibrate_at_site(settings, usable, "platt" if method == "platt" else "temperature", tell)
    if as_json:
        print(format_as_json_text(calibration.model_dump(mode="json"), indent=1))
    else:
        console.print(format_calibration(calibration), highlight=False)


def withdraw_from_federation(
    folder: Folder,
    reason: Annotated[str, typer.Option("--reason", help="Why, for the coordinator.")] = "",
    delete: Annotated[
        bool, typer.Option("--delete", help="Also remove decoded images, features and memory from state/.")
    ] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Take part again.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Let this hospital leave its federation. Stop the program first; start refuses from then on, until --undo.

    Example: flwr-client withdraw north --reason "contract ended"

    Shows in which runs the hospital took part, and what stays where. Writes a signed statement, NAME.withdrawal, for
    the coordinator, who gives it to flwr-server remove. Exit code 1 if nothing was done.
    """
    from polyclinic.client.connection.preflight import refuse_running_site
    from polyclinic.client.site.site_file import read_site_with_faults
    from polyclinic.client.withdrawal.withdraw import (
        describe_withdrawal,
        examine_withdrawal,
        undo_withdrawal,
        withdraw_site,
    )

    settings, _ = read_site_with_faults(folder)
    if undo:
        undo_withdrawal(settings)
        _print_line(
            f"{folder} may take part again. A coordinator that has removed it has to admit it anew, by a new key:"
        )
        _print_line(f"flwr-client init {quote_for_shell(folder)} --renew-key")
        return
    refuse_running_site(settings.state_folder)  # before anybody reads what leaving means, and agrees
    withdrawal = examine_withdrawal(settings)
    for line in describe_withdrawal(withdrawal):
        _print_line(line)
    if not yes and not typer.confirm(f"Is {settings.file.name} to leave?", default=False):
        _print_line("Nothing was done.")
        raise SystemExit(1)
    path = withdraw_site(settings, withdrawal, reason, delete=delete)
    _print_line(
        f"{settings.file.name} has left: flwr-client start refuses. Send this statement to the coordinator: {path}"
    )
