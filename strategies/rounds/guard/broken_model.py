"""Whether a model is broken: by what the sites say of it that started from it, beside what they said of the last one.

A site's loss rises where it overfits or where sites differ; a broken model is many times worse at more than half of
them. What an honest site cannot do with it is a sign too: its training diverges, or it has no loss to tell.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

JUMP_SEEN, JUMP_UNSEEN = 3.0, 10.0
"""Times the loss before: where judges look at single updates afterwards, and where a site is held back to find out."""

CANNOT_GO_ON = ("diverged", "not a number", "validation_loss")
"""Words of the reasons of sites whose model is broken: their training, or the loss that they would tell."""


@dataclass(frozen=True)
class RolledBack:
    """A model was taken back.

    Attributes:
        broken: The round that made it.
        to: The round whose model is taken up again.
        because: What the sites said of it, in words.
        held: The site without which the round is done again; empty for none.
    """

    broken: int
    to: int
    because: str
    held: str = ""


def broken(losses: Mapping[str, float], absent: Mapping[str, str], before: Mapping[str, float], jump: float) -> str:
    """Why a model is broken, or an empty string.

    Args:
        losses: Site -> validation loss of the model.
        absent: Site -> why its reply does not count.
        before: Site -> validation loss of the last model that was not broken.
        jump: Times the loss before.
    """
    lost = [site for site, why in sorted(absent.items()) if any(words in why for words in CANNOT_GO_ON)]
    voters = sorted({*lost, *(site for site in before if site in losses or site in absent)})
    worse = [
        site
        for site in voters
        if site in losses and site in before and not losses[site] <= jump * max(before[site], 1e-6)
    ]
    if not voters or 2 * len(lost + worse) <= len(voters):
        return ""
    counts = f"{len(lost) + len(worse)} of {len(voters)} sites"
    ratios = [losses[site] / max(before[site], 1e-6) for site in worse if math.isfinite(losses[site])]
    much = f"a validation loss {min(ratios):.3g} times as high as before, or more" if ratios else "no finite loss"
    return f"{counts} cannot use the model of that round: {much}"


def sentence_of(rolled_back: RolledBack) -> str:
    """The sentence that a person reads about it."""
    again = f", without {rolled_back.held} to see whether the model is then sound" if rolled_back.held else ""
    done = f"the run goes back to the model of round {rolled_back.to} and does round {rolled_back.broken} again{again}"
    return f"round {rolled_back.broken}: {rolled_back.because}; {done}"


def condemned_sentence(server_round: int, site: str, reason: str) -> str:
    """The sentence about a site that harms the model."""
    return f"round {server_round}: {site} harms the model and is left out for the rest of the run: {reason}"
