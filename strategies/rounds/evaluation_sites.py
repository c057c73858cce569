"""Which sites say how good a model is: all of them, or of many a sample (:mod:`.participation.cohorts`)."""

from common.config import Plan
from strategies.base.method import Method
from strategies.base.state import FederationState
from strategies.rounds.participation.client_manager import Membership


class EvaluationSites(Method):
    """The base of :class:`~strategies.rounds.ask_sites.Exchanges`: whom it asks to judge and to test."""

    plan: Plan
    sites: Membership
    state: FederationState

    @property
    def samples_sites(self) -> bool:
        """Whether a sample of the sites tests the model, and not all of them.

        Where a site keeps parts of its own, all do: its own test chooses and writes its model.
        """
        return self.has_global_model and self.sites.samples

    def judges(self) -> list[str]:
        """The sites that say how good the model after the last round is.

        Where a sample would do, they are those that judged the best model up to now: only they can compare the two, so
        that the run ends with the model that it would end with if all were asked. Where there is no such choice, they
        are the sites that the next round would draw.
        """
        excluded = self.state.excluded
        if not self.samples_sites:
            return sorted(set(self.sites.members) - set(excluded))
        choose = self.plan.evaluation.result == "best"
        before = set(self.state.best_losses) & set(self.sites.members) if choose else set[str]()
        return sorted(before - set(excluded)) or self.sites.drawn(self.state.round + 1, excluded)

    def testers(self) -> list[str]:
        """The sites that test the model that the run ends with: all, or a sample that covers the classes if it can."""
        excluded = self.state.excluded
        if not self.samples_sites:
            return sorted(set(self.sites.members) - set(excluded))
        return self.sites.drawn_to_evaluate(self.state.round, excluded)

    @property
    def drawn_to_test(self) -> tuple[str, ...] | None:
        """The sites that test the model that the run ends with, where these are a sample; None where all do."""
        return tuple(self.testers()) if self.samples_sites else None
