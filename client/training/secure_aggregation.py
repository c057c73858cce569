"""Updates that a site holds back until it has masked them."""

from collections.abc import Callable
from dataclasses import replace

from client.gate.policy_rules import of_reply
from client.gate.requested_work import RequestedWork
from client.site.site import Site
from common.config import Plan
from common.errors import quoted
from common.wire.records import Groups, TrainReply, TrainRequest
from common.wire.secure_aggregation import (
    KeysAnswer,
    KeysRequest,
    MaskedAnswer,
    MaskedRequest,
    RevealAnswer,
    RevealRequest,
    SharesAnswer,
    SharesRequest,
)
from strategies.base.state import site_weight
from strategies.privacy.secure_aggregation.site import MaskingRefused, SiteRound, Terms, no_round
from strategies.privacy.secure_aggregation.supported import largest_change
from strategies.registry import method_of


class Masks:
    """The rounds that the sites of this process take part in: one a site, in memory only.

    Args:
        tell: Told, in words, what a site's people should know.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._rounds: dict[str, SiteRound] = {}
        self._tell = tell

    def held_back(self, site: Site, request: TrainRequest, reply: TrainReply) -> TrainReply:
        """The reply as it leaves: without its update where the plan has it masked first.

        Raises:
            MaskingRefused: If the site's policy does not allow the update, masked or not.
        """
        plan = Plan.model_validate_json(request.plan)
        if not plan.privacy.secure_aggregation:
            return reply
        method = method_of(plan)
        verdict = of_reply(site.policy, RequestedWork(plan, method, request.round), reply)
        if not verdict.allowed:  # the gate sees this reply without its update, and later only masked numbers
            raise MaskingRefused(f"does not send this: {verdict}")
        terms = Terms(
            weight=site_weight(reply, method.parameters.weighting),
            largest=largest_change(plan, method),
            alone=site.policy.rows_alone,
            identity=site.identity,
            peers=site.policy.peers,
        )
        self._rounds[site.name] = held = SiteRound(request.run, request.round, site.name, reply.update, terms)
        if held.cut:
            self._tell(f"round {request.round}: {held.cut} numbers of the update were cut to {terms.largest:g}")
        return replace(reply, update=Groups())

    def keys(self, site: Site, request: KeysRequest) -> KeysAnswer:
        return self._round(site).keys(request)

    def shares(self, site: Site, request: SharesRequest) -> SharesAnswer:
        """Make this site's shares; tell the hospital which of its head rows no other site's can hide."""
        held = self._round(site)
        answer = held.shares(request)
        if held.rows_alone:
            what = "can be seen by the coordinator" if site.policy.rows_alone else "stay masked and are not used"
            self._tell(f"round {request.round}: no other site annotates {quoted(held.rows_alone)}: its rows {what}")
        return answer

    def masked(self, site: Site, request: MaskedRequest) -> MaskedAnswer:
        return self._round(site).masked(request)

    def reveal(self, site: Site, request: RevealRequest) -> RevealAnswer:
        return self._round(site).reveal(request)

    def _round(self, site: Site) -> SiteRound:
        if site.name not in self._rounds:
            raise no_round(site.name)
        return self._rounds[site.name]
