"""Callbacks that keep what they receive."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from strategies.engine.events import Callbacks, RoundRecord
from strategies.engine.state import FederationState


@dataclass
class Noted(Callbacks):
    """The rounds that counted, and who was absent from an exchange that is no round."""

    records: list[RoundRecord] = field(default_factory=list)
    absences: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)

    def on_round(self, record: RoundRecord, state: FederationState) -> None:
        self.records.append(record)

    def on_absent(self, phase: str, absent: Mapping[str, str]) -> None:
        self.absences.append((phase, dict(absent)))
