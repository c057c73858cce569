"""Polyclinic's methods as Flower strategies, for your own model, ``ServerApp`` and ``ClientApp``.

A site may label only some of the model's classes. The strategy asks each site once for its classes, with a query that
:func:`labels` answers in the site's ``ClientApp``. A strategy needs the name of the model's last layer (``head``) and
the class of each of its rows (``classes``)::

    strategy = SurgicalAggregation(head="fc2", classes=("atelectasis", "effusion", "mass"))
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=10)

At the site, :class:`Site` provides the loss of the strategy for the classes that the site labels::

    site = Site(message)
    loss = site.loss(model(images), targets)

Each strategy runs one of Polyclinic's methods (``strategies/methods``) without the other parts of Polyclinic: there is
no protection against harmful sites, no quarantine of malformed replies, no checkpoint and no report.
"""

from polyclinic.flower.labels import SiteLabels, UnknownLabels, labels
from polyclinic.flower.site import FedMLPSite, Site
from polyclinic.flower.strategies import (
    FedMLP,
    FedSLD,
    LabelledSites,
    PartialLoss,
    SequentialTraining,
    SurgicalAggregation,
    UniFed,
    VanillaFL,
)
from polyclinic.strategies.local.early_stopping import EarlyStopping
from polyclinic.strategies.methods.unifed import loss_slope

__all__ = [
    "EarlyStopping",
    "FedMLP",
    "FedMLPSite",
    "FedSLD",
    "LabelledSites",
    "PartialLoss",
    "SequentialTraining",
    "Site",
    "SiteLabels",
    "SurgicalAggregation",
    "UniFed",
    "UnknownLabels",
    "VanillaFL",
    "labels",
    "loss_slope",
]
