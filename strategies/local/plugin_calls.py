"""A trial call of each of a run's plug-ins before the first round, so that a faulty plug-in is reported early."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from polyclinic.common.config import Experiment
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.metrics.auroc import compute_plugin_metric, load_plugin_metrics
from polyclinic.common.models.zoo.spec import Task
from polyclinic.common.plugins import PLUGIN, format_plugin_user_name
from polyclinic.data.images.augmentation import augment_images_weakly
from polyclinic.strategies.local.losses import PLAIN_LOSSES, Missing, make_training_loss
from polyclinic.strategies.local.optimisation import compute_learning_rate_factor, make_optimizer

_IMAGES = 4
_SIGNATURES = {
    "loss": "A loss is called as loss(logits, labels, annotated), each (images, classes) but annotated (classes,), or"
    " as loss(logits, labels) with the classes that a site annotates. It returns a scalar tensor; unknown labels are"
    " NaN.",
    "transform": "A transform is called as transform(images, generator) with float pixels"
    " (images, channels, height, width), and returns as many.",
    "optimizer": "An optimiser is made by optimizer(parameters, lr=..., weight_decay=...).",
    "schedule": "A schedule is called as schedule(server_round, rounds) and returns a factor of 0 or more.",
    "metrics": "A metric is called as metric(scores, labels) for each class and returns a number; if its first argument"
    " is y_true, as in scikit-learn, as metric(labels, scores).",
}


@dataclass(frozen=True)
class SiteLabels:
    """The labels that a loss gets at the sites of a run.

    Attributes:
        fewest_classes: The smallest number of classes that a site annotates.
        has_unknown: True if some labels of annotated classes are unknown.
        has_rows_of_all_classes: True if a site's network scores all classes; else only those that the site annotates.
        is_pooled: True if the images of all sites are in one place, with the labels that each site has.
    """

    fewest_classes: int
    has_unknown: bool = False
    has_rows_of_all_classes: bool = True
    is_pooled: bool = False


def find_plugin_faults(experiment: Experiment, classes: int, missing: Missing, site_labels: SiteLabels) -> list[Fault]:
    """Try each plug-in (loss, transform, optimiser, schedule, metrics) in a call; return the faults of those that fail.

    Args:
        classes: Number of classes of the run.
        missing: How the loss treats classes that a site does not annotate.
        site_labels: The labels that a loss gets.
    """
    named = [
        ("loss", experiment.training.loss),
        ("transform", experiment.augmentation.transform or ""),
        ("optimizer", experiment.training.optimizer),
        ("schedule", experiment.training.schedule),
        *(("metrics", name) for name in experiment.evaluation.metrics),
    ]
    faults = []
    for argument, name in named:
        if not name.startswith(PLUGIN):
            continue
        where, usage = format_plugin_user_name(argument, name), _SIGNATURES[argument]
        try:
            with torch.random.fork_rng(devices=[]):
                if argument == "loss":
                    _test_plugin_loss(experiment, classes, missing, site_labels)
                else:
                    _test_plugin(argument, name, experiment)
        except BadInput as bad:
            for fault in bad.faults:
                faults.append(Fault(where, fault.problem.replace(f'"{name}" ', ""), fault.remedy or usage))
        except (Exception, SystemExit) as error:  # somebody else's code: it may raise anything
            problem = f"fails at its first call: {type(error).__name__}: {error}".rstrip(".") + "."
            faults.append(Fault(where, problem, usage))
    return faults


def _test_plugin_loss(experiment: Experiment, classes: int, missing: Missing, site_labels: SiteLabels) -> None:
    """Call a loss as a site does that annotates all classes, and as the one does that annotates the fewest."""
    few, lacks = site_labels.fewest_classes, site_labels.fewest_classes < classes
    annotated = torch.ones(classes, dtype=torch.bool)
    has_unknown = site_labels.has_unknown or (site_labels.is_pooled and lacks)
    _test_plugin_loss_once(experiment, missing, annotated, has_unknown=has_unknown)
    if not lacks or site_labels.is_pooled:
        return
    if site_labels.has_rows_of_all_classes:
        annotated[few:] = False
        _test_plugin_loss_once(experiment, missing, annotated, has_unknown=has_unknown)
    else:
        _test_plugin_loss_once(experiment, missing, annotated[:few], has_unknown=has_unknown)


def _test_plugin_loss_once(experiment: Experiment, missing: Missing, annotated: Tensor, *, has_unknown: bool) -> None:
    """Call a loss once, with labels of the annotated classes of which one is unknown if ``has_unknown`` is True.

    Args:
        annotated: Mask of the classes that a site annotates, ``(classes,)``.
    """
    task: Task = experiment.model.task
    classes, own = len(annotated), int(annotated.sum())
    labels = torch.eye(classes)[torch.arange(_IMAGES) % own]
    if task == "multi_label":
        labels[:, ~annotated] = torch.nan
        if has_unknown:
            labels[0, 0] = torch.nan
    loss = make_training_loss(experiment.training, PLAIN_LOSSES[task, missing], task, missing, labels)
    logits = torch.linspace(-1, 1, _IMAGES * classes).reshape(_IMAGES, classes).requires_grad_()
    value: Tensor = loss(logits, labels, annotated)
    if not value.isfinite():
        reason = " where a label is unknown (NaN)" if labels.isnan().any() else ""
        line = "known = ~labels.isnan(), then the loss of logits[known] and labels[known]."
        raise BadInput([Fault("", f"returns {value.item()}{reason}.", f"Leave unknown labels out: {line}")])
    if value.grad_fn is None:
        raise BadInput([Fault("", "returns a value that does not depend on the logits, so nothing is trained.")])
    if task == "multi_label":  # batches as they come: of images that show no class, and of images that show all
        for label, shown in ((0.0, "no class"), (1.0, "all classes")):
            extreme: Tensor = loss(logits, torch.where(labels.isnan(), torch.nan, label), annotated)
            if not extreme.isfinite():
                problem = f"returns {extreme.item()} for a batch of images that show {shown}."
                raise BadInput([Fault("", problem, "A mean over no entry is NaN: divide its sum by at least 1.")])


def _test_plugin(argument: str, name: str, experiment: Experiment) -> None:
    model, training = experiment.model, experiment.training
    match argument:
        case "transform":
            images = torch.full((_IMAGES, model.channels, model.image_size, model.image_size), 127.0)
            augment_images_weakly(images, experiment.augmentation, torch.Generator().manual_seed(0))
        case "optimizer":
            network = nn.Linear(2, 2, device="cpu")
            optimizer = make_optimizer(network, training, training.lr)
            network(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        case "schedule":
            for server_round in range(1, experiment.run.rounds + 1):
                compute_learning_rate_factor(training, server_round, experiment.run.rounds)
        case "metrics":
            metric, scores, labels = load_plugin_metrics([name])[name], np.linspace(0.1, 0.9, 40), np.arange(40) % 2.0
            compute_plugin_metric(name, metric, scores, labels)
