"""The ensemble of the models that simulated sites train alone. Hospitals never send such models.

The ensemble's probability of a class is the mean over the models of the sites that annotate the class.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.contract import LabelContract
from polyclinic.common.metrics.auroc import (
    ClassMetrics,
    FinalTestSummary,
    average_metrics_over_models,
    compute_mean_and_sd,
    compute_metrics_per_class,
    summarise_test_results,
)
from polyclinic.common.metrics.multi_class import compute_multi_class_metrics
from polyclinic.common.models.gpu import move_network_to_device
from polyclinic.common.models.network import (
    Precision,
    SplitNetwork,
    compute_image_probabilities,
    select_head_row_labels,
)
from polyclinic.common.models.saved import load_model
from polyclinic.common.models.zoo.spec import DESCRIPTION_FILE
from polyclinic.common.system.plain_names import PlainName, join_plain_name
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.images.pixels import load_pixels_on_device
from polyclinic.server.runs.schema import EnsembleTestResult, SiteTestResult

ENSEMBLE_NOTE = "ensemble of the owning sites' own models"
LOCAL_MODELS_NOTE = "mean over the owning sites' own models"


def find_local_model_folders(run: Path, contract: LabelContract) -> list[Path]:
    """Return the folders of the sites' local models; empty unless the models of all sites are on this machine."""
    folders = [join_plain_name(run / "sites", PlainName(site)) / "model" for site in contract.sites]
    return folders if all((folder / DESCRIPTION_FILE).is_file() for folder in folders) else []


def evaluate_ensemble(
    folders: Iterable[Path],
    contract: LabelContract,
    test: ImageSet,
    site_tests: Mapping[str, ImageSet],
    device: str = "cpu",
    precision: Precision = "auto",
) -> EnsembleTestResult:
    """Test the ensemble on the pooled test images and at each site.

    Args:
        folders: Folders of the local models. Models are loaded one at a time, to save memory.
        test: Pooled test images.
        site_tests: Site -> its own test images. Other sites are tested on the pooled images.
    """
    names = contract.class_names
    tests = {"": test, **site_tests}
    scores = {key: np.zeros((len(images), len(names))) for key, images in tests.items()}
    owners = np.zeros(len(names))  # class -> number of models that have the class
    task = ""
    for network in (move_network_to_device(load_model(folder), device) for folder in folders):
        shared = [name for name in names if name in network.class_names]
        rows = [network.class_names.index(name) for name in shared]
        columns = [names.index(name) for name in shared]
        for key, images in tests.items():
            scores[key][:, columns] += _score_images(network, images, device, precision)[:, rows]
        owners[columns] += 1
        task = network.spec.task
    mean = {key: total / owners for key, total in scores.items()}
    labels = select_head_row_labels(test, names).numpy()
    per_site = {}
    for site, annotated in contract.sites.items():
        key = site if site in site_tests else ""
        columns = [names.index(name) for name in annotated]
        site_labels = select_head_row_labels(tests[key], annotated).numpy()
        results = compute_metrics_per_class(mean[key][:, columns], site_labels, annotated)
        per_site[site] = SiteTestResult(mean_auroc=compute_mean_auroc(results), per_class=results)
    per_class = compute_metrics_per_class(mean[""], labels, names)
    pooled = summarise_test_results(per_class, contract.shared_classes, contract.unique_classes, ENSEMBLE_NOTE)
    multi_class = compute_multi_class_metrics(mean[""], labels) if task == "multi_class" else None
    return EnsembleTestResult(test=replace(pooled, multi_class=multi_class), per_site=per_site)


def evaluate_local_models(
    folders: Iterable[Path], contract: LabelContract, images: ImageSet, device: str, precision: Precision
) -> FinalTestSummary:
    """Test each site's local model on its classes; return for each class the mean of the metrics over the sites.

    The models are loaded from ``folders`` one at a time, to save memory.
    """
    metrics_by_class: dict[str, list[ClassMetrics]] = {name: [] for name in contract.class_names}
    for network in (move_network_to_device(load_model(folder), device) for folder in folders):
        labels = select_head_row_labels(images, network.class_names).numpy()
        scores = _score_images(network, images, device, precision)
        for name, metrics in compute_metrics_per_class(scores, labels, network.class_names).items():
            metrics_by_class[name].append(metrics)
    means = {name: average_metrics_over_models(metrics) for name, metrics in metrics_by_class.items()}
    return summarise_test_results(means, contract.shared_classes, contract.unique_classes, LOCAL_MODELS_NOTE)


def _score_images(network: SplitNetwork, images: ImageSet, device: str, precision: Precision) -> NDArray[np.float32]:
    """Return the probabilities of a network's classes, ``(n, classes)``."""
    if not len(images):
        return np.zeros((0, len(network.class_names)), np.float32)
    return compute_image_probabilities(network, load_pixels_on_device(images, device), precision)


def compute_mean_auroc(results: Mapping[str, ClassMetrics]) -> float | None:
    """Return the mean AUROC over the classes that have one; None if no class has."""
    return compute_mean_and_sd(metrics.auroc for metrics in results.values())[0]
