"""Scores of the benchmark's runs on their test images, as files that others can evaluate by measures of their own."""

import csv
import gzip
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from threading import Lock
from typing import Any

from polyclinic.common.models.network import compute_image_probabilities
from polyclinic.common.models.saved import load_model
from polyclinic.common.models.zoo.spec import TENSORS_FILE
from polyclinic.common.simulation import load_simulated_data
from polyclinic.common.system.files import write_atomically
from polyclinic.data.images.pixels import load_pixels_on_device
from polyclinic.studies.benchmark_file import PlannedRun

_LOADING = Lock()
"""The data set that was loaded last is kept for the next run, so one thread loads at a time."""
SCORE_DECIMALS = 6
"""Number of decimals of a written score."""


def write_test_scores(planned: PlannedRun, run: Path, folder: Path) -> bool:
    """Write the scores of a finished run's global model, and the labels of the test images.

    ``KEY.csv.gz`` has a line for each test image: its row in the test part, and a score in [0, 1] for each class of the
    model. ``labels-DATA.csv.gz`` has the same rows with the patient and labels of 0, 1 or, where unknown, nothing. The
    names of the runs to the keys are in the results file.

    Args:
        run: The run folder.
        folder: Where the files are written.

    Returns:
        False if the run has no global model, as with the methods whose sites keep models of their own.
    """
    if not (run / TENSORS_FILE).is_file():
        return False
    file = planned.experiment_file
    with _LOADING:
        images = load_simulated_data(file.experiment, file.path.parent).test_images
    network = load_model(run)
    scores = compute_image_probabilities(network, load_pixels_on_device(images, "cpu"))
    rows = [[row, *(f"{score:.{SCORE_DECIMALS}f}" for score in of_image)] for row, of_image in enumerate(scores)]
    _write_table(folder / f"{planned.results_key}.csv.gz", ["image", *network.class_names], rows)
    labels = folder / f"labels-{planned.data}.csv.gz"
    if not labels.is_file():
        names = {0.0: "0", 1.0: "1"}
        known = [
            [row, patient, *(names.get(label, "") for label in of_image)]
            for row, (patient, of_image) in enumerate(zip(images.patients, images.labels.tolist(), strict=True))
        ]
        _write_table(labels, ["image", "patient", *images.class_names], known)
    return True


def _write_table(path: Path, heading: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heading)
    writer.writerows(rows)
    write_atomically(path, gzip.compress(text.getvalue().encode(), mtime=0))
