"""A site that turns round its row of a class which it shares with one other, to have that other left out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import client.training.train_round
from common.wire.records import Groups
from tests.federations import federation

CLASSES = {
    "a": ["0", "8"],
    "b": ["1", "9"],
    "c": ["3", "4", "5", "6"],
    "d": ["3", "4", "5", "6", "7"],
    "liar": ["0", "1", "2", "3", "4", "5", "6"],
}
LISTS = ", ".join(f"{site} = {classes}".replace("'", '"') for site, classes in CLASSES.items())


@pytest.mark.parametrize("times", [-1.0, -1e-6])
def test_no_honest_site_is_left_out_for_a_row_that_one_other_turned_round(
    times: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = client.training.train_round.update_of

    def turned(work: Any, *more: Any) -> Groups:
        update = true(work, *more)
        if work.site.name != "liar":
            return update
        head = update.head
        assert head is not None
        weight, bias = head.weight.copy(), head.bias.copy()
        for row, name in enumerate(head.class_names):
            if name in ("0", "1"):
                weight[row] *= times
                bias[row] *= times
        return replace(update, head=replace(head, weight=weight, bias=bias))

    monkeypatch.setattr(client.training.train_round, "update_of", turned)
    partition = f'partition={{kind="class_lists", lists={{{LISTS}}}}}'
    summary = federation(tmp_path, partition, "run.rounds=3", "participation.guard=on")
    assert not set(summary["condemned"]) & {"a", "b", "c", "d"}
