"""The site's half of the comparison: four models on its own test part, for its own eyes, and what of it may leave.

Trained alone: from the model that the run began with, for as many local epochs as the site trained in the run.
Fine-tuned: from the federated model, a quarter as many rounds (:data:`FINE_TUNED_SHARE`). In both the round with the
best validation figures of the site is taken, that before the first included. The ensemble is the mean of the
probabilities of the model trained alone and of the federated one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from client.benefit.home_training import HomeTraining, plan_at_home
from client.benefit.page import FOLDER, write_page
from client.site.site import Site
from client.training.evaluate_round import put_best
from client.training.figures import covers_local_parts, scored
from client.training.model_and_images import Work, unpack, validated
from common.data.base.image_set import are_known
from common.metrics.auroc import per_class
from common.metrics.benefit import MODELS, OVER_ALONE, Benefit, SiteModel
from common.metrics.bootstrap import Estimate, paired_means
from common.models.inference import label_matrix
from common.models.state import ModelState, read_state
from common.system.seeds import seed_of
from common.wire.benefit import BenefitReply, BenefitRequest
from common.wire.errors import WireError
from common.wire.records import Groups
from common.wire.roll_call import check_rows
from strategies.local.site_method import most_epochs
from strategies.local.training import reproducible

FINE_TUNED_SHARE = 4
"""Fine-tuning takes one of so many of the rounds that training alone takes."""

Scores = Mapping[SiteModel, NDArray[np.floating]]
"""Probabilities of each model on the test part, ``(n, classes)``."""


@dataclass(frozen=True)
class Scored:
    """The test part as four models see it.

    Attributes:
        labels: ``(n, classes)``: 1, 0 or NaN for unknown.
        class_names: The columns: the classes that the site annotates.
        patients: ``(n,)``.
    """

    scores: Scores
    labels: NDArray[np.floating]
    class_names: tuple[str, ...]
    patients: NDArray[np.str_]

    def benefit(self, site: Site, seed: int, without: frozenset[str] = frozenset()) -> Benefit | None:
        """Compare the models over the classes that have both kinds of image; None where no class has."""
        both = [{0.0, 1.0} <= set(np.unique(column).tolist()) for column in self.labels.T]
        columns = [c for c, name in enumerate(self.class_names) if both[c] and name not in without]
        if not columns:
            return None
        names, labels = tuple(self.class_names[c] for c in columns), self.labels[:, columns]
        scores: Scores = {model: self.scores[model][:, columns] for model in MODELS}
        generator = np.random.default_rng(seed_of(seed, site.name, "benefit"))
        patients = self.patients
        means, gains = paired_means([scores[model] for model in MODELS], labels, patients, generator)
        return Benefit(
            {model: _aurocs(scores[model], labels, names) for model in MODELS},
            dict(zip(MODELS, means, strict=True)),
            dict(zip(OVER_ALONE, gains, strict=True)),
            "patients" if are_known(patients) else "images",
        )


def _aurocs(scores: NDArray[np.floating], labels: NDArray[np.floating], names: tuple[str, ...]) -> dict[str, float]:
    found = per_class(scores, labels, names)
    return {name: one.auroc for name, one in found.items() if one.auroc is not None}


def compare(site: Site, request: BenefitRequest) -> BenefitReply:
    """Compare the federated model with one trained alone; write the site's own page; answer as its policy allows.

    Raises:
        WireError: If the plan does not ask for it, or for fewer epochs, or the model to begin with has other head rows
            than the site's own classes.
        FloatingPointError: If training alone diverged in a simulation.
    """
    work = unpack(site, request)
    plan, method = work.plan, work.method
    if not plan.evaluation.alone:
        raise WireError("the plan does not ask for a comparison with training alone.")
    if not 0 < request.epochs <= (most := plan.run.rounds * most_epochs(method, plan)):
        raise WireError(f"a run of at most {most:,} local epochs is compared with {request.epochs:,} alone.")
    check_rows(request.initial.head, site.declaration.canonical)
    figures_leave = _figures_leave(work)
    if not len(site.test):
        write_page(site, request.run, request.epochs, None)
        return no_figures(site, request)
    seed = plan.run.seed
    try:
        scores = _scored(work, request, figures_leave=figures_leave)
        benefit = scores.benefit(site, seed)
    except Exception as error:
        if site.simulated:
            raise
        # Whether it fails, and how, can hang on one patient's image: the coordinator hears the same either way.
        site.tell(f"the comparison with training alone failed: {error}")
        return no_figures(site, request)
    write_page(site, request.run, request.epochs, benefit)
    if not figures_leave:
        return no_figures(site, request)
    hidden = site.hides("test")
    return _reply(site, request, scores.benefit(site, seed, hidden) if hidden else benefit)


def no_figures(site: Site, request: BenefitRequest) -> BenefitReply:
    """Return a reply that says that the site was there, and nothing of its data."""
    return BenefitReply(request.run, request.round, site.name)


def _reply(site: Site, request: BenefitRequest, benefit: Benefit | None) -> BenefitReply:
    """Return the reply with the comparison over classes that are not hidden; None where there is none."""
    if benefit is None:
        return no_figures(site, request)
    return BenefitReply(
        request.run,
        request.round,
        site.name,
        benefit.classes,
        tuple(benefit.auroc[model][name] for model in MODELS for name in benefit.classes),
        **_columns("mean", [benefit.mean[model] for model in MODELS]),
        **_columns("gain", [benefit.gain[model] for model in OVER_ALONE]),
        over_patients=benefit.over == "patients",
    )


def _columns(name: str, estimates: list[Estimate]) -> dict[str, tuple[float, ...]]:
    return {
        name: tuple(one.value for one in estimates),
        f"{name}_low": tuple(one.interval[0] for one in estimates),
        f"{name}_high": tuple(one.interval[1] for one in estimates),
    }


def _figures_leave(work: Work) -> bool:
    """Check whether figures of models that are trained here, on bare data, may leave in such a run."""
    policy, privacy = work.site.policy, work.plan.privacy
    outside = privacy.level != "none" and not policy.metrics_outside_privacy
    masked = privacy.secure_aggregation and not work.site.simulated  # what masks cover these would tell
    return policy.test_metrics and not (outside or masked or covers_local_parts(work))


def _scored(work: Work, request: BenefitRequest, *, figures_leave: bool) -> Scored:
    """Score the test part with all four models; two of them are trained here."""
    site, plan, method = work.site, work.plan, work.method
    federated, model, held = _federated(work, request)
    tuned_from = Groups(model.trunk, model.norm, model.head.rows(site.declaration.canonical))
    home = site.for_itself(site.folder / FOLDER, plan, figures_leave=figures_leave)
    rounds = math.ceil(request.epochs / plan.training.epochs)
    short_rounds = max(rounds // FINE_TUNED_SHARE, 1)
    whole = plan_at_home(plan, method, rounds, warm_up=True)
    short = plan_at_home(plan, method, short_rounds, warm_up=False)
    alone, names = HomeTraining(home, whole, request.initial).scores(home.folder / "model", request.contract)
    tuned, _ = HomeTraining(home, short, tuned_from).scores(home.folder / "fine-tuned", request.contract)
    federated = federated[:, [held.index(name) for name in names]]
    both = (alone.astype(np.float64) + federated) / 2
    scores: Scores = {"alone": alone, "federated": federated, "fine_tuned": tuned, "ensemble": both}
    return Scored(scores, label_matrix(site.test, names).numpy(), names, site.test.patients)


def _federated(work: Work, request: BenefitRequest) -> tuple[NDArray[np.floating], ModelState, tuple[str, ...]]:
    """Scores of the run's model, with the site's own parts where the method leaves any there; the model; its classes.

    They are copies: the networks that are trained next share its tensors.
    """
    with reproducible(seed_of(work.plan.run.seed, work.site.name, "home"), work.plan.training.threads):
        if work.method.keeps_local_parts:
            put_best(work, request, validated(work, work.examples("validation")))
        scores, _, names = scored(work, "test")
    return scores, read_state(work.network), names
