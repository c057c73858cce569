"""``flwr-sim sites``: write each simulated site's images to files, to run the same federation over the network."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.config import ExperimentFile
from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.simulation import select_simulated_site_images
from polyclinic.common.system.files import make_private_folder, remove_outputs_on_failure, write_atomically
from polyclinic.common.system.plain_names import PlainName, join_plain_name
from polyclinic.common.system.toml import to_toml_text
from polyclinic.server.simulation.simulate import check_simulation_experiment

UNLABELLED_COLUMN = "(no class)"
"""Name of a second, unlabelled column for a site with one class; a single column would be read as class numbers."""

_SITE_TOML = """\
name = {name}

[data]
kind = "npz"
path = "images.npz"
patient_key = "patient"
classes = {classes}
annotates = {annotates}

[policy]                       # for rehearsals; with patients see docs/hospital-it.md
label_counts = true
score_histograms = true
smallest_count = 0
smallest_cohort = 1             # as in the simulation: under masks, head rows of two sites are opened too
"""


def export_simulated_sites(file: ExperimentFile, out: Path) -> list[Path]:
    """Write ``out/SITE/images.npz`` and ``out/SITE/site.toml`` for every site of an experiment; return the folders.

    Raises:
        BadInput: If the experiment has faults, or a site's files exist already.
    """
    method, data = check_simulation_experiment(file)
    if method.site.pooled_missing_labels != "no":
        problem = f'"{file.experiment.run.method}" puts all images in one place; it has no sites.'
        raise BadInput([Fault(f"{file.path.name}: run.method", problem)])
    folders = [join_plain_name(out, PlainName(part.site)) for part in data.parts]
    used = [folder for folder in folders if any((folder / name).exists() for name in ("images.npz", "site.toml"))]
    raise_faults([Fault(f"--out {out}", f"{folder} holds a site already.", "Name another folder.") for folder in used])
    with remove_outputs_on_failure(out, *folders):
        for index, (site_part, folder) in enumerate(zip(data.parts, folders, strict=True)):
            make_private_folder(folder)  # it holds images and patients' numbers, and later a key
            site = select_simulated_site_images(data, index, "no")
            arrays = dict[str, NDArray[Any]]()
            for part, images in {"train": site.train, "val": site.validation, "test": site.test}.items():
                labels = images.labels
                if labels.shape[1] == 1:
                    labels = np.column_stack([labels, np.full(len(labels), np.nan, np.float32)])
                named: dict[str, NDArray[Any]] = {"images": images.images, "labels": labels, "patient": images.patients}
                if images.masks is not None:
                    areas = images.masks.read_class_areas(np.arange(len(images)), images.class_names)
                    areas = np.moveaxis(areas, 1, -1)  # (n, *spatial, classes)
                    missing = labels.shape[1] - areas.shape[-1]
                    named["masks"] = np.pad(areas, [(0, 0)] * (areas.ndim - 1) + [(0, missing)])
                arrays |= {f"{part}_{name}": array for name, array in named.items()}
            content = io.BytesIO()
            np.savez(content, allow_pickle=False, **arrays)
            write_atomically(folder / "images.npz", [content.getbuffer()], private=True)
            annotated = site_part.class_names
            columns = annotated if len(annotated) > 1 else (*annotated, UNLABELLED_COLUMN)
            text = _SITE_TOML.format(
                name=to_toml_text(site_part.site),
                classes=to_toml_text(columns),
                annotates=to_toml_text(annotated),
            )
            write_atomically(folder / "site.toml", text.encode())
    return folders
