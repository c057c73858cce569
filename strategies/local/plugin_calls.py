"""A trial call of each of a run's plug-ins before the first round, so that a faulty plug-in is reported early."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyclinic.common.config import Experiment
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.metrics.auroc import compute_plugin_metric, load_plugin_metrics
from polyclinic.common.models.zoo.spec import Task
from polyclinic.common.plugins import (
    LOSSES,
    PLUGIN_PREFIX,
    TRANSFORMS,
    format_plugin_user_name,
    load_plugin_entry_point,
)
from polyclinic.data.images.augmentation import augment_images_weakly
from polyclinic.data.images.user_transform import takes_batch_and_generator
from polyclinic.strategies.local.losses import PLAIN_LOSSES, Missing, adapt_plugin_loss, make_training_loss
from polyclinic.strategies.local.optimisation import compute_learning_rate_factor, make_optimizer

_TRIAL_IMAGES = 4
_TRANSFORM_TRIALS = 8
"""Number of trial calls of a transform, each with another seed: a random transform may leave some images unchanged."""
_SIGNATURES = {
    "loss": "A loss is called as loss(logits, labels, annotated): logits and labels (batch, classes), unknown labels"
    " NaN; annotated (classes,). Or as loss(logits, labels) with the classes that a site annotates. It returns a scalar"
    " tensor.",
    "transform": "A transform is called with float pixels from 0 to 255, and returns as many: as"
    " transform(images, generator) with (batch, channels, height, width), if it needs two arguments; else as"
    " transform(image) with (channels, height, width).",
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
        if not name.startswith(PLUGIN_PREFIX):
            continue
        where = format_plugin_user_name(argument, name)
        usage = _SIGNATURES[argument]
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
    """Call a loss as at a site that annotates all classes, and as at the site that annotates the fewest."""
    _refuse_class_or_softmax(experiment)
    few = site_labels.fewest_classes
    lacks = site_labels.fewest_classes < classes
    annotated = torch.ones(classes, dtype=torch.bool)
    has_unknown = site_labels.has_unknown or (site_labels.is_pooled and lacks)
    _test_plugin_loss_once(experiment, missing, annotated, has_unknown=has_unknown)
    if not lacks or site_labels.is_pooled:
        return
    if site_labels.has_rows_of_all_classes:
        annotated[few:] = False
    else:
        annotated = annotated[:few]
    try:
        _test_plugin_loss_once(experiment, missing, annotated, has_unknown=has_unknown)
    except BadInput:
        raise
    except (Exception, SystemExit) as error:  # somebody else's code: it may raise anything
        loss = load_plugin_entry_point(LOSSES, experiment.training.loss.removeprefix(PLUGIN_PREFIX))
        gets_all = site_labels.has_rows_of_all_classes and adapt_plugin_loss(loss) is loss
        raise BadInput([_make_few_classes_fault(experiment, (few, classes), error, gets_all=gets_all)]) from error


def _make_few_classes_fault(
    experiment: Experiment, counts: tuple[int, int], error: BaseException, *, gets_all: bool
) -> Fault:
    """Return the fault of a loss that works with all classes but fails at a site that annotates fewer.

    Args:
        counts: Number of classes of the site, and of the run.
        gets_all: True if the loss gets a column for each class of the run.
    """
    few, classes = counts
    problem = f"fails at a site that annotates {few} of {classes} classes: {type(error).__name__}: {error}"
    if gets_all:
        return Fault("", problem.rstrip(".") + ".")
    remedy = (
        f'With run.method = "{experiment.run.method}" this loss gets the columns of the classes that the site '
        "annotates, and no others: tensors with an entry for each class of the run do not fit. For weights of classes "
        'leave loss= out: settings={"training.class_weights": True} counts them at each site.'
    )
    return Fault("", problem.rstrip(".") + ".", remedy)


def _refuse_class_or_softmax(experiment: Experiment) -> None:
    """Refuse a loss that is a class, or that trains a softmax of which the task reads sigmoids.

    Raises:
        BadInput: If the loss is one of these.
    """
    loss = load_plugin_entry_point(LOSSES, experiment.training.loss.removeprefix(PLUGIN_PREFIX))
    _refuse_class("loss", loss)
    if experiment.model.task == "multi_label" and _is_softmax_loss(loss):
        problem = (
            'trains a softmax over the classes, and model.task = "multi_label" reads each score by a sigmoid: '
            "the test and all predictions would be of probabilities that were not trained."
        )
        remedy = 'If each image shows one class, settings={"model.task": "multi_class"} reads a softmax. If not, use '
        raise BadInput([Fault("", problem, f"{remedy}loss=torch.nn.BCEWithLogitsLoss().")])


def _refuse_class(argument: str, part: Any) -> None:
    """Refuse a class given instead of an object of it, because a call would only make an object."""
    if isinstance(part, type):
        remedy = f"Pass an object of it: {argument}={part.__name__}()."
        raise BadInput([Fault("", f"is the class {part.__name__}, and its call makes an object.", remedy)])


def _is_softmax_loss(loss: Any) -> bool:
    """Return True if a loss is known to take a softmax over the classes: torch's, and those of MONAI that say so."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    if loss is functional.cross_entropy or isinstance(loss, nn.CrossEntropyLoss):
        return True
    says_so = (getattr(loss, name, None) is True for name in ("use_softmax", "softmax"))
    return isinstance(loss, nn.Module) and any(says_so)


def describe_softmax_like_loss(experiment: Experiment, classes: int, missing: Missing) -> str:
    """Return a note if a loss of a multi-label task depends on differences between an image's scores alone; else "".

    Such a loss does not change if all scores of an image rise by one number, as a softmax over the classes does not.
    The test reads each score by itself.

    Args:
        classes: Number of classes of the run.
        missing: How the loss treats classes that a site does not annotate.
    """
    name = experiment.training.loss
    task = experiment.model.task
    if not name.startswith(PLUGIN_PREFIX) or task != "multi_label" or classes < 2:
        return ""
    labels = torch.eye(classes)[torch.arange(_TRIAL_IMAGES) % classes]
    logits = _make_trial_logits(classes)
    annotated = torch.ones(classes, dtype=torch.bool)
    shifts = torch.tensor([0.5, -1.0, 2.0, -0.25])[:, None]  # of each image
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        loss = make_training_loss(experiment.training, PLAIN_LOSSES[task, missing], task, missing, labels)
        value = loss(logits, labels, annotated)
        shifted = loss(logits + shifts, labels, annotated)
    if not torch.allclose(value, shifted, rtol=1e-4):
        return ""
    return (
        f"{format_plugin_user_name('loss', name)} does not change if all scores of an image rise by one number, as "
        'with a softmax over the classes. With model.task = "multi_label" tests and predictions read each score by '
        'itself, through a sigmoid. If each image shows one class, set model.task = "multi_class".'
    )


def is_transform_repeatable(experiment: Experiment) -> bool:
    """Return False if a plug-in's transform changes the same images in another way with the same seed."""
    if experiment.augmentation.transform is None:
        return True
    with torch.random.fork_rng(devices=[]):
        return all(
            torch.equal(_transform_trial_images(experiment, seed), _transform_trial_images(experiment, seed))
            for seed in range(_TRANSFORM_TRIALS)
        )


def _transform_trial_images(experiment: Experiment, seed: int) -> Tensor:
    """Return images of noise, ``(4, channels, height, width)`` in 0..255, after the augmentation."""
    model = experiment.model
    generator = torch.Generator().manual_seed(seed)
    images = 255 * torch.rand(_TRIAL_IMAGES, *model.input_shape, generator=generator)
    return augment_images_weakly(images, experiment.augmentation, generator)


def _test_plugin_transform(experiment: Experiment) -> None:
    """Call a transform with several seeds.

    Raises:
        BadInput: If it is a class, returns something else than images, or makes pixels from 0 to 1.
    """
    name = experiment.augmentation.transform or ""
    transform = load_plugin_entry_point(TRANSFORMS, name.removeprefix(PLUGIN_PREFIX))
    _refuse_class("transform", transform)
    for seed in range(_TRANSFORM_TRIALS):
        images = _transform_trial_images(experiment, seed)
        if bool((images.amax((1, 2, 3)) <= 1).any()):
            problem = "makes pixels of at most 1 from pixels from 0 to 255: the network would see black pictures."
            line = "lambda image: 255 * NAME(image / 255)"
            if takes_batch_and_generator(transform):
                line = "lambda images, generator: 255 * NAME(images / 255, generator)"
            remedy = f"If it expects pixels from 0 to 1, write {line}, with yours as NAME."
            raise BadInput([Fault("", problem, remedy)])


def _make_trial_logits(classes: int) -> Tensor:
    return torch.linspace(-1, 1, _TRIAL_IMAGES * classes).reshape(_TRIAL_IMAGES, classes)


def _test_plugin_loss_once(experiment: Experiment, missing: Missing, annotated: Tensor, *, has_unknown: bool) -> None:
    """Call a loss once, with labels of the annotated classes of which one is unknown if ``has_unknown`` is True.

    Args:
        annotated: Mask of the classes that a site annotates, ``(classes,)``.
    """
    task: Task = experiment.model.task
    classes = len(annotated)
    own = int(annotated.sum())
    labels = torch.eye(classes)[torch.arange(_TRIAL_IMAGES) % own]
    if task == "multi_label":
        labels[:, ~annotated] = torch.nan
        if has_unknown:
            labels[0, 0] = torch.nan
    loss = make_training_loss(experiment.training, PLAIN_LOSSES[task, missing], task, missing, labels)
    logits = _make_trial_logits(classes).requires_grad_()
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
    training = experiment.training
    match argument:
        case "transform":
            _test_plugin_transform(experiment)
        case "optimizer":
            network = nn.Linear(2, 2, device="cpu")
            optimizer = make_optimizer(network, training, training.lr)
            network(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        case "schedule":
            for server_round in range(1, experiment.run.rounds + 1):
                compute_learning_rate_factor(training, server_round, experiment.run.rounds)
        case "metrics":
            metric = load_plugin_metrics([name])[name]
            scores = np.linspace(0.1, 0.9, 40)
            labels = np.arange(40) % 2.0
            compute_plugin_metric(name, metric, scores, labels)
