"""Callbacks that receive the events of a run."""

from collections.abc import Mapping
from dataclasses import dataclass

from strategies.engine.round_record import Arrival, FederationValidation, RoundRecord, Waiting
from strategies.engine.state import FederationState


@dataclass(frozen=True)
class RolledBack:
    """A model was taken back.

    Attributes:
        collapsed: The round that made it.
        to: The round whose model is taken up again.
        because: What the sites say of it, in words.
    """

    collapsed: int
    to: int
    because: str

    @property
    def sentence(self) -> str:
        """All of it for a person."""
        return (
            f"round {self.collapsed}: {self.because}; the run goes back to the model of round {self.to} and does round "
            f"{self.collapsed} again, to find the site that did it"
        )


def exclusion_sentence(server_round: int, site: str, reason: str) -> str:
    """Say for a person that a site is left out for the rest of the run."""
    return f"round {server_round}: {site} harms the model and is left out for the rest of the run: {reason}"


class Callbacks:
    """Passed to :meth:`strategies.methods.base.Method.prepare`; each does nothing if not overridden."""

    def on_wait(self, waiting: Waiting) -> None:
        """Receive the sites that are waited for, whenever these change."""

    def on_join(self, server_round: int, site: str) -> None:
        """Receive the name of a site that joined after the roll call."""

    def on_reply(self, arrival: Arrival) -> None:
        """Receive every reply of a site that was asked, as it comes."""

    def on_absent(self, phase: str, absent: Mapping[str, str]) -> None:
        """Receive who missed an exchange that is no round, and why."""

    def on_round(self, record: RoundRecord, state: FederationState) -> None:
        """Receive a round that counted."""

    def on_exclusion(self, server_round: int, site: str, reason: str) -> None:
        """Receive the site that is left out for the rest of the run."""

    def on_rollback(self, rolled_back: RolledBack) -> FederationState | None:
        """Return the state after the round to go back to; None where there is none, and nothing is taken back."""
        return None

    def on_reset(self, state: FederationState) -> FederationValidation:
        """Receive the state that the run goes on from after a rollback; return the validation of its model."""
        return FederationValidation()
