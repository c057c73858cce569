"""Compare the federated model with a model that one site trained alone, and summarise the comparison in a sentence.

Four models are compared on the site's test part, over the classes that the site annotates: the model trained alone, the
federated model, the federated model fine-tuned at the site, and the ensemble of the first two (mean probability). The
coordinator's report and the site's page print the same sentence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from polyclinic.common.metrics.bootstrap import EstimateWithInterval, Interval
from polyclinic.common.system.plain_text import (
    format_count_with_noun,
    format_interval,
    format_number,
    format_signed,
    join_as_english_list,
)

SiteModel = Literal["alone", "federated", "fine_tuned", "ensemble"]
COMPARED_SITE_MODELS: tuple[SiteModel, ...] = get_args(SiteModel)
"""The four models; each other model is compared with the first."""
CONTENDER_MODELS = COMPARED_SITE_MODELS[1:]
MODEL_LABELS: Mapping[SiteModel, str] = {
    "alone": "trained alone",
    "federated": "federated",
    "fine_tuned": "federated, fine-tuned at the site",
    "ensemble": "ensemble of own and federated model",
}
_MODEL_PHRASES: Mapping[SiteModel, str] = {
    "federated": "with the federated model",
    "fine_tuned": "with the federated model fine-tuned there",
    "ensemble": "with the ensemble of its own and the federated model",
}
Direction = Literal["above", "below", "open"]
Choice = Literal["alone", "federation", "open"]
CHANCE_AUROC = 0.5
MIN_PRINTED_NUMBER = 0.0005
"""Smallest number that is not printed as zero; an interval that reaches below it counts as including zero."""


def compare_interval_with_zero(interval: Interval) -> Direction:
    """Return the position of an interval: ``above`` or ``below`` zero, or ``open`` if it includes zero after
    rounding.
    """
    low, high = interval
    if low < MIN_PRINTED_NUMBER and high > -MIN_PRINTED_NUMBER:
        return "open"
    return "above" if low > 0 else "below"


@dataclass(frozen=True)
class FederationBenefit:
    """The comparison of four models on one site's test part.

    The models are ``alone`` (trained at this site only), ``federated``, ``fine_tuned`` (the federated model, trained
    further at this site) and ``ensemble`` (the mean probability of ``alone`` and ``federated``).

    Attributes:
        auroc: Model -> class -> AUROC; all models have the same classes.
        mean: Model -> mean AUROC over these classes, with its 95 % interval.
        gain: Model -> its mean AUROC minus that of ``alone``, with the 95 % interval; no entry for ``alone``.
        over: The unit that the bootstrap resampled.
    """

    auroc: Mapping[SiteModel, Mapping[str, float]]
    mean: Mapping[SiteModel, EstimateWithInterval]
    gain: Mapping[SiteModel, EstimateWithInterval]
    over: Literal["patients", "images"]

    @property
    def compared_classes(self) -> tuple[str, ...]:
        """The classes for which each model has an AUROC."""
        return tuple(self.auroc["alone"])

    @property
    def better_models(self) -> tuple[SiteModel, ...]:
        """The models whose 95 % intervals of the mean AUROC lie above 0.5, and those of the gain above zero."""
        ahead = (
            model for model in CONTENDER_MODELS if compare_interval_with_zero(self.gain[model].interval) == "above"
        )
        return tuple(model for model in ahead if self._is_auroc_above_chance(model))

    @property
    def recommended_training(self) -> Choice:
        """The training that the AUROC intervals recommend for this site.

        ``federation`` if the federated, fine-tuned or ensemble model beats the model trained alone; ``alone`` if the
        federated model is worse than the model trained alone, and the latter beats chance; else ``open``.
        """
        if self.better_models:
            return "federation"
        worse = compare_interval_with_zero(self.gain["federated"].interval) == "below"
        return "alone" if worse and self._is_auroc_above_chance("alone") else "open"

    def _is_auroc_above_chance(self, model: SiteModel) -> bool:
        """Return True if the interval of a model's mean AUROC lies above 0.5."""
        return self.mean[model].interval[0] > CHANCE_AUROC


def format_benefit_sentence(site: str, benefit: FederationBenefit, annotated: Sequence[str]) -> str:
    """Return one sentence for a report: the better training for a site, with the AUROCs of the compared models.

    If the intervals allow no recommendation, the sentence says so.

    Args:
        site: Name of the site.
        benefit: The comparison.
        annotated: All classes that the site annotates; the comparison can cover fewer.
    """
    classes = len(benefit.compared_classes)
    alone_mean = benefit.mean["alone"]
    all_classes = format_count_with_noun(len(annotated), "class", "classes")
    compared = f"its {all_classes}" if classes == len(annotated) else f"{classes} of its {all_classes}"
    where = f"on its own test {benefit.over} the mean AUROC over {compared}"
    alone_auroc = f"{format_number(alone_mean.value)} ({format_interval(alone_mean.interval)})"
    alone = f"is {alone_auroc} with the model that it trained alone"
    others = list[str]()
    for model in CONTENDER_MODELS:
        mean = benefit.mean[model]
        gain = benefit.gain[model]
        difference = f"{format_signed(gain.value)} ({' to '.join(map(format_signed, gain.interval))})"
        others.append(
            f"{format_number(mean.value)} ({format_interval(mean.interval)}) {_MODEL_PHRASES[model]}, a difference of "
            f"{difference}"
        )
    if benefit.recommended_training == "alone":
        verdict = f"{site} is better off alone"
    elif benefit.recommended_training == "federation":
        ways = join_as_english_list([_MODEL_PHRASES[model] for model in benefit.better_models])
        verdict = f"{site} is better off with the federation, that is {ways}"
    else:
        verdict = f"Whether {site} is better off alone or with the federation cannot be told"
    return f"{verdict}: {where} {alone}; {'; '.join(others)} (95 % intervals over {benefit.over})."
