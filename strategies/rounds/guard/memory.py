"""What the guard keeps between rounds; part of the coordinator's state and of its checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from strategies.aggregation.outliers import Lengths

NOBODY: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class GuardMemory:
    """What the guard knows after a round.

    Attributes:
        lengths: Site -> part -> length of the last update of the site that counted.
        losses: Site -> validation loss of the last model that was not broken.
        liars: Site -> why it is left out for the rest of the run.
        repeated: A round that was rolled back and is done again; it is not rolled back for the same reason.
        held: Site without which that round is done, to see whether the model is then sound; empty for none.
        to_hold: Sites that come after it.
        tried_all: Whether the repeated round was done without each of them in vain.
        quiet_until: No odd update before this round is judged, after judges found nothing wrong.
        pause: Rounds of the next such pause.
    """

    lengths: Mapping[str, Lengths] = field(default_factory=lambda: MappingProxyType({}))
    losses: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    liars: Mapping[str, str] = field(default_factory=lambda: NOBODY)
    repeated: int = 0
    held: str = ""
    to_hold: tuple[str, ...] = ()
    tried_all: bool = False
    quiet_until: int = 0
    pause: int = 1

    def facts(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return {
            "lengths": {site: dict(lengths) for site, lengths in self.lengths.items()},
            "losses": dict(self.losses),
            "liars": dict(self.liars),
            "repeated": self.repeated,
            "held": self.held,
            "to_hold": list(self.to_hold),
            "tried_all": self.tried_all,
            "quiet_until": self.quiet_until,
            "pause": self.pause,
        }

    @property
    def excluded(self) -> frozenset[str]:
        """Sites that are not asked."""
        return frozenset(self.liars) | ({self.held} if self.held else frozenset())

    def after(self, lengths: Mapping[str, Lengths], losses: Mapping[str, float]) -> "GuardMemory":
        """Take note of a round's updates that counted, and of the losses of the model that it began with."""
        return replace(
            self,
            lengths=MappingProxyType({**self.lengths, **lengths}),
            losses=MappingProxyType({**self.losses, **losses}),
        )

    def without(self, liars: Mapping[str, str]) -> "GuardMemory":
        """Leave sites out for the rest of the run."""
        held, to_hold = ("", ()) if self.held in liars else (self.held, self.to_hold)
        return replace(self, liars=MappingProxyType({**self.liars, **liars}), held=held, to_hold=to_hold)

    def acquitted(self, server_round: int) -> "GuardMemory":
        """The judges found nothing wrong: they are asked again later, each time after twice as many rounds."""
        return replace(self, quiet_until=server_round + 1 + self.pause, pause=2 * self.pause)

    def next_try(self, server_round: int, sites: Sequence[str]) -> "GuardMemory":
        """Do a broken round again: once as it was, then without one site after the other.

        Args:
            server_round: The round.
            sites: Those that may be held back.
        """
        if self.repeated != server_round:
            return replace(self, repeated=server_round, held="", to_hold=tuple(sites), tried_all=False)
        if not self.to_hold:
            return replace(self, held="", tried_all=True)
        return replace(self, held=self.to_hold[0], to_hold=self.to_hold[1:])

    def over(self, earlier: "GuardMemory") -> "GuardMemory":
        """This, with the figures of the round that the run goes back to."""
        return replace(self, lengths=earlier.lengths, losses=earlier.losses)
