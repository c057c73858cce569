"""flwr-client preview: what would leave, before anything does."""

import hashlib
import json
import re
from pathlib import Path

import pytest

from client.cli import main
from common.wire.canonical_bytes import parse_canonical
from common.wire.codec import decode
from common.wire.records import EvaluateReply, RollCallAnswer, TrainReply

Capture = pytest.CaptureFixture[str]
TOML = 'name = "north"\n{}\n[data]\nkind = "phantom"\nimages = 60\nimage_size = 16\n'


def preview(capsys: Capture, folder: Path, *arguments: object, policy: str = "") -> tuple[int, str]:
    (folder / "site.toml").write_text(TOML.format(policy), encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        main(["preview", str(folder), *map(str, arguments)])
    output = capsys.readouterr()
    return int(stopped.value.code or 0), output.out + output.err


def test_it_shows_and_writes_the_very_records_and_leaves_nothing_behind(tmp_path: Path, capsys: Capture) -> None:
    code, out = preview(capsys, tmp_path, "--out", tmp_path / "seen")
    assert code == 0
    for output in ("RollCallAnswer", "TrainReply", "EvaluateReply", "epochs", "update/trunk"):
        assert output in out
    records = sorted((tmp_path / "seen").glob("*.record"))
    assert [path.name for path in records] == [
        "1-RollCallAnswer.record",
        "2-TrainReply.record",
        "3-EvaluateReply.record",
    ]
    answer, trained, tested = (parse_canonical(path.read_bytes()) for path in records)
    counted = decode(answer, RollCallAnswer)
    assert counted.train_samples == decode(trained, TrainReply).train_samples > 0
    assert (counted.positives, decode(tested, EvaluateReply).histogram_classes) == ((), ())
    described = json.loads((tmp_path / "seen" / "2-TrainReply.json").read_text(encoding="utf-8"))
    assert described["sha256"] == hashlib.sha256(records[1].read_bytes().splitlines(keepends=True)[0]).hexdigest()
    for path in sorted((tmp_path / "seen").glob("*.json")):  # no field of a record is left out on the terminal
        fields = json.loads(path.read_text(encoding="utf-8"))["fields"]
        shown = out[out.index(f"{path.stem[2:]}: ") :].split("\n\n")[0]
        assert [name for name in fields if not re.search(rf"(^|\W){re.escape(name)}(\W|$)", shown)] == []
    assert not (tmp_path / "state").exists()


def test_what_the_policy_allows_is_seen_and_what_it_declines_has_its_reason(tmp_path: Path, capsys: Capture) -> None:
    text = '[run]\nmethod = "fedsld"\n[model]\narchitecture = "tiny_cnn"\nchannels = 1\nimage_size = 16\n'
    (tmp_path / "experiment.toml").write_text(text, encoding="utf-8")
    options = ("--experiment", tmp_path / "experiment.toml", "--out", tmp_path / "seen")
    code, out = preview(capsys, tmp_path, *options, policy="[policy]\nlabel_counts = true\nsmallest_count = 0\n")
    assert code == 0
    first = parse_canonical((tmp_path / "seen" / "1-RollCallAnswer.record").read_bytes())
    assert len(decode(first, RollCallAnswer).positives) > 0
    code, out = preview(capsys, tmp_path, *options[:2], policy='[policy]\nmethods = ["fedavg"]\n')
    assert code == 0
    assert 'This site declines: policy.methods: it does not have "fedsld".' in " ".join(out.split())
    assert "TrainReply" not in out


def test_a_method_that_cannot_do_without_what_the_policy_keeps_says_so(tmp_path: Path, capsys: Capture) -> None:
    text = '[run]\nmethod = "fedsld"\n[model]\narchitecture = "tiny_cnn"\nchannels = 1\nimage_size = 16\n'
    (tmp_path / "experiment.toml").write_text(text, encoding="utf-8")
    code, out = preview(capsys, tmp_path, "--experiment", tmp_path / "experiment.toml")
    assert code == 2
    assert "label_counts" in out
