"""Which sites still need the frozen part of the model: it is sent to each once, and to none that has it."""

from dataclasses import dataclass, field

from common.models.state import NOT_HERE, FrozenPart
from common.models.zoo.spec import ModelSpec
from common.wire.records import Groups


@dataclass
class FrozenSupply:
    """The frozen part, and who has it.

    Attributes:
        part: None where everything is trained.
        held: Sites that have answered a request that needed it.
        lost: Sites that said that they do not have it any more.
    """

    part: FrozenPart | None = None
    held: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, spec: ModelSpec, part: FrozenPart | None) -> "FrozenSupply":
        """A supply of what a plan's model names.

        Raises:
            ValueError: If the model has a frozen part, and this is not it.
        """
        if spec.train != "all" and (part is None or part.sha256 != spec.frozen_sha256):
            raise ValueError("the plan's model has a frozen part; pass it as frozen, and name its hash in the plan")
        return cls(part)

    def for_site(self, site: str, *, had: bool) -> Groups:
        """What goes with a request to this site.

        Args:
            had: Whether it said at the roll call that it has it; each process that leads a run calls the roll.
        """
        needed = site in self.lost or not (had or site in self.held)
        return Groups(trunk=self.part.values) if self.part is not None and needed else Groups()

    def note(self, site: str, fault: str = "") -> None:
        """Note what a site's reply shows.

        Args:
            fault: Why the reply does not count; empty where it does.
        """
        if not fault:
            self.held.add(site)
            self.lost.discard(site)
        elif NOT_HERE in fault:
            self.lost.add(site)
