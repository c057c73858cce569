"""A few images that cannot be read do not stop a run: they are left out, counted and listed."""

import json
from pathlib import Path

from tests.bad_input.catalogue import changed, simulation
from tests.bad_input.data_sets import DATA, TWO_SITES
from tests.bad_input.images import encoded, in_folder
from tests.federations import DIGITS


def test_a_few_corrupt_images_are_skipped_counted_and_listed(tmp_path: Path) -> None:
    table = in_folder(tmp_path, [encoded("PNG")[:-2000], b""])
    text = changed(DIGITS, (DATA, f"{table}skip_budget = 0.2\n"), TWO_SITES, ("rounds = 2", "rounds = 1"))
    (tmp_path / "good.toml").write_text(text, encoding="utf-8")
    ended = simulation("run", tmp_path / "good.toml", "--out", tmp_path / "run")
    lines = (tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    skipped = [event for event in map(json.loads, lines) if event["event"] == "image_skipped"]
    assert ended.code == 0, ended.err
    assert sorted((event["image"], event["reason"]) for event in skipped) == [
        ("00.png", "image file is truncated"),
        ("01.png", "empty"),
    ]
