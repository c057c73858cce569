"""What a run supports about each of its sites: whether it is better off alone, a sentence a site."""

from collections.abc import Iterator
from dataclasses import dataclass

from common.metrics.benefit import Benefit, Choice, benefit_sentence
from common.system.formatting import counted, shortened
from server.runs.reader import Run

NAMED = 8
"""Names in one sentence; more are counted."""
UNTOLD = "its policy tells no such figures, or no class has both a positive and a negative test image there"


@dataclass(frozen=True)
class SiteChoice:
    """One site's comparison with training alone.

    Attributes:
        benefit: None where nothing was compared, or told.
    """

    site: str
    sentence: str
    benefit: Benefit | None

    @property
    def choice(self) -> Choice:
        """Where the site is better off; ``open`` also where nobody knows."""
        return "open" if self.benefit is None else self.benefit.choice


def site_choices(run: Run) -> list[SiteChoice]:
    """A sentence for every site, in the order of their names; none where the run did not ask."""
    return [_choice(run, site) for site in sorted(run.summary.benefit)]


def _choice(run: Run, site: str) -> SiteChoice:
    found = run.summary.benefit[site]
    if (benefit := found.benefit) is not None:
        return SiteChoice(site, benefit_sentence(site, benefit, run.summary.sites[site].classes), benefit)
    verb, reason = ("was not compared with training alone", found.reason) if found.reason else ("says nothing", UNTOLD)
    return SiteChoice(site, f"Whether {site} is better off alone is not known: it {verb} ({reason}).", None)


def better_alone(run: Run) -> Iterator[str]:
    """The sites that lose by the federation, in one sentence beside the run's result."""
    choices = site_choices(run)
    alone = [one.site for one in choices if one.choice == "alone"]
    compared = sum(one.benefit is not None for one in choices)
    if alone:
        verb = "is" if len(alone) == 1 else "are"
        of_all = f"{len(alone)} of {counted(compared, 'site')} that compared"
        yield f"{of_all} {verb} better off alone than with this model: {shortened(alone, NAMED)}."


def by_chance(run: Run) -> Iterator[str]:
    """How often such a verdict is wrong."""
    compared = sum(one.benefit is not None for one in site_choices(run))
    if compared:
        yield (
            f"Whether a site is better off alone rests on a 95 % interval for each of {counted(compared, 'site')} by "
            "itself: where both models are equally good, one site in 40 is called better off alone by chance. The "
            "intervals are over test images and say nothing of another training."
        )
