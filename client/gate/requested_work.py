"""What a coordinator asks of a site, as the rules of its policy see it."""

from dataclasses import dataclass

from client.site.policy import GROUPS
from common.config import Plan
from strategies.local.site_method import SiteMethod


@dataclass(frozen=True)
class RequestedWork:
    """What a coordinator asks for.

    Attributes:
        round: 0 at the roll call.
        test: Whether the model is to be tested, too.
        rows: Of the model's head: the site's own classes at the roll call, later those of the request.
        images: At least as many as the site's training part has; it follows from the number that the site tells.
        device: The site's: ``cpu`` or ``cuda``.
        gpus: How many GPUs each batch is split across there.
    """

    plan: Plan
    method: SiteMethod
    round: int = 0
    test: bool = False
    rows: int = 1
    images: int = 0
    device: str = "cpu"
    gpus: int = 1

    @property
    def parts(self) -> tuple[str, ...]:
        """The groups of the network whose change the method is told."""
        method = self.method
        sends = {"trunk": method.traffic.trunk, "norm": method.sends_norm, "head": method.traffic.head}
        return tuple(name for name in GROUPS if sends[name])
