"""SFedKD: one model passes through the hospitals and learns also from models of the last round, its teachers.

Xu, Zhou, Zhang, Xiao, He, Xu: "SFedKD: Sequential Federated Learning with Discrepancy-Aware Multi-Teacher Knowledge
Distillation", arXiv 2507.08508 (2025). We had its abstract alone, and no published code is known to us.

What the abstract says. One model is passed on, and forgets what earlier hospitals taught it. So some models of the last
round, each as it left a hospital, are its *teachers* in this round. A teacher's knowledge of an image's own class
(target) and of the other classes (non-target) is distilled apart, as in decoupled knowledge distillation (DKD: Zhao,
Cui, Song, Qiu, Liang, CVPR 2022), with weights by how far the class distributions of teacher and student data are
apart. Redundant teachers are left out: a greedy choice covers the classes.

What we chose, because the abstract has no formulas:

- A site's class distribution is each class's share of the site's positives, from the counts of the roll call. Two
  distributions are apart by half of the sum of absolute differences, from 0 to 1.
- Teacher m weighs, in a student's target knowledge, as the distributions are alike (1 - distance), and in non-target
  knowledge as they are apart; both weights sum to 1 over teachers. A teacher from like data is sure of the classes that
  the student sees; one from other data knows what the student forgets.
- The greedy choice takes, one by one, the teacher by which the sum over classes of the largest share of any teacher
  grows most, and stops after ``teachers`` of them or where it does not grow. Ties go by name.
- In a multi-class task both parts are DKD's, times the squared temperature: the divergence of target and rest, and that
  of the other classes among themselves.
- In a multi-label task each class is a distribution of two. The entries that the site labels as present are the target;
  all other entries, labelled absent or not at all, are the non-target.

The loss is that of the site's labels plus ``weight`` times both parts, added over teachers. Labels that a hospital does
not have are left out, as in ``polyclinic``. The order of hospitals is drawn in each round.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from polyclinic.common.models.network import Model
from polyclinic.common.models.state import read_model_state, write_model_state
from polyclinic.common.models.zoo.spec import Task
from polyclinic.common.wire.records import NO_ARRAYS, Arrays, ModelGroups
from polyclinic.strategies.aggregation.means import Float32, Float64
from polyclinic.strategies.local.losses import Missing, mask_images_of_known_class
from polyclinic.strategies.local.method_traits import Parameters, Payload, SequentialTraits
from polyclinic.strategies.local.objective import Batch, ClientContext, LocalRound, copy_model_as_teacher
from polyclinic.strategies.local.site_method import SequentialSite
from polyclinic.strategies.methods.base import RoundContext, SequentialMethod, SiteReply
from polyclinic.strategies.methods.fedsld import collect_label_counts
from polyclinic.strategies.methods.polyclinic import VisitOrder, arrange_visits
from polyclinic.strategies.methods.scaffold import flatten_groups, unflatten_groups

TEACHERS, TEACHER_WEIGHTS = "teachers", "teacher_weights"
"""Names in a request: the teachers' numbers ``(teachers, n)``, and their weights of both parts ``(teachers, 2)``."""


class SFedKDParameters(Parameters):
    """The ``[method]`` table of ``sfedkd``.

    Attributes:
        teachers: Largest number of models of the last round that teach.
        weight: Weight of the distillation beside the loss of the labels.
        temperature: Divisor of the logits of student and teachers; above 1 softens.
        order: Order of the hospitals in a round: ``drawn`` at random for each round, or by ``name``.
        missing: How the loss of the labels treats classes that a hospital does not annotate, as in ``fedseq``.
    """

    teachers: int = Field(3, ge=1)
    weight: float = Field(1.0, ge=0)
    temperature: float = Field(2.0, gt=0)
    order: VisitOrder = "drawn"
    missing: Missing = "masked"


# ---------------------------------------------------------------------- who teaches whom


def compute_class_distributions(context: RoundContext) -> dict[str, Float64]:
    """Return each site's shares of its positives by class ``(classes,)``, which sum to 1.

    A site that sends no counts gets equal shares of its classes.
    """
    positives, _ = collect_label_counts(context)
    distributions = dict[str, Float64]()
    for site, row in zip(sorted(context.answers), np.nan_to_num(positives), strict=True):
        shown = row if row.sum() > 0 else context.contract.annotated_class_mask(site).astype(np.float64)
        distributions[site] = shown / max(shown.sum(), 1.0)
    return distributions


def choose_teachers(distributions: Mapping[str, Float64], most: int) -> list[str]:
    """Return the sites whose models cover the classes, in the order of choice: greedy maximum coverage.

    Args:
        distributions: Site -> its shares of classes ``(classes,)``, for the sites that could teach; at least one.
        most: Largest number of teachers.
    """
    chosen = list[str]()
    covered = np.zeros_like(next(iter(distributions.values())))
    while len(chosen) < min(most, len(distributions)):
        rest = [site for site in sorted(distributions) if site not in chosen]
        best = max(rest, key=lambda site: float(np.maximum(covered, distributions[site]).sum()))
        wider = np.maximum(covered, distributions[best])
        if not wider.sum() > covered.sum() + 1e-9:  # all that are left teach what others do
            break
        chosen = [*chosen, best]
        covered = wider
    return chosen


def compute_teacher_weights(student: Float64, teachers: Sequence[Float64]) -> Float32:
    """Return the weights of each teacher's target and non-target knowledge ``(teachers, 2)``; columns sum to 1.

    Args:
        student: The student's shares of classes ``(classes,)``.
        teachers: The same of each teacher.
    """
    distances = np.array([np.abs(student - teacher).sum() / 2 for teacher in teachers])
    return np.stack([_share_out(1 - distances), _share_out(distances)], axis=1).astype(np.float32)


def _share_out(values: Float64) -> Float64:
    total = values.sum()
    return values / total if total > 1e-9 else np.full(len(values), 1 / len(values))


# ---------------------------------------------------------------------- distillation
# Shapes: logits and labels (batch, rows), labels 1, 0 or NaN for unknown.


def compute_multi_label_divergences(
    student: Tensor, teacher: Tensor, labels: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the divergence KL(teacher || student) of entries labelled as present, and that of all other entries.

    Both are sums over their entries, divided by the number of all entries, in nats times the squared temperature.
    """
    targets = (teacher / temperature).sigmoid()
    cross_entropy = binary_cross_entropy_with_logits(student / temperature, targets, reduction="none")
    entropy = binary_cross_entropy_with_logits(teacher / temperature, targets, reduction="none")
    entries = (cross_entropy - entropy) * temperature**2
    of_target = torch.where(labels == 1, entries, 0.0).sum() / entries.numel()
    return of_target, entries.mean() - of_target


def compute_multi_class_divergences(
    student: Tensor, teacher: Tensor, labels: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return DKD's two divergences KL(teacher || student), as means over the images whose class is known.

    The first is of the image's class against all others, the second of the other classes among themselves (DKD, eq. 7);
    both in nats times the squared temperature.
    """
    known = mask_images_of_known_class(labels)
    if not known.any():
        return student.sum() * 0, student.sum() * 0
    is_target = labels[known] == 1
    own, theirs = (_split_target(logits[known] / temperature, is_target) for logits in (student, teacher))
    of_target, of_others = (_divergence(*pair).mean() for pair in zip(own, theirs, strict=True))
    return of_target * temperature**2, of_others * temperature**2


def _split_target(logits: Tensor, is_target: Tensor) -> tuple[Tensor, Tensor]:
    """Split a prediction into its target class and all other classes.

    Return log probabilities of the target and of all others together, ``(batch, 2)``, and of each class among the
    others, ``(batch, classes)``, where the target has minus infinity.
    """
    whole = logits.logsumexp(dim=1)
    others = logits.masked_fill(is_target, -torch.inf).logsumexp(dim=1)
    target = logits.masked_fill(~is_target, -torch.inf).logsumexp(dim=1)
    among_others = (logits - others[:, None]).masked_fill(is_target, -torch.inf)
    return torch.stack([target - whole, others - whole], dim=1), among_others


def _divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(teacher || student) ``(batch,)`` of log probabilities; an entry of probability 0 adds nothing."""
    there = teacher > -torch.inf
    terms = teacher.exp() * (teacher.masked_fill(~there, 0.0) - student.masked_fill(~there, 0.0))
    return terms.sum(dim=1)


DIVERGENCES: Mapping[Task, Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]] = {
    "multi_label": compute_multi_label_divergences,
    "multi_class": compute_multi_class_divergences,
}

# ---------------------------------------------------------------------- hospital


class SFedKDSite(SequentialSite):
    """The hospital's half of SFedKD: the loss of its labels, and distillation from the teachers on its images."""

    traits = SequentialTraits(
        "sfedkd",
        parameters_class=SFedKDParameters,
        payload=Payload(label_counts=True),
        reason_against_segmentation="it tells an image's own class from all others, and each pixel has its own",
        stores_statistics_by_site=True,
        stores_site_models=True,
    )
    parameters: SFedKDParameters

    def make_round(self, context: ClientContext) -> LocalRound:
        """Return the local round: the loss of the labels plus the weighted divergence from each teacher."""
        parameters = self.parameters
        supervised = self.choose_training_loss(context.examples, context.spec)
        compute_divergences = DIVERGENCES[self.task]
        teachers = make_teachers(context.network, context.statistics)

        def objective(model: Model, batch: Batch) -> Tensor:
            view = batch.view()
            student = batch.logits(model, view)
            loss = supervised(student, batch.labels, batch.annotated)
            for teacher, of_target, of_others in teachers:
                with torch.no_grad():
                    opinion = batch.logits(teacher, view)
                target, others = compute_divergences(student, opinion, batch.labels, parameters.temperature)
                loss = loss + parameters.weight * (of_target * target + of_others * others)
            return loss

        return LocalRound(objective)


def make_teachers(network: Model, statistics: Arrays) -> list[tuple[Model, float, float]]:
    """Return the teachers of a request with their weights of target and non-target knowledge; none in round 1.

    Raises:
        WireError: If a teacher does not fit the network.
    """
    if TEACHERS not in statistics:
        return []
    like = ModelGroups.from_model(read_model_state(network))
    teachers = list[tuple[Model, float, float]]()
    for flat, (of_target, of_others) in zip(statistics[TEACHERS], statistics[TEACHER_WEIGHTS], strict=True):
        teacher = copy_model_as_teacher(network)
        groups = unflatten_groups(flat, like, "teacher")
        write_model_state(teacher, trunk=groups.trunk, norm=groups.norm, head=groups.head)
        teachers.append((teacher, float(of_target), float(of_others)))
    return teachers


# ---------------------------------------------------------------------- coordinator


class SFedKD(SequentialMethod):
    """The coordinator's half of SFedKD: it stores the models that some sites passed on, and sends them as teachers."""

    site_class = SFedKDSite
    site: SFedKDSite

    def order_sites(self, context: RoundContext, sites: Sequence[str]) -> Sequence[str]:
        """Return the sites in a random order that depends only on the run's seed and the round, or sorted by name."""
        return arrange_visits(context, sites, self.site.parameters.order)

    def statistics_for(self, context: RoundContext) -> Callable[[str], Arrays]:
        """Return a function that gives each site the teachers and their weights; none before a round has ended."""
        sites = [site for site in sorted(context.statistics) if site in context.answers]
        if not sites:
            return lambda site: NO_ARRAYS
        distributions = compute_class_distributions(context)
        models = np.stack([context.statistics[s] for s in sites])
        of_teachers = [distributions[site] for site in sites]
        return lambda site: {
            TEACHERS: models,
            TEACHER_WEIGHTS: compute_teacher_weights(distributions[site], of_teachers),
        }

    def aggregate_statistics(self, context: RoundContext, replies: Mapping[str, SiteReply]) -> Arrays:
        """Return site -> the model that it passed on, flat, for the sites whose models teach in the next round."""
        distributions = compute_class_distributions(context)
        candidates = {site: distributions[site] for site in context.site_models if site in distributions}
        if not candidates:
            return context.statistics
        chosen = choose_teachers(candidates, self.site.parameters.teachers)
        models = context.site_models
        return {site: flatten_groups(ModelGroups.from_model(models[site])) for site in chosen}
