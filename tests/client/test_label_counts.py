"""How many images show a class: told where the method asks and the hospital allows it, and small numbers never."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from client.app import answer_roll_call
from client.site.policy import Policy
from client.site.settings import open_site, read_settings
from client.site.site import Site
from common.config import Plan
from common.contract import Declaration
from common.data.base.image_set import ImageSet
from common.errors import BadInput
from common.wire.records import UNKNOWN_COUNT, RollCall, RollCallAnswer


def site(folder: Path, policy: Policy, columns: Sequence[Sequence[float]]) -> Site:
    """A site with these label columns, by class."""
    labels = np.array(columns, np.float32).T.copy()
    count = len(labels)
    blank = np.zeros((count, 16, 16), np.uint8)
    images = ImageSet(blank, labels, ("Mass", "Edema"), np.arange(count).astype(str), np.full(count, ""))
    return Site(Declaration("north", ("Mass", "Edema")), images, images, images, folder, policy=policy)


def told(at: Site, method: str) -> RollCallAnswer:
    model = {"architecture": "tiny_cnn", "channels": 1, "image_size": 16}
    tables = {"method": {}, "model": model, "training": {}, "augmentation": {}}
    plan = Plan.model_validate({"run": {"method": method}, **tables})
    return answer_roll_call(at, RollCall("run-1", plan.model_dump_json()))


NAN = float("nan")
MASS = [1] * 12 + [0] * 15 + [NAN] * 3
EDEMA = [1] * 4 + [0] * 26


def test_known_labels_are_counted_and_an_unknown_one_is_in_neither_count(tmp_path: Path) -> None:
    said = told(site(tmp_path, Policy(label_counts=True, smallest_count=0), [MASS, EDEMA]), "fedsld")
    assert (said.positives, said.negatives) == ((12, 4), (15, 26))


def test_a_small_count_hides_the_class_whole_and_is_not_told_as_zero(tmp_path: Path) -> None:
    said = told(site(tmp_path, Policy(label_counts=True, smallest_count=5), [MASS, EDEMA]), "fedsld")
    assert (said.positives, said.negatives) == ((12, UNKNOWN_COUNT), (15, UNKNOWN_COUNT))


@pytest.mark.parametrize("level", ["masked", "private"])
def test_a_hospital_that_does_not_trust_the_coordinator_tells_no_counts(level: str, tmp_path: Path) -> None:
    said = told(site(tmp_path, Policy.model_validate({"level": level}), [MASS, EDEMA]), "fedsld")
    assert (said.positives, said.negatives) == ((), ())


@pytest.mark.parametrize("method", ["surgical", "fedmlp", "fedavg"])
def test_a_method_that_does_not_ask_is_not_told(method: str, tmp_path: Path) -> None:
    said = told(site(tmp_path, Policy(label_counts=True, smallest_count=0), [MASS, EDEMA]), method)
    assert (said.positives, said.negatives) == ((), ())


TOML = 'name = "north"\n{}\n[data]\nkind = "phantom"\nimages = 20\nimage_size = 16\n'


def test_the_policy_stands_in_site_toml(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(
        TOML.format("[policy]\nlabel_counts = true\nscore_histograms = true\nsmallest_count = 3"), encoding="utf-8"
    )
    policy = open_site(read_settings(tmp_path)).policy
    assert policy == Policy(label_counts=True, score_histograms=True, smallest_count=3)


def test_what_the_policy_cannot_say_is_refused(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(
        TOML.format("[policy]\nlabel_count = true\nsmallest_count = -1"), encoding="utf-8"
    )
    with pytest.raises(BadInput) as refused:
        read_settings(tmp_path)
    first, second = sorted(str(fault) for fault in refused.value.faults)
    assert first.startswith("site.toml: policy.label_count")
    assert second.startswith("site.toml: policy.smallest_count")
