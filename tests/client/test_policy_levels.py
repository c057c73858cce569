"""The three levels of a policy and docs/what-leaves.md: keys, and figures that leave. Attacks are in test_attack.py."""

import re
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from polyclinic.client.app import answer_roll_call
from polyclinic.client.gate.gate import REPLY_CLASSES
from polyclinic.client.preview.data_dictionary import FIELD_MEANINGS, SENT_RECORD_CLASSES, STATISTIC_MEANINGS
from polyclinic.client.site.policy import LEVEL_DEFAULTS, LEVEL_SENTENCES, Level, SitePolicy
from polyclinic.client.site.site_file import make_site_folder
from polyclinic.common.config import HospitalPlan
from polyclinic.common.system.docstrings import read_attribute_texts
from polyclinic.common.wire.codec import list_record_field_names
from polyclinic.common.wire.records import EvaluateReply, RollCall, TrainReply
from polyclinic.strategies.registry import list_statistic_meanings
from tests.client.rounds import OWN, changed_plan, judged, plan, private_plan, record_of, site, trained

SURGICAL = plan()
PLANS: dict[Level, HospitalPlan] = {
    "private": private_plan(SURGICAL, level="patient", noise_multiplier=20.0),
    "masked": changed_plan(SURGICAL, privacy={"secure_aggregation": True}),
}


@pytest.mark.parametrize("level", PLANS)
def test_no_figure_leaves_a_hospital_that_does_not_trust_the_coordinator(level: Level, tmp_path: Path) -> None:
    at, of = site(tmp_path, level=level, smallest_count=5), PLANS[level]
    assert trained(at, SURGICAL).has_error()
    reply = record_of(trained(at, of), TrainReply)
    figures = reply.train_loss, reply.validation_loss, reply.validation_auroc, reply.test_images, reply.seconds
    assert figures == (None, None, None, None, 0.0)
    tested = record_of(judged(at, of), EvaluateReply)
    classes = tested.class_names, tested.histogram_classes, tested.validation_classes
    assert (tested.validation_loss, *classes) == (None, (), (), ())


@pytest.mark.parametrize("level", PLANS)
def test_nor_does_it_say_which_classes_its_images_show(level: Level, tmp_path: Path) -> None:
    call = RollCall("run", PLANS[level].model_dump_json())
    assert answer_roll_call(site(tmp_path / level, level=level, smallest_count=5), call).shown == ""
    trusted = RollCall("run", SURGICAL.model_dump_json())
    assert answer_roll_call(site(tmp_path / "trusted", level="trusted", smallest_count=5), trusted).shown == "11"


def test_without_figures_of_training_or_of_the_test_a_run_without_privacy_goes_on(tmp_path: Path) -> None:
    at = site(tmp_path, smallest_count=0, training_figures=False)
    reply = record_of(trained(at, SURGICAL), TrainReply)
    assert (reply.train_loss, reply.validation_loss, reply.validation_auroc) == (None, None, None)
    tested = record_of(judged(at, SURGICAL), EvaluateReply)
    assert (tested.validation_loss, tested.validation_auroc, tested.class_names) == (None, None, OWN)
    untested = record_of(judged(site(tmp_path, smallest_count=0, test_metrics=False), SURGICAL), EvaluateReply)
    assert (untested.class_names, untested.histogram_classes, untested.positives) == ((), (), ())
    assert untested.validation_loss is not None


@pytest.mark.parametrize("level", LEVEL_DEFAULTS)
def test_a_level_sets_what_the_file_leaves_out_and_no_more(level: Level) -> None:
    bare = {key: field.get_default(call_default_factory=True) for key, field in SitePolicy.model_fields.items()}
    assert SitePolicy.model_validate({"level": level}).model_dump() == {**bare, **LEVEL_DEFAULTS[level], "level": level}
    own = {"level": level, "label_counts": True, "training_figures": True, "epsilon": 3.0}
    assert SitePolicy.model_validate(own).model_dump(include=set(own)) == own


def test_a_level_contradicts_no_key_of_the_file() -> None:
    assert SitePolicy.model_validate({"level": "private", "smallest_count": 3}).round_counts_to == 1
    assert not SitePolicy.model_validate({"round_counts_to": 5}).score_histograms


@pytest.mark.parametrize("level", ["strict", ["private"], 3])
def test_no_other_level_is_taken(level: object) -> None:
    with pytest.raises(ValidationError, match="'trusted', 'masked' or 'private'"):
        SitePolicy.model_validate({"level": level})


def test_init_writes_every_key_with_its_default_and_whom_the_hospital_trusts(tmp_path: Path) -> None:
    make_site_folder(tmp_path, "north")
    text = (tmp_path / "site.toml").read_text(encoding="utf-8")
    table = text.split("[policy]\n")[1].split("[data.synonyms]")[0]
    assert text.splitlines()[0] == f"# {LEVEL_SENTENCES['trusted']}"
    assert all(sentence in text for sentence in LEVEL_SENTENCES.values())
    assert SitePolicy.model_validate(tomllib.loads(text)["policy"]) == SitePolicy()
    # Of the other keys that stand there as comments, the value is an example of a hospital's own.
    keys = ("label_counts", "score_histograms", "training_figures", "test_metrics", "train_hidden_classes")
    keys += ("test_each_round", "smallest_count", "round_counts_to", "masked_only", "smallest_cohort", "rows_alone")
    comments = [line for line in table.splitlines() if line.startswith(tuple(f"# {key}" for key in keys))]
    values = tomllib.loads("\n".join(line.removeprefix("# ") for line in comments))
    assert values == SitePolicy().model_dump(include=set(keys))


@pytest.mark.parametrize("page", ["docs/privacy.md", "docs/hospital-it.md"])
def test_pages_say_whom_each_level_trusts_in_the_same_words(page: str) -> None:
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    assert [sentence for sentence in LEVEL_SENTENCES.values() if sentence not in text] == []


def test_every_field_that_can_leave_is_explained_and_no_other() -> None:
    assert set(SENT_RECORD_CLASSES) == set(REPLY_CLASSES.values())
    assert {name: set(fields) for name, fields in FIELD_MEANINGS.items()} == {
        record.__name__: set(list_record_field_names(record)) for record in SENT_RECORD_CLASSES
    }
    assert set(STATISTIC_MEANINGS) == set(list_statistic_meanings())


def test_a_new_site_toml_has_every_key_of_the_policy(tmp_path: Path) -> None:
    make_site_folder(tmp_path, "north")
    table = (tmp_path / "site.toml").read_text(encoding="utf-8").partition("\n[policy]\n")[2]
    table = table.partition("\n# Where this")[0]
    keys = re.findall(r"^(?:# )?(\w+) = ", table, re.MULTILINE)
    assert sorted(keys) == sorted(SitePolicy.model_fields)


def test_the_comments_of_a_new_site_toml_are_a_policy_and_say_what_the_docs_say(tmp_path: Path) -> None:
    make_site_folder(tmp_path, "north")
    table = (tmp_path / "site.toml").read_text(encoding="utf-8").partition("\n[policy]\n")[2]
    table = table.partition("\n# Where this")[0]
    values = re.findall(r"^(?:# )?(\w+ = .*)$", table, re.MULTILINE)
    policy = SitePolicy.model_validate(tomllib.loads("\n".join(values)))
    assert policy.level == "trusted"
    words = " ".join(table.replace("#     ", "").split())
    texts = read_attribute_texts(SitePolicy)
    assert len(texts) == len(SitePolicy.model_fields)
    plain = [text for key, text in texts.items() if key != "level" and not re.search(r"[`\[]|True|False", text)]
    assert len(plain) > 20
    assert [text for text in plain if text not in words] == []
