"""flwr-client preview: what would leave, before anything does."""

import hashlib
import json
import re
from pathlib import Path

import pytest

from polyclinic.common.wire.canonical_bytes import parse_canonical_record
from polyclinic.common.wire.codec import decode_record
from polyclinic.common.wire.records import EvaluateReply, RollCallAnswer, TrainReply
from tests.network.real import flwr_client
from tests.server.commands import Ended

FEDSLD = '[run]\nmethod = "fedsld"\n[model]\narchitecture = "tiny_cnn"\nchannels = 1\nimage_size = 16\n'


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    (tmp_path / "experiment.toml").write_text(FEDSLD, encoding="utf-8")
    return tmp_path / "experiment.toml"


def preview(folder: Path, *arguments: object, policy: str = "") -> Ended:
    text = f'name = "north"\n[policy]\n{policy}\n[data]\nkind = "phantom"\nimages = 60\nimage_size = 16\n'
    (folder / "site.toml").write_text(text, encoding="utf-8")
    return flwr_client("preview", folder, *arguments)


def test_it_shows_and_writes_the_very_records_and_leaves_nothing_behind(tmp_path: Path) -> None:
    ended = preview(tmp_path, "--out", tmp_path / "seen")
    assert ended.code == 0
    for name in ("RollCallAnswer", "TrainReply", "EvaluateReply", "epochs", "update/trunk"):
        assert name in ended.out
    records = sorted((tmp_path / "seen").glob("*.record"))
    assert [path.stem for path in records] == ["1-RollCallAnswer", "2-TrainReply", "3-EvaluateReply"]
    answer, trained, tested = (parse_canonical_record(path.read_bytes()) for path in records)
    counted = decode_record(answer, RollCallAnswer)
    assert counted.train_samples == decode_record(trained, TrainReply).train_samples > 0
    assert (counted.positives, decode_record(tested, EvaluateReply).histogram_classes) == ((), ())
    described = json.loads((tmp_path / "seen" / "2-TrainReply.json").read_text(encoding="utf-8"))
    assert described["sha256"] == hashlib.sha256(records[1].read_bytes().splitlines(keepends=True)[0]).hexdigest()
    for path in sorted((tmp_path / "seen").glob("*.json")):  # no field of a record is left out on the terminal
        fields = json.loads(path.read_text(encoding="utf-8"))["fields"]
        shown = ended.out[ended.out.index(f"{path.stem[2:]}: ") :].split("\n\n")[0]
        assert [name for name in fields if not re.search(rf"(^|\W){re.escape(name)}(\W|$)", shown)] == []
    assert not (tmp_path / "state").exists()


def test_what_the_policy_allows_is_seen_and_what_it_declines_has_its_reason(tmp_path: Path, experiment: Path) -> None:
    options = ("--experiment", experiment, "--out", tmp_path / "seen")
    assert preview(tmp_path, *options, policy="label_counts = true\nsmallest_count = 0").code == 0
    first = parse_canonical_record((tmp_path / "seen" / "1-RollCallAnswer.record").read_bytes())
    assert len(decode_record(first, RollCallAnswer).positives) > 0
    declined = preview(tmp_path, *options[:2], policy='methods = ["fedavg"]')
    assert declined.code == 0
    assert 'policy.methods: it does not have "fedsld".' in " ".join(declined.out.split())
    assert "TrainReply" not in declined.out


def test_a_method_that_cannot_do_without_what_the_policy_keeps_says_so(tmp_path: Path, experiment: Path) -> None:
    ended = preview(tmp_path, "--experiment", experiment)
    assert ended.code == 2
    assert "label_counts" in ended.out + ended.err
