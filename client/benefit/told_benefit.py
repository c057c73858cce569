"""What of the comparison leaves a site: figures of classes that are not hidden, rounded as its policy says.

Of the secret fifth of patients nothing is in them, and noise is on each class's figure, as on a test's. A mean over
classes is rounded to a step that is no finer than what one image changes, a difference of two means to one twice as
wide. Intervals follow from the rounded figures and the told counts, as if models and classes had nothing in
common, and their ends are rounded outwards: the resamples of the site's own page are of single images, and how wide
they are can say whether one image is there.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from client.site.disclosure import told_count
from client.site.site import Site
from client.site.told_figures import MOST_OF_ONE, most_of_one, noise_on_score, on_steps, share_of_one, step_for
from client.training.told_validation import groups_sha256
from common.config import plan_of_text
from common.metrics.benefit import MODELS, OVER_ALONE, Benefit, SiteModel
from common.metrics.bootstrap import Estimate, score_interval
from common.metrics.curves import NORMAL_95
from common.wire.benefit import BenefitReply, BenefitRequest

SLIP = 1e-9
"""Of a step: a figure that lies on it is not moved to the next by rounding of floats."""


def no_figures(site: Site, request: BenefitRequest) -> BenefitReply:
    """A reply that says that the site was there, and nothing of its data."""
    return BenefitReply(request.run, request.round, site.name)


def told_benefit(
    site: Site, request: BenefitRequest, found: Benefit | None, asked: Mapping[SiteModel, str]
) -> BenefitReply:
    """The reply with what was found over classes that are not hidden; None where there is none.

    Args:
        asked: Of :func:`questions`.
    """
    if found is None:
        return no_figures(site, request)
    told = found if site.policy.exact_figures else _on_steps(site, found, asked)
    return BenefitReply(
        request.run,
        request.round,
        site.name,
        told.classes,
        tuple(told.auroc[model][name] for model in MODELS for name in told.classes),
        **_columns("mean", [told.mean[model] for model in MODELS]),
        **_columns("gain", [told.gain[model] for model in OVER_ALONE]),
        over_patients=told.over == "patients",
    )


def questions(request: BenefitRequest, judged: str, rounds: tuple[int, int]) -> dict[SiteModel, str]:
    """All that each model's figures are a function of beside the site's images: noise follows from it.

    The same function has the same noise, in any answer and no matter how the plan is written, or the noise could be
    averaged out. Another function has other noise: by noise that two answers share, their difference would be exact. So
    it is the plan and not its text, without what may change when a run goes on; and the model as it was judged, with
    the parts of it that stay at the site.

    Args:
        judged: SHA-256 of the federated model as it was judged.
        rounds: That the site trained alone, and that it fine-tuned.
    """
    whole, short = rounds
    plan = plan_of_text(request.plan).model_dump(mode="json", exclude={"run": {"name", "rounds"}})
    both = [plan, list(request.class_names)]
    alone, federated = [whole, groups_sha256(request.initial)], [judged]
    functions = {"alone": alone, "federated": federated, "fine_tuned": [short, judged], "ensemble": [alone, federated]}
    return {model: json.dumps([*both, functions[model]], sort_keys=True) for model in MODELS}


def _noisy(site: Site, found: Benefit, widths: Mapping[str, float], asked: Mapping[SiteModel, str]) -> Benefit:
    """What was found with noise on each class's figure; means and differences follow from those."""
    secret = site.figure_secret
    auroc = {
        model: {
            name: min(max(value + widths[name] * secret.noise(model, name, asked[model]), 0.0), 1.0)
            for name, value in found.auroc[model].items()
        }
        for model in MODELS
    }
    means = {model: sum(values.values()) / len(values) for model, values in auroc.items()}
    mean = {model: replace(found.mean[model], value=means[model]) for model in MODELS}
    gain = {one: replace(found.gain[one], value=means[one] - means["alone"]) for one in OVER_ALONE}
    return replace(found, auroc=auroc, mean=mean, gain=gain)


def _on_steps(site: Site, found: Benefit, asked: Mapping[SiteModel, str]) -> Benefit:
    """What was found with noise, and each figure rounded to a step no finer than what one image changes."""
    pairs = _pairs(site, found)
    widths = _widths(site, pairs)
    found = _noisy(site, found, widths, asked)
    step = step_for(max(int(1 / share_of_one(list(pairs.values()))), 1))
    auroc = {model: _rounded(found.auroc[model], pairs) for model in MODELS}
    counts = {name: tuple(max(told_count(one, site.policy), 1) for one in pair) for name, pair in pairs.items()}
    reach = {model: _reach(auroc[model], counts, widths) for model in MODELS}
    down, up = reach["alone"]
    gains = {one: (math.hypot(reach[one][0], up), math.hypot(reach[one][1], down)) for one in OVER_ALONE}
    mean, gain = _stepped(found.mean, reach, step, 0.0), _stepped(found.gain, gains, 2 * step, -1.0)
    return Benefit(auroc, mean, gain, found.over)


def _reach(
    aurocs: Mapping[str, float], counts: Mapping[str, tuple[int, ...]], widths: Mapping[str, float]
) -> tuple[float, float]:
    """How far the interval of a mean over classes reaches below it and above it, by figures that are told.

    Args:
        widths: Standard deviation of the noise on each class's figure.
    """
    ends = [(value, score_interval(value, *counts[name])) for name, value in aurocs.items()]
    noise = math.hypot(*(NORMAL_95 * widths[name] for name in aurocs))
    below, above = (math.hypot(*sides) for sides in zip(*((v - low, high - v) for v, (low, high) in ends), strict=True))
    return math.hypot(below, noise) / len(ends), math.hypot(above, noise) / len(ends)


def _widths(site: Site, pairs: Mapping[str, tuple[int, int]]) -> dict[str, float]:
    """How large the noise on each class's figure is.

    A coordinator can make all models of a reply one, by a rate at which nothing is learned: the mean of their figures
    is then as noisy as one figure of a test.
    """
    images = min(most_of_one(site.test.patients), MOST_OF_ONE)
    wider = math.sqrt(len(MODELS))
    return {name: wider * noise_on_score(*pair, images) for name, pair in pairs.items()}


def _pairs(site: Site, found: Benefit) -> dict[str, tuple[int, int]]:
    """Positives and negatives of each class on the test part."""
    test = site.test
    columns = {name: test.labels[:, test.class_names.index(name)] for name in found.classes}
    return {name: (int(np.sum(column == 1)), int(np.sum(column == 0))) for name, column in columns.items()}


def _rounded(aurocs: Mapping[str, float], pairs: Mapping[str, tuple[int, int]]) -> dict[str, float]:
    rounded = {name: on_steps(value, min(pairs[name])) for name, value in aurocs.items()}
    return {name: value for name, value in rounded.items() if value is not None}


def _stepped(
    found: Mapping[SiteModel, Estimate], reach: Mapping[SiteModel, tuple[float, float]], step: float, least: float
) -> dict[SiteModel, Estimate]:
    """Estimates on multiples of a step, with intervals that reach so far, rounded outwards, between ``least`` and 1."""

    def on(value: float, way: Callable[[float], float]) -> float:
        return min(max(round(way(value / step) * step, 12), least), 1.0)

    told = {model: on(one.value, round) for model, one in found.items()}
    return {
        model: Estimate(
            value,
            (
                on(value - reach[model][0], lambda steps: math.floor(steps + SLIP)),
                on(value + reach[model][1], lambda steps: math.ceil(steps - SLIP)),
            ),
        )
        for model, value in told.items()
    }


def _columns(name: str, estimates: list[Estimate]) -> dict[str, tuple[float, ...]]:
    return {
        name: tuple(one.value for one in estimates),
        f"{name}_low": tuple(one.interval[0] for one in estimates),
        f"{name}_high": tuple(one.interval[1] for one in estimates),
    }
