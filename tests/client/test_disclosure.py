"""Small counts stay at home, and anyone who sees everything else cannot work them out."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from polyclinic.client.app import answer_roll_call
from polyclinic.client.site.disclosure import find_classes_hidden_by_policy
from polyclinic.client.site.policy import SitePolicy
from polyclinic.client.site.settings import load_site, read_site_settings
from polyclinic.client.site.site import Site
from polyclinic.client.training.layers import evaluate_with_privacy_layers, train_with_privacy_layers
from polyclinic.common.contract import LabelDeclaration
from polyclinic.common.errors import BadInput
from polyclinic.common.wire.records import UNKNOWN_COUNT, RollCall, RollCallAnswer
from polyclinic.data.base.image_set import ImageSet
from polyclinic.strategies.registry import STRATEGIES
from tests.client.rounds import beginning, evaluation, plan, private_plan, request

NAMES = ("a", "b", "c", "d")


def image_set(labels: NDArray[np.float32], patients: Sequence[str] | None = None) -> ImageSet:
    n, classes = labels.shape
    who = np.array(patients if patients is not None else [f"p{row}" for row in range(n)])
    images = np.random.default_rng(n).integers(0, 255, (n, 16, 16)).astype(np.uint8)
    return ImageSet(images, labels.astype(np.float32), NAMES[:classes], who, np.full(n, ""))


def one_class_an_image(counts: Sequence[int]) -> NDArray[np.float32]:
    return np.eye(len(counts), dtype=np.float32)[np.repeat(np.arange(len(counts)), counts)]


def site(folder: Path, train: ImageSet, test: ImageSet | None = None, **policy: object) -> Site:
    names = train.class_names
    own = SitePolicy.model_validate({"label_counts": True, **policy})
    return Site(LabelDeclaration("north", names), train, train, test or train, folder, policy=own, durable=False)


def answer(at: Site, method: str = "fedsld") -> RollCallAnswer:
    return answer_roll_call(at, RollCall("run", plan(method, {}).model_dump_json()))


NAN = float("nan")
LABELS = np.array([[1] * 12 + [0] * 15 + [NAN] * 3, [1] * 4 + [0] * 26], np.float32).T.copy()


@pytest.mark.parametrize(
    ("method", "policy", "positives", "negatives"),
    [
        ("fedsld", {"label_counts": True, "smallest_count": 0}, (12, 4), (15, 26)),
        ("fedsld", {"label_counts": True, "smallest_count": 5}, (12, UNKNOWN_COUNT), (15, UNKNOWN_COUNT)),
        ("fedsld", {"level": "masked"}, (), ()),
        ("fedsld", {"level": "private"}, (), ()),
        ("surgical", {"label_counts": True, "smallest_count": 0}, (), ()),
        ("fedmlp", {"label_counts": True, "smallest_count": 0}, (), ()),
        ("fedavg", {"label_counts": True, "smallest_count": 0}, (), ()),
    ],
)
def test_known_labels_are_counted_where_the_method_asks_the_policy_allows_and_patients_are_enough(
    method: str, policy: dict[str, object], positives: tuple[int, ...], negatives: tuple[int, ...], tmp_path: Path
) -> None:
    at = replace(site(tmp_path, image_set(LABELS)), policy=SitePolicy.model_validate(policy))
    reply = answer(at, method)
    assert (reply.positives, reply.negatives) == (positives, negatives)


def test_patients_are_counted_and_not_their_images(tmp_path: Path) -> None:
    labels = np.array([[1.0]] * 30 + [[0.0]] * 30)
    for count, positives in ((9, UNKNOWN_COUNT), (10, 30)):
        patients = [f"p{row % count}" for row in range(30)] + [f"q{row}" for row in range(30)]
        assert answer(site(tmp_path, image_set(labels, patients))).positives == (positives,)


def test_a_count_that_all_images_less_the_others_would_give_takes_another_class_with_it(tmp_path: Path) -> None:
    labels = one_class_an_image([20, 3, 30, 40])
    reply = answer(site(tmp_path, image_set(labels), train_hidden_classes=False))
    assert reply.positives == (UNKNOWN_COUNT, UNKNOWN_COUNT, 30, 40)
    assert reply.negatives == (UNKNOWN_COUNT, UNKNOWN_COUNT, 40, 30)  # the 23 images of hidden classes count nowhere
    assert (reply.train_samples, reply.patients) == (70, 70)
    labels[-10:, 0] = 1  # classes do not add up, and only the small one is hidden
    assert answer(site(tmp_path, image_set(labels))).positives == (30, UNKNOWN_COUNT, 30, 40)


@pytest.mark.parametrize("classes", [(1, 0, 1, 0), (0, 0, 0, 0)], ids=["two classes", "none"])
def test_a_few_images_of_two_or_no_classes_give_no_hidden_count_away(classes: tuple[int, ...], tmp_path: Path) -> None:
    """The counts would add up but for so few: a hidden count alone would lie within them."""
    labels = one_class_an_image([29, 3, 30, 40])
    labels[20:29] = classes
    assert answer(site(tmp_path, image_set(labels))).positives[:2] == (UNKNOWN_COUNT, UNKNOWN_COUNT)


def test_few_patients_are_no_site_and_answer_nothing_without_a_roll_call_either(tmp_path: Path) -> None:
    labels = np.array([[1.0]] * 6 + [[0.0]] * 6)
    at = site(tmp_path, image_set(labels, [f"p{row % 9}" for row in range(12)]))
    of = plan()
    first = beginning(of, NAMES[:1])
    for ask in (
        lambda: answer(at),
        lambda: train_with_privacy_layers(at, request(of, first)),
        lambda: evaluate_with_privacy_layers(at, evaluation(of, first, 1, 0, -1)),
    ):
        with pytest.raises(BadInput, match="fewer than 10 patients"):
            ask()


def test_counts_are_rounded_down_and_the_site_weighs_by_what_it_answer(tmp_path: Path) -> None:
    at = site(tmp_path, image_set(one_class_an_image([23, 24, 31])), round_counts_to=5)
    reply = answer(at)
    assert (reply.train_samples, reply.validation_samples, reply.patients) == (75, 75, 75)
    assert (reply.positives, reply.negatives) == ((20, 20, 30), (55, 50, 45))
    of = plan("fedavg", {})
    assert train_with_privacy_layers(at, request(of, beginning(of, NAMES[:3]))).train_samples == 75


def test_of_few_patients_in_a_part_or_a_class_no_figure_is_told(tmp_path: Path) -> None:
    many, few = image_set(one_class_an_image([20, 20])), image_set(one_class_an_image([4, 5]))
    at = replace(site(tmp_path, many, few), validation=few)
    assert answer(at).validation_samples == UNKNOWN_COUNT
    of = plan("fedavg", {})
    reply = train_with_privacy_layers(at, request(of, beginning(of, NAMES[:2])))
    assert (reply.validation_loss, reply.validation_auroc) == (None, None)
    tested = evaluate_with_privacy_layers(at, evaluation(of, beginning(of, NAMES[:2]), 1, 1, -1))
    assert (tested.positives, tested.negatives) == ((UNKNOWN_COUNT,) * 2, (UNKNOWN_COUNT,) * 2)
    assert np.isnan([*tested.auroc, *tested.average_precision, *tested.balanced_accuracy]).all()
    labels = one_class_an_image([20, 3, 30])
    labels[:10, 2] = 1  # so that classes do not add up
    at = site(tmp_path, image_set(labels))
    tested = evaluate_with_privacy_layers(at, evaluation(of, beginning(of, NAMES[:3]), 1, 1, -1))
    assert tested.histogram_classes == ("a", "c")
    assert tested.positives == (20, UNKNOWN_COUNT, 40)
    assert [bool(np.isnan(value)) for value in tested.auroc] == [False, True, False]


@pytest.mark.parametrize(
    "keys", [{"round_counts_to": 20}, {"round_counts_to": 4}, {"round_counts_to": 5, "score_histograms": True}]
)
def test_a_policy_that_would_undo_itself_is_refused(keys: Mapping[str, object]) -> None:
    with pytest.raises(ValueError, match="round_counts_to"):
        SitePolicy.model_validate(keys)


TELLING = {
    "fedmlp": {"stage_one_rounds": 1},
    "fedirm": {"supervised_rounds": 1},
    "cbafed": {"stage_one_rounds": 1},
    "fednoro": {"stage_one_rounds": 1},
    "unifed": {"epoch_cap": 1},
    "scaffold": {},
    "fedlsm": {},
}


@pytest.mark.parametrize("method", TELLING)
def test_a_statistic_that_rests_on_few_patients_is_not_told(method: str, tmp_path: Path) -> None:
    labels = np.array([[1.0, 1.0]] * 4 + [[0.0, 1.0]] * 20 + [[0.0, 0.0]] * 16)
    of = plan(method, TELLING[method])
    keys = [{"smallest_count": count, "train_hidden_classes": True} for count in (0, 10)]
    sites = [site(tmp_path / str(number), image_set(labels), **policy) for number, policy in enumerate(keys)]
    every, released = (train_with_privacy_layers(at, request(of, beginning(of, ("a", "b")))).statistics for at in sites)
    assert set(every) == set(released)
    positives_of_a = {
        "prototypes": (0, 1),
        "relations": (0,),
        "indicators": (0, 1),
        "positive_share": (0,),
    }  # of 4 patients
    for name, array in every.items():
        hidden = np.zeros(array.shape, np.bool_)
        hidden[positives_of_a.get(name, ...)] = name in positives_of_a
        np.testing.assert_array_equal(released[name], np.where(hidden, np.nan, array))
        assert not np.isnan(array[hidden]).any()


def test_every_method_that_tells_something_is_tested_here_or_tells_nothing(tmp_path: Path) -> None:
    for name in sorted(set(STRATEGIES) - set(TELLING) - {"centralised", "server_only"}):
        of = plan(name, {})
        at = site(tmp_path / name, image_set(one_class_an_image([20, 20])), smallest_count=0)
        assert train_with_privacy_layers(at, request(of, beginning(of, ("a", "b")))).statistics == {}


def visible(counts: Sequence[int], smallest: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """What an attacker gets of a table in which every image, of a patient of its own, shows one class."""
    hidden = find_classes_hidden_by_policy(image_set(one_class_an_image(counts)), smallest)
    released = tuple(-1 if NAMES[row] in hidden else count for row, count in enumerate(counts))
    return (sum(counts), *released), tuple(NAMES[row] in hidden for row in range(len(counts)))


def interval(total: int, released: Sequence[int], cell: int) -> tuple[int, int]:
    """The least and the most that a hidden cell can hold, given all that adds up."""
    n = len(released)
    low = np.array([0 if count < 0 else count for count in released])
    high = np.array([total if count < 0 else count for count in released])
    adds_up = LinearConstraint(np.ones((1, n)), total, total)
    ends = []
    for sign in (1, -1):
        solution = milp(sign * np.eye(n)[cell], integrality=np.ones(n), bounds=Bounds(low, high), constraints=adds_up)
        assert solution.success
        ends.append(round(sign * solution.fun))
    return ends[0], ends[1]


tables = st.lists(st.integers(0, 25), min_size=2, max_size=4).filter(lambda counts: sum(counts) >= 10)


@settings(max_examples=30)
@given(tables)
def test_no_sum_narrows_a_hidden_cell_to_less_than_every_small_count(counts: list[int]) -> None:
    (total, *released), hidden = visible(counts, 10)
    for cell in np.flatnonzero(hidden).tolist():
        least, most = interval(total, released, cell)
        assert least <= 1
        assert most >= 9


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for bars in itertools.combinations(range(total + parts - 1), parts - 1):
        places = (-1, *bars, total + parts - 1)
        yield tuple(b - a - 1 for a, b in itertools.pairwise(places))


@pytest.mark.parametrize("total", [3, 5, 9])
def test_to_an_attacker_who_knows_the_rule_a_hidden_count_has_as_many_values_as_a_small_one(total: int) -> None:
    """Every table of three classes and this many images; the attacker tries all that would have looked the same."""
    smallest, looks_like = 3, dict[tuple[int, ...], list[tuple[int, ...]]]()
    for counts in compositions(total, 3):
        looks_like.setdefault(visible(counts, smallest)[0], []).append(counts)
    for view, alike in looks_like.items():
        for cell in range(3):
            values = {counts[cell] for counts in alike}
            if view[1 + cell] == -1:
                assert len(values) >= smallest - 1


def site_of(folder: Path, annotates: Sequence[str]) -> Site:
    folder.mkdir(exist_ok=True)
    labels = one_class_an_image([12, 14, 4, 15])
    arrays = {"images": np.full((len(labels), 16, 16), 90, np.uint8), "labels": labels}
    parts = {f"{part}_{kind}": value for part in ("train", "val", "test") for kind, value in arrays.items()}
    np.savez(folder / "images.npz", **parts)
    (folder / "site.toml").write_text(
        f'name = "north"\n[policy]\nlabel_counts = true\n[data]\nkind = "npz"\npath = "images.npz"\n'
        f"classes = {list(NAMES)}\nannotates = {list(annotates)}\n".replace("'", '"'),
        encoding="utf-8",
    )
    return load_site(read_site_settings(folder))


def test_runs_with_other_class_lists_tell_no_more_together_than_one(tmp_path: Path) -> None:
    """What is told of a class depends on the whole table, never on which classes a run has."""
    released = dict[str, set[int]]()
    for count in range(1, 5):
        for annotates in itertools.combinations(NAMES, count):
            reply = answer(site_of(tmp_path / "north", annotates))
            for name, positives in zip(reply.class_names, reply.positives, strict=True):
                released.setdefault(name, set()).add(positives)
    assert released == {"a": {UNKNOWN_COUNT}, "b": {14}, "c": {UNKNOWN_COUNT}, "d": {15}}
    assert interval(45, [-1, 14, -1, 15], 2) == (0, 16)


@pytest.mark.parametrize(
    ("policy", "signs"),
    [
        ({"smallest_count": 0, "label_counts": True}, "110"),
        ({"smallest_count": 3, "label_counts": True}, "1??"),
        ({"smallest_count": 0, "label_counts": False}, ""),
        ({"level": "trusted", "smallest_count": 3}, "1??"),
    ],
)
def test_a_site_says_of_its_classes_as_much_as_of_their_counts(
    policy: dict[str, object], signs: str, tmp_path: Path
) -> None:
    """Five patients show ``a``, two ``b``, none ``c``; twenty show nothing."""
    labels = np.zeros((27, 3), np.float32)
    labels[:5, 0] = labels[5:7, 1] = 1
    assert answer(site(tmp_path, image_set(labels), **policy), method="surgical").shown == signs


def test_in_a_run_with_noise_the_signs_of_classes_are_figures_that_no_noise_covers(tmp_path: Path) -> None:
    labels = np.zeros((27, 2), np.float32)
    labels[:5, 0] = 1
    call = RollCall("run", private_plan(plan("surgical", {}), level="sample", noise_multiplier=20.0).model_dump_json())
    trusted: dict[str, object] = {"smallest_count": 0, "label_counts": True}
    assert answer_roll_call(site(tmp_path / "a", image_set(labels), **trusted), call).shown == ""
    allowed = site(tmp_path / "b", image_set(labels), **trusted, metrics_outside_privacy=True)
    assert answer_roll_call(allowed, call).shown == "10"
