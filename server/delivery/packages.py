"""Make the signed packages of a finished run: ``flwr-server deliver``."""

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.evaluation.thresholds import make_summary_of_thresholds
from polyclinic.common.models.saved import read_model_description
from polyclinic.common.security.delivery import (
    DELIVERY_SUFFIX,
    DESCRIPTION_FILE,
    MODEL_CARD_FILE,
    MODEL_FILE,
    RECEIPT_FILE,
    REPORT_FILE,
    THRESHOLDS_FILE,
    Delivery,
    DeliveryManifest,
    describe_files,
    pack_delivery,
    sign_delivery,
)
from polyclinic.common.security.identity import is_same_public_key
from polyclinic.common.system.files import make_private_folder, write_atomically
from polyclinic.common.system.plain_names import PlainName, join_plain_name
from polyclinic.common.system.plain_text import format_utc_now
from polyclinic.server.coordinator.admission import AdmittedSite, read_all_admitted_sites
from polyclinic.server.coordinator.authority import ensure_valid_signing_key
from polyclinic.server.coordinator.folder import CoordinatorFolder
from polyclinic.server.delivery.own_report import write_own_report
from polyclinic.server.reporting.model_card import render_model_card
from polyclinic.server.runs.reader import read_run
from polyclinic.server.runs.receipt import RunReceipt, read_run_receipt

REVOKED_REASON = "it is revoked"
NOT_ADMITTED_REASON = "this coordinator has not admitted it"
OTHER_KEY_REASON = "this coordinator has admitted another key under its name than the receipt names"


@dataclass(frozen=True)
class RunPackages:
    """The signed packages of a run for its hospitals.

    Attributes:
        deliveries: Site -> its package.
        left_out: Site that took part in the run but gets no package -> reason.
    """

    deliveries: Mapping[str, Delivery]
    left_out: Mapping[str, str]


def make_run_packages(coordinator: CoordinatorFolder, folder: Path) -> RunPackages:
    """Make and sign a package for each hospital that took part in a finished run.

    Args:
        folder: The run's folder.

    Raises:
        BadInput: If the run is not finished, has no model, or none of its hospitals is admitted by this coordinator.
            Also if a file in the folder differs from the one that the run's receipt names.
    """
    run = read_run(folder)
    receipt = read_run_receipt(folder / RECEIPT_FILE)
    deliverable, left_out = _select_sites(receipt, read_all_admitted_sites(coordinator))
    if not deliverable:
        reasons = "; ".join(f"{site}: {reason}" for site, reason in sorted(left_out.items())) or "it has no hospital"
        remedy = "Name the folder of a run that flwr-server run wrote with this coordinator's folder."
        raise BadInput([Fault(str(folder), f"has no hospital that can get a package ({reasons}).", remedy)])
    model_files = _read_model_files(folder, receipt)
    key, certificate = ensure_valid_signing_key(coordinator)
    time = format_utc_now()
    deliveries = dict[str, Delivery]()
    with tempfile.TemporaryDirectory() as scratch:
        for site in deliverable:
            page = write_own_report(Path(scratch) / REPORT_FILE, run, receipt, site, coordinator.file.name, time)
            contents = {**model_files, REPORT_FILE: page.read_bytes()}
            manifest = DeliveryManifest(
                run=receipt.run,
                name=receipt.name,
                site=site,
                coordinator=coordinator.file.name,
                time=time,
                model_sha256=receipt.model_sha256,
                files=describe_files(contents),
            )
            deliveries[site] = sign_delivery(manifest, contents, key, certificate)
    return RunPackages(deliveries, left_out)


def write_run_packages(packages: RunPackages, out: Path) -> list[Path]:
    """Write each package to ``NAME.delivery`` in a new folder; return the paths."""
    make_private_folder(out)
    paths = []
    for site, delivery in packages.deliveries.items():
        path = join_plain_name(out, PlainName(site), DELIVERY_SUFFIX)
        write_atomically(path, pack_delivery(delivery), private=True)
        paths.append(path)
    return paths


def _select_sites(receipt: RunReceipt, admitted: Mapping[str, AdmittedSite]) -> tuple[list[str], dict[str, str]]:
    """Return the sites of a receipt that get a package; and for each other site the reason why it gets none."""
    deliverable, left_out = list[str](), dict[str, str]()
    for name, participant in sorted(receipt.sites.items()):
        site = admitted.get(name)
        if site is None:
            left_out[name] = NOT_ADMITTED_REASON
        elif site.revoked:
            left_out[name] = REVOKED_REASON
        elif not _has_key(site, (participant.public_key, *participant.old_public_keys)):
            left_out[name] = OTHER_KEY_REASON  # the package of one hospital must not go to another of the same name
        else:
            deliverable.append(name)
    return deliverable, left_out


def _has_key(site: AdmittedSite, receipt_keys: tuple[str, ...]) -> bool:
    """Return whether one of the keys in a receipt is a present or old key of an admitted site."""
    admitted_keys = (site.public_key, *site.old_keys)
    return any(is_same_public_key(line, key) for line in receipt_keys if line for key in admitted_keys)


def _read_model_files(folder: Path, receipt: RunReceipt) -> dict[str, bytes]:
    """Return name -> content of the files that all packages share, after a check against the receipt.

    Raises:
        BadInput: If a file is missing or belongs to another model. The signature must not confirm such a file.
    """
    saved = read_model_description(folder)
    card = render_model_card(folder)  # refuses a summary of another model
    contents, faults = dict[str, bytes](), list[Fault]()
    for name in (MODEL_FILE, DESCRIPTION_FILE, RECEIPT_FILE):
        try:
            contents[name] = (folder / name).read_bytes()
        except OSError as error:
            faults.append(Fault(str(folder / name), f"cannot be read: {error.strerror}.", "Name a finished run."))
    raise_faults(faults)
    remedy = "Nothing was signed. flwr-server verify says what was changed in this folder."
    if saved.model_sha256 != receipt.model_sha256:
        problem = f"is of the model {saved.model_sha256}, and {RECEIPT_FILE} of {receipt.model_sha256}."
        faults.append(Fault(str(folder / DESCRIPTION_FILE), problem, remedy))
    actual = hashlib.sha256(contents[MODEL_FILE]).hexdigest()
    if actual != saved.safetensors_sha256:
        problem = f"has SHA-256 {actual}, and {DESCRIPTION_FILE} names {saved.safetensors_sha256}."
        faults.append(Fault(str(folder / MODEL_FILE), problem, remedy))
    raise_faults(faults)
    return {**contents, MODEL_CARD_FILE: card.encode(), THRESHOLDS_FILE: make_summary_of_thresholds(folder)}
