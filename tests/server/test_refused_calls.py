"""Refused calls on the disk: the last ones of an attack are told, too, and no caller fills the disk."""

from pathlib import Path

import pytest

from server.deployment.superlink.fleet import refused_calls
from server.deployment.superlink.fleet.refused_calls import FILE, RefusedCall, RefusedCalls, RefusedCallsReader
from tests.server.guarded import eventually

FORGED = RefusedCall("east", "PullMessages", "the node is another site's", "north")


def test_what_was_only_counted_is_written_after_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused_calls, "PAUSE_S", 0.2)
    calls, found = RefusedCalls(tmp_path / FILE), []
    calls.note(FORGED)  # before the run
    reader = RefusedCallsReader(tmp_path / FILE)
    for _ in range(9):
        calls.note(FORGED)  # during it

    def told() -> int:
        found.extend(reader.new())
        return sum(one["times"] for one in found)

    assert eventually(lambda: told() == 9)
    assert {(one["caller"], one["other"]) for one in found} == {("east", "north")}
