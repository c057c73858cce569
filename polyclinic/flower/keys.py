"""Keys of the ``ConfigRecord`` that a strategy sends with the model, and of what comes back."""

CLASSES, ANNOTATED, MISSING, TASK, PRIOR = (
    "polyclinic-classes",
    "polyclinic-annotated",
    "polyclinic-missing",
    "polyclinic-task",
    "polyclinic-prior",
)
REDUCTION = "polyclinic-reduction"
FEDMLP = "polyclinic-fedmlp"
"""Key of FedMLP's parameters as JSON; name of the record with its prototypes; name of the tags in a site's state."""
SLOPE = "loss-slope"
"""In a site's ``MetricRecord``: :func:`polyclinic.flower.loss_slope` of its training."""
HEAD, START = "polyclinic-head", "polyclinic-start"
"""Name of the model's last layer, and a mark of this start: FedMLP's tags of another one are not used."""
