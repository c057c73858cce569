"""What one attack on this hospital came to, in words and figures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

Picture = tuple[str, str]
"""An original and what was recovered of it, PNG as base64."""


@dataclass(frozen=True)
class Attempt:
    """One attack.

    Attributes:
        name: For the JSON form and the contract suite.
        title: For people.
        tried: What the attacker did, in one or two sentences.
        recovered, of: How many things it found, of how many it looked for; ``of`` is 0 where there was nothing to find.
        things: What these are, in the plural.
        by_chance: How many of them guessing finds, on average.
        stops: What stops it, in words; keys of the policy in backquotes.
        notes: Further figures.
        refusals: What the site answered instead of records.
        pictures: Of recovered images, the best first.
    """

    name: str
    title: str
    tried: str
    recovered: int
    of: int
    things: str
    stops: str
    by_chance: float = 0.0
    notes: Sequence[str] = ()
    refusals: Sequence[str] = ()
    pictures: Sequence[Picture] = field(default=(), repr=False)
    seconds: float = 0.0

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        if not self.of:
            return f"Nothing to find: here are no {self.things}."
        guessed = f" (guessing finds {self.by_chance:.3g})" if self.by_chance else ""
        chance = ", which chance explains" if self.recovered and not self.succeeds else ""
        return f"{self.recovered} of {self.of} {self.things} were found{guessed}{chance}."

    @property
    def succeeds(self) -> bool:
        """Whether the attack found more than guessing does: by two standard deviations of a count by chance."""
        return self.recovered > self.by_chance + 2 * math.sqrt(self.by_chance)
