"""Intervals of means over a sample of sites: worked by hand, and how often they hold the mean over all."""

import numpy as np
import pytest

from common.metrics.pooled import estimate_from_sampled_sites


def test_the_interval_of_one_class_is_students_with_cochrans_correction() -> None:
    # mean 0.6, s² = (0.01 + 0.01) / 2 = 0.01; 3 of 12 sites: (1 - 1/4) 0.01 / 3 = 0.0025; t(0.975, 2) = 4.302653
    sample = estimate_from_sampled_sites({"a": {"x": 0.5, "y": 0.6, "z": 0.7}}, {"a": 0.25}, 3, 12)
    assert sample.per_class["a"] == pytest.approx((0.6 - 4.302653 * 0.05, 0.6 + 4.302653 * 0.05), abs=1e-6)
    assert sample.mean_auroc == pytest.approx(sample.per_class["a"])
    assert (sample.drawn, sample.of) == (3, 12)


def test_sites_that_test_two_classes_move_both_together() -> None:
    # Each class alone: moved by 0.75**0.5 / 6**0.5 * (-0.1, 0, 0.1); the mean of two like classes moves as one does.
    alike = {"x": 0.5, "y": 0.6, "z": 0.7}
    both = estimate_from_sampled_sites({"a": alike, "b": alike}, {"a": 0.25, "b": 0.25}, 3, 12)
    assert both.mean_auroc == pytest.approx(both.per_class["a"])
    # Turned round, what one class gains by a draw the other loses: nothing is left to chance.
    turned = estimate_from_sampled_sites(
        {"a": alike, "b": {"x": 0.7, "y": 0.6, "z": 0.5}}, {"a": 0.25, "b": 0.25}, 3, 12
    )
    assert turned.mean_auroc == pytest.approx((0.6, 0.6))


def test_a_class_whose_sites_were_all_asked_is_known() -> None:
    sample = estimate_from_sampled_sites({"a": {"x": 0.5, "y": 0.7}, "b": {"x": 0.9}}, {"a": 1.0, "b": 1.0}, 2, 9)
    assert sample.per_class == {"a": (0.6, 0.6), "b": (0.9, 0.9)}
    assert sample.mean_auroc == (0.75, 0.75)


def test_there_is_no_interval_where_one_site_stands_for_several_or_nothing_is_told() -> None:
    sample = estimate_from_sampled_sites(
        {"a": {"x": 0.5, "y": 0.7}, "b": {"x": 0.9}, "c": {}}, {"a": 0.5, "b": 0.5, "c": 0}, 2, 4
    )
    assert list(sample.per_class) == ["a"]
    assert sample.mean_auroc is None
    nothing = estimate_from_sampled_sites({"a": {}}, {"a": 0.5}, 2, 4)
    assert (nothing.mean_auroc, nothing.per_class) == (None, {})


def test_intervals_hold_the_mean_over_all_sites_in_95_of_100_draws() -> None:
    generator = np.random.default_rng(5)
    sites, classes = 400, "abc"
    annotates = generator.random((sites, len(classes))) < [0.9, 0.5, 0.3]
    skill = generator.normal(0, 0.05, (sites, 1)) + generator.normal(0, 0.05, (sites, len(classes)))
    aurocs = np.clip(0.75 + skill, 0, 1)
    truth = np.mean([aurocs[annotates[:, c], c].mean() for c in range(len(classes))])
    held = 0
    for _ in range(600):
        drawn = generator.choice(sites, 60, replace=False)
        values = {n: {str(s): aurocs[s, c] for s in drawn if annotates[s, c]} for c, n in enumerate(classes)}
        shares = {n: len(values[n]) / int(annotates[:, c].sum()) for c, n in enumerate(classes)}
        interval = estimate_from_sampled_sites(values, shares, 60, sites).mean_auroc
        held += interval[0] <= truth <= interval[1]
    # binomial: 600 at 0.95: mean 570, standard deviation 5.3
    assert abs(held - 570) < 4 * 5.3
