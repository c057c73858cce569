"""What one attack on this hospital came to, in words and figures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

Picture = tuple[str, str]
"""An original and what was recovered of it, PNG as base64."""


@dataclass
class Said:
    """What a site answered an attacker.

    Attributes:
        records: Answers that it could use.
        refusals: Reasons for others, each once.
    """

    records: int = 0
    refusals: list[str] = field(default_factory=list)


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
        said: What the site answered.
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
    said: Said = field(default_factory=Said)
    pictures: Sequence[Picture] = field(default=(), repr=False)
    seconds: float = 0.0

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        if not self.of:
            return f"Nothing to find: here are no {self.things}."
        if self.declined:
            return (
                "Each request was declined, so nothing was tried: this says nothing of requests that are not declined."
            )
        guessed = f" (guessing finds {self.by_chance:.3g})" if self.by_chance else ""
        chance = ", which chance explains" if self.recovered and not self.succeeds else ""
        return f"{self.recovered} of {self.of} {self.things} were found{guessed}{chance}."

    @property
    def declined(self) -> bool:
        """Whether the site answered nothing but refusals: then 0 is no result."""
        return bool(self.said.refusals) and not self.said.records

    @property
    def succeeds(self) -> bool:
        """Whether the attack found more than guessing does: by two standard deviations of a count by chance."""
        return self.recovered > self.by_chance + 2 * math.sqrt(self.by_chance)
