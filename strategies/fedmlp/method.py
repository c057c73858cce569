"""FedMLP, both halves.

Sun, Wu, Shi, Yu, Yang, Cheng, Yan: "FedMLP: Federated Multi-label Medical Image Classification under Task
Heterogeneity", MICCAI 2024 (specs 3). Each site labels some classes; its labels of the others are missing.

Stage 1, rounds 1 to ``stage_one_rounds``: the weighted partial-class loss (its own classes, logits adjusted by how
often the site sees each), and consistency with the received model on the classes it does not label. Stage 2: each
image whose feature is much nearer to one of the two global prototypes of a missing class is tagged with that label, for
ever; tags are trained on like labels, the rest stays consistent with the received model.

Hospital: tags, in its own memory; after training from the last round of stage 1 on, its prototypes and, for the classes
that it does not label, the *difficulty*. Coordinator: FedAvg, and the means of prototypes and difficulties.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from common.errors import Fault
from common.models.inference import features_and_logits
from common.models.network import SplitNetwork
from common.wire.records import Arrays, TrainReply
from strategies.aggregation.mean import HeadMean, WholeHeadMean
from strategies.aggregation.means import Weighting
from strategies.base.method import (
    Method,
    Parameters,
    Statistic,
    Traffic,
    without_local_norm,
)
from strategies.base.round_context import RoundContext, finite_by_name
from strategies.fedmlp.detection import Rounding, Tags, share_tagged, tags, with_tags, z_scores
from strategies.fedmlp.losses import first_stage, second_stage
from strategies.fedmlp.prior import adjustment_of
from strategies.fedmlp.prototypes import cosines, difficulty, global_statistics, local_prototypes
from strategies.local.losses import Loss, loss_for
from strategies.local.objective import LocalRound, Situation, fixed_copy
from strategies.local.training import Batch, Losses
from strategies.surgical import OwnersMean


class FedMLPParameters(Parameters):
    """The ``[method]`` table.

    Attributes:
        stage_one_rounds: Rounds before the first tags; the authors' t1 is 50.
        tag_rate_negative, tag_rate_positive: T0 and T1: share tagged in a round at difficulty 1.
        sure_below, sure_above: L and R: probabilities outside are sure.
        rounding: ``ceil`` tags at least one image of each sign, as a small site needs; ``floor`` is the authors'.
        weighted_partial_loss: Else missing counts as negative, unadjusted (ablation: WPC).
        detection: Tag missing labels at all (ablation: MLD).
        self_adaptive: The rates are multiplied by the difficulty (ablation: SAT).
        consistency, consistency_stage_one: Stay near the received model where there is no label (ablation: CR).
        prototype_weighting: Of the sites' prototypes.
        heads: ``own``: a class's head row is averaged over the sites that label it only, as in surgical aggregation.
    """

    weighting: Weighting = "samples"
    stage_one_rounds: int = Field(50, ge=1)
    tag_rate_negative: float = Field(0.005, ge=0, le=1)
    tag_rate_positive: float = Field(0.01, ge=0, le=1)
    sure_below: float = Field(0.3, ge=0, le=1)
    sure_above: float = Field(0.7, ge=0, le=1)
    rounding: Rounding = "ceil"
    weighted_partial_loss: bool = True
    detection: bool = True
    self_adaptive: bool = True
    consistency: bool = True
    consistency_stage_one: bool = True
    prototype_weighting: Weighting = "samples"
    heads: Literal["all", "own"] = "all"

    @model_validator(mode="after")
    def _sure_at_both_ends(self) -> Self:
        if self.sure_below > self.sure_above:
            raise ValueError(f"sure_below, {self.sure_below}, must not lie above sure_above, {self.sure_above}")
        return self

    @model_validator(mode="after")
    def _consistency_has_entries(self) -> Self:
        if self.consistency and not self.weighted_partial_loss:
            raise ValueError(
                "consistency makes no sense without weighted_partial_loss: missing counts as negative then, "
                "and no entry is left that has no target; set consistency = false too"
            )
        return self


class FedMLP(Method):
    """FedAvg; besides, the means of the sites' prototypes (eq. 6) and difficulties (eq. 10) go back to all."""

    name = "fedmlp"
    table = FedMLPParameters
    parameters: FedMLPParameters
    declared = Traffic(
        statistics=(
            Statistic(
                "prototypes",
                "signs",
                "mean features of each class's images, present and absent; of one image, that image's",
            ),
            Statistic("difficulty", "images", "of each class, on what share of images the model is sure"),
        )
    )
    plain_client = False
    looks_at_images = True
    chooses_loss = False
    multi_class = False

    @property
    def traffic(self) -> Traffic:
        """``heads = "own"``: a site sends the rows of its own classes only."""
        return replace(self.declared, sends_rows=self.parameters.heads)

    @property
    def head_mean(self) -> HeadMean:
        """``heads = "own"``: over a class's owners, as in surgical aggregation."""
        return OwnersMean if self.parameters.heads == "own" else WholeHeadMean

    @property
    def loss(self) -> Loss:
        """Cross-entropy on the site's own classes; without the weighted partial loss missing counts as negative."""
        return loss_for(self.task, "masked" if self.parameters.weighted_partial_loss else "negative")

    def statistics_for(self, known: RoundContext) -> Callable[[str], Arrays]:
        """The global prototypes and difficulties."""
        return lambda site: known.statistics

    def statistics_shape(self, known: RoundContext, site: str, features: int) -> Mapping[str, tuple[int, ...]]:
        """Both, from the last round of stage 1 on."""
        return expected(known, features, self.parameters)

    def aggregate_statistics(self, known: RoundContext, replies: Mapping[str, TrainReply]) -> Arrays:
        """This round's global prototypes and difficulties."""
        return learned(known, replies, self.parameters)

    def round_figures(self, known: RoundContext) -> Mapping[str, Any]:
        """Each class's difficulty."""
        return difficulty_noted(known)

    def summary_figures(self, known: RoundContext) -> Mapping[str, Any]:
        """How much the global prototypes are alike."""
        return prototypes_noted(known)

    def contradictions(self) -> list[Fault]:
        """The teacher is the model of all."""
        why = "its teacher is the model of all"
        return [*without_local_norm(self.name, self.parameters.trunk, why), *super().contradictions()]

    def client(self, situation: Situation) -> LocalRound:
        """Partial loss and consistency; in stage 2 tags count like labels."""
        return FedMLPClient(situation, self.parameters).round()


# ---------------------------------------------------------------------- coordinator


def expected(known: RoundContext, features: int, parameters: FedMLPParameters) -> Mapping[str, tuple[int, ...]]:
    """What every site tells from the last round of stage 1 on."""
    if not parameters.detection or known.round < parameters.stage_one_rounds:
        return {}
    classes = len(known.contract.class_names)
    return {"prototypes": (classes, 2, features), "difficulty": (classes,)}


def learned(known: RoundContext, replies: Mapping[str, TrainReply], parameters: FedMLPParameters) -> Arrays:
    """This round's global prototypes and difficulties; where nobody says anything, those of the round before."""
    told = {site: reply for site, reply in replies.items() if "prototypes" in reply.statistics}
    if not told:
        return known.statistics
    images = {site: float(reply.train_samples) for site, reply in told.items()}
    own = {site: known.contract.annotated(site) for site in told}
    statistics = {site: reply.statistics for site, reply in told.items()}
    return global_statistics(statistics, own, images, known.statistics, parameters.prototype_weighting)


def difficulty_noted(known: RoundContext) -> dict[str, Any]:
    """Each class's difficulty after a round, once sites have told theirs; None where every site labels the class."""
    if "difficulty" not in known.statistics:
        return {}
    values = np.where(known.contract.coverage().all(axis=0), np.nan, known.statistics["difficulty"])
    return {"difficulty": finite_by_name(dict(zip(known.contract.class_names, values, strict=True)))}


def prototypes_noted(known: RoundContext) -> dict[str, Any]:
    """How much the global prototypes are alike, not the vectors themselves."""
    if "prototypes" not in known.statistics:
        return {}
    prototypes = known.statistics["prototypes"]
    between = cosines(prototypes[:, 1])
    within = np.array([cosines(pair)[0, 1] for pair in prototypes])
    alike = [[None if np.isnan(value) else float(value) for value in row] for row in between]
    apart = [None if np.isnan(value) else float(value) for value in within]
    return {"prototypes": {"classes": list(known.contract.class_names), "positives": alike, "signs": apart}}


# ---------------------------------------------------------------------- hospital


class FedMLPClient:
    """One round at one site."""

    def __init__(self, situation: Situation, parameters: FedMLPParameters) -> None:
        self.situation, self.parameters = situation, parameters
        self.labels = situation.examples.labels.cpu().numpy()  # (n, classes)
        self.annotated = situation.examples.annotated.cpu().numpy()
        self.teacher = fixed_copy(situation.network)
        kept = situation.notes.get("tags")
        self.tags: Tags = np.full(self.labels.shape, -1, np.int8) if kept is None else kept.astype(np.int8)

    def round(self) -> LocalRound:
        """Tag, in stage 2, then say what is minimised and told."""
        if self.second_stage and self.parameters.detection and "prototypes" in self.situation.told:
            self.tags = self.tagged()
        device = self.situation.examples.labels.device
        self.targets = torch.from_numpy(self._targets()).to(device)
        # By each class's positives at this site, true or tagged.
        self.adjustment = adjustment_of(self.targets) if self.parameters.weighted_partial_loss else None
        return LocalRound(
            self.objective,
            self.told,
            notes=lambda network: {"tags": self.tags.astype(np.float32)},
        )

    @property
    def second_stage(self) -> bool:
        return self.situation.round > self.parameters.stage_one_rounds

    def tagged(self) -> Tags:
        """The tags with this round's new ones, from the features of the received model (specs 3.5, steps 1 to 4)."""
        told, parameters = self.situation.told, self.parameters
        features, _ = self._seen_by(self.teacher)
        found = self.tags.copy()
        for column in np.flatnonzero(~self.annotated):
            ease = float(told["difficulty"][column]) if parameters.self_adaptive else 1.0
            negative, positive = told["prototypes"][column]
            new = tags(
                z_scores(features, negative, positive),
                found[:, column] < 0,
                share_tagged(ease, parameters.tag_rate_negative),
                share_tagged(ease, parameters.tag_rate_positive),
                parameters.rounding,
            )
            found[:, column] = with_tags(found[:, column], new)
        return found

    def _targets(self) -> NDArray[np.float32]:
        """Labels, and tags where there is no label; NaN for the rest, or 0 where missing counts as negative."""
        tagged = np.where(self.tags >= 0, self.tags, np.nan)
        targets = np.where(self.annotated, self.labels, tagged)
        if not self.parameters.weighted_partial_loss:
            targets = np.where(~self.annotated & np.isnan(targets), 0.0, targets)
        return targets.astype(np.float32)

    def objective(self, network: SplitNetwork, batch: Batch) -> Tensor:
        """Stage 1 on two views of the images, stage 2 on one."""
        targets, annotated = self.targets[batch.rows], batch.annotated
        if self.second_stage:
            view = batch.view()
            teacher = self._taught(batch, view) if self.parameters.consistency else None
            return second_stage(batch.logits(network, view), teacher, targets, annotated, self.adjustment)
        views = [batch.view(), batch.view()]
        consistent = self.parameters.consistency and self.parameters.consistency_stage_one
        teachers = [self._taught(batch, view) for view in views] if consistent else None
        students = [batch.logits(network, view) for view in views]
        return first_stage(students, teachers, targets, annotated, self.adjustment)

    def _taught(self, batch: Batch, view: Tensor) -> Tensor:
        with torch.no_grad():
            return batch.logits(self.teacher, view)

    def told(self, network: SplitNetwork, losses: Losses) -> Arrays:
        """Prototypes and difficulty of the trained model, from the last round of stage 1 on (specs 3.4)."""
        if not self.parameters.detection or self.situation.round < self.parameters.stage_one_rounds:
            return {}
        features, probabilities = self._seen_by(network)
        labels = np.where(self.annotated, self.labels, np.nan)
        sure = difficulty(probabilities, self.parameters.sure_below, self.parameters.sure_above)
        return {
            "prototypes": local_prototypes(features, labels).astype(np.float32),
            "difficulty": np.where(self.annotated, np.nan, sure).astype(np.float32),
        }

    def _seen_by(self, network: SplitNetwork) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Features and unadjusted probabilities of all training images as they are, not augmented."""
        features, logits = features_and_logits(network, self.situation.examples.images, self.situation.spec.precision)
        return features.cpu().numpy(), logits.sigmoid().cpu().numpy()
