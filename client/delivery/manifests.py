"""The folder of received packages, and their manifests without verification; this module imports no torch."""

from contextlib import suppress
from pathlib import Path

from polyclinic.common.security.delivery import MANIFEST_FILE, DeliveryManifest

DELIVERED_FOLDER = "delivered"
DELIVERY_EVENT = "delivered"
"""Event of the audit log for a package that came over the connection, with its title, coordinator and model."""


def get_delivered_folder(state: Path) -> Path:
    """Return the folder of all packages that this site has received."""
    return state / DELIVERED_FOLDER


def read_stored_manifests(state: Path) -> list[DeliveryManifest]:
    """Return the manifests of the stored packages, the oldest signature first, without a verification.

    A manifest that cannot be read is left out.
    """
    folder = get_delivered_folder(state)
    manifests = list[DeliveryManifest]()
    for run_folder in list_run_folders(folder) if folder.is_dir() else []:
        with suppress(OSError, ValueError):
            manifests.append(DeliveryManifest.model_validate_json((run_folder / MANIFEST_FILE).read_bytes()))
    return sorted(manifests, key=lambda manifest: (manifest.time, manifest.run))


def list_run_folders(folder: Path) -> list[Path]:
    """Return the folders of the stored packages, by name."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
