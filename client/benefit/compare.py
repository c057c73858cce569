"""Comparison of the federated model with training at this site only: four models are scored on the site's test part.

*Alone*: trained by this site only, from the run's initial model, for as many local epochs as the site trained in the
run. *Fine-tuned*: trained further by this site from the federated model, for a quarter of the rounds of *Alone*
(:data:`FINE_TUNING_ROUNDS_DIVISOR`). For both, the round with the best result on the site's validation part is used;
round 0 counts too. *Federated*: the run's model. *Ensemble*: the mean of the probabilities of *Alone* and *Federated*.
A page at the site shows all figures; the policy decides which of them are sent to the coordinator.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from polyclinic.client.benefit.home_training import LocalOnlyTraining, make_local_only_plan
from polyclinic.client.site.site import Site
from polyclinic.client.training.figures import has_protected_local_parts, score_data_part
from polyclinic.client.training.local_round import load_best_local_parts
from polyclinic.client.training.task import LocalTask, prepare_local_task
from polyclinic.common.errors import WireError
from polyclinic.common.metrics.auroc import compute_metrics_per_class
from polyclinic.common.metrics.benefit import (
    COMPARED_SITE_MODELS,
    CONTENDER_MODELS,
    MODEL_LABELS,
    FederationBenefit,
    SiteModel,
    format_benefit_sentence,
)
from polyclinic.common.metrics.bootstrap import EstimateWithInterval, compare_mean_aurocs
from polyclinic.common.models.network import select_head_row_labels
from polyclinic.common.models.state import read_model_state
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.hashing import derive_seed
from polyclinic.common.system.plain_text import format_count_with_noun, format_interval, format_number, format_signed
from polyclinic.common.wire.records import BenefitReply, BenefitRequest, ModelGroups, check_head_row_names
from polyclinic.data.base.image_set import are_all_patients_known
from polyclinic.strategies.local.site_method import compute_largest_epoch_count

LOCAL_TRAINING_FOLDER = "alone"
"""Folder in the site's folder, with the page, figures and two trained models of the last comparison."""
BENEFIT_PAGE_FILE = "does-it-help.txt"
BENEFIT_JSON_FILE = "does-it-help.json"
MODELS_NOTE = (
    "",
    "Both models that were trained here lie beside this page: model/ (alone) and fine-tuned/. They never leave.",
    "One comparison in 40 calls a site better off alone by chance, where both models are equally good.",
)
FINE_TUNING_ROUNDS_DIVISOR = 4
"""Number of rounds of the model *Alone*, divided by the number of rounds of *Fine-tuned*."""

Scores = Mapping[SiteModel, NDArray[np.floating]]
"""Probabilities of each model on the test part, ``(n, classes)``."""


@dataclass(frozen=True)
class FourModelScores:
    """The probabilities that four models give to a site's test images, with the labels of these images.

    Attributes:
        scores: Model -> probabilities, ``(n, classes)``. The models are: trained alone, federated, fine-tuned from the
            federated model, and the ensemble (mean) of alone and federated.
        labels: ``(n, classes)``: 1, 0 or NaN for unknown.
        class_names: The classes that the site annotates, one for each column.
        patients: The patient of each image, ``(n,)``.
    """

    scores: Scores
    labels: NDArray[np.floating]
    class_names: tuple[str, ...]
    patients: NDArray[np.str_]

    def compute_federation_benefit(
        self, site: Site, seed: int, without: frozenset[str] = frozenset()
    ) -> FederationBenefit | None:
        """Compare the four models' AUROCs over the classes that have both positive and negative test images.

        Args:
            seed: The run's seed, from which the bootstrap draws.
            without: Classes to leave out.

        Returns:
            The comparison; None if no class is left.
        """
        has_both_labels = [{0.0, 1.0} <= set(np.unique(column).tolist()) for column in self.labels.T]
        columns = [c for c, name in enumerate(self.class_names) if has_both_labels[c] and name not in without]
        if not columns:
            return None
        names = tuple(self.class_names[c] for c in columns)
        labels = self.labels[:, columns]
        scores: Scores = {model: self.scores[model][:, columns] for model in COMPARED_SITE_MODELS}
        generator = np.random.default_rng(derive_seed(seed, site.name, "benefit"))
        means, gains = compare_mean_aurocs(
            [scores[model] for model in COMPARED_SITE_MODELS], labels, self.patients, generator
        )
        aurocs = dict[SiteModel, dict[str, float]]()
        for model in COMPARED_SITE_MODELS:
            rows = compute_metrics_per_class(scores[model], labels, names)
            aurocs[model] = {name: row.auroc for name, row in rows.items() if row.auroc is not None}
        mean_by_model = dict(zip(COMPARED_SITE_MODELS, means, strict=True))
        gain_by_model = dict(zip(CONTENDER_MODELS, gains, strict=True))
        unit: Literal["patients", "images"] = "patients" if are_all_patients_known(self.patients) else "images"
        return FederationBenefit(aurocs, mean_by_model, gain_by_model, unit)


def compare_with_local_only_training(site: Site, request: BenefitRequest) -> BenefitReply:
    """Compare the federated model with models that only this site trained; return the figures that may leave.

    The figures of all classes are written to a page that stays at the site.

    Raises:
        WireError: If the plan does not ask for this comparison, if a run of this plan cannot have the request's number
            of local epochs, or if the initial model's head rows are not the classes of this site.
        FloatingPointError: If training alone diverged in a simulation.
    """
    task = prepare_local_task(site, request)
    plan = task.plan
    method = task.method
    if not plan.evaluation.compare_local:
        raise WireError("the plan does not ask for a comparison with training alone.")
    if not 0 < request.epochs <= (max_epochs := plan.run.rounds * compute_largest_epoch_count(method, plan)):
        raise WireError(f"a run of at most {max_epochs:,} local epochs is compared with {request.epochs:,} alone.")
    check_head_row_names(request.initial.head, site.declaration.canonical_names)

    policy = site.policy
    privacy = plan.privacy
    # Both models are trained here without noise, so their figures are unnoised.
    are_withheld = policy.withholds_unnoised_figures(privacy.level)
    # The figures of one site would disclose what secure aggregation hides in a sum.
    are_masked = privacy.secure_aggregation and not site.simulated
    figures_leave = policy.test_metrics and not (are_withheld or are_masked or has_protected_local_parts(task))

    if not len(site.test):
        write_site_benefit_files(site, request.run, request.epochs, None)
        return make_withheld_benefit_reply(site, request)
    seed = plan.run.seed
    try:
        scores = _train_and_score_four_models(task, request, figures_leave=figures_leave)
        benefit = scores.compute_federation_benefit(site, seed)
    except Exception as error:
        if site.simulated:
            raise
        # A failure can depend on one patient's image, so the coordinator gets the same reply as without one.
        site.tell(f"the comparison with training alone failed: {error}")
        return make_withheld_benefit_reply(site, request)

    write_site_benefit_files(site, request.run, request.epochs, benefit)
    hidden = site.hidden_classes("test")
    released = scores.compute_federation_benefit(site, seed, hidden) if hidden and figures_leave else benefit
    if not figures_leave or released is None:
        return make_withheld_benefit_reply(site, request)
    return BenefitReply(
        request.run,
        request.round,
        site.name,
        released.compared_classes,
        tuple(released.auroc[model][name] for model in COMPARED_SITE_MODELS for name in released.compared_classes),
        **_make_estimate_columns("mean", [released.mean[model] for model in COMPARED_SITE_MODELS]),
        **_make_estimate_columns("gain", [released.gain[model] for model in CONTENDER_MODELS]),
        over_patients=released.over == "patients",
    )


def make_withheld_benefit_reply(site: Site, request: BenefitRequest) -> BenefitReply:
    """Return a reply without figures, for a site that may not, or cannot, send any figure of the comparison."""
    return BenefitReply(request.run, request.round, site.name)


def _make_estimate_columns(name: str, estimates: list[EstimateWithInterval]) -> dict[str, tuple[float, ...]]:
    return {
        name: tuple(estimate.value for estimate in estimates),
        f"{name}_low": tuple(estimate.interval[0] for estimate in estimates),
        f"{name}_high": tuple(estimate.interval[1] for estimate in estimates),
    }


def _train_and_score_four_models(task: LocalTask, request: BenefitRequest, *, figures_leave: bool) -> FourModelScores:
    """Train one model from the initial model and one from the federated model; score the test part with four models.

    The other two models are the federated model, and the ensemble of the first model and the federated model.

    Args:
        figures_leave: True if figures of the models may be sent to the coordinator.
    """
    site = task.site
    plan = task.plan
    method = task.method
    with task.use_seed_of(site.name, "home"):
        if method.parts.keeps_local_parts:
            load_best_local_parts(task, request, task.validate_current_network())
        federated, _, federated_names = score_data_part(task, "test")
    model = read_model_state(task.network)  # a copy: the networks that are trained next share its tensors
    federated_groups = ModelGroups(model.trunk, model.norm, model.head.select_rows(site.declaration.canonical_names))
    local_site = site.copy_site_for_local_training(
        site.folder / LOCAL_TRAINING_FOLDER, plan, figures_leave=figures_leave
    )
    rounds = math.ceil(request.epochs / plan.training.epochs)
    tuning_rounds = max(rounds // FINE_TUNING_ROUNDS_DIVISOR, 1)
    alone_plan = make_local_only_plan(plan, method, rounds, warm_up=True)
    tuning_plan = make_local_only_plan(plan, method, tuning_rounds, warm_up=False)
    training = LocalOnlyTraining(local_site, alone_plan, request.initial)
    tuning = LocalOnlyTraining(local_site, tuning_plan, federated_groups)
    alone, names = training.train_and_score_local_model(local_site.folder / "model", request.contract)
    tuned, _ = tuning.train_and_score_local_model(local_site.folder / "fine-tuned", request.contract)
    federated = federated[:, [federated_names.index(name) for name in names]]
    ensemble = (alone.astype(np.float64) + federated) / 2
    scores: Scores = {"alone": alone, "federated": federated, "fine_tuned": tuned, "ensemble": ensemble}
    return FourModelScores(scores, select_head_row_labels(site.test, names).numpy(), names, site.test.patients)


# ---------------------------------------------------------------------- the site's own page


def write_site_benefit_files(site: Site, run: str, epochs: int, benefit: FederationBenefit | None) -> None:
    """Write page and JSON figures of the comparison with training alone, and print its result for the hospital's staff.

    Args:
        epochs: Number of local epochs for which the site trained alone.
        benefit: The comparison over all classes; None if no class has both positive and negative test images.
    """
    annotated = site.declaration.canonical_names
    if benefit is None:
        none = "no class has both a positive and a negative test image here"
        sentence = f"Whether {site.name} is better off alone or with the federation cannot be told: {none}."
    else:
        sentence = format_benefit_sentence(site.name, benefit, annotated)

    table = list[str]()
    if benefit is not None:  # a line for each model and a column for each class
        heads = ("model", "mean AUROC", "95 % interval", "minus alone", "95 % interval", *benefit.compared_classes)
        rows = [heads]
        for model in COMPARED_SITE_MODELS:
            mean = benefit.mean[model]
            gain = benefit.gain.get(model)
            over = (
                ("", "")
                if gain is None
                else (format_signed(gain.value), " to ".join(map(format_signed, gain.interval)))
            )
            aurocs = [format_number(benefit.auroc[model][name]) for name in benefit.compared_classes]
            rows.append(
                (MODEL_LABELS[model], format_number(mean.value), format_interval(mean.interval), *over, *aurocs)
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
        table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]

    folder = site.folder / LOCAL_TRAINING_FOLDER
    about = f"Run {run}. Trained alone for {format_count_with_noun(epochs, 'local epoch')}, as many as in the run."
    text = "\n".join([sentence, "", about, "", *table, *MODELS_NOTE])
    figures = {"run": run, "site": site.name, "epochs": epochs, "benefit": benefit and asdict(benefit)}
    write_atomically(folder / BENEFIT_PAGE_FILE, f"{text}\n".encode(), durable=site.durable, private=True)
    write_atomically(
        folder / BENEFIT_JSON_FILE, json.dumps(figures, indent=2).encode(), durable=site.durable, private=True
    )
    site.tell(f"{sentence} More in {folder / BENEFIT_PAGE_FILE}")
